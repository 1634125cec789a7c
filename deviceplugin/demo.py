"""Simulates a node in one process for `deviceplugin demo`, and prints the events. `dra_bridge.demo` uses the classes.

Before the demo prints a line about an event, it checks that the event has happened. If not, the demo fails. The demo
writes only to a temporary directory.
"""

from __future__ import annotations

import asyncio
import io
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Final, TextIO

from deviceplugin.device import ContainerEdits, Device, Health
from deviceplugin.sources.simulated import SimulatedSource
from deviceplugin.tables import aligned
from deviceplugin.testing.kubelet import FakeKubelet
from deviceplugin.testing.pods import FakePod
from deviceplugin.testing.serving import Served, serve

GPU: Final = "example.com/gpu"
TIMEOUT: Final = 10.0
"""Seconds within which each step of the demo must succeed."""


class DemoError(Exception):
    """Raised when an expected event of the demo has not happened within the timeout."""


def check(met: bool, what: str) -> None:
    """Raise DemoError if `met` is False. what: the condition in words."""
    if not met:
        raise DemoError(f"expected, but not true: {what}")


def joined(ids: Iterable[str]) -> str:
    """Join sorted ids with commas, for an environment variable or a sentence."""
    return ",".join(sorted(ids))


class Gpus(SimulatedSource):
    """A source of simulated devices, which gives each container an environment variable with the ids of its devices."""

    resource = GPU

    def __init__(self, count: int, numa: int | None = None) -> None:
        super().__init__(count, numa=numa, prefix="gpu")

    def edits(self, devices: Sequence[Device]) -> ContainerEdits:
        """Return an environment variable with the ids of the container's devices."""
        return ContainerEdits(env={"GPU_VISIBLE_DEVICES": joined(device.id for device in devices)})


