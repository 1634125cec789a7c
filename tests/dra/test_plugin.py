"""The fixtures `bridged` and `fake_node`, with which authors test claims."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

import dra_bridge.testing
from deviceplugin import ContainerEdits, Device, DeviceNode, DeviceSource, Mount
from deviceplugin.config import parse
from dra_bridge.manifests import manifests
from dra_bridge.testing import FakeApiServer, FakeNode, ServedBoth
from dra_bridge.testing.plugin import bridged, fake_node  # an older installation has no entry point for them
from dra_bridge.testing.serving import device_class

__all__ = ["bridged", "fake_node"]
R, D = "example.com/fpga", "fpga.example.com"
Bridged = Callable[..., ServedBoth]


class Tuning(msgspec.Struct):
    mode: str = "balanced"


class Fpga(DeviceSource):
    resource = R
    driver = D
    config_type = Tuning

    def __init__(self) -> None:
        self.unprepared: list[str] = []

    async def watch(self) -> AsyncIterator[Sequence[Device]]:
        yield [Device(name, nodes=["/dev/null"]) for name in ("fpga0", "fpga1")]

    def edits(self, devices: Sequence[Device]) -> ContainerEdits:
        return ContainerEdits({"FPGAS": ",".join(one.id for one in devices)}, mounts=[Mount("/etc", "/mnt")])

    def prepare(self, devices: Sequence[Device], config: Tuning | None) -> ContainerEdits:
        return ContainerEdits({"MODE": (config or Tuning()).mode})

    def unprepare(self, devices: Sequence[Device]) -> None:
        self.unprepared += [one.id for one in devices]


def test_a_claim_gets_a_device(fake_node: FakeNode, bridged: Bridged) -> None:
    """A pod with a claim gets its device and the hooks' container edits; later the claim is unprepared."""
    source = Fpga()
    bridged(source, share="all")
    pod = fake_node.start_pod("p", template={D: 1}).wait_running()
    ((name, side),) = fake_node.devices_of(pod).items()
    assert side == "claim"
    got = fake_node.edits_of(pod)
    assert got.env == {"FPGAS": name, "MODE": "balanced"}
    assert got.nodes == (DeviceNode("/dev/null", "/dev/null"),)
    assert got.mounts == (Mount("/etc", "/mnt"),)
    pod.delete()
    fake_node.wait_until(lambda: source.unprepared == [name])


def test_a_claim_has_parameters(fake_node: FakeNode, bridged: Bridged) -> None:
    """The source's hook `prepare` gets a claim's parameters as its argument `config`."""
    bridged(Fpga(), share="all")
    fake_node.claim("fast", D, parameters={D: {"mode": "fast"}})
    pod = fake_node.start_pod("p", claims=["fast"]).wait_running()
    assert fake_node.edits_of(pod).env["MODE"] == "fast"


def test_devices_are_shared_out(fake_node: FakeNode, bridged: Bridged) -> None:
    """`bridged` returns once the requested devices are for claims; both sides give the same container edits."""
    bridged(Fpga(), share=1)
    assert fake_node.allocatable(R) == 1
    by_limits = fake_node.run_pod("limits", {R: 1})
    by_claim = fake_node.start_pod("claim", template={D: 1}).wait_running()
    assert list(fake_node.devices_of(by_limits).values()) == ["plugin"]
    assert list(fake_node.devices_of(by_claim).values()) == ["claim"]
    assert {fake_node.edits_of(one).env["FPGAS"] for one in (by_limits, by_claim)} == {"fpga0", "fpga1"}
    assert fake_node.edits_of(by_limits).nodes == (DeviceNode("/dev/null", "/dev/null"),)


@pytest.mark.parametrize("share", ["none", "all"])
def test_a_missing_device_node_is_named_on_both_sides(fake_node: FakeNode, bridged: Bridged, share: str) -> None:
    """A pod with a missing device node does not start, by limits and by a claim; the message names the node."""

    class Missing(Fpga):
        async def watch(self) -> AsyncIterator[Sequence[Device]]:
            yield [Device("fpga0", nodes=["/dev/not-there"])]

    bridged(Missing(), share=share)
    pod = fake_node.start_pod("p", {R: 1}) if share == "none" else fake_node.start_pod("p", template={D: 1})
    said = "device node /dev/not-there: No such file or directory"
    fake_node.wait_until(lambda: said in pod.container().message)


def test_claims_get_nothing_unless_a_share_says_so(fake_node: FakeNode, bridged: Bridged) -> None:
    """Without the argument `share`, no device is for claims, as with `dra_bridge.run`."""
    bridged(Fpga())
    assert fake_node.allocatable(R) == 2
    with pytest.raises(TimeoutError):
        fake_node.start_pod("p", template={D: 1}).wait_running(timeout=0.1)


