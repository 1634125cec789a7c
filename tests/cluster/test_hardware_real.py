"""Sysfs identifies a device, not its device number: USB sticks come back, swap numbers and move between ports.

Sysfs is simulated: a tmpfs over /sys/dev/char has a USB device for each stick. As from udev, links by serial number and
by port point to the device nodes.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Collection
from pathlib import Path

import pytest

from tests.cluster import build, isolate, locks
from tests.cluster.node import Pod, remove_ledger
from tests.cluster.test_existing_plugin_real import restart_container
from tests.cluster.test_witnesses_real import LIMIT, Agents, Scene, claimer, plain, reboot, resource, scene
from tests.scenarios.sides import named
from tests.sources.trees import Tree

__all__ = ["scene"]

SYSFS = Path("/sys/dev/char")
FORMS = ["limits", "claim"]


class Sticks:
    """USB serial sticks, each with a serial number, in ports of a hub."""

    def __init__(self) -> None:
        self.at: dict[str, tuple[str, int]] = {}
        """Port and minor number of each stick that is plugged in."""
        for links in ("by-id", "by-path"):
            (locks.NODES / links).mkdir()

    def plug(self, serial: str, minor: int, port: str = "", links: Collection[str] = ("by-id", "by-path")) -> str:
        """Plug a stick into a port (by default a port of its own); return the key of its device node's lock."""
        port = port or f"port-{serial}"
        usb = SYSFS / "pci0000:00/0000:00:14.0/usb1" / port
        interface = usb / f"{port}:1.0" / f"ttyUSB{minor}" / "tty" / f"ttyUSB{minor}"
        interface.mkdir(parents=True)
        for name, value in {"idVendor": "0403", "idProduct": "6001", "serial": serial}.items():
            (usb / name).write_text(f"{value}\n")
        (SYSFS / f"{locks.MAJOR}:{minor}").symlink_to(interface)
        node = locks.NODES / f"ttyUSB{minor}"
        key = locks.make_node(node, minor)
        self.at[serial] = port, minor
        for of in links:
            self.link(serial, of)
        return key

    def link(self, serial: str, links: str) -> None:
        """Make a link to a stick's node, in the directory by-id or by-path."""
        port, minor = self.at[serial]
        (locks.NODES / links / (serial if links == "by-id" else port)).symlink_to(f"../ttyUSB{minor}")

    def of(self, key: str) -> str:
        """Return the serial of the stick whose device node has this key."""
        return next(serial for serial, (_, minor) in self.at.items() if key == f"{locks.MAJOR:x}.{minor:x}")

    def pull(self, *serials: str) -> None:
        """Pull these USB sticks out of their ports."""
        for serial in serials:
            port, minor = self.at.pop(serial)
            (locks.NODES / "by-id" / serial).unlink()
            (locks.NODES / "by-path" / port).unlink()
            (locks.NODES / f"ttyUSB{minor}").unlink()
            (SYSFS / f"{locks.MAJOR}:{minor}").unlink()
            shutil.rmtree(SYSFS / "pci0000:00/0000:00:14.0/usb1" / port)


@pytest.fixture
def sticks(scene: Scene) -> Sticks:
    subprocess.run(["mount", "-t", "tmpfs", "none", str(SYSFS)], check=True)
    scene.stack.callback(subprocess.run, ["umount", str(SYSFS)], check=True)  # unmounted after the agents' end
    return Sticks()


def serve(scene: Scene, form: str, count: int, glob: str = "by-id/*") -> None:
    scene.serve(resource("a", "all" if form == "claim" else "none", devices=[{"path": f"{locks.NODES}/{glob}"}]))
    wait_offered(scene, form, count)


def wait_offered(scene: Scene, form: str, count: int) -> None:
    if form == "claim":
        scene.agents.wait_offered(count)
    else:
        scene.cluster.wait_allocatable(named("a"), count)


def holder(scene: Scene, form: str, name: str) -> Pod:
    pod = scene.claimer(name, "a") if form == "claim" else scene.pod(name, "a")
    scene.running(pod)
    return pod


Start = Callable[[Scene, str, str], Pod]
"""Starts a pod, given the scene, the form (`limits` or `claim`) and the pod's name."""


