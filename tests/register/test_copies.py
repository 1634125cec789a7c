"""The copies that each agent writes of its allocations, from which other agents know its holders."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from deviceplugin.files import place_of
from deviceplugin.identity import UNIDENTIFIED, Identity, boot_id, identified
from deviceplugin.kubelet.holders import grant_of
from deviceplugin.looks import Looks
from deviceplugin.register import copies
from deviceplugin.register.copies import AllocationCopies, Copy
from deviceplugin.register.question import Wanted
from deviceplugin.register.records import Allocation, AllocationRecord, Amount, Change, Decision
from deviceplugin.register.store import MemoryStore
from tests.identities import seen_as
from tests.waits import until

R = "example.com/fpga"


def put(directory: Path, agent: str, *holders: tuple[str, str], boot: str | None = None) -> None:
    """Write an agent's copy of its allocations: one half of d0 is granted to these containers."""
    one = AllocationRecord(
        R, "d0::0", "d0", 1.0, 1, frozenset(holders), identity=seen_as("b", "n1"), amount=Amount("1/2")
    )
    copies.write(copies.path(str(directory), agent), Copy(boot_id() if boot is None else boot, 1, (one,)))


def changed(found: AllocationCopies) -> Mapping[Allocation, Wanted]:
    """Read the agents' copies of allocations, and return the grants that are new since the last call."""
    found.read()
    return found.changed()


def test_what_is_copied_is_read_once(tmp_path: Path) -> None:
    """A grant in another agent's copy is returned once, with identity and amount, and again only if it changes."""
    found = AllocationCopies(tmp_path, tmp_path, "own")
    assert changed(found) == {}
    put(tmp_path, "own", ("u0", "main"))
    put(tmp_path, "one", ("u1", "main"), ("u1", "side"))
    put(tmp_path, "two", ("u2", "main"))
    what = Wanted((R, "d0"), seen_as("b", "n1"), Amount("1/2"))
    holders = [("u1", "main"), ("u1", "side"), ("u2", "main")]
    assert changed(found) == {Allocation(*one, R, "d0::0"): what for one in holders}
    assert changed(found) == {}
    put(tmp_path, "two", ("u3", "main"))
    assert changed(found) == {Allocation("u3", "main", R, "d0::0"): what}
    assert changed(AllocationCopies(tmp_path, tmp_path)).keys() >= {Allocation("u0", "main", R, "d0::0")}


def test_a_copy_of_another_boot_and_a_grant_without_a_container_name_nobody(tmp_path: Path) -> None:
    """A copy of allocations from another boot names no holder, and neither does a grant without a known container."""
    put(tmp_path, "one", ("u1", "main"), boot="before")
    put(tmp_path, "two")
    assert changed(AllocationCopies(tmp_path, tmp_path)) == {}


def test_a_copy_that_cannot_be_read_is_reported_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """An agent's copy that cannot be read is logged once, and others are read; without the directory there are none."""
    put(tmp_path, "one", ("u1", "main"))
    (tmp_path / "deviceplugin" / "allocations" / "two.json").write_bytes(b"{")
    (tmp_path / "deviceplugin" / "allocations" / "three.json").symlink_to(tmp_path / "nothing")
    found = AllocationCopies(tmp_path, tmp_path)
    assert len(changed(found)) == 1
    assert changed(found) == {}
    assert caplog.text.count("cannot be read") == 1
    assert changed(AllocationCopies(tmp_path / "none", tmp_path)) == {}


def test_a_read_that_nobody_waited_for_is_not_lost(tmp_path: Path) -> None:
    """If nothing takes what one read of the copies found, the call after the next read returns the grants of both."""
    put(tmp_path, "one", ("u1", "main"))
    found = AllocationCopies(tmp_path, tmp_path)
    found.read()
    put(tmp_path, "two", ("u2", "main"))
    assert {allocation.pod_uid for allocation in changed(found)} == {"u1", "u2"}


