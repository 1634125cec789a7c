"""Prepare of claims for an adopted plugin's devices: which calls the plugin gets, and which answers are refused."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest

from deviceplugin.adoption import plugins as adopted_plugins
from deviceplugin.adoption import source as adoption
from deviceplugin.adoption.plugins import VendorPlugin, VendorPlugins
from deviceplugin.adoption.source import Adopted, AdoptedSource
from deviceplugin.device import Device
from deviceplugin.testing.foreign import AllocateAnswer
from deviceplugin.wire import deviceplugin_pb2 as pb
from dra_bridge.driver.claims import ClaimError
from tests.adoption.test_plugins import RESOURCE, Plugin, plugin, serving
from tests.dra.driver.served import D, ServedDriver, claim, result, served_driver
from tests.waits import until


class Allocating(Plugin):
    """A plugin that answers Allocate and PreStartContainer once a test has set `answers` and `starts`."""

    def __init__(self, directory: Path, socket: str = "vendor.sock") -> None:
        super().__init__(directory, socket)
        self.answer = AllocateAnswer(env={"GADGETS": "{ids}"}, control=[("/dev/null", "/dev/ctl", "rw")])
        self.pre_start, self.cancelled, self.error = False, False, ""
        self.asked: list[tuple[str, ...]] = []
        self.started: list[tuple[str, ...]] = []
        self.calls: list[str] = []
        self.answers, self.starts = asyncio.Event(), asyncio.Event()
        self.answers.set()
        self.starts.set()

    async def GetDevicePluginOptions(self, request: pb.Empty, context: Any) -> pb.DevicePluginOptions:  # noqa: N802
        return pb.DevicePluginOptions(pre_start_required=self.pre_start)

    async def Allocate(self, request: pb.AllocateRequest, context: Any) -> pb.AllocateResponse:  # noqa: N802
        (one,) = request.container_requests
        self.asked.append(tuple(one.devices_ids))
        self.calls.append("Allocate")
        try:
            await self.answers.wait()
        except asyncio.CancelledError:
            self.cancelled = True
            raise
        if self.error:
            await context.abort(grpc.StatusCode.UNKNOWN, self.error)
        return pb.AllocateResponse.FromString(self.answer.message(list(one.devices_ids)))

    async def PreStartContainer(self, request: pb.PreStartContainerRequest, context: Any) -> Any:  # noqa: N802
        self.calls.append("PreStartContainer")
        await self.starts.wait()
        self.started.append(tuple(request.devices_ids))
        self.calls.append("started")
        return pb.PreStartContainerResponse()


class Scene:
    """A driver whose devices g0 to g3 are those of an adopted plugin."""

    def __init__(self, vendors: VendorPlugins, vendor: Allocating, where: Path) -> None:
        self.vendors, self.vendor, self.where = vendors, vendor, where
        self.driver: ServedDriver

    async def begin(self, **adopted: Any) -> None:
        await self.vendor.register()
        self.vendor.show("g0", "g1", "g2", "g3")
        await until(lambda: (one := self.vendors.plugin(RESOURCE)) and one.devices)
        self.driver = await served_driver(
            self.where, self.source(**adopted), devices=[Device(f"g{number}") for number in range(4)]
        )

    @property
    def plugin(self) -> VendorPlugin:
        found = self.vendors.plugin(RESOURCE)
        assert found is not None
        return found

    def source(self, **adopted: Any) -> AdoptedSource:
        return AdoptedSource(RESOURCE, self.vendors, Adopted(D, **adopted))

    async def again(self, **options: Any) -> None:
        """Start the driver again, with the plugin already registered."""
        devices = list(self.driver.inventory.snapshot.devices.values())
        self.driver = await self.driver.again(self.source(), devices=devices, **options)

    async def prepared(self, uid: str) -> list[dict[str, Any]]:
        """Prepare a claim, and return the edits of its devices."""
        answer = await self.driver.prepared(uid)
        return [one for device in answer.devices for one in self.driver.edits(*device.cdi_ids)]

    async def answered_late(self) -> None:
        """Have the plugin answer an Allocate call for which no Prepare waits any more."""
        self.vendor.answers.set()
        await until(lambda: all(task.done() for task in self.plugin.claimed.values()))

    async def refused(self, uid: str) -> ClaimError:
        """Prepare a claim, check that it is refused and that nothing of it is recorded, and return the error."""
        answer = (await self.driver.prepare(uid))[uid]
        assert isinstance(answer, ClaimError)
        assert (D, uid) not in self.driver.async_ledger.snapshot.claims
        assert not self.driver.all_files
        return answer


@pytest.fixture
async def scene() -> AsyncIterator[Scene]:
    """A scene whose driver has not started: a test starts it."""
    with tempfile.TemporaryDirectory(prefix="adopt-") as where:  # pytest's paths are too long for sockets
        directory = Path(where) / "p"
        async with serving(directory) as vendors:
            vendor = Allocating(directory)  # type: ignore[abstract]  # GetPreferredAllocation is not called
            await vendor.server.start()
            made = Scene(vendors, vendor, Path(where))
            try:
                yield made
            finally:
                vendor.answers.set()
                vendor.starts.set()
                await made.driver.end()
                await vendor.server.stop(0)


@pytest.fixture
async def here(scene: Scene) -> Scene:
    """A scene whose driver has started."""
    await scene.begin()
    return scene


def ids(*names: str, request: str = "fpga") -> Sequence[Any]:
    return [result(name, request) for name in names]


async def test_one_allocate_for_each_request(here: Scene) -> None:
    """Each request of a claim is one Allocate with its ids in natural order, and gets the response's CDI edits."""
    here.vendor.answer = AllocateAnswer(env={"G_{ids}": "1"}, control=[("/dev/null", "/dev/ctl", "rw")])
    here.driver.claims.add(claim("1", *ids("g1", "g0", request="left"), *ids("g2", request="right")))
    left, right = await here.prepared("1")
    assert here.vendor.asked == [("g0", "g1"), ("g2",)]
    assert (left["env"], right["env"]) == (["G_{ids}=1"], ["G_{ids}=1"])


