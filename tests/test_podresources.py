"""Who holds what: the two witnesses, and what follows from them."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deviceplugin.podresources import (
    CHECKPOINT,
    WELL_APART,
    CheckpointEntry,
    CheckpointError,
    Holder,
    Holdings,
    PodResources,
    PodResourcesError,
    Quiet,
    Released,
    Report,
    double_held,
    ended_pods,
    holdings,
    parse_checkpoint,
    parse_list,
    read_checkpoint,
)
from deviceplugin.testing import Checkpoint, FakeKubelet
from deviceplugin.testing.checkpoint import PodDevicesEntry
from deviceplugin.wire import podresources_pb2 as pb

R = "example.com/r"


def report(**containers: str) -> Report:
    """What `List` says: pod_container="a b" holds devices a and b."""
    held: dict[str, frozenset[Holder]] = {}
    for name, devices in containers.items():
        pod, container = name.split("_")
        for device in devices.split():
            held[device] = held.get(device, frozenset()) | {Holder("default", pod, container)}
    return Report({R: held})


def entry(uid: str, container: str, devices: str) -> CheckpointEntry:
    return CheckpointEntry(uid, container, R, frozenset(devices.split()))


# The answer of List.


def test_list_is_read_per_container() -> None:
    """Devices of one resource in several entries (one per NUMA node) come together; a shared one has both holders."""
    devices = [
        pb.ContainerDevices(resource_name=R, device_ids=["a"]),
        pb.ContainerDevices(resource_name=R, device_ids=["b"]),
    ]
    pods = [
        pb.PodResources(name=name, namespace="ns", containers=[pb.ContainerResources(name="main", devices=devices)])
        for name in ("one", "two")
    ]
    parsed = parse_list(pb.ListPodResourcesResponse(pod_resources=pods))
    both = frozenset({Holder("ns", "one", "main"), Holder("ns", "two", "main")})
    assert parsed.held == {R: {"a": both, "b": both}}
    assert parsed.containers == {("main", R, "a"), ("main", R, "b")}


def test_two_pods_on_one_device_are_the_kubelets_mistake() -> None:
    """Two pods that hold one device are told apart from two containers of one pod, which may share it."""
    held = report(one_init="a", one_main="a b", two_main="b").held[R]
    assert set(double_held(held)) == {"b"}


# The checkpoint.


def test_checkpoint_of_the_kubelet_is_read() -> None:
    """Entries as the device manager writes them are read, devices of all NUMA nodes together."""
    written = Checkpoint(
        [
            PodDevicesEntry("u1", "init", R, {0: ["a"], 1: ["b"]}, b""),
            PodDevicesEntry("u1", "main", R, {-1: ["c"]}, None),
            PodDevicesEntry("u2", "main", "example.com/other", None, b"x"),
        ],
        {R: ["a", "b", "c"]},
    ).to_json()
    assert parse_checkpoint(written) == (
        entry("u1", "init", "a b"),
        entry("u1", "main", "c"),
        CheckpointEntry("u2", "main", "example.com/other", frozenset()),
    )


def test_checkpoint_without_pods_is_empty(tmp_path: Path) -> None:
    """No file, and a file of a kubelet that never gave out a device (null), both mean that nothing is held."""
    assert read_checkpoint(tmp_path) == ()
    (tmp_path / CHECKPOINT).write_bytes(Checkpoint().to_json())
    assert read_checkpoint(tmp_path) == ()


def test_unreadable_checkpoint_is_not_an_empty_one(tmp_path: Path) -> None:
    """A checkpoint that cannot be read is an error: it must never look as if nothing was held."""
    (tmp_path / CHECKPOINT).mkdir()
    with pytest.raises(CheckpointError, match=CHECKPOINT):
        read_checkpoint(tmp_path)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "null",
        "[]",
        "{}",
        '{"Data": null}',
        '{"Data": {}}',
        '{"Data": {"PodDeviceEntries": 3}}',
        '{"Data": {"PodDeviceEntries": [{}]}}',
        '{"Data": {"PodDeviceEntries": [null]}}',
        '{"Data": {"PodDeviceEntries": [{"PodUID": "u", "ContainerName": "c", "ResourceName": "r", "DeviceIDs": 3}]}}',
        "\udcff",
        "[" * 100_000,
    ],
)
def test_damaged_checkpoint_says_so(text: str) -> None:
    """What is no checkpoint is a CheckpointError, whatever is wrong with it."""
    with pytest.raises(CheckpointError, match="not a device manager checkpoint"):
        parse_checkpoint(text.encode(errors="surrogateescape"))


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["Data", "PodDeviceEntries", "PodUID", "ContainerName", "ResourceName", "DeviceIDs", "0"]),
            inner,
        )
    ),
    max_leaves=30,
)


@given(st.binary() | _json.map(lambda value: json.dumps(value).encode()))
def test_no_file_breaks_the_reader(text: bytes) -> None:
    """Whatever is in the file, the reader answers with entries or with CheckpointError."""
    try:
        entries = parse_checkpoint(text)
    except CheckpointError:
        return
    for one in entries:
        assert isinstance(one, CheckpointEntry)


# Both together.


def test_init_container_is_known_from_the_checkpoint_alone() -> None:
    """A container that `List` never showed (an init container) holds what the checkpoint says."""
    now = holdings(report(one_main="a"), [entry("u1", "init", "b"), entry("u1", "main", "a")], Holdings(), frozenset())
    assert now.of(R) == {
        "a": frozenset({Holder("default", "one", "main")}),
        "b": frozenset({Holder(container="init", uid="u1")}),
    }


def test_checkpoint_that_lags_does_not_bring_the_dead_back() -> None:
    """What `List` once showed and shows no more is free, though the checkpoint still names it."""
    written = [entry("u1", "main", "a")]
    held = holdings(report(one_main="a"), written, Holdings(), frozenset())
    assert set(held.of(R)) == {"a"}
    gone = holdings(report(), written, held, frozenset())
    assert gone.of(R) == {}
    assert holdings(report(), written, gone, frozenset()).of(R) == {}


def test_new_pod_on_a_device_of_a_lagging_entry_counts() -> None:
    """A device that another container holds now is held, whatever the old entry says."""
    written = [entry("u1", "main", "a")]
    held = holdings(report(one_main="a"), written, Holdings(), frozenset())
    free = holdings(report(), written, held, frozenset())
    again = holdings(report(two_work="a"), [*written, entry("u2", "work", "a")], free, frozenset())
    assert again.of(R) == {"a": frozenset({Holder("default", "two", "work")})}


def test_entry_of_an_ended_pod_does_not_count() -> None:
    """The checkpoint's entries of pods that are known to be gone hold nothing."""
    written = [entry("u1", "init", "a"), entry("u2", "init", "b")]
    assert set(holdings(report(), written, Holdings(), frozenset({"u1"})).of(R)) == {"b"}


