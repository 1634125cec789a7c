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
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol, cast

from deviceplugin import filewatch, hooks, podresources
from deviceplugin.device import Device
from deviceplugin.endpoint import Doorkeeper, Endpoint
from deviceplugin.endpoint import Statistics as EndpointStatistics
from deviceplugin.inventory import Inventory, Snapshot
from deviceplugin.podresources import ClaimUse, Holder, Holdings, PodResources, Quiet, Released
from deviceplugin.registration import Backoff, Identity, Registration, RegistrationError, Timing, identity
from deviceplugin.registration import Statistics as RegistrationStatistics
from deviceplugin.source import DeviceSource

if TYPE_CHECKING:
    from deviceplugin.report import Provider

__all__ = ["Agent", "AgentError", "Paths", "ResourceStatus", "Status"]

_LOG: Final = logging.getLogger(__name__)


class AgentError(Exception):
    """Raised when the agent cannot do its work at all."""


@dataclass(frozen=True, slots=True)
class Paths:
    """Where the kubelet keeps its sockets.

    The device plugin directory is fixed at /var/lib/kubelet/device-plugins whatever the kubelet's
    --root-dir says, while the PodResources socket follows it (kubernetes#68567; k3s, k0s and
    microk8s differ): each can be given.
    """

    kubelet_root: Path = Path("/var/lib/kubelet")
    device_plugin_dir: Path | None = None
    pod_resources_socket: Path | None = None

    @property
    def plugins(self) -> Path:
        """The device plugin directory."""
        return self.device_plugin_dir or self.kubelet_root / "device-plugins"

    @property
    def pod_resources(self) -> Path:
        """The PodResources service's socket."""
        return self.pod_resources_socket or self.kubelet_root / "pod-resources" / "kubelet.sock"


@dataclass(frozen=True, slots=True)
class ResourceStatus:
    """One resource as of now. `holders` is by the kubelet's device ids, as of the last look."""

    resource: str
    snapshot: Snapshot
    replicas: int
    registered: bool
    live: bool
    holders: Mapping[str, frozenset[Holder]]
    endpoint: EndpointStatistics
    registration: RegistrationStatistics
    source_error: str


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


TAKE_OVER: Final = 3.0
"""Seconds that a new source has to list its devices while the old one's hooks still answer."""


