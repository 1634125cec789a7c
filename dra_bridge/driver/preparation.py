"""Prepares and unprepares the claims of one DRA driver.

A claim's way through `prepare`: fetch it, check that it is the one meant and allocated here, find its devices, decode
its parameters, ask the ledger (R2), call the source's hooks, write the CDI file, record, answer.

Order and crashes. The ledger's record comes last and carries the whole answer and the CDI spec:
what is in it was set up completely, and a restart answers the same and can write the file again.
Before the hooks the devices are reserved, on disk if the source has a `prepare` hook (its traces
must be undone after a crash), else in memory. So a claim costs one fsync, with such a hook two,
and an unprepare one. Unprepare works in the opposite order: hook, file, record.

A late Prepare leaves nothing behind (nvidia k8s-dra-driver-gpu#1162): calls for one claim wait
for each other, an Unprepare ends the Prepares of its claim that are still under way, and a Prepare
for a claim that is gone, deallocated or reserved for no pod is refused.

A container that is given several requests of one driver gets the edits of each; where they speak
of the same variable, the runtime takes the last. The kubelet does not tell a driver which
container wants what, so this cannot be settled here as it is for the device plugin.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final, NamedTuple, TypeVar

import msgspec

from deviceplugin import cdi, hooks, naming
from deviceplugin.device import ContainerEdits, Device, EditConflictError, Health
from deviceplugin.identity import boot_id
from deviceplugin.inventory import GONE
from deviceplugin.kubelet.cgroups import PodProcesses
from deviceplugin.kubelet.claim_state import ClaimStateError, PreparedClaim
from deviceplugin.kubelet.exclusion_guard import ConflictError, ExclusionGuard
from deviceplugin.kubelet.orphaned_claims import only_seen
from deviceplugin.source import DeviceSource
from dra_bridge import ledger
from dra_bridge.driver.claim_api import ClaimApi
from dra_bridge.driver.claim_events import ClaimEvents
from dra_bridge.driver.claim_files import ClaimFiles, Prepared, prepared_of
from dra_bridge.driver.claims import (
    Allocation,
    ClaimError,
    ClaimRef,
    Result,
    check_ref,
    decoded_config,
    is_uid,
    parse_allocation,
)
from dra_bridge.driver.reconciliation import ClaimReconciler, Reconciled
from dra_bridge.driver.served import Group, ServedDevices, ServedResource
from dra_bridge.driver.tasks import Tasks
from dra_bridge.driver.turns import Turns, ended, in_thread
from dra_bridge.ledger import AsyncLedger, Claim, ClaimDevice, ClaimEvidence, LedgerError, Refused

__all__ = ["ClaimStatistics", "Driver", "RunningPods"]

_LOG: Final = logging.getLogger(__name__)
_T = TypeVar("_T")

DEADLINE: Final = 30.0
"""Seconds for one claim; the kubelet gives a call 45 (kubelet 1.36, cm/dra/plugin)."""

PATIENCE: Final = 40.0
"""Seconds for a call: also for what undoes a claim that failed at its deadline, whose hooks may hang, too."""

_MAX_MESSAGE: Final = 1000


class RunningPods(NamedTuple):
    """The pods whose processes run, by UID.

    unlisted: those of which it is not known which claims they use. The kubelet did not list them when their processes
    were seen to run, and it forgets the claims of a pod that was deleted by force.
    """

    running: frozenset[str] = frozenset()
    unlisted: frozenset[str] = frozenset()


async def _no_pods() -> RunningPods:
    return RunningPods()


@dataclass(frozen=True, slots=True)
class ClaimStatistics:
    """What a driver has done so far; counters only grow. Seconds are sums over finished claims."""

    prepared: int = 0
    prepared_again: int = 0
    prepare_failures: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    prepare_seconds: float = 0.0
    unprepared: int = 0
    unprepare_failures: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    unprepare_seconds: float = 0.0
    hook_seconds: float = 0.0
    api_seconds: float = 0.0
    in_flight: int = 0


class Driver:
    """One DRA driver of this node. Belongs to one event loop.

    Args:
        name: the driver's name.
        pool: the pool's name, which is the node's.
        served: the resources whose devices it offers.
        async_ledger: the ledger, shared by all drivers of the process.
        claims: the API server.
        cdi_directory: where the runtime looks for CDI files.
        deadline: seconds for one claim.
        patience: seconds for a call; what is not done then is told so, and goes on.
        pull: whether a claim for an idle device of the plugin's side begins its move (R2).
        report: whether to write `status.devices` of claims, which costs a GET and a PATCH for each.
        boot: what tells one boot of the node from another; None: the kernel's own.
        changed: called after claims came or went.
        ready: whether a device (resource, id) may be given to claims yet.
        qualifiers: returns those of resources, as in the names of published devices; a resource for
            which it has none has no published devices yet.
        guard: keeps devices that are one thing, or parts of one, from holders that exclude each other.
        running_pods: records in the ledger which pods use which claims, and returns the pods whose processes run.

    """

    def __init__(
        self,
        name: str,
        pool: str,
        served: Sequence[ServedResource],
        async_ledger: AsyncLedger,
        claims: ClaimApi,
        *,
        cdi_directory: str = cdi.DIRECTORY,
        deadline: float = DEADLINE,
        patience: float = PATIENCE,
        pull: bool = False,
        report: bool = False,
        boot: str | None = None,
        changed: Callable[[], None] | None = None,
        ready: Callable[[str, str], bool] = lambda resource, device: True,
        running_pods: Callable[[], Awaitable[RunningPods]] = _no_pods,
        qualifiers: Callable[[Sequence[str]], Mapping[str, str]] = naming.qualifiers,
        guard: ExclusionGuard | None = None,
    ) -> None:
        self.name: Final = name
        self._guard = guard or ExclusionGuard()
        self._ready = ready
        self._running_pods = running_pods
        self.pool: Final = pool
        self._served = ServedDevices(served, qualifiers)
        self._ledger = async_ledger
        self._claims = claims
        self._deadline = deadline
        self._patience = patience
        self._pull = pull
        self._report = report
        self._changed = changed or (lambda: None)
        self._turns = Turns()
        self._files = ClaimFiles(name, cdi_directory, async_ledger, self._turns, boot_id() if boot is None else boot)
        self._preparing: dict[str, set[asyncio.Task[Prepared]]] = {}
        self._reconciler = ClaimReconciler(
            name,
            pool,
            async_ledger,
            claims,
            self._files,
            self._turns,
            unprepare=self._unprepare_in_turn,
            preparing=self._preparing.keys(),
            deadline=deadline,
        )
        self._tasks = Tasks()
        self._events = ClaimEvents(name, pool, claims, self._tasks)
        self._statistics = ClaimStatistics()

    def __repr__(self) -> str:
        return f"<Driver {self.name} pool {self.pool}: {', '.join(s.source.resource for s in self.served)}>"

    def serve(self, served: Sequence[ServedResource]) -> None:
        """Offer the devices of other resources from now on."""
        self._served.replace(served)

    @property
    def served(self) -> tuple[ServedResource, ...]:
        """The resources whose devices it offers."""
        return self._served.resources

    @property
    def devices(self) -> Mapping[str, tuple[ServedResource, Device]]:
        """The devices by the name that slices and claims use."""
        return self._served.by_name

    @property
    def statistics(self) -> ClaimStatistics:
        """What was done so far."""
        return self._statistics

    # What the kubelet asks.

    async def prepare(self, claims: Iterable[ClaimRef]) -> dict[str, Prepared | ClaimError]:
        """Prepare claims, each on its own; an answer by UID for every one of them."""
        return await self._each(claims, self._prepare)

    async def unprepare(self, claims: Iterable[ClaimRef]) -> dict[str, ClaimError | None]:
        """Unprepare claims, each on its own, known or not; None by UID where it is done."""
        return await self._each(claims, self._unprepare)

    async def _each(
        self, claims: Iterable[ClaimRef], work: Callable[[ClaimRef], Coroutine[Any, Any, _T]]
    ) -> dict[str, _T | ClaimError]:
        refs = {claim.uid: claim for claim in claims}
        tasks = {uid: self._tasks.start(work(ref)) for uid, ref in refs.items()}
        # A caller that goes away does not stop what has begun: its next try finds it done.
        if tasks:
            await asyncio.wait(tasks.values(), timeout=self._patience)
        late = f"not done within {self._patience:g} s; it goes on"
        return {
            uid: _outcome(task) if task.done() else ClaimError("timeout", f"claim {refs[uid].title}: {late}")
            for uid, task in tasks.items()
        }

    async def _prepare(self, ref: ClaimRef) -> Prepared:
        task: asyncio.Task[Any] | None = asyncio.current_task()
        assert task is not None
        self._preparing.setdefault(ref.uid, set()).add(task)
        began = time.perf_counter()
        self._count(in_flight=1)
        try:
            check_ref(ref)
            async with asyncio.timeout(self._deadline), self._turns.of(ref.uid):
                prepared = await self._prepare_in_turn(ref)
            self._events.forget(ref.uid)
            return prepared
        except BaseException as error:
            failure = _as_claim_error(error, f"claim {ref.title}", self._deadline)
            self._count(prepare_failures=_plus(self._statistics.prepare_failures, failure.reason))
            _LOG.warning("%s: cannot prepare claim %s (%s): %s", self.name, ref.title, ref.uid, failure)
            raise failure from error
        finally:
            self._count(in_flight=-1, prepare_seconds=time.perf_counter() - began)
            self._preparing[ref.uid].discard(task)
            if not self._preparing[ref.uid]:
                del self._preparing[ref.uid]

    async def _prepare_in_turn(self, ref: ClaimRef) -> Prepared:
        known = self._known(ref.uid)
        if known is not None and (prepared := prepared_of(known)) is not None and prepared.boot == self._files.boot:
            await self._files.write(ref.uid, prepared)
            self._count(prepared_again=1)
            return prepared
        began = time.perf_counter()
        claim = await self._claims.get_claim(ref.namespace, ref.name)
        self._count(api_seconds=time.perf_counter() - began)
        allocation = parse_allocation(claim, ref, self.name, self.pool)
        if not allocation.reserved:
            raise ClaimError("unreserved", f"claim {ref.title} is not reserved for a pod (any more)")
        groups = self._groups(ref, allocation)
        if known is not None and known.result is not None:
            # Prepared before a reboot: the devices have to be set up again.
            await self._ledger.do(ledger.reopen(self.name, ref.uid))
        record = Claim(
            self.name,
            ref.uid,
            ref.namespace,
            ref.name,
            tuple(
                ClaimDevice(group.served.source.resource, device.id, result.share_id or "", group.admin)
                for group in groups
                for device, result in zip(group.devices, group.results, strict=True)
            ),
            None,
            time.time(),
            pods=allocation.pods,
        )
        return await self._carry_out(ref, record, groups)

    async def _carry_out(self, ref: ClaimRef, record: Claim, groups: Sequence[Group]) -> Prepared:
        traces = any("prepare" in group.served.source.hooks for group in groups)
        await self._reserve(ref, record, durable=traces)
        try:
            edits: dict[str, list[ContainerEdits]] = {}
            for group in groups:
                edits.setdefault(group.request, []).append(await self._edits(ref, group))
            prepared = await in_thread(self._files.answer, ref.uid, groups, edits)
            await self._verify_granted(ref, record)  # after the device numbers in the CDI file were read
            final = dataclasses.replace(record, result=msgspec.json.encode(prepared).decode())
            await self._ask(ref, ledger.prepare(final, pull=self._pull))
        except BaseException:
            await self._finish(self._undo(ref, record, traces=traces))
            raise
        self._count(prepared=1)
        self._changed()
        if self._report:
            self._events.prepared(ref, prepared)
        return prepared

    async def _unprepare(self, ref: ClaimRef) -> None:
        began = time.perf_counter()
        self._count(in_flight=1)
        try:
            for task in self._preparing.get(ref.uid, ()):
                task.cancel(_OVERTAKEN)
            async with asyncio.timeout(self._deadline), self._turns.of(ref.uid):
                await self._refuse_running(ref)
                await self._unprepare_in_turn(ref.uid)
        except BaseException as error:
            failure = _as_claim_error(error, f"claim {ref.title}", self._deadline)
            self._count(unprepare_failures=_plus(self._statistics.unprepare_failures, failure.reason))
            _LOG.warning("%s: cannot unprepare claim %s (%s): %s", self.name, ref.title, ref.uid, failure)
            raise failure from error
        finally:
            self._events.forget(ref.uid)
            self._count(in_flight=-1, unprepare_seconds=time.perf_counter() - began)

    async def _refuse_running(self, ref: ClaimRef) -> None:
        """Keep a claim whose containers run, and have the kubelet try again.

        Of a pod that was deleted by force and whose containers hang the kubelet's reconcile loop unprepares the
        claims all the same (kubelet 1.36, cm/dra/manager.go: reconcileLoop). If another pod shares the claim, the loop
        only drops the pod from the claim state.

        Raises:
            ClaimError: processes of a pod of this claim run, or it is not known which pods use it.

        """
        if self._known(ref.uid) is None:
            return
        try:
            running, unlisted = await self._running_pods()
        except (ClaimStateError, LedgerError, OSError) as error:
            what = f"it is not known which pods use it; it stays prepared so long: {error}"
            raise ClaimError("unknown", f"claim {ref.title}: {what}") from error
        known = self._known(ref.uid)
        if known is None:
            return
        if users := sorted(known.pods & running):
            raise ClaimError(
                "running", f"claim {ref.title}: processes of pod {users[0]} run; it stays prepared so long"
            )
        if unlisted:
            what = f"processes of pod {min(unlisted)} run, which the kubelet does not list and which may use it"
            raise ClaimError("unknown", f"claim {ref.title}: {what}; it stays prepared so long")

    async def _unprepare_in_turn(self, uid: str) -> None:
        known = self._known(uid)
        if known is not None:
            await self._call_unprepare(known)
        if is_uid(uid):
            await self._files.remove(uid)
        if known is not None:
            await self._ledger.do(ledger.unprepare(self.name, uid))
            self._count(unprepared=1)
            self._changed()
            self._tell_released(known)

    async def reconcile(
        self, named: Collection[str], pods: PodProcesses, unlisted: Collection[str] = (), *, sweep: bool = True
    ) -> Reconciled:
        """End claims that are over by all evidence; see `ClaimReconciler.reconcile`."""
        return await self._reconciler.reconcile(named, pods, unlisted, sweep=sweep)

    async def keep_files(self) -> None:
        """Write CDI files again soon after they were removed, until cancelled; see `ClaimFiles.keep`."""
        await self._files.keep()

    def claim_evidence(self, prepared: Iterable[PreparedClaim], resource: str) -> Iterator[ClaimEvidence]:
        """Yield what the kubelet's claim state says of claims on devices of one resource (R8)."""
        for claim in prepared:
            shares = {
                self.devices[name][1].id: share
                for pool, name, share in claim.devices.get(self.name, ())
                if pool == self.pool
                and name in self.devices
                and self.devices[name][0].source.resource == resource
                and name not in only_seen(claim, self.name)
            }
            if shares:
                yield ClaimEvidence(
                    self.name,
                    claim.uid,
                    frozenset(shares),
                    prepared=True,
                    namespace=claim.namespace,
                    name=claim.name,
                    pods=claim.pod_uids,
                    shares=shares,
                )

    async def close(self) -> None:
        """End what runs in the background."""
        await self._tasks.close()

    def cdi_evidence(self) -> dict[str, list[ClaimEvidence]]:
        """Return what the CDI files say of prepared claims, by resource (R8). Blocks for their reading."""
        found: dict[str, list[ClaimEvidence]] = {served.source.resource: [] for served in self.served}
        for uid, names in self._files.holding():
            devices: dict[str, set[str]] = {}
            for served, device in (self.devices[name] for name in names if name in self.devices):
                devices.setdefault(served.source.resource, set()).add(device.id)
            for resource, ids in devices.items():
                found[resource].append(ClaimEvidence(self.name, uid, frozenset(ids), prepared=True))
        return found

    # Steps.

    def _known(self, uid: str) -> Claim | None:
        return self._ledger.snapshot.claims.get((self.name, uid))

    def _groups(self, ref: ClaimRef, allocation: Allocation) -> list[Group]:
        """Find the devices and decode the parameters of each request.

        Raises:
            ClaimError: a device is missing, gone or unhealthy, or the parameters are wrong.

        """
        found: dict[tuple[str, str, bool], list[tuple[Device, Result]]] = {}
        by_resource = {served.source.resource: served for served in self.served}
        for result in allocation.results:
            if result.device not in self.devices:
                raise ClaimError(
                    "missing", f"request {result.request!r}: driver {self.name} has no device {result.device!r} here"
                )
            served, device = self.devices[result.device]
            admin = bool(result.admin_access)
            if not admin:
                _check_health(device, result, self.name)
                if not self._ready(served.source.resource, device.id):
                    what = "who holds it is not known yet, the agent has just started"
                    raise ClaimError("starting", f"request {result.request!r}: device {result.device!r}: {what}")
            found.setdefault((result.request, served.source.resource, admin), []).append((device, result))
        return [
            Group(
                request.partition("/")[0],
                by_resource[resource],
                tuple(device for device, _ in items),
                tuple(result for _, result in items),
                decoded_config(by_resource[resource].source.config_type, allocation.config, request),
                admin,
            )
            for (request, resource, admin), items in found.items()
        ]

    async def _reserve(self, ref: ClaimRef, record: Claim, *, durable: bool) -> None:
        """Have the ledger reserve a claim's devices, if nobody holds what excludes them.

        Raises:
            ClaimError: a device is not to be had.

        """
        keys = sorted(record.held)
        try:
            await self._guard.reread()
            await self._guard.verify(keys)
            with self._guard.reserve(keys):
                await self._ledger.identify({key: self._guard.identity(*key) for key in keys})
                await self._ask(ref, ledger.reserve(record, durable=durable, pull=self._pull))
        except ConflictError as error:
            self._events.refused(ref, str(error), str(error))
            raise ClaimError("refused", str(error)) from error

    async def _verify_granted(self, ref: ClaimRef, record: Claim) -> None:
        """Check that a claim's devices still are what they were when they were reserved.

        Raises:
            ClaimError: one is not.

        """
        try:
            await self._guard.verify_granted(record.held)
        except ConflictError as error:
            self._events.refused(ref, str(error), str(error))
            raise ClaimError("refused", str(error)) from error

    async def _ask(self, ref: ClaimRef, operation: ledger.Operation[Claim | Refused]) -> Claim:
        answer = await self._ledger.do(operation)
        if isinstance(answer, Refused):
            if answer.moving:
                self._changed()
            self._events.refused(ref, answer.state.value, answer.message)
            raise ClaimError("refused", answer.message)
        return answer

    async def _edits(self, ref: ClaimRef, group: Group) -> ContainerEdits:
        """Set up the devices of a group and return what its containers get.

        The same as on the plugin side: the devices' own edits, then those of the hooks.
        """
        source, devices = group.served.source, tuple(dict.fromkeys(group.devices))
        if "reset" in source.hooks and not group.admin:
            # Who shares a device with another claim must not have it reset under the other's feet.
            others = {
                key
                for claim in self._ledger.snapshot.claims_on(source.resource, (device.id for device in devices))
                if (claim.driver, claim.uid) != (self.name, ref.uid)
                for key in claim.held
            }
            idle = [device for device in devices if (source.resource, device.id) not in others]
            if idle:
                await self._hook("reset", source, source.reset, idle)
        extra = ContainerEdits()
        if "edits" in source.hooks:
            extra = _edits_of(source, "edits", await self._hook("edits", source, source.edits, devices))
        if "prepare" in source.hooks:
            made = await self._hook("prepare", source, source.prepare, devices, group.config)
            if made is not None:
                extra = ContainerEdits.merge((extra,), winner=_edits_of(source, "prepare", made))
        try:
            return ContainerEdits.merge((device.container_edits for device in devices), winner=extra)
        except EditConflictError as error:
            raise ClaimError("conflict", f"request {group.request!r}: the devices' edits: {error}") from error

    async def _undo(self, ref: ClaimRef, record: Claim, *, traces: bool) -> None:
        """Leave nothing of a Prepare that failed; what cannot be undone now, Unprepare will."""
        try:
            await self._files.remove(ref.uid)
            if traces:
                await self._call_unprepare(record)
            await self._ledger.do(ledger.unprepare(self.name, ref.uid))
        except (ClaimError, hooks.HookError, cdi.CdiError, LedgerError) as error:
            _LOG.warning("%s: the failed Prepare of claim %s is not wholly undone: %s", self.name, ref.title, error)

    async def _finish(self, work: Coroutine[Any, Any, None]) -> None:
        """Do it to the end, though this task be cancelled."""
        await ended(self._tasks.start(work))

    async def _call_unprepare(self, claim: Claim) -> None:
        for served, devices in self._devices_of(claim):
            if "unprepare" in served.source.hooks:
                await self._hook("unprepare", served.source, served.source.unprepare, devices)

    def _tell_released(self, claim: Claim) -> None:
        """Have `released` called for the devices that nobody holds any more."""
        for served, devices in self._devices_of(claim, held=True):
            source = served.source
            now = self._ledger.snapshot
            used = self._guard.in_use((source.resource, device.id) for device in devices)
            idle = [
                device
                for device in devices
                if not now.claims_on(source.resource, (device.id,)) and (source.resource, device.id) not in used
            ]
            if idle and "released" in source.hooks:
                work = self._release(source, idle)
                self._guard.release([(source.resource, device.id) for device in idle], work)

    async def _release(self, source: DeviceSource, devices: Sequence[Device]) -> None:
        began = time.perf_counter()
        try:
            await hooks.call(f"released of {source.resource}", source.released, devices, timeout=source.hook_timeout)
        finally:
            self._count(hook_seconds=time.perf_counter() - began)

    def _devices_of(self, claim: Claim, *, held: bool = False) -> Iterator[tuple[ServedResource, list[Device]]]:
        for served in self.served:
            resource, listed = served.source.resource, served.inventory.snapshot.devices
            ids = dict.fromkeys(d.device for d in claim.devices if d.resource == resource and not (held and d.admin))
            if ids:
                yield served, [listed.get(name) or Device(name, health=Health.UNHEALTHY, message=GONE) for name in ids]

    async def _hook(
        self, name: str, source: DeviceSource, hook: Callable[..., _T | Awaitable[_T]], *args: object
    ) -> _T:
        began = time.perf_counter()
        try:
            return await hooks.call(f"{name} of {source.resource}", hook, *args, timeout=source.hook_timeout)
        except hooks.HookError as error:
            raise ClaimError("hook", str(error)) from error
        finally:
            self._count(hook_seconds=time.perf_counter() - began)

    def _count(self, **changes: Any) -> None:
        now = self._statistics
        values: dict[str, Any] = {
            name: value if isinstance(value, Mapping) else getattr(now, name) + value for name, value in changes.items()
        }
        self._statistics = dataclasses.replace(now, **values)


