"""Values that describe devices and what a container gets with them: frozen, no I/O."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from types import MappingProxyType
from typing import Any, Final, TypeVar

_T = TypeVar("_T")
_NO_STRINGS: Final[Mapping[str, str]] = MappingProxyType({})
_NO_ATTRIBUTES: Final[Mapping[str, Any]] = MappingProxyType({})


class Health(enum.Enum):
    """What is known of a device's health. A device of unknown health is still offered, since it need not be broken.

    A source says it of each device in each list: `Device("fpga0", health=Health.UNHEALTHY, message="over 95 °C")`. An
    unhealthy device is given to nobody; who has it keeps it. UNKNOWN is for what could not be read.
    """

    HEALTHY = "healthy"
    UNHEALTHY = "unhealthy"
    UNKNOWN = "unknown"

    @property
    def usable(self) -> bool:
        """Whether new containers may be given such a device."""
        return self is not Health.UNHEALTHY


class Version(str):
    """A semantic version as an attribute value, so that selectors can compare it as one."""

    __slots__ = ()


AttributeValue = str | int | bool | Version
"""What an attribute of a device may be; the four kinds of resource.k8s.io."""


class EditConflictError(ValueError):
    """Raised when two edits of one container contradict each other."""


def counted(number: int, what: str = "device") -> str:
    """Return a number with its noun: "1 device", "2 devices"."""
    return f"{number} {what}{'' if number == 1 else 's'}"


def printable(text: str) -> str:
    """Return text with its control and other unprintable characters escaped."""
    return text if text.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def _absolute(path: object, what: str) -> None:
    if not isinstance(path, str):
        raise TypeError(f"{what} must be a string such as {str(path)!r}, not {path!r}")
    if not path.startswith("/"):
        raise ValueError(f"{what} must be an absolute path, not {path!r}")


@dataclass(frozen=True, slots=True)
class DeviceNode:
    """A device node of the host and how a container sees it.

    `container` empty means the same path as on the host. `permissions` is any of r (read), w (write) and m (mknod).
    """

    host: str
    container: str = ""
    permissions: str = "rw"

    def __post_init__(self) -> None:
        _absolute(self.host, "a device node's host path")
        if self.container:
            _absolute(self.container, "a device node's container path")
        if not self.permissions or set(self.permissions) - set("rwm"):
            raise ValueError(f"permissions must be made of r, w and m, not {self.permissions!r}")

    @property
    def path(self) -> str:
        """Where the container finds the node."""
        return self.container or self.host


@dataclass(frozen=True, slots=True)
class Mount:
    """A file or directory of the host, bind-mounted into a container."""

    host: str
    container: str
    readonly: bool = True

    def __post_init__(self) -> None:
        _absolute(self.host, "a mount's host path")
        _absolute(self.container, "a mount's container path")


@dataclass(frozen=True, slots=True)
class ContainerEdits:
    """What a container gets together with its devices, on either side.

    env: variables by name. nodes: device nodes; a plain string is that node at the same path, read and write. mounts:
    bind mounts. annotations: for the container runtime (the plugin side only, they are not the pod's). cdi: fully
    qualified CDI device names, vendor.com/class=name.
    """

    env: Mapping[str, str] = field(default_factory=lambda: _NO_STRINGS)
    nodes: Sequence[DeviceNode | str] = ()
    mounts: Sequence[Mount] = ()
    annotations: Mapping[str, str] = field(default_factory=lambda: _NO_STRINGS)
    cdi: Sequence[str] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "nodes", _nodes(self.nodes))
        if isinstance(self.cdi, str):
            raise TypeError(f"cdi must be a list of names such as [{self.cdi!r}], not the string {self.cdi!r}")
        object.__setattr__(self, "mounts", tuple(self.mounts))
        object.__setattr__(self, "cdi", tuple(self.cdi))
        for mount in self.mounts:
            if not isinstance(mount, Mount):
                raise TypeError(f"mounts must be made of Mount(host, container), not {mount!r}")
        for name in self.cdi:
            if not isinstance(name, str):
                raise TypeError(f"cdi must be made of strings such as 'vendor.com/class=name', not {name!r}")
        _strings("env", self.env)
        _strings("annotations", self.annotations)

    def __bool__(self) -> bool:
        return bool(self.env or self.nodes or self.mounts or self.annotations or self.cdi)

    @property
    def device_nodes(self) -> tuple[DeviceNode, ...]:
        """The nodes, all of them as DeviceNode."""
        return self.nodes  # type: ignore[return-value]  # __post_init__ made them so

    @classmethod
    def merge(cls, edits: Iterable[ContainerEdits], winner: ContainerEdits | None = None) -> ContainerEdits:
        """Put edits together into one; equal entries are kept once, those of `winner` replace the others'.

        Raises EditConflictError if two edits give one variable, annotation, node or mount point different contents, and
        `winner` does not. A value that devices must share (a list of ids, say) is made by the source's `edits` hook,
        which gets all devices of the container.
        """
        parts = (winner or NO_EDITS, *edits)
        nodes = _united("device node", [[(node.path, node) for node in part.device_nodes] for part in parts])
        mounts = _united("mount at", [[(mount.container, mount) for mount in part.mounts] for part in parts])
        env = _united("environment variable", [part.env.items() for part in parts])
        annotations = _united("annotation", [part.annotations.items() for part in parts])
        cdi = dict.fromkeys(name for part in (*parts[1:], parts[0]) for name in part.cdi)
        return cls(env, tuple(nodes.values()), tuple(mounts.values()), annotations, tuple(cdi))


def _united(what: str, parts: Sequence[Iterable[tuple[str, _T]]]) -> dict[str, _T]:
    """Return the entries of all parts; those of the first replace the others'."""
    settled = dict(parts[0])
    found = settled.copy()
    for key, value in chain.from_iterable(parts[1:]):
        if key not in settled and found.setdefault(key, value) != value:
            raise EditConflictError(f"{what} {key!r} is given twice: {found[key]!r} and {value!r}")
    return found


def _are_numbers(numa: object) -> bool:
    several = numa if isinstance(numa, Sequence) and not isinstance(numa, str | bytes) else (numa,)
    return all(isinstance(one, int) and not isinstance(one, bool) for one in several)


def _strings(field_name: str, entries: Mapping[str, str]) -> None:
    if entries is _NO_STRINGS:
        return
    if not isinstance(entries, Mapping):
        raise TypeError(f"{field_name} must be a dict of strings such as {{'NAME': 'value'}}, not {entries!r}")
    for name, value in entries.items():
        if not isinstance(name, str):
            raise TypeError(f"{field_name}: the name {name!r} must be a string such as {str(name)!r}")
        if not isinstance(value, str):
            raise TypeError(
                f"{field_name}: the value of {name!r} must be a string such as {str(value)!r}, not {value!r}"
            )


def _nodes(nodes: Sequence[DeviceNode | str]) -> tuple[DeviceNode, ...]:
    if isinstance(nodes, str) or not isinstance(nodes, Iterable):
        kind = "the string " if isinstance(nodes, str) else ""
        raise TypeError(f"nodes must be a sequence of device nodes such as ['/dev/fpga0'], not {kind}{nodes!r}")
    return tuple(node if isinstance(node, DeviceNode) else DeviceNode(node) for node in nodes)


NO_EDITS: Final = ContainerEdits()


@dataclass(frozen=True, slots=True)
class Device:
    """One device of a node, the same on both sides.

    id: its name on this node, 1 to 63 characters, the same after a restart (the kubelet's checkpoint remembers it).
    numa: the NUMA node or nodes it is close to, None if unknown.
    nodes: its device nodes. edits: what else a container gets that holds it.
    attributes: what claims select on; unqualified names belong to the driver's domain.
    capacity: amounts by name, an int or a Kubernetes quantity such as "16Gi".
    message: why it is not healthy, for people.
    consumes: what it takes of shared counters while it has a holder, by counter set and counter. Partitions of one
        physical device exclude each other by it: none is granted if the counters do not suffice.
    counters: whole counter sets that it brings along, by name; several partitions may bring the same one.
    identity: what it is, beyond its id (a serial number, say), without spaces; two devices of one identity are one
        thing, and never have two holders. The numbers of `nodes` that no other device of the list has identify it, too.
    """

    id: str
    nodes: Sequence[DeviceNode | str] = ()
    numa: int | Sequence[int] | None = None
    health: Health = Health.HEALTHY
    attributes: Mapping[str, AttributeValue] = field(default_factory=lambda: _NO_ATTRIBUTES)
    capacity: Mapping[str, int | str] = field(default_factory=lambda: _NO_ATTRIBUTES)
    edits: ContainerEdits = field(default_factory=lambda: NO_EDITS)
    message: str = ""
    consumes: Mapping[str, Mapping[str, int | str]] = field(default_factory=lambda: _NO_ATTRIBUTES)
    counters: Mapping[str, Mapping[str, int | str]] = field(default_factory=lambda: _NO_ATTRIBUTES)
    identity: str = ""

    def __post_init__(self) -> None:
        # A source may list thousands of devices at once: what is right passes by identity and type.
        if not isinstance(self.id, str):
            raise TypeError(f"a device's id must be a string such as {str(self.id)!r}, not {self.id!r}")
        if not 0 < len(self.id) <= MAX_ID or not self.id.isprintable() or " " in self.id:
            raise ValueError(f"a device id is 1 to {MAX_ID} printable characters without spaces, not {self.id!r}")
        if type(self.health) is not Health:
            text = "health must be Health.HEALTHY, Health.UNHEALTHY or Health.UNKNOWN"
            raise self._mistake(f"{text}, not {self.health!r}")
        if not (self.numa is None or type(self.numa) is int or _are_numbers(self.numa)):
            raise self._mistake(f"numa must be a NUMA node such as 0, a list of them or None, not {self.numa!r}")
        if not isinstance(self.edits, ContainerEdits):
            raise self._mistake(f"edits must be ContainerEdits(env={{'NAME': 'value'}}), say, not {self.edits!r}")
        if not isinstance(self.message, str):
            raise self._mistake(f"message must be a string, not {self.message!r}")
        if not isinstance(self.identity, str):
            raise self._mistake(f"identity must be a string, not {self.identity!r}")
        for mapping in (self.attributes, self.capacity, self.consumes, self.counters):
            if mapping is not _NO_ATTRIBUTES and not isinstance(mapping, Mapping):
                raise self._mistake(
                    f"attributes, capacity, consumes and counters must be dicts by name, not {mapping!r}"
                )
        if " " in self.identity or not self.identity.isprintable():
            raise ValueError(f"a device's identity is printable characters without spaces, not {self.identity!r}")
        try:
            object.__setattr__(self, "nodes", _nodes(self.nodes))
        except (TypeError, ValueError) as error:
            raise type(error)(f"device {self.id!r}: {error}") from None

    def __hash__(self) -> int:
        return hash(self.id)

    def _mistake(self, text: str) -> TypeError:
        return TypeError(f"device {self.id!r}: {text}")

    @property
    def numa_nodes(self) -> tuple[int, ...]:
        """The NUMA nodes as a tuple, empty if unknown."""
        if self.numa is None:
            return ()
        return (self.numa,) if isinstance(self.numa, int) else tuple(self.numa)

    @property
    def container_edits(self) -> ContainerEdits:
        """What this device alone puts into a container: its nodes and its edits."""
        return replace(self.edits, nodes=(*self.nodes, *self.edits.nodes)) if self.nodes else self.edits

    def with_health(self, health: Health, message: str = "") -> Device:
        """Return the same device in another state of health."""
        if (self.health, self.message) == (health, message):
            return self
        return replace(self, health=health, message=message)


MAX_ID: Final = 63
"""Characters of a device id (the kubelet's API says so; it does not check)."""
