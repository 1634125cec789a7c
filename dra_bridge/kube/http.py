"""Sends HTTP requests to one API server with aiohttp, without redirects, cookies and compression.

Callers set deadlines.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import os
import socket
import ssl
import urllib.parse
from asyncio import sslproto
from collections.abc import AsyncIterator, Mapping
from typing import Any, Final, NamedTuple

from deviceplugin.version import installing

try:
    import aiohttp
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(f"aiohttp is not installed; {installing('bridge')}", name="aiohttp") from error
import yarl
from aiohttp.http import HttpProcessingError
from aiohttp.http_exceptions import LineTooLong

MAX_REQUESTS: Final = 4
"""Maximum number of simultaneous requests. A further request waits, because a new TLS connection would take longer.

Streams (watches) are not counted: each running DRA driver has a stream, and streams must not delay requests.
"""
IDLE: Final = 60.0  # Seconds after which an idle connection is closed.
MAX_BODY: Final = 16 * 2**20
"""Maximum bytes of one response. etcd accepts objects of 1.5 MiB, and one byte can become six bytes in JSON."""
# Maximum bytes of one watch event. kube-apiserver accepts objects of up to 3 MiB, etcd of 1.5 MiB.
MAX_LINE: Final = 8 * 2**20
TLS_BUFFER: Final = 16 * 2**10
"""Bytes of asyncio's receive buffer for each TLS connection: the size of a TLS record.

