"""The ledger's record of the requested share (how many devices are for claims)."""

from __future__ import annotations

from pathlib import Path

from deviceplugin.tasks import Tasks
from dra_bridge.ledger.store import Ledger
from dra_bridge.ledger.worker import AsyncLedger
from dra_bridge.node.share import SHARE, DriverShare
from dra_bridge.rollout import progress

D = "sim.example.com"


async def test_the_last_share_is_recorded(tmp_path: Path) -> None:
    """If 1 device is requested for claims, then `all`, then 1 before `all` is recorded, the ledger has 1 in the end."""
    ledger, tasks = AsyncLedger(Ledger(str(tmp_path / "register.db"))), Tasks()
    share = DriverShare(D, ledger, tasks)
    key = progress.share_annotation(D)
    assert share.read({key: "1"}, "node")
    await tasks.wait(20)
    for text in ("all", "1"):
        assert share.read({key: text}, "node")
    await tasks.wait(20)
    assert ledger.snapshot.setting(SHARE, D) == "1"