class Service:
    """One resource: its source followed, its endpoint registered, its releases told."""

    def __init__(self, source: DeviceSource, paths: Paths, quiet: Quiet, turn: asyncio.Lock, **options: Any) -> None:
        self.source = source
        self.inventory = Inventory(source.resource)
        self.endpoint = Endpoint(
            source, self.inventory, quiet, granted=self._granted, doorkeeper=options.get("doorkeeper")
        )
        self.registration = Registration(self.endpoint, paths.plugins, turn, options.get("timing"))
        self.source_error = ""
        self._released = Released()
        self._looked = False
        self._plugins = paths.plugins
        self._inherited: frozenset[str] = frozenset()
        self._gone_before: frozenset[str] = frozenset()
        self._former_before: frozenset[str] = frozenset()
        self._taken = asyncio.Event()
        self._books = cast("Callable[[], None]", options.get("books") or (lambda: None))
        self._follower: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def resource(self) -> str:
        """The resource's name."""
        return self.source.resource

    async def run(self) -> None:
        """Serve until cancelled.

        Raises:
            RegistrationError: it cannot be served on this node at all.

        """
        self.inventory.subscribe(lambda snapshot: self._books() if snapshot.gone else None)
        self._inherited = await asyncio.to_thread(self._held)
        self._follower = asyncio.create_task(self._follow(self.source), name=f"follow {self.resource}")
        try:
            await self.registration.run()
        finally:
            for task in (self._follower, *self._tasks):
                task.cancel()
            await asyncio.wait((self._follower, *self._tasks), timeout=1.0)

    def _held(self) -> frozenset[str]:
        """Return the ids that pods have by now, as far as the checkpoint can be read."""
        try:
            entries = podresources.read_checkpoint(self._plugins)
        except podresources.CheckpointError as error:
            _LOG.warning("%s: who has which device from before is not known: %s", self.resource, error)
            return frozenset()
        return frozenset().union(*(entry.devices for entry in entries if entry.resource == self.resource))

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
        self._books()

    async def _follow(self, source: DeviceSource) -> None:
        """Take a source's lists for as long as it lives, and begin again when it fails."""
        backoff = Backoff(first=0.5, most=60.0)
        while True:
            try:
                async for devices in listings(source):
                    if source is not self.source:
                        self._take(source)
                    self.inventory.publish(devices)
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
            before, self._inherited = self._inherited, self.endpoint.inherit(self._inherited)
            if before != self._inherited:
                self._books()

    # What the kubelet's books say.

    def _granted(self, names: Sequence[str]) -> None:
        self._released = self._released.grant(names)
        self._books()

    @property
    def wants_books(self) -> bool:
        """Whether it matters here who holds what."""
        return bool(self.inventory.snapshot.gone or self.endpoint.former) or (
            "released" in self.source.hooks and (not self._looked or bool(self._released.busy))
        )

    def look(self, held: Mapping[str, frozenset[Holder]], at: float, allocatable: frozenset[str] | None) -> None:
        """Draw the conclusions of a look at the kubelet's books.

        held: holders by the kubelet's device ids, asked at `at`. allocatable: ids that the kubelet would give
        out, asked before the holders; None if it was not asked.
        """
        behind = self.endpoint.behind
        self._released = self._released.look(held, at)
        self._inherited &= self._released.busy
        busy = set(map(behind, self._released.busy))
        freed = set(map(behind, self._released.free)) - busy
        snapshot = self.inventory.snapshot
        if not self._looked:
            self._looked = True
            freed = snapshot.devices.keys() - busy
        devices = [device for name, device in snapshot.devices.items() if name in freed]
        if devices and "released" in self.source.hooks:
            task = asyncio.create_task(self._tell_released(self.source, devices))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        if allocatable is not None and self.endpoint.live:
            # Seen gone at the look before, too: a grant between would have been seen by now.
            former = self.endpoint.former.keys() & self._former_before
            self.endpoint.forget(former - self._released.busy - allocatable)
            self.inventory.forget((snapshot.gone & self._gone_before) - busy - set(map(behind, allocatable)))
        self._gone_before, self._former_before = snapshot.gone, frozenset(self.endpoint.former)

    async def _tell_released(self, source: DeviceSource, devices: Sequence[Device]) -> None:
        try:
            await hooks.call(f"released of {self.resource}", source.released, devices, timeout=source.hook_timeout)
        except hooks.HookError as error:
            _LOG.warning("%s", error)

    def status(self, holders: Mapping[str, frozenset[Holder]]) -> ResourceStatus:
        """Return what is known now."""
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
        )


@dataclass(frozen=True, slots=True)
class Look:
    """What one look at the kubelet's books found; times are monotonic seconds.

    holdings: asked for from `at` on, no own Allocate in between. allocatable: ids that the kubelet
    would give out by resource, asked for at `allocatable_at`, before `at`; None if not asked.
    unsure: (resource, id) that only a checkpoint says are held which the kubelet has not written
    anew since: it may be older than the pod's end.
    """

    holdings: Holdings
    at: float
    allocatable: Mapping[str, frozenset[str]] | None
    allocatable_at: float
    unsure: frozenset[tuple[str, str]] = frozenset()


class BooksObserver(Protocol):
    """Somebody else who wants to know what each look at the kubelet's books found; the ledger's keeper."""

    def wants_books(self) -> bool:
        """Return whether it matters now who holds what."""

    def before_look(self) -> object:
        """Return what is to be remembered from before the kubelet is asked."""

    async def after_look(self, before: object, seen: Look) -> None:
        """Take note of what was seen; `before` is what `before_look` returned."""


