"""Identifies a device by tokens (texts): of its device nodes, of the hardware behind them, and of its source.

Two devices are the same hardware if they have a token in common, unless sysfs shows different hardware for the two
devices: a USB stick can get the device number that another stick had before. A device number that several devices of a
list have belongs to a control node that these devices share. Devices of a list that have no other device number are the
same hardware.

A link of udev in a directory `by-path`, and the identity from `port`, stand for a port with any hardware in it. The
holder of such a device holds the port; the holder of any other device holds the hardware (`lasting`). The present
tokens of a device name both its hardware and its port: a stick that is listed twice, by its serial number and by its
port, is one device, under whichever name it has a holder.
"""

from __future__ import annotations

import functools
import os
import re
import stat
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Final, Literal

import msgspec

from deviceplugin import looked_at
from deviceplugin.device import Device
from deviceplugin.sysfs import ROOT, HardwareReader

if TYPE_CHECKING:  # Not imported at run time, because `validate` should not load an event loop.
    from deviceplugin.inventory import Inventory
    from deviceplugin.looks import Looks

Tokens = frozenset[str]
Stat = Callable[[str], os.stat_result]
NodeKind = Literal["char", "block"]

_LOOKED_UP: Final = re.compile(r"(char|block|file):\d+:\d+")
"""Matches an identity that `token` has made, and that each check reads again. Any other identity is a text from the
source."""
_HARDWARE: Final = re.compile(r"hardware:([^#]+)#.*")
"""Matches a token from `_hardware`: the name of a USB device or PCI function, and the part of this hardware (such as an
interface) to which a device node leads."""
_PLACE: Final = "place:"
"""The beginning of a token from `_hardware` for a place: the USB port or PCI slot, and the part of the hardware to
which a device node leads."""
_PORT: Final = "port:"
_PORTS: Final = "by-path"
"""The directory of udev's links with the names of ports (systemd, rules.d/60-serial.rules and others)."""
MEMORY: Final = 1
"""The major number of /dev/null, /dev/zero and /dev/random, which stand for no hardware."""


def token(status: os.stat_result) -> str:
    """Return the token of a file with this status: a node's device number ("" if MEMORY), or else the inode."""
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

    files: whether to include files that are no device nodes.

    Blocks.
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
    """Return the tokens of the device nodes among these paths. Blocks."""
    return identity_of(paths, stat, files=False)


def _numbers(device: Device, stat: Stat) -> dict[str, str]:
    """Return the token of each existing node in the device's `nodes`, with the first path of the node."""
    paths: dict[str, str] = {}
    for host in device.hosts:
        for number in identity_of((host,), stat, files=False):
            paths.setdefault(number, host)
    return paths


def port(name: str) -> str:
    """Return the `identity` for a device that stands for a port with any hardware in it. name: the port's name."""
    return f"{_PORT}{name}"


def _hardware(paths: Mapping[str, str], reader: HardwareReader) -> Tokens:
    """Return the tokens of the hardware behind nodes, and of its ports or slots.

    paths: for each node's token, its path.
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
    """Return whether these are the tokens of a USB device, whose device numbers may change at any time."""
    return any(token.startswith(("hardware:usb:", "port:usb:")) for token in tokens)


def is_port(tokens: Collection[str]) -> bool:
    """Return whether a device with these tokens stands for a port, with any hardware in it."""
    return any(token.startswith(_PORT) for token in tokens)


def numbers_change(tokens: Collection[str]) -> bool:
    """Return whether the holder of a device with these tokens may find its node under another number later."""
    return is_usb(tokens) or is_port(tokens)


def lasting(tokens: Tokens) -> Tokens:
    """Return the present tokens of a device without the tokens that can change while the device has the same holder.

    If the device stands for a port, the tokens of the hardware that is now in the port are left out; otherwise, the
    tokens of the port or slot in which the hardware now is.
    """
    if is_port(tokens):
        return frozenset(token for token in tokens if not _HARDWARE.fullmatch(token))
    return frozenset(token for token in tokens if not token.startswith(_PLACE))


def identities(devices: Sequence[Device], stat: Stat = looked_at.stat, sysfs: str = ROOT) -> dict[str, Tokens]:
    """Return, for each device of a source's list, its present tokens by id; an empty set if no token is known. Blocks.

    A node of several devices, such as /dev/nvidiactl, identifies none of these devices, except a device that has only
    shared nodes.
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
    return {device.id: known[device.id] | _hardware(own_paths[device.id], reader) for device in devices}


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


