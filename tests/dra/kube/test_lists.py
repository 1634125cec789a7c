"""Lists that are read in pages, and answers that are larger or nest deeper than a client accepts."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dra_bridge.kube import NODES, RESOURCE_CLAIMS, Cluster, GoneError, ListedClaim, UnreadableError, forms, http
from dra_bridge.kube.forms import Page
from dra_bridge.testing.apiserver import FakeApiServer, Fault
from dra_bridge.wire import objects_pb2 as pb
from tests.dra.objects import node_body


@pytest.fixture
def pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The client asks for lists in pages of two objects."""
    monkeypatch.setattr(forms, "FIRST_LIMIT", 2)
    monkeypatch.setattr(forms, "MAX_LIMIT", 2)


@pytest.mark.usefixtures("pairs")
async def test_pages_are_one_list(server: FakeApiServer, cluster: Cluster) -> None:
    """A list is asked for in pages and returned whole."""
    for number in range(5):
        server.create(node_body(f"n{number}"))
    listing = await cluster.list(NODES)
    assert [one["metadata"]["name"] for one in listing.items] == [f"n{number}" for number in range(5)]
    assert len(server.requests("GET", "/nodes")) == 3


def claim_body(name: str, device: str = "", parameters: str = "") -> dict[str, Any]:
    """Return a claim. device: the device that the claim is allocated."""
    config = [{"opaque": {"driver": "d", "parameters": {"text": parameters}}}]
    result = {"request": "r", "driver": "d", "pool": "n", "device": device}
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaim",
        "metadata": {"name": name, "namespace": "ns"},
        "spec": {"devices": {"config": config}},
        "status": {"allocation": {"devices": {"results": [result]}}} if device else {},
    }


def devices_of(page: Page[ListedClaim]) -> list[str]:
    return [result.device for claim in page.items for result in claim.results]


async def claims_of(cluster: Cluster) -> list[ListedClaim]:
    return [claim async for page in cluster.pages(RESOURCE_CLAIMS, forms.CLAIMS) for claim in page.items]


@pytest.mark.usefixtures("pairs")
async def test_pages_are_of_the_moment_of_the_first(server: FakeApiServer, cluster: Cluster) -> None:
    """All pages of a list show the same moment, although a device moves to another claim meanwhile."""
    for name, device in zip("abcde", ("", "", "", "", "d0"), strict=True):
        server.create(claim_body(name, device))
    found = []
    async for page in cluster.pages(RESOURCE_CLAIMS, forms.CLAIMS):
        found += devices_of(page)
        server.replace(claim_body("e"))
        server.replace(claim_body("a", "d0"))
    assert found == ["d0"]


@pytest.mark.usefixtures("pairs")
async def test_pages_whose_moment_is_gone_are_not_continued(server: FakeApiServer, cluster: Cluster) -> None:
    """If the moment of a list's first page is gone, the client does not read the rest at the server's newer moment.

    A device that moves to another claim meanwhile could be in no page of such a list.
    """
    for name, device in zip("abcde", ("", "", "", "", "d0"), strict=True):
        server.create(claim_body(name, device))
    pages = cluster.pages(RESOURCE_CLAIMS, forms.CLAIMS)
    await anext(pages)
    server.replace(claim_body("e"))
    server.replace(claim_body("a", "d0"))
    server.compact()
    with pytest.raises(GoneError) as caught:
        await anext(pages)
    assert caught.value.reason == "Expired"
    assert "inconsistent list" in caught.value.message
    assert len(server.requests("GET", "/resourceclaims")) == 2


