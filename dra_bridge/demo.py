"""`dra-bridge demo`: simulates a node that switches to DRA, first without the bridge, then with the bridge.

The kubelet, the scheduler and the API server are fakes from `testing`; the plugin, the driver and the bridge are real.
The first part, without the bridge, fails unless a device gets two holders. The second part, with the bridge, fails if a
device gets two holders.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import random
import tempfile
import textwrap
import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self, TextIO

from deviceplugin import demo as plugin_demo
from deviceplugin.demo import GPU, DemoError, Printer, check
from deviceplugin.inventory import Inventory
from deviceplugin.register import operations
from deviceplugin.register.records import Side
from deviceplugin.register.register import Register
from deviceplugin.register.rules import Evidence
from deviceplugin.testing.pods import FakePod
from deviceplugin.testing.serving import serve
from dra_bridge.driver import ClusterClaims, Driver, DriverNode, ServedResource
from dra_bridge.driver.registrar import DriverDirectories, Registrar
from dra_bridge.kube import Cluster
from dra_bridge.ledger.worker import AsyncLedger
from dra_bridge.rollout import fleet
from dra_bridge.slices.desired import Offer, Pool
from dra_bridge.slices.publisher import Publisher
from dra_bridge.testing import scheduler
from dra_bridge.testing.apiserver import FakeApiServer
from dra_bridge.testing.node import FakeNode, Holding, overlaps
from dra_bridge.testing.serving import device_class, serve_both

DRIVER: Final = "gpu.example.com"
NODE: Final = "node"
TIMEOUT: Final = 15.0
"""Seconds that a step may take before the demo counts as failed."""
SHARES: Final = ("none", "3", "50%", "all", "1", "none")
"""The shares that the demo requests one after the other while pods start and end."""
LIVES: Final = (0.5, 0.9)
"""Minimum and maximum seconds for which a pod runs. The minimum gives the agent time to read the kubelet's checkpoint.
If a pod ended before the agent has read the checkpoint, the agent would treat the pod's device as held for 10 s."""
DWELL: Final = 0.7
"""Minimum seconds between two moves of devices, in which pods start and end. The value only sets the demo's pace."""
WIDTH: Final = 72
MOST_TEXT: Final = 80
"""Maximum characters per line of the text about a pod's failure, without the 18 characters before the text."""


class DemoGpus(plugin_demo.Gpus):
    """Simulated GPUs that pods and claims can get."""

    driver = DRIVER


@contextlib.contextmanager
def in_background(name: str, work: Callable[[], Coroutine[Any, Any, None]]) -> Iterator[None]:
    """While the context is active, run a coroutine in its own thread and event loop. Raises DemoError on a failure."""
    over = threading.Event()
    errors: list[Exception] = []

    async def main() -> None:
        task = asyncio.create_task(work())
        ending = asyncio.create_task(asyncio.to_thread(over.wait))
        await asyncio.wait({task, ending}, return_when=asyncio.FIRST_COMPLETED)
        task.cancel()
        results = await asyncio.gather(task, return_exceptions=True)
        errors.extend(result for result in results if isinstance(result, Exception))

    thread = threading.Thread(target=lambda: asyncio.run(main()), name=name, daemon=True)
    try:
        thread.start()
        yield
    finally:
        over.set()
        thread.join(TIMEOUT)
    if errors:
        raise DemoError(f"{name} has failed: {errors[0]!r}")


@dataclass(frozen=True)
class Scene:
    """A cluster of one node, with methods to observe and change it."""

    printer: Printer
    directory: Path
    server: FakeApiServer
    node: FakeNode

    def device(self, pod: FakePod, side: str) -> str:
        """Return the only device of a running pod.

        Check that the pod got the device from `side` (plugin or claim), and that the pod's container sees the device.
        """
        devices = self.node.devices_of(pod)
        check(list(devices.values()) == [side], f"{pod.name} runs with one device on the side {side}: {devices}")
        (name,) = devices
        check(self.visible(pod) == name, f"{pod.name} sees {name}, not {self.visible(pod)!r}")
        return name

    def visible(self, pod: FakePod) -> str:
        """Return GPU_VISIBLE_DEVICES in a pod's container: the device that the plugin or a CDI file names there."""
        return self.node.edits_of(pod).env.get("GPU_VISIBLE_DEVICES", "")

    def wait(self, met: Callable[[], bool], what: str, why: Callable[[], str] = str) -> None:
        """Wait until `met` returns True. Raises DemoError after TIMEOUT seconds.

        what: the condition in words, for the error. why: a function that returns further text for the error.
        """
        try:
            self.server.wait_for(lambda _: met(), TIMEOUT)
        except TimeoutError:
            raise DemoError(f"not reached within {TIMEOUT:g} s: {what}; {why()}".rstrip("; ")) from None

    def ask(self, share: str) -> float:
        """Request a share as `dra-bridge migrate` does. Return the time of the request (monotonic seconds)."""
        node, patch = self.server.get("nodes", NODE), fleet.share_patch(DRIVER, share)
        node["metadata"].setdefault("annotations", {}).update(patch["metadata"]["annotations"])
        self.server.replace(node)
        return time.monotonic()

    def view(self) -> Any:
        """Return the node's state as `dra-bridge status` would show it."""
        (view,) = fleet.views(DRIVER, self.server.objects("nodes"), (), leases=self.server.objects("leases"))
        return view

    def moved(self) -> bool:
        """Return whether as many devices are on the DRA side as the requested share requires."""
        return fleet.finished(self.view())

    def counts(self) -> dict[str, int]:
        """Return how many devices are in each state."""
        reported = self.view().reported
        return dict(reported.resources[GPU].counts) if reported is not None else {}


