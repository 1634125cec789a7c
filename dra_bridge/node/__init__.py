"""The agent of one node with both sides. `bridge` makes it, with a `driver_runtime` for each DRA driver."""
