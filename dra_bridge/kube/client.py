"""The client of one API server: reads, writes and watches of objects.

Objects are plain dicts as JSON has them, so no model classes are loaded.

Many agents talk to one API server. Nothing here polls. A lost server is asked again after random waits that grow to
half a minute, and a loss or a recovery is logged once.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from typing import Final, Self, TypedDict, Unpack

from deviceplugin.backoff import Backoff
from dra_bridge.kube import auth
from dra_bridge.kube.auth import Access
from dra_bridge.kube.connection import Connection, RequestStatistics
from dra_bridge.kube.discovery import Discovery
from dra_bridge.kube.errors import GoneError, UnavailableError, VersionChangedError
from dra_bridge.kube.kinds import EVENTS, Kind, Object, path_of, selectors_of
from dra_bridge.kube.watch import SILENCE, Changed, Listed, Listing, Positions, Watches

COMPONENT: Final = "dra-bridge"
"""The field manager of patches and the source of Events."""


class Options(TypedDict, total=False):
    """The options of a Cluster; see there."""

    deadline: float
    backoff: Backoff
    watch_seconds: tuple[float, float]
    silence: tuple[float, float]


class Cluster:
    """One API server, asynchronously. Belongs to one event loop; every request has a deadline.

    Use as an async context manager, or call `aclose`. Methods raise the errors of `dra_bridge.kube.errors`:
    ApiError and what derives from it, UnsupportedError for kinds of resource.k8s.io that the server
    does not serve, AccessError when the configuration cannot be used.
    """

    def __init__(
        self,
        configuration: Callable[[], Awaitable[Access]],
        *,
        deadline: float = 10.0,
        backoff: Backoff | None = None,
        watch_seconds: tuple[float, float] = (240.0, 480.0),
        silence: tuple[float, float] = SILENCE,
    ) -> None:
        """Connect to nothing yet.

        configuration: read at the first request, and again when the server cannot be reached.
        deadline: seconds for one request and its answer. backoff: the waits of watches after failures.
        watch_seconds: how long the server is asked to keep a watch open. silence: how long a watch that sends nothing
        is trusted. Both are drawn between two bounds.
        """
        self.backoff = backoff or Backoff()
        self._connection = Connection(configuration, deadline)
        self._discovery = Discovery(self._connection)
        self._positions = Positions()
        self._watches = Watches(
            self._connection, self._discovery, self._positions, self.list, self.backoff, watch_seconds, silence
        )

    @classmethod
    def from_environment(cls, kubeconfig: str | os.PathLike[str] | None = None, **options: Unpack[Options]) -> Cluster:
        """Reach the server that a kubeconfig file names, else the one of the pod, else KUBECONFIG or ~/.kube/config."""
        return cls(lambda: auth.from_environment(kubeconfig), **options)

    @classmethod
    def from_server(cls, url: str, **options: Unpack[Options]) -> Cluster:
        """Reach the server at a URL, without credentials."""

        async def configuration() -> Access:
            return auth.from_server(url)

        return cls(configuration, **options)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def __repr__(self) -> str:
        return f"<Cluster {self._connection.url or 'not connected'}>"

    def configure(self) -> None:
        """Read the configuration now, before there is an event loop; may block.

        Raises AccessError if there is none, or it cannot be used.
        """
        asyncio.run(self._connection.connect())

    async def aclose(self) -> None:
        """Close all connections; open watches fail."""
        await self._connection.aclose()

    @property
    def statistics(self) -> RequestStatistics:
        """What went to the API server so far."""
        return self._connection.traffic.statistics

    async def version(self) -> str:
        """Return the version of resource.k8s.io to use: v1, v1beta2 or v1beta1.

        The server is asked once, again after an outage, and after a 404 that means the whole kind.
        Raises UnsupportedError if the server serves none of them.
        """
        return await self._discovery.version()

    async def api_version(self, kind: Kind) -> str:
        """Return the `apiVersion` of objects of a kind."""
        return kind.api_version(kind.version or await self.version())

    async def get(self, kind: Kind, name: str, namespace: str = "") -> Object:
        """Read one object. Raises NotFoundError if there is none."""
        return await self._request("GET", kind, name, namespace)

    async def list(
        self, kind: Kind, namespace: str = "", *, field_selector: str = "", label_selector: str = "", page: int = 500
    ) -> Listing:
        """Read all objects of a kind as of now (a consistent read), in all namespaces unless one is given.

        page: objects an answer; the pages together are one moment's state.
        """
        selectors = selectors_of(field_selector, label_selector)
        before = self._positions.highest(kind)
        items: list[Object] = []
        follow = ""
        while True:
            parameters = {**selectors, "limit": str(page)} if page else dict(selectors)
            if follow:
                parameters["continue"] = follow
            try:
                answer = await self._request("GET", kind, "", namespace, parameters=parameters)
            except GoneError:
                if not page:
                    raise
                items, follow, page = [], "", 0  # the pages' moment is too old: all in one
                continue
            items += answer.get("items") or ()
            metadata = answer.get("metadata") or {}
            follow = metadata.get("continue") or ""
            if not follow:
                position = str(metadata.get("resourceVersion") or "")
                self._positions.moved(kind, position, before)
                return Listing(items, position)

    async def create(self, kind: Kind, body: Object, namespace: str = "", *, dry_run: bool = False) -> Object:
        """Create an object and return it as the server has it.

        dry_run: the server checks and returns the object without storing it.
        Raises ConflictError if there is one of that name, InvalidError if the server refuses its content, and
        VersionChangedError if it was made for another version than the chosen one.
        """
        parameters = {"dryRun": "All"} if dry_run else {}
        return await self._request("POST", kind, "", namespace, parameters=parameters, body=body)

    async def replace(self, kind: Kind, body: Object, namespace: str = "") -> Object:
        """Replace the object of this name, if it still has this `metadata.resourceVersion`.

        Raises ConflictError if it has another, NotFoundError if there is no object, and otherwise as `create`.
        """
        return await self._request("PUT", kind, body["metadata"]["name"], namespace, body=body)

    async def patch(
        self, kind: Kind, name: str, patch: object, namespace: str = "", *, subresource: str = ""
    ) -> Object:
        """Change parts of an object by a merge patch."""
        parameters = {"fieldManager": COMPONENT}
        return await self._request(
            "PATCH", kind, name, namespace, subresource=subresource, parameters=parameters, body=patch
        )

    async def delete(self, kind: Kind, name: str, namespace: str = "", *, uid: str = "") -> None:
        """Delete an object. Raises NotFoundError if there is none, ConflictError if it has another UID than given."""
        options: Object = {"apiVersion": "v1", "kind": "DeleteOptions"}
        if uid:
            options["preconditions"] = {"uid": uid}
        await self._request("DELETE", kind, name, namespace, body=options)

    async def event(self, regarding: Object, reason: str, message: str, *, node: str = "") -> None:
        """Write a warning Event, which `kubectl describe` shows; `message` is cut at 1024 bytes.

        regarding: the object, or its apiVersion, kind, metadata.name, .namespace and .uid.
        """
        metadata = regarding.get("metadata") or {}
        namespace = metadata.get("namespace") or "default"
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        body: Object = {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"generateName": f"{str(metadata.get('name', ''))[:200]}.", "namespace": namespace},
            "involvedObject": {
                **{key: regarding.get(key, "") for key in ("apiVersion", "kind")},
                **{key: metadata.get(key, "") for key in ("name", "namespace", "uid")},
            },
            "reason": reason,
            "message": message.encode()[:1024].decode(errors="ignore"),
            "type": "Warning",
            "source": {"component": COMPONENT, **({"host": node} if node else {})},
            "reportingComponent": COMPONENT,
            "reportingInstance": node,
            "firstTimestamp": now,
            "lastTimestamp": now,
            "count": 1,
        }
        await self.create(EVENTS, body, namespace)

    def follow(
        self, kind: Kind, namespace: str = "", *, field_selector: str = "", label_selector: str = ""
    ) -> AsyncGenerator[Listed | Changed, None]:
        """Yield all objects now, then each change, for ever.

        A watch that ends when the server was asked to end it is resumed at its position. After any
        other end (the connection was lost, the server ended it early, refused it, or sent nothing
        for long), and when another list shows that the server went back, `Listed` comes again and
        replaces all that was known. The position must not be used then: the server's storage may
        have been restored from an older snapshot, and kube-apiserver opens a watch at a position
        in its future without an error and sends nothing on it until its revision has caught up
        (Cacher.Watch, cacher.go, 1.36).

        Outages, refusals and servers without DRA are waited out, whatever they last. Close the
        generator (`contextlib.aclosing`) to end the watch.
        """
        selectors = {"field_selector": field_selector, "label_selector": label_selector}
        return self._watches.follow(kind, namespace, selectors)

    async def pause(self, seconds: float) -> None:
        """Wait before another try; a wait while the server is lost ends early when another request is answered."""
        await self._connection.traffic.pause(seconds)

    async def _request(
        self,
        method: str,
        kind: Kind,
        name: str,
        namespace: str,
        *,
        subresource: str = "",
        parameters: Mapping[str, str] | None = None,
        body: object = None,
    ) -> Object:
        for again in (True, False):
            version = kind.version or await self.version()
            if method in ("POST", "PUT") and isinstance(body, dict):
                api_version = kind.api_version(version)
                if body.setdefault("apiVersion", api_version) != api_version:
                    raise VersionChangedError(f"the object is in {body['apiVersion']}, the server uses {api_version}")
                body.setdefault("kind", kind.kind)
            path = path_of(kind, version, name, namespace, subresource)
            try:
                answer = await self._connection.send(method, path, parameters, body, kind, name)
            except UnavailableError as error:
                if error.code != 404 or kind.version or not again:
                    raise
                self._discovery.forget()  # perhaps the version is not served: the server is another one now
            else:
                _check(answer, method, path, kind, name)
                return answer
        raise AssertionError("not reached")


def _check(answer: Object, method: str, path: str, kind: Kind, name: str) -> None:
    """Raise UnavailableError unless this is what an API server answers: an object of the kind, or a list of them."""
    if method == "DELETE" and answer.get("kind") == "Status" and answer.get("status") == "Success":
        return
    metadata = answer.get("metadata")
    listed = method == "GET" and not name
    if (
        not isinstance(metadata, dict)
        or answer.get("kind") != (f"{kind.kind}List" if listed else kind.kind)
        or (name and metadata.get("name") != name)
        or (listed and not metadata.get("resourceVersion"))
    ):
        raise UnavailableError(f"{method} {path}: the answer is not the requested object")
