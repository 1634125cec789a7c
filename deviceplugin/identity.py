"""Identifies a device by tokens: texts for its device nodes, for their hardware in sysfs, and from its source.

Two devices are the same hardware if they have a token in common, unless sysfs shows different hardware for the two
devices: a USB stick can get the device number that another stick had before. If several listed devices have the same
device number, the number belongs to a control node that these devices share, and does not identify them. But listed
devices without any other device number are the same hardware.

A link of udev in a directory `by-path`, or an identity from the function `port`, stands for a port, whatever hardware
is in the port. The holder of such a device holds the port. The holder of any other device holds the hardware
(`lasting`). The present tokens of a device name both its hardware and its port. So a stick that is listed twice, by its
serial number and by its port, counts as one device.
"""

from __future__ import annotations

import functools
import os
import re
import stat
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

import msgspec

from deviceplugin import looked_at
from deviceplugin.device import Device
from deviceplugin.sysfs import ROOT, HardwareReader

# The two modules are not imported at run time, so that `deviceplugin validate` does not load asyncio.
if TYPE_CHECKING:
    from deviceplugin.inventory import Inventory
    from deviceplugin.looks import Looks

Tokens = frozenset[str]
Stat = Callable[[str], os.stat_result]
NodeKind = Literal["char", "block"]

_LOOKED_UP: Final = re.compile(r"(char|block|file):\d+:\d+")
"""Matches an identity that the function `token` has made from a file's status; each check reads the status again. Any
other identity is a text from the source."""
_HARDWARE: Final = re.compile(r"hardware:([^#]+)#.*")
"""Matches a token of hardware: the name of a USB device or PCI function, and the component of it (such as an interface)
to which a device node leads."""
_PLACE: Final = "place:"
"""The prefix of the token of a place. The token names a USB port or PCI slot, and the component of the hardware there
to which a device node leads."""
_PORT: Final = "port:"
_PORTS: Final = "by-path"
"""The name of the directories in which udev makes links named after ports (systemd, rules.d/60-serial.rules and
others)."""
UUID: Final = "uuid:"
"""The prefix of the `identity` that the NVIDIA source gives to GPUs and MIG partitions. The UUID follows."""
PCI: Final = "pci:"
"""The prefix of the `identity` of a PCI function. The address follows, such as `0000:07:00.0`."""
MEMORY: Final = 1
"""The major number of /dev/null, /dev/zero and /dev/random. These nodes stand for no hardware."""


def token(status: os.stat_result) -> str:
    """Return a file's token from its status: the device number of a device node ("" for MEMORY), else the inode."""
    mode = status.st_mode
    if not (stat.S_ISCHR(mode) or stat.S_ISBLK(mode)):
        return f"file:{status.st_dev}:{status.st_ino}"
    kind: NodeKind = "char" if stat.S_ISCHR(mode) else "block"
    return node_token(kind, os.major(status.st_rdev), os.minor(status.st_rdev))


def node_token(kind: NodeKind, major: int, minor: int) -> str:
    """Return the token of a device node with this number; "" if the node stands for no hardware."""
    return "" if (kind, major) == ("char", MEMORY) else f"{kind}:{major}:{minor}"


def identity_of(paths: Iterable[str], stat: Stat = looked_at.stat, *, files: bool = True) -> Tokens:
    """Return the tokens of the files that exist at these paths.

    Blocks. files: whether to include files that are no device nodes.
    """
    tokens = set()
    for path in paths:
        try:
            found = token(stat(path))
        except OSError:
            continue
        if found and (files or not found.startswith("file:")):
            tokens.add(found)
    return frozenset(tokens)


def numbers_of(paths: Iterable[str], stat: Stat = looked_at.stat) -> Tokens:
    """Return the tokens of the device nodes at these paths, and below the directories at these paths. Blocks.

    A container gets all nodes below a directory (containerd 2.1, pkg/oci/utils_unix.go: getDevices).
    """
    below = (os.path.join(place, name) for path in paths for place, _, names in os.walk(path) for name in names)
    return identity_of((*paths, *below), stat, files=False)


