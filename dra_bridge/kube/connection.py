"""Connects to one API server: reads the configuration, sends requests, opens streams, and chooses the API version."""

from __future__ import annotations

import asyncio
import logging
import math
import random
import time
import urllib.parse
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, TypeVar

import msgspec

from deviceplugin.tasks import in_time
from dra_bridge.kube import api, auth, forms, liveness
from dra_bridge.kube.api import GROUP, AccessError, ApiError, Kind, Object, UnavailableError
from dra_bridge.kube.auth import Access
from dra_bridge.kube.forms import Form
from dra_bridge.kube.http import HTTP_ERRORS, MAX_BODY, HttpClient, OversizedBodyError, Response, proxy_of
from dra_bridge.kube.kubeconfig import KubeConfigError

logger: Final = logging.getLogger(__name__)
T = TypeVar("T")

USER_AGENT: Final = "dra-bridge"
VERSIONS: Final = ("v1", "v1beta2", "v1beta1")
"""The versions of resource.k8s.io that this client supports, the best first (v1 is in Kubernetes since 1.34, v1beta2
since 1.33, v1beta1 since 1.32).
"""

_DEEP: Final = "the answer nests too deep to be decoded"
_FAILURES: Final = (*HTTP_ERRORS, TimeoutError, OSError, KubeConfigError, ValueError)
"""The errors of a request without a usable response. They include failures of a token file or a credential plugin, and
responses that are not JSON."""


@dataclass(slots=True)
class RequestStatistics:
    """Counters and state of the requests to the API server.

    requests: for each HTTP method, the number of requests. failures: number of requests without a response, or with an
    `UnavailableError` as response (such as 429 or 5xx). watches: number of requests that open a stream. lost_since: the
    time (monotonic seconds) of the first failure since the last response, None while the server responds. refused: the
    server's refusal of the credentials (401), None once the server accepts them. token: when the last sent token was
    issued and expires, None for other credentials.
    """

    requests: Counter[str] = field(default_factory=Counter)
    failures: int = 0
    watches: int = 0
    lost_since: float | None = None
    refused: liveness.Failing | None = None
    token: auth.TokenLife | None = None

    def unreachable_since(self) -> float | None:
        """Return when the server became unreachable (Unix seconds); None if it responds, or in the first 30 s."""
        lost = 0.0 if self.lost_since is None else time.monotonic() - self.lost_since
        return time.time() - lost if lost >= liveness.LOST else None


class ApiRequest(NamedTuple):
    """A request to the API server. body: for PATCH, a merge patch.

    kind, name: the requested object, if the request is for one object.
    """

    method: str
    path: str
    parameters: Mapping[str, str] | None = None
    body: object = None
    kind: Kind | None = None
    name: str = ""


