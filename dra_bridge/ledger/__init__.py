"""The ledger: who may have a device and who has it. It is durable, and a node's agent has no other authority.

Both sides ask here before they answer the kubelet, and what is granted is on disk before the answer leaves. `records`
has the values. `rules` and `operations` decide as pure functions: `grant`, `prepare`, `commit_to_dra` and the others
return an operation, which gives an answer and changes for a snapshot. `Ledger` (`store`) has the effects: it applies
the changes to one SQLite file. `AsyncLedger` (`worker`) serves it to asyncio from one thread.
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
