"""Defines immutable values: devices, and the changes to a container that gets devices."""

from __future__ import annotations

import enum
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Final

_NOTHING: Final[Mapping[str, Any]] = MappingProxyType({})
_DIGITS: Final = re.compile(r"([0-9]+)")
CDI_NAME: Final = (
    r"[a-zA-Z0-9](?:[-a-zA-Z0-9_.]*[a-zA-Z0-9])?/[a-zA-Z](?:[-a-zA-Z0-9_]*[a-zA-Z0-9])?"
    r"=[a-zA-Z0-9](?:[-a-zA-Z0-9_.:]*[a-zA-Z0-9])?"
)
LABEL: Final = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
"""Matches a DNS label (RFC 1123). Device names in ResourceSlices must be DNS labels."""
LABEL_IN_WORDS: Final = "1 to 63 lower-case letters, digits and '-' (not at the ends)"
QUANTITY: Final = re.compile(
    r"(?P<sign>[+-]?)(?P<number>[0-9]+(\.[0-9]*)?|\.[0-9]+)(?P<suffix>[KMGTPE]i|[numkMGTPE]?|[eE][+-]?[0-9]{1,3})"
)
"""Matches the text of a Kubernetes quantity, such as "16Gi" (apimachinery, pkg/api/resource)."""


class Health(enum.Enum):
    """The health of a device. A device whose health is unknown is still offered, because it may be intact.

    A source sets the health of each device that it lists: `Device("fpga0", health=Health.UNHEALTHY, message="over 95
    °C")`. New pods and claims do not get an unhealthy device. If a device becomes unhealthy while a pod or claim has
    it, this pod or claim keeps it. UNKNOWN: the health could not be read.
    """

    HEALTHY = "healthy"
    UNHEALTHY = "unhealthy"
    UNKNOWN = "unknown"

    @property
    def usable(self) -> bool:
        """Whether a device with this health may be allocated to new containers."""
        return self is not Health.UNHEALTHY


class Version(str):
    """A semantic version as the value of an attribute. Selectors of claims compare such values as versions."""

    __slots__ = ()


AttributeValue = str | int | bool | Version
"""The value of a device's attribute, of one of the four types in resource.k8s.io."""


class EditConflictError(ValueError):
    """Raised when two edits for one container contradict each other."""


def counted(number: int, what: str = "device") -> str:
    """Return a number and its noun as text: "1 device", "2 devices"."""
    return f"{number} {what}{'' if number == 1 else 's'}"


def some(names: Sequence[str], most: int) -> str:
    """Return the first `most` names as text, with the number of the others: "a, b and 3 more"."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def printable(text: str) -> str:
    """Return a text with control characters escaped, because these can change a terminal's cursor or text direction."""
    return text if text.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def natural(device: str) -> tuple[object, ...]:
    """Return a sort key for ids. Numbers in ids are compared by value: sim-2, sim-02, sim-10."""
    parts: list[object] = _DIGITS.split(device)
    for at in range(1, len(parts), 2):
        number = str(parts[at]).lstrip("0")
        parts[at] = (len(number), number)
    return tuple(parts), device


_STRING: Final = "a string such as {!r}"
_QUANTITY: Final = "an integer or a quantity such as '16Gi'"


def _typed(what: str, value: object, kind: type | tuple[type, ...], right: str) -> None:
    if not isinstance(value, kind):
        raise TypeError(f"{what} must be {right}, not {value!r}")


def _string(what: str, value: object) -> None:
    if not isinstance(value, str):
        raise TypeError(f"{what} must be {_STRING.format(str(value))}, not {value!r}")


def _absolute(path: object, what: str) -> None:
    _string(what, path)
    if not str(path).startswith("/"):
        raise ValueError(f"{what} must be an absolute path, not {path!r}")


def _is_quantity(value: object) -> bool:
    return type(value) is int or (isinstance(value, str) and QUANTITY.fullmatch(value) is not None)


def _entries(what: str, entries: object, right: str, fits: Callable[[Any], bool], value: str) -> None:
    """Raise TypeError unless `entries` is a mapping of strings to values for which `fits` returns True.

    what: the name of the mapping in the message. right: a description of a valid mapping, for the message. value: a
    description of a valid value, for the message.
    """
    if entries is _NOTHING:
        return
    _typed(what, entries, Mapping, right)
    for name, given in entries.items():  # type: ignore[attr-defined]  # a Mapping has it
        if not isinstance(name, str):
            raise TypeError(f"{what}: the name {name!r} must be {_STRING.format(str(name))}")
        if not fits(given):
            raise TypeError(f"{what}: the value of {name!r} must be {value.format(str(given))}, not {given!r}")