class Agent:
    """Serves sources on this node until it is stopped.

    Args:
        sources: one for each resource.
        paths: where the kubelet is.
        period: seconds between looks at the kubelet's books, while they matter.
        keep_books: look at them always (metrics want to know the holders).
        doorkeeper: who decides which devices the plugin side may offer; None: everything.
        observers: who else hears of each look at the books.
        timing: waits of the registration.

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
        observers: Sequence[BooksObserver] = (),
        timing: Timing | None = None,
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
        self._services: dict[str, Service] = {source.resource: self._service(source) for source in sources}
        self._looking = asyncio.Lock()
        self.books = Books(PodResources(self.paths.pod_resources))

    @property
    def services(self) -> Mapping[str, Service]:
        """The services by resource."""
        return self._services

    def status(self) -> Status:
        """Return what is known now; cheap, and safe from any thread."""
        held = self.books.holdings
        return Status(
            tuple(service.status(held.of(name)) for name, service in list(self._services.items())),
            self.books.double,
            held.claims,
            self.books.looked_at,
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
        for service in self._services.values():
            self._start(service)
        self._begun.set()
        books = asyncio.create_task(self._keep(), name="books")
        stopped = asyncio.create_task(self._stopped.wait())
        try:
            waits: set[asyncio.Future[Any]] = {stopped, self._failed}
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
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
            doorkeeper=self._doorkeeper,
            timing=self._timing,
            books=self._wanted.set,
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
                        self._fail(AgentError(str(error)))
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

    def _fail(self, error: AgentError) -> None:
        if self._failed is not None and not self._failed.done():
            self._failed.set_exception(error)

    async def look(self, *, allocatable: bool = False) -> Look | None:
        """Look at the kubelet's books now and tell everybody what they say.

        allocatable: ask first which devices the kubelet would give out.

        Returns:
            What was seen; None if an allocation came in between and it is worth nothing.

        Raises:
            PodResourcesError: the kubelet cannot be asked.
            CheckpointError: its checkpoint cannot be read.

        """
        async with self._looking:
            await self.quiet.wait()
            services = tuple(self._services.values())
            remembered = [(observer, observer.before_look()) for observer in self.observers]
            gone = any(service.inventory.snapshot.gone or service.endpoint.former for service in services)
            seen = await self.books.look(self.paths, self.quiet, self._resend, allocatable=allocatable or gone)
            if seen is None:
                return None
            for service in services:
                offered = None if seen.allocatable is None else seen.allocatable.get(service.resource, frozenset())
                service.look(seen.holdings.of(service.resource), seen.at, offered)
            for observer, before in remembered:
                await observer.after_look(before, seen)
            return seen

    def _resend(self) -> bool:
        return any(service.endpoint.resend() for service in self._services.values() if service.endpoint.live)

    async def _keep(self) -> None:
        """Look at the kubelet's books from time to time, while they matter to anybody."""
        backoff, told = Backoff(first=1.0, most=30.0), ""
        while True:
            self._wanted.clear()
            if not self._keep_books and not self._books_matter():
                await self._wanted.wait()
                continue
            await asyncio.sleep(self._period * (0.9 + random.random() / 5))  # noqa: S311  # jitter
            try:
                await self.look()
            except (podresources.PodResourcesError, podresources.CheckpointError) as error:
                if told != str(error):
                    told = str(error)
                    _LOG.info("who holds what cannot be read now: %s", error)
                await asyncio.sleep(backoff.next())
            except Exception:
                _LOG.exception("a look at the kubelet's books failed")
                await asyncio.sleep(backoff.next())
            else:
                told = ""
                backoff.reset()

    def _books_matter(self) -> bool:
        return any(service.wants_books for service in self._services.values()) or any(
            observer.wants_books() for observer in self.observers
        )


