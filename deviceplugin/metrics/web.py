"""The agent's HTTP server: a few read-only pages, by the standard library's http.server, in threads of its own.

What clients can cause is bounded: the number of connections, one request a connection, a time for
each step, and one rendering of a page an interval, which all clients share. GET and HEAD only.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import errno
import gzip
import hmac
import http.client
import http.server
import logging
import math
import os
import random
import select
import socket
import ssl
import threading
import time
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field, replace
from email.message import Message
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, cast
from urllib.parse import urlsplit

from prometheus_client.exposition import gzip_accepted

from deviceplugin.addresses import parse_address

_LOG: Final = logging.getLogger(__name__)
TEXT: Final = "text/plain; charset=utf-8"
LIFETIME: Final = 0.5  # seconds for which an answer is used at least
LIFETIME_FACTOR: Final = 10  # an answer is used at least so many times as long as its rendering took of the processor
MAX_WAITING: Final = 8
"""Clients that wait for the rendering of a page. More are turned away, so that they leave connections to others."""
SMALL: Final = 1024  # bytes up to which an answer is not compressed
MAX_HEAD: Final = 16 * 1024  # bytes of a request's head
MAX_LINGERING: Final = 256  # connections that are kept open although their clients have been answered
SPARE: Final = 4  # threads that wait for their turn to accept at most
BACKLOG: Final = 1024  # connections that the kernel keeps while the server accepts no more


@dataclass(frozen=True, slots=True)
class Request:
    """A client's request. headers: by name in any case."""

    path: str
    query: str
    headers: Message


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to a request."""

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
    """A page whose answers are shared by all clients for a while.

    An answer whose rendering took long is used longer, so that clients cause a tenth of a processor's load at most. It
    is used twice as long while a rendering is under way.

    render: makes an answer for a key. key: what the answer depends on in a request; it has few values. public: no
    credentials are needed. lock: routes with the same lock render one after the other.
    """

    render: Callable[[Any], Answer]
    key: Callable[[Request], Hashable] = lambda request: None
    public: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)
    _renderings: dict[tuple[Hashable, bool], _Rendering] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self._waiting = threading.BoundedSemaphore(MAX_WAITING)

    def answer(self, request: Request) -> Answer:
        """Return the answer to a request, compressed if the client takes that."""
        key = (self.key(request), gzip_accepted(request.headers.get("accept-encoding", "")))
        found = self._renderings.get(key)
        if found is not None and found.is_fresh(1):
            return found.answer
        if not self.lock.acquire(blocking=False):
            if found is not None and found.is_fresh(2):
                return found.answer
            if not self._waiting.acquire(blocking=False):
                return Answer(b"too many clients wait for this page\n", status=503, headers={"Retry-After": "1"})
            try:
                self.lock.acquire()
            finally:
                self._waiting.release()
        try:
            found = self._renderings.get(key)
            if found is None or not found.is_fresh(1):
                self._renderings = {one: other for one, other in self._renderings.items() if other.is_fresh(2)}
                found = self._renderings[key] = self._rendered(*key)
            return found.answer
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
    """Return a socket that listens at the address; without a host, at all, IPv4 and IPv6. Raises OSError."""
    host, port = parse_address(address)
    if not host:
        host, family = ("::", socket.AF_INET6) if socket.has_dualstack_ipv6() else ("0.0.0.0", socket.AF_INET)  # noqa: S104
        return socket.create_server(
            (host, port), family=family, dualstack_ipv6=family == socket.AF_INET6, backlog=BACKLOG
        )
    try:
        # Text would load the codec `idna`, 0.3 MB.
        family, *_, found = socket.getaddrinfo(host.encode(), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except socket.gaierror as error:
        raise OSError(errno.EADDRNOTAVAIL, f"{host}: {error.strerror}") from error
    return socket.create_server(found[:2], family=family, backlog=BACKLOG)


class _Watched:
    """Files that are read again when they have changed; compared at each use, which takes µs."""

    def __init__(self, *paths: str | Path) -> None:
        self.paths = tuple(map(Path, paths))
        self._warned = ""
        self._lock = threading.Lock()
        self._load()
        self._seen = self._identities()

    def _identities(self) -> list[tuple[int, ...]]:
        stats = (os.stat(path) for path in self.paths)
        return [(stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns) for stat in stats]

    def _load(self) -> None:
        raise NotImplementedError

    def _refresh(self) -> None:
        with self._lock:
            try:
                seen = self._identities()
                if seen == self._seen:
                    return
                self._load()
            except OSError as error:
                # Most often half of a renewal. The next use tries again.
                warning = f"{error.strerror or error}"
                if warning != self._warned:
                    self._warned = warning
                    _LOG.warning("%s; the content that was read before stays in use", warning)
                return
            _LOG.info("%s was read again", " and ".join(map(str, self.paths)))
            self._seen, self._warned = seen, ""


class Certificate(_Watched):
    """A server's certificate chain and key in PEM files.

    client_ca: a PEM file with the authorities of client certificates; all clients but the kubelet's
    probes must then have one. Raises OSError at the start if the files cannot be read or do not belong together.
    """

    def __init__(
        self,
        certificate: str | Path,
        key: str | Path | None = None,
        client_ca: str | Path | None = None,
        min_version: Literal["1.2", "1.3"] = "1.2",
    ) -> None:
        self.client_ca = client_ca
        self._min_version = ssl.TLSVersion.TLSv1_3 if min_version == "1.3" else ssl.TLSVersion.TLSv1_2
        super().__init__(certificate, key or certificate, *([client_ca] if client_ca else []))

    def _load(self) -> None:
        certificate, key = self.paths[:2]
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = self._min_version
        try:
            context.load_cert_chain(certificate, key)
        except ssl.SSLError as error:
            message = f"{certificate} and {key} are no certificate with its key: {error.reason or error}"
            raise OSError(errno.EINVAL, message) from error
        except OSError as error:
            # OpenSSL does not say which of the two it was.
            unread = next((path for path in self.paths if not os.access(path, os.R_OK)), certificate)
            raise OSError(error.errno, f"certificate file {unread}: {os.strerror(error.errno or 0)}") from error
        if self.client_ca is not None:
            try:
                context.load_verify_locations(self.client_ca)
            except OSError as error:
                message = f"client CA file {self.client_ca}: {error.strerror or error}"
                raise OSError(error.errno, message) from error
            context.verify_mode = ssl.CERT_OPTIONAL  # the kubelet's probes have none
        self._context = context

    @property
    def context(self) -> ssl.SSLContext:
        """The context for the next connection."""
        self._refresh()
        return self._context


class Token(_Watched):
    """A bearer token in a file. Raises OSError at the start if it cannot be read or is empty."""

    def _load(self) -> None:
        (path,) = self.paths
        try:
            token = path.read_bytes().strip()
        except OSError as error:
            raise OSError(error.errno, f"token file {path}: {error.strerror}") from error
        if not token:
            raise OSError(errno.EINVAL, f"token file {path}: it is empty")
        self._token = token

    def admits(self, authorization: str) -> bool:
        """Return whether an Authorization header carries the token: as a bearer, or (browsers) as a password."""
        self._refresh()
        scheme, _, credentials = authorization.partition(" ")
        given = credentials.strip().encode(errors="replace")
        if scheme.lower() == "basic":
            try:
                given = base64.b64decode(given, validate=True).partition(b":")[2]
            except binascii.Error:
                return False
        elif scheme.lower() != "bearer":
            return False
        return hmac.compare_digest(given, self._token)


@dataclass(frozen=True, slots=True)
class Limits:
    """How long a client may take, in seconds, and how many there may be at a time."""

    request: float = 10.0  # from connecting to the end of the request's head
    answer: float = 30.0  # to take the answer
    grace: float = 0.1  # for each of both, when other clients wait
    linger: float = 5.0  # to the end of a connection with several requests, so that its client comes back no sooner
    connections: int = 128


@dataclass(slots=True, eq=False)
class _Client:
    sock: socket.socket
    thread: threading.Thread
    since: float  # when the server began to wait for the client, inf while it does not
    deadline: float  # when the connection ends at the latest
    answered: bool = False  # whether the server waits for the answer to be taken
    pipelined: bool = False

    def cut(self) -> None:
        """Make whatever its thread waits for fail."""
        with contextlib.suppress(OSError):
            # Not SSLSocket.shutdown, after which the thread would go on in plain text.
            socket.socket.shutdown(self.sock, socket.SHUT_RDWR)


class Server:
    """Serves routes by path at a socket that listens; one request a connection.

    Its threads take turns: one accepts a connection, lets the next one accept, and answers. So a connection waits for
    no other thread to wake up, which is what takes long on a busy machine.
    """

    def __init__(
        self,
        sock: socket.socket,
        routes: Mapping[str, Route],
        *,
        certificate: Certificate | None = None,
        token: Token | None = None,
        limits: Limits | None = None,
    ) -> None:
        self.socket = sock
        self._descriptor = sock.fileno()
        self.routes = routes
        self.certificate = certificate
        self.token = token
        self.limits = limits or Limits()
        self._clients: dict[socket.socket, _Client] = {}
        self._changed = threading.Condition()
        self._accepting = threading.Lock()
        self._spare = 0  # threads that wait for their turn to accept
        self._over = False
        self._last_error = ""
        self._lingering: dict[socket.socket, float] = {}  # until when

    @property
    def address(self) -> str:
        """Where it listens, as host:port."""
        host, port = self.socket.getsockname()[:2]
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    @property
    def connections(self) -> int:
        """How many clients there are."""
        return len(self._clients)

    @property
    def crowded(self) -> bool:
        """Whether another client waits to be accepted; then one that sends several requests at once gets no page."""
        poll = select.poll()
        poll.register(self._descriptor, select.POLLIN)
        return bool(poll.poll(0))

    def start(self) -> None:
        """Begin to serve. Raises RuntimeError if no thread can be started."""
        for _ in range(1 + SPARE):
            self._start_thread()

    def _start_thread(self) -> None:
        threading.Thread(target=self._work, name="web client", daemon=True).start()

    def close(self) -> None:
        """End all connections, and no longer listen."""
        self._over = True
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        if self._accepting.acquire(timeout=5.0):
            self._accepting.release()
        self.socket.close()
        with self._changed:
            left = list(self._clients.values())
        for client in left:
            client.pipelined = False
            client.cut()
        until = time.monotonic() + 0.5  # a thread that still works on an answer is a daemon, and is left
        for client in left:
            client.thread.join(max(0.0, until - time.monotonic()))
        for sock in self._lingering:
            _close(sock)

    def _work(self) -> None:
        """Take turns with the other threads until there are enough of them."""
        while True:
            with self._changed:
                if self._spare == SPARE:
                    return
                self._spare += 1
            with self._accepting:
                with self._changed:
                    self._spare -= 1
                client = self._accept()
            if client is None:
                return
            self._serve(client.sock)

    def _accept(self) -> _Client | None:
        """Return the next client, when there are not too many, and see to a thread for the one after it."""
        while not self._over:
            self._make_room(self.limits.connections)
            self._end_late()
            self.socket.settimeout(0.1 if self._clients or self._lingering else None)
            try:
                sock, _ = self.socket.accept()
            except TimeoutError:
                continue
            except OSError as error:  # out of file descriptors, say
                if not self._over and self._last_error != str(error):
                    self._last_error = str(error)
                    _LOG.warning("a client cannot be accepted: %s", error)
                self._make_room(self.connections)
                with self._changed:
                    self._changed.wait_for(lambda: self._over, self.limits.grace)
                continue
            self._last_error = ""
            if self.certificate is not None:
                try:
                    sock = self.certificate.context.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
                except OSError:
                    continue  # it has left already
            now = time.monotonic()
            client = _Client(sock, threading.current_thread(), now, now + self.limits.request)
            with self._changed:
                self._clients[sock] = client
                alone = not self._spare
            try:
                if alone:
                    self._start_thread()
            except RuntimeError as error:  # no more threads
                _LOG.warning("a client cannot be served: %s", error)
                self._ended(sock)
                continue
            return client
        return None

    def _make_room(self, most: int) -> None:
        """Wait until there are fewer than `most` clients; cut the one that has kept the server waiting longest."""
        with self._changed:
            while len(self._clients) >= most > 0 and not self._over:
                waiting = min(self._clients.values(), key=lambda one: (one.since == math.inf, one.answered, one.since))
                if time.monotonic() - waiting.since >= self.limits.grace:
                    waiting.cut()
                    waiting.since = math.inf
                self._changed.wait(self.limits.grace)

    def _end_late(self) -> None:
        """Cut the clients whose time is over, and end the connections that have lingered long enough."""
        now = time.monotonic()
        with self._changed:
            late = [client for client in self._clients.values() if client.deadline <= now]
            ended = [sock for sock, until in self._lingering.items() if until <= now]
            for sock in ended:
                del self._lingering[sock]
        for client in late:
            client.cut()
        for sock in ended:
            _close(sock)

    def turn(self, sock: socket.socket, *, answered: bool = False) -> None:
        """Note that the server works for this client now, or that the client has its answer to take."""
        now = time.monotonic()
        with self._changed:
            client = self._clients[sock]
            client.since, client.answered = now if answered else math.inf, answered
            client.deadline = now + self.limits.answer

    def _serve(self, sock: socket.socket) -> None:
        try:
            if isinstance(sock, ssl.SSLSocket):
                sock.do_handshake()
            _Handler(sock, None, self)  # type: ignore[arg-type]  # only its own methods look at the server
        except (OSError, http.client.HTTPException):
            pass  # it left, or was cut, or does not speak HTTP
        except Exception:
            _LOG.exception("serving a client failed")
        finally:
            self._ended(sock)

    def _ended(self, sock: socket.socket) -> None:
        with self._changed:
            client = self._clients.pop(sock)
            self._changed.notify_all()
            if client.pipelined and len(self._lingering) < MAX_LINGERING:
                # Not the same time for all: they would come back together.
                linger = self.limits.linger * random.uniform(1.0, 2.0)  # noqa: S311  # jitter
                self._lingering[sock] = time.monotonic() + linger
                return
        _close(sock)

    def pipelined(self, sock: socket.socket) -> None:
        """Note that a client has sent more than one request."""
        with self._changed:
            self._clients[sock].pipelined = not self._over

    def refusal(self, request: Request, sock: socket.socket) -> Answer | None:
        """Return the answer to a client without the certificate or token that it needs."""
        wants_certificate = self.certificate is not None and self.certificate.client_ca is not None
        if wants_certificate and not cast("ssl.SSLSocket", sock).getpeercert():
            return Answer(b"a client certificate is needed\n", status=403)
        if self.token is None or self.token.admits(request.headers.get("authorization", "")):
            return None
        # Browsers ask for a password only when they are offered Basic.
        scheme = "Basic" if "text/html" in request.headers.get("accept", "") else "Bearer"
        return Answer(b"a token is needed\n", TEXT, 401, {"WWW-Authenticate": f'{scheme} realm="deviceplugin"'})


def _close(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_WR)
    sock.close()


class _Head:
    """Reads the lines of a request's head, up to a number of bytes in all."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self._left = MAX_HEAD
        self.close, self.peek = file.close, file.peek

    def readline(self, size: int) -> bytes:
        line: bytes = self._file.readline(min(size, self._left + 1))
        self._left -= len(line)
        if self._left < 0:
            raise http.client.LineTooLong("head")
        return line


