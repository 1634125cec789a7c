"""Prepares and unprepares claims, one call at a time for each claim.

Prepare fetches the claim, checks that it is the one meant and allocated here, finds its devices, decodes its
parameters, asks the ledger, calls the source's hooks, writes the CDI file, records and answers. Unprepare calls
the hook, removes the file and then the record.

A claim that is prepared is answered as recorded if its allocation is the recorded one. A claim that was deallocated and
allocated anew under its UID is prepared anew, once no process runs that may use what it had. So each Prepare reads
the claim, and one that cannot be read is an error, also if an answer is recorded: the kubelet itself reads the claim
before it asks (kubelet 1.36, cm/dra/manager.go: prepareResources), and tries again.

Crashes. The ledger's record comes last and has the whole answer and the CDI spec: what is in it was set up
completely, and a restart answers the same and can write the file again. Before the hooks the devices are reserved: in
the ledger, and synced, if the source has a `prepare` hook (its traces must be undone after a crash), else in memory.

A late Prepare leaves nothing behind (nvidia k8s-dra-driver-gpu#1162): calls for one claim wait for each other, an
Unprepare ends the Prepares of its claim that are still under way, and a Prepare for a claim that is gone, deallocated
or reserved for no pod is refused.

A claim whose devices have holders that are about to end waits for them (`dra_bridge.driver.waiting`).

A container that is given several requests of one driver gets the edits of each. Where they set the same variable, the
runtime takes the last: a driver does not learn which container wants what.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import math
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import msgspec

from deviceplugin import cdi, hooks
from deviceplugin.adoption.answers import AnswerError
from deviceplugin.adoption.source import AdoptedSource
from deviceplugin.device import ContainerEdits, Device, EditConflictError, counted
from deviceplugin.exclusion import DeviceConflictError, DeviceKey
from deviceplugin.kubelet.claim_state import ClaimStateError
from deviceplugin.looks import LookTimeoutError
from deviceplugin.register import operations
from deviceplugin.register.outlook import outlook
from deviceplugin.register.question import View
from deviceplugin.register.records import Claim, Decision, LedgerError, Operation, Outlook, RegisterSnapshot
from deviceplugin.register.register import HookWorksError, Register
from deviceplugin.register.rules import Excluded, Refused
from deviceplugin.source import DeviceSource
from deviceplugin.tasks import Tasks, ended
from dra_bridge.driver.claim_api import ClaimEvents, ClusterClaims
from dra_bridge.driver.claim_devices import granted_device
from dra_bridge.driver.claim_files import ClaimFiles
from dra_bridge.driver.claims import Awaited, ClaimAllocation, ClaimError, ClaimRef, check_ref, parse_allocation
from dra_bridge.driver.host import DriverHost
from dra_bridge.driver.records import ClaimRecords, Prepared, prepared_of
from dra_bridge.driver.served import RequestDevices, ServedDevices
from dra_bridge.driver.statistics import CallStatistics, ClaimStatistics
from dra_bridge.driver.waiting import ClaimWait, WaitLimit, when_free

_LOG: Final = logging.getLogger(__name__)
_MAX_MESSAGE: Final = 1000
_OVERTAKEN: Final = "cancelled by Unprepare of the same claim"

PATIENCE: Final = 10.0
"""Seconds for which Unprepare is refused while processes of the claim's pods run.

