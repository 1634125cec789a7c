"""`deviceplugin demo`: a node in one process, and what happens on it told as it happens.

An embedded kubelet (the one authors test with), a plugin with four simulated devices, pods that
come and go, a device that fails and recovers, a kubelet restart. Every sentence is checked before
it is told; the demo fails when reality differs. Nothing on the machine is touched but a directory
of its own under the temporary ones.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Final, TextIO

from deviceplugin.device import ContainerEdits, Device, Health
from deviceplugin.sources.simulated import SimulatedSource

if TYPE_CHECKING:
    from deviceplugin.testing.kubelet import FakeKubelet
    from deviceplugin.testing.pods import FakePod
    from deviceplugin.testing.serving import Served

__all__ = ["DemoError", "Gpus", "main"]

GPU: Final = "example.com/gpu"
PATIENCE: Final = 10.0
"""Seconds that anything may take before the demo counts as failed."""


class DemoError(Exception):
    """Raised when what is to be told is not so."""


class Gpus(SimulatedSource):
    """Four devices on two NUMA nodes, with most of the hooks a source may have."""

    resource = GPU

    def __init__(self, notify: Callable[[], None]) -> None:
        super().__init__(4, numa=2, prefix="gpu")
        self.reset_ids: list[str] = []
        self.released_ids: list[str] = []
        self._notify = notify

    def edits(self, devices: Sequence[Device]) -> ContainerEdits:
        """Tell the container which devices it has."""
        return ContainerEdits(env={"GPU_VISIBLE_DEVICES": names(device.id for device in devices)})

    def reset(self, devices: Sequence[Device]) -> None:
        """Take note of the devices that are made ready."""
        self.reset_ids += [device.id for device in devices]

    def released(self, devices: Sequence[Device]) -> None:
        """Take note of the devices that came free."""
        self.released_ids += [device.id for device in devices]
        self._notify()


def names(ids: Iterable[str]) -> str:
    """Return ids as people and variables like them."""
    return ",".join(sorted(ids))


class Teller:
    """Writes the story, in colours if somebody is looking."""

    COLOURS: Final = {
        "kubelet": "34",
        "plugin": "35",
        "driver": "36",
        "bridge": "36",
        "pod": "32",
        "device": "33",
        "failed": "31",
    }

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._coloured = stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
        self._began = time.monotonic()

    def title(self, text: str) -> None:
        """Write a line by itself."""
        self._write(self._styled(text, "1"))

    def tell(self, who: str, text: str, *more: str) -> None:
        """Write what happened to whom, and when."""
        passed = f"{time.monotonic() - self._began:5.2f} s"
        self._write(f"{self._styled(passed, '2')}  {self._styled(f'{who:<8}', self.COLOURS[who])} {text}")
        for line in more:
            self._write(f"{'':18}{line}")

    def table(self, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Write a table."""
        widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]
        for row in (header, *rows):
            line = "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
            self._write(self._styled(line, "1") if row is header else line)

    def _styled(self, text: str, code: str) -> str:
        return f"\033[{code}m{text}\033[0m" if self._coloured else text

    def _write(self, line: str) -> None:
        self._stream.write(line + "\n")
        self._stream.flush()


