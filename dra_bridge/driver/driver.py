"""One DRA driver of this node: what the kubelet asks of it, and what evidence it has of its claims."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from typing import Final, TypeVar

from deviceplugin import cdi, naming
from deviceplugin.identity import boot_id
from deviceplugin.kubelet.claim_state import PreparedClaim
from deviceplugin.kubelet.exclusion_guard import ExclusionGuard
from deviceplugin.kubelet.orphaned_claims import only_seen
from deviceplugin.register.rules import ClaimEvidence
from dra_bridge.driver.claim_api import ClaimEvents, ClusterClaims
from dra_bridge.driver.claim_files import ClaimFiles
from dra_bridge.driver.claims import ClaimError, ClaimRef
from dra_bridge.driver.preparation import ClaimDevices, ClaimPreparation, ClaimStatistics, RunningPods
from dra_bridge.driver.reconciliation import ClaimReconciler
from dra_bridge.driver.records import ClaimRecords, Prepared
from dra_bridge.driver.served import ServedDevices, ServedResource
from dra_bridge.driver.tasks import Tasks
from dra_bridge.ledger.worker import AsyncLedger

_T = TypeVar("_T")

DEADLINE: Final = 30.0
"""Seconds for one claim; the kubelet gives a call 45 (kubelet 1.36, cm/dra/plugin)."""

PATIENCE: Final = 40.0
"""Seconds for a call: also for what undoes a claim that failed at its deadline, whose hooks may hang, too."""


async def _no_pods() -> RunningPods:
    return RunningPods()


class Driver:
    """One DRA driver of this node. Belongs to one event loop.

    pool: the pool's name, which is the node's. async_ledger: may be shared by drivers. deadline: seconds for one claim.
    patience: seconds for a call; what is not done then is an error in the answer, and it goes on. report: whether to
    write `status.devices` of claims, which costs a GET and a PATCH for each. boot: identifies the node's boot; None: as
    the kernel does. changed: called after claims came or went. ready: whether a device (resource, id) may be given to
    claims yet. running_pods: records in the ledger which pods use which claims, and returns the pods whose processes
    run. qualifiers: returns those of resources in the names of published devices; a resource without one has no
    published devices yet. guard: keeps devices that are one thing, or parts of one, from holders that exclude each
    other.
    """

    def __init__(
        self,
        name: str,
        pool: str,
        served: Sequence[ServedResource],
        async_ledger: AsyncLedger,
        api: ClusterClaims,
        *,
        cdi_directory: str = cdi.DIRECTORY,
        deadline: float = DEADLINE,
        patience: float = PATIENCE,
        report: bool = False,
        boot: str | None = None,
        changed: Callable[[], None] = lambda: None,
        ready: Callable[[str, str], bool] = lambda resource, device: True,
        running_pods: Callable[[], Awaitable[RunningPods]] = _no_pods,
        qualifiers: Callable[[Sequence[str]], Mapping[str, str]] = naming.qualifiers,
        guard: ExclusionGuard | None = None,
    ) -> None:
        self.name: Final = name
        self.pool: Final = pool
        self.statistics = statistics = ClaimStatistics()
        self.records = records = ClaimRecords(name, pool, async_ledger)
        self.devices = served_devices = ServedDevices(name, tuple(served), qualifiers, ready)
        self.files = files = ClaimFiles(records, cdi_directory, boot_id() if boot is None else boot)
        self._patience = patience
        self._tasks = tasks = Tasks()
        events = ClaimEvents(records, api, tasks, report)
        devices = ClaimDevices(records, served_devices, guard or ExclusionGuard(), events, statistics, changed)
        self._preparation = ClaimPreparation(
            records, api, served_devices, devices, files, events, tasks, statistics, running_pods, deadline, changed
        )
        self.reconciler = ClaimReconciler(records, api, files, self._preparation)

    async def prepare(self, claims: Iterable[ClaimRef]) -> dict[str, Prepared | ClaimError]:
        """Prepare claims, each on its own; return an answer by UID for every one of them."""
        refs = {claim.uid: claim for claim in claims}
        tasks = {uid: self._tasks.start(self._preparation.prepare(ref)) for uid, ref in refs.items()}
        return await self._answers(refs, tasks)

    async def unprepare(self, claims: Iterable[ClaimRef]) -> dict[str, ClaimError | None]:
        """Unprepare claims, each on its own, known or not; return None by UID where it is done."""
        refs = {claim.uid: claim for claim in claims}
        tasks = {uid: self._tasks.start(self._preparation.unprepare(ref)) for uid, ref in refs.items()}
        return await self._answers(refs, tasks)

    async def _answers(
        self, refs: Mapping[str, ClaimRef], tasks: Mapping[str, asyncio.Task[_T]]
    ) -> dict[str, _T | ClaimError]:
        # A caller that goes away does not stop what has begun: its next try finds it done.
        if tasks:
            await asyncio.wait(tasks.values(), timeout=self._patience)
        late = f"not done within {self._patience:g} s; it goes on"
        timeouts = {uid: ClaimError("timeout", f"claim {ref.title}: {late}") for uid, ref in refs.items()}
        return {uid: _answer(task) if task.done() else timeouts[uid] for uid, task in tasks.items()}

    def claim_evidence(self, prepared: Iterable[PreparedClaim], resource: str) -> Iterator[ClaimEvidence]:
        """Yield the evidence of the kubelet's claim state about devices of one resource (R8)."""
        ids = self._ids(resource)
        for claim in prepared:
            seen = only_seen(claim, self.name)
            shares = {
                ids[name]: share
                for pool, name, share in claim.devices.get(self.name, ())
                if pool == self.pool and name in ids and name not in seen
            }
            if shares:
                names = claim.namespace, claim.name, claim.pod_uids
                yield ClaimEvidence(self.name, claim.uid, frozenset(shares), True, *names, shares)

    def cdi_evidence(self, resource: str) -> list[ClaimEvidence]:
        """Return the evidence of prepared claims' CDI files about devices of one resource (R8). Blocks to read them."""
        ids = self._ids(resource)
        found = [(uid, frozenset(ids[name] for name in names if name in ids)) for uid, names in self.files.holding()]
        return [ClaimEvidence(self.name, uid, devices, prepared=True) for uid, devices in found if devices]

    def _ids(self, resource: str) -> dict[str, str]:
        """Return the ids of a resource's devices by the names that slices and claims use."""
        named = self.devices.by_name.items()
        return {name: device.id for name, (served, device) in named if served.source.resource == resource}

    async def close(self) -> None:
        """End what runs in the background."""
        await self._tasks.close()


def _answer(task: asyncio.Task[_T]) -> _T | ClaimError:
    if task.cancelled():  # before it began
        return ClaimError("stopped", "the driver is stopping")
    error = task.exception()
    return task.result() if error is None else ClaimError("internal", f"internal error: {error!r}")
