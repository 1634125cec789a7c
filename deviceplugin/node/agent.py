"""The node agent: one process, one loop, many resources; start, reload, and end of all of it.

Everything else is a room of its own; here they are put together. Data flows one way: source to
inventory to endpoint, and from the kubelet's books back to the source's `released` hook.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol, cast

import grpc

from deviceplugin import hooks, identity
from deviceplugin.device import Device
from deviceplugin.exclusion import Key
from deviceplugin.identity import Tokens
from deviceplugin.inventory import Inventory, Snapshot
from deviceplugin.kubelet.allocation_gate import Doorkeeper, Refusal
from deviceplugin.kubelet.checkpoint import Allocation
from deviceplugin.kubelet.exclusion_guard import ConflictError, ExclusionGuard
from deviceplugin.kubelet.holders import HolderSnapshot
from deviceplugin.kubelet.in_flight import IdsInUse
from deviceplugin.kubelet.podresources import ClaimUse, Holder, PodResources, Quiet
from deviceplugin.kubelet.registration import Backoff, Registration, RegistrationError, Timing
from deviceplugin.kubelet.registration import Statistics as RegistrationStatistics
from deviceplugin.kubelet.servicer import Endpoint
from deviceplugin.kubelet.servicer import Statistics as EndpointStatistics
from deviceplugin.kubelet.tracker import HolderTracker
from deviceplugin.source import DeviceSource

if TYPE_CHECKING:
    from deviceplugin.metrics.report import Provider

__all__ = ["Agent", "AgentError", "Paths", "ResourceStatus", "Status"]

_LOG: Final = logging.getLogger(__name__)


class AgentError(Exception):
    """Raised when the agent cannot do its work at all."""


@dataclass(frozen=True, slots=True)
class Paths:
    """Where the kubelet keeps its sockets.

    The device plugin directory is fixed at /var/lib/kubelet/device-plugins whatever the kubelet's
    --root-dir says, while the PodResources socket follows it (kubernetes#68567; k3s, k0s and
    microk8s differ): each can be given. cgroup_root: where the host's cgroup file system is mounted.
    pod_log_dir: the kubelet's podLogsDir, where pods have directories named namespace_name_uid.
    """

    kubelet_root: Path = Path("/var/lib/kubelet")
    device_plugin_dir: Path | None = None
    pod_resources_socket: Path | None = None
    cgroup_root: Path | None = None
    pod_log_dir: Path | None = None

    @property
    def plugins(self) -> Path:
        """The device plugin directory."""
        return self.device_plugin_dir or self.kubelet_root / "device-plugins"

    @property
    def pod_resources(self) -> Path:
        """The PodResources service's socket."""
        return self.pod_resources_socket or self.kubelet_root / "pod-resources" / "kubelet.sock"

    @property
    def pod_logs(self) -> Path:
        """The kubelet's directory of pod logs."""
        return self.pod_log_dir or Path("/var/log/pods")

    @property
    def cgroups(self) -> Path:
        """The mount of the host's cgroup file system."""
        return self.cgroup_root or Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class ResourceStatus:
    """One resource as of now. holders: by the kubelet's device ids, as of the last scan.

    withheld: devices that are given to nobody because they are held, or may be, by something that the kubelet does not
    count as a holder; and why.
    """

    resource: str
    snapshot: Snapshot
    replicas: int
    registered: bool
    live: bool
    holders: Mapping[str, frozenset[Holder]]
    endpoint: EndpointStatistics
    registration: RegistrationStatistics
    source_error: str
    withheld: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Status:
    """The agent as of now.

    claims: what containers use through claims. looked_at: when the kubelet was last asked who
    holds what, on the monotonic clock; None before the first time.
    """

    resources: tuple[ResourceStatus, ...]
    double_allocations: int
    claims: frozenset[ClaimUse] = frozenset()
    looked_at: float | None = None


async def listings(source: DeviceSource) -> AsyncIterator[Sequence[Device]]:
    """Iterate over a source's lists, whichever kind of generator its `watch` is.

    Raises:
        TypeError: `watch` is neither kind of generator.

    """
    lists: Any = source.watch()
    if hasattr(lists, "__anext__"):
        async with contextlib.aclosing(lists) as generator:
            async for devices in generator:
                yield devices
    elif hasattr(lists, "__next__"):
        async for devices in _threaded(lists, source.resource):
            yield devices
    else:
        raise TypeError(f"{type(source).__name__}.watch must yield lists of devices (a generator, async or not)")


