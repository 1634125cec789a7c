"""What a claim is granted of a device, and how the claim's own file says it. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction

from deviceplugin import naming
from deviceplugin.claim_files import ClaimFile, FiledDevice
from deviceplugin.device import Device
from deviceplugin.identity import UNIDENTIFIED, Identity, identified
from deviceplugin.register.question import takes_of
from deviceplugin.register.records import Amount, Claim, ClaimDevice
from dra_bridge.driver.claims import Result
from dra_bridge.driver.served import RequestDevices


def granted_device(
    asked: RequestDevices, device: Device, result: Result, boot: str, times: int | None = None, *, limits: bool = False
) -> ClaimDevice:
    """Return what a claim is granted of a device now.

    asked: the request that the device is for. boot: the node's. times: how often the device is offered; None: as its
    inventory says. limits: whether the claim stands for a pod's `limits`.
    """
    now, admin = asked.served.inventory.snapshot, asked.admin
    tokens = now.identities.get(device.id, frozenset())
    part = "0" if admin else _part(times or now.replicas.get(device.id, 1), result)
    return ClaimDevice(
        now.resource,
        device.id,
        result.share_id or "",
        admin,
        identified(tokens, boot),
        Amount(part, () if admin else takes_of(device)),
        asked.parameters,
        limits,
    )


def _part(times: int, result: Result) -> str:
    """Return which part of a device a claim has: its shares of those that there are now; "" if that is not known."""
    if not result.share_id:
        return "1"
    capacity = result.consumed_capacity or {}
    consumed = {naming.qualified(name, result.driver): amount for name, amount in capacity.items()}
    try:
        shares = naming.parse_quantity(consumed[naming.qualified(naming.SHARES, result.driver)])
    except (KeyError, naming.NamingError):
        return ""
    part = shares / times
    return str(min(part, Fraction(1))) if part > 0 else ""


def filed(claim: Claim, boot: str, agent: str) -> ClaimFile:
    """Return the file of a claim. agent: the name of this one."""
    devices = tuple(
        FiledDevice(
            resource=device.resource,
            device=device.device,
            share=device.share,
            admin=device.admin,
            identity=device.identity,
            part=device.amount.part,
            takes=device.amount.takes,
            parameters=device.parameters,
            limits=device.limits,
        )
        for device in claim.devices
    )
    return ClaimFile(
        driver=claim.driver,
        uid=claim.uid,
        agent=agent,
        namespace=claim.namespace,
        name=claim.name,
        boot=boot,
        pods=claim.pods,
        devices=devices,
    )


def claim_of(file: ClaimFile, now: float) -> Claim:
    """Return the claim of a file, as one without an answer. now: Unix seconds."""
    return Claim(file.driver, file.uid, file.namespace, file.name, tuple(devices_of(file)), None, now, pods=file.pods)


def devices_of(file: ClaimFile) -> Iterator[ClaimDevice]:
    """Yield the devices of a claim's file; their identities name the boot, also where nothing else is known."""
    for device in file.devices or ():
        identity = Identity(file.boot) if device.identity == UNIDENTIFIED else device.identity
        amount = Amount(device.part, device.takes)
        held = device.resource, device.device, device.share, device.admin, identity, amount, device.parameters
        yield ClaimDevice(*held, limits=device.limits)
