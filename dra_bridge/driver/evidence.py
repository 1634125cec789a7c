"""Reads from files and the kubelet's claim state which devices the claims of one driver hold. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from deviceplugin import cdi
from deviceplugin.identity import Identity
from deviceplugin.kubelet.claim_state import PreparedClaim
from deviceplugin.register.claim_files import ClaimFile
from deviceplugin.register.records import UNKNOWN, WHOLE, Claim, ClaimDevice
from deviceplugin.register.rules import ClaimEvidence


class Published(NamedTuple):
    """A claim of which only the published names of devices are known. shares: (name, share; None if not known)."""

    uid: str
    shares: tuple[tuple[str, str | None], ...]
    namespace: str = ""
    name: str = ""
    pods: frozenset[str] = frozenset()

    def evidence(self, driver: str, resource: str, ids: Mapping[str, str], boot: str) -> ClaimEvidence:
        """Return the devices of one resource that the claim holds.

        ids: of the resource's devices, by published name.
        """
        granted = tuple(
            ClaimDevice(resource, ids[name], share or "", False, Identity(boot), WHOLE if share == "" else UNKNOWN)
            for name, share in self.shares
            if name in ids
        )
        held = frozenset(device.device for device in granted)
        return ClaimEvidence(driver, self.uid, held, True, self.namespace, self.name, self.pods, granted)


def in_state(claims: Iterable[PreparedClaim], driver: str, pool: str) -> Iterator[Published]:
    """Yield the devices of a driver's pool that claims hold by the kubelet's claim state."""
    for claim in claims:
        seen, listed = only_seen(claim, driver), sorted(claim.devices.get(driver, ()))
        shares = tuple((name, share) for of, name, share in listed if of == pool and name not in seen)
        yield Published(claim.uid, shares, claim.namespace, claim.name, claim.pod_uids)


def of_file(file: ClaimFile, resource: str, pods: frozenset[str]) -> ClaimEvidence:
    """Return the evidence in a claim's own file. pods: further pods that the kubelet's claim state names."""
    granted = file.devices or ()
    held = frozenset(device.device for device in granted if device.resource == resource and not device.admin)
    return ClaimEvidence(file.driver, file.uid, held, True, file.namespace, file.name, file.pods | pods, granted)


def only_seen(claim: PreparedClaim, driver: str) -> frozenset[str]:
    """Return the names of a driver's devices that a claim does not hold but has administrative access to.

    The CDI ids in the agent's answers show this: `<driver>/claim=admin_<claim UID>_<request>`. A device that is also in
    another request of the claim is held.
    """
    prefix = cdi.qualified(driver, f"{cdi.ADMIN}_{claim.uid}_")
    admin = {name.removeprefix(prefix) for name in claim.cdi_ids if name.startswith(prefix)}
    mine = [(request, device) for of, request, device in claim.requests if of == driver]
    held = {device for request, device in mine if request not in admin}
    return frozenset(device for request, device in mine if request in admin and device not in held)


def claim_of(file: ClaimFile, now: float) -> Claim:
    """Return the claim of a file, without an answer. now: Unix seconds."""
    return Claim(file.driver, file.uid, file.namespace, file.name, file.devices or (), None, now, pods=file.pods)
