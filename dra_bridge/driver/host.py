"""The interface between a driver and its agent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from deviceplugin import naming


class RunningPods(NamedTuple):
    """The pods whose processes run, by UID.

    unlisted: pods whose claims are not known, with the time since when they have been seen to run (monotonic seconds).
    The kubelet did not list them when their processes were seen, and it forgets the claims of a pod that was deleted by
    force.
    """

    running: frozenset[str] = frozenset()
    unlisted: Mapping[str, float] = {}


class DriverHost:
    """The agent of a driver. The methods here are for a driver without an agent, which has all of its devices."""

    def ready(self, resource: str, device: str) -> bool:
        """Return whether the agent may already give a device to claims."""
        return True

    def bypassed(self, resource: str) -> bool:
        """Return whether a plugin that bypasses this agent may be giving pods devices of an adopted resource."""
        return False

    def qualifiers(self, resources: Sequence[str]) -> Mapping[str, str]:
        """Return, for each resource, its qualifier in the names of published devices.

        A resource without a qualifier has no published devices yet.
        """
        return naming.qualifiers(resources)

    async def running_pods(self) -> RunningPods:
        """Record in the ledger which pods use which claims; return the pods whose processes run.

        Raises ClaimStateError, LedgerError or OSError if this is not known.
        """
        return RunningPods()

    def last_running_pods(self) -> RunningPods:
        """Return the last answer of `running_pods`, or of a later reading.

        While claims wait, the pods are read often.
        """
        return RunningPods()

    def claims_changed(self) -> None:
        """Handle that a claim came or ended, or that a device moves for a claim."""
