"""Prepares and unprepares claims. Calls for the same claim run one after another.

Prepare has these steps: read the claim, check that its UID is right and that it is allocated on this node, find its
devices, decode its parameters, get the register's grant, set up the devices, write the claim's files, and return the
response. Unprepare calls the hook `unprepare`, removes the files, and then removes the claim's record from the ledger
(the SQLite file of records).

For a prepared claim whose allocation has not changed, Prepare returns the recorded response. If a claim was deallocated
and allocated again under its UID, Prepare sets up the new devices, once no process runs that may use the former
devices. So each Prepare reads the claim from the API server. If the claim cannot be read, Prepare fails, even if a
response is recorded. The kubelet itself also reads the claim before the call (kubelet 1.36, cm/dra/manager.go:
prepareResources), and tries again if Prepare fails.

Crashes: if a claim's record has a response, the devices were set up completely, and the record also has the CDI spec.
So after a restart, the agent returns the same response and can write the files again. If neither hooks nor vendors'
plugins set up the devices, one transaction grants them and records the response; then the files are written. Otherwise
the devices are reserved before the hooks are called, and the response is recorded last, after the files are written.
The reservation is synced to disk if the source has the hook `prepare`, whose changes must be undone after a crash;
otherwise the reservation is in memory.

Three rules make sure that a late Prepare leaves no changes behind (nvidia k8s-dra-driver-gpu#1162). Calls for the same
claim run one after another. An Unprepare cancels the running Prepares of its claim. A Prepare is refused if its claim
is deleted, deallocated, or not reserved for a pod.

If a claim's devices have holders that are about to end, Prepare waits for their end (`dra_bridge.driver.waiting`).

A container that uses several requests of one driver gets the edits of all these requests. If several edits set the same
environment variable, the container has the last value, and no error is raised, because a driver does not know which
container uses which requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import logging
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from deviceplugin import cdi, hooks
from deviceplugin.device import counted
from deviceplugin.kubelet.claim_state import ClaimStateError
from deviceplugin.looks import LookTimeoutError
from deviceplugin.register import operations
from deviceplugin.register.records import Claim, ClaimDevice, LedgerError, Outlook
from deviceplugin.tasks import Tasks, ended
from dra_bridge.driver.claim_api import ClusterClaims
from dra_bridge.driver.claim_devices import ClaimDevices, RequestDevices
from dra_bridge.driver.claim_files import ClaimFiles
from dra_bridge.driver.claims import (
    Awaited,
    ClaimAllocation,
    ClaimError,
    ClaimRef,
    Prepared,
    Reason,
    check_ref,
    parse_allocation,
    prepared_of,
)
from dra_bridge.driver.statistics import CallStatistics
from dra_bridge.driver.waiting import WaitLimit, wait

_LOG: Final = logging.getLogger(__name__)
_MAX_MESSAGE: Final = 1000

PATIENCE: Final = 10.0
"""Seconds for which Unprepare is refused while processes of the claim's pods run.

