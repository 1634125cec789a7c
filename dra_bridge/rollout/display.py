"""Formats the status of the cluster's nodes as lines of a given width, for `dra-bridge status`. Pure functions.

Names are never cut. If a table is too wide, headings replace the columns for node and resource. If the table is still
too wide, holders and messages get separate lines.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final, NamedTuple

from deviceplugin.device import counted, printable
from deviceplugin.register.records import State
from deviceplugin.tables import Line, age, aligned, fits, wrapped
from dra_bridge.rollout import autoscaler, fleet
from dra_bridge.rollout.fleet import NodeView, ReportedDevice
from dra_bridge.rollout.rollout import MANY

HEADER: Final = ("NODE", "RESOURCE", "DEVICE", "SIDE", "STATE", "HOLDER", "HEALTH", "SINCE")


@dataclass(frozen=True, slots=True)
class FleetStatus:
    """The status of the cluster's nodes with devices, and of their agents.

    problems: problems of the agents themselves. hints: sentences that name moves of devices after which waiting pods
    could start. unknown: sentences that name unknown facts and the reasons why the facts are unknown.
    """

    nodes: Sequence[NodeView]
    problems: Sequence[str] = ()
    hints: Sequence[str] = ()
    unknown: Sequence[str] = ()


def needs_attention(device: ReportedDevice) -> bool:
    """Return whether a device is moving, quarantined, not offered, not listed any more, or not healthy."""
    at_rest = device.state in (State.PLUGIN, State.DRA)
    return not at_rest or bool(device.withheld) or device.gone or device.health not in ("", "healthy")


def totals(nodes: Sequence[NodeView], width: int | None) -> list[Line]:
    """Return lines with the totals of all nodes; [] if there are at most MANY nodes.

    The program shows these lines before it asks the agents.
    """
    many = len({view.node for view in nodes}) > MANY
    return wrapped(_totals(nodes), width) if many else []


def lines(
    status: FleetStatus, width: int | None, now: float, *, problems: bool = False, with_totals: bool = True
) -> list[Line]:
    """Return the lines that `dra-bridge status` prints. width: the terminal's width in characters, None for no limit.

    problems: whether to leave out nodes that have their requested share, and devices that need no attention. If there
    are many nodes and the output is a terminal, such nodes and devices are always left out. with_totals: whether to
    print the totals of many nodes.
    """
    nodes = {view.node for view in status.nodes}
    many = len(nodes) > MANY
    brief = problems or (many and width is not None)
    devices = [(view, device) for view in status.nodes for device in view.devices]
    shown = [row for row in devices if needs_attention(row[1])] if brief else devices
    named = [view for view in status.nodes if fleet.obstacles(view) or fleet.withheld(view)] if brief else status.nodes
    top = [*status.problems, *(_totals(status.nodes) if many and with_totals else ())]
    rest = [*status.hints, *status.unknown]
    if brief and len(shown) < len(devices):
        left = [device for _, device in devices if not needs_attention(device)]
        fine = sum(bool(device.health) for device in left)
        parts = [f"{counted(fine)} that need{'s' * (fine == 1)} no attention"] if fine else []
        parts += [f"{counted(len(left) - fine)} whose health is not known"] if fine < len(left) else []
        more = "" if problems else "; --node NAME shows all of a node"
        rest.append(f"not listed: {', '.join(parts)}{more}")
    sentences = [line for view in named for line in _of_node(view, width)]
    table = _table([_row(view, device, now) for view, device in shown], width)
    last = wrapped(rest, width)
    blocks = [sentences, table, last] if many else [table, sentences + last]
    together = wrapped(top, width)
    for block in filter(None, blocks):
        together += [*([Line("")] if together else []), *block]
    return together


def _of_node(view: NodeView, width: int | None) -> Iterator[Line]:
    yield from wrapped([f"{view.node} {view.driver}: {fleet.summary(view)}"], width)
    if view.reported is not None:
        marks = autoscaler.sentences(view.marks, autoscaler.placement(view.reported))
        said = [*fleet.obstacles(view), *fleet.withheld(view), *fleet.administrative(view), *marks]
        yield from wrapped(said, width, "  ")


def _totals(nodes: Sequence[NodeView]) -> Iterator[str]:
    """Yield lines with the numbers of nodes, and of devices in each state, for each driver."""
    for driver in dict.fromkeys(view.driver for view in nodes):
        mine = [view for view in nodes if view.driver == driver]
        done = sum(map(fleet.finished, mine))
        yield f"{driver}: {len(mine)} nodes, {done} done, {len(mine) - done} not"
        requested = Counter("no share" if view.requested is None else view.requested for view in mine)
        shares = [f"{share} ({counted(number, 'node')})" for share, number in requested.most_common()]
        yield f"  requested: {', '.join(shares)}"
        counts: dict[str, Counter[str]] = {}
        for view in mine:
            for resource, progress in (view.reported.resources if view.reported is not None else {}).items():
                counts.setdefault(resource, Counter()).update(progress.counts)
        for resource, states in counts.items():
            words = ", ".join(f"{number} {state}" for state, number in sorted(states.items()))
            here = [device for view in mine for device in view.devices if device.resource == resource]
            broken = sum(device.health not in ("", "healthy") for device in here)
            withheld = sum(bool(device.withheld) for device in here)
            parts = [f"{number} {what}" for number, what in ((broken, "not healthy"), (withheld, "withheld")) if number]
            yield f"  {resource}: {counted(states.total())}: {words}" + (f"; {', '.join(parts)}" if parts else "")


class _Row(NamedTuple):
    """The texts of the cells in a device's row of the table."""

    node: str
    resource: str
    device: str
    side: str
    state: str
    holder: str
    health: str
    message: str
    since: str
    bad: bool

    @property
    def cells(self) -> tuple[str, ...]:
        health = self.health + (f" ({self.message})" if self.message else "")
        return *self[:6], health, self.since


