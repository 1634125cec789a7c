"""Class `Ledger` keeps the records in one SQLite file and applies the changes of operations to it.

SQLite runs in WAL mode with synchronous=FULL: one fdatasync a commit, where a rollback journal
needs three or four; in exclusive locking mode, so that there is no shared memory file and three
descriptors suffice (database, WAL, lock). One agent at a time: a lock file with flock, which the
operating system frees whatever way its owner ends; a second agent (a rolling update) stands by.

A file that is damaged or of another schema is put aside and the ledger starts empty;
`reconcile_evidence` then rebuilds it from evidence. SQLite's own check does not see a changed byte
in a row, so the rows carry a common seal (the XOR of their digests), which has to fit.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import sqlite3
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, Final, Self, TypeVar, cast

import msgspec

from deviceplugin.files import inode_of, locked
from dra_bridge.ledger.records import (
    Change,
    Claim,
    ClaimDevice,
    DeviceRecord,
    Hold,
    Holder,
    Key,
    LedgerBusyError,
    LedgerError,
    LedgerLostError,
    Operation,
    Record,
    Setting,
    Snapshot,
    State,
)

__all__ = ["SCHEMA", "Ledger"]

_LOG: Final = logging.getLogger(__name__)
_T = TypeVar("_T")

SCHEMA: Final = 2
"""The schema's version (PRAGMA user_version); a file of any other is put aside."""
_APPLICATION: Final = 0x64706C67  # "dplg"
_KEEP_ASIDE: Final = 5

_TABLES: Final = {
    "devices": ("resource", "device", "state", "since", "sequence", "reason", "identity"),
    "holds": ("resource", "unit", "device", "since", "sequence", "holders", "pending"),
    "claims": ("driver", "uid", "namespace", "name", "devices", "result", "since", "sequence", "pods"),
    "settings": ("section", "key", "value"),
}
_CREATE: Final = (
    *(
        f"CREATE TABLE {table} ({', '.join(columns)}, PRIMARY KEY ({columns[0]}, {columns[1]})) WITHOUT ROWID"
        for table, columns in _TABLES.items()
    ),
    "CREATE TABLE seal (id INTEGER PRIMARY KEY, sequence INTEGER NOT NULL, seal INTEGER NOT NULL)",
    "INSERT INTO seal VALUES (1, 0, 0)",
)
_FORMER_COLUMNS: Final = {"devices": 6, "holds": 5, "claims": 8}
"""How many of the columns a database of schema 1 has."""
_FROM_FORMER: Final = (
    "ALTER TABLE devices ADD COLUMN identity DEFAULT ''",
    "ALTER TABLE holds ADD COLUMN holders DEFAULT '[]'",
    "ALTER TABLE holds ADD COLUMN pending DEFAULT 1",
    "ALTER TABLE claims ADD COLUMN pods DEFAULT '[]'",
    "CREATE TABLE settings (section, key, value, PRIMARY KEY (section, key)) WITHOUT ROWID",
)
"""What makes a database of schema 1 one of schema 2."""
_PUT: Final = {
    table: f"INSERT OR REPLACE INTO {table} VALUES ({', '.join('?' * len(columns))})"  # noqa: S608  # our own names
    for table, columns in _TABLES.items()
}
_DROP: Final = {
    table: f"DELETE FROM {table} WHERE {columns[0]} = ? AND {columns[1]} = ?"  # noqa: S608
    for table, columns in _TABLES.items()
}
_SELECT: Final = {table: f"SELECT {', '.join(columns)} FROM {table}" for table, columns in _TABLES.items()}  # noqa: S608

_Row = tuple[str | int | float | None, ...]


