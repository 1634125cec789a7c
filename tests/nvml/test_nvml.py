"""The NVIDIA source, through the real ctypes calls, against a fake library in C."""

from __future__ import annotations

import _ctypes
import asyncio
import contextlib
import ctypes
import json
import logging
import os
import re
import shutil
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
from tests.nvml import gpus as machines
from tests.nvml.conftest import Until, unload
from tests.nvml.gpus import DGX1V, FakeGpus, build

QUICK = HealthRules(failures=1, successes=1, quiet=0.0)


def source(gpus: FakeGpus, **options: Any) -> NvidiaSource:
    wanted = NvidiaConfig(**{name: options.pop(name) for name in NvidiaConfig.__struct_fields__ if name in options})
    return NvidiaSource(wanted, **{"places": gpus.places, "period": 0.05, "rules": QUICK, **options})


def once(gpus: FakeGpus, **options: Any) -> NvidiaSource:
    """Return a source that has scanned once, without an event loop."""
    made = source(gpus, **options)
    with contextlib.closing(Session(gpus.places)) as session:
        made.update(session.scan())
    return made


def looked(gpus: FakeGpus, **options: Any) -> dict[str, Device]:
    """Return the devices of one scan."""
    return {device.id: device for device in once(gpus, **options).devices()}


def calls(function: str) -> int:
    """Return how often the library's function was called."""
    import pynvml  # type: ignore[import-untyped]

    return cast("int", pynvml.nvmlLib.fake_calls(function.encode()))


def closing(made: NvidiaSource) -> Any:
    return aclosing(cast("Any", made.watch()))


def healths(devices: dict[str, Device]) -> list[Health]:
    return [device.health for device in devices.values()]


# --- what a device is -----------------------------------------------------------------------------


def test_gpu_is_described_by_what_claims_select_on(gpus: FakeGpus) -> None:
    """A GPU has the attributes on which claims select: UUID, PCI address and root, product, versions and others."""
    uuid = gpus.gpu(1, node=1)
    gpus.write(gpu0__return__nvmlDeviceGetHandleByIndex_v2=999)
    device = looked(gpus)[uuid]
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


def test_what_a_gpu_does_not_support_is_left_out_and_not_unhealthy(gpus: FakeGpus) -> None:
    """NOT_SUPPORTED, NO_PERMISSION and FUNCTION_NOT_FOUND leave an attribute out; the GPU is healthy."""
    uuid = gpus.gpu(0)
    for code, functions in {
        3: ("MinorNumber", "Brand", "Temperature", "SupportedEventTypes", "FieldValues", "MigMode"),
        4: ("Serial", "Architecture", "CudaComputeCapability"),
        13: ("MemoryInfo",),
    }.items():
        for function in functions:
            gpus.set(f"return.nvmlDeviceGet{function}", code)
    gpus.write(return__nvmlSystemGetDriverVersion=3)
    device = looked(gpus)[uuid]
    assert device.health is Health.HEALTHY
    assert device.capacity == {}
    assert not {"minor", "brand", "serial", "architecture", "cudaComputeCapability", "driverVersion"} & set(
        device.attributes
    )


def test_numa_node_comes_from_the_driver_where_sysfs_has_none(gpus: FakeGpus) -> None:
    """If sysfs has no NUMA node, the driver's memory affinity gives the node."""
    uuid = gpus.gpu(0, node=-1, numa=3)
    assert looked(gpus)[uuid].numa == 3
    gpus.write(gpu0__numa=None)
    assert looked(gpus)[uuid].numa is None


# --- injection ------------------------------------------------------------------------------------


async def edited(made: NvidiaSource, devices: Sequence[Device]) -> ContainerEdits:
    return ContainerEdits.merge([device.container_edits for device in devices], winner=made.edits(devices))


async def test_env_names_the_devices_of_the_container_together(gpus: FakeGpus) -> None:
    """Injection by env gives one variable with all UUIDs of the container, and no nodes."""
    uuids = [gpus.gpu(index) for index in range(3)]
    made = source(gpus)
    edits = await edited(made, list(looked(gpus).values())[1::-1])  # the kubelet gives them in any order
    assert dict(edits.env) == {"NVIDIA_VISIBLE_DEVICES": ",".join(uuids[:2])}
    assert not edits.nodes
    assert not edits.cdi


async def test_nodes_give_the_gpus_and_what_all_of_them_need(gpus: FakeGpus) -> None:
    """Injection by nodes gives the GPUs' nodes and existing common nodes, and turns NVIDIA's runtime off by `void`."""
    for index in range(2):
        gpus.gpu(index)
    dev = Path(gpus.places.dev)
    for name in ("nvidiactl", "nvidia-uvm"):
        (dev / name).touch()
    made = source(gpus, injection="nodes")
    edits = await edited(made, list(looked(gpus, injection="nodes").values()))
    assert [node.path for node in edits.device_nodes] == [
        "/dev/nvidia0",
        "/dev/nvidiactl",
        "/dev/nvidia-uvm",
        "/dev/nvidia1",
    ]
    assert edits.device_nodes[0].host == f"{dev}/nvidia0"
    assert edits.env["NVIDIA_VISIBLE_DEVICES"] == "void"


