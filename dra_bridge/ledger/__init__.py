"""The ledger: the durable store of the agent's register (`deviceplugin.register`).

Both sides ask the register before they answer the kubelet, and what is granted is written before the answer leaves.
`Ledger` (`store`) applies the changes of operations to one SQLite file. `AsyncLedger` (`worker`) serves it to asyncio,
and has a thread for what is synced.
"""
