"""Checks an author's source before the agent uses it, and each list of devices that the source yields.

`DeviceSource` itself finds misspelt hooks and invalid resource names when a subclass is defined.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Final, get_args

from deviceplugin import exclusion, hooks
from deviceplugin.device import Device
from deviceplugin.inventory import by_id
from deviceplugin.source import DeviceSource, Policy, check_names

_SETTINGS: Final[Mapping[str, tuple[Callable[[Any], object], str]]] = {
    "resource": (lambda value: isinstance(value, str), "a string"),
    "driver": (lambda value: value is None or isinstance(value, str), "a string"),
    "replicas": (lambda value: type(value) is int and value >= 1, "a number of at least 1"),
    "policy": (lambda value: value in get_args(Policy), f"one of {', '.join(get_args(Policy))}"),
    "hook_timeout": (lambda value: type(value) in (int, float) and value > 0, "a number of seconds above 0"),
}


PRE_START: Final = 30
"""Seconds that the kubelet waits for PreStartContainer (k8s.io/kubelet 0.36, deviceplugin/v1beta1/constants.go)."""
PREPARE: Final = 45
"""Seconds that the kubelet waits for NodePrepareResources (kubelet 1.36, cm/dra/plugin/dra_plugin.go)."""


def check_sources(sources: Collection[object]) -> None:
    """Raise TypeError unless all objects are valid sources, NamingError for an invalid resource or driver."""
    if not sources:
        raise TypeError("there is no source to serve: name at least one")
    for source in sources:
        check_source(source)


def mistaken_names(sources: Collection[DeviceSource]) -> str:
    """Return a message if two sources have the same resource, or a source has no resource name; else ""."""
    names = [source.resource for source in sources]
    if twice := sorted({name for name in names if name and names.count(name) > 1}):
        return f"two sources for one resource: {', '.join(twice)}"
    unnamed = [type(source).__name__ for source in sources if not source.resource]
    return f"{unnamed[0]} has no resource name; set `resource` to vendor-domain/name" if unnamed else ""


def check_source(source: object) -> None:
    """Raise TypeError unless this is a valid source, NamingError if its resource or driver is invalid."""
    if isinstance(source, type):
        raise TypeError(f"{source.__name__} is a class; a source is an instance of it: {source.__name__}()")
    if not isinstance(source, DeviceSource):
        raise TypeError(f"{source!r} is not a source; a source is an instance of a class derived from DeviceSource")
    kind = type(source).__name__
    for field, (fits, right) in _SETTINGS.items():
        if not fits(value := getattr(source, field)):
            raise TypeError(f"{kind}.{field} must be {right}, not {value!r}")
    check_names(kind, source.resource, source.driver)
    if type(source).watch is DeviceSource.watch:
        raise TypeError(f"{kind} has no `watch`; define it, as a generator of device lists")
    for name in ("watch", *source.hooks, "replicas_of", "child_sources"):
        if mistake := _mistake(name, getattr(source, name)):
            raise TypeError(f"{kind}.{name} {mistake}")
    _check_config_type(f"{kind}.config_type", source.config_type)
    _check_links(source)


def overlong(source: DeviceSource) -> str:
    """Return a text that names the calls of the kubelet whose timeout the source's hooks may exceed; "" if none."""
    calls: list[tuple[str, int, tuple[str, ...]]] = [("PreStartContainer", PRE_START, ("reset",))]
    calls += [("NodePrepareResources", PREPARE, ("reset", "prepare"))] if source.driver else []
    calls_over = [
        f"{call}, which calls {' and '.join(f'`{hook}`' for hook in of if hook in source.hooks)}, after {limit} s"
        for call, limit, of in calls
        if source.hook_timeout > limit and not source.hooks.isdisjoint(of)
    ]
    return (
        f"hook_timeout is {source.hook_timeout:g} s, but the kubelet gives up {', '.join(calls_over)}"
        if calls_over
        else ""
    )


def _check_config_type(what: str, config_type: object) -> None:
    if config_type is None:
        return
    from msgspec import inspect as types

    try:
        info = types.type_info(config_type)
    except TypeError:
        info = None
    objects = (types.StructType, types.DataclassType, types.TypedDictType, types.DictType, types.UnionType)
    if not isinstance(info, objects):
        right = "a class that msgspec makes of a JSON object, such as a msgspec.Struct or a dataclass"
        raise TypeError(f"{what} must be {right}, not {config_type!r}")


