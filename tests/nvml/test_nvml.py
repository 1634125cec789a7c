"""The NVIDIA source against a library written in C, by the same ctypes calls as the real one."""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from deviceplugin import config, naming, sources
from deviceplugin.config.types import NvidiaConfig
from deviceplugin.device import ContainerEdits, Device, Health, Version
from deviceplugin.health import HealthRules, Verdict
from deviceplugin.naming import PCI_BUS_ID, PCIE_ROOT
from deviceplugin.sources import nvidia
from deviceplugin.sources.nvidia import NvidiaSource, driver
from deviceplugin.sources.nvidia.nvml import Gpu, NvmlError, NvmlScan, Xid
from deviceplugin.sources.nvidia.readings import profile_of
from deviceplugin.sources.nvidia.session import Session
from tests.nvml import world as worlds
from tests.nvml.conftest import Until, unload
from tests.nvml.world import DGX1V, World, build

QUICK = HealthRules(failures=1, successes=1, quiet=0.0)


def source(world: World, **options: Any) -> NvidiaSource:
    wanted = NvidiaConfig(**{name: options.pop(name) for name in NvidiaConfig.__struct_fields__ if name in options})
    return NvidiaSource(wanted, **{"places": world.places, "period": 0.05, "rules": QUICK, **options})


def looked(world: World, **options: Any) -> dict[str, Device]:
    """Look once, without a loop."""
    session, made = Session(world.places), None
    try:
        made = source(world, **options)
        made.update(session.scan())
        return {device.id: device for device in made.devices()}
    finally:
        session.close()


def calls(function: str) -> int:
    """How often the library's function was called."""
    import pynvml  # type: ignore[import-untyped]

    return cast("int", pynvml.nvmlLib.fake_calls(function.encode()))


def closing(made: NvidiaSource) -> Any:
    return aclosing(cast("Any", made.watch()))


def healths(devices: dict[str, Device]) -> list[Health]:
    return [device.health for device in devices.values()]


# --- what a device is -----------------------------------------------------------------------------


def test_gpu_is_described_by_what_claims_select_on(world: World) -> None:
    """UUID, minor, PCI address and root, NUMA node, memory, product, architecture and versions are told."""
    uuid = world.gpu(1, node=1)
    world.set("gpu0.return.nvmlDeviceGetHandleByIndex_v2", 999)
    world.write()
    device = looked(world)[uuid]
    assert device.health is Health.HEALTHY
    assert device.numa == 1
    assert device.capacity == {"memory": "40960Mi"}
    assert dict(device.attributes) == {
        "type": "gpu",
        "uuid": uuid,
        "index": 1,
        "minor": 1,
        PCI_BUS_ID: "0000:08:00.0",
        PCIE_ROOT: "pci0000:00",
        "numaNode": 1,
        "productName": "NVIDIA A100-SXM4-40GB",
        "brand": "Tesla",
        "serial": "S1",
        "architecture": "Ampere",
        "cudaComputeCapability": "8.0.0",
        "driverVersion": "535.104.5",
        "cudaDriverVersion": "12.2.0",
    }
    assert isinstance(device.attributes["driverVersion"], Version)
    assert not list(naming.problems(device, "gpu.example.com"))


def test_what_a_gpu_does_not_support_is_left_out_and_not_unhealthy(world: World) -> None:
    """NOT_SUPPORTED, NO_PERMISSION and FUNCTION_NOT_FOUND leave an attribute out and the GPU healthy."""
    uuid = world.gpu(0)
    for code, functions in {
        3: ("MinorNumber", "Brand", "Temperature", "SupportedEventTypes", "FieldValues", "MigMode"),
        4: ("Serial", "Architecture", "CudaComputeCapability"),
        13: ("MemoryInfo",),
    }.items():
        for function in functions:
            world.set(f"return.nvmlDeviceGet{function}", code)
    world.set("return.nvmlSystemGetDriverVersion", 3)
    world.write()
    device = looked(world)[uuid]
    assert device.health is Health.HEALTHY
    assert device.capacity == {}
    assert not {"minor", "brand", "serial", "architecture", "cudaComputeCapability", "driverVersion"} & set(
        device.attributes
    )


def test_numa_node_comes_from_the_driver_where_sysfs_has_none(world: World) -> None:
    """Without a node in sysfs the driver's memory affinity counts."""
    uuid = world.gpu(0, node=-1, numa=3)
    assert looked(world)[uuid].numa == 3
    world.write(gpu0__numa=None)
    assert looked(world)[uuid].numa is None


# --- injection ------------------------------------------------------------------------------------


async def edited(made: NvidiaSource, devices: Sequence[Device]) -> ContainerEdits:
    return ContainerEdits.merge([device.container_edits for device in devices], winner=made.edits(devices))


async def test_env_names_the_devices_of_the_container_together(world: World) -> None:
    """Injection by env gives one variable with all UUIDs, and no nodes."""
    uuids = [world.gpu(index) for index in range(3)]
    made = source(world)
    edits = await edited(made, list(looked(world).values())[1::-1])  # as the kubelet does, in any order
    assert dict(edits.env) == {"NVIDIA_VISIBLE_DEVICES": ",".join(uuids[:2])}
    assert not edits.nodes
    assert not edits.cdi


