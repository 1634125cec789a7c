"""The file of the ledger: damage, crashes, full disks and a second agent."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deviceplugin.identity import UNIDENTIFIED
from deviceplugin.register import identification, operations, rules
from deviceplugin.register.records import (
    UNKNOWN,
    WHOLE,
    Amount,
    Change,
    Claim,
    LedgerError,
    LedgerLostError,
    Point,
    RegisterSnapshot,
    Side,
)
from deviceplugin.register.rules import (
    ClaimEvidence,
    ClusterEvidence,
    Evidence,
    Excluded,
    KubeletEvidence,
    KubeletSnapshot,
)
from dra_bridge.ledger import store as store_module
from dra_bridge.ledger.worker import AsyncLedger
from tests.dra.ledger.samples import (
    T0,
    D,
    DirectLedger,
    Flaky,
    R,
    Watched,
    adopt,
    claim,
    grant,
    held_by,
    prepare,
    put_aside,
    reserve,
    seen,
)
from tests.identities import seen_as


def test_a_directory_in_place_of_the_file_is_put_aside(path: str) -> None:
    """A directory at the ledger's path, as a hostPath of type DirectoryOrCreate makes it, is put aside."""
    os.makedirs(path)
    with DirectLedger(path) as opened:
        assert opened.fresh
        assert os.path.isfile(path)
    (aside,) = put_aside(path)
    assert os.path.isdir(aside)


def test_a_file_that_can_only_be_read_is_put_aside(path: str) -> None:
    """A ledger file whose header allows only reading, as that of a newer SQLite, is put aside."""
    filled(path)
    with open(path, "r+b") as file:
        file.seek(18)
        file.write(b"\3")
    with DirectLedger(path) as again:
        assert put_aside(path)
        again.do(adopt(R, ["a"], Side.PLUGIN, T0))


def test_a_second_agent_stands_by_until_the_first_ends(path: str) -> None:
    """A second agent waits until the first closes the ledger, and then has its records."""
    first = DirectLedger(path)

    async def second() -> int:
        opening = asyncio.create_task(AsyncLedger.open(path))
        assert not (await asyncio.wait([opening], timeout=0.1))[0]
        first.do(adopt(R, ["a"], Side.PLUGIN, T0))
        first.close()
        async_ledger = await opening
        count = len(async_ledger.snapshot.devices)
        await async_ledger.close()
        return count

    assert asyncio.run(second()) == 1


@pytest.mark.parametrize("removed", ["ledger.db", "ledger.db-wal", "ledger.db.lock", "."])
def test_a_ledger_removed_under_an_agent_grants_nothing_any_more(path: str, removed: str) -> None:
    """After a file of the ledger was removed, all grants fail, also when it is back: another agent may have used it."""
    with DirectLedger(path) as store:
        store.do(adopt(R, ["a", "b"], Side.PLUGIN, T0))
        store.do(grant(R, {"a": "a"}, T0))
        gone = Path(path).parent / removed
        kept = gone.rename(gone.parent.parent / "kept")
        for _ in range(2):
            with pytest.raises(LedgerLostError, match="has to be restarted"):
                store.do(grant(R, {"b": "b"}, T0))
            if kept.exists():
                kept.rename(gone)
        assert not store.snapshot.allocations_on(R, ["b"])


def test_a_ledger_that_another_agent_made_anew_grants_nothing_to_the_first(path: str) -> None:
    """After the ledger's directory is removed and another agent makes a new ledger, the first agent's grants fail."""
    with DirectLedger(path) as store:
        store.do(adopt(R, ["a"], Side.PLUGIN, T0))
        shutil.rmtree(Path(path).parent)
        with DirectLedger(path) as other:
            other.do(adopt(R, ["a"], Side.DRA, T0))
            with pytest.raises(LedgerLostError):
                store.do(grant(R, {"a": "a"}, T0))
            assert not store.snapshot.allocations


