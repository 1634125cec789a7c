"""Class `Ledger` keeps the register's records in one SQLite file, and writes each operation's changes to this file.

SQLite runs in WAL mode. Its exclusive locking mode needs no shared memory file. A lock file (flock) ensures that only
one agent at a time has the ledger; a second agent (in a rolling update) waits.

Every grant for which the kubelet has a response survives the death of the process. Some records must also survive a
crash of the machine: the side of a device, settings, claims whose `prepare` hook is about to change devices, and claims
that share a device. Such records are synced to disk, with one fdatasync, before the kubelet gets the response
(`outlives_boot`). Other grants are not synced, because no holder survives a crash of the machine. Records that remain
after such a crash name the earlier boot, so their holders count as ended. After the boot, the kubelet's checkpoint and
claim state name the devices that the kubelet gives to the same pods and claims again. Claims that share a device are
synced because the kubelet's claim state does not state how much of the device each claim has.

A file that is damaged or has another schema is renamed, and the ledger starts empty; `reconcile_evidence` then rebuilds
the records from evidence. SQLite's own check does not detect a changed byte in a row. So the file also has a seal, the
XOR of all rows' digests, which must match the rows.

If the kubelet's checkpoint is lost together with the ledger, no file names the pods with devices of the device plugin
any more. So the allocations are copied to a file in another directory. This directory should be in memory, because no
holder survives a reboot. The copy is written after the ledger. If a copy of this boot has a higher sequence number than
the ledger, then the ledger was lost, was restored from a backup, or has lost SQLite's log.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import logging
import os
import sqlite3
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, Final

import msgspec

from deviceplugin.files import inode_of, locked
from deviceplugin.identity import Identity, boot_id
from deviceplugin.register import copies, records
from deviceplugin.register.copies import Copy
from deviceplugin.register.records import Change, Decision, LedgerError, LedgerLostError, Operation, RegisterSnapshot

_LOG: Final = logging.getLogger(__name__)
_Row = tuple[str | int | float | None, ...]

SCHEMA: Final = 7
"""The version of the schema (PRAGMA user_version). A file with another version is renamed, and a new file is made."""
_APPLICATION: Final = 0x64706C67  # "dplg" in ASCII. This number marks the file as a ledger.
_KEEP_ASIDE: Final = 5
_PRAGMAS: Final = (
    "locking_mode = EXCLUSIVE",
    "journal_mode = WAL",
    "cache_size = -256",
    "wal_autocheckpoint = 0",
    "journal_size_limit = 2097152",
)

CHECKPOINT: Final = 100
"""Number of commits after which SQLite's log is copied into the database. Each commit adds two to four pages to this
log."""

_RECORDS: Final = {
    "devices": records.DeviceRecord,
    "allocations": records.AllocationRecord,
    "claims": records.Claim,
    "settings": records.Setting,
}
_TABLES: Final = {
    "devices": ("resource", "device", "state", "since", "sequence", "reason", "driver", "for_claim"),
    "allocations": (
        *("resource", "device_id", "device", "since", "sequence", "holders", "pending", "identity", "amount", "shown"),
        "former",
    ),
    "claims": ("driver", "uid", "namespace", "name", "devices", "result", "since", "sequence", "pods"),
    "settings": ("section", "key", "value"),
}
"""For each table, the stored fields of its records. The first two fields are the key. The name of each table is also
the name of a field of `RegisterSnapshot`.
"""
_CREATE: Final = (
    *(
        f"CREATE TABLE {name} ({', '.join(columns)}, PRIMARY KEY ({columns[0]}, {columns[1]})) WITHOUT ROWID"
        for name, columns in _TABLES.items()
    ),
    "CREATE TABLE seal (id INTEGER PRIMARY KEY, sequence INTEGER NOT NULL, seal INTEGER NOT NULL)",
    "INSERT INTO seal VALUES (1, 0, 0)",
)
# ruff: noqa: S608  # all names in the statements are constants from above
_DECODERS: Final[dict[str, Callable[[Any], Any]]] = {
    "state": records.State,
    "holders": msgspec.json.Decoder(frozenset[records.ContainerKey]).decode,
    "pending": bool,
    "for_claim": bool,
    "identity": msgspec.json.Decoder(Identity).decode,
    "shown": msgspec.json.Decoder(frozenset[tuple[str, str]]).decode,
    "amount": msgspec.json.Decoder(records.Amount).decode,
    "former": msgspec.json.Decoder(tuple[records.FormerGrant, ...]).decode,
    "pods": msgspec.json.Decoder(frozenset[str]).decode,
    "devices": msgspec.json.Decoder(tuple[records.ClaimDevice, ...]).decode,
}
"""For each field that needs a conversion, the function that converts the column's value to the field's value.
"""


_ENCODE: Final = msgspec.json.Encoder(order="deterministic").encode


def _row(table: str, record: records.Record) -> _Row:
    row: list[Any] = []
    for field in _TABLES[table]:
        value = getattr(record, field)
        if isinstance(value, records.State):
            value = value.value
        elif isinstance(value, frozenset | tuple | records.Amount | Identity):
            value = _ENCODE(value).decode()
        elif isinstance(value, bool):
            value = int(value)
        row.append(value)
    return tuple(row)


def _record(table: str, row: Sequence[Any]) -> Any:
    fields = dict(zip(_TABLES[table], row, strict=True))
    for field in _DECODERS.keys() & fields.keys():
        fields[field] = _DECODERS[field](fields[field])
    return _RECORDS[table](**fields)


def _digest(table: str, row: _Row) -> int:
    data = msgspec.msgpack.encode((table, *row))
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big", signed=True)


class _DamagedError(Exception):
    """Raised when the file is damaged, or is not a ledger of this schema."""


_DAMAGE: Final = frozenset(
    {
        sqlite3.SQLITE_CORRUPT,
        sqlite3.SQLITE_NOTADB,
        sqlite3.SQLITE_ERROR,  # A missing table causes this error.
        sqlite3.SQLITE_FORMAT,
        sqlite3.SQLITE_MISMATCH,
        sqlite3.SQLITE_SCHEMA,
        # This error shows that the file's header requires a newer SQLite for writes. The error has no other cause here,
        # because the directory is writable and this process has the lock.
        sqlite3.SQLITE_READONLY,
        sqlite3.SQLITE_CONSTRAINT,
        sqlite3.SQLITE_TOOBIG,
    }
)
"""SQLite's error codes for a damaged or wrong file. Problems of the disk or of permissions have other codes."""


