"""ResourceSlices: the wanted slices, the plan of writes, and that the publisher reaches the wanted slices."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deviceplugin.backoff import Backoff
from deviceplugin.device import Device, Health, Version
from deviceplugin.inventory import InventorySnapshot, merged
from dra_bridge.kube import RESOURCE_SLICES, Cluster, ConflictError, UnavailableError
from dra_bridge.kube.client import SILENCE
from dra_bridge.slices.desired import Offer, Pool, desired, slice_name
from dra_bridge.slices.foreign import ForeignKind
from dra_bridge.slices.mirror import Mirror
from dra_bridge.slices.plan import fingerprint, in_version, neutral, plan
from dra_bridge.slices.publisher import FEW, Publisher, remove_slices
from dra_bridge.testing.apiserver import FEATURES, FakeApiServer, Fault
from tests.dra.objects import node_body
from tests.waits import until

DRIVER = "gpu.example.com"
NODE = "node1"


def snapshot(*devices: Device, resource: str = "example.com/gpu") -> InventorySnapshot:
    return merged(InventorySnapshot(resource), devices)


def pool(*devices: Device, replicas: int = 1, **options: Any) -> Pool:
    shares = {device.id: replicas for device in devices}
    return Pool(DRIVER, NODE, (Offer(snapshot(*devices), replicas=shares, **options),))


def many(count: int, **options: Any) -> list[Device]:
    return [Device(f"gpu{number}", **options) for number in range(count)]


def slices(wanted: Pool, **options: Any) -> list[dict[str, Any]]:
    found = desired(wanted, **options)
    assert found is not None
    return list(found.slices)


def entry(wanted: Pool, **options: Any) -> dict[str, Any]:
    return dict(slices(wanted, **options)[0]["spec"]["devices"][0])


# --- desired --------------------------------------------------------------------------------------


def test_attributes_of_all_kinds() -> None:
    """Strings, integers, booleans and versions become the four kinds of attributes; NUMA becomes an attribute too."""
    device = Device(
        "gpu0",
        numa=1,
        attributes={
            "model": "u280",
            "lanes": 16,
            "ecc": True,
            "firmware": Version("1.2.3"),
            "resource.kubernetes.io/pciBusID": "0000:01:00.0",
        },
        capacity={"memory": "16Gi", "engines": 4},
    )
    assert entry(pool(device)) == {
        "name": "gpu0",
        "attributes": {
            "extendedResource": {"string": "example.com/gpu"},
            "model": {"string": "u280"},
            "lanes": {"int": 16},
            "ecc": {"bool": True},
            "firmware": {"version": "1.2.3"},
            "resource.kubernetes.io/pciBusID": {"string": "0000:01:00.0"},
            "resource.kubernetes.io/numaNode": {"int": 1},
        },
        "capacity": {"memory": {"value": "16Gi"}, "engines": {"value": "4"}},
    }


def test_pool_is_the_node_and_slices_count_themselves() -> None:
    """A pool is named like the node, and each slice says how many slices the pool has."""
    bodies = slices(pool(*many(300)))
    assert [len(body["spec"]["devices"]) for body in bodies] == [64, 64, 64, 64, 44]
    assert {body["spec"]["pool"]["resourceSliceCount"] for body in bodies} == {5}
    assert {body["spec"]["pool"]["name"] for body in bodies} == {NODE}
    assert len({body["metadata"]["name"] for body in bodies}) == 5


@pytest.mark.parametrize("consumes", [False, True])
@pytest.mark.parametrize("changed", ["health", "side", "sides"])
def test_a_change_of_one_device_changes_its_slice_alone(changed: str, consumes: bool) -> None:
    """If devices of one slice are tainted or leave for limits, only that slice changes, not the number of slices."""
    sets: dict[str, dict[str, int | str]] = {f"card{number}": {"memory": 1} for number in range(10)}
    options = [{"consumes": {f"card{number % 10}": {"memory": 1}}, "counters": sets} if consumes else {}
               for number in range(200)]  # fmt: skip
    devices = [Device(f"gpu{number}", **options[number]) for number in range(200)]  # type: ignore[arg-type]
    everything = frozenset(device.id for device in devices)
    before = applied([], plan(slices(pool(*devices, offered=everything)), []))
    if changed == "health":
        devices[70] = devices[70].with_health(Health.UNHEALTHY, "fan")
    leaving = {"health": (), "side": ("gpu70",), "sides": tuple(f"gpu{number}" for number in range(64, 128))}[changed]
    wanted = slices(pool(*devices, offered=everything.difference(leaving)))
    (write,) = plan(wanted, before)
    assert write.body["metadata"]["name"] == slice_name(NODE, DRIVER, 3 if consumes else 1)
    assert len(set(generations(applied(before, [write])))) == 1
    back = slices(pool(*[Device(f"gpu{number}", **options[number]) for number in range(200)]))  # type: ignore[arg-type]
    assert len(plan(back, applied(before, [write]))) == 1


def test_unhealthy_devices_are_tainted() -> None:
    """An unhealthy device is offered with a taint, a device of unknown health without."""
    devices = [Device("a", health=Health.UNHEALTHY), Device("b"), Device("c", health=Health.UNKNOWN)]
    wanted = pool(*devices)
    found = {one["name"]: one.get("taints") for one in slices(wanted)[0]["spec"]["devices"]}
    assert found == {"a": [{"key": f"{DRIVER}/unhealthy", "effect": "NoSchedule"}], "b": None, "c": None}
    evicting = replace(wanted, unhealthy="NoExecute")
    assert slices(evicting)[0]["spec"]["devices"][0]["taints"][0]["effect"] == "NoExecute"


def test_only_devices_of_the_dra_side() -> None:
    """Only devices for claims are in the slices; without such devices there is no slice, or an empty one on request."""
    wanted = pool(*many(3), offered={"gpu1"})
    assert [one["name"] for one in slices(wanted)[0]["spec"]["devices"]] == ["gpu1"]
    nothing = pool(*many(3), offered=frozenset())
    assert slices(nothing) == []
    noted = replace(nothing, annotations={f"{DRIVER}/progress": "1/3"})
    assert slices(noted) == []
    (body,) = slices(replace(noted, empty=True))
    assert "devices" not in body["spec"]
    assert body["metadata"]["annotations"] == {f"{DRIVER}/progress": "1/3"}


def test_each_slice_is_marked() -> None:
    """Every slice has an annotation, because a policy lets a former driver delete such slices only.

    Only the first slice's annotation has a value.
    """
    noted = replace(pool(*many(130)), annotations={f"{DRIVER}/progress": "1/3"})
    values = [body["metadata"]["annotations"][f"{DRIVER}/progress"] for body in slices(noted)]
    assert values == ["1/3", "", ""]


def test_before_the_first_list_nothing_is_known() -> None:
    """While a source has not listed its devices, the wanted state is None and not an empty list."""
    assert (
        desired(Pool(DRIVER, NODE, (Offer(snapshot(Device("a"))), Offer(InventorySnapshot("example.com/fpga")))))
        is None
    )


def test_order_does_not_follow_health() -> None:
    """Devices keep their places in the slice, in natural order of ids, also when some are gone and tainted."""
    before = snapshot(*many(12))
    after = merged(before, many(12)[3:])
    names = [one["name"] for one in slices(Pool(DRIVER, NODE, (Offer(before),)))[0]["spec"]["devices"]]
    assert names == [f"gpu{number}" for number in range(12)]
    gone = slices(Pool(DRIVER, NODE, (Offer(after),)))[0]["spec"]["devices"]
    assert [one["name"] for one in gone] == names
    assert [one["name"] for one in gone if "taints" in one] == names[:3]


def test_shared_devices() -> None:
    """A shared device allows several claims: a claim takes one share and an equal part of each capacity by default."""
    found = entry(pool(Device("a", capacity={"memory": "16Gi", "odd": 3, "half": "500m"}), replicas=4))
    assert found["allowMultipleAllocations"] is True
    assert found["capacity"] == {
        "shares": {"value": "4", "requestPolicy": {"default": "1", "validRange": {"min": "1", "step": "1"}}},
        "memory": {"value": "16Gi", "requestPolicy": {"default": "4Gi"}},
        "odd": {"value": "3", "requestPolicy": {"default": "0"}},
        "half": {"value": "500m", "requestPolicy": {"default": "0"}},
    }
    exclusive = entry(pool(Device("a", capacity={"memory": "16Gi"}), replicas=4), without={"sharing"})
    assert "allowMultipleAllocations" not in exclusive
    assert exclusive["capacity"] == {"memory": {"value": "16Gi"}}


def partitions() -> list[Device]:
    sets: dict[str, dict[str, int | str]] = {"card0": {"memory": "80Gi", "slices": 7}}
    return [
        Device("whole", counters=sets, consumes={"card0": {"memory": "80Gi", "slices": 7}}),
        Device("part0", counters=sets, consumes={"card0": {"memory": "10Gi", "slices": 1}}),
        Device("free"),
    ]


def test_shared_counters() -> None:
    """Counter sets are in slices of their own, and devices refer to them."""
    bodies = slices(pool(*partitions()))
    assert bodies[0]["spec"]["sharedCounters"] == [
        {"name": "card0", "counters": {"memory": {"value": "80Gi"}, "slices": {"value": "7"}}}
    ]
    assert "devices" not in bodies[0]["spec"]
    devices = {one["name"]: one.get("consumesCounters") for one in bodies[1]["spec"]["devices"]}
    assert devices["free"] is None
    assert devices["part0"] == [
        {"counterSet": "card0", "counters": {"memory": {"value": "10Gi"}, "slices": {"value": "1"}}}
    ]
    assert {body["spec"]["pool"]["resourceSliceCount"] for body in bodies} == {2}


@pytest.mark.parametrize(
    ("device", "word"),
    [
        (Device("a", attributes={"no-dash": 1}), "no-dash"),
        (Device("a", attributes={"big": 2**63}), "64 bits"),
        (Device("a", attributes={"long": "x" * 65}), "64 bytes"),
        (Device("a", attributes={"v": Version("1.2")}), "semantic version"),
        (Device("a", attributes={"model": 1, f"{DRIVER}/model": 2}), "given twice"),
        (Device("a", attributes={f"a{number}": number for number in range(32)}), "one more"),
        (Device("a", capacity={"memory": "-1"}), "at least 0"),
    ],
)
def test_what_the_api_would_refuse_is_left_out(device: Device, word: str) -> None:
    """An invalid attribute or capacity is left out and reported; the device and the other devices are published."""
    found = desired(pool(device, Device("b")))
    assert found is not None
    assert [one["name"] for one in found.slices[0]["spec"]["devices"]] == ["a", "b"]
    assert any(word in problem for problem in found.problems)
    assert len(found.slices[0]["spec"]["devices"][0]["attributes"]) <= 32


def test_bad_counters_withhold_the_device() -> None:
    """A device that consumes an undefined counter set is not offered; the other devices are."""
    found = desired(pool(Device("a", consumes={"x": {"m": 1}}), Device("b")))
    assert found is not None
    (body,) = found.slices
    assert [one["name"] for one in body["spec"]["devices"]] == ["b"]
    assert "no device defines" in found.problems[0]


def test_resources_of_one_driver_do_not_share_names() -> None:
    """If two resources of a driver have the same device ids, the published names have prefixes (qualifiers)."""
    gpu, fpga = snapshot(Device("0")), snapshot(Device("0"), resource="example.com/fpga")
    offers = Offer(gpu, qualifier="gpu"), Offer(fpga, qualifier="fpga")
    names = [one["name"] for one in slices(Pool(DRIVER, NODE, offers))[0]["spec"]["devices"]]
    assert names == ["gpu--0", "fpga--0"]


def test_v1beta1_wraps_devices() -> None:
    """In v1beta1 all fields of a device except its name are under `basic`; conversion back gives the same spec."""
    (body,) = slices(pool(Device("a", attributes={"model": "x"})))
    old = in_version(body, "v1beta1")
    assert old["apiVersion"] == "resource.k8s.io/v1beta1"
    assert old["spec"]["devices"][0]["basic"]["attributes"]["model"] == {"string": "x"}
    assert neutral(old)["spec"] == body["spec"]


def test_fingerprint_is_about_content() -> None:
    """Slices that differ only in spelling of quantities, empty fields, taint times and generation count as equal."""
    (one,) = slices(pool(Device("a", capacity={"m": "1024Mi"}, health=Health.UNHEALTHY)))
    (other,) = slices(pool(Device("a", capacity={"m": "1Gi"}, health=Health.UNHEALTHY)))
    other["spec"]["pool"]["generation"] = 7
    other["spec"]["devices"][0]["taints"][0]["timeAdded"] = "2026-01-01T00:00:00Z"
    other["spec"]["devices"][0]["consumesCounters"] = []
    assert fingerprint(one) == fingerprint(other)
    other["spec"]["devices"][0]["taints"][0]["effect"] = "NoExecute"
    assert fingerprint(one) != fingerprint(other)


# --- plan -----------------------------------------------------------------------------------------


def applied(existing: list[dict[str, Any]], writes: list[Any]) -> list[dict[str, Any]]:
    state = {body["metadata"]["name"]: body for body in existing}
    for verb, body in writes:
        if verb == "delete":
            del state[body["metadata"]["name"]]
        else:
            state[body["metadata"]["name"]] = body
    return list(state.values())


def generations(bodies: list[dict[str, Any]]) -> list[int]:
    return [body["spec"]["pool"]["generation"] for body in bodies]


def test_fewer_slices_are_deleted_last() -> None:
    """A pool that shrinks is first written whole in a new generation; then the surplus slices are deleted."""
    before = applied([], plan(slices(pool(*many(300))), []))
    writes = plan(slices(pool(*many(3))), before)
    assert [verb for verb, _ in writes] == ["replace", "delete", "delete", "delete", "delete"]
    assert generations(applied(before, writes)) == [2]


devices_strategy = st.lists(
    st.builds(
        Device,
        st.from_regex(r"[a-c][0-9]{1,2}", fullmatch=True),
        health=st.sampled_from(list(Health)),
        attributes=st.dictionaries(st.sampled_from(["x", "y"]), st.integers(0, 2), max_size=2),
        capacity=st.dictionaries(st.sampled_from(["m", "n"]), st.sampled_from([1, "1Gi", "1024Mi"]), max_size=1),
    ),
    max_size=6,
    unique_by=lambda device: device.id,
)


@dataclass(frozen=True)
class Recipe:
    """The parts of a pool, with a short repr for reports of hypothesis."""

    devices: list[Device]
    extra: int
    replicas: int
    noted: bool

    def pool(self) -> Pool:
        more = [Device(f"z{number}") for number in range(self.extra)]
        made = pool(*self.devices, *more, replicas=self.replicas)
        return replace(made, annotations={f"{DRIVER}/progress": "1"} if self.noted else {}, empty=self.noted)


recipes = st.builds(
    Recipe, devices_strategy, st.sampled_from([0, 0, 60, 130, 300]), st.sampled_from([1, 2]), st.booleans()
)


@given(st.lists(recipes, min_size=1, max_size=4), st.lists(st.integers(0, 4), min_size=4, max_size=4))
def test_plans_converge_and_pools_are_never_wrong(made: list[Recipe], cuts: list[int]) -> None:
    """From any state, after any number of interrupted plans, one whole plan reaches the wanted slices.

    The next plan is then empty. After each write, the slices of the highest generation have contents that some wanted
    state has, and once they are complete, no device is in two slices.
    """
    sequence = [recipe.pool() for recipe in made]
    state: list[dict[str, Any]] = []
    for wanted, cut in zip(sequence, cuts, strict=False):
        state = applied(state, plan(slices(wanted), state)[:cut])
    wanted = sequence[-1]
    allowed = {fingerprint(body) for one in sequence for body in slices(one)}
    steps = plan(slices(wanted), state)
    right = {id(body) for body in [*state, *(body for _, body in steps)] if fingerprint(body) in allowed}
    for count in range(len(steps) + 1):
        between = applied(state, steps[:count])
        highest = max(generations(between), default=0)
        now = [body for body in between if body["spec"]["pool"]["generation"] == highest]
        assert all(id(body) in right for body in now)
        names = [one["name"] for body in now for one in body["spec"].get("devices", ())]
        if now and len(now) == now[0]["spec"]["pool"]["resourceSliceCount"]:
            assert len(names) == len(set(names))
    done = applied(state, steps)
    assert sorted(map(fingerprint, done)) == sorted(map(fingerprint, slices(wanted)))
    assert len(set(generations(done))) <= 1
    assert plan(slices(wanted), done) == []


# --- publishing -----------------------------------------------------------------------------------


def client(server: FakeApiServer, **options: Any) -> Cluster:
    return Cluster.from_server(server.url, backoff=Backoff(0.01, 0.05), deadline=2.0, **options)


@contextlib.asynccontextmanager
async def running(publisher: Publisher, *pools: Pool) -> AsyncIterator[None]:
    """Run a publisher of these pools; the block begins once the API server has the pools."""
    tickets = [(one.driver, publisher.want(one)) for one in pools]
    task = asyncio.create_task(publisher.run())
    try:
        async with asyncio.timeout(120):
            for driver, ticket in tickets:
                await publisher.accepted(driver, ticket)
            yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


@contextlib.asynccontextmanager
async def publishing(
    server: FakeApiServer, *pools: Pool, silence: tuple[float, float] = SILENCE, **options: Any
) -> AsyncIterator[Publisher]:
    async with client(server, silence=silence) as cluster:
        publisher = Publisher(cluster, NODE, **{"burst": 10_000, **options})
        async with running(publisher, *pools):
            yield publisher


async def became(publisher: Publisher, wanted: Pool) -> None:
    await publisher.accepted(wanted.driver, publisher.want(wanted))


def published(server: FakeApiServer) -> list[str]:
    return [one["name"] for body in server.objects() for one in body["spec"].get("devices", ())]


async def test_publishes_with_owner(server: FakeApiServer) -> None:
    """Published slices are owned by the Node, and the publisher's state has their devices."""
    async with publishing(server, pool(*many(3))) as publisher:
        (body,) = server.objects()
        assert body["metadata"]["name"] == slice_name(NODE, DRIVER, 0)
        owner = server.get("nodes", NODE)["metadata"]["uid"]
        assert [one["uid"] for one in body["metadata"]["ownerReferences"]] == [owner]
        state = publisher.state(DRIVER)
        assert (state.slices, set(state.devices), state.problems) == (1, {"gpu0", "gpu1", "gpu2"}, ())
        assert len(server.writes) == 1


