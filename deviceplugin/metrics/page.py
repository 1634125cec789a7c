"""A view for people (one HTML page) and for programs (JSON). Pure: no clock, nothing is asked."""

from __future__ import annotations

import base64
import functools
import hashlib
import os
import socket
import string
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

if TYPE_CHECKING:
    from deviceplugin.metrics.load import Value
    from deviceplugin.metrics.report import Event
    from deviceplugin.metrics.views import DeviceView, Hold, ResourceView, View

__all__ = ["headers", "html", "status"]

MANY: Final = 4
"""Holders of one device that are shown at once; the others on demand."""
PLACES: Final = {
    "plugin": "device plugin",
    "to-dra": "moving to DRA",
    "dra": "DRA",
    "to-plugin": "moving to the device plugin",
    "quarantined": "quarantined",
}


def node_name() -> str:
    """Return what to call this node: $NODE_NAME (the downward API's), or the host's name."""
    return os.environ.get("NODE_NAME") or socket.gethostname()


# For programs.


def status(view: View) -> bytes:
    """Return the view as JSON."""
    return msgspec.json.format(msgspec.json.encode(_status(view), enc_hook=str), indent=1)


def _status(view: View) -> dict[str, Any]:
    return {
        "node": node_name(),
        "at": _iso(view.at),
        "ready": not view.unready,
        "unready": list(view.unready),
        "holdersKnown": view.holders_known,
        "doubleAllocations": view.double_allocations,
        "resources": [_resource(one) for one in view.resources],
        "events": [
            {"at": _iso(event.at), "resource": event.resource, "text": event.text, "bad": event.bad}
            for event in view.events
        ],
        "providers": {name: dict(report.status) for name, report in view.providers.items()},
        "silent": dict(view.silent),
    }


def _resource(one: ResourceView) -> dict[str, Any]:
    known, servicer, registration = one.status, one.status.endpoint, one.status.registration
    return {
        "resource": one.name,
        "registered": known.registered,
        "kubeletListens": known.live,
        "replicas": known.replicas,
        "sourceError": known.source_error,
        "measureError": one.measured.error if one.measured is not None else "",
        "registrations": registration.registrations,
        "kubeletRestarts": registration.kubelet_restarts,
        "allocations": servicer.allocations,
        "refusals": dict(servicer.refusals),
        "devices": [_device(seen) for seen in one.devices],
    }


def _device(seen: DeviceView) -> dict[str, Any]:
    device, place = seen.device, seen.place
    return {
        "id": device.id,
        "health": device.health.value,
        "replicas": seen.replicas,
        "message": device.message,
        "gone": seen.gone,
        "side": place.side,
        "state": place.state,
        "reason": place.reason,
        "withheld": seen.withheld,
        "numa": list(device.numa_nodes),
        "attributes": dict(device.attributes),
        "holders": [_holder(hold) for hold in seen.holds],
        "load": dict(seen.load),
    }


def _holder(hold: Hold) -> dict[str, str]:
    return {
        "side": hold.side,
        "namespace": hold.namespace,
        "pod": hold.pod,
        "container": hold.container,
        "claim": hold.claim,
        "uid": hold.uid,
    }


def _iso(at: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(at))


# For people.


def escape(text: str) -> str:
    """Return text as HTML; `html.escape` without the 2,231 names of characters that come with it."""
    for character, name in (("&", "&amp;"), ("<", "&lt;"), (">", "&gt;"), ('"', "&quot;"), ("'", "&#x27;")):
        text = text.replace(character, name)
    return text


@functools.cache
def _template() -> string.Template:
    return string.Template((Path(__file__).parent / "page.html").read_text(encoding="utf-8"))


@functools.cache
def headers() -> Mapping[str, str]:
    """Return what a browser is told: the page loads nothing from anywhere and runs its own script alone."""
    script = _template().template.partition("<script>")[2].partition("</script>")[0]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return {
        "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; connect-src 'self'; "
        f"script-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
        "Referrer-Policy": "no-referrer",
    }


def html(view: View) -> bytes:
    """Return the view as a page."""
    parts = [*_wrong(view), *(_section(one, view) for one in view.resources), _events(view.events)]
    at = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(view.at))
    return _template().substitute(node=escape(node_name()), at=at, main="\n".join(parts)).encode(errors="replace")


def _wrong(view: View) -> Iterable[str]:
    reasons = list(view.unready)
    if not view.holders_known:
        reasons.append("who holds what is not known: the kubelet's checkpoint cannot be read, or was not read yet")
    if view.double_allocations:
        reasons.append(f"the kubelet gave devices to several pods at once, {view.double_allocations} times")
    for one in view.resources:
        if one.status.source_error and one.status.snapshot.listed:
            reasons.append(f"{one.name}: the source failed: {one.status.source_error}")
        if one.measured is not None and one.measured.error:
            reasons.append(one.measured.error)
    if reasons:
        yield '<div class="wrong"><ul>' + "".join(f"<li>{escape(reason)}</li>" for reason in reasons) + "</ul></div>"


