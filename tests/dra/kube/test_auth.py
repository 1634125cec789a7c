"""The address and credentials of the API server: service accounts, kubeconfigs, credential plugins, TLS."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import re
import select
import shutil
import ssl
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from deviceplugin.version import installing
from dra_bridge.kube import NODES, Cluster, UnavailableError
from dra_bridge.kube import auth as access
from dra_bridge.kube.auth import from_environment, from_server
from dra_bridge.kube.kubeconfig import KubeConfigError
from dra_bridge.testing.apiserver import FakeApiServer
from tests.dra.objects import node_body
from tests.kubeconfigs import written

HERE = pytest.mark.usefixtures("read_here")
"""Marks tests that read kubeconfigs in the test's process; other tests read them in a second process, as agents do."""


@pytest.fixture
def account(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A pod's service account."""
    directory = tmp_path / "serviceaccount"
    directory.mkdir()
    (directory / "token").write_text("first\n")
    bundle = next(
        path for path in ("/etc/ssl/certs/ca-certificates.crt", "/etc/pki/tls/cert.pem") if Path(path).exists()
    )
    shutil.copy(bundle, directory / "ca.crt")
    monkeypatch.setattr(access, "SERVICE_ACCOUNT", directory)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "fd00::1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "6443")
    return directory


async def test_in_a_pod(account: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pod uses its service account; the token is read again when it is old or refused."""
    found = await from_environment()
    assert found.url == "https://[fd00::1]:6443"
    assert found.tls is not None
    assert found.tls.get_ca_certs()
    assert await found.authorize(False) == "Bearer first"
    (account / "token").write_text("second")
    assert await found.authorize(False) == "Bearer first"
    assert await found.authorize(True) == "Bearer second"
    monkeypatch.setattr(access, "TOKEN_AGE", 0.0)
    (account / "token").write_text("third")
    assert await found.authorize(False) == "Bearer third"


async def test_a_named_service_account(account: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A named directory replaces the pod's service account; the environment must name the API server."""
    own = tmp_path / "own"
    shutil.copytree(account, own)
    (own / "token").write_text("mine")
    found = await from_environment(None, own)
    assert found.url == "https://[fd00::1]:6443"
    assert await found.authorize(False) == "Bearer mine"
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST")
    with pytest.raises(KubeConfigError, match="KUBERNETES_SERVICE_HOST does not name the server"):
        await from_environment(None, own)


def service_account_token(issued: float, expires: float) -> str:
    """Return a token like one of the API server, without a valid signature."""
    payload = json.dumps({"iat": int(issued), "exp": int(expires), "kubernetes.io": {"node": {"name": "n1"}}})
    return ".".join(base64.urlsafe_b64encode(part.encode()).decode().rstrip("=") for part in ("{}", payload, "x"))


@pytest.mark.parametrize(
    ("header", "life"),
    [
        (f"Bearer {service_account_token(1000.0, 2000.0)}", access.TokenLife(1000.0, 2000.0)),
        ("Bearer opaque", None),
        ("Bearer a.b.c", None),
        ("Bearer a.W10.c", None),
        ("Basic dTpw", None),
        ("", None),
    ],
    ids=["a ServiceAccount's", "opaque", "three parts", "no object", "a password", "nothing"],
)
def test_the_life_of_a_token(header: str, life: access.TokenLife | None) -> None:
    """The times of issue and expiry are read from a ServiceAccount's token; other credentials have no such times."""
    assert access.token_life(header) == life


async def test_the_token_that_was_sent_last(tmp_path: Path) -> None:
    """After a request, the statistics have the expiry of the token that the request has sent."""
    (tmp_path / "token").write_text(service_account_token(1000.0, 2000.0))
    with FakeApiServer() as server:
        server.create(node_body("n1"))
        async with Cluster(lambda: from_server(server.url, token_file=tmp_path / "token")) as cluster:
            assert cluster.statistics.token is None
            await cluster.get(NODES, "n1")
            assert cluster.statistics.token == access.TokenLife(1000.0, 2000.0)


def kubeconfig(path: Path, user: dict[str, Any], **cluster: Any) -> Path:
    return written(path, "http://server.example", user, **cluster)


@HERE
async def test_a_named_file_comes_first(account: Path, tmp_path: Path) -> None:
    """A kubeconfig that the caller names is used, although the pod has a service account."""
    assert (await from_environment(kubeconfig(tmp_path / "config", {}))).url == "http://server.example"


@HERE
@pytest.mark.parametrize(
    ("user", "header"),
    [
        ({"token": "t"}, "Bearer t"),
        ({"username": "u", "password": "p"}, "Basic dTpw"),
        ({}, ""),
    ],
    ids=["token", "password", "nobody"],
)
async def test_users(tmp_path: Path, user: dict[str, Any], header: str) -> None:
    """A kubeconfig's token or password is sent in the Authorization header, also after a refusal."""
    found = await from_environment(kubeconfig(tmp_path / "config", user))
    assert await found.authorize(False) == header
    assert await found.authorize(True) == header


@HERE
async def test_a_token_file_that_does_not_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the token file hangs, the former token is used, unless it was refused; the event loop is not blocked."""
    file = tmp_path / "token"
    file.write_text("first")
    found = await from_server("http://api", token_file=file)
    assert await found.authorize(False) == "Bearer first"
    monkeypatch.setattr(access, "TOKEN_AGE", 0.0)
    file.unlink()
    os.mkfifo(file)  # opening the file blocks until another process opens it for writing
    assert await found.authorize(False) == "Bearer first"
    with pytest.raises(OSError, match="did not answer"):
        await found.authorize(True)
    file.write_text("second")  # the blocked thread reads this text
    file.unlink()
    file.write_text("third")
    async with asyncio.timeout(30.0):
        while await found.authorize(False) != "Bearer third":  # noqa: ASYNC110
            await asyncio.sleep(0)  # no event reports the end of the thread


async def test_a_token_file_beside_the_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A token file's path is relative to the kubeconfig; the file is read again when the token is old or refused."""
    (tmp_path / "token").write_text("first")
    found = await from_environment(kubeconfig(tmp_path / "config", {"tokenFile": "token"}))
    (tmp_path / "token").write_text("second")
    assert await found.authorize(False) == "Bearer first"
    assert await found.authorize(True) == "Bearer second"
    monkeypatch.setattr(access, "TOKEN_AGE", 0.0)
    (tmp_path / "token").write_text("third")
    assert await found.authorize(False) == "Bearer third"


@HERE
async def test_what_a_cluster_says(tmp_path: Path) -> None:
    """The proxy and the TLS server name of a kubeconfig are used."""
    more = {"proxy-url": "http://proxy.example:3128", "tls-server-name": "other.example"}
    found = await from_environment(kubeconfig(tmp_path / "config", {}, **more))
    assert (found.proxy, found.server_name) == ("http://proxy.example:3128", "other.example")


@HERE
async def test_several_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The files of KUBECONFIG are merged; missing files are ignored."""
    kubeconfig(tmp_path / "a", {"token": "t"})
    (tmp_path / "b").write_text(json.dumps({"current-context": "c"}))
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    monkeypatch.setenv("KUBECONFIG", f"{tmp_path / 'missing'}:{tmp_path / 'b'}:{tmp_path / 'a'}")
    assert await (await from_environment()).authorize(False) == "Bearer t"


def plugin_file(tmp_path: Path, script: str, version: str = "v1", **more: Any) -> Path:
    """Return a kubeconfig with a credential plugin that runs this script; $n is the number of runs so far."""
    plugin, runs = tmp_path / "plugin", tmp_path / "runs"
    plugin.write_text(f"#!/bin/sh\necho x >> {runs}\nn=$(grep -c x {runs})\n{script}\n")
    plugin.chmod(0o755)
    user = {"exec": {"apiVersion": f"client.authentication.k8s.io/{version}", "command": "./plugin", **more}}
    return kubeconfig(tmp_path / "config", user)


def printed(status: str, version: str = "v1") -> str:
    """Return a shell command that prints an ExecCredential.

    `status`: JSON without braces, for double quotes of a shell.
    """
    return (
        f"""printf '{{"apiVersion": "client.authentication.k8s.io/{version}", "kind": "ExecCredential","""
        f""" "status": {{%s}}}}' "{status}" """
    )


@HERE
async def test_an_exec_plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An exec plugin runs once for concurrent requests, and again when its token is refused."""
    monkeypatch.setattr(access, "RENEW", 0.0)
    found = await from_environment(plugin_file(tmp_path, printed(r"\"token\": \"t$n\"")))
    assert set(await asyncio.gather(*(found.authorize(False) for _ in range(5)))) == {"Bearer t1"}
    assert [await found.authorize(again) for again in (False, True, False)] == ["Bearer t1", "Bearer t2", "Bearer t2"]
    assert set(await asyncio.gather(*(found.authorize(True) for _ in range(5)))) == {"Bearer t3"}


@HERE
@pytest.mark.parametrize("version", ["v1", "v1beta1"])
async def test_an_exec_plugin_knows_what_it_is_asked_for(tmp_path: Path, version: str) -> None:
    """An exec plugin gets its arguments, its environment variables, and the API version that its answer must have."""
    script = printed(r"""\"token\": \"$1-$REGION-$(echo $KUBERNETES_EXEC_INFO | tr -d '\" {},:')\" """, version)
    file = plugin_file(tmp_path, script, version, args=["get-token"], env=[{"name": "REGION", "value": "north"}])
    token = await (await from_environment(file)).authorize(False)
    asked = f"apiVersionclient.authentication.k8s.io/{version}kindExecCredential"
    assert token.startswith(f"Bearer get-token-north-{asked}")


