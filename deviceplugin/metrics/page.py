"""Formats the state of an agent (`AgentView`) as an HTML page for users, and as JSON for programs. Pure functions."""

from __future__ import annotations

import base64
import functools
import hashlib
import re
import string
import time
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any, Final

import msgspec

from deviceplugin.device import Device, counted, some
from deviceplugin.metrics.load import Value
from deviceplugin.metrics.report import Event, ShareProgress
from deviceplugin.metrics.views import AgentView, DeviceHolder, DeviceView, ResourceView, UnlistedDevice, iso, no_plugin
from deviceplugin.register.records import State

CALM: Final = 4  # The urgency of a device that needs no attention.
SHOWN_ATTENTION: Final = 10  # Maximum number of devices in the list of devices that need attention.
# Maximum number of healthy devices without a holder in the first table of one resource. Further such devices are in a
# second, folded table.
SHOWN_CALM: Final = 8
SHOWN_HOLDERS: Final = 4  # Maximum number of visible holders of one device. A click shows the other holders.


def status(view: AgentView) -> bytes:
    """Return the agent's state as JSON, for /status."""
    contents = {
        "node": view.node,
        "at": iso(view.at),
        "ready": not view.unready,
        "unready": list(view.unready),
        "problems": list(view.problems),
        "holdersKnown": view.holders_known,
        "doubleAllocations": view.double_allocations,
        "resources": [_resource(resource) for resource in view.resources],
        "unserved": [
            {"resource": resource, "id": device, "holders": holders}
            for (resource, device), holders in view.unserved.items()
        ],
        "events": [
            {"at": iso(event.at), "resource": event.resource, "text": event.text, "bad": event.bad}
            for event in view.events
        ],
        "providers": {name: dict(report.status) for name, report in view.providers.items()},
        "silent": dict(view.silent),
    }
    return msgspec.json.format(msgspec.json.encode(contents, enc_hook=str), indent=1)


def _resource(resource: ResourceView) -> dict[str, Any]:
    reported, servicer, registration = resource.status, resource.status.endpoint, resource.status.registration
    vendor = reported.vendor and {
        "connected": reported.vendor.connected,
        "since": iso(reported.vendor.since),
    }
    return {
        "resource": resource.name,
        "registered": reported.registered,
        "kubeletListens": reported.live,
        "replicas": reported.replicas,
        "vendor": vendor,
        "share": resource.share,
        "sourceError": reported.source_error,
        "measureError": resource.measured.error if resource.measured is not None else "",
        "registrations": registration.registrations,
        "kubeletRestarts": registration.kubelet_restarts,
        "allocations": servicer.allocations,
        "refusals": dict(servicer.refusals),
        "devices": [_device(seen) for seen in resource.devices],
        "unlisted": [
            {"id": of.id, "state": of.location.state.value, "holders": of.holders} for of in resource.unlisted
        ],
    }


def _device(seen: DeviceView) -> dict[str, Any]:
    device, location = seen.device, seen.location
    return {
        "id": device.id,
        "health": device.health.value,
        "replicas": seen.replicas,
        "message": device.message,
        "since": iso(seen.since) if seen.since is not None else None,
        "gone": seen.gone,
        "side": location.side,
        "state": location.state.value,
        "stateSince": iso(location.since) if location.since else None,
        "reason": location.reason,
        "waits": location.waits,
        "withheld": seen.withheld.reason if seen.withheld else "",
        "numa": list(device.numa_nodes),
        "attributes": dict(device.attributes),
        "holders": seen.holders,
        "administrativeAccess": seen.admins,
        "load": dict(seen.load),
    }


@functools.cache
def _template() -> string.Template:
    return string.Template((Path(__file__).parent / "page.html").read_text(encoding="utf-8"))


@functools.cache
def headers() -> Mapping[str, str]:
    """Return the page's HTTP headers.

    The headers make browsers refuse content from other servers, and all scripts except the script in the page.
    """
    script = _template().template.partition("<script>")[2].partition("</script>")[0]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return {
        "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; connect-src 'self'; "
        f"script-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
        "Referrer-Policy": "no-referrer",
    }


def html(view: AgentView) -> bytes:
    """Return the agent's state as an HTML page."""
    parts = [
        *_problems(view),
        *_attention(view),
        *(_section(resource, view) for resource in view.resources),
        *(_unserved(resource, view.unserved) for resource in dict.fromkeys(name for name, _ in view.unserved)),
        _events(view.events),
    ]
    at = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(view.at))
    return _template().substitute(node=escape(view.node), at=at, main="\n".join(parts)).encode(errors="replace")


