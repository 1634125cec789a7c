"""A pod has claims of a failing and of a working driver: which devices the kubelet counts, and when the pod starts."""

from __future__ import annotations

import grpc

from deviceplugin.wire import podresources_pb2, podresources_pb2_grpc
from tests.cluster.bridge import Bridge, env_of
from tests.cluster.node import POD_RESOURCES_SOCKET, Cluster

GOOD, BAD = "good.example.net", "bad.example.net"
TRIES = 6
AGENT = """
import pathlib

from deviceplugin import ContainerEdits, Device, DeviceSource
from dra_bridge import run

class Good(DeviceSource):
    resource, driver = "example.net/good", "good.example.net"

    async def watch(self):
        yield [Device("good-0")]

    def prepare(self, devices, config):
        return ContainerEdits(env={"GOOD": devices[0].id})

class Bad(DeviceSource):
    resource, driver = "example.net/bad", "bad.example.net"

    async def watch(self):
        yield [Device("bad-0")]

    def prepare(self, devices, config):
        if not (pathlib.Path(__file__).parent / "mended").exists():
            raise RuntimeError("the firmware does not load")
        return ContainerEdits(env={"BAD": devices[0].id})

run(Good(), Bad(), share="all")
"""


def served(name: str) -> dict[str, object]:
    return {"name": f"example.net/{name}", "driver": f"{name}.example.net", "devices": [{"simulated": {"count": 1}}]}


def counted(claim: str) -> int:
    """Return how many devices of a claim the kubelet's PodResources `List` has."""
    with grpc.insecure_channel(f"unix:{POD_RESOURCES_SOCKET}", (("grpc.default_authority", "localhost"),)) as channel:
        request = podresources_pb2.ListPodResourcesRequest()
        answer = podresources_pb2_grpc.PodResourcesListerStub(channel).List(request, timeout=10)
    containers = [container for pod in answer.pod_resources for container in pod.containers]
    claims = [one for container in containers for one in container.dynamic_resources if one.claim_name == claim]
    return sum(len(one.claim_resources) for one in claims)


def test_a_driver_that_fails_beside_another(cluster: Cluster) -> None:
    """A pod with claims of a failing and of a working driver runs with both once the failing driver works.

    Until then, the kubelet counts the working driver's device once since 1.37, and once for each try before.
    """
    with Bridge.running(cluster, served("good"), served("bad"), script=AGENT) as bridge:
        bridge.wait_offered(1, GOOD)
        bridge.wait_offered(1, BAD)
        bridge.claim("good")
        bridge.claim("bad", bridge.one(resource="example.net/bad"))
        pod = bridge.pod("one", {"good": "good", "bad": "bad"})
        seen, counts = 0, []
        while seen < TRIES:
            before = seen

            def tried(before: int = before) -> int:
                failures = pod.retry(before)
                return failures if failures > before else 0

            seen = cluster.wait_for(tried, 60, "the kubelet tries again")
            counts.append(counted("good"))
        print(f"devices of the good claim, of {cluster.version}: {counts}")
        assert max(counts) <= 1 or cluster.minor < 37
        (bridge.directory / "mended").touch()
        pod.wait_running()
        environment = env_of(pod)
        assert (environment["GOOD"], environment["BAD"]) == ("good-0", "bad-0")
        assert counted("good") == 1 or cluster.minor < 37
