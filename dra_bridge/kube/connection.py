"""The connection to one API server: configuration, credentials, requests, streams, and the version of the API."""

from __future__ import annotations

import asyncio
import logging
import math
import time
import urllib.parse
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Final, NamedTuple, TypeVar

import msgspec

from dra_bridge.kube import api, auth, forms, liveness
from dra_bridge.kube.api import GROUP, AccessError, ApiError, Kind, Object, UnavailableError
from dra_bridge.kube.auth import Access
from dra_bridge.kube.forms import Form
from dra_bridge.kube.http import (
    HTTP_ERRORS,
    MAX_BODY,
    HttpClient,
    OversizedBodyError,
    Response,
    StreamedResponse,
    proxy_of,
)
from dra_bridge.kube.kubeconfig import KubeConfigError

logger: Final = logging.getLogger(__name__)
T = TypeVar("T")
_R = TypeVar("_R", Response, StreamedResponse)

USER_AGENT: Final = "dra-bridge"
VERSIONS: Final = ("v1", "v1beta2", "v1beta1")
"""The versions of resource.k8s.io of this client, the best first (v1 since 1.34, v1beta2 1.33, v1beta1 1.32)."""

_DEEP: Final = "the answer nests too deep to be decoded"
_FAILURES: Final = (*HTTP_ERRORS, TimeoutError, OSError, KubeConfigError, ValueError)
"""What a request without an answer raises, also when a token file or plugin fails, or the answer is not JSON."""


@dataclass(slots=True)
class RequestStatistics:
    """What went to the API server so far.

    requests: answered or not, by HTTP method. failures: those not answered, or with a 429 or 5xx. watches: streams
    opened. lost_since: time.monotonic() of the first failure since the last answer, None while the server answers.
    refused: that the server refuses the credentials (401), None since it took them. token: the life of the token that
    was sent last, None of other credentials.
    """

    requests: Counter[str] = field(default_factory=Counter)
    failures: int = 0
    watches: int = 0
    lost_since: float | None = None
    refused: liveness.Failing | None = None
    token: auth.TokenLife | None = None

    def unreachable_since(self) -> float | None:
        """Return since when (Unix seconds) the server is out of reach; None while it is not."""
        lost = 0.0 if self.lost_since is None else time.monotonic() - self.lost_since
        return time.time() - lost if lost >= liveness.LOST else None


class ApiRequest(NamedTuple):
    """A request. body: of a PATCH, a merge patch. kind, name: the requested object, if it is for one."""

    method: str
    path: str
    parameters: Mapping[str, str] | None = None
    body: object = None
    kind: Kind | None = None
    name: str = ""


