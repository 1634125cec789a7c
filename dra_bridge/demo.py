"""`dra-bridge demo`: one node in one process, first switched naively to DRA, then moved by the bridge.

The kubelet, the scheduler and the API server are those that authors test with; the plugin, the
driver and the bridge are real and talk to them over their sockets. Nothing is acted: the first part
fails if the naive switch does not give a device away twice, the second if the bridge does. Nothing
on the machine is touched but a directory under the temporary ones.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self, TextIO

from deviceplugin.demo import DemoError, Teller
from deviceplugin.device import ContainerEdits, Device
from deviceplugin.sources.simulated import SimulatedSource

if TYPE_CHECKING:
    from deviceplugin.testing.pods import FakePod
    from dra_bridge.testing.apiserver import FakeApiServer
    from dra_bridge.testing.node import FakeNode, Holding

__all__ = ["DemoError", "Gpus", "main"]

GPU: Final = "example.com/gpu"
DRIVER: Final = "gpu.example.com"
NODE: Final = "node"
PATIENCE: Final = 15.0
"""Seconds that anything may take before the demo counts as failed."""
SHARES: Final = ("none", "3", "50%", "all", "1", "none")
"""What the node is asked for while pods churn."""
LIVES: Final = (0.3, 0.7)
"""Seconds that a pod runs: longer than the agent takes to read the checkpoint, or a hold is kept 10 s (R7)."""
DWELL: Final = 0.7
"""Seconds of churn after each move; the demo's own pace, nothing waits for it."""
WIDTH: Final = 72


class Gpus(SimulatedSource):
    """Devices that exist in name only, and tell their container which they are."""

    resource = GPU
    driver = DRIVER

    def __init__(self, count: int) -> None:
        super().__init__(count, prefix="gpu")

    def edits(self, devices: Sequence[Device]) -> ContainerEdits:
        """Tell the container which devices it has."""
        return ContainerEdits(env={"GPU_VISIBLE_DEVICES": ",".join(sorted(device.id for device in devices))})