_OVERTAKEN: Final = "overtaken by Unprepare"


def _outcome(task: asyncio.Task[_T]) -> _T | ClaimError:
    error = task.exception() if not task.cancelled() else ClaimError("stopped", "the driver is stopping")
    if error is None:
        return task.result()
    return error if isinstance(error, ClaimError) else ClaimError("internal", f"internal error: {error!r}")


def _as_claim_error(error: BaseException, what: str, deadline: float) -> ClaimError:
    """Say an error so that a user can read it; what is unexpected goes to the log, too."""
    if isinstance(error, ClaimError):
        text, reason = str(error), error.reason
    elif isinstance(error, asyncio.CancelledError):
        overtaken = error.args[:1] == (_OVERTAKEN,)
        text, reason = f"{what}: {_OVERTAKEN if overtaken else 'the driver is stopping'}", "overtaken"
    elif isinstance(error, TimeoutError):
        text, reason = f"{what}: not done within {deadline:g} s", "timeout"
    elif isinstance(error, cdi.CdiError):
        text, reason = str(error), "cdi"
    elif isinstance(error, LedgerError):
        text, reason = str(error), "ledger"
    else:
        # The API client's errors come here, too; their text is meant for people.
        text, reason = f"{what}: {error or type(error).__name__}", "api"
    return ClaimError(reason, text if len(text) <= _MAX_MESSAGE else f"{text[: _MAX_MESSAGE - 3]}...")


def _check_health(device: Device, result: Result, driver: str) -> None:
    if device.health.usable:
        return
    tolerated = any(
        toleration.get("key") in {None, "", f"{driver}/unhealthy"} for toleration in result.tolerations or ()
    )
    if device.message == GONE or not tolerated:
        why = device.message or "no reason was given"
        raise ClaimError("unhealthy", f"request {result.request!r}: device {result.device!r} is unhealthy: {why}")


def _edits_of(source: DeviceSource, hook: str, answer: object) -> ContainerEdits:
    if not isinstance(answer, ContainerEdits):
        raise ClaimError("hook", f"{hook} of {source.resource} returned {type(answer).__name__}, not ContainerEdits")
    return answer


def _plus(counts: Mapping[str, int], key: str) -> Mapping[str, int]:
    return MappingProxyType({**counts, key: counts.get(key, 0) + 1})