def await_file(scene: Scene, form: str, pod: Pod, minor: int) -> None:
    """Wait until the CDI file of a pod's claim has a device number; for a pod with limits return at once."""
    if form == "claim":
        claim = pod.status["resourceClaimStatuses"][0]["resourceClaimName"]
        uid = scene.cluster.api.get("ResourceClaim", claim, api_version=scene.agents.api_version)["metadata"]["uid"]

        def minors() -> set[int]:
            files = Path("/var/run/cdi").glob(f"*_{uid}.json")
            devices = [device for file in files for device in json.loads(file.read_text())["devices"]]
            return {node["minor"] for device in devices for node in device["containerEdits"]["deviceNodes"]}

        scene.cluster.wait_for(lambda: minors() == {minor}, LIMIT, f"the CDI file of {uid} has the number {minor}")


def until_taken(scene: Scene) -> None:
    """Wait until one of the waiting pods has a device."""

    def taken() -> bool:
        scene.urge()
        return any(one.pod in scene.waiting for one in locks.holders())

    scene.until("a waiting pod has a device", taken, 60)


def kill(*pods: Pod) -> None:
    for pod in pods:
        for pid in locks.pids(pod.uid):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("agent", ["runs", "restarts"])
@pytest.mark.parametrize("form", FORMS)
def test_a_stick_comes_back_under_another_number(scene: Scene, sticks: Sticks, form: str, agent: str) -> None:
    """A USB stick that returns under another number stays with its pod; a restarted container gets the new node."""
    sticks.plug("A", 1)
    serve(scene, form, 1)
    pod = holder(scene, form, "holder")
    scene.before = 1
    if agent == "restarts":
        scene.agents.kill()
    sticks.pull("A")
    if agent == "runs":
        wait_offered(scene, form, 0)
    key = sticks.plug("A", 2)
    if agent == "restarts":
        scene.agents.start()
        scene.agents.wait_registered()
    wait_offered(scene, form, 1)
    await_file(scene, form, pod, 2)
    restart_container(scene, pod)
    assert scene.key(pod) == key
    wants = claimer("wants", "a") if form == "claim" else plain("wants", "a")
    scene.wait(wants)
    scene.handed_on(pod.delete, [pod.uid], "wants")


def for_the_plugin_alone(scene: Scene) -> Agents:
    """Return agents that are stopped; their config has the USB sticks for limits only, to run `deviceplugin run`."""
    agents = scene.serve(resource("a", "none", devices=[{"path": f"{locks.NODES}/by-id/*"}]))
    agents.stop()
    scene.cluster.wait_allocatable(named("a"), 0)
    agents.resources[:] = [{"name": named("a"), "devices": [{"path": f"{locks.NODES}/by-id/*"}]}]
    agents.write()
    return agents


def test_a_stick_comes_back_while_the_plugin_alone_restarts(scene: Scene, sticks: Sticks) -> None:
    """While the plugin is stopped, a held USB stick gets another number, and a second stick gets the former number.

    The pod keeps its stick, which the kubelet's checkpoint identifies. Another pod gets a stick after the pod's end.
    """
    sticks.plug("A", 1)
    agents = for_the_plugin_alone(scene)
    plugin = agents.start_plugin()
    try:
        scene.cluster.wait_allocatable(named("a"), 1)
        pod = holder(scene, "limits", "holder")
        scene.before = 1
        plugin.terminate()
        plugin.wait(20)
        sticks.pull("A")
        sticks.plug("B", 1)
        key = sticks.plug("A", 2)
        plugin = agents.start_plugin()
        scene.cluster.wait_allocatable(named("a"), 1)
        scene.wait(plain("wants", "a"))
        restart_container(scene, pod)
        assert scene.key(pod) == key
        scene.observe(5)
        pod.delete()
        scene.cluster.wait_for(lambda: not locks.pids(pod.uid), LIMIT, "the container has ended")
        until_taken(scene)
        scene.after = 1
    finally:
        plugin.kill()
        plugin.wait()


