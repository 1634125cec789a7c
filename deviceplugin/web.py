"""The agent's HTTP server: a few pages to read, in threads of its own, beside the loop.

Whoever connects gets a thread, up to a number; beyond it the one who has kept its thread waiting
longest is let go, so idle and slow clients can never keep a scrape out. Nothing can be written
here: GET and HEAD only.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import errno
import logging
import os
import re
import selectors
import socket
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import ssl

__all__ = ["Answer", "Certificate", "Request", "Server", "Token", "listen", "parse_address"]

_LOG: Final = logging.getLogger(__name__)
TEXT: Final = "text/plain; charset=utf-8"
MOST_CONNECTIONS: Final = 32
SMALL: Final = 1024
"""Bytes of an answer up to which compressing it is not worth the while."""


# What the routes see.


@dataclass(frozen=True, slots=True)
class Request:
    """What was asked for. headers: names in lower case."""

    path: str
    query: str
    headers: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Answer:
    """What comes back. body: as a whole, or in pieces that are put together (and compressed) one by one."""

    body: bytes | Iterable[bytes]
    content_type: str = TEXT
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)


Route = Callable[[Request], Answer]


# Addresses.


def parse_address(address: str) -> tuple[str, int]:
    """Split `host:port`, `[v6]:port` or `:port`.

    Raises:
        OSError: it is none of these.

    """
    host, colon, port = address.rpartition(":")
    bare = host.removeprefix("[").removesuffix("]")
    if not colon or not port.isascii() or not port.isdecimal() or int(port) > 65535 or (":" in host and host == bare):
        raise OSError(errno.EINVAL, f"{address!r} is not host:port, [v6 address]:port or :port")
    return bare, int(port)


def listen(address: str) -> socket.socket:
    """Return a socket that listens at the address; without a host, on all addresses of both families.

    Raises:
        OSError: the address is in use, not this machine's, or none at all.

    """
    host, port = parse_address(address)
    if not host:
        host, family = ("::", socket.AF_INET6) if socket.has_dualstack_ipv6() else ("0.0.0.0", socket.AF_INET)  # noqa: S104
        return socket.create_server(
            (host, port), family=family, dualstack_ipv6=family == socket.AF_INET6, backlog=MOST_CONNECTIONS
        )
    try:
        family, *_, found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except socket.gaierror as error:
        raise OSError(errno.EADDRNOTAVAIL, f"{host}: {error.strerror}") from error
    return socket.create_server(found[:2], family=family, backlog=MOST_CONNECTIONS)


# Secrets that change while the process runs.


class _Watched:
    """Files whose contents are read again when they are others; compared at each use, as that costs µs."""

    def __init__(self, *paths: Path) -> None:
        self.paths = paths
        self._seen: object = None
        self._told = ""
        self._lock = threading.Lock()
        self._load()
        self._seen = self._look()

    def _look(self) -> object:
        found = []
        for path in self.paths:
            stat = os.stat(path)
            found.append((stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns))
        return tuple(found)

    def _load(self) -> None:
        raise NotImplementedError

    def _refresh(self) -> None:
        with self._lock:
            try:
                seen = self._look()
                if seen == self._seen:
                    return
                self._load()
            except OSError as error:
                # Half of a renewal, most often: what was read before goes on, and the next use looks again.
                said = f"{error.strerror or error}"
                if said != self._told:
                    self._told = said
                    _LOG.warning("%s; what was read before goes on being used", said)
                return
            if self._seen is not None:
                _LOG.info("%s was read again", " and ".join(map(str, self.paths)))
            self._seen, self._told = seen, ""


class Certificate(_Watched):
    """A server's certificate chain and key in PEM files, read again when they are renewed.

    Raises:
        OSError: at the start, if they cannot be read or do not belong together.

    """

    def __init__(self, certificate: Path, key: Path | None = None) -> None:
        self._context: ssl.SSLContext | None = None
        super().__init__(certificate, key or certificate)

    def _load(self) -> None:
        import ssl  # OpenSSL, 6 MB: only for those who want TLS

        certificate, key = self.paths
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        try:
            context.load_cert_chain(certificate, key)
        except ssl.SSLError as error:
            raise OSError(
                errno.EINVAL, f"{certificate} and {key} are no certificate with its key: {error.reason or error}"
            ) from error
        except OSError as error:
            # OpenSSL does not say which of the two it was.
            unread = next((path for path in self.paths if not os.access(path, os.R_OK)), certificate)
            raise OSError(error.errno, f"certificate file {unread}: {os.strerror(error.errno or 0)}") from error
        self._context = context

    @property
    def context(self) -> ssl.SSLContext:
        """What the next connection is to be made with."""
        self._refresh()
        assert self._context is not None
        return self._context


class Token(_Watched):
    """A bearer token in a file, read again when it changes.

    Raises:
        OSError: at the start, if it cannot be read or is empty.

    """

    def __init__(self, path: Path) -> None:
        self._token = b""
        super().__init__(path)

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
        scheme, _, said = authorization.partition(" ")
        given = said.strip().encode(errors="replace")
        if scheme.lower() == "basic":
            try:
                given = base64.b64decode(given, validate=True).partition(b":")[2]
            except binascii.Error:
                return False
        elif scheme.lower() != "bearer":
            return False
        return _equal(given, self._token)


def _equal(one: bytes, other: bytes) -> bool:
    """Compare without telling by the time it takes where they differ."""
    import hmac  # brings OpenSSL along where there is one: only for those who want a token

    return hmac.compare_digest(one, other)


# Connections.


@dataclass(frozen=True, slots=True)
class Limits:
    """How long a client may take, in seconds, and how many there may be.

    request: from connecting to the end of the first request's head. idle: from an answer to the
    end of the next request's head. answer: to take an answer.
    """

    request: float = 10.0
    idle: float = 120.0
    answer: float = 30.0
    connections: int = MOST_CONNECTIONS


class _Connection:
    """One client. waiting: it is the client's turn to say something."""

    def __init__(self, sock: socket.socket, deadline: float) -> None:
        self.sock = sock
        self.deadline = deadline
        self.since = time.monotonic()
        self.waiting = True
        self._over = False
        self._lock = threading.Lock()

    def turn(self, seconds: float, *, waiting: bool) -> None:
        """Note whose turn it is and how long it may take."""
        self.since = time.monotonic()
        self.deadline = self.since + seconds
        self.waiting = waiting

    def encrypt(self, context: ssl.SSLContext) -> None:
        """Go on with TLS."""
        with self._lock:  # meanwhile there is no socket that could be cut
            if self._over:
                raise ConnectionAbortedError
            self.sock = context.wrap_socket(self.sock, server_side=True, do_handshake_on_connect=False)
        self.sock.do_handshake()

    def cut(self) -> None:
        """End it from outside: whatever its thread waits for fails now."""
        with self._lock:
            if not self._over:
                self._over = True
                with contextlib.suppress(OSError):
                    # Past SSLSocket.shutdown, which would have the thread go on in plain text.
                    socket.socket.shutdown(self.sock, socket.SHUT_RDWR)

    def close(self) -> None:
        """End it from its own thread."""
        with self._lock:
            self._over = True
            self.sock.close()