def _section(one: ResourceView, view: View) -> str:
    unhealthy = sum(not seen.device.health.usable for seen in one.devices)
    held = sum(bool(seen.holds) for seen in one.devices)
    loads = any(seen.load for seen in one.devices)
    said = [
        '<span class="good">registered</span>' if one.status.registered else '<span class="bad">not registered</span>',
        f'<span class="dim">{_many(len(one.devices), "device")}'
        + (f" for up to {one.status.replicas} containers each" if one.status.replicas > 1 else "")
        + (f", {held} held" if view.holders_known else "")
        + "</span>",
    ]
    if unhealthy:
        said.append(f'<span class="bad">{unhealthy} unhealthy</span>')
    columns = ["Device", "Health", "Side", "Holder", *(["Load"] if loads else [])]
    head = "".join(f'<th scope="col">{column}</th>' for column in columns)
    rows = "\n".join(_row(one.name, seen, view, loads=loads) for seen in one.devices)
    table = f"<table><thead><tr>{head}</tr></thead><tbody>\n{rows}\n</tbody></table>" if one.devices else ""
    return f"<section><div><h2>{escape(one.name)}</h2>{''.join(said)}</div>\n{table}</section>"


def _row(resource: str, seen: DeviceView, view: View, *, loads: bool) -> str:
    device, place = seen.device, seen.place
    where = f"NUMA {', '.join(map(str, device.numa_nodes))}" if device.numa_nodes else ""
    color = {"healthy": "good", "unhealthy": "bad"}.get(device.health.value, "warn")
    moving = "" if place.state in ("plugin", "dra") else ' class="warn"'
    cells = [
        _cell("Device", escape(device.id) + _small(where)),
        _cell("Health", f'<span class="{color}">{device.health.value}</span>' + _small(device.message)),
        _cell(
            "Side",
            f"<span{moving}>{escape(PLACES.get(place.state, place.state))}</span>"
            + _small(place.reason)
            + _small(f"withheld: {seen.withheld}" if seen.withheld else ""),
        ),
        _cell("Holder", _holders(resource, seen, view)),
    ]
    if loads:
        cells.append(_cell("Load", "".join(_load(seen.load)), "load"))
    return f'<tr id="{escape(f"{resource}/{device.id}")}">{"".join(cells)}</tr>'


def _cell(label: str, content: str, kind: str = "") -> str:
    kinds = " ".join(word for word in (kind, "" if content else "empty") if word)
    return f'<td data-label="{label}"{f""" class="{kinds}" """.rstrip() if kinds else ""}><div>{content}</div></td>'


def _holders(resource: str, seen: DeviceView, view: View) -> str:
    names = [f"<li>{escape(hold.text or hold.side)}</li>" for hold in seen.holds]
    if not names:
        return '<span class="dim">free</span>' if view.holders_known else '<span class="dim">not known</span>'
    first = f'<ul class="plain">{"".join(names[:MANY])}</ul>'
    if len(names) <= MANY:
        return first
    mark = escape(f"more-{resource}/{seen.device.id}")
    rest = "".join(names[MANY:])
    summary = f"<summary>{len(names) - MANY} more</summary>"
    return f'{first}<details id="{mark}">{summary}<ul class="plain">{rest}</ul></details>'


def _load(load: Mapping[str, Value]) -> Iterable[str]:
    left = dict(load)
    busy = left.pop("utilization_ratio", None)
    if isinstance(busy, (int, float)):
        yield _bar("busy", busy, f"{busy:.0%}")
    used, total = left.pop("memory_used_bytes", None), left.pop("memory_total_bytes", None)
    if isinstance(used, (int, float)) and isinstance(total, (int, float)) and total > 0:
        yield _bar("memory", used / total, f"{_bytes(used)} of {_bytes(total)}")
    for name in sorted(left):
        value = left[name]
        if name.endswith("_ratio") and isinstance(value, (int, float)):
            word = name.removesuffix("_ratio").replace("_utilization", "").replace("_", " ")
            yield _bar(word, value, f"{value:.0%}")
    short = [text for name, unit in _SHORT.items() if name in left for text in _short(left[name], unit)]
    if short:
        yield f'<span class="dim">{escape(" · ".join(short))}</span>'


_SHORT: Final = {"temperature_celsius": "°C", "power_watts": "W", "throttled": ""}


def _short(value: Value, unit: str) -> Iterable[str]:
    if isinstance(value, (int, float)):
        yield f"{value:.0f} {unit}"
    elif unit:
        yield from (f"{number:.0f} {unit} {part}" for part, number in value.items())
    else:
        yield from (f"slowed by {part}" for part, number in value.items() if number)


def _bar(word: str, share: float, text: str) -> str:
    return (
        f'<div class="bar"><span class="dim">{escape(word)}</span>'
        f'<meter min="0" max="1" value="{min(1.0, max(0.0, share)):.3f}">{escape(text)}</meter>'
        f'<span class="dim">{escape(text)}</span></div>'
    )


def _bytes(number: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if number < 1024:
            return f"{number:{'.0f' if number >= 100 else '.3g'}} {unit}"
        number /= 1024
    return f"{number:.3g} TiB"


def _events(events: Iterable[Event]) -> str:
    lines = [
        f'<li><time class="dim" datetime="{_iso(event.at)}">{_iso(event.at)[11:19]}</time>'
        f'<span class="dim">{escape(event.resource)}</span>'
        f'<span class="{"bad" if event.bad else "fine"}">{escape(event.text)}</span></li>'
        for event in reversed(tuple(events))
    ]
    listed = "\n".join(lines or ['<li><span class="dim">nothing</span></li>'])
    return f"<section><div><h2>Lately</h2></div><ol>{listed}</ol></section>"


def _small(text: str) -> str:
    return f"<small>{escape(text)}</small>" if text else ""


def _many(count: int, word: str) -> str:
    return f"{count} {word}{'' if count == 1 else 's'}"
