"""The text formats: what is written is what Prometheus reads."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.exposition import generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as generate_open
from prometheus_client.openmetrics.parser import text_string_to_metric_families as read_open
from prometheus_client.parser import text_string_to_metric_families as read_plain

from deviceplugin.exposition import OPEN_METRICS, PLAIN, Family, negotiate, number, render


class Collected:
    def __init__(self, *families: Any) -> None:
        self._families = families

    def collect(self) -> Iterable[Any]:
        return self._families


def rendered(content_type: str, *families: Any) -> str:
    return b"".join(render(Collected(*families), content_type)).decode()


KINDS = ("gauge", "counter", "info", "summary", "unknown")


@st.composite
def families(draw: st.DrawFn) -> Family:
    kind = draw(st.sampled_from(KINDS))
    labels = draw(st.sampled_from([(), ("resource",), ("resource", "device")]))
    family = Family("some_energy_joules" if kind != "info" else "some", kind, draw(st.text(max_size=20)), labels)
    rows: Sequence[tuple[str, ...]] = draw(
        st.lists(st.tuples(*(st.text(max_size=12) for _ in labels)), max_size=4, unique=True)
    )
    for values in rows:
        value = draw(st.floats(min_value=0, allow_infinity=False) | st.integers(0, 2**53)) if kind != "info" else 1
        if kind == "summary":
            family.add(values, value, "_sum")
            family.add(values, draw(st.integers(0, 9)), "_count")
        else:
            family.add(values, value)
    return family


def read(text: str, reader: Any) -> Any:
    return {
        (family.name, family.type, family.documentation): sorted(
            (sample.name, sorted(sample.labels.items()), sample.value) for sample in family.samples
        )
        for family in reader(text)
    }


@given(families())
def test_what_is_written_means_what_the_client_library_would_write(family: Family) -> None:
    """Read back, our text and the library's are the same, in both formats, whatever is in the labels."""
    registry: Any = Collected(family)
    assert read(rendered(PLAIN, family), read_plain) == read(generate_latest(registry).decode(), read_plain)
    ours, theirs = rendered(OPEN_METRICS, family), generate_open(registry).decode()  # type: ignore[no-untyped-call]
    assert read(ours, read_open) == read(theirs, read_open)


def test_plain_text_is_as_documented() -> None:
    """A counter's name has its suffix in HELP and TYPE, labels and help are escaped."""
    family = Family("a_seconds", "counter", "two\nlines \\", ("x",))
    family.add(('q"\\\n',), 1.5)
    assert rendered(PLAIN, family) == (
        "# HELP a_seconds_total two\\nlines \\\\\n"
        "# TYPE a_seconds_total counter\n"
        'a_seconds_total{x="q\\"\\\\\\n"} 1.5\n'
    )


def test_open_metrics_names_the_unit_and_ends() -> None:
    """OpenMetrics has a UNIT line for names that end with one, and says where it ends."""
    family = Family("a_seconds", "counter", "help")
    family.add((), 2)
    assert rendered(OPEN_METRICS, family) == (
        "# HELP a_seconds help\n# TYPE a_seconds counter\n# UNIT a_seconds seconds\na_seconds_total 2\n# EOF\n"
    )
    assert rendered(OPEN_METRICS) == "# EOF\n"


def test_a_row_may_have_one_label_more() -> None:
    """Parts of a quantity carry a label that its other rows do not have."""
    family = Family("t_celsius", "gauge", "help", ("device",))
    family.add(("a",), 1)
    family.add(("b", "gpu"), 2, more="sensor")
    assert rendered(PLAIN, family).endswith('t_celsius{device="a"} 1\nt_celsius{device="b",sensor="gpu"} 2\n')


def test_families_of_the_client_library_are_written_too() -> None:
    """Whoever adds collectors may use the client library; its families come out as it writes them."""
    registry = CollectorRegistry()
    Counter("mine", "mine", registry=registry).inc()
    Histogram("took_seconds", "took", registry=registry).observe(0.2)
    own = Family("own", "gauge", "own")
    own.add((), 1)
    text = rendered(PLAIN, own, *registry.collect())
    assert "own 1\n" in text
    assert "mine_total 1.0\n" in text
    assert 'took_seconds_bucket{le="0.25"} 1.0' in text
    opened = rendered(OPEN_METRICS, *registry.collect(), own)
    assert opened.count("# EOF") == 1
    assert opened.endswith("own 1\n# EOF\n")
    assert {family.name for family in read_open(opened)} == {"own", "mine", "took_seconds"}  # type: ignore[no-untyped-call]


def test_a_name_that_is_no_text_does_not_fail_the_scrape() -> None:
    """A file name that is no UTF-8 comes out with question marks."""
    family = Family("a", "gauge", "help", ("x",))
    family.add(("tty\udcff",), 1)
    assert 'a{x="tty?"} 1\n' in rendered(PLAIN, family)


def test_numbers_are_written_as_the_formats_want_them() -> None:
    """Whole numbers stay whole, infinities have a sign."""
    assert [number(n) for n in (3, True, 0.5, 1e300, math.inf, -math.inf, math.nan)] == [
        "3", "1", "0.5", "1e+300", "+Inf", "-Inf", "NaN",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("accept", "wanted"),
    [
        ("", PLAIN),
        ("*/*", PLAIN),
        ("text/html,*/*;q=0.8", PLAIN),
        ("application/openmetrics-text", OPEN_METRICS),
        # Prometheus 2.42 and 3.
        (
            "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,"
            "text/plain;version=0.0.4;q=0.5,*/*;q=0.1",
            OPEN_METRICS,
        ),
        (
            "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,"
            "text/plain;version=1.0.0;escaping=allow-utf-8;q=0.4,*/*;q=0.2",
            OPEN_METRICS,
        ),
        ("text/plain;version=0.0.4;q=0.9,application/openmetrics-text;version=1.0.0;q=0.5", PLAIN),
        ("application/openmetrics-text;version=0.0.1", PLAIN),
        ("application/openmetrics-text;q=0", PLAIN),
        ("application/vnd.google.protobuf;encoding=delimited,text/plain;q=0.1", PLAIN),
        ("text/plain;q=high,application/openmetrics-text;;", OPEN_METRICS),
    ],
)
def test_format_is_negotiated(accept: str, wanted: str) -> None:
    """OpenMetrics goes to those who prefer it and speak version 1, the plain format to all others."""
    assert negotiate(accept) == wanted
