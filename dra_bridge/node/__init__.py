"""The agent of one node with both sides: the bridge, the process around it, its metrics and options."""