Most end by then. The others are ended by the kubelet only after Unprepare: of a kubelet that ended while containerd
started a container a `runc init` stays, which no StopContainer or StopPodSandbox ends. The kubelet kills it with what
else is in the pod's cgroup once the pod is deleted, and the pod is not deleted before its claims are unprepared
(kubelet 1.36, cm/pod_container_manager_linux.go: tryKillingCgroupProcesses; containerd 2.1, internal/cri).
"""


@dataclass(frozen=True, slots=True)
class ClaimDevices:
    """Asks the ledger for the devices of claims, and calls the sources' hooks around their use.

    A claim for an idle device of the plugin's side begins its move. register, host: see `Driver`. events: get the
    refusals. statistics: get the seconds that hooks took. ending: UIDs of the claims that are being taken back; of
    those that share a device one is the last.
    """

    records: ClaimRecords
    served: ServedDevices
    register: Register
    events: ClaimEvents
    statistics: ClaimStatistics
    host: DriverHost
    ending: set[str] = field(default_factory=set)

    async def reserve(self, ref: ClaimRef, record: Claim, *, durable: bool) -> None:
        """Have the ledger reserve a claim's devices, if nobody holds what excludes them.

        Raises ClaimError: a device is not to be had, or is set up with other parameters.
        """
        await self._ask(
            ref,
            record,
            sorted(record.held),
            lambda view: _reserve_alike(record, view, durable=durable, along=self._along(record)),
        )

    async def confirm(self, ref: ClaimRef, record: Claim) -> None:
        """Record a claim with its answer, if its devices still are what they were when they were reserved.

        Raises ClaimError: one is not, or the ledger does not grant it any more.
        """
        try:
            await self.register.verify_granted(record.held)
        except DeviceConflictError as error:
            raise self._refused(ref, str(error), str(error)) from error
        prepare = partial(operations.prepare, record, move_idle=True, along=self._along(record))
        await self._ask(ref, record, (), prepare)

    def _along(self, record: Claim) -> frozenset[DeviceKey]:
        """Return the devices that move along with a claim's."""
        return frozenset(peer for key in record.held for peer in self.register.listed.group(*key))

    async def _ask(
        self,
        ref: ClaimRef,
        record: Claim,
        keys: Sequence[DeviceKey],
        operation: Callable[[View], Operation[Claim | Refused | Excluded]],
    ) -> None:
        awaited = Awaited(record.held, lambda: outlook(self.register.snapshot, record, self.register.view()))
        try:
            answer = await self.register.decide(keys, operation)
        except HookWorksError as error:
            raise self._refused(ref, str(error), str(error), awaited) from error
        except DeviceConflictError as error:
            raise self._refused(ref, str(error), str(error)) from error
        if isinstance(answer, Claim):
            return
        if isinstance(answer, Refused) and answer.moving:
            self.host.claims_changed()
        kind = answer.message if isinstance(answer, Excluded) else answer.record.state.value
        raise self._refused(ref, kind, answer.message, awaited if answer.outlook.waits else None)

    def _refused(self, ref: ClaimRef, kind: str, message: str, awaited: Awaited | None = None) -> ClaimError:
        self.events.refused(ref, kind, message)
        return ClaimError("refused", message, awaited)

    async def of_claim(self, uid: str, groups: Sequence[RequestDevices]) -> dict[str, list[ContainerEdits]]:
        """Set up a claim's devices and return the edits of each request. Raises as `edits` does.

        The answers of vendors' plugins have to fit together: nothing tells which container gets which.
        """
        calls: dict[object, list[RequestDevices]] = {}
        for number, group in enumerate(groups):
            source = group.served.source
            together = isinstance(source, AdoptedSource) and source.adopted.together
            calls.setdefault(source.resource if together else number, []).append(group)
        edits: dict[str, list[ContainerEdits]] = {}
        answers = []
        for alike in calls.values():
            members = tuple(member for group in alike for member in group.members)
            made = await self.edits(uid, dataclasses.replace(alike[0], members=members))
            if isinstance(alike[0].served.source, AdoptedSource):
                answers.append(made)
            for group in alike:
                edits.setdefault(group.request, []).append(made)
        try:
            ContainerEdits.merge(answers)
        except EditConflictError as error:
            what = "the answers of vendors' plugins to the requests of this claim contradict each other"
            how = "with `answer: claim` under `plugin` the requests of one resource are allocated together"
            raise ClaimError("conflict", f"{what}: {error}; {how}") from error
        return edits

    async def edits(self, uid: str, group: RequestDevices) -> ContainerEdits:
        """Set up a group's devices for a claim and return the edits of the devices, then those of the hooks.

        Administrative access changes nothing: the devices are set up for others.

        Of an adopted resource they are what its plugin answers.

        Raises HookError: a hook failed. ClaimError: the edits contradict each other, a hook returned something else, or
        a plugin refuses.
        """
        source, devices = group.served.source, tuple(dict.fromkeys(device for device, _ in group.members))
        if isinstance(source, AdoptedSource):
            try:
                return await source.answer(devices, uid)
            except AnswerError as error:
                raise ClaimError("plugin", f"request {group.request!r}: {source.resource}: {error}") from error
        run, statistics = self.register.hooks, self.statistics.hooks
        hooks_called = source.hooks - {"reset", "prepare"} if group.admin else source.hooks
        if "reset" in hooks_called and (alone := self._alone(uid, source, devices)):
            await run.call(statistics, "reset", source, alone)
        extra = ContainerEdits()
        if "edits" in hooks_called:
            extra = _edits_of(source, "edits", await statistics.call("edits", source, source.edits, devices))
        if "prepare" in hooks_called:
            made = await run.call(statistics, "prepare", source, devices, group.config)
            if made is not None:
                extra = ContainerEdits.merge((extra,), winner=_edits_of(source, "prepare", made))
        try:
            return ContainerEdits.merge((device.container_edits for device in devices), winner=extra)
        except EditConflictError as error:
            raise ClaimError("conflict", f"request {group.request!r}: the devices' edits: {error}") from error

    def forget(self, uid: str) -> None:
        """Have late answers of vendors' plugins to a claim that ends dropped."""
        for served in self.served.resources:
            if isinstance(served.source, AdoptedSource):
                served.source.forget(uid)

    async def unprepare(self, claim: Claim) -> None:
        """Undo what `prepare` hooks did for a claim to devices that no other claim holds.

        Raises HookError: a hook failed.
        """
        for (source, _), devices in self.served.of_claim(claim):
            if "unprepare" in source.hooks and (alone := self._alone(claim.uid, source, devices)):
                await self.register.hooks.call(self.statistics.hooks, "unprepare", source, alone)

    def _alone(self, uid: str, source: DeviceSource, devices: Sequence[Device]) -> list[Device]:
        """Return the devices that no other claim holds, but for those that are ending, too."""
        mine = {(self.records.driver, claim_uid) for claim_uid in (uid, *self.ending)}
        others = (claim.held for key, claim in self.records.ledger.snapshot.claims.items() if key not in mine)
        held: frozenset[DeviceKey] = frozenset().union(*others)
        return [device for device in devices if (source.resource, device.id) not in held]

    def released(self, claim: Claim) -> None:
        """Have `released` called for devices of an ended claim that nobody holds any more."""
        for (source, _), devices in self.served.of_claim(claim):
            if "released" not in source.hooks:
                continue
            idle = [device for device in devices if self.register.is_free((source.resource, device.id))]
            if idle:
                self.register.hooks.start(self.statistics.hooks, "released", source, idle)