class Server:
    """Serves routes by path at a socket that listens.

    open_routes: paths that need no token (a kubelet's probes carry none).
    """

    def __init__(
        self,
        sock: socket.socket,
        routes: Mapping[str, Route],
        *,
        certificate: Certificate | None = None,
        token: Token | None = None,
        open_routes: frozenset[str] = frozenset(),
        limits: Limits | None = None,
    ) -> None:
        self.routes = routes
        self.token = token
        self.open_routes = open_routes
        self.limits = limits or Limits()
        self.cut = 0
        self._sock = sock
        self._certificate = certificate
        self._connections: dict[_Connection, threading.Thread] = {}
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._wake, self._woken = socket.socketpair()
        self._told = ""
        self._thread = threading.Thread(target=self._serve, name="web", daemon=True)

    @property
    def address(self) -> str:
        """Where it listens, as host:port."""
        host, port = self._sock.getsockname()[:2]
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    @property
    def connections(self) -> int:
        """How many clients there are."""
        return len(self._connections)

    def start(self) -> None:
        """Begin to serve."""
        self._sock.setblocking(False)
        self._thread.start()

    def close(self) -> None:
        """End it all, clients included."""
        self._over.set()
        self._wake.close()
        if self._thread.ident is not None:
            self._thread.join(5.0)
        self._sock.close()
        self._woken.close()
        with self._lock:
            left = dict(self._connections)
        for connection in left:
            connection.cut()
        until = time.monotonic() + 0.5  # daemons: one that still works on an answer is left behind
        for thread in left.values():
            thread.join(max(0.0, until - time.monotonic()))

    def _serve(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._sock, selectors.EVENT_READ)
            selector.register(self._woken, selectors.EVENT_READ)
            while not self._over.is_set():
                ready = selector.select(self._next_deadline())
                if self._over.is_set():
                    return
                self._cut_late_ones()
                if any(key.fileobj is self._sock for key, _ in ready):
                    self._accept()

    def _accept(self) -> None:
        try:
            sock, _ = self._sock.accept()
        except (BlockingIOError, ConnectionError):
            return
        except OSError as error:  # out of file descriptors: those of clients that wait are worth less
            if self._told != str(error):
                self._told = str(error)
                _LOG.warning("a client cannot be accepted: %s", error)
            if not self._make_room(least=1):
                self._over.wait(0.1)
            return
        self._told = ""
        try:
            sock.setblocking(True)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except OSError:  # it has gone already
            sock.close()
            return
        self._make_room(self.limits.connections)
        connection = _Connection(sock, time.monotonic() + self.limits.request)
        thread = threading.Thread(target=self._talk, args=(connection,), name="web client", daemon=True)
        with self._lock:
            self._connections[connection] = thread
        try:
            thread.start()
        except RuntimeError as error:  # no more threads
            _LOG.warning("a client cannot be served: %s", error)
            with self._lock:
                del self._connections[connection]
            connection.close()

    def _make_room(self, least: int) -> bool:
        """Let clients go until there are fewer than `least`, those who have kept us waiting longest first."""
        with self._lock:
            surplus = len(self._connections) - least + 1
            order = sorted(self._connections, key=lambda one: (not one.waiting, one.since)) if surplus > 0 else []
        for connection in order[:surplus]:
            self.cut += 1
            connection.cut()
            with self._lock:
                self._connections.pop(connection, None)
        return surplus > 0

    def _next_deadline(self) -> float | None:
        with self._lock:
            if not self._connections:
                return None
            # Deadlines move while we sleep, but never nearer than by the shortest limit.
            nearest = min(connection.deadline for connection in self._connections)
        shortest = min(self.limits.request, self.limits.idle, self.limits.answer)
        return max(0.0, min(nearest - time.monotonic(), shortest))

    def _cut_late_ones(self) -> None:
        now = time.monotonic()
        with self._lock:
            late = [connection for connection in self._connections if connection.deadline <= now]
            for connection in late:
                del self._connections[connection]
        for connection in late:
            connection.cut()

    def _talk(self, connection: _Connection) -> None:
        try:
            if self._certificate is not None:
                connection.encrypt(self._certificate.context)
            _Conversation(connection, self).hold()
        except OSError:
            pass  # it went, or was let go
        except Exception:
            _LOG.exception("serving a client failed")
        finally:
            connection.close()
            with self._lock:
                self._connections.pop(connection, None)


