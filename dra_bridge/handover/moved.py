"""Defines a resource whose devices move between plugin and DRA, and the interfaces by which moves use the agent."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

from deviceplugin.exclusion import DeviceKey
from deviceplugin.inventory import Inventory
from deviceplugin.kubelet.servicer import Endpoint
from deviceplugin.register.records import State
from deviceplugin.register.register import Register
from deviceplugin.register.rules import KubeletSnapshot
from dra_bridge.handover.planner import ALL, Movable, Moving


@dataclass(frozen=True, slots=True)
class Allocated:
    """The devices of this node in the allocations of claims, from one consistent list of all claims.

    at: when the request for the list began (monotonic seconds). claims: for each (resource, device), the claim's
    namespace/name. limits: those keys of `claims` whose claim the scheduler made for a pod's `limits`.
    """

    at: float
    claims: Mapping[DeviceKey, str] = field(default_factory=dict)
    limits: frozenset[DeviceKey] = frozenset()


class MoveEvidence(Protocol):
    """Reads which pods and claims hold devices, and which claims have devices allocated. No result is cached.

    errors: the types of exceptions that `allocated` and `allocates` raise when the API server does not respond.
    """

    errors: ClassVar[tuple[type[Exception], ...]]

    async def scan(self, resource: str, device_ids: Collection[str]) -> KubeletSnapshot | None:
        """Read the holders of all devices, compare the register with them, and return the holders of the resource.

        device_ids: ids whose holders may have ended. Returns None if an Allocate ran during the read.
        """

    def title(self, pod_uid: str) -> str:
        """Return a pod's name, for messages."""

    async def allocated(self) -> Allocated:
        """Return the allocations of all claims at one moment, which is after this method was called."""

    async def allocates(self, claim: str, resource: str, device: str | None) -> bool:
        """Read a claim (namespace/name); return whether its allocation has this device of this node.

        device: None for any device of the resource.
        """


class DriverSlices(Protocol):
    """The ResourceSlices of one driver.

    `dra_bridge.node.slice_feed.SliceFeed` implements this interface.
    """

    def withdrawn(self, resource: str, device: str) -> float | None:
        """Return the time since which no slice offers a device (monotonic seconds); None if a slice may offer it."""

    def offering(self, resource: str, device: str) -> str:
        """Return the name of a slice by another driver or agent that offers a device; "" if there is none."""

    def publish(self) -> None:
        """Compute and publish the slices again, because the state of moves has changed."""


class Successor(Protocol):
    """The moves of the driver that a resource names now (`dra_bridge.handover.moves.Handover`)."""

    @property
    def driver(self) -> str:
        """The driver's name."""

    def takes(self, leaving: Collection[str]) -> Collection[str]:
        """Return those of these devices, which leave a former driver, that the share assigns to claims.

        Devices that must move together are returned together, or not at all.
        """

    def passed_on(self, devices: Collection[str]) -> None:
        """Continue the moves to DRA of these devices, which `dra_bridge.handover.ends.pass_on` has begun."""

    def publish(self) -> None:
        """Write the report again, because the waits of a former driver's devices have changed."""


class DriverSide(Protocol):
    """Finds the driver's other resources, and is told about moves (implemented by `dra_bridge.node.driver_runtime`)."""

    def successor(self, resource: str) -> Successor | None:
        """Return the moves of the driver that a resource names now; None if the resource names no driver."""

    def endpoint(self, resource: str) -> Endpoint | None:
        """Return the endpoint of another resource of the driver; None if this process has no such resource."""

    def moved(self, resource: str) -> None:
        """Update the device lists and the slices, because moves of this resource's devices have begun or ended.

        The device lists are updated by tasks of the event loop, after this method has returned.
        """


@dataclass(frozen=True, slots=True)
class MovedResource:
    """One resource whose devices may move. moving: selects the devices that may move. name: the resource's name."""

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

    def movable(self, leaving: Collection[str] = ()) -> Movable:
        """Return the plugged-in devices that may move, with their states.

        `Share.of` computes from the number of these devices how many should be for DRA. leaving: devices of a former
        driver to add.
        """
        now, listed = self.register.snapshot, self.inventory.snapshot
        states: dict[str, State] = {}
        records = self.moving.of(now, self.name)
        for name in leaving:
            records[name] = now.device(self.name, name)
        for name, record in records.items():
            if name in listed.devices and name not in listed.gone:
                states[name] = record.state
        together, refused = self.register.listed.groups(self.name, states), self.register.waits.refused
        return Movable.of(now, self.name, states, together, refused, self.moving.driver)
