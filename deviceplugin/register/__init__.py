"""The register: the holders of this node's devices, and the side (plugin or DRA) of each device.

One agent has one register. Allocate, Prepare, and the moves of devices between the plugin and DRA ask only the
register. `records` defines the records. `rules` and `operations` decide as pure functions: `grant`, `prepare`,
`commit_to_dra` and the others return an operation, which computes a result and the changed records from a snapshot of
the register. A store executes operations. `deviceplugin run` has a store in memory; `dra-bridge run` stores the records
in a SQLite file (`dra_bridge.ledger`).
"""
