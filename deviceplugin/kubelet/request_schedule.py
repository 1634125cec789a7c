"""Decides which scans request a newer checkpoint from the kubelet."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Collection
from typing import Final

from deviceplugin.kubelet import holders
from deviceplugin.kubelet.cgroups import PodProcesses
from deviceplugin.kubelet.holders import HolderSnapshot
from deviceplugin.register.records import Allocation

FIRST_REQUEST: Final = 0.5
MOST_REQUEST: Final = 10.0
"""FIRST_REQUEST and MOST_REQUEST are the minimum and maximum seconds between two requests for a checkpoint about the
same allocations. Each request doubles the delay."""


class RequestSchedule:
    """Decides which scans request a newer checkpoint from the kubelet.

    scan_wanted: an event that is set when a request is due at once.
    """

    def __init__(self, scan_wanted: asyncio.Event) -> None:
        self._scan_wanted = scan_wanted
        self._disputed = False
        self._running: frozenset[str] = frozenset()
        self._asked_for: frozenset[tuple[Allocation, bool]] = frozenset()
        self._next = 0.0
        self._delay = FIRST_REQUEST

    def dispute(self) -> None:
        """Record that the kubelet has allocated a held id again, because the kubelet counts the holder as ended."""
        self._disputed = True
        self._scan_wanted.set()

    def due(self, now: HolderSnapshot, pods: PodProcesses, wanted: Collection[tuple[str, str]]) -> bool:
        """Return whether this scan must request a newer checkpoint from the kubelet.

        now: the holders according to the evidence that the scan has read so far. pods: the pods' processes in this
        evidence. wanted: the (resource, device id) pairs for which a caller waits until they have no holder.
        """
        uncertain = holders.needs_request(now.held, pods)
        ended = any(allocation.pod_uid in self._running for allocation in uncertain)
        self._running = frozenset(allocation.pod_uid for allocation in now.held.keys() - uncertain)
        held = {allocation[2:] for allocation, of in now.held.items() if of.begun or allocation not in uncertain}
        if ended or self._disputed or not held.issuperset(wanted):
            self._disputed = False
            return True
        asking = frozenset((allocation, now.held[allocation].named) for allocation in uncertain)
        if asking != self._asked_for:
            # An allocation that the checkpoint no longer names has probably ended, so a newer checkpoint is requested
            # at once.
            dropped = any(not named for _, named in asking - self._asked_for)
            self._asked_for, self._delay = asking, FIRST_REQUEST
            self._next = now.at if dropped else now.at + FIRST_REQUEST
        if not uncertain or now.at < self._next:
            return False
        self._next = now.at + self._delay * random.uniform(0.8, 1.2)  # noqa: S311  # jitter
        self._delay = min(2 * self._delay, MOST_REQUEST)
        return True