async def test_nothing_changed_nothing_written(server: FakeApiServer) -> None:
    """A new listing of unchanged devices causes no request."""
    wanted = pool(*many(3))
    async with publishing(server, wanted) as publisher:
        server.forget_log()
        same = Pool(DRIVER, NODE, (Offer(replace(wanted.offers[0].snapshot, version=9)),))
        await became(publisher, same)
        assert server.log == []


async def test_wiped_slices_come_back(server: FakeApiServer) -> None:
    """Slices that the kubelet deletes are created again within 2 s, with the former times of taints."""
    wanted = pool(*many(3), Device("bad", health=Health.UNHEALTHY))
    async with publishing(server, wanted):
        old = server.objects()
        changed = {**old[0], "spec": {**old[0]["spec"]}}
        changed["spec"]["devices"][0]["taints"][0]["timeAdded"] = "2020-01-01T00:00:00Z"
        server.replace(changed)
        assert server.wipe(NODE) == 1
        await asyncio.to_thread(server.wait_for, lambda it: len(it.objects()) == 1, 2.0)
        (new,) = server.objects()
        assert new["metadata"]["uid"] != old[0]["metadata"]["uid"]
        (taint,) = next(one["taints"] for one in new["spec"]["devices"] if one["name"] == "bad")
        assert taint["timeAdded"] == "2020-01-01T00:00:00Z"


