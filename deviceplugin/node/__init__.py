"""The agent of one node: a service for each resource, the process that runs it, options and logs."""
