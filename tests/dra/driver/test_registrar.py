"""Registration of a DRA driver with a kubelet that behaves as the real one does."""

from __future__ import annotations

import asyncio
import math
import os
import re
import shutil
import socket
import tempfile
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import pytest

from deviceplugin import addresses, filewatch
from deviceplugin.backoff import Backoff
from deviceplugin.device import ContainerEdits, Device, Health
from deviceplugin.directory_watch import DirectoryReader
from deviceplugin.inventory import Inventory
from deviceplugin.kubelet.plugin_directory import PluginDirectory
from deviceplugin.register.register import Register
from dra_bridge.driver import Driver, DriverNode, ServedResource
from dra_bridge.driver import registrar as registrar_module
from dra_bridge.driver.registrar import DriverDirectories, Registrar, RegistrarTiming, health_list
from dra_bridge.testing.kubelet import HEALTH_SERVICES, FakeDraKubelet, FakeDraPod, PodError
from tests.dra.driver.served import NODE, D, FakeClaims, Plain, ref, result, served_driver
from tests.dra.driver.served import claim as made_claim
from tests.testing.bare_dra import BareDriver
from tests.waits import until

AGENT = "agent"
QUICK = RegistrarTiming(patience=30.0, drain=0.5, keep_alive=10.0)
_T = TypeVar("_T")


def claim(name: str, uid: str, *results: tuple[str, str]) -> dict[str, Any]:
    """Return a claim for the pods p1 and p2. results: each a request and a device."""
    listed = [result(device, request) for request, device in results]
    return made_claim(uid, *listed, name=name, pods=("p1", "p2"))