class Background:
    """A coroutine in a thread and a loop of its own, while the context lasts."""

    def __init__(self, name: str, make: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self.error: BaseException | None = None
        self._make = make
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[None] | None = None
        self._made = threading.Event()
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        try:
            self._made.wait(PATIENCE)
        except BaseException:  # Ctrl-C: it would go on making sockets where all is being removed
            self._end()
            raise
        return self

    def _end(self) -> None:
        self._made.wait(PATIENCE)  # before, there is nothing to cancel
        if self._loop is not None and self._task is not None:
            with contextlib.suppress(RuntimeError):  # it has ended by itself
                self._loop.call_soon_threadsafe(self._task.cancel)
        self._thread.join(PATIENCE)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()
        if kind is None and self.error is not None:
            raise DemoError(f"{self._thread.name} has failed: {self.error!r}")

    def _main(self) -> None:
        async def run() -> None:
            self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
            self._made.set()
            await self._make()

        try:
            asyncio.run(run())
        except asyncio.CancelledError:
            pass
        except BaseException as error:  # handed to whoever leaves the context
            self.error = error
        finally:
            self._made.set()


async def plain_driver(server: FakeApiServer, node: FakeNode, gpus: Gpus, directory: Path) -> None:
    """Be a DRA driver as others are: it offers every device and knows of no plugin."""
    from deviceplugin.inventory import Inventory
    from dra_bridge import ledger
    from dra_bridge.driver import ClusterClaims, Driver, ServedResource
    from dra_bridge.driver.registrar import Registrar
    from dra_bridge.kube import Cluster
    from dra_bridge.ledger import AsyncLedger, Side
    from dra_bridge.slices import Offer, Pool, Publisher

    inventory = Inventory(GPU)
    inventory.publish(gpus.devices)
    async_ledger = await AsyncLedger.open(str(directory / "plain-driver.db"))
    await async_ledger.do(ledger.adopt(GPU, inventory.snapshot.devices, Side.DRA, time.time()))
    async with Cluster.from_server(server.url) as cluster:
        publisher = Publisher(cluster, node.name)
        publisher.want(Pool(DRIVER, node.name, (Offer(inventory.snapshot),)))
        driver = Driver(
            DRIVER,
            node.name,
            [ServedResource(gpus, inventory)],
            async_ledger,
            ClusterClaims(cluster, node.name),
            cdi_directory=str(directory / "cdi"),
        )
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(Registrar(driver, node.root).run())
                group.create_task(publisher.run())
        finally:
            await driver.close()
            await async_ledger.close()


async def bridge(server: FakeApiServer, node: FakeNode, gpus: Gpus, directory: Path) -> None:
    """Be the bridge's agent, as `dra-bridge run` is."""
    from dra_bridge.kube import Cluster
    from dra_bridge.node.bridge import Bridge

    await Bridge(
        [gpus],
        {},
        Cluster.from_server(server.url),
        node.name,
        node.paths,
        cdi_directory=str(directory / "cdi"),
        period=0.05,
    ).run()


class Scene:
    """A cluster of one node, what happens on it, and what is checked."""

    def __init__(self, teller: Teller) -> None:
        self.teller = teller
        self.tell = teller.tell
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        from dra_bridge.testing.apiserver import FakeApiServer
        from dra_bridge.testing.node import FakeNode

        with contextlib.ExitStack() as stack:
            self.directory = Path(tempfile.mkdtemp(prefix="dra-demo-"))
            stack.callback(shutil.rmtree, self.directory, ignore_errors=True)
            self.server = stack.enter_context(FakeApiServer())
            self.server.create(
                {
                    "apiVersion": "resource.k8s.io/v1",
                    "kind": "DeviceClass",
                    "metadata": {"name": DRIVER},
                    "spec": {
                        "extendedResourceName": GPU,
                        "selectors": [{"cel": {"expression": f'device.driver == "{DRIVER}"'}}],
                    },
                }
            )
            self.node = stack.enter_context(FakeNode(self.server, NODE))
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, trace)

    def check(self, so: bool, what: str) -> None:
        """Make sure of what is to be told."""
        if not so:
            raise DemoError(f"this should be so and is not: {what}")

    def device(self, pod: FakePod, side: str) -> str:
        """Return the single device of a running pod, having made sure of its side and of what its container sees."""
        devices = self.node.devices_of(pod)
        self.check(list(devices.values()) == [side], f"{pod.name} runs with one device on the side {side}: {devices}")
        (name,) = devices
        self.check(self.visible(pod) == name, f"{pod.name} sees {name}, not {self.visible(pod)!r}")
        return name

    def visible(self, pod: FakePod) -> str:
        """Return the variable in a pod's container, be it from the plugin or from a CDI file."""
        edits: dict[str, Any] = {}
        for file in (self.directory / "cdi").glob("*.json"):
            spec = json.loads(file.read_bytes())
            edits |= {f"{spec['kind']}={one['name']}": one["containerEdits"] for one in spec["devices"]}
        variables = dict(pod.env)
        for name in pod.container().cdi_devices:
            variables.update(entry.split("=", 1) for entry in edits.get(name, {}).get("env", ()))
        return variables.get("GPU_VISIBLE_DEVICES", "")

    def offered(self) -> int:
        """Return how many devices the slices offer."""
        from dra_bridge.testing.scheduler import offered

        return len(offered(self.server.objects(), NODE))

    def wait(self, met: Callable[[], bool], what: str, why: Callable[[], str] = str) -> None:
        """Wait until something is so; why: what to add when it is not."""
        try:
            self.server.wait_for(lambda _: met(), PATIENCE)
        except TimeoutError:
            raise DemoError(f"this should come and does not: {what}; {why()}".rstrip("; ")) from None


# The naive switch.


