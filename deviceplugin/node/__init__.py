"""Runs the agent of one node: a service for each resource, the process with its signals, options and logs."""
