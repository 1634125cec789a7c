"""HTTP/1.1 on kept connections, against servers that send exactly the bytes of a test."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import socket
import ssl
import threading
import tracemalloc
import warnings
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiohttp.client_proto import ResponseHandler

from dra_bridge.kube import http
from dra_bridge.kube.http import HTTP_ERRORS, MAX_REQUESTS, HttpClient, proxy_of
from tests.metrics.test_web import make_certificate, trusting

Handler = Callable[[str], bytes | None]


class Answering:
    """A server that answers each request's head with the handler's bytes.

    It closes the connection after an answer with the header "Connection: close", and without an answer if that is None.
    """

    def __init__(self, handler: Handler) -> None:
        self.handler = handler
        self.heads: list[str] = []
        self.connections = 0
        self.writers: list[asyncio.StreamWriter] = []
        self.url = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self.writers.append(writer)
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                self.heads.append(head)
                answer = self.handler(head)
                if answer is None:
                    break
                writer.write(answer)
                await writer.drain()
                if b"Connection: close" in answer:
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


def url_of(server: asyncio.Server) -> str:
    return f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


@asynccontextmanager
async def answering(handler: Handler | bytes) -> AsyncIterator[Answering]:
    one = Answering(handler if callable(handler) else lambda _: handler)
    server = await asyncio.start_server(one.serve, "127.0.0.1", 0)
    one.url = url_of(server)
    try:
        async with asyncio.timeout(10):
            yield one
    finally:
        server.close()
        for writer in one.writers:
            writer.close()
        await server.wait_closed()


@asynccontextmanager
async def reaching(url: str, proxy: str = "") -> AsyncIterator[HttpClient]:
    server = HttpClient(url, proxy=proxy)
    try:
        yield server
    finally:
        await server.aclose()


CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"


async def test_connections_are_kept() -> None:
    """Sequential requests share a connection; concurrent requests have a connection each."""
    async with answering(OK) as other, reaching(other.url) as server:
        for _ in range(3):
            assert (await server.request("GET", "/a", {})).body == b"{}"
        assert other.connections == 1
        await asyncio.gather(*(server.request("GET", "/a", {}) for _ in range(3)))
        assert other.connections == 3


async def test_few_requests_are_under_way_at_a_time() -> None:
    """At most MAX_REQUESTS connections exist for concurrent requests; further requests wait for a connection."""
    async with answering(OK) as other, reaching(other.url) as server:
        answers = await asyncio.gather(*(server.request("GET", "/a", {}) for _ in range(3 * MAX_REQUESTS)))
        assert {bytes(answer.body) for answer in answers} == {b"{}"}
        assert other.connections == MAX_REQUESTS


async def test_streams_keep_no_request_waiting() -> None:
    """100 open streams do not block a request: a node has a watch for each driver."""
    async with (
        answering(lambda request: CHUNKED if "/watch" in request else OK) as other,
        reaching(other.url) as server,
        contextlib.AsyncExitStack() as streams,
    ):
        for _ in range(100):
            await streams.enter_async_context(server.stream("GET", "/watch", {}))
        assert (await server.request("GET", "/a", {})).body == b"{}"


async def test_the_request() -> None:
    """The request has the path below the server's path, the Host header, the given headers and Content-Length."""
    async with answering(OK) as other, reaching(f"{other.url}/prefix/") as server:
        await server.request("POST", "/a?b=c", {"X-One": "1"}, b"body")
        (head,) = other.heads
        line, *headers = head.rstrip().split("\r\n")
        assert line == "POST /prefix/a?b=c HTTP/1.1"
        assert {f"Host: {other.url.partition('//')[2]}", "X-One: 1", "Content-Length: 4"} <= set(headers)


