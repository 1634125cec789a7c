"""What claims hold through drivers that nobody serves."""

from __future__ import annotations

import sys
from pathlib import Path

import grpc
import pytest

from deviceplugin import ledger, left
from deviceplugin.endpoint import Refusal
from deviceplugin.ledger import Claim, ClaimDevice, Ledger, Side
from deviceplugin.testing import FakeKubelet
from tests.programs import running

R = "example.com/sim"
D = "sim.example.com"


def leave(plugins: Path, *devices: ClaimDevice, driver: str = D) -> None:
    """Leave a ledger with a prepared claim."""
    with Ledger.open(str(plugins / driver / "ledger.db")) as book:
        book.do(ledger.adopt(R, [one.device for one in devices], Side.DRA, 1.0))
        book.do(ledger.prepare(Claim(driver, "uid", "ml", "train", devices, "ready", 1.0)))


def test_claims_are_found_by_driver(tmp_path: Path) -> None:
    """Those of drivers that are served are not looked at; devices for administrative access are not held."""
    leave(tmp_path, ClaimDevice(R, "a"), ClaimDevice(R, "b", admin=True))
    leave(tmp_path, ClaimDevice(R, "c"), driver="other.example.com")
    (tmp_path / "vendor.example.org").mkdir()
    (tmp_path / "vendor.example.org" / "ledger.db").write_text("another program's")
    found = left.claims_left(tmp_path, {"other.example.com"})
    assert list(found) == [D]
    assert left.holders(found) == {
        (R, "a"): f"claim ml/train through driver {D}, which is not served; name it again to end it"
    }
    assert left.holders(found, {D}) == {(R, "a"): f"claim ml/train through driver {D}"}


def test_no_keeper_where_nothing_was_left(tmp_path: Path) -> None:
    """A node that never had a bridge pays nothing."""
    assert left.doorkeeper(tmp_path) is None
    (tmp_path / "plugins").mkdir()
    assert left.doorkeeper(tmp_path) is None


async def test_what_a_claim_holds_is_not_given_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """All the rest is."""
    leave(tmp_path / "plugins", ClaimDevice(R, "a"))
    keeper = left.doorkeeper(tmp_path)
    assert keeper is not None
    assert f"{R}: device a is held by claim ml/train" in caplog.text
    offered = [keeper.offers(R, "a"), keeper.offers(R, "b"), keeper.offers("example.com/other", "a")]
    assert offered == [False, True, True]
    assert keeper.avoids(R) == ()
    await keeper.grant(R, ["b"], ["b"])
    with pytest.raises(Refusal, match="device a is held by claim ml/train") as refused:
        await keeper.grant(R, ["a::1", "b"], ["a", "b"])
    assert refused.value.code is grpc.StatusCode.FAILED_PRECONDITION


@pytest.mark.parametrize("own", [False, True], ids=["a file", "an author's own"])
def test_a_plugin_alone_after_a_bridge_keeps_off_its_claims(
    fake_kubelet: FakeKubelet, tmp_path: Path, *, own: bool
) -> None:
    """Whoever takes `deviceplugin run` where `dra-bridge run` was finds devices of running containers withheld."""
    leave(fake_kubelet.root / "plugins", ClaimDevice(R, "sim-0"))
    if own:
        program = tmp_path / "plugin.py"
        program.write_text(
            "from deviceplugin import run\nfrom deviceplugin.sources.simulated import SimulatedSource\n"
            f"run(SimulatedSource(2, resource={R!r}))\n"
        )
        command = [sys.executable, str(program)]
    else:
        file = tmp_path / "config.yaml"
        file.write_text(f"resources: [{{name: {R}, driver: {D}, devices: [{{simulated: {{count: 2}}}}]}}]\n")
        command = [sys.executable, "-m", "deviceplugin", "run", "--config", str(file)]
    with running([*command, "--kubelet-root", str(fake_kubelet.root)]) as process:
        fake_kubelet.wait_allocatable(R, 1, timeout=30)
        health = {name: device.health for name, device in fake_kubelet.devices(R).items()}
        assert health == {"sim-0": "Unhealthy", "sim-1": "Healthy"}
        assert fake_kubelet.run_pod("p", {R: 1}).device_ids == ("sim-1",)
        process.terminate()
        assert process.wait(30) == 0