class ClaimPreparation:
    """Prepares and unprepares the claims of one driver.

    tasks: run the work that must not be cancelled. deadline: see `Driver`.
    """

    def __init__(
        self, api: ClusterClaims, devices: ClaimDevices, files: ClaimFiles, tasks: Tasks, deadline: float
    ) -> None:
        self.api, self.devices, self.files, self.tasks, self.deadline = api, devices, files, tasks, deadline
        self.records, self.served, self.events = devices.records, devices.served, devices.events
        self.statistics, self.host = devices.statistics, devices.host
        self.preparing: dict[asyncio.Task[Any], str] = {}
        """The calls that prepare a claim now, with its UID."""
        self.begun: dict[str, float] = {}
        """When this process first prepared a claim with its allocation, by UID (monotonic seconds)."""
        self.refused: dict[str, float] = {}
        """When Unprepare was refused first because processes run, by UID (monotonic seconds)."""
        self.logged: dict[str, str] = {}
        """The last failure by UID; the kubelet tries again and again."""

    async def prepare(self, ref: ClaimRef, limit: WaitLimit) -> Prepared | ClaimError:
        """Prepare a claim; the answer survives this process when it is returned. limit: of the call's waits."""
        task: asyncio.Task[Any] | None = asyncio.current_task()
        assert task is not None
        self.preparing[task] = ref.uid
        try:
            async with self._working("prepare", self.statistics.prepare, ref) as work:
                try_it, register = partial(self._now, ref), self.devices.register
                answer = await when_free(try_it, register, limit, work, partial(self._log_wait, ref))
                self.statistics.prepare.done += 1
        except ClaimError as error:
            return error
        finally:
            del self.preparing[task]
        self.events.forget(ref.uid)
        return answer

    async def _now(self, ref: ClaimRef) -> Prepared:
        async with self._turn(ref):
            return await self._prepared(ref)

    async def _prepared(self, ref: ClaimRef) -> Prepared:
        """Prepare a claim now, or answer as recorded. The caller has its lock. Raises ClaimError."""
        check_ref(ref)
        allocation = await self._read(ref)
        recorded = self.records.get(ref.uid)
        former = prepared_of(recorded) if recorded is not None else None
        if recorded is not None and former is not None and self._stands(former, allocation):
            await self.files.write(recorded)
            self.statistics.prepared_again += 1
            return former
        groups = self.served.groups(allocation)
        devices = tuple(
            granted_device(
                group,
                device,
                result,
                self.files.boot,
                self.devices.register.times(group.served.source.resource, device),
                limits=allocation.limits,
            )
            for group in groups
            for device, result in group.members
        )
        names = ref.uid, ref.namespace, ref.name
        record = Claim(self.records.driver, *names, devices, None, time.time(), pods=allocation.pods)
        if recorded is not None:
            anew = recorded.held != record.held if former is None else former.named != allocation.named
            await self._leave(ref, recorded, former, anew=anew)
        if self.records.get(ref.uid) is None:
            self.begun[ref.uid] = time.monotonic()
        return await self._set_up(ref, record, groups)

    async def unprepare(self, ref: ClaimRef) -> ClaimError | None:
        """Unprepare a claim, known or not, unless its containers run: then the kubelet has to try again.

        Of a pod that was deleted by force and whose containers hang the kubelet's reconcile loop unprepares the
        claims all the same (kubelet 1.36, cm/dra/manager.go: reconcileLoop). If another pod shares the claim, the loop
        only drops the pod from the claim state.

        Where they run on for `PATIENCE` the kubelet is answered that the claim is unprepared, and the ledger keeps it:
        its devices are held until no process of its pods runs (`ClaimReconciler`).
        """
        driver = self.records.driver
        for task, uid in self.preparing.items():
            if uid == ref.uid:
                task.cancel(_OVERTAKEN)
        try:
            async with self._working("unprepare", self.statistics.unprepare, ref), self._turn(ref):
                users, unlisted = await self._users(ref)
                if not (users or unlisted):
                    await self.end(ref.uid)
                else:
                    now = time.monotonic()
                    error = _still_running(ref, users, unlisted)
                    if now - self.refused.setdefault(ref.uid, now) < PATIENCE:
                        raise error
                    text = "%s; telling the kubelet that the claim is unprepared, since it may end them only after that"
                    _LOG.warning(text, error, extra={"driver": driver, "claim": ref.title})
                    await self.records.ledger.do(operations.reopen(driver, ref.uid))
                    await self.files.describe(ref.uid)
        except ClaimError as failure:
            return failure
        finally:
            self.events.forget(ref.uid)
        return None

    def _log_wait(self, ref: ClaimRef, error: ClaimError) -> None:
        extra = {"driver": self.records.driver, "claim": ref.title}
        _LOG.info("claim %s waits for its devices: %s", ref.title, error, extra=extra)
        if error.reason != "refused":  # which has an Event already
            self.events.refused(ref, error.reason, str(error))

    @contextlib.asynccontextmanager
    async def _working(self, verb: str, statistics: CallStatistics, ref: ClaimRef) -> AsyncIterator[ClaimWait]:
        """Work on a claim: count and log it. Raises ClaimError for every failure."""
        began, work = time.perf_counter(), ClaimWait()
        self.statistics.in_flight += 1
        try:
            yield work
            self.logged.pop(ref.uid, None)
        except BaseException as error:
            failure = _as_claim_error(error, f"claim {ref.title}", self.deadline)
            statistics.failures[failure.reason] += 1
            text, extra = "cannot %s claim %s (%s): %s", {"driver": self.records.driver, "claim": ref.title}
            level = logging.DEBUG if self.logged.get(ref.uid) == f"{verb} {failure}" else logging.WARNING
            self.logged[ref.uid] = f"{verb} {failure}"
            _LOG.log(level, text, verb, ref.title, ref.uid, failure, extra=extra)
            raise failure from error
        finally:
            self.statistics.in_flight -= 1
            statistics.durations.add(time.perf_counter() - began - work.seconds)
            if work.seconds:
                self.statistics.waits.add(work.seconds)

    @contextlib.asynccontextmanager
    async def _turn(self, ref: ClaimRef) -> AsyncIterator[None]:
        """Have a claim's lock, within the deadline."""
        async with asyncio.timeout(self.deadline), self.records.locked(ref.uid):
            yield

    async def _read(self, ref: ClaimRef) -> ClaimAllocation:
        """Return what a claim has of this driver. Raises ClaimError: nothing, or nobody may use it."""
        began = time.perf_counter()
        self.statistics.claim_reads += 1
        try:
            claim = await self.api.get_claim(ref.namespace, ref.name)
        finally:
            self.statistics.claim_read_seconds += time.perf_counter() - began
        allocation = parse_allocation(claim, ref, self.records.driver, self.records.pool)
        if not allocation.reserved:
            raise ClaimError("unreserved", f"claim {ref.title} is not reserved for a pod (any more)")
        return allocation

    def _stands(self, former: Prepared, allocation: ClaimAllocation) -> bool:
        """Return whether a recorded answer is of this boot, and of what the claim is allocated now."""
        return former.boot == self.files.boot and former.named == allocation.named

    async def _leave(self, ref: ClaimRef, record: Claim, former: Prepared | None, *, anew: bool) -> None:
        """Leave what a claim had before. former: its answer then. anew: it has another allocation now.

        A claim is allocated anew only when no pod uses it any more by the API server, whose pods may run on here all
        the same: they were deleted by force, or this node was cut off. Processes of the pod that asks now are waited
        for, too: the kubelet has a claim prepared before it makes the pod's sandbox (kubelet 1.36,
        kuberuntime_manager.go: SyncPod), so what runs is of a sandbox with the former allocation.

        Raises ClaimError: processes may use it.
        """
        if former is None or (anew and former.boot == self.files.boot):
            # Without an answer: its Unprepare was answered while processes ran, or its Prepare did not end.
            users, unlisted = await self._users(ref)
            if users or (anew and unlisted):
                former_devices = Awaited(record.held, lambda: self._still_used(ref, record))
                raise _still_running(ref, users, unlisted, former_devices)
            if anew and not record.pods:
                what = "it is not known which pods have the devices that it had before; they are held until Unprepare"
                raise ClaimError("unknown", f"claim {ref.title} is allocated anew: {what}")
        if anew:
            await self.end(ref.uid)
        elif former is not None:
            # Prepared before a reboot: the devices have to be set up again.
            await self.records.ledger.do(operations.reopen(self.records.driver, ref.uid))

    async def _set_up(self, ref: ClaimRef, record: Claim, groups: Sequence[RequestDevices]) -> Prepared:
        """Reserve the devices, call the hooks, write the CDI file and record the answer; undo all if that fails."""
        traces = any("prepare" in group.served.source.hooks and not group.admin for group in groups)
        await self.devices.reserve(ref, record, durable=traces)
        try:
            edits = await self.devices.of_claim(ref.uid, groups)
            prepared = await self.files.answer(record, groups, edits)
            # This verifies the devices after their numbers were read for the CDI file.
            await self.devices.confirm(ref, dataclasses.replace(record, result=msgspec.json.encode(prepared).decode()))
        except BaseException:
            await ended(self.tasks.start(self._undo(ref, record)))  # also if this task is cancelled
            raise
        self.host.claims_changed()
        self.events.prepared(ref, prepared)
        _log("prepared", record)
        return prepared

    async def _undo(self, ref: ClaimRef, record: Claim) -> None:
        """Leave nothing of a Prepare that failed; what cannot be undone now, Unprepare will."""
        try:
            await self._take_back(record)
        except (hooks.HookError, cdi.CdiError, LedgerError) as error:
            text = "cannot undo all of the failed Prepare of claim %s: %s"
            _LOG.warning(text, ref.title, error, extra={"driver": self.records.driver, "claim": ref.title})

    async def _users(self, ref: ClaimRef) -> tuple[frozenset[str], frozenset[str]]:
        """Return the pods of a claim whose processes run, and those of which it is not known whether they use it.

        Raises ClaimError: it is not known which pods use it.
        """
        if self.records.get(ref.uid) is None:
            return frozenset(), frozenset()
        try:
            running, unlisted = await self.host.running_pods()
        except (ClaimStateError, LedgerError, OSError) as error:
            what = f"it is not known which pods use it; its devices are held until that is known: {error}"
            raise ClaimError("unknown", f"claim {ref.title}: {what}") from error
        record = self.records.get(ref.uid)  # with the pods that were recorded just now
        if record is None:
            return frozenset(), frozenset()
        return record.pods & running, self.possible_users(ref.uid, unlisted)

    def _still_used(self, ref: ClaimRef, record: Claim) -> Outlook:
        """Return whether processes use a claim's former devices, as of the last reading."""
        running, unlisted = self.host.last_running_pods()
        used = not running.isdisjoint(record.pods) or self.possible_users(ref.uid, unlisted)
        return Outlook.ENDING if used else Outlook.FREE

    def possible_users(self, uid: str, unlisted: Mapping[str, float]) -> frozenset[str]:
        """Return which of these pods may use a claim: not those that ran before it was prepared.

        The kubelet has a claim prepared before it makes the sandbox of its pod (kubelet 1.36, kuberuntime_manager.go:
        SyncPod).
        """
        begun = self.begun.get(uid, -math.inf)
        return frozenset(pod for pod, since in unlisted.items() if since >= begun)

    async def end(self, uid: str) -> None:
        """Undo all that was prepared for a claim. The caller has its lock, and knows that no container uses it."""
        self.refused.pop(uid, None)
        self.begun.pop(uid, None)
        self.devices.forget(uid)
        record = self.records.get(uid)
        if record is not None:
            await self._take_back(record)
            self.statistics.unprepare.done += 1
            self.host.claims_changed()
            self.devices.released(record)
            _log("unprepared", record)
        elif cdi.UID.fullmatch(uid):
            await self.files.remove(uid)

    async def _take_back(self, claim: Claim) -> None:
        """Undo what was set up for a claim; its record is dropped last."""
        self.devices.ending.add(claim.uid)
        try:
            await self.devices.unprepare(claim)
            await self.files.remove(claim.uid)
            # A Prepare of this claim must not find the record before it goes.
            drop = self.records.ledger.do(operations.unprepare(self.records.driver, claim.uid))
            await ended(asyncio.ensure_future(drop))
        finally:
            self.devices.ending.discard(claim.uid)