def test_a_disk_that_loses_what_was_written_ends_the_ledger(path: str) -> None:
    """After a failed write the file is read again; if the file lacks an answered operation, all grants fail."""
    failing: list[str] = []

    def step(statement: str) -> None:
        if statement in failing:
            raise OSError(28, "No space left on device")

    with DirectLedger(path, connect=Watched.by(step)) as store:
        store.do(adopt(R, ["a", "b"], Side.PLUGIN, T0))
        old = {suffix: Path(path + suffix).read_bytes() for suffix in ("", "-wal")}
        store.do(grant(R, {"a": "a"}, T0))
        failing.append("COMMIT")
        with pytest.raises(LedgerError):
            store.do(grant(R, {"b": "b"}, T0))
        failing.clear()
        for suffix, content in old.items():
            Path(path + suffix).write_bytes(content)
        with pytest.raises(LedgerLostError, match="writes to it were lost"):
            store.do(grant(R, {"b": "b"}, T0))


SYNCS = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdlib.h>
#include <unistd.h>
static void note(void) {
    int fd = open(getenv("SYNCS"), O_WRONLY | O_APPEND);
    if (fd >= 0) { write(fd, "s", 1); close(fd); }
}
int fdatasync(int fd) { note(); return ((int (*)(int)) dlsym(RTLD_NEXT, "fdatasync"))(fd); }
int fsync(int fd) { note(); return ((int (*)(int)) dlsym(RTLD_NEXT, "fsync"))(fd); }
"""
"""A library that notes each sync of the process that loads it."""


def test_what_must_survive_a_power_failure_is_synced_before_the_answer(tmp_path: Path) -> None:
    """A begun move, a durably reserved claim, a setting and a claim of a shared device are synced before the answer.

    A grant, the claim of a whole device and an Unprepare are not synced: no holder survives a power failure.
    """
    source, library, notes = tmp_path / "syncs.c", tmp_path / "syncs.so", tmp_path / "notes"
    source.write_text(SYNCS)
    compiler = os.environ.get("CC", "gcc")
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-w", "-o", str(library), str(source), "-ldl"], check=True, timeout=60
    )
    notes.touch()
    script = f"""
from pathlib import Path
from deviceplugin.register import operations
from deviceplugin.register.records import Side
from tests.dra.ledger.samples import R, T0, DirectLedger, adopt, claim, grant, prepare, reserve
notes = Path({str(notes)!r})
store = DirectLedger({str(tmp_path / "l.db")!r})
store.do(adopt(R, ["a"], Side.PLUGIN, T0))
store.do(adopt(R, ["b", "c"], Side.DRA, T0))
for operation in (
    grant(R, {{"a": "a"}}, T0),
    operations.begin_move(R, ["a"], Side.DRA, T0),
    prepare(claim("1", "b")),
    operations.unprepare("fpga.example.com", "1"),
    reserve(claim("2", "c", result=None), durable=True),
    operations.set_setting("section", "key", "value"),
    operations.unprepare("fpga.example.com", "2"),
    prepare(claim("3", "c", share="one of two")),
):
    before = len(notes.read_text())
    store.do(operation)
    print(len(notes.read_text()) > before)
