"""The base class that plugin authors derive from: a source of devices, with optional hooks.

A hook may be a plain function, which runs in a separate thread, or a coroutine function, which must not block. Each
hook has a deadline. If a hook fails, only the call that needs the hook's result fails.
"""

from __future__ import annotations

import functools
import types
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Final, Literal

from deviceplugin import naming
from deviceplugin.device import ContainerEdits, Device

Policy = Literal["links", "packed", "distributed", "none"]
Measured = Mapping[str, Mapping[str, float | Mapping[str, float] | None]]
"""The type of the result of `measure`: for each device id and quantity, a number, or a number for each label value
("xid_errors_total": {"79": 1})."""


class DeviceSource:
    """A kind of device on this node. A subclass sets `resource` and defines `watch`.

    docs/sources.md has an example of each hook, with a test. The definition of a subclass raises TypeError for a
    probable misspelling of a hook or a setting, and NamingError for an invalid `resource` or `driver`.

    Attributes: resource: the extended resource, vendor-domain/name, that pods name in their limits. driver: the name of
        the DRA driver, which DeviceClasses select, or None for limits only. replicas: how many containers may share one
        device. With more than 1, the kubelet gets this many ids for each device, or as many as `replicas_of` returns
        for the device. topology: whether the kubelet gets the devices' NUMA nodes. The number of the kubelet's topology
        hints grows exponentially with the NUMA nodes (kubernetes#135541); set False if the kubelet becomes too slow.
        metadata: whether containers get files that describe their devices (KEP-5304), with the devices' attributes.
        policy: the choice of devices for a container that requests several, without a hook `prefer`. "links": devices
        with high link scores (from `links`, otherwise from NUMA nodes), and replicas of different devices. "packed":
        replicas of as few devices as possible. "distributed": replicas of the devices with the fewest replicas in use.
        "none": the first ids. hook_timeout: seconds after which a hook's call fails. The kubelet waits for Allocate
        without a deadline and admits no other pod meanwhile (kubernetes#117435). It waits 30 s for PreStartContainer,
        which calls `reset`, and 45 s for NodePrepareResources, which calls `reset` and `prepare`. At its start, the
        agent warns of timeouts that are too long for these calls. config_type: the type of a claim's opaque parameters:
        a type that msgspec can make of a JSON object, such as a Struct or a dataclass. Unknown fields are errors. None:
        the driver accepts no parameters.

    """

    resource: str = ""
    driver: str | None = None
    replicas: int = 1
    topology: bool = True
    metadata: bool = False
    policy: str = "links"
    hook_timeout: float = 10.0
    config_type: ClassVar[type[Any] | None] = None

    HOOKS: ClassVar[tuple[str, ...]] = ("edits", "reset", "prefer", "released", "prepare", "unprepare", "measure")

    def __init_subclass__(cls, **more: Any) -> None:
        """Check the names in a subclass.

        Raises TypeError if a name is close to that of a hook or setting, NamingError for a wrong resource or driver.
        """
        super().__init_subclass__(**more)
        own = cls.__dict__
        check_names(cls.__name__, own.get("resource"), own.get("driver"))
        for name, value in own.items():
            if not name.startswith("_") and (meant := _likely_name(cls, name, value)):
                what = "hook and would never be called" if isinstance(value, _METHODS) else "setting and has no effect"
                raise TypeError(
                    f"{cls.__name__}.{name} is no {what}; did you mean {meant}? "
                    f"If not, rename it, for example to _{name}"
                )

    def watch(self) -> AsyncIterator[Sequence[Device]] | Iterator[Sequence[Device]]:
        """Yield the full list of devices now, and again after each change.

        This method is an async generator, which must not block, or a plain generator, which runs in a thread of its own
        and may block. If the generator ends, its last list stays valid. If the generator raises an exception, or yields
        anything but lists of Device, `watch` is called again after a delay; until then, the last list stays valid.

            async def watch(self):
                while True:
                    yield [Device("fpga0", nodes=["/dev/fpga0"])]
                    await self.something_changed()
        """
        raise NotImplementedError(f"{type(self).__name__} must define watch()")

    def edits(self, devices: Sequence[Device]) -> ContainerEdits | Awaitable[ContainerEdits]:
        """Return the edits of a container in addition to the devices' own nodes, mounts and environment variables.

        For limits this hook is called once for each container, before the container exists, and again if the pod is
        admitted again. For claims it is called once for each request, also with administrative access. If a device is
        shared, the hook is called for each pod or claim. The hook must not change the devices. The environment
        variables, nodes and mounts that it returns take precedence over those of the devices:
        `ContainerEdits(env={"FPGAS": ",".join(device.id for device in devices)})`.
        """
        return ContainerEdits()

    def reset(self, devices: Sequence[Device]) -> Awaitable[None] | None:
        """Prepare the devices for their next user.

        For limits this hook is called before each start of a container, restarts included. For claims it is called
        once, when the claim is prepared, since the kubelet does not tell a DRA driver of restarts. So a clean-up
        between two users belongs into this hook or into `released`. If pods with claims use the device, work that each
        start of a container needs must be done by the program in the container.

        If pods share a device, the hook is called for each pod while other pods use the device. If claims share a
        device, the hook is called for the first claim only. It is never called for administrative access.

        If the hook raises an exception, the container does not start, and the kubelet tries again:
        `for device in devices: wipe(device.id)`
        """
        return None

    def prefer(
        self, available: Sequence[Device], must_include: Sequence[Device], size: int
    ) -> Sequence[Device | str] | Awaitable[Sequence[Device | str]]:
        """Return the `size` devices of `available` that a container should get, with all of `must_include`.

        The result contains devices or their ids. If the result is invalid or the hook raises an exception, the
        framework chooses the devices. Example: `[*must_include, *(device for device in available if device not in
        must_include)][:size]`
        """
        raise NotImplementedError

    def released(self, devices: Sequence[Device]) -> Awaitable[None] | None:
        """Clean up after the last pod or claim with these devices has ended; called once for a shared device.

        The device plugin API has no Deallocate, so the agent detects the end some seconds later, from the kubelet's
        checkpoint and the pods' cgroups. The agent calls this hook at least once, also for a device that is new or had
        no holder at the agent's start, so the hook must be idempotent. The device has no other holder before the hook
        has succeeded; after a failure the hook is called again: `for device in devices: wipe(device.id)`
        """
        return None

    def prepare(
        self, devices: Sequence[Device], config: Any
    ) -> ContainerEdits | Awaitable[ContainerEdits | None] | None:
        """Set up the devices of a claim's request; return further edits of its containers, in addition to `edits`.

        The hook is called for claims only, once for each request, after `reset`; not for administrative access. If
        claims share a device, the hook is called for each claim, always with the same parameters: a claim with other
        parameters is refused while another claim has the device. `config` is an instance of `config_type` from the
        parameters of DeviceClass and claim; parameters of the claim take precedence, and without parameters `config`
        has the defaults. Without a `config_type`, `config` is None. The hook may be called again for the same devices,
        after it failed or the agent ended. If the hook raises an exception, the claim's pods wait, and the kubelet
        tries again. `return ContainerEdits(env={"FPGA_MODE": config.mode})`
        """
        return None

    def unprepare(self, devices: Sequence[Device]) -> Awaitable[None] | None:
        """Undo `prepare` for all devices of a claim together, also if `prepare` failed.

        If claims share a device, the hook is called when the last of these claims ends. It is never called for
        administrative access.

        The hook may be called again, so it must not fail if there is nothing to undo:
        `self.modes.pop(device.id, None)`. If the hook raises an exception, the claim's pods cannot end, and the kubelet
        tries again.
        """
        return None

    def measure(self, devices: Sequence[Device]) -> Measured | Awaitable[Measured]:
        """Return, for each device id and quantity, the load; called periodically if the agent serves metrics.

        `deviceplugin.metrics.load` lists the common quantities (`utilization_ratio`, `memory_used_bytes`). Each other
        quantity becomes a metric of its own: use base units, and the suffix `_total` for a quantity that only grows.
        Leave out a quantity that a device cannot report, or return None, never 0: `{"fpga0": {"utilization_ratio": 0.5,
        "power_watts": None}}`. If the call fails or takes too long, the metrics are missing. A late call must end
        before the next call is made.
        """
        raise NotImplementedError

    def replicas_of(self, device: Device) -> int:
        """Return how many containers may share this device, 1 to `replicas`. The method must be a plain function.

        This method is called for each device of a list. If it returns an invalid number or raises an exception, the
        list is refused.

        `return 1 if device.attributes["model"] == "small" else self.replicas`
        """
        return self.replicas

    @property
    def links(self) -> Mapping[frozenset[str], float]:
        """Link scores: a number for each frozenset of two device ids; a higher number means closer.

        The property must not take long. The usual scale is the number of NVLinks times 100, plus the PCIe level; see
        `deviceplugin.topology.Link`. `{frozenset(("fpga0", "fpga1")): 100.0}`
        """
        return {}

    async def child_sources(self) -> AsyncIterator[Sequence[DeviceSource]]:
        """Yield the list of all child sources, each for a further resource; yield it again after a child was added.

        Define this method for resources that are known only after a read of the hardware, such as kinds of partitions:
        `yield [Halves("example.com/fpga-half")]`. Child sources are served until this source ends. After an error this
        generator is started again.
        """
        none: Sequence[Sequence[DeviceSource]] = ()
        for child_sources in none:
            yield child_sources

    @property
    def hooks(self) -> frozenset[str]:
        """The names of the hooks that the class defines."""
        return _hooks_of(type(self))  # type: ignore[arg-type]  # a class is hashable