def _strings(what: str, entries: object) -> None:
    _entries(what, entries, "a dict of strings such as {'NAME': 'value'}", lambda text: isinstance(text, str), _STRING)


def _label(what: str, name: str) -> None:
    if not LABEL.fullmatch(name):
        raise ValueError(f"{what} must be {LABEL_IN_WORDS}, not {name!r}")


def _counters(what: str, sets: object) -> None:
    right = "{set: {counter: amount}} such as {'gpu0': {'memory': '4Gi'}}"

    def fits(amounts: object) -> bool:
        _entries(what, amounts, right, _is_quantity, _QUANTITY)
        return True

    _entries(what, sets, right, fits, "")
    for name, amounts in sets.items():  # type: ignore[attr-defined]  # a Mapping has it
        _label(f"{what}: a counter set's name", name)
        for counter in amounts:
            _label(f"{what}: a counter's name in set {name!r}", counter)


def _list(what: str, items: object, right: str) -> tuple[Any, ...]:
    if isinstance(items, str | bytes) or not isinstance(items, Iterable):
        kind = "the string " if isinstance(items, str) else ""
        raise TypeError(f"{what} must be a sequence of {right}, not {kind}{items!r}")
    return tuple(items)


def _nodes(nodes: Sequence[DeviceNode | str]) -> tuple[DeviceNode, ...]:
    listed = _list("nodes", nodes, "device nodes such as ['/dev/fpga0']")
    return tuple(node if isinstance(node, DeviceNode) else DeviceNode(node) for node in listed)


@dataclass(frozen=True, slots=True)
class DeviceNode:
    """A device node of the host, and its path and permissions in a container.

    If `container` is empty, the path in the container is the same as on the host. `permissions` is a combination of r
    (read), w (write) and m (mknod). If `host` is a symlink, `target` is the link's target at the source's last scan;
    the container runtime gets `host` and resolves the link itself.
    """

    host: str
    container: str = ""
    permissions: str = "rw"
    target: str = ""

    def __post_init__(self) -> None:
        _absolute(self.host, "a device node's host path")
        if self.container != "":
            _absolute(self.container, "a device node's container path")
        if self.target != "":
            _absolute(self.target, "a device node's target")
        _string("permissions", self.permissions)
        if not self.permissions or set(self.permissions) - set("rwm"):
            raise ValueError(f"permissions must be made of r, w and m, not {self.permissions!r}")

    @property
    def path(self) -> str:
        """The path in the container."""
        return self.container or self.host

    @property
    def real(self) -> str:
        """The target of the symlink `host`, if the source has resolved it; otherwise `host`."""
        return self.target or self.host


@dataclass(frozen=True, slots=True)
class Mount:
    """A file or directory of the host, bind-mounted into a container."""

    host: str
    container: str
    readonly: bool = True

    def __post_init__(self) -> None:
        _absolute(self.host, "a mount's host path")
        _absolute(self.container, "a mount's container path")
        _typed("a mount's readonly", self.readonly, bool, "True or False")