"""
    environment = {**os.environ, "LD_PRELOAD": str(library), "SYNCS": str(notes)}
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60, env=environment
    )
    assert done.stdout.split() == ["False", "True", "False", "False", "True", "True", "False", "True"]


@pytest.mark.parametrize("version", [0, 6, 8, 99])
def test_a_file_of_another_schema_is_put_aside(store: DirectLedger, path: str, version: int) -> None:
    """A file with an older or newer schema version is put aside, and an empty ledger is made."""
    store.close()
    with contextlib.closing(sqlite3.connect(path)) as raw:
        raw.execute(f"PRAGMA user_version = {version}")
    with DirectLedger(path) as again:
        assert again.fresh
        assert put_aside(path)
        again.do(adopt(R, ["a"], Side.PLUGIN, T0))


def test_only_the_latest_damaged_files_are_kept(path: str) -> None:
    """Of eight damaged files that were put aside, the latest five are kept."""
    os.makedirs(os.path.dirname(path))
    for _ in range(8):
        Path(path).write_bytes(b"not a database at all, by any measure" * 100)
        with DirectLedger(path) as opened:
            assert opened.fresh
    assert sum(".aside-" in name for name in os.listdir(os.path.dirname(path))) == 5


def filled(path: str) -> bytes:
    with DirectLedger(path) as opened:
        opened.do(adopt(R, [f"device-{n}" for n in range(8)], Side.DRA, T0))
        for number in range(6):
            opened.do(prepare(claim(str(number), f"device-{number}")))
        opened.do(adopt(R, ["p"], Side.PLUGIN, T0))
        opened.do(grant(R, {"p": "p"}, T0))
    return Path(path).read_bytes()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, RegisterSnapshot]:
    """The file of a filled ledger, and its records."""
    path = str(tmp_path_factory.mktemp("whole") / "ledger.db")
    written = filled(path)
    with DirectLedger(path) as opened:
        return written, opened.snapshot


@settings(max_examples=3 * settings().max_examples)
@given(data=st.data())
def test_any_damage_is_noticed_or_harmless(
    tmp_path_factory: pytest.TempPathFactory, whole: tuple[bytes, RegisterSnapshot], data: st.DataObject
) -> None:
    """A truncated or changed ledger file opens with all its records, or is put aside and an empty ledger is made."""
    path = str(tmp_path_factory.mktemp("damage") / "ledger.db")
    written, before = whole
    damaged = bytearray(written)
    if data.draw(st.booleans(), "truncate"):
        del damaged[data.draw(st.integers(0, len(written) - 1), "at") :]
    else:
        for _ in range(data.draw(st.integers(1, 4), "changes")):
            damaged[data.draw(st.integers(0, len(written) - 1), "at")] = data.draw(st.integers(0, 255), "to")
    Path(path).write_bytes(damaged)
    with DirectLedger(path) as opened:
        assert opened.snapshot == before or opened.fresh
        assert opened.fresh or not put_aside(path)
        opened.do(adopt(R, ["new"], Side.PLUGIN, T0))
    with DirectLedger(path) as opened:
        assert (R, "new") in opened.snapshot.devices


def test_a_damaged_write_ahead_log_ends_where_it_is_damaged(tmp_path: Path) -> None:
    """With a damaged write-ahead log, the ledger has the operations before the damage and none after it."""
    path = str(tmp_path / "ledger.db")
    opened = DirectLedger(path)
    opened.do(adopt(R, ["a"], Side.PLUGIN, T0))
    first = opened.snapshot
    size = os.path.getsize(path + "-wal")
    opened.do(grant(R, {"a": "a"}, T0))
    copies = {suffix: Path(path + suffix).read_bytes() for suffix in ("", "-wal")}
    both = opened.snapshot
    opened.close()
    wal = copies["-wal"]
    for at in range(0, len(wal), 97):
        Path(path).write_bytes(copies[""])
        Path(path + "-wal").write_bytes(wal[:at] + bytes([wal[at] ^ 0x55]) + wal[at + 1 :])
        with DirectLedger(path) as again:
            assert again.snapshot in (first, both) or again.fresh or again.snapshot.sequence < first.sequence
            if at >= size:
                assert again.snapshot in (first, both)


# The copy of the allocations, which are the devices granted to pods by limits.


def lose(path: str) -> None:
    """Remove the ledger's files."""
    for file in Path(path).parent.glob(f"{Path(path).name}*"):
        file.unlink()


@pytest.fixture
def copy(tmp_path: Path) -> str:
    return str(tmp_path / "run" / "allocations")


def test_a_new_ledger_has_the_allocations_of_the_copy(path: str, copy: str) -> None:
    """A ledger made after a loss has the grants to pods from the copy.

    They exclude other holders, survive a restart, and end with their pods.
    """
    with DirectLedger(path, copy) as opened:
        opened.do(adopt(R, ["a", "b"], Side.PLUGIN, T0))
        for name in ("a::0", "a::1"):
            opened.do(grant(R, {name: "a"}, amount=Amount("1/2"), identity=seen_as("1", "n1")))
        held = {"a::0": held_by("a", "u1/main")}
        opened.do(operations.observe(R, replace(seen(opened), held=held), T0))
        for _ in range(9):
            opened.do(grant(R, {"b": "b"}))
        known, sequence = opened.snapshot.allocations, opened.snapshot.sequence
    lose(path)
    with DirectLedger(path, copy) as opened:
        assert opened.fresh
        kept = {key: replace(one, absent_since=None) for key, one in known.items()}
        assert opened.snapshot.allocations == kept
        assert opened.snapshot.sequence > sequence, "a copy of now is newer than one of before the loss"
        assert isinstance(opened.do(grant(R, {"x": "x"}, identity=seen_as("1", "n1"))), Excluded)
    with DirectLedger(path) as opened:
        assert opened.snapshot.allocations == {
            key: replace(one, pod="", absent_since=None) for key, one in kept.items()
        }
        for at in (1.0, 100.0):
            opened.do(operations.observe(R, seen(opened, at), T0))
        assert not opened.snapshot.allocations