class Demo:
    """The story. Each step does something, waits until it is so, checks it and tells it."""

    def __init__(self, kubelet: FakeKubelet, gpus: Gpus, served: Served, teller: Teller) -> None:
        self.kubelet = kubelet
        self.gpus = gpus
        self.served = served
        self.tell = teller.tell
        self.pods: list[FakePod] = []

    def play(self) -> None:
        """Tell all of it."""
        self.registration()
        trainer = self.pod("trainer", 2)
        near = {self.numa(name) for name in trainer.device_ids}
        self.check(len(near) == 1, "trainer's devices are NUMA neighbours")
        self.tell("plugin", f"was asked what goes well together: both are on NUMA node {near.pop()}")
        notebook = self.pod("notebook", 1)
        batch = self.waiting_pod("batch", 2)
        self.end(trainer)
        self.comes_to_run(batch)
        self.failure_and_recovery()
        self.books()
        self.kubelet_restart()
        self.end(notebook)
        self.release(notebook)
        self.pod("evening", 1)

    def registration(self) -> None:
        """The plugin registers and its devices become allocatable."""
        self.kubelet.wait_allocatable(GPU, 4, PATIENCE)
        self.tell("kubelet", f"is up in {self.kubelet.root}")
        by_node: dict[int, list[str]] = {}
        for name in sorted(self.kubelet.devices(GPU)):
            by_node.setdefault(self.numa(name), []).append(name)
        self.check(len(by_node) == 2, "the devices are on two NUMA nodes")
        self.tell(
            "plugin",
            f"registered {GPU}; allocatable: 4",
            "   ".join(f"NUMA node {node}: {' '.join(devices)}" for node, devices in sorted(by_node.items())),
        )

    def pod(self, name: str, count: int) -> FakePod:
        """A pod for which there are devices."""
        pod = self.kubelet.start_pod(name, {GPU: count}).wait_running(PATIENCE)
        self.pods.append(pod)
        self.holds(pod, count)
        self.tell("pod", f"{name} asks for {count}, runs with {self.have(pod)}", f"env: {self.env(pod)}")
        return pod

    def waiting_pod(self, name: str, count: int) -> FakePod:
        """A pod for which there are not enough devices."""
        pod = self.kubelet.start_pod(name, {GPU: count})
        self.pods.append(pod)
        healthy = {name for name, device in self.kubelet.devices(GPU).items() if device.health == "Healthy"}
        free = len(healthy - self.in_use())
        self.check(pod.phase == "Pending" and free < count, f"{name} has to wait")
        self.tell("pod", f"{name} asks for {count}, waits: {free} free")
        return pod

    def comes_to_run(self, pod: FakePod) -> None:
        """A pod that waited gets its devices."""
        pod.wait_running(PATIENCE)
        (count,) = pod.requests.values()
        self.holds(pod, count)
        self.tell("pod", f"{pod.name} waited, now runs with {self.have(pod)}")

    def end(self, pod: FakePod) -> None:
        """A pod ends by itself."""
        pod.complete(timeout=PATIENCE)
        self.check(pod.phase == "Succeeded", f"{pod.name} has succeeded")
        self.tell("pod", f"{pod.name} is done, {self.have(pod)} free again")

    def failure_and_recovery(self) -> None:
        """A free device fails and recovers; a pod waits for it."""
        left = sorted(self.kubelet.devices(GPU).keys() - self.in_use())
        self.check(len(left) == 1, f"one device is free, not {left}")
        free = left[0]
        self.gpus.set_health(free, Health.UNHEALTHY, "fell off the bus")
        self.kubelet.wait_allocatable(GPU, 3, PATIENCE)
        self.check(self.kubelet.devices(GPU)[free].health == "Unhealthy", f"{free} is unhealthy")
        self.check(self.kubelet.capacity(GPU) == 4, "capacity stays")
        self.tell("device", f"{free} fell off the bus; allocatable: 3, capacity: 4")
        pod = self.waiting_pod("nightly", 1)
        self.gpus.set_health(free, Health.HEALTHY)
        self.kubelet.wait_allocatable(GPU, 4, PATIENCE)
        self.tell("device", f"{free} recovered; allocatable: 4")
        self.comes_to_run(pod)
        self.check(pod.device_ids == (free,), f"nightly got {free}")

    def books(self) -> None:
        """The plugin reads in the kubelet's checkpoint who holds what; Allocate does not say it."""
        wanted = {name: pod.name for pod in self.pods if pod.running for name in pod.device_ids}

        def known() -> dict[str, str]:
            (resource,) = self.served.agent.status().resources
            return {name: holder.pod for name, holders in resource.holders.items() for holder in holders}

        self.kubelet.wait_until(lambda: known() == wanted, PATIENCE, f"{wanted} to be known, not {known()}")
        self.tell("plugin", "reads who holds what: " + ", ".join(f"{name} {wanted[name]}" for name in sorted(wanted)))

    def kubelet_restart(self) -> None:
        """The kubelet forgets its plugins; pods run on, the plugin comes back by itself."""
        before = {pod.name: pod.device_ids for pod in self.pods if pod.running}
        registered = len(self.kubelet.registrations)
        self.kubelet.stop()
        self.tell("kubelet", "is gone; its plugins' registrations are lost, the pods run on")
        began = time.monotonic()
        self.kubelet.start()
        again = self.kubelet.wait_registered(GPU, registered + 1, PATIENCE)
        self.kubelet.wait_allocatable(GPU, 4, PATIENCE)
        self.tell("kubelet", "starts again, deletes every socket, reads its checkpoint")
        self.tell("plugin", f"registered again {(again.at - began) * 1000:.0f} ms after the kubelet began to start")
        after = {pod.name: pod.device_ids for pod in self.pods if pod.running}
        self.check(before == after and all(not pod.container().restarts for pod in self.pods), "no pod was harmed")
        self.tell("pod", f"{', '.join(after)} kept their devices and were not restarted")

    def release(self, pod: FakePod) -> None:
        """The plugin learns that a pod is gone, though the kubelet's API has no Deallocate."""
        wanted = set(pod.device_ids)
        self.kubelet.wait_until(lambda: wanted <= set(self.gpus.released_ids), PATIENCE, f"released of {wanted}")
        self.tell("plugin", f"its `released` hook was told of {names(wanted)} (from the kubelet's PodResources)")

    def summary(self) -> list[tuple[str, ...]]:
        """Return the table of who held what."""
        rows: list[tuple[str, ...]] = []
        for pod in self.pods:
            (count,) = pod.requests.values()
            self.check(set(pod.device_ids) <= set(self.gpus.reset_ids), f"{pod.name}'s devices were reset")
            rows.append(
                (
                    pod.name,
                    str(count),
                    " ".join(pod.device_ids),
                    " ".join(sorted({str(self.numa(name)) for name in pod.device_ids})),
                    "runs" if pod.running else "is done",
                )
            )
        return rows

    # What is checked.

    def check(self, so: bool, what: str) -> None:
        """Make sure of what is to be told."""
        if not so:
            raise DemoError(f"this should be so and is not: {what}")

    def holds(self, pod: FakePod, count: int) -> None:
        """Make sure that a pod has as many devices as it asked for, and nobody else has them."""
        self.check(pod.running and len(pod.device_ids) == count, f"{pod.name} runs with {count} devices")
        others = self.in_use(but=pod)
        self.check(others.isdisjoint(pod.device_ids), f"{pod.name} has {pod.device_ids} to itself")
        self.check(pod.env.get("GPU_VISIBLE_DEVICES") == names(pod.device_ids), f"{pod.name} knows its devices")

    def in_use(self, but: FakePod | None = None) -> set[str]:
        """Return what running pods have."""
        return {name for pod in self.pods if pod.running and pod is not but for name in pod.device_ids}

    def numa(self, device: str) -> int:
        """Return a device's NUMA node as the kubelet knows it."""
        return self.kubelet.devices(GPU)[device].numa[0]

    @staticmethod
    def have(pod: FakePod) -> str:
        """Return a pod's devices for a sentence."""
        return " and ".join(pod.device_ids)

    @staticmethod
    def env(pod: FakePod) -> str:
        """Return a pod's variables for a line."""
        return " ".join(f"{key}={value}" for key, value in sorted(pod.env.items()))


