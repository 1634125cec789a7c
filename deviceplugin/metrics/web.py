"""Serves the agent's few read-only pages over HTTP, by the standard library's http.server and socketserver.

The server limits the load that clients can cause. It has a maximum number of connections, serves one request for each
connection, has a time limit for each step of a request, and caches responses for all clients. It accepts only GET and
HEAD.
"""

from __future__ import annotations

import contextlib
import errno
import gzip
import http.client
import http.server
import logging
import math
import socket
import socketserver
import ssl
import sys
import threading
import time
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field, replace
from email.message import Message
from typing import Any, Final, NamedTuple, cast
from urllib.parse import urlsplit

from prometheus_client.exposition import gzip_accepted

from deviceplugin.addresses import parse_address
from deviceplugin.metrics.credentials import Certificate, Token

_LOG: Final = logging.getLogger(__name__)
TEXT: Final = "text/plain; charset=utf-8"
LIFETIME: Final = 0.5  # Minimum seconds for which a rendered response is reused.
LIFETIME_FACTOR: Final = 10  # A response is reused for at least this multiple of its rendering's processor time.
MAX_WAITING: Final = 8
"""Maximum number of clients that wait for the rendering of one page. Further clients of this page get status 503 at
once, so that there are connections for clients of other pages."""
SMALL: Final = 1024  # Responses of up to this number of bytes are not compressed.
MAX_HEAD: Final = 16 * 1024  # Maximum bytes of a request's head.
BACKLOG: Final = 1024  # Maximum connections that Linux keeps until the server accepts them.


@dataclass(frozen=True, slots=True)
class Request:
    """A client's request. headers: for each header's name (not case-sensitive), the value."""

    path: str
    query: str
    headers: Message


@dataclass(frozen=True, slots=True)
class Answer:
    """The response to a request."""

    body: bytes
    content_type: str = TEXT
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)


class _Rendering(NamedTuple):
    answer: Answer
    at: float
    lifetime: float

    def is_fresh(self, lifetimes: int) -> bool:
        return time.monotonic() - self.at < lifetimes * self.lifetime


@dataclass(eq=False)
class Route:
    """A page of the server. All clients get the same rendered response while this response is fresh.

    A response is fresh for ten times the processor time of its rendering, but at least LIFETIME seconds. So rendering
    uses at most a tenth of a processor. While the next response is rendered, clients get the old response, until the
    old response is twice as old as a fresh response may be.

    key: a function that returns the key of a request: the few properties on which the response depends. render: a
    function that makes the response for a key. public: whether clients without credentials are served. lock: a lock
    that is held during rendering, so that routes with the same lock render one after the other.
    """

    render: Callable[[Any], Answer]
    key: Callable[[Request], Hashable] = lambda request: None
    public: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)
    _renderings: dict[tuple[Hashable, bool], _Rendering] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self._waiting = threading.BoundedSemaphore(MAX_WAITING)

    def answer(self, request: Request) -> Answer:
        """Return the response to a request, compressed if the client accepts that."""
        key = (self.key(request), gzip_accepted(request.headers.get("accept-encoding", "")))
        rendering = self._renderings.get(key)
        if rendering is not None and rendering.is_fresh(1):
            return rendering.answer
        if not self.lock.acquire(blocking=False):
            if rendering is not None and rendering.is_fresh(2):
                return rendering.answer
            if not self._waiting.acquire(blocking=False):
                return Answer(b"too many clients wait for this page\n", status=503, headers={"Retry-After": "1"})
            try:
                self.lock.acquire()
            finally:
                self._waiting.release()
        try:
            rendering = self._renderings.get(key)
            if rendering is None or not rendering.is_fresh(1):
                self._renderings = {cached: other for cached, other in self._renderings.items() if other.is_fresh(2)}
                rendering = self._renderings[key] = self._rendered(*key)
            return rendering.answer
        finally:
            self.lock.release()

    def _rendered(self, key: Hashable, packed: bool) -> _Rendering:
        began = time.thread_time()
        answer = self.render(key)
        if packed and len(answer.body) > SMALL:
            body = gzip.compress(answer.body, 1)
            answer = replace(answer, body=body, headers={**answer.headers, "Content-Encoding": "gzip"})
        return _Rendering(answer, time.monotonic(), max(LIFETIME, LIFETIME_FACTOR * (time.thread_time() - began)))


