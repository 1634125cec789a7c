"""The view of an agent (a snapshot for pages and metrics), composed from the states of its parts."""

from __future__ import annotations

import asyncio
import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from deviceplugin.device import Device, Health
from deviceplugin.inventory import merged
from deviceplugin.kubelet.podresources import ClaimUse, PodContainer
from deviceplugin.kubelet.registration import RegistrationStatistics
from deviceplugin.kubelet.status import ResourceStatus, VendorConnection, Withheld
from deviceplugin.metrics import page, views
from deviceplugin.metrics.report import ClaimedDevice, DeviceLocation, Event, ProviderReport
from deviceplugin.metrics.views import HOLDERS_STALE, UNANSWERED, AgentView, DeviceHolder, events_between
from deviceplugin.naming import device_name
from deviceplugin.register.records import State
from deviceplugin.unwatched import Unwatched, UnwatchedCause, WatchFailure
from tests.metrics.views import RESOURCE, Source, Still, resource

MAIN = PodContainer("team", "train", "main")


def holders(view: AgentView, device: str = "a") -> list[DeviceHolder]:
    return [
        holder for one in view.resources for seen in one.devices if seen.device.id == device for holder in seen.holders
    ]


def with_driver(one: ResourceStatus) -> Still:
    """Return an agent whose resource has the driver gpu.example.com."""
    still, source = Still(one), Source()
    source.driver = "gpu.example.com"
    still.sources = {RESOURCE: source}
    return still


def refused(error: str) -> ResourceStatus:
    """Return a resource that the kubelet has refused to register."""
    return replace(resource("a", registered=False), registration=RegistrationStatistics(error=error))


class Telling:
    """A provider (a component that reports its state to the view) whose report a test sets."""

    name = "bridge"

    def __init__(self, report: Callable[[], ProviderReport]) -> None:
        self.report = report


