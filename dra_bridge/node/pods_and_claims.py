"""Which pods run on the node, and which claims its kubelet has prepared."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from deviceplugin.kubelet import claim_state
from deviceplugin.kubelet.claim_state import PreparedClaim
from deviceplugin.kubelet.tracker import HolderTracker
from deviceplugin.tasks import SharedCall


class PodsAndClaims:
    """Reads which pods run, and then which claims the kubelet has prepared, once for all drivers that ask.

    kubelet_root: where the kubelet's claim state lies.
    """

    def __init__(self, tracker: HolderTracker, kubelet_root: Path) -> None:
        self._tracker = tracker
        self._kubelet_root = kubelet_root
        self.read: Final = SharedCall(self._read)

    async def _read(self) -> tuple[frozenset[str], Sequence[PreparedClaim]]:
        """Raises ClaimStateError: the claim state cannot be read; OSError: cgroups cannot be read any more."""
        pods, root = self._tracker.pods, self._kubelet_root
        return await self._tracker.looks.at("claim state", lambda: (pods.running(), claim_state.read(root)), brief=True)