def _problems(view: AgentView) -> Iterable[str]:
    reasons = [*view.problems, *view.unready]
    if not view.holders_known:
        reasons.append("the holders are not known: the kubelet's checkpoint cannot be read, or was not read yet")
    if view.double_allocations:
        reasons.append(f"the kubelet gave devices to several pods at once, {view.double_allocations} times")
    for resource in view.resources:
        if resource.status.source_error and resource.status.snapshot.listed:
            reasons.append(f"{resource.name}: the source failed: {resource.status.source_error}")
        if resource.measured is not None and resource.measured.error:
            reasons.append(resource.measured.error)
    if reasons:
        yield (
            '<div class="wrong"><h2>What is wrong</h2><ul>'
            + "".join(f"<li>{escape(reason)}</li>" for reason in reasons)
            + "</ul></div>"
        )


def attention(seen: DeviceView) -> tuple[int, str]:
    """Return (a device's urgency, from 0 for the highest; the reason why the device needs attention, or "")."""
    device, location = seen.device, seen.location
    if location.state is State.QUARANTINED:
        return 0, f"quarantined: {location.reason}"
    if not device.health.usable:
        return 0, f"{device.health.value}: {device.message}" if device.message else device.health.value
    if seen.withheld:
        return 1, f"withheld: {seen.withheld.reason}"
    if device.health.value == "unknown":
        return 2, f"health unknown: {device.message}" if device.message else "health unknown"
    return (3, "") if location.state.moves else (CALM, "")


def _attention(view: AgentView) -> Iterable[str]:
    """Yield an HTML list of the devices of all resources that need attention, each with a link to its table row."""
    urgent_devices = [
        (*attention(seen), resource.name, seen) for resource in view.resources for seen in resource.devices
    ]
    urgent_devices = sorted((entry for entry in urgent_devices if entry[1]), key=lambda entry: entry[0])
    if not urgent_devices:
        return
    lines = [
        f'<li><a href="#{_mark(resource, seen.device.id)}">{_name(seen.device.id)}</a> {_span("dim", resource)} '
        f"{_span('bad' if urgent == 0 else 'warn', why)} {_span('dim', _more(seen))}</li>"
        for urgent, why, resource, seen in urgent_devices[:SHOWN_ATTENTION]
    ]
    if len(urgent_devices) > SHOWN_ATTENTION:
        lines.append(f"<li>{_span('dim', f'{len(urgent_devices) - SHOWN_ATTENTION} more, first in their tables')}</li>")
    yield f'<div class="wrong"><h2>Needs attention</h2><ul>{"".join(lines)}</ul></div>'


def _more(seen: DeviceView) -> str:
    """Return a text with the time at which a device began to need attention, and with its known holders."""
    names = [holder.text or holder.side for holder in seen.holders]
    held = f"held by {some(names, SHOWN_HOLDERS)}" if names else ""
    return "; ".join(filter(None, (_since(seen.since or _moving_since(seen)), held)))


def _moving_since(seen: DeviceView) -> float | None:
    return seen.location.since if not seen.location.state.rests else None


def _since(at: float | None) -> str:
    return f"since {iso(at)[:16].replace('T', ' ')}" if at else ""


def _mark(resource: str, device: str) -> str:
    return escape(f"{resource}/{device}").replace("%", "%25")


def _share(share: ShareProgress) -> str:
    parts = [f"requested share: {share.requested}", f"{share.claimable} of {share.devices} on the DRA side"]
    parts += [f"{share.leaving} moving to it"] if share.leaving else []
    parts += [f"{share.returning} moving back"] if share.returning else []
    moving = share.leaving + share.returning
    part = share.claimable / share.devices if share.devices else 0.0
    meter = f'<meter min="0" max="1" value="{part:.3f}">{part:.0%}</meter>'
    return f'<span class="share">{meter}{_span("warn" if moving else "dim", ", ".join(parts))}</span>'


