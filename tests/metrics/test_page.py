"""The page for people and the status for programs."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import time
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from deviceplugin.device import Device, Health
from deviceplugin.kubelet.podresources import PodContainer
from deviceplugin.kubelet.status import VendorConnection, Withheld
from deviceplugin.metrics import load, page
from deviceplugin.metrics.report import DeviceLocation, Event, ProviderReport, ShareProgress
from deviceplugin.metrics.views import Observer
from deviceplugin.register.records import State
from tests.metrics.views import RESOURCE, Still, resource


class Table(HTMLParser):
    """Reads the rows of all tables as lists of texts, all text, and the references."""

    def __init__(self, html: bytes) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.references: list[str] = []
        self.open: list[str] = []
        self.text = ""
        self._in_cell = self._joined = False
        self.feed(html.decode())
        self.close()

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.references += [value or "" for name, value in attributes if name in ("href", "src", "action", "data")]
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self._in_cell = True
            self.rows[-1].append("")
        self._joined = tag == "wbr"
        if tag not in ("meta", "link", "br", "wbr"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag
        if tag in ("td", "th"):
            self._in_cell = False

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] in ("style", "script"):
            return
        self.text += data
        if self._in_cell:
            self.rows[-1][-1] = f"{self.rows[-1][-1]}{'' if self._joined else ' '}{data}".strip()
            self._joined = False


class Bridge:
    name = "bridge"

    def report(self) -> ProviderReport:
        return ProviderReport(
            status={"slices": 1},
            locations={
                (RESOURCE, "c"): DeviceLocation(State.TO_DRA, time.time(), "asked for by the node's annotation")
            },
            shares={RESOURCE: ShareProgress("2", 3, 1, 1)},
        )


def busy() -> tuple[Still, Observer]:
    """An agent with a shared and held device, an unhealthy device, and a moving device of unknown health."""
    holders = {f"a::{n}": [PodContainer("team", f"train-{n}", "main")] for n in range(6)}
    still = Still(
        resource(
            Device("a", numa=0),
            Device("b", numa=[0, 1], health=Health.UNHEALTHY, message="XID 79: <fell off the bus>"),
            Device("c", health=Health.UNKNOWN),
            held=holders,
            replicas=8,
            refusals={"unhealthy": 1},
        )
    )
    still.providers.append(Bridge())
    load = {
        "utilization_ratio": 0.53,
        "memory_used_bytes": 3 * 2**30,
        "memory_total_bytes": 80 * 2**30,
        "encoder_utilization_ratio": 0.25,
        "temperature_celsius": {"gpu": 61.0, "memory": 70.0},
        "power_watts": 312.4,
        "throttled": {"power": 1, "thermal": 0},
    }
    return still, still.measured(a=load)


class TestPage:
    """The page: one HTML file, complete without a script."""

    def test_table_shows_each_device(self) -> None:
        """The table has each device with health, side (device plugin or DRA), holders and load in plain HTML."""
        _, observer = busy()
        rows = Table(page.html(observer.view())).rows
        assert rows[0] == ["Device", "Health", "Side", "Holder", "Load"]
        b, c, a = rows[1:]  # devices that need attention come first
        assert a[:3] == ["a NUMA 0", "healthy", "device plugin"]
        assert a[3].startswith("team/train-0 (main) team/train-1 (main)")
        assert "2 more" in a[3]
        assert "train-5" in a[3]
        assert a[4] == "busy 53% 53% memory 3 GiB of 80 GiB 3 GiB of 80 GiB encoder 25% 25% " + (
            "61 °C gpu · 70 °C memory · 312 W · slowed by power"
        )
        assert b == ["b NUMA 0, 1", "unhealthy XID 79: <fell off the bus>", "device plugin", "free", ""]
        assert c[:2] + c[3:] == ["c", "unknown", "free", ""]
        assert c[2].startswith("moving to DRA asked for by the node's annotation since 20")

    @pytest.mark.parametrize(
        ("replicas", "said"),
        [(1, "1 device, 1 held"), (4, "1 device for up to 4 containers each, 1 held")],
    )
    def test_heading_counts_devices(self, replicas: int, said: str) -> None:
        """The heading has the number of devices, how many containers may share one, and how many devices are held."""
        name = "a::0" if replicas > 1 else "a"
        still = Still(resource(Device("a"), held={name: [PodContainer("team", "web", "main")]}, replicas=replicas))
        assert f"{RESOURCE}registered{said}" in Table(page.html(still.observer().view())).text

    def test_long_names_break_between_their_words(self) -> None:
        """Names and paths may break after their punctuation marks, and their text stays the same."""
        device = Device("usb-FTDI_FT232R_A5", nodes=["/dev/serial/by-id/x"])
        html = page.html(Still(resource(device)).observer().view())
        assert b"usb-FTDI_<wbr>FT232R_<wbr>A5" in html
        assert Table(html).rows[1][0] == "usb-FTDI_FT232R_A5 /dev/serial/by-id/x"

    def test_nothing_comes_from_outside(self) -> None:
        """The page refers to pages of this server only."""
        _, observer = busy()
        html = page.html(observer.view())
        references = Table(html).references
        assert [one for one in references if not one.startswith("#")] == ["metrics", "status"]
        assert not re.search(rb"https?://|@import|url\(", html)

    def test_what_others_named_is_text(self) -> None:
        """Names and messages of other programs are escaped."""
        evil = '<script>alert("1")</script>'
        device = Device("a", health=Health.UNHEALTHY, message=evil)
        still = Still(resource(device, held={"a": [PodContainer(evil, evil, "'&")]}, source_error=evil))
        html = page.html(still.observer().view())
        assert html.count(b"<script") == 1
        assert Table(html).rows[1][1] == f"unhealthy {evil}"

    def test_script_is_the_only_one_that_may_run(self) -> None:
        """The Content-Security-Policy has the digest of the page's one script."""
        _, observer = busy()
        script = page.html(observer.view()).partition(b"<script>")[2].partition(b"</script>")[0]
        digest = base64.b64encode(hashlib.sha256(script).digest()).decode()
        assert f"script-src 'sha256-{digest}'" in page.headers()["Content-Security-Policy"]
        assert b"refresh" in page.html(observer.view()).partition(b"</noscript>")[0]

    def test_what_is_wrong_stands_on_top(self) -> None:
        """All problems come first, as text."""
        still = Still(resource("a", registered=False, source_error="OSError: no bus"))
        still.scanned_at = None
        still.double = 2
        observer = still.observer()
        ((gauge, _),) = observer.due()
        gauge.error = "measure of example.com/gpu still hangs"
        text = Table(page.html(observer.view())).text
        assert text.index("What is wrong") < text.index("no bus")
        for said in ("not registered", "no bus", "not known", "2 times", "still hangs"):
            assert said in text.partition("Device Health")[0]

    @pytest.mark.parametrize("connected", [True, False])
    def test_an_adopted_plugin(self, connected: bool) -> None:
        """Page and /status have the connection of the adopted plugin, and since when."""
        vendor = VendorConnection(connected=connected, since=60.0)
        view = Still(resource("a", registered=connected, vendor=vendor)).observer().view()
        said = (
            "is connected since 1970-01-01T00:01:00"
            if connected
            else "is not registered with the agent since 1970-01-01"
        )
        assert said in Table(page.html(view)).text
        (one,) = json.loads(page.status(view))["resources"]
        assert one["vendor"]["connected"] is connected
        assert one["vendor"]["since"].startswith("1970-01-01T00:01:00")

    def test_devices_that_are_not_listed(self) -> None:
        """A device for claims, and a device that a pod holds, are shown also before the source lists its devices."""

        class Claims(Bridge):
            def report(self) -> ProviderReport:
                places = {(RESOURCE, "<d0>"): DeviceLocation(State.DRA, 60.0, "")}
                return ProviderReport(locations=places)

        still = Still(resource(listed=False, held={"d1": [PodContainer("team", "train", "main")]}))
        still.providers.append(Claims())
        text = Table(page.html(still.observer().view())).text
        assert "<d0> not listed now DRA" in text
        assert "d1 not listed now device plugin team/train (main)" in text

    def test_problems_come_first(self) -> None:
        """A problem that a provider (such as the bridge) reports comes first on the page; the agent stays ready."""

        class Lost(Bridge):
            def report(self) -> ProviderReport:
                return ProviderReport(problems=["the API server is unreachable since 21:23:36 UTC"], node="n8")

        still = Still(resource("a", source_error="no bus"))
        still.providers.append(Lost())
        view = still.observer().view()
        text = Table(page.html(view)).text
        assert 0 < text.index("unreachable since 21:23:36") < text.index("no bus")
        assert "Devices of n8" in text
        said = json.loads(page.status(view))
        assert (said["node"], said["ready"]) == ("n8", True)
        assert said["problems"] == ["the API server is unreachable since 21:23:36 UTC"]

    def test_broken_devices_come_before_all_tables(self) -> None:
        """Of 64 devices the two with problems come first, with links to their rows; the rest is folded."""
        devices: list[Device | str] = [f"d{number}" for number in range(64)]
        devices[40] = Device("d40", health=Health.UNHEALTHY, message="XID 79")
        withheld = {"d50": Withheld("unknown", "the claim state cannot be read")}
        still = Still(resource("x", name="example.com/other"), replace(resource(*devices), withheld=withheld))
        read = Table(page.html(still.observer().view()))
        top = read.text.partition("Device Health")[0].partition("DeviceHealth")[0]
        assert "d40 example.com/gpu unhealthy: XID 79" in top
        assert "d50 example.com/gpu withheld: the claim state cannot be read" in top
        assert [one for one in read.references if one.startswith(f"#{RESOURCE}")] == [
            f"#{RESOURCE}/d40",
            f"#{RESOURCE}/d50",
        ]
        assert [row[0] for row in read.rows[3:7]] == ["d40", "d50", "Device", "d0"]
        assert "62 healthy, free devices" in read.text  # the heading of the folded rows

    def test_what_needs_attention_says_since_when_and_who_has_it(self) -> None:
        """An unhealthy device has its holder and the time of its failure; a moving device has the time of its move."""
        ill = Device("a", health=Health.UNHEALTHY, message="XID 79")
        held = {"a": [PodContainer("team", "train", "main")]}
        still = Still(resource(ill, "c", held=held))
        still.providers.append(Bridge())
        observer = still.observer()
        began = time.time()
        observer.note(still.status())
        observer.note(still.status())
        view = observer.view()
        (a, c) = view.resources[0].devices
        assert a.since is not None
        assert began <= a.since <= time.time()
        day = time.strftime("since %Y-%m-%d %H:", time.gmtime(a.since))
        read = Table(page.html(view))
        top = read.text.partition("Needs attention")[2].partition("Device")[0]
        assert day in top
        assert "held by team/train (main)" in top
        assert day in read.rows[1][1]
        assert time.strftime("since %Y-%m-%d", time.gmtime(c.location.since)) in read.rows[2][2]
        said = json.loads(page.status(view))["resources"][0]["devices"]
        assert said[0]["since"] == time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(a.since))
        assert (said[1]["since"], said[1]["stateSince"] is None) == (None, False)
        still.resources = [resource("a", "c", held=held)]
        observer.note(still.status())
        assert observer.view().resources[0].devices[0].since is None

    def test_few_free_devices_are_not_folded(self) -> None:
        """Eight free devices are shown and nine are folded; while holders are unknown none is folded."""
        few, many = resource(*map(str, range(8))), resource(*map(str, range(9)))
        assert "healthy, free" not in Table(page.html(Still(few).observer().view())).text
        still = Still(many)
        assert "9 healthy, free devices" in Table(page.html(still.observer().view())).text
        still.scanned_at = None
        assert "healthy, free" not in Table(page.html(still.observer().view())).text

    def test_what_needs_attention_is_bounded(self) -> None:
        """The list of devices that need attention is limited, with the number of further devices."""
        devices = [Device(f"d{number}", health=Health.UNHEALTHY) for number in range(64)]
        read = Table(page.html(Still(resource(*devices)).observer().view()))
        assert len([one for one in read.references if one.startswith(f"#{RESOURCE}")]) == page.SHOWN_ATTENTION
        assert f"{64 - page.SHOWN_ATTENTION} more" in read.text

    def test_a_page_without_trouble_has_no_such_list(self) -> None:
        """Healthy and moving devices do not need attention."""
        still = Still(resource("a", "c"))
        still.providers.append(Bridge())
        assert "Needs attention" not in Table(page.html(still.observer().view())).text

    def test_share_and_progress_are_shown(self) -> None:
        """Page and /status have the requested number of devices for claims, and how many are for claims or moving."""
        _, observer = busy()
        assert "requested share: 2, 1 of 3 on the DRA side, 1 moving to it" in Table(page.html(observer.view())).text
        (one,) = json.loads(page.status(observer.view()))["resources"]
        assert one["share"] == {"requested": "2", "devices": 3, "claimable": 1, "leaving": 1, "returning": 0}

    def test_events_have_dates(self) -> None:
        """Events on the page have a date."""
        still = Still(resource("a"))
        view = replace(still.observer().view(), events=(Event(1.7e9, RESOURCE, "a vanished", bad=True),))
        assert "2023-11-14 22:13:20" in Table(page.html(view)).text

    @pytest.mark.parametrize(
        ("number", "text"),
        [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (2**40 * 3, "3 TiB"), (2**30 * 80, "80 GiB")],
    )
    def test_bytes_are_readable(self, number: int, text: str) -> None:
        """Bytes are shown with three digits and a binary unit."""
        assert page.with_unit(number) == text

    def test_an_agent_without_anything_has_a_page(self) -> None:
        """Before the first list the page says that the source has not listed."""
        still = Still(resource(listed=False))
        assert "has not listed" in Table(page.html(still.observer().view())).text


def test_status_is_json_for_programs() -> None:
    """/status has the page's data as JSON."""
    still, observer = busy()
    said = json.loads(page.status(observer.view()))
    assert (said["ready"], said["holdersKnown"], said["providers"]) == (True, True, {"bridge": {"slices": 1}})
    (one,) = said["resources"]
    assert (one["resource"], one["replicas"], one["refusals"]) == (RESOURCE, 8, {"unhealthy": 1})
    a, b, c = one["devices"]
    assert len(a["holders"]) == 6
    assert a["load"]["temperature_celsius"] == {"gpu": 61.0, "memory": 70.0}
    assert (b["health"], b["numa"]) == ("unhealthy", [0, 1])
    assert (c["side"], c["state"]) == ("plugin", "to-dra")
    still.resources = []
    assert json.loads(page.status(observer.view()))["unready"] == ["no resource is served"]


def test_page_is_part_of_the_package() -> None:
    """The file page.html lies beside the package's modules."""
    assert (Path(load.__file__).parent / "page.html").is_file()