@pytest.mark.parametrize(
    ("answer", "status", "body", "again"),
    [
        (CHUNKED + b"3;x=y\r\nabc\r\nA\r\n0123456789\r\n0\r\nT: 1\r\n\r\n", 200, b"abc0123456789", 1),
        (b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 404 Not Found\r\ncontent-length: 1\r\n\r\nx", 404, b"x", 1),
        (b"HTTP/1.1 204 No Content\r\n\r\n", 204, b"", 1),
        (b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 1\r\n\r\nx", 200, b"x", 2),
        (b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\nall of it", 200, b"all of it", 2),
        (b"HTTP/1.0 200 OK\r\nContent-Length: 1\r\n\r\nx", 200, b"x", 2),
        (b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 1\r\n\r\nx", 200, b"x", 1),
        (b"HTTP/1.1 302 Found\r\nLocation: /b\r\nContent-Length: 1\r\n\r\nx", 302, b"x", 1),
    ],
    ids=["chunked", "continue", "no-content", "close", "no length", "1.0", "compressed", "redirect"],
)
async def test_answers(answer: bytes, status: int, body: bytes, again: int) -> None:
    """Bodies of every form are read, redirects are not followed, and only kept connections are used again."""
    async with answering(answer) as other, reaching(other.url) as server:
        for _ in range(2):
            response = await server.request("GET", "/", {})
            assert (response.status, response.body) == (status, body)
        assert other.connections == again


@pytest.mark.parametrize(
    "answer",
    [
        None,
        b"SSH-2.0-OpenSSH\r\n\r\n",
        b"HTTP/1.1 abc\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 5\r\n\r\na",
        b"HTTP/1.1 200 OK\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n5\r\na",
        b"HTTP/1.1 200 OK\r\nX: " + b"x" * 100_000,
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + b"1" * 100_000,
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 4\r\n\r\n{}{}",
        b"HTTP/1.1 200 OK\r\nContent-Length: 2, 4\r\n\r\n{}{}",
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
    ],
    ids=[
        *("closed", "ssh", "status", "chunk", "length", "short body", "short chunk", "headers", "size"),
        *("two lengths", "a list", "both"),
    ],
)
async def test_nonsense(answer: bytes | None) -> None:
    """An invalid or incomplete answer is an error, and its connection is not used again."""
    async with answering(lambda _: answer) as other, reaching(other.url) as server:
        for asked in (1, 2):
            before = other.connections
            with pytest.raises(HTTP_ERRORS):
                await server.request("POST", "/", {})
            assert (other.connections - before, len(other.heads)) == (1, asked)


@pytest.mark.parametrize("late", [False, True])
async def test_an_answer_that_nobody_asked_for(monkeypatch: pytest.MonkeyPatch, late: bool) -> None:
    """Bytes that arrive on a kept connection before the next request are not taken as the answer to that request."""
    evil = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nevil!"
    received, take = asyncio.Event(), ResponseHandler.data_received

    def noted(protocol: ResponseHandler, data: bytes) -> None:
        take(protocol, data)
        if evil in data:
            received.set()

    monkeypatch.setattr(ResponseHandler, "data_received", noted)
    async with answering(OK if late else OK + evil) as other, reaching(other.url) as server:
        assert (await server.request("GET", "/", {})).body == b"{}"
        if late:
            other.writers[0].write(evil)
            await other.writers[0].drain()
            await received.wait()
        assert (await server.request("GET", "/", {})).body == b"{}"
        assert other.connections == 2


async def test_a_body_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer with a body above MAX_BODY is an error, also if the answer refuses a stream."""
    monkeypatch.setattr(http, "MAX_BODY", 1000)
    for status, fits in ((200, 1000), (403, 1000), (200, 1001), (403, 1001)):
        answer = b"HTTP/1.1 %d X\r\nContent-Length: %d\r\n\r\n" % (status, fits) + b"x" * fits
        async with answering(answer) as other, reaching(other.url) as server:
            raised = contextlib.nullcontext() if fits == 1000 else pytest.raises(HTTP_ERRORS, match="larger than")
            with raised:
                assert len((await server.request("GET", "/", {})).body) == fits
            if status == 403:
                with raised:
                    async with server.stream("GET", "/", {}) as response:
                        assert len(response.body) == fits


async def test_a_line_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """A line of a stream above MAX_LINE is an error."""
    monkeypatch.setattr(http, "MAX_LINE", 1000)
    answer = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + (b"200\r\n" + b"x" * 512 + b"\r\n") * 3
    async with (
        answering(answer) as other,
        reaching(other.url) as server,
        server.stream("GET", "/", {}) as response,
    ):
        with pytest.raises(HTTP_ERRORS, match="1000"):
            await anext(response.lines())


async def test_a_connection_that_the_server_closed_is_not_used() -> None:
    """A kept connection that the server has closed is replaced by a new one."""
    async with answering(OK) as other, reaching(other.url) as server:
        await server.request("GET", "/", {})
        other.writers[0].close()
        await other.writers[0].wait_closed()
        await asyncio.sleep(0)
        await server.request("GET", "/", {})
        assert other.connections == 2


async def test_old_connections_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection that was idle for longer than IDLE is replaced by a new one."""
    monkeypatch.setattr(http, "IDLE", 0.0)
    async with answering(OK) as other, reaching(other.url) as server:
        for _ in range(2):
            await server.request("GET", "/", {})
        assert other.connections == 2


async def test_a_stream() -> None:
    """A stream yields lines in whatever pieces they arrive, and may be left before its end."""
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n7\r\none\ntwo\r\n"
    async with answering(head) as other, reaching(other.url) as server:
        async with server.stream("GET", "/", {}) as response:
            assert response.status == 200
            lines = response.lines()
            assert await anext(lines) == b"one\n"
            other.writers[0].write(b"5\r\n\ntri\n\r\n")
            assert [await anext(lines), await anext(lines)] == [b"two\n", b"tri\n"]
        assert not await server.retire()  # no request is running


def test_a_stream_that_is_left_is_closed_at_once(tmp_path: Path) -> None:
    """A TLS stream that is left early leaves no open socket, also if the server sends nothing more."""
    certificate, key = make_certificate(tmp_path, "a")
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(certificate, key)
    over = threading.Event()

    def serve(listening: socket.socket) -> None:
        with tls.wrap_socket(listening.accept()[0], server_side=True) as connection:
            connection.recv(1000)
            connection.sendall(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n4\r\none\n\r\n")
            over.wait(10)

    async def leave(url: str) -> None:
        server = HttpClient(url, trusting(certificate))
        async with server.stream("GET", "/", {}) as response:
            assert await anext(response.lines()) == b"one\n"
        await server.aclose()

    with socket.create_server(("127.0.0.1", 0)) as listening, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ResourceWarning)
        thread = threading.Thread(target=serve, args=(listening,))
        thread.start()
        try:
            asyncio.run(leave(f"https://127.0.0.1:{listening.getsockname()[1]}"))
            gc.collect()
        finally:
            over.set()
            thread.join()
    assert [str(one.message) for one in caught] == []


def test_many_tls_streams_take_little_memory(tmp_path: Path) -> None:
    """Each TLS stream takes less than 128 KiB; asyncio's default buffer alone is 256 KiB."""
    certificate, key = make_certificate(tmp_path, "a")
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(certificate, key)
    over = threading.Event()

    def answer(connection: socket.socket) -> None:
        with tls.wrap_socket(connection, server_side=True) as wrapped:
            wrapped.recv(1000)
            wrapped.sendall(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n4\r\none\n\r\n")
            over.wait(60)

    def serve(listening: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                threading.Thread(target=answer, args=(listening.accept()[0],), daemon=True).start()

    async def measure(url: str) -> float:
        """Return the bytes of memory per further stream in the client."""
        server = HttpClient(url, trusting(certificate))
        async with contextlib.AsyncExitStack() as stack:
            sizes = []
            for streams in (1, 16):
                for _ in range(streams):
                    response = await stack.enter_async_context(server.stream("GET", "/", {}))
                    assert await anext(response.lines()) == b"one\n"
                gc.collect()
                sizes.append(tracemalloc.get_traced_memory()[0])
        await server.aclose()
        return (sizes[1] - sizes[0]) / 16

    with socket.create_server(("127.0.0.1", 0)) as listening:
        threading.Thread(target=serve, args=(listening,), daemon=True).start()
        tracemalloc.start()
        try:
            assert asyncio.run(measure(f"https://127.0.0.1:{listening.getsockname()[1]}")) < 128 * 1024
        finally:
            tracemalloc.stop()
            over.set()


async def test_cancelled() -> None:
    """The connection of a cancelled request is closed, and the next request gets its own answer."""
    async with answering(lambda head: b"" if "slow" in head else OK) as other, reaching(other.url) as server:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await server.request("GET", "/slow", {})
        assert (await server.request("GET", "/", {})).body == b"{}"
        assert other.connections == 2


async def test_a_retired_server() -> None:
    """A running stream of a retired client goes on; after its end the client has no running request."""
    async with answering(CHUNKED) as other, reaching(other.url) as server:
        async with server.stream("GET", "/", {}) as response:
            assert await server.retire()
            other.writers[0].write(b"4\r\none\n\r\n")
            assert await anext(response.lines()) == b"one\n"
        assert not await server.retire()


async def test_a_proxy() -> None:
    """A proxy gets the whole URL for http, and CONNECT with the proxy's credentials for https."""
    async with answering(OK) as proxy, reaching("http://server.example", proxy.url) as server:
        await server.request("GET", "/a", {})
        assert proxy.heads[0].startswith("GET http://server.example/a HTTP/1.1\r\n")
    refusing = answering(b"HTTP/1.1 407 Who\r\nContent-Length: 0\r\n\r\n")
    async with refusing as proxy, reaching("https://[::1]:6443", proxy.url.replace("//", "//me:s%20x@")) as server:
        with pytest.raises(HTTP_ERRORS, match="407"):
            await server.request("GET", "/a", {})
        assert proxy.heads[0].startswith("CONNECT [::1]:6443 HTTP/1.1\r\nHost: [::1]:6443\r\n")
        assert "Proxy-Authorization: Basic bWU6cyB4\r\n" in proxy.heads[0]


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """An environment without proxy variables."""
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)
    return monkeypatch


def test_which_proxy(environment: pytest.MonkeyPatch) -> None:
    """The proxy comes from the environment variable for the URL's scheme."""
    assert proxy_of("https://server.example") == ""
    environment.setenv("HTTPS_PROXY", "proxy.example:3128")
    assert proxy_of("https://server.example") == "http://proxy.example:3128"
    assert proxy_of("http://server.example") == ""
    environment.delenv("HTTPS_PROXY")
    environment.setenv("https_proxy", "https://proxy.example")
    assert proxy_of("https://server.example") == "https://proxy.example"


@pytest.mark.parametrize(
    ("rules", "direct", "proxied"),
    [
        ("", "localhost 127.0.0.1 127.9.9.9 [::1]", "server.example 10.0.0.1"),
        ("*", "server.example 10.0.0.1", ""),
        ("10.96.0.0/12, fd00::/8", "10.96.0.1 10.111.255.255 [fd00::1]", "10.112.0.1 [fe80::1] 10.96.0.1.example"),
        ("10.96.0.1,[fd00::1]:6443", "10.96.0.1 10.96.0.1:6443 [fd00::1]:6443", "10.96.0.2 [fd00::1]"),
        ("10.96.0.1:443", "10.96.0.1", "10.96.0.1:6443"),
        ("server.example", "server.example a.server.example Server.Example", "aserver.example example"),
        (".example,*.test", "a.example a.b.test", "example test"),
        (" SERVER.example:6443 ", "server.example:6443 a.server.example:6443", "server.example"),
        ("300.1.1.0/99,:443,,/", "", "server.example 10.0.0.1"),
    ],
)
def test_servers_without_a_proxy(environment: pytest.MonkeyPatch, rules: str, direct: str, proxied: str) -> None:
    """NO_PROXY has client-go's syntax: names, domains, addresses and CIDR ranges, each with an optional port."""
    environment.setenv("HTTPS_PROXY", "proxy.example")
    environment.setenv("NO_PROXY", rules)
    assert [host for host in direct.split() if proxy_of(f"https://{host}")] == []
    assert [host for host in proxied.split() if not proxy_of(f"https://{host}")] == []


@pytest.mark.parametrize(("url", "proxy"), [("server", ""), ("ftp://server", ""), ("http://server", "socks5://proxy")])
def test_urls_that_cannot_be_used(url: str, proxy: str) -> None:
    """URLs and proxies of other schemes than HTTP are refused at once."""
    with pytest.raises(ValueError, match="is not the URL of"):
        HttpClient(url, proxy=proxy)
