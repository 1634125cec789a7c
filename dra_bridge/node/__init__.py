"""The agent of a node with a device plugin and DRA drivers: `bridge`, and a `driver_runtime` for each driver."""
