"""Makes evidence of the devices that claims hold, from claim files and the kubelet's claim state, by pure functions."""

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
    """A claim whose devices are known only by published names.

    shares: for each device, its published name and the claim's share ID; None if the share ID is unknown.
    """

    uid: str
    shares: tuple[tuple[str, str | None], ...]
    namespace: str = ""
    name: str = ""
    pods: frozenset[str] = frozenset()

    def evidence(self, driver: str, resource: str, ids: Mapping[str, str], boot: str) -> ClaimEvidence:
        """Return evidence that the claim holds its devices of one resource.

        ids: for each published name of a device of the resource, the device's id.
        """
        granted = tuple(
            ClaimDevice(resource, ids[name], share or "", False, Identity(boot), WHOLE if share == "" else UNKNOWN)
            for name, share in self.shares
            if name in ids
        )
        held = frozenset(device.device for device in granted)
        return ClaimEvidence(driver, self.uid, held, True, self.namespace, self.name, self.pods, granted)


def in_state(claims: Iterable[PreparedClaim], driver: str, pool: str) -> Iterator[Published]:
    """Yield, for each claim in the kubelet's claim state, the devices of a driver's pool that the claim holds."""
    for claim in claims:
        seen, listed = only_seen(claim, driver), sorted(claim.devices.get(driver, ()))
        shares = tuple((name, share) for of, name, share in listed if of == pool and name not in seen)
        yield Published(claim.uid, shares, claim.namespace, claim.name, claim.pod_uids)


def of_file(file: ClaimFile, resource: str, pods: frozenset[str]) -> ClaimEvidence:
    """Return evidence that a claim holds its devices of one resource, from the agent's own file of the claim.

    pods: the claim's further pods, from the kubelet's claim state.
    """
    granted = file.devices or ()
    held = frozenset(device.device for device in granted if device.resource == resource and not device.admin)
    return ClaimEvidence(file.driver, file.uid, held, True, file.namespace, file.name, file.pods | pods, granted)


def only_seen(claim: PreparedClaim, driver: str) -> frozenset[str]:
    """Return the names of a driver's devices that a claim does not hold, because it has only administrative access.

    The CDI ID in the agent's Prepare response shows such access: `<driver>/claim=admin_<claim UID>_<request>`. If
    another request of the claim has the same device without such access, the claim holds the device.
    """
    prefix = cdi.qualified(driver, f"{cdi.ADMIN}_{claim.uid}_")
    admin = {name.removeprefix(prefix) for name in claim.cdi_ids.get(driver, ()) if name.startswith(prefix)}
    mine = [(request, device) for of, request, device in claim.requests if of == driver]
    held = {device for request, device in mine if request not in admin}
    return frozenset(device for request, device in mine if request in admin and device not in held)


def claim_of(file: ClaimFile, now: float) -> Claim:
    """Return the record of the claim in a claim file, without a Prepare response. now: Unix seconds."""
    return Claim(file.driver, file.uid, file.namespace, file.name, file.devices or (), None, now, pods=file.pods)
