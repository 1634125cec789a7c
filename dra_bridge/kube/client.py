"""The client of one API server: reads, writes and watches of objects, which are plain dicts as JSON has them.

Many agents use one API server, so the client never polls. After a failure it connects again after random waits of up
to half a minute. It logs each loss and each recovery of the server once.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import random
import time
import urllib.parse
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple, Self, TypeVar

import msgspec

from deviceplugin.backoff import Backoff
from dra_bridge.kube import api, auth, forms
from dra_bridge.kube.api import ApiError, GoneError, Kind, Object, UnavailableError
from dra_bridge.kube.auth import Access
from dra_bridge.kube.connection import ApiRequest, Connection, Discovery, RequestStatistics
from dra_bridge.kube.forms import Form, ListedClaim, Page
from dra_bridge.kube.liveness import WatchState

logger: Final = logging.getLogger(__name__)
T = TypeVar("T")

COMPONENT: Final = "dra-bridge"  # the field manager of patches and the source of Events
SILENCE: Final = (180.0, 300.0)
"""Seconds for which a watch without event and bookmark is trusted, drawn between the two.

kube-apiserver sends a bookmark every minute (defaultBookmarkFrequency, cacher.go, 1.36), but only when its
cache has passed the watch's position. In a cluster where nothing changes the cache moves with etcd's progress
notifications: every 5 s as kubeadm sets it up, every 10 minutes by etcd's default. A node then lists its own
objects once in about 4 minutes for each watch.
"""


@dataclass(frozen=True, slots=True)
class Listed:
    """A list of all objects, with its resourceVersion.

    A watch yields it at the beginning, and after an end that the client had not requested.
    """

    items: list[Object]
    resource_version: str


class Changed(msgspec.Struct, frozen=True):
    """A change of one object. type: ADDED, MODIFIED or DELETED."""

    type: str
    object: Object


class _Asked(NamedTuple):
    """What is asked of a server; its path depends on the version of resource.k8s.io that it serves."""

    method: str
    kind: Kind
    name: str
    namespace: str
    parameters: Mapping[str, str] | None = None
    body: object = None
    subresource: str = ""


class Cluster:
    """One API server, asynchronously. Belongs to one event loop; every request has a deadline.

    Methods raise ApiError and what derives from it, UnsupportedError for kinds of resource.k8s.io that the server does
    not serve, AccessError when the configuration cannot be used.
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
        """Store the settings; do not connect yet.

        configuration: read at the first request, and again when the server cannot be reached. deadline: seconds for one
        request and its answer. backoff: the waits of watches after failures. watch_seconds: how long the server is
        asked to keep a watch open. silence: how long one that sends nothing is trusted. Both are drawn between bounds.
        """
        self.backoff = backoff or Backoff()
        self._connection = Connection(configuration, deadline)
        self._discovery = Discovery(self._connection)
        self._deadline = deadline
        self._watch_seconds = watch_seconds
        self._silence = silence

    @classmethod
    def from_environment(
        cls, kubeconfig: str | os.PathLike[str] | None = None, account: Path | None = None, **options: Any
    ) -> Cluster:
        """Use the server of a kubeconfig file, else that of the pod, else of KUBECONFIG or ~/.kube/config.

        account: the directory of a service account, in place of the pod's.
        """
        return cls(lambda: auth.from_environment(kubeconfig, account), **options)

    @classmethod
    def from_server(cls, url: str, **options: Any) -> Cluster:
        """Use the server at a URL, without credentials."""
        return cls(lambda: auth.from_server(url), **options)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def configure(self) -> None:
        """Read the configuration now, before there is an event loop; may block.

        Raises AccessError if there is none, or it cannot be used.
        """
        asyncio.run(self._connection.connect())

    async def aclose(self) -> None:
        """Close all connections; open watches fail."""
        await self._connection.aclose()

    @property
    def where(self) -> str:
        """The server's address and the source of the address, for messages; "" until the configuration is read."""
        return self._connection.where

    @property
    def statistics(self) -> RequestStatistics:
        """The counters of requests to the API server."""
        return self._connection.statistics

    async def version(self) -> str:
        """Return the version of resource.k8s.io to use: v1, v1beta2 or v1beta1; raise UnsupportedError if it has none.

        The server is asked once, again after an outage, and after a 404 that means the whole kind.
        """
        return await self._discovery.version()

    async def api_version(self, kind: Kind) -> str:
        """Return the `apiVersion` of objects of a kind."""
        return kind.api_version(kind.version or await self.version())

    async def get(self, kind: Kind, name: str, namespace: str = "") -> Object:
        """Read one object. Raises NotFoundError if there is none."""
        return await self._request("GET", kind, name, namespace)

    async def claim(self, name: str, namespace: str) -> ListedClaim:
        """Read what a ResourceClaim is allocated. Raises NotFoundError if there is none."""
        return await self._exchange(_Asked("GET", api.RESOURCE_CLAIMS, name, namespace), forms.CLAIM)

    async def allocated_claims(self) -> list[Object]:
        """Read of all ResourceClaims that are allocated what they are allocated and reserved for, as of one moment."""
        claims, _ = await self._whole(api.RESOURCE_CLAIMS, forms.CLAIMS)
        return [claim.body() for claim in claims if claim.results]

    async def _whole(
        self, kind: Kind, form: Form[Page[T]], namespace: str = "", selectors: Mapping[str, str] | None = None
    ) -> tuple[list[T], str]:
        """Return all parts of a list as one, and its resourceVersion."""
        for again in (True, False):
            items: list[T] = []
            version = ""
            try:
                async for page in self.pages(kind, form, namespace, selectors):
                    items += page.items
                    version = page.resource_version
            except GoneError:
                if not again:
                    raise
                continue
            return items, version
        raise AssertionError("not reached")

    async def list(
        self, kind: Kind, namespace: str = "", *, field_selector: str = "", label_selector: str = ""
    ) -> Listed:
        """Read all objects of a kind as of one moment (a consistent read)."""
        selectors = api.selectors_of(field_selector, label_selector)
        return Listed(*await self._whole(kind, forms.page_of(kind), namespace, selectors))

    async def pages(
        self, kind: Kind, form: Form[Page[T]], namespace: str = "", selectors: Mapping[str, str] | None = None
    ) -> AsyncGenerator[Page[T], None]:
        """Yield the parts of one list, all as of the moment of the first one, each about `forms.PAGE` bytes.

        The first request is a consistent read: without resourceVersion it is answered by etcd, or by a cache that has
        reached etcd's revision. Each further one names that revision. Once etcd has compacted it (after 5 to 10
        minutes) the server answers with 410 and a token that goes on at the newest revision (etcd3/errors.go, 1.36).
        An allocation that passes from a claim in a later part to one in an earlier part is in neither then. So that
        token is not used.

        Raises GoneError where the list has to begin anew, OversizedError: one object is larger than an answer may be.
        """
        limit, version, more = forms.FIRST_LIMIT, "", ""
        while True:
            parameters = {**(selectors or {}), "limit": str(limit), **({"continue": more} if more else {})}
            asked = _Asked("GET", kind, "", namespace, parameters)
            try:
                page = await self._exchange(asked, form, forms.MAX_PAGE if limit > 1 else None)
            except api.OversizedError:
                if limit == 1:
                    raise
                limit = forms.smaller_limit(limit)
                continue
            if version not in ("", page.resource_version):
                raise GoneError(f"list {kind.plural}: its parts are of {version} and of {page.resource_version}")
            yield page
            version, more = page.resource_version, page.more
            if not more:
                return
            limit = forms.next_limit(limit, len(page.items), page.size)

    async def create(self, kind: Kind, body: Object, namespace: str = "", *, dry_run: bool = False) -> Object:
        """Create an object and return it as the server has it; dry_run: the server checks it and does not store it.

        Raises ConflictError if there is one of that name, InvalidError if the server refuses its content,
        VersionChangedError if it was made for another version than the chosen one.
        """
        return await self._request("POST", kind, "", namespace, {"dryRun": "All"} if dry_run else None, body)

    async def replace(self, kind: Kind, body: Object, namespace: str = "") -> Object:
        """Replace the object of this name. Raises ConflictError if it has another `metadata.resourceVersion`."""
        return await self._request("PUT", kind, body["metadata"]["name"], namespace, body=body)

    async def patch(
        self, kind: Kind, name: str, patch: object, namespace: str = "", *, subresource: str = ""
    ) -> Object:
        """Change parts of an object by a merge patch."""
        manager = {"fieldManager": COMPONENT}
        return await self._request("PATCH", kind, name, namespace, manager, patch, subresource=subresource)

    async def delete(self, kind: Kind, name: str, namespace: str = "", *, uid: str = "") -> Object:
        """Delete an object; return its last state or a Status. One with `metadata.finalizers` is still there.

        Raises NotFoundError if there is none, ConflictError if it has another UID than given.
        """
        options: Object = {"apiVersion": "v1", "kind": "DeleteOptions"}
        if uid:
            options["preconditions"] = {"uid": uid}
        return await self._request("DELETE", kind, name, namespace, body=options)

    async def ask_pod(
        self, namespace: str, name: str, port: int, path: str, *, tls: bool = False, timeout: float
    ) -> bytes:
        """Return a pod's answer to a GET through the API server (pods/proxy). timeout: seconds.

        Raises ApiError, with code and message of the API server or of the pod.
        """
        pod = f"{'https:' if tls else ''}{name}:{port}"
        return await self._connection.fetch(path_of(api.PODS, "v1", pod, namespace, "proxy") + path, timeout)

    async def ask_node(self, name: str, path: str, *, timeout: float) -> bytes:
        """Return a node's answer to a GET through the API server (nodes/proxy). timeout: in seconds.

        name: NODE for its kubelet, NODE:PORT or https:NODE:PORT for what else listens there.
        """
        return await self._connection.fetch(path_of(api.NODES, "v1", name, "", "proxy") + path, timeout)

    async def event(self, kind: Kind, metadata: Mapping[str, str], reason: str, message: str, node: str) -> None:
        """Write a warning Event, which `kubectl describe` shows; `message` is cut at 1024 bytes.

        metadata: of the object that it is about; name, namespace and uid are used. node: where it happened.
        """
        namespace = metadata.get("namespace") or "default"
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        body: Object = {
            "metadata": {"generateName": f"{metadata['name'][:200]}.", "namespace": namespace},
            "involvedObject": {
                "apiVersion": await self.api_version(kind),
                "kind": kind.kind,
                **{key: metadata.get(key, "") for key in ("name", "namespace", "uid")},
            },
            "reason": reason,
            "message": message.encode()[:1024].decode(errors="ignore"),
            "type": "Warning",
            "source": {"component": COMPONENT, "host": node},
            "reportingComponent": COMPONENT,
            "reportingInstance": node,
            "firstTimestamp": now,
            "lastTimestamp": now,
            "count": 1,
        }
        await self.create(api.EVENTS, body, namespace)

    async def follow(
        self,
        kind: Kind,
        state: WatchState | None = None,
        /,
        *,
        namespace: str = "",
        field_selector: str = "",
        label_selector: str = "",
    ) -> AsyncGenerator[Listed | Changed, None]:
        """Yield all objects now, then each change, for ever. state: is kept, for others to see if the watch is alive.

        A watch that ends at the requested time is resumed at its position. After any other end (a lost connection, an
        early end, a refusal, silence) it yields a new `Listed`, which replaces all earlier objects. It must not resume
        at the position then: the server's storage may have been restored from an older snapshot. kube-apiserver opens a
        watch at a future position without an error, and sends nothing until its revision has reached that position
        (Cacher.Watch, cacher.go, 1.36).

        Through outages, refusals and servers without DRA it keeps waiting, without a limit. Close the generator
        (`contextlib.aclosing`) to end the watch.
        """
        backoff, state = self.backoff.fresh(), state or WatchState()
        state.patience = self._silence[1] + 3 * self._deadline  # for the version, a list, and the watch's begin
        selectors: dict[str, Any] = {"field_selector": field_selector, "label_selector": label_selector}
        position, listed_in, lost, warned = "", "", False, False
        while True:
            opened = math.inf
            try:
                age = 0.0 if lost else self._watch_seconds[0] / 2
                version = kind.version or await self._discovery.version(older_than=age)
                if not position or version != listed_in:
                    listing = await self.list(kind, namespace, **selectors)
                    version = kind.version or await self.version()
                    position, listed_in = listing.resource_version, version
                    state.heard()
                    yield listing
                seconds = random.uniform(*self._watch_seconds)  # noqa: S311 - no secret
                parameters = {
                    **api.selectors_of(**selectors),
                    "watch": "true",
                    "allowWatchBookmarks": "true",
                    "resourceVersion": position,
                    "timeoutSeconds": str(max(1, round(seconds))),
                }
                target = f"{path_of(kind, version, '', namespace)}?{urllib.parse.urlencode(parameters)}"
                async with self._connection.stream(target) as lines:
                    opened, lost = time.monotonic(), False
                    state.opened()
                    silence = random.uniform(*self._silence)  # noqa: S311 - no secret
                    while line := await _next_line(lines, silence):
                        event = msgspec.json.decode(line, type=Changed)
                        if event.type == "ERROR":
                            raise api.error_of_status(event.object)
                        state.heard()
                        warned = False
                        position = str((event.object.get("metadata") or {}).get("resourceVersion") or position)
                        if event.type in ("ADDED", "MODIFIED", "DELETED"):
                            yield event
                if time.monotonic() - opened < seconds - 1.0:
                    raise UnavailableError(f"watch {kind.plural}: it ended before its time")
                warned = False
                backoff.reset()
            except (ApiError, api.UnsupportedError) as error:
                position = ""
                state.failed(error)
                if time.monotonic() - opened >= 1.0:
                    backoff.reset()  # a server that ends watches at once is not asked at once
                wait = backoff.next()
                if isinstance(error, GoneError):
                    if wait <= backoff.first:
                        wait = 0.0  # the first time there is nothing to wait for
                elif isinstance(error, ApiError):
                    lost = lost or isinstance(error, UnavailableError)
                    if error.code == 404 and not kind.version:
                        self._discovery.forget()  # the server may not serve the version any more
                    wait = max(wait, min(error.retry_after, backoff.most))
                refused = isinstance(error, api.UnsupportedError) or (error.code and not isinstance(error, GoneError))
                if refused and not warned:
                    warned = True
                    logger.warning("watch %s: %s; trying again", kind.plural, error)
                await self.pause(wait)

    async def pause(self, seconds: float) -> None:
        """Wait before another try; a wait while the server is lost ends early when another request is answered."""
        await self._connection.pause(seconds)

    async def _request(
        self,
        method: str,
        kind: Kind,
        name: str,
        namespace: str,
        parameters: Mapping[str, str] | None = None,
        body: object = None,
        subresource: str = "",
    ) -> Object:
        """Return the object that a request is answered with. Raises UnavailableError if it is another."""
        asked = _Asked(method, kind, name, namespace, parameters, body, subresource)
        answer = await self._exchange(asked, forms.JSON)
        if method == "DELETE" and answer.get("kind") == "Status" and answer.get("status") == "Success":
            return answer
        metadata = answer.get("metadata")
        if not isinstance(metadata, dict) or answer.get("kind") != kind.kind or (name and metadata.get("name") != name):
            raise UnavailableError(f"{method} {kind.plural} {name}: the answer is not the requested object")
        return answer

    async def _exchange(self, asked: _Asked, form: Form[T], most: int | None = None) -> T:
        method, kind, name, namespace, parameters, body, subresource = asked
        for again in (True, False):
            version = kind.version or self._discovery.chosen or await self._discovery.version()
            if method in ("POST", "PUT") and isinstance(body, dict):
                api_version = kind.api_version(version)
                if body.setdefault("apiVersion", api_version) != api_version:
                    raise api.VersionChangedError(
                        f"the object is in {body['apiVersion']}, the server uses {api_version}"
                    )
                body.setdefault("kind", kind.kind)
            path = path_of(kind, version, name, namespace, subresource)
            try:
                return await self._connection.exchange(
                    ApiRequest(method, path, parameters, body, kind, name), form, most
                )
            except UnavailableError as error:
                if error.code != 404 or kind.version or not again:
                    raise
                self._discovery.forget()  # perhaps the version is not served: the server is another one now
        raise AssertionError("not reached")


def path_of(kind: Kind, version: str, name: str = "", namespace: str = "", subresource: str = "") -> str:
    """Return the path of one object, or of all of a kind if `name` is empty."""
    parts = ["apis", kind.group, version] if kind.group else ["api", version]
    if namespace:
        parts += ["namespaces", namespace]
    path = ""
    for part in (*parts, kind.plural, name, subresource):
        if part:
            path += f"/{urllib.parse.quote(part, safe='')}"
    return path


async def _next_line(lines: AsyncIterator[bytes], silence: float) -> bytes:
    """Return the next line of a watch, b"" at its end. Raises GoneError if nothing came for `silence` seconds."""
    limit = asyncio.timeout(silence)
    try:
        async with limit:
            return await anext(lines, b"")
    except TimeoutError:
        if limit.expired():
            raise GoneError("the watch is silent") from None
        raise