async def _threaded(lists: Iterator[Sequence[Device]], name: str) -> AsyncIterator[Sequence[Device]]:
    """Drive a plain generator in a daemon thread of its own, which may block for ever."""
    loop = asyncio.get_running_loop()
    queue: asyncio.Queue[Sequence[Device] | BaseException | None] = asyncio.Queue()
    over = threading.Event()

    def drive() -> None:
        end: BaseException | None = None
        try:
            for devices in lists:
                if over.is_set():
                    return
                loop.call_soon_threadsafe(queue.put_nowait, devices)
        except Exception as error:  # an author's code: passed on to who waits
            end = error
        except BaseException as error:  # SystemExit and the like: a thread is no place for them
            end = RuntimeError(f"{type(error).__name__}: {error}")
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(queue.put_nowait, end)

    threading.Thread(target=drive, name=f"watch {name}", daemon=True).start()
    try:
        while (devices := await queue.get()) is not None:
            if isinstance(devices, BaseException):
                raise devices
            yield devices
    finally:
        over.set()


SOON: Final = 0.3
"""Seconds from a grant to the scan that finds out which pod it was for."""
TAKE_OVER: Final = 3.0
"""Seconds that a new source has to list its devices while the old one's hooks still answer."""


class Service:
    """One resource: its source followed, its endpoint registered, its releases told."""

    def __init__(
        self,
        source: DeviceSource,
        paths: Paths,
        quiet: Quiet,
        turn: asyncio.Lock,
        tracker: HolderTracker,
        guard: ExclusionGuard,
        **options: Any,
    ) -> None:
        self.source = source
        self.inventory = Inventory(source.resource)
        self._doorkeeper: Doorkeeper | None = options.get("doorkeeper")
        self._tracker = tracker
        self._guard = guard
        self.endpoint = Endpoint(
            source,
            self.inventory,
            quiet,
            granted=self._granted,
            release_former=self._release_former,
            doorkeeper=self._doorkeeper,
            holders=tracker,
            guard=guard,
        )
        self.registration = Registration(self.endpoint, paths.plugins, turn, options.get("timing"))
        self.source_error = ""
        self._in_use = IdsInUse()
        self._released: frozenset[Allocation] = frozenset()
        """Allocations that have ended, and whose devices were released before a grant; they are not forgotten yet."""
        self._first_release_due = True
        self._release_later: frozenset[str] = frozenset()
        """Devices that came free while somebody holds them under another id."""
        self._inherited: frozenset[str] = frozenset()
        self._gone_before: frozenset[str] = frozenset()
        self._former_before: frozenset[str] = frozenset()
        self._taken = asyncio.Event()
        self._wake_scan = cast("Callable[[], None]", options.get("wake_scan") or (lambda: None))
        self._follower: asyncio.Task[None] | None = None

    @property
    def resource(self) -> str:
        """The resource's name."""
        return self.source.resource

    async def run(self) -> None:
        """Serve until cancelled.

        Raises:
            RegistrationError: it cannot be served on this node at all.

        """
        self.inventory.subscribe(lambda snapshot: self._wake_scan() if snapshot.gone else None)
        self.inventory.subscribe(lambda snapshot: self._guard.notify())
        self._inherited = frozenset(self._tracker.snapshot.of(self.resource))
        self._follower = asyncio.create_task(self._follow(self.source), name=f"follow {self.resource}")
        try:
            await self.registration.run()
        finally:
            self._follower.cancel()
            await asyncio.wait((self._follower,), timeout=1.0)

    def replace(self, source: DeviceSource) -> None:
        """Take another source for the same resource; what is served and registered goes on.

        The old source's hooks answer until the new one has listed its devices: it cannot speak of them
        before. The inventory stays, so that devices the new source does not know become unhealthy
        instead of vanishing from under their holders.
        """
        if self._follower is None:
            self._take(source)
            return
        self._taken.clear()
        self._follower.cancel()
        self._follower = asyncio.create_task(self._follow(source), name=f"follow {self.resource}")

    async def replaced(self, source: DeviceSource) -> None:
        """Wait until this source, given to `replace`, has taken over; one that does not list in time takes over."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(TAKE_OVER):
                await self._taken.wait()
        if source is not self.source:
            self._take(source)

    def _take(self, source: DeviceSource) -> None:
        """Ask this source's hooks from now on."""
        self._taken.set()
        before, self.source = self.source, source
        self.endpoint.replace(source)
        if source.hooks != before.hooks:
            self.registration.wake()
        self._wake_scan()

    async def _follow(self, source: DeviceSource) -> None:
        """Take a source's lists for as long as it lives, and begin again when it fails."""
        backoff = Backoff(first=0.5, most=60.0)
        while True:
            try:
                async for devices in listings(source):
                    if source is not self.source:
                        self._take(source)
                    await identity.publish(self.inventory, devices)
                    self._inherit()
                    self.source_error = ""
                    backoff.reset()
            except Exception as error:
                self.source_error = f"{type(error).__name__}: {error}"
                delay = backoff.next()
                _LOG.exception(
                    "%s: the source failed; its last list of %d devices stays, trying again in %.1f s",
                    self.resource,
                    len(self.inventory.snapshot.devices),
                    delay,
                )
                await asyncio.sleep(delay)
            else:
                if source is not self.source:
                    self._take(source)
                if not self.inventory.snapshot.listed:
                    self.inventory.publish(())
                return

    def _inherit(self) -> None:
        """Take over the ids that pods have from before; sharing may have changed while no agent ran."""
        if self._inherited:
            before, self._inherited = self._inherited, self.endpoint.adopt_existing(self._inherited)
            if before != self._inherited:
                self._wake_scan()

    # Who holds what.

    def release_idle(self) -> None:
        """Have `released` called of all idle devices, as after the start: only now all holders are known."""
        self._first_release_due = True
        self._wake_scan()

    def _granted(self, names: Sequence[str]) -> None:
        self._in_use = self._in_use.granted(names)
        self._wake_scan()

    def remember(self, pending: Collection[str], held: Collection[Allocation]) -> None:
        """Count ids as pending that a former process granted.

        held: their holders from before the grant; these are not whom it was for.
        """
        self._in_use = replace(self._in_use, held=self._in_use.held | set(held)).granted(pending)

    @property
    def in_use(self) -> bool:
        """Whether anything of this resource is held or given out."""
        return bool(self._in_use.ids)

    @property
    def held_devices(self) -> frozenset[str]:
        """The devices that pods hold or were just given."""
        ids = self._in_use.ids | self._tracker.snapshot.of(self.resource).keys()
        return frozenset(map(self.endpoint.ids.device_id_of, ids))

    def device_of(self, device_id: str) -> str:
        """Return the device of one of the kubelet's ids."""
        return self.endpoint.ids.device_id_of(device_id)

    @property
    def awaited(self) -> frozenset[str]:
        """The kubelet's ids about which something is to be done once nobody holds them.

        Those of gone devices and of former sharing are forgotten; after the start, all idle ones are released; grants
        whose container is not named are over after a while.
        """
        snapshot = self.inventory.snapshot
        first = self._first_release_due and "released" in self.source.hooks
        devices = snapshot.devices if first else snapshot.gone
        ids = (name for one in devices for name in self.endpoint.ids.names_of(snapshot.devices[one]))
        return frozenset(self.endpoint.ids.legacy) | frozenset(ids) | self._in_use.pending.keys()

    def take_holders(self, now: HolderSnapshot) -> None:
        """Take in who holds what; first of all services, since a device may be held under another resource's id."""
        held = [one for one in now.held if one.resource == self.resource]
        self._in_use = self._in_use.observed(held, now.at, awake=now.awake)
        self._released &= now.held.keys()

    def observe(self, now: HolderSnapshot) -> None:
        """Draw the conclusions of a scan: what came free, and what may be forgotten."""
        behind = self.endpoint.ids.device_id_of
        in_use = self._in_use.ids
        self._inherited &= in_use
        snapshot = self.inventory.snapshot
        busy = set(map(behind, in_use))
        if (gate := self._doorkeeper) is not None:
            busy |= {device for device in snapshot.devices if gate.claimed(self.resource, device)}
        freed = set(map(behind, self._in_use.freed)) - busy
        if self._first_release_due and snapshot.listed and self._tracker.all_pods_listed:
            # What was given back while no agent ran is not known one by one.
            self._first_release_due = False
            freed = snapshot.devices.keys() - busy
        freed |= self._release_later - busy
        used = self._guard.in_use((self.resource, name) for name in freed) if freed else frozenset()
        self._release_later = frozenset(name for _, name in used)
        devices = [
            device for name, device in snapshot.devices.items() if name in freed and (self.resource, name) not in used
        ]
        if devices and "released" in self.source.hooks:
            self._release(devices)
        if now.awake and now.registered is not None and self.endpoint.live:
            # Gone at the scan before, too: a grant between would be known by now.
            registered = now.registered.get(self.resource, frozenset())
            former = self.endpoint.ids.legacy.keys() & self._former_before
            self.endpoint.forget(former - in_use - registered)
            self.inventory.forget((snapshot.gone & self._gone_before) - busy - set(map(behind, registered)))
        self._gone_before, self._former_before = snapshot.gone, frozenset(self.endpoint.ids.legacy)
        self.endpoint.refresh()

    def _release(self, devices: Sequence[Device]) -> asyncio.Task[str]:
        source = self.source
        work = hooks.call(f"released of {self.resource}", source.released, devices, timeout=source.hook_timeout)
        return self._guard.release([(self.resource, device.id) for device in devices], work)

    async def _release_former(self, names: Sequence[str]) -> None:
        """Have `released` called of devices whose holders have ended, before these ids are granted.

        The kubelet may give an id to the next pod before a scan sees that its holder has ended.

        Raises:
            Refusal: `released` failed, or still works on one of the devices.

        """
        if "released" not in self.source.hooks:
            return
        known = self.inventory.snapshot.devices
        ids = {
            device: self.endpoint.ids.ids_of(device)
            for device in map(self.endpoint.ids.device_id_of, names)
            if device in known
        }
        keys = {(self.resource, device) for device in ids}
        try:
            await self._guard.wait_released(keys)
            ended, others = await self._tracker.ended(self.resource, [name for those in ids.values() for name in those])
            in_use = {one.device_id for one in others} | (self._in_use.pending.keys() - set(names))
            former = {one.device_id for one in ended - self._released}
            gate = self._doorkeeper
            idle = keys - self._guard.in_use(keys) if former else keys
            devices = [
                known[device]
                for device, those in ids.items()
                if not former.isdisjoint(those)
                and in_use.isdisjoint(those)
                and (self.resource, device) in idle
                and not (gate is not None and gate.claimed(self.resource, device))
            ]
            # The hook goes on though the kubelet may give up the call.
            if devices and (error := await asyncio.shield(self._release(devices))):
                details = f"{self.resource}: it is not granted before `released` of its former holder succeeds: {error}"
                raise Refusal(grpc.StatusCode.FAILED_PRECONDITION, "released", details)
            released = {name for device in devices for name in ids[device.id]}
            self._released |= {one for one in ended if one.device_id in released}
        except ConflictError as error:
            raise Refusal(grpc.StatusCode.FAILED_PRECONDITION, "excluded", f"{self.resource}: {error}") from error

    def status(self) -> ResourceStatus:
        """Return what is known now."""
        holders = self._tracker.holders(self.resource)
        return ResourceStatus(
            self.resource,
            self.inventory.snapshot,
            self.source.replicas,
            self.registration.statistics.registered,
            self.endpoint.live,
            holders,
            self.endpoint.statistics,
            self.registration.statistics,
            self.source_error,
            self.withheld(),
        )

    def withheld(self) -> dict[str, str]:
        """Return the devices that are given to nobody for now though their source lists them healthy, and why."""
        reasons = dict(self._guard.last_withheld(self.resource))
        if self._doorkeeper is not None:
            reasons |= self._doorkeeper.withheld(self.resource)
        for device_id, reason in self._tracker.unnamed_reasons(self.resource).items():
            reasons.setdefault(self.endpoint.ids.device_id_of(device_id), reason)
        return reasons


