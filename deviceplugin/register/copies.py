"""Copies of agents' allocations: JSON files in the directory `copies_in`.

An agent with a ledger (the SQLite file of the agent's records) has one copy, with the agent's name. An agent without a
ledger has copies with the names of its resources. If the ledger and the kubelet's checkpoint are lost, only the copy
names the pods that have devices of the device plugin. The checkpoint also drops a pod that was deleted by force,
although the pod's processes may hang. So the other agents of the node read the copy: agents with another
`--agent-name`, and `deviceplugin run` after `dra-bridge run`. A running agent keeps its copy up to date, and the copy
of an ended agent stays. On most nodes a reboot empties the directory; a copy of another boot is ignored.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec

from deviceplugin import cdi, files
from deviceplugin.backoff import Backoff
from deviceplugin.files import FileIdentity, file_identity
from deviceplugin.identity import boot_id, numbers_change
from deviceplugin.looks import Looks
from deviceplugin.register.question import Wanted
from deviceplugin.register.records import NONE, Allocation, AllocationRecord, RecordKey, RegisterSnapshot
from deviceplugin.register.store import Store

_LOG: Final = logging.getLogger(__name__)
SUFFIX: Final = ".json"
FIRST_TRY: Final = 1.0
"""Seconds after which a failed write is repeated for the first time."""
REST: Final = 60.0
"""Seconds after which `keep` compares the records with the copies again, even if the register has not changed."""


class Copy(msgspec.Struct, frozen=True):
    """The content of a copy of the allocations.

    boot: the id of the node's boot in which the copy was written. sequence: the register's sequence at the writing.
    """

    boot: str
    sequence: int
    allocations: tuple[AllocationRecord, ...]


_DECODER: Final = msgspec.json.Decoder(Copy)


def copies_in(directory: str) -> str:
    """Return the directory of the copies. directory: the directory of the CDI specs.

    The copies have a directory apart from the claim files, because each new file in the directory of the claim files
    makes the next grant list all claim files.
    """
    return os.path.join(cdi.own_directory(directory), "allocations")


def path(directory: str, agent: str) -> str:
    """Return the path of an agent's copy. directory: the directory of the CDI specs. agent: the agent's name."""
    return os.path.join(copies_in(directory), f"{agent}{SUFFIX}")


def write(path: str, copy: Copy) -> None:
    """Write a copy atomically. Raises OSError."""
    os.makedirs(os.path.dirname(path), exist_ok=True)
    files.put(path, msgspec.json.encode(copy), f"{path}.new", 0o600)


def read(path: str) -> Copy | None:
    """Read a copy; None if the file does not exist. Raises OSError or msgspec.MsgspecError if it cannot be read."""
    try:
        with open(path, "rb") as file:
            return _DECODER.decode(file.read())
    except FileNotFoundError:
        return None


class AllocationCopies:
    """Writes the copies of this process's allocations, and reads the copies of other agents.

    directory: the directory of CDI specs. own: the agent's name, or "". The copy of an agent with a name has all
    allocations of the agent. An agent without a name has no ledger, and writes a copy for each resource whose devices
    can get other device numbers. The allocations of its other resources need no copy, because the agent can restore
    them from the kubelet's checkpoint.
    """

    def __init__(self, directory: Path, own: str = "") -> None:
        self._directory = Path(copies_in(str(directory)))
        self._agent = own
        self._own = {f"{own}{SUFFIX}"}
        self._written: tuple[int, Mapping[RecordKey, AllocationRecord]] = (-1, NONE)
        """The register's sequence and its allocations when the copies were last written."""
        self._read: Mapping[str, tuple[FileIdentity, Mapping[Allocation, Wanted]]] = NONE
        """For each copy's file name, the file's identity and the copied grants. A changed file causes a new mapping."""
        self._taken: Mapping[str, tuple[FileIdentity, Mapping[Allocation, Wanted]]] = NONE
        """The value of `_read` at the last call of `changed`."""

    async def keep(self, store: Store, looks: Looks) -> None:
        """Write the copies after each change of the allocations, until cancelled."""
        failing = Backoff(first=FIRST_TRY, most=60.0)
        while True:
            count = store.changes.count
            try:
                await self.write(store.snapshot, looks)
            except OSError as error:
                _LOG.warning("cannot copy the allocations: %s", error)
                await asyncio.sleep(failing.next())
                continue
            failing.reset()
            await store.changes.after(count, REST)

    async def write(self, now: RegisterSnapshot, looks: Looks) -> None:
        """Write the copies, if recorded allocations have changed since the last write. Raises OSError."""
        sequence, written = self._written
        if now.allocations is written or now.sequence == sequence:
            return
        copied = [(self._agent, tuple(now.allocations.values()))] if self._agent else self._of_resources(now, written)
        for name, allocations in copied:
            copy = Copy(boot_id(), now.sequence, allocations)
            await looks.until_answered("copy", self._write, f"{name}{SUFFIX}", copy, brief=True)
        self._written = now.sequence, now.allocations

    def _of_resources(
        self, now: RegisterSnapshot, written: Mapping[RecordKey, AllocationRecord]
    ) -> list[tuple[str, tuple[AllocationRecord, ...]]]:
        """Return (file name without suffix, allocations) for the copy of each resource that needs a copy."""
        changing = {one.resource for one in now.allocations.values() if numbers_change(one.identity.tokens)}
        copied = {name for name, _ in written if f"{_file_of(name)}{SUFFIX}" in self._own}
        return [(_file_of(name), tuple(now.allocations_of(name))) for name in sorted(changing | copied)]

    def _write(self, name: str, copy: Copy) -> None:
        write(str(self._directory / name), copy)
        self._own.add(name)

    def read(self) -> None:
        """Read the copies that are new or have changed since the last read. Blocks.

        A grant without a recorded holder is left out. Its agent ended before the agent had read a checkpoint with the
        container, so the kubelet's present checkpoint names the container.
        """
        try:
            names = os.listdir(self._directory)
        except OSError:
            return
        for name in names:
            if name.endswith(SUFFIX) and name not in self._own:
                file, (last, _) = file_identity(self._directory / name), self._read.get(name, (None, NONE))
                if file is not None and file != last:
                    self._read = {**self._read, name: (file, _allocations(self._directory / name))}

    def changed(self) -> Mapping[Allocation, Wanted]:
        """Return the grants of each copy that `read` has read since the last call of `changed`."""
        read, before = self._read, self._taken
        if read is before:
            return NONE
        self._taken, copied = read, dict[Allocation, Wanted]()
        for name, found in read.items():
            if before.get(name) is not found:
                copied |= found[1]
        return copied


def _file_of(resource: str) -> str:
    return resource.replace("/", "_")


def _allocations(path: Path) -> Mapping[Allocation, Wanted]:
    try:
        copy = read(str(path))
    except (OSError, msgspec.MsgspecError) as error:
        _LOG.warning("the copy %s of another agent's allocations cannot be read: %s", path, error)
        return {}
    if copy is None or copy.boot != boot_id():
        return {}
    return {
        Allocation(*holder, record.resource, record.device_id): Wanted(
            (record.resource, record.device), record.identity, record.amount
        )
        for record in copy.allocations
        for holder in record.holders
    }