@dataclass(frozen=True, slots=True)
class ContainerEdits:
    """The changes to a container that gets devices.

    env: for each environment variable, the value. nodes: device nodes; a plain string means the node at the same path,
    with permissions rw. mounts: bind mounts. annotations: annotations of the container for the container runtime (only
    for devices by `limits`; they are not the pod's annotations). cdi: fully qualified CDI device names,
    vendor.com/class=name.
    """

    env: Mapping[str, str] = field(default_factory=lambda: _NOTHING)
    nodes: Sequence[DeviceNode | str] = ()
    mounts: Sequence[Mount] = ()
    annotations: Mapping[str, str] = field(default_factory=lambda: _NOTHING)
    cdi: Sequence[str] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "nodes", _nodes(self.nodes))
        object.__setattr__(self, "mounts", _list("mounts", self.mounts, "Mount(host, container)"))
        object.__setattr__(self, "cdi", _list("cdi", self.cdi, "names such as 'example.com/fpga=fpga0'"))
        for mount in self.mounts:
            _typed("an entry of mounts", mount, Mount, "Mount(host, container)")
        for name in self.cdi:
            if not isinstance(name, str) or not re.fullmatch(CDI_NAME, name):
                raise TypeError(f"cdi must be made of strings such as 'vendor.com/class=name', not {name!r}")
        _strings("env", self.env)
        if wrong := [name for name in self.env if not name or "=" in name]:
            raise ValueError(f"env: {wrong[0]!r}: a variable's name is not empty and has no '='")
        _strings("annotations", self.annotations)

    def __bool__(self) -> bool:
        return bool(self.env or self.nodes or self.mounts or self.annotations or self.cdi)

    @property
    def device_nodes(self) -> tuple[DeviceNode, ...]:
        """The device nodes, each as a DeviceNode."""
        return self.nodes  # type: ignore[return-value]  # __post_init__ made them so

    @classmethod
    def merge(cls, edits: Iterable[ContainerEdits], winner: ContainerEdits | None = None) -> ContainerEdits:
        """Merge edits into one. Equal entries occur once in the result. Entries of `winner` replace entries of `edits`.

        Raises EditConflictError if two edits differ in one environment variable, annotation, node or mount point, and
        `winner` does not set it. For a value that depends on several devices, such as a list of ids, a source has the
        hook `edits`, which gets all devices of the container.
        """
        parts = (NO_EDITS if winner is None else winner, *edits)
        united: dict[str, dict[str, Any]] = {}
        for field_name, key, what in _KINDS:
            union: dict[str, Any] = {}
            first: frozenset[str] = frozenset()
            for part in parts:
                entries = getattr(part, field_name)
                for entry in entries:
                    name, value = (getattr(entry, key), entry) if key else (entry, entries[entry])
                    if part is parts[0]:
                        union[name] = value
                    elif name not in first and union.setdefault(name, value) != value:
                        raise EditConflictError(f"{what} {name!r} is given twice: {union[name]!r} and {value!r}")
                if part is parts[0]:
                    first = frozenset(union)
            united[field_name] = union
        names: dict[str, None] = {}
        for part in (*parts[1:], parts[0]):
            names |= dict.fromkeys(part.cdi)
        nodes, mounts = tuple(united["nodes"].values()), tuple(united["mounts"].values())
        return _checked(united["env"], nodes, mounts, united["annotations"], tuple(names))


_KINDS: Final = (
    ("nodes", "path", "device node"),
    ("mounts", "container", "mount at"),
    ("env", "", "environment variable"),
    ("annotations", "", "annotation"),
)
"""For each field of `ContainerEdits`: the attribute of an entry that identifies the entry ("" if the field is a
mapping), and the word for an entry in messages."""


def _checked(
    env: Mapping[str, str],
    nodes: tuple[DeviceNode, ...],
    mounts: tuple[Mount, ...],
    annotations: Mapping[str, str],
    cdi: tuple[str, ...],
) -> ContainerEdits:
    """Return edits with these entries, without checks, because the entries come from edits that were checked.

    Each Allocate calls this function, so it must be fast.
    """
    edits = object.__new__(ContainerEdits)
    for name, value in (("env", env), ("nodes", nodes), ("mounts", mounts), ("annotations", annotations), ("cdi", cdi)):
        object.__setattr__(edits, name, value)
    return edits


def _are_numbers(numa: object) -> bool:
    several = numa if isinstance(numa, Sequence) and not isinstance(numa, str | bytes) else (numa,)
    return all(isinstance(one, int) and not isinstance(one, bool) and -1 <= one <= MAX_NUMA for one in several)


NO_EDITS: Final = ContainerEdits()