async def test_time_of_a_taint_survives_a_restart(server: FakeApiServer) -> None:
    """A new agent that writes a slice keeps the time at which a device became unhealthy."""
    bad = Device("bad", health=Health.UNHEALTHY)
    async with publishing(server, pool(bad)):
        (body,) = server.objects()
        body["spec"]["devices"][0]["taints"][0]["timeAdded"] = "2020-01-01T00:00:00Z"
        server.replace(body)
    async with publishing(server, pool(bad, Device("new"))):
        devices = {one["name"]: one for one in server.objects()[0]["spec"]["devices"]}
        assert devices["bad"]["taints"][0]["timeAdded"] == "2020-01-01T00:00:00Z"
        assert "new" in devices


async def test_slices_follow_a_node_that_was_made_anew(server: FakeApiServer) -> None:
    """Slices that a former Node of the same name owns get the new Node as owner."""
    async with publishing(server, pool(*many(3))):
        (old,) = server.objects()
    node = server.get("nodes", NODE)
    server.delete("nodes", NODE)
    new = server.create(node_body(NODE))
    assert new["metadata"]["uid"] != node["metadata"]["uid"]
    async with publishing(server, pool(*many(3))):
        (now,) = server.objects()
    (owner,) = now["metadata"]["ownerReferences"]
    assert owner == {
        "apiVersion": "v1", "kind": "Node", "name": NODE, "uid": new["metadata"]["uid"], "controller": True,
    }  # fmt: skip
    assert now["spec"] == old["spec"]


