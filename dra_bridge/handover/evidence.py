"""What a move has seen so far, and the evidence that the ledger's rules ask for at its end. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from deviceplugin.kubelet.holders import HolderSnapshot
from dra_bridge.handover.gate import DeviceIdResolver, kubelet_snapshot
from dra_bridge.ledger import (
    ClusterEvidence,
    KubeletEvidence,
    Snapshot,
    State,
)

__all__ = ["ToDra", "ToPlugin"]


@dataclass(frozen=True, slots=True)
class ToDra:
    """The evidence that R5 asks for, as far as it is gathered.

    The steps, each a method that returns what is known after it: `begun` (the moves under way now
    and where the ledger stands), `showing` (what ListAndWatch sent), `looking` (where the ledger
    stands before the witnesses are asked), `scanned` (what they said). The evidence goes to
    `ledger.commit_to_dra`, which checks it against all that was granted meanwhile.
    """

    resource: str
    devices: tuple[str, ...]
    sequence: int
    shown: Mapping[str, float] = field(default_factory=dict)
    began: int = -1

    @classmethod
    def begun(cls, resource: str, now: Snapshot) -> ToDra:
        """Return the gathering for the devices that are moving as of now."""
        devices = (name for name, record in now.of(resource).items() if record.state is State.TO_DRA)
        return cls(resource, tuple(sorted(devices)), now.sequence)

    def showing(self, sent: tuple[float, frozenset[str]] | None, device_id_of: DeviceIdResolver) -> ToDra:
        """Take in what ListAndWatch shows: when it was sent, and the healthy ids in it."""
        if sent is None:
            return replace(self, shown={})
        at, healthy = sent
        shown = set(map(device_id_of, healthy))
        names = (name for name in self.devices if name not in shown)
        return replace(self, shown=dict.fromkeys(names, at))

    def looking(self, sequence: int) -> ToDra:
        """Remember where the ledger stands before the kubelet is asked who holds what."""
        return replace(self, began=sequence)

    def scanned(
        self, now: HolderSnapshot | None, device_id_of: DeviceIdResolver, title: Callable[[str], str] = str
    ) -> KubeletEvidence | None:
        """Return the evidence; None if an Allocate came in between."""
        if now is None:
            return None
        snapshot = kubelet_snapshot(self.began, now, self.resource, device_id_of, title)
        return KubeletEvidence(self.sequence, self.shown, snapshot)


@dataclass(frozen=True, slots=True)
class ToPlugin:
    """The evidence that R6 asks for, as far as it is gathered.

    The steps: `begun` (the moves under way now; claims that are prepared hold some), `withdrawing`
    (which of them the API server has no more), `listed` (a list of claims begun after that).
    """

    resource: str
    devices: tuple[str, ...]
    held: frozenset[str]
    sequence: int
    withdrawn: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def begun(cls, resource: str, now: Snapshot) -> ToPlugin:
        """Return the gathering for the devices that are moving as of now."""
        devices = tuple(sorted(name for name, record in now.of(resource).items() if record.state is State.TO_PLUGIN))
        claimed = {name for claim in now.claims_on(resource, devices) for of, name in claim.held if of == resource}
        return cls(resource, devices, frozenset(claimed) & frozenset(devices), now.sequence)

    @property
    def free(self) -> frozenset[str]:
        """The devices that no prepared claim holds."""
        return frozenset(self.devices) - self.held

    def withdrawing(self, accepted: Mapping[str, float | None]) -> ToPlugin:
        """Take in since when the API server has had slices without a device; None where it has one with it."""
        return replace(self, withdrawn={name: at for name, at in accepted.items() if at is not None})

    def listed(self, at: float, allocated: Mapping[str, str]) -> ClusterEvidence:
        """Return the evidence with a list of claims that was begun at `at`."""
        return ClusterEvidence(self.sequence, self.withdrawn, at, allocated)