def test_the_plugin_alone_restarts_after_a_container_has_another_number(scene: Scene, sticks: Sticks) -> None:
    """A held USB stick gets a new number, and its container restarts; later a second stick gets this new number.

    The second stick is plugged in while the plugin is stopped. No pod gets it before the container's pod ends.
    """
    sticks.plug("A", 1)
    agents = for_the_plugin_alone(scene)
    remove_ledger()
    plugin = agents.start_plugin()
    try:
        scene.cluster.wait_allocatable(named("a"), 1)
        pod = holder(scene, "limits", "holder")
        scene.before = 1
        sticks.pull("A")
        key = sticks.plug("A", 2)
        scene.observe(2)
        restart_container(scene, pod)
        assert scene.key(pod) == key
        scene.observe(6)
        plugin.kill()
        plugin.wait(20)
        sticks.pull("A")
        assert sticks.plug("B", 2) == key
        for minor, serial in enumerate("CD", 3):  # two sticks, because the scheduler still counts one for the pod
            sticks.plug(serial, minor)
        plugin = agents.start_plugin()
        for name in ("first", "second"):
            scene.waiting[name] = plain(name, "a")
            scene.make(scene.waiting[name])
        until_taken(scene)
        for _ in range(10):
            scene.urge()
            scene.observe(1)
        assert len(locks.holders()) == 2, "the container, and a pod with a stick that nobody had"
        pod.delete()

        def both() -> bool:
            scene.urge()
            return {one.pod for one in locks.holders()} == {"first", "second"}

        scene.until("each of the other pods has a stick", both, 60)
        scene.after = 2
    finally:
        plugin.kill()
        plugin.wait()


@pytest.mark.parametrize("form", FORMS)
def test_another_stick_has_the_old_number(scene: Scene, sticks: Sticks, form: str) -> None:
    """No pod gets a USB stick that now has a held stick's former number before the holder of that number ends."""
    first = sticks.plug("A", 1)
    serve(scene, form, 1)
    pod = holder(scene, form, "holder")
    scene.before = 1
    sticks.pull("A")
    assert sticks.plug("B", 1) == first
    second = sticks.plug("A", 2)
    wants = claimer("wants", "a") if form == "claim" else plain("wants", "a")
    scene.wait(wants)
    await_file(scene, form, pod, 2)
    scene.observe(5)
    restart_container(scene, pod)
    assert scene.key(pod) == second
    pod.delete()
    scene.cluster.wait_for(lambda: not locks.pids(pod.uid), LIMIT, "the container has ended")
    until_taken(scene)
    scene.after = 1
    wait_offered(scene, form, 2)


def two_pods(
    scene: Scene, sticks: Sticks, form: str, glob: str = "by-id/*", start: Start = holder
) -> tuple[list[Pod], list[str]]:
    """Run two pods, each with one of two USB sticks; return the pods, and the keys of the locks that they hold."""
    keys = sticks.plug("A", 1), sticks.plug("B", 2)
    serve(scene, form, 2, glob)
    pods = [start(scene, form, name) for name in ("one", "two")]
    scene.before = 2
    had = [scene.key(pod) for pod in pods]
    assert set(had) == set(keys)
    return pods, had


def swap(sticks: Sticks) -> None:
    """Swap the device numbers of the two USB sticks of `two_pods`."""
    sticks.pull("A", "B")
    sticks.plug("B", 1)
    sticks.plug("A", 2)


def swapped(scene: Scene, sticks: Sticks, form: str) -> tuple[list[Pod], list[str]]:
    """Run two pods, each with a USB stick, then swap the sticks' device numbers; return the result of `two_pods`."""
    made = two_pods(scene, sticks, form)
    swap(sticks)
    return made


def has_own(pods: list[Pod], had: list[str]) -> bool:
    """Return whether each of two pods has its own USB stick after the sticks have swapped their numbers."""
    held = {(one.uid, one.key) for one in locks.holders()}
    return held == set(zip((pod.uid for pod in pods), had[::-1], strict=True))


@pytest.mark.parametrize("form", FORMS)
def test_two_sticks_swap_their_numbers(scene: Scene, sticks: Sticks, form: str) -> None:
    """After two USB sticks swap their numbers, each restarted container gets the device node of its pod's stick."""
    pods, had = swapped(scene, sticks, form)
    kill(*pods)
    scene.until("each pod has its own stick", lambda: has_own(pods, had), 120)
    scene.after = 2