async def test_a_gpu_without_its_nodes_is_unhealthy(gpus: FakeGpus, until: Until) -> None:
    """A GPU whose device nodes are missing is unhealthy, with the path and the remedy, until the nodes exist."""
    name, dev = gpus.gpu(0), Path(gpus.places.dev)
    for missing in ("nvidiactl", "nvidia-uvm"):
        (device,) = looked(gpus, injection="nodes").values()
        assert device.health is Health.UNHEALTHY
        assert device.message.startswith(f"{dev}/{missing} is not there, and its container needs it; `nvidia-modprobe")
        (dev / missing).touch()
    assert looked(gpus, injection="nodes")[name].health is Health.HEALTHY
    assert looked(gpus, injection="env")[name].health is Health.HEALTHY
    (dev / "nvidia0").unlink()
    assert "nvidia0 is not there" in looked(gpus, injection="nodes")[name].message
    assert looked(gpus, injection="env")[name].health is Health.HEALTHY, "the runtime makes it"
    async with closing(source(gpus, injection="nodes")) as lists:
        assert not (await until(lists, lambda found: name in found))[name].health.usable
        (dev / "nvidia0").touch()
        await until(lists, lambda found: found[name].health is Health.HEALTHY)


def test_partitions_nodes_are_their_gpus_and_their_capabilities(gpus: FakeGpus) -> None:
    """Injection of a partition by nodes gives the GPU's node and the two capability nodes that proc names."""
    gpus.gpu(0)
    part = gpus.partition(0, 0, "3g.20gb", instance=2)
    base = Path(gpus.places.proc) / "driver/nvidia/capabilities/gpu0/mig/gi2"
    (base / "ci0").mkdir(parents=True)
    (base / "access").write_text("DeviceFileMinor: 21\nDeviceFileMode: 292\n")
    (base / "ci0/access").write_text("DeviceFileMinor: 22\nDeviceFileMode: 292\n")
    device = looked(gpus, mig="single", injection="nodes")[part]
    assert [node.path for node in device.container_edits.device_nodes] == [
        "/dev/nvidia-caps/nvidia-cap22",
        "/dev/nvidia0",
        "/dev/nvidia-caps/nvidia-cap21",
    ]
    assert f"{gpus.places.dev}/nvidia-caps/nvidia-cap22 is not there" in device.message
    shutil.rmtree(base)
    for name in ("nvidiactl", "nvidia-uvm"):
        (Path(gpus.places.dev) / name).touch()
    assert "names no device node of the partition" in looked(gpus, mig="single", injection="nodes")[part].message


async def test_cdi_takes_the_name_that_a_spec_has(gpus: FakeGpus, until: Until) -> None:
    """Injection by CDI uses the name that a spec has, UUID or index; without a spec the GPUs are unhealthy."""
    first, second = gpus.gpu(0), gpus.gpu(1)
    cdi = Path(gpus.places.cdi[0])
    async with closing(source(gpus, injection="cdi")) as lists:
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


def test_partition_is_described_with_parent_and_placement(gpus: FakeGpus) -> None:
    """A partition has its profile, its GPU, its instances and its placement as attributes."""
    gpu = gpus.gpu(0, node=1)
    part = gpus.partition(0, 2, "2g.10gb")
    device = looked(gpus, mig="single")[part]
    told = device.attributes
    assert told["type"] == "mig"
    assert (told["profile"], told["parentUUID"], told["parentIndex"]) == ("2g.10gb", gpu, 0)
    assert (told["gpuInstance"], told["computeInstance"]) == (3, 0)
    assert (told["placementStart"], told["placementSize"]) == (2, 2)
    assert device.numa == 1
    assert device.capacity == {"memory": "10140Mi"}
    assert not list(naming.problems(device, "gpu.example.com"))


def test_gpus_and_partitions_are_parts_of_the_gpus_node(gpus: FakeGpus) -> None:
    """A GPU's device node is a larger device of the GPU and its partitions, also before the node exists."""
    gpus.gpu(0)
    node = Path(gpus.places.dev) / "nvidia0"
    node.unlink()
    for mig in ("none", "single"):
        (before,) = looked(gpus, mig=mig).values()
        node.symlink_to("/dev/tty")
        (after,) = looked(gpus, mig=mig).values()
        node.unlink()
        assert "char:195:0" in before.part_of
        assert "char:5:0" in after.part_of
        gpus.partition(0, 0, "1g.5gb")


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
    """If the driver's name for a partition has no profile, slices and memory give the profile."""
    assert profile_of(compute, slices, memory, whole) == profile


def test_older_drivers_partitions_get_their_profile_from_their_size(gpus: FakeGpus) -> None:
    """An older driver's partition without a profile in its name gets the profile from its size."""
    gpus.gpu(0)
    part = gpus.partition(0, 0, "1g.5gb")
    gpus.write(gpu0__mig0__name="A100-SXM4-40GB")
    assert looked(gpus, mig="single")[part].attributes["profile"] == "1g.5gb"