def _numbers(device: Device, stat: Stat) -> dict[str, str]:
    """Return, for the token of each existing device node in the device's `nodes`, the first path that leads to it."""
    paths: dict[str, str] = {}
    for host in device.hosts:
        for number in identity_of((host,), stat, files=False):
            paths.setdefault(number, host)
    return paths


def port(name: str) -> str:
    """Return the `identity` of a device that stands for a port, whatever is in the port. name: the port's name."""
    return f"{_PORT}{name}"


def _hardware(paths: Mapping[str, str], reader: HardwareReader) -> Tokens:
    """Return the tokens of the hardware of device nodes, and of the ports or slots of this hardware.

    paths: for each device node's token, the path of the node.
    """
    tokens: set[str] = set()
    for number, path in paths.items():
        kind, _, numbers = number.partition(":")
        if os.path.basename(os.path.dirname(path)) == _PORTS:
            tokens.add(port(path))
        if (found := reader.behind(kind, numbers)) is not None:
            tokens.update(f"hardware:{name}#{found.part}" for name in found.devices)
            tokens.add(f"{_PLACE}{found.place}#{found.part}")
    return frozenset(tokens)


def is_usb(tokens: Collection[str]) -> bool:
    """Return whether a device with these tokens is a USB device, whose device numbers may change at any time."""
    return any(token.startswith(("hardware:usb:", "port:usb:")) for token in tokens)


def is_port(tokens: Collection[str]) -> bool:
    """Return whether a device with these tokens stands for a port, whatever hardware is in the port."""
    return any(token.startswith(_PORT) for token in tokens)


def numbers_change(tokens: Collection[str]) -> bool:
    """Return whether a node of a device with these tokens may get another number while the holder is the same."""
    return is_usb(tokens) or is_port(tokens)


def lasting(tokens: Tokens) -> Tokens:
    """Return the present tokens of a device without the tokens that can change while the device has the same holder.

    For a device that stands for a port, the result lacks the tokens of the hardware in the port. For any other device,
    the result lacks the tokens of the port or slot in which the hardware is.
    """
    if is_port(tokens):
        return frozenset(token for token in tokens if not _HARDWARE.fullmatch(token))
    return frozenset(token for token in tokens if not token.startswith(_PLACE))


class Identified(NamedTuple):
    """The identities of listed devices.

    tokens: for each device id, the device's present tokens. containing: for each device id, the tokens of the nodes
    that contain the device's hardware (see `HardwareReader.containing`), if there are such nodes.
    """

    tokens: dict[str, Tokens]
    containing: dict[str, Tokens]


def identities(devices: Sequence[Device], stat: Stat = looked_at.stat, sysfs: str = ROOT) -> Identified:
    """Return the tokens of listed devices; an empty set for a device of which no token is known. Blocks.

    A node of several devices, such as /dev/nvidiactl, identifies none of them. But if one of these devices has only
    shared nodes and no `identity`, its nodes identify all devices that have them.
    """
    reader = HardwareReader(sysfs)
    paths = {device.id: _numbers(device, stat) for device in devices}
    counts = Counter(number for of in paths.values() for number in of)
    own = {
        device.id: frozenset(number for number in paths[device.id] if counts[number] == 1)
        | ({device.identity} if device.identity else frozenset())
        for device in devices
    }
    whole = (device.id for device in devices if not own[device.id] and len(paths[device.id]) == len(device.nodes))
    telling = frozenset[str]().union(*(paths[name] for name in whole))
    known = {name: (of | (paths[name].keys() & telling)) or frozenset(paths[name]) for name, of in own.items()}
    own_paths = {
        name: {number: path for number, path in paths[name].items() if number in of} for name, of in known.items()
    }
    tokens = {device.id: known[device.id] | _hardware(own_paths[device.id], reader) for device in devices}
    containing: dict[str, Tokens] = {}
    for name, own_numbers in own_paths.items():
        others = frozenset(other for number in own_numbers for other in reader.containing(number))
        if others := others - paths[name].keys():
            containing[name] = others
    return Identified(tokens, containing)