class TestHolders:
    """Holders of devices."""

    def test_containers_hold_devices(self) -> None:
        """The holders in the kubelet's checkpoint are in the view; a free device has none."""
        view = Still(resource("a", "b", held={"a": [MAIN]})).observer().view()
        assert holders(view) == [DeviceHolder("plugin", "team", "train", "main")]
        assert holders(view, "b") == []
        assert view.holders_known

    def test_a_shared_device_has_many_holders(self) -> None:
        """Each container with replicas of a device is one holder of the device, also with two replicas."""
        other = PodContainer("team", "serve", "main")
        held = {"a::0": [MAIN], "a::1": [other], "a::3": [MAIN]}
        view = Still(resource("a", held=held, replicas=4)).observer().view()
        assert [hold.pod for hold in holders(view)] == ["serve", "train"]

    def test_devices_of_a_source_may_be_shared_differently(self) -> None:
        """Each device in the view has its number of replicas from the inventory."""
        one = resource("a", "b", "c", replicas=4)
        still = Still(replace(one, snapshot=replace(one.snapshot, replicas={"a": 4, "b": 1, "c": 4})))
        assert [seen.replicas for seen in still.observer().view().resources[0].devices] == [4, 1, 4]

    def test_holders_are_unknown_when_the_checkpoint_is_old(self) -> None:
        """Without a scan, or with an old scan, holders are unknown."""
        still = Still(resource("a", held={"a": [MAIN]}))
        observer = still.observer()
        for scanned_at in (None, time.monotonic() - HOLDERS_STALE - 1):
            still.scanned_at = scanned_at
            assert not observer.view().holders_known
            assert holders(observer.view()) == []

    def test_containers_that_use_a_claim_hold_its_devices(self) -> None:
        """Containers with a claim are holders of its devices, found by driver and published name."""
        still = with_driver(resource("a", "GPU_1"))
        still.claims = frozenset(
            {
                ClaimUse("gpu.example.com", "node1", device_name("GPU_1"), "mine", MAIN),
                ClaimUse("other.example.com", "node1", "a", "theirs", MAIN),
                ClaimUse("gpu.example.com", "node1", "gone", "mine", MAIN),
            }
        )
        view = still.observer().view()
        assert holders(view, "GPU_1") == [DeviceHolder("dra", "team", "train", "main", "mine")]
        assert holders(view, "a") == []

    @pytest.mark.parametrize("kept", [{}, {"example.com/big": "", "example.com/small": "small--"}])
    def test_resources_of_one_driver_are_distinguished(self, kept: dict[str, str]) -> None:
        """Two resources of one driver have devices with one id: the published name tells which resource it is."""
        sources = {}
        for name in ("example.com/big", "example.com/small"):
            sources[name] = Source()
            sources[name].resource, sources[name].driver = name, "gpu.example.com"
        still = Still(*(resource("a", name=name) for name in sources))
        still.sources = dict(sources)
        word = kept.get("example.com/small", "small")
        still.claims = frozenset({ClaimUse("gpu.example.com", "n", device_name("a", word), "mine", MAIN)})
        still.providers.append(Telling(lambda: ProviderReport(qualifiers=kept)))
        view = still.observer().view()
        assert [len(one.devices[0].holders) for one in view.resources] == [0, 1]

    def test_the_pods_of_a_claim_are_those_of_the_ledger_where_the_kubelet_does_not_list_it(self) -> None:
        """If PodResources does not list a claim, its pods are those that the DRA bridge reports, by name or UID."""
        still = Still(resource("a"))
        pods = (PodContainer("team", "train", uid="u1"), PodContainer(uid="u2"))
        claims = [ClaimedDevice(RESOURCE, "a", "team", "mine", pods)]
        still.providers.append(Telling(lambda: ProviderReport(claims=claims)))
        assert [one.text for one in holders(still.observer().view())] == [
            "pod u2, claim team/mine",
            "team/train, claim team/mine",
        ]

    def test_a_prepared_claim_that_nobody_uses_holds_its_device(self) -> None:
        """A prepared claim holds its device even without a container; with a container it is listed once."""
        still = with_driver(resource("a", "b"))
        still.claims = frozenset({ClaimUse("gpu.example.com", "node1", "a", "used", MAIN)})
        claims = [ClaimedDevice(RESOURCE, "a", "team", "used"), ClaimedDevice(RESOURCE, "b", "team", "waiting")]
        still.providers.append(Telling(lambda: ProviderReport(claims=claims)))
        view = still.observer().view()
        assert holders(view, "a") == [DeviceHolder("dra", "team", "train", "main", "used")]
        assert holders(view, "b") == [DeviceHolder("dra", "team", "", "", "waiting")]
        assert holders(view, "b")[0].text == "claim team/waiting"

    def test_administrative_access_is_shown_and_holds_nothing(self) -> None:
        """A claim with administrative access is shown as such, and is no holder."""
        still = with_driver(resource("a", "b"))
        still.claims = frozenset({ClaimUse("gpu.example.com", "node1", "a", "watch", MAIN)})
        claims = [ClaimedDevice(RESOURCE, name, "team", "watch", admin=True) for name in "ab"]
        still.providers.append(Telling(lambda: ProviderReport(claims=claims)))
        view = still.observer().view()
        assert holders(view, "a") == holders(view, "b") == []
        assert [[one.text for one in seen.admins] for seen in view.resources[0].devices] == [
            ["team/train (main), claim team/watch"],
            ["claim team/watch"],
        ]
        assert "administrative access, not held: claim team/watch" in page.html(view).decode().replace("<wbr>", "")
        shown = json.loads(page.status(view))["resources"][0]["devices"][1]
        assert (shown["holders"], shown["administrativeAccess"][0]["claim"]) == ([], "watch")

    def test_what_another_plugin_gave_is_shown_at_the_device_that_it_is(self) -> None:
        """A pod that got a device from another plugin, under another id, is shown as a holder of this device."""
        one = resource("a", "b", held={"theirs": [MAIN]})
        still = Still(replace(one, elsewhere={"theirs": frozenset({(RESOURCE, "a")})}))
        view = still.observer().view()
        assert [one.text for one in holders(view, "a")] == ["team/train (main)"]
        assert holders(view, "b") == []

    def test_holders_by_a_former_resource_are_shown(self) -> None:
        """Pods and claims that have devices of a resource that is not served any more are shown with it."""
        still, former = Still(resource("a", "b")), "example.com/former"
        one = resource("a", "b")
        still.resources = [replace(one, withheld={"b": Withheld("excluded", "it is held by another name")})]
        still.unserved = {(former, "x"): frozenset({MAIN})}
        claims = [ClaimedDevice(former, "y", "team", "mine"), ClaimedDevice(RESOURCE, "a", "team", "own")]
        still.providers.append(Telling(lambda: ProviderReport(claims=claims)))
        view = still.observer().view()
        held = {key: [one.text for one in those] for key, those in view.unserved.items()}
        assert held == {(former, "x"): ["team/train (main)"], (former, "y"): ["claim team/mine"]}
        rows = json.loads(page.status(view))["unserved"]
        assert [(row["resource"], row["id"], row["holders"][0]["claim"]) for row in rows] == [
            (former, "x", ""),
            (former, "y", "mine"),
        ]
        text = " ".join(re.sub("<[^>]*>", " ", page.html(view).decode().replace("<wbr>", "")).split())
        assert f"{former} not served any more x team/train (main) y claim team/mine" in text
        assert "b healthy device plugin withheld: it is held by another name withheld" in text
        still.scanned_at = None
        assert still.observer().view().unserved.keys() == {(former, "y")}


