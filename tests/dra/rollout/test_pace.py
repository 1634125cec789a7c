"""How fast a rollout begins nodes whose agents have to list all claims of the cluster."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from dra_bridge.kube import Cluster
from dra_bridge.rollout.fleet import Before, Goal, NodeView
from dra_bridge.rollout.pace import BURST, BYTES_A_SECOND, UNKNOWN, Pace, read_pace, returns
from dra_bridge.rollout.progress import Progress, ResourceProgress
from dra_bridge.testing.apiserver import FakeApiServer, Fault
from tests.dra.objects import claim_body


@pytest.mark.parametrize("size", [0, 1e6, 120e6, 2e9])
@pytest.mark.parametrize("step", [0.1, 2.0])
def test_all_agents_together_list_so_many_bytes_a_second(size: float, step: float) -> None:
    """In 1000 s, the lists of claims of all started nodes have at most, and nearly, the allowed number of bytes."""
    bound, seconds = Pace(size), 1_000.0
    begun = 0
    for number in range(round(seconds / step)):
        begun += sum(bound.take(1_000.0 + number * step) for _ in range(50))
    assert begun * size <= seconds * BYTES_A_SECOND + max(BURST * BYTES_A_SECOND, size)
    offered = 50 * seconds / step
    assert begun >= min(offered, 0.9 * seconds * BYTES_A_SECOND / max(1.0, size))


async def test_the_list_of_claims_is_measured() -> None:
    """The size of the list of claims is measured over all pages; without the right to list, a large size is assumed."""
    with FakeApiServer() as server:
        async with Cluster.from_server(server.url) as cluster:
            empty = (await read_pace(cluster)).interval
            for number in range(250):
                server.create(claim_body(f"c{number}", "d"))
            assert (await read_pace(cluster)).interval * BYTES_A_SECOND > 250 * 20
            assert empty * BYTES_A_SECOND < 1_000
            server.fail(lambda request: request.path.endswith("/resourceclaims"), Fault(code=403))
            assert (await read_pace(cluster)).interval == UNKNOWN / BYTES_A_SECOND


@pytest.mark.parametrize(
    ("share", "counts", "back"),
    [
        ("all", {"plugin": 8}, False),
        ("all", {"dra": 8}, False),
        ("none", {"plugin": 8}, False),
        ("none", {"plugin": 7, "dra": 1}, True),
        ("2", {"plugin": 4, "dra": 4}, True),
        ("50%", {"plugin": 4, "dra": 4}, False),
        ("4", {"plugin": 2, "dra": 4, "to-plugin": 2}, True),
        (None, {"plugin": 8}, False),  # how many devices the config gives to claims is not known
        (None, {"plugin": 7, "dra": 1}, True),
        ("none force", {"dra": 1}, True),
    ],
)
def test_nodes_whose_devices_return(share: str | None, counts: Mapping[str, int], back: bool) -> None:
    """A node's devices return to limits if more of them are for claims than requested, or if that is not known."""
    reported = Progress({"example.com/gpu": ResourceProgress("x", dict(counts))})
    assert returns(Goal(share), NodeView("n1", "d", reported=reported)) is back
    undone = NodeView("n1", "d", before=Before(share), reported=reported)
    assert returns(Goal(None, undo=True), undone) is back
    assert returns(Goal(share), NodeView("n1", "d"))