async def test_who_wants_slices_while_all_ends_keeps_nothing_running(server: FakeApiServer) -> None:
    """A pool that is wanted while the publisher stops does not delay the publisher's end."""
    async with client(server) as cluster:
        publisher = Publisher(cluster, NODE)
        ticket = publisher.want(pool(*many(1)))
        task = asyncio.create_task(publisher.run())
        async with asyncio.timeout(60):
            await publisher.accepted(DRIVER, ticket)
        task.cancel()
        await asyncio.sleep(0)
        publisher.want(replace(pool(), driver="late.example.com"))
        done, _ = await asyncio.wait({task}, timeout=10)
        assert done


def test_several_numa_nodes_are_a_list_where_the_server_takes_one() -> None:
    """Several NUMA nodes are a list attribute, or none if the server takes no lists; no NUMA node and -1 are none."""
    close, attribute = pool(Device("a", numa=[1, 2])), "resource.kubernetes.io/numaNode"
    assert entry(close)["attributes"][attribute] == {"ints": [1, 2]}
    assert attribute not in entry(close, without={"lists"})["attributes"]
    for numa in (None, -1):
        assert attribute not in entry(pool(Device("a", numa=numa)))["attributes"]


async def test_a_server_that_takes_no_lists_any_more_gets_none(caplog: pytest.LogCaptureFixture) -> None:
    """A server that takes no lists any more refuses the slice; the publisher detects it and writes without lists."""
    caplog.set_level(logging.WARNING)
    with FakeApiServer(features=FEATURES | {"lists"}) as server:
        server.create(node_body(NODE))
        async with publishing(server, pool(Device("a", numa=[0, 1]))) as publisher:
            assert not publisher.state(DRIVER).unsupported
            for body in server.objects():
                server.delete("resourceslices", body["metadata"]["name"])
            server.features = FEATURES
            await became(publisher, pool(Device("a", numa=[0, 1]), Device("b", numa=[0, 1])))
            assert publisher.state(DRIVER).unsupported == {"lists"}
            assert published(server) == ["a", "b"]


