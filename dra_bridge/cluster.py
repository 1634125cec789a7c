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
import os
import random
import time
import urllib.parse
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, field
from typing import Any, Final, Literal, NamedTuple, Self

import msgspec

from dra_bridge import access, http
from dra_bridge.access import Access

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
    "Reopened",
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
        named: whether an object was missing, not the whole kind (404 only).

    """

    def __init__(
        self,
        message: str,
        *,
        code: int = 0,
        reason: str = "",
        causes: tuple[Cause, ...] = (),
        retry_after: float = 0.0,
        named: bool = True,
    ) -> None:
        self.code = code
        self.reason = reason
        self.message = message
        self.causes = causes
        self.retry_after = retry_after
        self.named = named
        super().__init__(f"{code} {reason}: {message}" if code else message)


class UnavailableError(ApiError):
    """Raised when the API server did not answer in time, not at all, or cannot serve now; try later."""


class UnauthorizedError(ApiError):
    """Raised when the API server does not know who asks (401)."""


class ForbiddenError(ApiError):
    """Raised when the one who asks may not do that (403)."""


class NotFoundError(ApiError):
    """Raised when there is no such object (404)."""


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
    404: NotFoundError,
    408: UnavailableError,
    409: ConflictError,
    410: GoneError,
    413: InvalidError,
    415: InvalidError,
    422: InvalidError,
    429: UnavailableError,
}


def error_of(code: int, body: bytes, retry_after: str = "") -> ApiError:
    """Return the error that an answer stands for; `body` is a Status object, or any text."""
    try:
        status = msgspec.json.decode(body)
    except msgspec.MsgspecError:
        status = {}
    if not isinstance(status, dict) or status.get("kind") != "Status":
        status = {"message": body[:400].decode(errors="replace").strip() or "no further answer", "details": {}}
    return _error_of_status({**status, "code": code}, retry_after)


def _error_of_status(status: Mapping[str, Any], retry_after: str = "") -> ApiError:
    code = int(status.get("code") or 500)
    details = status.get("details") or {}
    reason = str(status.get("reason") or "")
    raw = retry_after or details.get("retryAfterSeconds") or 0
    kind = _ERRORS.get(code) or (UnavailableError if code >= 500 else ApiError)
    if reason == "AlreadyExists":
        kind = AlreadyExistsError
    return kind(
        str(status.get("message") or "no message"),
        code=code,
        reason=reason,
        causes=tuple(
            Cause(str(cause.get("field", "")), str(cause.get("reason", "")), str(cause.get("message", "")))
            for cause in details.get("causes") or ()
        ),
        retry_after=float(raw) if str(raw).isdecimal() else 0.0,
        named=bool(details.get("name")),
    )


# --- values ---------------------------------------------------------------------------------------


class Listing(NamedTuple):
    """A list and the position in the history at which it is true."""

    items: list[Object]
    resource_version: str


@dataclass(frozen=True, slots=True)
class Listed:
    """All objects there are, at the beginning of a watch and whenever its thread was lost.

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
class Reopened:
    """The watch goes on after it ended before its time; nothing was missed, but it may be a newer server now."""


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

