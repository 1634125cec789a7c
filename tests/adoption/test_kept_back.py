"""Which devices stay registered with the kubelet though their plugin has gone."""

from __future__ import annotations

from pathlib import Path

from deviceplugin.adoption.plugins import VendorPlugins
from deviceplugin.adoption.source import AdoptedEndpoint, AdoptedSource
from deviceplugin.inventory import Inventory
from deviceplugin.kubelet.podresources import AllocationsInFlight
from deviceplugin.register.records import Change, Decision, DeviceRecord, State
from deviceplugin.register.register import MemoryStore, Register

R = "vendor.example/gadget"


async def test_those_that_claims_have_or_may_get(tmp_path: Path) -> None:
    """A device that pods may still be given is none: the last list that was sent may have it healthy."""
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