class Connection:
    """A connection to the API server that the configuration names.

    longest: the longest wait before another try, in seconds. Other parameters: see `Cluster`.
    """

    def __init__(self, configuration: Callable[[], Awaitable[Access]], deadline: float, longest: float) -> None:
        self.statistics = RequestStatistics()
        self._url = ""  # The server's URL; empty until the configuration is read.
        self._configuration = configuration
        self._deadline = deadline
        self._longest = longest
        self._again_at = 0.0  # The time (monotonic seconds) when interrupted watches begin again.
        self._reached: tuple[Access, HttpClient] | None = None
        self._made_at = 0.0
        self._renew = False
        self._authorization = ""
        self._former: list[HttpClient] = []
        self._connecting = asyncio.Lock()
        self._failure: AccessError | None = None
        """The error of the last try to read the configuration."""
        self._answers = asyncio.Event()  # An event, set when an unreachable server responds again.

    @property
    def where(self) -> str:
        """The server's address and the source of the address, for messages; "" until the configuration is read."""
        source = self._reached[0].source if self._reached is not None else ""
        return f"{self._url} ({source})" if source else self._url

    async def aclose(self) -> None:
        """Close all connections. Streams that are still open fail."""
        reached, self._reached = self._reached, None
        for client in [*([reached[1]] if reached else []), *self._former]:
            await client.aclose()

    async def send(self, method: str, path: str) -> Object:
        """Send a request for a path that names no object of the API, such as /apis, and return the response.

        Raises ApiError if the server refuses the request or does not respond.
        """
        return await self.exchange(ApiRequest(method, path), forms.JSON)

    async def exchange(self, request: ApiRequest, form: Form[T], most: int | None = None) -> T:
        """Send a request, and decode the response. form: the response's encoding. most: maximum bytes of the response.

        Raises ApiError if the server refuses the request or does not respond, OversizedError if the response is larger
        than `most`.
        """
        method, path, parameters, body = request.method, request.path, request.parameters, request.body
        content = b"" if body is None else msgspec.json.encode(body)
        content_type = "application/merge-patch+json" if method == "PATCH" else "application/json"
        headers = {"Accept": form.accept, **({"Content-Type": content_type} if content else {})}
        target = f"{path}?{urllib.parse.urlencode(parameters)}" if parameters else path
        with self._failures(method, path):
            response = await self._authorized(HttpClient.request, method, target, headers, content, most)
            if response.status >= 300:
                raise self._refused(response, request.kind, request.name)
        self._answered()
        try:
            return form.decode(response.body)
        except RecursionError as error:
            raise api.UnreadableError(f"{method} {path}: {_DEEP}") from error
        except ValueError as error:
            raise UnavailableError(f"{method} {path}: the answer is not the requested object: {error}") from error

    @asynccontextmanager
    async def stream(self, path: str) -> AsyncGenerator[AsyncIterator[bytes], None]:
        """Open a stream, and yield its lines.

        If a line cannot be read or decoded, ApiError is raised inside the context manager.
        """
        self.statistics.watches += 1
        async with AsyncExitStack() as stack:

            async def opened(server: HttpClient, *request: Any) -> Response:
                return await stack.enter_async_context(server.stream(*request))

            with self._failures("GET", path.partition("?")[0]):
                response = await self._authorized(opened, "GET", path, {"Accept": forms.JSON.accept})
                if response.status != 200:
                    raise self._refused(response)
                self._answered()
                yield response.lines()

    async def fetch(self, path: str, timeout: float) -> bytes:
        """Return the body of a response that the API server forwards from a pod or node. Raises ApiError.

        A failure of this request does not count as a failure of the API server or as a refusal of the credentials.
        """
        try:
            server, credentials = await self._connected()
            self.statistics.requests["GET"] += 1
            headers = {"Accept": forms.JSON.accept, **credentials}
            async with asyncio.timeout(timeout), server.stream("GET", path, headers) as response:
                if response.status == 200:
                    answer = bytearray()
                    async for line in response.lines():
                        answer += line
                        if len(answer) > MAX_BODY:
                            raise api.OversizedError(f"the answer is larger than {MAX_BODY} bytes")
                    return bytes(answer)
        except _FAILURES as error:
            late = f"no answer within {timeout:g} s"
            raise UnavailableError(late if isinstance(error, TimeoutError) else str(error) or "no answer") from error
        raise api.error_of(response.status, bytes(response.body))

    async def _authorized(
        self, send: Callable[..., Awaitable[Response]], method: str, target: str, headers: Mapping[str, str], *more: Any
    ) -> Response:
        """Send a request with the credentials.

        If the server refuses them (401) and there are new credentials, send the request again. send: a function like
        `HttpClient.request`. more: further arguments for `send`.
        """
        sent: Mapping[str, str] | None = None
        for refused in (False, True):
            server, credentials = await self._connected(refused=refused)
            if credentials == sent:
                break
            sent = credentials
            self.statistics.requests[method] += 1
            async with asyncio.timeout(self._deadline):
                response = await send(server, method, target, {**headers, **credentials}, *more)
            if response.status != 401:
                break
        return response

    def _refused(self, response: Response, kind: Kind | None = None, name: str = "") -> ApiError:
        retry_after = response.headers.get("retry-after", "")
        body = forms.refusal_of(response.body) or bytes(response.body)
        error = api.error_of(response.status, body, retry_after, kind=kind, name=name)
        if isinstance(error, UnavailableError):
            self.statistics.failures += 1
        else:
            self._answered(error)
        return error

    @contextmanager
    def _failures(self, method: str, path: str) -> Iterator[None]:
        """Convert a failure of a request inside this context manager to UnavailableError, and count the failure.

        From the first failure on, the server counts as unreachable. A response that is too large or nested too deeply
        is no such failure, because the server is reachable.
        """
        try:
            yield
        except OversizedBodyError as error:
            self._answered()
            raise api.OversizedError(f"{method} {path}: {error}") from error
        except RecursionError as error:
            self._answered()
            raise api.UnreadableError(f"{method} {path}: {_DEEP}") from error
        except _FAILURES as error:
            self._renew = True
            reason = "no answer in time" if isinstance(error, TimeoutError) else str(error) or type(error).__name__
            self.statistics.failures += 1
            if self.statistics.lost_since is None:
                self.statistics.lost_since = time.monotonic()
                self._answers.clear()
                logger.warning("the API server %s is lost: %s", self._url, reason)
            raise UnavailableError(f"{method} {path}: {reason}") from error

    def _answered(self, error: ApiError | None = None) -> None:
        refused = error is not None and error.code == 401
        # Any other response than a refusal of the credentials shows that address and credentials are correct, so the
        # configuration is not read again.
        self._renew = refused
        before = self.statistics.refused
        self.statistics.refused = liveness.Failing.after(before, error) if refused and error is not None else None
        if refused and before is None:
            logger.warning("the API server %s refuses the agent's credentials: %s", self.where, error)
        elif before is not None and not refused:
            logger.info("the API server %s accepts the agent's credentials again", self.where)
        if (lost_since := self.statistics.lost_since) is not None:
            self.statistics.lost_since = None
            self._answers.set()
            logger.info("the API server %s is back after %.1f s", self._url, time.monotonic() - lost_since)

    def apart(self) -> float:
        """Return the seconds until all interrupted watches of this client begin again, at the same moment."""
        now = time.monotonic()
        if self._again_at <= now:
            self._again_at = now + random.uniform(0.0, self._longest)  # noqa: S311 - no secret
        return self._again_at - now

    async def pause(self, seconds: float) -> None:
        """Wait for this number of seconds before another try.

        If the server is unreachable, the wait ends as soon as another request succeeds.
        """
        if self.statistics.lost_since is None:
            await asyncio.sleep(seconds)
            return
        await in_time(self._answers.wait(), seconds)

    async def connect(self) -> None:
        """Read the configuration.

        If the read fails, the previous configuration stays in use. Raises AccessError if there is no previous
        configuration.
        """
        try:
            access = await self._configuration()
            server = HttpClient(access.url, access.tls, access.proxy or proxy_of(access.url), access.server_name)
        except (KubeConfigError, OSError, ValueError) as error:
            if self._reached is None:
                self._failure = AccessError(f"cannot reach an API server: {error}")
                raise self._failure from error
        else:
            old, self._reached = self._reached, (access, server)
            self._url = access.url
            # Watches on the old connections continue, because closing them would look like another outage.
            former = self._former if old is None else [*self._former, old[1]]
            self._former = [client for client in former if await client.retire()]
        self._made_at, self._renew = time.monotonic(), False

    async def _connected(self, *, refused: bool = False) -> tuple[HttpClient, dict[str, str]]:
        """Return the HTTP client, and the headers that identify the client to the server (User-Agent, Authorization).

        refused: whether the server refused the last credentials. A request's deadline does not apply here, because a
        credential plugin may ask a user to log in.
        """
        before = self._failure
        async with self._connecting:
            if self._reached is None and self._failure is not None and self._failure is not before:
                # Another request has just failed to read the configuration, so do not read it again.
                raise self._failure
            if self._reached is None or (self._renew and time.monotonic() - self._made_at >= auth.RENEW):
                await self.connect()
        assert self._reached is not None
        access, server = self._reached
        headers = {"User-Agent": USER_AGENT}
        if authorization := await access.authorize(refused):
            headers["Authorization"] = authorization
            if authorization != self._authorization:
                self._authorization, self.statistics.token = authorization, auth.token_life(authorization)
        return server, headers