class _BadRequestError(Exception):
    """Raised when what a client says is no request; carries the status to answer with."""

    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.status = status


class _Conversation:
    """Speaks HTTP with one client: a request, its answer, and the next one.

    By hand: the standard library's server brings OpenSSL and the mail parser along, many times
    what is needed here, for every node's memory to hold.
    """

    def __init__(self, connection: _Connection, served: Server) -> None:
        self._client = connection
        self._served = served
        self._heard = b""

    def hold(self) -> None:
        """Answer until one of both wants no more."""
        limits, keep = self._served.limits, True
        while keep:
            try:
                head = self._read_head()
                if head is None:
                    return
                self._client.turn(limits.answer, waiting=False)
                method, request, keep = parse_head(head)
                answer = self._answer(request)
            except _BadRequestError as error:
                method, request, keep = "GET", Request("", "", {}), False
                answer = Answer(f"{REASONS[error.status]}\n".encode(), TEXT, error.status)
            self._send(answer, request, whole=method != "HEAD", keep=keep)
            self._client.turn(limits.idle, waiting=True)

    def _read_head(self) -> bytes | None:
        """Return the next request's head; None if the client has gone."""
        while True:
            self._heard = self._heard.lstrip(b"\r\n")
            if found := _END.search(self._heard):
                head, self._heard = self._heard[: found.start()], self._heard[found.end() :]
                return head
            if len(self._heard) > MOST_HEAD:
                raise _BadRequestError(431)
            piece = self._client.sock.recv(65536)
            if not piece:
                return None
            self._heard += piece

    def _answer(self, request: Request) -> Answer:
        served, path = self._served, request.path
        if (
            served.token is not None
            and path not in served.open_routes
            and not served.token.admits(request.headers.get("authorization", ""))
        ):
            # Browsers ask for a password only when they are offered Basic.
            scheme = "Basic" if "text/html" in request.headers.get("accept", "") else "Bearer"
            return Answer(b"a token is needed\n", TEXT, 401, {"WWW-Authenticate": f'{scheme} realm="deviceplugin"'})
        route = served.routes.get(path)
        if route is None:
            return Answer(f"there are {', '.join(served.routes)}\n".encode(), TEXT, 404)
        try:
            return route(request)
        except Exception as error:
            _LOG.exception("%s failed", path)
            return Answer(f"{type(error).__name__}: {error}\n".encode(), TEXT, 500)

    def _send(self, answer: Answer, request: Request, *, whole: bool, keep: bool) -> None:
        status = answer.status
        try:
            body, packed = _body(answer.body, packed=_takes_gzip(request.headers.get("accept-encoding", "")))
        except Exception as error:  # in the midst of the pieces
            _LOG.exception("%s failed", request.path)
            body, packed, status = f"{type(error).__name__}: {error}\n".encode(), False, 500
        headers = {
            "Content-Type": answer.content_type if status == answer.status else TEXT,
            "Content-Length": str(len(body)),
            "Cache-Control": "no-store",
            "X-Content-Type-Options": "nosniff",
            "Vary": "Accept, Accept-Encoding",
            **({"Content-Encoding": "gzip"} if packed else {}),
            **({} if keep else {"Connection": "close"}),
            **answer.headers,
        }
        lines = [f"HTTP/1.1 {status} {REASONS.get(status, 'Unknown')}", *(f"{k}: {v}" for k, v in headers.items())]
        self._client.sock.sendall("\r\n".join((*lines, "", "")).encode("latin-1", "replace"))
        if whole:
            self._client.sock.sendall(body)