def test_without_mig_a_partitioned_gpu_is_given_out_whole_and_that_is_told(gpus: FakeGpus) -> None:
    """mig: none lists a GPU in MIG mode as a whole, with a note."""
    uuid = gpus.gpu(0)
    gpus.partition(0, 0, "1g.5gb")
    made = once(gpus)
    assert [device.id for device in made.devices()] == [uuid]
    assert made.notes == ("GPU 0 is in MIG mode and offered whole; see mig: single and mixed",)


def test_single_gives_nothing_out_of_unequal_partitions(gpus: FakeGpus) -> None:
    """mig: single with two profiles, or beside a whole GPU, lists all as unhealthy with the reason."""
    gpus.gpu(0)
    gpus.partition(0, 0, "1g.5gb")
    gpus.partition(0, 1, "3g.20gb")
    devices = looked(gpus, mig="single")
    assert set(healths(devices)) == {Health.UNHEALTHY}
    assert "1g.5gb and 3g.20gb" in next(iter(devices.values())).message
    gpus.write(gpu0__mig1__uuid=None)
    gpus.gpu(1)
    devices = looked(gpus, mig="single")
    assert [(d.health, "not" in d.message) for d in devices.values()] == [(Health.UNHEALTHY, True)] * 2
    gpus.partition(1, 0, "1g.5gb")
    assert healths(looked(gpus, mig="single")) == [Health.HEALTHY] * 2


def test_mixed_keeps_whole_gpus_and_leaves_partitions_to_their_profiles(gpus: FakeGpus) -> None:
    """mig: mixed lists GPUs without MIG mode; an entry with a profile lists the partitions of that profile."""
    gpus.gpu(0)
    whole = gpus.gpu(1)
    small, large = gpus.partition(0, 0, "1g.5gb"), gpus.partition(0, 1, "3g.20gb")
    assert set(looked(gpus, mig="mixed")) == {whole}
    assert set(looked(gpus, profile="1g.5gb")) == {small}
    assert set(looked(gpus, mig="mixed", profile="3g.20gb")) == {large}


@pytest.mark.parametrize(
    ("profile", "resource"),
    [
        ("1g.24gb+me", "nvidia.com/mig-1g.24gb.me"),
        ("1g.24gb+me.all", "nvidia.com/mig-1g.24gb.me.all"),
        ("1g.24gb+gfx", "nvidia.com/mig-1g.24gb.gfx"),
        ("1g.24gb-me", "nvidia.com/mig-1g.24gb-me"),
        ("1c.2g.48gb+gfx", "nvidia.com/mig-1c.2g.48gb.gfx"),
    ],
)
def test_profiles_with_attributes(gpus: FakeGpus, profile: str, resource: str) -> None:
    """A profile's name may end in attributes as NVIDIA writes them; its resource has the name as in NVIDIA's plugin."""
    gpus.gpu(0)
    gpus.partition(0, 0, re.sub("[+-].*", "", profile))
    part = gpus.partition(0, 1, profile)
    assert nvidia.resource_of(profile) == resource.removeprefix("nvidia.com/")
    text = f"resources: [{{name: {resource}, devices: [{{nvidia: {{profile: {profile}}}}}]}}]"
    wanted = config.parse(text).resources[0].devices[0].nvidia
    assert wanted is not None
    assert set(looked(gpus, profile=wanted.profile)) == {part}


def test_profile_that_no_partition_has_is_told(gpus: FakeGpus) -> None:
    """A profile that no partition has gets a note with the profiles that partitions have."""
    gpus.gpu(0)
    made = once(gpus, profile="1g.5gb+me")
    assert (made.devices(), made.notes) == ([], ("no partition has the profile 1g.5gb+me; there are none",))
    gpus.partition(0, 0, "3g.20gb")
    gpus.partition(0, 1, "1g.5gb")
    made = once(gpus, profile="1g.5gb+me")
    assert (made.devices(), made.notes) == ([], ("no partition has the profile 1g.5gb+me; there are 1g.5gb, 3g.20gb",))
    gpus.partition(0, 2, "1g.5gb+me")
    made = once(gpus, profile="1g.5gb+me")
    assert (len(made.devices()), made.notes) == (1, ())


async def test_mixed_brings_a_resource_for_each_profile_along(gpus: FakeGpus) -> None:
    """mig: mixed has a child source nvidia.com/mig-PROFILE for each profile, also for a profile that comes later."""
    gpus.gpu(0)
    gpus.partition(0, 0, "1g.5gb")
    text = f"""
        resources:
        - name: nvidia.com/gpu
          devices: [{{nvidia: {{mig: mixed, library: {gpus.places.library}}}}}]
          health: {{period: 1}}
    """
    built = sources.ConfiguredSource(config.parse(text).resources[0])
    entry = built.entries[0]
    assert isinstance(entry, NvidiaSource)
    entry.places = gpus.places
    async with asyncio.timeout(20), aclosing(cast("Any", built.watch())) as lists:
        await anext(lists)
        child_sources: Any = built.child_sources()
        assert [branch.resource for branch in await anext(child_sources)] == ["nvidia.com/mig-1g.5gb"]
        gpus.partition(0, 1, "1g.5gb+me")
        gpus.xid(0, -1)
        found = await anext(child_sources)
        assert [branch.resource for branch in found] == ["nvidia.com/mig-1g.5gb", "nvidia.com/mig-1g.5gb.me"]
        assert found[1].entries[0].wanted.profile == "1g.5gb+me"
        await child_sources.aclose()