Most processes end within this time. Some processes end only after Unprepare. For example, if a kubelet ended while
containerd started a container, a `runc init` process stays, which neither StopContainer nor StopPodSandbox ends. The
kubelet kills such a process, with all others in the pod's cgroup, when it deletes the pod. The kubelet deletes the pod
only after the pod's claims are unprepared (kubelet 1.36, cm/pod_container_manager_linux.go: tryKillingCgroupProcesses;
containerd 2.1, internal/cri).
"""


@dataclass(slots=True, eq=False)
class _Work:
    """A running call for one claim.

    task: the asyncio task of the call. waited: seconds for which the call has waited for holders of devices. overtaken:
    whether an Unprepare of the claim has cancelled the call.
    """

    ref: ClaimRef
    task: asyncio.Task[Any]
    waited: float = 0.0
    overtaken: bool = False


class ClaimPreparation:
    """Prepares and unprepares the claims of one driver.

    tasks: runs background tasks, which continue if the kubelet's call is cancelled. deadline: seconds for one claim.
    """

    def __init__(
        self, api: ClusterClaims, devices: ClaimDevices, files: ClaimFiles, tasks: Tasks, deadline: float
    ) -> None:
        self.api, self.devices, self.files, self.tasks, self.deadline = api, devices, files, tasks, deadline
        records, events, statistics, host = devices.records, devices.events, devices.statistics, devices.host
        self.records, self.events, self.statistics, self.host = records, events, statistics, host
        self.preparing: set[_Work] = set()
        """The running calls to prepare a claim."""
        self.begun: dict[str, float] = {}
        """For each claim UID, when this process first prepared the claim with its present allocation (monotonic
        seconds)."""
        self.refused: dict[str, float] = {}
        """For each claim UID, when Unprepare was first refused because processes ran (monotonic seconds)."""
        self.logged: dict[str, tuple[str, str]] = {}
        """For each claim UID, the last failed call and its error. If the next call fails with the same error, this
        failure is logged at DEBUG.
        """

    async def prepare(self, ref: ClaimRef, limit: WaitLimit) -> Prepared | ClaimError:
        """Prepare a claim, record the response in the ledger file, and return it.

        limit: the time limit for waits of this call.
        """
        register, answer = self.devices.register, None
        try:
            with self._working("prepare", self.statistics.prepare, ref) as work:
                self.preparing.add(work)
                try:
                    while answer is None:
                        seen = register.store.changes.count
                        try:
                            async with asyncio.timeout(self.deadline), self.records.locked(ref.uid):
                                answer = await self._prepared(ref)
                        except ClaimError as error:
                            if error.awaited is None or limit.is_over:
                                raise
                            await self._wait(work, error, error.awaited, limit, seen)
                finally:
                    self.preparing.discard(work)
                self.statistics.prepare.done += 1
        except ClaimError as error:
            return error
        self.events.refusals.pop(ref.uid, None)
        return answer

    async def _wait(self, work: _Work, refused: ClaimError, awaited: Awaited, limit: WaitLimit, seen: int) -> None:
        """Wait for the devices of a refused claim; log the first wait."""
        ref, began = work.ref, time.monotonic()
        if not work.waited:
            extra = {"driver": self.records.driver, "claim": ref.title}
            _LOG.info("claim %s waits for its devices: %s", ref.title, refused, extra=extra)
            if refused.reason is not Reason.REFUSED:  # For a refusal, `ClaimDevices` has already written an Event.
                self.events.refused(ref, refused.reason, str(refused))
        try:
            await wait(self.devices.register, awaited, limit, seen)
        finally:
            work.waited += time.monotonic() - began

    async def _prepared(self, ref: ClaimRef) -> Prepared:
        """Try once to prepare a claim, or return its recorded response. The caller has the claim's lock."""
        check_ref(ref)
        began = time.perf_counter()
        self.statistics.claim_reads += 1
        try:
            claim = await self.api.get_claim(ref.namespace, ref.name)
        finally:
            self.statistics.claim_read_seconds += time.perf_counter() - began
        allocation = parse_allocation(claim, ref, self.records.driver, self.records.pool)
        if not allocation.reserved:
            raise ClaimError(Reason.UNRESERVED, f"claim {ref.title} is not reserved for a pod")
        recorded = self.records.get(ref.uid)
        former = prepared_of(recorded) if recorded is not None else None
        if recorded and former and self._stands(former, allocation):
            await self.files.write(recorded, former)
            self.statistics.prepared_again += 1
            return former
        groups, devices, by_others = self.devices.requested(allocation, self.files.boot), list[ClaimDevice](), False
        for group in groups:
            devices += group.records
            by_others |= group.by_others
        names = ref.uid, ref.namespace, ref.name
        record = Claim(self.records.driver, *names, tuple(devices), None, time.time(), pods=allocation.pods)
        if recorded is not None:
            anew = recorded.held != record.held if former is None else former.named != allocation.named
            await self._leave(ref, recorded, former, anew=anew)
            recorded = self.records.get(ref.uid)
        if recorded is None:
            self.begun[ref.uid] = time.monotonic()
        set_up = self._set_up_by_others if by_others else self._set_up
        prepared = await set_up(ref, record, groups, allocation.pod_claim)
        self.host.claims_changed()
        if self.events.report:
            self.events.prepared(ref, prepared)
        _log("prepared", record)
        return prepared

    async def unprepare(self, ref: ClaimRef) -> ClaimError | None:
        """Unprepare a claim, even if the ledger has no record of the claim.

        While the claim's containers run, return an error: the kubelet tries again. Even if a pod was deleted by force
        and its containers hang, the kubelet's reconcile loop unprepares the pod's claims (kubelet 1.36,
        cm/dra/manager.go: reconcileLoop). If another pod shares a claim, the loop only removes the pod from the claim
        state.

        After `PATIENCE` seconds, the response states that the claim is unprepared, even if containers still run. But
        the claim's record stays in the ledger file, so that the claim holds its devices until no process of its pods
        runs (`ClaimReconciler`).
        """
        driver = self.records.driver
        for work in self.preparing:
            if work.ref.uid == ref.uid:
                work.overtaken = True
                work.task.cancel()
        try:
            with self._working("unprepare", self.statistics.unprepare, ref):
                async with asyncio.timeout(self.deadline), self.records.locked(ref.uid):
                    users, unlisted = await self.users(ref)
                    if not (users or unlisted):
                        await self.end(ref.uid)
                        return None
                    now = time.monotonic()
                    error = _still_running(ref, users, unlisted)
                    if now - self.refused.setdefault(ref.uid, now) < PATIENCE:
                        raise error
                    text = (
                        "%s; telling the kubelet that the claim is unprepared, because it may end processes only then"
                    )
                    _LOG.warning(text, error, extra={"driver": driver, "claim": ref.title})
                    await self.records.ledger.do(operations.reopen(driver, ref.uid))
                    await self.files.describe(ref.uid)
        except ClaimError as failure:
            return failure
        finally:
            self.events.refusals.pop(ref.uid, None)
        return None

    def prepares(self, uid: str) -> bool:
        """Return whether a claim is being prepared now."""
        return any(work.ref.uid == uid for work in self.preparing)

    @contextlib.contextmanager
    def _working(self, verb: str, statistics: CallStatistics, ref: ClaimRef) -> Iterator[_Work]:
        """Return a context manager that counts and logs the call for a claim that runs inside the context.

        On exit, the context manager raises a failure of the call as a ClaimError.
        """
        task: asyncio.Task[Any] | None = asyncio.current_task()
        assert task is not None
        began, work = time.perf_counter(), _Work(ref, task)
        self.statistics.in_flight += 1
        try:
            yield work
            self.logged.pop(ref.uid, None)
        except BaseException as error:
            failure = _as_claim_error(error, work, self.deadline)
            statistics.failures[failure.reason] += 1
            text, extra = "cannot %s claim %s (%s): %s", {"driver": self.records.driver, "claim": ref.title}
            level = logging.DEBUG if self.logged.get(ref.uid) == (verb, str(failure)) else logging.WARNING
            self.logged[ref.uid] = verb, str(failure)
            _LOG.log(level, text, verb, ref.title, ref.uid, failure, extra=extra)
            raise failure from error
        finally:
            self.statistics.in_flight -= 1
            statistics.durations.add(time.perf_counter() - began - work.waited)
            if work.waited:
                self.statistics.waits.add(work.waited)

    def _stands(self, former: Prepared, allocation: ClaimAllocation) -> bool:
        """Return whether a recorded response is from this boot and for the claim's present allocation."""
        return former.boot == self.files.boot and former.named == allocation.named

    async def _leave(self, ref: ClaimRef, record: Claim, former: Prepared | None, *, anew: bool) -> None:
        """Release a claim's former devices. former: the recorded response. anew: whether the claim's allocation is new.

        A claim is allocated again only when, according to the API server, no pod uses the claim any more. Pods that
        used the claim may still run on this node, if they were deleted by force or if this node was cut off from the
        API server. Prepare waits even for processes of the pod that it is called for: the kubelet prepares a claim
        before it makes the pod's sandbox (kubelet 1.36, kuberuntime_manager.go: SyncPod), so these processes belong to
        an earlier sandbox with the former devices.

        Raises ClaimError while processes may use the former devices.
        """
        if former is None or (anew and former.boot == self.files.boot):
            # The record has no response if Unprepare succeeded while processes ran, or if Prepare was interrupted.
            users, unlisted = await self.users(ref)
            if users or (anew and unlisted):
                former_devices = Awaited(record.held, lambda: self._still_used(ref, record))
                raise _still_running(ref, users, unlisted, former_devices)
            if anew and not record.pods:
                what = "it is not known which pods use its former devices; these are held until Unprepare"
                raise ClaimError(Reason.UNKNOWN, f"claim {ref.title} has a new allocation: {what}")
        if anew:
            await self.end(ref.uid)
        elif former is not None:
            # The claim was prepared before a reboot, so its devices have to be set up again.
            await self.records.ledger.do(operations.reopen(self.records.driver, ref.uid))

    async def _set_up(self, ref: ClaimRef, record: Claim, groups: Sequence[RequestDevices], pod_claim: str) -> Prepared:
        """Prepare a claim that needs no hook of a source and no vendor's plugin.

        Its devices are recorded together with the Prepare response, then its files are written.
        """
        made = tuple(zip(groups, map(RequestDevices.edits, groups), strict=True))
        prepared = await self.files.answer(ref, made, pod_claim)
        try:
            # The grant verifies that the device numbers in the CDI file are still those of the devices.
            await self.devices.grant(ref, _answered(record, prepared), operations.prepare)
            newest = self.records.get(ref.uid)  # The newest record also has the pods that were recorded meanwhile.
            await self.files.write(newest or record, prepared)
        except ClaimError:
            raise  # The ledger has recorded nothing, so there is nothing to undo.
        except BaseException:
            await ended(self.tasks.start(self._undo(ref, record)))  # The undo completes even if this task is cancelled.
            raise
        return prepared

    async def _set_up_by_others(
        self, ref: ClaimRef, record: Claim, groups: Sequence[RequestDevices], pod_claim: str
    ) -> Prepared:
        """Prepare a claim with hooks or vendors' plugins: reserve, set up, write the files, and record the response.

        If a step fails, all steps are undone.
        """
        traces = any("prepare" in group.served.source.hooks and not group.admin for group in groups)
        await self.devices.grant(ref, record, functools.partial(operations.reserve, durable=traces))
        try:
            made, record = await self.devices.set_up(record, groups)
            prepared = await self.files.answer(ref, made, pod_claim)
            await self.files.write(record, prepared)
            # `confirm` verifies that the device numbers in the CDI file are still those of the devices.
            await self.devices.confirm(ref, _answered(record, prepared))
        except BaseException:
            await ended(self.tasks.start(self._undo(ref, record)))  # The undo completes even if this task is cancelled.
            raise
        return prepared

    async def _undo(self, ref: ClaimRef, record: Claim) -> None:
        """Undo a failed Prepare. If a step of the undo fails, the claim's Unprepare repeats the undo."""
        try:
            await self._take_back(record)
        except (hooks.HookError, cdi.CdiError, LedgerError) as error:
            text = "cannot undo all of the failed Prepare of claim %s: %s"
            _LOG.warning(text, ref.title, error, extra={"driver": self.records.driver, "claim": ref.title})

    async def users(self, ref: ClaimRef) -> tuple[frozenset[str], frozenset[str]]:
        """Return two sets of UIDs: the claim's pods whose processes run, and running pods that may use the claim.

        Raises ClaimError if it is not known which pods use the claim.
        """
        if self.records.get(ref.uid) is None:
            return frozenset(), frozenset()
        try:
            running, unlisted = await self.host.running_pods()
        except (ClaimStateError, LedgerError, OSError) as error:
            what = f"it is not known which pods use it; its devices are held until that is known: {error}"
            raise ClaimError(Reason.UNKNOWN, f"claim {ref.title}: {what}") from error
        record = self.records.get(ref.uid)  # This record has the pods that `running_pods` has just recorded.
        if record is None:
            return frozenset(), frozenset()
        return record.pods & running, self.possible_users(ref.uid, unlisted)

    def _still_used(self, ref: ClaimRef, record: Claim) -> Outlook:
        """Return ENDING if a pod used the claim's former devices at the last reading of the running pods, else FREE."""
        running, unlisted = self.host.last_running_pods()
        used = not running.isdisjoint(record.pods) or self.possible_users(ref.uid, unlisted)
        return Outlook.ENDING if used else Outlook.FREE

    def possible_users(self, uid: str, unlisted: Mapping[str, float]) -> frozenset[str]:
        """Return those of the unlisted pods that may use a claim: pods first seen after the claim was prepared.

        unlisted: see `RunningPods`. The kubelet prepares a claim before it makes the sandbox of the claim's pod
        (kubelet 1.36, kuberuntime_manager.go: SyncPod).
        """
        begun, users = self.begun.get(uid, -math.inf), set[str]()
        for pod, since in unlisted.items():
            if since >= begun:
                users.add(pod)
        return frozenset(users)

    async def end(self, uid: str) -> None:
        """Undo the preparation of a claim.

        The caller has the claim's lock, and has checked that no container uses the claim.
        """
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
        """Undo the setup of a claim's devices, remove the claim's files, and finally delete its record."""
        self.devices.ending.add(claim.uid)
        try:
            await self.devices.unprepare(claim)
            await self.files.remove(claim.uid)
            # The claim's lock is kept until the record is deleted, so that no Prepare finds the record.
            drop = self.records.ledger.do(operations.unprepare(self.records.driver, claim.uid))
            await ended(asyncio.ensure_future(drop))
        finally:
            self.devices.ending.discard(claim.uid)


