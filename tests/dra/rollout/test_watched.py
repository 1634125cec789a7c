"""A rollout's view of its nodes, from watches and from the answers to the rollout's own writes."""

from __future__ import annotations

from dra_bridge.kube import Cluster
from dra_bridge.rollout.reporter import Reporter
from dra_bridge.rollout.watched import WatchedFleet
from dra_bridge.testing.apiserver import FakeApiServer
from tests.dra.objects import node_body


async def test_an_answer_that_comes_after_the_nodes_end_brings_it_not_back() -> None:
    """An answer to a PATCH that comes after the watch has reported the node's deletion does not restore the node."""
    with FakeApiServer() as server:
        node = server.create(node_body("n1"))
        async with (
            Cluster.from_server(server.url) as cluster,
            WatchedFleet(cluster, "fpga.example.com", Reporter(print)).watched() as fleet,
        ):
            assert [view.node for view in fleet.views()] == ["n1"]
            server.delete("nodes", "n1")
            while fleet.views():
                await fleet.changed.wait()
                fleet.changed.clear()
            fleet.put(node)
            assert not fleet.views()
            server.create(node_body("n1"))
            while not fleet.views():
                await fleet.changed.wait()
                fleet.changed.clear()