def _row(view: NodeView, device: ReportedDevice, now: float) -> _Row:
    state = device.state.value + (" (gone)" if device.gone else " (withheld)" if device.withheld else "")
    health = "gone" if device.gone else device.health or "?"
    holder = (fleet.holder(device) or "-") if device.known else "?"
    message = "" if device.gone else device.message
    return _Row(
        printable(view.node),
        printable(device.resource),
        printable(device.name),
        device.state.side,
        state,
        printable(holder),
        printable(health),
        printable(message),
        age(now - device.since),
        health in ("gone", "unhealthy"),
    )


def _table(rows: Sequence[_Row], width: int | None) -> list[Line]:
    """Return the devices as a table that fits the width. If no layout fits, the narrowest layout is used."""
    if not rows:
        return []
    bad = [False, *(row.bad for row in rows)]
    whole = aligned([HEADER, *(row.cells for row in rows)])
    if fits(whole, width):
        return list(itertools.starmap(Line, zip(whole, bad, strict=True)))
    narrow = aligned([("  DEVICE", *HEADER[4:]), *((f"  {row.device}", *row.cells[4:]) for row in rows)])
    if not (fitting := fits(narrow, width)):
        narrow = aligned(
            [("  DEVICE", "STATE", "HEALTH", "SINCE")]
            + [(f"  {row.device}", row.state, row.health, row.since) for row in rows]
        )
    listing, group = [Line(narrow[0])], ("", "")
    for row, text in zip(rows, narrow[1:], strict=True):
        if group != (row.node, row.resource):
            group = (row.node, row.resource)
            listing += wrapped(["  ".join(group)], width)
        listing.append(Line(text, row.bad))
        if not fitting:
            held = {"-": "", "?": "it is not known who holds it"}.get(row.holder, f"held by {row.holder}")
            more = [row.message, held]
            listing += [Line(line.text, row.bad) for line in wrapped(filter(None, more), width, "      ")]
    return listing


def rows_of(text: str, width: int) -> int:
    """Return the number of terminal rows that a line of text takes."""
    return max(1, -(-len(text) // width))


def first_rows(all_lines: Sequence[Line], width: int, height: int) -> list[Line]:
    """Return the first of these lines that fit on the screen. If some are left out, a last line states how many."""
    used = list(itertools.accumulate(rows_of(line.text, width) for line in all_lines))
    if not used or used[-1] < height:
        return list(all_lines)
    shown = sum(rows <= height - 2 for rows in used)
    return [
        *all_lines[:shown],
        Line(f"{len(all_lines) - shown} more lines; --problems shows only nodes and devices with problems"),
    ]


def as_json(status: FleetStatus) -> dict[str, Any]:
    """Return the status as a structure for JSON."""
    nodes = [_node_as_json(view) for view in status.nodes]
    return {
        "problems": list(status.problems),
        "nodes": nodes,
        "hints": list(status.hints),
        "unknown": list(status.unknown),
    }


def _node_as_json(view: NodeView) -> dict[str, Any]:
    return {
        "node": view.node,
        "driver": view.driver,
        "requested": view.requested,
        "before": view.before.share if view.before is not None else None,
        "inRollout": view.before is not None,
        "rolloutOf": view.before.owner if view.before is not None else "",
        "scaleDownDisabled": {"now": view.marks.disabled, "byRollout": view.marks.own},
        "done": fleet.finished(view),
        "waitsFor": fleet.obstacles(view),
        "resources": [
            {
                "name": name,
                "share": resource.share,
                "counts": resource.counts,
                "devices": [_device_as_json(device) for device in view.devices if device.resource == name],
            }
            for name, resource in (view.reported.resources if view.reported is not None else {}).items()
        ],
    }


def _device_as_json(device: ReportedDevice) -> dict[str, Any]:
    return {
        "name": device.name,
        "side": device.state.side,
        "state": device.state.value,
        "holder": device.holder if device.known else None,
        "administrativeAccess": list(device.admins),
        "health": device.health or None,
        "message": device.message,
        "pods": list(device.pods),
        "since": datetime.fromtimestamp(device.since, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "waitsFor": device.waits,
        "withheld": device.withheld,
        "gone": device.gone,
    }
