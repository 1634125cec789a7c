"""A resource whose devices move, and the interfaces of the agent that its handover uses."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

from deviceplugin.exclusion import DeviceKey
from deviceplugin.inventory import Inventory
from deviceplugin.kubelet.holders import HolderSnapshot
from deviceplugin.kubelet.servicer import Endpoint
from deviceplugin.register.records import RegisterSnapshot
from deviceplugin.register.register import Register
from dra_bridge.handover.planner import ALL, Moving, Together


@dataclass(frozen=True, slots=True)
class Allocated:
    """The devices of this node that the allocations of claims name, from a consistent list of all claims.

    at: when the list began (monotonic seconds). claims: namespace/name by (resource, device). limits: the claims among
    them that serve the `limits` of a pod.
    """

    at: float
    claims: Mapping[DeviceKey, str] = field(default_factory=dict)
    limits: frozenset[DeviceKey] = frozenset()


class MoveEvidence(Protocol):
    """Provides evidence about present and future holders of devices, read again at each call.

    errors: the exceptions that `allocated` and `allocates` raise when the API server does not answer.
    """

    errors: ClassVar[tuple[type[Exception], ...]]

    async def scan(self, wanted: Collection[DeviceKey]) -> HolderSnapshot | None:
        """Find the holders of devices, and compare the register with them. Return None if an Allocate interfered."""

    def title(self, pod_uid: str) -> str:
        """Return a pod's name, for messages."""

    async def allocated(self) -> Allocated:
        """List all claims, consistently; the list begins after this call."""

    async def allocates(self, claim: str, resource: str, device: str | None) -> bool:
        """Read a claim, by namespace/name; return whether its allocation names a device of this node.

        device: None for any device of the resource.
        """


class DriverSlices(Protocol):
    """The slices of one driver. Devices move between them and the plugin side (`dra_bridge.node.slice_feed`)."""

    def withdrawn(self, resource: str, device: str) -> float | None:
        """Return since when no slice of the API server has offered a device (monotonic seconds); None if one may."""

    def offering(self, resource: str, device: str) -> str:
        """Return the name of a foreign slice that offers a device; "" if there is none."""

    def publish(self) -> None:
        """Compute and publish the slices again, because the state of moves has changed."""


class DriverSide(Protocol):
    """The driver's other resources, and the listeners to its moves (`dra_bridge.node.driver_runtime`)."""

    def endpoint(self, resource: str) -> Endpoint | None:
        """Return the servicer of a resource whose devices move together with these; None if it is not served."""

    def moved(self, resource: str) -> None:
        """Compute device lists and slices again, because moves have begun or ended."""


@dataclass(frozen=True, slots=True)
class MovedResource:
    """One resource whose devices are moved. moving: selects these devices. name: of the resource."""

    endpoint: Endpoint
    inventory: Inventory
    register: Register
    evidence: MoveEvidence
    side: DriverSide
    slices: DriverSlices
    moving: Moving = ALL
    name: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", self.endpoint.resource)

    @property
    def now(self) -> RegisterSnapshot:
        """The register's current records."""
        return self.register.store.snapshot

    def together(self, devices: Iterable[str]) -> Together:
        """Return, for each device, the devices that must move together with it. The first of them leads."""
        together: dict[str, tuple[DeviceKey, ...]] = {}
        for device in devices:
            together[device] = self.register.listed.group(self.name, device)
        return together
