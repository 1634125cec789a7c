"""Metrics and status of the agent: views of its state, metrics for Prometheus, devices' load, web server, web page."""
