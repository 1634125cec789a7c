"""The register: who holds which device of this node, and on which side each device is.

One agent has one register; Allocate, Prepare and the moves ask it, and nothing else. `records` has the values.
`rules` and `operations` decide as pure functions: `grant`, `prepare`, `commit_to_dra` and the others return an
operation, which gives an answer and changes for a snapshot. A store carries them out: in memory for the plugin alone,
in a SQLite file (`dra_bridge.ledger`) for both sides.
"""