def moved(numbers: Collection[str], granted: Tokens, sysfs: str = ROOT) -> Tokens:
    """Return those of these device numbers that, by sysfs, belong to other hardware than a granted identity. Blocks.

    If the identity has no hardware tokens, the result is empty.
    """
    hardware = frozenset(token for token in granted if _HARDWARE.fullmatch(token) or token.startswith(_PLACE))
    if not hardware:
        return frozenset()
    reader = HardwareReader(sysfs)
    return frozenset(number for number in numbers if hardware.isdisjoint(_hardware({number: ""}, reader)))


def agree(tokens: Collection[str], other: Collection[str]) -> bool:
    """Return whether two sets of tokens are of the same device.

    The sets must share a token, and sysfs must not show different hardware for them, unless both stand for the same
    port.
    """
    common = frozenset(tokens).intersection(other)
    if not common or is_port(common):
        return bool(common)
    mine, theirs = ({found[1] for found in map(_HARDWARE.fullmatch, of) if found} for of in (tokens, other))
    return not (mine and theirs and mine.isdisjoint(theirs))


def same_hardware(tokens: Tokens, other: Tokens) -> bool:
    """Return whether two sets of tokens can belong to the same hardware. An empty set can belong to any hardware."""
    return not (tokens and other) or agree(tokens, other)


def reachable(tokens: Tokens) -> Tokens:
    """Return the tokens that stand for device nodes and files, by which a container opens a device.

    Tokens of the hardware behind the nodes are not in the result.
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
    device has the same holder. sure: True if all tokens are of one device; False if they are of all devices in an
    AllocateResponse, or of a control node. reached: nodes to which the device's paths have led since the grant; a
    restarted container may open these nodes, even if they stand for other hardware later. left: nodes among the tokens
    that the holder cannot open any more, because its container has restarted.
    """

    boot: str = ""
    tokens: Tokens = frozenset()
    sure: bool = True
    reached: Tokens = frozenset()
    left: Tokens = frozenset()

    def in_boot(self, boot: str) -> Tokens:
        """Return the tokens; an empty set if they are from another boot, whose containers do not run any more."""
        return self.tokens if self.boot == boot else frozenset()

    def reaches(self, boot: str) -> Tokens:
        """Return `reached`: further nodes that the holder may open; empty for an identity from another boot."""
        return self.reached if self.boot == boot else frozenset()

    def reaching(self, now: Identity) -> Identity:
        """Return this identity with the nodes of another identity of the same boot added to `reached`."""
        more = reachable(now.tokens) | now.reached if now.boot == self.boot else frozenset()
        return msgspec.structs.replace(self, reached=self.reached | more - self.tokens, left=self.left - more)

    def reaching_only(self, nodes: Tokens) -> Identity:
        """Return the identity of a holder that can open these nodes, and no other nodes. nodes: of this boot."""
        nodes = reachable(nodes)
        return msgspec.structs.replace(self, reached=nodes - self.tokens, left=reachable(self.tokens) - nodes)

    def leaving(self, nodes: Tokens) -> Identity:
        """Return the identity of a holder that cannot open these nodes any more."""
        left = self.left | reachable(self.tokens) & nodes
        return msgspec.structs.replace(self, reached=self.reached - nodes, left=left)

    def says_more_than(self, recorded: Identity) -> bool:
        """Return whether this identity, read in this boot, must replace a holder's recorded identity."""
        if not self.tokens or (self.boot, self.sure) == (recorded.boot, recorded.sure):
            return False
        return self.boot != recorded.boot or self.sure


UNIDENTIFIED: Final = Identity()
"""The identity of a device without known tokens."""


def identified(tokens: Tokens, boot: str, *, sure: bool = True) -> Identity:
    """Return the identity to record for a device with these present tokens; `UNIDENTIFIED` without tokens."""
    return Identity(boot, lasting(tokens), sure) if tokens else UNIDENTIFIED


async def publish(inventory: Inventory, devices: Sequence[Device], replicas: Mapping[str, int]) -> bool:
    """Publish a list of devices in an inventory, with the devices' tokens; return whether the inventory changed.

    While a read of a device's path hangs, this function waits, and the previously listed devices are unhealthy.
    """
    identifiable = any(device.identity or device.nodes for device in devices)
    tokens = await inventory.looks.until_answered("list", identities, devices) if identifiable else {}
    return inventory.publish(devices, tokens, replicas)


async def read(looks: Looks, kind: str, devices: Mapping[str, Device]) -> dict[str, Tokens]:
    """Stat the devices' paths, and return each device's present tokens, by the same keys. Raises LookTimeoutError."""
    for device in devices.values():
        if device.nodes or device.identity.startswith("file:"):
            return await looks.at(kind, _tokens_of_all, devices, brief=True)
    return _tokens_of_all(devices)  # These devices have no paths, so no thread is needed.


def _tokens_of_all(devices: Mapping[str, Device]) -> dict[str, Tokens]:
    now: dict[str, Tokens] = {}
    for name, device in devices.items():
        now[name] = tokens_now(device)
    return now
