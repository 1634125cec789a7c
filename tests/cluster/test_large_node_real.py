"""A node with 300 devices, and 100 claims at the same time; `tests.fleet` has 10,000 pods on simulated nodes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.cluster.bridge import Bridge, ClaimPod
from tests.cluster.node import LEDGER, Cluster

DEVICES = 300
CLAIMS = 100
TOGETHER = 25
"""The number of claims of one pod; the driver prepares all of them in one call of the kubelet."""
LOG = 4 * 2**20
"""Maximum bytes of the log of the agent's SQLite ledger: after 100 commits SQLite overwrites the log from its start."""


def files(bridge: Bridge) -> int:
    """Return how many files the agent has open."""
    assert bridge.process is not None
    return len(os.listdir(f"/proc/{bridge.process.pid}/fd"))


@pytest.mark.lengthy
def test_a_hundred_claims_at_once(cluster: Cluster) -> None:
    """A hundred claims get different devices; in a repetition the agent has no more open files and hardly more data."""
    resource = {
        "name": "example.com/large",
        "driver": "large.example.com",
        "devices": [{"simulated": {"count": DEVICES}}],
        "dra": {"share": "50%"},
    }
    with Bridge.running(cluster, resource) as bridge:
        bridge.wait_registered()
        bridge.wait_offered(DEVICES // 2, timeout=120.0)
        sizes = []
        for turn in range(2):
            names = [f"large-{turn}-{number}" for number in range(CLAIMS)]
            for name in names:
                bridge.claim(name)
            pods: list[ClaimPod] = []
            for first in range(0, CLAIMS, TOGETHER):
                claims = {f"c{number}": names[first + number] for number in range(TOGETHER)}
                pods.append(bridge.pod(f"large-{turn}-{first}", claims))
            for pod in pods:
                pod.wait_running(300.0)
            devices = [device for name in names for device in bridge.allocated(name)]
            assert len(devices) == len(set(devices)) == CLAIMS
            for pod in pods:
                pod.delete()
            for name in names:
                cluster.api.delete("ResourceClaim", name, api_version=bridge.api_version)
            # The kubelet calls Unprepare for a claim before its pod is removed, and the claim is removed after the pod.
            cluster.wait_for(lambda: not cluster.api.list("ResourceClaim", "default"), 300.0, "the claims are gone")
            log = Path(f"{LEDGER}-wal").stat().st_size
            sizes.append((files(bridge), Path(LEDGER).stat().st_size, log))
        (first_files, first_bytes, first_log), (last_files, last_bytes, last_log) = sizes
        assert last_files <= first_files
        assert last_bytes <= 1.1 * (first_bytes + first_log), "what the log had is in the file by now"
        assert last_log <= LOG
