"""The client of the API server: requests, errors, list-and-watch."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from deviceplugin.backoff import Backoff
from dra_bridge.kube import (
    EVENTS,
    NODES,
    RESOURCE_CLAIMS,
    RESOURCE_SLICES,
    AccessError,
    ApiError,
    Changed,
    Cluster,
    ConflictError,
    ForbiddenError,
    InvalidError,
    Listed,
    NotFoundError,
    UnavailableError,
    UnsupportedError,
    VersionChangedError,
    auth,
)
from dra_bridge.kube.api import GoneError, Kind, error_of
from dra_bridge.testing.apiserver import FakeApiServer, Fault
from tests.dra.kube.conftest import connected
from tests.dra.objects import node_body
from tests.kubeconfigs import written

# --- requests -------------------------------------------------------------------------------------


async def test_verbs(cluster: Cluster) -> None:
    """Objects are created, read, listed, patched, replaced and deleted."""
    made = await cluster.create(NODES, {"metadata": {"name": "a", "labels": {"x": "1"}}})
    assert made["metadata"]["uid"]
    assert await cluster.get(NODES, "a") == made
    patched = await cluster.patch(NODES, "a", {"metadata": {"labels": {"x": None, "y": "2"}}})
    assert patched["metadata"]["labels"] == {"y": "2"}
    patched["metadata"]["labels"] = {"z": "3"}
    replaced = await cluster.replace(NODES, patched)
    listing = await cluster.list(NODES, field_selector="metadata.name=a")
    assert [one["metadata"]["labels"] for one in listing.items] == [{"z": "3"}]
    assert listing.resource_version == replaced["metadata"]["resourceVersion"]
    await cluster.delete(NODES, "a", uid=made["metadata"]["uid"])
    with pytest.raises(NotFoundError):
        await cluster.get(NODES, "a")


async def test_status_is_patched_alone(server: FakeApiServer, cluster: Cluster) -> None:
    """A patch of the status leaves the rest of a claim as it is."""
    claim = {
        "apiVersion": "v1",
        "kind": "ResourceClaim",
        "metadata": {"name": "c", "namespace": "ns"},
        "spec": {"a": 1},
    }
    server.create(claim)
    patch = {"spec": {"a": 2}, "status": {"devices": [{"driver": "d"}]}}
    done = await cluster.patch(RESOURCE_CLAIMS, "c", patch, "ns", subresource="status")
    assert done["spec"] == {"a": 1}
    assert (await cluster.get(RESOURCE_CLAIMS, "c", "ns"))["status"] == {"devices": [{"driver": "d"}]}


async def test_conflicts(server: FakeApiServer, cluster: Cluster) -> None:
    """Creating an existing object, replacing a changed one and deleting with a wrong UID raise ConflictError."""
    made = server.create(node_body("a"))
    with pytest.raises(ConflictError, match="409 AlreadyExists"):
        await cluster.create(NODES, node_body("a"))
    await cluster.patch(NODES, "a", {"metadata": {"labels": {"x": "1"}}})
    with pytest.raises(ConflictError):
        await cluster.replace(NODES, made)
    with pytest.raises(ConflictError):
        await cluster.delete(NODES, "a", uid="another")


async def test_invalid_names_the_field(server: FakeApiServer, cluster: Cluster) -> None:
    """The error of an invalid object has the server's field names."""
    body = {
        "metadata": {"name": "s"},
        "spec": {"driver": "d", "nodeName": "n", "pool": {"name": "n", "generation": 1, "resourceSliceCount": 0}},
    }
    with pytest.raises(InvalidError) as caught:
        await cluster.create(RESOURCE_SLICES, body)
    assert [cause.field for cause in caught.value.causes] == ["spec.pool.resourceSliceCount"]


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (400, InvalidError),
        (403, ForbiddenError),
        (404, UnavailableError),
        (409, ConflictError),
        (410, GoneError),
        (422, InvalidError),
        (429, UnavailableError),
        (500, UnavailableError),
        (503, UnavailableError),
        (418, ApiError),
    ],
)
def test_errors(code: int, kind: type[ApiError]) -> None:
    """Each status code has its error class with the server's message, also if the body is no Status object."""
    status = {"kind": "Status", "code": code, "reason": "R", "message": "said", "details": {"retryAfterSeconds": 3}}
    error = error_of(code, json.dumps(status).encode())
    assert type(error) is kind
    assert (error.code, error.reason, error.message, error.retry_after) == (code, "R", "said", 3.0)
    assert type(error_of(code, b"<html>proxy</html>", "7")) is kind
    assert error_of(code, b"<html>proxy</html>", "7").retry_after == 7.0