_METHODS: Final = (types.FunctionType, staticmethod, classmethod, property)
_ALIKE: Final = 0.82
"""Minimum similarity (ratio of difflib) of a misspelling. `perfer` counts as a misspelling of `prefer`, but `match` is
not similar enough to `watch`."""


def check_names(kind: str, resource: object, driver: object) -> None:
    """Raise NamingError if a source's resource or driver is set but is not a valid name. kind: the class's name."""
    for field, name, check in (("resource", resource, naming.check_resource), ("driver", driver, naming.check_driver)):
        if isinstance(name, str) and name:
            try:
                check(name)
            except naming.NamingError as error:
                raise naming.NamingError(f"{kind}.{field}: {error}") from None


def _likely_name(kind: type[DeviceSource], name: str, value: object) -> str:
    """Return the method or setting of `DeviceSource` of which a name is probably a misspelling; "" if there is none.

    The name of a call in the kubelet's API counts as a misspelling of the hook for this call. A name is not a
    misspelling of a method or setting that the class also defines, or of a setting with a value of another type.

    A misspelling is an error, not a warning: without a call of `released`, for example, the next user of a device can
    read the data of the last user. The author of a source can rename a method that is not a misspelling.
    """
    if hasattr(DeviceSource, name):
        return ""
    method = isinstance(value, _METHODS)
    # `links` is the only property, so a property can only be a misspelling of `links`, and a method only of another
    # name.
    hooks = [hook for hook in _OPTIONAL if isinstance(value, property) == (hook == "links")]
    names = hooks if method else [setting for setting, kind_of in _SETTINGS.items() if isinstance(value, kind_of)]
    free = [candidate for candidate in names if getattr(kind, candidate) is getattr(DeviceSource, candidate)]
    if (meant := _OTHER_NAMES.get(name.lower().replace("_", ""))) in free:
        return str(meant)
    letters = Counter(name.lower())
    # The number of common letters, in any order, gives an upper bound of difflib's ratio. Only names above `_ALIKE` by
    # this bound need difflib, so most programs do not import it.
    near = [
        candidate
        for candidate in free
        if 2 * (letters & Counter(candidate)).total() >= _ALIKE * (len(name) + len(candidate))
    ]
    if not near:
        return ""
    import difflib

    return next(iter(difflib.get_close_matches(name.lower(), near, 1, _ALIKE)), "")


_OPTIONAL: Final = ("watch", *DeviceSource.HOOKS, "replicas_of", "links", "child_sources")
_SETTINGS: Final[Mapping[str, type | tuple[type, ...]]] = {
    "resource": str,
    "driver": str,
    "replicas": int,
    "topology": bool,
    "metadata": bool,
    "policy": str,
    "hook_timeout": (int, float),
    "config_type": type,
}
_OTHER_NAMES: Final = {
    "listandwatch": "watch",
    "allocate": "edits",
    "prestartcontainer": "reset",
    "getpreferredallocation": "prefer",
    "resourcename": "resource",
}
"""For each name in the kubelet's API (in lower case), the method or setting of `DeviceSource` with the same purpose."""


@functools.cache  # The names are cached, because each Allocate needs them.
def _hooks_of(kind: type[DeviceSource]) -> frozenset[str]:
    return frozenset(name for name in kind.HOOKS if getattr(kind, name) is not getattr(DeviceSource, name))