def listen(address: str) -> socket.socket:
    """Return a socket that listens at the address; without a host, on IPv4 and IPv6. Raises OSError."""
    host, port = parse_address(address)
    if not host:
        host, family = ("::", socket.AF_INET6) if socket.has_dualstack_ipv6() else ("0.0.0.0", socket.AF_INET)  # noqa: S104
        return socket.create_server(
            (host, port), family=family, dualstack_ipv6=family == socket.AF_INET6, backlog=BACKLOG
        )
    try:
        # The host name is given as bytes, because a text would load the codec `idna`, which takes 0.3 MB of memory.
        family, *_, resolved = socket.getaddrinfo(
            host.encode(), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except socket.gaierror as error:
        raise OSError(errno.EADDRNOTAVAIL, f"{host}: {error.strerror}") from error
    return socket.create_server(resolved[:2], family=family, backlog=BACKLOG)


@dataclass(frozen=True, slots=True)
class ClientLimits:
    """Time limits for a client, in seconds, and the maximum number of clients at a time."""

    request: float = 10.0  # Maximum seconds from the connection to the end of the request's head.
    answer: float = 30.0  # Maximum seconds in which a client must read the response.
    grace: float = 0.1  # This limit replaces `request` and `answer` while other clients wait for a connection.
    connections: int = 128


class _Connection(NamedTuple):
    since: float  # The time at which the present step began: the client was accepted, or had sent its request.
    deadline: float  # The time at which the server ends the connection.


class Server(socketserver.ThreadingMixIn, socketserver.TCPServer):
    """Serves one route for each path, at a listening socket. Each connection has its own thread and one request."""

    daemon_threads = True

    def __init__(
        self,
        sock: socket.socket,
        routes: Mapping[str, Route],
        *,
        certificate: Certificate | None = None,
        token: Token | None = None,
        limits: ClientLimits | None = None,
    ) -> None:
        socketserver.BaseServer.__init__(self, sock.getsockname(), _RequestHandler)
        self.socket = sock
        self.routes = routes
        self.certificate = certificate
        self.token = token
        self.limits = limits or ClientLimits()
        self._clients: dict[socket.socket, _Connection] = {}
        self._changed = threading.Condition()
        self._over = False
        self._last_error = ""
        self._thread = threading.Thread(target=self._run, name="web server", daemon=True)

    @property
    def address(self) -> str:
        """The server's address, as host:port."""
        host, port = cast("tuple[str, int]", self.server_address[:2])
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    @property
    def connections(self) -> int:
        """The number of connected clients."""
        return len(self._clients)

    def start(self) -> None:
        """Begin to serve. Raises RuntimeError if no thread can be started."""
        self._thread.start()

    def close(self) -> None:
        """End all connections, and stop listening."""
        self._over = True
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)  # The shutdown wakes the thread that accepts clients.
        self._thread.join(5.0)
        self.server_close()
        with self._changed:
            for sock in self._clients:
                _cut(sock)
            # The wait may be short: the threads that still work on responses are daemon threads, so the process can end
            # without them.
            self._changed.wait_for(lambda: not self._clients, 0.5)

    def _run(self) -> None:
        while not self._over:
            self.timeout = 0.1 if self._clients else None
            self.handle_request()
            now = time.monotonic()
            with self._changed:
                for sock in [sock for sock, client in self._clients.items() if client.deadline <= now]:
                    _cut(sock)

    def get_request(self) -> tuple[socket.socket, Any]:
        """Wait until there are fewer clients than the maximum, then accept the next client."""
        self._make_room(self.limits.connections)
        try:
            sock, address = self.socket.accept()
        except OSError as error:  # One cause is that no file descriptor is left.
            if not self._over and self._last_error != str(error):
                self._last_error = str(error)
                _LOG.warning("a client cannot be accepted: %s", error)
            self._make_room(self.connections)
            raise
        self._last_error = ""
        if self.certificate is not None:
            sock = self.certificate.context.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
        self.allow(sock, self.limits.request)
        return sock, address

    def allow(self, sock: socket.socket, seconds: float) -> None:
        """Set the time limit for the next step of a client. seconds: the limit, from now."""
        now = time.monotonic()
        with self._changed:
            self._clients[sock] = _Connection(now, now + seconds)

    def _make_room(self, most: int) -> None:
        """Wait until there are fewer than `most` clients.

        Until then, end the connection with the earliest deadline, as soon as its present step is `grace` seconds old.
        """
        with self._changed:
            while len(self._clients) >= most > 0 and not self._over:
                sock, client = min(self._clients.items(), key=lambda item: item[1].deadline)
                if time.monotonic() - client.since >= self.limits.grace:
                    _cut(sock)
                    self._clients[sock] = _Connection(math.inf, math.inf)
                self._changed.wait(self.limits.grace)

    def finish_request(self, request: Any, client_address: Any) -> None:
        """Serve a client, in the client's thread."""
        if isinstance(request, ssl.SSLSocket):
            request.do_handshake()
        super().finish_request(request, client_address)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log an error, unless the client caused it: the client left, was disconnected, or does not speak HTTP."""
        if not isinstance(sys.exc_info()[1], OSError | http.client.HTTPException):
            _LOG.exception("serving a client failed")

    def shutdown_request(self, request: Any) -> None:
        """End a client's connection."""
        with self._changed:
            self._clients.pop(request, None)
            self._changed.notify_all()
        super().shutdown_request(request)

    def refusal(self, request: Request, sock: socket.socket) -> Answer | None:
        """Return the error response for a client without the required certificate or token; None for other clients."""
        wants_certificate = self.certificate is not None and self.certificate.client_ca is not None
        if wants_certificate and not cast("ssl.SSLSocket", sock).getpeercert():
            return Answer(b"a client certificate is needed\n", status=403)
        if self.token is None or self.token.admits(request.headers.get("authorization", "")):
            return None
        # Browsers ask for a password only if the server offers Basic.
        scheme = "Basic" if "text/html" in request.headers.get("accept", "") else "Bearer"
        return Answer(b"a token is needed\n", TEXT, 401, {"WWW-Authenticate": f'{scheme} realm="deviceplugin"'})


