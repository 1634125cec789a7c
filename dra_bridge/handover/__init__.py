"""Moves of devices between the two sides: what is asked for, which devices move, and how a move ends."""

from dra_bridge.handover.gate import DeviceIdResolver, LedgerGate, allocations_of, held_units, kubelet_snapshot
from dra_bridge.handover.moves import AllocatedClaims, Handover, MoveStatistics, Slices
from dra_bridge.handover.share import Drain, Share, ShareError, parse_share

__all__ = [
    "AllocatedClaims",
    "DeviceIdResolver",
    "Drain",
    "Handover",
    "LedgerGate",
    "MoveStatistics",
    "Share",
    "ShareError",
    "Slices",
    "allocations_of",
    "held_units",
    "kubelet_snapshot",
    "parse_share",
]
