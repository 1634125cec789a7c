"""A driver with a ledger and with claims that a test makes, without an agent and a kubelet."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from deviceplugin.cdi import own_directory
from deviceplugin.device import ContainerEdits, Device
from deviceplugin.inventory import Inventory
from deviceplugin.register import claim_files
from deviceplugin.register.claim_files import ClaimFile
from deviceplugin.register.records import Side
from deviceplugin.register.register import Register, RegisterHost
from deviceplugin.sharing import replicas_of, shares
from deviceplugin.source import DeviceSource
from dra_bridge.driver import (
    ClaimError,
    ClaimRef,
    ClusterClaims,
    Driver,
    DriverNode,
    Prepared,
    ServedResource,
)
from dra_bridge.ledger.worker import AsyncLedger
from tests.dra.ledger.samples import adopt

R = "example.com/fpga"
D = "fpga.example.com"
NODE = "node-1"
T0 = 1_700_000_000.0


def result(device: str, request: str = "fpga", **more: Any) -> dict[str, Any]:
    """Return a claim's allocation result for one device; with `shareID`, for one share of a shared device."""
    if "shareID" in more:
        more = {"consumedCapacity": {f"{D}/shares": "1"}, **more}
    return {"request": request, "driver": D, "pool": NODE, "device": device, **more}


def opaque(parameters: Any, *requests: str, source: str = "FromClaim", driver: str = D) -> dict[str, Any]:
    return {"source": source, "requests": list(requests), "opaque": {"driver": driver, "parameters": parameters}}


def claim(
    uid: str,
    *results: Mapping[str, Any],
    config: Sequence[Mapping[str, Any]] = (),
    name: str = "",
    pods: Sequence[str] = ("pod-uid",),
) -> dict[str, Any]:
    """Return a claim that was allocated these results. pods: the UIDs of the pods that it is reserved for."""
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaim",
        "metadata": {"namespace": "default", "name": name or f"claim-{uid}", "uid": uid},
        "status": {
            "reservedFor": [{"resource": "pods", "name": pod, "uid": pod} for pod in pods],
            "allocation": {"devices": {"results": list(results), "config": list(config)}},
        },
    }


def ref(uid: str, name: str = "") -> ClaimRef:
    return ClaimRef("default", name or f"claim-{uid}", uid)


@dataclass
class FakeClaims(ClusterClaims):
    """The claims of the API server, as the driver reads and writes them."""

    claims: dict[str, dict[str, Any]] = field(default_factory=dict)
    statuses: list[Any] = field(default_factory=list)
    events: list[str] = field(default_factory=list)
    gets: int = 0
    broken: Exception | None = None
    gate: asyncio.Event | None = None
    word: asyncio.Condition = field(default_factory=asyncio.Condition)

    def add(self, *claims: dict[str, Any]) -> None:
        for made in claims:
            self.claims[made["metadata"]["name"]] = made

    async def asked(self, times: int) -> None:
        async with self.word:
            await self.word.wait_for(lambda: self.gets >= times)

    def read(self, namespace: str, name: str) -> dict[str, Any] | None:
        """Return a claim to a fake kubelet; unlike the driver's reads, this one is not counted and never fails."""
        return self.claims.get(name)

    async def get_claim(self, namespace: str, name: str) -> Mapping[str, Any] | None:
        async with self.word:
            self.gets += 1
            self.word.notify_all()
        if self.gate is not None:
            await self.gate.wait()
        if self.broken is not None:
            raise self.broken
        return self.claims.get(name)

    async def set_devices(self, claim: ClaimRef, driver: str, devices: Sequence[Mapping[str, Any]]) -> None:
        self.statuses.append((claim.uid, driver, devices))

    async def claim_event(self, claim: ClaimRef, reason: str, message: str) -> None:
        self.events.append(f"{claim.name} {reason}: {message}")


class Plain(DeviceSource):
    """A source without hooks."""

    resource = R
    driver = D
    replicas = 2


