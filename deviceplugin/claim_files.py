"""Files of our own: what each prepared claim holds, whatever its devices are called today.

`<driver>_<claim UID>.claim` is JSON, in `cdi.own_directory`. Each prepared claim has one, also a claim without edits.
The directory is in memory on most nodes, so the files go with the containers at a reboot.

Functions and classes take the directory of CDI specs.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection
from typing import Final

import msgspec

from deviceplugin import cdi
from deviceplugin.identity import UNIDENTIFIED, Identity
from deviceplugin.naming import NamingError, parse_quantity

VERSION: Final = 2
_SUFFIX: Final = ".claim"
_FILE: Final = re.compile(rf"(?P<driver>[A-Za-z0-9][A-Za-z0-9.-]*)_(?P<uid>{cdi.UID.pattern}){re.escape(_SUFFIX)}")


class FiledDevice(msgspec.Struct, frozen=True):
    """A device of a claim; the fields are those of `deviceplugin.register.records.ClaimDevice` and its amount."""

    resource: str
    device: str
    share: str = ""
    admin: bool = False
    identity: Identity = UNIDENTIFIED
    part: str = ""
    takes: tuple[tuple[str, str, str], ...] = ()
    parameters: str = ""
    limits: bool = False


class ClaimFile(msgspec.Struct, frozen=True, kw_only=True):
    """What a claim holds through one driver.

    agent: the name of the agent that prepared it; "" if it has none, or the file cannot be read. boot: the node's boot
    in which the file was written. pods: UIDs of its pods. devices: None if the file cannot be
    read; then only `driver` and `uid` are known.
    """

    driver: str
    uid: str
    agent: str = ""
    namespace: str = ""
    name: str = ""
    boot: str = ""
    pods: frozenset[str] = frozenset()
    devices: tuple[FiledDevice, ...] | None = None
    version: int = VERSION

    @property
    def title(self) -> str:
        """Namespace and name if they are known, else the UID, for messages."""
        return f"{self.namespace}/{self.name}" if self.name else self.uid


_DECODER: Final = msgspec.json.Decoder(ClaimFile)
"""Made here: msgspec 0.22 crashes if several threads are the first to decode a type."""


def encode(file: ClaimFile) -> bytes:
    """Return the bytes of a file; the same for equal ones."""
    return msgspec.json.encode(file, order="deterministic")


def decode(data: bytes, driver: str, uid: str) -> ClaimFile:
    """Read the bytes of the file that has this name; without devices if it is damaged, or of another version."""
    unknown = ClaimFile(driver=driver, uid=uid)
    try:
        file = _DECODER.decode(data)
        for _, _, quantity in (taken for device in file.devices or () for taken in device.takes):
            parse_quantity(quantity)
    except (msgspec.DecodeError, UnicodeDecodeError, NamingError):
        return unknown
    return file if (file.driver, file.uid, file.version) == (driver, uid, VERSION) else unknown


def read_all(directory: str, without: Collection[str] = ()) -> tuple[ClaimFile, ...]:
    """Read the files of all drivers' claims. Blocks. without: drivers whose files are left out.

    Raises OSError: the directory is there and cannot be read. A file that cannot be read has no devices.
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
                continue  # it has just been removed
            except OSError:
                files.append(ClaimFile(driver=named["driver"], uid=named["uid"]))
    return tuple(files)


class ClaimFileStore(cdi.CdiStore):
    """The files of one driver's claims."""

    SUFFIX = _SUFFIX

    def __init__(self, driver: str, directory: str = cdi.DIRECTORY) -> None:
        super().__init__(driver, cdi.own_directory(directory))
        self._prefix = f"{driver}_"