class HolderObserver(Protocol):
    """Another part of the process that is given each scan's result; the ledger, by way of its keeper."""

    def awaited(self) -> Collection[tuple[str, str]]:
        """Return (resource, the kubelet's id) of which it matters whether they are free."""

    def before_scan(self) -> object:
        """Return what is to be remembered from before the witnesses are asked."""

    async def after_scan(self, before: object, now: HolderSnapshot) -> None:
        """Take the result; `before` is what `before_scan` returned."""


class Agent:
    """Serves sources on this node until it is stopped.

    Args:
        sources: one for each resource.
        paths: where the kubelet is.
        period: seconds between two scans of who holds what, while that matters.
        keep_books: scan always, with the names of pods (metrics show the holders).
        doorkeeper: decides which devices the plugin side may offer; None: everything.
        observers: further parts that are given each scan's result.
        timing: waits of the registration.
        before_end: awaited when the agent is to stop, while its resources are still its own.
        believe_checkpoint: see `HolderTracker`; not where devices also go to claims.
        orphaned: returns what claims of drivers that are not served hold; see `ExclusionGuard`.

    Attributes:
        providers: other parts of this process that metrics and status pages show, too.

    """

    def __init__(
        self,
        sources: Sequence[DeviceSource],
        paths: Paths | None = None,
        *,
        period: float = 5.0,
        keep_books: bool = False,
        doorkeeper: Doorkeeper | None = None,
        observers: Sequence[HolderObserver] = (),
        timing: Timing | None = None,
        before_end: Callable[[], Awaitable[None]] | None = None,
        believe_checkpoint: bool = True,
        orphaned: Callable[[], Mapping[Key, Tokens]] = dict,
    ) -> None:
        names = [source.resource for source in sources]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise AgentError(f"two sources for one resource: {', '.join(twice)}")
        if unnamed := [type(source).__name__ for source in sources if not source.resource]:
            raise AgentError(f"{unnamed[0]} has no resource name; set `resource` to vendor-domain/name")
        self.paths = paths or Paths()
        self.providers: list[Provider] = []
        self._period = period
        self._keep_books = keep_books
        self._doorkeeper = doorkeeper
        self.observers = list(observers)
        self._timing = timing
        self._before_end = before_end
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopped = asyncio.Event()
        self._stop_asked = threading.Event()
        self._begun = asyncio.Event()
        self._running: dict[str, asyncio.Task[None]] = {}
        self._branches: dict[str, asyncio.Task[None]] = {}
        self._stems: dict[str, str] = {}
        self._failed: asyncio.Future[None] | None = None
        self.quiet = Quiet()
        self._turn = asyncio.Lock()
        self._wanted = asyncio.Event()
        self._scanning = asyncio.Lock()
        self._doubled: frozenset[tuple[str, str]] = frozenset()
        self._double_allocations = 0
        self._withheld: dict[tuple[str, str], set[str]] = {}
        self._problem = ""
        self._problem_before = False
        self.tracker = HolderTracker(
            self.paths.plugins,
            self.paths.kubelet_root,
            self.paths.cgroups,
            PodResources(self.paths.pod_resources),
            self.quiet,
            self._resend,
            pod_logs=self.paths.pod_logs,
            claim_uses=keep_books,
            believe_checkpoint=believe_checkpoint,
        )
        self.guard = ExclusionGuard(
            lambda: self._services,
            doorkeeper,
            self.tracker.allocated,
            reread=self.tracker.reread,
            orphaned=orphaned,
        )
        self._services: dict[str, Service] = {}
        for source in sources:
            self._services[source.resource] = self._service(source)
        self.guard.subscribe(self._refresh)

    @property
    def services(self) -> Mapping[str, Service]:
        """The services by resource."""
        return self._services

    def status(self) -> Status:
        """Return what is known now; cheap, and safe from any thread."""
        return Status(
            tuple(service.status() for service in list(self._services.values())),
            self._double_allocations,
            self.tracker.claim_uses,
            self.tracker.scanned_at,
        )

    async def run(self) -> None:
        """Serve until `stop`, then drain and clean up.

        Raises:
            AgentError: a resource cannot be served on this node at all.

        """
        self._listen()
        if self._stop_asked.is_set():
            return
        self._failed = asyncio.get_running_loop().create_future()
        await self.tracker.start()
        for service in self._services.values():
            self._start(service)
        self._begun.set()
        books = asyncio.create_task(self._keep_scanning(), name="scan holders")
        stopped = asyncio.create_task(self._stopped.wait())
        try:
            waits: set[asyncio.Future[Any]] = {stopped, self._failed}
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            if self._before_end is not None:
                await self._before_end()
        finally:
            tasks = (books, stopped, *self._branches.values(), *self._running.values())
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        if self._failed.done():
            await self._failed

    def stop(self) -> None:
        """Have `run` return; from any thread or signal handler."""
        self._stop_asked.set()
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: it has ended
                self._loop.call_soon_threadsafe(self._stopped.set)

    def _listen(self) -> None:
        """Have `stop` be heard in this loop."""
        self._loop = asyncio.get_running_loop()
        if self._stop_asked.is_set():
            self._stopped.set()

    async def stopping(self) -> None:
        """Wait until `stop` is called, also before `run` is; for who has to do something first."""
        self._listen()
        await self._stopped.wait()

    async def begun(self) -> None:
        """Wait until `run` has begun to serve."""
        await self._begun.wait()

    async def reconfigure(self, wanted: Mapping[str, DeviceSource], unchanged: Sequence[str] = ()) -> None:
        """Serve these sources from now on, those of `unchanged` resources as they are.

        Resources that are in neither end; those that are served already take the new source
        without a break. Before `run` has begun it waits for that.
        """
        await self.begun()
        kept = {name for name, stem in self._stems.items() if stem in wanted or stem in unchanged}
        ending = [name for name in self._running if name not in wanted and name not in unchanged and name not in kept]
        for name in ending:
            self._running[name].cancel()
        await asyncio.gather(*(self._running[name] for name in ending), return_exceptions=True)
        replaced = [(self._services[name], source) for name, source in wanted.items() if name in self._services]
        for name, source in wanted.items():
            self._stems.pop(name, None)
            self._serve(source)
        await asyncio.gather(*(service.replaced(source) for service, source in replaced))

    def _serve(self, source: DeviceSource) -> None:
        """Serve one more source, or another one for a resource that is served."""
        name = source.resource
        if name in self._services:
            self._services[name].replace(source)
            self._follow_branches(source)
        else:
            self._services[name] = self._service(source)
            self._start(self._services[name], fatal=False)

    def _follow_branches(self, source: DeviceSource) -> None:
        """Serve the further resources that a source brings along, in place of what the one before it brought."""
        if (before := self._branches.pop(source.resource, None)) is not None:
            before.cancel()
        if type(source).branches is not DeviceSource.branches:
            self._branches[source.resource] = asyncio.create_task(
                self._serve_branches(source), name=f"branches of {source.resource}"
            )

    async def _serve_branches(self, source: DeviceSource) -> None:
        served: set[str] = set()
        try:
            async for branches in source.branches():
                for branch in branches:
                    name = branch.resource
                    if name in served:
                        continue
                    served.add(name)
                    if name in self._services and self._stems.get(name) != source.resource:
                        _LOG.info("%s is served already, not as what %s brings along", name, source.resource)
                        continue
                    self._stems[name] = source.resource
                    self._serve(branch)
        except Exception:
            _LOG.exception("what %s brings along is not served", source.resource)

    def _service(self, source: DeviceSource) -> Service:
        return Service(
            source,
            self.paths,
            self.quiet,
            self._turn,
            self.tracker,
            self.guard,
            doorkeeper=self._doorkeeper,
            timing=self._timing,
            wake_scan=self._wanted.set,
        )

    def _start(self, service: Service, *, fatal: bool = True) -> None:
        self._running[service.resource] = asyncio.create_task(
            self._supervise(service, fatal=fatal), name=f"serve {service.resource}"
        )
        self._follow_branches(service.source)
        self._wanted.set()

    async def _supervise(self, service: Service, *, fatal: bool) -> None:
        """Run a service; begin again if it ends by an error that is not its user's to mend."""
        backoff = Backoff(first=1.0, most=30.0)
        name = service.resource
        try:
            while True:
                try:
                    await service.run()
                except RegistrationError as error:
                    if fatal and not service.registration.statistics.registrations:
                        self.fail(AgentError(str(error)))
                        return
                    _LOG.error("%s; trying again", error)  # no traceback for what a user must mend
                except Exception:
                    _LOG.exception("%s: serving failed; trying again", name)
                await asyncio.sleep(backoff.next())
        finally:
            if self._services.get(name) is service:
                del self._services[name]
                self._running.pop(name, None)
                self._stems.pop(name, None)
                if (branches := self._branches.pop(name, None)) is not None:
                    branches.cancel()

    def fail(self, error: AgentError) -> None:
        """Have `run` end and raise this error."""
        if self._failed is not None and not self._failed.done():
            self._failed.set_exception(error)

    async def scan(self, wanted: Collection[tuple[str, str]] | None = None) -> HolderSnapshot | None:
        """Ask the witnesses now who holds what, and pass the result to everybody.

        Args:
            wanted: (resource, the kubelet's device id) of which is asked whether they are free (`HolderTracker.scan`).

        Returns:
            Who holds what; None if an own Allocate came in between, and it is worth nothing.

        """
        async with self._scanning:
            remembered = [(observer, observer.before_scan()) for observer in self.observers]
            now = await self.tracker.scan(wanted)
            if now is None:
                return None
            self._count_doubles()
            services = tuple(self._services.values())
            for service in services:
                service.take_holders(now)
            self.guard.notify(scanned=True)
            for service in services:
                service.observe(now)
            self._log_withheld()
            for observer, before in remembered:
                await observer.after_scan(before, now)
            self.guard.notify()
            return now

    def _log_withheld(self) -> None:
        """Say each reason once for which an id is withheld that the kubelet may give away though it is held."""
        now = {(name, one): why for name in self._services for one, why in self.tracker.unnamed_reasons(name).items()}
        for key, why in now.items():
            # Between two requests for a checkpoint the reason is another one each time.
            if why not in (said := self._withheld.setdefault(key, set())):
                said.add(why)
                _LOG.warning("%s: device %s is withheld: %s", *key, why)
        for key in self._withheld.keys() - now.keys():
            del self._withheld[key]
            _LOG.info("%s: device %s is not withheld any more", *key)

    def _refresh(self) -> None:
        for service in self._services.values():
            service.endpoint.refresh()

    def _resend(self) -> bool:
        return any(service.endpoint.resend() for service in self._services.values() if service.endpoint.live)

    async def _keep_scanning(self) -> None:
        """Scan from time to time while it matters to anybody, and soon after something was given out."""
        backoff = Backoff(first=1.0, most=30.0)
        while True:
            awaited = self._awaited()
            held = self.tracker.snapshot.held or self._in_use() or self.guard.unsettled
            if not (self._keep_books or awaited or held):
                await self._wanted.wait()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._period * random.uniform(0.9, 1.1)):  # noqa: S311  # jitter
                    await self._wanted.wait()
                    # The kubelet writes its checkpoint some milliseconds after Allocate was answered.
                    await asyncio.sleep(SOON)
                    # Before its processes run, only a checkpoint that was asked for proves which pod a grant was for. A
                    # ledger is to have it at once: agent and checkpoint may be lost together.
                    awaited = frozenset().union(*(observer.awaited() for observer in self.observers))
            self._wanted.clear()
            try:
                now = await self.scan(awaited)
            except Exception:
                _LOG.exception("who holds which device could not be found out")
                await asyncio.sleep(backoff.next())
            else:
                self._report_problem(now)
                backoff.reset()

    def _in_use(self) -> bool:
        return any(service.in_use for service in self._services.values())

    def _awaited(self) -> frozenset[tuple[str, str]]:
        """Return (resource, the kubelet's id) of which it matters to somebody whether they are free."""
        mine = {(name, one) for name, service in self._services.items() for one in service.awaited}
        return frozenset(mine).union(*(observer.awaited() for observer in self.observers))

    def _report_problem(self, now: HolderSnapshot | None) -> None:
        """Log why the kubelet's checkpoint cannot be read, if two scans in a row could not.

        The kubelet of a new node has none until the first plugin has registered.
        """
        problem = now.problem if now is not None and now.registered is None else ""
        first, self._problem_before = bool(problem) and not self._problem_before, bool(problem)
        if problem != self._problem and not first:
            self._problem = problem
            if problem:
                _LOG.warning("devices that may be held count as held: %s", problem)
            else:
                _LOG.info("the kubelet's checkpoint can be read again")

    def _count_doubles(self) -> None:
        doubled = self.tracker.double_held()
        for key in doubled.keys() - self._doubled:
            self._double_allocations += 1
            _LOG.error(
                "the kubelet gave device %s of %s to several pods: %s (kubernetes#137534)",
                key[1],
                key[0],
                ", ".join(doubled[key]),
            )
        self._doubled = frozenset(doubled)