class _Handler(http.server.BaseHTTPRequestHandler):
    """Answers one request. HTTP/1.0, so that http.server ends the connection after it."""

    server: Server  # type: ignore[assignment]
    server_version = "deviceplugin"
    sys_version = ""
    default_request_version = "HTTP/1.0"
    disable_nagle_algorithm = True

    def setup(self) -> None:
        super().setup()
        self.rfile = cast("Any", _Head(self.rfile))

    def finish(self) -> None:
        if self._has_more():
            self.server.pipelined(self.connection)
        super().finish()

    def _has_more(self) -> bool:
        """Return whether the client has sent more than its request; the connection does not block from then on."""
        with contextlib.suppress(OSError):
            self.connection.setblocking(False)
            return bool(self.rfile.peek(1))  # type: ignore[attr-defined]
        return False

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Log nothing: any client could fill the log."""

    def do_GET(self) -> None:
        self.server.turn(self.connection)
        try:
            url = urlsplit(self.path)
        except ValueError as error:
            self.send_error(400, explain=str(error))
            return
        answer = self._answer(Request(url.path, url.query, self.headers))
        self.server.turn(self.connection, answered=True)
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
        if self.server.crowded:
            more = self._has_more()
            self.connection.setblocking(True)
            if more:
                return Answer(b"one request a connection\n", status=503, headers={"Retry-After": "1"})
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
