"""Which pods a kubelet restart would end, and which moves of devices from limits to claims would cause this."""

from __future__ import annotations

import itertools

import pytest

from deviceplugin.register.records import AllocationRecord, Claim, ClaimDevice, RegisterSnapshot
from dra_bridge.handover.admission import AdmittedPod, Counts, counts_of, denied, may_leave, pods_of, served_by_dra

R, OTHER, D = "example.com/card", "example.com/other", "card.example.com"


@pytest.mark.parametrize(
    ("shown", "by_plugin", "by_dra", "leaving", "allowed"),
    [
        # No pod by limits has a device through DRA: no move is blocked, not even a move of held devices.
        (8, 0, 0, 8, True),
        (8, 2, 0, 6, True),
        (8, 2, 0, 8, True),
        (0, 2, 0, 0, True),
        # No pod has a device of the plugin: all devices may leave.
        (4, 0, 2, 4, True),
        (1, 0, 6, 1, True),
        # Pods by limits on both sides, plugin and DRA: a device may leave if enough devices stay for all these pods.
        (4, 2, 2, 1, False),
        (4, 2, 2, 4, False),
        (4, 1, 2, 1, True),  # as the case before the last, after one of its two plugin pods has ended
        (4, 1, 2, 2, False),
        (3, 1, 2, 1, False),
        (8, 2, 2, 4, True),
        (8, 2, 2, 5, False),
        # Pods hold as many ids as are healthy, or more: the count by which the kubelet admits pods does not change.
        (1, 2, 2, 1, True),
        (2, 2, 2, 2, True),
        (2, 2, 6, 1, True),
        (3, 2, 6, 1, False),
        # No device leaves that the kubelet counts: the devices that leave are broken or withdrawn.
        (2, 1, 6, 0, True),
        # The kubelet is not connected: its number of devices is not known.
        (None, 2, 2, 1, False),
        (None, 2, 2, 0, True),
        (None, 2, 0, 1, True),
        (None, 0, 2, 1, True),
    ],
)
def test_devices_that_may_leave(shown: int | None, by_plugin: int, by_dra: int, leaving: int, allowed: bool) -> None:
    """Devices may leave the plugin if this cannot make a kubelet restart end a pod, whatever the pods' ages."""
    assert may_leave(Counts(shown, by_plugin, by_dra), leaving) is allowed


def test_no_batch_that_may_leave_ends_a_pod() -> None:
    """If `may_leave` allows a move, a kubelet restart ends the same pods before and after it, for up to 5 pods."""
    tried = 0
    for kinds in itertools.chain.from_iterable(itertools.product((True, False), repeat=n) for n in range(6)):
        pods = [AdmittedPod(f"{age}", float(age), 1, by_dra) for age, by_dra in enumerate(kinds)]
        by_dra = sum(kinds)
        for shown in range(7):
            now = Counts(shown, len(kinds) - by_dra, by_dra)
            before = denied(pods, now.capacity)
            for leaving in range(1, shown + 1):
                if may_leave(now, leaving):
                    after = Counts(shown - leaving, now.by_plugin, by_dra)
                    assert denied(pods, after.capacity) == before
                    tried += 1
    assert tried > 100


def pod(title: str, created: float, asks: int = 1) -> AdmittedPod:
    return AdmittedPod(title, created, asks, by_dra=False)


def dra(created: float, asks: int = 1) -> AdmittedPod:
    return AdmittedPod("served by DRA", created, asks, by_dra=True)


@pytest.mark.parametrize(
    ("pods", "capacity", "ended"),
    [
        ([pod("a", 1), pod("b", 2), dra(3), dra(4)], 2, ()),  # the pods with devices of the plugin are older
        ([dra(1), dra(2), pod("a", 3), pod("b", 4)], 2, ("a", "b")),  # the pods with devices of the plugin are younger
        ([dra(1), dra(2), pod("a", 3), pod("b", 4)], 4, ()),  # there is room for all pods
        ([dra(1), dra(2), pod("a", 3), pod("b", 4)], 3, ("b",)),
        ([pod("a", 1), dra(2), pod("b", 3)], 2, ("b",)),
        ([dra(1, 4), pod("a", 2), dra(3)], 1, ("a",)),  # a pod waited for four devices while another pod came
        ([dra(1), pod("large", 2, 4), pod("small", 3)], 4, ("large",)),  # the ids of a denied pod are not counted
        ([dra(1.9), pod("a", 1.1)], 1, ("a",)),  # the kubelet sorts pods of one second at random
        ([], 0, ()),
    ],
)
def test_pods_that_are_denied(pods: list[AdmittedPod], capacity: int, ended: tuple[str, ...]) -> None:
    """The kubelet admits pods by age, and denies each pod that does not fit beside those it has admitted."""
    assert denied(pods, capacity) == ended


def test_what_the_register_says() -> None:
    """The counts are of ids that the plugin has granted, and of devices in claims that Kubernetes made for limits."""

    def held(name: str, since: float, *uids: str, resource: str = R) -> AllocationRecord:
        holders = frozenset((uid, "main") for uid in uids)
        return AllocationRecord(resource, name, name, since, 1, holders, pending=not uids)

    def claim(name: str, *devices: ClaimDevice) -> Claim:
        return Claim(D, name, "ml", name, devices, "{}", 100.0)

    allocations = [held("a", 50.0, "one"), held("b", 60.0, "one"), held("c", 70.0), held("a", 1.0, "x", resource=OTHER)]
    two = ClaimDevice(R, "d", limits=True), ClaimDevice(R, "e", limits=True)
    others = ClaimDevice(OTHER, "e", limits=True), ClaimDevice(R, "f", admin=True, limits=True), ClaimDevice(R, "g")
    now = RegisterSnapshot(
        allocations={(one.resource, one.device_id): one for one in allocations},
        claims={(D, name): claim(name, *devices) for name, devices in (("served", two), ("others", others))},
    )
    assert counts_of(now, R, {"h", "i"}) == Counts(2, 3, 2)
    assert counts_of(now, R, None).capacity == 3
    assert [one.name for one in served_by_dra(now, R)] == ["served"]
    assert pods_of(now, R) == [
        AdmittedPod("one", 50.0, 2, by_dra=False),
        AdmittedPod("", 70.0, 1, by_dra=False),
        AdmittedPod("ml/served", 95.0, 2, by_dra=True),
    ]