@HERE
@pytest.mark.parametrize(("ends", "again"), [("2020-01-01T00:00:00Z", "t2"), ("2999-01-01T00:00:00Z", "t1")])
async def test_a_token_that_has_ended_is_asked_for_again(tmp_path: Path, ends: str, again: str) -> None:
    """An exec plugin runs again when its token has expired."""
    script = printed(rf"\"expirationTimestamp\": \"{ends}\", \"token\": \"t$n\"")
    found = await from_environment(plugin_file(tmp_path, script))
    assert await found.authorize(False) == f"Bearer {again}"


class Clock:
    """A clock whose monotonic time is set by the test; `time` is the system's time."""

    time = staticmethod(time.time)
    now = 1000.0

    def monotonic(self) -> float:
        return self.now


@HERE
@pytest.mark.parametrize("why", ["refused", "expired", "fails"])
async def test_a_plugin_that_does_not_help_is_not_asked_at_each_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    """If a plugin fails, or its token is refused or expired, it runs once per renewal time; its last answer is used."""
    clock = Clock()
    monkeypatch.setattr(access, "time", clock)
    ends = "2999-01-01T00:00:00Z" if why == "refused" else "2020-01-01T00:00:00Z"
    script = f"if [ -e {tmp_path}/broken ]; then echo x >> {tmp_path}/tries; exit 3; fi\n" if why == "fails" else ""
    script += printed(rf"\"expirationTimestamp\": \"{ends}\", \"token\": \"t$n\"")
    found = await from_environment(plugin_file(tmp_path, script))
    (tmp_path / "broken").touch()

    async def ask() -> str:
        try:
            return await found.authorize(why == "refused")
        except KubeConfigError as error:
            return str(error)

    for again in (2, 3):
        answers = set(await asyncio.gather(*(ask() for _ in range(3)))) | {await ask()}
        if why == "fails":
            assert len(answers) == 1
            assert "returned 3" in answers.pop()
            assert (tmp_path / "tries").read_text() == "x\n" * (again - 1)
        else:
            assert answers == {f"Bearer t{again}"}  # the token that this run of the plugin has printed
        clock.now += access.RENEW