MOST_HEAD: Final = 16 * 1024
"""Bytes that a request's head may have."""
REASONS: Final = {
    200: "OK",
    400: "Bad Request",
    401: "Unauthorized",
    404: "Not Found",
    405: "Method Not Allowed",
    431: "Request Header Fields Too Large",
    500: "Internal Server Error",
    503: "Service Unavailable",
    505: "HTTP Version Not Supported",
}
_END: Final = re.compile(rb"\r?\n\r?\n")
_NAME: Final = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")


def parse_head(head: bytes) -> tuple[str, Request, bool]:
    """Take a request's head apart; return its method, what it asks for, and whether another may follow."""
    first, *lines = head.decode("latin-1").replace("\r\n", "\n").split("\n")
    words = first.split(" ")
    if len(words) != 3 or not words[2].startswith("HTTP/"):
        raise _BadRequestError(400)
    method, target, version = words
    if version not in ("HTTP/1.0", "HTTP/1.1"):
        raise _BadRequestError(505)
    if method not in ("GET", "HEAD"):
        raise _BadRequestError(405)
    headers: dict[str, str] = {}
    for line in lines:
        name, colon, value = line.partition(":")
        if not colon or not _NAME.fullmatch(name):
            raise _BadRequestError(400)
        name, value = name.lower(), value.strip(" \t")
        headers[name] = f"{headers[name]}, {value}" if name in headers else value
    if "://" in target:  # as to a proxy
        target = "/" + target.partition("://")[2].partition("/")[2]
    if not target.startswith("/"):
        raise _BadRequestError(400)
    path, _, query = target.partition("?")
    wishes = headers.get("connection", "").lower()
    keep = "keep-alive" in wishes if version == "HTTP/1.0" else "close" not in wishes
    if headers.get("content-length", "0") != "0" or "transfer-encoding" in headers:
        keep = False  # a body, which nobody reads
    return method, Request(path, query, headers), keep


def _body(body: bytes | Iterable[bytes], *, packed: bool) -> tuple[bytes, bool]:
    """Return what goes out, and whether it is compressed."""
    if isinstance(body, bytes) and (not packed or len(body) <= SMALL):
        return body, False
    pieces = (body,) if isinstance(body, bytes) else body
    if not packed:
        return b"".join(pieces), False
    packer = zlib.compressobj(level=1, wbits=16 + zlib.MAX_WBITS)  # with gzip's head and tail
    return b"".join([packer.compress(piece) for piece in pieces] + [packer.flush()]), True


def _takes_gzip(header: str) -> bool:
    for part in header.split(","):
        name, _, parameters = part.partition(";")
        if name.strip() == "gzip":
            return parameters.replace(" ", "") not in ("q=0", "q=0.0", "q=0.00", "q=0.000")
    return False


@contextlib.contextmanager
def serving(server: Server) -> Iterator[Server]:
    """Serve while the context lasts."""
    server.start()
    try:
        yield server
    finally:
        server.close()