@pytest.mark.parametrize("missing", ["taints", "sharing", "counters", "lists"])
async def test_dropped_fields_are_noticed(missing: str, caplog: pytest.LogCaptureFixture) -> None:
    """A dry run finds the fields that the server drops; a drop is reported once, and the fields are not sent again."""
    caplog.set_level(logging.WARNING)
    with FakeApiServer(features=(FEATURES | {"lists"}) - {missing}) as server:
        server.create(node_body(NODE))
        wanted = pool(*partitions(), Device("bad", health=Health.UNHEALTHY, numa=[0, 1]), replicas=2)
        async with publishing(server, wanted) as publisher:
            assert publisher.state(DRIVER).unsupported == {missing}
            first = len(server.writes)
            await became(
                publisher,
                pool(*partitions(), Device("bad", health=Health.UNHEALTHY, message="x", numa=[0, 1]), replicas=2),
            )
            assert len(server.writes) == first
            reported = [record.getMessage() for record in caplog.records if "feature gate" in record.getMessage()]
            assert len(reported) == 1
            gone = {"taints": {"bad"}, "counters": {"whole", "part0"}}.get(missing, set())
            assert set(published(server)) == {"whole", "part0", "free", "bad"} - gone
            dry = [entry for entry in server.log if "dryRun" in entry.query]
            assert len(dry) <= 3


async def test_fields_dropped_without_warning(server: FakeApiServer) -> None:
    """If the server drops taints after the dry run, a write's answer shows it; the unhealthy device is withdrawn."""
    async with publishing(server, pool(Device("a"), Device("b", health=Health.UNHEALTHY))) as publisher:
        server.features = FEATURES - {"taints"}
        await became(publisher, pool(Device("a"), Device("b")))
        await became(publisher, pool(Device("a"), Device("b", health=Health.UNHEALTHY)))
        assert published(server) == ["a"]
        assert publisher.state(DRIVER).unsupported == {"taints"}


async def test_a_feature_that_comes_is_used(server: FakeApiServer) -> None:
    """After an outage the server may be newer: the publisher tries unsupported features again."""
    server.features = FEATURES - {"taints"}
    wanted = pool(Device("a", health=Health.UNHEALTHY), Device("b"))
    async with publishing(server, wanted, probe_again=0.0):
        assert published(server) == ["b"]
        with server.outage():
            server.features = FEATURES
        await asyncio.to_thread(server.wait_for, lambda it: published(it) == ["a", "b"])