@contextlib.contextmanager
def scene(printer: Printer) -> Iterator[Scene]:
    """Run a cluster of one node while the context lasts."""
    with (
        tempfile.TemporaryDirectory(prefix="dra-demo-", ignore_cleanup_errors=True) as directory,
        FakeApiServer() as server,
    ):
        server.create(device_class(GPU, DRIVER))
        with FakeNode(server, NODE) as node:
            yield Scene(printer, Path(directory), server, node)


async def plain_driver(scene: Scene, gpus: DemoGpus) -> None:
    """Run a DRA driver without the bridge.

    The driver offers every device, because it does not know which devices the plugin has given to pods.
    """
    inventory = Inventory(GPU)
    inventory.publish(gpus.devices)
    async_ledger = await AsyncLedger.open(str(scene.directory / "plain-driver.db"))
    devices = inventory.devices
    await async_ledger.do(operations.reconcile_evidence(GPU, Evidence(), devices, Side.DRA, time.time()))
    async with Cluster.from_server(scene.server.url) as cluster:
        publisher = Publisher(cluster, NODE)
        publisher.want(Pool(DRIVER, NODE, (Offer(inventory.snapshot),)))
        claims, register = ClusterClaims(cluster, NODE), Register(store=async_ledger)
        node = DriverNode(NODE, register, claims, str(scene.node.cdi))
        driver = Driver(DRIVER, node, [ServedResource(gpus, inventory)])
        try:
            async with asyncio.TaskGroup() as group:
                root = scene.node.root
                directories = DriverDirectories(root / "plugins" / "plain", root / "plugins_registry")
                group.create_task(Registrar(driver, directories).run())
                group.create_task(publisher.run())
        finally:
            await driver.close()
            await async_ledger.close()


def naive(scene: Scene) -> None:
    """Run the demo's first part: end a plugin while its pods run, and start a driver that offers the same devices."""
    gpus, node, event = DemoGpus(2), scene.node, scene.printer.event
    with contextlib.ExitStack() as stack:
        plugin = stack.enter_context(contextlib.ExitStack())
        plugin.enter_context(serve(gpus, node, timeout=TIMEOUT, period=0.1))
        node.wait_allocatable(GPU, 2, TIMEOUT)
        event("plugin", f"a device plugin serves {GPU}: gpu-0, gpu-1")
        olds = [node.start_pod(name, {GPU: 1}).wait_running(TIMEOUT) for name in ("train-1", "train-2")]
        event("pod", "; ".join(f"{pod.name} runs with {scene.device(pod, 'plugin')}" for pod in olds))
        stack.enter_context(in_background("plain driver", lambda: plain_driver(scene, gpus)))
        node.dra.wait_registered(DRIVER, timeout=TIMEOUT)
        scene.wait(lambda: len(scheduler.offered(scene.server.objects(), NODE)) == 2, "the driver's slice")
        event("driver", "a DRA driver is installed beside it, its slice offers gpu-0, gpu-1")
        new = node.start_pod("batch", {GPU: 1})
        check(new.phase == "Pending", "batch waits: both devices are taken")
        event("pod", "batch asks for one as well and waits: both are taken")
        plugin.close()
        node.wait_allocatable(GPU, 0, TIMEOUT)
        event("plugin", "is uninstalled; allocatable: 0. train-1 and train-2 run on")
        new.wait_running(TIMEOUT)
        name = scene.device(new, "claim")
        holder = next(pod for pod in olds if scene.visible(pod) == name)
        event("pod", f"batch starts through DRA with {name}: none is allocatable, but the slice has it")
        check(len(overlaps(node.holdings())) == 1 and holder.running and new.running, "one device has two holders")
        sees = {pod.name: f"GPU_VISIBLE_DEVICES={scene.visible(pod)}" for pod in (new, *olds)}
        holdings = sorted(node.holdings(), key=lambda holding: (holding.device, holding.begin))
        rows = [(holding.device, holding.pod, holding.side, sees[holding.pod]) for holding in holdings]
        scene.printer.table(("DEVICE", "HOLDER", "THROUGH", "ITS CONTAINER SEES"), rows)
        event("device", f"{name} is held by {holder.name} and by batch at the same time")
        for pod in (new, *olds):
            pod.delete(TIMEOUT)


