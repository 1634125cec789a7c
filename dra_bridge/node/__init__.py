"""The agent of one node with both sides.

`bridge` makes and supervises all of it, with a `driver_runtime` for each DRA driver. The parts of a driver:
`device_reconciliation` with `evidence`, `claim_reconciliation`, `slice_feed` and `share`. `gates` decides what pods
get, `status` and `metrics` report, `process` and `options` are the process around it.
"""