class TestReadiness:
    """Reasons for an agent not to be ready."""

    @pytest.mark.parametrize(
        ("resources", "unready"),
        [
            ([resource("a")], ""),
            ([], "no resource is served"),
            ([resource("a", registered=False)], f"{RESOURCE}: not registered.*"),
            ([resource(listed=False, registered=False)], f"{RESOURCE}.* has not listed.*"),
            ([resource(listed=False, source_error="OSError: no bus")], f"{RESOURCE}.* no bus.*"),
            (
                [replace(resource("a"), live=False)],
                f"{RESOURCE}: registered, but the kubelet does not follow its list of devices",
            ),
            (
                [refused("refused (UNKNOWN: no)")],
                rf"{RESOURCE}: not registered with the kubelet: refused \(UNKNOWN: no\)",
            ),
        ],
    )
    def test_what_is_missing_is_said(self, resources: list[ResourceStatus], unready: str) -> None:
        """An agent is ready if all its resources are registered and followed; a reason names its resource."""
        assert re.fullmatch(unready, "; ".join(Still(*resources).observer().view().unready))


class TestProviders:
    """Providers: other components of the process that report to the view."""

    @pytest.fixture
    def released(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
        monkeypatch.setattr(views, "REPORT_TIMEOUT", 0.05)
        event = threading.Event()
        yield event
        event.set()

    def test_their_reports_are_part_of_the_view(self) -> None:
        """The view has the devices' states and the reasons for not being ready that a provider reports."""
        place = DeviceLocation(State.TO_PLUGIN, 5.0, "asked for")
        still = Still(resource("a", "b"))
        still.providers.append(
            Telling(lambda: ProviderReport(unready=["no slices"], locations={(RESOURCE, "a"): place}))
        )
        view = still.observer().view()
        assert [seen.location for seen in view.resources[0].devices] == [place, DeviceLocation()]
        assert view.unready == ("bridge: no slices",)

    def test_one_that_raises_is_said_and_left_out(self, caplog: pytest.LogCaptureFixture) -> None:
        """A provider (such as the DRA bridge) that raises is left out with a reason, and each error is logged once."""
        errors = iter(["one", "one", "two"])

        def report() -> ProviderReport:
            raise RuntimeError(next(errors))

        still = Still(resource("a"))
        still.providers.append(Telling(report))
        observer = still.observer()
        view = observer.view()
        assert view.silent == {"bridge": "failed: RuntimeError: one"}
        assert view.unready == ("bridge failed: RuntimeError: one",)
        assert len(view.resources[0].devices) == 1
        observer.view()
        observer.view()
        assert [record.args for record in caplog.records] == [
            ("bridge", "failed: RuntimeError: one"),
            ("bridge", "failed: RuntimeError: two"),
        ]

    def test_one_that_hangs_costs_its_time_once(self, released: threading.Event) -> None:
        """A provider (component that reports to the view) that hangs is not asked again before it has answered."""
        calls = 0

        def report() -> ProviderReport:
            nonlocal calls
            calls += 1
            if calls == 1:
                released.wait()
            return ProviderReport(status={"fine": True})

        still = Still(resource("a"))
        still.providers.append(Telling(report))
        observer = still.observer()
        assert "did not answer" in observer.view().silent["bridge"]
        assert observer.view().silent == {"bridge": "still hangs"}
        assert calls == 1
        released.set()
        deadline = time.monotonic() + 5
        while "bridge" not in (view := observer.view()).providers:
            assert time.monotonic() < deadline
        assert view.silent == {}


class TestProblems:
    """Problems that leave the agent ready."""

    def test_a_config_file_that_was_refused_is_a_problem_and_an_event(self) -> None:
        """A refused config file is a problem until a valid one is accepted; both are events."""
        still = Still(resource("a"))
        observer = still.observer()
        still.config_error = "the config file is refused: line 3"
        observer.note(still.status())
        view = observer.view()
        assert (view.problems, view.unready) == (("the config file is refused: line 3",), ())
        still.config_error = ""
        observer.note(still.status())
        assert [(event.text, event.bad) for event in observer.view().events] == [
            ("the config file is refused: line 3", True),
            ("the config file is accepted again", False),
        ]
        assert observer.view().problems == ()

    def test_directories_without_file_events_are_a_problem(self) -> None:
        """Directories without file events are a problem, with a path, their number and the cause."""
        still = Still(resource("a"))
        still.unwatched = (Unwatched(WatchFailure(UnwatchedCause.WATCHES), ("/dev", "/sys")),)
        (problem,) = still.observer().view().problems
        assert problem.startswith("cannot watch /dev and 1 more: this user has no inotify watch left (")
        still.unwatched = ()
        assert still.observer().view().problems == ()

    def test_the_node_is_what_a_provider_says(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The node's name is the one that a provider (such as the DRA bridge) reports, else that in NODE_NAME."""
        monkeypatch.setenv("NODE_NAME", "n7")
        still = Still(resource("a"))
        assert still.observer().view().node == "n7"
        still.providers.append(Telling(lambda: ProviderReport(node="n8")))
        assert still.observer().view().node == "n8"


class TestEvents:
    """Events: the differences between two states of a resource."""

    def changes(self, before: ResourceStatus, now: ResourceStatus) -> list[tuple[str, bool]]:
        return [(event.text, event.bad) for event in events_between(before, now, 0.0)]

    def test_nothing_happened_is_nothing_said(self) -> None:
        """Equal states of a resource, and its first state, give no event."""
        one = resource("a", held={"a": [MAIN]})
        assert self.changes(one, one) == []
        assert events_between(None, one, 0.0) == []

    def test_devices_change(self) -> None:
        """Devices that appear, vanish, fail and recover are events."""
        before = resource("a", "b", "c")
        ill = Device("a", health=Health.UNHEALTHY, message="XID 79")
        now = replace(before, snapshot=merged(before.snapshot, [ill, Device("b"), Device("d")]))
        assert self.changes(before, now) == [
            ("a is unhealthy: XID 79", True),
            ("d appeared", False),
            ("c vanished", True),
        ]
        assert self.changes(now, before) == [
            ("a recovered", False),
            ("c appeared again", False),
            ("d vanished", True),
        ]

    def test_a_device_that_is_forgotten_has_vanished_before(self) -> None:
        """A device that vanishes is one event, also if it was forgotten at once."""
        there = resource("a", "b")
        gone = replace(there, snapshot=merged(there.snapshot, [Device("b")]))
        without = resource("b")
        assert self.changes(there, without) == [("a vanished", True)]
        assert self.changes(there, gone) == [("a vanished", True)]
        assert self.changes(gone, without) == [("a is removed: it is unlisted and has no holder", False)]

    def test_the_first_list_is_no_event(self) -> None:
        """Devices of the first list are no events, except an unhealthy one."""
        assert self.changes(resource(listed=False), resource("a")) == []
        ill = resource("a", Device("b", health=Health.UNHEALTHY, message="XID 79"))
        assert self.changes(resource(listed=False), ill) == [("b is unhealthy: XID 79", True)]

    def test_an_adopted_plugin_that_is_not_there_is_a_problem(self) -> None:
        """If an adopted vendor plugin is not connected, the agent shows a problem and is ready nevertheless."""
        one = resource(listed=False, registered=False, vendor=VendorConnection(connected=False, since=60.0))
        view = Still(one).observer().view()
        assert view.unready == ()
        assert view.problems == (
            f"{RESOURCE}: the vendor's plugin is not registered with the agent since 1970-01-01T00:01:00Z",
        )

    def test_an_adopted_plugin_that_does_not_answer_is_a_problem(self) -> None:
        """An adopted plugin with a call unanswered for `UNANSWERED` seconds is a problem; a shorter wait is none."""
        hangs, works = (
            VendorConnection(connected=True, since=1.0, unanswered=at)
            for at in (time.time() - UNANSWERED, time.time() - UNANSWERED / 2)
        )
        (problem,) = Still(resource("a", vendor=hangs)).observer().view().problems
        assert problem.startswith(f"{RESOURCE}: the vendor's plugin has not answered a call since ")
        assert Still(resource("a", vendor=works)).observer().view().problems == ()

    def test_a_kubelet_that_does_not_answer_is_a_problem(self) -> None:
        """A kubelet that does not answer is a problem, and the agent is ready."""
        still = Still(resource("a"))
        still.kubelet_answers, still.kubelet_silent = False, 60.0
        view = still.observer().view()
        assert view.unready == ()
        assert view.problems == (
            "the kubelet has not answered since 1970-01-01T00:01:00Z; the node starts and ends no pods",
        )

    def test_an_adopted_plugin_that_goes_is_said(self) -> None:
        """An adopted plugin that disconnects is a bad event; one that connects is not bad."""
        here, gone = (resource("a", vendor=VendorConnection(connected=one, since=1.0)) for one in (True, False))
        assert self.changes(here, gone) == [("the vendor's plugin has disconnected", True)]
        assert self.changes(gone, here) == [("the vendor's plugin has connected", False)]

    def test_registration_and_restarts_are_said(self) -> None:
        """The loss of the registration is a bad event; registration and kubelet restarts are not bad."""
        on, off = resource("a"), resource("a", registered=False)
        assert self.changes(on, off) == [("not registered with the kubelet any more", True)]
        assert self.changes(off, on) == [("registered with the kubelet", False)]
        later = replace(on, registration=replace(on.registration, kubelet_restarts=2))
        assert self.changes(on, later) == [("the kubelet restarted (2 times so far)", False)]

    def test_trouble_is_said(self) -> None:
        """A failed source and refused allocations are bad events; a source that works again is not bad."""
        before, now = resource("a"), resource("a", source_error="OSError: no", refusals={"unhealthy": 2})
        assert self.changes(before, now) == [
            ("its source failed: OSError: no", True),
            ("2 allocations refused: unhealthy", True),
        ]
        assert self.changes(replace(before, source_error="x"), before) == [("its source works again", False)]

    def test_holders_come_and_go(self) -> None:
        """A device that gets a holder and a device that comes free are events."""
        free, held = resource("a"), resource("a", held={"a": [MAIN]})
        assert self.changes(free, held) == [("a went to team/train (main)", False)]
        assert self.changes(held, free) == [("a came free", False)]

    def test_events_are_kept_but_not_for_ever(self) -> None:
        """The last 100 events are kept."""
        still = Still(resource("a"))
        observer = still.observer()
        for count in range(120):
            still.resources = [resource("a", refusals={"unhealthy": count})]
            observer.note(still.status())
        events = observer.view().events
        assert len(events) == 100
        still.resources = []
        observer.note(still.status())

    def test_what_providers_tell_is_among_the_events(self) -> None:
        """Events that a provider (such as the DRA bridge) reports are sorted by time with those of the resources."""

        class Moving(Telling):
            def events(self) -> list[Event]:
                return [Event(5.0, RESOURCE, "moved to the DRA side: a")]

        still = Still(resource("a"))
        still.providers.append(Moving(ProviderReport))
        observer = still.observer()
        observer.note(still.status())
        still.resources = [resource("a", refusals={"unhealthy": 1})]
        observer.note(still.status())
        assert [event.text for event in observer.view().events] == [
            "moved to the DRA side: a",
            "moved to the DRA side: a",
            "1 allocations refused: unhealthy",
        ]

    async def test_an_error_does_not_end_the_watch(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        """An exception while events are recorded is logged, and the next status is recorded."""
        still = Still(resource("a"))
        observer = still.observer()
        monkeypatch.setattr(observer, "TICK", 0.001)
        seen = asyncio.Event()
        looks = 0

        def note(status: object) -> None:
            nonlocal looks
            looks += 1
            if looks == 1:
                raise ValueError("no")
            seen.set()

        monkeypatch.setattr(observer, "note", note)
        task = asyncio.create_task(observer.watch())
        async with asyncio.timeout(5):
            await seen.wait()
        task.cancel()
        assert "could not be recorded" in caplog.text


async def test_a_source_that_was_replaced_is_measured_anew() -> None:
    """After a reload the new source is measured in place of the old one."""
    still = Still(resource("a"))
    first, second = Source(), Source()
    still.sources = {RESOURCE: first}
    observer = still.observer()
    ((gauge, devices),) = observer.due()
    assert [device.id for device in devices] == ["a"]
    assert observer.due()[0][0] is gauge
    still.sources = {RESOURCE: second}
    assert observer.due()[0][0].source is second
    still.sources = {RESOURCE: type("Plain", (Source,), {"hooks": frozenset()})()}
    assert observer.due() == []
