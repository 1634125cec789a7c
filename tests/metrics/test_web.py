"""The HTTP server: clients cannot block a scrape, secrets may change, and it is read-only."""

from __future__ import annotations

import contextlib
import errno
import functools
import gzip
import http.client
import logging
import os
import select
import socket
import ssl
import subprocess
import threading
import time
from base64 import b64encode
from collections.abc import Callable, Iterator
from email.message import Message
from pathlib import Path
from typing import Any

import pytest

from deviceplugin.addresses import parse_address
from deviceplugin.metrics import web
from deviceplugin.metrics.credentials import Certificate, Token
from deviceplugin.metrics.web import Answer, ClientLimits, Request, Route, Server, listen
from tests.waits import wait

LONG = b"long " * 1000


def routes() -> dict[str, Route]:
    def failing(key: object) -> Answer:
        raise ValueError("not today")

    def said(request: Request) -> Answer:
        return Answer(f"{request.path} {request.query} {request.headers['x-y']}".encode())

    return {
        "/metrics": Route(lambda key: Answer(b"one 1\n")),
        "/long": Route(lambda key: Answer(LONG)),
        "/huge": Route(lambda key: Answer(bytes(64 * 1024 * 1024))),
        "/failing": Route(failing),
        "/said": Route(said, key=lambda request: request),
        "/healthz": Route(lambda key: Answer(b"ok\n"), public=True),
    }


@contextlib.contextmanager
def serving(server: Server) -> Iterator[Server]:
    """Serve while the context lasts."""
    server.start()
    try:
        yield server
    finally:
        server.close()


@pytest.fixture
def serve() -> Iterator[Callable[..., Server]]:
    with contextlib.ExitStack() as stack:

        def start(address: str = "127.0.0.1:0", **options: Any) -> Server:
            pages = options.pop("routes", None) or routes()
            return stack.enter_context(serving(Server(listen(address), pages, **options)))

        yield start


def get(
    server: Server, path: str = "/metrics", tls: ssl.SSLContext | None = None, method: str = "GET", **headers: str
) -> tuple[int, bytes, dict[str, str]]:
    of = functools.partial(http.client.HTTPSConnection, context=tls) if tls else http.client.HTTPConnection
    with contextlib.closing(of(*parse_address(server.address), timeout=20)) as connection:
        connection.request(method, path, headers={name.replace("_", "-"): value for name, value in headers.items()})
        answer = connection.getresponse()
        return answer.status, answer.read(), dict(answer.getheaders())


def connect(server: Server) -> socket.socket:
    return socket.create_connection(parse_address(server.address), timeout=10)


def read(client: socket.socket) -> bytes:
    """Return all that the server sends until the end of the connection."""
    pieces = []
    with contextlib.suppress(ConnectionError):
        while piece := client.recv(65536):
            pieces.append(piece)
    return b"".join(pieces)


def is_cut(client: socket.socket) -> bool:
    """Read to the end; return whether the connection was cut."""
    read(client)
    return True


class TestAddress:
    """Listen addresses."""

    @pytest.mark.parametrize(
        ("address", "wanted"),
        [
            (":9410", ("", 9410)),
            ("127.0.0.1:0", ("127.0.0.1", 0)),
            ("[::1]:80", ("::1", 80)),
            ("node1.example.com:9", ("node1.example.com", 9)),
        ],
    )
    def test_address_has_a_host_or_none(self, address: str, wanted: tuple[str, int]) -> None:
        """An address is host:port, [v6]:port or :port."""
        assert parse_address(address) == wanted

    @pytest.mark.parametrize("address", ["", "9410", "::1:80", "a:b", "a:70000", "a:-1", "a:٣"])
    def test_anything_else_is_refused(self, address: str) -> None:
        """A text that is no address is an error that quotes the text."""
        with pytest.raises(OSError, match="is not host:port"):
            parse_address(address)

    def test_unknown_host_is_an_error_that_names_it(self) -> None:
        """An unknown host is an error that names the host."""
        with pytest.raises(OSError, match=r"nowhere\.invalid"):
            listen("nowhere.invalid:0")

    @pytest.mark.parametrize(("address", "client"), [(":0", "127.0.0.1"), (":0", "::1"), ("[::1]:0", "::1")])
    def test_families_reach_it(self, address: str, client: str, serve: Callable[..., Server]) -> None:
        """:port listens for IPv4 and IPv6; [::1]:port is shown with its brackets."""
        if client == "::1" and not socket.has_dualstack_ipv6():
            pytest.skip("this machine has no IPv6")
        server = serve(address)
        assert server.address.startswith("[::1]:") is (address == "[::1]:0")
        with socket.create_connection((client, parse_address(server.address)[1]), timeout=10) as connection:
            connection.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
            assert read(connection).endswith(b"one 1\n")


