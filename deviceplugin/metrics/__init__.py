"""Serves the agent's metrics and status: views of its state, metrics for Prometheus, load of devices, server, page."""
