"""GPUs from the config file to a pod: the agent between fake hardware and the fake kubelet."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from deviceplugin import cli, config, sources
from deviceplugin.adoption.plugins import VendorPlugins
from deviceplugin.config.lock import OPEN
from deviceplugin.node.process import ConfigFile
from deviceplugin.sources import ConfiguredSource
from deviceplugin.testing import FakeKubelet, PodFailedError
from deviceplugin.testing.plugin import Served
from tests.nvml import gpus as machines
from tests.nvml.gpus import FakeGpus
from tests.testing.vendor import RESOURCE, Vendor, resource

# `gpus` is the first fixture of each test, since it must outlive the agent.
Serve = Callable[..., Served]


@pytest.fixture
def configured(gpus: FakeGpus, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ConfiguredSource]:
    """Build a source of nvidia.com/gpu from the config file, on the fake machine."""
    from deviceplugin.sources import nvidia

    monkeypatch.setattr(nvidia, "Places", lambda **_: gpus.places)

    def build(fields: str, entry: str = "{}") -> ConfiguredSource:
        text = f"resources: [{{name: nvidia.com/gpu, devices: [{{nvidia: {entry}}}], health: {{period: 1}}, {fields}}}]"
        return sources.ConfiguredSource(config.parse(text).resources[0])

    return build


Configured = Callable[..., ConfiguredSource]


def test_pod_gets_gpus_that_are_linked_and_their_names(
    gpus: FakeGpus, fake_kubelet: FakeKubelet, served: Serve, configured: Configured
) -> None:
    """On a DGX-1V a pod with two GPUs gets a pair with two NVLinks, with their UUIDs in the container's variable."""
    uuids = machines.dgx_1v(gpus)
    served(configured(""))
    fake_kubelet.wait_allocatable("nvidia.com/gpu", 8)
    pod = fake_kubelet.run_pod("pod", {"nvidia.com/gpu": 2})
    given = pod.container().env["NVIDIA_VISIBLE_DEVICES"].split(",")
    assert set(given) == set(pod.devices["nvidia.com/gpu"])
    one, other = map(uuids.index, given)
    assert machines.DGX1V[one][other] == 2
    assert fake_kubelet.devices("nvidia.com/gpu")[uuids[7]].numa == (1,)


def test_broken_gpu_is_withdrawn_alone(
    gpus: FakeGpus, fake_kubelet: FakeKubelet, served: Serve, configured: Configured
) -> None:
    """After an XID one GPU is no longer allocatable; the capacity stays."""
    machines.dgx_a100(gpus)
    served(configured(""))
    fake_kubelet.wait_allocatable("nvidia.com/gpu", 8)
    gpus.xid(3, 79)
    fake_kubelet.wait_allocatable("nvidia.com/gpu", 7)
    assert fake_kubelet.capacity("nvidia.com/gpu") == 8


def test_mixed_serves_whole_gpus_and_each_profile(
    gpus: FakeGpus, fake_kubelet: FakeKubelet, served: Serve, configured: Configured
) -> None:
    """With mig: mixed whole GPUs and each profile are resources of their own, also a profile that is made later."""
    for index in range(2):
        gpus.gpu(index)
    small = [gpus.partition(1, index, "1g.10gb") for index in range(2)]
    served(configured("", "{mig: mixed}"))
    fake_kubelet.wait_allocatable("nvidia.com/gpu", 1)
    fake_kubelet.wait_allocatable("nvidia.com/mig-1g.10gb", 2)
    pod = fake_kubelet.run_pod("pod", {"nvidia.com/mig-1g.10gb": 1})
    assert pod.container().env["NVIDIA_VISIBLE_DEVICES"] in small
    large = gpus.partition(1, 2, "3g.40gb")
    gpus.xid(1, -1)
    fake_kubelet.wait_allocatable("nvidia.com/mig-3g.40gb", 1)
    assert set(fake_kubelet.devices("nvidia.com/mig-3g.40gb")) == {large}


def test_mixed_in_two_domains_serves_each_profile_in_both(
    gpus: FakeGpus, fake_kubelet: FakeKubelet, tmp_path: Path, configured: Configured, served: Serve
) -> None:
    """With mig: mixed in two domains, each has a resource of a profile that is made later, with its own GPUs."""
    for index in range(2):
        gpus.gpu(index, mig=1)
    file = tmp_path / "config.yaml"
    settings = "devices: [{nvidia: {mig: mixed}}], health: {period: 1}"
    both = (
        f"- {{name: nvidia.com/gpu, {settings}, include: ['0000:07:*']}}",
        f"- {{name: example.com/gpu, {settings}, include: ['0000:08:*']}}",
    )
    file.write_text("\n".join(("resources:", *both)))
    served(*ConfigFile.read(file, OPEN).sources())
    fake_kubelet.wait_until(lambda: {"nvidia.com/gpu", "example.com/gpu"} <= set(fake_kubelet.resources()))
    parts = [gpus.partition(index, 0, "1g.10gb") for index in range(2)]
    for index, name in enumerate(("nvidia.com/mig-1g.10gb", "example.com/mig-1g.10gb")):
        fake_kubelet.wait_allocatable(name, 1)
        assert set(fake_kubelet.devices(name)) == {parts[index]}


