"""HTTP/1.1 to one server over kept connections: what the API client needs of HTTP, and no more.

An agent waits for its API server on every node. The usual client library and what it imports
(HTTP/2, cookies, proxies' protocols, a second event loop's) cost 8 MB resident there and twice the
time a request; asyncio's streams are loaded anyway. Nothing here retries, follows a redirect or
asks for compression. Deadlines are the caller's (`asyncio.timeout`): a request that is cancelled
loses its connection and nothing else.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import os
import re
import socket
import ssl
import time
import urllib.parse
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Final

__all__ = ["HttpError", "Response", "Server"]

IDLE: Final = 60.0
"""Seconds after which a kept connection is not used any more."""
KEPT: Final = 4
"""Connections that are kept for later requests."""
MOST: Final = 32
"""Requests at one time, watches not counted."""

_KEEPALIVE: Final = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 15),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 30_000),
    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
)
"""A peer that vanished without a word (node lost, load balancer gone) is noticed after 30 s, also by a silent watch."""

_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f]")


class HttpError(Exception):
    """Raised when the other side does not speak HTTP, or ends in the middle of it."""


@dataclass(frozen=True, slots=True)
class Response:
    """An answer. headers: by names in lower case. body: empty of a streamed one."""

    status: int
    headers: Mapping[str, str]
    body: bytes = b""


class _Connection:
    """One connection, and how far its current answer is read."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer
        self.used_at = time.monotonic()
        self.again = False
        """Whether it can take another request once the answer is read."""

    @property
    def usable(self) -> bool:
        """Whether a request may be sent on it: neither side has closed it, nor is it old."""
        return (
            not self.reader.at_eof()
            and not self.writer.is_closing()
            and self.reader.exception() is None
            and time.monotonic() - self.used_at < IDLE
        )

    async def send(self, head: str, content: bytes) -> None:
        self.writer.write(head.encode("latin-1") + content)
        await self.writer.drain()

    async def read_head(self) -> Response:
        """Read the status and the headers of the final answer."""
        while True:
            try:
                lines = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
            except asyncio.IncompleteReadError as error:
                raise HttpError("the connection was closed before the answer") from error
            except asyncio.LimitOverrunError as error:
                raise HttpError("the answer's headers have no end") from error
            words = lines[0].split(None, 2)
            if len(words) < 2 or not words[0].startswith("HTTP/1.") or not re.fullmatch(r"[1-9][0-9]{2}", words[1]):
                raise HttpError(f"not an HTTP answer: {lines[0][:80]!r}")
            status = int(words[1])
            if status >= 200 or status == 101:
                break
        headers: dict[str, str] = {}
        for line in lines[1:-2]:
            name, _, value = line.partition(":")
            headers[name.strip().lower()] = value.strip()
        self.again = words[0] != "HTTP/1.0" and headers.get("connection", "").lower() != "close"
        return Response(status, headers)

    async def pieces(self, response: Response) -> AsyncIterator[bytes]:
        """Yield the answer's body as it comes."""
        if response.status in (204, 304):
            return
        try:
            if "chunked" in response.headers.get("transfer-encoding", "").lower():
                while size := self._size(await self.reader.readuntil(b"\r\n")):
                    yield await self.reader.readexactly(size)
                    await self.reader.readexactly(2)
                while await self.reader.readuntil(b"\r\n") != b"\r\n":
                    pass  # trailers
            elif "content-length" in response.headers:
                rest = self._size(response.headers["content-length"].encode(), 10)
                while rest:
                    piece = await self.reader.read(min(rest, 1 << 20))
                    if not piece:
                        raise HttpError("the connection was closed in the middle of the answer")
                    rest -= len(piece)
                    yield piece
            else:
                self.again = False
                while piece := await self.reader.read(1 << 16):
                    yield piece
        except asyncio.IncompleteReadError as error:
            raise HttpError("the connection was closed in the middle of the answer") from error
        except asyncio.LimitOverrunError as error:
            raise HttpError("a chunk's size has no end") from error

    @staticmethod
    def _size(text: bytes, base: int = 16) -> int:
        try:
            size = int(text.partition(b";")[0], base)
        except ValueError:
            size = -1
        if size < 0:
            raise HttpError(f"not a length: {text[:40]!r}")
        return size

    def abort(self) -> None:
        self.writer.transport.abort()

    async def closed(self) -> None:
        """Close it, and wait until that is done."""
        self.abort()
        with contextlib.suppress(OSError):
            await self.writer.wait_closed()


