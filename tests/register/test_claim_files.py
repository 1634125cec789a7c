"""The claim files: the driver writes one for each prepared claim."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deviceplugin import cdi
from deviceplugin.register import claim_files
from deviceplugin.register.claim_files import ClaimFile
from deviceplugin.register.records import Amount, ClaimDevice
from dra_bridge.driver.claim_files import CdiStore, ClaimFileStore
from tests.identities import seen_as

D = "fpga.example.com"
R = "example.com/fpga"


def made(uid: str = "1", driver: str = D, **more: object) -> ClaimFile:
    fields = {
        "namespace": "ml",
        "name": "train",
        "boot": "b",
        "pods": frozenset({"p2", "p1"}),
        "devices": (
            ClaimDevice(
                R,
                "d0",
                "s",
                False,
                seen_as("b", "char:240:0"),
                Amount("1/3", (("set", "memory", "5Gi"),)),
                '{"mode":"fast"}',
            ),
            ClaimDevice(R, "d1", admin=True, amount=Amount("0")),
        ),
    } | more
    return msgspec.convert({"driver": driver, "uid": uid, **fields}, ClaimFile)


def put(directory: Path, *files: ClaimFile) -> None:
    for file in files:
        ClaimFileStore(file.driver, str(directory)).write(file.uid, claim_files.encode(file))


def own(directory: Path) -> Path:
    """Return the directory of the claim files."""
    return Path(cdi.own_directory(str(directory)))


def test_what_is_written_is_read(tmp_path: Path) -> None:
    """A claim file is read with all fields that were written; the order of the pods does not change its bytes."""
    other = made("2", "2nd.example.com", devices=(), pods=frozenset())
    put(tmp_path, made(), other)
    assert set(claim_files.read_all(str(own(tmp_path)))) == {made(), other}
    assert claim_files.encode(made(pods=frozenset({"p1", "p2"}))) == claim_files.encode(made())
    assert (made().title, made(name="").title) == ("ml/train", "1")


def test_runtimes_do_not_read_it(tmp_path: Path) -> None:
    """Claim files are in a subdirectory of the CDI specs' directory, since runtimes read no subdirectories."""
    put(tmp_path, made())
    CdiStore(D, str(tmp_path)).write("1", b"{}")
    (own(tmp_path) / "allocations").mkdir()
    (own(tmp_path) / f".{D}_2.left.over").write_bytes(b"")
    assert sorted(os.listdir(tmp_path)) == ["deviceplugin", f"{D}-claim_1.json"]
    assert sorted(os.listdir(own(tmp_path))) == sorted([f"{D}_1.claim", "allocations", f".{D}_2.left.over"])
    assert claim_files.read_all(str(own(tmp_path))) == (made(),)
    assert CdiStore(D, str(tmp_path)).list() == ClaimFileStore(D, str(tmp_path)).list() == {"1"}
    assert not (own(tmp_path) / f".{D}_2.left.over").exists(), "a draft that a crash left is removed"
    assert ClaimFileStore(D, str(tmp_path)).remove("1")
    assert os.path.exists(tmp_path / f"{D}-claim_1.json")


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{",
        b"[]",
        b"\xff",
        b'{"driver":"fpga.example.com","uid":"1"}',
        claim_files.encode(made(version=claim_files.VERSION + 1)),
        claim_files.encode(made("2")),
        claim_files.encode(made(driver="other.example.com")),
        claim_files.encode(made()).replace(b'"d0",', b""),
    ],
)
def test_a_damaged_file_says_that_its_devices_are_unknown(tmp_path: Path, text: bytes) -> None:
    """A damaged claim file is read as a claim with unknown devices; driver and claim come from the file's name."""
    put(tmp_path, made("3"))
    (own(tmp_path) / f"{D}_1.claim").write_bytes(text)
    found = {file.uid: file for file in claim_files.read_all(str(own(tmp_path)))}
    assert found == {"1": ClaimFile(driver=D, uid="1"), "3": made("3")}
    assert found["1"].devices is None


def test_a_file_that_cannot_be_read_says_so(tmp_path: Path) -> None:
    """A directory or a broken link in place of a claim file is read as a claim with unknown devices."""
    (own(tmp_path) / f"{D}_1.claim").mkdir(parents=True)
    (own(tmp_path) / f"{D}_2.claim").symlink_to(own(tmp_path) / f"{D}_2.claim")
    assert [(file.uid, file.devices) for file in claim_files.read_all(str(own(tmp_path)))] == [("1", None), ("2", None)]


def test_a_directory_that_is_not_there_has_no_files(tmp_path: Path) -> None:
    """If the directory of claim files is missing, there are no claims; if it cannot be read, that is an error."""
    assert claim_files.read_all(str(own(tmp_path / "none"))) == ()
    (tmp_path / "deviceplugin").write_bytes(b"")
    with pytest.raises(OSError, match="Not a directory"):
        claim_files.read_all(str(own(tmp_path)))


@given(st.binary() | st.builds(lambda at: claim_files.encode(made())[:at], st.integers(0, 400)))
def test_any_bytes_are_understood_or_unknown(data: bytes) -> None:
    """A claim file with any bytes is read as the claim that was written, or as a claim with unknown devices."""
    found = claim_files.decode(data, D, "1")
    assert found == made() or (found.driver, found.uid, found.devices) == (D, "1", None)
