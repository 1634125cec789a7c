"""The register: the holders of this node's devices, and the side of each device.

One agent has one register. Allocate, Prepare and the moves ask only the register. `records` has the values. `rules` and
`operations` decide as pure functions: `grant`, `prepare`, `commit_to_dra` and the others return an operation, which
computes an answer and changes from a snapshot. A store executes operations: in memory for the plugin alone, in a SQLite
file (`dra_bridge.ledger`) for both sides.
"""
