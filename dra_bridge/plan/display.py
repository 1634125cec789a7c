"""Formats the plan as a table for terminals, as Markdown, or as JSON. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from deviceplugin.tables import age, aligned, fits, wrapped
from dra_bridge.plan.checks import MigrationPlan, ResourceUse
from dra_bridge.plan.findings import PlanFinding

_WIDE: Final = ("RESOURCE", "DRIVER", "NODES", "CAPACITY", "ALLOCATABLE", "PUBLISHED", "PODS", "BY LIMITS", "BY DRA")
_HEAD: Final = (*_WIDE, "WAIT", "UNCHANGED PODS THROUGH DRA")


def table(plan: MigrationPlan, width: int | None) -> str:
    """Format the plan for a terminal. width: the terminal's width in characters; None for no limit."""
    blocks = [_drain(plan)]
    for finding in plan.findings:
        kind = finding.kind
        head = f"{kind.severity.value.upper()} {kind.code}: {kind.text}"
        blocks.append([head, f"  {finding.object}: {finding.reason}", f"  do: {kind.remedy}"])
    blocks += [_unread(plan), [summary(plan)]]
    texts = [_uses(plan.uses, width), *([line.text for line in wrapped(block, width)] for block in blocks)]
    return "\n\n".join("\n".join(block) for block in texts if block)


def summary(plan: MigrationPlan) -> str:
    """Return a text with the number of findings of each severity."""
    counts: dict[str, int] = {}
    for finding in plan.findings:
        counts[finding.kind.severity.value] = counts.get(finding.kind.severity.value, 0) + 1
    said = ", ".join(f"{count} {name}{'s' if count != 1 else ''}" for name, count in counts.items())
    return (said or "no findings") + ("; incomplete" if plan.unread else "")


def markdown(plan: MigrationPlan) -> str:
    """Format the plan as a Markdown page."""
    lines = ["# Plan", "", *_markdown_table(_rows(plan.uses)), "", *_drain(plan), "", f"{summary(plan)}.", ""]
    rows = [("severity", "code", "object", "reason", "what to do")]
    rows += [(f.kind.severity.value, f.kind.code, f.object, f.reason, f.kind.remedy) for f in plan.findings]
    lines += _markdown_table(rows) if plan.findings else []
    return "\n".join([*lines, "", *_unread(plan)])


def as_json(plan: MigrationPlan) -> dict[str, Any]:
    """Return the plan as a structure for JSON."""
    drain = plan.drain
    return {
        "resources": [
            {
                "resource": use.resource,
                "driver": use.driver,
                "nodes": use.nodes,
                "capacity": use.capacity,
                "allocatable": use.allocatable,
                "published": use.published,
                "podsByCount": {str(count): pods for count, pods in use.by_count.items()},
                "devicesByLimits": use.by_limits,
                "devicesByDRA": use.by_dra,
                "podsWaiting": use.waiting,
                "unchangedPodsThroughDRA": use.unchanged,
            }
            for use in plan.uses
        ],
        "drain": drain and {"nodes": drain.nodes, "halfSeconds": int(drain.half), "lastSeconds": int(drain.most)},
        "findings": [_finding(one) for one in plan.findings],
        "unread": [{"what": one.what, "reason": one.reason} for one in plan.unread],
    }


def _finding(one: PlanFinding) -> dict[str, str]:
    kind = one.kind
    return {
        "code": kind.code,
        "severity": kind.severity.value,
        "text": kind.text,
        "object": one.object,
        "reason": one.reason,
        "remedy": kind.remedy,
    }


def _rows(uses: Sequence[ResourceUse]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [_HEAD]
    for use in uses:
        pods = " ".join(f"{pods}x{count}" for count, pods in use.by_count.items()) or "none"
        numbers = (use.nodes, use.capacity, use.allocatable, use.published)
        more = (use.by_limits, use.by_dra, use.waiting)
        rows.append(
            (
                use.resource,
                use.driver or "-",
                *map(str, numbers),
                pods,
                *map(str, more),
                "yes" if use.unchanged else "no",
            )
        )
    return rows


def _uses(uses: Sequence[ResourceUse], width: int | None) -> list[str]:
    """Return a table of the resources. If the table is wider than `width`, each row has two lines."""
    if not uses:
        return ["no node has an extended resource, and no pod asks for one"]
    if fits(whole := aligned(_rows(uses)), width):
        return whole
    short = (*_WIDE[2:6], "LIMITS", "DRA", "WAIT", "UNCHANGED", "PODS")
    cells = [(*row[2:6], *row[7:], row[6]) for row in _rows(uses)[1:]]
    head, *rest = aligned([(f"  {first}", *more) for first, *more in (short, *cells)])
    lines = [head]
    for use, text in zip(uses, rest, strict=True):
        lines += [line.text for line in wrapped([f"{use.resource}  {use.driver or '-'}", text], width)]
    return lines


def _drain(plan: MigrationPlan) -> list[str]:
    if plan.drain is None:
        return ["no pod has devices: nodes move at once"] if plan.idle else []
    half, most = age(plan.drain.half), age(plan.drain.most)
    return [
        f"by the ages of the pods that run, half of the {plan.drain.nodes} nodes with such pods are free within "
        f"{half}, the last in {most}"
    ]


def _unread(plan: MigrationPlan) -> list[str]:
    by_reason: dict[str, list[str]] = {}
    for one in plan.unread:
        by_reason.setdefault(one.reason, []).append(one.what)
    return [f"NOT READ: {', '.join(what)}: {reason}" for reason, what in by_reason.items()]


def _markdown_table(rows: Sequence[Sequence[str]]) -> list[str]:
    head, *rest = [" | ".join(cell.replace("|", "\\|") for cell in row) for row in rows]
    return [f"| {head} |", f"|{'---|' * len(rows[0])}", *(f"| {row} |" for row in rest)]