async def test_partitions_come_and_go_with_an_event(gpus: FakeGpus, until: Until) -> None:
    """An event of the driver brings a change of partitions at once, long before the next scan."""
    gpus.gpu(0)
    first = gpus.partition(0, 0, "1g.5gb")
    async with closing(source(gpus, mig="single", period=3600)) as lists:
        await until(lists, lambda found: set(found) == {first})
        second = gpus.partition(0, 1, "1g.5gb")
        gpus.xid(0, -1)
        await until(lists, lambda found: set(found) == {first, second})
        gpus.write(gpu0__mig0__uuid=None)
        gpus.xid(0, -1)
        await until(lists, lambda found: set(found) == {second})


# --- links ----------------------------------------------------------------------------------------


def score(one: int, other: int, uuids: list[str], links: dict[frozenset[str], float]) -> float:
    return links.get(frozenset((uuids[one], uuids[other])), 0.0)


def links_of(gpus: FakeGpus, **options: Any) -> dict[frozenset[str], float]:
    made = once(gpus, **options)
    made.devices()
    return dict(made.links)


def test_links_of_a_dgx_1v_are_its_mesh(gpus: FakeGpus) -> None:
    """Each direct NVLink counts 100, in addition to the score of the PCIe level."""
    uuids = machines.dgx_1v(gpus)
    links = links_of(gpus)
    assert len(links) == 28
    for one in range(8):
        for other in range(8):
            if one != other:
                level = 10 if one // 4 != other // 4 else 20 if one // 2 != other // 2 else 50
                assert score(one, other, uuids, links) == 100 * DGX1V[one][other] + level


@pytest.mark.parametrize(
    ("machine", "count", "switch"), [(machines.dgx_a100, 12, 40), (machines.hgx_h100, 18, 20)], ids=["A100", "H100"]
)
def test_links_through_switches_reach_every_gpu(
    gpus: FakeGpus, machine: Callable[[FakeGpus], list[str]], count: int, switch: int
) -> None:
    """GPUs on NVSwitches score 100 for each link to the switches."""
    uuids = machine(gpus)
    links = links_of(gpus)
    assert score(0, 1, uuids, links) == 100 * count + switch
    assert score(0, 2, uuids, links) == 100 * count + 20
    assert score(0, 7, uuids, links) == 100 * count + 10


def test_partitions_of_one_gpu_are_on_one_board_and_know_no_nvlink(gpus: FakeGpus) -> None:
    """Partitions get only the score of the PCIe level: 60 within one GPU."""
    machines.dgx_a100(gpus)
    parts = [gpus.partition(gpu, index, "1g.5gb") for gpu in (0, 1) for index in (0, 1)]
    links = links_of(gpus, profile="1g.5gb")
    assert score(0, 1, parts, links) == 60
    assert score(0, 2, parts, links) == 40


async def test_links_are_read_once_for_a_discovery(gpus: FakeGpus, until: Until) -> None:
    """Links are read once; later scans read none, except when there is another GPU."""
    machines.dgx_1v(gpus)
    made = source(gpus)
    async with closing(made) as lists:
        await until(lists, lambda found: len(found) == 8)
        before = calls("nvmlDeviceGetNvLinkState"), calls("nvmlDeviceGetTopologyCommonAncestor")
        assert before[0] >= 8 * 18
        assert before[1] == 28
        looks = calls("nvmlDeviceGetMemoryInfo")
        gpus.write(gpu0__return__nvmlDeviceGetTemperature=999)
        await until(lists, lambda found: Health.UNKNOWN in healths(found))
        assert calls("nvmlDeviceGetMemoryInfo") > looks
        assert (calls("nvmlDeviceGetNvLinkState"), calls("nvmlDeviceGetTopologyCommonAncestor")) == before
        gpus.gpu(8)
        gpus.link(7, 8, 4)
        gpus.write()
        found = await until(lists, lambda found: len(found) == 9)
        last = list(found)[7:]
        assert made.links[frozenset(last)] == 400


def test_a_gpu_without_links_costs_the_others_nothing(gpus: FakeGpus) -> None:
    """A GPU whose links cannot be read fails no scan; links that can be read from another GPU keep their scores."""
    uuids = machines.dgx_1v(gpus)
    gpus.set("gpu3.return.nvmlDeviceGetNvLinkState", 3)
    gpus.write(gpu3__return__nvmlDeviceGetTopologyCommonAncestor=999)
    links = links_of(gpus)
    assert score(0, 4, uuids, links) == 210
    assert score(3, 7, uuids, links) == 100  # the link is read from GPU 7


