"""Follows the lists of a source, whichever kind of generator yields them."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

from deviceplugin.device import Device
from deviceplugin.source import DeviceSource

__all__ = ["listings"]


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