def tokens_now(device: Device, stat: Stat = looked_at.stat, sysfs: str = ROOT) -> Tokens:
    """Return all present tokens of a device, also of nodes that it shares with other devices. Blocks."""
    now = frozenset[str]()
    if device.nodes:
        paths = _numbers(device, stat)
        now = frozenset(paths) | _hardware(paths, HardwareReader(sysfs))
    if not device.identity:
        return now
    if (kind := _LOOKED_UP.fullmatch(device.identity)) is None:
        return now | {device.identity}
    if kind[1] == "file":
        return now | identity_of([mount.host for mount in device.edits.mounts], stat)
    return now


def tokens_by_number(paths: Mapping[str, str], sysfs: str = ROOT) -> dict[str, Tokens]:
    """Return, for each device number, the number's token and the present tokens of its hardware, place and port.

    Blocks. paths: for each number, a path that leads to its device node.
    """
    reader = HardwareReader(sysfs)
    return {number: frozenset({number}) | _hardware({number: path}, reader) for number, path in paths.items()}


def moved(numbers: Collection[str], granted: Tokens, sysfs: str = ROOT) -> Tokens:
    """Return those of `numbers` (device numbers) that, as sysfs shows, no longer belong to the granted hardware.

    Blocks. granted: the tokens of the granted hardware. If none of these tokens is of hardware or of a place, the
    result is empty.
    """
    hardware = frozenset(token for token in granted if _HARDWARE.fullmatch(token) or token.startswith(_PLACE))
    if not hardware:
        return frozenset()
    reader = HardwareReader(sysfs)
    return frozenset(number for number in numbers if hardware.isdisjoint(_hardware({number: ""}, reader)))


def agree(tokens: Collection[str], other: Collection[str]) -> bool:
    """Return whether two sets of tokens are of the same device.

    The result is True if both sets contain the same port, or if they have a token in common and sysfs shows no
    different hardware.
    """
    common = frozenset(tokens).intersection(other)
    if not common or is_port(common):
        return bool(common)
    mine, theirs = ({found[1] for found in map(_HARDWARE.fullmatch, of) if found} for of in (tokens, other))
    return not (mine and theirs and mine.isdisjoint(theirs))


def belongs(node: Collection[str], granted: Tokens) -> bool:
    """Return whether a device node is a node of the granted hardware.

    node: the node's tokens, from `tokens_by_number`. granted: the tokens of the granted hardware. If these include the
    whole USB device or PCI function, not only a component such as an interface, each node of it belongs to it.
    """
    whole = {f"{token.partition('#')[0]}#" for token in node if "#" in token}
    return agree(whole.union(node), granted)


def same_hardware(tokens: Tokens, other: Tokens) -> bool:
    """Return whether two sets of tokens can be of the same hardware. An empty set can stand for any hardware."""
    return not (tokens and other) or agree(tokens, other)


def reachable(tokens: Tokens) -> Tokens:
    """Return the tokens of the device nodes and files by which a container opens a device.

    Tokens of hardware, places and ports are left out.
    """
    return frozenset(filter(_LOOKED_UP.fullmatch, tokens))


def shown(tokens: Collection[str]) -> str:
    """Return tokens as text, such as `char 240:3`."""
    return ", ".join(text.replace(":", " ", 1) for text in sorted(tokens)) or "nothing"