def _section(resource: ResourceView, view: AgentView) -> str:
    text = counted(len(resource.devices))
    numbers = sorted({seen.replicas for seen in resource.devices})
    if numbers and numbers != [1]:
        text += f" for up to {' or '.join(map(str, numbers))} containers each"
    if view.holders_known:
        text += f", {sum(bool(seen.holders) for seen in resource.devices)} held"
    title = _span("good", "registered") if resource.status.registered else _span("bad", "not registered")
    if (vendor := resource.status.vendor) is not None:
        shown = f"the vendor's plugin is connected since {iso(vendor.since)}" if vendor.connected else no_plugin(vendor)
        title += _span("dim" if vendor.connected else "bad", shown)
    title += _span("dim", text)
    if unhealthy := sum(not seen.device.health.usable for seen in resource.devices):
        title += _span("bad", f"{unhealthy} unhealthy")
    if resource.share is not None:
        title += _share(resource.share)
    loads = any(seen.load for seen in resource.devices)
    columns = ("Device", "Health", "Side", "Holder", "Load")[: 5 if loads else 4]
    head = "".join(f'<th scope="col">{column}</th>' for column in columns)
    rows: dict[bool, list[str]] = {True: [], False: []}
    for seen in sorted(resource.devices, key=lambda seen: attention(seen)[0]):
        rows[_calm(seen, view)].append(_row(resource.name, seen, view, loads=loads))
    calm, fold = rows[True], len(rows[True]) > SHOWN_CALM
    shown = _table(head, rows[False] if fold else rows[False] + calm)
    if fold:
        summary = f"<summary>{len(calm)} healthy, free devices</summary>"
        shown += f'<details id="{escape(f"free-{resource.name}")}">{summary}{_table(head, calm)}</details>'
    shown += _unlisted(resource)
    return f"<section><div><h2>{_name(resource.name)}</h2>{title}</div>\n{shown}</section>"


def _unlisted(resource: ResourceView) -> str:
    """Return the HTML of the resource's `unlisted` devices; "" if there are none.

    An unlisted device has a holder or is not on the plugin side, but its source does not list it any more.

    While a vendor's plugin is disconnected, this list contains all held devices of the plugin.
    """

    def line(device: UnlistedDevice) -> str:
        side = _span("warn", device.location.state.short)
        return f"<li>{escape(device.id)} {_span('dim', 'not listed now')} {side}{_small(device.location.why)} " + (
            f"{_holder_list(resource.name, device.id, device.holders)}</li>"
        )

    return f"<ul>{''.join(map(line, resource.unlisted))}</ul>" if resource.unlisted else ""


def _unserved(resource: str, held: Mapping[tuple[str, str], Sequence[DeviceHolder]]) -> str:
    """Return the HTML of a resource that is not served any more, with its devices that still have holders."""
    lines = [
        f"<li>{escape(device)} {_holder_list(resource, device, holders)}</li>"
        for (of, device), holders in held.items()
        if of == resource
    ]
    title = f"<h2>{_name(resource)}</h2>{_span('warn', 'not served any more')}"
    return f"<section><div>{title}</div>\n<ul>{''.join(lines)}</ul></section>"


