"""What a device is, beyond its id: tokens made of the numbers of its device nodes and of its source's `identity`.

Two devices are the same hardware when they have a token in common. A device number that several devices of a list
have is of a control node that they share. If several have only the same numbers, the list names the same hardware
several times.
"""

from __future__ import annotations

import functools
import os
import re
import stat
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Final, Literal

import msgspec

from deviceplugin import looked_at
from deviceplugin.device import Device
from deviceplugin.inventory import Inventory

Tokens = frozenset[str]
Stat = Callable[[str], os.stat_result]
NodeKind = Literal["char", "block"]

_LOOKED_UP: Final = re.compile(r"(char|block|file):\d+:\d+")
"""An identity that `token` has made, which is looked up again; other identities are the source's word."""
MEMORY: Final = 1
"""The major number of null, zero, random: character devices that stand for no hardware."""


def token(status: os.stat_result) -> str:
    """Return the token of a file's status: a device node's number ("" for no hardware), else file system and inode."""
    mode = status.st_mode
    if not (stat.S_ISCHR(mode) or stat.S_ISBLK(mode)):
        return f"file:{status.st_dev}:{status.st_ino}"
    kind: NodeKind = "char" if stat.S_ISCHR(mode) else "block"
    return node_token(kind, os.major(status.st_rdev), os.minor(status.st_rdev))


def node_token(kind: NodeKind, major: int, minor: int) -> str:
    """Return the token of a device node with this number; "" if it stands for no hardware."""
    return "" if (kind, major) == ("char", MEMORY) else f"{kind}:{major}:{minor}"


def identity_of(paths: Iterable[str], stat: Stat = looked_at.stat, *, files: bool = True) -> Tokens:
    """Return the tokens of those paths that are there. files: also of those that are no device nodes. Blocks."""
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
    """Return the tokens of those paths that are device nodes. Blocks."""
    return identity_of(paths, stat, files=False)


def identities(devices: Sequence[Device], stat: Stat = looked_at.stat) -> dict[str, Tokens]:
    """Return the tokens of each device of a list by id, none for a device of which nothing is known. Blocks.

    A node of several devices says nothing, as /dev/nvidiactl, unless one of them has all its nodes and nothing else.
    """
    numbers = {device.id: numbers_of(device.hosts, stat) for device in devices}
    counts = Counter(number for of in numbers.values() for number in of)
    own = {
        device.id: frozenset(number for number in numbers[device.id] if counts[number] == 1)
        | ({device.identity} if device.identity else frozenset())
        for device in devices
    }
    whole = (device.id for device in devices if not own[device.id] and len(numbers[device.id]) == len(device.nodes))
    telling = frozenset[str]().union(*(numbers[name] for name in whole))
    return {name: (of | (numbers[name] & telling)) or numbers[name] for name, of in own.items()}


def tokens_now(device: Device, stat: Stat = looked_at.stat) -> Tokens:
    """Return all tokens that could identify a device now. Blocks."""
    now = identity_of(device.hosts, stat, files=False) if device.nodes else frozenset[str]()
    if not device.identity:
        return now
    if (kind := _LOOKED_UP.fullmatch(device.identity)) is None:
        return now | {device.identity}
    if kind[1] == "file":
        return now | identity_of([mount.host for mount in device.edits.mounts], stat)
    return now


def same_hardware(tokens: Tokens, other: Tokens) -> bool:
    """Return whether two sets of tokens may be of the same hardware; an empty one may be of any."""
    return not (tokens and other) or not tokens.isdisjoint(other)


def shown(tokens: Collection[str]) -> str:
    """Return tokens for people, such as `char 240:3`."""
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
    """What the hardware of a holding was when it was granted.

    tokens: valid during one boot of the node only. boot: its id. sure: the tokens are those of one device; else they
    are those of all devices that one answer to Allocate names, or of a control node.
    """

    boot: str = ""
    tokens: Tokens = frozenset()
    sure: bool = True

    def in_boot(self, boot: str) -> Tokens:
        """Return the tokens; none if they are of another boot, whose containers no longer run."""
        return self.tokens if self.boot == boot else frozenset()

    def says_more_than(self, recorded: Identity) -> bool:
        """Return whether this identity, which was found in this boot, replaces the recorded one of a holding."""
        if not self.tokens or (self.boot, self.sure) == (recorded.boot, recorded.sure):
            return False
        return self.boot != recorded.boot or self.sure


UNIDENTIFIED: Final = Identity()
"""The identity of a device of which nothing is known."""


def identified(tokens: Tokens, boot: str, *, sure: bool = True) -> Identity:
    """Return the identity that these tokens make in a boot of the node; `UNIDENTIFIED` without tokens."""
    return Identity(boot, tokens, sure) if tokens else UNIDENTIFIED


async def publish(inventory: Inventory, devices: Sequence[Device], replicas: Mapping[str, int]) -> bool:
    """Publish a list in an inventory, with the devices' tokens; return whether anything changed.

    While a path of theirs does not answer, this waits, and the devices listed before are unhealthy.
    """
    identifiable = any(device.identity or device.nodes for device in devices)
    tokens = await inventory.looks.until_answered("list", identities, devices) if identifiable else {}
    return inventory.publish(devices, tokens, replicas)