@dataclass
class ServedDriver:
    """A driver, and the ledger, claims, inventory and CDI directory that it works with."""

    driver: Driver
    async_ledger: AsyncLedger
    claims: FakeClaims
    inventory: Inventory
    cdi: Path
    path: str
    register: Register
    successor: ServedDriver | None = None
    """The driver after a restart of the agent, which `again` has made; None before."""

    async def prepare(self, *uids: str) -> dict[str, Prepared | ClaimError]:
        return await self.driver.prepare([ref(uid) for uid in uids])

    async def prepared(self, uid: str) -> Prepared:
        answer = (await self.prepare(uid))[uid]
        assert isinstance(answer, Prepared), answer
        return answer

    async def give(self, uid: str, device: str) -> None:
        """Add a claim to which this device is allocated, and prepare it."""
        self.claims.add(claim(uid, result(device)))
        await self.prepared(uid)

    async def refusal(self, uid: str) -> ClaimError:
        answer = (await self.prepare(uid))[uid]
        assert isinstance(answer, ClaimError)
        return answer

    async def refused(self, uid: str) -> str:
        answer = await self.refusal(uid)
        assert not self.all_files, "an error leaves no file behind"
        assert not self.async_ledger.snapshot.claims, "an error leaves no record behind"
        return str(answer)

    async def unprepare(self, uid: str) -> ClaimError | None:
        return (await self.driver.unprepare([ref(uid)]))[uid]

    @property
    def all_files(self) -> list[str]:
        return sorted(path.name for path in self.cdi.rglob("*") if not path.is_dir())

    @property
    def files(self) -> list[str]:
        return [name for name in self.all_files if name.endswith(".json")]

    @property
    def own(self) -> dict[str, ClaimFile]:
        """The file that the agent keeps about each claim beside the claim's CDI file, by the claim's UID."""
        return {file.uid: file for file in claim_files.read_all(own_directory(str(self.cdi)))}

    def edits(self, *ids: str) -> list[dict[str, Any]]:
        """Return the container edits of these CDI ids."""
        known: dict[str, dict[str, Any]] = {}
        for name in self.files:
            spec = json.loads((self.cdi / name).read_bytes())
            known |= {f"{spec['kind']}={device['name']}": device["containerEdits"] for device in spec["devices"]}
        return [known[name] for name in ids]

    async def end(self) -> None:
        """End the driver as if the agent had been killed; the driver that `again` has returned ends as well."""
        if self.successor is not None:
            await self.successor.end()
        await self.driver.close()
        await self.async_ledger.close()

    async def again(self, source: DeviceSource | None = None, **options: Any) -> ServedDriver:
        """Return the driver after a restart of the agent, as if it had been killed."""
        await self.end()
        self.successor = await served_driver(
            self.cdi.parent, source or self.driver.devices.resources[0].source, claims=self.claims, **options
        )
        return self.successor


class _Listed(RegisterHost):
    """The host of a Register: it knows the devices of one source, if that source has a hook `released`."""

    def __init__(self, source: DeviceSource, inventory: Inventory) -> None:
        if "released" in source.hooks:
            its = SimpleNamespace(source=source, inventory=inventory, ids_now=partial(_ids, source), device_of=str)
            self.services = {source.resource: cast("Any", its)}


def _ids(source: DeviceSource, device: Device) -> tuple[str, ...]:
    return replicas_of(device.id, source.replicas)


async def served_driver(
    directory: Path,
    source: DeviceSource | None = None,
    *,
    claims: FakeClaims | None = None,
    side: Side = Side.DRA,
    devices: Sequence[Device] = (),
    boot: str = "1",
    report: bool = False,
    **options: Any,
) -> ServedDriver:
    source = source or Plain()
    inventory = Inventory(source.resource)
    listed = devices or [
        Device(f"d{n}", nodes=["/dev/null"], edits=ContainerEdits({f"FPGA_{n}": "1"})) for n in range(4)
    ]
    inventory.publish(listed, replicas=shares(source, listed))
    path = str(directory / "ledger.db")
    async_ledger = await AsyncLedger.open(path)
    await async_ledger.do(adopt(source.resource, inventory.snapshot.devices, side, T0))
    api = claims or FakeClaims()
    register = Register(_Listed(source, inventory), async_ledger)
    made = Driver(
        D,
        DriverNode(NODE, register, api, str(directory / "cdi"), boot=boot, report=report),
        [ServedResource(source, inventory)],
        **options,
    )
    return ServedDriver(made, async_ledger, api, inventory, directory / "cdi", path, register)


Serve = Callable[..., Awaitable[ServedDriver]]
"""Makes drivers as `served_driver` does, in one directory."""