async def test_an_agent_without_a_ledger_copies_the_allocations_of_each_resource(tmp_path: Path) -> None:
    """An agent without a ledger copies the allocations of each resource to a file, on each change of a known holder.

    A grant whose holder is unknown changes no such file.
    """
    store, looks, found = MemoryStore(), Looks("copies", threads=1), AllocationCopies(tmp_path, tmp_path)
    keeping = asyncio.create_task(found.keep(store, looks))

    async def record(device: str, resource: str = R, pod: str = "", identity: Identity = UNIDENTIFIED) -> None:
        holders = frozenset({(pod, "main")} if pod else ())
        one = AllocationRecord(resource, device, device, 1.0, 1, holders, identity=identity)
        await store.do(lambda _: Decision(None, (Change("allocations", (resource, device), one),)))

    async def copied(*expected: tuple[str, str, str, Identity]) -> None:
        def read() -> set[tuple[str, str, str, Identity]]:
            grants = changed(AllocationCopies(tmp_path, tmp_path)).items()
            return {(one.pod_uid, one.resource, one.device_id, grant.identity) for one, grant in grants}

        await until(lambda: keeping.done() or read() == set(expected))
        assert not keeping.done()

    granted = identified(frozenset({"char:240:1", "hardware:usb:A#"}), boot_id())
    moved = granted.reaching(identified(frozenset({"char:240:2"}), boot_id()))
    other = "u2", "example.com/s", "d0", UNIDENTIFIED
    await record("d0", pod="u1", identity=moved)
    await record("d0", "example.com/s", pod="u2")
    await copied(("u1", R, "d0", moved), other)
    files = {path: path.stat().st_ino for path in (tmp_path / "deviceplugin" / "allocations").iterdir()}
    await record("d1")
    await record("d0", pod="u1", identity=granted)
    await copied(("u1", R, "d0", granted), other)
    assert [path.name.partition("@")[0] for path, file in files.items() if path.stat().st_ino != file] == [
        "example.com_fpga"
    ]
    await store.do(lambda _: Decision(None, (Change("allocations", (R, "d0"), None),)))
    await copied(other)
    assert changed(found) == {}
    keeping.cancel()


@pytest.mark.parametrize("own", ["", "dra-bridge"])
async def test_copies_of_another_plugin_directory_are_ignored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: str
) -> None:
    """A copy of allocations counts only for its plugin directory, as an adopted plugin's ids are in two directories."""
    store, looks = MemoryStore(), Looks("copies", threads=1)
    one = AllocationRecord(R, "d0", "d0", 1.0, 1, frozenset({("u1", "main")}))
    await store.do(lambda _: Decision(None, (Change("allocations", (R, "d0"), one),)))
    await AllocationCopies(tmp_path, tmp_path / "kubelet", own).write(store.snapshot, looks)
    assert changed(AllocationCopies(tmp_path, tmp_path / "agent")) == {}
    one = replace(one, holders=frozenset({("u2", "main")}))
    await store.do(lambda _: Decision(None, (Change("allocations", (R, "d0"), one),)))
    await AllocationCopies(tmp_path, tmp_path / "agent").write(store.snapshot, looks)
    (tmp_path / "kubelet").mkdir()  # the kubelet creates this directory after the copy was written
    holders = [Allocation(pod, "main", R, "d0") for pod in ("u1", "u2")]
    assert [*changed(AllocationCopies(tmp_path, tmp_path / "kubelet"))] == holders[:1]
    monkeypatch.setattr(copies, "place_of", lambda path: "")
    assert changed(AllocationCopies(tmp_path, tmp_path / "agent")).keys() == {*holders}