class Books:
    """What the kubelet's books said last."""

    def __init__(self, asked: PodResources) -> None:
        self.holdings = Holdings()
        self.looked_at: float | None = None
        self.double = 0
        self._asked = asked
        self._believed: frozenset[tuple[str, str, Holder]] = frozenset()
        self._sure: frozenset[tuple[str, str, Holder]] = frozenset()
        self._resent_at = -RESEND
        self._doubled: frozenset[tuple[str, str]] = frozenset()

    async def look(self, paths: Paths, quiet: Quiet, resend: Callable[[], bool], *, allocatable: bool) -> Look | None:
        """Look once; None if an allocation came in between.

        The checkpoint shows ended pods until the kubelet writes it anew. `List` has the kubelet
        drop them from its books, `resend` has it write these down: where the checkpoint says
        something that `List` does not show, it is read once more after that.

        Raises:
            PodResourcesError: the kubelet cannot be asked.
            CheckpointError: its checkpoint cannot be read.

        """
        asked_at = time.monotonic()
        offered = await self._asked.allocatable() if allocatable else None
        at = time.monotonic()
        _, entries = await asyncio.to_thread(_checkpoint, paths)
        report = await self._asked.list()
        now = await self._together(report, entries, paths)
        doubtful = podresources.unlisted(now)
        self._believed &= doubtful
        self._sure &= doubtful
        again = bool(doubtful - self._sure) and at - self._resent_at > RESEND
        if doubtful - self._believed or again:
            # What is written from here on is written after `List`.
            written, _ = await asyncio.to_thread(_checkpoint, paths)
            if resend():
                self._resent_at = at
                anew = await _rewritten(paths, written)
                now = await self._together(report, entries if anew is None else anew, paths)
                self._believed = doubtful = podresources.unlisted(now)
                self._sure = self._sure & doubtful if anew is None else doubtful
        if not quiet.quiet_since(at):
            return None
        self.holdings, self.looked_at = now, at
        self._count_doubles(report)
        unsure = frozenset((resource, name) for resource, name, _ in doubtful - self._sure)
        return Look(now, at, offered, asked_at, unsure)

    async def _together(
        self, report: podresources.Report, entries: Sequence[podresources.CheckpointEntry], paths: Paths
    ) -> Holdings:
        uids = {entry.pod_uid for entry in entries}
        ended = await asyncio.to_thread(podresources.ended_pods, paths.kubelet_root, uids)
        return podresources.holdings(report, entries, self.holdings, ended)

    def _count_doubles(self, report: podresources.Report) -> None:
        doubled = {
            (resource, name): holders
            for resource, devices in report.held.items()
            for name, holders in podresources.double_held(devices).items()
        }
        for key in doubled.keys() - self._doubled:
            self.double += 1
            pods = ", ".join(sorted(f"{holder.namespace}/{holder.pod}" for holder in doubled[key]))
            _LOG.error("the kubelet gave device %s of %s to several pods: %s (kubernetes#137534)", key[1], key[0], pods)
        self._doubled = frozenset(doubled)


def _checkpoint(paths: Paths) -> tuple[Identity | None, tuple[podresources.CheckpointEntry, ...]]:
    written = identity(paths.plugins / podresources.CHECKPOINT)
    return written, podresources.read_checkpoint(paths.plugins)


RESEND: Final = 30.0
"""Seconds between two lists that are sent only to have the kubelet write its checkpoint, for the same doubt."""
REWRITE: Final = 1.0
"""Seconds that the kubelet has to write its checkpoint after it was sent a list; some ms are usual."""


async def _rewritten(paths: Paths, before: Identity | None) -> tuple[podresources.CheckpointEntry, ...] | None:
    """Wait until the checkpoint is another file than before and read it; None if it is not in time."""
    with filewatch.shared().watch([str(paths.plugins)]) as watch:
        until = time.monotonic() + REWRITE
        while (rest := until - time.monotonic()) > 0:
            written, entries = await asyncio.to_thread(_checkpoint, paths)
            if written != before:
                return entries
            await watch.wait(rest)
    return None
