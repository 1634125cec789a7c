"""Replicas of a device and their ids."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from deviceplugin.device import Device
from deviceplugin.sharing import device_of, replicas_of, shares
from deviceplugin.source import DeviceSource

_ids = st.text(st.characters(categories=["L", "N", "P"]), min_size=1, max_size=20)


class Some(DeviceSource):
    """A source whose `replicas_of` raises for device c."""

    resource = "example.com/card"
    replicas = 4

    def replicas_of(self, device: Device) -> int:
        return {"a": 9, "b": 1}[device.id]


def test_devices_are_shared_as_their_source_says() -> None:
    """`replicas_of` gives the number for each device, at most `replicas`; if it raises, the device has `replicas`."""
    devices = [Device(name) for name in "abc"]
    assert shares(Some(), devices) == {"a": 4, "b": 1, "c": 4}
    whole = Some()
    whole.replicas = 1
    assert shares(whole, devices) == {}


def test_unshared_device_keeps_its_id() -> None:
    """A device that is not shared has its own id at the kubelet, also one that looks like a replica."""
    assert replicas_of("a::0", 1) == ("a::0",)
    assert device_of("a::0", 1) == "a::0"


def test_replicas_are_numbered() -> None:
    """A shared device is known under an id for each replica."""
    assert replicas_of("a", 3) == ("a::0", "a::1", "a::2")


@given(_ids, st.integers(2, 20))
def test_replica_leads_back_to_its_device(device: str, replicas: int) -> None:
    """The replicas of a device have different ids, and each id leads back to the device."""
    names = replicas_of(device, replicas)
    assert len(set(names)) == replicas
    assert {device_of(name, replicas) for name in names} == {device}


@given(st.lists(_ids, unique=True, min_size=2, max_size=5), st.integers(2, 5))
def test_replicas_of_two_devices_never_collide(devices: list[str], replicas: int) -> None:
    """Two devices never share an id, also if one has the name of the other's replica."""
    names = [name for device in devices for name in replicas_of(device, replicas)]
    assert len(set(names)) == len(names)
    assert list(dict.fromkeys(device_of(name, replicas) for name in names)) == devices


def test_id_that_is_no_replica_stays() -> None:
    """An id without a replica's number, for example from before sharing was switched on, is the device's own id."""
    assert device_of("gpu", 4) == "gpu"
    assert device_of("gpu::x", 4) == "gpu::x"
    assert device_of("::1", 4) == ""