# --- health ---------------------------------------------------------------------------------------


async def test_xid_makes_its_gpu_unhealthy_at_once_and_quiet_makes_it_healthy_again(
    gpus: FakeGpus, until: Until
) -> None:
    """A critical XID makes its GPU alone unhealthy at once; the GPU recovers after the quiet time."""
    first, second = gpus.gpu(0), gpus.gpu(1)
    now = 0.0
    made = source(gpus, rules=HealthRules(failures=3, successes=2, quiet=300), clock=lambda: now)
    async with closing(made) as lists:
        await until(lists, lambda found: healths(found) == [Health.HEALTHY] * 2)
        gpus.xid(0, 79)
        found = await until(lists, lambda found: found[first].health is Health.UNHEALTHY)
        assert found[first].message == "XID 79"
        assert found[second].health is Health.HEALTHY
        now = 299.0
        gpus.xid(1, 48)
        found = await until(lists, lambda found: found[second].health is Health.UNHEALTHY)
        assert found[first].health is Health.UNHEALTHY
        now = 300.0
        found = await until(lists, lambda found: found[first].health is Health.HEALTHY)
        assert found[second].health is Health.UNHEALTHY


async def test_application_xids_are_counted_but_not_held_against_the_gpu(gpus: FakeGpus, until: Until) -> None:
    """Ignored XIDs are counted and leave the GPU healthy; `ignore_xids` in the config replaces the default ones."""
    first = gpus.gpu(0)
    made = source(gpus, ignore_xids=(13, 79), rules=HealthRules(quiet=None))
    async with closing(made) as lists:
        devices = await until(lists, len)
        for code in (13, 79, 13, 31):  # the last one is not ignored
            gpus.xid(0, code)
        found = await until(lists, lambda found: found[first].health is Health.UNHEALTHY)
        assert found[first].message == "XID 31"
        measured = await made.measure(list(devices.values()))
        assert measured[first]["xid_errors_total"] == {"13": 2, "79": 1, "31": 1}


def test_storm_of_xids_does_not_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """1,000 equal XIDs are counted, and give 10 log lines."""
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
    """XIDs 13, 31, 43, 45, 68 and 109, which programs cause, are ignored by default."""
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


async def test_xid_of_a_partition_is_that_partitions_alone(gpus: FakeGpus, until: Until) -> None:
    """An XID with instance ids makes that partition unhealthy; an XID without them, all partitions of the GPU."""
    gpus.gpu(0)
    parts = [gpus.partition(0, index, "1g.5gb", instance=index + 1) for index in range(3)]
    async with closing(source(gpus, mig="single", rules=HealthRules(quiet=None))) as lists:
        await until(lists, len)
        gpus.xid(0, 94, 2, 0)
        found = await until(lists, lambda found: Health.UNHEALTHY in healths(found))
        assert healths(found) == [Health.HEALTHY, Health.UNHEALTHY, Health.HEALTHY]
        gpus.xid(0, 48)
        await until(lists, lambda found: healths(found) == [Health.UNHEALTHY] * 3)
    assert len(parts) == 3


async def test_xid_of_no_known_gpu_is_everybodys(gpus: FakeGpus, until: Until) -> None:
    """An event without a known GPU makes all GPUs unhealthy."""
    for index in range(2):
        gpus.gpu(index)
    async with closing(source(gpus, rules=HealthRules(quiet=None))) as lists:
        await until(lists, len)
        gpus.xid(-1, 79)
        await until(lists, lambda found: healths(found) == [Health.UNHEALTHY] * 2)


async def test_no_events_is_not_unhealthy(gpus: FakeGpus, until: Until, caplog: pytest.LogCaptureFixture) -> None:
    """A GPU or a driver without events is healthy, with a note in the log; scans still find a lost GPU."""
    caplog.set_level(logging.INFO)
    first = gpus.gpu(0, events=0)
    second = gpus.gpu(1)
    gpus.write(gpu1__return__nvmlDeviceRegisterEvents=3)
    made = source(gpus)
    async with closing(made) as lists:
        found = await until(lists, len)
        assert healths(found) == [Health.HEALTHY] * 2
        assert len(made.notes) == 2
        assert [line for line in caplog.messages if line in made.notes] == list(made.notes)
        gpus.write(gpu0__return__nvmlDeviceGetTemperature=15)
        found = await until(lists, lambda found: found[first].health is Health.UNHEALTHY)
        assert found[second].health is Health.HEALTHY


async def test_lost_gpu_is_unhealthy_alone_and_stays_listed(gpus: FakeGpus, until: Until) -> None:
    """A GPU that has fallen off the bus is unhealthy and stays listed; it recovers when it answers again."""
    first, second, third = (gpus.gpu(index) for index in range(3))
    async with closing(source(gpus)) as lists:
        await until(lists, len)
        gpus.write(gpu1__lost=1)
        found = await until(lists, lambda found: Health.UNHEALTHY in healths(found))
        assert list(found) == [first, second, third]
        assert healths(found) == [Health.HEALTHY, Health.UNHEALTHY, Health.HEALTHY]
        assert found[second].message == "it has fallen off the bus"
        assert found[second].attributes[PCI_BUS_ID] == "0000:08:00.0"
        gpus.write(gpu1__lost=None)
        await until(lists, lambda found: healths(found) == [Health.HEALTHY] * 3)