@pytest.mark.parametrize("version", ["v1beta1", "v1beta2", "v1"])
async def test_versions(version: str) -> None:
    """Slices are written in the API version that the server has."""
    with FakeApiServer(versions=[version]) as server:
        server.create(node_body(NODE))
        async with publishing(server, pool(*many(3), Device("x", health=Health.UNHEALTHY))) as publisher:
            assert len(published(server)) == 4
            await became(publisher, pool(*many(2)))
            assert len(published(server)) == 2
        assert all(f"/{version}/" in entry.path for entry in server.writes if "slices" in entry.path)


async def test_an_upgraded_server(server: FakeApiServer) -> None:
    """When the server no longer has the API version in use, the publisher goes on with another."""
    server.versions = ("v1beta1",)
    async with publishing(server, pool(*many(3))) as publisher:
        server.versions = ("v1", "v1beta2")
        await became(publisher, pool(*many(4)))
        assert len(published(server)) == 4
        assert server.writes[-1].path.startswith("/apis/resource.k8s.io/v1/")


@pytest.mark.parametrize("late", [False, True])
async def test_an_unanswered_write_counts_as_neither_done_nor_refused(
    server: FakeApiServer, monkeypatch: pytest.MonkeyPatch, late: bool
) -> None:
    """After a write without an answer, a pool is accepted only when the lost write can no longer take effect."""
    replace, lost = Cluster.replace, list[Any]()

    async def unanswered(cluster: Cluster, kind: Any, body: Any, *more: Any, **options: Any) -> Any:
        if lost:
            return await replace(cluster, kind, body, *more, **options)
        lost.append(body)
        if not late:
            await replace(cluster, kind, body, *more, **options)
        tickets.append(publisher.want(pool(*many(1))))  # the pool that the server had before the lost write
        raise UnavailableError("no answer in time")

    tickets: list[int] = []
    async with publishing(server, pool(*many(1))) as publisher:
        monkeypatch.setattr(Mirror, "observe", lambda *_, **__: False)  # the watch reports nothing
        monkeypatch.setattr(Cluster, "replace", unanswered)
        publisher.want(pool(*many(2)))
        await asyncio.to_thread(server.wait_for, lambda _: bool(tickets))
        async with asyncio.timeout(20):
            await publisher.accepted(DRIVER, tickets[0])
        if late:
            async with client(server) as other:
                with pytest.raises(ConflictError):
                    await replace(other, RESOURCE_SLICES, lost[0])
        assert published(server) == ["gpu0"]


async def test_the_generation_never_goes_back(server: FakeApiServer) -> None:
    """Slices that are deleted are created again in a generation not below the highest generation ever written."""
    async with publishing(server, pool(*many(1))) as publisher:
        for count in (2, 3):
            await became(publisher, pool(*many(count)))
        (before,) = generations(server.objects())
        server.wipe(NODE)
        await asyncio.to_thread(server.wait_for, lambda it: len(published(it)) == 3)
        (after,) = generations(server.objects())
    assert (before, after) == (3, 3)


async def test_what_the_server_refuses_is_told(server: FakeApiServer, caplog: pytest.LogCaptureFixture) -> None:
    """If the server refuses a slice, the publisher's state has its reason until a new pool is accepted.

    The refusal is logged once.
    """
    refused = "the API server refuses the slices: no"
    async with publishing(server, pool(*many(3))) as publisher:
        server.fail(lambda request: request.method == "PUT", Fault(code=422, message="no"), times=1000)
        publisher.want(pool(*many(4)))
        await asyncio.to_thread(server.wait_for, lambda it: len(it.requests("PUT")) >= 3)
        assert publisher.state(DRIVER).problems == (refused,)
        server.heal()
        await became(publisher, pool(*many(5)))
        assert len(published(server)) == 5
        assert publisher.state(DRIVER).problems == ()
    assert [record.getMessage() for record in caplog.records] == [refused]