class Connection:
    """One API server, reached by a configuration; the arguments are those of `Cluster`."""

    def __init__(self, configuration: Callable[[], Awaitable[Access]], deadline: float) -> None:
        self.statistics = RequestStatistics()
        self._url = ""  # until the configuration is read
        self._configuration = configuration
        self._deadline = deadline
        self._reached: tuple[Access, HttpClient] | None = None
        self._made_at = 0.0
        self._renew = False
        self._authorization = ""
        self._former: list[HttpClient] = []
        self._connecting = asyncio.Lock()
        self._answers = asyncio.Event()  # set when the server answers again after it was lost

    @property
    def where(self) -> str:
        """The server's address and where it is from, for people; "" until the configuration is read."""
        source = self._reached[0].source if self._reached is not None else ""
        return f"{self._url} ({source})" if source else self._url

    async def aclose(self) -> None:
        """Close all connections; streams that are still read fail."""
        reached, self._reached = self._reached, None
        for client in [*([reached[1]] if reached else []), *self._former]:
            await client.aclose()

    async def send(self, method: str, path: str) -> Object:
        """Send a request about no object and return its answer. Raises ApiError if it is refused or not answered."""
        return await self.exchange(ApiRequest(method, path), forms.JSON)

    async def exchange(self, request: ApiRequest, form: Form[T], most: int | None = None) -> T:
        """Send a request and return its answer in a form. most: see `HttpClient.request`.

        Raises ApiError if it is refused or not answered, OversizedError if the answer is larger.
        """
        method, path, parameters, body = request.method, request.path, request.parameters, request.body
        content = b"" if body is None else msgspec.json.encode(body)
        content_type = "application/merge-patch+json" if method == "PATCH" else "application/json"
        more = {"Accept": form.accept, **({"Content-Type": content_type} if content else {})}
        target = f"{path}?{urllib.parse.urlencode(parameters)}" if parameters else path

        async def once(server: HttpClient, headers: dict[str, str]) -> Response:
            self.statistics.requests[method] += 1
            return await server.request(method, target, headers | more, content, most)

        with self._failures(method, path):
            response = await self._authorized(once)
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
        """Open a stream and give its lines; what fails while they are read and decoded ends with ApiError."""
        self.statistics.requests["GET"] += 1
        self.statistics.watches += 1
        async with AsyncExitStack() as stack:

            async def request(server: HttpClient, headers: dict[str, str]) -> StreamedResponse:
                return await stack.enter_async_context(server.stream("GET", path, headers))

            with self._failures("GET", path.partition("?")[0]):
                response = await self._authorized(request)
                if response.status != 200:
                    raise self._refused(response)
                self._answered()
                yield response.lines

    async def fetch(self, path: str, timeout: float) -> bytes:
        """Return the body of an answer that the API server passes on from a pod. Raises ApiError.

        A failure says nothing about the API server and the credentials: they are used on as before.
        """
        try:
            server, headers = await self._connected()
            self.statistics.requests["GET"] += 1
            async with asyncio.timeout(timeout), server.stream("GET", path, headers) as response:
                if response.status == 200:
                    answer = bytearray()
                    async for line in response.lines:
                        answer += line
                        if len(answer) > MAX_BODY:
                            raise api.OversizedError(f"the answer is larger than {MAX_BODY} bytes")
                    return bytes(answer)
        except _FAILURES as error:
            late = f"no answer within {timeout:g} s"
            raise UnavailableError(late if isinstance(error, TimeoutError) else str(error) or "no answer") from error
        raise api.error_of(response.status, bytes(response.body))

    async def _authorized(self, request: Callable[[HttpClient, dict[str, str]], Awaitable[_R]]) -> _R:
        """Make a request, and make it again with new credentials if the server refuses the old ones (401)."""
        server, headers = await self._connected()
        async with asyncio.timeout(self._deadline):
            response = await request(server, headers)
        if response.status == 401:
            server, renewed = await self._connected(refused=True)
            if renewed != headers:
                async with asyncio.timeout(self._deadline):
                    response = await request(server, renewed)
        return response

    def _refused(self, response: Response | StreamedResponse, kind: Kind | None = None, name: str = "") -> ApiError:
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
        """Count a request without an answer, and raise UnavailableError; the server is lost from the first one on.

        A server that answers with too much is not lost.
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
        self._renew = refused  # else address and credentials of the configuration are still right
        before = self.statistics.refused
        self.statistics.refused = liveness.Failing.after(before, error) if refused and error is not None else None
        if refused and before is None:
            logger.warning("the API server %s refuses the agent's credentials: %s", self.where, error)
        elif before is not None and not refused:
            logger.info("the API server %s takes the agent's credentials again", self.where)
        if (lost_since := self.statistics.lost_since) is not None:
            self.statistics.lost_since = None
            self._answers.set()
            logger.info("the API server %s is back after %.1f s", self._url, time.monotonic() - lost_since)

    async def pause(self, seconds: float) -> None:
        """Wait before another try; a wait while the server is lost ends early when another request is answered."""
        if self.statistics.lost_since is None:
            await asyncio.sleep(seconds)
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._answers.wait()

    async def connect(self) -> None:
        """Read the configuration; if that fails the one before stays. Raises AccessError if there was none before."""
        try:
            access = await self._configuration()
            server = HttpClient(access.url, access.tls, access.proxy or proxy_of(access.url), access.server_name)
        except (KubeConfigError, OSError, ValueError) as error:
            if self._reached is None:
                raise AccessError(f"cannot reach an API server: {error}") from error
        else:
            old, self._reached = self._reached, (access, server)
            self._url = access.url
            # Watches on the old connections go on: cutting them would look like another outage.
            former = self._former if old is None else [*self._former, old[1]]
            self._former = [client for client in former if await client.retire()]
        self._made_at, self._renew = time.monotonic(), False

    async def _connected(self, *, refused: bool = False) -> tuple[HttpClient, dict[str, str]]:
        """Return the server and the headers with the credentials; refused: the server refused the last ones.

        Not bound by a request's deadline: a credential plugin may ask a person to log in.
        """
        async with self._connecting:
            if self._reached is None or (self._renew and time.monotonic() - self._made_at >= auth.RENEW):
                await self.connect()
        assert self._reached is not None
        access, server = self._reached
        headers = {"User-Agent": USER_AGENT, "Accept": forms.JSON.accept}
        if authorization := await access.authorize(refused):
            headers["Authorization"] = authorization
            if authorization != self._authorization:
                self._authorization, self.statistics.token = authorization, auth.token_life(authorization)
        return server, headers


class Discovery:
    """Chooses the best version of resource.k8s.io that the server serves, and remembers it."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.chosen = ""
        """The version as it was found last; "" while it is in doubt."""
        self._chosen_at = 0.0
        self._choosing = asyncio.Lock()

    async def version(self, *, older_than: float = math.inf) -> str:
        """See `Cluster.version`. older_than: seconds after which the server is asked again."""
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
                logger.info("the API server is used in version %s/%s", GROUP, version)
            self.chosen, self._chosen_at = version, time.monotonic()
            return version

    async def _has_slices(self, version: str) -> bool:
        answer = await self._connection.send("GET", f"/apis/{GROUP}/{version}")
        return any(entry.get("name") == api.RESOURCE_SLICES.plural for entry in answer.get("resources") or ())

    async def _group(self) -> Object:
        """Return what the server serves of resource.k8s.io; empty if its list of groups is without it."""
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
        """Have the server asked again: it may not serve the chosen version any more."""
        self.chosen = ""
