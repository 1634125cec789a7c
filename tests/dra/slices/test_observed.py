"""The publisher's report about slices shows what the API server has now."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import pytest

from dra_bridge.kube import Cluster, Failing, WatchState
from dra_bridge.kube.liveness import LOST
from dra_bridge.slices.observed import Comparison, ObservedPool
from dra_bridge.slices.publisher import Publisher
from dra_bridge.testing.apiserver import FakeApiServer, Fault, LoggedRequest
from tests.dra.objects import node_body
from tests.dra.slices.test_publisher import DRIVER, NODE, many, pool, publishing
from tests.waits import until

FOR_EVER = 10**6


def writes(request: LoggedRequest) -> bool:
    return request.method != "GET"


def now(publisher: Publisher) -> ObservedPool:
    return publisher.observed(DRIVER, time.monotonic())


def later(publisher: Publisher) -> tuple[ObservedPool, float]:
    """Return the publisher's view of the pool at a time LOST seconds from now, and that time.

    By then a failure of now counts as a long one.
    """
    at = time.monotonic() + LOST
    return publisher.observed(DRIVER, at), at


def refuse(server: FakeApiServer, code: int, which: Callable[[LoggedRequest], bool] = writes) -> None:
    server.fail(which, Fault(code=code, message=f"no {code} today"), FOR_EVER)


async def test_what_was_published_is_known(server: FakeApiServer) -> None:
    """The publisher's report has slices, devices and generation as in the API server; before the first list, none."""
    idle = Publisher(Cluster.from_server(server.url), NODE)
    idle.want(pool(*many(3)))
    assert (now(idle).published, now(idle).known) == (False, None)
    assert now(idle).unready(time.monotonic())
    async with publishing(server, pool(*many(3))) as publisher:
        assert now(publisher).published
        assert now(publisher).known == Comparison(1, 1, frozenset({"gpu0", "gpu1", "gpu2"}), 0)
        assert now(publisher).unready(time.monotonic()) == ""


@pytest.mark.parametrize("code", [401, 403, 429, 500])
@pytest.mark.parametrize("undone", ["deleted", "edited"])
async def test_slices_that_others_undo_while_writes_are_refused(server: FakeApiServer, code: int, undone: str) -> None:
    """If other clients delete or edit slices while writes are refused, these slices do not count as published.

    If the refusal lasts, the agent is not ready until the slices are restored.
    """
    async with publishing(server, pool(*many(3))) as publisher:
        refuse(server, code)
        if undone == "deleted":
            server.wipe(NODE)
        else:
            (body,) = server.objects()
            del body["spec"]["devices"][0]
            server.replace(body)
        await until(lambda: now(publisher).failing)
        assert not now(publisher).published
        assert now(publisher).unready(time.monotonic()) == "", "it may pass by itself"
        known = now(publisher).known
        assert known is not None
        assert len(known.devices) == (0 if undone == "deleted" else 2)
        observed, at = later(publisher)
        assert f"no {code} today" in observed.unready(at)
        assert publisher.failures(DRIVER)[code] >= 1
        server.heal()
        await until(lambda: now(publisher).published and now(publisher).failing is None)
        observed, at = later(publisher)
        assert observed.unready(at) == ""


async def test_slices_that_went_with_their_node(server: FakeApiServer) -> None:
    """Without its Node object no slice can be written, and the report names this reason; a new Node owns the slices."""
    async with publishing(server, pool(*many(3))) as publisher:
        server.delete("nodes", NODE)
        server.wipe(NODE)
        await until(lambda: now(publisher).failing)
        observed, at = later(publisher)
        assert not observed.published
        assert f'nodes "{NODE}" not found' in observed.unready(at)
        new = server.create(node_body(NODE))
        await until(lambda: now(publisher).published)
        (body,) = server.objects()
        assert body["metadata"]["ownerReferences"][0]["uid"] == new["metadata"]["uid"]


