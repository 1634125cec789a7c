"""The ledger: the SQLite file with the records of the agent's register (`deviceplugin.register`).

The device plugin and the DRA drivers ask the register before they answer the kubelet, and the ledger records each grant
before the kubelet gets the response. `Ledger` (`store`) writes the changes to the file. `AsyncLedger` (`worker`) is the
ledger's interface for asyncio, with a thread for writes that need a sync.
"""
