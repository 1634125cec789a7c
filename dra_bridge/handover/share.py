"""Defines the share: how many of a resource's devices on a node should be for claims (DRA), not the device plugin."""

from __future__ import annotations

import math
import re
import reprlib
from dataclasses import dataclass, replace
from typing import Final, Literal

Drain = Literal["cordon", "wait"]
"""Determines when held devices leave the device plugin. cordon: a held device leaves at once, so that no new pod gets
the device. wait: a held device leaves when it is idle; until then, new pods get other devices if possible."""


class ShareError(ValueError):
    """Raised when a text is not a share."""


@dataclass(frozen=True, slots=True)
class Share:
    """How many of a node's devices of a resource should be for DRA: a count, or a fraction of all (0 to 1).

    forced: whether devices move even if a kubelet restart would then end pods (`dra_bridge.handover.admission`).
    """

    count: int | None = None
    part: float = 0.0
    forced: bool = False

    def of(self, total: int) -> int:
        """Return how many of `total` devices should be for DRA.

        A fraction is rounded to the nearest number of devices; halves are rounded up.
        """
        if self.count is not None:
            return min(self.count, total)
        return min(total, math.floor(self.part * total + 0.5))

    def __str__(self) -> str:
        forced = _FORCED if self.forced else ""
        if self.count is not None:
            return (str(self.count) if self.count else "none") + forced
        return ("all" if self.part == 1 else f"{self.part:.0%}") + forced


_FORCED: Final = " force"


def parse_requested(text: str) -> Share:
    """Parse the share in a Node's annotation, which may end with the word force. Raises ShareError."""
    share = parse_share(text.removesuffix(_FORCED))
    return replace(share, forced=text.endswith(_FORCED))


def parse_share(text: str | int) -> Share:
    """Parse a share: none, all, a count, or a percentage. Raises ShareError for any other text."""
    value = {"none": "0", "all": "100%"}.get(str(text).strip(), str(text).strip())
    if re.fullmatch(r"[0-9]{1,7}", value):
        return Share(int(value))
    if re.fullmatch(r"100%|[1-9]?[0-9]%", value):
        return Share(part=int(value[:-1]) / 100)
    shown = reprlib.repr(value)
    raise ShareError(f"{shown} is not a share; write none, all, a number of devices, or a percentage such as 50%")