def _row(record: Record) -> _Row:
    if isinstance(record, DeviceRecord):
        at = (record.resource, record.device, record.state.value)
        return *at, record.since, record.sequence, record.reason, record.identity
    if isinstance(record, Hold):
        holders = msgspec.json.encode(sorted(record.holders)).decode()
        return record.resource, record.unit, record.device, record.since, record.sequence, holders, int(record.pending)
    if isinstance(record, Setting):
        return record.section, record.key, record.value
    devices = msgspec.json.encode(record.devices).decode()
    pods = msgspec.json.encode(sorted(record.pods)).decode()
    first = (record.driver, record.uid, record.namespace, record.name)
    return *first, devices, record.result, record.since, record.sequence, pods


def _record(table: str, row: Sequence[Any]) -> Record:
    if table == "devices":
        return DeviceRecord(row[0], row[1], State(row[2]), *row[3:])
    if table == "holds":
        holders = msgspec.json.decode(row[5], type=frozenset[Holder])
        resource, unit, device, since, sequence = row[:5]
        return Hold(resource, unit, device, since, sequence, holders, pending=bool(row[6]))
    if table == "settings":
        return Setting(*row)
    devices = msgspec.json.decode(row[4], type=tuple[ClaimDevice, ...])
    driver, uid, namespace, name = row[:4]
    result, since, sequence = row[5:8]
    pods = msgspec.json.decode(row[8], type=frozenset[str])
    return Claim(driver, uid, namespace, name, devices, result, since, sequence, pods)


def _digest(table: str, row: _Row) -> int:
    data = msgspec.msgpack.encode((table, *row))
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big", signed=True)


class _DamagedError(Exception):
    """Raised when the file is not a ledger of this schema in good order."""


# SQLite's answers that speak of the file and not of the disk or the permissions.
_DAMAGE: Final = frozenset(
    {
        sqlite3.SQLITE_CORRUPT,
        sqlite3.SQLITE_NOTADB,
        sqlite3.SQLITE_ERROR,  # no such table
        sqlite3.SQLITE_FORMAT,
        sqlite3.SQLITE_MISMATCH,
        sqlite3.SQLITE_SCHEMA,
        sqlite3.SQLITE_READONLY,  # the header says a newer writer made it; the directory is writable, we hold the lock
        sqlite3.SQLITE_CONSTRAINT,
        sqlite3.SQLITE_TOOBIG,
        sqlite3.SQLITE_NOMEM,  # a length field that claims gigabytes
    }
)


def _speaks_of_damage(error: Exception) -> bool:
    if isinstance(error, sqlite3.Error):
        code = getattr(error, "sqlite_errorcode", None)
        return code is None or (code & 0xFF) in _DAMAGE
    return True


def _locked(path: str, *, wait: bool = False) -> int:
    """Lock the ledger at this path; return the open lock.

    Raises:
        LedgerBusyError: another agent has it, and `wait` is False.
        LedgerError: the directory or the disk does not let us.

    """
    try:
        os.makedirs(os.path.dirname(path) or ".", mode=0o750, exist_ok=True)
        return locked(path + ".lock", wait=wait)
    except BlockingIOError as error:
        raise LedgerBusyError(f"another agent holds the ledger {path}") from error
    except OSError as error:
        raise LedgerError(f"cannot open the ledger {path}: {error}") from error