async def test_an_answer_is_kept_for_one_boot(here: Scene) -> None:
    """A second Prepare of a claim reuses the plugin's response, also after a restart, but not after a reboot."""
    here.driver.claims.add(claim("1", *ids("g0")))
    first = await here.prepared("1")
    assert await here.prepared("1") == first
    await here.again()
    assert await here.prepared("1") == first
    assert here.vendor.asked == [("g0",)]
    here.vendor.answer = AllocateAnswer(env={"GADGETS": "after the reboot"})
    await here.again(boot="2")
    (after,) = await here.prepared("1")
    assert after["env"] == ["GADGETS=after the reboot"]
    assert here.vendor.asked == [("g0",), ("g0",)]


async def test_a_retry_joins_the_call_in_flight(here: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """If Prepare is tried again while Allocate is in flight, the plugin gets one call, and its late answer is used."""
    monkeypatch.setattr(adoption, "ANSWER", 0.05)
    here.vendor.answers.clear()
    here.driver.claims.add(claim("1", *ids("g0")))
    error = await here.refused("1")
    assert (error.reason, "has not answered Allocate of 1 device for 0.05 s" in str(error)) == ("plugin", True)
    await here.refused("1")
    monkeypatch.undo()
    await here.answered_late()
    (edits,) = await here.prepared("1")
    assert edits["env"] == ["GADGETS=g0"]
    assert here.vendor.asked == [("g0",)]
    assert not here.plugin.claimed


async def test_a_late_answer_is_not_believed_once_its_device_was_given_to_others(
    here: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A late answer of the plugin is dropped if one of its devices was allocated again meanwhile."""
    monkeypatch.setattr(adoption, "ANSWER", 0.05)
    here.vendor.answers.clear()
    here.driver.claims.add(claim("1", *ids("g0", "g1")))
    await here.refused("1")
    monkeypatch.undo()
    await here.answered_late()
    await here.vendors.allocate(here.plugin, [["g1"]])
    await here.prepared("1")
    assert here.vendor.asked == [("g0", "g1"), ("g1",), ("g0", "g1")]


@pytest.mark.parametrize("end", ["unprepare", "list", "claim", "age"])
async def test_a_late_answer_that_nobody_takes_is_dropped(
    here: Scene, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    """A late answer that no Prepare uses is dropped by Unprepare, a list without the device, another claim, or age."""
    monkeypatch.setattr(adoption, "ANSWER", 0.05)
    here.vendor.answers.clear()
    here.driver.claims.add(claim("1", *ids("g0")), claim("2", *ids("g0")))
    await here.refused("1")
    monkeypatch.undo()
    if end == "age":
        monkeypatch.setattr(adopted_plugins, "KEPT", 0.05)
    await here.answered_late()
    if end == "unprepare":
        assert await here.driver.unprepare("1") is None
    elif end == "list":
        here.vendor.show("g1")
        await until(lambda: "g0" not in (here.plugin.devices or {}))
        here.vendor.show("g0", "g1")
        await until(lambda: "g0" in (here.plugin.devices or {}))
    elif end == "age":
        await until(lambda: not here.plugin.claimed)
    await here.prepared("2" if end == "claim" else "1")
    assert here.vendor.asked == [("g0",), ("g0",)]
    assert not here.plugin.claimed


async def test_an_answer_is_not_believed_if_its_device_went_meanwhile(here: Scene) -> None:
    """If a device leaves the plugin's list and returns during Allocate, Prepare is refused and the answer not used."""
    here.vendor.answers.clear()
    here.driver.claims.add(claim("1", *ids("g0")), claim("2", *ids("g1")))
    preparing = asyncio.create_task(here.refused("1"))
    await until(lambda: here.vendor.asked)
    waiting = asyncio.create_task(here.refused("2"))  # this Prepare waits for the end of the first one
    await until(lambda: len(here.plugin.claimed) == 2)
    here.vendor.show("g2")
    await until(lambda: len(here.plugin.devices or ()) == 1)
    here.vendor.show("g0", "g1")
    await until(lambda: len(here.plugin.devices or ()) == 2)
    here.vendor.answers.set()
    for refused in (preparing, waiting):
        assert "the vendor's plugin has listed the devices again" in str(await refused)
    assert here.vendor.asked == [("g0",)]
    await here.prepared("1")
    assert here.vendor.asked == [("g0",), ("g0",)]


async def test_a_plugin_is_asked_for_one_claim_after_the_other(here: Scene) -> None:
    """The plugin gets the Allocate calls of two claims one after the other."""
    here.vendor.answers.clear()
    here.driver.claims.add(claim("1", *ids("g0")), claim("2", *ids("g1")))
    preparing = [asyncio.create_task(here.driver.prepared(uid)) for uid in "12"]
    await until(lambda: here.vendor.asked)
    assert len(here.vendor.asked) == 1
    here.vendor.answers.set()
    await asyncio.gather(*preparing)
    assert sorted(here.vendor.asked) == [("g0",), ("g1",)]


async def test_a_plugin_that_hangs_holds_up_itself_alone(here: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plugin that hangs delays calls of other plugins by at most `TURN` seconds, and its own until it answers."""
    monkeypatch.setattr(adopted_plugins, "TURN", 0.05)
    async with plugin(here.vendors.directory, "other.sock", Allocating) as other:
        await other.register("vendor.example/other")
        others = here.vendors.plugin("vendor.example/other")
        assert others is not None
        here.vendor.answers.clear()
        pods = [asyncio.create_task(here.vendors.allocate(here.plugin, [[name]])) for name in ("g0", "g1")]
        here.driver.claims.add(claim("1", *ids("g2")))
        preparing = asyncio.create_task(here.driver.prepared("1"))
        await until(lambda: here.vendor.asked)
        async with asyncio.timeout(10):
            await here.vendors.allocate(others, [["o0"]])
            await here.vendors.allocate_claim(others, "2", ["o0"], 10)
        assert here.vendor.asked == [("g0",)]
        here.vendor.answers.set()
        await asyncio.gather(*pods, preparing)
        assert sorted(here.vendor.asked) == [("g0",), ("g1",), ("g2",)]


@pytest.mark.parametrize("hangs", [False, True])
async def test_a_container_starts_while_a_claim_is_allocated(
    here: Scene, monkeypatch: pytest.MonkeyPatch, hangs: bool
) -> None:
    """PreStartContainer waits until an Allocate in flight has ended, but for `TURN` seconds at most."""
    if hangs:
        monkeypatch.setattr(adopted_plugins, "TURN", 0.05)
    here.vendor.answers.clear()
    here.driver.claims.add(claim("1", *ids("g0")))
    preparing = asyncio.create_task(here.driver.prepared("1"))
    await until(lambda: here.vendor.asked)
    request = pb.PreStartContainerRequest(devices_ids=["g1"]).SerializeToString()
    start = asyncio.create_task(here.plugin.call_in_turn("PreStartContainer", request))
    await asyncio.wait({start}, timeout=10 if hangs else 0.1)
    assert start.done() is hangs
    assert ("PreStartContainer" in here.vendor.calls) is hangs
    here.vendor.answers.set()
    await asyncio.gather(preparing, start)
    assert here.vendor.started == [("g1",)]


async def test_an_allocate_that_nobody_waits_for_is_cancelled(here: Scene) -> None:
    """If the kubelet cancels an Allocate, the agent cancels its call to the plugin, so the next call is not delayed."""
    here.vendor.answers.clear()
    pod = asyncio.create_task(here.vendors.allocate(here.plugin, [["g0"]]))
    await until(lambda: here.vendor.asked)
    pod.cancel()
    await until(lambda: here.vendor.cancelled)
    here.vendor.answers.set()
    await here.vendors.allocate(here.plugin, [["g0"]])


async def test_ids_are_checked_against_the_live_list(here: Scene) -> None:
    """A device that the plugin no longer lists is refused without a call, since some plugins answer for any id."""
    here.vendor.show("g1")
    await until(lambda: (one := here.vendors.plugin(RESOURCE)) and len(one.devices or ()) == 1)
    here.driver.claims.add(claim("1", *ids("g0")))
    assert "the vendor's plugin does not list device g0" in str(await here.refused("1"))
    assert not here.vendor.asked


async def test_ids_of_another_plugin_than_the_known_one_are_refused(scene: Scene) -> None:
    """A device id that does not match the configured pattern is refused, since another plugin must be running."""
    await scene.begin(ids="GPU-[0-9]+")
    scene.driver.claims.add(claim("1", *ids("g0")))
    assert "the known plugin of this resource never has the id g0, so another plugin runs" in str(
        await scene.refused("1")
    )
    assert not scene.vendor.asked


async def test_a_plugin_that_refuses_or_has_gone_is_the_claims_error(here: Scene) -> None:
    """If the plugin refuses or is not connected, the claim's error says so."""
    here.vendor.error = "no such gadget"
    here.driver.claims.add(claim("1", *ids("g0")))
    assert str(await here.refused("1")) == f"request 'fpga': {RESOURCE}: the vendor's plugin refuses: no such gadget"
    here.vendor.error = ""
    await here.prepared("1")
    here.driver.claims.add(claim("2", *ids("g1")))
    await here.vendor.server.stop(0)
    await until(lambda: (one := here.vendors.plugin(RESOURCE)) and not one.alive)
    answer = (await here.driver.prepare("2"))["2"]
    assert "the vendor's plugin is not connected" in str(answer)


async def test_a_plugin_that_ends_while_it_allocates(here: Scene) -> None:
    """If the plugin ends during Allocate, Prepare fails at once; the next try calls the plugin that then runs."""
    here.vendor.answers.clear()
    here.driver.claims.add(claim("1", *ids("g0")))
    preparing = asyncio.create_task(here.driver.prepare("1"))
    await until(lambda: here.vendor.asked)
    await here.vendor.server.stop(0)
    (answer,) = (await preparing).values()
    assert isinstance(answer, ClaimError)
    assert answer.reason == "plugin"
    words = (
        f"{RESOURCE}: the vendor's plugin at {here.vendors.directory}/vendor.sock ended, or cannot be reached, during"
    )
    assert f"{words} Allocate: " in str(answer)
    assert str(answer).endswith("; the next try asks it again")
    async with plugin(here.vendors.directory, "next.sock", Allocating) as after:
        await after.register()
        after.show("g0")
        await until(lambda: (one := here.vendors.plugin(RESOURCE)) and one.devices)
        (edits,) = await here.prepared("1")
        assert edits["env"] == ["GADGETS=g0"]


async def test_answers_that_contradict_each_other_are_refused(here: Scene) -> None:
    """If two requests of a claim get different values of a variable, the claim is refused with a hint."""
    here.driver.claims.add(claim("1", *ids("g0", request="left"), *ids("g1", request="right")))
    error = await here.refused("1")
    assert error.reason == "conflict"
    assert "environment variable 'GADGETS' is given twice: 'g0' and 'g1'; with `answer: claim`" in str(error)


async def test_requests_of_a_claim_can_be_allocated_together(scene: Scene) -> None:
    """With `together` a claim causes one Allocate with all its ids, and each request gets the whole response."""
    await scene.begin(together=True)
    scene.driver.claims.add(claim("1", *ids("g0", request="left"), *ids("g1", request="right")))
    left, right = await scene.prepared("1")
    assert scene.vendor.asked == [("g0", "g1")]
    assert left == right
    assert left["env"] == ["GADGETS=g0,g1"]


@pytest.mark.parametrize("once", [False, True])
async def test_pre_start_container(scene: Scene, once: bool) -> None:
    """With `pre_start: once` PreStartContainer is called once, after Allocate; without it the claim is refused."""
    scene.vendor.pre_start = True
    await scene.begin(pre_start_once=once)
    scene.driver.claims.add(claim("1", *ids("g0")))
    if once:
        await scene.prepared("1")
        assert scene.vendor.started == [("g0",)]
    else:
        assert "write `pre_start: once` under `plugin`" in str(await scene.refused("1"))
        assert not scene.vendor.asked


async def test_pre_start_container_has_the_turn_of_its_allocate(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """No Allocate comes between a claim's Allocate and PreStartContainer; after a later one, Prepare repeats both."""
    monkeypatch.setattr(adoption, "ANSWER", 0.05)
    scene.vendor.pre_start = True
    scene.vendor.starts.clear()
    await scene.begin(pre_start_once=True)
    scene.driver.claims.add(claim("1", *ids("g0")))
    await scene.refused("1")
    await until(lambda: "PreStartContainer" in scene.vendor.calls)
    monkeypatch.undo()
    pod = asyncio.create_task(scene.vendors.allocate(scene.plugin, [["g0"]]))
    for _ in range(3):
        await scene.plugin.call("GetDevicePluginOptions", b"")  # once this call is answered, earlier calls have arrived
    scene.vendor.starts.set()
    await pod
    assert scene.vendor.calls == ["Allocate", "PreStartContainer", "started", "Allocate"]
    await scene.prepared("1")
    assert scene.vendor.asked == [("g0",)] * 3


async def test_a_plugin_that_hangs_in_pre_start_container(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """A PreStartContainer call without an answer is given up after `PRE_START` s; the claim's error names the call."""
    monkeypatch.setattr(adopted_plugins, "PRE_START", 0.05)
    scene.vendor.pre_start = True
    scene.vendor.starts.clear()
    await scene.begin(pre_start_once=True)
    scene.driver.claims.add(claim("1", *ids("g0")))
    where = f"{scene.vendors.directory}/vendor.sock"
    assert f"the vendor's plugin at {where} takes too long to answer PreStartContainer: " in str(
        await scene.refused("1")
    )


async def test_administrative_access_is_refused(here: Scene) -> None:
    """A claim with administrative access is refused, since the plugin would allocate a device that others hold."""
    here.driver.claims.add(claim("1", result("g0", adminAccess=True)))
    error = await here.refused("1")
    assert (error.reason, "administrative access is not possible" in str(error)) == ("admin", True)
    assert not here.vendor.asked


async def test_a_mount_without_a_source_is_refused(here: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mount whose host path does not exist is refused, except by an agent in a pod, which cannot see the host."""
    missing = str(here.where / "missing")
    here.vendor.answer = AllocateAnswer(mounts=[(missing, "/opt/lib")])
    here.driver.claims.add(claim("1", *ids("g0")))
    assert f"a mount of {missing}, which does not exist on the host" in str(await here.refused("1"))
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    (edits,) = await here.prepared("1")
    assert edits["mounts"][0]["hostPath"] == missing


async def test_a_node_that_is_missing_is_refused(here: Scene) -> None:
    """A response with a device node that does not exist is refused, since Prepare reads the node's numbers."""
    here.vendor.answer = AllocateAnswer(nodes=[("/dev/no-{id}", "/dev/x-{id}", "rw")])
    here.driver.claims.add(claim("1", *ids("g0")))
    assert (await here.refused("1")).reason == "cdi"


async def test_attributes_have_the_id_put_in(here: Scene) -> None:
    """In text attributes of the config, {id} is replaced by the device's id; numbers are unchanged."""
    source = here.source(attributes={"k8s.cni.cncf.io/deviceID": "{id}", "n": 1}, capacity={"memory": "1Gi"})
    async for devices in source.watch():
        assert [dict(one.attributes) for one in devices[:2]] == [
            {"k8s.cni.cncf.io/deviceID": "g0", "n": 1},
            {"k8s.cni.cncf.io/deviceID": "g1", "n": 1},
        ]
        assert devices[0].capacity == {"memory": "1Gi"}
        break