def naive(scene: Scene) -> None:
    """Stop a plugin while its pods run, with a driver that offers the same devices."""
    from deviceplugin.testing.serving import serve
    from dra_bridge.testing.node import overlaps

    gpus, node, tell = Gpus(2), scene.node, scene.tell
    with contextlib.ExitStack() as stack:
        plugin = stack.enter_context(contextlib.ExitStack())
        plugin.enter_context(serve(gpus, node, timeout=PATIENCE, period=0.1))
        node.wait_allocatable(GPU, 2, PATIENCE)
        tell("plugin", f"a device plugin serves {GPU}: gpu-0, gpu-1")
        olds = [node.start_pod(name, {GPU: 1}).wait_running(PATIENCE) for name in ("train-1", "train-2")]
        tell("pod", "; ".join(f"{pod.name} runs with {scene.device(pod, 'plugin')}" for pod in olds))
        driver = Background("plain driver", lambda: plain_driver(scene.server, node, gpus, scene.directory))
        stack.enter_context(driver)
        node.dra.wait_registered(DRIVER, timeout=PATIENCE)
        scene.wait(lambda: scene.offered() == 2, "the driver's slice")
        tell("driver", "a DRA driver is installed beside it, its slice offers gpu-0, gpu-1")
        new = node.start_pod("batch", {GPU: 1})
        scene.check(new.phase == "Pending", "batch waits: both devices are taken")
        tell("pod", "batch asks for one as well and waits: both are taken")
        plugin.close()
        node.wait_allocatable(GPU, 0, PATIENCE)
        tell("plugin", "is uninstalled; allocatable: 0. train-1 and train-2 run on")
        new.wait_running(PATIENCE)
        name = scene.device(new, "claim")
        holder = next(pod for pod in olds if scene.visible(pod) == name)
        tell("pod", f"batch starts at once, through DRA, with {name}: nothing is allocatable, the slice has it")
        twice = overlaps(node.holdings())
        scene.check(len(twice) == 1 and holder.running and new.running, "one device has two holders")
        scene.teller.table(
            ("DEVICE", "HOLDER", "THROUGH", "ITS CONTAINER SEES"),
            [
                (one.device, one.pod, one.side, f"GPU_VISIBLE_DEVICES={scene.visible(node.pods[f'default/{one.pod}'])}")
                for one in sorted(node.holdings(), key=lambda one: (one.device, one.begin))
            ],
        )
        tell("device", f"{name} is in the hands of {holder.name} and batch at the same time")
        for pod in (new, *olds):
            pod.delete(PATIENCE)


# The bridge.