def _check_links(source: DeviceSource) -> None:
    what = f"{type(source).__name__}.links"
    try:
        links = source.links
    except Exception as error:
        raise TypeError(f"{what} failed: {type(error).__name__}: {error}") from error
    if callable(links):
        raise TypeError(f"{what} must be a property: write @property before it")
    if not isinstance(links, Mapping):
        raise TypeError(f"{what} must be a dict, not {links!r}")
    for pair, value in links.items():
        if not (isinstance(pair, frozenset) and len(pair) == 2 and isinstance(value, int | float)):
            given = f"frozenset({sorted(pair, key=repr)!r})" if isinstance(pair, frozenset) else repr(pair)
            raise TypeError(f"{what} must have a number for each frozenset of two ids, not {given}: {value!r}")


def _mistake(name: str, method: Any) -> str:
    """Return an error if a source's method is the wrong kind of function (plain, coroutine or generator), else ""."""
    if not callable(method):
        return f"must be a method, not {method!r}"
    usual = list(inspect.signature(getattr(DeviceSource, name)).parameters)[1:]
    try:
        inspect.signature(method).bind(*usual)
    except TypeError as error:
        return f"is called as {name}({', '.join(usual)}): {error}"
    if "devices" in usual and "device" in inspect.signature(method).parameters:
        return "gets a list of devices, whatever its length: call its parameter `devices`, not `device`"
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


def checked_list(source: DeviceSource, lists: object, listed: object) -> tuple[Device, ...]:
    """Check a device list that `watch` has yielded, and return it as a tuple of devices.

    lists: the generator of `watch`; messages name its present line. Raises TypeError or ValueError if the list contains
    anything but devices with different ids, or if the source's `replicas_of` or `links` returns an invalid value for
    these devices.
    """
    if not isinstance(listed, Iterable) or isinstance(listed, str | bytes | Mapping):
        raise TypeError(f"{_place(source, lists)} must yield lists of Device, not {_instead(listed)}")
    devices = tuple(listed)
    for device in devices:
        if not isinstance(device, Device):
            raise TypeError(f"{_place(source, lists)} must yield lists of Device, not of {_instead(device)}")
        if device.consumes or device.counters:
            # The call of `hardware_of` raises an error if the amount of a counter is invalid.
            exclusion.hardware_of(device, frozenset(), "")
        if source.replicas != 1:
            number = source.replicas_of(device)
            if type(number) is not int or not 1 <= number <= source.replicas:
                what = f"{type(source).__name__}.replicas_of must return 1 to {source.replicas} (`replicas`)"
                raise ValueError(f"{what}, not {number!r} for device {device.id!r}")
    by_id(devices, _place(source, lists))
    _check_links(source)
    return devices


def _instead(value: object) -> str:
    if inspect.iscoroutine(value):
        value.close()  # The call of `close` prevents Python's own warning of a coroutine that was never awaited.
        return f"a coroutine: {hooks.NOT_AWAITED}"
    if isinstance(value, Device):
        return f"a Device: write yield [Device({value.id!r})]"
    if isinstance(value, str):
        return f"strings: write Device({value!r})"
    return f"{type(value).__name__}: {value!r}"


def checked_children(parent: DeviceSource, children: object) -> list[DeviceSource]:
    """Return a list that `child_sources` has yielded. Raises TypeError or NamingError for a wrong source."""
    what = f"{type(parent).__name__}.child_sources"
    if not isinstance(children, Iterable):
        raise TypeError(f"{what} must yield lists of sources, not {children!r}")
    copied = [*children]
    for child in copied:
        check_source(child)
    if mistake := mistaken_names(copied):
        raise TypeError(f"{what}: {mistake}")
    return copied


def not_yielding(source: DeviceSource) -> str:
    """Return a message for a source whose `watch` is no generator, with the correction."""
    code = getattr(source.watch, "__code__", None)
    where = f" ({code.co_filename}:{code.co_firstlineno})" if code else ""
    return f"{type(source).__name__}.watch{where} must yield lists of devices, not return one: write yield [...]"


def _place(source: DeviceSource, lists: object) -> str:
    """Return the text `Class.watch` for messages, with the present file and line of the generator if they are known."""
    kind = type(source).__name__
    for attribute in ("gi_frame", "ag_frame"):
        if (frame := getattr(lists, attribute, None)) is not None:
            return f"{kind}.watch ({frame.f_code.co_filename}:{frame.f_lineno})"
    return f"{kind}.watch"
