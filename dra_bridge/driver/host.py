"""What a driver asks of the agent that it is a part of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from deviceplugin import naming


class RunningPods(NamedTuple):
    """The pods whose processes run, by UID.

    unlisted: those of which it is not known which claims they use, and since when they have been seen to run (monotonic
    seconds). The kubelet did not list them when their processes were seen to run, and it forgets the claims of a pod
    that was deleted by force.
    """

    running: frozenset[str] = frozenset()
    unlisted: Mapping[str, float] = {}


class DriverHost:
    """The agent of a driver. These answers are those for a driver alone: it has all of its devices."""

    def ready(self, resource: str, device: str) -> bool:
        """Return whether a device may be given to claims yet."""
        return True

    def bypassed(self, resource: str) -> bool:
        """Return whether pods may just be given devices of an adopted resource by a plugin that bypasses this agent."""
        return False

    def qualifiers(self, resources: Sequence[str]) -> Mapping[str, str]:
        """Return those of resources in the names of published devices.

        A resource without one has no published devices yet.
        """
        return naming.qualifiers(resources)

    async def running_pods(self) -> RunningPods:
        """Record in the ledger which pods use which claims; return the pods whose processes run.

        Raises ClaimStateError, LedgerError, OSError: it is not known.
        """
        return RunningPods()

    def last_running_pods(self) -> RunningPods:
        """Return the last answer of `running_pods`, or of a later reading: while claims wait it is read often."""
        return RunningPods()

    def claims_changed(self) -> None:
        """Take that claims came or went, or that a device moves for one."""
