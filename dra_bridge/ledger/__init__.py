"""The ledger: the durable store of the agent's register (`deviceplugin.register`).

The device plugin side and the DRA side ask the register before they answer the kubelet, and each grant is written
before the answer is sent. `Ledger` (`store`) applies the changes of operations to one SQLite file. `AsyncLedger`
(`worker`) offers the ledger to asyncio, and has a thread for writes that need a sync.
"""
