"""Devices that the source does not list any more: they leave the ledger once nothing holds them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from deviceplugin.inventory import Inventory
from dra_bridge.handover.planner import held_and_expected
from dra_bridge.handover.to_dra import Scan
from dra_bridge.ledger import operations
from dra_bridge.ledger.records import Side, State
from dra_bridge.ledger.rules import HolderWait
from dra_bridge.ledger.worker import AsyncLedger

_LOG: Final = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class UnpluggedDevices:
    """Forgets unplugged devices of one resource. notify: called when lists and slices may be other ones."""

    resource: str
    inventory: Inventory
    ledger: AsyncLedger
    scan: Scan
    notify: Callable[[], None]

    async def forget(self, waiting: dict[str, str]) -> None:
        """Forget devices that are unplugged, once nobody holds them and no claim names them.

        One on the DRA side, or on its way, moves to the plugin's side first, which shows that no claim names it (R6).
        """
        if not self.inventory.snapshot.listed:
            return
        now = self.ledger.snapshot
        unplugged = now.of(self.resource).keys() - self.inventory.snapshot.devices.keys()
        if allocations := now.allocations_on(self.resource, unplugged):
            waiting.update({one.device: HolderWait("its pod") for one in allocations})
            await self.scan({(self.resource, one.device_id) for one in allocations})
        now, devices = self.ledger.snapshot, self.inventory.snapshot.devices
        held, _ = held_and_expected(now)
        gone = {
            name: record.state
            for name, record in now.of(self.resource).items()
            if name not in devices and (self.resource, name) not in held
        }
        if leaving := [name for name, state in gone.items() if state in (State.DRA, State.TO_DRA)]:
            back = operations.begin_move(self.resource, leaving, Side.PLUGIN, time.time(), "it is unplugged")
            await self.ledger.do(back)
            self.notify()
        over = [name for name, state in gone.items() if state in (State.PLUGIN, State.QUARANTINED)]
        if over and (forgotten := await self.ledger.do(operations.forget(self.resource, over))):
            _LOG.info("%s: unplugged devices that nobody holds are forgotten: %s", self.resource, ", ".join(forgotten))
            self.notify()