@pytest.mark.parametrize("seed", range(2))
def test_sticks_come_and_go_in_any_order(scene: Scene, sticks: Sticks, seed: int) -> None:
    """Three USB sticks come and go with four device numbers: in the end each pod has the node of its own stick again.

    No device has two holders. The program that uses a stick ends when the stick is pulled, as a real program does.
    """
    chance = random.Random(seed)
    for minor, serial in enumerate("AB", 1):
        sticks.plug(serial, minor)
    serve(scene, "limits", 2)
    pods = {sticks.of(scene.key(pod)): pod for pod in (holder(scene, "limits", name) for name in ("one", "two"))}
    scene.before = 2
    scene.wait(plain("wants", "a"))
    for _ in range(12):
        serial = chance.choice("ABC")
        if serial in sticks.at:
            node = locks.key_of(locks.NODES / f"ttyUSB{sticks.at[serial][1]}")
            sticks.pull(serial)
            # The waiting pod may have got stick C.
            users = {one.uid for one in locks.holders() if one.key == node}
            for uid in users | {pod.uid for of, pod in pods.items() if of == serial}:
                for pid in locks.pids(uid):
                    os.kill(pid, signal.SIGKILL)
        else:
            sticks.plug(serial, chance.choice(sorted({1, 2, 3, 4} - {minor for _, minor in sticks.at.values()})))
        scene.observe(chance.choice([0.2, 1.5]))
    for serial in set("AB") - sticks.at.keys():
        sticks.plug(serial, min({1, 2, 3, 4} - {minor for _, minor in sticks.at.values()}))
    for serial, pod in pods.items():
        kill(pod)
        wanted = locks.key_of(locks.NODES / f"ttyUSB{sticks.at[serial][1]}")

        def has(pod: Pod = pod, wanted: str = wanted) -> bool:
            return wanted in {one.key for one in locks.holders() if one.uid == pod.uid}

        scene.cluster.wait_for(has, 120, f"{pod} has {serial} again")
    scene.check()
    scene.after = len(locks.holders())


@pytest.mark.parametrize("form", FORMS)
def test_numbers_are_swapped_by_a_reboot(scene: Scene, sticks: Sticks, form: str) -> None:
    """Two USB sticks swap their numbers and the node reboots: after the reboot each pod has its own stick again."""
    pods, had = swapped(scene, sticks, form)
    reboot(scene, "before the kubelet")
    scene.cluster.wait_for(lambda: all(locks.pids(pod.uid) for pod in pods), 90, "the pods run again")
    scene.running(*pods)
    assert [scene.key(pod) for pod in pods] == had[::-1]


@pytest.mark.parametrize("form", FORMS)
def test_another_stick_is_plugged_into_a_port(scene: Scene, sticks: Sticks, form: str) -> None:
    """With links by port, a new USB stick in a held port goes to the port's pod, also after a container restart."""
    sticks.plug("A", 1, "1-2")
    serve(scene, form, 1, "by-path/*")
    pod = holder(scene, form, "holder")
    scene.before = 1
    sticks.pull("A")
    key = sticks.plug("B", 2, "1-2")
    wait_offered(scene, form, 1)
    await_file(scene, form, pod, 2)
    restart_container(scene, pod)
    assert scene.key(pod) == key
    scene.after = 1


@pytest.mark.parametrize("form", FORMS)
def test_a_program_knows_which_device_it_has(scene: Scene, form: str) -> None:
    """A program finds its device by the configured path in the container, and by environment variables."""
    for number, name in enumerate(("front", "back"), 1):
        locks.make_node(locks.NODES / "cameras" / name, number)
    device = {"path": f"{locks.NODES}/cameras/*", "container": f"{locks.NODES}/inside/{{name}}"}
    share = "all" if form == "claim" else "none"
    scene.serve(resource("a", share, devices=[device], env={"CAMERA": "{path}", "WHICH": "{name}"}))
    wait_offered(scene, form, 2)
    pod = holder(scene, form, "holder")
    (environment,) = (of for _, of in locks.containers() if of["POD_UID"] == pod.uid)
    assert scene.key(pod) == locks.key_of(locks.NODES / "cameras" / environment["WHICH"])
    assert environment["CAMERA"] == f"{locks.NODES}/inside/{environment['WHICH']}"
    assert pod.exec(["ls", f"{locks.NODES}/inside"]).split() == [environment["WHICH"]]
    scene.before = scene.after = 1


class MadeAgents(Agents):
    """Agents that read a simulated sysfs and simulated device nodes for USB and PCI devices."""

    metrics = "127.0.0.1:9419"

    def command(self) -> list[str]:
        module, *arguments = super().command()[2:]
        assert module == "tests.cluster.locks"
        return [sys.executable, "-c", MADE_AGENT, *arguments]


