"""The ledger: who may have a device and who has it; a node's agent has no other authority, and it is durable.

Both sides ask here before they answer the kubelet, and what is granted is on disk before the answer leaves. The
modules, in the order in which they depend on each other:

- `records`: the frozen records and the frozen `Snapshot` of all of them;
- `rules`: the rules as predicates over a snapshot, and the evidence that they are given;
- `operations`, `reconciliation`: pure functions (`grant`, `prepare`, `commit_to_dra`, `reconcile_evidence` and so
  on), each of which returns an operation, which, given a snapshot, says the answer and the changes;
- `store`: `Ledger`, the only place with effects, which applies changes to one SQLite file;
- `worker`: `AsyncLedger`, which serves a `Ledger` to asyncio from one thread and commits together whatever is asked
  at the same time.
"""

from __future__ import annotations

from dra_bridge.ledger.operations import (
    WELL_APART,
    Committed,
    Granted,
    Observed,
    adopt,
    begin_move,
    cancel_move,
    commit_to_dra,
    commit_to_plugin,
    describe,
    forget,
    grant,
    identify,
    observe,
    prepare,
    reopen,
    reserve,
    set_setting,
    unprepare,
)
from dra_bridge.ledger.reconciliation import Reconciled, reconcile_evidence
from dra_bridge.ledger.records import (
    Change,
    Claim,
    ClaimDevice,
    Decision,
    DeviceRecord,
    Hold,
    Holder,
    Key,
    LedgerBusyError,
    LedgerError,
    LedgerLostError,
    Operation,
    Setting,
    Side,
    Snapshot,
    State,
)
from dra_bridge.ledger.rules import (
    ClaimEvidence,
    ClusterEvidence,
    Evidence,
    Held,
    KubeletEvidence,
    KubeletSnapshot,
    Refused,
)
from dra_bridge.ledger.store import SCHEMA, Ledger
from dra_bridge.ledger.worker import AsyncLedger

__all__ = [
    "SCHEMA",
    "WELL_APART",
    "AsyncLedger",
    "Change",
    "Claim",
    "ClaimDevice",
    "ClaimEvidence",
    "ClusterEvidence",
    "Committed",
    "Decision",
    "DeviceRecord",
    "Evidence",
    "Granted",
    "Held",
    "Hold",
    "Holder",
    "Key",
    "KubeletEvidence",
    "KubeletSnapshot",
    "Ledger",
    "LedgerBusyError",
    "LedgerError",
    "LedgerLostError",
    "Observed",
    "Operation",
    "Reconciled",
    "Refused",
    "Setting",
    "Side",
    "Snapshot",
    "State",
    "adopt",
    "begin_move",
    "cancel_move",
    "commit_to_dra",
    "commit_to_plugin",
    "describe",
    "forget",
    "grant",
    "identify",
    "observe",
    "prepare",
    "reconcile_evidence",
    "reopen",
    "reserve",
    "set_setting",
    "unprepare",
]
