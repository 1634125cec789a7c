"""The agent's own files about prepared claims, one file for each claim.

From such a file, the agent knows the devices that a claim holds, even after the devices were renamed. The file
`<driver>_<claim UID>.claim` in `cdi.own_directory` is JSON. Each prepared claim has such a file, even if the claim
needs no CDI edits. On most nodes, `cdi.own_directory` is in memory, so a reboot removes the files together with the
containers.

The argument `directory` of `read_all` is `cdi.own_directory` of the directory of CDI specs.
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

    agent: the name (`--agent-name`) of the agent that prepared the claim; "" if the agent has no name, or the file
    cannot be read. boot: the id of the node's boot in which the file was written; all identities in the file are of
    this boot. pods: UIDs of the claim's pods. devices: the held devices; None if the file cannot be read, in which case
    only `driver` and `uid` are known.
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
        """The claim's namespace and name if they are known, else the claim's UID, for messages."""
        return f"{self.namespace}/{self.name}" if self.name else self.uid


_DECODER: Final = msgspec.json.Decoder(ClaimFile)


def encode(file: ClaimFile) -> bytes:
    """Return the content of a claim's file as bytes. Equal `ClaimFile` objects give equal bytes."""
    return msgspec.json.encode(file, order="deterministic")


def decode(data: bytes, driver: str, uid: str) -> ClaimFile:
    """Decode the content of a claim's file. driver, uid: the two parts of the file's name.

    For a damaged file, or a file of another version, the result's `devices` is None.
    """
    unknown = ClaimFile(driver=driver, uid=uid)
    try:
        file = _DECODER.decode(data)
        for _, _, quantity in (taken for device in file.devices or () for taken in device.amount.takes):
            parse_quantity(quantity)
    except (msgspec.DecodeError, UnicodeDecodeError, NamingError):
        return unknown
    return file if (file.driver, file.uid, file.version) == (driver, uid, VERSION) else unknown


def read_all(directory: str, without: Collection[str] = ()) -> tuple[ClaimFile, ...]:
    """Read the claim files of all drivers, except the drivers in `without`. This function blocks the thread.

    Raises OSError if the directory exists and cannot be read. If a claim's file cannot be read, `devices` of its
    `ClaimFile` is None.
    """
    try:
        names = sorted(os.listdir(directory))
    except FileNotFoundError:
        return ()
    files = []
    for name in names:
        if (named := _FILE.fullmatch(name)) and named["driver"] not in without:
            try:
                with open(os.path.join(directory, name), "rb") as file:
                    files.append(decode(file.read(), named["driver"], named["uid"]))
            except FileNotFoundError:
                continue  # The file was removed after the directory was listed.
            except OSError:
                files.append(ClaimFile(driver=named["driver"], uid=named["uid"]))
    return tuple(files)
