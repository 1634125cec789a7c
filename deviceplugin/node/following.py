"""Reads the device lists that the method `watch` of a source yields. `watch` is an async or a plain generator."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import threading
from collections.abc import AsyncGenerator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from deviceplugin import identity, sharing
from deviceplugin.backoff import Backoff
from deviceplugin.device import Device
from deviceplugin.inventory import Inventory
from deviceplugin.source import DeviceSource
from deviceplugin.source_check import checked_list, not_yielding
from deviceplugin.tasks import in_time

_LOG: Final = logging.getLogger(__name__)

TAKE_OVER: Final = 3.0
"""Maximum seconds to wait for the first device list of a new source, while the hooks of the old source are called."""


class ListReceiver(Protocol):
    """The object that is called when a source yields devices (implemented by `deviceplugin.node.service.Service`)."""

    def take_source(self, source: DeviceSource) -> None:
        """Call the hooks of this source from now on."""

    def listed(self) -> None:
        """Handle a new device list that the inventory has received."""


@dataclass(eq=False)
class SourceFollower:
    """Writes the lists of a resource's source to the resource's inventory, and starts a failed source again.

    failure: the last exception that the source's `watch` raised; None after the source has listed devices again.
    """

    source: DeviceSource
    inventory: Inventory
    receiver: ListReceiver
    failure: Exception | None = field(default=None, init=False)
    _taken_over: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    _task: asyncio.Task[None] | None = field(default=None, init=False)

    @property
    def error(self) -> str:
        """The exception that the source's `watch` raised, as text; "" if there is none."""
        return f"{type(self.failure).__name__}: {self.failure}" if self.failure is not None else ""

    def start(self) -> None:
        """Start to read the source's lists."""
        self._follow(self.source)

    async def end(self) -> None:
        """Stop reading the source's lists."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait((self._task,), timeout=1.0)

    def replace(self, source: DeviceSource) -> None:
        """Replace the resource's source. The service and the registration with the kubelet continue.

        The old source's hooks are called until the new source has listed its devices. The inventory keeps its devices:
        a device that the new source does not list becomes unhealthy, and stays while it has holders.
        """
        if self._task is None:
            self._take_over(source)
        else:
            self._taken_over.clear()
            self._task.cancel()
            self._follow(source)

    async def replaced(self, source: DeviceSource) -> None:
        """Wait until the resource uses this source, which was given to `replace`.

        If the source has yielded no device list after TAKE_OVER seconds, the resource uses the source nevertheless.
        """
        await in_time(self._taken_over.wait(), TAKE_OVER)
        self._take_over(source)

    def _take_over(self, source: DeviceSource) -> None:
        if source is not self.source:
            self.source = source
            self._taken_over.set()
            self.receiver.take_source(source)

    def _follow(self, source: DeviceSource) -> None:
        self._task = asyncio.create_task(self._publish_lists(source), name=f"follow {source.resource}")

    async def _publish_lists(self, source: DeviceSource) -> None:
        backoff = Backoff(first=0.5, most=60.0)
        while True:
            try:
                async for devices in _listings(source):
                    self._take_over(source)
                    await identity.publish(self.inventory, devices, sharing.shares(source, devices))
                    self.receiver.listed()
                    self.failure = None
                    backoff.reset()
            except Exception as error:
                self.failure = error
                count, delay = len(self.inventory.devices), backoff.next()
                message = "the source failed; its last list of %d devices stays, trying again in %.1f s"
                _LOG.exception(message, count, delay, extra={"resource": source.resource})
                await asyncio.sleep(delay)
            else:
                self._take_over(source)
                if not self.inventory.snapshot.listed:
                    self.inventory.publish(())
                return


async def _listings(source: DeviceSource) -> AsyncGenerator[Sequence[Device]]:
    """Yield a source's device lists, and check each of them.

    Raises TypeError if `watch` is no generator, or yields anything but lists of devices.
    """
    made: Any = source.watch()
    if hasattr(made, "__next__"):
        lists = _threaded((checked_list(source, made, child) for child in made), source.resource)
    elif hasattr(made, "__anext__"):
        lists = made
    else:
        if inspect.iscoroutine(made):
            made.close()
        raise TypeError(not_yielding(source))
    async with contextlib.aclosing(lists):
        async for devices in lists:
            yield checked_list(source, made, devices) if lists is made else devices


async def _threaded(lists: Iterator[Sequence[Device]], name: str) -> AsyncGenerator[Sequence[Device]]:
    """Run a plain generator in its own daemon thread, because it may block for ever."""
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
        except Exception as error:  # An exception of the source's code is passed to the reader of the lists.
            end = error
        except BaseException as error:  # For example, SystemExit must end the reader's wait too.
            end = RuntimeError(f"{type(error).__name__}: {error}")
        with contextlib.suppress(RuntimeError):  # The loop is closed already.
            loop.call_soon_threadsafe(queue.put_nowait, end)

    threading.Thread(target=drive, name=f"watch {name}", daemon=True).start()
    try:
        while (devices := await queue.get()) is not None:
            if isinstance(devices, BaseException):
                raise devices
            yield devices
    finally:
        over.set()
