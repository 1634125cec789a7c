"""Runs the agent of a node: `bridge` serves device plugin and DRA, and `driver_runtime` runs each DRA driver."""
