"""Reads the ledger file's records of a driver's claims, with the Prepare responses that the kubelet has received."""

from __future__ import annotations

import asyncio
import functools
import weakref
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Final

import msgspec

from deviceplugin.kubelet import holders
from deviceplugin.kubelet.cgroups import PodProcesses
from deviceplugin.kubelet.containers import Starts
from deviceplugin.register.records import Claim
from deviceplugin.register.store import Store


class PreparedDevice(msgspec.Struct, frozen=True, omit_defaults=True):
    """One device in a Prepare response. request: the request's name without the subrequest."""

    request: str
    pool: str
    device: str
    cdi_ids: tuple[str, ...] = ()
    share: str = ""


class Prepared(msgspec.Struct, frozen=True, omit_defaults=True):
    """The recorded response to the Prepare of a claim.

    spec: the claim's CDI spec as text, "" if the claim needs none. boot: the node's boot in which the claim was
    prepared. metadata: the texts of the claim's metadata files, by request. withheld: the requests whose CDI devices
    are not in the CDI file, because one of their devices is unplugged, or because another holder can open one of its
    nodes. stale: device numbers that were removed from the CDI file, but whose nodes the claim's containers may still
    be able to open. starts: how often the kubelet had begun to start each container when `stale` was removed; None if
    this was not read yet.
    """

    devices: tuple[PreparedDevice, ...]
    spec: str = ""
    boot: str = ""
    metadata: Mapping[str, str] = {}
    withheld: frozenset[str] = frozenset()
    stale: frozenset[str] = frozenset()
    starts: Starts | None = None

    @property
    def named(self) -> frozenset[tuple[str, str, str, str]]:
        """For each device, its request, pool, name and share ID, to compare with `ClaimAllocation.named`."""
        return frozenset((device.request, device.pool, device.device, device.share) for device in self.devices)


_DECODER: Final = msgspec.json.Decoder(Prepared)


def prepared_of(claim: Claim) -> Prepared | None:
    """Return the recorded Prepare response of a claim; None if there is none, or an older agent recorded it."""
    return None if claim.result is None else _prepared(claim.result)


@functools.lru_cache(maxsize=256)
def _prepared(result: str) -> Prepared | None:
    """Decode a recorded response. Cached, because each second all claims' files are compared with their responses."""
    try:
        return _DECODER.decode(result)
    except msgspec.DecodeError:
        return None


def is_over(
    claim: Claim, boot: str, named: Collection[str], pods: PodProcesses, unlisted: Collection[str] = ()
) -> bool:
    """Return whether no container of this node can use a claim any more.

    If the claim's pods are unknown, a container may use the claim until the next boot. boot: the id of the present
    boot. named: UIDs of the claims in the kubelet's claim state. pods: the pods whose processes run. unlisted: further
    pods that may use the claim.
    """
    prepared = prepared_of(claim)
    begun = {prepared.boot} if prepared is not None else {device.identity.boot for device in claim.devices}
    unknown = not claim.pods and boot in begun
    return not unknown and holders.claim_is_over(claim.uid, claim.pods.union(unlisted), named, pods)


@dataclass(frozen=True, slots=True)
class ClaimRecords:
    """The records of one driver's claims in the ledger file, and a lock for each claim."""

    driver: str
    pool: str
    ledger: Store
    _locks: weakref.WeakValueDictionary[str, asyncio.Lock] = field(default_factory=weakref.WeakValueDictionary)

    def get(self, uid: str) -> Claim | None:
        """Return the ledger file's record of a claim; None if there is no record."""
        return self.ledger.snapshot.claims.get((self.driver, uid))

    def all(self) -> list[Claim]:
        """Return the records of all claims of the driver."""
        return [claim for claim in self.ledger.snapshot.claims.values() if claim.driver == self.driver]

    def locked(self, uid: str) -> asyncio.Lock:
        """Return a claim's lock. All callers get the same object while a task has the lock or waits for this lock."""
        return self._locks.setdefault(uid, asyncio.Lock())