def test_a_ledger_that_is_there_does_not_read_the_copy(path: str, copy: str) -> None:
    """A ledger that exists does not take an ended grant from an older copy of the grants."""
    with DirectLedger(path, copy) as opened:
        opened.do(adopt(R, ["a"], Side.PLUGIN, T0))
        opened.do(grant(R, {"a": "a"}))
    old = Path(copy).read_bytes()
    with DirectLedger(path, copy) as opened:
        opened.do(operations.observe(R, seen(opened, a="u1/main"), T0))
        opened.do(operations.observe(R, seen(opened), T0))
    Path(copy).write_bytes(old)
    with DirectLedger(path, copy) as opened:
        assert not opened.snapshot.allocations


@pytest.mark.parametrize("lost", [False, True], ids=["restored", "lost between"])
def test_a_ledger_from_before_has_the_allocations_of_the_copy(
    path: str, copy: str, caplog: pytest.LogCaptureFixture, *, lost: bool
) -> None:
    """An older ledger that was restored gets newer grants from the copy and keeps its own grants; the log says so once.

    This also holds if the ledger was lost once in between.
    """
    with DirectLedger(path, copy) as opened:
        opened.do(adopt(R, ["a", "b", "c"], Side.PLUGIN, T0))
        opened.do(grant(R, {"a": "a"}))
    before = Path(path).read_bytes()
    if lost:
        lose(path)
    with DirectLedger(path, copy) as opened:
        opened.do(operations.observe(R, seen(opened, a="u1/main"), T0))
        opened.do(operations.observe(R, seen(opened), T0))
        opened.do(grant(R, {"b": "b"}))
        assert opened.snapshot.allocations.keys() == {(R, "b")}
    lose(path)
    Path(path).write_bytes(before)
    caplog.clear()
    with DirectLedger(path, copy) as opened:
        assert not opened.fresh
        assert opened.snapshot.allocations.keys() == {(R, "a"), (R, "b")}
        assert "from before" in caplog.text
        caplog.clear()
    with DirectLedger(path, copy) as opened:
        assert opened.snapshot.allocations.keys() == {(R, "a"), (R, "b")}
        assert not caplog.text