def _table(head: str, rows: Sequence[str]) -> str:
    body = "\n".join(rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>\n{body}\n</tbody></table>" if rows else ""


def _calm(seen: DeviceView, view: AgentView) -> bool:
    """Return whether the page may fold a device's row: the device is healthy, and has no holder, load or problem.

    While the holders of devices are unknown, the result is False.
    """
    return view.holders_known and not seen.holders and not seen.load and attention(seen)[0] == CALM


def _row(resource: str, seen: DeviceView, view: AgentView, *, loads: bool) -> str:
    device, location = seen.device, seen.location
    numa = f"NUMA {', '.join(map(str, device.numa_nodes))}" if device.numa_nodes else ""
    withheld = _small(f"withheld: {seen.withheld.reason}" if seen.withheld else "")
    admins = "".join(_small(f"administrative access, not held: {holder.text}") for holder in seen.admins)
    color = {"healthy": "good", "unhealthy": "bad"}.get(device.health.value, "warn")
    moving = "fine" if location.state.rests else "warn"
    cells = [
        _cell("Device", _name(device.id) + _small(_paths(device)) + _small(numa)),
        _cell("Health", _span(color, device.health.value) + _small(device.message) + _small(_since(seen.since))),
        _cell(
            "Side",
            _span(moving, location.state.short) + _small(location.why) + _small(_since(_moving_since(seen))) + withheld,
        ),
        _cell("Holder", _holders(resource, seen, view) + admins),
    ]
    if loads:
        cells.append(_cell("Load", "".join(_load(seen.load)), "load"))
    kind = ' class="calm"' if _calm(seen, view) else ""
    return f'<tr id="{escape(f"{resource}/{device.id}")}"{kind}>{"".join(cells)}</tr>'


def _paths(device: Device) -> str:
    """Return a text with the path of a device's first node, and with the number of the device's other nodes."""
    first, *more = device.hosts or ("",)
    return f"{first} and {len(more)} more" if more else first


def _cell(label: str, content: str, kind: str = "") -> str:
    kinds = f"{kind}{'' if content else ' empty'}".strip()
    attribute = f' class="{kinds}"' if kinds else ""
    return f'<td data-label="{label}"{attribute}><div>{content}</div></td>'


def _holders(resource: str, seen: DeviceView, view: AgentView) -> str:
    if not seen.holders:
        free = "withheld" if seen.withheld else "free"
        return _span("dim", free if view.holders_known else "not known")
    return _holder_list(resource, seen.device.id, seen.holders)


def _holder_list(resource: str, device: str, holders: Sequence[DeviceHolder]) -> str:
    names = [f"<li>{_name(holder.text or holder.side)}</li>" for holder in holders]
    first = f'<ul class="plain">{"".join(names[:SHOWN_HOLDERS])}</ul>'
    if len(names) <= SHOWN_HOLDERS:
        return first
    mark = escape(f"more-{resource}/{device}")
    rest = "".join(names[SHOWN_HOLDERS:])
    summary = f"<summary>{len(names) - SHOWN_HOLDERS} more</summary>"
    return f'{first}<details id="{mark}">{summary}<ul class="plain">{rest}</ul></details>'


_SHORT: Final = {"temperature_celsius": "°C", "power_watts": "W", "throttled": ""}
"""For each quantity that the page shows as a number: the unit; "" for a quantity that the page shows as a word."""


def _load(load: Mapping[str, Value]) -> Iterable[str]:
    left = dict(load)
    busy = left.pop("utilization_ratio", None)
    if isinstance(busy, (int, float)):
        yield _bar("busy", busy, f"{busy:.0%}")
    used, total = left.pop("memory_used_bytes", None), left.pop("memory_total_bytes", None)
    if isinstance(used, (int, float)) and isinstance(total, (int, float)) and total > 0:
        yield _bar("memory", used / total, f"{with_unit(used)} of {with_unit(total)}")
    for name in sorted(left):
        value = left[name]
        if name.endswith("_ratio") and isinstance(value, (int, float)):
            word = name.removesuffix("_ratio").replace("_utilization", "").replace("_", " ")
            yield _bar(word, value, f"{value:.0%}")
    short = [text for name, unit in _SHORT.items() if name in left for text in _short(left[name], unit)]
    if short:
        yield _span("dim", " · ".join(short))


def _short(value: Value, unit: str) -> Iterable[str]:
    if isinstance(value, (int, float)):
        yield f"{value:.0f} {unit}"
    elif unit:
        yield from (f"{number:.0f} {unit} {part}" for part, number in value.items())
    else:
        yield from (f"slowed by {part}" for part, number in value.items() if number)


def _bar(word: str, share: float, text: str) -> str:
    return (
        f'<div class="bar">{_span("dim", word)}'
        f'<meter min="0" max="1" value="{min(1.0, max(0.0, share)):.3f}">{escape(text)}</meter>'
        f"{_span('dim', text)}</div>"
    )


def with_unit(number: float) -> str:
    """Return a number of bytes with three digits and a binary unit."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if number < 1024:
            return f"{number:{'.0f' if number >= 100 else '.3g'}} {unit}"
        number /= 1024
    return f"{number:.3g} TiB"


def _events(events: Iterable[Event]) -> str:
    lines = [
        f'<li><time class="dim" datetime="{iso(event.at)}">{iso(event.at)[:19].replace("T", " ")}</time>'
        f"{_span('dim', event.resource)}{_span('bad' if event.bad else 'fine', event.text)}</li>"
        for event in reversed(tuple(events))
    ]
    listed = "\n".join(lines or [f"<li>{_span('dim', 'nothing')}</li>"])
    return f'<section id="lately"><div><h2>Lately</h2></div><ol>{listed}</ol></section>'


def _name(text: str) -> str:
    """Return a name or path as HTML. Browsers may break the line after punctuation marks in this text."""
    return re.sub(r"([_/.:]+)(?=\w)", r"\1<wbr>", escape(text))


def _span(kind: str, text: str) -> str:
    return f'<span class="{kind}">{_name(text)}</span>'


def _small(text: str) -> str:
    return f"<small>{_name(text)}</small>" if text else ""