class Ledger:
    """The file. Synchronous and thread-safe; `AsyncLedger` is for event loops.

    Attributes:
        set_aside: where a file went that could not be used, None if there was none. The ledger is
            empty then, and `reconcile_evidence` must rebuild it before anything is granted.
        fresh: the ledger was empty when it was opened.

    """

    def __init__(
        self,
        path: str,
        lock: int,
        step: Callable[[str], None] | None,
        connect: Callable[[str], sqlite3.Connection],
    ) -> None:
        """Do not call it, use `open`."""
        self.path: Final = path
        self.set_aside: str | None = None
        self.fresh = False
        self._lock_file = lock
        self._connect = connect
        self._guard = threading.RLock()
        self._step = step or _no_step
        self._connection: sqlite3.Connection | None = None
        self._snapshot = Snapshot()
        self._seal = 0
        self._files: tuple[tuple[int, int] | None, ...] = ()
        self._lost = ""
        self._closed = False

    @classmethod
    def open(
        cls,
        path: str,
        *,
        wait: bool = False,
        step: Callable[[str], None] | None = None,
        connect: Callable[[str], sqlite3.Connection] | None = None,
    ) -> Self:
        """Open the ledger, or make it; put aside what cannot be used.

        Args:
            path: the database; `path + ".lock"` is the lock. Missing directories are made.
            wait: stand by while another agent has it.
            step: called before and after each durable step with its name, for tests.
            connect: opens the database, for tests.

        Raises:
            LedgerBusyError: another agent has it, and `wait` is False.
            LedgerError: the directory or the disk does not let us; another try may.

        """
        ledger = cls(path, _locked(path, wait=wait), step, connect or _connected)
        try:
            ledger._load()
        except BaseException:
            ledger.close()
            raise
        return ledger

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        now = self._snapshot
        what = f"{len(now.devices)} devices, {len(now.holds)} holds, {len(now.claims)} claims"
        return f"<Ledger {self.path} at {now.sequence}: {what}>"

    @property
    def snapshot(self) -> Snapshot:
        """Everything as of the last commit."""
        return self._snapshot

    def do(self, operation: Operation[_T]) -> _T:
        """Decide and record; the answer is durable when it is returned.

        Raises:
            LedgerError: it could not be recorded, nothing was granted.

        """
        answer = self.do_all([operation])[0]
        if isinstance(answer, BaseException):
            raise answer
        return cast("_T", answer)

    def do_all(self, operations: Sequence[Operation[Any]]) -> list[Any]:
        """Decide one after the other and record all in one transaction.

        Returns:
            An answer each, or the exception that its operation raised (a mistake of ours).

        Raises:
            LedgerError: it could not be recorded, nothing was granted.
            LedgerLostError: the files were removed, replaced or damaged; nothing is granted any more.

        """
        with self._guard:
            if self._closed:
                raise LedgerError(f"the ledger {self.path} is closed")
            if not self._lost and not self._in_place():
                self._lose("its files were removed or replaced while it was in use")
            if self._lost:
                raise LedgerLostError(self._lost)
            if self._connection is None:
                self._load_again()
            before, after = self._snapshot, self._snapshot
            answers: list[Any] = []
            changes: list[Change] = []
            for operation in operations:
                try:
                    decision = operation(after)
                except Exception as error:  # costs its own caller only
                    answers.append(error)
                    continue
                answers.append(decision.answer)
                if decision.changes:
                    grows = any(change.durable for change in decision.changes)
                    after = after.with_changes(decision.changes, after.sequence + grows)
                    changes += decision.changes
            if after.sequence != before.sequence:
                self._write(before, after, changes)
            self._snapshot = after
            return answers

    def close(self) -> None:
        """Close the file and let go of the lock."""
        with self._guard:
            self._closed = True
            self._disconnect()
            if self._lock_file >= 0:
                os.close(self._lock_file)
                self._lock_file = -1

    def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            with contextlib.suppress(sqlite3.Error):
                connection.close()

    def _in_place(self) -> bool:
        """Return whether what is written is found again by the next agent; SQLite removes the log with a connection."""
        count = 2 if self._connection is None else 3
        return all(file == inode_of(path) for path, file in list(zip(self._paths, self._files, strict=True))[:count])

    @property
    def _paths(self) -> tuple[str, ...]:
        """The files that make up the ledger, its lock first."""
        return f"{self.path}.lock", self.path, f"{self.path}-wal"

    def _lose(self, why: str) -> None:
        """Grant nothing any more: what is on disk is not what this process has written."""
        self._lost = f"the ledger {self.path} cannot be used any more: {why}; the agent has to be restarted"
        _LOG.error("%s", self._lost)
        self._disconnect()

    def _write(self, before: Snapshot, after: Snapshot, changes: Sequence[Change]) -> None:
        connection = self._connection
        assert connection is not None
        # The last word on each durable record, and the seal that belongs to all of them.
        last = {(change.table, change.key): change.record for change in changes if change.durable}
        seal = self._seal
        try:
            self._step("begin")
            connection.execute("BEGIN IMMEDIATE")
            for (table, key), record in last.items():
                self._step(f"{'drop' if record is None else 'put'} {table}")
                old = getattr(before, table).get(key)
                if old is not None and getattr(old, "durable", True):
                    seal ^= _digest(table, _row(old))
                if record is None:
                    connection.execute(_DROP[table], key)
                else:
                    row = _row(record)
                    seal ^= _digest(table, row)
                    connection.execute(_PUT[table], row)
            self._step("seal")
            connection.execute("UPDATE seal SET sequence = ?, seal = ? WHERE id = 1", (after.sequence, seal))
            self._step("commit")
            connection.execute("COMMIT")
        except (sqlite3.Error, OSError) as error:
            # What is on disk now is not certain; the next call looks.
            with contextlib.suppress(sqlite3.Error):
                connection.execute("ROLLBACK")
            self._disconnect()
            raise LedgerError(f"cannot write the ledger {self.path}: {error}") from error
        self._seal = seal
        self._step("committed")

    def _load_again(self) -> None:
        """Go on after a failed write: what is on disk counts, what only this process knows stays."""
        known, files = self._snapshot, self._files
        try:
            self._load()
        except LedgerError:
            self._snapshot = known
            raise
        found = self._snapshot
        if self._files[:2] != files[:2] or found.sequence < known.sequence:
            self._snapshot = known
            self._lose("it has lost what was written to it")
            raise LedgerLostError(self._lost)
        holds = {
            key: replace(hold, absent_since=old.absent_since, pod=old.pod)
            if (old := known.holds.get(key)) is not None and old.sequence == hold.sequence
            else hold
            for key, hold in found.holds.items()
        }
        reserved = {key: claim for key, claim in known.claims.items() if not claim.durable}
        self._snapshot = replace(found, holds=holds, claims={**reserved, **found.claims})

    def _load(self) -> None:
        """Open the database and read all of it; put it aside if that is not possible."""
        for last in (False, True):
            try:
                self._snapshot, self._seal = self._read()
            except (sqlite3.Error, _DamagedError, ValueError, TypeError, OverflowError, MemoryError) as error:
                self._disconnect()
                if last or not _speaks_of_damage(error):
                    raise LedgerError(f"cannot open the ledger {self.path}: {error}") from error
                self.set_aside = self._put_aside()
                _LOG.error(
                    "the ledger %s cannot be used (%s); it is now %s, and a new one is built from what kubelet, "
                    "API server and CDI files say",
                    self.path,
                    error,
                    self.set_aside,
                )
            else:
                return

    def _read(self) -> tuple[Snapshot, int]:
        self._step("open")
        connection = self._connection = self._connect(self.path)
        connection.execute("PRAGMA locking_mode = EXCLUSIVE")
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute("PRAGMA cache_size = -256")
        connection.execute("PRAGMA wal_autocheckpoint = 256")
        connection.execute("PRAGMA journal_size_limit = 2097152")
        version = connection.execute("PRAGMA user_version").fetchone()[0]
        if version == 0 and not connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
            self._create(connection)
        elif version not in {1, SCHEMA}:
            raise _DamagedError(f"its schema is {version}, this agent's is {SCHEMA}")
        elif connection.execute("PRAGMA application_id").fetchone()[0] != _APPLICATION:
            raise _DamagedError("it is another program's database")
        elif version == 1:
            self._upgrade(connection)
        check = connection.execute("PRAGMA quick_check(1)").fetchone()
        if check is None or check[0] != "ok":
            raise _DamagedError(str(check[0] if check else "no answer from quick_check"))
        loaded = self._rows(connection)
        # A header that says a newer SQLite wrote it can be read and not be written: better known now.
        connection.execute("BEGIN IMMEDIATE")
        connection.execute("UPDATE seal SET id = 1 WHERE id = 1")
        connection.execute("ROLLBACK")
        # A commit whose fsync failed may lie in the page cache as if it had been written; copying
        # it into the database writes it once more.
        self._step("checkpoint")
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        self._files = tuple(map(inode_of, self._paths))
        self._step("opened")
        return loaded

    def _create(self, connection: sqlite3.Connection) -> None:
        self._step("create")
        connection.execute("BEGIN IMMEDIATE")
        for statement in _CREATE:
            connection.execute(statement)
        connection.execute(f"PRAGMA application_id = {_APPLICATION}")
        connection.execute(f"PRAGMA user_version = {SCHEMA}")
        self._step("create commit")
        connection.execute("COMMIT")
        self._step("created")

    def _upgrade(self, connection: sqlite3.Connection) -> None:
        """Make a database of schema 1 one of this schema, if its seal fits."""
        connection.execute("BEGIN IMMEDIATE")
        former = 0
        for table, count in _FORMER_COLUMNS.items():
            columns = ", ".join(_TABLES[table][:count])
            for row in connection.execute(f"SELECT {columns} FROM {table}"):  # noqa: S608  # our own names
                former ^= _digest(table, row)
        found = connection.execute("SELECT seal FROM seal WHERE id = 1").fetchone()
        if found is None or found[0] != former:
            raise _DamagedError("the seal does not fit the rows")
        for statement in _FROM_FORMER:
            connection.execute(statement)
        seal = 0
        for table, statement in _SELECT.items():
            for row in connection.execute(statement):
                seal ^= _digest(table, row)
        connection.execute("UPDATE seal SET seal = ? WHERE id = 1", (seal,))
        connection.execute(f"PRAGMA user_version = {SCHEMA}")
        connection.execute("COMMIT")

    def _rows(self, connection: sqlite3.Connection) -> tuple[Snapshot, int]:
        tables: dict[str, dict[Key, Any]] = {}
        seal = 0
        for table, statement in _SELECT.items():
            records = tables[table] = {}
            for row in connection.execute(statement):
                record = _record(table, row)
                if _row(record) != row or not isinstance(row[0], str) or not isinstance(row[1], str):
                    raise _DamagedError(f"a row of {table} is not in order")
                seal ^= _digest(table, row)
                records[row[0], row[1]] = record
        row = connection.execute("SELECT sequence, seal FROM seal WHERE id = 1").fetchone()
        if row is None or row[1] != seal or not isinstance(row[0], int):
            raise _DamagedError("the seal does not fit the rows")
        self.fresh = row[0] == 0
        return Snapshot(row[0], **tables), seal

    def _put_aside(self) -> str:
        stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%S.%fZ")
        aside = f"{self.path}.aside-{stamp}"
        try:
            # The database first: without it nobody takes its journals for anything.
            for suffix in ("", "-wal", "-shm", "-journal"):
                with contextlib.suppress(FileNotFoundError):
                    os.rename(self.path + suffix, aside + suffix)
        except OSError as error:
            raise LedgerError(f"cannot put the damaged ledger {self.path} aside: {error}") from error
        self._remove_old()
        return aside

    def _remove_old(self) -> None:
        directory, name = os.path.split(self.path)
        with contextlib.suppress(OSError):
            old = sorted(n for n in os.listdir(directory or ".") if n.startswith(name + ".aside-") and n.endswith("Z"))
            for gone in old[:-_KEEP_ASIDE]:
                for suffix in ("", "-wal", "-shm", "-journal"):
                    with contextlib.suppress(FileNotFoundError):
                        os.remove(os.path.join(directory, gone + suffix))


def _no_step(_name: str) -> None:
    pass


def _connected(path: str) -> sqlite3.Connection:
    return sqlite3.connect(path, timeout=1.0, isolation_level=None, check_same_thread=False, cached_statements=32)
