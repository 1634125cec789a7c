"""Moves of devices between the two sides: what is asked for, which devices move, and how a move ends."""

from dra_bridge.handover.evidence import DeviceIdResolver, allocations_of, held_ids
from dra_bridge.handover.gate import LedgerGate
from dra_bridge.handover.moves import Handover
from dra_bridge.handover.share import Drain, Share, ShareError, parse_share

__all__ = [
    "DeviceIdResolver",
    "Drain",
    "Handover",
    "LedgerGate",
    "Share",
    "ShareError",
    "allocations_of",
    "held_ids",
    "parse_share",
]
