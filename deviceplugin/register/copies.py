"""Copies of agents' allocations: JSON files in the directory `copies_in`.

An agent with a ledger (the SQLite file of the agent's records) has one copy, with the agent's name. An agent without a
ledger has one copy for each of its resources, with the resource's name. If the ledger and the kubelet's checkpoint are
lost, only the copy names the pods that have devices of the device plugin. The checkpoint also drops a pod that was
deleted by force, although the pod's processes may hang. So other agents of the node read an agent's copies: the next
process of an agent without a ledger, agents with another `--agent-name`, and `deviceplugin run` after `dra-bridge run`.
A running agent keeps its copies up to date, and the copies of an ended agent stay. On most nodes a reboot empties the
directory `copies_in`; a copy of another boot is ignored.

A copy names the device plugin directory of its agent, and agents with another device plugin directory ignore the copy.
An agent that adopts plugins has a directory of its own for these plugins. A plugin in this directory gives devices to
the same pods, but sees no checkpoint that could show the end of a pod, so this plugin leaves the holders to the agent
that has adopted the plugin.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec

from deviceplugin import cdi, files
from deviceplugin.backoff import Backoff
from deviceplugin.files import FileIdentity, file_identity, place_of
from deviceplugin.identity import boot_id
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

    boot: the id of the node's boot in which the copy was written. sequence: the register's sequence
    (`RegisterSnapshot.sequence`) when the copy was written. plugins: the place of the agent's device plugin directory
    (see `place_of`), "" if the place is not known.
    """

    boot: str
    sequence: int
    allocations: tuple[AllocationRecord, ...]
    plugins: str = ""


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

    directory: the directory of CDI specs. plugins: the kubelet's device plugin directory. own: the agent's name, or "".
    The copy of an agent with a name has all allocations of the agent. An agent without a name has no ledger, and writes
    a copy for each resource, with the allocations whose holder is known.

    A grant is copied after the scan that finds the grant's container, not before the answer to Allocate: before this
    scan, the agent does not know the container, but the kubelet's checkpoint names it right after the answer.
    """

    def __init__(self, directory: Path, plugins: Path, own: str = "") -> None:
        self._directory = Path(copies_in(str(directory)))
        self._plugin_directory = plugins
        self._agent = own
        self._own = {f"{own}{SUFFIX}"}
        self._written: tuple[int, Mapping[RecordKey, AllocationRecord]] = (-1, NONE)
        """The register's sequence and its allocations when the copies were last written."""
        self._copied: dict[str, tuple[AllocationRecord, ...]] = {}
        """For each copy's name (the agent's, or a resource's): the allocations that were last written to the copy."""
        self._read: Mapping[str, tuple[FileIdentity, Mapping[Allocation, Wanted]]] = NONE
        """For each copy's file name, the file's identity and the copied grants. A changed file causes a new mapping."""
        self._taken: Mapping[str, tuple[FileIdentity, Mapping[Allocation, Wanted]]] = NONE
        """The value of `_read` at the last call of `changed`."""

    @functools.cached_property
    def _plugins(self) -> str:
        return place_of(self._plugin_directory)

    async def keep(self, store: Store, looks: Looks) -> None:
        """Write the copies after each change of the allocations, until cancelled."""
        failing, said = Backoff(first=FIRST_TRY, most=60.0), ""
        while True:
            count = store.changes.count
            try:
                await self.write(store.snapshot, looks)
            except OSError as error:
                if str(error) != said:
                    _LOG.warning("cannot copy the allocations: %s", error)
                said = str(error)
                await asyncio.sleep(failing.next())
                continue
            failing.reset()
            said = ""
            await store.changes.after(count, REST)

    async def write(self, now: RegisterSnapshot, looks: Looks) -> None:
        """Write the copies, if recorded allocations have changed since the last write. Raises OSError."""
        sequence, written = self._written
        if now.allocations is written or now.sequence == sequence:
            return
        for name, allocations in self._changed(now):
            await looks.until_answered("copy", self._write, name, now.sequence, allocations, brief=True)
            self._copied[name] = allocations
        self._written = now.sequence, now.allocations

    def _changed(self, now: RegisterSnapshot) -> list[tuple[str, tuple[AllocationRecord, ...]]]:
        """Return (name of the agent or resource, allocations) for each copy that must be written."""
        if self._agent:
            return [(self._agent, tuple(now.allocations.values()))]
        held: dict[str, list[AllocationRecord]] = {resource: [] for resource in self._copied}
        for record in now.allocations.values():
            if record.holders:
                held.setdefault(record.resource, []).append(record)
        copied = ((resource, tuple(records)) for resource, records in held.items())
        return [copy for copy in copied if copy[1] != self._copied.get(copy[0])]

    def _write(self, name: str, sequence: int, allocations: tuple[AllocationRecord, ...]) -> None:
        file = name.replace("/", "_")
        if not self._agent and self._plugins:  # Agents with other plugin directories may have the resource.
            file += f"@{hashlib.sha256(self._plugins.encode()).hexdigest()[:12]}"
        write(str(self._directory / f"{file}{SUFFIX}"), Copy(boot_id(), sequence, allocations, self._plugins))
        self._own.add(f"{file}{SUFFIX}")

    def read(self) -> None:
        """Read the copies that are new or have changed since the last read. Blocks.

        A grant without a recorded holder is left out. The agent that made this grant ended before it had read a
        checkpoint that names the grant's container, so the kubelet's present checkpoint names the container.
        """
        try:
            names = os.listdir(self._directory)
        except OSError:
            return
        for name in names:
            if name.endswith(SUFFIX) and name not in self._own:
                file, (last, _) = file_identity(self._directory / name), self._read.get(name, (None, NONE))
                if file is not None and file != last:
                    self._read = {**self._read, name: (file, self._allocations(self._directory / name))}

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

    def _allocations(self, path: Path) -> Mapping[Allocation, Wanted]:
        try:
            copy = read(str(path))
        except (OSError, msgspec.MsgspecError) as error:
            _LOG.warning("the copy %s of another agent's allocations cannot be read: %s", path, error)
            return {}
        if copy is None or copy.boot != boot_id() or (copy.plugins and self._plugins not in (copy.plugins, "")):
            return {}
        return {
            Allocation(*holder, record.resource, record.device_id): Wanted(
                (record.resource, record.device), record.identity, record.amount
            )
            for record in copy.allocations
            for holder in record.holders
        }