async def test_nodes_give_the_gpus_and_what_all_of_them_need(world: World) -> None:
    """Injection by nodes gives each GPU's node once, the common ones that exist, and voids the runtime's variable."""
    for index in range(2):
        world.gpu(index)
    dev = Path(world.places.dev)
    for name in ("nvidiactl", "nvidia-uvm"):
        (dev / name).touch()
    made = source(world, injection="nodes")
    edits = await edited(made, list(looked(world, injection="nodes").values()))
    assert [node.path for node in edits.device_nodes] == [
        "/dev/nvidia0",
        "/dev/nvidiactl",
        "/dev/nvidia-uvm",
        "/dev/nvidia1",
    ]
    assert edits.device_nodes[0].host == f"{dev}/nvidia0"
    assert edits.env["NVIDIA_VISIBLE_DEVICES"] == "void"


def test_partitions_nodes_are_their_gpus_and_their_capabilities(world: World) -> None:
    """A partition by nodes is the GPU's node and the two capabilities that proc names."""
    world.gpu(0)
    part = world.partition(0, 0, "3g.20gb", instance=2)
    base = Path(world.places.proc) / "driver/nvidia/capabilities/gpu0/mig/gi2"
    (base / "ci0").mkdir(parents=True)
    (base / "access").write_text("DeviceFileMinor: 21\nDeviceFileMode: 292\n")
    (base / "ci0/access").write_text("DeviceFileMinor: 22\nDeviceFileMode: 292\n")
    device = looked(world, mig="single", injection="nodes")[part]
    assert [node.path for node in device.container_edits.device_nodes] == [
        "/dev/nvidia-caps/nvidia-cap22",
        "/dev/nvidia0",
        "/dev/nvidia-caps/nvidia-cap21",
    ]


async def test_cdi_takes_the_name_that_a_spec_has(world: World, until: Until) -> None:
    """Injection by CDI uses the UUID or index that a spec names, and waits for a spec that is not there yet."""
    first, second = world.gpu(0), world.gpu(1)
    cdi = Path(world.places.cdi[0])
    async with closing(source(world, injection="cdi")) as lists:
        devices = await until(lists, len)
        assert set(healths(devices)) == {Health.UNHEALTHY}
        assert "nvidia-ctk cdi generate" in devices[first].message
        (cdi / "other.json").write_text(json.dumps({"kind": "example.com/x", "devices": [{"name": "0"}]}))
        spec = {"cdiVersion": "0.6.0", "kind": "nvidia.com/gpu", "devices": [{"name": first}, {"name": "1"}]}
        (cdi / "nvidia.json").write_text(json.dumps(spec))
        devices = await until(lists, lambda found: set(healths(found)) == {Health.HEALTHY})
        assert devices[first].edits.cdi == (f"nvidia.com/gpu={first}",)
        assert devices[second].edits.cdi == ("nvidia.com/gpu=1",)
        (cdi / "nvidia.json").unlink()
        (cdi / "nvidia.yaml").write_text("kind: nvidia.com/gpu\ndevices:\n- name: gpu0\n- {name: gpu1}\n")
        devices = await until(lists, lambda found: found[first].edits.cdi == ("nvidia.com/gpu=gpu0",))
        (cdi / "nvidia.yaml").write_text("kind: nvidia.com/gpu\ndevices: [{]")
        await until(lists, lambda found: set(healths(found)) == {Health.UNHEALTHY})


# --- partitions -----------------------------------------------------------------------------------


def test_partition_is_described_with_parent_and_placement(world: World) -> None:
    """A partition tells its profile, its GPU, its instances and its place on it."""
    gpu = world.gpu(0, node=1)
    part = world.partition(0, 2, "2g.10gb")
    device = looked(world, mig="single")[part]
    told = {name: device.attributes[name] for name in device.attributes}
    assert told["type"] == "mig"
    assert (told["profile"], told["parentUUID"], told["parentIndex"]) == ("2g.10gb", gpu, 0)
    assert (told["gpuInstance"], told["computeInstance"]) == (3, 0)
    assert (told["placementStart"], told["placementSize"]) == (2, 2)
    assert device.numa == 1
    assert device.capacity == {"memory": "10140Mi"}
    assert not list(naming.problems(device, "gpu.example.com"))


@pytest.mark.parametrize(
    ("compute", "slices", "memory", "whole", "profile"),
    [
        (1, 1, 4864, 40960, "1g.5gb"),
        (2, 2, 9856, 40960, "2g.10gb"),
        (3, 3, 19968, 40960, "3g.20gb"),
        (1, 3, 19968, 40960, "1c.3g.20gb"),
        (7, 7, 40192, 40960, "7g.40gb"),
        (1, 1, 9728, 81920, "1g.10gb"),
        (4, 4, 40192, 81920, "4g.40gb"),
        (1, 1, 5952, 24576, "1g.6gb"),
    ],
)
def test_profile_is_named_as_users_know_it(compute: int, slices: int, memory: int, whole: int, profile: str) -> None:
    """Where the driver's name for a partition has no profile, slices and memory give it."""
    assert profile_of(compute, slices, memory, whole) == profile


