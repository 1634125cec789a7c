"""The agent of one node: a service for each resource, the process around them, options and logs."""
