"""Runs the agent of one node: a service for each resource, and the process with signals, options and logs."""