class Printer:
    """Prints events of the demo, in colours if the output is a terminal."""

    COLOURS: Final = {"kubelet": 34, "plugin": 35, "driver": 36, "bridge": 36, "pod": 32, "device": 33, "failed": 31}

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._coloured = stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
        self._began = time.monotonic()

    def title(self, *lines: str) -> None:
        """Print lines in bold, as a title."""
        self._print(*(self._styled(line, 1) for line in lines))

    def event(self, subject: str, text: str, *more: str) -> None:
        """Print an event with its time. subject: the event's cause, such as "kubelet".

        more: further lines about the event.
        """
        passed = self._styled(f"{time.monotonic() - self._began:5.2f} s", 2)
        self._print(f"{passed}  {self._styled(f'{subject:<8}', self.COLOURS[subject])} {text}")
        self._print(*(f"{'':18}{line}" for line in more))

    def table(self, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Print a table with a header."""
        first, *rest = aligned((header, *rows))
        self.title(first)
        self._print(*rest)

    def _styled(self, text: str, code: int) -> str:
        return f"\033[{code}m{text}\033[0m" if self._coloured else text

    def _print(self, *lines: str) -> None:
        self._stream.writelines(f"{line}\n" for line in lines)
        self._stream.flush()


def show(scenario: Callable[[Printer], None], stream: TextIO | None) -> int:
    """Run a scenario; return the exit status: 0, or 1 if a check failed.

    stream: the stream to which the scenario prints, None for stdout. Log lines are printed only if the scenario fails.
    """
    printer, logged = Printer(stream or sys.stdout), io.StringIO()
    handler = logging.StreamHandler(logged)
    handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
    root = logging.getLogger()
    root.handlers, before = [handler], root.handlers
    try:
        scenario(printer)
    except (DemoError, RuntimeError, TimeoutError) as error:
        printer.event("failed", str(error), *logged.getvalue().splitlines()[-20:])
        return 1
    finally:
        root.handlers = before
    return 0


def wait_for_signal(printer: Printer, *lines: str) -> None:
    """Print lines, then wait until the process gets SIGINT or SIGTERM."""

    async def signalled() -> None:
        # A plain handler must not set a threading.Event: it would wait for ever for a lock that this thread holds.
        over, loop = asyncio.Event(), asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, over.set)
        printer.title(*lines)
        await over.wait()

    asyncio.run(signalled())


class _HookedGpus(Gpus):
    """A source of four devices on two NUMA nodes, which defines most of the hooks of `DeviceSource`."""

    def __init__(self, notify: Callable[[], None]) -> None:
        super().__init__(4, numa=2)
        self.reset_ids: list[str] = []
        self.released_ids: list[str] = []
        self._notify = notify

    def reset(self, devices: Sequence[Device]) -> None:
        self.reset_ids += [device.id for device in devices]

    def released(self, devices: Sequence[Device]) -> None:
        self.released_ids += [device.id for device in devices]
        self._notify()


@dataclass
class _Demo:
    """The scenario of the demo. Each step changes the simulated node, waits for the result, checks it and prints it."""

    kubelet: FakeKubelet
    gpus: _HookedGpus
    served: Served
    event: Callable[..., None]
    pods: list[FakePod] = field(default_factory=list)

    def play(self) -> None:
        self.registration()
        trainer = self.pod("trainer", 2)
        near = {self.numa(name) for name in trainer.device_ids}
        check(len(near) == 1, "trainer's devices are NUMA neighbours")
        self.event("plugin", f"chooses devices for a pod that wants two: both are on NUMA node {near.pop()}")
        notebook = self.pod("notebook", 1)
        batch = self.waiting_pod("batch", 2)
        self.end(trainer)
        self.starts_at_last(batch)
        self.failure_and_recovery()
        self.holders()
        self.kubelet_restart()
        self.end(notebook)
        ended = set(notebook.device_ids)
        self.kubelet.wait_until(lambda: ended <= set(self.gpus.released_ids), TIMEOUT, f"released of {ended}")
        self.event(
            "plugin", f"its `released` hook gets {joined(ended)}, though the device plugin API has no Deallocate"
        )
        self.pod("evening", 1)

    def registration(self) -> None:
        self.kubelet.wait_allocatable(GPU, 4, TIMEOUT)
        self.event("kubelet", f"is up in {self.kubelet.root}")
        by_node = groupby(sorted(self.kubelet.devices(GPU), key=self.numa), self.numa)
        nodes = [f"NUMA node {node}: {' '.join(sorted(devices))}" for node, devices in by_node]
        check(len(nodes) == 2, "the devices are on two NUMA nodes")
        self.event("plugin", f"registered {GPU}; allocatable: 4", "   ".join(nodes))

    def pod(self, name: str, count: int) -> FakePod:
        pod = self.kubelet.start_pod(name, {GPU: count})
        self.pods.append(pod)
        self.check_runs(pod)
        env = " ".join(f"{key}={value}" for key, value in sorted(pod.env.items()))
        self.event("pod", f"{name} asks for {count}, runs with {' and '.join(pod.device_ids)}", f"env: {env}")
        return pod

    def waiting_pod(self, name: str, count: int) -> FakePod:
        pod = self.kubelet.start_pod(name, {GPU: count})
        self.pods.append(pod)
        free = self.kubelet.allocatable(GPU) - len(self.held())
        check(pod.phase == "Pending" and free < count, f"{name} has to wait")
        self.event("pod", f"{name} asks for {count}, waits: {free} free")
        return pod

    def starts_at_last(self, pod: FakePod) -> None:
        self.check_runs(pod)
        self.event("pod", f"{pod.name} waited, now runs with {' and '.join(pod.device_ids)}")

    def end(self, pod: FakePod) -> None:
        pod.complete(timeout=TIMEOUT)
        check(pod.phase == "Succeeded", f"{pod.name} has succeeded")
        self.event("pod", f"{pod.name} is done, {' and '.join(pod.device_ids)} free again")

    def failure_and_recovery(self) -> None:
        """Check that a pod waits while the only free device is unhealthy, and starts when the device has recovered."""
        idle = self.kubelet.devices(GPU).keys() - self.held().keys()
        check(len(idle) == 1, f"one device is free, not {idle}")
        free = idle.pop()
        self.gpus.set_health(free, Health.UNHEALTHY, "fell off the bus")
        self.kubelet.wait_allocatable(GPU, 3, TIMEOUT)
        check(self.kubelet.devices(GPU)[free].health == "Unhealthy", f"{free} is unhealthy")
        check(self.kubelet.capacity(GPU) == 4, "capacity stays")
        self.event("device", f"{free} fell off the bus; allocatable: 3, capacity: 4")
        pod = self.waiting_pod("nightly", 1)
        self.gpus.set_health(free, Health.HEALTHY)
        self.kubelet.wait_allocatable(GPU, 4, TIMEOUT)
        self.event("device", f"{free} recovered; allocatable: 4")
        self.starts_at_last(pod)
        check(pod.device_ids == (free,), f"nightly got {free}")

    def holders(self) -> None:
        """Wait until the plugin has read the holders of devices from the kubelet's checkpoint."""
        wanted, until, shown = self.held(), time.monotonic() + TIMEOUT, None
        while shown != wanted:
            check(time.monotonic() < until, f"the plugin knows the holders {wanted}, not {shown}")
            time.sleep(0.01)  # The end of a scan causes no event, so it is polled.
            (resource,) = self.served.agent.status().resources
            shown = {name: holder.pod for name, holders in resource.holders.items() for holder in holders}
        self.event("plugin", "reads the holders: " + ", ".join(map(" ".join, sorted(wanted.items()))))

    def kubelet_restart(self) -> None:
        """Restart the kubelet. The kubelet forgets its plugins, so the plugin registers again. Pods continue to run."""
        before = self.held()
        registered = len(self.kubelet.registrations)
        self.kubelet.stop()
        self.event("kubelet", "is gone; its plugins' registrations are lost, the pods run on")
        began = time.monotonic()
        self.kubelet.start()
        again = self.kubelet.wait_registered(GPU, registered + 1, TIMEOUT)
        self.kubelet.wait_allocatable(GPU, 4, TIMEOUT)
        self.event("kubelet", "starts again, deletes every socket, reads its checkpoint")
        self.event("plugin", f"registered again {(again.at - began) * 1000:.0f} ms after the kubelet began to start")
        unharmed = self.held() == before and all(not pod.container().restarts for pod in self.pods)
        check(unharmed, "no pod was harmed")
        self.event("pod", f"{', '.join(dict.fromkeys(before.values()))} kept their devices and were not restarted")

    def summary(self) -> list[tuple[str, ...]]:
        rows: list[tuple[str, ...]] = []
        for pod in self.pods:
            check(set(pod.device_ids) <= set(self.gpus.reset_ids), f"{pod.name}'s devices were reset")
            (count,) = pod.requests.values()
            numa = sorted({str(self.numa(name)) for name in pod.device_ids})
            now = "runs" if pod.running else "is done"
            rows.append((pod.name, str(count), " ".join(pod.device_ids), " ".join(numa), now))
        return rows

    def check_runs(self, pod: FakePod) -> None:
        """Wait until a pod runs. Check that the pod has all requested devices, and that no other pod has them."""
        (count,) = pod.wait_running(TIMEOUT).requests.values()
        check(pod.running and len(pod.device_ids) == count, f"{pod.name} runs with {count} devices")
        others = {name for other in self.pods if other.running and other is not pod for name in other.device_ids}
        check(others.isdisjoint(pod.device_ids), f"{pod.name} has {pod.device_ids} to itself")
        check(pod.env.get("GPU_VISIBLE_DEVICES") == joined(pod.device_ids), f"{pod.name} knows its devices")

    def held(self) -> dict[str, str]:
        """Return, for each device that a running pod has, the name of this pod."""
        return {name: pod.name for pod in self.pods if pod.running for name in pod.device_ids}

    def numa(self, device: str) -> int:
        """Return the NUMA node that the kubelet has recorded for a device."""
        return self.kubelet.devices(GPU)[device].numa[0]


def main(hold: bool = False, stream: TextIO | None = None) -> int:
    """Run the demo; return the exit status as `show` does. hold: whether to serve until SIGINT or SIGTERM."""

    def scenario(printer: Printer) -> None:
        with FakeKubelet() as kubelet:
            gpus = _HookedGpus(kubelet.notify)
            with serve(gpus, kubelet, timeout=TIMEOUT, period=0.1) as served:
                printer.title("A node in one process: an embedded kubelet, a device plugin, pods.")
                demo = _Demo(kubelet, gpus, served, printer.event)
                demo.play()
                rows = demo.summary()
                check(not kubelet.crashes, f"the kubelet did not crash: {kubelet.crashes}")
                printer.title("\nWhich pod held what")
                printer.table(("POD", "ASKED", "DEVICES", "NUMA", "NOW"), rows)
                if hold:
                    wait_for_signal(
                        printer,
                        "\nStill serving; Ctrl-C ends it. To try a plugin of your own on this kubelet:",
                        f"  deviceplugin run --config FILE {' '.join(kubelet.arguments)}",
                    )

    return show(scenario, stream)