class Churn:
    """Pods of both kinds that come and go, more of them than there are devices, while the context lasts."""

    def __init__(self, node: FakeNode, each: int) -> None:
        self.started: Counter[str] = Counter()
        self.failed: list[str] = []
        self.error: Exception | None = None
        self._node = node
        self._each = each
        self._over = threading.Event()
        self._random = random.Random(7)  # noqa: S311 - no secret
        self._pods: dict[str, list[tuple[FakePod, float]]] = {"plain": [], "claim": []}
        self._thread = threading.Thread(target=self._main, name="churn", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(PATIENCE)
        for listed in self._pods.values():
            for last, _life in listed:
                last.delete(PATIENCE)

    def _main(self) -> None:
        try:
            while not self._over.wait(0.02):
                for kind, listed in self._pods.items():
                    self._turn(kind, listed)
        except Exception as error:
            self.error = error

    def _turn(self, kind: str, listed: list[tuple[FakePod, float]]) -> None:
        now = time.monotonic()
        for entry in list(listed):
            pod, life = entry
            if pod.phase == "Failed":
                self.failed.append(f"  {pod.name}: {pod.reason}: {pod.message}"[:90])
            elif not pod.running or now - pod.container().starts[0] < life:
                continue
            listed.remove(entry)
            pod.delete(PATIENCE)
        while len(listed) < self._each:
            self.started[kind] += 1
            name = f"{kind}-{self.started[kind]}"
            if kind == "plain":
                pod = self._node.start_pod(name, {GPU: 1})
            else:
                pod = self._node.start_pod(name, template={DRIVER: 1})
            listed.append((pod, self._random.uniform(*LIVES)))


class Bridged:
    """The second part: the same devices, moved by the bridge."""

    def __init__(self, scene: Scene, count: int) -> None:
        self.scene = scene
        self.node = scene.node
        self.server = scene.server
        self.tell = scene.tell
        self.check = scene.check
        self.count = count

    def play(self) -> tuple[float, float]:
        """Tell all of it; return from when to when pods churned."""
        self.node.wait_allocatable(GPU, self.count, PATIENCE)
        self.node.dra.wait_registered(DRIVER, timeout=PATIENCE)
        self.scene.wait(self.settled, "the first slice")
        names = ", ".join(sorted(self.node.devices(GPU)))
        self.tell("bridge", f"serves {names} on both sides; all are on the plugin's side")
        train = self.node.start_pod("train", {GPU: 1}).wait_running(PATIENCE)
        held = self.scene.device(train, "plugin")
        self.tell("pod", f"train runs with {held}")
        self.ask("all")
        self.scene.wait(lambda: self.counts() == {"dra": self.count - 1, "to-dra": 1}, "all but one to move")
        self.node.wait_allocatable(GPU, 0, PATIENCE)
        self.check(self.waits().get(held) is not None, f"{held} waits")
        self.tell("bridge", f"is asked for `all`: {self.count - 1} idle devices move, {held} waits for train")
        batch = self.node.start_pod("batch", {GPU: 1}).wait_running(PATIENCE)
        got = self.scene.device(batch, "claim")
        self.check(got != held, "batch has another device")
        self.tell("pod", f"batch, an unchanged pod, starts through DRA with {got}")
        train.delete(PATIENCE)
        began = time.monotonic()
        self.scene.wait(self.settled, "the last device to move")
        self.tell("bridge", f"train ends, {held} moves {time.monotonic() - began:.2f} s later")
        batch.delete(PATIENCE)
        return self.churn()

    def churn(self) -> tuple[float, float]:
        """Move devices back and forth while pods of both kinds come and go."""
        began = time.monotonic()
        self.tell("pod", f"{self.count} pods by resource and {self.count} by claim now come and go all the time")
        with Churn(self.node, self.count) as churn:
            for share in SHARES:
                took = self.ask(share)
                self.scene.wait(self.settled, f"the move to {share}", self.obstacles)
                where = ", ".join(f"{number} {state}" for state, number in sorted(self.counts().items()))
                self.tell("bridge", f"is asked for {share:<5} {time.monotonic() - took:.2f} s later: {where}")
                self.dwell(churn)
        if churn.error is not None:
            raise DemoError(f"a pod did not go: {churn.error}")
        ended = time.monotonic()
        self.tell(
            "pod",
            f"{churn.started['plain']} pods by resource, {churn.started['claim']} by claim were made, "
            f"{len(churn.failed)} failed",
            *(("where a device was withdrawn between scheduling and admission:",) if churn.failed else ()),
            *churn.failed[:3],
        )
        return began, ended

    def dwell(self, churn: Churn) -> None:
        """Let some pods come and go where devices are now."""
        started, until = churn.started.total(), time.monotonic() + DWELL
        self.node.wait_until(
            lambda: churn.started.total() > started + 4 and time.monotonic() > until, PATIENCE, "pods to come and go"
        )

    def ask(self, share: str) -> float:
        """Ask for a share, as `dra-bridge migrate` does; return when."""
        from dra_bridge.rollout.fleet import share_patch

        node = self.server.get("nodes", NODE)
        node["metadata"].setdefault("annotations", {}).update(share_patch(DRIVER, share)["metadata"]["annotations"])
        self.server.replace(node)
        return time.monotonic()

    def view(self) -> Any:
        """Return what `dra-bridge status` would show."""
        from dra_bridge.rollout import fleet

        (view,) = fleet.views(DRIVER, self.server.objects("nodes"), self.server.objects())
        return view

    def settled(self) -> bool:
        """Whether all devices are where they should be."""
        from dra_bridge.rollout import fleet

        return fleet.settled(self.view())

    def obstacles(self) -> str:
        """Return what the move waits for."""
        from dra_bridge.rollout import fleet

        return "; ".join(fleet.obstacles(self.view()))

    def counts(self) -> dict[str, int]:
        """Return how many devices are where."""
        reported = self.view().reported
        return dict(reported.resources[GPU].counts) if reported is not None else {}

    def waits(self) -> dict[str, str]:
        """Return the devices in the move, and their holders."""
        return {one.name: one.holder for one in self.view().devices if one.state.value.startswith("to-")}


def timeline(holdings: Sequence[Holding], began: float, ended: float) -> list[tuple[str, ...]]:
    """Return for each device who held it when, a character for a moment: p a pod through the plugin, c a claim."""
    rows: list[tuple[str, ...]] = []
    step = (ended - began) / WIDTH
    for device in sorted({one.device for one in holdings}):
        line = ["."] * WIDTH
        mine = [one for one in holdings if one.device == device]
        for one in mine:
            if one.end is not None and one.end <= began:
                continue
            first = max(0, int((one.begin - began) / step))
            last = WIDTH - 1 if one.end is None else min(WIDTH - 1, int((one.end - began) / step))
            for place in range(first, last + 1):
                line[place] = "p" if one.side == "plugin" else "c"
        sides = Counter(one.side for one in mine)
        rows.append((device, "".join(line), str(sides["plugin"]), str(sides["claim"])))
    return rows


def bridged(scene: Scene) -> None:
    """Tell the second part and prove that no device had two holders."""
    from dra_bridge.testing.node import overlaps

    gpus = Gpus(4)
    with Background("bridge", lambda: bridge(scene.server, scene.node, gpus, scene.directory)):
        began, ended = Bridged(scene, 4).play()
    holdings = scene.node.holdings()
    scene.teller.title("\nWho held what when (p: a pod through the plugin, c: a claim, .: nobody)")
    scene.teller.table(("DEVICE", f"{ended - began:.1f} s", "BY PLUGIN", "BY CLAIM"), timeline(holdings, began, ended))
    twice = overlaps(holdings)
    sides = Counter(one.side for one in holdings)
    scene.check(min(sides["plugin"], sides["claim"]) > 10, "devices were held on both sides")
    scene.check(not twice, f"no device had two holders: {twice[:3]}")
    scene.check(not scene.node.crashes, f"the kubelet did not crash: {scene.node.crashes}")
    scene.teller.title(f"\n{len(holdings)} times a device was held; never by two at once.")


class _Remember(logging.Handler):
    """Keeps the logs for the case that the demo fails."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(f"{record.levelname} {record.name}: {record.getMessage()}")


@contextlib.contextmanager
def _quiet() -> Iterator[_Remember]:
    """Keep what is logged to oneself."""
    remembered = _Remember()
    before = {name: logging.getLogger(name).propagate for name in ("deviceplugin", "dra_bridge")}
    for name in before:
        logging.getLogger(name).propagate = False
        logging.getLogger(name).addHandler(remembered)
    try:
        yield remembered
    finally:
        for name, propagated in before.items():
            logging.getLogger(name).propagate = propagated
            logging.getLogger(name).removeHandler(remembered)


def main(hold: bool = False, stream: TextIO | None = None) -> int:
    """Tell the story; return the exit status: 0, or 1 if something was not as it should be.

    hold: go on serving after that, until SIGINT or SIGTERM. stream: where to, stdout if None.
    """
    teller = Teller(stream or sys.stdout)
    with _quiet() as remembered:
        try:
            teller.title("A node in one process: kubelet, scheduler and API server are those of the tests,")
            teller.title("plugin, driver and bridge are real.\n")
            teller.title(
                "1. The node is switched from its plugin to DRA while pods run: what happens without the bridge"
            )
            with Scene(teller) as scene:
                naive(scene)
            teller.title("\n2. The same with the bridge")
            with Scene(teller) as scene:
                bridged(scene)
                if hold:
                    _hold(scene)
        except (DemoError, RuntimeError, TimeoutError) as error:
            teller.tell("failed", str(error), *remembered.lines[-20:])
            return 1
    return 0


def _hold(scene: Scene) -> None:
    """Keep the node with an agent until a signal comes."""
    over = threading.Event()
    before = {number: signal.signal(number, lambda *_: over.set()) for number in (signal.SIGINT, signal.SIGTERM)}
    kubeconfig = scene.directory / "kubeconfig"
    kubeconfig.write_text(
        json.dumps(
            {
                "apiVersion": "v1",
                "kind": "Config",
                "current-context": "demo",
                "clusters": [{"name": "demo", "cluster": {"server": scene.server.url}}],
                "users": [{"name": "demo", "user": {}}],
                "contexts": [{"name": "demo", "context": {"cluster": "demo", "user": "demo"}}],
            }
        )
    )
    try:
        with Background("bridge", lambda: bridge(scene.server, scene.node, Gpus(4), scene.directory)):
            scene.teller.title("\nStill serving; Ctrl-C ends it. In another shell:")
            scene.teller.title(f"  dra-bridge status --kubeconfig {kubeconfig}")
            scene.teller.title(
                f"  dra-bridge migrate {NODE} --driver {DRIVER} --share all --wait --kubeconfig {kubeconfig}"
            )
            over.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