MADE = isolate.DEVICES / "made"
MADE_AGENT = f"""
import functools, sys
from deviceplugin.sources import configured, pci, usb
made = {{"sysfs_root": "{MADE}/sys", "dev": "{locks.NODES}"}}
configured.UsbSource = functools.partial(usb.UsbSource, **made)
configured.PciSource = functools.partial(pci.PciSource, **made)
from tests.cluster.locks import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture
def tree(scene: Scene) -> Tree:
    scene.kind = MadeAgents
    scene.stack.callback(shutil.rmtree, MADE)
    return Tree(MADE)


@pytest.mark.parametrize("form", FORMS)
def test_a_device_gets_other_ids_when_its_firmware_is_loaded(scene: Scene, tree: Tree, form: str) -> None:
    """A device whose USB ids change when its firmware is loaded stays one device with one holder.

    A container with a claim sees the device's second node after a restart. With limits, the kubelet keeps the response
    with the first node: the container cannot start again, and its pod must be deleted.
    """
    bus = locks.NODES / "bus/usb/001"
    locks.make_node(bus / "004", 4)
    usb = tree.usb("1-2", 4, "1a6e", "089a")
    ids = [{"vendor": "1a6e", "product": "089a"}, {"vendor": "18d1", "product": "9302"}]
    scene.serve(resource("a", "all" if form == "claim" else "none", devices=[{"usb": ids}]))
    wait_offered(scene, form, 1)
    pod = holder(scene, form, "holder")
    scene.before = 1
    tree.pull("1-2")
    shutil.rmtree(usb)
    (bus / "004").unlink()
    wait_offered(scene, form, 0)
    tree.usb("1-2", 5, "18d1", "9302")
    key = locks.make_node(bus / "005", 5)
    wait_offered(scene, form, 1)
    scene.wait(claimer("wants", "a") if form == "claim" else plain("wants", "a"))
    await_file(scene, form, pod, 5)
    scene.observe(3)
    if form == "claim":
        restart_container(scene, pod)
        assert scene.key(pod) == key
        scene.handed_on(pod.delete, [pod.uid], "wants")
    else:
        kill(pod)

        def fails() -> bool:
            (main,) = pod.status["containerStatuses"]
            return "delete the pod" in main["state"].get("waiting", {}).get("message", "")

        scene.cluster.wait_for(fails, LIMIT, "the container does not start")
        pod.delete()
        until_taken(scene)
        assert {one.key for one in locks.holders()} == {key}
        scene.after = 1


def status_now(scene: Scene) -> str:
    """Return the agent's status without past events."""
    status = json.loads(scene.agents.page("/status"))
    del status["events"]
    return json.dumps(status)


@pytest.mark.parametrize("form", FORMS)
def test_a_vfio_group_is_given_once_the_host_has_no_function_of_it(scene: Scene, tree: Tree, form: str) -> None:
    """A graphics card on vfio-pci is unhealthy, with the reason, until its audio function is bound to vfio-pci, too."""
    tree.pci("0000:01:00.0", "10de", "2204", "030000", driver="vfio-pci", group=12)
    audio = tree.pci("0000:01:00.1", "10de", "1aef", "040300", driver="snd_hda_intel", group=12)
    keys = [locks.make_node(locks.NODES / "vfio" / name, minor) for minor, name in enumerate(("12", "vfio"), 1)]
    card = {"pci": {"vendor": "10de", "class": "0300"}}
    scene.serve(resource("a", "all" if form == "claim" else "none", devices=[card]))
    reason = "0000:01:00.1 of the same IOMMU group 12 is bound to snd_hda_intel of the host"
    scene.until("the status has the reason", lambda: reason in status_now(scene))
    wait_offered(scene, form, 0)
    wants = claimer("wants", "a") if form == "claim" else plain("wants", "a")
    scene.wait(wants)
    tree.bind(audio, "vfio-pci")
    until_taken(scene)
    scene.until("the container has both nodes", lambda: [one.key for one in locks.holders()] == keys)
    assert reason not in status_now(scene)
    tree.bind(audio, "snd_hda_intel")
    scene.until("the status has the reason", lambda: reason in status_now(scene))
    wait_offered(scene, form, 0)
    scene.before = scene.after = 2


