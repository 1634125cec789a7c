"""The node agent: one process, one loop, many resources; start, reload, and end of all of it.

Data flows one way: from the source to the inventory and the servicer, and from the kubelet's checkpoint
back to the source's `released` hook.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import threading
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Protocol

from deviceplugin.backoff import Backoff
from deviceplugin.exclusion import Key
from deviceplugin.identity import Tokens
from deviceplugin.kubelet.allocation_gate import AllocationGate
from deviceplugin.kubelet.exclusion_guard import ExclusionGuard
from deviceplugin.kubelet.holders import HolderSnapshot
from deviceplugin.kubelet.podresources import AllocationsInFlight, PodResources
from deviceplugin.kubelet.registration import RegistrationError, Timing
from deviceplugin.kubelet.tracker import HolderTracker
from deviceplugin.source import DeviceSource

if TYPE_CHECKING:
    from deviceplugin.metrics.report import Provider

from deviceplugin.kubelet.status import Status
from deviceplugin.node.paths import Paths
from deviceplugin.node.service import Service

__all__ = ["Agent", "AgentError", "HolderObserver"]

_LOG: Final = logging.getLogger(__name__)

SOON: Final = 0.3
"""Seconds from a grant to the scan that finds out which pod it was for."""


class AgentError(Exception):
    """Raised when the agent cannot do its work at all."""


class HolderObserver(Protocol):
    """Another part of the process that is given each scan's result; the ledger, by way of its gate."""

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
        allocation_gate: decides which devices the plugin side may offer; None: everything.
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
        allocation_gate: AllocationGate | None = None,
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
        self._allocation_gate = allocation_gate
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
        self.in_flight = AllocationsInFlight()
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
            self.in_flight,
            self._resend,
            pod_logs=self.paths.pod_logs,
            claim_uses=keep_books,
            believe_checkpoint=believe_checkpoint,
            wake=self._wanted.set,
        )
        self.guard = ExclusionGuard(
            lambda: self._services,
            allocation_gate,
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
        scanning = asyncio.create_task(self._keep_scanning(), name="scan holders")
        stopped = asyncio.create_task(self._stopped.wait())
        try:
            waits: set[asyncio.Future[Any]] = {stopped, self._failed}
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            if self._before_end is not None:
                await self._before_end()
        finally:
            tasks = (scanning, stopped, *self._branches.values(), *self._running.values())
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
            self._follow_child_sources(source)
        else:
            self._services[name] = self._service(source)
            self._start(self._services[name], fatal=False)

    def _follow_child_sources(self, source: DeviceSource) -> None:
        """Serve the further resources that a source brings along, in place of what the one before it brought."""
        if (before := self._branches.pop(source.resource, None)) is not None:
            before.cancel()
        if type(source).child_sources is not DeviceSource.child_sources:
            self._branches[source.resource] = asyncio.create_task(
                self._serve_child_sources(source), name=f"branches of {source.resource}"
            )

    async def _serve_child_sources(self, source: DeviceSource) -> None:
        served: set[str] = set()
        try:
            async for child_sources in source.child_sources():
                for branch in child_sources:
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
            self.in_flight,
            self._turn,
            self.tracker,
            self.guard,
            allocation_gate=self._allocation_gate,
            timing=self._timing,
            wake_scan=self._wanted.set,
        )

    def _start(self, service: Service, *, fatal: bool = True) -> None:
        self._running[service.resource] = asyncio.create_task(
            self._supervise(service, fatal=fatal), name=f"serve {service.resource}"
        )
        self._follow_child_sources(service.source)
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
                if (child_sources := self._branches.pop(name, None)) is not None:
                    child_sources.cancel()

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
