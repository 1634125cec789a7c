"""A whole agent without sockets, in random walks and in planned sequences of configs, lists, claims, hooks, losses."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from hypothesis import HealthCheck, settings

from tests.model.life import Setting
from tests.model.mutations import WALKS, patched
from tests.model.outside import D, E, R, S
from tests.model.walk import Walk

AT_LENGTH = os.environ.get("DEVICEPLUGIN_MODEL") == "long"

Walk.TestCase.settings = settings(
    max_examples=5000 if AT_LENGTH else settings().max_examples,
    stateful_step_count=90 if AT_LENGTH else 60,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
TestWalk = pytest.mark.explore(Walk.TestCase)


@contextlib.contextmanager
def walking(**config: Setting) -> Iterator[Walk]:
    """Start an agent with resources R and S as configured, and offer devices; at the end, all must come to rest."""
    walk = Walk()
    try:
        walk.first({{"r": R, "s": S}[name]: setting for name, setting in config.items()})
        walk.all_goes_well_for_a_while()
        yield walk
        walk.nothing_is_wrong()
    except BaseException:
        walk.close()
        raise
    walk.teardown()


def every_name_of_the_hardware_is_asked_for() -> None:
    """Two pods share the hardware h0 through R; other pods request h0 through S, as an old list of S offers it."""
    with walking(r=Setting("", 2), s=Setting("", 2)) as walk:
        for _ in range(2):
            walk.pod_starts_well(R, 0)
        walk.outside.registered[S] = frozenset({"x::0", "x::1"})
        for _ in range(2):
            walk.kubelet_chooses(S)
            walk.allocate_arrives()
            walk.kubelet_admits()
            walk.pod_runs()


def a_claim_of_a_former_driver_comes_late() -> None:
    """A claim for a device of driver E is allocated late, when the device went to driver D and has a claim there."""
    with walking(r=Setting(E, 1, 2)) as walk:
        walk.scheduler_chooses(E, 0)
        (late,) = walk.outside.claims.values()
        walk.rename(D)
        walk.all_goes_well_for_a_while(8)
        for index in (0, 1):
            walk.claim_starts_well(D, index)
        assert len(walk.outside.containers) == 2
        walk.rename(E)
        walk.all_goes_well_for_a_while(1)
        walk.scheduler_writes()
        walk.kubelet_prepares()
        walk.run_container(late)


def a_device_goes_on_to_another_driver() -> None:
    """While a pod by limits keeps one device of driver E, the other goes to driver D; a late claim of E requests it."""
    with walking(r=Setting(E, 1, 2)) as walk:
        walk.claim_starts_well(E, 0, limits=True)
        walk.scheduler_chooses(E, 1)
        *_, late = walk.outside.claims.values()
        walk.rename(D)
        walk.all_goes_well_for_a_while(8)
        assert walk.here.lines(R) == {"a": False, "b": False}
        walk.claim_starts_well(D, 0, limits=True)
        assert len(walk.outside.containers) == 2
        walk.scheduler_writes()
        walk.kubelet_prepares(1)
        walk.run_container(late)


def a_list_says_other_replicas_of_what_is_held() -> None:
    """Two pods share a device; then the list has one replica of it, and one more pod starts."""
    with walking(r=Setting("", 2)) as walk:
        for _ in range(2):
            walk.pod_starts_well(R, 0)
        walk.list_says_other_replicas("a", 1)
        walk.list_is_sent(R)
        walk.pod_starts_well(R, 0)


def a_list_says_other_replicas_during_an_allocate() -> None:
    """The replicas of a device change during an Allocate: the list still has the id of this Allocate."""
    with walking(r=Setting("", 3)) as walk:
        walk.list_says_other_replicas("a", 1)
        walk.list_is_sent(R)
        walk.kubelet_chooses(R, 0)
        walk.allocate_arrives(end=False)
        walk.list_says_other_replicas("a", 3)
        walk.list_is_sent(R)
        walk.finish()
        walk.kubelet_admits()
        walk.pod_runs()
        walk.list_is_sent(R)


def a_reload_says_other_replicas_of_what_is_held() -> None:
    """A pod has one of two replicas; then the config has one replica, and later three."""
    with walking(r=Setting("", 2)) as walk:
        walk.pod_starts_well(R, 0)
        for replicas in (1, 3):
            walk.reload({R: Setting("", replicas)})
            for _ in range(3):
                walk.pod_starts_well(R, 0)


def a_hook_does_not_end() -> None:
    """After a pod's end `released` hangs for its device; other pods request the hardware by all its names."""
    with walking(r=Setting("", 1)) as walk:
        walk.pod_starts_well(R, 0)
        walk.agent_scans()
        walk.hooks_hang(stuck=True)
        walk.pod_ends()
        walk.checkpoint_is_written()
        walk.kubelet_writes_when_asked(prompt=True)
        walk.agent_scans()
        walk.time_passes()
        walk.agent_scans()
        assert walk.outside.hooks
        walk.kubelet_chooses(R, 0)
        walk.allocate_arrives()
        walk.kubelet_admits()
        walk.pod_runs()
        walk.reload({S: Setting("", 1)})
        walk.pod_starts_well(S, 0)