@functools.cache
def boot_id() -> str:
    """Return the id of this boot of the node; "" if it cannot be read."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return ""


class Identity(msgspec.Struct, frozen=True, array_like=True):
    """The identity of granted hardware at the time of the grant.

    boot: the id of the node's boot during which the tokens are valid. tokens: the tokens that do not change while the
    device has the same holder. sure: True if all tokens are of this device; False if they are of all devices in an
    AllocateResponse, or of a control node. reached: the tokens of nodes to which the device's paths have led since the
    grant; a restarted container may open these nodes, even if they later stand for other hardware. left: the tokens in
    `tokens` whose nodes the holder cannot open any more, because its container has restarted. within: the tokens of
    larger devices of which the device is a part (`Device.part_of`).
    """

    boot: str = ""
    tokens: Tokens = frozenset()
    sure: bool = True
    reached: Tokens = frozenset()
    left: Tokens = frozenset()
    within: Tokens = frozenset()

    def valid_in(self, boot: str) -> Identity:
        """Return this identity; `UNIDENTIFIED` if it is from another boot of the node, whose containers have ended."""
        return self if self.boot == boot else UNIDENTIFIED

    def in_boot(self, boot: str) -> Tokens:
        """Return `tokens`; an empty set if they are from another boot of the node, whose containers have ended."""
        return self.tokens if self.boot == boot else frozenset()

    def reaching(self, now: Identity) -> Identity:
        """Return this identity with another identity of the same boot: its nodes are added to `reached`."""
        if now.boot != self.boot:
            return self
        more, within = reachable(now.tokens) | now.reached, self.within | now.within
        reached = self.reached | more - self.tokens
        return msgspec.structs.replace(self, reached=reached, left=self.left - more, within=within)

    def reaching_only(self, nodes: Tokens) -> Identity:
        """Return the identity for a holder that can open only these nodes. nodes: the nodes' tokens in this boot."""
        nodes = reachable(nodes)
        return msgspec.structs.replace(self, reached=nodes - self.tokens, left=reachable(self.tokens) - nodes)

    def leaving(self, nodes: Tokens) -> Identity:
        """Return the identity for a holder that cannot open these nodes any more. nodes: the nodes' tokens."""
        left = self.left | reachable(self.tokens) & nodes
        return msgspec.structs.replace(self, reached=self.reached - nodes, left=left)

    def says_more_than(self, recorded: Identity) -> bool:
        """Return whether this identity, read in this boot, must replace a recorded identity of the same holder."""
        if not (self.tokens or self.reached) or (self.boot, self.sure) == (recorded.boot, recorded.sure):
            return False
        return self.boot != recorded.boot or self.sure


UNIDENTIFIED: Final = Identity()
"""The identity of a device without known tokens."""


def identified(tokens: Tokens, boot: str, *, sure: bool = True, within: Collection[str] = ()) -> Identity:
    """Return the identity to record for a device with these present tokens; `UNIDENTIFIED` without tokens.

    within: see `Identity`.
    """
    return Identity(boot, lasting(tokens), sure, within=frozenset(within)) if tokens or within else UNIDENTIFIED


async def publish(inventory: Inventory, devices: Sequence[Device], replicas: Mapping[str, int]) -> bool:
    """Publish a device list in an inventory, with the devices' identity tokens; return whether the inventory changed.

    While a read of a device's path hangs, this function waits, and the inventory's present devices are unhealthy.
    """
    identifiable = any(device.identity or device.nodes for device in devices)
    found = await inventory.looks.until_answered("list", identities, devices) if identifiable else Identified({}, {})
    return inventory.publish(devices, found.tokens, replicas, found.containing)


async def read(looks: Looks, kind: str, devices: Mapping[str, Device]) -> dict[str, Tokens]:
    """Return, for each key of `devices`, the device's present tokens, read in a thread. Raises LookTimeoutError."""
    for device in devices.values():
        if device.nodes or device.identity.startswith("file:"):
            return await looks.at(kind, _tokens_of_all, devices, brief=True)
    return _tokens_of_all(devices)  # No thread is needed here, because these devices have no paths.


def _tokens_of_all(devices: Mapping[str, Device]) -> dict[str, Tokens]:
    now: dict[str, Tokens] = {}
    for name, device in devices.items():
        now[name] = tokens_now(device)
    return now
