"""How an agent reads the kubelet's claim state, the file with the claims that it prepared."""

from __future__ import annotations

import json
import zlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deviceplugin.kubelet.claim_state import (
    FILE_NAME,
    ClaimStateError,
    ClaimStateMissingError,
    PreparedClaim,
    parse,
    read,
)
from tests.testing.test_claim_state import SAMPLES

TWO = SAMPLES["two"][1]


def enveloped(data: str) -> bytes:
    return json.dumps({"Data": data, "Checksum": zlib.crc32(data.encode())}).encode()


def test_the_kubelets_file_is_read(tmp_path: Path) -> None:
    """From a file that kubelet 1.36.3 wrote, the agent reads claims with their pods, and their devices by driver."""
    (tmp_path / FILE_NAME).write_text(TWO)
    assert read(tmp_path) == (
        PreparedClaim(
            "u1",
            "ns",
            "c1",
            frozenset({"p1", "p2"}),
            {
                "a.example.com": frozenset(),  # this driver was asked to prepare the claim, and has not answered
                "gpu.example.com": frozenset({("n", "gpu-0", ""), ("n", "gpu-1", "s-1")}),
            },
            {"a.example.com": frozenset(), "gpu.example.com": frozenset({'example.com/gpu=a<&>é"\\', "x=y"})},
            frozenset({("gpu.example.com", "r0", "gpu-0"), ("gpu.example.com", "", "gpu-1")}),
        ),
        PreparedClaim("u2", "ns", "c2", frozenset(), {}),
    )


@pytest.mark.parametrize("name", ["nil", "empty"])
def test_a_kubelet_without_claims_names_none(name: str) -> None:
    """A kubelet without claims writes null at first and an empty list later: both are read as no claims."""
    assert parse(SAMPLES[name][1].encode()) == ()


def test_a_missing_file_is_told_from_a_damaged_one(tmp_path: Path) -> None:
    """A missing claim state, as of a kubelet without DRA, has an error class of its own; an unreadable one has not."""
    with pytest.raises(ClaimStateMissingError, match=FILE_NAME):
        read(tmp_path)
    (tmp_path / FILE_NAME).mkdir()
    with pytest.raises(ClaimStateError, match=FILE_NAME) as unreadable:
        read(tmp_path)
    assert not isinstance(unreadable.value, ClaimStateMissingError)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (TWO.replace("gpu-0", "gpu-9").encode(), "checksum"),
        (TWO[:100].encode(), "not the kubelet's claim state"),
        (b"", "not the kubelet's claim state"),
        (b"null", "not the kubelet's claim state"),
        (b'{"Data":null,"Checksum":0}', "not the kubelet's claim state"),
        (enveloped("[]"), "not the kubelet's claim state"),
        (enveloped("{}"), "not the kubelet's claim state"),
        (enveloped('{"ClaimInfoStateList": [{}]}'), "not the kubelet's claim state"),
        # The device manager's checkpoint under the wrong name.
        (b'{"Data":{"PodDeviceEntries":null,"RegisteredDevices":null},"Checksum":1944006890}', "claim state"),
    ],
)
def test_a_damaged_file_is_an_error(tmp_path: Path, text: bytes, message: str) -> None:
    """A claim state with a wrong checksum, without its end, or with another file's contents is an error."""
    (tmp_path / FILE_NAME).write_bytes(text)
    with pytest.raises(ClaimStateError, match=message):
        read(tmp_path)


@given(st.integers(0, len(TWO.encode()) - 1), st.integers(0, 255))
def test_a_changed_byte_is_noticed_or_harmless(at: int, byte: int) -> None:
    """Reading a claim state with one changed byte raises an error or returns the same claims."""
    text = TWO.encode()
    damaged = text[:at] + bytes([byte]) + text[at + 1 :]
    try:
        found = parse(damaged)
    except ClaimStateError:
        return
    assert found == parse(text)


@given(st.binary())
def test_no_file_breaks_the_reader(data: bytes) -> None:
    """Whatever bytes a file has, the reader returns claims or raises ClaimStateError."""
    for text in (data, enveloped(data.decode("latin-1"))):
        try:
            assert parse(text) == ()
        except ClaimStateError:
            continue