With asyncio's default of 256 KiB, the watches of a node with 64 drivers would take 16 MiB.
"""

_KEEPALIVE: Final = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 15),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 30_000),
)
"""TCP keepalive options. The options detect within 30 s that the peer's node or a load balancer is lost, even on a
watch without events."""


class OversizedBodyError(Exception):
    """Raised when a response is larger than the limit. The rest of the response is not read."""


HTTP_ERRORS: Final = (aiohttp.ClientError, HttpProcessingError, OversizedBodyError)
"""Methods of `HttpClient` raise these errors, or OSError, if there is no response, or if the response is not HTTP or is
too large."""

_Address = ipaddress.IPv4Address | ipaddress.IPv6Address


class Response(NamedTuple):
    """An HTTP response. body: the whole body; empty for a streamed response with the status 200."""

    status: int
    headers: Mapping[str, str]
    body: bytes | bytearray
    rest: aiohttp.StreamReader
    """The part of the body that is not read yet."""

    async def lines(self) -> AsyncIterator[bytes]:
        """Yield the lines of a streamed response's body, which the caller need not read to the end.

        Raises OversizedBodyError if a line is too long.
        """
        try:
            while line := await self.rest.readline(max_line_length=MAX_LINE):
                yield line
        except LineTooLong as error:
            raise OversizedBodyError(f"a line is longer than {MAX_LINE} bytes") from error


sslproto.SSLProtocol.max_size = TLS_BUFFER


def _keepalive_socket(address: aiohttp.AddrInfoType) -> socket.socket:
    made = socket.socket(*address[:3])
    for option in _KEEPALIVE:
        with contextlib.suppress(OSError):
            made.setsockopt(*option)
    return made


class _Connector(aiohttp.TCPConnector):
    """An aiohttp connector that discards idle connections on which data has arrived without a request.

    aiohttp itself would take this data as the response to the next request (aio-libs/aiohttp#13656, seen with 3.14.5).
    """

    async def connect(self, *args: Any, **kwargs: Any) -> aiohttp.connector.Connection:
        for _ in range(MAX_REQUESTS + 1):  # The pool has at most MAX_REQUESTS idle connections.
            connection = await super().connect(*args, **kwargs)
            if connection.protocol is None or not connection.protocol.should_close:
                return connection
            connection.close()
        raise aiohttp.ServerDisconnectedError("the server sent data before a request")


class HttpClient:
    """A client of one HTTP server. The client belongs to one event loop.

    All methods may raise OSError and `HTTP_ERRORS`. url: scheme, host, port, and optionally a prefix of all paths.
    proxy, server_name: see `auth.Access`.
    """

    def __init__(self, url: str, tls: ssl.SSLContext | None = None, proxy: str = "", server_name: str = "") -> None:
        parts, via = urllib.parse.urlsplit(url), urllib.parse.urlsplit(proxy)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{url!r} is not the URL of an HTTP server")
        if proxy and (via.scheme not in ("http", "https") or not via.hostname):
            raise ValueError(f"{via.hostname or proxy!r} is not the URL of an HTTP proxy")
        self._base = url.rstrip("/")
        self._options: dict[str, Any] = {"allow_redirects": False}
        if proxy:
            host = via.netloc.rpartition("@")[2]
            self._options["proxy"] = via._replace(netloc=host).geturl()
            if via.username is not None:
                user, password = map(urllib.parse.unquote, (via.username, via.password or ""))
                self._options["proxy_headers"] = {"Proxy-Authorization": aiohttp.encode_basic_auth(user, password)}
        if server_name:
            self._options["server_hostname"] = server_name
        self._tls = tls
        self._session: aiohttp.ClientSession | None = None
        self._requests = 0
        self._turns = asyncio.Semaphore(MAX_REQUESTS)
        self._retired = False

    async def aclose(self) -> None:
        """Close all connections; running requests fail."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def retire(self) -> bool:
        """Close the client as soon as no request is running.

        Running requests continue; the end of the last one closes the client. The caller begins no new request. Return
        whether any request is running.
        """
        self._retired = True
        if not self._requests:
            await self.aclose()
        return bool(self._requests)

    async def request(
        self, method: str, target: str, headers: Mapping[str, str], content: bytes = b"", most: int | None = None
    ) -> Response:
        """Send a request, and read the whole response. target: path and query.

        most: maximum bytes of the response; None for `MAX_BODY`. Raises OversizedBodyError if the response is larger.
        """
        async with self._turns, self._exchange(method, target, headers, content, most) as response:
            return response

    def stream(
        self, method: str, target: str, headers: Mapping[str, str]
    ) -> contextlib.AbstractAsyncContextManager[Response]:
        """Return a context manager that sends a request.

        Inside the context, the body of a response with status 200 can be read by lines.
        """
        return self._exchange(method, target, headers, streamed=True)

    @contextlib.asynccontextmanager
    async def _exchange(
        self,
        method: str,
        target: str,
        headers: Mapping[str, str],
        content: bytes = b"",
        most: int | None = None,
        *,
        streamed: bool = False,
    ) -> AsyncIterator[Response]:
        self._requests += 1
        try:
            url = yarl.URL(f"{self._base}{target}", encoded=True)
            session = self._session or self._open()
            request = session.request(method, url, headers=headers, data=content or None, **self._options)
            async with request as response:
                try:
                    body = bytearray()  # The body stays a bytearray: a copy as bytes would double the memory.
                    most = MAX_BODY if most is None else most
                    if not streamed or response.status != 200:
                        async for piece in response.content.iter_any():
                            body += piece
                            if len(body) > most:
                                raise OversizedBodyError(f"the answer is larger than {most} bytes")
                    yield Response(response.status, response.headers, body, response.content)
                finally:
                    # If the caller has not read all lines, the connection is aborted. An orderly end of TLS would wait
                    # for the rest of the lines.
                    connection = response.connection
                    if connection is not None and connection.transport is not None:
                        connection.transport.abort()
        finally:
            self._requests -= 1
            if self._retired and not self._requests:
                await self.aclose()

    def _open(self) -> aiohttp.ClientSession:
        self._session = aiohttp.ClientSession(
            connector=_Connector(
                limit=0,  # With 0, aiohttp does not limit the number of connections.
                keepalive_timeout=IDLE,
                ssl=self._tls or True,
                socket_factory=_keepalive_socket,
            ),
            timeout=aiohttp.ClientTimeout(total=None),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            headers={"Accept-Encoding": "identity"},
        )
        return self._session


def proxy_of(url: str) -> str:
    """Return the proxy that the environment variables name for a server, by client-go's rules; "" for no proxy.

    The rules are those of golang.org/x/net/http/httpproxy: HTTPS_PROXY or HTTP_PROXY by the server's scheme; NO_PROXY
    with names, addresses and CIDR ranges; no proxy for localhost and loopback addresses.
    """
    parts = urllib.parse.urlsplit(url)
    proxy, host = _variable(f"{parts.scheme}_proxy"), parts.hostname or ""
    address = _address(host)
    if not proxy or host == "localhost" or (address is not None and address.is_loopback):
        return ""
    port = parts.port or (443 if parts.scheme == "https" else 80)
    if any(_matches(rule.strip().lower(), host, port, address) for rule in _variable("no_proxy").split(",")):
        return ""
    return proxy if "://" in proxy else f"http://{proxy}"


def _variable(name: str) -> str:
    return os.environ.get(name.upper()) or os.environ.get(name) or ""


def _matches(rule: str, host: str, port: int, address: _Address | None) -> bool:
    if rule == "*":
        return True
    if "/" in rule:
        with contextlib.suppress(ValueError):
            return address is not None and address in ipaddress.ip_network(rule, strict=False)
    name, wanted = _split_port(rule)
    if not name or wanted not in ("", str(port)):
        return False
    listed = _address(name)
    if listed is not None or address is not None:
        return listed == address
    if name.startswith((".", "*.")):
        return host.endswith(name.removeprefix("*"))
    return f".{host}".endswith(f".{name}")


def _address(text: str) -> _Address | None:
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address


def _split_port(rule: str) -> tuple[str, str]:
    """Split `host`, `host:port`, `[address]:port` or an address into host and port; the port is "" if there is none."""
    if rule.startswith("[") or rule.count(":") == 1:
        host, _, port = rule.rpartition(":")
        return host.strip("[]"), port
    return rule, ""