def test_older_drivers_partitions_get_their_profile_from_their_size(world: World) -> None:
    """A driver that does not name the profile still leads to the right resource."""
    world.gpu(0)
    part = world.partition(0, 0, "1g.5gb")
    world.write(gpu0__mig0__name="A100-SXM4-40GB")
    assert looked(world, mig="single")[part].attributes["profile"] == "1g.5gb"


def test_without_mig_a_partitioned_gpu_is_given_out_whole_and_that_is_told(world: World) -> None:
    """mig: none lists the GPU although it is in MIG mode, with a note."""
    uuid = world.gpu(0)
    world.partition(0, 0, "1g.5gb")
    made = source(world)
    session = Session(world.places)
    made.update(session.scan())
    assert [device.id for device in made.devices()] == [uuid]
    assert made.notes == ("GPU 0 is in MIG mode and given out whole; see mig: single and mixed",)
    session.close()


def test_single_gives_nothing_out_of_unequal_partitions(world: World) -> None:
    """mig: single with two profiles, or with a whole GPU, shows everything unhealthy and says why."""
    world.gpu(0)
    world.partition(0, 0, "1g.5gb")
    world.partition(0, 1, "3g.20gb")
    devices = looked(world, mig="single")
    assert set(healths(devices)) == {Health.UNHEALTHY}
    assert "1g.5gb and 3g.20gb" in next(iter(devices.values())).message
    world.write(gpu0__mig1__uuid=None)
    world.gpu(1)
    devices = looked(world, mig="single")
    assert [(d.health, "not" in d.message) for d in devices.values()] == [(Health.UNHEALTHY, True)] * 2
    world.partition(1, 0, "1g.5gb")
    assert healths(looked(world, mig="single")) == [Health.HEALTHY] * 2


def test_mixed_keeps_whole_gpus_and_leaves_partitions_to_their_profiles(world: World) -> None:
    """mig: mixed lists GPUs without MIG mode; a profile lists its partitions."""
    world.gpu(0)
    whole = world.gpu(1)
    small, large = world.partition(0, 0, "1g.5gb"), world.partition(0, 1, "3g.20gb")
    assert set(looked(world, mig="mixed")) == {whole}
    assert set(looked(world, profile="1g.5gb")) == {small}
    assert set(looked(world, mig="mixed", profile="3g.20gb")) == {large}


async def test_mixed_brings_a_resource_for_each_profile_along(world: World) -> None:
    """A mixed entry's branches are named as users know them, also for a profile that is made later."""
    world.gpu(0)
    world.partition(0, 0, "1g.5gb")
    text = f"""
        resources:
        - name: nvidia.com/gpu
          devices: [{{nvidia: {{mig: mixed, library: {world.places.library}}}}}]
          health: {{period: 1}}
    """
    built = sources.ConfiguredSource(config.parse(text).resources[0])
    entry = built.entries[0]
    assert isinstance(entry, NvidiaSource)
    entry._places = world.places
    async with asyncio.timeout(20), aclosing(cast("Any", built.watch())) as lists:
        await anext(lists)
        child_sources: Any = built.child_sources()
        assert [branch.resource for branch in await anext(child_sources)] == ["nvidia.com/mig-1g.5gb"]
        world.partition(0, 1, "1g.5gb+me")
        world.xid(0, -1)
        found = await anext(child_sources)
        assert [branch.resource for branch in found] == ["nvidia.com/mig-1g.5gb", "nvidia.com/mig-1g.5gb.me"]
        assert found[1].entries[0].wanted.profile == "1g.5gb+me"
        await child_sources.aclose()


async def test_partitions_come_and_go_with_an_event(world: World, until: Until) -> None:
    """A change of partitions is seen when the driver tells of it, long before the next look is due."""
    world.gpu(0)
    first = world.partition(0, 0, "1g.5gb")
    async with closing(source(world, mig="single", period=3600)) as lists:
        await until(lists, lambda found: set(found) == {first})
        second = world.partition(0, 1, "1g.5gb")
        world.xid(0, -1)
        await until(lists, lambda found: set(found) == {first, second})
        world.set("gpu0.mig0.uuid", None)
        world.write()
        world.xid(0, -1)
        await until(lists, lambda found: set(found) == {second})


# --- links ----------------------------------------------------------------------------------------


def score(one: int, other: int, uuids: list[str], links: dict[frozenset[str], float]) -> float:
    return links.get(frozenset((uuids[one], uuids[other])), 0.0)


def links_of(world: World, **options: Any) -> dict[frozenset[str], float]:
    session = Session(world.places)
    made = source(world, **options)
    made.update(session.scan())
    made.devices()
    session.close()
    return dict(made.links)