def test_the_copy_of_another_boot_says_nothing(path: str, copy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a reboot, a new ledger does not take grants from the copy, because no holder of a device runs any more."""
    with DirectLedger(path, copy) as opened:
        opened.do(grant(R, {"a": "a"}))
    lose(path)
    monkeypatch.setattr(store_module, "boot_id", lambda: "another")
    with DirectLedger(path, copy) as opened:
        assert opened.fresh
        assert opened.snapshot == RegisterSnapshot()


def test_a_copy_that_cannot_be_read_does_not_stop_the_ledger(
    path: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """If the copy of the grants cannot be read, the ledger starts empty, and the log says so."""
    copy = tmp_path / "copy"
    copy.write_bytes(b"{")
    with DirectLedger(path, str(copy)) as opened:
        assert opened.snapshot == RegisterSnapshot()
    assert "cannot be read" in caplog.text


# Crashes and full disks.


def crash_operations() -> Sequence[Any]:
    """Return the operations of a device's life: adoption by the ledger, grants, moves, a claim, and their ends."""
    sequence = 1 << 40
    evidence = KubeletEvidence(sequence, {"a": 1.0}, KubeletSnapshot(sequence, 3.0, True))
    return (
        adopt(R, ["a", "b"], Side.PLUGIN, T0),
        grant(R, {"b": "b"}, T0),
        operations.begin_move(R, ["a"], Side.DRA, T0),
        operations.commit_to_dra(R, ["a"], evidence, T0),
        reserve(claim("1", "a"), durable=True),
        prepare(claim("1", "a")),
        operations.begin_move(R, ["a"], Side.PLUGIN, T0),
        operations.unprepare(D, "1"),
        operations.commit_to_plugin(R, ["a"], ClusterEvidence(sequence, {"a": 1.0}, 2.0), T0),
        grant(R, {"a": "a"}, T0),
        operations.forget(R, ["b"]),
    )


def scenario(path: str, die_at: int) -> None:
    """Run the operations; kill the process at the given step. Each answer's number is written to stdout at once."""
    count = 0

    def step(_statement: str) -> None:
        nonlocal count
        count += 1
        if count == die_at:
            os.kill(os.getpid(), signal.SIGKILL)

    with DirectLedger(path, connect=Watched.by(step)) as opened:
        for number, operation in enumerate(crash_operations()):
            opened.do(operation)
            os.write(1, b"%d\n" % number)


def states(path: str) -> list[RegisterSnapshot]:
    with DirectLedger(path) as opened:
        found = [opened.snapshot]
        for operation in crash_operations():
            opened.do(operation)
            found.append(replace(opened.snapshot, ended={}))  # `ended` is not written to the file
    return found


def kill_everywhere(directory: str, every: int) -> None:
    """For each `every`-th step, fork a child that is killed there; runs in a process without threads."""
    for die_at in range(1, 1000, every):
        path = os.path.join(directory, f"{die_at}.db")
        reader, writer = os.pipe()
        child = os.fork()
        if not child:
            os.dup2(writer, 1)
            scenario(path, die_at)
            os._exit(0)
        os.close(writer)
        with os.fdopen(reader) as pipe:
            answered = len(pipe.read().split())
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        print(die_at, answered, status)
        if status == 0:
            return


@pytest.mark.parametrize("every", [pytest.param(1, marks=pytest.mark.explore), 7])
def test_a_kill_at_any_step_loses_nothing_that_was_answered(tmp_path: Path, every: int) -> None:
    """After a kill at any step, the ledger has all answered operations, and at most one more."""
    expected = states(str(tmp_path / "expected.db"))
    script = f"from tests.dra.ledger.test_store import kill_everywhere; kill_everywhere({str(tmp_path)!r}, {every})"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=120)
    lines = [[int(word) for word in line.split()] for line in done.stdout.splitlines()]
    assert lines[-1][0] > 50
    for die_at, answered, status in lines:
        assert status == (0 if die_at == lines[-1][0] else -signal.SIGKILL)
        with DirectLedger(str(tmp_path / f"{die_at}.db")) as again:
            assert not put_aside(again.path)
            assert again.snapshot in expected[answered : answered + 2], die_at