def test_entry_that_left_the_checkpoint_can_come_back() -> None:
    """Once both witnesses forgot a container, an entry of the same names counts anew."""
    written = [entry("u1", "main", "a")]
    held = holdings(report(one_main="a"), written, Holdings(), frozenset())
    forgotten = holdings(report(), [], holdings(report(), written, held, frozenset()), frozenset())
    assert set(holdings(report(), written, forgotten, frozenset()).of(R)) == {"a"}


def test_pods_whose_directory_is_gone_have_ended(tmp_path: Path) -> None:
    """A pod's directory says whether it is there; without any, or with a strange UID, nothing is concluded."""
    assert ended_pods(tmp_path, ["u1"]) == frozenset()
    (tmp_path / "pods" / "u1").mkdir(parents=True)
    assert ended_pods(tmp_path, ["u1", "u2", "", "../x"]) == {"u2"}


_devices = st.sets(st.sampled_from("abcd"), min_size=1).map(lambda names: " ".join(sorted(names)))
_reports = st.dictionaries(st.sampled_from(["one_main", "two_main", "three_init"]), _devices).map(
    lambda containers: report(**containers)
)
_entries = st.lists(st.builds(entry, st.sampled_from(["u1", "u2"]), st.sampled_from(["main", "init"]), _devices))


@given(st.lists(st.tuples(_reports, _entries), max_size=5))
def test_what_list_shows_is_always_held(looks: list[tuple[Report, list[CheckpointEntry]]]) -> None:
    """Whatever came before, everything `List` shows is held, and all else is written in the checkpoint."""
    known = Holdings()
    for seen, written in looks:
        known = holdings(seen, written, known, frozenset())
        listed = seen.held.get(R, {})
        for name, holders in known.of(R).items():
            assert listed.get(name, frozenset()) <= holders
            for holder in holders - listed.get(name, frozenset()):
                assert any(name in one.devices and one.pod_uid == holder.uid for one in written)
        assert listed.keys() <= known.of(R).keys()


