"""Devices that the source does not list any more: they leave the ledger once nothing holds them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Final

from deviceplugin.inventory import Inventory
from dra_bridge.handover.planner import held_and_expected
from dra_bridge.handover.to_dra import Scan
from dra_bridge.ledger import operations
from dra_bridge.ledger.records import Side, State
from dra_bridge.ledger.rules import HolderWait
from dra_bridge.ledger.worker import AsyncLedger

_LOG: Final = logging.getLogger(__name__)


class UnpluggedDevices:
    """Forgets unplugged devices of one resource. notify: called when lists and slices may be other ones."""

    def __init__(
        self, resource: str, inventory: Inventory, async_ledger: AsyncLedger, scan: Scan, notify: Callable[[], None]
    ) -> None:
        self._resource = resource
        self._inventory = inventory
        self._ledger = async_ledger
        self._scan = scan
        self._notify = notify

    async def forget(self, waiting: dict[str, str]) -> None:
        """Forget devices that are unplugged, once nobody holds them and no claim names them.

        One on the DRA side, or on its way, moves to the plugin's side first, which shows that no claim names it (R6).
        """
        if not self._inventory.snapshot.listed:
            return
        now = self._ledger.snapshot
        unplugged = now.of(self._resource).keys() - self._inventory.snapshot.devices.keys()
        if allocations := now.allocations_on(self._resource, unplugged):
            waiting.update({one.device: HolderWait("its pod") for one in allocations})
            await self._scan({(self._resource, one.device_id) for one in allocations})
        now, devices = self._ledger.snapshot, self._inventory.snapshot.devices
        held, _ = held_and_expected(now)
        gone = {
            name: record.state
            for name, record in now.of(self._resource).items()
            if name not in devices and (self._resource, name) not in held
        }
        if leaving := [name for name, state in gone.items() if state in (State.DRA, State.TO_DRA)]:
            back = operations.begin_move(self._resource, leaving, Side.PLUGIN, time.time(), "it is unplugged")
            await self._ledger.do(back)
            self._notify()
        over = [name for name, state in gone.items() if state in (State.PLUGIN, State.QUARANTINED)]
        if over and (forgotten := await self._ledger.do(operations.forget(self._resource, over))):
            _LOG.info("%s: unplugged devices that nobody holds are forgotten: %s", self._resource, ", ".join(forgotten))
            self._notify()
