"""The ledger: who may have a device and who has it. It is durable, and a node's agent has no other authority.

Both sides ask here before they answer the kubelet, and what is granted is on disk before the answer leaves. The
modules, in the order in which they depend on each other:

- `records`: the frozen records and the frozen `Snapshot` of all of them;
- `rules`: the rules as pure functions of a snapshot, and the evidence that they are given;
- `operations`: pure functions such as `grant`, `prepare`, `commit_to_dra` and `reconcile_evidence`. Each returns an
  operation: called with a snapshot, it returns the answer and the changes;
- `store`: `Ledger`, the only place with effects, which applies changes to one SQLite file;
- `worker`: `AsyncLedger`, which serves a `Ledger` to asyncio from one thread and commits together whatever is asked
  at the same time.
"""

from __future__ import annotations

from dra_bridge.ledger.operations import (
    adopt,
    begin_move,
    commit_to_dra,
    commit_to_plugin,
    describe,
    forget,
    grant,
    observe,
    prepare,
    reconcile_evidence,
    reopen,
    reserve,
    set_setting,
    unprepare,
)
from dra_bridge.ledger.records import (
    AllocationRecord,
    Claim,
    ClaimDevice,
    DeviceRecord,
    LedgerError,
    Operation,
    Side,
    Snapshot,
    State,
)
from dra_bridge.ledger.rules import (
    ClaimEvidence,
    ClusterEvidence,
    Evidence,
    KubeletEvidence,
    KubeletSnapshot,
    ObservedAllocation,
    Refused,
)
from dra_bridge.ledger.store import Ledger
from dra_bridge.ledger.worker import AsyncLedger

__all__ = [
    "AllocationRecord",
    "AsyncLedger",
    "Claim",
    "ClaimDevice",
    "ClaimEvidence",
    "ClusterEvidence",
    "DeviceRecord",
    "Evidence",
    "KubeletEvidence",
    "KubeletSnapshot",
    "Ledger",
    "LedgerError",
    "ObservedAllocation",
    "Operation",
    "Refused",
    "Side",
    "Snapshot",
    "State",
    "adopt",
    "begin_move",
    "commit_to_dra",
    "commit_to_plugin",
    "describe",
    "forget",
    "grant",
    "observe",
    "prepare",
    "reconcile_evidence",
    "reopen",
    "reserve",
    "set_setting",
    "unprepare",
]