def test_a_full_disk_grants_nothing_and_heals(tmp_path: Path) -> None:
    """With a full disk each grant fails and the records stay; with room a grant succeeds and survives a restart."""
    script = f"""
import resource, signal, sys
from deviceplugin.register import operations
from deviceplugin.register.records import LedgerError, Side
from tests.dra.ledger.samples import R, T0, DirectLedger, adopt, grant, put_aside
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
store = DirectLedger({str(tmp_path / "l.db")!r})
store.do(adopt(R, ["a", "b"], Side.PLUGIN, T0))
before = store.snapshot
soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
for _ in range(3):
    try:
        store.do(grant(R, {{"a": "a"}}, T0))
    except LedgerError as error:
        print("refused", error)
    assert store.snapshot == before, store.snapshot
resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
assert store.do(grant(R, {{"a": "a"}}, T0)) is None
after = store.snapshot
store.close()
again = DirectLedger({str(tmp_path / "l.db")!r})
assert not put_aside(again.path) and again.snapshot == after
print("healed")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=60)
    assert done.stdout.count("refused") == 3, done.stdout + done.stderr
    assert "healed" in done.stdout


def test_a_full_disk_at_the_first_start_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    """With a full disk the first start fails with the file's name and puts nothing aside; with room it succeeds."""
    path = tmp_path / "l.db"
    script = f"""
import resource, signal
from deviceplugin.register.records import LedgerError
from tests.dra.ledger.samples import DirectLedger
from tests.identities import seen_as
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
try:
    DirectLedger({str(path)!r})
except LedgerError as error:
    print(error)
resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
with DirectLedger({str(path)!r}) as store:
    assert store.fresh
print("made")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=60)
    reported, made = done.stdout.splitlines()
    assert reported.startswith(f"cannot open the ledger {path}: ")
    assert made == "made"
    assert not [*tmp_path.glob("*aside*")]


@pytest.mark.parametrize("word", ["BEGIN", "INSERT", "UPDATE", "COMMIT"])
def test_a_write_that_fails_refuses_and_the_next_one_looks_at_the_disk(tmp_path: Path, word: str) -> None:
    """After a failed write the file is read again before the next operation; claims in memory stay."""
    fails: set[str] = set()
    path = str(tmp_path / "l.db")
    with DirectLedger(path, connect=lambda where: Flaky(where, fails)) as store:  # type: ignore[arg-type,return-value]
        store.do(adopt(R, ["a", "b"], Side.DRA, T0))
        store.do(reserve(claim("0", "b"), durable=False))
        fails.add(word)
        for _ in range(2):
            with pytest.raises(LedgerError):
                store.do(prepare(claim("1", "a")))
        fails.add("PRAGMA")
        with pytest.raises(LedgerError):
            store.do(prepare(claim("1", "a")))
        fails.clear()
        assert set(store.snapshot.claims) == {(D, "0")}
        assert isinstance(store.do(prepare(claim("1", "a"))), Claim)
        assert set(store.snapshot.claims) == {(D, "0"), (D, "1")}
        kept = store.snapshot.devices
    with DirectLedger(path) as again:
        assert again.snapshot.devices == kept


def test_what_only_the_process_knows_stays_when_the_file_is_read_again(path: str) -> None:
    """Facts that only memory has survive a new read of the file: unprepared claims, reservations, a pod's absence."""
    fails: set[str] = set()
    with DirectLedger(path, connect=lambda where: Flaky(where, fails)) as store:  # type: ignore[arg-type,return-value]
        store.do(adopt(R, ["a"], Side.PLUGIN, T0))
        store.do(adopt(R, ["b", "c"], Side.DRA, T0))
        store.do(grant(R, {"a": "a"}))
        store.do(operations.observe(R, seen(store, 1.0), T0))
        store.do(prepare(claim("old", "b")))
        store.do(operations.unprepare(D, "old"))
        store.do(reserve(claim("reserved", "c", identity=seen_as("1", "n1")), durable=False))
        before = store.snapshot
        fails.add("COMMIT")
        with pytest.raises(LedgerError):
            store.do(operations.set_setting("s", "k", "1"))
        fails.clear()
        store.do(operations.set_setting("s", "k", "1"))
        after = store.snapshot
        assert (after.ended, after.claims, after.allocations) == (before.ended, before.claims, before.allocations)
        assert after.index == before.index
        found = [ClaimEvidence(D, "old", frozenset({"b"}), prepared=True)]
        store.do(operations.reconcile_evidence(R, Evidence(claims=found), ["b"], Side.DRA, T0))
        assert (D, "old") not in store.snapshot.claims, "it was unprepared"
        assert isinstance(store.do(prepare(claim("2", "b", identity=seen_as("1", "n1")))), Excluded), (
            "what is reserved is held"
        )
        assert store.do(operations.observe(R, seen(store, 100.0), T0)).released == ("a",)


def test_a_file_that_goes_bad_while_it_is_in_use_ends_the_ledger(tmp_path: Path) -> None:
    """A file that is damaged while the ledger is open is put aside, and all further grants fail."""
    fails: set[str] = set()
    path = str(tmp_path / "l.db")
    with DirectLedger(path, connect=lambda where: Flaky(where, fails)) as store:  # type: ignore[arg-type,return-value]
        store.do(adopt(R, ["a", "b"], Side.PLUGIN, T0))
        fails.add("COMMIT")
        with pytest.raises(LedgerError):
            store.do(grant(R, {"b": "b"}, T0))
        fails.clear()
        Path(path).write_bytes(b"\xff" * 8192)
        for _ in range(2):
            with pytest.raises(LedgerLostError):
                store.do(grant(R, {"b": "b"}, T0))
        assert put_aside(path)


