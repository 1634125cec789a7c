"""The text that Prometheus reads: the plain format and OpenMetrics, by negotiation.

The client library's own encoders take some 15 µs a line, and a node with 64 devices has 2,000
lines. Here a family keeps rows instead of sample objects, and values are escaped once. Families
of the client library (of whoever adds collectors) go through its encoders; it is loaded for them
only, since it brings an HTTP server and OpenSSL along, some 8 MB.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, Protocol

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric
    from prometheus_client.samples import Sample

__all__ = ["OPEN_METRICS", "PLAIN", "Family", "negotiate", "render"]

PLAIN: Final = "text/plain; version=0.0.4; charset=utf-8"
OPEN_METRICS: Final = "application/openmetrics-text; version=1.0.0; charset=utf-8"
UNITS: Final = ("seconds", "bytes", "ratio", "celsius", "watts", "joules", "hertz")
_PLAIN_TYPES: Final = {"info": "gauge", "unknown": "untyped", "stateset": "gauge"}
_EOF: Final = b"# EOF\n"


class Family:
    """One metric of any type as rows; looks like a Metric of the client library to a registry.

    name: without the `_total` or `_info` that its samples carry. labels: the names of the labels
    of each row; what a row adds besides comes behind them.
    """

    __slots__ = ("documentation", "kind", "labels", "name", "rows")

    def __init__(self, name: str, kind: str, documentation: str, labels: tuple[str, ...] = ()) -> None:
        self.name = name
        self.kind = kind
        self.documentation = documentation
        self.labels = labels
        self.rows: list[tuple[str, tuple[str, ...], tuple[str, ...], float]] = []

    def __repr__(self) -> str:
        return f"<Family {self.name} of {len(self.rows)} rows>"

    def add(self, values: tuple[str, ...], value: float, suffix: str | None = None, more: str = "") -> None:
        """Add a row: the labels' values, its number, what follows the name, one more label's name.

        With `more`, `values` has one value more than the family has labels.
        """
        if suffix is None:
            suffix = _SUFFIXES.get(self.kind, "")
        self.rows.append((suffix, (*self.labels, more) if more else self.labels, values, value))

    @property
    def type(self) -> str:
        """The type's name in OpenMetrics."""
        return self.kind

    @property
    def unit(self) -> str:
        """The unit that the name ends with, if it does."""
        last = self.name.rpartition("_")[2]
        return last if last in UNITS else ""

    @property
    def samples(self) -> list[Sample]:
        """The rows as samples of the client library."""
        from prometheus_client.samples import Sample

        return [
            Sample(self.name + suffix, dict(zip(names, values, strict=True)), value)
            for suffix, names, values, value in self.rows
        ]


_SUFFIXES: Final = {"counter": "_total", "info": "_info"}


class Collected(Protocol):
    """Anything that yields families; a registry, say."""

    def collect(self) -> Iterable[Any]:
        """Yield the families."""


def negotiate(accept: str) -> str:
    """Return the content type to answer with, from a request's Accept header."""
    best, choice = -1.0, PLAIN
    for part in accept.split(","):
        kind, *parameters = (piece.strip() for piece in part.split(";"))
        said = dict(parameter.split("=", 1) for parameter in parameters if "=" in parameter)
        try:
            quality = float(said.get("q", "1"))
        except ValueError:
            continue
        version = said.get("version", "")
        if kind == "application/openmetrics-text" and version in ("", "1.0.0"):
            offer = OPEN_METRICS
        elif kind in ("text/plain", "text/*", "*/*"):
            offer = PLAIN
        else:
            continue
        if quality > best and quality > 0:
            best, choice = quality, offer
    return choice


def render(collected: Collected, content_type: str) -> Iterator[bytes]:
    """Yield everything that is collected now as text of this type, a family at a time."""
    opened = content_type == OPEN_METRICS
    for family in collected.collect():
        yield _written(family, opened) if isinstance(family, Family) else _foreign(family, opened)
    if opened:
        yield _EOF


class _One:
    def __init__(self, family: Metric) -> None:
        self._family = family

    def collect(self) -> Iterable[Metric]:
        return (self._family,)


def _foreign(family: Metric, opened: bool) -> bytes:
    from prometheus_client.exposition import generate_latest as plain_text
    from prometheus_client.openmetrics.exposition import generate_latest as open_metrics

    if opened:
        text: bytes = open_metrics(_One(family))  # type: ignore[no-untyped-call]
        return text.removesuffix(_EOF)
    return plain_text(_One(family))


def _written(family: Family, opened: bool) -> bytes:
    out: list[str] = []
    name, kind = family.name, family.kind
    shown = name
    if not opened:
        shown = name + _SUFFIXES.get(kind, "")
        kind = _PLAIN_TYPES.get(kind, kind)
    text = family.documentation.replace("\\", r"\\").replace("\n", r"\n")
    out.append(f"# HELP {shown} {text.replace(chr(34), chr(92) + chr(34)) if opened else text}\n")
    out.append(f"# TYPE {shown} {kind}\n")
    if opened and family.unit:
        out.append(f"# UNIT {name} {family.unit}\n")
    for suffix, names, values, value in family.rows:
        shown = _labels_form(names) % tuple(map(_quoted, values))
        out.append(f"{name}{suffix}{shown} {number(value)}\n")
    return "".join(out).encode()


@lru_cache(maxsize=256)
def _labels_form(names: tuple[str, ...]) -> str:
    return "{" + ",".join(f'{name}="%s"' for name in names) + "}" if names else ""


_SPECIAL: Final = re.compile(r'[\\"\n]')
_ESCAPES: Final[Mapping[str, str]] = {"\\": r"\\", '"': r"\"", "\n": r"\n"}


@lru_cache(maxsize=4096)
def _quoted(value: str) -> str:
    # A name that is no UTF-8 (from the file system, say) must not fail the scrape.
    value = value.encode(errors="replace").decode()
    return _SPECIAL.sub(lambda match: _ESCAPES[match[0]], value)


def number(value: float) -> str:
    """Return a number as both formats write it."""
    if isinstance(value, int):
        return str(int(value))
    if math.isfinite(value):
        return repr(float(value))
    return "NaN" if math.isnan(value) else ("+Inf" if value > 0 else "-Inf")
