"""Defines the interface by which a driver calls its agent."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from deviceplugin import naming
from deviceplugin.kubelet.containers import Starts


class RunningPods(NamedTuple):
    """The UIDs of the pods whose processes run.

    unlisted: for each running pod whose claims are unknown, when its processes were first seen (monotonic seconds). The
    kubelet does not list such a pod, because it forgets a pod that was deleted by force, together with its claims.
    """

    running: frozenset[str] = frozenset()
    unlisted: Mapping[str, float] = {}


class DriverHost:
    """The methods of the agent that a driver calls. In this base class, claims may get all devices at any time."""

    def ready(self, resource: str, device: str) -> bool:
        """Return whether claims may get a device now: False until the agent has found out the device's holders."""
        return True

    def bypassed(self, resource: str) -> bool:
        """Return whether the vendor's plugin of an adopted resource may be allocating devices without this agent."""
        return False

    def qualifiers(self, resources: Sequence[str]) -> Mapping[str, str]:
        """Return, for each resource, the qualifier that the names of its published devices contain.

        A resource that is missing in the result has no published devices yet.
        """
        return naming.qualifiers(resources)

    async def running_pods(self) -> RunningPods:
        """Record in the ledger file which pods use which claims. Return the pods whose processes run.

        Raises ClaimStateError, LedgerError or OSError if the pods are not known.
        """
        return RunningPods()

    def last_running_pods(self) -> RunningPods:
        """Return the newest result of `running_pods`, without reading the pods again.

        The result is recent enough for claims that wait for devices, because the agent reads the pods every few seconds
        while a claim waits.
        """
        return RunningPods()

    async def starts(self, pods: Collection[str]) -> Starts:
        """Return how often the kubelet has begun to start each container of these pods. Raises OSError."""
        return {}

    async def restarted(self, before: Starts, pods: Collection[str], waited: float) -> bool:
        """Return whether all containers that these pods had at an earlier time have certainly ended.

        before: the result of `starts` at the earlier time. pods: the pods, which run now. waited: a lower bound of the
        seconds since the earlier time.
        """
        return False

    def claims_changed(self) -> None:
        """React after a claim was prepared or unprepared, or after a device began to move to DRA for a claim."""
