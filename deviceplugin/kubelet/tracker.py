"""Asks the witnesses and remembers who holds what, for all resources of this process.

One scan reads the kubelet's checkpoint and the pods' cgroups. Only where a newer checkpoint might say that an
allocation has ended, the kubelet is asked for one: PodResources `List` makes it drop ended pods, and a list of
devices sent once more makes it write the checkpoint (kubelet 1.36, devicemanager/manager.go). That is asked for
several times in a row, because a file may be older than the one that it replaces (`holders.shows_present`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from deviceplugin import filewatch
from deviceplugin.files import FileIdentity
from deviceplugin.identity import boot_id
from deviceplugin.kubelet import checkpoint, holders
from deviceplugin.kubelet.cgroups import CgroupReader, PodProcesses, own_pod, read_directories
from deviceplugin.kubelet.checkpoint import Allocation, Checkpoint, CheckpointError
from deviceplugin.kubelet.granted import Granted, granted
from deviceplugin.kubelet.holders import HolderSnapshot, Witnesses
from deviceplugin.kubelet.podresources import (
    AllocationsInFlight,
    ClaimUse,
    Holder,
    PodResources,
    PodResourcesError,
    PodResourcesReport,
)

__all__ = ["POD_LOGS", "HolderTracker", "pod_names"]

_LOG: Final = logging.getLogger(__name__)

POD_LOGS: Final = Path("/var/log/pods")
"""Where the kubelet keeps a directory for each pod, named namespace_name_uid."""
CLOCK_STEP: Final = 1.0
"""Seconds by which a file's time may lag behind the clock."""
REWRITE: Final = 1.0
"""Seconds that the kubelet has to write its checkpoint after it was sent a list; some ms are usual."""
FIRST_REQUEST: Final = 0.5
MOST_REQUEST: Final = 10.0
"""Seconds between two requests for a checkpoint about the same allocations: from the first to the second value."""
LIST_TRIES: Final = 20
"""Tries of a `List` that the kubelet refuses because clients together ask more than 100 times a second."""


