"""The ledger: which side each device is on, and which pods and claims hold it. A node's agent has no other authority.

Both sides ask here before they answer the kubelet, and what is granted is on disk before the answer leaves. `records`
has the values. `rules` and `operations` decide as pure functions: `grant`, `prepare`, `commit_to_dra` and the others
return an operation, which gives an answer and changes for a snapshot. `Ledger` (`store`) has the effects: it applies
the changes to one SQLite file. `AsyncLedger` (`worker`) serves it to asyncio from one thread.
"""