@HERE
@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("echo why >&2; exit 3", "returned 3. why"),
        ("echo nothing", "failed to decode"),
        ("echo '[]'", "malformed response"),
        (printed(""), "printed neither a token nor a certificate"),
    ],
)
async def test_what_exec_plugins_do_wrong(tmp_path: Path, script: str, said: str) -> None:
    """A plugin that fails or prints no credentials is an error that names the plugin."""
    with pytest.raises(KubeConfigError, match=f"no credentials: credential plugin .*/plugin:? .*{said}"):
        await from_environment(plugin_file(tmp_path, script))


async def test_a_plugin_that_waits_for_a_person(tmp_path: Path) -> None:
    """A plugin may run longer than the deadline of a request, for example until a user has logged in."""
    os.mkfifo(tmp_path / "login")
    with FakeApiServer() as server:
        server.create(node_body("a"))
        file = plugin_file(tmp_path, f"cat {tmp_path / 'login'}\n" + printed(r"\"token\": \"t\""))
        file.write_text(file.read_text().replace("http://server.example", server.url))
        async with Cluster.from_environment(file, deadline=0.5) as cluster, asyncio.timeout(60):
            asked = asyncio.create_task(cluster.get(NODES, "a"))
            done, _ = await asyncio.wait([asked], timeout=1.0)
            assert not done
            await asyncio.to_thread((tmp_path / "login").write_text, "")
            assert (await asked)["metadata"]["name"] == "a"