def test_several_resources_of_a_driver(fake_node: FakeNode, bridged: Bridged) -> None:
    """Each resource of a driver gets a DeviceClass; a DeviceClass that exists is not changed."""

    class Half(Fpga):
        resource = "example.com/half"

    own = device_class(R, D)
    own["spec"]["extendedResourceName"] = "example.com/other"
    fake_node.server.create(own)
    bridged(Fpga(), Half(), share="all")
    classes = {one["metadata"]["name"]: one["spec"] for one in fake_node.server.objects("deviceclasses")}
    assert classes.keys() == {D, f"half.{D}"}
    assert classes[D]["extendedResourceName"] == "example.com/other"
    pod = fake_node.start_pod("p", template={f"half.{D}": 2}).wait_running()
    assert sorted(fake_node.edits_of(pod).env["FPGAS"].split(",")) == ["fpga0", "fpga1"]


def test_the_class_is_that_of_the_manifests() -> None:
    """The class that the fixture makes is the one that `dra-bridge manifests` prints."""
    text = f"resources: [{{name: {R}, driver: {D}, devices: [{{simulated: {{count: 1}}}}]}}]"
    (printed,) = (one for one in manifests(parse(text, "x"), text) if one["kind"] == "DeviceClass")
    assert device_class(R, D)["spec"] == printed["spec"]
    assert device_class(R, D)["metadata"]["name"] == printed["metadata"]["name"]


def test_what_cannot_be_served_is_named(fake_node: FakeNode, bridged: Bridged) -> None:
    """A class instead of a source, a wrong `share` and a failing `watch` raise in the call of `bridged`."""

    class Failing(Fpga):
        async def watch(self) -> AsyncIterator[Sequence[Device]]:
            yield [Device(name) for name in Path("/nowhere").read_text()]

    with pytest.raises(TypeError, match=r"Fpga is a class"):
        bridged(Fpga)
    with pytest.raises(ValueError, match="'half' is not a share"):
        bridged(Fpga(), share="half")
    with pytest.raises(RuntimeError, match=r"example\.com/fpga: watch failed .*: FileNotFoundError") as failure:
        bridged(Failing(), timeout=60.0)
    assert isinstance(failure.value.__cause__, FileNotFoundError)


def test_wrong_arguments_are_refused_at_once(fake_node: FakeNode, bridged: Bridged) -> None:
    """Wrong arguments of claims, pods and `bridged` raise in the call, and no pod is created."""

    class Plain(Fpga):
        driver = None  # type: ignore[assignment]  # mypy infers str

    with pytest.raises(ValueError, match="no source has a `driver`, so claims cannot have a share of all"):
        bridged(Plain(), share="all")
    with pytest.raises(ValueError, match="drain must be one of cordon, wait, not 'cordn'"):
        bridged(Fpga(), drain="cordn")
    with pytest.raises(TypeError, match="there is no source to serve"):
        bridged()
    with pytest.raises(TypeError, match="config_type must be a class"):
        bridged(type("Wrong", (Fpga,), {"config_type": {"mode": str}})())
    wrong: Any = "cc"
    with pytest.raises(TypeError, match=r"claims must be names of ResourceClaims such as \['cc'\]"):
        fake_node.start_pod("p", claims=wrong)
    with pytest.raises(TypeError, match=r"template must be numbers by DeviceClass such as {'cc': 1}"):
        fake_node.start_pod("p", template=wrong)
    rate: Any = {"rate": 7}
    with pytest.raises(TypeError, match=r"parameters must be by driver .*, not 'rate': 7"):
        fake_node.claim("c", D, parameters=rate)
    assert not fake_node.pods


def test_a_pod_that_stays_pending_says_why(fake_node: FakeNode, bridged: Bridged) -> None:
    """The timeout error of a pending pod names a missing DeviceClass, a missing claim or the lack of devices."""
    bridged(Fpga(), share=0)
    fake_node.claim("misspelt", "fgpa.example.com")
    for pod, why in (
        (fake_node.start_pod("a", claims=["misspelt"]), f"no DeviceClass fgpa.example.com; there are {D}"),
        (fake_node.start_pod("b", claims=["nope"]), "no claim nope in namespace default"),
        (fake_node.start_pod("c", template={D: 2}), f"2 of DeviceClass {D}: (no|the) ResourceSlices? "),
        (fake_node.start_pod("d", {R: 3}), f"3 of {R}, 2 free"),
    ):
        with pytest.raises(TimeoutError, match=f"Pending; it waits for {why}"):
            pod.wait_running(0.5)