def _cut(sock: socket.socket) -> None:
    """End a connection, so that every read and write in the thread of its client fails."""
    with contextlib.suppress(OSError):
        # SSLSocket.shutdown must not be called, because the client's thread would then continue without encryption.
        socket.socket.shutdown(sock, socket.SHUT_RDWR)


class _Head:
    """Reads the lines of a request's head, up to MAX_HEAD bytes in total."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self._left = MAX_HEAD
        self.close = file.close

    def readline(self, size: int) -> bytes:
        line: bytes = self._file.readline(min(size, self._left + 1))
        self._left -= len(line)
        if self._left < 0:
            raise http.client.LineTooLong("head")
        return line


class _RequestHandler(http.server.BaseHTTPRequestHandler):
    """Handles one request. With HTTP/1.0, http.server ends the connection after the response."""

    server: Server
    server_version = "deviceplugin"
    sys_version = ""
    default_request_version = "HTTP/1.0"
    disable_nagle_algorithm = True

    def setup(self) -> None:
        super().setup()
        self.rfile = cast("Any", _Head(self.rfile))

    def finish(self) -> None:
        super().finish()
        # Read the rest of the request: if data is unread, Linux resets the connection, and the response may be lost.
        with contextlib.suppress(OSError):
            self.connection.setblocking(False)
            self.connection.recv(65536)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Log no request, because any client could fill the log."""

    def do_GET(self) -> None:
        self.server.allow(self.connection, self.server.limits.answer)
        try:
            url = urlsplit(self.path)
        except ValueError as error:
            self.send_error(400, explain=str(error))
            return
        answer = self._answer(Request(url.path, url.query, self.headers))
        headers = {
            "Content-Type": answer.content_type,
            "Content-Length": str(len(answer.body)),
            "Cache-Control": "no-store",
            "X-Content-Type-Options": "nosniff",
            "Vary": "Accept, Accept-Encoding",
            **answer.headers,
        }
        self.send_response(answer.status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(answer.body)

    do_HEAD = do_GET  # noqa: N815

    def _answer(self, request: Request) -> Answer:
        route = self.server.routes.get(request.path)
        if (route is None or not route.public) and (refusal := self.server.refusal(request, self.connection)):
            return refusal
        if route is None:
            return Answer(f"there are {', '.join(self.server.routes)}\n".encode(), status=404)
        try:
            return route.answer(request)
        except Exception as error:
            _LOG.exception("the answer to %s failed", request.path)
            return Answer(f"{type(error).__name__}: {error}\n".encode(), status=500)
