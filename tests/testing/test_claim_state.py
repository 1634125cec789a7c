"""Claim states of the fake kubelet, compared with samples that a Go program wrote with kubelet 1.36.3's package."""

from __future__ import annotations

from pathlib import Path

import pytest

from deviceplugin.testing import claim_state
from deviceplugin.testing.checkpoint import CorruptCheckpointError
from deviceplugin.testing.claim_state import AnsweredDevice, DevicesOfClaim

CLAIMS = [
    DevicesOfClaim(
        "ns",
        "c1",
        "u1",
        {
            "gpu.example.com": [
                AnsweredDevice(("r0",), "n", "gpu-0", ('example.com/gpu=a<&>é"\\', "x=y"), None),
                AnsweredDevice((), "n", "gpu-1", (), "s-1"),
            ],
            "a.example.com": [],
        },
        {"p2", "p1"},
    ),
    DevicesOfClaim("ns", "c2", "u2", {}),
]
_HEAD = (
    r'{"Data":"{\"kind\":\"DRACheckpoint\",\"apiVersion\":\"checkpoint.dra.kubelet.k8s.io/v1\",\"ClaimInfoStateList\":'
)
SAMPLES = {
    "nil": (None, _HEAD + r'null}","Checksum":4010664294}'),
    "empty": ([], _HEAD + r'[]}","Checksum":2361995144}'),
    "two": (
        CLAIMS,
        _HEAD + r"[{\"ClaimUID\":\"u1\",\"ClaimName\":\"c1\",\"Namespace\":\"ns\",\"PodUIDs\":{\"p1\":{},\"p2\":{}},"
        r"\"DriverState\":{\"a.example.com\":{\"Devices\":null},\"gpu.example.com\":{\"Devices\":[{\"PoolName\":\"n\","
        r"\"DeviceName\":\"gpu-0\",\"ShareID\":null,\"RequestNames\":[\"r0\"],\"CDIDeviceIDs\":"
        r"[\"example.com/gpu=a\\u003c\\u0026\\u003eé\\\"\\\\\",\"x=y\"]},{\"PoolName\":\"n\",\"DeviceName\":\"gpu-1\","
        r"\"ShareID\":\"s-1\",\"RequestNames\":null,\"CDIDeviceIDs\":null}]}}},{\"ClaimUID\":\"u2\",\"ClaimName\":"
        r'\"c2\",\"Namespace\":\"ns\",\"PodUIDs\":{},\"DriverState\":{}}]}","Checksum":438660209}',
    ),
}


@pytest.mark.parametrize("name", SAMPLES)
def test_samples(name: str) -> None:
    """A claim state is written byte for byte as the kubelet writes it, and is read back."""
    claims, text = SAMPLES[name]
    assert claim_state.to_json(claims).decode() == text
    assert claim_state.from_json(text) == (claims or [])


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    """A claim state with a wrong checksum, without its end, or of another kind is refused and not overwritten."""
    path = tmp_path / "dra_manager_state"
    for damaged, error in (
        (SAMPLES["two"][1].replace("gpu-0", "gpu-9"), CorruptCheckpointError),
        (SAMPLES["two"][1][:100], ValueError),
        ('{"Data":{"PodDeviceEntries":null,"RegisteredDevices":null},"Checksum":1944006890}', ValueError),
        ("[]", ValueError),
    ):
        path.write_text(damaged)
        with pytest.raises(error):
            claim_state.read_or_create(tmp_path)
        assert path.read_text() == damaged