def test_links_of_a_dgx_1v_are_its_mesh(world: World) -> None:
    """Direct NVLinks are counted once, a hundred each, on top of the PCIe level."""
    uuids = worlds.dgx_1v(world)
    links = links_of(world)
    assert len(links) == 28
    for one in range(8):
        for other in range(8):
            if one != other:
                level = 10 if one // 4 != other // 4 else 20 if one // 2 != other // 2 else 50
                assert score(one, other, uuids, links) == 100 * DGX1V[one][other] + level


@pytest.mark.parametrize(
    ("machine", "count", "switch"), [(worlds.dgx_a100, 12, 40), (worlds.hgx_h100, 18, 20)], ids=["A100", "H100"]
)
def test_links_through_switches_reach_every_gpu(
    world: World, machine: Callable[[World], list[str]], count: int, switch: int
) -> None:
    """GPUs on NVSwitches are as close to each other as each has links to them."""
    uuids = machine(world)
    links = links_of(world)
    assert score(0, 1, uuids, links) == 100 * count + switch
    assert score(0, 2, uuids, links) == 100 * count + 20
    assert score(0, 7, uuids, links) == 100 * count + 10


def test_partitions_of_one_gpu_are_on_one_board_and_know_no_nvlink(world: World) -> None:
    """Between partitions only the PCIe level counts, 60 within a GPU."""
    worlds.dgx_a100(world)
    parts = [world.partition(gpu, index, "1g.5gb") for gpu in (0, 1) for index in (0, 1)]
    links = links_of(world, profile="1g.5gb")
    assert score(0, 1, parts, links) == 60
    assert score(0, 2, parts, links) == 40


async def test_links_are_read_once_for_a_discovery(world: World, until: Until) -> None:
    """Later looks ask for no links; a GPU more makes them be read again."""
    worlds.dgx_1v(world)
    made = source(world)
    async with closing(made) as lists:
        await until(lists, lambda found: len(found) == 8)
        before = calls("nvmlDeviceGetNvLinkState"), calls("nvmlDeviceGetTopologyCommonAncestor")
        assert before[0] >= 8 * 18
        assert before[1] == 28
        looks = calls("nvmlDeviceGetMemoryInfo")
        world.write(gpu0__return__nvmlDeviceGetTemperature=999)
        await until(lists, lambda found: Health.UNKNOWN in healths(found))
        assert calls("nvmlDeviceGetMemoryInfo") > looks
        assert (calls("nvmlDeviceGetNvLinkState"), calls("nvmlDeviceGetTopologyCommonAncestor")) == before
        world.gpu(8)
        world.link(7, 8, 4)
        world.write()
        found = await until(lists, lambda found: len(found) == 9)
        last = list(found)[7:]
        assert made.links[frozenset(last)] == 400


def test_a_gpu_without_links_costs_the_others_nothing(world: World) -> None:
    """Where a GPU tells no links and no levels it has no scores, and the look is as good."""
    uuids = worlds.dgx_1v(world)
    world.set("gpu3.return.nvmlDeviceGetNvLinkState", 3)
    world.set("gpu3.return.nvmlDeviceGetTopologyCommonAncestor", 999)
    world.write()
    links = links_of(world)
    assert score(0, 4, uuids, links) == 210
    assert score(3, 7, uuids, links) == 100  # the other end tells of it


# --- health ---------------------------------------------------------------------------------------


async def test_xid_makes_its_gpu_unhealthy_at_once_and_quiet_makes_it_healthy_again(world: World, until: Until) -> None:
    """A critical XID is seen by its event, the other GPU stays, and the GPU recovers after a quiet time."""
    first, second = world.gpu(0), world.gpu(1)
    now = 0.0
    made = source(world, rules=HealthRules(failures=3, successes=2, quiet=300), clock=lambda: now)
    async with closing(made) as lists:
        await until(lists, lambda found: healths(found) == [Health.HEALTHY] * 2)
        world.xid(0, 79)
        found = await until(lists, lambda found: found[first].health is Health.UNHEALTHY)
        assert found[first].message == "XID 79"
        assert found[second].health is Health.HEALTHY
        now = 299.0
        world.xid(1, 48)
        found = await until(lists, lambda found: found[second].health is Health.UNHEALTHY)
        assert found[first].health is Health.UNHEALTHY
        now = 300.0
        found = await until(lists, lambda found: found[first].health is Health.HEALTHY)
        assert found[second].health is Health.UNHEALTHY


async def test_application_xids_are_counted_but_not_held_against_the_gpu(world: World, until: Until) -> None:
    """Ignored XIDs leave the health as it is; which ones are ignored can be said."""
    first = world.gpu(0)
    made = source(world, ignore_xids=(13, 79), rules=HealthRules(quiet=None))
    async with closing(made) as lists:
        devices = await until(lists, len)
        for code in (13, 79, 13, 31):  # 31 is not ignored here
            world.xid(0, code)
        found = await until(lists, lambda found: found[first].health is Health.UNHEALTHY)
        assert found[first].message == "XID 31"
        measured = await made.measure(list(devices.values()))
        assert measured[first]["xid_errors_total"] == {"13": 2, "79": 1, "31": 1}