NAMED = {"name": "c", "kind": "resourceclaims", "group": "resource.k8s.io"}


@pytest.mark.parametrize("details", [NAMED, {"name": "c"}, {**NAMED, "kind": "ResourceClaim"}])
def test_a_missing_object_is_named(details: dict[str, str]) -> None:
    """A 404 with the name of the requested object means that the object does not exist."""
    status = {"kind": "Status", "reason": "NotFound", "details": details}
    error = error_of(404, json.dumps(status).encode(), kind=RESOURCE_CLAIMS, name="c")
    assert type(error) is NotFoundError


@pytest.mark.parametrize(
    "body",
    [
        "<html>no such host</html>",
        "404 page not found\n",
        "[]",
        json.dumps({"kind": "Error", "reason": "NotFound", "details": NAMED}),
        "[" * 100_000,
        json.dumps({"kind": "Status", "reason": "NotFound"}),
        json.dumps({"kind": "Status", "reason": "NotFound", "details": [NAMED]}),
        json.dumps({"kind": "Status", "reason": "", "details": NAMED}),
        json.dumps({"kind": "Status", "reason": "NotFound", "details": {**NAMED, "name": "d"}}),
        json.dumps({"kind": "Status", "reason": "NotFound", "details": {**NAMED, "kind": "namespaces"}}),
        json.dumps({"kind": "Status", "reason": "NotFound", "details": {**NAMED, "group": "example.com"}}),
    ],
)
async def test_a_404_that_does_not_name_the_object_is_no_answer(
    server: FakeApiServer, cluster: Cluster, body: str
) -> None:
    """A 404 of a proxy, or about another object, does not mean that the requested object does not exist."""
    server.create({"apiVersion": "v1", "kind": "ResourceClaim", "metadata": {"name": "c", "namespace": "ns"}})
    await cluster.version()
    for call in (
        lambda: cluster.get(RESOURCE_CLAIMS, "c", "ns"),
        lambda: cluster.delete(RESOURCE_CLAIMS, "c", "ns"),
        lambda: cluster.patch(RESOURCE_CLAIMS, "c", {}, "ns", subresource="status"),
        lambda: cluster.list(RESOURCE_CLAIMS),
    ):
        server.fail(lambda request: "resourceclaims" in request.path, Fault(code=404, body=body), times=2)
        with pytest.raises(UnavailableError) as caught:
            await call()
        assert caught.value.code == 404
        server.heal()
    await cluster.get(RESOURCE_CLAIMS, "c", "ns")


@pytest.mark.parametrize(
    "body",
    [
        "{}",
        "[]",
        "null",
        "[" * 100_000,
        '{"kind": "NodeList", "items": []}',
        '{"kind": "Node", "metadata": {"name": "b"}}',
    ],
)
async def test_an_answer_to_another_question_is_no_answer(server: FakeApiServer, cluster: Cluster, body: str) -> None:
    """A 200 with an object of another kind or name than requested is an error, for reads, lists and writes."""
    server.create(node_body("a"))
    for call in (
        lambda: cluster.get(NODES, "a"),
        lambda: cluster.list(NODES),
        lambda: cluster.replace(NODES, node_body("a")),
        lambda: cluster.delete(NODES, "a"),
    ):
        server.fail(lambda request: True, Fault(code=200, body=body))
        with pytest.raises(UnavailableError):
            await call()
        server.heal()


