"""The agent of one node with both sides. `bridge` builds it, with a `driver_runtime` for each DRA driver."""
