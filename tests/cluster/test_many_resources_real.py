"""A node with 64 resources of simulated devices, each with its own driver, as if each device had its own plugin."""

from __future__ import annotations

import json
import re
import threading
import time

import pytest

from deviceplugin.files import file_identity
from tests.cluster.bridge import Bridge
from tests.cluster.node import DEVICE_PLUGINS, Cluster

COUNT = 64
RESOURCES = [f"example.com/many-{number:02d}" for number in range(COUNT)]
ALARM = re.compile(r"another plugin (has|may have) registered this resource")
REGISTERED = re.compile(r"^.*: registered (again )?as .*$", re.MULTILINE)


def listed() -> list[int]:
    """Return the number of ids of each resource in the kubelet's checkpoint."""
    registered = json.loads((DEVICE_PLUGINS / "kubelet_internal_checkpoint").read_text())["Data"]["RegisteredDevices"]
    return [len((registered or {}).get(resource) or ()) for resource in RESOURCES]


def published(bridge: Bridge) -> dict[str, int]:
    """Return the number of devices in the slices of each driver."""
    offered = dict.fromkeys(bridge.drivers, 0)
    for body in bridge.cluster.api.list("ResourceSlice", api_version=bridge.api_version):
        if body["spec"]["driver"] in offered:
            offered[body["spec"]["driver"]] += len(body["spec"].get("devices") or ())
    return offered


def registered_again(bridge: Bridge, figures: dict[str, float]) -> None:
    """Add to `figures` the seconds from the kubelet's next socket until each resource has registered once more."""
    socket, before = DEVICE_PLUGINS / "kubelet.sock", file_identity(DEVICE_PLUGINS / "kubelet.sock")
    bridge.cluster.wait_for(lambda: file_identity(socket) not in (before, None), 60, "the kubelet is back")
    began = time.monotonic()
    bridge.cluster.wait_for(
        lambda: len(REGISTERED.findall(bridge.log())) == 2 * COUNT, 60, "each has registered once more"
    )
    figures["registered again, s"] = round(time.monotonic() - began, 2)


@pytest.mark.lengthy
def test_all_are_served_on_both_sides(cluster: Cluster) -> None:
    """Each of 64 resources registers once, and once more after a kubelet restart; pods by limits and claim run on."""
    resources = [
        {
            "name": resource,
            "devices": [{"simulated": {"count": 4}}],
            "driver": f"many-{number:02d}.example.com",
            "dra": {"share": "50%"},
        }
        for number, resource in enumerate(RESOURCES)
    ]
    began = time.monotonic()
    with Bridge.running(cluster, *resources) as bridge:
        cluster.wait_for(lambda: listed() == [2] * COUNT, 120, "the kubelet counts two devices of each")
        cluster.wait_for(lambda: set(published(bridge).values()) == {2}, 120, "the slices offer two devices of each")
        figures = {"served on both sides, s": round(time.monotonic() - began, 1)}
        last = bridge.claim("last", bridge.one(resource=RESOURCES[-1]))
        pods = [
            cluster.start_pod("by-limits", {RESOURCES[0]: 1, RESOURCES[-1]: 1}),
            bridge.pod("by-claim", {"one": {"resourceClaimName": last["metadata"]["name"]}}),
        ]
        for pod in pods:
            pod.wait_running()
        assert len(REGISTERED.findall(bridge.log())) == COUNT
        figures["resident MB"] = round(bridge.rss() * 1024 / 1e6, 1)
        again = threading.Thread(target=registered_again, args=(bridge, figures))
        again.start()
        cluster.restart_kubelet(reported=True)
        again.join()
        print(figures)
        cluster.wait_for(lambda: listed() == [2] * COUNT, 60, "the kubelet counts two devices of each again")
        assert [pod.phase for pod in pods] == ["Running", "Running"]
        assert not ALARM.search(bridge.log())
        assert len(REGISTERED.findall(bridge.log())) == 2 * COUNT
