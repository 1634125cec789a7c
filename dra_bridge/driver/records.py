"""Reads the ledger's records of a driver's claims, with the answers that the kubelet got."""

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
from deviceplugin.register.records import Claim
from deviceplugin.register.store import Store


class PreparedDevice(msgspec.Struct, frozen=True, omit_defaults=True):
    """One device of an answer to the kubelet. request: without the subrequest."""

    request: str
    pool: str
    device: str
    cdi_ids: tuple[str, ...] = ()
    share: str = ""


class Prepared(msgspec.Struct, frozen=True, omit_defaults=True):
    """The recorded answer to a claim.

    spec: the CDI file's text, "" if none is needed. boot: the node's boot in which the claim was prepared. metadata:
    the texts of its metadata files by request.
    """

    devices: tuple[PreparedDevice, ...]
    spec: str = ""
    boot: str = ""
    metadata: Mapping[str, str] = {}

    @property
    def named(self) -> frozenset[tuple[str, str, str, str]]:
        """The request, pool, device and share of each device: the allocation that this is the answer to."""
        return frozenset((device.request, device.pool, device.device, device.share) for device in self.devices)


_DECODER: Final = msgspec.json.Decoder(Prepared)


def prepared_of(claim: Claim) -> Prepared | None:
    """Return the recorded answer to a claim; None if there is none, or it has the format of an older agent."""
    return None if claim.result is None else _prepared(claim.result)


@functools.lru_cache(maxsize=256)
def _prepared(result: str) -> Prepared | None:
    """Decode an answer. The files of all claims are compared with their answers every second."""
    try:
        return _DECODER.decode(result)
    except msgspec.DecodeError:
        return None


def is_over(
    claim: Claim, boot: str, named: Collection[str], pods: PodProcesses, unlisted: Collection[str] = ()
) -> bool:
    """Return whether no container of this node can use a claim. If its pods are unknown, one may until the next boot.

    boot: the present boot. named, pods: see `ClaimReconciler.reconcile`. unlisted: further pods that may use the claim.
    """
    prepared = prepared_of(claim)
    begun = {prepared.boot} if prepared is not None else {device.identity.boot for device in claim.devices}
    unknown = not claim.pods and boot in begun
    return not unknown and holders.claim_is_over(claim.uid, claim.pods.union(unlisted), named, pods)


@dataclass(frozen=True, slots=True)
class ClaimRecords:
    """The records of one driver's claims in the ledger, and a lock for each claim that is being changed."""

    driver: str
    pool: str
    ledger: Store
    _locks: weakref.WeakValueDictionary[str, asyncio.Lock] = field(default_factory=weakref.WeakValueDictionary)

    def get(self, uid: str) -> Claim | None:
        """Return a claim's record."""
        return self.ledger.snapshot.claims.get((self.driver, uid))

    def all(self) -> list[Claim]:
        """Return the records of all claims of the driver."""
        return [claim for claim in self.ledger.snapshot.claims.values() if claim.driver == self.driver]

    def locked(self, uid: str) -> asyncio.Lock:
        """Return the lock of a claim. It is the same object while a task has it or waits for it."""
        return self._locks.setdefault(uid, asyncio.Lock())