class Discovery:
    """Chooses the best version of resource.k8s.io that the server serves, and remembers the choice."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.chosen = ""
        """The version that was last chosen; "" if it has to be chosen again."""
        self._chosen_at = 0.0
        self._choosing = asyncio.Lock()

    async def version(self, *, older_than: float = math.inf) -> str:
        """Return the version to use, see `Cluster.version`.

        older_than: age in seconds; if the last choice is older, the version is chosen again.
        """
        async with self._choosing:
            if self.chosen and time.monotonic() - self._chosen_at <= older_than:
                return self.chosen
            served = {entry.get("version") for entry in (await self._group()).get("versions") or ()}
            for version in VERSIONS:
                if version in served and (version == self.chosen or await self._has_slices(version)):
                    break
            else:
                self.chosen = ""
                raise api.UnsupportedError(
                    f"the API server serves none of {GROUP}/{', '.join(VERSIONS)}: Dynamic Resource Allocation is off"
                )
            if version != self.chosen:
                logger.info("the client uses the API %s/%s", GROUP, version)
            self.chosen, self._chosen_at = version, time.monotonic()
            return version

    async def _has_slices(self, version: str) -> bool:
        answer = await self._connection.send("GET", f"/apis/{GROUP}/{version}")
        return any(entry.get("name") == api.RESOURCE_SLICES.plural for entry in answer.get("resources") or ())

    async def _group(self) -> Object:
        """Return the server's description of the API group resource.k8s.io; {} if the server lacks this group."""
        try:
            return await self._connection.send("GET", f"/apis/{GROUP}")
        except ApiError as error:
            if error.code != 404:
                raise
        groups = (await self._connection.send("GET", "/apis")).get("groups")
        if not isinstance(groups, list):
            raise UnavailableError("GET /apis: the answer is not a list of API groups")
        return next((group for group in groups if group.get("name") == GROUP), {})

    def forget(self) -> None:
        """Make the next request choose the version again, because the server may no longer serve the chosen version."""
        self.chosen = ""
