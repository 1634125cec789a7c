"""Metrics and status of the agent: views of its state, Prometheus collectors, device load, web server and web page."""