def a_claim_is_allocated_anew() -> None:
    """A claim is allocated another device for its next pod, while its former pod still runs on this node."""
    with walking(r=Setting(D, 1, 2)) as walk:
        walk.claim_starts_well(D, 0)
        walk.claim_is_allocated_elsewhere(0, D, 1)
        walk.kubelet_prepares()
        walk.container_with_claim_runs()
        walk.container_with_claim_ends()
        walk.kubelet_prepares()
        walk.container_with_claim_runs()


def another_vendor_has_the_hardware() -> None:
    """A claim of another vendor's driver has hardware of the agent, seen by its device node; pods request it."""
    with walking(r=Setting("", 1)) as walk:
        walk.foreign_claim("h0")
        for _ in range(2):
            walk.kubelet_chooses(R, 0)
            walk.allocate_arrives()
            walk.kubelet_admits()
            walk.pod_runs()


def another_vendor_has_the_hardware_before_released() -> None:
    """Another vendor's claim has gotten hardware whose hook `released` is due, and a pod requests this hardware."""
    with walking(r=Setting(E, 1)) as walk:
        walk.agent_scans()
        walk.foreign_claim("h0")
        walk.reload({R: Setting(D, 1), S: Setting("", 1)})
        walk.hooks_hang(stuck=True)
        walk.pod_starts_well(S, 0)


def another_vendor_has_our_names() -> None:
    """A claim of another vendor's driver has a device named like one of the agent's; the agent still offers its own."""
    with walking(r=Setting(D, 1, 1)) as walk:
        walk.foreign_claim()
        walk.pod_starts_well(R, 0)
        walk.claim_starts_well(D, 0)
        assert len(walk.outside.containers) == 1
        assert [pod.at for pod in walk.outside.pods] == ["runs"]


def the_register_is_lost_with(*more: str) -> Callable[[], None]:
    """Return a plan: a pod and a claim hold devices while the agent loses its records, and the driver is renamed.

    The pod was deleted by force before. Then other pods and claims request the hardware by all its names.
    """

    def lost() -> None:
        with walking(r=Setting(D, 1, 1)) as walk:
            walk.claim_starts_well(D, 0)
            walk.pod_starts_well(R, 0)
            assert {hardware for hardware, _, _ in walk.outside.holders()} == {"h0", "h1"}
            walk.agent_scans()
            walk.pod_is_deleted_by_force()
            walk.checkpoint_is_written()
            walk.agent_is_killed()
            walk.agent_starts(frozenset({"register", *more}), {R: Setting(E, 1, 2)})
            walk.all_goes_well_for_a_while(6)
            walk.pod_starts_well(R, 0)
            for index in (0, 1):
                walk.claim_starts_well(E, index)
            walk.reload({S: Setting("", 1)})
            walk.all_goes_well_for_a_while()
            walk.pod_starts_well(S, 0)

    return lost


def the_checkpoint_is_lost_before_a_scan() -> None:
    """The kubelet loses its checkpoint before a scan has recorded a pod, and other pods request the pod's device."""
    with walking(r=Setting("", 1)) as walk:
        walk.pod_starts_well(R, 0)
        walk.kubelet_loses_its_checkpoint()
        for _ in range(2):
            walk.pod_starts_well(R, 0)
            walk.all_goes_well_for_a_while(1)
            walk.pod_starts_well(R, 0)


def a_driver_goes_before_its_lost_names_are_known() -> None:
    """The agent's records are lost, and the resource gets another driver before the agent reads the slices' names."""
    with walking(r=Setting(E, 1, 1)) as walk:
        assert walk.outside.slices[E].there
        walk.agent_is_killed()
        walk.agent_starts(frozenset({"register"}))
        walk.rename(D)


