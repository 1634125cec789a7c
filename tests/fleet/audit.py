"""Requests from the API server's audit log: pure functions over its lines.

The policy `POLICY` logs the requests of ServiceAccounts only, without their bodies. A request that priority and
fairness refuses is logged too, as the audit comes first (DefaultBuildHandlerChain, config.go, 1.36).
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Final, NamedTuple

POLICY: Final[dict[str, Any]] = {
    "apiVersion": "audit.k8s.io/v1",
    "kind": "Policy",
    "omitStages": ["RequestReceived"],
    "rules": [
        {"level": "None", "users": ["admin", "system:apiserver"]},
        {"level": "Metadata"},
    ],
}
NODE: Final = "authentication.kubernetes.io/node-name"


class Request(NamedTuple):
    """A request to the API server.

    at: Unix seconds of its arrival. node: the node to which the client's token is bound. what: a resource, or a path.
    code: the HTTP status.
    """

    at: float
    user: str
    node: str
    verb: str
    what: str
    name: str
    code: int


class Log:
    """An audit log that grows."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._seen: set[str] = set()

    def more(self) -> list[Request]:
        """Return the requests that were logged since the last call. A watch counts when it begins."""
        with self._path.open("rb") as file:
            file.seek(self._offset)
            content = file.read()
        whole = content[: content.rfind(b"\n") + 1]
        self._offset += len(whole)
        events = [json.loads(line) for line in whole.splitlines()]
        fresh = []
        for event in events:
            if event["auditID"] not in self._seen:
                fresh.append(request_of(event))
            if event["stage"] == "ResponseStarted":
                self._seen.add(event["auditID"])  # A long request, a watch or proxy, is logged once more at its end.
            else:
                self._seen.discard(event["auditID"])
        return fresh


def request_of(event: dict[str, Any]) -> Request:
    """Return the request to the API server that an event of the audit log describes."""
    subject = event.get("objectRef") or {}
    parts = (subject.get("resource", ""), subject.get("subresource", ""))
    what = "/".join(part for part in parts if part) or event["requestURI"].partition("?")[0]
    extra = event["user"].get("extra") or {}
    return Request(
        datetime.fromisoformat(event["requestReceivedTimestamp"]).timestamp(),
        event["user"].get("username", ""),  # A request without valid credentials has no user name.
        (extra.get(NODE) or [""])[0],
        event["verb"],
        what,
        subject.get("name", ""),
        (event.get("responseStatus") or {}).get("code", 0),
    )


def of_user(requests: Iterable[Request], user: str) -> list[Request]:
    """Return the requests of a ServiceAccount, namespace:name."""
    return [request for request in requests if request.user == f"system:serviceaccount:{user}"]


def counts(requests: Iterable[Request]) -> Counter[tuple[str, str]]:
    """Return how many requests there are by verb and resource."""
    return Counter((request.verb, request.what) for request in requests)


class Spread(NamedTuple):
    """How requests are spread over time.

    seconds: from the first to the last request. most: the number of requests in the busiest second.
    """

    number: int
    seconds: float
    most: int


def spread(requests: Sequence[Request]) -> Spread:
    """Return how requests are spread over time."""
    times = sorted(request.at for request in requests)
    if not times:
        return Spread(0, 0.0, 0)
    each = Counter(int(at - times[0]) for at in times)
    return Spread(len(times), times[-1] - times[0], max(each.values()))