def _reserve_alike(
    record: Claim, view: View, *, durable: bool, along: frozenset[DeviceKey]
) -> Operation[Claim | Refused | Excluded]:
    """Reserve a claim's devices, unless others that share one have it with other parameters; then answer why not."""
    reserve = operations.reserve(record, view, durable=durable, move_idle=True, along=along)

    def decide(state: RegisterSnapshot) -> Decision[Claim | Refused | Excluded]:
        decision = reserve(state)
        if isinstance(decision.answer, Claim) and (why := _other_parameters(state, record)):
            return Decision(Excluded(why))
        return decision

    return decide


def _other_parameters(state: RegisterSnapshot, claim: Claim) -> str:
    """Return which device another holder, or the claim itself, has with other parameters; "" if all are alike."""
    for device in claim.devices:
        holders = state.claims_on(device.resource, (device.device,)) if not device.admin else ()
        for other in (claim, *(other for other in holders if (other.driver, other.uid) != (claim.driver, claim.uid))):
            for theirs in other.devices:
                same = (theirs.resource, theirs.device, theirs.admin) == (device.resource, device.device, device.admin)
                if same and theirs.parameters != device.parameters:
                    text = (
                        f"device {device.device!r} of {device.resource} is shared with claim {other.title or other.uid}"
                    )
                    how = "has it with other parameters" if theirs.parameters else "may have it with other parameters"
                    return f"{text}, which {how}"
    return ""