async def test_what_is_wanted_now_counts(server: FakeApiServer) -> None:
    """Accepted slices do not count as published once other slices are wanted and refused."""
    async with publishing(server, pool(*many(3))) as publisher:
        refuse(server, 403)
        publisher.want(pool(*many(4)))
        await until(lambda: now(publisher).failing)
        assert not now(publisher).published
        publisher.want(pool(*many(3)))
        await until(lambda: now(publisher).published)


async def test_an_outage_is_no_reason_to_be_unready(server: FakeApiServer) -> None:
    """During an outage the slices are unknown, and an agent that has published stays ready."""
    async with publishing(server, pool(*many(3))) as publisher:
        with server.outage():
            await until(lambda: publisher.watch.failing)
            observed, at = later(publisher)
            assert (observed.published, observed.known, observed.unready(at)) == (False, None, "")
        await until(lambda: publisher.watch.failing is None)
        assert now(publisher).published


@pytest.mark.parametrize("code", [401, 403])
async def test_a_watch_that_is_refused(server: FakeApiServer, code: int) -> None:
    """While the watch is refused the slices are unknown, and the reason for being unready names the refusal."""
    async with publishing(server, pool(*many(3))) as publisher:
        refuse(server, code, lambda request: request.method == "GET" and "resourceslices" in request.path)
        server.break_watches()
        await until(lambda: publisher.watch.failing and publisher.watch.failing.code == code)
        observed, at = later(publisher)
        assert (observed.published, observed.known, observed.failing) == (False, None, None)
        assert f"no {code} today" in observed.unready(at)
        server.heal()
        await until(lambda: later(publisher)[0].published)


async def test_no_device_counts_as_withdrawn_while_slices_cannot_be_seen(server: FakeApiServer) -> None:
    """While the watch is refused no device counts as withdrawn, as a foreign slice may offer it."""
    async with publishing(server, pool(*many(1))) as publisher:
        await until(lambda: publisher.withdrawn(DRIVER, "gone") is not None)
        refuse(server, 403, lambda request: request.method == "GET" and "resourceslices" in request.path)
        server.break_watches()
        await until(lambda: publisher.watch.failing)
        assert publisher.watch.failing
        publisher.watch.failing = replace(publisher.watch.failing, since=publisher.watch.failing.since - LOST)
        assert publisher.withdrawn(DRIVER, "gone") is None
        server.heal()
        await until(lambda: publisher.withdrawn(DRIVER, "gone") is not None)


async def test_a_watch_in_which_nothing_comes(server: FakeApiServer) -> None:
    """Changes that the watch does not report are found, and undone, after the watch was silent for long."""
    async with publishing(server, pool(*many(3)), silence=(0.2, 0.3)) as publisher:
        snapshot = server.snapshot()
        server.wipe(NODE)
        await until(lambda: now(publisher).published and len(server.writes) >= 2)
        empty = snapshot._replace(objects={**snapshot.objects, "resourceslices": {}})
        server.restore(empty, end_streams=False)
        await until(lambda: server.objects())
        await until(lambda: now(publisher).published)


def test_a_watch_is_alive_while_it_is_heard() -> None:
    """A watch counts as alive after a short failure or pause, but not after a lasting failure or too long a silence."""
    state, begin = WatchState(patience=300.0), time.monotonic()
    assert state.lapse(begin) == Failing(begin, "nothing was read yet", outage=True)
    state.opened()
    assert state.lapse(begin + 299.0) is None
    lapse = state.lapse(begin + 400.0)
    assert lapse is not None
    assert lapse.outage
    state.failed(ValueError("first"))
    state.failed(ValueError("second"))
    assert state.failing is not None
    assert state.lapse(state.failing.since + LOST - 1.0) is None
    assert state.lapse(state.failing.since + LOST + 0.001) == replace(state.failing, text="second")
    state.opened()
    assert state.lapse(begin + LOST) is None
