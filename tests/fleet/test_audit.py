"""The requests read from an audit log, and figures of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.fleet import page
from tests.fleet.audit import NODE, Log, counts, of_user, spread
from tests.fleet.limits import Limit


def event(number: int, verb: str, stage: str = "ResponseComplete", second: float = 0.0, **more: Any) -> str:
    user = {"username": "system:serviceaccount:a:b", "extra": {NODE: ["n1"]}}
    at = f"2026-01-01T00:00:{second:09.6f}Z"
    subject = {"resource": "nodes", "name": "n1"}
    body = {"auditID": str(number), "verb": verb, "stage": stage, "user": user, "requestReceivedTimestamp": at}
    return json.dumps({**body, "requestURI": "/api/v1/nodes/n1?x=y", "objectRef": subject, **more}) + "\n"


def test_a_watch_counts_once_when_it_begins(tmp_path: Path) -> None:
    """Each call of `more` returns new requests; a watch counts once, at its begin; an unfinished line counts later."""
    path = tmp_path / "audit.log"
    log = Log(path)
    path.write_text(event(1, "get") + event(2, "watch", "ResponseStarted") + event(3, "list")[:20])
    assert counts(log.more()) == {("get", "nodes"): 1, ("watch", "nodes"): 1}
    with path.open("a") as file:
        file.write(event(3, "list")[20:] + event(2, "watch"))
    assert counts(log.more()) == {("list", "nodes"): 1}
    with path.open("a") as file:  # A request to a proxy is logged at its begin and at its end.
        file.write(event(4, "get", "ResponseStarted") + event(4, "get"))
    assert counts(log.more()) == {("get", "nodes"): 1}
    with path.open("a") as file:  # The API server has refused the credentials, as it may do while it starts.
        file.write(event(5, "list", user={}))
    (refused,) = log.more()
    assert (refused.user, refused.node) == ("", "")


def test_a_watch_that_is_refused_counts(tmp_path: Path) -> None:
    """A refused watch counts, though only its end is logged. `node` is the node to which the token is bound."""
    path = tmp_path / "audit.log"
    path.write_text(event(1, "watch", responseStatus={"code": 429}) + event(2, "get", objectRef=None))
    refused, discovery = of_user(Log(path).more(), "a:b")
    assert (refused.code, refused.node, discovery.what) == (429, "n1", "/api/v1/nodes/n1")


def test_the_busiest_second_counts(tmp_path: Path) -> None:
    """`spread` returns the number of requests, the time from first to last, and the number in the busiest second."""
    path = tmp_path / "audit.log"
    path.write_text("".join(event(number, "list", second=at) for number, at in enumerate((1.0, 1.5, 1.9, 4.0))))
    assert spread(Log(path).more()) == (4, 3.0, 3)
    assert spread([]) == (0, 0.0, 0)


def test_a_part_writes_its_own_sections(tmp_path: Path) -> None:
    """A part of a run replaces its own section of the page; other sections stay, and the order stays the same."""
    path = tmp_path / "scale.md"
    page.write({"restart": "second", "growth": "first"}, path)
    page.write({"growth": "new"}, path)
    text = path.read_text()
    assert text.index("new") < text.index("second")
    assert "first" not in text


def test_a_limit_says_whether_it_is_missed() -> None:
    """A value beyond its limit is missed, and is marked in the table."""
    limits = [Limit("a", 2.0, 1.0), Limit("b", 2.0, 1.0, least=True), Limit("c", 2.0, 3.0, "s", least=True)]
    assert [one.met for one in limits] == [False, True, False]
    assert page.of_limits(limits).count("MISSED") == 2