async def test_a_proxy_that_does_not_know_the_group_is_no_server_without_dra(
    server: FakeApiServer, cluster: Cluster
) -> None:
    """A 404 for /apis does not mean that DRA is off; only a list of API groups without resource.k8s.io does."""
    server.fail(lambda request: request.path.startswith("/apis"), Fault(code=404, body="404 page not found"), 2)
    with pytest.raises(UnavailableError):
        await cluster.version()
    server.heal()
    assert await cluster.version() == "v1"


async def test_deadline(server: FakeApiServer) -> None:
    """A server that takes a request and does not answer counts as unavailable after the deadline."""
    server.create(node_body("a"))
    async with connected(server, deadline=0.5) as cluster:
        server.fail(lambda request: True, Fault(delay=30.0), times=9)
        with pytest.raises(UnavailableError, match="no answer in time"):
            await cluster.get(NODES, "a")
        server.heal()
        assert cluster.statistics.lost_since is not None
        await cluster.get(NODES, "a")
        assert cluster.statistics.lost_since is None


async def test_credentials_that_are_refused(server: FakeApiServer, cluster: Cluster) -> None:
    """After a 401 the statistics have the refusal until the server accepts the credentials; a 403 is acceptance too."""
    server.create(node_body("n1"))
    for _ in range(2):
        server.fail(lambda request: True, Fault(code=401, message="invalid bearer token"))
        with pytest.raises(ApiError):
            await cluster.get(NODES, "n1")
    refused = cluster.statistics.refused
    assert refused is not None
    assert (refused.code, refused.outage) == (401, False)
    assert "invalid bearer token" in refused.text
    server.fail(lambda request: True, Fault(code=500))
    with pytest.raises(UnavailableError):
        await cluster.get(NODES, "n1")
    assert cluster.statistics.refused == refused, "what does not answer properly says nothing about them"
    server.fail(lambda request: True, Fault(code=403))
    with pytest.raises(ForbiddenError):
        await cluster.get(NODES, "n1")
    assert cluster.statistics.refused is None


async def test_a_closed_connection_is_no_outage(server: FakeApiServer, cluster: Cluster) -> None:
    """A read on a kept connection that the server has closed is repeated on a new connection."""
    server.create(node_body("a"))
    server.fail(lambda request: True, Fault())
    await cluster.get(NODES, "a")
    assert cluster.statistics.failures == 0


async def test_events(cluster: Cluster) -> None:
    """An event refers to its object, is in the object's namespace, and is cut to the API's limit of 1024 bytes."""
    await cluster.event(RESOURCE_CLAIMS, {"name": "c", "namespace": "ns"}, "Refused", "é" * 2000, "n1")
    (event,) = (await cluster.list(EVENTS, "ns")).items
    about = {"apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim", "name": "c", "namespace": "ns", "uid": ""}
    assert event["involvedObject"] == about
    assert len(event["message"].encode()) == 1024
    assert (event["type"], event["source"]["host"]) == ("Warning", "n1")


# --- versions -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("served", "chosen"),
    [(("v1", "v1beta2", "v1beta1"), "v1"), (("v1beta1", "v1beta2"), "v1beta2"), (("v1alpha3", "v1beta1"), "v1beta1")],
)
async def test_version(served: tuple[str, ...], chosen: str) -> None:
    """Of the API versions that the server serves, the client chooses the best that it knows, once."""
    with FakeApiServer(versions=served) as server:
        async with connected(server) as cluster:
            assert await cluster.version() == chosen
            requests = len(server.log)
            assert await cluster.version() == chosen
            assert len(server.log) == requests
            assert await cluster.api_version(RESOURCE_SLICES) == f"resource.k8s.io/{chosen}"


async def test_no_dra() -> None:
    """Without resource.k8s.io the client raises UnsupportedError, and asks the server again at the next call."""
    with FakeApiServer(versions=()) as server:
        async with connected(server) as cluster:
            with pytest.raises(UnsupportedError, match="is off"):
                await cluster.list(RESOURCE_SLICES)
            server.versions = ("v1",)
            assert (await cluster.list(RESOURCE_SLICES)).items == []


