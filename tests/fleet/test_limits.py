"""A run's report names each limit that its figures miss."""

from __future__ import annotations

from dataclasses import replace

from tests.fleet import load, one_node
from tests.fleet.load import Load
from tests.fleet.one_node import OneNode, Use

USE = Use(70.0, 80_000, 33, 30)
NODE = OneNode(USE, USE, 4.0, 1.0, 100, USE, USE, 1_000, 10_000, 600.0)
LOAD = Load("claims", 40, 288, 0.8, 150.0, 96, 96, (0.1, 0.2, 0.4), {"get resourceclaims": 1.0}, 0.1, 0, [], [])


def missed(found: OneNode | Load) -> list[str]:
    limits = one_node.limits(found) if isinstance(found, OneNode) else load.limits([found])
    return [limit.what for limit in limits if not limit.met]


def test_a_node_that_grows_misses_limits() -> None:
    """A node whose memory, ledger, open files and threads have grown after all pods misses four limits."""
    assert missed(NODE) == []
    grown = replace(NODE, late=Use(80.0, 100_000, 36, 33))
    assert len(missed(grown)) == 4
    assert one_node.section(grown).count("MISSED") == 4


def test_a_load_with_pods_that_fail_or_share_a_device_misses_limits() -> None:
    """Failed pods, shared devices, pods that never ran and many reads miss limits; in a rollout the first two do."""
    assert missed(LOAD) == []
    wrong = replace(LOAD, ran=95, failed=["why"], overlaps=["two"], requests={"get resourceclaims": 1.5})
    assert len(missed(wrong)) == 4
    assert len(missed(replace(wrong, moved=3))) == 2
    assert load.section([wrong]).count("MISSED") == 4