def _log(verb: str, claim: Claim) -> None:
    """Log that a claim was prepared or unprepared, its devices at DEBUG."""
    extra = {"driver": claim.driver, "claim": claim.title}
    _LOG.info("claim %s was %s: %s", claim.title, verb, counted(len(claim.devices)), extra=extra)
    for device in claim.devices if _LOG.isEnabledFor(logging.DEBUG) else ():
        where = {**extra, "resource": device.resource, "device": device.device}
        _LOG.debug("claim %s has device %s of %s", claim.title, device.device, device.resource, extra=where)


def _still_running(
    ref: ClaimRef, users: frozenset[str], unlisted: frozenset[str], awaited: Awaited | None = None
) -> ClaimError:
    what = f"claim {ref.title}: processes of pod {min(users or unlisted)} run"
    if users:
        return ClaimError("running", f"{what}; its devices are held until they end", awaited)
    what += ", which the kubelet does not list and which may use it"
    return ClaimError("unknown", f"{what}; its devices are held until they end", awaited)


def _as_claim_error(error: BaseException, what: str, deadline: float) -> ClaimError:
    """Return an error with a text that a user can read."""
    match error:
        case ClaimError():
            reason, text = error.reason, str(error)
        case asyncio.CancelledError():
            overtaken = error.args[:1] == (_OVERTAKEN,)
            reason, text = "overtaken", f"{what}: {_OVERTAKEN if overtaken else 'the driver is stopping'}"
        case LookTimeoutError():
            reason, text = "timeout", f"{what}: {error}"
        case TimeoutError():
            reason, text = "timeout", f"{what}: not done within {deadline:g} s"
        case hooks.HookError():
            reason, text = "hook", str(error)
        case cdi.CdiError():
            reason, text = "cdi", str(error)
        case LedgerError():
            reason, text = "ledger", str(error)
        case _:  # also the API client's errors, whose text is meant for people
            reason, text = "api", f"{what}: {error or type(error).__name__}"
    return ClaimError(reason, text if len(text) <= _MAX_MESSAGE else f"{text[: _MAX_MESSAGE - 3]}...")


def _edits_of(source: DeviceSource, hook: str, answer: object) -> ContainerEdits:
    if not isinstance(answer, ContainerEdits):
        raise ClaimError("hook", f"{hook} of {source.resource} returned {type(answer).__name__}, not ContainerEdits")
    return answer
