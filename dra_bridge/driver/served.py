"""The devices that a driver serves, and those of them that one request of a claim gets."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from deviceplugin import naming
from deviceplugin.device import Device
from deviceplugin.inventory import Inventory
from deviceplugin.source import DeviceSource
from dra_bridge.driver.claims import Result

__all__ = ["Group", "ServedDevices", "ServedResource"]


class ServedResource(NamedTuple):
    """One resource that the driver serves: who makes its devices, and the live set of them."""

    source: DeviceSource
    inventory: Inventory


@dataclass(frozen=True, slots=True)
class Group:
    """The devices of one request that come from one source."""

    request: str
    served: ServedResource
    devices: tuple[Device, ...]
    results: tuple[Result, ...]
    config: Any
    admin: bool


class ServedDevices:
    """The devices of a driver's resources by their published names.

    Args:
        served: the resources.
        qualifiers: returns those of resources, as in the names of published devices; a resource for
            which it has none has no published devices yet.

    """

    def __init__(
        self, served: Sequence[ServedResource], qualifiers: Callable[[Sequence[str]], Mapping[str, str]]
    ) -> None:
        self._qualifiers = qualifiers
        self._served = tuple(served)
        self._names: tuple[object, dict[str, tuple[ServedResource, Device]]] = (None, {})

    def replace(self, served: Sequence[ServedResource]) -> None:
        """Serve other resources from now on."""
        self._served = tuple(served)
        self._names = (None, {})

    @property
    def resources(self) -> tuple[ServedResource, ...]:
        """The resources."""
        return self._served

    @property
    def by_name(self) -> Mapping[str, tuple[ServedResource, Device]]:
        """The devices by the name that slices and claims use."""
        snapshots = [served.inventory.snapshot for served in self._served]
        words = self._qualifiers([snapshot.resource for snapshot in snapshots])
        key = tuple((snapshot.resource, snapshot.version) for snapshot in snapshots), tuple(words.items())
        if self._names[0] != key:
            served = {one.inventory.snapshot.resource: one for one in self._served}
            ids = {snapshot.resource: snapshot.devices for snapshot in snapshots}
            names = naming.published_names(words, ids)
            self._names = key, {name: (served[of], ids[of][one]) for name, (of, one) in names.items()}
        return self._names[1]
