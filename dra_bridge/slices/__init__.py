"""ResourceSlices: what is published, and how it is kept so.

`desired` says what the API server should have of this node's devices. `plan` compares that with what it
has and lists the fewest writes. `Publisher` keeps watching and writing.
"""

from dra_bridge.slices.desired import ALL, SHARES, Capabilities, Desired, Offer, Pool, desired, slice_name
from dra_bridge.slices.plan import Write, fingerprint, plan
from dra_bridge.slices.publisher import PoolState, Publisher, remove_slices
from dra_bridge.slices.versions import in_version, neutral

__all__ = [
    "ALL",
    "SHARES",
    "Capabilities",
    "Desired",
    "Offer",
    "Pool",
    "PoolState",
    "Publisher",
    "Write",
    "desired",
    "fingerprint",
    "in_version",
    "neutral",
    "plan",
    "remove_slices",
    "slice_name",
]
