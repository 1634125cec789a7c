"""ResourceSlices: what is published, and how it is kept so.

`desired` returns what the API server should have of this node's devices. `plan` compares that with what it has and
returns the fewest writes. `Publisher` keeps watching and writing.
"""

from dra_bridge.slices.desired import Desired, Offer, Pool, desired, slice_name
from dra_bridge.slices.publisher import PoolState, Publisher, remove_slices

__all__ = ["Desired", "Offer", "Pool", "PoolState", "Publisher", "desired", "remove_slices", "slice_name"]
