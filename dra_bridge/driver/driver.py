"""One DRA driver of this node: answers the kubelet's calls, and returns which devices its claims hold."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeVar

from deviceplugin import cdi
from deviceplugin.kubelet.claim_state import PreparedClaim
from deviceplugin.looks import Looks
from deviceplugin.register.register import Register
from deviceplugin.register.rules import ClaimEvidence
from deviceplugin.tasks import Tasks
from dra_bridge.driver import evidence
from dra_bridge.driver.claim_api import ClaimEvents, ClusterClaims
from dra_bridge.driver.claim_devices import ClaimDevices
from dra_bridge.driver.claim_files import ClaimFiles
from dra_bridge.driver.claims import ClaimError, ClaimRef, Reason
from dra_bridge.driver.host import DriverHost
from dra_bridge.driver.preparation import ClaimPreparation
from dra_bridge.driver.reconciliation import ClaimReconciler
from dra_bridge.driver.records import ClaimRecords, Prepared
from dra_bridge.driver.renewal import ClaimRenewal
from dra_bridge.driver.served import ServedDevices, ServedResource
from dra_bridge.driver.statistics import ClaimStatistics
from dra_bridge.driver.waiting import MARGIN, WaitLimit

_T = TypeVar("_T")

DEADLINE: Final = 30.0
"""Seconds in which one claim must be prepared or unprepared. The kubelet waits 45 s for a call with several claims
(kubelet 1.36, cm/dra/plugin)."""

CALL_DEADLINE: Final = 43.0
"""Seconds until a call is answered: less than the kubelet's 45, and more than `DEADLINE`, so that a claim that failed
at its deadline can still be undone; its hooks may hang again.
"""

RESERVE: Final = 2.0
"""Seconds before the deadline of the kubelet's call at which unfinished claims get an error as their answer."""


@dataclass(frozen=True, slots=True)
class DriverNode:
    """The objects that the DRA drivers of a node share.

    pool: the pool's name, which is the node's name. agent: the name of the agent, for the claims' files. report:
    whether to write `status.devices` of claims, which costs a GET and a PATCH for each claim. boot: identifies the
    node's boot; "" for the kernel's own identifier. cdi_looks: runs all reads and writes of `cdi_directory`.
    """

    pool: str
    register: Register
    api: ClusterClaims
    cdi_directory: str = cdi.DIRECTORY
    agent: str = ""
    report: bool = False
    boot: str = ""
    cdi_looks: Looks = field(default_factory=lambda: Looks("the CDI directory", threads=1))


