"""Lists of all claims: which callers share a list, and when the next list begins."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any, cast

import pytest

from deviceplugin.backoff import Backoff
from dra_bridge.kube import Cluster, ListedClaim, UnavailableError
from dra_bridge.kube.forms import Page
from dra_bridge.node import claim_lists
from dra_bridge.node.claim_lists import ClaimLists


def claim(name: str) -> ListedClaim:
    return ListedClaim(name, "ns", name, for_limits=False, results=(), pods=())


class Server:
    """Lists the claims that exist when a list begins, one to a page; each page waits until `let` is released."""

    def __init__(self) -> None:
        self.claims = ["a", "b"]
        self.begun: list[float] = []
        self.asked = asyncio.Semaphore(0)
        self.let = asyncio.Semaphore(0)
        self.errors: list[Exception] = []

    async def pages(self, *_: object) -> AsyncIterator[Page[ListedClaim]]:
        self.begun.append(time.monotonic())
        for name in tuple(self.claims):
            self.asked.release()
            await self.let.acquire()
            if self.errors:
                raise self.errors.pop()
            yield Page([claim(name)], "7", "", 100)


@pytest.fixture
def server() -> Server:
    return Server()


@pytest.fixture
async def lists(server: Server, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[ClaimLists]:
    monkeypatch.setattr(claim_lists, "REST", 0.0)
    made = ClaimLists(cast(Cluster, server), Backoff(30.0, 30.0))
    async with asyncio.timeout(20):
        yield made
    await made.aclose()


class Reader:
    """A caller that waits for a list."""

    def __init__(self, lists: ClaimLists) -> None:
        self.found: list[str] = []
        self.asked = time.monotonic()
        self.task = asyncio.create_task(lists.read(lambda one: self.found.append(one.name)))


async def test_calls_share_a_list_that_begins_after_them(server: Server, lists: ClaimLists) -> None:
    """Three calls share a list; calls that come while it is read share the next list, which has newer claims."""
    first = [Reader(lists) for _ in range(3)]
    await server.asked.acquire()
    later = [Reader(lists) for _ in range(3)]
    await asyncio.sleep(0)
    server.claims.append("c")
    for _ in range(5):
        server.let.release()
    for reader in [*first, *later]:
        assert await reader.task >= reader.asked
    assert [reader.found for reader in first] == [["a", "b"]] * 3
    assert [reader.found for reader in later] == [["a", "b", "c"]] * 3
    assert len(server.begun) == 2
    assert (lists.statistics.bytes, sum(lists.statistics.durations.counts)) == (500, 2)


async def test_a_caller_that_gives_up_ends_the_list_for_nobody_else(server: Server, lists: ClaimLists) -> None:
    """If one of two callers of a list is cancelled, the other gets the whole list."""
    one, other = Reader(lists), Reader(lists)
    await server.asked.acquire()
    one.task.cancel()
    server.let.release()
    server.let.release()
    await other.task
    assert other.found == ["a", "b"]


async def test_a_list_that_fails_halfway_fails_for_all_and_is_not_asked_for_at_once(
    server: Server, lists: ClaimLists
) -> None:
    """A list that fails on its second page fails for all callers; until a retry is due, calls make no request."""
    readers = [Reader(lists), Reader(lists)]
    await server.asked.acquire()
    server.let.release()
    await server.asked.acquire()
    server.errors.append(UnavailableError("away", retry_after=5.0))
    server.let.release()
    for reader in readers:
        with pytest.raises(UnavailableError, match="away"):
            await reader.task
    with pytest.raises(UnavailableError, match="away"):
        await Reader(lists).task
    assert len(server.begun) == 1
    assert lists.statistics.failures == 1


async def test_a_list_without_end_is_given_up(
    server: Server, lists: ClaimLists, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A list that does not end within the deadline fails with an error that says so."""
    monkeypatch.setattr(claim_lists, "DEADLINE", 0.01)
    with pytest.raises(UnavailableError, match="has not ended"):
        await Reader(lists).task


async def test_lists_end_with_the_agent(server: Server, lists: ClaimLists) -> None:
    """A list that is read when the agent ends is cancelled, and so is its caller."""
    reader: Any = Reader(lists)
    await server.asked.acquire()
    await lists.aclose()
    with pytest.raises(asyncio.CancelledError):
        await reader.task
