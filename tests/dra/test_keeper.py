from __future__ import annotations

import asyncio
from pathlib import Path

from deviceplugin.agent import Look
from deviceplugin.device import Device
from deviceplugin.endpoint import Endpoint
from deviceplugin.inventory import Inventory
from deviceplugin.ledger import Desk, Ledger
from deviceplugin.podresources import Holder, Holdings, Quiet
from deviceplugin.source import DeviceSource
from dra_bridge.keeper import Behind, Keeper, held_units


class Gpus(DeviceSource):
    resource = "example.com/gpu"


async def test_replicas_from_before_sharing_ended_hold_their_device() -> None:
    """A pod that holds a replica of a device that is shared no more still holds that device."""
    inventory = Inventory(Gpus.resource)
    inventory.publish([Device("gpu0"), Device("gpu1")])
    endpoint = Endpoint(Gpus(), inventory, Quiet())
    held = {name: {Holder("default", "train", "main")} for name in ("gpu0::3", "gpu1")}
    units = held_units(held, endpoint.behind)
    assert {unit: one.device for unit, one in units.items()} == {"gpu0::3": "gpu0", "gpu1": "gpu1"}


async def test_a_resource_may_be_dropped_while_the_books_are_compared(tmp_path: Path) -> None:
    """The ledger takes its time for each of them, and a reload does not wait for it."""
    desk = Desk(Ledger.open(str(tmp_path / "ledger.db")))
    resources: dict[str, Behind] = {"example.com/a": str, "example.com/b": str}
    keeper = Keeper(desk, resources)
    held = {name: {"d": frozenset({Holder("default", "p", "c")})} for name in resources}
    looking = asyncio.create_task(keeper.after_look(desk.snapshot.sequence, Look(Holdings(held), 1.0, None, 0.5)))
    await asyncio.sleep(0)  # the ledger is asked about the first
    del resources["example.com/a"]
    await looking
    assert [hold.resource for hold in desk.snapshot.holds.values()] == ["example.com/a", "example.com/b"]
    await desk.close()