async def test_a_version_that_went_away() -> None:
    """When the server drops the chosen API version, reads use another one; a create with the old version is refused."""
    with FakeApiServer(versions=("v1beta1",)) as server:
        async with connected(server) as cluster:
            await cluster.list(RESOURCE_SLICES)
            server.versions = ("v1",)
            assert (await cluster.list(RESOURCE_SLICES)).items == []
            with pytest.raises(VersionChangedError):
                await cluster.create(RESOURCE_SLICES, {"apiVersion": "resource.k8s.io/v1beta1", "metadata": {}})


async def test_a_missing_object_is_no_missing_version(server: FakeApiServer, cluster: Cluster) -> None:
    """A read of a missing claim costs one request, without a new choice of the API version."""
    await cluster.version()
    server.forget_log()
    with pytest.raises(NotFoundError):
        await cluster.get(RESOURCE_CLAIMS, "c", "ns")
    assert len(server.log) == 1


# --- list-and-watch -------------------------------------------------------------------------------


@asynccontextmanager
async def following(
    server: FakeApiServer, kind: Kind = NODES, field_selector: str = "", **options: Any
) -> AsyncIterator[tuple[Cluster, AsyncGenerator[Listed | Changed, None]]]:
    """Connect a client, and list and watch objects of a kind."""
    async with (
        connected(server, **options) as cluster,
        aclosing(cluster.follow(kind, field_selector=field_selector)) as events,
    ):
        yield cluster, events


def name_of(event: object) -> tuple[str, str]:
    assert isinstance(event, Changed), event
    return event.type, event.object["metadata"]["name"]


async def test_follow(server: FakeApiServer) -> None:
    """A watch with a field selector first yields the list, then each change of the selected object."""
    server.create(node_body("a"))
    async with following(server, field_selector="metadata.name=a") as (_, events):
        first = await anext(events)
        assert isinstance(first, Listed)
        assert [one["metadata"]["name"] for one in first.items] == ["a"]
        server.create(node_body("b"))
        server.replace({**node_body("a"), "x": 1})
        assert name_of(await anext(events)) == ("MODIFIED", "a")
        server.delete("nodes", "a")
        assert name_of(await anext(events)) == ("DELETED", "a")


async def watched(server: FakeApiServer, count: int = 1) -> None:
    """Wait until this number of watches has been opened."""
    await asyncio.to_thread(server.wait_for, lambda it: sum(entry.watch for entry in it.log) >= count)


def lists(server: FakeApiServer, path: str = "/nodes") -> int:
    return sum(not entry.watch for entry in server.requests("GET", path))


def names(event: object) -> list[str]:
    assert isinstance(event, Listed), event
    return [one["metadata"]["name"] for one in event.items]


async def test_a_lost_connection_is_listed_again(server: FakeApiServer) -> None:
    """After an outage the client lists again; the list shows the changes during the outage."""
    async with following(server) as (_, events):
        assert names(await anext(events)) == []
        server.create(node_body("a"))
        assert name_of(await anext(events)) == ("ADDED", "a")
        with server.outage():
            server.create(node_body("b"))
            server.delete("nodes", "a")
        assert names(await anext(events)) == ["b"]


async def test_a_watch_that_ends_as_asked_is_resumed(server: FakeApiServer) -> None:
    """A watch that the server ends after the requested time is resumed without a list, and misses no change."""
    async with following(server, watch_seconds=(1.0, 1.0)) as (_, events):
        assert names(await anext(events)) == []
        coming = asyncio.ensure_future(anext(events))
        await watched(server, 2)
        server.create(node_body("a"))
        assert name_of(await coming) == ("ADDED", "a")
        assert lists(server) == 1


async def test_restored_storage_is_listed_again(server: FakeApiServer) -> None:
    """After a restore of an older snapshot, the client lists at once and yields the server's objects."""
    server.create(node_body("a"))
    snapshot = server.snapshot()
    async with following(server) as (_, events):
        assert names(await anext(events)) == ["a"]
        server.delete("nodes", "a")
        assert name_of(await anext(events)) == ("DELETED", "a")
        server.restore(snapshot)
        assert names(await anext(events)) == ["a"]
        server.create(node_body("b"))
        assert name_of(await anext(events)) == ("ADDED", "b")


