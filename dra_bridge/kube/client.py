"""The API server: requests with deadlines, list-and-watch, and which resource.k8s.io it speaks.

The only room that knows how Kubernetes is reached. Objects are plain dicts as JSON has them, so no
model classes are loaded. How the server is reached and how requests get there is other rooms'
business (`access`, `http`) and does not show: errors are this module's own and so is list-and-watch.

Many agents talk to one API server. Nothing here polls, a lost server is asked again after random
waits that grow to half a minute, and what is lost or back is logged once.
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
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, field
from typing import Any, Final, Literal, NamedTuple, Self

import msgspec

from dra_bridge.kube import auth as access
from dra_bridge.kube import http
from dra_bridge.kube.auth import Access

__all__ = [
    "DEVICE_CLASSES",
    "EVENTS",
    "NODES",
    "PODS",
    "RESOURCE_CLAIMS",
    "RESOURCE_SLICES",
    "AccessError",
    "AlreadyExistsError",
    "ApiError",
    "Backoff",
    "Cause",
    "Changed",
    "Cluster",
    "ClusterError",
    "ConflictError",
    "ForbiddenError",
    "GoneError",
    "InvalidError",
    "Kind",
    "Listed",
    "Listing",
    "NotFoundError",
    "Object",
    "Statistics",
    "UnauthorizedError",
    "UnavailableError",
    "UnsupportedError",
    "VersionChangedError",
]

Object = dict[str, Any]
"""A Kubernetes object as JSON has it."""

logger: Final = logging.getLogger(__name__)

GROUP: Final = "resource.k8s.io"
VERSIONS: Final = ("v1", "v1beta2", "v1beta1")
"""The versions of resource.k8s.io that are spoken, the best first (v1 since 1.34, v1beta2 1.33, v1beta1 1.32)."""

DEADLINE: Final = 10.0
"""Seconds for one request and its answer, retries not counted."""


class Kind(NamedTuple):
    """A kind of objects. `version` empty means the version of resource.k8s.io that was chosen."""

    group: str
    version: str
    plural: str
    kind: str
    namespaced: bool


NODES: Final = Kind("", "v1", "nodes", "Node", False)
PODS: Final = Kind("", "v1", "pods", "Pod", True)
EVENTS: Final = Kind("", "v1", "events", "Event", True)
RESOURCE_SLICES: Final = Kind(GROUP, "", "resourceslices", "ResourceSlice", False)
RESOURCE_CLAIMS: Final = Kind(GROUP, "", "resourceclaims", "ResourceClaim", True)
DEVICE_CLASSES: Final = Kind(GROUP, "", "deviceclasses", "DeviceClass", False)


# --- errors ---------------------------------------------------------------------------------------


class ClusterError(Exception):
    """Raised when something about the API server fails; the base of all errors here."""


class AccessError(ClusterError):
    """Raised when there is no configuration to reach an API server with, or it cannot be used."""


class UnsupportedError(ClusterError):
    """Raised when the API server serves no version of resource.k8s.io that is spoken here."""


class VersionChangedError(ClusterError):
    """Raised when an object was made for a version of resource.k8s.io that is not the chosen one any more."""


class Cause(NamedTuple):
    """One detail of a refusal: the field, a reason for programs, and a message for people."""

    field: str
    reason: str
    message: str


class ApiError(ClusterError):
    """Raised when a request was refused, or not answered.

    Attributes:
        code: the HTTP status, 0 if there was no answer.
        reason: the server's reason in one word, may be empty.
        message: what the server said.
        causes: its details, one for each wrong field.
        retry_after: seconds that the server asks to wait, 0 if it does not.

    """

    def __init__(
        self,
        message: str,
        *,
        code: int = 0,
        reason: str = "",
        causes: tuple[Cause, ...] = (),
        retry_after: float = 0.0,
    ) -> None:
        self.code = code
        self.reason = reason
        self.message = message
        self.causes = causes
        self.retry_after = retry_after
        super().__init__(f"{code} {reason}: {message}" if code else message)


class UnavailableError(ApiError):
    """Raised when the API server did not answer in time, not at all, or cannot serve now; try later.

    Also when the answer cannot be that of an API server to this request: a 404 that does not name
    the object that was asked for, or another object in its place.
    """


class UnauthorizedError(ApiError):
    """Raised when the API server does not know who asks (401)."""


class ForbiddenError(ApiError):
    """Raised when the one who asks may not do that (403)."""


class NotFoundError(ApiError):
    """Raised when the API server says that the object which was asked for does not exist, and names it (404)."""


class ConflictError(ApiError):
    """Raised when the object is another by now: newer, or another UID (409)."""


class AlreadyExistsError(ConflictError):
    """Raised when an object of that name exists (409)."""


class GoneError(ApiError):
    """Raised when a position in the history is too old to go on from (410)."""


class InvalidError(ApiError):
    """Raised when the API server will never take this; `causes` names the fields (400, 413, 422)."""


_ERRORS: Final[Mapping[int, type[ApiError]]] = {
    400: InvalidError,
    401: UnauthorizedError,
    403: ForbiddenError,
    404: UnavailableError,
    408: UnavailableError,
    409: ConflictError,
    410: GoneError,
    413: InvalidError,
    415: InvalidError,
    422: InvalidError,
    429: UnavailableError,
}


class _Cause(msgspec.Struct):
    field: str = ""
    reason: str = ""
    message: str = ""


class _Details(msgspec.Struct):
    name: str = ""
    group: str = ""
    kind: str = ""
    causes: list[_Cause] = []
    retry_after: int = msgspec.field(default=0, name="retryAfterSeconds")


class _Status(msgspec.Struct):
    """What of a metav1.Status matters here."""

    kind: Literal["Status"]
    code: int = 500
    reason: str = ""
    message: str = "no message"
    details: _Details = msgspec.field(default_factory=_Details)


def error_of(code: int, body: bytes, retry_after: str = "", *, kind: Kind | None = None, name: str = "") -> ApiError:
    """Return the error that an answer stands for; `body` is a Status object, or any text.

    kind, name: the object that was asked for, if it was one.
    """
    try:
        status = msgspec.json.decode(body, type=_Status)
    except (msgspec.MsgspecError, RecursionError):
        status = _Status("Status", message=body[:400].decode(errors="replace").strip() or "no further answer")
    status.code = code
    if retry_after.isdecimal():
        status.details.retry_after = int(retry_after[:9])
    return _error_of_status(status, kind, name)


def _error_of_status(status: _Status, kind: Kind | None = None, name: str = "") -> ApiError:
    error = _ERRORS.get(status.code) or (UnavailableError if status.code >= 500 else ApiError)
    if status.reason == "AlreadyExists":
        error = AlreadyExistsError
    elif status.code == 404 and status.reason == "NotFound" and kind is not None and _names(status.details, kind, name):
        error = NotFoundError
    return error(
        status.message,
        code=status.code,
        reason=status.reason,
        causes=tuple(Cause(cause.field, cause.reason, cause.message) for cause in status.details.causes),
        retry_after=float(status.details.retry_after),
    )


def _names(details: _Details, kind: Kind, name: str) -> bool:
    """Whether the details of a Status name this object, as NewNotFound of k8s.io/apimachinery writes them.

    `kind` is the resource's plural there. A proxy, a namespace that is missing, a kind or a version
    that is not served name something else or nothing.
    """
    return (
        bool(name)
        and details.name == name
        and details.kind in ("", kind.plural, kind.kind)
        and details.group in ("", kind.group)
    )


# --- values ---------------------------------------------------------------------------------------


class Listing(NamedTuple):
    """A list and the position in the history at which it is true."""

    items: list[Object]
    resource_version: str


@dataclass(frozen=True, slots=True)
class Listed:
    """All objects there are: at the beginning, and whenever a watch did not end as it was asked to.

    version: of resource.k8s.io in which the objects are; empty for other groups.
    """

    items: tuple[Object, ...]
    resource_version: str
    version: str = ""


@dataclass(frozen=True, slots=True)
class Changed:
    """One object that was added, changed or deleted since."""

    type: Literal["ADDED", "MODIFIED", "DELETED"]
    object: Object


@dataclass(frozen=True, slots=True)
class Statistics:
    """What went to the API server so far; never changed, replaced.

    requests: answered or not, by HTTP method. failures: those not answered, or with a 429 or 5xx.
    watches: streams opened. lost_since: time.monotonic() of the first failure since the last
    answer, None while the server answers. version: of resource.k8s.io, empty if not chosen yet.
    """

    requests: Mapping[str, int] = field(default_factory=dict)
    failures: int = 0
    watches: int = 0
    lost_since: float | None = None
    version: str = ""

    @property
    def writes(self) -> int:
        """Requests that change something."""
        return sum(count for method, count in self.requests.items() if method != "GET")


class Backoff:
    """Waits that double from `base` to `cap` seconds, each shortened at random to down to a half."""

    def __init__(
        self, base: float = 0.25, cap: float = 30.0, *, draw: Callable[[float, float], float] = random.uniform
    ) -> None:
        self.base = base
        self.cap = cap
        self._draw = draw
        self._failures = 0

    def __repr__(self) -> str:
        return f"<Backoff {self.base} to {self.cap} s, {self._failures} failures>"

    def next(self) -> float:
        """Return the seconds to wait after one more failure."""
        longest = min(self.cap, self.base * 2.0 ** min(self._failures, 32))
        self._failures += 1
        return self._draw(longest / 2, longest)

    def longest(self) -> float:
        """Return the seconds to wait where only time will help, or somebody else."""
        return self._draw(self.cap / 2, self.cap)

    def reset(self) -> None:
        """Begin anew: something went well."""
        self._failures = 0

    def fresh(self) -> Backoff:
        """Return another one of the same kind, without failures."""
        return Backoff(self.base, self.cap, draw=self._draw)


# --- the client -----------------------------------------------------------------------------------

SILENCE: Final = (180.0, 300.0)
"""Seconds for which a watch without event and bookmark is believed, drawn between the two.

