"""The agent of a node with a device plugin and DRA. `bridge` builds it, with a `driver_runtime` for each DRA driver."""
