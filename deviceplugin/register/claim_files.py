"""The agent's own files of prepared claims. They identify the devices that a claim holds, even after renames.

`<driver>_<claim UID>.claim` is JSON, in `cdi.own_directory`. Each prepared claim has one, also a claim without edits.
The directory is in memory on most nodes, so a reboot removes the files together with the containers.

Functions and classes take the directory of CDI specs.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection
from typing import Final

import msgspec

from deviceplugin import cdi
from deviceplugin.naming import NamingError, parse_quantity
from deviceplugin.register.records import ClaimDevice

VERSION: Final = 3
SUFFIX: Final = ".claim"
_FILE: Final = re.compile(rf"(?P<driver>[A-Za-z0-9][A-Za-z0-9.-]*)_(?P<uid>{cdi.UID.pattern}){re.escape(SUFFIX)}")


class ClaimFile(msgspec.Struct, frozen=True, kw_only=True):
    """The devices that a claim holds through one driver.

    agent: the name of the agent that prepared it; "" if the agent has no name, or the file cannot be read. boot: the
    node's boot in which the file was written, which all identities name. pods: UIDs of its pods. devices: None if the
    file cannot be read; then only `driver` and `uid` are known.
    """

    driver: str
    uid: str
    agent: str = ""
    namespace: str = ""
    name: str = ""
    boot: str = ""
    pods: frozenset[str] = frozenset()
    devices: tuple[ClaimDevice, ...] | None = None
    version: int = VERSION

    @property
    def title(self) -> str:
        """Namespace and name if they are known, else the UID, for messages."""
        return f"{self.namespace}/{self.name}" if self.name else self.uid


_DECODER: Final = msgspec.json.Decoder(ClaimFile)


def encode(file: ClaimFile) -> bytes:
    """Encode a file. Equal files have equal bytes."""
    return msgspec.json.encode(file, order="deterministic")


def decode(data: bytes, driver: str, uid: str) -> ClaimFile:
    """Decode a file, whose name contains driver and UID. A damaged file, or one of another version, has no devices."""
    unknown = ClaimFile(driver=driver, uid=uid)
    try:
        file = _DECODER.decode(data)
        for _, _, quantity in (taken for device in file.devices or () for taken in device.amount.takes):
            parse_quantity(quantity)
    except (msgspec.DecodeError, UnicodeDecodeError, NamingError):
        return unknown
    return file if (file.driver, file.uid, file.version) == (driver, uid, VERSION) else unknown


def read_all(directory: str, without: Collection[str] = ()) -> tuple[ClaimFile, ...]:
    """Read the files of all drivers' claims, except those of the drivers in `without`. Blocks.

    Raises OSError if the directory exists and cannot be read. A file that cannot be read has no devices.
    """
    own = cdi.own_directory(directory)
    try:
        names = sorted(os.listdir(own))
    except FileNotFoundError:
        return ()
    files = []
    for name in names:
        if (named := _FILE.fullmatch(name)) and named["driver"] not in without:
            try:
                with open(os.path.join(own, name), "rb") as file:
                    files.append(decode(file.read(), named["driver"], named["uid"]))
            except FileNotFoundError:
                continue  # The file was removed meanwhile.
            except OSError:
                files.append(ClaimFile(driver=named["driver"], uid=named["uid"]))
    return tuple(files)