class Driver:
    """One DRA driver of this node. It belongs to one event loop.

    host: the agent that the driver belongs to. deadline: seconds for one claim. call_deadline: seconds for a call. A
    claim that is unfinished at the call's deadline gets an error in the answer, but its preparation continues.
    """

    def __init__(
        self,
        name: str,
        node: DriverNode,
        served: Sequence[ServedResource] = (),
        host: DriverHost | None = None,
        *,
        deadline: float = DEADLINE,
        call_deadline: float = CALL_DEADLINE,
    ) -> None:
        host, api, register = host or DriverHost(), node.api, node.register
        self.name: Final = name
        self.pool: Final = node.pool
        self.statistics = statistics = ClaimStatistics()
        self.records = records = ClaimRecords(name, node.pool, register.store)
        self.devices = served_devices = ServedDevices(name, tuple(served), host)
        self.files = files = ClaimFiles(
            records, node.cdi_directory, node.cdi_looks, node.boot or register.boot, node.agent
        )
        self.waits: Final = register.waits
        self._call_deadline, self._register = call_deadline, register
        self._limits: set[WaitLimit] = set()
        """The time limits of the running calls to prepare claims."""
        self.tasks = tasks = Tasks()
        events = ClaimEvents(records, api, tasks, node.report)
        devices = ClaimDevices(records, served_devices, register, events, statistics, host)
        self._preparation = ClaimPreparation(api, devices, files, tasks, deadline)
        self.renewal: Final = ClaimRenewal(records, served_devices, files, register)
        self.reconciler = ClaimReconciler(records, api, files, self._preparation)

    async def prepare(
        self, claims: Iterable[ClaimRef], remaining: float | None = None
    ) -> dict[str, Prepared | ClaimError]:
        """Prepare claims independently of each other; return an answer for each UID.

        remaining: seconds until the caller's deadline. Until shortly before this deadline,
        claims wait for devices whose holders are about to end. Without a deadline, claims do not wait. If the caller
        cancels the call, waiting claims are refused.
        """
        limit = WaitLimit(0.0 if remaining is None else time.monotonic() + remaining - MARGIN)
        self._limits.add(limit)
        tasks: dict[ClaimRef, asyncio.Task[Prepared | ClaimError]] = {}
        for claim in claims:
            tasks[claim] = self.tasks.start(self._preparation.prepare(claim, limit))
        try:
            return await self._answers(tasks, remaining)
        finally:
            self._limits.discard(limit)
            if not all(map(asyncio.Task.done, tasks.values())):
                limit.until = 0.0
                self._register.store.changes.note()

    def end_waits(self) -> None:
        """Refuse the claims that wait for devices, because the agent stops or serves at another socket."""
        for limit in self._limits:
            limit.until = 0.0
        self._register.store.changes.note()

    async def unprepare(self, claims: Iterable[ClaimRef]) -> dict[str, ClaimError | None]:
        """Unprepare claims, recorded or not, independently of each other. For each UID, None means success."""
        tasks: dict[ClaimRef, asyncio.Task[ClaimError | None]] = {}
        for claim in claims:
            tasks[claim] = self.tasks.start(self._preparation.unprepare(claim))
        return await self._answers(tasks)

    async def _answers(
        self, tasks: Mapping[ClaimRef, asyncio.Task[_T]], remaining: float | None = None
    ) -> dict[str, _T | ClaimError]:
        # If the call is cancelled, work that has begun continues. The caller's next call returns its result.
        latest = self._call_deadline
        deadline = latest if remaining is None else min(latest, max(0.0, remaining - RESERVE))
        if tasks:
            await asyncio.wait(tasks.values(), timeout=deadline)
        answers: dict[str, _T | ClaimError] = {}
        for claim, task in tasks.items():
            if not task.done():
                late = f"claim {claim.title}: not done within {deadline:.3g} s; it goes on"
                answers[claim.uid] = ClaimError(Reason.TIMEOUT, late)
            elif task.cancelled():  # The task was cancelled before it began.
                answers[claim.uid] = ClaimError(Reason.STOPPED, "the driver is stopping")
            elif (error := task.exception()) is not None:
                answers[claim.uid] = ClaimError(Reason.INTERNAL, f"internal error: {error!r}")
            else:
                answers[claim.uid] = task.result()
        return answers

    def claim_evidence(self, prepared: Iterable[PreparedClaim], resource: str) -> list[ClaimEvidence]:
        """Return the evidence of this driver's claims from the claims' files and the kubelet's claim state. Blocks.

        A claim's own file states the claim's devices of every resource. For a claim without such a file, the claim's
        CDI file and the claim state name its devices of this resource. prepared: the claims in the kubelet's claim
        state.

        Raises OSError if the files cannot be read, CdiError if neither the ledger nor a file nor the claim state names
        the devices of a claim.
        """
        state = [claim for claim in prepared if self.name in claim.devices]
        pods = {claim.uid: claim.pod_uids for claim in state}
        files, boot, ids = {file.uid: file for file in self.files.read()}, self.files.boot, self._ids(resource)
        unknown = {uid for uid, file in files.items() if file.devices is None and self.records.get(uid) is None}
        claims = [
            evidence.of_file(file, resource, pods.get(uid, frozenset()))
            for uid, file in files.items()
            if file.devices is not None
        ]
        filed = {claim.uid for claim in claims}
        for claim in (*evidence.in_state(state, self.name, self.pool), *self.files.holding()):
            if claim.shares and claim.uid not in filed:
                unknown.discard(claim.uid)
                claims.append(claim.evidence(self.name, resource, ids, boot))
        if unknown:
            raise cdi.CdiError(f"it is not known what claim {min(unknown)} holds: {self.files.path(min(unknown))}")
        return [claim for claim in claims if claim.granted]

    def _ids(self, resource: str) -> dict[str, str]:
        """Return the ids of a resource's devices by their published names."""
        named = self.devices.by_name.items()
        return {name: device.id for name, (served, device) in named if served.source.resource == resource}

    async def close(self) -> None:
        """End the driver's background tasks."""
        await self.tasks.close()
