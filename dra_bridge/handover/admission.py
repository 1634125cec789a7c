"""Computes which pods a kubelet restart would end now, and which moves would cause that. Pure functions.

Facts (kubelet 1.36): at its start the kubelet admits the node's pods again, the oldest first (HandlePodAdditions). For
the pod under admission, the kubelet ignores limits that DRA serves. For the pods admitted before, it counts such limits
(removeMissingExtendedResources, lifecycle/predicate.go; kubernetes#124586). It compares the sum with the Node's
`status.allocatable`, or with the number of ids in its checkpoint if that is larger (sanitizeNodeAllocatable,
devicemanager/manager.go). The kubelet ends a pod that does not fit, although the pod runs.

So a restart can end a pod of the plugin side if older pods get their `limits` through DRA. The kubelet's own number is
0 until the agent has registered. No pod is at risk if all pods of one kind have ended before pods of the other kind
start. Therefore devices return to the plugin side only when no pod has a device through DRA by `limits`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Final, NamedTuple

from deviceplugin.register.records import Claim, RegisterSnapshot
from deviceplugin.register.rules import held_by_limits, served_by_limits

AGE: Final = 5.0
"""Seconds by which a pod may be older than its claim for `limits`. The pod's own creation time is not known here."""


@dataclass(frozen=True, slots=True)
class Counts:
    """The kubelet's counts of one resource, as numbers of ids.

    shown: ids that are Healthy both in the present list and in the next one; None without a ListAndWatch stream.
    by_plugin: ids that pods have, withdrawn devices included. by_dra: devices that pods have through DRA by their
    `limits`.
    """

    shown: int | None
    by_plugin: int
    by_dra: int

    @property
    def capacity(self) -> int:
        """The number that the kubelet will compare the sum of limits with at its next start.

        The kubelet uses it only if the agent registers before the kubelet admits its pods.
        """
        return max(self.shown or 0, self.by_plugin)


def counts_of(now: RegisterSnapshot, resource: str, shown: Collection[str] | None) -> Counts:
    """Return the counts of a resource. shown: see `Counts`."""
    return Counts(len(shown) if shown is not None else None, *held_by_limits(now, resource))


def served_by_dra(now: RegisterSnapshot, resource: str) -> list[Claim]:
    """Return the claims through which pods have devices of a resource by their `limits`, the oldest first."""
    served = [claim for claim in now.claims.values() if served_by_limits(claim, resource)]
    return sorted(served, key=attrgetter("since"))


def resources_served_by_dra(now: RegisterSnapshot) -> set[str]:
    """Return the resources of which pods have devices through DRA by their `limits`."""
    served: set[str] = set()
    for claim in now.claims.values():
        for device in claim.devices:
            if device.limits and not device.admin:
                served.add(device.resource)
    return served


def may_leave(now: Counts, ids: int) -> bool:
    """Return whether this number of Healthy ids may move to DRA at once.

    The ids may move if a kubelet restart then ends no pod of the plugin side. That is so in four cases: the plugin side
    has no pods; DRA serves no pod by limits; the kubelet's number stays the same; or it stays large enough for all
    pods.
    """
    if not now.by_plugin or not now.by_dra:
        return True
    if now.shown is None:
        return not ids
    after = replace(now, shown=now.shown - ids)
    return after.capacity == now.capacity or after.capacity >= now.by_plugin + now.by_dra


class AdmittedPod(NamedTuple):
    """A pod that the kubelet admits again. created: Unix seconds. asks: the pod's limit of one resource."""

    title: str
    created: float
    asks: int
    by_dra: bool


def denied(pods: Iterable[AdmittedPod], capacity: int) -> tuple[str, ...]:
    """Return the pods that the kubelet denies. Among pods of the same second, those served by DRA count as older."""
    used = 0
    titles = []
    for pod in sorted(pods, key=lambda pod: (int(pod.created), not pod.by_dra, pod.title)):
        if not pod.by_dra and used + pod.asks > capacity:
            titles.append(pod.title)
        else:
            used += pod.asks
    return tuple(titles)


def pods_of(now: RegisterSnapshot, resource: str) -> list[AdmittedPod]:
    """Return the pods that have devices of a resource by their `limits`, with the time at which they got them.

    The title of a pod of the plugin side is its UID, "" if the UID is not known yet. A pod that had to wait before DRA
    served it is older than this function assumes.
    """
    ids: dict[str, set[str]] = {}
    since: dict[str, float] = {}
    for allocation in now.allocations_of(resource):
        for uid in {uid for uid, _ in allocation.holders} or {""}:
            ids.setdefault(uid, set()).add(allocation.device_id)
            since[uid] = min(since.get(uid, allocation.since), allocation.since)
    by_plugin = [AdmittedPod(uid, since[uid], len(names), by_dra=False) for uid, names in ids.items()]
    return by_plugin + [
        AdmittedPod(claim.title, claim.since - AGE, served_by_limits(claim, resource), by_dra=True)
        for claim in served_by_dra(now, resource)
    ]


def denied_now(now: RegisterSnapshot, resource: str) -> tuple[str, ...]:
    """Return the UIDs of the pods that the kubelet would deny if it restarted now.

    The function takes the kubelet's own number as 0, because the agent may not have registered by then.
    """
    if not served_by_dra(now, resource):
        return ()
    return denied(pods_of(now, resource), counts_of(now, resource, None).capacity)