@pytest.mark.usefixtures("pairs")
async def test_pages_of_two_moments_are_no_list(
    server: FakeApiServer, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A list fails if the server itself answers a later page at another resourceVersion than the first page."""
    for name in "abcde":
        server.create(claim_body(name))
    decode = forms.CLAIMS.decode

    def newer(body: bytes | bytearray) -> Page[ListedClaim]:
        page = decode(body)
        return page if page.items[0].name == "a" else page._replace(resource_version="7")

    with pytest.raises(GoneError, match="different versions"):
        async for _ in cluster.pages(RESOURCE_CLAIMS, forms.Form(forms.CLAIMS.accept, newer)):
            pass


@pytest.mark.usefixtures("pairs")
async def test_a_list_whose_moment_is_gone_begins_anew(
    server: FakeApiServer, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A 410 in the middle of a list restarts the list, without duplicates; a second 410 is an error."""
    for number in range(5):
        server.create(node_body(f"n{number}"))
    gone = Fault(code=410)
    server.fail(lambda request: "continue" in request.query, gone)
    listing = await cluster.list(NODES)
    assert sorted(one["metadata"]["name"] for one in listing.items) == [f"n{number}" for number in range(5)]
    server.fail(lambda request: "continue" in request.query, gone, times=2)
    with pytest.raises(GoneError):
        await cluster.list(NODES)
    server.heal()
    assert {request.query.get("limit") for request in server.requests("GET", "/nodes")} == {"2"}


@pytest.mark.parametrize("list_them", [claims_of, lambda cluster: cluster.list(RESOURCE_CLAIMS)])
async def test_heavy_pages_are_asked_for_in_smaller_ones(
    server: FakeApiServer, cluster: Cluster, monkeypatch: pytest.MonkeyPatch, list_them: Callable[[Cluster], Any]
) -> None:
    """A page of too many bytes is not read to its end; before and after it, pages have many small objects."""
    monkeypatch.setattr(forms, "MAX_PAGE", 40_000)
    monkeypatch.setattr(forms, "PAGE", 10_000)
    for number in range(200):
        server.create(claim_body(f"c{number:03}", parameters="x" * (5_000 if 80 <= number < 120 else 0)))
    listed = await list_them(cluster)
    assert len(getattr(listed, "items", listed)) == 200
    limits = [int(request.query["limit"]) for request in server.requests("GET", "/resourceclaims")]
    assert limits[0] == 100
    assert min(limits) < 8
    assert limits[-1] > 8
    assert cluster.statistics.lost_since is None


def test_limits_follow_what_pages_weigh() -> None:
    """The limit of the next page follows from the size of the objects in the last page."""
    assert forms.next_limit(100, 100, 100) == 400
    assert forms.next_limit(400, 400, 400) == forms.MAX_LIMIT
    assert forms.next_limit(100, 100, forms.PAGE * 10) == 10
    assert forms.next_limit(1, 1, forms.PAGE * 10) == 1
    assert forms.next_limit(100, 0, 0) == 400
    assert forms.smaller_limit(100) == 12
    assert forms.smaller_limit(3) == 1


async def test_an_object_that_is_too_large_is_no_lost_server(
    server: FakeApiServer, cluster: Cluster, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A body that is too large raises UnreadableError, and the server does not count as lost."""
    server.create(claim_body("c", parameters="x" * 2000))
    await cluster.version()
    monkeypatch.setattr(http, "MAX_BODY", 1000)
    monkeypatch.setattr(forms, "MAX_PAGE", 1000)
    for call in (lambda: cluster.get(RESOURCE_CLAIMS, "c", "ns"), lambda: claims_of(cluster)):
        with pytest.raises(UnreadableError, match="larger than"):
            await call()
    assert cluster.statistics.lost_since is None
    assert "is lost" not in caplog.text


async def test_an_object_that_nests_deep_is_no_lost_server(server: FakeApiServer, cluster: Cluster) -> None:
    """A claim whose JSON nests too deep raises UnreadableError, but its allocation can be read."""
    await cluster.version()
    deep = claim_body("c", "d0", parameters="deep")
    deep["status"]["reservedFor"] = [{"resource": what, "name": what, "uid": "1"} for what in ("pods", "jobs")]
    server.create(deep)
    text = json.dumps(deep).replace('"deep"', "[" * 5000 + "]" * 5000)
    server.fail(lambda request: True, Fault(code=200, body=text))
    with pytest.raises(UnreadableError, match="nests too deep"):
        await cluster.get(RESOURCE_CLAIMS, "c", "ns")
    assert cluster.statistics.lost_since is None
    (claim,) = await claims_of(cluster)
    assert claim == await cluster.claim("c", "ns")
    assert [(result.driver, result.pool, result.device) for result in claim.results] == [("d", "n", "d0")]
    assert [pod.name for pod in claim.pods] == ["pods"]
    assert await cluster.allocated_claims() == [claim]


def test_text_that_is_no_utf_8_does_not_matter() -> None:
    """A list is read although a claim has an annotation that is not UTF-8, which clients with protobuf can write."""
    claim = pb.Claim(metadata=pb.Metadata(name=b"c", annotations=[pb.Annotation(key=b"\xff", value=b"\xfe")]))
    listed = pb.List(metadata=pb.ListMetadata(resource_version=b"7"), items=[claim.SerializeToString()])
    envelope = pb.Envelope(type=pb.Type(kind=b"ResourceClaimList"), raw=listed.SerializeToString())
    page = forms.CLAIMS.decode(forms.MAGIC + envelope.SerializeToString())
    assert [one.name for one in page.items] == ["c"]


@given(st.binary(max_size=200))
def test_nonsense_is_no_list(body: bytes) -> None:
    """A body that is not a list of claims raises ValueError."""
    for start in (b"", forms.MAGIC):
        with pytest.raises(ValueError, match="the body is"):
            forms.CLAIMS.decode(start + body)