class Server:
    """One HTTP server. Belongs to one event loop.

    Raises of all methods: OSError (TLS errors and those of the name's look-up among it) and
    HttpError.

    Args:
        url: scheme, host, port and perhaps the beginning of all paths.
        tls: for https.
        proxy: the URL of an HTTP proxy on the way, "" for none.

    """

    def __init__(self, url: str, tls: ssl.SSLContext | None = None, proxy: str = "") -> None:
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{url!r} is not the URL of an HTTP server")
        via = urllib.parse.urlsplit(proxy)
        if proxy and (via.scheme not in ("http", "https") or not via.hostname):
            raise ValueError(f"{proxy!r} is not the URL of an HTTP proxy")
        self.url = url
        self._tls = (tls or ssl.create_default_context()) if parts.scheme == "https" else None
        self._host = parts.hostname
        self._port = parts.port or (443 if self._tls else 80)
        self._base = parts.path.rstrip("/")
        self._authority = parts.netloc.rpartition("@")[2]
        self._proxy = via if proxy else None
        self._idle: list[_Connection] = []
        self._busy: set[_Connection] = set()
        self._retired = False
        self._room = asyncio.Semaphore(MOST)

    def __repr__(self) -> str:
        return f"<Server {self.url}: {len(self._busy)} connections at work, {len(self._idle)} kept>"

    async def aclose(self) -> None:
        """Close all connections; requests under way fail."""
        connections, self._idle, self._busy = [*self._idle, *self._busy], [], set()
        for connection in connections:
            await connection.closed()

    def retire(self) -> bool:
        """Keep no connection for another request; return whether any is still at work, which goes on."""
        self._retired = True
        connections, self._idle = self._idle, []
        for connection in connections:
            connection.abort()
        return bool(self._busy)

    async def request(self, method: str, target: str, headers: Mapping[str, str], content: bytes = b"") -> Response:
        """Send a request and read the whole answer. target: path and query."""
        async with self._room, self._exchange(method, target, headers, content) as (connection, response):
            body = bytearray()
            async for piece in connection.pieces(response):
                body += piece
            return Response(response.status, response.headers, bytes(body))

    @contextlib.asynccontextmanager
    async def stream(
        self, method: str, target: str, headers: Mapping[str, str]
    ) -> AsyncIterator[tuple[Response, AsyncIterator[bytes]]]:
        """Send a request; its answer's body comes in pieces, and may be left unread."""
        async with self._exchange(method, target, headers, b"", whole=False) as (connection, response):
            yield response, connection.pieces(response)

    @contextlib.asynccontextmanager
    async def _exchange(
        self, method: str, target: str, headers: Mapping[str, str], content: bytes, *, whole: bool = True
    ) -> AsyncIterator[tuple[_Connection, Response]]:
        through = f"http://{self._authority}" if self._proxy and not self._tls else ""
        lines = [f"{method} {through}{self._base}{target} HTTP/1.1", f"Host: {self._authority}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        if content:
            lines.append(f"Content-Length: {len(content)}")
        for line in lines:
            if _CONTROL.search(line):
                raise ValueError("a control character in a request's headers")
        connection = self._kept() or await self._connect()
        self._busy.add(connection)
        try:
            await connection.send("\r\n".join((*lines, "", "")), content)
            response = await connection.read_head()
            yield connection, response
        except BaseException:
            self._drop(connection)
            raise
        keep = whole and connection.again and connection in self._busy and not self._retired
        if keep and len(self._idle) < KEPT:
            self._busy.discard(connection)
            connection.used_at = time.monotonic()
            self._idle.append(connection)
        else:
            self._drop(connection)

    def _drop(self, connection: _Connection) -> None:
        self._busy.discard(connection)
        connection.abort()

    def _kept(self) -> _Connection | None:
        while self._idle:
            connection = self._idle.pop()
            if connection.usable:
                return connection
            connection.abort()
        return None

    async def _connect(self) -> _Connection:
        proxy = self._proxy
        if proxy is None:
            return await self._open(self._host, self._port, self._tls)
        tls = ssl.create_default_context() if proxy.scheme == "https" else None
        assert proxy.hostname is not None
        connection = await self._open(proxy.hostname, proxy.port or (443 if tls else 80), tls)
        if self._tls is None:
            return connection
        try:
            there = f"[{self._host}]:{self._port}" if ":" in self._host else f"{self._host}:{self._port}"
            lines = [f"CONNECT {there} HTTP/1.1", f"Host: {there}"]
            if proxy.username:
                user = f"{urllib.parse.unquote(proxy.username)}:{urllib.parse.unquote(proxy.password or '')}"
                lines.append(f"Proxy-Authorization: Basic {base64.b64encode(user.encode()).decode()}")
            await connection.send("\r\n".join((*lines, "", "")), b"")
            answer = await connection.read_head()
            if answer.status // 100 != 2:
                raise HttpError(f"the proxy {proxy.hostname} refuses: {answer.status}")
            await connection.writer.start_tls(self._tls, server_hostname=self._host)
        except BaseException:
            self._drop(connection)
            raise
        return connection

    @staticmethod
    async def _open(host: str, port: int, tls: ssl.SSLContext | None) -> _Connection:
        reader, writer = await asyncio.open_connection(host, port, ssl=tls)
        raw = writer.get_extra_info("socket")
        for level, option, value in _KEEPALIVE:
            with contextlib.suppress(OSError):
                raw.setsockopt(level, option, value)
        return _Connection(reader, writer)


def proxy_of(url: str) -> str:
    """Return the proxy that the environment names for a server, "" for none."""
    if not any(name.lower() in ("http_proxy", "https_proxy", "all_proxy") and os.environ[name] for name in os.environ):
        return ""
    import urllib.request  # with it come http.client and email

    parts = urllib.parse.urlsplit(url)
    proxies = urllib.request.getproxies()
    proxy = proxies.get(parts.scheme) or proxies.get("all") or ""
    if not proxy or urllib.request.proxy_bypass(parts.hostname or ""):
        return ""
    return proxy if "://" in proxy else f"http://{proxy}"