PLANS: dict[str, Callable[[], None]] = {
    "every name": every_name_of_the_hardware_is_asked_for,
    "former driver": a_claim_of_a_former_driver_comes_late,
    "on to another driver": a_device_goes_on_to_another_driver,
    "other replicas by list": a_list_says_other_replicas_of_what_is_held,
    "other replicas during an Allocate": a_list_says_other_replicas_during_an_allocate,
    "other replicas by reload": a_reload_says_other_replicas_of_what_is_held,
    "hook": a_hook_does_not_end,
    "allocated anew": a_claim_is_allocated_anew,
    "foreign hardware": another_vendor_has_the_hardware,
    "foreign hardware before released": another_vendor_has_the_hardware_before_released,
    "foreign names": another_vendor_has_our_names,
    "register lost": the_register_is_lost_with(),
    "register and slices lost": the_register_is_lost_with("slices"),
    "register and claim state lost": the_register_is_lost_with("state"),
    "driver gone": a_driver_goes_before_its_lost_names_are_known,
    "checkpoint lost": the_checkpoint_is_lost_before_a_scan,
    "register and checkpoint lost": the_register_is_lost_with("checkpoint"),
}


def test_a_device_that_comes_back_is_given_to_nobody_before_the_evidence_was_read() -> None:
    """A device that is plugged in again is offered only after the agent has looked for a holder of it."""
    with walking(r=Setting(D, 1, 0)) as walk:
        walk.kubelet_writes_when_asked(prompt=True)
        walk.device_is_plugged((R, "a"), there=False)
        walk.list_is_sent(R)
        for _ in range(3):
            walk.outside.later += 20.0
            walk.agent_scans()
        assert walk.here.lines(R) == {"b": True}, "it is forgotten"
        walk.device_is_plugged((R, "a"), there=True)
        assert walk.here.lines(R) == {"b": True, "a": False}
        walk.outside.registered[R] = frozenset({"a"})
        walk.kubelet_chooses(R)
        walk.allocate_arrives()
        assert walk.outside.pods == []
        walk.agent_compares()
        assert walk.here.lines(R) == {"a": True, "b": True}


def test_a_walk_reads_no_clock_of_the_machine_and_starts_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step has the same result however busy the machine is; otherwise hypothesis cannot make the same walk again."""
    here, used = threading.get_ident(), set[str]()

    def noted(what: str, function: Callable[..., object]) -> Callable[..., object]:
        def call(*args: object) -> object:
            caller = str(sys._getframe(1).f_globals["__name__"])
            if threading.get_ident() == here and caller.startswith(("asyncio.", "deviceplugin.", "dra_bridge.")):
                used.add(f"{what} in {caller}")
            return function(*args)

        return call

    for clock in ("monotonic", "time", "sleep"):
        monkeypatch.setattr(time, clock, noted(clock, getattr(time, clock)))
    monkeypatch.setattr(threading.Thread, "start", noted("a thread", threading.Thread.start))
    config = {"r": Setting(D, 1, 1, "wait", prepares=True), "s": Setting("", 2)}
    with walking(**config) as walk:
        for _ in range(2):
            walk.pod_starts_well(R)
            walk.claim_starts_well(D)
            walk.foreign_claim()
            walk.agent_scans()
            walk.agent_settles_claims()
            walk.hooks_hang(stuck=True)
            walk.pod_ends()
            walk.container_with_claim_ends()
            walk.kubelet_unprepares()
            walk.agent_scans()
            walk.time_passes()
            walk.rename(E)
            walk.all_goes_well_for_a_while()
            walk.hooks_end()
            walk.agent_is_killed()
            walk.agent_starts()
            walk.rename(D)
            walk.all_goes_well_for_a_while(8)
        assert walk.outside.numbers > 4, "pods and claims have started"
    assert used == set()


@pytest.mark.parametrize("what", PLANS)
def test_what_happens_as_planned_harms_nobody(what: str) -> None:
    """At no step of a plan does hardware have too many holders, and in the end all devices are offered again."""
    PLANS[what]()


@pytest.mark.parametrize("what", WALKS)
def test_without_what_a_plan_needs_it_comes_to_harm(what: str) -> None:
    """Without the rule or evidence that a mutation switches off, the plan fails, so the model notices its absence."""
    plan, replacements, harm = WALKS[what]
    with patched(replacements), pytest.raises(AssertionError, match=harm):
        PLANS[plan]()