async def test_a_plugin_at_a_terminal(tmp_path: Path) -> None:
    """The plugin's exec info is interactive if and only if this process has a terminal."""
    file = plugin_file(tmp_path, printed(r"""\"token\": \"$(echo $KUBERNETES_EXEC_INFO | tr -d '\" {},:')\" """))
    code = (
        "import asyncio, os, dra_bridge.kube.auth as access\n"
        "for _ in range(2):\n"
        f"    found = asyncio.run(access.from_environment({str(file)!r}))\n"
        "    print(asyncio.run(found.authorize(False)))\n"
        "    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)\n"
    )
    ours, theirs = os.openpty()
    try:
        command = [sys.executable, "-c", code]
        done = await asyncio.to_thread(subprocess.run, command, stdout=subprocess.PIPE, stderr=theirs, timeout=60)
        assert re.findall(b"interactive(true|false)", done.stdout) == [b"true", b"false"]
    finally:
        os.close(ours)
        os.close(theirs)


async def test_a_reader_that_does_not_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plugin that does not end within the timeout is an error."""
    monkeypatch.setattr(access, "EXEC_TIMEOUT", 0.5)
    os.mkfifo(tmp_path / "login")
    with pytest.raises(KubeConfigError, match=r"config took longer than 0.5 s; its credential plugin"):
        await from_environment(plugin_file(tmp_path, f"cat {tmp_path / 'login'}"))


async def test_a_plugin_ends_with_its_reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A credential plugin that hangs is ended when the task that waits for its credentials is cancelled."""
    monkeypatch.setattr(os, "isatty", lambda file: False)
    os.mkfifo(tmp_path / "login")
    asked = asyncio.create_task(from_environment(plugin_file(tmp_path, f"cat {tmp_path / 'login'}")))
    with await asyncio.to_thread((tmp_path / "login").open, "wb", 0) as login:  # the plugin has opened the file
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
        readers = select.poll()
        readers.register(login, 0)
        assert await asyncio.to_thread(readers.poll, 20_000) == [(login.fileno(), select.POLLERR)]


async def test_tokens_of_an_oidc_provider(tmp_path: Path) -> None:
    """An expired OIDC token is refreshed, and the new refresh token is written to the kubeconfig."""

    def token(ends: int) -> str:
        return "e30." + base64.urlsafe_b64encode(json.dumps({"exp": ends}).encode()).decode().rstrip("=") + ".x"

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request = await reader.readuntil(b"\r\n\r\n")
        tokens = {"id_token": token(2**33), "refresh_token": "second"}
        body = json.dumps({"token_endpoint": f"{url}/token"} if request.startswith(b"GET") else tokens).encode()
        head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nConnection: close\r\nContent-Length: %d\r\n\r\n"
        writer.write(head % len(body) + body)
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as listening:
        url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
        given = {"client-id": "c", "client-secret": "s", "idp-issuer-url": url, "refresh-token": "first"}
        user = {"auth-provider": {"name": "oidc", "config": given | {"id-token": token(0)}}}
        file = kubeconfig(tmp_path / "config", user)
        assert await (await from_environment(file)).authorize(False) == f"Bearer {token(2**33)}"
    assert "refresh-token: second" in file.read_text()


@HERE
async def test_an_exec_plugin_that_is_not_there(tmp_path: Path) -> None:
    """The error for a missing exec plugin has its install hint."""
    user = {
        "exec": {
            "apiVersion": "client.authentication.k8s.io/v1",
            "command": "no-such-plugin",
            "installHint": "install it from example.com",
        }
    }
    with pytest.raises(KubeConfigError, match=r"no-such-plugin: .*; install it from example.com"):
        await from_environment(kubeconfig(tmp_path / "config", user))