async def test_xids_of_the_others_are_heard_while_a_gpu_is_lost(gpus: FakeGpus, until: Until) -> None:
    """While a GPU is lost, XIDs of other GPUs are still received; once the GPU is back, its own XIDs are, too."""
    first, second = gpus.gpu(0), gpus.gpu(1)
    async with closing(source(gpus, rules=HealthRules(failures=1, successes=1, quiet=None))) as lists:
        await until(lists, len)
        gpus.set("return.nvmlEventSetWait_v2", 15)
        gpus.write(gpu0__lost=1)
        await until(lists, lambda found: found[first].health is Health.UNHEALTHY)
        gpus.write(return__nvmlEventSetWait_v2=None)
        gpus.xid(1, 48)
        await until(lists, lambda found: found[second].message == "XID 48")
        gpus.write(gpu0__lost=None)
        await until(lists, lambda found: found[first].health is Health.HEALTHY)
        gpus.xid(0, 63)
        await until(lists, lambda found: found[first].message == "XID 63")


async def test_events_that_always_fail_are_given_up(gpus: FakeGpus, until: Until) -> None:
    """If waiting for events always fails, a note says so, and periodic scans go on."""
    uuid = gpus.gpu(0)
    gpus.write(return__nvmlEventSetWait_v2=999)
    made = source(gpus)
    async with closing(made) as lists:
        await until(lists, len)
        # Scans come before the end of the period: a scan follows each failed wait after 0.5 s.
        async with asyncio.timeout(20):
            while not any("events fail" in note for note in made.notes):
                gpus.write(gpu0__return__nvmlDeviceGetTemperature=999)
                await until(lists, lambda found: found[uuid].health is Health.UNKNOWN)
                gpus.write(gpu0__return__nvmlDeviceGetTemperature=None)
                await until(lists, lambda found: found[uuid].health is Health.HEALTHY)
        waits = calls("nvmlEventSetWait_v2")
        gpus.write(gpu0__lost=1)
        await until(lists, lambda found: found[uuid].health is Health.UNHEALTHY)
        assert calls("nvmlEventSetWait_v2") <= waits + 1  # one wait reads the old event set before it is freed


async def test_unexpected_error_of_a_look_is_not_the_gpus(
    gpus: FakeGpus, until: Until, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An unexpected exception in a scan is logged and makes the health unknown until the next good scan."""
    uuid = gpus.gpu(0)
    async with closing(source(gpus)) as lists:
        await until(lists, len)
        with monkeypatch.context() as patch:
            patch.setattr(Session, "check", lambda *_: 1 / 0)
            found = await until(lists, lambda found: found[uuid].health is Health.UNKNOWN)
            assert found[uuid].message == "ZeroDivisionError: division by zero"
        await until(lists, lambda found: found[uuid].health is Health.HEALTHY)
    assert "the scan of the GPUs failed" in caplog.text


def test_missing_python_package_is_said(gpus: FakeGpus, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without nvidia-ml-py the error says how to install it."""
    import sys

    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "pynvml", None)
        with pytest.raises(NvmlError, match=r"pip install '.\[nvidia\]'"):
            Session(gpus.places).scan()


@pytest.mark.parametrize(
    ("functions", "code", "message"),
    [
        (["nvmlDeviceGetCount_v2"], 999, ""),
        (["nvmlInitWithFlags"], 999, ""),
        (["nvmlDeviceGetCount_v2", "nvmlInitWithFlags"], 9, "the NVIDIA driver is not loaded"),
    ],
    ids=["count", "init", "not loaded"],
)
async def test_library_that_fails_as_a_whole_is_tried_again(
    gpus: FakeGpus, until: Until, functions: Sequence[str], code: int, message: str
) -> None:
    """An error of the whole library changes the GPUs' health only; they stay listed, and recover."""
    uuid = gpus.gpu(0)
    async with closing(source(gpus)) as lists:
        await until(lists, len)
        failing = {f"return__{function}": code for function in functions}
        if not message:
            failing["return__nvmlDeviceGetHandleByIndex_v2"] = 1  # NVML was shut down, and is initialized again
        gpus.write(**failing)
        found = await until(lists, lambda found: found[uuid].health is not Health.HEALTHY)
        assert found[uuid].message
        if message:
            assert (found[uuid].health, found[uuid].message) == (Health.UNHEALTHY, message)
        gpus.write(**dict.fromkeys(failing))
        await until(lists, lambda found: found[uuid].health is Health.HEALTHY)


