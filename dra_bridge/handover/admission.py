"""Computes, by pure functions, which pods a kubelet restart would end now, and which moves of devices endanger pods.

Facts (kubelet 1.36): at its start the kubelet admits the node's pods again, the oldest first (HandlePodAdditions). For
the pod that is being admitted, the kubelet ignores `limits` that are satisfied by a claim. For the pods that are
already admitted, the kubelet counts such `limits` (removeMissingExtendedResources, lifecycle/predicate.go;
kubernetes#124586). The kubelet compares the sum of the `limits` with the Node's `status.allocatable`, or with the
number of ids in its checkpoint if that number is larger (sanitizeNodeAllocatable, devicemanager/manager.go). The
kubelet ends a running pod if, with the pod's `limits`, the sum exceeds this number.

So a restart can end a pod that has devices from the device plugin, if older pods have devices for their `limits`
through DRA. After its start, the kubelet counts 0 devices until the agent has registered. No pod is at risk if the pods
with devices from the device plugin and the pods with devices for their `limits` through DRA never run at the same time.
Therefore a resource's devices return to the device plugin only when no pod has a device for its `limits` through DRA.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Final, NamedTuple

from deviceplugin.register.records import Claim, RegisterSnapshot
from deviceplugin.register.rules import held_by_limits, served_by_limits

AGE: Final = 5.0
"""Assumed seconds from the creation of a pod to the time when the scheduler's claim for the pod's `limits` gets its
devices. The agent knows only when the claim gets its devices, not when the pod was created."""


@dataclass(frozen=True, slots=True)
class Counts:
    """The kubelet's counts of one resource, as numbers of device plugin ids.

    shown: number of ids that are Healthy both in the last device list for the kubelet and in the next one; None if the
    kubelet has no ListAndWatch stream open. by_plugin: number of ids that pods have from the device plugin, including
    ids of unhealthy devices. by_dra: number of devices that pods have for their `limits` through DRA.
    """

    shown: int | None
    by_plugin: int
    by_dra: int

    @property
    def capacity(self) -> int:
        """The number of devices that the kubelet will compare with the sum of the pods' `limits` at its next start.

        The number is valid only if the agent registers before the kubelet admits the pods.
        """
        return max(self.shown or 0, self.by_plugin)


def counts_of(now: RegisterSnapshot, resource: str, shown: Collection[str] | None) -> Counts:
    """Return the kubelet's counts of a resource. shown: the ids counted in `Counts.shown`, None for no stream."""
    return Counts(len(shown) if shown is not None else None, *held_by_limits(now, resource))


def served_by_dra(now: RegisterSnapshot, resource: str) -> list[Claim]:
    """Return the claims through which pods have devices of a resource for the pods' `limits`, the oldest first."""
    served = [claim for claim in now.claims.values() if served_by_limits(claim, resource)]
    return sorted(served, key=attrgetter("since"))


def resources_served_by_dra(now: RegisterSnapshot) -> set[str]:
    """Return the resources of which some pod has devices for its `limits` through DRA."""
    served: set[str] = set()
    for claim in now.claims.values():
        for device in claim.devices:
            if device.limits and not device.admin:
                served.add(device.resource)
    return served


def may_leave(now: Counts, ids: int) -> bool:
    """Return whether this number (`ids`) of Healthy ids may move to DRA at once.

    The ids may move if a kubelet restart after the move ends no pod with devices of the device plugin. This holds in
    four cases: no pod has devices of the device plugin; no pod has devices for its `limits` through DRA; the number of
    devices that the kubelet counts stays the same; or this number stays large enough for all pods.
    """
    if not now.by_plugin or not now.by_dra:
        return True
    if now.shown is None:
        return not ids
    after = replace(now, shown=now.shown - ids)
    return after.capacity == now.capacity or after.capacity >= now.by_plugin + now.by_dra


class AdmittedPod(NamedTuple):
    """A pod that the kubelet admits again when the kubelet starts.

    created: Unix seconds. asks: the pod's limit for one resource. by_dra: whether the pod gets the devices of this
    limit through DRA.
    """

    title: str
    created: float
    asks: int
    by_dra: bool


def denied(pods: Iterable[AdmittedPod], capacity: int) -> tuple[str, ...]:
    """Return the titles of the pods that the kubelet denies if it counts `capacity` devices of a resource.

    If pods were created in the same second, the function assumes the worst case that pods with devices through DRA are
    older.
    """
    used = 0
    titles = []
    for pod in sorted(pods, key=lambda pod: (int(pod.created), not pod.by_dra, pod.title)):
        if not pod.by_dra and used + pod.asks > capacity:
            titles.append(pod.title)
        else:
            used += pod.asks
    return tuple(titles)


def pods_of(now: RegisterSnapshot, resource: str) -> list[AdmittedPod]:
    """Return the pods that have devices of a resource for their `limits`, each with an assumed time of creation.

    The assumed time is when the pod got its devices; for a pod with a claim, `AGE` seconds earlier. A pod that has
    waited longer than `AGE` for its claim is older than assumed. A pod with devices of the device plugin has its UID as
    title, "" if the UID is not known yet.
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
    """Return the titles (see `pods_of`) of the pods that the kubelet would deny if it restarted now.

    The function assumes the worst case that the agent registers too late, so that the kubelet counts no Healthy ids.
    """
    if not served_by_dra(now, resource):
        return ()
    return denied(pods_of(now, resource), counts_of(now, resource, None).capacity)