@HERE
@pytest.mark.parametrize("text", ["", "[]", "{}", "current-context: none\nclusters: []\ncontexts: []\n", "a: ["])
async def test_files_that_make_no_sense(tmp_path: Path, text: str) -> None:
    """A file that is no valid kubeconfig is an error that names the file."""
    file = tmp_path / "config"
    file.write_text(text)
    with pytest.raises(KubeConfigError, match="config"):
        await from_environment(file)


async def test_without_the_reader_of_kubeconfigs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without kubernetes_asyncio, the error names the extra that installs it."""
    (tmp_path / "kubernetes_asyncio.py").write_text("raise ImportError('there is none')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(KubeConfigError, match=re.escape(installing("cli"))):
        await from_environment(kubeconfig(tmp_path / "config", {}))


# --- TLS ------------------------------------------------------------------------------------------


class Authority:
    """A CA without key identifiers, as in EKS and microk8s, and the certificates that it signs."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.certificate = directory / "ca.crt"
        self._key = directory / "ca.key"
        (directory / "cnf").write_text(
            "[req]\ndistinguished_name = dn\n[dn]\n"
            "[ca]\nsubjectKeyIdentifier = none\nauthorityKeyIdentifier = none\nbasicConstraints = CA:TRUE\n"
            "[leaf]\nsubjectKeyIdentifier = none\nauthorityKeyIdentifier = none\n"
            "subjectAltName = IP:127.0.0.1, DNS:server.example\n"
        )
        self._request("ca", self.certificate, self._key)

    def sign(self, name: str) -> tuple[Path, Path]:
        """Return a certificate and its key."""
        certificate, key = self.directory / f"{name}.crt", self.directory / f"{name}.key"
        self._request("leaf", certificate, key, "-CA", self.certificate, "-CAkey", self._key)
        return certificate, key

    def _request(self, kind: str, certificate: Path, key: Path, *more: str | Path) -> None:
        command: list[str | Path] = ["openssl", "req", "-x509", "-nodes"]
        command += ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
        command += ["-days", "2", "-config", self.directory / "cnf", "-extensions", kind, "-subj", f"/CN={kind}"]
        subprocess.run([*command, "-out", certificate, "-keyout", key, *more], check=True, capture_output=True)


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("pki"))


@asynccontextmanager
async def secured(authority: Authority) -> AsyncIterator[tuple[str, list[Any]]]:
    """A server that accepts only clients with a certificate of the authority; yields its URL and the names from SNI."""
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=authority.certificate)
    tls.verify_flags &= ~ssl.VERIFY_X509_STRICT
    tls.verify_mode = ssl.CERT_REQUIRED
    tls.load_cert_chain(*authority.sign("server"))
    names: list[Any] = []
    tls.sni_callback = lambda _socket, name, _context: names.append(name)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await reader.readuntil(b"\r\n\r\n")
            body = b'{"kind": "Node", "metadata": {"name": "a"}}'
            writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
            await writer.drain()
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0, ssl=tls) as listening:
        yield f"https://127.0.0.1:{listening.sockets[0].getsockname()[1]}", names


def encoded(path: Path) -> str:
    return base64.b64encode(path.read_bytes()).decode()