async def test_driver_without_events_is_looked_at_alone(gpus: FakeGpus, until: Until) -> None:
    """A driver without event sets gets a note; scans find a lost GPU."""
    uuid = gpus.gpu(0)
    gpus.write(return__nvmlEventSetCreate=3)
    made = source(gpus)
    async with closing(made) as lists:
        found = await until(lists, len)
        assert found[uuid].health is Health.HEALTHY
        assert made.notes == ("the driver has no events, so XIDs are not received",)
        gpus.write(gpu0__lost=1)
        await until(lists, lambda found: found[uuid].health is Health.UNHEALTHY)


def test_gpu_that_was_lost_from_the_start_is_noted(gpus: FakeGpus) -> None:
    """A GPU that could never be read is not listed, and a note names it; the others are listed."""
    gpus.gpu(0, lost=1)
    second = gpus.gpu(1)
    with contextlib.closing(Session(gpus.places)) as session:
        look = session.scan()
    assert [gpu.uuid for gpu in look.gpus] == [second]
    assert look.notes[0].startswith("GPU 0 cannot be read")


def test_partition_of_which_nothing_is_known_is_listed_all_the_same(gpus: FakeGpus) -> None:
    """A partition without name, size or instance ids is listed with the profile "unknown"."""
    gpus.gpu(0)
    part = gpus.partition(0, 0, "1g.5gb")
    for function in ("Attributes_v2", "Name", "GpuInstanceId", "ComputeInstanceId"):
        gpus.set(f"return.nvmlDeviceGet{function}", 3)
    gpus.write()
    device = looked(gpus, mig="single")[part]
    assert device.attributes["profile"] == "unknown"
    assert device.health is Health.HEALTHY
    assert not list(naming.problems(device, "gpu.example.com"))


def test_partitions_cdi_names_are_those_of_the_spec(gpus: FakeGpus) -> None:
    """CDI names of partitions are those of the spec: a UUID, a place (0:1), or a word with a place."""
    gpus.gpu(0)
    parts = [gpus.partition(0, index, "1g.5gb") for index in range(3)]
    names = [parts[0], "0:1", "mig0:2"]
    spec = {"kind": "nvidia.com/gpu", "devices": [{"name": name} for name in names]}
    (Path(gpus.places.cdi[0]) / "nvidia.json").write_text(json.dumps(spec))
    devices = looked(gpus, mig="single", injection="cdi")
    assert [devices[part].edits.cdi for part in parts] == [(f"nvidia.com/gpu={name}",) for name in names]


async def test_recovery_that_the_driver_asks_for_is_unhealthy(gpus: FakeGpus, until: Until) -> None:
    """A GPU for which the driver asks for a reset is unhealthy until it no longer does."""
    field = "gpu0.field230"
    gpus.gpu(0)
    async with closing(source(gpus)) as lists:
        await until(lists, lambda found: healths(found) == [Health.HEALTHY])
        gpus.set(field, 1)
        gpus.write()
        found = await until(lists, lambda found: healths(found) == [Health.UNHEALTHY])
        assert "reset" in next(iter(found.values())).message
        gpus.set(field, 5)
        gpus.write()
        await until(lists, lambda found: healths(found) == [Health.HEALTHY])
        gpus.set(field, 99)
        gpus.write()
        await until(lists, lambda found: healths(found) == [Health.UNKNOWN])


# --- coming and going -----------------------------------------------------------------------------


async def test_gpu_that_is_plugged_in_is_found_and_one_that_is_pulled_leaves(gpus: FakeGpus, until: Until) -> None:
    """A GPU that is plugged in is listed and one that is pulled leaves, without a restart."""
    first = gpus.gpu(0)
    async with closing(source(gpus, period=3600)) as lists:
        await until(lists, lambda found: set(found) == {first})
        second = gpus.gpu(1)
        (Path(gpus.places.dev) / "hint").touch()
        await until(lists, lambda found: set(found) == {first, second})
        gpus.unplug(1)
        await until(lists, lambda found: set(found) == {first})


async def test_library_that_is_not_there_yet_is_waited_for(
    tmp_path: Path, gpus: FakeGpus, library: Path, until: Until
) -> None:
    """Without the library there are no devices and a note; when the library comes, the GPUs are listed."""
    path = tmp_path / "later" / "libnvidia-ml.so.1"
    path.parent.mkdir()
    uuid = gpus.gpu(0)
    places = nvidia.Places(str(path), gpus.places.sysfs, gpus.places.proc, gpus.places.dev, gpus.places.cdi)
    made = source(gpus, places=places)
    async with closing(made) as lists:
        assert await until(lists, lambda found: True) == {}
        assert "is missing" in made.notes[0]
        os.link(library, path)
        await until(lists, lambda found: set(found) == {uuid})
        assert made.notes == ()


