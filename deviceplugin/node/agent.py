"""The agent of a node: one process and event loop that starts, reloads and ends the services of many resources."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Coroutine, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from deviceplugin import cdi_specs, filewatch
from deviceplugin.adoption.plugins import AdoptionError, VendorPlugins
from deviceplugin.adoption.source import AdoptedSource
from deviceplugin.kubelet.paths import Paths
from deviceplugin.kubelet.plugin_directory import PluginDirectory
from deviceplugin.kubelet.registration import RegistrationTiming
from deviceplugin.kubelet.status import AgentStatus
from deviceplugin.node.claim_side import ClaimSide
from deviceplugin.node.evidence import NodeEvidence
from deviceplugin.node.scanning import HolderScanner
from deviceplugin.node.service import Service, ServiceContext, Supervisor
from deviceplugin.source import DeviceSource
from deviceplugin.source_check import check_sources, mistaken_names
from deviceplugin.tasks import cancel_all

if TYPE_CHECKING:
    from deviceplugin.metrics.report import Provider


_LOG: Final = logging.getLogger(__name__)


class AgentError(Exception):
    """Raised when the agent cannot serve this node, so that its process must end."""


class Agent:
    """Serves the devices of sources (one source for each resource) on this node until `stop` is called.

    period: seconds between two scans for holders while a device may have a holder. report_holders: whether metrics show
    the holders; the agent then scans even if no device is held, and reads the names of pods. claim_side: the DRA part
    of this process, which gives devices to claims; None for an agent without DRA. vendors: the vendors' plugins that
    register with this agent. providers: the other components of this process whose state is shown in metrics and status
    pages. claims: the claims of DRA drivers that this process does not run.
    """

    def __init__(
        self,
        sources: Sequence[DeviceSource],
        paths: Paths | None = None,
        *,
        period: float = 5.0,
        report_holders: bool = False,
        timing: RegistrationTiming | None = None,
        claim_side: ClaimSide | None = None,
        vendors: VendorPlugins | None = None,
    ) -> None:
        check_sources(sources)
        if mistake := mistaken_names(sources):
            raise AgentError(mistake)
        self.paths = paths or Paths()
        self.providers: list[Provider] = []
        self.services = services = dict[str, Service]()
        self._claim_side = side = claim_side or ClaimSide()
        self.loop: asyncio.AbstractEventLoop | None = None
        self._watcher: filewatch.Watcher | None = None
        self._stopped = asyncio.Event()
        self._stop_asked = False
        self.begun = asyncio.Event()
        """An event that is set when `run` has begun to serve."""
        self.config_error, self.former_config = "", False
        """The fields of the same names in `AgentStatus`."""
        self._error: AgentError | None = None
        scan_wanted = asyncio.Event()
        self.evidence = evidence = NodeEvidence(
            services, self.paths, self, side, scan_wanted, report_holders=report_holders
        )
        self.register, self.tracker, self.claims = evidence.register, evidence.tracker, evidence.claims
        self.scanner = HolderScanner(
            services, self.tracker, self.register, scan_wanted, period, evidence, always=report_holders
        )
        self._adopts = vendors is not None
        # If the agent adopts no plugins, `run` of `vendors` is never called, so no plugin registers.
        self._vendors = vendors = vendors or VendorPlugins(self.paths.plugins)
        vendors.registered = self._vendor_registered
        vendors.cdi_directories = cdi_specs.directories(self.paths.cdi_dir)
        self.plugin_directory: Final = PluginDirectory(self.paths.plugins, (timing or RegistrationTiming()).poll)
        plugins, tracker, register = self.plugin_directory, self.tracker, self.register
        directory = str(self.paths.cdi_dir)
        context = ServiceContext(plugins, tracker, register, side, vendors, timing, scan_wanted, directory)
        self.supervisor = Supervisor(services, context, self.fail)
        for source in sources:
            services[source.resource] = Service(source, context)
        self.register.subscribe(self._refresh)

    def status(self) -> AgentStatus:
        """Return the agent's present status, without blocking. Any thread may call this method."""
        resources = tuple(service.status() for service in list(self.services.values()))
        return AgentStatus(
            resources,
            self.scanner.log.double_allocations,
            self.tracker.claim_uses,
            self.tracker.read_at,
            self.config_error,
            self.former_config,
            self.tracker.pod_resources.answers,
            self.tracker.pod_resources.silent_since,
            self.tracker.problems,
            dict(self.tracker.unknown),
            self._watcher.unwatched() if self._watcher is not None else (),
            self.paths.cgroup_root,
            self.evidence.unserved_holders({resource.resource for resource in resources}),
        )

    async def run(self) -> None:
        """Serve until `stop` is called. Then end the DRA part, wait for running calls, and remove the sockets.

        Raises AgentError if a resource cannot be served at all.
        """
        self._watcher = filewatch.shared()
        self._accept_stop()
        if not self._stopped.is_set() and await self.ended_before_stop(self._start()):
            for service in self.services.values():
                self.supervisor.start(service)
            self.begun.set()
            scanning = asyncio.create_task(self.scanner.run(), name="scan holders")
            adopting = asyncio.create_task(self._adopt(), name="adopt plugins")
            copying = asyncio.create_task(self.evidence.keep_copies(), name="copy allocations")
            try:
                await self._stopped.wait()
                await self._claim_side.end()
            finally:
                scanning.cancel()
                await asyncio.gather(scanning, self.supervisor.end(), return_exceptions=True)
                # The connections to vendors' plugins end last, because services forward running calls to these plugins.
                await cancel_all([adopting, copying])
                await self.evidence.write_copies()
        if self._error is not None:
            raise self._error

    async def ended_before_stop(self, work: Coroutine[Any, Any, None]) -> bool:
        """Run a coroutine to its end. If the agent is stopped before, cancel the coroutine and return False.

        This method may be called before `run` is.
        """
        working, stopping = asyncio.create_task(work), asyncio.create_task(self.stopping())
        try:
            await asyncio.wait({working, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                await working
        finally:
            await cancel_all([task for task in (working, stopping) if not task.done()])
        return not working.cancelled()

    async def _start(self) -> None:
        """Read the holders of devices."""
        await self.evidence.read_others()
        await self.tracker.start()
        self.scanner.log.holders(self.tracker.snapshot.held)
        await self.scanner.observe(self.tracker.snapshot, self.register.snapshot.sequence)

    def stop(self) -> None:
        """Make `run` return. Any thread or signal handler may call this method."""
        self._stop_asked = True
        if self.loop is not None:
            with contextlib.suppress(RuntimeError):  # The loop is closed, so the agent has ended.
                self.loop.call_soon_threadsafe(self._stopped.set)

    def fail(self, message: str) -> None:
        """Make `run` end and raise an `AgentError` with this message. Must be called in the agent's event loop."""
        self._error = self._error or AgentError(message)
        self._stopped.set()

    def _accept_stop(self) -> None:
        """Prepare for `stop` in this event loop: from now on, `stop` ends `stopping`, also a `stop` called before."""
        self.loop = asyncio.get_running_loop()
        if self._stop_asked:
            self._stopped.set()

    async def stopping(self) -> None:
        """Wait until `stop` is called. This method may be called before `run` is."""
        self._accept_stop()
        await self._stopped.wait()

    async def reconfigure(self, wanted: Mapping[str, DeviceSource], unchanged: Sequence[str] = ()) -> None:
        """Serve these sources from now on.

        Resources in `unchanged` keep their sources. The services of all resources that are neither in `wanted` nor in
        `unchanged` end, with three exceptions: resources of child sources whose parent's resource continues, resources
        of connected vendors' plugins, and adopted resources of which claims hold devices. A served resource gets its
        new source without an interruption, unless the change is between a vendor's plugin and a source of the agent.
        This method first waits until `run` has begun to serve.
        """
        await self.begun.wait()
        wanted = dict(wanted)
        kept = {name for name in self._held_by_claims() if self.adopted(name)}
        for resource in sorted((self._vendors.registered_resources | kept) - {*wanted, *unchanged}):
            # A vendor's plugin has registered this resource, or claims hold its devices, but the config does not name
            # it.
            wanted[resource] = AdoptedSource(resource, self._vendors)
        await self.supervisor.reconfigure(wanted, unchanged)
        for resource in sorted(self._vendors.registered_resources - self.services.keys()):
            self._vendor_registered(resource)  # The plugin registered while the resource's former service was ending.

    def _held_by_claims(self) -> set[str]:
        """Return the resources of which claims hold devices whose identity is unknown.

        A device of a vendor's plugin has no known identity, so only these resources may be resources of such plugins.
        """
        held = (device for claim in self.register.snapshot.claims.values() for device in claim.devices)
        return {device.resource for device in held if not device.identity.tokens}

    def keep_from_pods(self) -> None:
        """Serve the resources of vendors' plugins of which claims hold devices, even if no config names the resource.

        Must be called before `run`. If such a resource were not served, the vendor's plugin could register it with the
        kubelet, and give the devices to pods. An agent that serves the resource notices such a registration, even if
        the agent no longer adopts plugins.
        """
        for resource in sorted(self._held_by_claims() - self.services.keys()):
            text = "the config does not name it, but claims hold devices of it; pods with limits get none of these"
            _LOG.warning(text, extra={"resource": resource})
            context = self.supervisor.context
            self.supervisor.services[resource] = Service(AdoptedSource(resource, self._vendors), context)

    async def _adopt(self) -> None:
        """Let vendors' plugins register with this agent until cancelled, if the agent was made with `vendors`."""
        try:
            if self._adopts:
                await self._vendors.run()
        except AdoptionError as error:
            self.fail(str(error))
        except Exception as error:
            _LOG.exception("plugins can no longer register")
            self.fail(f"--adopt: plugins can no longer register: {error}")

    def _vendor_registered(self, resource: str) -> None:
        """Serve a resource that a vendor's plugin has registered.

        If no config names the resource, its devices are only for pods (by `limits`), not for claims.
        """
        if resource not in self.services:
            text = "the config does not name it; its plugin serves pods by limits only"
            _LOG.warning(text, extra={"resource": resource})
            self.supervisor.serve(AdoptedSource(resource, self._vendors))
            self._claim_side.brought(resource, "")
        elif self.adopted(resource):
            # The plugin's options may have changed; the kubelet reads new options only at a Register.
            self.services[resource].registration.wake()
        else:
            text = "a vendor's plugin registered it, but the config lists its devices; those of the config are served"
            _LOG.error(text, extra={"resource": resource})

    def _refresh(self) -> None:
        for service in self.services.values():
            service.endpoint.refresh()

    def adopted(self, resource: str) -> bool:
        """Return whether a vendor's plugin handles the Allocates of a resource."""
        return resource in self.services and isinstance(self.services[resource].source, AdoptedSource)

    def resend(self) -> bool:
        """Send the device lists to the kubelet again. Return whether any resource has an open ListAndWatch stream."""
        return any(
            service.endpoint.streams.resend() for service in self.services.values() if service.endpoint.streams.live
        )
