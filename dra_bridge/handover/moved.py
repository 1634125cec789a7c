"""One resource whose devices are moved, and what its handover asks of the agent around it."""

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
    """What allocations of claims name on this node, as of a consistent list of all claims.

    at: when the list began (monotonic seconds). claims: namespace/name by (resource, device). limits: those of them
    that pods have by their `limits`.
    """

    at: float
    claims: Mapping[DeviceKey, str] = field(default_factory=dict)
    limits: frozenset[DeviceKey] = frozenset()


class MoveEvidence(Protocol):
    """Tells who holds devices, or will; read anew at each call.

    errors: what `allocated` and `allocates` raise when the API server cannot be asked.
    """

    errors: ClassVar[tuple[type[Exception], ...]]

    async def scan(self, wanted: Collection[DeviceKey]) -> HolderSnapshot | None:
        """Find out who holds devices, and compare the register with it; return None if an Allocate came in between."""

    def title(self, pod_uid: str) -> str:
        """Return a pod's name, for people."""

    async def allocated(self) -> Allocated:
        """List all claims, consistently; the list begins after this call."""

    async def allocates(self, claim: str, resource: str, device: str | None) -> bool:
        """Read a claim, by namespace/name; return whether its allocation names a device of this node.

        device: None for any one of the resource.
        """


class DriverSlices(Protocol):
    """The slices of the driver between which and the plugin's side devices move (`dra_bridge.node.slice_feed`)."""

    def withdrawn(self, resource: str, device: str) -> float | None:
        """Return since when (monotonic seconds) the API server has had slices without a device, if it has."""

    def offering(self, resource: str, device: str) -> str:
        """Return the name of a slice that others wrote and that offers a device; "" if there is none."""

    def publish(self) -> None:
        """Have the slices made anew: moves wait for something else."""


class DriverSide(Protocol):
    """The other resources of that driver, and all who follow its moves (`dra_bridge.node.driver_runtime`)."""

    def endpoint(self, resource: str) -> Endpoint | None:
        """Return the servicer of a resource whose devices move along, None if it is not served."""

    def moved(self, resource: str) -> None:
        """Have lists and slices made anew: moves have begun or ended."""


@dataclass(frozen=True, slots=True)
class MovedResource:
    """One resource whose devices are moved. moving: whose devices these are. name: of the resource."""

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
        """What the register has recorded."""
        return self.register.store.snapshot

    def together(self, devices: Iterable[str]) -> Together:
        """Return what each of these devices must move together with, the first of them leading."""
        together: dict[str, tuple[DeviceKey, ...]] = {}
        for device in devices:
            together[device] = self.register.listed.group(self.name, device)
        return together