def test_storm_of_xids_does_not_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """A thousand XIDs of a program in a loop are counted, and make ten lines."""
    made = NvidiaSource()
    made.update(NvmlScan((Gpu("GPU-0", 0),), {"GPU-0": (Verdict.GOOD, "")}))
    with caplog.at_level("INFO"):
        for _ in range(1000):
            made.update(Xid("GPU-0", 13))
    assert made.health.counts == {"GPU-0": {"13": 1000}}
    assert len([record for record in caplog.records if "XID 13" in record.getMessage()]) == 10


@pytest.mark.parametrize("code", [13, 31, 43, 45, 68, 109])
@pytest.mark.parametrize("configured", [False, True])
def test_xids_of_applications_are_ignored_by_default(code: int, configured: bool) -> None:
    """13, 31, 43, 45, 68 and 109 are what programs cause."""
    gpu = Gpu("GPU-0", 0)
    made: Any = NvidiaSource()
    if configured:
        text = "resources: [{name: nvidia.com/gpu, devices: [{nvidia: {}}]}]"
        (made,) = sources.ConfiguredSource(config.parse(text).resources[0]).entries
    made.update(NvmlScan((gpu,), {"GPU-0": (Verdict.GOOD, "")}))
    made.update(Xid("GPU-0", code))
    assert [device.health for device in made.devices()] == [Health.HEALTHY]
    made.update(Xid("GPU-0", 48))
    assert [device.health for device in made.devices()] == [Health.UNHEALTHY]


async def test_xid_of_a_partition_is_that_partitions_alone(world: World, until: Until) -> None:
    """An XID with instance ids hits those partitions, one without hits all of the GPU."""
    world.gpu(0)
    parts = [world.partition(0, index, "1g.5gb", instance=index + 1) for index in range(3)]
    async with closing(source(world, mig="single", rules=HealthRules(quiet=None))) as lists:
        await until(lists, len)
        world.xid(0, 94, 2, 0)
        found = await until(lists, lambda found: Health.UNHEALTHY in healths(found))
        assert healths(found) == [Health.HEALTHY, Health.UNHEALTHY, Health.HEALTHY]
        world.xid(0, 48)
        await until(lists, lambda found: healths(found) == [Health.UNHEALTHY] * 3)
    assert len(parts) == 3


async def test_xid_of_no_known_gpu_is_everybodys(world: World, until: Until) -> None:
    """An event without a device makes all GPUs unhealthy: one of them is, and which cannot be told."""
    for index in range(2):
        world.gpu(index)
    async with closing(source(world, rules=HealthRules(quiet=None))) as lists:
        await until(lists, len)
        world.xid(-1, 79)
        await until(lists, lambda found: healths(found) == [Health.UNHEALTHY] * 2)


async def test_no_events_is_not_unhealthy(world: World, until: Until) -> None:
    """A GPU that cannot register for events, or a driver without any, is healthy; it is noted."""
    first = world.gpu(0, events=0)
    second = world.gpu(1)
    world.write(gpu1__return__nvmlDeviceRegisterEvents=3)
    made = source(world)
    async with closing(made) as lists:
        found = await until(lists, len)
        assert healths(found) == [Health.HEALTHY] * 2
        assert len(made.notes) == 2
        world.set("gpu0.return.nvmlDeviceGetTemperature", 15)
        world.write()
        found = await until(lists, lambda found: found[first].health is Health.UNHEALTHY)
        assert found[second].health is Health.HEALTHY


async def test_lost_gpu_is_unhealthy_alone_and_stays_listed(world: World, until: Until) -> None:
    """A GPU that fell off the bus is unhealthy, the others are not, and it recovers when it answers again."""
    first, second, third = (world.gpu(index) for index in range(3))
    async with closing(source(world)) as lists:
        await until(lists, len)
        world.write(gpu1__lost=1)
        found = await until(lists, lambda found: Health.UNHEALTHY in healths(found))
        assert list(found) == [first, second, third]
        assert healths(found) == [Health.HEALTHY, Health.UNHEALTHY, Health.HEALTHY]
        assert found[second].message == "it has fallen off the bus"
        assert found[second].attributes[PCI_BUS_ID] == "0000:08:00.0"
        world.write(gpu1__lost=None)
        await until(lists, lambda found: healths(found) == [Health.HEALTHY] * 3)


async def test_xids_of_the_others_are_heard_while_a_gpu_is_lost(world: World, until: Until) -> None:
    """Waiting fails as long as a lost GPU is registered; the others' events are heard all the same, and the lost
    one's own again once it is back.
    """
    first, second = world.gpu(0), world.gpu(1)
    async with closing(source(world, rules=HealthRules(failures=1, successes=1, quiet=None))) as lists:
        await until(lists, len)
        world.set("return.nvmlEventSetWait_v2", 15)
        world.write(gpu0__lost=1)
        await until(lists, lambda found: found[first].health is Health.UNHEALTHY)
        world.write(return__nvmlEventSetWait_v2=None)
        world.xid(1, 48)
        await until(lists, lambda found: found[second].message == "XID 48")
        world.write(gpu0__lost=None)
        await until(lists, lambda found: found[first].health is Health.HEALTHY)
        world.xid(0, 63)
        await until(lists, lambda found: found[first].message == "XID 63")