def test_profile_of_a_resource_of_any_name_is_left_out_by_mixed(
    gpus: FakeGpus, fake_kubelet: FakeKubelet, tmp_path: Path, configured: Configured, served: Serve
) -> None:
    """With mig: mixed, the partitions of a profile that another resource lists are served by that resource alone."""
    for index in range(2):
        gpus.gpu(index)
    small = [gpus.partition(1, index, "1g.10gb") for index in range(2)]
    gpus.partition(1, 2, "3g.40gb")
    file = tmp_path / "config.yaml"
    mixed = "resources:\n- {name: nvidia.com/gpu, devices: [{nvidia: {mig: mixed}}], health: {period: 1}}\n"
    file.write_text(mixed + "- {name: example.com/small, devices: [{nvidia: {profile: 1g.10gb}}]}\n")
    served(*ConfigFile.read(file, OPEN).sources())
    fake_kubelet.wait_allocatable("nvidia.com/mig-3g.40gb", 1)
    fake_kubelet.wait_allocatable("example.com/small", 2)
    assert set(fake_kubelet.devices("example.com/small")) == set(small)
    assert "nvidia.com/mig-1g.10gb" not in fake_kubelet.resources()


def test_devices_lists_the_partitions_of_mixed(
    gpus: FakeGpus, tmp_path: Path, configured: Configured, capsys: pytest.CaptureFixture[str]
) -> None:
    """`deviceplugin devices` lists the resources of mig: mixed for each profile that no other resource lists."""
    whole, _ = gpus.gpu(0), gpus.gpu(1)
    small, large = gpus.partition(1, 0, "1g.10gb"), gpus.partition(1, 1, "3g.40gb")
    file = tmp_path / "config.yaml"
    mixed = "resources:\n- {name: nvidia.com/gpu, devices: [{nvidia: {mig: mixed}}], sharing: {replicas: 2}}\n"

    def listed() -> dict[str, tuple[list[str], int]]:
        assert cli.main(["devices", str(file), "-o", "json"]) == 0
        found = json.loads(capsys.readouterr().out)["resources"]
        return {one["name"]: ([device["id"] for device in one["devices"]], one["offered"]) for one in found}

    file.write_text(mixed)
    further = {"nvidia.com/mig-1g.10gb": ([small], 1), "nvidia.com/mig-3g.40gb": ([large], 1)}
    assert listed() == {"nvidia.com/gpu": ([whole], 2), **further}
    file.write_text(mixed + "- {name: example.com/small, devices: [{nvidia: {profile: 1g.10gb}}]}\n")
    further["example.com/small"] = further.pop("nvidia.com/mig-1g.10gb")
    assert listed() == {"nvidia.com/gpu": ([whole], 2), **further}


def test_partitions_of_mixed_are_not_shared(
    gpus: FakeGpus, fake_kubelet: FakeKubelet, served: Serve, configured: Configured
) -> None:
    """With mig: mixed, `replicas` of whole GPUs do not apply to the partitions of the further resources."""
    for index in range(2):
        gpus.gpu(index)
    part = gpus.partition(1, 0, "1g.10gb")
    served(configured("sharing: {replicas: 4}", "{mig: mixed}"))
    fake_kubelet.wait_allocatable("nvidia.com/gpu", 4)
    fake_kubelet.wait_allocatable("nvidia.com/mig-1g.10gb", 1)
    assert set(fake_kubelet.devices("nvidia.com/mig-1g.10gb")) == {part}


