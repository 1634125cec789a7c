"""The output of `status`: no name is cut at any width, and for many nodes it begins with numbers and problems."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deviceplugin.register.records import State
from deviceplugin.tables import Line
from dra_bridge.rollout import display
from dra_bridge.rollout.display import FleetStatus
from dra_bridge.rollout.fleet import NodeView, Phase, ReportedDevice
from dra_bridge.rollout.progress import DeviceProgress, Progress, ResourceProgress
from dra_bridge.rollout.reporter import Reporter

D = "gpu.example.com"
R = "example.com/gpu"
NOW = 1000.0


def device(name: str, state: State = State.PLUGIN, holder: str = "", **more: Any) -> ReportedDevice:
    fields: Mapping[str, Any] = {"known": True, "health": "healthy"} | more
    return ReportedDevice(state, 995, holder, resource=R, name=name, **fields)


def view(name: str, *devices: ReportedDevice, requested: str | None = None) -> NodeView:
    states = [one.state.value for one in devices]
    counts = {state: states.count(state) for state in states}
    told = {one.name: DeviceProgress(one.state, one.since) for one in devices}
    reported = Progress({R: ResourceProgress(requested or "none", counts, told)}, requested or "", {R: ""})
    return NodeView(name, D, requested, reported=reported, devices=devices)


def shown(status: FleetStatus, width: int | None = None, **more: bool) -> list[str]:
    return [line.text for line in display.lines(status, width, NOW, **more)]


HELD = device("gpu-0", State.TO_DRA, "pod ml/training-0", waits="pod ml/training-0")
BROKEN = device("gpu-1", health="unhealthy", message="XID 79: it has fallen off the bus")
FEW = FleetStatus([view("ip-10-0-123-45.compute.internal", HELD, BROKEN, requested="1")], ["the agent of x: not ready"])


def test_without_a_width_all_columns_are_there() -> None:
    """Without a width, each device is one line with all columns, and what it waits for is listed below once."""
    lines = shown(FEW)
    assert lines[0] == "the agent of x: not ready"
    assert lines[2].split() == list(display.HEADER)
    assert lines[3].startswith("ip-10-0-123-45.compute.internal  example.com/gpu  gpu-0   plugin  to-dra  pod ml/train")
    assert sum("waits for pod ml/training-0" in line for line in lines) == 1


def test_narrow_terminals_get_no_columns_that_repeat_themselves() -> None:
    """On a narrow terminal, node and resource are above their devices, and the side (plugin or DRA) has no column."""
    assert shown(FEW, 100)[2:6] == [
        "  DEVICE  STATE   HOLDER             HEALTH                                         SINCE",
        "ip-10-0-123-45.compute.internal  example.com/gpu",
        "  gpu-0   to-dra  pod ml/training-0  healthy                                        5s",
        "  gpu-1   plugin  -                  unhealthy (XID 79: it has fallen off the bus)  5s",
    ]


def test_what_is_long_gets_a_line_of_its_own() -> None:
    """On a very narrow terminal, holder and message are on lines below their device."""
    lines = display.lines(FEW, 60, NOW)
    assert lines[2:8] == [
        Line("  DEVICE  STATE   HEALTH     SINCE"),
        Line("ip-10-0-123-45.compute.internal  example.com/gpu"),
        Line("  gpu-0   to-dra  healthy    5s"),
        Line("      held by pod ml/training-0"),
        Line("  gpu-1   plugin  unhealthy  5s", bad=True),
        Line("      XID 79: it has fallen off the bus", bad=True),
    ]
    unknown = FleetStatus([view("n", device("a", known=False, message="x" * 80))])
    assert "      it is not known who holds it" in shown(unknown, 60)


names = st.text("abcdefghij0123456789-./", min_size=1, max_size=70)


@given(st.lists(st.tuples(names, names, names), min_size=1, max_size=20), st.sampled_from([80, 120, 140]))
def test_nothing_is_cut(found: list[tuple[str, str, str]], width: int) -> None:
    """At any width each name is shown as a whole; only a line with one long name exceeds the width."""
    status = FleetStatus([view(name, device(one, State.TO_DRA, f"pod {holder}")) for name, one, holder in found])
    lines = shown(status, width)
    for name, one, holder in found:
        for word in (name, one, holder):
            assert any(word in line for line in lines), word
    for line in lines:
        assert len(line) <= width or len(max(line.split(), key=len)) > width - 30


def test_many_nodes_begin_with_their_numbers() -> None:
    """The output for many nodes begins with numbers; then a terminal gets devices that need attention, a pipe all."""
    fine = [view(f"n{number}", device("a", State.DRA), device("b", State.DRA), requested="all") for number in range(40)]
    waiting = view("n99", HELD, BROKEN, requested="1")
    lines = shown(FleetStatus([*fine, waiting]), 120)
    assert lines == [
        f"{D}: 41 nodes, 40 done, 1 not",
        "  requested: all (40 nodes), 1 (1 node)",
        f"  {R}: 82 devices: 80 dra, 1 plugin, 1 to-dra; 1 not healthy",
        "",
        f"n99 {D}: share 1 requested; {R}: 1 plugin, 1 to-dra (share 1)",
        "  gpu-0 (to-dra) waits for pod ml/training-0",
        "",
        "NODE  RESOURCE         DEVICE  SIDE    STATE   HOLDER             HEALTH                                 "
        "        SINCE",
        "n99   example.com/gpu  gpu-0   plugin  to-dra  pod ml/training-0  healthy                                "
        "        5s",
        "n99   example.com/gpu  gpu-1   plugin  plugin  -                  unhealthy (XID 79: it has fallen off the"
        " bus)  5s",
        "",
        "not listed: 80 devices that need no attention; --node NAME shows all of a node",
    ]
    piped = shown(FleetStatus([*fine, waiting]))
    assert piped[:3] == lines[:3]
    assert sum(f"  {R}  " in line for line in piped) == 82


@pytest.mark.parametrize(
    "seen",
    [
        device("a", State.QUARANTINED),
        device("a", State.TO_PLUGIN),
        device("a", withheld="not known"),
        device("a", gone=True),
        device("a", health="unknown"),
    ],
)
def test_problems_alone(seen: ReportedDevice) -> None:
    """--problems lists only devices with a problem, and counts the other devices."""
    status = FleetStatus([view("n1", device("fine"), requested="none"), view("n2", seen)])
    lines = shown(status, problems=True)
    assert not any("fine" in line for line in lines)
    assert any(line.startswith("n2 ") for line in lines)
    assert lines[-1] == "not listed: 1 device that needs no attention"


def test_unknown_health_is_not_said_to_be_fine() -> None:
    """--problems counts devices of unknown health apart from healthy ones."""
    status = FleetStatus([view("n1", device("a"), device("b", health=""), device("c", health=""), requested="none")])
    assert shown(status, problems=True)[-1] == (
        "not listed: 1 device that needs no attention, 2 devices whose health is not known"
    )


class Bars:
    """Progress bars that record how they are made."""

    def __init__(self) -> None:
        self.made: list[dict[str, Any]] = []

    def add_task(self, description: str, **fields: Any) -> int:
        self.made.append({"description": description, **fields})
        return len(self.made)

    def update(self, task: int, **fields: Any) -> None:
        """Accept a change of a bar."""


def test_the_first_frame_of_a_rollout_has_its_nodes() -> None:
    """The progress bar of all nodes is made with the number of nodes, so that its first drawing is right."""
    bars = Bars()
    Reporter(print, bars).total({"n1": Phase.DONE, "n2": Phase.WAITING})
    (made,) = bars.made
    assert (made["total"], made["completed"]) == (2, 1)
    assert made["description"] == "0 moving, 1 not started"


def test_a_screen_is_not_exceeded() -> None:
    """Lines that do not fit on the screen are counted; a line wider than the screen counts as several."""
    found = [Line("x" * 25) for _ in range(4)]
    assert display.first_rows(found, 30, 5) == found
    assert display.first_rows(found, 30, 4)[:-1] == found[:2]
    assert display.first_rows(found, 30, 4)[-1].text.startswith("2 more lines; ")
    assert len(display.first_rows(found, 10, 9)) == 3
    assert display.first_rows([], 30, 4) == []