async def test_events_that_always_fail_are_given_up(world: World, until: Until) -> None:
    """Where waiting for events fails again and again it is noted, and looking goes on at its period."""
    uuid = world.gpu(0)
    world.write(return__nvmlEventSetWait_v2=999)
    made = source(world)
    async with closing(made) as lists:
        await until(lists, len)
        # In time: each failure has a look follow, half a second later.
        async with asyncio.timeout(20):
            while not any("events fail" in note for note in made.notes):
                world.write(gpu0__return__nvmlDeviceGetTemperature=999)
                await until(lists, lambda found: found[uuid].health is Health.UNKNOWN)
                world.write(gpu0__return__nvmlDeviceGetTemperature=None)
                await until(lists, lambda found: found[uuid].health is Health.HEALTHY)
        waits = calls("nvmlEventSetWait_v2")
        world.write(gpu0__lost=1)
        await until(lists, lambda found: found[uuid].health is Health.UNHEALTHY)
        assert calls("nvmlEventSetWait_v2") <= waits + 1  # what was left in the old set


async def test_unexpected_error_of_a_look_is_not_the_gpus(
    world: World, until: Until, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An error in this code makes health unknown, is logged, and the next look is made."""
    uuid = world.gpu(0)
    async with closing(source(world)) as lists:
        await until(lists, len)
        with monkeypatch.context() as patch:
            patch.setattr(Session, "_check", lambda *_: 1 / 0)
            found = await until(lists, lambda found: found[uuid].health is Health.UNKNOWN)
            assert found[uuid].message == "ZeroDivisionError: division by zero"
        await until(lists, lambda found: found[uuid].health is Health.HEALTHY)
    assert "the scan of the GPUs failed" in caplog.text


def test_missing_python_package_is_said(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without nvidia-ml-py the advice is how to install it."""
    import sys

    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "pynvml", None)
        with pytest.raises(NvmlError, match=r"pip install '.\[nvidia\]'"):
            Session(world.places).scan()


@pytest.mark.parametrize("function", ["nvmlDeviceGetCount_v2", "nvmlInitWithFlags"])
async def test_library_that_fails_as_a_whole_is_tried_again(world: World, until: Until, function: str) -> None:
    """An error of all of NVML changes what is known of the GPUs, not that they are listed, and passes."""
    uuid = world.gpu(0)
    async with closing(source(world)) as lists:
        await until(lists, len)
        world.set(f"return.{function}", 999)
        world.write(return__nvmlDeviceGetHandleByIndex_v2=1)  # NVML was shut down: it is initialized anew
        found = await until(lists, lambda found: found[uuid].health is not Health.HEALTHY)
        assert found[uuid].message
        world.set(f"return.{function}", None)
        world.write(return__nvmlDeviceGetHandleByIndex_v2=None)
        await until(lists, lambda found: found[uuid].health is Health.HEALTHY)


async def test_driver_without_events_is_looked_at_alone(world: World, until: Until) -> None:
    """Where no event set can be made it is noted, and lost GPUs are found by looking."""
    uuid = world.gpu(0)
    world.write(return__nvmlEventSetCreate=3)
    made = source(world)
    async with closing(made) as lists:
        found = await until(lists, len)
        assert found[uuid].health is Health.HEALTHY
        assert made.notes == ("the driver has no events, so XIDs are not received",)
        world.write(gpu0__lost=1)
        await until(lists, lambda found: found[uuid].health is Health.UNHEALTHY)


def test_gpu_that_was_lost_from_the_start_is_noted(world: World) -> None:
    """A GPU that never could be read has no identity to be listed by; the others are, and a note tells of it."""
    world.gpu(0, lost=1)
    second = world.gpu(1)
    session = Session(world.places)
    look = session.scan()
    session.close()
    assert [gpu.uuid for gpu in look.gpus] == [second]
    assert look.notes[0].startswith("GPU 0 cannot be read")


def test_partition_of_which_nothing_is_known_is_listed_all_the_same(world: World) -> None:
    """A driver that tells neither name nor size of a partition leaves its profile unknown."""
    world.gpu(0)
    part = world.partition(0, 0, "1g.5gb")
    for function in ("Attributes_v2", "Name", "GpuInstanceId", "ComputeInstanceId"):
        world.set(f"return.nvmlDeviceGet{function}", 3)
    world.write()
    device = looked(world, mig="single")[part]
    assert device.attributes["profile"] == "unknown"
    assert device.health is Health.HEALTHY
    assert not list(naming.problems(device, "gpu.example.com"))


def test_partitions_cdi_names_are_those_of_the_spec(world: World) -> None:
    """Specs name partitions by UUID, by their place (0:1), or by a word and their place."""
    world.gpu(0)
    parts = [world.partition(0, index, "1g.5gb") for index in range(3)]
    names = [parts[0], "0:1", "mig0:2"]
    spec = {"kind": "nvidia.com/gpu", "devices": [{"name": name} for name in names]}
    (Path(world.places.cdi[0]) / "nvidia.json").write_text(json.dumps(spec))
    devices = looked(world, mig="single", injection="cdi")
    assert [devices[part].edits.cdi for part in parts] == [(f"nvidia.com/gpu={name}",) for name in names]