def test_a_gpu_is_held_whole_or_in_partitions(
    gpus: FakeGpus, fake_kubelet: FakeKubelet, tmp_path: Path, configured: Configured, served: Serve
) -> None:
    """While a pod holds a GPU, no pod gets a partition of it, not even a new one; a held partition blocks its GPU."""
    for index in range(2):
        gpus.gpu(index)
    gpus.partition(0, 0, "1g.10gb")
    gpus.partition(0, 1, "1g.10gb")
    part, file = "example.com/part", tmp_path / "config.yaml"
    whole = "resources:\n- {name: nvidia.com/gpu, devices: [{nvidia: {}}], health: {period: 1}}\n"
    file.write_text(whole + f"- {{name: {part}, devices: [{{nvidia: {{profile: 1g.10gb}}}}], health: {{period: 1}}}}\n")
    served(*ConfigFile.read(file, OPEN).sources())
    fake_kubelet.wait_allocatable("nvidia.com/gpu", 2)
    fake_kubelet.wait_allocatable(part, 2)
    both = fake_kubelet.run_pod("both", {part: 2})
    fake_kubelet.wait_allocatable("nvidia.com/gpu", 1)
    fake_kubelet.run_pod("whole", {"nvidia.com/gpu": 1})
    gpus.partition(1, 0, "1g.10gb")
    gpus.xid(1, -1)
    fake_kubelet.wait_until(lambda: fake_kubelet.capacity(part) == 3)
    with pytest.raises(PodFailedError):
        fake_kubelet.run_pod("another", {part: 1})
    both.delete()
    fake_kubelet.wait_allocatable("nvidia.com/gpu", 2)
    assert fake_kubelet.allocatable(part) == 2


@pytest.mark.parametrize("form", ["nodes", "cdi"])
@pytest.mark.parametrize("own", ["nvidia: {}", "nvidia: {profile: 1g.10gb}"])
def test_a_gpu_that_an_adopted_plugin_gives_by_its_node(
    gpus: FakeGpus, fake_kubelet: FakeKubelet, configured: Configured, served: Serve, own: str, form: str
) -> None:
    """A GPU or partition and an adopted plugin's id, whose response has only the GPU's node, exclude each other."""
    name, node, cdi = "example.com/own", Path(gpus.places.dev) / "nvidia0", fake_kubelet.paths.cdi_dir
    gpus.gpu(0)
    if "profile" in own:
        gpus.partition(0, 0, "1g.10gb")
    node.unlink()
    node.symlink_to("/dev/tty")
    cdi.mkdir(exist_ok=True)
    spec = {"name": "g0", "containerEdits": {"deviceNodes": [{"path": "/dev/nvidia0", "hostPath": str(node)}]}}
    (cdi / "vendor.json").write_text(json.dumps({"kind": "vendor.example/gpu", "devices": [spec]}))
    answers: dict[str, Any] = {"nodes": [[str(node), "/dev/nvidia0", "rw"]], "cdi": ["vendor.example/gpu=g0"]}
    source = ConfiguredSource(config.parse(f"resources: [{{name: {name}, devices: [{own}]}}]").resources[0])
    with tempfile.TemporaryDirectory(prefix="adopt-") as where:  # pytest's paths are too long for sockets
        directory = Path(where) / "adopted"
        served(source, vendors=VendorPlugins(directory), period=1.0)
        vendor = Vendor(Path(where), directory, resource("g0", **{form: answers[form]})).start()
        try:
            fake_kubelet.wait_allocatable(RESOURCE, 1)
            for first, second in ((name, RESOURCE), (RESOURCE, name)):
                fake_kubelet.wait_allocatable(first, 1)
                pod = fake_kubelet.run_pod("first", {first: 1})
                with pytest.raises(PodFailedError):
                    fake_kubelet.run_pod(f"second-{first[-3:]}", {second: 1})
                fake_kubelet.wait_allocatable(second, 0)
                pod.delete()
                fake_kubelet.wait_allocatable(second, 1)
        finally:
            vendor.stop(kill=True)


def test_replicas_go_by_product(
    gpus: FakeGpus, fake_kubelet: FakeKubelet, served: Serve, configured: Configured
) -> None:
    """`replicas: {a100: 4}` offers each A100 as four replicas and every other GPU as one."""
    gpus.gpu(0)
    gpus.gpu(1, "Tesla T4", memory=15360)
    served(configured("sharing: {replicas: {a100: 4}}"))
    fake_kubelet.wait_allocatable("nvidia.com/gpu", 5)


@pytest.mark.parametrize(
    ("fields", "left"),
    [
        ('exclude: ["0000:07:00.0"]', {1, 2}),
        ('include: ["GPU-00000001-*"]', {1}),
        ('include: ["0000:*"], exclude: ["GPU-00000002*"]', {0, 1}),
    ],
)
def test_gpus_are_chosen_by_address_or_uuid(
    gpus: FakeGpus, fake_kubelet: FakeKubelet, served: Serve, configured: Configured, fields: str, left: Any
) -> None:
    """include and exclude take UUIDs and PCI addresses, with wildcards; exclude wins."""
    uuids = [gpus.gpu(index) for index in range(3)]
    served(configured(fields))
    fake_kubelet.wait_allocatable("nvidia.com/gpu", len(left))
    assert set(fake_kubelet.devices("nvidia.com/gpu")) == {uuids[index] for index in left}
