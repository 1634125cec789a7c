"""What claims hold through drivers that nobody serves: their containers may still run.

So it is after `dra-bridge run` was replaced by `deviceplugin run`, or after a resource's driver was
renamed or taken out of the file. Whoever serves the resource next gives nobody such a device.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import grpc

from deviceplugin.endpoint import Refusal

if TYPE_CHECKING:
    from deviceplugin.ledger import Claim

__all__ = ["Left", "claims_left", "doorkeeper", "holders"]

_LOG: Final = logging.getLogger(__name__)

Holders = Mapping[tuple[str, str], str]
"""Who holds what, in words, by (resource, device)."""


class Left:
    """A doorkeeper that gives out all but what such claims hold."""

    def __init__(self, held: Holders) -> None:
        self.held = held

    def offers(self, resource: str, device: str) -> bool:
        """Offer what no claim holds."""
        return (resource, device) not in self.held

    def avoids(self, resource: str) -> Collection[str]:
        """Avoid nothing."""
        return ()

    async def grant(self, resource: str, names: Sequence[str], devices: Sequence[str]) -> None:
        """Refuse what a claim holds."""
        for device in devices:
            if holder := self.held.get((resource, device)):
                details = f"{resource}: device {device} is held by {holder}"
                raise Refusal(grpc.StatusCode.FAILED_PRECONDITION, "claim", details)


def claims_left(plugins: Path, served: Collection[str] = ()) -> dict[str, Sequence[Claim]]:
    """Return the claims in the ledgers among the kubelet's plugins, by driver; reads files.

    served: drivers that have an agent, whose ledgers it knows itself.
    """
    files = [path for path in sorted(plugins.glob("*/ledger.db")) if path.parent.name not in served]
    if not files:
        return {}
    from deviceplugin import ledger  # with it comes SQLite: only where there was an agent with both doors

    found = {path.parent.name: ledger.left_behind(str(path)) for path in files}
    return {driver: claims for driver, claims in found.items() if claims}


def holders(claims: Mapping[str, Sequence[Claim]], served: Collection[str] = ()) -> Holders:
    """Return what claims of these drivers hold; served: those that an agent still ends when their pods have ended."""
    return {
        key: f"claim {claim.title} through driver {driver}"
        + ("" if driver in served else ", which is not served; name it again to end it")
        for driver, theirs in sorted(claims.items())
        for claim in theirs
        for key in sorted(claim.held)
    }


def doorkeeper(kubelet_root: Path) -> Left | None:
    """Return who keeps the plugin door where nobody serves claims; None if none were left. Reads files."""
    held = holders(claims_left(kubelet_root / "plugins"))
    for (resource, device), holder in held.items():
        _LOG.warning("%s: device %s is held by %s; not offered so long", resource, device, holder)
    return Left(held) if held else None
