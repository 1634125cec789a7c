"""Which devices the agent still lists to the kubelet while the adopted plugin is away."""

from __future__ import annotations

from pathlib import Path

from deviceplugin.adoption.plugins import VendorPlugins
from deviceplugin.adoption.source import AdoptedEndpoint, AdoptedSource, VendorDevice
from deviceplugin.inventory import Inventory
from deviceplugin.kubelet.podresources import AllocationsInFlight
from deviceplugin.register.records import Change, Decision, DeviceRecord, State
from deviceplugin.register.register import Register
from deviceplugin.register.store import MemoryStore

R = "vendor.example/gadget"


async def test_those_that_claims_have_or_may_get(tmp_path: Path) -> None:
    """Devices that claims have or may get stay listed, so that pods do not get them; other devices do not."""
    store = MemoryStore()
    endpoint = AdoptedEndpoint(
        AdoptedSource(R, VendorPlugins(tmp_path)), Inventory(R), AllocationsInFlight(), register=Register(store=store)
    )
    assert not endpoint.kept_back
    records = [DeviceRecord(R, state.value, state, 0.0) for state in State]
    records.append(DeviceRecord("vendor.example/other", "x", State.DRA, 0.0))
    changes = tuple(Change("devices", (one.resource, one.device), one) for one in records)
    await store.do(lambda snapshot: Decision(None, changes))
    assert endpoint.kept_back == {"dra", "to-plugin", "quarantined"}
    assert not endpoint.ready


async def test_what_the_kubelet_has_stays_in_the_list(tmp_path: Path) -> None:
    """Ids that the kubelet knows are listed as unhealthy while the plugin lists none; an id for claims always is."""
    store, inventory = MemoryStore(), Inventory(R)
    endpoint = AdoptedEndpoint(
        AdoptedSource(R, VendorPlugins(tmp_path)), inventory, AllocationsInFlight(), register=Register(store=store)
    )
    record = DeviceRecord(R, "held", State.DRA, 0.0)
    await store.do(lambda snapshot: Decision(None, (Change("devices", (R, "held"), record),)))

    async def listed() -> dict[str, str]:
        message = await anext(endpoint.streams.lists())
        assert len(message.devices) == len({one.ID for one in message.devices})
        return {one.ID: one.health for one in message.devices}

    endpoint.keep_registered({"another's"})
    assert await listed() == {"held": "Unhealthy", "another's": "Unhealthy"}
    inventory.publish([])
    assert await listed() == {"held": "Unhealthy", "another's": "Unhealthy"}
    inventory.publish([VendorDevice("another's"), VendorDevice("held")])
    assert await listed() == {"another's": "Healthy", "held": "Unhealthy"}