@pytest.fixture
def root() -> Iterator[Path]:
    # A short path, because a socket's path has at most 107 bytes.
    path = Path(tempfile.mkdtemp(prefix="k"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def server() -> FakeClaims:
    return FakeClaims()


@pytest.fixture
def kubelet(root: Path, server: FakeClaims) -> Iterator[FakeDraKubelet]:
    with FakeDraKubelet(root, server.read) as running:
        yield running


@pytest.fixture
async def driver(root: Path, server: FakeClaims) -> AsyncIterator[Driver]:
    devices = [Device(f"d{n}", nodes=["/dev/null"], edits=ContainerEdits({f"N{n}": "1"})) for n in range(3)]
    made = await served_driver(root, claims=server, devices=devices)
    yield made.driver
    await made.end()


class Running:
    """A registrar that runs until the block ends."""

    def __init__(
        self, driver: Driver, root: Path, timing: RegistrarTiming = QUICK, kubelet: PluginDirectory | None = None
    ) -> None:
        directories = DriverDirectories(root / "plugins" / AGENT, root / "plugins_registry", poll=0.2)
        self.registrar = Registrar(driver, directories, kubelet=kubelet, timing=timing)
        self.task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Registrar:
        self.task = asyncio.create_task(self.registrar.run())
        return self.registrar

    async def __aexit__(self, *_: object) -> None:
        assert self.task is not None
        self.task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await self.task


async def aside(work: Callable[..., _T], *args: Any) -> _T:
    """Call the fake kubelet in a thread, so that the driver's event loop can answer."""
    return await asyncio.to_thread(work, *args)


async def test_a_driver_registers_prepares_and_goes(
    driver: Driver, root: Path, kubelet: FakeDraKubelet, server: FakeClaims
) -> None:
    """A driver registers with the kubelet, prepares and unprepares a pod's claim, and leaves no socket when it ends.

    Each container gets the devices of its own requests; a second pod gets the same answer.
    """

    def files() -> list[Path]:
        return [path for path in (root / "cdi").rglob("*") if path.is_file()]

    server.add(claim("c", "uid-1", ("left", "d0"), ("right", "d1")))
    async with Running(driver, root) as registrar:
        (plugin,) = await aside(kubelet.wait_registered, D)
        assert plugin.service == "v1.DRAPlugin"
        assert registrar.statistics.registered
        pod = FakeDraPod("p1", "p1", ["c"], {"a": [("c", "left")], "b": [("c", "right")], "all": [("c", "")]})
        ids = await aside(kubelet.prepare_pod, pod)
        assert (len(ids["a"]), len(ids["b"]), len(ids["all"])) == (1, 1, 2)
        assert set(ids["a"]).isdisjoint(ids["b"])
        assert set(ids["all"]) == {*ids["a"], *ids["b"]}
        other = replace(pod, name="p2", uid="p2")
        assert await aside(kubelet.prepare_pod, other) == ids
        await aside(kubelet.unprepare_pod, pod)
        assert len(files()) == 2, "another pod still uses it"
        await aside(kubelet.unprepare_pod, other)
        assert not files()
    await aside(kubelet.wait_for, lambda: kubelet.plugins(D) == [])
    assert os.listdir(root / "plugins_registry") == []
    assert not (root / "plugins" / AGENT).exists(), "the one socket is in plugins_registry"


@pytest.mark.parametrize("service", ["v1.DRAPlugin", "v1beta1.DRAPlugin"])
async def test_both_versions_of_the_api_answer_alike(
    driver: Driver, root: Path, server: FakeClaims, service: str
) -> None:
    """A kubelet uses the version that it knows (1.32 and 1.33: v1beta1); v1 also has the share ID.

    Each claim of a call has its own error.
    """
    server.add(made_claim("1", result("d0", "r/big", shareID="s")), made_claim("2", result("d9")))
    claims = [ref("1"), ref("2")]
    with FakeDraKubelet(root, server.read, services=[service]) as kubelet:
        async with Running(driver, root):
            (plugin,) = await aside(kubelet.wait_registered, D)
            assert plugin.service == service
            answers = await aside(kubelet.call, D, "NodePrepareResources", claims)
            (device,) = answers["1"].devices
            assert list(device.request_names) == ["r"]
            assert getattr(device, "share_id", "s") == "s"
            assert device.cdi_device_ids[0].startswith(f"{D}/claim=")
            assert re.search(r"request 'fpga': driver .* has no device 'd9'", answers["2"].error)
            ended = await aside(kubelet.call, D, "NodeUnprepareResources", claims)
            assert {uid: answer.error for uid, answer in ended.items()} == {"1": "", "2": ""}
            assert not driver.records.all()


async def test_a_restarted_kubelet_finds_the_driver_and_prepares_again(
    driver: Driver, root: Path, kubelet: FakeDraKubelet, server: FakeClaims
) -> None:
    """A restarted kubelet registers the driver, gets the same answer for a claim, and unprepares the ended pod."""
    server.add(claim("c", "uid-1", ("r", "d0")))
    pod = FakeDraPod("p1", "p1", ["c"], {"a": [("c", "r")]})
    async with Running(driver, root):
        await aside(kubelet.wait_registered, D)
        before = await aside(kubelet.prepare_pod, pod)
        await aside(kubelet.restart)
        await aside(kubelet.wait_registered, D)
        after = await aside(kubelet.prepare_pod, pod)
        # Kubelet 1.36.3 adds the devices of a second answer to those that it read from its claim state.
        assert {name: set(ids) for name, ids in after.items()} == {name: set(ids) for name, ids in before.items()}
        await aside(kubelet.unprepare_pod, pod)
        assert not driver.records.ledger.snapshot.claims


async def test_a_kubelet_that_was_restarted_has_not_registered_the_driver(
    driver: Driver, root: Path, kubelet: FakeDraKubelet
) -> None:
    """After a kubelet restart the driver counts as not registered, and makes a new socket if that lasts."""
    own = root / "kubelet.sock"
    own.touch()
    quick = RegistrarTiming(patience=0.3, drain=0.2)
    async with Running(driver, root, quick, PluginDirectory(root)) as registrar:
        (first,) = await aside(kubelet.wait_registered, D)
        await aside(kubelet.wait_for, lambda: registrar.registered)
        await aside(kubelet.stop)
        own.unlink()
        await aside(kubelet.wait_for, lambda: not registrar.registered)
        own.touch()
        await aside(kubelet.wait_for, lambda: "was restarted" in registrar.statistics.error)
        await aside(kubelet.wait_for, lambda: not os.path.exists(first.endpoint))
        await aside(kubelet.start)
        await aside(kubelet.wait_registered, D)
        await aside(kubelet.wait_for, lambda: registrar.registered)
        assert registrar.statistics.error == ""


@pytest.mark.parametrize("what", ["plugins_registry", "socket"])
async def test_a_socket_that_vanishes_comes_back(
    driver: Driver, root: Path, kubelet: FakeDraKubelet, what: str
) -> None:
    """If the driver's socket or its directory is removed, the driver makes a new socket and registers again."""
    async with Running(driver, root) as registrar:
        (first,) = await aside(kubelet.wait_registered, D)
        if what == "socket":
            os.remove(first.endpoint)
        else:
            await aside(kubelet.stop)
            shutil.rmtree(root / what)
            await aside(kubelet.start)
        await aside(
            kubelet.wait_for,
            lambda: [p.connected and p.told and p.endpoint != first.endpoint for p in kubelet.plugins(D)] == [True],
        )
        assert registrar.statistics.registrations >= 2


async def test_a_refusal_is_said_and_tried_again(
    driver: Driver, root: Path, kubelet: FakeDraKubelet, caplog: pytest.LogCaptureFixture
) -> None:
    """After a refused registration, the driver logs the reason and registers by a new socket."""
    kubelet.refuse = "the moon is in the wrong phase"
    async with Running(driver, root) as registrar:
        await aside(kubelet.wait_for, lambda: any("wrong phase" in failure for failure in kubelet.failures))
        kubelet.refuse = ""
        await aside(kubelet.wait_registered, D)
        assert registrar.statistics.failures >= 1
        assert registrar.statistics.error == ""
    assert "the moon is in the wrong phase" in caplog.text


async def test_two_instances_may_be_registered_at_once(driver: Driver, root: Path, kubelet: FakeDraKubelet) -> None:
    """Of two instances of a driver, as in a rolling update, the kubelet calls the newer; the older keeps its socket."""
    async with Running(driver, root):
        (old,) = await aside(kubelet.wait_registered, D)
        async with Running(driver, root):
            both = await aside(kubelet.wait_registered, D, 2)
            assert [plugin.endpoint == old.endpoint for plugin in both] == [True, False]
            assert kubelet.plugin(D).endpoint != old.endpoint
        (left,) = await aside(kubelet.wait_registered, D)
        assert left.endpoint == old.endpoint
        assert os.path.exists(old.endpoint)


def abandon(*paths: Path) -> None:
    """Make sockets at which no process listens, as a killed process leaves them."""
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind(str(path))


async def test_sockets_of_killed_processes_are_swept_and_those_of_others_are_not(
    driver: Driver, root: Path, kubelet: FakeDraKubelet
) -> None:
    """An agent that starts removes sockets of its killed processes, also of former drivers, but no other sockets."""
    registry, own = root / "plugins_registry", root / "plugins" / AGENT
    instance = DriverDirectories(own, registry).instance
    dead = [registry / f"{name}-{instance}0123abcd-reg.sock" for name in (D, "former.example.com")]
    # An agent of a former version had two sockets for each driver.
    dead += [registry / f"{name}-456789ab-reg.sock" for name in (D, "former.example.com")] + [own / "dra-456789ab.sock"]
    elsewhere = DriverDirectories(root / "plugins" / "other-agent", registry).instance
    other = [registry / f"{D}-{elsewhere}0123abcd-reg.sock", registry / "other.example.com-0123abcd-reg.sock"]
    abandon(*dead, *other, own / "other.sock")
    async with Running(driver, root):
        await aside(kubelet.wait_registered, D)
        assert [path for path in dead if path.exists()] == []
        assert [path for path in (*other, own / "other.sock") if not path.exists()] == []


async def test_the_sockets_are_swept_once_for_all_drivers(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight drivers that start at once test the agent's sockets only once, as each test connects to each socket."""
    swept: list[int] = []
    remove = addresses.remove_abandoned

    def count(paths: Iterable[Path]) -> None:
        swept.append(len(paths := list(paths)))
        remove(paths)

    monkeypatch.setattr(addresses, "remove_abandoned", count)
    directories = DriverDirectories(root / "plugins" / AGENT, root / "plugins_registry")
    abandon(*(directories.registry / f"d{n}.example.com-{directories.instance}0123abcd-reg.sock" for n in range(3)))
    await asyncio.gather(*(asyncio.to_thread(directories.prepare) for _ in range(8)))
    assert swept == [3]
    assert os.listdir(directories.registry) == []


async def test_a_driver_of_a_former_version_may_be_registered_beside_this_one(
    driver: Driver, root: Path, kubelet: FakeDraKubelet, server: FakeClaims
) -> None:
    """The kubelet calls this driver, not a former version's driver beside it, whose two sockets stay."""
    server.add(claim("c", "uid-1", ("r", "d0")))
    former, pod = BareDriver(root, D), FakeDraPod("p1", "p1", ["c"], {"a": [("c", "r")]})
    (old,) = await aside(kubelet.wait_registered, D)
    assert old.endpoint != old.socket
    async with Running(driver, root):
        both = await aside(kubelet.wait_registered, D, 2)
        assert both[1].endpoint == both[1].socket
        assert await aside(kubelet.prepare_pod, pod)
        assert not former.prepared
        assert os.path.exists(old.endpoint)
        assert os.path.exists(old.socket)
        await aside(former.stop)
        await aside(kubelet.wait_for, lambda: kubelet.plugins(D) == [both[1]])
        await aside(kubelet.unprepare_pod, pod)
        assert not driver.records.ledger.snapshot.claims


async def test_drivers_of_an_agent_share_a_directory(
    driver: Driver, root: Path, kubelet: FakeDraKubelet, server: FakeClaims
) -> None:
    """Two drivers have a socket each in plugins_registry; one that ends leaves the other's socket."""
    records, inventory = driver.records, driver.devices.resources[0].inventory
    other = Driver(
        "other.example.com",
        DriverNode(NODE, Register(store=records.ledger), server, str(root / "cdi")),
        [ServedResource(Plain(), inventory)],
    )
    async with Running(driver, root):
        async with Running(other, root):
            both = [(await aside(kubelet.wait_registered, one.name))[0].endpoint for one in (driver, other)]
            assert {os.path.dirname(endpoint) for endpoint in both} == {str(root / "plugins_registry")}
        await aside(kubelet.wait_for, lambda: kubelet.plugins(other.name) == [])
        assert [os.path.exists(endpoint) for endpoint in both] == [True, False]
        (left,) = await aside(kubelet.wait_registered, D)
        assert left.endpoint == both[0]
    await other.close()


async def test_silence_is_broken_by_new_sockets(driver: Driver, root: Path) -> None:
    """Until a kubelet registers the driver, it makes new sockets now and then: a kubelet may have missed one."""
    registry = root / "plugins_registry"
    registry.mkdir()
    names: set[str] = set()
    with filewatch.shared().watch([str(registry)]) as watch:
        async with Running(driver, root, replace(QUICK, patience=0.1)) as registrar, asyncio.timeout(10):
            while len(names) < 3:
                await watch.wait(1.0)
                names.update(os.listdir(registry))
            with FakeDraKubelet(root, lambda namespace, name: None) as kubelet:
                await aside(kubelet.wait_registered, D)
            assert registrar.statistics.registered


@dataclass
class Waits(Backoff):
    """A backoff whose waits all have the same length."""

    def next(self) -> float:
        self.tries += 1
        return self.first


async def test_the_kubelets_own_next_try_may_be_the_sooner(root: Path, driver: Driver, server: FakeClaims) -> None:
    """If the kubelet registers the driver during its wait after a refusal, the driver makes no new socket."""
    running = Running(driver, root)
    registrar = running.registrar
    registrar.backoff = Waits(3.0)
    ended, real = asyncio.Event(), registrar.pause

    async def pause() -> None:
        await real()
        ended.set()

    registrar.pause = pause  # type: ignore[method-assign]
    with FakeDraKubelet(root, server.read) as kubelet:
        kubelet.refuse = "not now"
        async with running, asyncio.timeout(60):
            await aside(kubelet.wait_for, lambda: any("not now" in failure for failure in kubelet.failures))
            kubelet.refuse = ""
            (plugin,) = await aside(kubelet.wait_registered, D)
            await ended.wait()
            assert registrar.statistics.registrations == 1
            assert [one.endpoint for one in await aside(kubelet.wait_registered, D)] == [plugin.endpoint]


async def test_a_kubelet_that_goes_on_refusing_is_asked_ever_more_rarely(
    driver: Driver, root: Path, kubelet: FakeDraKubelet
) -> None:
    """While registrations are refused, the driver waits by its backoff before each new socket."""
    kubelet.refuse = "never"
    running = Running(driver, root)
    waits = running.registrar.backoff = Waits(0.2)
    made: set[str] = set()
    async with running, asyncio.timeout(60):
        while len(made) < 3:
            made.update(os.listdir(root / "plugins_registry"))
            await asyncio.sleep(0.01)
    assert waits.tries >= 2


async def test_sockets_of_a_registered_driver_are_looked_at_when_they_change(
    driver: Driver, root: Path, kubelet: FakeDraKubelet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once the driver is registered, it waits for changes of its sockets without a timeout."""
    waits: list[float] = []
    wait = DirectoryReader.wait

    async def note(reader: DirectoryReader, timeout: float = math.inf, *arguments: Any, **named: Any) -> bool:
        waits.append(timeout)
        return await wait(reader, timeout, *arguments, **named)

    monkeypatch.setattr(DirectoryReader, "wait", note)
    async with Running(driver, root, replace(QUICK, patience=0.5)), asyncio.timeout(60):
        await aside(kubelet.wait_registered, D)
        await aside(kubelet.wait_for, lambda: waits[-1] == math.inf)


async def test_a_registry_that_cannot_be_written_is_said_and_waited_for(
    driver: Driver, root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """If the plugin registry's directory cannot be made, the log says so; once it can be made, the driver registers."""
    (root / "plugins_registry").write_text("in the way")
    async with Running(driver, root) as registrar:
        await until(lambda: registrar.statistics.failures)
        (root / "plugins_registry").unlink()
        with FakeDraKubelet(root, lambda namespace, name: None) as kubelet:
            await aside(kubelet.wait_registered, D)
    assert "cannot serve" in caplog.text


async def test_health_is_told_at_once_and_kept_alive(driver: Driver, root: Path, kubelet: FakeDraKubelet) -> None:
    """A change of health reaches the kubelet at once, with state and message; complete lists follow as a keep-alive.

    After 31 s without a list, the kubelet counts a device as unknown.
    """
    inventory = driver.devices.resources[0].inventory
    async with Running(driver, root, replace(QUICK, keep_alive=0.05)):
        await aside(kubelet.wait_registered, D)
        await aside(kubelet.wait_for, lambda: kubelet.health(D, NODE, "d0").health == "healthy")
        devices = list(inventory.snapshot.devices.values())
        inventory.publish(
            [devices[0].with_health(Health.UNHEALTHY, "it smokes"), devices[1].with_health(Health.UNKNOWN), devices[2]]
        )
        await aside(kubelet.wait_for, lambda: kubelet.health(D, NODE, "d0").health == "unhealthy")
        assert kubelet.health(D, NODE, "d0").message == "it smokes"
        assert [kubelet.health(D, NODE, f"d{n}").health for n in (1, 2)] == ["unknown", "healthy"]
        count = len(kubelet.updates)
        await aside(kubelet.wait_for, lambda: len(kubelet.updates) >= count + 3)
        assert {size for _, size in kubelet.updates} == {3}
        assert kubelet.health(D, NODE, "d2", later=31.0).health == "unknown"


@pytest.mark.parametrize(
    ("known", "chosen"),
    [
        (None, "v1alpha1.DRAResourceHealth"),
        (HEALTH_SERVICES, "v1.DRAResourceHealth"),
        (HEALTH_SERVICES[1:], "v1alpha1.DRAResourceHealth"),
    ],
    ids=["until 1.36", "since 1.37", "without v1"],
)
async def test_health_reaches_every_kubelet(
    driver: Driver, root: Path, server: FakeClaims, known: Sequence[str] | None, chosen: str
) -> None:
    """Each kubelet chooses a version of the health service that it knows, and uses v1 for claims."""
    with FakeDraKubelet(root, server.read, health_services=known) as kubelet:
        async with Running(driver, root):
            (plugin,) = await aside(kubelet.wait_registered, D)
            assert (plugin.service, plugin.health_service) == ("v1.DRAPlugin", chosen)
            await aside(kubelet.wait_for, lambda: kubelet.health(D, NODE, "d0").health == "healthy")


async def test_a_kubelet_since_1_37_opens_no_health_stream_that_is_not_listed(
    driver: Driver, root: Path, server: FakeClaims, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kubelet since 1.37 opens no health stream if the driver lists no health service (Kubernetes#139477)."""
    monkeypatch.setattr(registrar_module, "SERVICES", ("v1.DRAPlugin",))
    with FakeDraKubelet(root, server.read, health_services=HEALTH_SERVICES) as kubelet:
        async with Running(driver, root):
            (plugin,) = await aside(kubelet.wait_registered, D)
            assert (plugin.health_service, kubelet.updates) == ("", [])
            assert kubelet.health(D, NODE, "d0").health == "unknown"


async def test_health_needs_no_timer_to_be_told(driver: Driver, root: Path, kubelet: FakeDraKubelet) -> None:
    """A change of health is sent without the keep-alive timer, also for a resource that was added by a reload."""
    async with Running(driver, root, replace(QUICK, keep_alive=3600)) as registrar:
        await aside(kubelet.wait_registered, D)
        await aside(kubelet.wait_for, lambda: kubelet.health(D, NODE, "d0").health == "healthy")
        (first,) = driver.devices.resources
        devices = list(first.inventory.snapshot.devices.values())
        first.inventory.publish([devices[0].with_health(Health.UNHEALTHY, "it smokes"), *devices[1:]])
        await aside(kubelet.wait_for, lambda: kubelet.health(D, NODE, "d0").health == "unhealthy")
        other = type("Other", (Plain,), {"resource": "example.com/more"})()
        more = Inventory(other.resource)
        more.publish([Device("m0")])
        driver.devices.replace([first, ServedResource(other, more)])
        registrar.follow()
        (name,) = (name for name, (served, _) in driver.devices.by_name.items() if served.inventory is more)
        await aside(kubelet.wait_for, lambda: kubelet.health(D, NODE, name).health == "healthy")
        more.publish([Device("m0", health=Health.UNHEALTHY)])
        await aside(kubelet.wait_for, lambda: kubelet.health(D, NODE, name).health == "unhealthy")


async def test_the_keep_alive_is_well_inside_the_kubelets_patience() -> None:
    """Two keep-alive intervals are shorter than the 30 s after which kubelet 1.36 counts health as unknown."""
    assert RegistrarTiming().keep_alive * 2 < 30


async def test_messages_are_cut(driver: Driver) -> None:
    """A health message is cut to 1000 bytes, as the kubelet cuts at 1024; the time is in whole seconds."""
    inventory = driver.devices.resources[0].inventory
    inventory.publish([Device("x", health=Health.UNHEALTHY, message="m\u20ac" * 5000)])
    listed = health_list(driver, 12.7)
    assert {len(entry.message.encode()) for entry in listed.devices} <= {1000, len("the device is gone")}
    assert {entry.last_updated_time for entry in listed.devices} == {12}


@pytest.mark.parametrize("ends", ["holder", "kubelet", "agent"])
async def test_a_call_that_waits_ends(
    driver: Driver, root: Path, kubelet: FakeDraKubelet, server: FakeClaims, ends: str
) -> None:
    """A Prepare waits for the device's holder, and succeeds when the holder ends.

    If the kubelet or the agent stops meanwhile, the Prepare fails and leaves no record.
    """
    server.add(claim("held", "u1", ("r", "d0")))
    server.add(claim("wants", "u2", ("r", "d0")))
    former, pod = FakeDraPod("p1", "p1", ["held"]), FakeDraPod("p2", "p2", ["wants"], {"main": [("wants", "")]})
    async with Running(driver, root):
        await aside(kubelet.wait_registered, D)
        await aside(kubelet.prepare_pod, former)
        waiting = asyncio.create_task(aside(kubelet.prepare_pod, pod))
        await until(lambda: driver.waits.devices)
        if ends == "holder":
            await aside(kubelet.unprepare_pod, former)
            assert (await waiting)["main"]
            return
        if ends == "kubelet":
            await aside(kubelet.stop)
    with pytest.raises(PodError):
        await waiting
    await until(lambda: not driver.waits.devices)
    assert {claim.uid for claim in driver.records.all()} == {"u1"}