class TestAnswers:
    """Answers to requests."""

    def test_route_sees_what_was_asked_for(self, serve: Callable[..., Server]) -> None:
        """A route gets path, query and headers."""
        assert get(serve(), "/said?a=b", X_Y="z")[1] == b"/said a=b z"

    def test_unknown_path_names_the_known_ones(self, serve: Callable[..., Server]) -> None:
        """An unknown path gets 404 with the known paths."""
        status, body, _ = get(serve(), "/metric")
        assert status == 404
        assert b"/metrics" in body

    def test_head_has_no_body(self, serve: Callable[..., Server]) -> None:
        """HEAD has the length and no body."""
        status, body, headers = get(serve(), method="HEAD")
        assert (status, body, headers["Content-Length"]) == (200, b"", "6")

    def test_long_answers_are_compressed_on_demand(self, serve: Callable[..., Server]) -> None:
        """Long answers are compressed with gzip for clients that accept it; short ones are not."""
        server = serve()
        _, packed, headers = get(server, "/long", Accept_Encoding="br, gzip;q=0.5")
        assert headers["Content-Encoding"] == "gzip"
        assert gzip.decompress(packed) == LONG
        for no in ("", "identity"):
            assert get(server, "/long", Accept_Encoding=no)[1] == LONG
        assert get(server, Accept_Encoding="gzip")[1] == b"one 1\n"

    def test_one_connection_is_one_request(self, serve: Callable[..., Server]) -> None:
        """A client that sends several requests at once gets one answer, and the connection ends."""
        server = serve()
        for count in (300, 1):
            with connect(server) as client:
                client.sendall(b"GET /healthz HTTP/1.1\r\n\r\n" * count)
                assert read(client).count(b"HTTP/1.0 200 OK") == 1

    def test_a_route_that_fails_says_so_and_the_rest_goes_on(
        self, serve: Callable[..., Server], caplog: pytest.LogCaptureFixture
    ) -> None:
        """A route that raises gives 500 with the error, which is logged; the next request is answered."""
        server = serve()
        status, body, _ = get(server, "/failing")
        assert (status, body) == (500, b"ValueError: not today\n")
        assert "/failing failed" in caplog.text
        assert get(server)[0] == 200

    @pytest.mark.parametrize(
        "garbage", [b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n", b"\r\n" * 100, b"GET\r\n\r\n", b"G" * 70000, b"\x00"]
    )
    def test_garbage_harms_nobody(
        self, garbage: bytes, serve: Callable[..., Server], caplog: pytest.LogCaptureFixture
    ) -> None:
        """A client that sends bytes that are no HTTP is disconnected, without a log line."""
        server = serve()
        with connect(server) as client:
            with contextlib.suppress(ConnectionError):
                client.sendall(garbage)
                client.shutdown(socket.SHUT_WR)
            assert is_cut(client)
        assert get(server)[0] == 200
        assert not caplog.records


class TestRequests:
    """Requests as the standard library parses them."""

    @pytest.mark.parametrize(
        ("target", "status", "body"),
        [
            ("/healthz", 200, b"ok\n"),
            ("/healthz?x=http://a/metrics", 200, b"ok\n"),
            ("/healthz#/metrics", 200, b"ok\n"),
            ("http://node1:9410/healthz?x=/metrics", 200, b"ok\n"),
            ("//healthz", 200, b"ok\n"),
            ("/healthz/metrics", 401, b"a token is needed\n"),
            ("http://a/metrics?/healthz", 401, b"a token is needed\n"),
            ("http://[/healthz", 400, b""),
            ("*", 401, b"a token is needed\n"),
        ],
    )
    def test_path_is_what_the_target_says(
        self, target: str, status: int, body: bytes, serve: Callable[..., Server], tmp_path: Path
    ) -> None:
        """A query or host in the target neither selects another page nor avoids the token."""
        (tmp_path / "token").write_text("s3cret")
        with connect(serve(token=Token(tmp_path / "token"))) as client:
            client.sendall(f"GET {target} HTTP/1.1\r\n\r\n".encode())
            answer = read(client)
        assert answer.startswith(f"HTTP/1.0 {status} ".encode())
        assert answer.partition(b"\r\n\r\n")[2].endswith(body)

    @pytest.mark.parametrize(
        ("head", "status"),
        [
            (b"GET / HTTP/2.0", 505),
            (b"GET / x HTTP/1.1 y", 400),
            (b"POST /healthz HTTP/1.1", 501),
            (b"GET /healthz HTTP/x", 400),
            (b"GET /healthz HTTP/1.1" + b"\r\nA: b" * 101, 431),
            (b"GET /healthz HTTP/1.1\r\nA: " + b"b" * 17_000, 431),
        ],
    )
    def test_what_is_no_request_is_refused(self, head: bytes, status: int, serve: Callable[..., Server]) -> None:
        """An invalid request gets the status of its error."""
        with connect(serve()) as client:
            client.sendall(head + b"\r\n\r\n")
            assert read(client).startswith(f"HTTP/1.0 {status} ".encode())

    def test_requests_may_come_in_pieces(self, serve: Callable[..., Server]) -> None:
        """A request may come byte by byte."""
        with connect(serve()) as client:
            for byte in b"GET /healthz HTTP/1.1\r\nA: b\r\n\r\n":
                client.sendall(bytes([byte]))
            assert read(client).startswith(b"HTTP/1.0 200 OK\r\n")


class TestSharing:
    """One rendering of a page serves all clients."""

    def test_answers_are_shared(self, serve: Callable[..., Server], monkeypatch: pytest.MonkeyPatch) -> None:
        """Clients of a page share one rendering for each key of the route (here the query), compressed or not."""
        monkeypatch.setattr(web, "LIFETIME", 600.0)
        renderings: list[object] = []

        def render(key: object) -> Answer:
            renderings.append(key)
            return Answer(LONG)

        server = serve(routes={"/page": Route(render, key=lambda request: request.query)})
        for _ in range(5):
            assert get(server, "/page")[1] == LONG
            assert gzip.decompress(get(server, "/page", Accept_Encoding="gzip")[1]) == LONG
            assert get(server, "/page?other")[1] == LONG
        assert sorted(map(str, renderings)) == ["", "", "other"]

    def test_answers_are_made_anew(self, serve: Callable[..., Server], monkeypatch: pytest.MonkeyPatch) -> None:
        """After the lifetime of a shared answer, the page is rendered again."""
        renderings = iter(range(10))
        server = serve(routes={"/page": Route(lambda key: Answer(b"%d" % next(renderings)))})
        monkeypatch.setattr(web, "LIFETIME", 0.0)
        monkeypatch.setattr(web, "LIFETIME_FACTOR", 0)
        assert [get(server, "/page")[1] for _ in range(2)] == [b"0", b"1"]

    def test_what_takes_long_is_used_long(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """An answer is used again for ten times the processor time that its rendering took."""
        now, used = [100.0], [0.0]
        monkeypatch.setattr(time, "monotonic", lambda: now[0])
        monkeypatch.setattr(time, "thread_time", lambda: used[0])
        renderings: list[int] = []

        def render(key: object) -> Answer:
            used[0] += 2.0
            renderings.append(1)
            return Answer(b"")

        route, request = Route(render), Request("/", "", Message())
        for at, count in ((100, 1), (119, 1), (121, 2), (140, 2), (142, 3)):
            now[0] = at
            route.answer(request)
            assert len(renderings) == count

    def test_nobody_waits_for_another_one_s_rendering(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """While another route with the same lock renders, clients get a route's old answer for a limited time."""
        now = [100.0]
        monkeypatch.setattr(time, "monotonic", lambda: now[0])
        begun, released, lock = threading.Event(), threading.Event(), threading.Lock()
        old, other = Route(lambda key: Answer(b"%d" % now[0]), lock=lock), Route(self.wait(begun, released), lock=lock)
        request = Request("/", "", Message())
        assert old.answer(request).body == b"100"
        rendering = threading.Thread(target=other.answer, args=(request,))
        rendering.start()
        assert begun.wait(10)
        now[0] += 1.5 * web.LIFETIME
        assert old.answer(request).body == b"100"
        released.set()
        rendering.join(10)
        now[0] = 200.0
        assert old.answer(request).body == b"200"

    def wait(self, begun: threading.Event, released: threading.Event) -> Callable[[object], Answer]:
        def render(key: object) -> Answer:
            begun.set()
            assert released.wait(10)
            return Answer(b"")

        return render

    def test_few_wait_for_a_page_and_none_for_another(
        self, serve: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """During a page's first rendering two clients wait and the next gets 503; other pages are served."""
        monkeypatch.setattr(web, "MAX_WAITING", 2)
        begun, released = threading.Event(), threading.Event()
        server = serve(
            routes={**routes(), "/slow": Route(self.wait(begun, released))}, limits=ClientLimits(connections=4)
        )
        with contextlib.ExitStack() as stack:
            clients = [stack.enter_context(connect(server)) for _ in range(4)]
            clients[0].sendall(b"GET /slow HTTP/1.1\r\n\r\n")
            assert begun.wait(10)
            for client in clients[1:]:
                client.sendall(b"GET /slow HTTP/1.1\r\n\r\n")
            ready, _, _ = select.select(clients, [], [], 10)
            assert [client.recv(12) for client in ready] == [b"HTTP/1.0 503"]
            assert get(server)[0] == 200
            released.set()
            assert all(client.recv(12) == b"HTTP/1.0 200" for client in clients if client not in ready)

    def test_failure_is_not_kept(self, serve: Callable[..., Server]) -> None:
        """A page that failed once is rendered again for the next client."""
        answers = iter((ValueError("once"), Answer(b"good")))

        def render(key: object) -> Answer:
            answer = next(answers)
            if isinstance(answer, Exception):
                raise answer
            return answer

        server = serve(routes={"/page": Route(render)})
        assert [get(server, "/page")[0] for _ in range(2)] == [500, 200]

    def test_probes_are_answered_while_no_page_is(self, serve: Callable[..., Server]) -> None:
        """While a page's rendering hangs, and more clients wait than allowed, probes are answered."""
        begun, released = threading.Event(), threading.Event()
        render, lock = self.wait(begun, released), threading.Lock()
        pages = {path: Route(render, lock=lock) for path in ("/", "/metrics", "/status")}
        server = serve(routes={**routes(), **pages})
        with contextlib.ExitStack() as stack:
            stack.callback(released.set)
            for path in pages:
                for _ in range(server.limits.connections // 2):
                    client = stack.enter_context(connect(server))
                    client.sendall(f"GET {path} HTTP/1.1\r\n\r\n".encode())
            assert begun.wait(10)
            for _ in range(3):
                assert get(server, "/healthz")[:2] == (200, b"ok\n")


class TestClients:
    """Idle and slow clients, and too many of them."""

    def test_idle_clients_do_not_keep_a_scrape_out(self, serve: Callable[..., Server]) -> None:
        """With as many idle connections as allowed, a scrape is answered at once; one idle connection is cut."""
        server = serve(limits=ClientLimits(connections=4))
        with contextlib.ExitStack() as stack:
            idle = [stack.enter_context(connect(server)) for _ in range(12)]
            began = time.monotonic()
            assert get(server)[0] == 200
            assert time.monotonic() - began < 5
            assert is_cut(idle[0])
            assert server.connections <= 4

    def test_clients_that_do_not_read_do_not_keep_a_scrape_out(self, serve: Callable[..., Server]) -> None:
        """Clients that do not read their answers are cut for a scrape as well."""
        server = serve(limits=ClientLimits(connections=2))
        with contextlib.ExitStack() as stack:
            for _ in range(4):
                client = stack.enter_context(connect(server))
                client.sendall(b"GET /huge HTTP/1.1\r\n\r\n")
            assert get(server)[0] == 200

    def test_those_who_work_stay(self, serve: Callable[..., Server]) -> None:
        """Idle clients are cut before a client that reads its answer."""
        server = serve(limits=ClientLimits(connections=3))
        with connect(server) as reader, contextlib.ExitStack() as stack:
            reader.sendall(b"GET /huge HTTP/1.1\r\nConnection: close\r\n\r\n")
            assert reader.recv(16) == b"HTTP/1.0 200 OK\r"
            for _ in range(6):
                stack.enter_context(connect(server))
            assert get(server)[0] == 200
            length = 0
            while piece := reader.recv(1 << 20):
                length += len(piece)
        assert length > 64 * 1024 * 1024

    def test_a_request_has_a_deadline(self, serve: Callable[..., Server]) -> None:
        """A client that sends a request too slowly is cut off."""
        server = serve(limits=ClientLimits(request=0.3))
        with connect(server) as client:
            over = threading.Event()

            def drip() -> None:
                with contextlib.suppress(OSError):
                    client.sendall(b"GET /metrics HTTP/1.1\r\n")
                    while not over.wait(0.02):
                        client.sendall(b"X")

            thread = threading.Thread(target=drip)
            thread.start()
            assert is_cut(client)
            over.set()
            thread.join()

    def test_an_answer_has_a_deadline(self, serve: Callable[..., Server]) -> None:
        """A client that does not read its answer is cut off."""
        server = serve(limits=ClientLimits(answer=0.2))
        with connect(server) as client:
            client.sendall(b"GET /huge HTTP/1.1\r\n\r\n")
            assert client.recv(8) == b"HTTP/1.0"
            wait(lambda: not server.connections)
            assert is_cut(client)

    def test_without_file_descriptors_somebody_has_to_go(self, caplog: pytest.LogCaptureFixture) -> None:
        """Without file descriptors an idle client is cut, and the scrape is answered."""
        deadline = time.monotonic() + 10

        class Full(socket.socket):
            full = 0

            def accept(self) -> tuple[socket.socket, Any]:
                if Full.full > 0:
                    Full.full -= 1
                    raise OSError(errno.EMFILE, "Too many open files")
                return super().accept()

        with (
            serving(Server(Full(fileno=listen("127.0.0.1:0").detach()), routes())) as server,
            connect(server) as idle,
        ):
            idle.sendall(b"GET /healthz HTTP/1.1\r\n")
            while not server.connections:
                assert time.monotonic() < deadline
            Full.full = 3
            assert get(server)[0] == 200
            assert is_cut(idle)
        assert [record.getMessage() for record in caplog.records] == [
            "a client cannot be accepted: [Errno 24] Too many open files"
        ]

    def test_without_threads_a_client_is_turned_away(
        self, serve: Callable[..., Server], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        """If no thread can be started for a client, the client is cut; the next client is answered."""
        server = serve()
        start, failing = threading.Thread.start, [True]

        def fail(thread: threading.Thread) -> None:
            if failing:
                failing.pop()
                raise RuntimeError("can't start new thread")
            start(thread)

        monkeypatch.setattr(threading.Thread, "start", fail)
        with connect(server) as client:
            assert is_cut(client)
        assert "can't start new thread" in caplog.text
        assert get(server)[0] == 200

    def test_closing_ends_everybody(self, serve: Callable[..., Server]) -> None:
        """After the server's end no client is connected, and the address is free."""
        server = Server(listen("127.0.0.1:0"), routes())
        address = server.address
        server.start()
        with connect(server) as client:
            client.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
            assert client.recv(8) == b"HTTP/1.0"
            server.close()
            assert is_cut(client)
        listen(address).close()


def make_certificate(directory: Path, name: str, also: str = "") -> tuple[Path, Path]:
    """Make a certificate for 127.0.0.1 and its key."""
    certificate, key = directory / f"{name}.crt{also}", directory / f"{name}.key{also}"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2",
         "-subj", f"/CN={name}", "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", key, "-out", certificate],
        check=True,
        capture_output=True,
    )  # fmt: skip
    return certificate, key


def trusting(certificate: Path) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(certificate))


class TestCertificate:
    """TLS with files that may change."""

    def test_served_with_tls(self, tmp_path: Path, serve: Callable[..., Server]) -> None:
        """A client that trusts the certificate is answered over TLS; plain HTTP is not."""
        certificate, key = make_certificate(tmp_path, "a")
        server = serve(certificate=Certificate(certificate, key))
        assert get(server, tls=trusting(certificate))[:2] == (200, b"one 1\n")
        with connect(server) as client:
            client.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
            with contextlib.suppress(ConnectionError):
                assert b"one 1" not in client.recv(1000)

    def test_renewed_files_are_used_from_the_next_connection_on(
        self, tmp_path: Path, serve: Callable[..., Server]
    ) -> None:
        """A renewed certificate is used for new connections without a restart."""
        certificate, key = make_certificate(tmp_path, "a")
        server = serve(certificate=Certificate(certificate, key))
        old = trusting(certificate)
        assert get(server, tls=old)[0] == 200
        new, new_key = make_certificate(tmp_path, "b")
        os.replace(new_key, key)
        os.replace(new, certificate)
        assert get(server, tls=trusting(certificate))[0] == 200
        with pytest.raises(ssl.SSLCertVerificationError):
            get(server, tls=old)

    def test_half_a_renewal_changes_nothing(
        self, tmp_path: Path, serve: Callable[..., Server], caplog: pytest.LogCaptureFixture
    ) -> None:
        """While key and certificate do not fit, the old ones are used, and the log says so once."""
        certificate, key = make_certificate(tmp_path, "a")
        server = serve(certificate=Certificate(certificate, key))
        trusted = trusting(certificate)
        new, new_key = make_certificate(tmp_path, "b")
        os.replace(new, certificate)
        for _ in range(3):
            assert get(server, tls=trusted)[0] == 200
        assert len(caplog.records) == 1
        assert str(certificate) in caplog.text
        certificate.unlink()
        assert get(server, tls=trusted)[0] == 200
        os.replace(new_key, key)
        make_certificate(tmp_path, "a")
        assert get(server, tls=trusting(certificate))[0] == 200

    def test_clients_that_do_not_shake_hands_are_cut(self, tmp_path: Path, serve: Callable[..., Server]) -> None:
        """A client without a handshake is cut after the request's time, and blocks no other client."""
        certificate, key = make_certificate(tmp_path, "a")
        server = serve(certificate=Certificate(certificate, key), limits=ClientLimits(request=0.5, connections=2))
        with contextlib.ExitStack() as stack:
            idle = [stack.enter_context(connect(server)) for _ in range(4)]
            assert get(server, tls=trusting(certificate))[0] == 200
            assert all(is_cut(client) for client in idle)

    def test_key_and_certificate_may_be_one_file(self, tmp_path: Path, serve: Callable[..., Server]) -> None:
        """Without a key file the key is read from the certificate's file."""
        certificate, key = make_certificate(tmp_path, "a")
        both = tmp_path / "both.pem"
        both.write_bytes(certificate.read_bytes() + key.read_bytes())
        assert get(serve(certificate=Certificate(both)), tls=trusting(certificate))[0] == 200

    def test_clients_need_a_certificate_where_an_authority_is_given(
        self, tmp_path: Path, serve: Callable[..., Server]
    ) -> None:
        """With client_ca pages need a certificate of that authority, probes none; other certificates are refused."""
        certificate, key = make_certificate(tmp_path, "a")
        mine, mine_key = make_certificate(tmp_path, "mine")
        other, other_key = make_certificate(tmp_path, "other")
        server = serve(certificate=Certificate(certificate, key, mine))
        tls = trusting(certificate)
        assert get(server, tls=tls)[:2] == (403, b"a client certificate is needed\n")
        assert get(server, "/healthz", tls=tls)[0] == 200
        tls.load_cert_chain(mine, mine_key)
        assert get(server, tls=tls)[:2] == (200, b"one 1\n")
        tls = trusting(certificate)
        tls.load_cert_chain(other, other_key)
        with pytest.raises((ssl.SSLError, ConnectionError)):
            get(server, tls=tls)
        mine.unlink()
        with pytest.raises(OSError, match=r"client CA file .*mine\.crt: No such file"):
            Certificate(certificate, key, mine)

    def test_least_version_of_tls_can_be_raised(self, tmp_path: Path, serve: Callable[..., Server]) -> None:
        """A client of TLS 1.2 is served by default, and refused if the minimum is 1.3."""
        certificate, key = make_certificate(tmp_path, "a")
        old = trusting(certificate)
        old.maximum_version = ssl.TLSVersion.TLSv1_2
        assert get(serve(certificate=Certificate(certificate, key)), tls=old)[0] == 200
        strict = serve(certificate=Certificate(certificate, key, min_version="1.3"))
        assert get(strict, tls=trusting(certificate))[0] == 200
        with pytest.raises((ssl.SSLError, ConnectionError)):
            get(strict, tls=old)

    def test_unusable_files_are_an_error_that_names_them(self, tmp_path: Path) -> None:
        """An unusable certificate ends the start with an error that names the file."""
        certificate, key = make_certificate(tmp_path, "a")
        with pytest.raises(OSError, match=r"no\.crt: No such file"):
            Certificate(tmp_path / "no.crt", key)
        with pytest.raises(OSError, match=r"no\.key: No such file"):
            Certificate(certificate, tmp_path / "no.key")
        key.write_text("nonsense")
        with pytest.raises(OSError, match=r"a\.key are not a certificate and its key"):
            Certificate(certificate, key)


class TestToken:
    """Access with a token."""

    @pytest.fixture
    def path(self, tmp_path: Path) -> Path:
        path = tmp_path / "token"
        path.write_text("s3cret\n")
        return path

    def test_without_the_token_there_is_nothing_to_see(self, path: Path, serve: Callable[..., Server]) -> None:
        """Without the token pages that need one answer 401 with the scheme Bearer; with it they answer 200."""
        server = serve(token=Token(path))
        for authorization in ("", "Bearer", "Bearer wrong", "Bearer s3cret1", "s3cret", "Basic s3cret", "Basic czNj"):
            status, body, headers = get(server, Authorization=authorization)
            assert (status, headers["WWW-Authenticate"]) == (401, 'Bearer realm="deviceplugin"')
            assert b"one" not in body
        assert get(server, "/nope")[0] == 401
        assert get(server, "/healthz")[0] == 200
        assert get(server, Authorization="bearer  s3cret")[0] == 200

    def test_browsers_may_give_it_as_a_password(self, path: Path, serve: Callable[..., Server]) -> None:
        """A browser may send the token as the password, with any user name."""
        server = serve(token=Token(path))
        assert get(server, Accept="text/html,*/*")[2]["WWW-Authenticate"] == 'Basic realm="deviceplugin"'
        assert get(server, Authorization=f"Basic {b64encode(b'me:s3cret').decode()}")[0] == 200

    def test_a_token_that_changes_counts_at_once(
        self, path: Path, serve: Callable[..., Server], caplog: pytest.LogCaptureFixture
    ) -> None:
        """A changed token counts at once; while its file is missing or empty, the old token counts."""
        caplog.set_level(logging.INFO)
        server = serve(token=Token(path))
        path.unlink()
        assert get(server, Authorization="Bearer s3cret")[0] == 200
        path.write_text("")
        assert get(server, Authorization="Bearer s3cret")[0] == 200
        path.write_text("other")
        assert get(server, Authorization="Bearer s3cret")[0] == 401
        assert get(server, Authorization="Bearer other")[0] == 200
        assert "s3cret" not in caplog.text

    def test_no_token_is_an_error_that_names_the_file(self, path: Path) -> None:
        """A missing or empty token file ends the start, since it must not give access to all."""
        path.write_text(" \n")
        with pytest.raises(OSError, match="token: it is empty"):
            Token(path)
        path.unlink()
        with pytest.raises(OSError, match="token: No such file"):
            Token(path)
