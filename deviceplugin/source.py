"""What an author writes: a source of devices, and hooks around their use.

Hooks may be plain functions, which run in a thread of their own, or coroutine functions, which must not block. Each
has a deadline, and one that fails costs its own call only.
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
"""Device id -> quantity -> number, or numbers by part ("xid_errors_total": {"79": 1})."""


class DeviceSource:
    """A kind of device on this node; derive from it, name a resource, write `watch`.

    docs/sources.md has an example of each hook, with a test. A name that is almost a hook's or a setting's is
    refused when the class is defined (TypeError), and so are names that no resource or driver has (NamingError).

    Attributes:
        resource: the extended resource, vendor-domain/name, as pods ask for it.
        driver: the DRA driver's name as DeviceClasses select it, or None for a plugin only.
        replicas: how many containers may share one device; above 1 the kubelet sees that many ids for each device
            (fewer where `replicas_of` says so).
        topology: whether the kubelet learns the devices' NUMA nodes. Its hints grow exponentially with the nodes
            (kubernetes#135541); leave them out where that hurts.
        policy: which devices go well together where a pod wants several and there is no `prefer`: "links", closely
            linked ones (by `links`, by NUMA nodes without them), replicas of different devices; "packed", replicas of
            few devices; "distributed", replicas of the devices that are used least; "none", the first.
        hook_timeout: seconds after which a hook's call is given up. The kubelet waits for Allocate without a deadline
            and admits no other pod meanwhile (kubernetes#117435), 30 s for PreStartContainer, which calls `reset`, and
            45 s for NodePrepareResources, which calls `reset` and `prepare`: a longer time is warned of at the start.
        config_type: what a claim's opaque parameters are decoded into, any type that msgspec can convert a JSON object
            to (a Struct, a dataclass). Unknown fields are errors. None: this driver takes no parameters.

    """

    resource: str = ""
    driver: str | None = None
    replicas: int = 1
    topology: bool = True
    policy: str = "links"
    hook_timeout: float = 10.0
    config_type: ClassVar[type[Any] | None] = None

    HOOKS: ClassVar[tuple[str, ...]] = ("edits", "reset", "prefer", "released", "prepare", "unprepare", "measure")

    def __init_subclass__(cls, **more: Any) -> None:
        """Raise TypeError if a name is almost a hook's or setting's, NamingError if resource or driver is none."""
        super().__init_subclass__(**more)
        own = cls.__dict__
        check_names(cls.__name__, own.get("resource"), own.get("driver"))
        for name, value in own.items():
            if not name.startswith("_") and (meant := _likely_name(cls, name, value)):
                what = "hook and would never be called" if isinstance(value, _METHODS) else "setting and has no effect"
                raise TypeError(
                    f"{cls.__name__}.{name} is no {what}; did you mean {meant}? "
                    f"One of your own needs another name, _{name} for example"
                )

    def watch(self) -> AsyncIterator[Sequence[Device]] | Iterator[Sequence[Device]]:
        """Yield the full list of devices now, and again whenever anything about it changes.

        An async generator, which must not block, or a plain one, which runs in a thread of its own and may block. When
        it ends, its last list stays valid. When it raises, or yields anything but lists of Device, it is started again
        after a while; its last list stays valid meanwhile.

            async def watch(self):
                while True:
                    yield [Device("fpga0", nodes=["/dev/fpga0"])]
                    await self.something_changed()
        """
        raise NotImplementedError(f"{type(self).__name__} must define watch()")

    def edits(self, devices: Sequence[Device]) -> ContainerEdits | Awaitable[ContainerEdits]:
        """Return what a container with these devices gets beyond what they carry themselves.

        Called once a container, before it exists, and again if it is admitted again; for a claim once for each of its
        requests. It runs for each of those that share a device, also for administrative access, and changes no device.
        Its variables, nodes and mounts replace those of the devices:
        `ContainerEdits(env={"FPGAS": ",".join(device.id for device in devices)})`.
        """
        return ContainerEdits()

    def reset(self, devices: Sequence[Device]) -> Awaitable[None] | None:
        """Make the devices ready for their next user.

        With limits it is called before each start of a container, also of one that starts again in its pod. With
        claims it is called once, when the claim is prepared: the kubelet tells a DRA driver nothing of containers that
        start again. What has to be done between two users belongs to `released` or to this hook; what each start
        needs, the program in the container must do itself, if pods with claims use it.

        Of a device that pods share it runs for each of them, while the others use it. Of one that claims share it runs
        for the first alone, and never for administrative access.

        An error keeps the container from starting; the kubelet tries again. `for device in devices: wipe(device.id)`
        """
        return None

    def prefer(
        self, available: Sequence[Device], must_include: Sequence[Device], size: int
    ) -> Sequence[Device | str] | Awaitable[Sequence[Device | str]]:
        """Return the `size` devices out of `available` that go best together, `must_include` among them.

        An answer that does not fit (or an error) is replaced by the framework's own choice. Devices or their ids:
        `[*must_include, *(device for device in available if device not in must_include)][:size]`
        """
        raise NotImplementedError

    def released(self, devices: Sequence[Device]) -> Awaitable[None] | None:
        """Take note that the last pod or claim that had these devices is gone: once for all that shared one.

        The device plugin API has no Deallocate: this follows from the kubelet's checkpoint and the pods' cgroups, some
        seconds later, at least once. Soon after the start of the process it is called for all devices without a holder.
        So it does again what it has done: `for device in devices: wipe(device.id)`
        """
        return None

    def prepare(
        self, devices: Sequence[Device], config: Any
    ) -> ContainerEdits | Awaitable[ContainerEdits | None] | None:
        """Set devices up as a claim's request wants them; return what its containers get beyond `edits`.

        Called on the DRA side only, once for each request of a claim, after `reset`; not for administrative access. It
        runs for each claim that shares a device, always with the same parameters: a claim with others is refused while
        another one has the device. `config` is a `config_type` made from the parameters of class and claim (the claim's
        win; its defaults without any), None without one. It may be called again for the same devices, if it failed or
        the agent ended; an error is the claim's, its pods wait and the kubelet tries again.
        `return ContainerEdits(env={"FPGA_MODE": config.mode})`
        """
        return None

    def unprepare(self, devices: Sequence[Device]) -> Awaitable[None] | None:
        """Undo `prepare`, for all devices of a claim together; also where `prepare` failed.

        Of a device that claims share it is called when the last of them ends; never for administrative access.

        It may be called again, so that what is not there any more is no error: `self.modes.pop(device.id, None)`. An
        error keeps the claim's pods from ending; the kubelet tries again.
        """
        return None

    def measure(self, devices: Sequence[Device]) -> Measured | Awaitable[Measured]:
        """Return how busy the devices are, by id and quantity; called at a period if there are metrics.

        `deviceplugin.metrics.load` knows the common quantities (`utilization_ratio`, `memory_used_bytes`); others
        become metrics of their own, in base units, with `_total` at the end if they only grow. What a device cannot
        tell is left out or None, never 0: `{"fpga0": {"utilization_ratio": 0.5, "power_watts": None}}`. After an error
        or a timeout nothing is shown; the next call follows when this one has ended.
        """
        raise NotImplementedError

    def replicas_of(self, device: Device) -> int:
        """Return how many containers may share this one device, 1 to `replicas`; a plain function.

        It is called for each device of a list. Any other answer, or an error, fails the list.

        `return 1 if device.attributes["model"] == "small" else self.replicas`
        """
        return self.replicas

    @property
    def links(self) -> Mapping[frozenset[str], float]:
        """How close two devices are, frozenset of their ids -> number, higher is closer; cheap to ask.

        The usual scale is the number of NVLinks times 100, plus the PCIe level; see `deviceplugin.topology.Link`.
        `{frozenset(("fpga0", "fpga1")): 100.0}`
        """
        return {}

    async def child_sources(self) -> AsyncIterator[Sequence[DeviceSource]]:
        """Yield the sources of further resources that come with this one, all of them, when one more is known.

        They are served until this one ends; after an error this is called again. Which kinds of partitions there are,
        for example, is known only when the hardware is read: `yield [Halves("example.com/fpga-half")]`
        """
        none: Sequence[Sequence[DeviceSource]] = ()
        for child_sources in none:
            yield child_sources

    @property
    def hooks(self) -> frozenset[str]:
        """The hooks that this source really has."""
        return _hooks_of(type(self))  # type: ignore[arg-type]  # a class is hashable


_METHODS: Final = (types.FunctionType, staticmethod, classmethod, property)
_ALIKE: Final = 0.82
"""How alike two names are (difflib) of which one is taken for a mistake: perfer is, watch and match are not."""


def check_names(kind: str, resource: object, driver: object) -> None:
    """Raise NamingError, with the class's name, unless a source's resource and driver are valid names, or not set."""
    for field, name, check in (("resource", resource, naming.check_resource), ("driver", driver, naming.check_driver)):
        if isinstance(name, str) and name:
            try:
                check(name)
            except naming.NamingError as error:
                raise naming.NamingError(f"{kind}.{field}: {error}") from None


def _likely_name(kind: type[DeviceSource], name: str, value: object) -> str:
    """Return the method or setting of `DeviceSource` that a name is almost that of; "" if none.

    Also the hook that a call of the kubelet's API becomes. What the class itself has was not misspelt, and a value of
    another type than a setting's is the author's own.

    It is an error, not a warning: a `released` that is never called leaves one user's data to the next, and nothing
    else shows it. Who means another method only has to rename it.
    """
    if hasattr(DeviceSource, name):
        return ""
    method = isinstance(value, _METHODS)
    # A property is not misspelt by a plain method, nor the other way round.
    hooks = [hook for hook in _OPTIONAL if isinstance(value, property) == (hook == "links")]
    names = hooks if method else [setting for setting, kind_of in _SETTINGS.items() if isinstance(value, kind_of)]
    free = [candidate for candidate in names if getattr(kind, candidate) is getattr(DeviceSource, candidate)]
    if (meant := _OTHER_NAMES.get(name.lower().replace("_", ""))) in free:
        return str(meant)
    letters = Counter(name.lower())
    # No word is more alike than by its letters in any order; with most names this spares every agent the import.
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
"""What is meant by names of the kubelet's API."""


@functools.cache  # needed by every Allocate; a class does not change
def _hooks_of(kind: type[DeviceSource]) -> frozenset[str]:
    return frozenset(name for name in kind.HOOKS if getattr(kind, name) is not getattr(DeviceSource, name))