@dataclass(frozen=True, slots=True)
class Device:
    """One device of a node, for pods' limits and for claims.

    id: the device's name on this node, of 1 to 63 characters. The id must be the same after a restart, because the
    kubelet's checkpoint contains the id. numa: the device's NUMA node or nodes; None, or -1 as in sysfs, if unknown.
    nodes: the device nodes. edits: further edits of a container with the device. attributes: attributes by which claims
    select devices; names without a domain belong to the driver's domain. capacity: for each capacity in DRA (by name),
    an int or a Kubernetes quantity such as "16Gi". message: the reason why the device is not healthy. consumes: for
    each counter set and each of its counters, the quantity that the device takes while it has a holder. A device is not
    granted if a counter would become negative. So partitions of one physical device exclude each other. counters: for
    each counter set that the device declares, the quantity of each counter. Several partitions may declare the same
    set. identity: a text without spaces that identifies the hardware, such as a serial number. Devices with equal
    identities are the same hardware and never have two holders. The agent also identifies the hardware by device
    numbers in `nodes`: by the numbers that no other listed device has, or by all numbers if other devices have each of
    them. So put a node that partitions share into the `edits` of each partition. part_of: the identities of larger
    devices of which this device is a part, and the numbers of their device nodes, such as `char:195:0`. This device and
    such a device never have holders at the same time; parts of one device can.
    """

    id: str
    nodes: Sequence[DeviceNode | str] = ()
    numa: int | Sequence[int] | None = None
    health: Health = Health.HEALTHY
    attributes: Mapping[str, AttributeValue] = field(default_factory=lambda: _NOTHING)
    capacity: Mapping[str, int | str] = field(default_factory=lambda: _NOTHING)
    edits: ContainerEdits = field(default_factory=lambda: NO_EDITS)
    message: str = ""
    consumes: Mapping[str, Mapping[str, int | str]] = field(default_factory=lambda: _NOTHING)
    counters: Mapping[str, Mapping[str, int | str]] = field(default_factory=lambda: _NOTHING)
    identity: str = ""
    part_of: Sequence[str] = ()

    def __post_init__(self) -> None:
        _string("a device's id", self.id)
        self._check_id()
        try:
            self._check()
        except (TypeError, ValueError) as error:
            raise type(error)(f"device {self.id!r}: {error}") from None

    def _check_id(self) -> None:
        if not 0 < len(self.id) <= MAX_ID or not self.id.isprintable() or " " in self.id:
            raise ValueError(f"a device id is 1 to {MAX_ID} printable characters without spaces, not {self.id!r}")

    def _check(self) -> None:
        _typed("health", self.health, Health, "Health.HEALTHY, Health.UNHEALTHY or Health.UNKNOWN")
        if self.numa is not None and not _are_numbers(self.numa):
            right = f"a NUMA node such as 0, {MAX_NUMA} at the most, a list of them or None"
            raise TypeError(f"numa must be {right}, not {self.numa!r}")
        if self.numa is not None and -1 in (self.numa if isinstance(self.numa, Sequence) else (self.numa,)):
            object.__setattr__(self, "numa", tuple(node for node in self.numa_nodes if node != -1) or None)
        _typed("edits", self.edits, ContainerEdits, "ContainerEdits(env={'NAME': 'value'}), say")
        _string("message", self.message)
        if self.part_of != ():
            object.__setattr__(self, "part_of", _list("part_of", self.part_of, "identities such as 'serial:1234'"))
        for name, text in (("identity", self.identity), *(("part_of", text) for text in self.part_of)):
            _string(name, text)
            if " " in text or not text.isprintable():
                raise ValueError(f"{name} is printable characters without spaces, not {text!r}")
        attribute = "a string, an integer, a boolean or a Version"
        right = "a dict by name such as {'memory': '16Gi'}"
        _entries("attributes", self.attributes, right, lambda given: isinstance(given, str | int), attribute)
        _entries("capacity", self.capacity, right, _is_quantity, _QUANTITY)
        _counters("consumes", self.consumes)
        _counters("counters", self.counters)
        if self.nodes != ():
            object.__setattr__(self, "nodes", _nodes(self.nodes))

    def __hash__(self) -> int:
        return hash(self.id)

    @property
    def numa_nodes(self) -> tuple[int, ...]:
        """The NUMA nodes as a tuple, empty if they are unknown."""
        if self.numa is None:
            return ()
        return (self.numa,) if isinstance(self.numa, int) else tuple(self.numa)

    @property
    def links(self) -> tuple[DeviceNode, ...]:
        """The `nodes` whose host path is a symlink. The runtime resolves the symlink at each container start."""
        return tuple(node for node in self.nodes if isinstance(node, DeviceNode) and node.target)

    @property
    def hosts(self) -> tuple[str, ...]:
        """The host paths of `nodes`."""
        return tuple([node.host for node in self.nodes])  # type: ignore[union-attr]  # __post_init__ made them nodes

    @property
    def container_edits(self) -> ContainerEdits:
        """The edits of a container with this device: `nodes` and `edits`, merged."""
        if not self.nodes:
            return self.edits
        its, nodes = self.edits, (*self.nodes, *self.edits.nodes)
        return _checked(its.env, nodes, its.mounts, its.annotations, its.cdi)  # type: ignore[arg-type]  # as checked

    def with_health(self, health: Health, message: str = "") -> Device:
        """Return a copy of the device with another health and message."""
        if (self.health, self.message) == (health, message):
            return self
        return replace(self, health=health, message=message)


def in_order(devices: Iterable[Device]) -> list[Device]:
    """Return devices in the natural order of their ids."""
    listed = [*devices]
    if len(listed) > 1:
        listed.sort(key=lambda device: natural(device.id))
    return listed


MAX_NUMA: Final = 1023
"""The highest number of a NUMA node in Linux (CONFIG_NODES_SHIFT is at most 10)."""
MAX_ID: Final = 63
"""Maximum characters of a device id, as the kubelet's API states; the kubelet itself does not check this limit."""