async def test_a_server_that_asks_for_time_gets_it(server: FakeApiServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The publisher waits for the time in Retry-After, limited to the longest wait of its backoff."""
    waits: list[float] = []

    async def note(self: Cluster, seconds: float) -> None:
        waits.append(seconds)

    monkeypatch.setattr(Cluster, "pause", note)
    server.fail(lambda request: request.method == "POST", Fault(code=429, retry_after=7))
    cluster = Cluster.from_server(server.url, backoff=Backoff(0.01, 5.0), deadline=5.0)
    async with cluster, running(Publisher(cluster, NODE), pool(*many(2))):
        pass
    assert waits == [5.0]


async def test_outage(server: FakeApiServer, caplog: pytest.LogCaptureFixture) -> None:
    """A pool that is wanted during an outage is published afterwards; begin and end of the outage are logged once."""
    caplog.set_level(logging.INFO)
    async with publishing(server, pool(*many(3))) as publisher:
        with server.outage():
            ticket = publisher.want(pool(*many(6)))
            await until(lambda: publisher.cluster.statistics.lost_since is not None)
        await publisher.accepted(DRIVER, ticket)
        assert len(published(server)) == 6
    reported = [record.getMessage() for record in caplog.records]
    assert sum("is lost" in text for text in reported) == 1
    assert sum("is back" in text for text in reported) == 1


@pytest.mark.parametrize("end_streams", [True, False], ids=["lost", "silent"])
async def test_restored_storage(server: FakeApiServer, end_streams: bool) -> None:
    """After the server was restored to an older snapshot, a device withdrawn since then is withdrawn again."""
    async with publishing(server, pool(*many(3)), silence=(0.2, 0.4)) as publisher:
        snapshot = server.snapshot()
        await became(publisher, pool(*many(2)))
        server.restore(snapshot, end_streams=end_streams)
        await asyncio.to_thread(server.wait_for, lambda it: len(published(it)) == 2)
        await became(publisher, pool(*many(4)))
        assert len(published(server)) == 4


async def test_annotation_alone_is_one_write(server: FakeApiServer) -> None:
    """A changed annotation is one write; the generation and the annotations of other programs stay."""
    async with publishing(server, replace(pool(*many(300)), annotations={f"{DRIVER}/progress": "0/2"})) as publisher:
        body = server.get("resourceslices", slice_name(NODE, DRIVER, 0))
        body["metadata"]["annotations"]["someone.else/note"] = "x"
        server.replace(body)
        server.forget_log()
        await became(publisher, replace(pool(*many(300)), annotations={f"{DRIVER}/progress": "1/2"}))
        assert len(server.writes) == 1
        now = server.get("resourceslices", slice_name(NODE, DRIVER, 0))
        assert now["metadata"]["annotations"] == {"someone.else/note": "x", f"{DRIVER}/progress": "1/2"}
        assert now["spec"] == body["spec"]


async def test_moves_are_not_slowed_down(server: FakeApiServer) -> None:
    """Writes for new wanted states are not rate-limited: 20 changes in a row take less than 20 s."""
    async with publishing(server, pool(*many(3)), burst=3, per_second=0.01) as publisher, asyncio.timeout(20):
        for count in range(4, 24):
            await became(publisher, pool(*many(count)))
        assert len(published(server)) == 23


async def test_drivers_share_a_read_of_the_node(server: FakeApiServer) -> None:
    """When the slices of 16 drivers are deleted at once, the drivers share reads of the Node's UID: at most 8."""
    drivers = [f"d{number}.example.com" for number in range(16)]
    pools = [Pool(driver, NODE, (Offer(snapshot(Device("a"))),)) for driver in drivers]
    async with publishing(server, *pools):
        before = {body["metadata"]["uid"] for body in server.objects("resourceslices")}
        server.forget_log()
        for driver in drivers:
            server.delete("resourceslices", slice_name(NODE, driver, 0))

        def again(it: FakeApiServer) -> bool:
            now = {body["metadata"]["uid"] for body in it.objects("resourceslices")}
            return len(now) == 16 and not now & before

        await asyncio.to_thread(server.wait_for, again)
        assert 1 <= len(server.requests("GET", "/nodes/")) <= 8


async def test_uninstall(server: FakeApiServer) -> None:
    """Uninstalling removes the driver's slices and no slices of another driver."""
    other = Pool("fpga.example.com", NODE, (Offer(snapshot(Device("f0"))),))
    async with publishing(server, pool(*many(300)), other):
        pass
    async with client(server) as cluster:
        assert await remove_slices(cluster, [DRIVER], NODE) == 5
    assert published(server) == ["f0"]


def test_another_node_is_refused() -> None:
    """A publisher refuses a pool of another node."""

    async def attempt() -> None:
        async with Cluster.from_server("http://127.0.0.1:1") as cluster:
            Publisher(cluster, "node2").want(pool(Device("a")))

    with pytest.raises(ValueError, match="node2"):
        asyncio.run(attempt())


faults = st.lists(
    st.tuples(
        st.sampled_from(["GET", "POST", "PUT", "DELETE", "*"]),
        st.builds(Fault, code=st.sampled_from([0, 0, 409, 429, 500, 503]), done=st.booleans()),
        st.integers(1, 3),
    ),
    max_size=6,
)


@given(
    st.lists(recipes, min_size=1, max_size=3),
    faults,
    st.sets(st.sampled_from(sorted(FEATURES))),
    st.sampled_from(["none", "wipe", "outage", "compact", "break"]),
)
@settings(max_examples=settings().max_examples // 2)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # cancelled while connecting
def test_publisher_reaches_what_is_wanted(
    made: list[Recipe], faulty: list[tuple[str, Fault, int]], features: set[str], accident: str
) -> None:
    """After any faults the server ends with the pool that was wanted last, and a second run writes nothing."""

    sequence = [recipe.pool() for recipe in made]

    async def go(server: FakeApiServer) -> None:
        async with publishing(server, sequence[0]) as publisher:
            for method, fault, times in faulty:
                server.fail(lambda request, method=method: method in ("*", request.method), fault, times)  # type: ignore[misc]
            for wanted in sequence[1:]:
                publisher.want(wanted)
                await asyncio.sleep(0)
            if accident == "wipe":
                server.wipe(NODE)
            elif accident == "outage":
                await asyncio.to_thread(server.stop)
                server.start()
            elif accident == "compact":
                server.compact()
                server.break_watches()
            elif accident == "break":
                server.break_watches()
            await publisher.accepted(DRIVER, publisher.state(DRIVER).wanted)
            goal = sorted(fingerprint(body) for body in slices(sequence[-1], without=FEATURES - features))

            def reached(it: FakeApiServer) -> bool:
                bodies = it.objects()
                whole = len({body["spec"]["pool"]["generation"] for body in bodies}) <= 1
                return whole and sorted(fingerprint(body) for body in bodies) == goal

            await asyncio.to_thread(server.wait_for, reached, 60.0)
        server.heal()
        server.forget_log()
        async with publishing(server, sequence[-1]):
            pass
        assert server.writes == []

    threads = threading.active_count()
    with FakeApiServer(features=frozenset(features)) as server:
        server.create(node_body(NODE))
        asyncio.run(go(server))
    assert threading.active_count() <= threads + 40


async def test_a_deletion_overtakes_the_answer_to_a_write(
    server: FakeApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slice that the kubelet deletes before the answer to its write has come is published again."""
    replace, overtaken = Cluster.replace, 0

    async with publishing(server, pool(*many(2))) as publisher:

        async def late(cluster: Cluster, kind: Any, body: Any, *more: Any, **options: Any) -> Any:
            nonlocal overtaken
            answer = await replace(cluster, kind, body, *more, **options)
            if not overtaken:
                server.wipe(NODE)
                await until(lambda: publisher.withdrawn(DRIVER, "gpu0") is not None, "the watch reports it")
                overtaken += 1
            return answer

        monkeypatch.setattr(Cluster, "replace", late)
        await publisher.accepted(DRIVER, publisher.want(pool(*many(3))))
        await asyncio.to_thread(server.wait_for, lambda it: len(published(it)) == 3, 10.0)
    assert overtaken == 1


async def test_a_refusal_that_passes_is_tried_again_soon(server: FakeApiServer) -> None:
    """After two refusals of a create, as by a policy that changed a moment ago, the create is retried soon."""
    server.fail(lambda request: request.method == "POST" and "dryRun" not in request.query, Fault(code=422), 2)
    async with publishing(server, pool(*many(2))):
        assert len(published(server)) == 2


async def test_many_drivers_share_a_watch_of_slices_without_a_node(server: FakeApiServer) -> None:
    """The first FEW drivers have a watch each; one shared watch serves all other drivers, also ones that join later."""
    pools = [replace(pool(Device("a")), driver=f"d{number}.example.com") for number in range(FEW + 4)]
    alone, *_, shared, late = (one.driver for one in pools)

    def put(driver: str, name: str, node: str = NODE) -> None:
        spec = {"driver": driver, "allNodes": True, "devices": [{"name": "a"}]}
        spec["pool"] = {"name": node, "generation": 1, "resourceSliceCount": 1}
        server.create(in_version({"metadata": {"name": name}, "spec": spec, "kind": "ResourceSlice"}, "v1"))

    def selected(*, watches: bool) -> list[str]:
        requests = server.requests("GET", "/resourceslices")
        return sorted(one.query["fieldSelector"] for one in requests if one.watch is watches)

    put("network.example.com", "of-another-driver")
    put(late, "of-another-pool", "fabric")
    put(late, "before")
    few = sorted(f"spec.driver={one.driver},spec.nodeName=" for one in pools[:FEW])
    wanted = sorted([*few, "spec.nodeName=", f"spec.nodeName={NODE}"])
    async with publishing(server, *pools[:-1]) as publisher:
        await until(lambda: selected(watches=True) == wanted)
        assert selected(watches=False) == wanted
        await became(publisher, pools[-1])
        assert selected(watches=True) == selected(watches=False) == wanted
        for name, driver in enumerate((alone, shared, late)):
            put(driver, f"meanwhile-{name}")
        left = {"of-another-driver", "of-another-pool"}
        await until(
            lambda: {one["metadata"]["name"] for one in server.objects() if "nodeName" not in one["spec"]} == left
        )
        undone = {alone: 1, shared: 1, late: 2}

        def count() -> dict[str, int]:
            counts = {one.driver: publisher.state(one.driver).overcome for one in pools}
            return {driver: kinds[ForeignKind.NODELESS] for driver, kinds in counts.items() if kinds}

        await until(lambda: count() == undone)
        assert len(publisher.watches) == FEW + 2


async def test_a_driver_that_joins_while_the_shared_watch_is_lost_lists_its_slices(server: FakeApiServer) -> None:
    """While the shared watch is lost, a driver that joins lists its slices from the API server."""
    pools = [replace(pool(Device("a")), driver=f"d{number}.example.com") for number in range(FEW + 2)]
    async with publishing(server, *pools[:-1]) as publisher:
        lost = publisher.watches["slices of all drivers without a node"]
        lost.patience = -1.0
        server.forget_log()
        await became(publisher, pools[-1])
        listed = [one.query["fieldSelector"] for one in server.requests("GET", "/resourceslices") if not one.watch]
        assert f"spec.driver={pools[-1].driver},spec.nodeName=" in listed
        assert publisher.withdrawn(pools[0].driver, "b") is not None