# What has come free.


def test_device_is_free_when_it_was_held_and_is_not() -> None:
    """A device comes free with the first look that does not show it any more, once."""
    known = Released().grant(["a"]).look(["a"], at=0.0)
    assert known.free == set()
    assert known.busy == {"a"}
    known = known.look([], at=1.0)
    assert known.free == {"a"}
    assert known.busy == set()
    assert known.look([], at=2.0).free == set()


def test_grant_whose_pod_never_shows_up_is_free_after_two_looks_well_apart() -> None:
    """The kubelet may reject a pod after Allocate: two looks that miss it, well apart, release the device."""
    known = Released().grant(["a"]).look([], at=10.0)
    assert known.free == set()
    assert known.busy == {"a"}
    known = known.look([], at=10.0 + WELL_APART / 2)
    assert known.free == set()
    assert known.look([], at=10.0 + WELL_APART).free == {"a"}


def test_grant_to_the_next_pod_is_not_a_release() -> None:
    """A device that is given out again before a look saw it free stays in use."""
    known = Released().look(["a"], at=0.0).grant(["a"]).look([], at=1.0)
    assert known.free == set()
    assert known.busy == {"a"}
    assert known.look(["a"], at=2.0).look([], at=3.0).free == {"a"}


def test_grant_begins_its_wait_anew() -> None:
    """A device that is granted again waits for its new pod as long as the first one did."""
    known = Released().grant(["a"]).look([], at=0.0).grant(["a"]).look([], at=WELL_APART)
    assert known.busy == {"a"}
    assert known.look([], at=2 * WELL_APART).free == {"a"}


_steps = st.lists(
    st.tuples(
        st.sampled_from(["grant", "look"]), st.frozensets(st.sampled_from("abc")), st.sampled_from([0.1, 3.0, 60.0])
    ),
    max_size=12,
)


@given(_steps)
def test_every_use_ends_in_one_release(steps: list[tuple[str, frozenset[str], float]]) -> None:
    """Whatever is seen, in the end each device that was busy is released, and never while it is held."""
    known, owed, now = Released(), set[str](), 0.0
    for what, ids, passed in (*steps, *[("look", frozenset[str](), WELL_APART)] * 3):
        now += passed
        known = known.grant(ids) if what == "grant" else known.look(ids, now)
        owed |= ids
        if what == "look":
            assert known.free.isdisjoint(ids)
            assert known.free.isdisjoint(known.busy)
            assert known.free <= owed
            owed -= known.free
    assert owed == known.busy == set()


# When to ask.


async def test_quiet_waits_for_allocations_to_land() -> None:
    """Nobody asks `List` while an own Allocate is in flight or was a moment ago."""
    quiet = Quiet()
    await quiet.wait()
    before = time.monotonic()
    assert quiet.quiet_since(before)
    with quiet.busy(0.02):
        with quiet.busy(0.02):
            waiting = asyncio.create_task(quiet.wait())
        done, _ = await asyncio.wait({waiting}, timeout=0.05)
        assert not done
        assert not quiet.quiet_since(before)
        landed = time.monotonic()
    await waiting
    assert time.monotonic() >= landed + 0.02
    assert not quiet.quiet_since(before)
    assert quiet.quiet_since(time.monotonic())


# The service.


async def test_asking_a_kubelet(fake_kubelet: FakeKubelet) -> None:
    """`List` and `GetAllocatableResources` of a kubelet that holds nothing answer with nothing."""
    service = PodResources(fake_kubelet.pod_resources_socket)
    assert (await service.list()).held == {}
    assert await service.allocatable() == {}


async def test_kubelet_that_cannot_be_asked(tmp_path: Path) -> None:
    """A kubelet that is not there is an error that names the socket."""
    service = PodResources(tmp_path / "none.sock", timeout=1.0)
    with pytest.raises(PodResourcesError, match=r"none.sock: (UNAVAILABLE|DEADLINE_EXCEEDED)"):
        await service.list()
