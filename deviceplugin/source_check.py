"""What is checked of a source that an author wrote, before it is served and with each of its lists.

A misspelt hook and a wrong name are found by `DeviceSource` itself when the class is defined.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from typing import Any

from deviceplugin import hooks
from deviceplugin.device import Device
from deviceplugin.source import DeviceSource, check_names


def check_sources(sources: Iterable[object]) -> None:
    """Raise TypeError unless these are sources that can be served, NamingError if one's resource or driver is wrong."""
    for source in sources:
        check_source(source)


def check_source(source: object) -> None:
    """Raise TypeError unless this is a source that can be served, NamingError if its resource or driver is wrong."""
    if isinstance(source, type):
        raise TypeError(f"{source.__name__} is a class; a source is an instance of it: {source.__name__}()")
    if not isinstance(source, DeviceSource):
        raise TypeError(f"{source!r} is no source; a source is an instance of a class derived from DeviceSource")
    kind = type(source).__name__
    for field, value in (("resource", source.resource), ("driver", source.driver or "")):
        if not isinstance(value, str):
            raise TypeError(f"{kind}.{field} must be a string, not {value!r}")
    check_names(kind, source.resource, source.driver)
    for name in ("watch", *source.hooks, "replicas_of", "child_sources"):
        if mistake := _mistake(name, getattr(source, name)):
            raise TypeError(f"{kind}.{name} {mistake}")
    if callable(source.links):
        raise TypeError(f"{kind}.links must be a property: write @property before it")


def _mistake(name: str, method: Any) -> str:
    """Return what is wrong with the kind of function that a method is; "" if nothing is."""
    if name == "watch":
        return "must yield lists of devices, not return one" if inspect.iscoroutinefunction(method) else ""
    if name == "child_sources":
        wrong = inspect.iscoroutinefunction(method) or inspect.isgeneratorfunction(method)
        return "must be an async generator: `async def`, and `yield` of lists of sources" if wrong else ""
    if name == "replicas_of" and inspect.iscoroutinefunction(method):
        return "must be a plain function, not async"
    if inspect.isgeneratorfunction(method) or inspect.isasyncgenfunction(method):
        return "must return its result, not yield it: a generator is never run"
    return ""


def checked_list(kind: str, lists: object, listed: object) -> Sequence[Device]:
    """Return the devices that `watch` yielded. Raises TypeError, with the line of the generator `lists`."""
    if isinstance(listed, Iterable) and not isinstance(listed, str | bytes):
        devices = tuple(listed)
        for device in devices:
            if not isinstance(device, Device):
                raise TypeError(f"{_place(kind, lists)} must yield lists of Device, not of {_instead(device)}")
        return devices
    raise TypeError(f"{_place(kind, lists)} must yield lists of Device, not {_instead(listed)}")


def _instead(value: object) -> str:
    if inspect.iscoroutine(value):
        value.close()  # else Python warns of it once more, at some other place
        return f"a coroutine: {hooks.NOT_AWAITED}"
    if isinstance(value, Device):
        return f"a Device: write yield [Device({value.id!r})]"
    if isinstance(value, str):
        return f"strings: write Device({value!r})"
    return f"{type(value).__name__}: {value!r}"


def _place(kind: str, lists: object) -> str:
    for attribute in ("gi_frame", "ag_frame"):
        if (frame := getattr(lists, attribute, None)) is not None:
            return f"{kind}.watch ({frame.f_code.co_filename}:{frame.f_lineno})"
    return f"{kind}.watch"
