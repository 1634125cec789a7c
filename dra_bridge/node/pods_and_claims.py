"""Reads the running pods of the node, and the claims that its kubelet has prepared."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from deviceplugin.kubelet import claim_state
from deviceplugin.kubelet.claim_state import PreparedClaim
from deviceplugin.kubelet.tracker import HolderTracker
from deviceplugin.tasks import SharedCall


class PodsAndClaims:
    """Reads the running pods, and then the claims that the kubelet has prepared, once for all drivers that ask.

    kubelet_root: the directory of the kubelet's claim state.
    """

    def __init__(self, tracker: HolderTracker, kubelet_root: Path) -> None:
        self._tracker = tracker
        self._kubelet_root = kubelet_root
        self.read: Final = SharedCall(self._read)

    async def _read(self) -> tuple[frozenset[str], Sequence[PreparedClaim]]:
        """Raises ClaimStateError if the claim state cannot be read, OSError if cgroups can no longer be read."""
        pods, root = self._tracker.pods, self._kubelet_root
        return await self._tracker.looks.at("claim state", lambda: (pods.running(), claim_state.read(root)), brief=True)
