"""Runs the services of a node's resources, also of those resources that a source brings along."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from deviceplugin.kubelet.registration import Backoff, RegistrationError
from deviceplugin.node.service import Service, ServiceContext
from deviceplugin.source import DeviceSource

_LOG: Final = logging.getLogger(__name__)


class Supervisor:
    """Starts, replaces and ends services; starts one again that failed.

    services: by resource; only this class changes them once the agent runs. fail: called with the reason when a
    resource cannot be served on this node at all.
    """

    def __init__(self, services: dict[str, Service], context: ServiceContext, fail: Callable[[str], None]) -> None:
        self._services = services
        self._context = context
        self._fail = fail
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._child_tasks: dict[str, asyncio.Task[None]] = {}
        self._parents: dict[str, str] = {}
        """The resource whose source brought another resource along."""

    def start(self, service: Service, *, fatal: bool = True) -> None:
        """Serve a resource; fatal: end the agent if it cannot be registered at first."""
        name = service.resource
        self._tasks[name] = asyncio.create_task(self._supervise(service, fatal=fatal), name=f"serve {name}")
        self._follow_child_sources(service.source)
        self._context.wake_scan()

    async def end(self) -> None:
        """End all services."""
        await _cancel((*self._child_tasks.values(), *self._tasks.values()))

    async def reconfigure(self, wanted: Mapping[str, DeviceSource], unchanged: Sequence[str]) -> None:
        """Serve these sources from now on; see `Agent.reconfigure`."""
        kept = {*wanted, *unchanged}
        await _cancel(
            [task for name, task in self._tasks.items() if name not in kept and self._parents.get(name) not in kept]
        )
        replaced = [(self._services[name], source) for name, source in wanted.items() if name in self._services]
        for name, source in wanted.items():
            self._parents.pop(name, None)
            self._serve(source)
        await asyncio.gather(*(service.follower.replaced(source) for service, source in replaced))

    def _serve(self, source: DeviceSource) -> None:
        """Serve one more source, or another one for a resource that is served."""
        name = source.resource
        if name in self._services:
            self._services[name].follower.replace(source)
            self._follow_child_sources(source)
        else:
            self._services[name] = Service(source, self._context)
            self.start(self._services[name], fatal=False)

    def _follow_child_sources(self, source: DeviceSource) -> None:
        """Serve the further resources that a source brings along, in place of those of the source before it."""
        name = source.resource
        if (before := self._child_tasks.pop(name, None)) is not None:
            before.cancel()
        if type(source).child_sources is not DeviceSource.child_sources:
            self._child_tasks[name] = asyncio.create_task(
                self._serve_child_sources(source), name=f"child sources of {name}"
            )

    async def _serve_child_sources(self, parent: DeviceSource) -> None:
        served: set[str] = set()
        try:
            async for children in parent.child_sources():
                for child in children:
                    name = child.resource
                    if name in served:
                        continue
                    served.add(name)
                    if name in self._services and self._parents.get(name) != parent.resource:
                        _LOG.info("%s has a source of its own; that of %s is not served", name, parent.resource)
                        continue
                    self._parents[name] = parent.resource
                    self._serve(child)
        except Exception:
            _LOG.exception("%s: its child sources failed; they are not followed any more", parent.resource)

    async def _supervise(self, service: Service, *, fatal: bool) -> None:
        """Run a service; start it again if it ends by an error that is not its user's to mend."""
        backoff = Backoff(first=1.0, most=30.0)
        name = service.resource
        try:
            while True:
                try:
                    await service.run()
                except RegistrationError as error:
                    if fatal and not service.registration.statistics.registrations:
                        self._fail(str(error))
                        return
                    _LOG.error("%s; trying again", error)  # no traceback for what a user must mend
                except Exception:
                    _LOG.exception("%s: serving failed; trying again", name)
                await asyncio.sleep(backoff.next())
        finally:
            if self._services.get(name) is service:
                del self._services[name]
                self._tasks.pop(name, None)
                self._parents.pop(name, None)
                if (child_task := self._child_tasks.pop(name, None)) is not None:
                    child_task.cancel()


async def _cancel(tasks: Sequence[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