async def test_a_silent_watch_is_listed_again(server: FakeApiServer) -> None:
    """A watch that brings no events and bookmarks for the silence time is listed again; this is not a failure."""
    snapshot = server.snapshot()
    server.create(node_body("a"))
    async with following(server, silence=(0.2, 0.3)) as (cluster, events):
        assert names(await anext(events)) == ["a"]
        coming = asyncio.ensure_future(anext(events))
        await watched(server)
        server.restore(snapshot, end_streams=False)
        server.create(node_body("b"))  # at the resourceVersion of the deleted node: the watch does not report it
        found = names(await coming)
        while found != ["b"]:
            found = names(await anext(events))
        assert cluster.statistics.failures == 0


async def test_what_went_wrong_once_cuts_no_watch(server: FakeApiServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """After an outage, and after an unanswered request, other requests do not end the running watch."""
    monkeypatch.setattr(auth, "RENEW", 0.0)

    def change(number: int) -> None:
        found = server.get("nodes", "a")
        found["metadata"]["labels"] = {"number": str(number)}
        server.replace(found)

    async with following(server) as (cluster, events):
        assert isinstance(await anext(events), Listed)
        server.create(node_body("a"))
        await anext(events)
        with server.outage():
            pass
        assert isinstance(await anext(events), Listed)
        change(-1)
        assert name_of(await anext(events)) == ("MODIFIED", "a")
        before = replace(cluster.statistics)
        for number in range(5):
            await cluster.get(NODES, "a")
            change(number)
            assert name_of(await anext(events)) == ("MODIFIED", "a")
        assert cluster.statistics.watches == before.watches
        assert cluster.statistics.failures == before.failures

        server.fail(lambda request: request.method == "PATCH", Fault())
        with pytest.raises(UnavailableError):
            await cluster.patch(NODES, "b", {})
        assert cluster.statistics.failures == before.failures + 1
        for number in range(5):  # the first of these requests reads the configuration again
            await cluster.get(NODES, "a")
            change(number + 5)
            assert name_of(await anext(events)) == ("MODIFIED", "a")
        assert cluster.statistics.watches == before.watches
        assert cluster.statistics.failures == before.failures + 1


async def test_bookmarks_move_the_position(server: FakeApiServer) -> None:
    """A watch that got only bookmarks resumes from them, although the earlier history is compacted."""
    async with following(server, field_selector="metadata.name=a", watch_seconds=(1.0, 1.0)) as (_, events):
        assert names(await anext(events)) == []
        coming = asyncio.ensure_future(anext(events))
        await watched(server)
        server.create(node_body("b"))
        server.bookmark()
        server.compact()
        await watched(server, 2)
        server.create(node_body("a"))
        assert name_of(await coming) == ("ADDED", "a")
        assert lists(server) == 1


async def test_a_server_that_asks_for_time_gets_it(server: FakeApiServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The client waits for Retry-After and a small random time, limited to the longest wait of its backoff."""
    waits: list[float] = []

    async def note(seconds: float) -> None:
        waits.append(seconds)

    async with connected(server, backoff=Backoff(0.01, 20.0)) as cluster:
        monkeypatch.setattr(cluster, "pause", note)
        server.fail(lambda request: True, Fault(code=429, retry_after=7))
        server.fail(lambda request: True, Fault(code=503, retry_after=600))
        async with aclosing(cluster.follow(NODES)) as events:
            assert isinstance(await anext(events), Listed)
    asked, longest = waits
    assert 7.0 < asked <= 7.01
    assert 20.0 < longest <= 20.02


async def test_watches_that_break_off_begin_again_at_one_random_moment(
    server: FakeApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a break the watches of one client list again at the same time, those of another client at another time."""
    moments: dict[Cluster, list[float]] = {}

    async def note(cluster: Cluster, seconds: float) -> None:
        moments.setdefault(cluster, []).append(time.monotonic() + seconds)

    monkeypatch.setattr(Cluster, "pause", note)
    far = Backoff(0.01, 1e6)
    async with connected(server, backoff=far) as one, connected(server, backoff=far) as other:
        watched = [(of, kind) for of in (one, other) for kind in (NODES, RESOURCE_SLICES)]
        async with contextlib.AsyncExitStack() as stack:
            follows = [await stack.enter_async_context(aclosing(of.follow(kind))) for of, kind in watched]
            for events in follows:
                assert isinstance(await anext(events), Listed)
            again = [asyncio.create_task(anext(events)) for events in follows]
            await asyncio.to_thread(server.wait_for, lambda it: sum(entry.watch for entry in it.log) == 4)
            server.break_watches()
            for task in again:
                assert isinstance(await task, Listed)
    # A list over a connection that the server has just closed fails: its watch waits again for the same time.
    assert all(len(of) >= 2 and max(of) - min(of) < 10.0 for of in moments.values())
    assert abs(moments[one][0] - moments[other][0]) > 10.0


async def test_gone_is_listed_again(server: FakeApiServer) -> None:
    """After a 410 (the watch's resourceVersion is too old) the client lists again."""
    async with following(server, watch_seconds=(1.0, 1.0)) as (_, events):
        assert isinstance(await anext(events), Listed)
        coming = asyncio.ensure_future(anext(events))
        await watched(server)
        server.fail(lambda request: request.watch, Fault(code=410))
        server.create(node_body("a"))
        assert name_of(await coming) == ("ADDED", "a")
        coming = asyncio.ensure_future(anext(events))
        await watched(server, 2)
        assert names(await coming) == ["a"]


async def test_another_version_is_listed_again() -> None:
    """After an upgrade of the server, the client lists again in the new version."""
    with FakeApiServer(versions=("v1beta1",)) as server:
        async with following(server, RESOURCE_SLICES) as (_, events):
            assert isinstance(await anext(events), Listed)
            assert lists(server, "/resource.k8s.io/v1beta1/resourceslices") == 1
            coming = asyncio.ensure_future(anext(events))
            await asyncio.to_thread(server.wait_for, lambda it: any(entry.watch for entry in it.log))
            with server.outage():
                server.versions = ("v1", "v1beta1")
            assert isinstance(await coming, Listed)
            assert lists(server, "/resource.k8s.io/v1/resourceslices") == 1


@pytest.mark.parametrize(
    "line", ["[" * 100_000, "[]", '{"type": 1}', '{"type": "ADDED"}', '{"type": "ERROR", "object": {"kind": "Pod"}}']
)
async def test_a_watch_that_makes_no_sense_is_listed_again(server: FakeApiServer, line: str) -> None:
    """A line of a watch that is no valid event counts as one failure; the client lists again."""
    async with following(server) as (cluster, events):
        assert names(await anext(events)) == []
        server.fail(lambda request: request.watch, Fault(code=200, body=line + "\n"))
        assert names(await anext(events)) == []
        assert cluster.statistics.failures == 1


async def test_failures_are_waited_out(
    server: FakeApiServer, cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    """Refusals, server errors and lost answers are retried; a repeated refusal is logged once."""
    server.fail(lambda request: True, Fault(code=403, message="no"), times=5)
    server.fail(lambda request: True, Fault(code=503), times=5)
    server.fail(lambda request: True, Fault(), times=5)
    async with aclosing(cluster.follow(NODES)) as events:
        assert isinstance(await anext(events), Listed)
    assert sum("no; trying again" in record.getMessage() for record in caplog.records) == 1


async def test_a_watch_that_ends_at_once_is_not_reopened_at_once(server: FakeApiServer) -> None:
    """A server that ends each watch at once gets the next watch after a growing wait."""
    draws: list[float] = []

    def draw(low: float, high: float) -> float:
        draws.append(high)
        return low / 100

    async with connected(server, backoff=Backoff(0.1, 1.0, draw=draw)) as cluster:
        server.create(node_body("a"))

        async def follow() -> None:
            async with aclosing(cluster.follow(NODES)) as events:
                async for _ in events:
                    pass

        task = asyncio.create_task(follow())
        for count in range(1, 7):
            await asyncio.to_thread(
                server.wait_for,
                lambda it, count=count: sum(entry.watch for entry in it.log) >= count,  # type: ignore[misc]
            )
            server.break_watches()
        task.cancel()
        await asyncio.wait([task])
    assert draws[:5] == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.0])


def test_backoff() -> None:
    """The backoff's waits double up to a maximum, are shortened at random by up to half, and restart on success."""
    high = Backoff(0.25, 30.0, draw=lambda _, high: high)
    assert [high.next() for _ in range(9)] == [0.25, 0.5, 1, 2, 4, 8, 16, 30, 30]
    high.reset()
    assert high.next() == 0.25
    assert high.longest() == 30
    usual = Backoff()
    assert all(usual.next() <= 30 for _ in range(2000))
    waits = {usual.longest() for _ in range(100)}
    assert len(waits) > 1
    assert all(15 <= wait <= 30 for wait in waits)


async def test_a_long_outage_is_not_hammered() -> None:
    """During an outage the waits between requests grow; an answer to another request ends the wait."""
    draws: list[float] = []
    rare = asyncio.Event()

    def draw(low: float, high: float) -> float:
        draws.append(high)
        if high > 1:
            rare.set()
        return high

    with FakeApiServer() as server:
        backoff = Backoff(0.01, 20.0, draw=draw)
        async with following(server, backoff=backoff) as (cluster, events):
            assert isinstance(await anext(events), Listed)
            server.stop()
            coming = asyncio.ensure_future(anext(events))
            async with asyncio.timeout(30):
                await rare.wait()
            assert not coming.done()
            assert draws == pytest.approx([0.01 * 2**tries for tries in range(8)])
            assert cluster.statistics.failures <= len(draws) + 1  # the end of the watch, and one failure for each try
            server.start()
            server.create(node_body("a"))
            await cluster.get(NODES, "a")  # another request is answered: the wait ends
            assert names(await coming) == ["a"]


# --- access ---------------------------------------------------------------------------------------


async def test_no_configuration(tmp_path: Path) -> None:
    """Without a usable configuration, the error names the missing kubeconfig."""
    async with Cluster.from_environment(tmp_path / "missing") as cluster:
        with pytest.raises(AccessError, match="missing"):
            await cluster.get(NODES, "a")


async def test_a_token_is_read_again(server: FakeApiServer, tmp_path: Path) -> None:
    """After a 401 the token file is read again."""
    token = tmp_path / "token"
    token.write_text("old")
    file = written(tmp_path / "config", server.url, {"tokenFile": str(token)})
    server.create(node_body("a"))
    async with Cluster.from_environment(file) as cluster:
        await cluster.get(NODES, "a")
        server.fail(lambda request: True, Fault(code=401))
        token.write_text("new")
        await cluster.get(NODES, "a")


@pytest.mark.usefixtures("read_here")
async def test_another_kubeconfig_is_read_after_an_outage(
    server: FakeApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a failed connection the kubeconfig is read again: address, CA or credentials may have changed."""
    monkeypatch.setattr(auth, "RENEW", 0.0)
    file = written(tmp_path / "config", "http://127.0.0.1:1", {"token": "t"})
    server.create(node_body("a"))
    async with Cluster.from_environment(file) as cluster:
        with pytest.raises(UnavailableError):
            await cluster.get(NODES, "a")
        written(file, server.url, {"token": "t"})
        await cluster.get(NODES, "a")


MEMORY = """
import asyncio, sys
def rss():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmRSS")) / 1024
import grpc.aio, watchdog.observers, prometheus_client, msgspec, yaml, sqlite3
before = rss()
from dra_bridge.kube import Cluster, NODES
import dra_bridge.slices.publisher
async def main():
    async with Cluster.from_server(sys.argv[1]) as cluster:
        for _ in range(20):
            await cluster.list(NODES)
asyncio.run(main())
print(rss() - before)
"""


def test_memory(server: FakeApiServer) -> None:
    """Client and publisher take at most 14 MB of memory beyond gRPC and the other libraries of an agent."""
    done = subprocess.run(
        [sys.executable, "-c", MEMORY, server.url], capture_output=True, text=True, check=True, timeout=60
    )
    assert float(done.stdout) <= 14.0
