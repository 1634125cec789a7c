"""The connection to one API server: its configuration, one request and its answer, one stream of lines."""

from __future__ import annotations

import asyncio
import time
import urllib.parse
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Final

import msgspec

import dra_bridge.kube.auth as auth
from dra_bridge.kube.auth import Access
from dra_bridge.kube.errors import AccessError, ApiError, UnauthorizedError, UnavailableError, error_of
from dra_bridge.kube.http import HttpClient, HttpError, Response, proxy_of
from dra_bridge.kube.kinds import Kind, Object
from dra_bridge.kube.traffic import Traffic

__all__ = ["Connection"]

_RENEW: Final = 10.0
"""Seconds between two readings of the configuration when the server cannot be reached or does not know us."""

_FAILURES: Final = (
    HttpError,
    TimeoutError,
    OSError,
    auth.AccessError,
    ValueError,
    RecursionError,
)
"""What a request without an answer ends with: also a token file or plugin that fails, and JSON that is none."""


class Connection:
    """One API server as it is configured; the configuration is read again when the server cannot be reached."""

    def __init__(
        self,
        configuration: Callable[[], Awaitable[Access]],
        traffic: Traffic,
        *,
        deadline: float,
        user_agent: str,
    ) -> None:
        """Connect to nothing yet.

        configuration: read at the first request, and again when the server cannot be reached.
        traffic: counts what is sent and what fails. deadline: seconds for one request.
        """
        self.traffic = traffic
        self.url = ""
        """Of the server; empty until the configuration is read."""
        self._configuration = configuration
        self._deadline = deadline
        self._user_agent = user_agent
        self._reached: tuple[Access, HttpClient] | None = None
        self._made_at = 0.0
        self._renew = False
        self._former: list[HttpClient] = []
        self._connecting = asyncio.Lock()

    async def aclose(self) -> None:
        """Close all connections; streams that are still read fail."""
        reached, self._reached = self._reached, None
        if reached is not None:
            await reached[1].aclose()
        for former in self._former:
            await former.aclose()

    async def send(
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
        """Send a request and return its answer.

        kind, name: the object that is asked for, if it is one.

        Raises:
            ApiError: it was refused, or not answered.

        """
        content = b"" if body is None else msgspec.json.encode(body)
        more = {"Content-Type": content_type} if content else {}
        target = f"{path}?{urllib.parse.urlencode(parameters)}" if parameters else path

        async def once(connected: tuple[HttpClient, dict[str, str]]) -> Response:
            server, headers = connected
            self.traffic.asked(method)
            async with asyncio.timeout(deadline or self._deadline):
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

    @asynccontextmanager
    async def stream(self, path: str) -> AsyncGenerator[AsyncIterator[bytes], None]:
        """Ask for a stream and give its lines; what fails while they are read and understood ends with ApiError."""
        self.traffic.streamed()
        async with AsyncExitStack() as stack:
            try:
                server, headers = await self._connected()
                async with asyncio.timeout(self._deadline):
                    response, lines = await stack.enter_async_context(server.stream("GET", path, headers))
                if response.status == 401 and (renewed := await self._connected(refused=True))[1] != headers:
                    server, headers = renewed
                    async with asyncio.timeout(self._deadline):
                        response, lines = await stack.enter_async_context(server.stream("GET", path, headers))
                if response.status != 200:
                    raise self._refused(response)
                self._answered()
                yield lines
            except _FAILURES as error:
                raise self._failed("GET", path.partition("?")[0], error) from error

    def _refused(self, response: Response, kind: Kind | None = None, name: str = "") -> ApiError:
        retry_after = response.headers.get("retry-after", "")
        error = error_of(response.status, response.body, retry_after, kind=kind, name=name)
        if isinstance(error, UnavailableError):
            self.traffic.failed()
        else:
            self._answered()
        if isinstance(error, UnauthorizedError):
            self._renew = True
        return error

    def _failed(self, method: str, path: str, error: BaseException) -> ApiError:
        self._renew = True
        said = "no answer in time" if isinstance(error, TimeoutError) else str(error)
        said = said or type(error).__name__
        self.traffic.unanswered(self.url, said)
        return UnavailableError(f"{method} {path}: {said}")

    def _answered(self) -> None:
        self._renew = False  # it is there, and knows us, by the configuration as it was read
        self.traffic.answered(self.url)

    async def connect(self) -> None:
        """Read the configuration; one that cannot be used leaves what there is.

        Raises:
            AccessError: there is none, or it cannot be used, and there was none before.

        """
        try:
            made = await self._configuration()
            server = HttpClient(made.url, made.tls, made.proxy or proxy_of(made.url), made.server_name)
        except (auth.AccessError, OSError, ValueError) as error:
            if self._reached is None:
                raise AccessError(f"cannot reach an API server: {error}") from error
        else:
            old, self._reached = self._reached, (made, server)
            self.url = made.url
            # Watches that live on its connections go on: to cut them would look like the next outage.
            former = self._former if old is None else [*self._former, old[1]]
            self._former = [one for one in former if await one.retire()]
        self._made_at, self._renew = time.monotonic(), False

    async def _connected(self, *, refused: bool = False) -> tuple[HttpClient, dict[str, str]]:
        """Return the server and the headers that tell it who asks; refused: it did not know the last ones.

        Not bound by a request's deadline: somebody may have to log in for a credential plugin.
        """
        async with self._connecting:
            if self._reached is None or (self._renew and time.monotonic() - self._made_at >= _RENEW):
                await self.connect()
        assert self._reached is not None
        reached, server = self._reached
        headers = {"User-Agent": self._user_agent, "Accept": "application/json"}
        if authorization := await reached.authorize(refused):
            headers["Authorization"] = authorization
        return server, headers
