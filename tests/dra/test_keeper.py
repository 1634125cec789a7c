from __future__ import annotations

from deviceplugin.device import Device
from deviceplugin.endpoint import Endpoint
from deviceplugin.inventory import Inventory
from deviceplugin.podresources import Holder, Quiet
from deviceplugin.source import DeviceSource
from dra_bridge.keeper import held_units


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