def test_a_stick_comes_back_with_the_generic_device_plugin(scene: Scene, sticks: Sticks) -> None:
    """With squat's generic-device-plugin, too, a restarted container gets its USB stick under a new number."""
    if build.PEER_PROGRAMS not in os.environ:
        pytest.skip(f"{build.PEER_PROGRAMS} names no directory with generic-device-plugin")
    program = str(build.ensure_peer("generic-device-plugin"))
    sticks.plug("A", 1)
    device = json.dumps({"name": "stick", "groups": [{"paths": [{"path": f"{locks.NODES}/by-id/*"}]}]})
    domain = named("stick").partition("/")[0]
    with (scene.cluster.logs / "generic.log").open("wb") as log:
        process = subprocess.Popen([program, "--domain", domain, "--device", device], stdout=log, stderr=log)
    try:
        scene.cluster.wait_allocatable(named("stick"), 1)
        pod = scene.pod("holder", "stick")
        scene.running(pod)
        scene.before = 1
        sticks.pull("A")
        key = sticks.plug("A", 2)
        restart_container(scene, pod)
        assert scene.key(pod) == key
        scene.after = 1
    finally:
        process.terminate()
        process.wait(20)


CONTAINING = {
    "a USB device and its interface": ("0000:00:14.0/usb1/1-1", "1-1:1.0/ttyUSB2/tty/ttyUSB2"),
    "the nodes of a GPU": ("0000:07:00.0/drm/card0", "../renderD128"),
    "a disk and its partition": ("0000:08:00.0/nvme/nvme0/nvme0n1", "nvme0n1p1"),
}
"""For each pair of nodes: the directory of the first in sysfs, and the directory of the second, relative to that."""


@pytest.mark.parametrize(
    ("pair", "forms"),
    [
        *((pair, (form, form)) for pair in CONTAINING for form in FORMS),
        # The two nodes of a GPU are the same hardware. On different sides, neither is offered.
        *((pair, ("limits", "claim")) for pair in CONTAINING if pair != "the nodes of a GPU"),
    ],
)
def test_a_node_that_contains_another(scene: Scene, pair: str, forms: tuple[str, str]) -> None:
    """Two resources list nodes of one piece of hardware, one of which gives all of the other: one of them has a holder.

    The other node has a holder when the first holder has ended.
    """
    subprocess.run(["mount", "-t", "tmpfs", "none", str(SYSFS)], check=True)
    scene.stack.callback(subprocess.run, ["umount", str(SYSFS)], check=True)
    whole, part = CONTAINING[pair]
    for minor, below in enumerate((whole, f"{whole}/{part}"), 1):
        directory = SYSFS / "pci0000:00" / below
        directory.mkdir(parents=True)
        (directory / "dev").write_text(f"{locks.MAJOR}:{minor}\n")
        (SYSFS / f"{locks.MAJOR}:{minor}").symlink_to(directory.resolve())
        locks.make_node(locks.NODES / f"x{minor}", minor)
    if "usb" in whole:
        for name, value in {"idVendor": "0403", "idProduct": "6001", "serial": "A5"}.items():
            (SYSFS / "pci0000:00" / whole / name).write_text(f"{value}\n")
    shares = ["all" if form == "claim" else "none" for form in forms]
    listed = [[{"path": f"{locks.NODES}/x{minor}"}] for minor in (1, 2)]
    scene.serve(*(resource(letter, share, devices=of) for letter, share, of in zip("ab", shares, listed, strict=True)))
    wants = {letter: "claimer" if form == "claim" else "pod" for letter, form in zip("ab", forms, strict=True)}
    scene.agents.wait_registered()
    for first, second in ("ab", "ba"):
        for letter, form in zip("ab", forms, strict=True):
            if form == "claim":
                scene.agents.wait_offered(1, f"{letter}.example.net")
            else:
                scene.cluster.wait_allocatable(named(letter), 1)
        holder = getattr(scene, wants[first])(f"{first}-first", first)
        scene.running(holder)
        if wants[second] == "claimer":
            scene.agents.wait_offered(0, f"{second}.example.net")
        else:
            scene.cluster.wait_allocatable(named(second), 0)
        scene.wait((claimer if wants[second] == "claimer" else plain)(f"{second}-wants", second))
        scene.observe(2)
        assert len(locks.holders()) == 1
        holder.delete()
        taker = scene.cluster.pod(f"{second}-wants")
        scene.running(taker)
        assert [one.pod for one in locks.holders()] == [f"{second}-wants"]
        scene.waiting.clear()
        taker.delete()
        taker.wait_gone()