kube-apiserver sends a bookmark every minute (defaultBookmarkFrequency, cacher.go, 1.36), but only when its
cache has passed the watch's position. In a cluster where nothing changes the cache moves with etcd's progress
notifications: every 5 s as kubeadm sets it up, every 10 minutes by etcd's default. A node then lists its own
objects once in about 4 minutes for each watch.
"""
_RENEW: Final = 10.0
"""Seconds between two readings of the configuration when the server cannot be reached or does not know us."""


class Cluster:
    """One API server, asynchronously. Belongs to one event loop; every request has a deadline.

    Use as an async context manager, or call `aclose`. Methods raise the errors of this module:
    ApiError and what derives from it, UnsupportedError where resource.k8s.io is asked for and not
    served, AccessError when the configuration cannot be used.
    """

    def __init__(
        self,
        configuration: Callable[[], Awaitable[Access]],
        *,
        deadline: float = DEADLINE,
        backoff: Backoff | None = None,
        watch_seconds: tuple[float, float] = (240.0, 480.0),
        silence: tuple[float, float] = SILENCE,
        user_agent: str = "dra-bridge",
    ) -> None:
        """Connect to nothing yet.

        configuration: read at the first request, and again when the server cannot be reached.
        deadline: seconds for one request. backoff: the waits of watches after failures.
        watch_seconds: how long the server is asked to keep a watch open, drawn between the two.
        silence: how long a watch is believed that sends nothing, drawn between the two.
        """
        self.deadline = deadline
        self.backoff = backoff or Backoff()
        self._configuration = configuration
        self._watch_seconds = watch_seconds
        self._silence = silence
        self._user_agent = user_agent
        self._connection: tuple[Access, http.Server] | None = None
        self._server = ""
        self._made_at = 0.0
        self._renew = False
        self._former: list[http.Server] = []
        self._version = ""
        self._version_at = 0.0
        self._choosing = asyncio.Lock()
        self._connecting = asyncio.Lock()
        self._requests: dict[str, int] = {}
        self._failures = 0
        self._watches = 0
        self._lost_since: float | None = None
        self._back = asyncio.Event()
        self._said: set[str] = set()
        self._positions: dict[str, int] = {}
        """The highest resourceVersion seen, by the kind's plural: kinds may lie in different etcds."""
        self._restored = 0
        """How often a list was older than what had been seen before."""
        self._reads: set[asyncio.Timeout] = set()
        """The deadlines of the watches' reads under way."""

    @classmethod
    def from_environment(cls, kubeconfig: str | os.PathLike[str] | None = None, **options: Any) -> Cluster:
        """Reach the server that a kubeconfig file names, else the one of the pod, else KUBECONFIG or ~/.kube/config.

        options: as of the class.
        """
        return cls(lambda: access.from_environment(kubeconfig), **options)

    @classmethod
    def from_server(cls, url: str, *, token: str = "", ca_file: str = "", **options: Any) -> Cluster:
        """Reach the server at a URL, with a bearer token and a file of CA certificates if given."""

        async def configuration() -> Access:
            return access.from_server(url, token=token, ca_file=ca_file)

        return cls(configuration, **options)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def __repr__(self) -> str:
        return f"<Cluster {self._server or 'not connected'}>"

    def configure(self) -> None:
        """Read the configuration now, so that a wrong one is known before anything else is begun.

        Before there is an event loop; may block.

        Raises:
            AccessError: there is none, or it cannot be used.

        """
        asyncio.run(self._connect())

    async def aclose(self) -> None:
        """Close all connections; watches that are still followed fail."""
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection[1].aclose()
        for former in self._former:
            await former.aclose()

    @property
    def statistics(self) -> Statistics:
        """What went to the API server so far."""
        return Statistics(dict(self._requests), self._failures, self._watches, self._lost_since, self._version)

    # --- which resource.k8s.io ---

    async def version(self, *, older_than: float | None = None) -> str:
        """Return the version of resource.k8s.io to speak: v1, v1beta2 or v1beta1.

        Asked of the server once, again after an outage, after a 404 that means the whole kind, and
        when the answer is older than `older_than` seconds.

        Raises:
            UnsupportedError: the server serves none of them.

        """
        async with self._choosing:
            if self._version and (older_than is None or time.monotonic() - self._version_at <= older_than):
                return self._version
            before, chosen = self._version, ""
            served = await self._group()
            names = {entry.get("version") for entry in served.get("versions") or ()}
            for version in (version for version in VERSIONS if version in names):
                if version != before:
                    known = await self._send("GET", f"/apis/{GROUP}/{version}")
                    if not any(entry.get("name") == RESOURCE_SLICES.plural for entry in known.get("resources") or ()):
                        continue
                chosen = version
                break
            self._version, self._version_at = chosen, time.monotonic()
            if not chosen:
                raise UnsupportedError(
                    f"the API server serves none of {GROUP}/{', '.join(VERSIONS)}: Dynamic Resource Allocation is off"
                )
            if chosen != before:
                logger.info("the API server is spoken to in %s/%s", GROUP, chosen)
            return chosen

    async def _group(self) -> Object:
        """Return what the server serves of resource.k8s.io; empty if its list of groups is without it."""
        try:
            return await self._send("GET", f"/apis/{GROUP}")
        except ApiError as error:
            if error.code != 404:
                raise
        groups = (await self._send("GET", "/apis")).get("groups")
        if not isinstance(groups, list):
            raise UnavailableError("GET /apis: the answer is no list of API groups")
        return next((group for group in groups if group.get("name") == GROUP), {})

    async def api_version(self, kind: Kind) -> str:
        """Return the `apiVersion` of objects of a kind."""
        version = kind.version or await self.version()
        return f"{kind.group}/{version}" if kind.group else version

    # --- verbs ---

    async def get(self, kind: Kind, name: str, namespace: str = "", *, deadline: float | None = None) -> Object:
        """Read one object.

        Raises:
            NotFoundError: there is none.

        """
        return await self._request("GET", kind, name, namespace, deadline=deadline)

    async def list(
        self,
        kind: Kind,
        namespace: str = "",
        *,
        field_selector: str = "",
        label_selector: str = "",
        page: int = 500,
        deadline: float | None = None,
    ) -> Listing:
        """Read all objects of a kind as of now (a consistent read), in all namespaces unless one is given.

        page: objects an answer; the pages together are one moment's state.
        """
        selectors = _selectors(field_selector, label_selector)
        before = self._positions.get(kind.plural, 0)
        items: list[Object] = []
        follow = ""
        while True:
            parameters = {**selectors, "limit": str(page)} if page else dict(selectors)
            if follow:
                parameters["continue"] = follow
            try:
                answer = await self._request("GET", kind, "", namespace, parameters=parameters, deadline=deadline)
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
                self._moved(kind, position, before)
                return Listing(items, position)

    async def create(
        self, kind: Kind, body: Object, namespace: str = "", *, dry_run: bool = False, deadline: float | None = None
    ) -> Object:
        """Create an object and return it as the server has it.

        dry_run: only see what would come of it.

        Raises:
            AlreadyExistsError: there is one of that name.
            InvalidError: the server refuses its content.
            VersionChangedError: it was made for another version than the chosen one.

        """
        parameters = {"dryRun": "All"} if dry_run else {}
        return await self._request("POST", kind, "", namespace, parameters=parameters, body=body, deadline=deadline)

    async def replace(self, kind: Kind, body: Object, namespace: str = "", *, deadline: float | None = None) -> Object:
        """Replace the object that is named like this one, if it still has its `metadata.resourceVersion`.

        Raises:
            ConflictError: it changed meanwhile. NotFoundError: there is none.
            InvalidError, VersionChangedError: as for `create`.

        """
        return await self._request("PUT", kind, body["metadata"]["name"], namespace, body=body, deadline=deadline)

    async def patch(
        self,
        kind: Kind,
        name: str,
        patch: object,
        namespace: str = "",
        *,
        subresource: str = "",
        content: Literal["merge", "strategic", "json", "apply"] = "merge",
        field_manager: str = "dra-bridge",
        deadline: float | None = None,
    ) -> Object:
        """Change parts of an object, by a merge, strategic merge or JSON patch, or by server-side apply (forced)."""
        parameters = {"fieldManager": field_manager}
        if content == "apply":
            parameters["force"] = "true"
        return await self._request(
            "PATCH",
            kind,
            name,
            namespace,
            subresource=subresource,
            parameters=parameters,
            body=patch,
            content_type=_PATCHES[content],
            deadline=deadline,
        )

    async def patch_status(
        self, kind: Kind, name: str, patch: object, namespace: str = "", *, deadline: float | None = None
    ) -> Object:
        """Change parts of an object's status by a merge patch `{"status": ...}`."""
        return await self.patch(kind, name, patch, namespace, subresource="status", deadline=deadline)

    async def delete(
        self,
        kind: Kind,
        name: str,
        namespace: str = "",
        *,
        uid: str = "",
        resource_version: str = "",
        deadline: float | None = None,
    ) -> None:
        """Delete an object, if it still has this UID and resourceVersion where they are given.

        Raises:
            NotFoundError: there is none. ConflictError: it is another one by now.

        """
        wanted = {"uid": uid, "resourceVersion": resource_version}
        conditions = {key: value for key, value in wanted.items() if value}
        options: Object = {"apiVersion": "v1", "kind": "DeleteOptions"}
        if conditions:
            options["preconditions"] = conditions
        await self._request("DELETE", kind, name, namespace, body=options, deadline=deadline)

    async def event(
        self,
        regarding: Object,
        reason: str,
        message: str,
        *,
        warning: bool = True,
        node: str = "",
        component: str = "dra-bridge",
    ) -> None:
        """Tell about an object where `kubectl describe` shows it; `message` is cut at 1024 bytes.

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
                "apiVersion": regarding.get("apiVersion", ""),
                "kind": regarding.get("kind", ""),
                "name": metadata.get("name", ""),
                "namespace": metadata.get("namespace", ""),
                "uid": metadata.get("uid", ""),
            },
            "reason": reason,
            "message": message.encode()[:1024].decode(errors="ignore"),
            "type": "Warning" if warning else "Normal",
            "source": {"component": component, **({"host": node} if node else {})},
            "reportingComponent": component,
            "reportingInstance": node,
            "firstTimestamp": now,
            "lastTimestamp": now,
            "count": 1,
        }
        await self.create(EVENTS, body, namespace)

    # --- list-and-watch ---

    async def follow(
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
        backoff = self.backoff.fresh()
        selectors = _selectors(field_selector, label_selector)
        what = f"watch {kind.plural}"
        position, listed_in, restored, lost = "", "", 0, False
        while True:
            opened = math.inf
            try:
                version = ""
                if not kind.version:
                    version = await self.version(older_than=0.0 if lost else self._watch_seconds[0] / 2)
                if not position or version != listed_in:
                    listing = await self.list(
                        kind, namespace, field_selector=field_selector, label_selector=label_selector
                    )
                    restored = self._restored
                    version = "" if kind.version else await self.version()
                    position, listed_in = listing.resource_version, version
                    yield Listed(tuple(listing.items), position, version)
                seconds = random.uniform(*self._watch_seconds)  # noqa: S311 - no secret
                changes = self._watch(kind, namespace, selectors, position, listed_in, seconds, restored)
                async with aclosing(changes):
                    async for event, found in changes:
                        if event == "OPEN":
                            opened, lost = time.monotonic(), False
                            continue
                        self._said.discard(what)
                        position = str((found.get("metadata") or {}).get("resourceVersion") or position)
                        self._moved(kind, position)
                        if event in ("ADDED", "MODIFIED", "DELETED"):
                            yield Changed(event, found)  # type: ignore[arg-type]  # just compared
                if time.monotonic() - opened < seconds - 1.0:
                    raise UnavailableError(f"{what}: it ended before its time")
                self._said.discard(what)
                backoff.reset()
            except (ApiError, UnsupportedError) as error:
                position = ""
                if time.monotonic() - opened >= 1.0:
                    backoff.reset()  # a server that ends watches at once is not asked at once
                wait = backoff.next()
                if isinstance(error, GoneError):
                    if wait <= backoff.base:
                        wait = 0.0  # the first time there is nothing to wait for
                elif isinstance(error, ApiError):
                    lost = lost or isinstance(error, UnavailableError)
                    if error.code == 404 and not kind.version:
                        self._version = ""  # the version is not served any more
                    wait = max(wait, min(error.retry_after, backoff.cap))
                if isinstance(error, UnsupportedError) or (error.code and not isinstance(error, GoneError)):
                    self._say_once(what, f"{error}")
                await self.pause(wait)

    def _moved(self, kind: Kind, position: str, before: int = 0) -> None:
        """Note a resourceVersion; a consistent list's is at least as high as what was seen before it was asked for.

        If it is not, the server's storage was restored: open watches may be silent from here on.
        """
        number = int(position) if position.isdecimal() and len(position) < 20 else 0
        if number < before:
            logger.warning(
                "the API server went back from resourceVersion %d to %d of %s; all watches list again",
                before,
                number,
                kind.plural,
            )
            self._restored += 1
            self._positions.clear()
            for read in self._reads:
                if not read.expired():
                    read.reschedule(0.0)
        self._positions[kind.plural] = max(number, self._positions.get(kind.plural, 0))

    async def pause(self, seconds: float) -> None:
        """Wait before trying again: some seconds, or less if the server is lost and another request finds it back."""
        if self._lost_since is None:
            await asyncio.sleep(seconds)
            return
        try:
            async with asyncio.timeout(seconds):
                await self._back.wait()
        except TimeoutError:
            pass

    async def _watch(
        self,
        kind: Kind,
        namespace: str,
        selectors: Mapping[str, str],
        position: str,
        version: str,
        seconds: float,
        restored: int,
    ) -> AsyncGenerator[tuple[str, Object], None]:
        parameters = {
            **selectors,
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": position,
            "timeoutSeconds": str(max(1, round(seconds))),
        }
        path = f"{_path(kind, kind.version or version, '', namespace)}?{urllib.parse.urlencode(parameters)}"
        self._watches += 1
        self._requests["GET"] = self._requests.get("GET", 0) + 1
        async with AsyncExitStack() as stack:
            try:
                server, headers = await self._connected()
                async with asyncio.timeout(self.deadline):
                    response, lines = await stack.enter_async_context(server.stream("GET", path, headers))
                if response.status == 401 and (renewed := await self._connected(refused=True))[1] != headers:
                    server, headers = renewed
                    async with asyncio.timeout(self.deadline):
                        response, lines = await stack.enter_async_context(server.stream("GET", path, headers))
                if response.status != 200:
                    raise self._refused(response)
                self._answered()
                yield "OPEN", {}
                silence = random.uniform(*self._silence)  # noqa: S311 - no secret
                while line := await self._read(lines, silence, restored):
                    event = _WATCH_EVENT.decode(line)
                    if event.type == "ERROR":
                        raise _error_of_status(msgspec.convert(event.object, _Status))
                    yield event.type, event.object
            except _FAILURES as error:
                raise self._failed("GET", path.partition("?")[0], error) from error

    async def _read(self, lines: AsyncIterator[bytes], silence: float, restored: int) -> bytes:
        """Return the next line of a watch's stream, b"" at its end.

        Raises:
            GoneError: nothing came for `silence` seconds, or the server went back meanwhile.

        """
        if self._restored != restored:
            raise GoneError("the API server went back")
        limit = asyncio.timeout(silence)
        try:
            async with limit:
                self._reads.add(limit)
                return await anext(lines, b"")
        except TimeoutError:
            if limit.expired():
                raise GoneError("the watch is silent") from None
            raise
        finally:
            self._reads.discard(limit)

    # --- one request ---

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
        content_type: str = "application/json",
        deadline: float | None = None,
    ) -> Object:
        for again in (True, False):
            version = kind.version or await self.version()
            if method in ("POST", "PUT") and isinstance(body, dict):
                made = f"{kind.group}/{version}" if kind.group else version
                if body.setdefault("apiVersion", made) != made:
                    raise VersionChangedError(
                        f"the object is in {body['apiVersion']}, the server is spoken to in {made}"
                    )
                body.setdefault("kind", kind.kind)
            path = _path(kind, version, name, namespace, subresource)
            try:
                answer = await self._send(method, path, parameters, body, content_type, deadline, kind, name)
            except UnavailableError as error:
                if error.code != 404 or kind.version or not again:
                    raise
                self._version = ""  # perhaps the version is missing: the server is another one now
            else:
                _check(answer, method, path, kind, name)
                return answer
        raise AssertionError("not reached")

    async def _send(
        self,
        method: str,
        path: str,
        parameters: Mapping[str, str] | None = None,
        body: object = None,
        content_type: str = "application/json",
        deadline: float | None = None,
        kind: Kind | None = None,
        name: str = "",
    ) -> Object:
        content = b"" if body is None else msgspec.json.encode(body)
        more = {"Content-Type": content_type} if content else {}
        target = f"{path}?{urllib.parse.urlencode(parameters)}" if parameters else path

        async def once(connected: tuple[http.Server, dict[str, str]]) -> http.Response:
            server, headers = connected
            self._requests[method] = self._requests.get(method, 0) + 1
            async with asyncio.timeout(deadline or self.deadline):
                return await server.request(method, target, headers | more, content)

        try:
            connected = await self._connected()
            response = await once(connected)
            if response.status == 401 and (renewed := await self._connected(refused=True))[1] != connected[1]:
                response = await once(renewed)
            if response.status >= 300:
                raise self._refused(response, kind, name)
        except _FAILURES as error:
            raise self._failed(method, path, error) from error
        self._answered()
        try:
            answer = msgspec.json.decode(response.body)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise UnavailableError(f"{method} {path}: the answer is not JSON: {error}") from error
        return answer if isinstance(answer, dict) else {"value": answer}

    def _refused(self, response: http.Response, kind: Kind | None = None, name: str = "") -> ApiError:
        retry_after = response.headers.get("retry-after", "")
        error = error_of(response.status, response.body, retry_after, kind=kind, name=name)
        if isinstance(error, UnavailableError):
            self._failures += 1
        else:
            self._answered()
        if isinstance(error, UnauthorizedError):
            self._renew = True
        return error

    def _failed(self, method: str, path: str, error: BaseException) -> ApiError:
        self._failures += 1
        self._renew = True
        said = "no answer in time" if isinstance(error, TimeoutError) else str(error)
        said = said or type(error).__name__
        if self._lost_since is None:
            self._lost_since = time.monotonic()
            self._back.clear()
            logger.warning("the API server %s is lost: %s", self._server, said)
        return UnavailableError(f"{method} {path}: {said}")

    def _answered(self) -> None:
        self._renew = False  # it is there, and knows us, by the configuration as it was read
        if self._lost_since is not None:
            seconds = time.monotonic() - self._lost_since
            self._lost_since = None
            self._back.set()
            self._version_at = float("-inf")  # it may be a newer one: ask again when next it matters
            logger.info("the API server %s is back after %.1f s", self._server, seconds)

    def _say_once(self, what: str, message: str) -> None:
        if what not in self._said:
            self._said.add(what)
            logger.warning("%s: %s; trying again", what, message)

    async def _connect(self) -> None:
        """Read the configuration; one that cannot be used leaves what there is."""
        try:
            made = await self._configuration()
            server = http.Server(made.url, made.tls, made.proxy or http.proxy_of(made.url), made.server_name)
        except (access.AccessError, OSError, ValueError) as error:
            if self._connection is None:
                raise AccessError(f"cannot reach an API server: {error}") from error
        else:
            old, self._connection = self._connection, (made, server)
            self._server = made.url
            # Watches that live on its connections go on: to cut them would look like the next outage.
            former = self._former if old is None else [*self._former, old[1]]
            self._former = [one for one in former if await one.retire()]
        self._made_at, self._renew = time.monotonic(), False

    async def _connected(self, *, refused: bool = False) -> tuple[http.Server, dict[str, str]]:
        """Return the server and the headers that tell it who asks; refused: it did not know the last ones.

        Not bound by a request's deadline: somebody may have to log in for a credential plugin.
        """
        async with self._connecting:
            if self._connection is None or (self._renew and time.monotonic() - self._made_at >= _RENEW):
                await self._connect()
        assert self._connection is not None
        reached, server = self._connection
        headers = {"User-Agent": self._user_agent, "Accept": "application/json"}
        if authorization := await reached.authorize(refused):
            headers["Authorization"] = authorization
        return server, headers


class _WatchEvent(msgspec.Struct):
    type: str
    object: Object


_WATCH_EVENT: Final = msgspec.json.Decoder(_WatchEvent)

_FAILURES: Final = (
    http.HttpError,
    TimeoutError,
    OSError,
    access.AccessError,
    ValueError,
    RecursionError,
)
"""What a request without an answer ends with: also a token file or plugin that fails, and JSON that is none."""

_PATCHES: Final[Mapping[str, str]] = {
    "merge": "application/merge-patch+json",
    "strategic": "application/strategic-merge-patch+json",
    "json": "application/json-patch+json",
    "apply": "application/apply-patch+yaml",
}


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
        raise UnavailableError(f"{method} {path}: the answer is not what was asked for")


def _path(kind: Kind, version: str, name: str, namespace: str, subresource: str = "") -> str:
    parts = ["", "apis", kind.group, version] if kind.group else ["", "api", version]
    if kind.namespaced and namespace:
        parts += ["namespaces", urllib.parse.quote(namespace, safe="")]
    parts.append(kind.plural)
    if name:
        parts.append(urllib.parse.quote(name, safe=""))
    if subresource:
        parts.append(subresource)
    return "/".join(parts)


def _selectors(field_selector: str, label_selector: str) -> dict[str, str]:
    both = {"fieldSelector": field_selector, "labelSelector": label_selector}
    return {key: value for key, value in both.items() if value}
