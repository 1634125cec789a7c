"""One resource whose devices are moved, and what its handover asks of the agent around it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

from deviceplugin.exclusion import DeviceKey
from deviceplugin.inventory import Inventory
from deviceplugin.kubelet.holders import HolderSnapshot
from deviceplugin.kubelet.servicer import Endpoint
from deviceplugin.register.records import RegisterSnapshot, State
from deviceplugin.register.register import Register
from deviceplugin.register.store import Store
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

    async def allocates(self, claim: str, resource: str, device: str) -> bool:
        """Read a claim, by namespace/name; return whether its allocation names a device of this node.

        Without a device: any one of the resource.
        """


class DriverSide(Protocol):
    """The driver between which and the plugin's side devices move."""

    def withdrawn(self, resource: str, device: str) -> float | None:
        """Return since when (monotonic seconds) the API server has had slices without a device, if it has."""

    def offering(self, resource: str, device: str) -> str:
        """Return the name of a slice that others wrote and that offers a device; "" if there is none."""

    def endpoint(self, resource: str) -> Endpoint | None:
        """Return the servicer of a resource whose devices move along, None if it is not served."""

    def moved(self, resource: str) -> None:
        """Have lists and slices made anew: moves have begun or ended."""

    def publish(self) -> None:
        """Have the slices made anew: moves wait for something else."""


@dataclass(frozen=True, slots=True)
class MovedResource:
    """One resource whose devices are moved. moving: whose devices these are."""

    endpoint: Endpoint
    inventory: Inventory
    register: Register
    evidence: MoveEvidence
    side: DriverSide
    moving: Moving = ALL

    @property
    def name(self) -> str:
        """The resource."""
        return self.endpoint.resource

    @property
    def ledger(self) -> Store:
        """Where the register keeps its records."""
        return self.register.store

    def in_state(self, now: RegisterSnapshot, state: State) -> tuple[str, ...]:
        """Return the devices that are moved and are in a state."""
        return self.moving.in_state(now, self.name, state)

    def together(self, devices: Iterable[str]) -> Together:
        """Return what each of these devices must move together with."""
        return {device: self.group(device) for device in devices}

    def group(self, device: str) -> tuple[DeviceKey, ...]:
        """Return the devices that a device must move together with, the first of them leading."""
        return self.register.listed.group(self.name, device)