def test_a_directory_that_cannot_be_written_is_an_error_that_says_so(tmp_path: Path) -> None:
    """If the ledger's directory cannot be made, opening the ledger raises an error that says so."""
    (tmp_path / "file").write_text("")
    with pytest.raises(LedgerError, match="cannot open the ledger"):
        DirectLedger(str(tmp_path / "file" / "ledger.db"))


def indexed(now: RegisterSnapshot) -> Mapping[Point, frozenset[tuple[str, tuple[str, str]]]]:
    """Return the ledger's index of these records, computed from scratch."""
    records = [Change("allocations", key, one) for key, one in now.allocations.items()]
    records += [Change("claims", key, one) for key, one in now.claims.items()]
    return RegisterSnapshot().with_changes(records, 1).index


@given(data=st.data())
def test_memory_and_file_never_differ(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """After any operations, a ledger that is opened again has the same durable records and index."""
    path = str(tmp_path_factory.mktemp("same") / "l.db")
    device, uid = st.sampled_from("abc"), st.sampled_from("123")
    identity = st.sampled_from(
        [
            UNIDENTIFIED,
            seen_as("1", "n1"),
            seen_as("1", "n1", "n2"),
            seen_as("0", "n3"),
        ]
    )
    amount = st.sampled_from([WHOLE, Amount("1/2"), Amount("1/4", (("memory", "bytes", "5"),)), UNKNOWN])
    operation = st.one_of(
        st.builds(lambda d, s: adopt(R, [d], s, T0), device, st.sampled_from(Side)),
        st.builds(lambda d, a, i: grant(R, {d: d}, amount=a, identity=i), device, amount, identity),
        st.builds(lambda d: operations.add_holders([("u4", "main", R, d)], T0), device),
        st.builds(lambda d, i: identification.adopt({(R, d): i}, "1"), device, identity),
        st.builds(lambda d, s: operations.begin_move(R, [d], s, T0), device, st.sampled_from(Side)),
        st.builds(
            lambda u, d, a, i: prepare(claim(u, d, amount=a, identity=i), move_idle=True), uid, device, amount, identity
        ),
        st.builds(lambda u, d, i, k: reserve(claim(u, d, identity=i), durable=k), uid, device, identity, st.booleans()),
        st.builds(lambda u: operations.unprepare(D, u), uid),
        st.builds(lambda u: operations.reopen(D, u), uid),
        st.builds(lambda d: operations.forget(R, [d]), device),
        st.builds(
            lambda d, held: operations.observe(
                R, KubeletSnapshot(1 << 40, 0.0, True, {d: held_by(d, held)} if held else {}), T0
            ),
            device,
            st.sampled_from(["", "u1/main", "u1/init", "u2/main"]),
        ),
        st.builds(lambda u, d: operations.describe(D, u, "n", "c", [d]), uid, device),
        st.builds(lambda d, v: operations.set_setting("s", d, v), device, st.sampled_from([None, "1", "2"])),
        st.builds(
            lambda d, held: operations.reconcile_evidence(
                R,
                Evidence(
                    {d: held_by(d, "u3/main")} if held else {}, [ClaimEvidence(D, "9", frozenset({d}), prepared=held)]
                ),
                [d],
                Side.DRA,
                T0,
            ),
            device,
            st.booleans(),
        ),
    )
    with patch.object(rules, "WELL_APART", 0.0), DirectLedger(path) as opened:
        for batch in data.draw(st.lists(st.lists(operation, min_size=1, max_size=3), max_size=10)):
            opened.do_all(batch)
        known = opened.snapshot
    assert known.index == indexed(known)
    with DirectLedger(path) as again:
        assert not put_aside(path)
        assert again.snapshot.index == indexed(again.snapshot)
        assert again.snapshot.sequence == known.sequence
        assert again.snapshot.devices == known.devices
        assert again.snapshot.claims == {key: value for key, value in known.claims.items() if value.durable}
        assert again.snapshot.allocations == {
            key: replace(record, pod="", absent_since=None) for key, record in known.allocations.items()
        }
        assert again.snapshot.settings == known.settings