async def test_a_copy_that_states_no_plugin_directory_is_of_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy of allocations that states no plugin directory, as when /proc was hidden, counts for every directory."""
    store, one = MemoryStore(), AllocationRecord(R, "d0", "d0", 1.0, 1, frozenset({("u1", "main")}))
    await store.do(lambda _: Decision(None, (Change("allocations", (R, "d0"), one),)))
    with monkeypatch.context() as patch:
        patch.setattr(copies, "place_of", lambda path: "")
        await AllocationCopies(tmp_path, tmp_path).write(store.snapshot, Looks("copies", threads=1))
    assert changed(AllocationCopies(tmp_path, tmp_path)).keys() == {Allocation("u1", "main", R, "d0")}


@pytest.mark.parametrize("left", [None, b"", b"{", b'{"boot": "1", "allocations": []}'])
async def test_the_copy_of_an_agent_with_a_ledger_has_all_its_allocations(tmp_path: Path, left: bytes | None) -> None:
    """An agent with a ledger copies all its allocations into one file, whatever the file had before."""
    if left is not None:
        put(tmp_path, "own", ("u0", "main"))
        Path(copies.path(str(tmp_path), "own")).write_bytes(left)
    store, found = MemoryStore(), AllocationCopies(tmp_path, tmp_path, "own")
    one = AllocationRecord(R, "d0", "d0", 1.0, 1, frozenset({("u1", "main")}), identity=seen_as("b", "n1"))
    await store.do(lambda _: Decision(None, (Change("allocations", (R, "d0"), one),)))
    await found.write(store.snapshot, Looks("copies", threads=1))
    assert copies.read(copies.path(str(tmp_path), "own")) == Copy(
        boot_id(), store.snapshot.sequence, (one,), place_of(tmp_path)
    )
    assert changed(found) == {}


async def test_a_copy_is_written_only_after_a_durable_change(tmp_path: Path) -> None:
    """Allocations are copied to a file only after a change that must survive a power failure (`durable`)."""
    store, looks, found = MemoryStore(), Looks("copies", threads=1), AllocationCopies(tmp_path, tmp_path, "own")
    one = AllocationRecord(R, "d0", "d0", 1.0, 1, frozenset({("u1", "main")}), identity=seen_as("b", "n1"))
    path = Path(copies.path(str(tmp_path), "own"))

    async def is_written(*, durable: bool) -> bool:
        path.unlink(missing_ok=True)
        await store.do(lambda _: Decision(None, (Change("allocations", (R, "d0"), one, durable=durable),)))
        await found.write(store.snapshot, looks)
        return path.exists()

    assert await is_written(durable=True)
    assert not await is_written(durable=False)
    assert await is_written(durable=True)


async def test_a_copy_that_cannot_be_written_is_written_later(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the copy of the allocations cannot be written, the log says so, and the agent tries again until it can."""
    monkeypatch.setattr(copies, "FIRST_TRY", 0.01)
    (tmp_path / "deviceplugin").write_bytes(b"")
    store, found = MemoryStore(), AllocationCopies(tmp_path, tmp_path, "own")
    one = AllocationRecord(R, "d0", "d0", 1.0, 1, frozenset({("u1", "main")}), identity=seen_as("b", "n1"))
    await store.do(lambda _: Decision(None, (Change("allocations", (R, "d0"), one),)))
    keeping = asyncio.create_task(found.keep(store, Looks("copies", threads=1)))
    await until(lambda: "cannot copy the allocations" in caplog.text)
    (tmp_path / "deviceplugin").unlink()
    await until(Path(copies.path(str(tmp_path), "own")).exists)
    keeping.cancel()


def test_a_holder_can_open_what_a_copy_says_besides_its_answer() -> None:
    """A holder can open the nodes in the agent's copy beside those in the checkpoint, if both are of the same boot."""
    granted = identified(frozenset({"char:240:1"}), "1")
    answer = Wanted((R, "d0"), granted, Amount("1"))
    copied = answer._replace(identity=granted.reaching(identified(frozenset({"char:240:2"}), "1")))
    assert grant_of(answer, copied) == copied
    assert grant_of(answer, None) == grant_of(None, answer) == answer
    assert grant_of(None, None) is None
    assert grant_of(answer, copied._replace(identity=identified(frozenset({"char:240:2"}), "2"))) == answer