@pytest.fixture
def strict(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make SSL contexts with VERIFY_X509_STRICT, as Python 3.13 does."""
    make = ssl.create_default_context

    def made(*arguments: Any, **options: Any) -> ssl.SSLContext:
        context = make(*arguments, **options)
        context.verify_flags |= ssl.VERIFY_X509_STRICT
        return context

    monkeypatch.setattr(ssl, "create_default_context", made)


@pytest.mark.usefixtures("strict")
@pytest.mark.parametrize("source", ["files", "data", "plugin"])
async def test_a_cluster_whose_ca_has_no_key_identifiers(
    tmp_path: Path, authority: Authority, source: str, request: pytest.FixtureRequest
) -> None:
    """A pinned CA without key identifiers is trusted; the client's certificate comes from files, data or a plugin."""
    if source != "plugin":
        request.getfixturevalue("read_here")
    certificate, key = authority.sign("client")
    pinned = {"certificate-authority-data": encoded(authority.certificate), "tls-server-name": "server.example"}
    user = {
        "files": {"client-certificate": str(certificate), "client-key": str(key)},
        "data": {"client-certificate-data": encoded(certificate), "client-key-data": encoded(key)},
        "plugin": {},
    }[source]
    async with secured(authority) as (url, names), asyncio.timeout(60):
        file = kubeconfig(tmp_path / "config", user, **pinned)
        if source == "plugin":
            texts = {"clientCertificateData": certificate.read_text(), "clientKeyData": key.read_text()}
            version = "client.authentication.k8s.io/v1"
            (tmp_path / "credential").write_text(
                json.dumps({"apiVersion": version, "kind": "ExecCredential", "status": texts})
            )
            command = {"apiVersion": version, "command": "cat", "args": [str(tmp_path / "credential")]}
            kubeconfig(file, {"exec": command}, **pinned)
        file.write_text(file.read_text().replace("http://server.example", url))
        async with Cluster.from_environment(file) as cluster:
            assert (await cluster.get(NODES, "a"))["metadata"]["name"] == "a"
    assert names == ["server.example"]


@HERE
async def test_a_server_that_another_ca_signed(tmp_path: Path, authority: Authority) -> None:
    """A server with a certificate of another CA is refused, unless the kubeconfig skips the verification."""
    (tmp_path / "other").mkdir()
    certificate, key = authority.sign("client")
    user = {"client-certificate": str(certificate), "client-key": str(key)}
    other = {"certificate-authority": str(Authority(tmp_path / "other").certificate)}
    async with secured(authority) as (url, _), asyncio.timeout(60):
        for cluster_says, fits in ((other, False), ({}, False), ({"insecure-skip-tls-verify": True}, True)):
            file = kubeconfig(tmp_path / "config", user, **cluster_says)
            file.write_text(file.read_text().replace("http://server.example", url))
            async with Cluster.from_environment(file) as cluster:
                with contextlib.nullcontext() if fits else pytest.raises(UnavailableError, match="certificate verify"):
                    await cluster.get(NODES, "a")


# --- modules that are loaded --------------------------------------------------------------------------


def loaded(code: str) -> set[str]:
    """Run Python in a process of its own; return the top-level names of its loaded modules."""
    code += "import sys\nprint(*{name.split('.')[0] for name in sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    found = set(done.stdout.split())
    assert "deviceplugin" in found
    return found


def test_the_reader_of_kubeconfigs_ends_silently_with_its_parent() -> None:
    """If the parent process has ended before the answer, the reader ends without a traceback."""
    reading, writing = os.pipe()
    os.close(reading)
    code = "import sys; sys.argv[1:] = ['/nosuch']; from dra_bridge.kube import kubeconfig; kubeconfig.main()"
    done = subprocess.run([sys.executable, "-c", code], stdout=writing, stderr=subprocess.PIPE, text=True, timeout=60)
    os.close(writing)
    assert (done.returncode, done.stderr) == (0, "")


def test_an_agent_loads_no_kubernetes_client(tmp_path: Path) -> None:
    """The agent's process does not load the reader of kubeconfigs, which runs in another process."""
    file = kubeconfig(tmp_path / "config", {"token": "t"})
    code = (
        "import asyncio, dra_bridge.node.bridge, dra_bridge.kube.auth as access\n"
        "asyncio.run(access.from_server('https://127.0.0.1'))\n"
        f"assert asyncio.run(access.from_environment({str(file)!r})).url == 'http://server.example'\n"
    )
    assert "aiohttp" in (roots := loaded(code))
    assert roots.isdisjoint({"kubernetes_asyncio", "urllib3", "dateutil", "six"})


def test_a_plugin_loads_no_kubernetes_client() -> None:
    """`deviceplugin run` loads no modules for an API server."""
    code = "import deviceplugin.cli, deviceplugin.config, deviceplugin.node.process, deviceplugin.sources\n"
    assert loaded(code).isdisjoint({"kubernetes_asyncio", "aiohttp", "dra_bridge", "prometheus_client"})