async def test_recovery_that_the_driver_asks_for_is_unhealthy(world: World, until: Until) -> None:
    """A GPU of which the driver says that it needs a reset is withdrawn until it was reset."""
    field = "gpu0.field230"
    world.gpu(0)
    async with closing(source(world)) as lists:
        await until(lists, lambda found: healths(found) == [Health.HEALTHY])
        world.set(field, 1)
        world.write()
        found = await until(lists, lambda found: healths(found) == [Health.UNHEALTHY])
        assert "reset" in next(iter(found.values())).message
        world.set(field, 5)
        world.write()
        await until(lists, lambda found: healths(found) == [Health.HEALTHY])
        world.set(field, 99)
        world.write()
        await until(lists, lambda found: healths(found) == [Health.UNKNOWN])


async def test_error_that_says_nothing_makes_health_unknown(world: World, until: Until) -> None:
    """An unknown error is not a broken GPU: its health is unknown, and it is still offered."""
    world.gpu(0)
    async with closing(source(world)) as lists:
        await until(lists, len)
        world.write(gpu0__return__nvmlDeviceGetMemoryInfo=999)
        found = await until(lists, lambda found: healths(found) == [Health.UNKNOWN])
        assert next(iter(found.values())).health.usable


# --- coming and going -----------------------------------------------------------------------------


async def test_gpu_that_is_plugged_in_is_found_and_one_that_is_pulled_leaves(world: World, until: Until) -> None:
    """Hot plug needs no restart: the library is initialized anew when proc lists other GPUs."""
    first = world.gpu(0)
    async with closing(source(world, period=3600)) as lists:
        await until(lists, lambda found: set(found) == {first})
        second = world.gpu(1)
        (Path(world.places.dev) / "hint").touch()
        await until(lists, lambda found: set(found) == {first, second})
        world.unplug(1)
        await until(lists, lambda found: set(found) == {first})


async def test_library_that_is_not_there_yet_is_waited_for(
    tmp_path: Path, world: World, library: Path, until: Until
) -> None:
    """Without the library there are no devices and a note; when it comes there are."""
    path = tmp_path / "later" / "libnvidia-ml.so.1"
    path.parent.mkdir()
    uuid = world.gpu(0)
    places = nvidia.Places(str(path), world.places.sysfs, world.places.proc, world.places.dev, world.places.cdi)
    made = source(world, places=places)
    async with closing(made) as lists:
        assert await until(lists, lambda found: True) == {}
        assert "is not there" in made.notes[0]
        os.link(library, path)
        await until(lists, lambda found: set(found) == {uuid})
        assert made.notes == ()


async def test_driver_that_is_not_loaded_is_waited_for(world: World, until: Until) -> None:
    """While the driver is away its GPUs are unhealthy, and healthy again when it is back."""
    uuid = world.gpu(0)
    async with closing(source(world)) as lists:
        await until(lists, len)
        world.set("return.nvmlDeviceGetCount_v2", 9)
        world.set("return.nvmlInitWithFlags", 9)
        world.write()
        found = await until(lists, lambda found: found[uuid].health is Health.UNHEALTHY)
        assert found[uuid].message == "the NVIDIA driver is not loaded"
        world.set("return.nvmlDeviceGetCount_v2", None)
        world.set("return.nvmlInitWithFlags", None)
        world.write()
        await until(lists, lambda found: found[uuid].health is Health.HEALTHY)


async def test_replaced_driver_is_followed_with_its_new_library(tmp_path: Path, world: World, until: Until) -> None:
    """After an upgrade of the driver the new library is loaded in place of the old one, without a restart."""
    unload()
    library = build(tmp_path)
    uuid = world.gpu(0)
    places = nvidia.Places(str(library), world.places.sysfs, world.places.proc, world.places.dev, world.places.cdi)
    async with closing(source(world, places=places)) as lists:
        found = await until(lists, len)
        assert found[uuid].attributes["driverVersion"] == "535.104.5"
        world.set("return.nvmlDeviceGetCount_v2", 18)
        world.write(driver="550.54.14")
        found = await until(lists, lambda found: found[uuid].health is Health.UNHEALTHY)
        assert found[uuid].message == "the NVIDIA driver was replaced"
        build(tmp_path, "550.54.14")
        world.set("return.nvmlDeviceGetCount_v2", None)
        world.write()
        found = await until(lists, lambda found: found[uuid].health is Health.HEALTHY)
        assert found[uuid].attributes["driverVersion"] == "550.54.14"


