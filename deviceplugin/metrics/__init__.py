"""Metrics and status of the agent: views, Prometheus collectors, the load of devices, the web server and its page."""