class HolderTracker:
    """The holders of this node's plugin allocations.

    Args:
        plugins: the device plugin directory.
        kubelet_root: the kubelet's root directory.
        cgroups: the mount of the cgroup file system.
        pod_resources: the kubelet's PodResources service.
        in_flight: counts this process's own Allocate calls.
        request: sends the list of devices once more; returns whether the kubelet listens to any.
        pod_logs: the kubelet's directory of pod logs, which tells pods' names.
        claim_uses: whether people want to know which containers use claims; `List` is asked at each scan then.
        believe_checkpoint: where no pod cgroups are visible, have the checkpoint alone say when an allocation ends,
            as a device plugin alone may: the kubelet itself gives its devices away on no other evidence.
        boot: what tells one boot of the node from another; None: the kernel's own.
        wake: called when a scan is due at once.

    Attributes:
        snapshot: the result of the last scan.
        scanned_at: when that was (monotonic seconds), None before.
        claim_uses: what containers use through claims, as of the last `List`.
        all_pods_listed: every pod whose processes run was in the last `List`: none of them can be a pod that was
            deleted by force, or one that a kubelet which has just started does not know yet.

    """

    def __init__(
        self,
        plugins: Path,
        kubelet_root: Path,
        cgroups: Path,
        pod_resources: PodResources,
        in_flight: AllocationsInFlight,
        request: Callable[[], bool],
        *,
        pod_logs: Path = POD_LOGS,
        claim_uses: bool = False,
        believe_checkpoint: bool = False,
        boot: str | None = None,
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        self.snapshot = HolderSnapshot(problem="the kubelet has not been asked yet")
        self.scanned_at: float | None = None
        self.claim_uses: frozenset[ClaimUse] = frozenset()
        self.all_pods_listed = False
        self._plugins = plugins
        self._kubelet_root = kubelet_root
        self._own_pod = own_pod(kubelet_root)
        self._cgroups = CgroupReader(cgroups, self._own_pod)
        self._pod_resources = pod_resources
        self._in_flight = in_flight
        self._request = request
        self._wants_claim_uses = claim_uses
        self._believe_checkpoint = believe_checkpoint
        self._boot: Final = boot_id() if boot is None else boot
        self._cgroups_seen = False
        self._pod_logs = pod_logs
        self._known: frozenset[Allocation] = frozenset()
        self._grants: dict[tuple[str, str], float] = {}
        """Grants of a former process whose holders are not known; see `remember_grants`."""
        self._begun: frozenset[str] = frozenset()
        """UIDs of holders whose admission is over: they were known at the start, or were seen to run."""
        self._last_read = Checkpoint(frozenset(), {})
        self._granted: dict[Allocation, tuple[str, Granted]] = {}
        """What the devices of allocations were, with the answer that says so."""
        self._allocated: tuple[tuple[object, ...], Mapping[tuple[str, str], Granted]] = ((), {})
        self._pod_names: dict[str, tuple[str, str]] = {}
        self._running: frozenset[str] = frozenset()
        self._asked_for: frozenset[tuple[Allocation, bool]] = frozenset()
        self._next_request = 0.0
        self._delay = FIRST_REQUEST
        self._list_error = ""
        self._wake = wake
        self._disputed = False
        """Whether the kubelet has counted as free what is held, since the last request: it has dropped the holder."""

    async def start(self) -> None:
        """Take what the checkpoint names now as held; before anything is served."""
        seen = await asyncio.to_thread(self._read)
        self._known |= frozenset(await asyncio.to_thread(lambda: list(self._possible_holders(seen))))
        self.snapshot = holders.holders(self._known, seen, time.monotonic())
        self._known = frozenset(self.snapshot.held)
        self._begun = frozenset(one.pod_uid for one in self._known)
        await self._name_pods()
        for problem in await asyncio.to_thread(lambda: list(self.missing())):
            _LOG.warning("%s", problem)

    def remember(self, allocations: Iterable[Allocation]) -> None:
        """Count these as held until the witnesses say otherwise; a ledger knows them from before a restart."""
        remembered = frozenset(allocations)
        self._known |= remembered
        self._begun |= {one.pod_uid for one in remembered}

    def remember_grants(self, grants: Mapping[tuple[str, str], float]) -> None:
        """Take in grants whose holder a ledger does not know from before a restart; before `start`.

        grants: when they were made (Unix seconds), by (resource, device id).
        """
        self._grants |= grants

    def _possible_holders(self, seen: Witnesses) -> Iterator[Allocation]:
        """Yield allocations, of no container, of pods that may be the unknown holders of grants.

        The kubelet lists the resources that it knows in its checkpoint. If it does not list a grant's resource before
        this process has registered, it has lost its checkpoint since, and does not name the holder. A pod whose log
        directory is older than the grant is not its holder.
        """
        registered = {resource for one in seen.checkpoints for resource in one.registered}
        grants = {key: since for key, since in self._grants.items() if key[0] not in registered}
        if not grants:
            return
        pods = seen.pods.directories or () if seen.pods.running is None else seen.pods.running
        changed = log_directory_times(self._pod_logs)
        for (resource, device_id), since in grants.items():
            for pod_uid in sorted(set(pods) - {self._own_pod}):
                if changed.get(pod_uid, since) >= since - CLOCK_STEP:
                    _LOG.warning(
                        "%s: device %s counts as held while processes of pod %s run: it was granted shortly before the "
                        "agent ended, and the kubelet has lost the checkpoint that named its holder",
                        resource,
                        device_id,
                        pod_uid,
                    )
                    yield Allocation(pod_uid, "", resource, device_id)

    async def still_held(self, resource: str, device_ids: Collection[str]) -> Mapping[str, str]:
        """Return those ids that another pod still holds, and why; asked before a new Allocate.

        The kubelet gives an id away again only when it counts its holder as ended. It may be wrong: of a pod that was
        deleted by force, of one that it does not know after a lost checkpoint, and of one that it has just admitted,
        if somebody called PodResources List during that pod's Allocate (kubernetes#137534). It still names the latter
        in the checkpoint that it is asked for now; of a holder that it counts as ended it has dropped the allocations
        before this Allocate. Pods that have no cgroup yet are the new holder itself: its init container had the device
        before.
        """
        wanted = frozenset(device_ids)
        if not self._may_know(resource, wanted):
            return {}
        known, running, admitted = await asyncio.to_thread(self._holders_now, resource, wanted)
        found: dict[str, str] = {}
        if admitted and not running:
            written, problem = await self._written()
            named = {
                (one.pod_uid, one.device_id) for file in written for one in _of(file.allocations, resource, wanted)
            }
            why = problem or "is named in the kubelet's checkpoint"
            known, running, admitted = await asyncio.to_thread(self._holders_now, resource, wanted)
            for one in known:  # several of one id: a pod that has ended may have a cgroup for some time
                if one.pod_uid in admitted and (problem or (one.pod_uid, one.device_id) in named):
                    found[one.device_id] = f"pod {self.title(one.pod_uid)} has not started a process yet and {why}"
        self.remember(one for one in known if one.pod_uid in running.values() or one.device_id in found)
        if running:
            self._disputed = True
            self._wake()
        return found | {name: f"processes of pod {self.title(uid)} run" for name, uid in running.items()}

    def _holders_now(
        self, resource: str, device_ids: frozenset[str]
    ) -> tuple[Sequence[Allocation], Mapping[str, str], frozenset[str]]:
        """Return the known or named allocations of these ids, and by id pods whose processes run.

        And the UIDs of holders that have a cgroup without a process.
        """
        known = self._known_or_named(resource, device_ids)
        if not known:
            return known, {}, frozenset()
        cgroups = self._cgroups.pods()
        pods = self._processes(cgroups)
        uids = {one.pod_uid for one in known}
        may_run = {uid for uid in uids if pods.may_run(uid)}
        admitted = frozenset(uids & (cgroups or {}).keys() - may_run)
        return known, holders.running(known, resource, device_ids, may_run), admitted

    async def ended(
        self, resource: str, device_ids: Collection[str]
    ) -> tuple[frozenset[Allocation], frozenset[Allocation]]:
        """Return the known allocations of these ids whose pods have ended, and the others; asked before a new Allocate.

        The others are those of pods that run, and of pods that were admitted and have not been seen to run: the new
        holder's init container may have had the device before.
        """
        wanted = frozenset(device_ids)
        if not self._may_know(resource, wanted):
            return frozenset(), frozenset()
        return await asyncio.to_thread(self._ended, resource, wanted)

    def _ended(self, resource: str, device_ids: frozenset[str]) -> tuple[frozenset[Allocation], frozenset[Allocation]]:
        known = frozenset(self._known_or_named(resource, device_ids))
        uids = {one.pod_uid for one in known}
        # The kubelet and the runtime make a pod's directories after its admission.
        begun = self._begun | self._pod_names.keys() | pod_names(uids, self._pod_logs).keys()
        ended = holders.ended(known, self.pods(), begun | (read_directories(self._kubelet_root) or frozenset()))
        return ended, known - ended

    def _may_know(self, resource: str, device_ids: frozenset[str]) -> bool:
        """Whether there may be known or named allocations of these ids; else the checkpoint need not be read."""
        read = self._last_read
        named = read.allocations if read.file == checkpoint.identity(self._plugins) else None
        return named is None or bool(_of(self._known | named, resource, device_ids))

    def _known_or_named(self, resource: str, device_ids: frozenset[str]) -> list[Allocation]:
        # The checkpoint still names a holder that the kubelet has just dropped: it is written after Allocate.
        try:
            named = self._take(checkpoint.read(self._plugins)).allocations
        except CheckpointError:
            named = frozenset()
        return _of(self._known | named, resource, device_ids)

    def _take(self, *read: Checkpoint) -> Checkpoint:
        """Remember the last of these checkpoints, and what devices they say were granted. May block for device nodes.

        Returns:
            The last one.

        """
        kept = self._known.union(self.snapshot.held, *(one.allocations for one in read))
        grants = {one: grant for one, grant in self._granted.items() if one in kept}
        for allocation, response in (item for one in read for item in one.responses.items()):
            if allocation not in grants or grants[allocation][0] != response:
                grants[allocation] = response, granted(response, *allocation[2:], self._boot)
        self._last_read, self._granted = read[-1], grants
        return read[-1]

    async def reread(self) -> None:
        """Read the checkpoint if it has changed: it names what was allocated since the last scan."""
        if checkpoint.identity(self._plugins) != self._last_read.file:
            with contextlib.suppress(CheckpointError):
                await asyncio.to_thread(lambda: self._take(checkpoint.read(self._plugins)))

    def pods(self) -> PodProcesses:
        """Return which pods' processes run, as of now. Blocks."""
        return self._processes(self._cgroups.pods())

    def _processes(self, cgroups: Mapping[str, bool] | None) -> PodProcesses:
        if cgroups is not None:
            self._cgroups_seen = True
            return PodProcesses(frozenset(uid for uid, populated in cgroups.items() if populated))
        if self._cgroups_seen:
            return PodProcesses()  # they are there, and cannot be read now
        if self._believe_checkpoint:
            return PodProcesses(frozenset())
        return PodProcesses(None, read_directories(self._kubelet_root))

    def running_pods(self) -> frozenset[str]:
        """Return the UIDs of pods in whose cgroup a process is seen to run; none if no cgroups are visible. Blocks.

        Raises:
            OSError: cgroups were visible before, and cannot be read now.

        """
        running = self._cgroups.running()
        if running is None and self._cgroups_seen:
            raise OSError(f"pod cgroups in {self._cgroups.root} cannot be read now")
        self._cgroups_seen = running is not None
        return running or frozenset()

    async def listed(self, running: Collection[str]) -> frozenset[str]:
        """Return those of the running pods that the kubelet counts as active now: `List` names them.

        running: UIDs of all pods whose processes run.
        """
        await self._in_flight.wait()
        report = await self._list()
        return frozenset() if report is None else await asyncio.to_thread(self._listed, report, running)

    def missing(self) -> Iterator[str]:
        """Yield what cannot be seen of this node, and what that means; for the log at the start. Blocks."""
        if self._cgroups.running() is None:
            what = f"no pod cgroups (kubepods) of this kubelet are visible in {self._cgroups.root}"
            if self._believe_checkpoint:
                yield f"{what}: a device comes free when the kubelet says so, also of a pod whose containers hang"
            elif read_directories(self._kubelet_root) is not None:
                yield f"{what}: a device comes free only when its pod is deleted, not when it has completed"
            else:
                yield (
                    f"{what}, nor pod directories in {self._kubelet_root / 'pods'}: "
                    "no device that a pod holds ever comes free; mount either, read-only"
                )
        if not os.path.isdir(self._pod_logs):
            yield (
                f"pod log directories are not visible in {self._pod_logs}: pods are shown by their UIDs, "
                "and no claim is unprepared while a pod's processes run; mount them, read-only"
            )

    def title(self, pod_uid: str) -> str:
        """Return namespace and name of a pod as far as they are known, else its UID."""
        name = self._pod_names.get(pod_uid)
        return "/".join(name) if name else pod_uid

    def holders(self, resource: str) -> Mapping[str, frozenset[Holder]]:
        """Return who holds which of a resource's ids, with names as far as they are known."""
        found: dict[str, frozenset[Holder]] = {}
        for device_id, allocations in self.snapshot.of(resource).items():
            found[device_id] = frozenset(
                Holder(*self._pod_names.get(one.pod_uid, ("", "")), one.container, one.pod_uid) for one in allocations
            )
        return found

    def allocated(self) -> Mapping[tuple[str, str], Granted]:
        """Return what is known of all that counts as held, by (resource, device id); the same object until it changes.

        What the last checkpoint names and the last scan does not was allocated since.
        """
        of = self.snapshot, self._last_read, self._granted
        if [id(one) for one in self._allocated[0]] != [id(one) for one in of]:
            found: dict[tuple[str, str], Granted] = {}
            for one in self.snapshot.held.keys() | self._last_read.allocations:
                key, grant = (one.resource, one.device_id), self._granted.get(one, ("", Granted()))[1]
                before = found.get(key, Granted(shared=True))
                found[key] = Granted(before.tokens | grant.tokens, before.shared and grant.shared)
            self._allocated = of, self._allocated[1] if found == self._allocated[1] else found
        return self._allocated[1]

    def double_held(self) -> dict[tuple[str, str], tuple[str, ...]]:
        """Return the ids that several pods are known to hold at once (kubernetes#137534), and these pods."""
        pods: dict[tuple[str, str], dict[str, None]] = {}
        for one, holding in self.snapshot.held.items():
            if holding.certain and one.container:  # without a container the pod only may be the holder
                pods.setdefault((one.resource, one.device_id), {})[self.title(one.pod_uid)] = None
        return {key: tuple(those) for key, those in pods.items() if len(those) > 1}

    def unnamed(self, resource: str) -> frozenset[str]:
        """Return the ids that are held though the kubelet may give them away."""
        return self.snapshot.unnamed(resource)

    def unnamed_reasons(self, resource: str) -> Mapping[str, str]:
        """Return the ids that are held though the kubelet may give them away, and why they count as held."""
        unnamed = self.snapshot.unnamed(resource)
        return {
            one.device_id: f"{holding.reason} (pod {self.title(one.pod_uid)})"
            for one, holding in self.snapshot.held.items()
            if one.resource == resource and one.device_id in unnamed and holding.certain
        }

    async def scan(self, wanted: Collection[tuple[str, str]] | None = None) -> HolderSnapshot | None:
        """Ask the witnesses now.

        Args:
            wanted: (resource, device id) of which is asked whether they are free; the kubelet is asked for a
                checkpoint unless each has a holder whose processes run. It is asked too if processes of a holder
                have ended, and from time to time (`MOST_REQUEST`) if those of a holder have not been seen.

        Returns:
            Who holds what; None if an own Allocate came in between, and it is worth nothing.

        """
        await self._in_flight.wait()
        at = time.monotonic()
        report: PodResourcesReport | None = None
        if self._wants_claim_uses:
            report = await self._list()
        seen = await asyncio.to_thread(self._read)
        now = holders.holders(self._known, seen, at)
        if self._worth_a_request(now, seen.pods, wanted, at):
            if report is None:
                report = await self._list()
            now = await self._after_request(at)
        if not self._in_flight.quiet_since(at):
            return None
        if report is not None:
            self.claim_uses = report.claims
            self.all_pods_listed = await asyncio.to_thread(self._all_listed, report)
        self._known = frozenset(now.held)
        running = self._begun | (seen.pods.running or frozenset())
        self._begun = frozenset(one.pod_uid for one in self._known if one.pod_uid in running)
        await self._name_pods()
        self.snapshot, self.scanned_at = now, at
        return now

    def _worth_a_request(
        self, now: HolderSnapshot, pods: PodProcesses, wanted: Collection[tuple[str, str]] | None, at: float
    ) -> bool:
        doubtful = holders.needs_request(now.held, pods)
        ended = any(one.pod_uid in self._running for one in doubtful)
        self._running = frozenset(one.pod_uid for one in now.held.keys() - doubtful)
        held = {(one.resource, one.device_id) for one in now.held.keys() - doubtful}
        if ended or self._disputed or (wanted is not None and not held.issuperset(wanted)):
            self._disputed = False
            return True
        asking = frozenset((one, now.held[one].named) for one in doubtful)
        if asking != self._asked_for:
            # What the kubelet does not name any more has most likely ended; it is asked at once.
            dropped = any(not named for _, named in asking - self._asked_for)
            self._asked_for, self._delay = asking, FIRST_REQUEST
            self._next_request = at if dropped else at + FIRST_REQUEST
        if not doubtful or at < self._next_request:
            return False
        self._next_request = at + self._delay * random.uniform(0.8, 1.2)  # noqa: S311  # jitter
        self._delay = min(2 * self._delay, MOST_REQUEST)
        return True

    async def _after_request(self, at: float) -> HolderSnapshot:
        """Have the kubelet write its checkpoint until the files show what is allocated now; ask the witnesses again."""
        written, problem = await self._written()
        seen = await asyncio.to_thread(self._read, () if problem else written)
        if problem:
            problem = problem if seen.checkpoints else f"{seen.problem}; {problem}"
            seen = Witnesses(seen.checkpoints, False, seen.pods, problem)
        return holders.holders(self._known, seen, at)

    async def _written(self) -> tuple[Sequence[Checkpoint], str]:
        """Return checkpoints that the kubelet wrote at our request, which show what is allocated now.

        And why that was not possible, "" if it was.
        """
        written: list[Checkpoint] = []
        last, problem = checkpoint.identity(self._plugins), ""
        while not (problem or holders.shows_present(written)):
            if not self._request():
                problem = "the kubelet does not listen to this plugin, so it cannot be asked to write its checkpoint"
            elif (read := await self._rewritten(last)) is None:
                problem = "the kubelet has not written its checkpoint since it was asked to"
            else:
                written.append(read)
                last = read.file
        return written, problem

    def _read(self, written: Sequence[Checkpoint] = ()) -> Witnesses:
        """Read the checkpoint, unless those are given that were written at our request; then the cgroups."""
        if written:
            self._take(*written)
            return Witnesses(written, True, self.pods())
        try:
            read = [self._take(checkpoint.read(self._plugins))]
            problem = "the kubelet has not been asked for a newer checkpoint"
        except CheckpointError as error:
            read, problem = [], str(error)
        return Witnesses(read, False, self.pods(), problem)

    async def _rewritten(self, before: FileIdentity) -> Checkpoint | None:
        """Wait until the checkpoint is another file than before; None if it is not in time."""
        with filewatch.shared().watch([str(self._plugins)]) as watch:
            until = time.monotonic() + REWRITE
            while (rest := until - time.monotonic()) > 0:
                try:
                    read = await asyncio.to_thread(checkpoint.read, self._plugins)
                except CheckpointError:
                    read = None
                if read is not None and read.file != before:
                    return read
                await watch.wait(rest)
        return None

    async def _list(self) -> PodResourcesReport | None:
        """Call `List`, which has the kubelet drop ended pods; nothing safe depends on its answer."""
        for _ in range(LIST_TRIES):
            try:
                report = await self._pod_resources.list()
            except PodResourcesError as error:
                if error.exhausted:
                    await asyncio.sleep(random.uniform(0.02, 0.1))  # noqa: S311  # jitter
                    continue
                if self._list_error != str(error):
                    self._list_error = str(error)
                    _LOG.info("PodResources List failed; devices of ended pods come free later than usual: %s", error)
                return None
            self._list_error = ""
            return report
        return None

    async def _name_pods(self) -> None:
        """Learn the names of the pods that hold something."""
        uids = {one.pod_uid for one in self._known}
        if uids - self._pod_names.keys():
            self._pod_names |= await asyncio.to_thread(pod_names, uids, self._pod_logs)
        self._pod_names = {uid: name for uid, name in self._pod_names.items() if uid in uids}

    def _all_listed(self, report: PodResourcesReport) -> bool:
        running = self._cgroups.running()
        return running is not None and self._listed(report, running) == running

    def _listed(self, report: PodResourcesReport, running: Collection[str]) -> frozenset[str]:
        names = pod_names(running, self._pod_logs)
        # Of two pods of one name that run, one was deleted by force: a list that has the name does not tell which.
        counts = Counter(names.values())
        return frozenset(uid for uid, name in names.items() if name in report.pods and counts[name] == 1)


def pod_names(uids: Iterable[str], directory: Path) -> dict[str, tuple[str, str]]:
    """Return namespace and name of pods by UID, as far as the kubelet's log directories show them."""
    wanted = set(uids)
    found: dict[str, tuple[str, str]] = {}
    try:
        names = os.listdir(directory)
    except OSError:
        return found
    for name in names:
        parts = name.split("_")  # neither a namespace nor a pod's name has an underscore
        if len(parts) == 3 and parts[2] in wanted:
            found[parts[2]] = (parts[0], parts[1])
    return found


def log_directory_times(directory: Path) -> dict[str, float]:
    """Return when pods' log directories last changed (Unix seconds), by UID."""
    found: dict[str, float] = {}
    with contextlib.suppress(OSError), os.scandir(directory) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):
                found[entry.name.rpartition("_")[2]] = entry.stat().st_mtime
    return found


def _of(allocations: Iterable[Allocation], resource: str, device_ids: Collection[str]) -> list[Allocation]:
    return [one for one in allocations if one.resource == resource and one.device_id in device_ids]
