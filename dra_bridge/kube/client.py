"""The client of one API server: reads, writes and watches objects, which are dicts in the form of their JSON.

Many agents use one API server, so the client watches objects and never polls. After a failure, the client connects
again after random waits of up to half a minute, so that agents that lose a server at the same time do not all connect
again at the same time. The client logs once when the server becomes unreachable, and once when it responds again.
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
from typing import Any, Final, Self, TypeVar

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

COMPONENT: Final = "dra-bridge"
"""The name that the client gives as field manager of its patches and as source of its Events."""
SILENCE: Final = (180.0, 300.0)
"""Minimum and maximum seconds for which a watch without an event or bookmark counts as alive. For each watch, a random
value between them is used.

kube-apiserver sends a bookmark every minute (defaultBookmarkFrequency, cacher.go, 1.36), but only when its cache has
passed the watch's position. In a cluster without changes, the cache's position moves only with the progress
notifications of etcd, which etcd sends every 10 minutes by default, and every 5 s with kubeadm. So with etcd's default,
the client ends each watch for lack of data about every 4 minutes, and lists the objects again.
"""


@dataclass(frozen=True, slots=True)
class Listed:
    """All objects of a list at one moment. resource_version: the version at which a watch of later changes begins.

    `Cluster.follow` yields such a list first, and again each time the watch has ended earlier than the client
    requested.
    """

    items: list[Object]
    resource_version: str


class Changed(msgspec.Struct, frozen=True):
    """A change of one object. type: ADDED, MODIFIED or DELETED."""

    type: str
    object: Object


_CHANGED: Final = msgspec.json.Decoder(Changed)


class Cluster:
    """An asynchronous client of one API server. The client belongs to one event loop, and every request has a deadline.

    Methods raise ApiError and its subclasses, UnsupportedError for kinds of resource.k8s.io that the server does not
    serve, and AccessError when the configuration cannot be used.
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

        configuration: a function that reads the configuration; it is called at the first request, and again when the
        server cannot be reached. deadline: maximum seconds of one request with its response. backoff: the waits
        before a watch is opened again after a failure. watch_seconds: minimum and maximum seconds for which the client
        asks the server to keep a watch open. silence: minimum and maximum seconds for which a watch without any data
        counts as alive. Between minimum and maximum, a random value is used.
        """
        self.backoff = backoff or Backoff()
        self._connection = Connection(configuration, deadline, self.backoff.most)
        self._discovery = Discovery(self._connection)
        self._deadline = deadline
        self._watch_seconds = watch_seconds
        self._silence = silence

    @classmethod
    def from_environment(
        cls, kubeconfig: str | os.PathLike[str] | None = None, account: Path | None = None, **options: Any
    ) -> Cluster:
        """Make a client of the server in `kubeconfig`, else of the pod's server, else in KUBECONFIG or ~/.kube/config.

        account: the directory of a service account; the client then uses this account instead of the pod's service
        account.
        """
        return cls(lambda: auth.from_environment(kubeconfig, account), **options)

    @classmethod
    def from_server(cls, url: str, **options: Any) -> Cluster:
        """Make a client for the server at a URL, without credentials."""
        return cls(lambda: auth.from_server(url), **options)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def configure(self) -> None:
        """Read the configuration now, before an event loop exists. The call may block.

        Raises AccessError if no configuration is found, or if it cannot be used.
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
        """Return the version of resource.k8s.io to use: v1, v1beta2 or v1beta1.

        The client asks the server once for the versions of resource.k8s.io, and again after an outage or a 404 that
        concerns the whole kind. Raises UnsupportedError if the server serves none of these versions.
        """
        return await self._discovery.version()

    async def api_version(self, kind: Kind) -> str:
        """Return the `apiVersion` of objects of a kind."""
        return kind.api_version(kind.version or await self.version())

    async def get(self, kind: Kind, name: str, namespace: str = "") -> Object:
        """Read one object. Raises NotFoundError if the object does not exist."""
        return await self._request("GET", kind, name, namespace)

    async def claim(self, name: str, namespace: str) -> ListedClaim:
        """Read the allocation of one ResourceClaim. Raises NotFoundError if the claim does not exist."""
        return await self._exchange(forms.CLAIM, "GET", api.RESOURCE_CLAIMS, name, namespace)

    async def allocated_claims(self) -> list[ListedClaim]:
        """Return all allocated ResourceClaims at one moment."""
        claims, _ = await self._whole(api.RESOURCE_CLAIMS, forms.CLAIMS, keep=lambda claim: bool(claim.results))
        return claims

    async def _whole(
        self,
        kind: Kind,
        form: Form[Page[T]],
        namespace: str = "",
        selectors: Mapping[str, str] | None = None,
        keep: Callable[[T], bool] | None = None,
    ) -> tuple[list[T], str]:
        """Read all pages of a list. Return the items for which `keep` is true, and the list's resourceVersion.

        After the first GoneError, the list begins anew.
        """
        for again in (True, False):
            items: list[T] = []
            version = ""
            try:
                async for page in self.pages(kind, form, namespace, selectors):
                    items += filter(keep, page.items) if keep is not None else page.items
                    version = page.resource_version
            except GoneError:
                if not again:
                    raise
                continue
            return items, version
        raise AssertionError("not reached")

    async def list(
        self,
        kind: Kind,
        namespace: str = "",
        *,
        field_selector: str = "",
        label_selector: str = "",
        keep: Callable[[Object], bool] | None = None,
    ) -> Listed:
        """Read all objects of a kind at one moment (a consistent read).

        keep: a function that returns whether the list includes an object.
        """
        selectors = api.selectors_of(field_selector, label_selector)
        return Listed(*await self._whole(kind, forms.page_of(kind), namespace, selectors, keep))

    async def pages(
        self, kind: Kind, form: Form[Page[T]], namespace: str = "", selectors: Mapping[str, str] | None = None
    ) -> AsyncGenerator[Page[T], None]:
        """Yield the pages of one list, each about `forms.PAGE` bytes. All pages show the state at one moment.

        The first request is a consistent read: it names no resourceVersion, so the answer comes from etcd, or from a
        cache that has reached etcd's revision. Each further request names the revision of the first page. Once etcd has
        compacted the revision (after 5 to 10 minutes), the server answers with 410 and a token that continues at the
        newest revision (etcd3/errors.go, 1.36). The client does not use this token: a list of two revisions can miss a
        device whose allocation passes from a claim on a later page to a claim on an earlier page.

        Raises GoneError if the list has to begin anew, OversizedError if one object exceeds the size limit of a
        response.
        """
        limit, version, more = forms.FIRST_LIMIT, "", ""
        while True:
            parameters = {**(selectors or {}), "limit": str(limit), **({"continue": more} if more else {})}
            most = forms.MAX_PAGE if limit > 1 else None
            try:
                page = await self._exchange(form, "GET", kind, "", namespace, parameters, most=most)
            except api.OversizedError:
                if limit == 1:
                    raise
                limit = forms.smaller_limit(limit)
                continue
            if version not in ("", page.resource_version):
                raise GoneError(
                    f"list {kind.plural}: its pages have different versions: {version} and {page.resource_version}"
                )
            yield page
            version, more = page.resource_version, page.more
            if not more:
                return
            limit = forms.next_limit(limit, len(page.items), page.size)

    async def create(self, kind: Kind, body: Object, namespace: str = "", *, dry_run: bool = False) -> Object:
        """Create an object, and return it as the server has stored it.

        dry_run: whether the server only checks the object. Raises ConflictError if an object of this name exists,
        InvalidError if the server refuses the content, VersionChangedError if the object was made for another version
        of resource.k8s.io than the client now uses.
        """
        return await self._request("POST", kind, "", namespace, {"dryRun": "All"} if dry_run else None, body)

    async def replace(self, kind: Kind, body: Object, namespace: str = "") -> Object:
        """Replace the object that has the name in `body`.

        Raises ConflictError if the server has another version of the object.
        """
        return await self._request("PUT", kind, body["metadata"]["name"], namespace, body=body)

    async def patch(
        self, kind: Kind, name: str, patch: object, namespace: str = "", *, subresource: str = ""
    ) -> Object:
        """Change fields of an object by a merge patch. Return the changed object."""
        manager = {"fieldManager": COMPONENT}
        return await self._request("PATCH", kind, name, namespace, manager, patch, subresource=subresource)

    async def delete(self, kind: Kind, name: str, namespace: str = "", *, uid: str = "") -> Object:
        """Delete an object; return a Status, or the object's last state.

        An object with `metadata.finalizers` still exists afterwards. Raises NotFoundError if the object does not exist,
        ConflictError if the object's UID is not `uid`.
        """
        options: Object = {"apiVersion": "v1", "kind": "DeleteOptions"}
        if uid:
            options["preconditions"] = {"uid": uid}
        return await self._request("DELETE", kind, name, namespace, body=options)

    async def ask_pod(
        self, namespace: str, name: str, port: int, path: str, *, tls: bool = False, timeout: float
    ) -> bytes:
        """Return a pod's response to a GET request that the API server forwards (pods/proxy). timeout: seconds.

        Raises ApiError with the code and message of the API server or of the pod.
        """
        pod = f"{'https:' if tls else ''}{name}:{port}"
        return await self._connection.fetch(path_of(api.PODS, "v1", pod, namespace, "proxy") + path, timeout)

    async def ask_node(self, name: str, path: str, *, timeout: float) -> bytes:
        """Return a node's response to a GET request that the API server forwards (nodes/proxy). timeout: seconds.

        name: NODE for the node's kubelet, NODE:PORT or https:NODE:PORT for another server on the node.
        """
        return await self._connection.fetch(path_of(api.NODES, "v1", name, "", "proxy") + path, timeout)

    async def event(self, kind: Kind, metadata: Mapping[str, str], reason: str, message: str, node: str) -> None:
        """Write a warning Event, which `kubectl describe` shows.

        message: the Event's text, of which the client writes at most 1024 bytes. metadata: name, namespace and uid of
        the object that the Event is about. node: the node where the event happened.
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
        keep: Callable[[Object], bool] | None = None,
    ) -> AsyncGenerator[Listed | Changed, None]:
        """Yield a list of all objects of a kind, then each change of objects of this kind, without end.

        state: the generator records the watch's state here. keep: a function that returns whether a `Listed` includes
        an object. If a watch ends at the time that the client requested, a new watch continues at the last
        resourceVersion. After any other end (a lost connection, an early end, a refusal, no data for too long) the
        generator yields a new `Listed`, which replaces all earlier objects. In these cases, the generator does not
        continue at the old resourceVersion, because the server's storage may have been restored from an older snapshot:
        kube-apiserver opens a watch at a future resourceVersion without an error, and sends nothing until its revision
        has reached it (Cacher.Watch, cacher.go, 1.36).

        A watch that was interrupted begins again after a random wait, at most the longest wait of the backoff. All
        watches of this client begin again at the same moment. Short waits would overload a server: if one server ends,
        the watches of all agents are interrupted, and each agent lists all objects again (with short waits, 20 agents
        sent 37 list requests in one second, `tests.fleet`).

        During outages and refusals, and on servers without DRA, the generator waits without a limit. A caller ends the
        watch by closing the generator (`contextlib.aclosing`).
        """
        backoff, state = self.backoff.fresh(), state or WatchState()
        # Before the first data arrives, the client may need up to three requests: for the API version, for a list, and
        # for the watch.
        state.patience = self._silence[1] + 3 * self._deadline
        selectors: dict[str, Any] = {"field_selector": field_selector, "label_selector": label_selector}
        position, listed_in, broken, warned = "", "", False, False
        lost_at = -math.inf
        while True:
            opened = math.inf
            try:
                age = min(self._watch_seconds[0] / 2, time.monotonic() - lost_at)
                version = kind.version or await self._discovery.version(older_than=age)
                if not position or version != listed_in:
                    listing = await self.list(kind, namespace, **selectors, keep=keep)
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
                    opened, lost_at, broken = time.monotonic(), -math.inf, False
                    state.opened()
                    silence = random.uniform(*self._silence)  # noqa: S311 - no secret
                    while line := await _next_line(lines, silence):
                        event = _CHANGED.decode(line)
                        if event.type == "ERROR":
                            raise api.error_of_status(event.object)
                        state.heard()
                        warned = False
                        position = str((event.object.get("metadata") or {}).get("resourceVersion") or position)
                        if event.type in ("ADDED", "MODIFIED", "DELETED"):
                            if kind is api.NODES:
                                forms.trim_node(event.object)
                            yield event
                if time.monotonic() - opened < seconds - 1.0:
                    raise UnavailableError(f"watch {kind.plural}: the server ended it before the requested time")
                warned = False
                backoff.reset()
            except (ApiError, api.UnsupportedError) as error:
                position = ""
                state.failed(error)
                if time.monotonic() - opened >= 1.0:
                    # Even after a watch that was open, the next try comes after a wait, because the server may end each
                    # watch soon.
                    backoff.reset()
                wait = backoff.next()
                if isinstance(error, GoneError):
                    if wait <= backoff.first:
                        wait = 0.0  # After the first GoneError, list without a wait.
                elif isinstance(error, ApiError):
                    if isinstance(error, UnavailableError):
                        lost_at = time.monotonic()
                        broken = broken or opened < math.inf
                    if error.code == 404 and not kind.version:
                        # The server may no longer serve the chosen version of resource.k8s.io, so choose one again.
                        self._discovery.forget()
                    if broken:
                        wait = self._connection.apart()
                    # The server sends the same Retry-After to all clients, so this time is added to the random wait.
                    wait += min(error.retry_after, backoff.most)
                refused = isinstance(error, api.UnsupportedError) or (error.code and not isinstance(error, GoneError))
                if refused and not warned:
                    warned = True
                    logger.warning("the watch of %s failed: %s; trying again", kind.plural, error)
                await self.pause(wait)

    async def pause(self, seconds: float) -> None:
        """Wait for this number of seconds before another try.

        If the server is unreachable, the wait ends as soon as another request succeeds.
        """
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
        """Send a request, and return the object in the response.

        Raises UnavailableError if the response is not the requested object.
        """
        answer = await self._exchange(forms.JSON, method, kind, name, namespace, parameters, body, subresource)
        if method == "DELETE" and answer.get("kind") == "Status" and answer.get("status") == "Success":
            return answer
        metadata = answer.get("metadata")
        if not isinstance(metadata, dict) or answer.get("kind") != kind.kind or (name and metadata.get("name") != name):
            raise UnavailableError(f"{method} {kind.plural} {name}: the answer is not the requested object")
        if kind is api.NODES:
            forms.trim_node(answer)
        return answer

    async def _exchange(
        self,
        form: Form[T],
        method: str,
        kind: Kind,
        name: str,
        namespace: str,
        parameters: Mapping[str, str] | None = None,
        body: object = None,
        subresource: str = "",
        *,
        most: int | None = None,
    ) -> T:
        """Send a request whose path contains the chosen version of resource.k8s.io; return the decoded response."""
        for again in (True, False):
            version = kind.version or self._discovery.chosen or await self._discovery.version()
            if method in ("POST", "PUT") and isinstance(body, dict):
                api_version = kind.api_version(version)
                if body.setdefault("apiVersion", api_version) != api_version:
                    raise api.VersionChangedError(
                        f"the object has the version {body['apiVersion']}, the client uses {api_version}"
                    )
                body.setdefault("kind", kind.kind)
            path = path_of(kind, version, name, namespace, subresource)
            try:
                request = ApiRequest(method, path, parameters, body, kind, name)
                return await self._connection.exchange(request, form, most)
            except UnavailableError as error:
                if error.code != 404 or kind.version or not again:
                    raise
                # After an update of the server, it may no longer serve this version, so choose a version again.
                self._discovery.forget()
        raise AssertionError("not reached")


def path_of(kind: Kind, version: str, name: str = "", namespace: str = "", subresource: str = "") -> str:
    """Return the path of one object, or of all objects of a kind if `name` is empty."""
    parts = ["apis", kind.group, version] if kind.group else ["api", version]
    if namespace:
        parts += ["namespaces", namespace]
    path = ""
    for part in (*parts, kind.plural, name, subresource):
        if part:
            path += f"/{urllib.parse.quote(part, safe='')}"
    return path


async def _next_line(lines: AsyncIterator[bytes], silence: float) -> bytes:
    """Return the next line of a watch, b"" at its end. Raises GoneError after `silence` seconds without a line."""
    limit = asyncio.timeout(silence)
    try:
        async with limit:
            return await anext(lines, b"")
    except TimeoutError:
        if limit.expired():
            raise GoneError("the watch sends nothing") from None
        raise