_WATCH_GRACE: Final = 15.0
"""Seconds beyond the end that the server was asked for after which a silent watch is given up."""
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
        configuration: Callable[[], Access],
        *,
        deadline: float = DEADLINE,
        backoff: Backoff | None = None,
        watch_seconds: tuple[float, float] = (240.0, 480.0),
        user_agent: str = "dra-bridge",
    ) -> None:
        """Connect to nothing yet.

        configuration: read at the first request, and again when the server cannot be reached.
        deadline: seconds for one request. backoff: the waits of watches after failures.
        watch_seconds: how long the server is asked to keep a watch open, drawn between the two.
        """
        self.deadline = deadline
        self.backoff = backoff or Backoff()
        self._configuration = configuration
        self._watch_seconds = watch_seconds
        self._user_agent = user_agent
        self._connection: tuple[Access, http.Server] | None = None
        self._server = ""
        self._made_at = 0.0
        self._renew = False
        self._former: list[http.Server] = []
        self._version = ""
        self._version_at = 0.0
        self._choosing = asyncio.Lock()
        self._requests: dict[str, int] = {}
        self._failures = 0
        self._watches = 0
        self._lost_since: float | None = None
        self._back = asyncio.Event()
        self._said: set[str] = set()

    @classmethod
    def from_environment(cls, kubeconfig: str | os.PathLike[str] | None = None, **options: Any) -> Cluster:
        """Reach the server that a kubeconfig file names, else the one of the pod, else KUBECONFIG or ~/.kube/config.

        options: as of the class.
        """
        return cls(lambda: access.from_environment(kubeconfig), **options)

    @classmethod
    def from_server(cls, url: str, *, token: str = "", ca_file: str = "", **options: Any) -> Cluster:
        """Reach the server at a URL, with a bearer token and a file of CA certificates if given."""
        return cls(lambda: access.from_server(url, token=token, ca_file=ca_file), **options)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def __repr__(self) -> str:
        return f"<Cluster {self._server or 'not connected'}>"

    def configure(self) -> None:
        """Read the configuration now, so that a wrong one is known before anything else is begun; may block.

        Raises:
            AccessError: there is none, or it cannot be used.

        """
        if self._connection is None:
            self._connect(time.monotonic())

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
            try:
                served = await self._send("GET", f"/apis/{GROUP}")
            except NotFoundError:
                served = {}
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
                return Listing(items, str(metadata.get("resourceVersion") or ""))

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
    ) -> AsyncGenerator[Listed | Changed | Reopened, None]:
        """Yield all objects now, then each change, for ever.

        A lost connection is resumed where it broke off, `Reopened` tells of it. `Listed` comes
        again only when that is not possible (410, another version of resource.k8s.io) and then
        replaces all that was known. Outages, refusals and servers without DRA are waited out,
        whatever they last. Close the generator (`contextlib.aclosing`) to end the watch.
        """
        backoff = self.backoff.fresh()
        selectors = _selectors(field_selector, label_selector)
        what = f"watch {kind.plural}"
        position, listed_in, refusals, lost = "", "", 0, False
        while True:
            try:
                version = ""
                if not kind.version:
                    version = await self.version(older_than=0.0 if lost else self._watch_seconds[0] / 2)
                if not position or version != listed_in:
                    listing = await self.list(
                        kind, namespace, field_selector=field_selector, label_selector=label_selector
                    )
                    version = "" if kind.version else await self.version()
                    position, listed_in = listing.resource_version, version
                    yield Listed(tuple(listing.items), position, version)
                opened, seconds = time.monotonic(), random.uniform(*self._watch_seconds)  # noqa: S311 - no secret
                async with aclosing(self._watch(kind, namespace, selectors, position, listed_in, seconds)) as changes:
                    async for event, found in changes:
                        if event == "OPEN":
                            if lost:
                                lost = False
                                yield Reopened()
                            continue
                        refusals = 0
                        self._said.discard(what)
                        position = str((found.get("metadata") or {}).get("resourceVersion") or position)
                        if event in ("ADDED", "MODIFIED", "DELETED"):
                            yield Changed(event, found)  # type: ignore[arg-type]  # just compared
                refusals, lost = 0, time.monotonic() - opened < seconds - 1.0
                self._said.discard(what)
                if time.monotonic() - opened >= 1.0:
                    backoff.reset()
                    continue
                wait = backoff.next()  # a server that ends watches at once is not asked at once
            except GoneError:
                position = ""
                wait = backoff.next()
                if wait <= backoff.base:
                    wait = 0.0  # the first time there is nothing to wait for
            except ApiError as error:
                # The position can be the trouble: one that the server has not reached yet, after its
                # storage was restored from a backup, is answered with errors again and again.
                refusals += 1 if error.code else 0
                if refusals >= 3:
                    position, refusals = "", 0
                if isinstance(error, NotFoundError) and not error.named and not kind.version:
                    self._version, position = "", ""  # the version is not served any more
                if isinstance(error, UnavailableError):
                    lost = True
                if error.code:
                    self._say_once(what, f"{error}")
                wait = max(backoff.next(), min(error.retry_after, backoff.cap))
            except UnsupportedError as error:
                position = ""
                self._say_once(what, f"{error}")
                wait = backoff.next()
            await self.pause(wait)

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
        self, kind: Kind, namespace: str, selectors: Mapping[str, str], position: str, version: str, seconds: float
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
                async with asyncio.timeout(self.deadline):
                    server, headers = await self._connected()
                    response, pieces = await stack.enter_async_context(server.stream("GET", path, headers))
                    if response.status == 401 and (renewed := await self._connected(refused=True))[1] != headers:
                        server, headers = renewed
                        response, pieces = await stack.enter_async_context(server.stream("GET", path, headers))
                if response.status != 200:
                    body = bytearray()
                    async with asyncio.timeout(self.deadline):
                        async for piece in pieces:
                            body += piece
                    raise self._refused(http.Response(response.status, response.headers, bytes(body)))
                self._answered()
                yield "OPEN", {}
                rest = b""
                while True:
                    async with asyncio.timeout(seconds + _WATCH_GRACE):
                        piece = await anext(pieces, b"")
                    if not piece:
                        break
                    *lines, rest = (rest + piece).split(b"\n")
                    for line in filter(None, lines):
                        event = msgspec.json.decode(line)
                        found = event.get("object") or {}
                        if event.get("type") == "ERROR":
                            raise _error_of_status(found)
                        yield str(event.get("type")), found
            except _FAILURES as error:
                raise self._failed("GET", path.partition("?")[0], error) from error

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
                return await self._send(method, path, parameters, body, content_type, deadline)
            except NotFoundError as error:
                if kind.version or error.named or not again:
                    raise
                self._version = ""  # not an object is missing but the version: the server is another one now
        raise AssertionError("not reached")

    async def _send(
        self,
        method: str,
        path: str,
        parameters: Mapping[str, str] | None = None,
        body: object = None,
        content_type: str = "application/json",
        deadline: float | None = None,
    ) -> Object:
        content = b"" if body is None else msgspec.json.encode(body)
        more = {"Content-Type": content_type} if content else {}
        target = f"{path}?{urllib.parse.urlencode(parameters)}" if parameters else path

        async def once() -> http.Response:
            server, headers = await self._connected()
            self._requests[method] = self._requests.get(method, 0) + 1
            response = await server.request(method, target, headers | more, content)
            if response.status == 401 and (renewed := await self._connected(refused=True))[1] != headers:
                server, headers = renewed
                response = await server.request(method, target, headers | more, content)
            return response

        try:
            async with asyncio.timeout(deadline or self.deadline):
                try:
                    response = await once()
                except (http.HttpError, ConnectionError):
                    if method != "GET":
                        raise
                    response = await once()  # a kept connection that the server had closed
                if response.status >= 300:
                    raise self._refused(response)
        except _FAILURES as error:
            raise self._failed(method, path, error) from error
        self._answered()
        try:
            answer = msgspec.json.decode(response.body)
        except msgspec.MsgspecError as error:
            raise UnavailableError(f"{method} {path}: the answer is not JSON: {error}") from error
        return answer if isinstance(answer, dict) else {"value": answer}

    def _refused(self, response: http.Response) -> ApiError:
        error = error_of(response.status, response.body, response.headers.get("retry-after", ""))
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

    def _connect(self, now: float) -> None:
        """Read the configuration; one that cannot be used leaves what there is."""
        try:
            made = self._configuration()
            server = http.Server(made.url, made.tls, http.proxy_of(made.url))
        except (access.AccessError, OSError, ValueError) as error:
            if self._connection is None:
                raise AccessError(f"cannot reach an API server: {error}") from error
        else:
            old, self._connection = self._connection, (made, server)
            self._server = made.url
            # Watches that live on its connections go on: to cut them would look like the next outage.
            former = self._former if old is None else [*self._former, old[1]]
            self._former = [one for one in former if one.retire()]
        self._made_at, self._renew = now, False

    async def _connected(self, *, refused: bool = False) -> tuple[http.Server, dict[str, str]]:
        """Return the server and the headers that tell it who asks; refused: it did not know the last ones."""
        now = time.monotonic()
        if self._connection is None or (self._renew and now - self._made_at >= _RENEW):
            self._connect(now)
        assert self._connection is not None
        reached, server = self._connection
        headers = {"User-Agent": self._user_agent, "Accept": "application/json"}
        if authorization := await reached.authorize(refused):
            headers["Authorization"] = authorization
        return server, headers


_FAILURES: Final = (
    http.HttpError,
    TimeoutError,
    OSError,
    access.AccessError,
    ValueError,
)
"""What a request without an answer ends with; a token file or exec plugin that fails is among it."""

_PATCHES: Final[Mapping[str, str]] = {
    "merge": "application/merge-patch+json",
    "strategic": "application/strategic-merge-patch+json",
    "json": "application/json-patch+json",
    "apply": "application/apply-patch+yaml",
}


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
