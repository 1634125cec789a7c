"""After a holder's end, no pod and no claim gets its device before the `released` hook has succeeded.

The hook of ``tests.cluster.locks`` writes a line for each of its calls into the log with the containers' lines.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.cluster import locks
from tests.cluster.node import Cluster, Pod
from tests.cluster.test_witnesses_real import Scene, unbroken
from tests.scenarios.sides import named

SIDES = pytest.mark.parametrize("side", ["limits", "claims"])


class OneDevice(Scene):
    """A scene with one device, for pods by limits or for claims."""

    def start(self, side: str) -> Callable[[str, str], Pod]:
        """Start the agent; return the method that starts a pod with the device. side: by `limits`, or by a claim."""
        self.begin(a=(1, "none" if side == "limits" else "all"))
        return self.pod if side == "limits" else self.claimer

    def wait_offers(self, side: str, count: int) -> None:
        if side == "limits":
            self.cluster.wait_allocatable(named("a"), count)
        else:
            self.agents.wait_offered(count, "a.example.net")


@pytest.fixture
def scene(cluster: Cluster, request: pytest.FixtureRequest) -> Iterator[OneDevice]:
    yield from unbroken(OneDevice(cluster, request.node.name.removeprefix("test_")))


def calls() -> list[str]:
    """Return what containers and the hook have noted in the log (`locks.Note.what`), in order."""
    return [note.what for note in locks.notes()]


@SIDES
@pytest.mark.parametrize("how", ["raises", "hangs"])
def test_a_device_is_withheld_until_released_succeeds(scene: OneDevice, side: str, how: str) -> None:
    """`released` raises twice, or hangs longer than its timeout: the device is withheld until a call succeeds."""
    make = scene.start(side)
    begun = len(calls())
    first = make("first", "a")
    scene.running(first)
    scene.until("the container has noted its device", lambda: "got" in calls()[begun:])
    times = 2 if how == "raises" else 1
    locks.break_released(how, times)
    before = len(calls())
    first.delete()
    text = "is withheld until `released` succeeds"
    scene.until("the device is withheld", lambda: text in scene.agents.logs())
    scene.wait_offers(side, 0)
    second = make("second", "a")
    if how == "hangs":
        scene.until("the pod waits", second.unschedulable)
        locks.mend_released()
    scene.running(second)
    succeeded = ["free"] * (2 if how == "hangs" else 1)  # The call that hung succeeds in the end as well.
    assert calls()[before:] == ["broken"] * times + succeeded + ["got"]
    assert "is no longer withheld: `released` has succeeded" in scene.agents.logs()


@SIDES
def test_a_device_is_released_before_its_first_grant_after_a_start(scene: OneDevice, side: str) -> None:
    """An agent calls `released` before its first grant of a device: a holder may have ended while no agent ran."""
    make = scene.start(side)
    first = make("first", "a")
    scene.running(first)
    assert "free" in before_grant(0), calls()
    scene.kill_agent()
    noted = len(calls())
    first.delete()
    scene.until("the first pod's processes have ended", lambda: not locks.pids(first.uid))
    scene.start_agent()
    scene.wait_offers(side, 1)
    second = make("second", "a")
    scene.running(second)
    assert "free" in before_grant(noted), calls()


def before_grant(noted: int) -> list[str]:
    """Return the log's notes until the next container got its device, without the first `noted` notes."""
    found = calls()[noted:]
    return found[: found.index("got")]