class _Remember(logging.Handler):
    """Keeps the plugin's log for the case that the demo fails."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(f"{record.levelname} {record.name}: {record.getMessage()}")


def main(hold: bool = False, stream: TextIO | None = None) -> int:
    """Tell the story; return the exit status: 0, or 1 if something was not as it should be.

    hold: go on serving after that, until SIGINT or SIGTERM. stream: where to, stdout if None.
    """
    from deviceplugin.testing.kubelet import FakeKubelet
    from deviceplugin.testing.serving import serve

    teller = Teller(stream or sys.stdout)
    log, remembered = logging.getLogger("deviceplugin"), _Remember()
    propagated, log.propagate = log.propagate, False
    log.addHandler(remembered)
    try:
        with FakeKubelet() as kubelet:
            gpus = Gpus(kubelet.notify)
            with serve(gpus, kubelet, timeout=PATIENCE, period=0.1) as served:
                teller.title("A node in one process: an embedded kubelet, a device plugin, pods.")
                demo = Demo(kubelet, gpus, served, teller)
                demo.play()
                rows = demo.summary()
                demo.check(not kubelet.crashes, f"the kubelet did not crash: {kubelet.crashes}")
                teller.title("\nWho held what")
                teller.table(("POD", "ASKED", "DEVICES", "NUMA", "NOW"), rows)
                if hold:
                    _hold(kubelet, teller)
    except (DemoError, RuntimeError, TimeoutError) as error:
        teller.tell("failed", str(error), *remembered.lines[-20:])
        return 1
    finally:
        log.removeHandler(remembered)
        log.propagate = propagated
    return 0


def _hold(kubelet: FakeKubelet, teller: Teller) -> None:
    """Keep kubelet, plugin and pods until a signal comes."""
    over = threading.Event()
    before = {number: signal.signal(number, lambda *_: over.set()) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        teller.title("\nStill serving; Ctrl-C ends it. To try a plugin of your own on this kubelet:")
        teller.title(f"  deviceplugin run --config FILE {' '.join(kubelet.arguments)}")
        over.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
