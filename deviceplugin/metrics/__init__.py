"""What the agent measures and shows: views, Prometheus collectors, the load of devices, the web server and its page."""