def _log(verb: str, claim: Claim) -> None:
    """Log at INFO that a claim was prepared or unprepared, and log at DEBUG each of the claim's devices."""
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
        return ClaimError(Reason.RUNNING, f"{what}; its devices are held until they end", awaited)
    what += ", which the kubelet does not list and which may use it"
    return ClaimError(Reason.UNKNOWN, f"{what}; its devices are held until they end", awaited)


def _answered(record: Claim, prepared: Prepared) -> Claim:
    return dataclasses.replace(record, result=msgspec.json.encode(prepared).decode())


def _as_claim_error(error: BaseException, work: _Work, deadline: float) -> ClaimError:
    """Convert an error of a call to a ClaimError with a text for users of at most `_MAX_MESSAGE` characters."""
    what = f"claim {work.ref.title}"
    match error:
        case ClaimError():
            reason, text = error.reason, str(error)
        case asyncio.CancelledError() if work.overtaken:
            reason, text = Reason.OVERTAKEN, f"{what}: cancelled by Unprepare of the same claim"
        case asyncio.CancelledError():
            reason, text = Reason.STOPPED, f"{what}: the driver is stopping"
        case LookTimeoutError():
            reason, text = Reason.TIMEOUT, f"{what}: {error}"
        case TimeoutError():
            reason, text = Reason.TIMEOUT, f"{what}: not done within {deadline:g} s"
        case hooks.HookError():
            reason, text = Reason.HOOK, str(error)
        case cdi.CdiError():
            reason, text = Reason.CDI, str(error)
        case LedgerError():
            reason, text = Reason.LEDGER, str(error)
        case _:  # Errors of the API client, for example, have texts for users.
            reason, text = Reason.API, f"{what}: {error or type(error).__name__}"
    return ClaimError(reason, text if len(text) <= _MAX_MESSAGE else f"{text[: _MAX_MESSAGE - 3]}...")