async def test_hanging_library_blocks_nobody_and_is_given_up_after_its_time(
    world: World, until: Until, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a call hangs the loop runs on, health is unknown, no second call is begun, and all is well after."""
    monkeypatch.setattr(driver, "SCAN_TIMEOUT", 0.2)
    world.gpu(0)
    made = source(world)
    async with closing(made) as lists:
        devices = await until(lists, lambda found: healths(found) == [Health.HEALTHY])
        world.write(hang__nvmlDeviceGetMemoryInfo=1)
        found = await until(lists, lambda found: healths(found) == [Health.UNKNOWN])
        assert "did not answer" in next(iter(found.values())).message
        await until(lists, lambda found: "hangs" in next(iter(found.values())).message)
        with pytest.raises(NvmlError, match="hangs"):
            await made.measure(list(devices.values()))
        world.write(hang__nvmlDeviceGetMemoryInfo=None)
        await until(lists, lambda found: healths(found) == [Health.HEALTHY])


async def test_two_sources_share_one_thread_and_one_look(world: World, until: Until) -> None:
    """Sources of one loop listen to one driver; when the last one ends, the library is let go."""
    import threading

    world.gpu(0)
    async with closing(source(world, period=3600)) as one:
        await until(one, len)
        looks = calls("nvmlDeviceGetCount_v2")
        async with closing(source(world, profile="1g.5gb", period=3600)) as other:
            assert await until(other, lambda found: True) == {}
            assert sum(thread.name == "nvml" for thread in threading.enumerate()) == 1
        assert calls("nvmlDeviceGetCount_v2") == looks


# --- measuring ------------------------------------------------------------------------------------


async def test_measure_tells_what_the_gpu_tells_in_base_units(world: World, until: Until) -> None:
    """Load, memory, temperature, power, energy, clocks, throttling, ECC, PCIe and NVLink are in base units."""
    import pynvml

    world.gpu(
        0, used=1024, util=50, util_memory=25, encoder=10, decoder=20, temp=65, power=250500, power_limit=400000,
        energy=5000, throttle=0x44, clock0=1410, clock1=1410, clock2=1215, clock3=1275, ecc_corrected=3,
        ecc_uncorrected=0, pcie_tx=7, pcie_rx=9, replays=2, fan=30,
    )  # fmt: skip
    world.set(f"gpu0.field{pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX}", 4)
    world.set(f"gpu0.field{pynvml.NVML_FI_DEV_MEMORY_TEMP}", 70)
    world.write()
    made = source(world, period=3600)
    async with closing(made) as lists:
        devices = await until(lists, len)
        measured = await made.measure(list(devices.values()))
    from deviceplugin.metrics.load import QUANTITIES, checked

    values = dict(checked(measured, list(devices.values())))[next(iter(devices))]
    assert set(values) <= set(QUANTITIES)
    assert values == {
        "utilization_ratio": 0.5,
        "memory_utilization_ratio": 0.25,
        "encoder_utilization_ratio": 0.1,
        "decoder_utilization_ratio": 0.2,
        "memory_used_bytes": 1 << 30,
        "memory_total_bytes": 40 << 30,
        "temperature_celsius": {"gpu": 65, "memory": 70},
        "power_watts": 250.5,
        "power_limit_watts": 400.0,
        "energy_joules_total": 5.0,
        "clock_hertz": {"graphics": 1.41e9, "sm": 1.41e9, "memory": 1.215e9, "video": 1.275e9},
        "throttled": {
            "sw_power_cap": 1,
            "hw_slowdown": 0,
            "sync_boost": 0,
            "sw_thermal": 0,
            "hw_thermal": 1,
            "hw_power_brake": 0,
        },
        "ecc_errors_total": {"corrected": 3, "uncorrected": 0},
        "pcie_bytes_per_second": {"transmit": 7000, "receive": 9000},
        "pcie_replays_total": 2,
        "nvlink_bytes_total": {"transmit": 4096},
        "fan_ratio": 0.3,
    }


async def test_what_cannot_be_measured_is_absent(world: World, until: Until) -> None:
    """A GPU that supports little, a partition and a lost GPU give what they have, and no zeros."""
    from deviceplugin.metrics.load import checked

    little = world.gpu(0)
    lost = world.gpu(1)
    made = source(world)
    async with closing(made) as lists:
        devices = await until(lists, len)
        world.write(gpu1__lost=1)
        await until(lists, lambda found: Health.UNHEALTHY in healths(found))
        values = checked(await made.measure(list(devices.values())), list(devices.values()))
        assert values[little].keys() == {"memory_used_bytes", "memory_total_bytes", "temperature_celsius"}
        assert lost not in values
    part = world.partition(0, 0, "1g.5gb")
    world.set("gpu0.mig0.used", 10)
    world.write()
    made = source(world, mig="single")
    async with closing(made) as lists:
        devices = await until(lists, len)
        assert (await made.measure(list(devices.values())))[part]["memory_used_bytes"] == 10 << 20


# --- the fake itself ------------------------------------------------------------------------------


def test_library_is_found_by_its_name_where_it_is_loaded(world: World, library: Path) -> None:
    """Without a path the library is taken by name, as pynvml would."""
    loaded = ctypes.CDLL(str(library))
    uuid = world.gpu(0)
    session = Session(replace(world.places, library=""))
    try:
        assert [gpu.uuid for gpu in session.scan().gpus] == [uuid]
    finally:
        session.close()
    assert loaded.fake_calls(b"nvmlInitWithFlags") > 0