def test_a_driver_whose_slices_cannot_be_made_harms_no_other(
    fake_node: FakeNode, bridged: Bridged, caplog: pytest.LogCaptureFixture
) -> None:
    """A device that makes its driver's slices fail is logged; the slices of another driver are published."""
    attributes: Any = {"model": "x"}

    class Odd(Fpga):
        resource, driver = "example.com/odd", "odd.example.com"

        async def watch(self) -> AsyncIterator[Sequence[Device]]:
            device = Device("odd0", attributes=attributes)
            attributes[1] = 1  # the constructor of `Device` has already checked the attributes
            yield [device]

    bridged(Odd(), Fpga(), share="all", timeout=None)
    fake_node.start_pod("p", template={D: 1}).wait_running(60.0)
    fake_node.wait_until(lambda: "the slices cannot be made: AttributeError" in caplog.text, 60.0)
    fake_node.start_pod("q", template={D: 1}).wait_running(60.0)


def test_an_agent_that_ends_is_not_waited_for(fake_node: FakeNode, bridged: Bridged) -> None:
    """`bridged` raises at once if the agent ends, with the agent's error as the cause."""
    directory = fake_node.root / "plugins" / "dra-bridge"
    directory.parent.mkdir(exist_ok=True)
    directory.write_text("no directory")
    with pytest.raises(RuntimeError, match=f"the agent has ended: .*{directory}") as failure:
        bridged(Fpga(), timeout=60.0)
    assert str(directory) in str(failure.value.__cause__)


def test_the_plugin_is_cheap() -> None:
    """The pytest plugin, which every pytest run imports, imports neither gRPC nor asyncio nor a client."""
    code = "import sys, dra_bridge.testing.plugin; print({'grpc', 'asyncio', 'aiohttp'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout == "set()\n"


def test_a_crash_fails_the_test(tmp_path: Path) -> None:
    """A test in which a real kubelet would have crashed fails at its end."""
    (tmp_path / "conftest.py").write_text("from dra_bridge.testing.plugin import fake_node\n")
    test = tmp_path / "test_it.py"
    test.write_text("def test_it(fake_node):\n    fake_node.crashes.append('a nil pointer')\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(test)]
    result = subprocess.run(command, check=False, capture_output=True, text=True)
    assert result.returncode == 1
    assert "a nil pointer" in result.stdout


def test_names_are_found() -> None:
    """Every name in `__all__` can be imported, and other names cannot."""
    found: dict[str, Any] = {name: getattr(dra_bridge.testing, name) for name in dra_bridge.testing.__all__}
    assert all(one.__name__ == name for name, one in found.items())
    assert found["FakeApiServer"] is FakeApiServer
    with pytest.raises(AttributeError):
        dra_bridge.testing.Nonsense  # noqa: B018


class Odd(DeviceSource):
    """A source whose device ids differ from the names in slices."""

    resource, driver = "example.com/odd", "odd.example.com"

    async def watch(self):  # type: ignore[no-untyped-def]  # as an author writes it
        yield [Device("snd/a_1"), Device("snd/a_2")]


def test_devices_have_their_ids_on_both_sides(fake_node: FakeNode, bridged: Callable[..., ServedBoth]) -> None:
    """`devices_of` returns the source's ids, for limits and claims, whatever the names in slices are."""
    bridged(Odd(), share=1)
    pods = [fake_node.run_pod("p", {"example.com/odd": 1}), fake_node.start_pod("q", template={"odd.example.com": 1})]
    pods[1].wait_running()
    assert sorted(device for pod in pods for device in fake_node.devices_of(pod)) == ["snd/a_1", "snd/a_2"]


def test_waits_name_what_is_left_out_of_the_slices(fake_node: FakeNode, bridged: Bridged) -> None:
    """The error of each wait names a device that is left out of the slices, with the reason."""

    class Halves(Fpga):
        async def watch(self) -> AsyncIterator[Sequence[Device]]:
            yield [Device("half", consumes={"card0": {"memory": "8Gi"}})]

    bridged(Halves(), share="all")
    pod = fake_node.start_pod("p", template={D: 1})
    with pytest.raises(TimeoutError, match=r"no ResourceSlice .* left out of the slices: .*'half'.*'card0', which no"):
        pod.wait_running(timeout=0.5)
    pod.delete()
    with pytest.raises(TimeoutError, match=r"for a slice; .* left out of the slices: .*'half'.*'card0', which no"):
        fake_node.wait_until(
            lambda: any("devices" in one["spec"] for one in fake_node.server.objects()), 0.1, "a slice"
        )