async def test_replaced_driver_is_followed_with_its_new_library(tmp_path: Path, gpus: FakeGpus, until: Until) -> None:
    """After an upgrade of the driver the new library is loaded without a restart."""
    unload()
    library = build(tmp_path)
    uuid = gpus.gpu(0)
    places = nvidia.Places(str(library), gpus.places.sysfs, gpus.places.proc, gpus.places.dev, gpus.places.cdi)
    async with closing(source(gpus, places=places)) as lists:
        found = await until(lists, len)
        assert found[uuid].attributes["driverVersion"] == "535.104.5"
        gpus.set("return.nvmlDeviceGetCount_v2", 18)
        gpus.write(driver="550.54.14")
        found = await until(lists, lambda found: found[uuid].health is Health.UNHEALTHY)
        assert found[uuid].message == "the NVIDIA driver was replaced"
        build(tmp_path, "550.54.14")
        gpus.write(return__nvmlDeviceGetCount_v2=None)
        found = await until(lists, lambda found: found[uuid].health is Health.HEALTHY)
        assert found[uuid].attributes["driverVersion"] == "550.54.14"


async def test_hanging_library_blocks_nobody_and_is_given_up_after_its_time(
    gpus: FakeGpus, until: Until, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a call hangs, the loop runs on, health is unknown and no second call begins; later the GPU is healthy."""
    monkeypatch.setattr(driver, "SCAN_TIMEOUT", 0.2)
    gpus.gpu(0)
    made = source(gpus)
    async with closing(made) as lists:
        devices = await until(lists, lambda found: healths(found) == [Health.HEALTHY])
        gpus.write(hang__nvmlDeviceGetMemoryInfo=1)
        found = await until(lists, lambda found: healths(found) == [Health.UNKNOWN])
        assert "did not answer" in next(iter(found.values())).message
        await until(lists, lambda found: "hangs" in next(iter(found.values())).message)
        with pytest.raises(NvmlError, match="hangs"):
            await made.measure(list(devices.values()))
        gpus.write(hang__nvmlDeviceGetMemoryInfo=None)
        await until(lists, lambda found: healths(found) == [Health.HEALTHY])


async def test_two_sources_share_one_thread_and_one_look(gpus: FakeGpus, until: Until) -> None:
    """Two sources of one event loop share one thread and one scan."""
    import threading

    gpus.gpu(0)
    async with closing(source(gpus, period=3600)) as one:
        await until(one, len)
        looks = calls("nvmlDeviceGetCount_v2")
        async with closing(source(gpus, profile="1g.5gb", period=3600)) as other:
            assert await until(other, lambda found: True) == {}
            assert sum(thread.name == "nvml" for thread in threading.enumerate()) == 1
        assert calls("nvmlDeviceGetCount_v2") == looks


# --- measuring ------------------------------------------------------------------------------------


async def test_measure_tells_what_the_gpu_tells_in_base_units(gpus: FakeGpus, until: Until) -> None:
    """Load, memory, temperature, power, energy, clocks, throttling, ECC, PCIe and NVLink are in base units."""
    import pynvml

    gpus.gpu(
        0, used=1024, util=50, util_memory=25, encoder=10, decoder=20, temp=65, power=250500, power_limit=400000,
        energy=5000, throttle=0x44, clock0=1410, clock1=1410, clock2=1215, clock3=1275, ecc_corrected=3,
        ecc_uncorrected=0, pcie_tx=7, pcie_rx=9, replays=2, fan=30,
    )  # fmt: skip
    gpus.set(f"gpu0.field{pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX}", 4)
    gpus.set(f"gpu0.field{pynvml.NVML_FI_DEV_MEMORY_TEMP}", 70)
    gpus.write()
    made = source(gpus, period=3600)
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


async def test_what_cannot_be_measured_is_absent(gpus: FakeGpus, until: Until) -> None:
    """Quantities that a GPU, a partition or a lost GPU does not have are absent, not 0."""
    from deviceplugin.metrics.load import checked

    little = gpus.gpu(0)
    lost = gpus.gpu(1)
    made = source(gpus)
    async with closing(made) as lists:
        devices = await until(lists, len)
        gpus.write(gpu1__lost=1)
        await until(lists, lambda found: Health.UNHEALTHY in healths(found))
        values = checked(await made.measure(list(devices.values())), list(devices.values()))
        assert values[little].keys() == {"memory_used_bytes", "memory_total_bytes", "temperature_celsius"}
        assert lost not in values
    part = gpus.partition(0, 0, "1g.5gb")
    gpus.write(gpu0__mig0__used=10)
    made = source(gpus, mig="single")
    async with closing(made) as lists:
        devices = await until(lists, len)
        assert (await made.measure(list(devices.values())))[part]["memory_used_bytes"] == 10 << 20


# --- the fake itself ------------------------------------------------------------------------------


def test_library_is_found_by_its_name_where_it_is_loaded(gpus: FakeGpus, library: Path) -> None:
    """Without a path the library is loaded by its name, as pynvml does."""
    handle = _ctypes.dlopen(str(library), ctypes.DEFAULT_MODE)
    loaded = ctypes.CDLL(str(library), handle=handle)
    uuid = gpus.gpu(0)
    try:
        with contextlib.closing(Session(replace(gpus.places, library=""))) as session:
            assert [gpu.uuid for gpu in session.scan().gpus] == [uuid]
        assert loaded.fake_calls(b"nvmlInitWithFlags") > 0
    finally:
        _ctypes.dlclose(handle)