def bridge(scene: Scene) -> contextlib.AbstractContextManager[object]:
    """Run the bridge's agent for the scene's node, as `dra-bridge run` does, while the context lasts."""
    return serve_both(DemoGpus(4), scene.node, share="none", timeout=TIMEOUT, period=0.05)


class Churn:
    """While active, starts and ends pods with `limits` and pods with claims, more pods than devices."""

    def __init__(self, node: FakeNode, each: int) -> None:
        self.started: Counter[str] = Counter()
        self.failed: list[str] = []
        self.error: Exception | None = None
        self._node = node
        self._each = each
        self._over = threading.Event()
        self._random = random.Random(7)  # noqa: S311 - no secret
        self._lives: dict[str, dict[FakePod, float]] = {"plain": {}, "claim": {}}
        """For each kind of pod, the existing pods, each with the seconds for which it should run."""
        self._thread = threading.Thread(target=self._main, name="churn", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(TIMEOUT)
        for pod in (pod for lives in self._lives.values() for pod in lives):
            pod.delete(TIMEOUT)

    def _main(self) -> None:
        try:
            while not self._over.wait(0.02):
                for kind, lives in self._lives.items():
                    self.replace_ended(kind, lives)
        except Exception as error:
            self.error = error

    def replace_ended(self, kind: str, lives: dict[FakePod, float]) -> None:
        """Delete pods that have failed or have run for their time, and start as many new pods.

        lives: for each pod, the seconds for which it should run.
        """
        now = time.monotonic()
        for pod, life in list(lives.items()):
            if pod.phase == "Failed":
                self.failed.append(f"{pod.name}: {pod.reason}: {pod.message}")
            elif not pod.running or now - pod.container().starts[0] < life:
                continue
            del lives[pod]
            pod.delete(TIMEOUT)
        while len(lives) < self._each:
            self.started[kind] += 1
            name, wanted = f"{kind}-{self.started[kind]}", ({GPU: 1}, None) if kind == "plain" else (None, {DRIVER: 1})
            pod = self._node.start_pod(name, wanted[0], template=wanted[1])
            lives[pod] = self._random.uniform(*LIVES)


def move_devices(scene: Scene, count: int) -> tuple[float, float]:
    """Move devices by the bridge, first with two pods. Then run `move_under_churn`, and return its result."""
    node, event = scene.node, scene.printer.event
    node.wait_allocatable(GPU, count, TIMEOUT)
    event("bridge", f"serves {', '.join(sorted(node.devices(GPU)))} on both sides; all are on the plugin's side")
    train = node.start_pod("train", {GPU: 1}).wait_running(TIMEOUT)
    held = scene.device(train, "plugin")
    event("pod", f"train runs with {held}")
    scene.ask("all")
    scene.wait(lambda: scene.counts() == {"dra": count - 1, "to-dra": 1}, "all but one to move")
    node.wait_allocatable(GPU, 0, TIMEOUT)
    waiting = {device.name for device in scene.view().devices if device.state.value.startswith("to-")}
    check(held in waiting, f"{held} waits")
    event("bridge", f"share `all` requested: {count - 1} idle devices move, {held} waits for train")
    batch = node.start_pod("batch", {GPU: 1}).wait_running(TIMEOUT)
    got = scene.device(batch, "claim")
    check(got != held, "batch has another device")
    event("pod", f"batch, an unchanged pod, starts through DRA with {got}")
    train.delete(TIMEOUT)
    began = time.monotonic()
    scene.wait(scene.moved, "the last device to move")
    event("bridge", f"train ends, {held} moves {time.monotonic() - began:.2f} s later")
    batch.delete(TIMEOUT)
    return move_under_churn(scene, count)


def move_under_churn(scene: Scene, count: int) -> tuple[float, float]:
    """Move devices to DRA and back while pods start and end. Return the times of begin and end (monotonic seconds)."""
    event, began = scene.printer.event, time.monotonic()
    event("pod", f"{count} pods by resource and {count} by claim now come and go all the time")
    with Churn(scene.node, count) as churn:
        for share in SHARES:
            asked = scene.ask(share)
            scene.wait(scene.moved, f"the move to {share}", lambda: "; ".join(fleet.obstacles(scene.view())))
            where = ", ".join(f"{number} {state}" for state, number in sorted(scene.counts().items()))
            event("bridge", f"share {share:<5} requested, {time.monotonic() - asked:.2f} s later: {where}")
            enough, until = churn.started.total() + 4, time.monotonic() + DWELL
            while churn.started.total() <= enough or time.monotonic() <= until:
                check(time.monotonic() < until + TIMEOUT, "pods come and go")
                time.sleep(0.01)
    if churn.error is not None:
        raise DemoError(f"a pod was not deleted: {churn.error}")
    ended = time.monotonic()
    made = f"{churn.started['plain']} pods by resource, {churn.started['claim']} by claim were made"
    why = ["where a device was withdrawn between scheduling and admission:"] if churn.failed else []
    event("pod", f"{made}, {len(churn.failed)} failed", *why, *failures(churn.failed))
    return began, ended


def failures(failed: Sequence[str]) -> list[str]:
    """Return the first three failures of pods, wrapped into lines."""
    wrapped = [
        textwrap.wrap(failure, MOST_TEXT, initial_indent="  ", subsequent_indent="    ") for failure in failed[:3]
    ]
    return [line for lines in wrapped for line in lines]


def timeline(holdings: Sequence[Holding], began: float, ended: float) -> list[tuple[str, ...]]:
    """Return a row for each device, with a character for each moment: p if a pod with `limits` has it, c if a claim."""
    rows: list[tuple[str, ...]] = []
    step = (ended - began) / WIDTH
    for device in sorted({holding.device for holding in holdings}):
        line = ["."] * WIDTH
        own = [holding for holding in holdings if holding.device == device]
        for holding in own:
            first, last = (math.floor((at - began) / step) for at in (holding.begin, holding.end or ended))
            for moment in range(max(0, first), min(WIDTH - 1, last) + 1):
                line[moment] = holding.side[0]
        sides = Counter(holding.side for holding in own)
        rows.append((device, "".join(line), str(sides["plugin"]), str(sides["claim"])))
    return rows


def bridged(scene: Scene) -> None:
    """Run the demo's second part, with the bridge, and check that no device had two holders."""
    printer = scene.printer
    with bridge(scene):
        began, ended = move_devices(scene, 4)
    holdings = scene.node.holdings()
    printer.title("\nWhat held each device when (p: a pod through the plugin, c: a claim, .: nothing)")
    printer.table(("DEVICE", f"{ended - began:.1f} s", "PLUGIN", "CLAIM"), timeline(holdings, began, ended))
    twice = overlaps(holdings)
    sides = Counter(holding.side for holding in holdings)
    check(min(sides["plugin"], sides["claim"]) > 10, "devices were held on both sides")
    check(not twice, f"no device had two holders: {twice[:3]}")
    check(not scene.node.crashes, f"the kubelet did not crash: {scene.node.crashes}")
    printer.title(f"\n{len(holdings)} times a device was held; never by two at once.")


def main(hold: bool = False, stream: TextIO | None = None) -> int:
    """Run the demo and return the exit status.

    hold: whether to keep the node running at the end. stream: see `deviceplugin.demo.show`.
    """

    def scenario(printer: Printer) -> None:
        printer.title(
            "A node in one process: kubelet, scheduler and API server are those of the tests,",
            "plugin, driver and bridge are real.\n",
            "1. The node is switched from its plugin to DRA while pods run: what happens without the bridge",
        )
        with scene(printer) as first:
            naive(first)
        printer.title("\n2. The same with the bridge")
        with scene(printer) as second:
            bridged(second)
            if hold:
                serve_on(second)

    return plugin_demo.show(scenario, stream)


def serve_on(scene: Scene) -> None:
    """Keep the node and the bridge's agent running until a signal comes."""
    kubeconfig = scene.directory / "kubeconfig"
    named = {
        "clusters": [{"name": "demo", "cluster": {"server": scene.server.url}}],
        "users": [{"name": "demo", "user": {}}],
        "contexts": [{"name": "demo", "context": {"cluster": "demo", "user": "demo"}}],
    }
    kubeconfig.write_text(json.dumps({"apiVersion": "v1", "kind": "Config", "current-context": "demo", **named}))
    with bridge(scene):
        plugin_demo.wait_for_signal(
            scene.printer,
            "\nStill serving; Ctrl-C ends it. In another shell:",
            f"  dra-bridge status --kubeconfig {kubeconfig}",
            f"  dra-bridge migrate {NODE} --driver {DRIVER} --share all --wait --kubeconfig {kubeconfig}",
        )