def connected(path: str) -> sqlite3.Connection:
    """Open a database in which a transaction begins only when BEGIN is executed."""
    return sqlite3.connect(path, timeout=1.0, isolation_level=None, check_same_thread=False, cached_statements=32)


def outlives_boot(changes: Sequence[Change]) -> bool:
    """Return whether one of these changes is needed after a crash of the machine, and so must be synced."""
    for change in changes:
        claim = change.record
        if not change.durable:
            continue
        if change.table in ("devices", "settings"):
            return True
        if isinstance(claim, records.Claim) and (claim.result is None or any(each.share for each in claim.devices)):
            return True
    return False


class Ledger:
    """The ledger's file, with blocking, thread-safe methods; `AsyncLedger` is for event loops.

    snapshot: all records at the last commit. fresh: whether the ledger was empty when it was opened. In this case,
    `reconcile_evidence` must rebuild the records before any grant. If the copy of the allocations was newer than the
    ledger, the ledger also has the copy's allocations.
    """

    def __init__(self, path: str, copy: str = "", *, connect: Callable[[str], sqlite3.Connection] = connected) -> None:
        """Wait until no other agent has the ledger, then open or create the file. An unusable file is renamed.

        path: the path of the database; `path + ".lock"` is the lock file. copy: path of the copy of the allocations, ""
        for none. connect: the function that opens the database; tests replace the function. Raises LedgerError if the
        directory or the disk does not permit access; a later try may succeed.
        """
        self.path: Final = path
        self.copy: Final = copy
        self._connect = connect
        self.guard = threading.RLock()
        self._connection: sqlite3.Connection | None = None
        self._seal = 0
        self._files: tuple[tuple[int, int] | None, ...] = ()
        self._lost = ""
        self._logged = 0
        """Number of commits since SQLite's log was last copied into the database."""
        try:
            os.makedirs(os.path.dirname(path) or ".", mode=0o750, exist_ok=True)
            self._lock_file = locked(path + ".lock", wait=True)
            """The file descriptor of the lock file; -1 when the ledger is closed."""
        except OSError as error:
            raise LedgerError(f"cannot open the ledger {path}: {error}") from error
        try:
            self.snapshot = self._load()
            self.fresh: Final = not self.snapshot.sequence
            if copied := self._copied():
                allocations = (replace(allocation, absent_since=None) for allocation in copied.allocations)
                changes = tuple(
                    Change("allocations", (allocation.resource, allocation.device_id), allocation)
                    for allocation in allocations
                )
                # New records get a higher sequence number than all records of the copy, and than all evidence that the
                # former process had read.
                self.snapshot = replace(self.snapshot, sequence=copied.sequence)
                self.do_all([lambda state: Decision(None, changes)])
        except BaseException:
            self.close()
            raise

    @property
    def must_tidy(self) -> bool:
        """Whether SQLite's log has grown so much that `tidy` is due."""
        return self._logged >= CHECKPOINT

    def tidy(self) -> None:
        """Copy SQLite's log into the database if `must_tidy` is true, then begin a new log and sync it. Blocks."""
        with self.guard:
            if not self.must_tidy:
                return
            self._logged = 0
            if self._connection is None:
                return
            try:
                self._connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()
                # SQLite syncs the first frame of a new log. So this write does the sync here, and a later write in the
                # event loop needs no sync.
                for statement in ("BEGIN IMMEDIATE", "UPDATE seal SET id = 1 WHERE id = 1", "COMMIT"):
                    self._connection.execute(statement)
            except sqlite3.Error as error:
                # It is not known which frames of the log are on the disk. The next call reads the whole log, and writes
                # it again.
                _LOG.warning("cannot empty the log of the ledger %s: %s", self.path, error)
                self._disconnect()

    def do_all(self, operations: Sequence[Operation[Any]]) -> list[Any]:
        """Execute operations in order, and record all their changes in one transaction. Return the operations' results.

        The result of an operation that raises an exception (a bug in this code) is this exception. Raises LedgerError
        if the transaction could not be recorded, LedgerLostError if the files were removed, replaced or damaged.
        """
        with self.guard:
            if self._lock_file < 0:
                raise LedgerError(f"the ledger {self.path} is closed")
            # SQLite removes its log when a connection is closed, so the log may be missing.
            count = 2 if self._connection is None else 3
            if not self._lost and self._found_files()[:count] != self._files[:count]:
                self._lose("its files were removed or replaced while it was in use")
            if self._lost:
                raise LedgerLostError(self._lost)
            if self._connection is None:
                self._load_again()
            after = self.snapshot
            answers: list[Any] = []
            changes: list[Change] = []
            for operation in operations:
                try:
                    decision = operation(after)
                except Exception as error:  # The exception is the result of this operation only.
                    answers.append(error)
                    continue
                answers.append(decision.answer)
                after = after.following(decision)
                changes += decision.changes
            if after.sequence != self.snapshot.sequence:
                self._write(after.sequence, changes, synced=outlives_boot(changes))
            self.snapshot = after
            self.tidy()
            return answers

    def record(self, decision: Decision[Any]) -> bool:
        """Record a decision, made on the present snapshot, whose changes need no sync. Return whether this succeeded.

        Returns False if `do_all` must first open the file again.
        """
        with self.guard:
            if self._lost or self._connection is None or self._found_files() != self._files:
                return False
            after = self.snapshot.following(decision)
            if after.sequence != self.snapshot.sequence:
                self._write(after.sequence, decision.changes, synced=False)
            self.snapshot = after
            return True

    def close(self) -> None:
        """Close the file and release the lock."""
        with self.guard:
            self._disconnect()
            if self._lock_file >= 0:
                os.close(self._lock_file)
                self._lock_file = -1

    def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            with contextlib.suppress(sqlite3.Error):  # ROLLBACK fails if no transaction is open.
                connection.execute("ROLLBACK")
            with contextlib.suppress(sqlite3.Error):
                connection.close()

    def _found_files(self) -> tuple[tuple[int, int] | None, ...]:
        """Return the device and inode number of the lock file, the database and the log; None for a missing file."""
        return inode_of(f"{self.path}.lock"), inode_of(self.path), inode_of(f"{self.path}-wal")

    def _lose(self, why: str) -> None:
        """Refuse all grants from now on, because the files do not have the content any more that this process wrote."""
        self._lost = f"the ledger {self.path} cannot be used any more: {why}; the agent has to be restarted"
        _LOG.error("%s", self._lost)
        self._disconnect()

    def _write(self, sequence: int, changes: Sequence[Change], *, synced: bool) -> None:
        connection = self._connection
        assert connection is not None
        # For each durable record, only the last change is written. The seal of all records is written last.
        last: dict[tuple[str, records.RecordKey], records.Record | None] = {}
        for change in changes:
            if change.durable:
                last[change.table, change.key] = change.record
        seal = self._seal
        try:
            connection.execute(f"PRAGMA synchronous = {'FULL' if synced else 'NORMAL'}")
            connection.execute("BEGIN IMMEDIATE")
            for (table, key), record in last.items():
                old = getattr(self.snapshot, table).get(key)
                if old is not None and getattr(old, "durable", True):
                    seal ^= _digest(table, _row(table, old))
                if record is None:
                    first, second, *_ = _TABLES[table]
                    connection.execute(f"DELETE FROM {table} WHERE {first} = ? AND {second} = ?", key)
                else:
                    row = _row(table, record)
                    seal ^= _digest(table, row)
                    connection.execute(f"INSERT OR REPLACE INTO {table} VALUES ({', '.join('?' * len(row))})", row)
            connection.execute("UPDATE seal SET sequence = ?, seal = ? WHERE id = 1", (sequence, seal))
            connection.execute("COMMIT")
        except (sqlite3.Error, OSError) as error:
            # It is not known what the disk contains now, so the next call reads the file again.
            self._disconnect()
            raise LedgerError(f"cannot write the ledger {self.path}: {error}") from error
        self._seal = seal
        self._logged += 1

    def _copied(self) -> Copy | None:
        """Return the copy of the allocations if it is of this boot and newer than the ledger (which lacks commits)."""
        try:
            copy = copies.read(self.copy)
        except (OSError, msgspec.MsgspecError) as error:
            _LOG.warning("the copy of the allocations of the ledger %s cannot be read: %s", self.path, error)
            return None
        if copy is None or copy.boot != boot_id() or copy.sequence <= self.snapshot.sequence:
            return None
        if not copy.allocations:
            return None
        state = "new" if self.fresh else "from before (it was restored, or its log was lost)"
        text = "the ledger %s is %s, and its copy %s names %d allocations: they count as held while their pods run"
        _LOG.warning(text, self.path, state, self.copy, len(copy.allocations))
        return copy

    def _load_again(self) -> None:
        """Read the file again after a failed write. The snapshot keeps records and fields that are only in memory."""
        before, files = self.snapshot, self._files
        loaded = self._load()
        if self._files[:2] != files[:2] or loaded.sequence < before.sequence:
            self._lose("writes to it were lost")
            raise LedgerLostError(self._lost)
        allocations = dict(loaded.allocations)
        for key, record in loaded.allocations.items():
            old = before.allocations.get(key)
            if old is not None and old.sequence == record.sequence:
                allocations[key] = replace(record, absent_since=old.absent_since, pod=old.pod, ending=old.ending)
        reserved = {key: claim for key, claim in before.claims.items() if not claim.durable}
        claims = {**reserved, **loaded.claims}
        kept = [Change("allocations", key, allocation, durable=False) for key, allocation in allocations.items()]
        kept += [Change("claims", key, claim, durable=False) for key, claim in claims.items()]
        self.snapshot = replace(loaded.with_changes(kept, loaded.sequence), ended=before.ended)

    def _load(self, *, again: bool = False) -> RegisterSnapshot:
        """Open the database and read all records.

        If the file is damaged, rename it and create a new database.
        """
        try:
            return self._read()
        except (sqlite3.Error, _DamagedError, ValueError, TypeError, OverflowError, MemoryError) as error:
            self._disconnect()
            # A MemoryError has no error code of SQLite. Its cause is a damaged length field in the file that requests
            # gigabytes.
            code = getattr(error, "sqlite_errorcode", None)
            if again or (code is not None and code & 0xFF not in _DAMAGE):
                raise LedgerError(f"cannot open the ledger {self.path}: {error}") from error
            message = "the ledger %s cannot be used (%s); it was moved to %s, and a new one is built from evidence"
            _LOG.error(message, self.path, error, self._put_aside())
        return self._load(again=True)

    def _read(self) -> RegisterSnapshot:
        if os.path.isdir(self.path):
            raise _DamagedError("the path is a directory")
        connection = self._connection = self._connect(self.path)
        for pragma in _PRAGMAS:
            connection.execute(f"PRAGMA {pragma}")
        version = connection.execute("PRAGMA user_version").fetchone()[0]
        if version == 0 and not connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
            self._create(connection)
        elif version != SCHEMA:
            raise _DamagedError(f"the file has schema {version}, but this agent uses schema {SCHEMA}")
        elif connection.execute("PRAGMA application_id").fetchone()[0] != _APPLICATION:
            raise _DamagedError("the file is another program's database")
        if (check := connection.execute("PRAGMA quick_check(1)").fetchone()[0]) != "ok":
            raise _DamagedError(check)
        snapshot = self._rows(connection)
        # A file whose header requires a newer SQLite for writes can be read, but not written. This statement detects
        # such a file.
        connection.execute("BEGIN IMMEDIATE")
        connection.execute("UPDATE seal SET id = 1 WHERE id = 1")
        connection.execute("ROLLBACK")
        # After a failed fsync, a commit may be in the page cache, but not on the disk. This statement writes the commit
        # again.
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        self._files = self._found_files()
        return snapshot

    def _create(self, connection: sqlite3.Connection) -> None:
        connection.execute("BEGIN IMMEDIATE")
        for statement in _CREATE:
            connection.execute(statement)
        connection.execute(f"PRAGMA application_id = {_APPLICATION}")
        connection.execute(f"PRAGMA user_version = {SCHEMA}")
        connection.execute("COMMIT")

    def _rows(self, connection: sqlite3.Connection) -> RegisterSnapshot:
        tables: dict[str, dict[records.RecordKey, Any]] = {table: {} for table in _TABLES}
        seal = 0
        for table, by_key in tables.items():
            for row in connection.execute(f"SELECT {', '.join(_TABLES[table])} FROM {table}"):
                by_key[row[0], row[1]] = record = _record(table, row)
                if _row(table, record) != row or not isinstance(row[0], str) or not isinstance(row[1], str):
                    raise _DamagedError(f"a row of table {table} is malformed")
                seal ^= _digest(table, row)
        row = connection.execute("SELECT sequence, seal FROM seal WHERE id = 1").fetchone()
        if row is None or row[1] != seal or not isinstance(row[0], int):
            raise _DamagedError("checksum mismatch")
        sequence, self._seal = row
        changes = [Change(table, key, record) for table, by_key in tables.items() for key, record in by_key.items()]
        return RegisterSnapshot().with_changes(changes, sequence)

    def _put_aside(self) -> str:
        """Rename the database and its journals; return the new path.

        Older renamed files, except the last few, are removed.
        """
        aside = f"{self.path}.aside-{datetime.now(UTC).strftime('%Y%m%dT%H%M%S.%fZ')}"
        # The database is renamed first, because no program reads the journals without the database.
        suffixes = ("", "-wal", "-shm", "-journal")
        try:
            for suffix in suffixes:
                with contextlib.suppress(FileNotFoundError):
                    os.rename(self.path + suffix, aside + suffix)
        except OSError as error:
            raise LedgerError(f"cannot put the damaged ledger {self.path} aside: {error}") from error
        for old in sorted(glob.glob(f"{glob.escape(self.path)}.aside-*Z"))[:-_KEEP_ASIDE]:
            for suffix in suffixes:
                with contextlib.suppress(OSError):
                    os.remove(old + suffix)
        return aside
