"""How the API server is reached: its address, its CA, and the client's credentials.

In a pod that is the service account. Everywhere else it is a kubeconfig, which another process reads (`kubeconfig`).
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import os
import signal
import ssl
import sys
import time
import urllib.parse
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from deviceplugin.looks import Looks, LookTimeoutError
from dra_bridge.kube.kubeconfig import Credentials, Failure, KubeConfigError

SERVICE_ACCOUNT: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""Where the kubelet puts a pod's token and the cluster's CA."""

NAMESPACE: Final = "dra-bridge"
"""The namespace of agents that are not in a pod, and by default of those that `manifests` makes."""

TOKEN_AGE: Final = 60.0
"""Seconds after which a token's file is read again, as client-go does; it is renewed long before it expires."""

EXEC_TIMEOUT: Final = 120.0
"""Seconds that reading a kubeconfig may take: its credential plugin may ask a person to log in."""

RENEW: Final = 30.0
"""Seconds from a reading of the configuration that was of no use to the next: it failed, or what it gave is refused.

One of a kubeconfig takes a process, some 0.4 s of CPU, and runs its credential plugin.
"""


@dataclass(frozen=True, slots=True)
class Access:
    """How a server is reached.

    authorize: returns the Authorization header, "" for none. It takes whether the last one was refused (401) and a new
    one is needed; it raises KubeConfigError or OSError where there is none. proxy: the URL of an HTTP proxy, "" for
    none. server_name: the name in the server's certificate, "" if it is the URL's host. source: where all this is from,
    for people.
    """

    url: str
    tls: ssl.SSLContext | None
    authorize: Callable[[bool], Awaitable[str]]
    proxy: str = ""
    server_name: str = ""
    source: str = ""


def own_namespace() -> str:
    """Return the namespace of the pod that this process is in; NAMESPACE outside of one."""
    try:
        return (SERVICE_ACCOUNT / "namespace").read_text().strip() or NAMESPACE
    except OSError:
        return NAMESPACE


class TokenLife(NamedTuple):
    """When a token was issued, and when it expires (Unix seconds)."""

    issued: float
    expires: float

    @property
    def overdue(self) -> float:
        """From when on it should have been renewed: kubelets renew at 80 % of a token's life."""
        return self.issued + 0.9 * (self.expires - self.issued)


def token_life(authorization: str) -> TokenLife | None:
    """Return what a ServiceAccount's token says of its life; None of credentials that say nothing.

    It is a JSON Web Token. Its signature is the API server's business.
    """
    try:
        _, payload, _ = authorization.removeprefix("Bearer ").split(".")
        claims = msgspec.json.decode(base64.urlsafe_b64decode(f"{payload}==="), type=dict[str, object])
        return TokenLife(float(str(claims["iat"])), float(str(claims["exp"])))
    except (ValueError, KeyError, msgspec.MsgspecError):
        return None


async def from_environment(kubeconfig: str | os.PathLike[str] | None = None, account: Path | None = None) -> Access:
    """Return what a kubeconfig file says, else a service account, else KUBECONFIG or ~/.kube/config.

    account: the directory of the service account; None for that of the pod, if this runs in one.

    Raises KubeConfigError if there is none of these or it cannot be used, OSError if a file cannot be read.
    """
    host, directory = os.environ.get("KUBERNETES_SERVICE_HOST"), account or SERVICE_ACCOUNT
    if account and not kubeconfig and not host:
        raise KubeConfigError(f"$KUBERNETES_SERVICE_HOST does not name the server of the service account in {account}")
    if not kubeconfig and host and (account or (directory / "token").exists()):
        host = f"[{host}]" if ":" in host else host
        url = f"https://{host}:{os.environ.get('KUBERNETES_SERVICE_PORT') or 443}"
        return await from_server(url, token_file=directory / "token", ca_file=str(directory / "ca.crt"))
    return await _KubeConfig(os.fspath(kubeconfig or os.environ.get("KUBECONFIG") or "~/.kube/config")).load()


async def from_server(url: str, *, token_file: Path | None = None, ca_file: str = "") -> Access:
    """Return the access to a server, with the bearer token in a file if one is given."""
    secure = urllib.parse.urlsplit(url).scheme == "https"
    tls = await Looks(ca_file or "the system's CAs", threads=1).at("certificates", _tls, ca_file) if secure else None
    return Access(url, tls, _TokenFile(token_file))


def _tls(ca_file: str | None) -> ssl.SSLContext:
    """Return the context that verifies servers: by the cluster's own CA, else by those of the system.

    As Go does, it takes a cluster's CAs and certificates without key identifiers, which Python refuses by default since
    3.13 (VERIFY_X509_STRICT), and an intermediate CA as the root.
    """
    context = ssl.create_default_context(cafile=ca_file or None)
    if ca_file:
        context.verify_flags &= ~ssl.VERIFY_X509_STRICT
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    return context


class _TokenFile:
    """A bearer token in a file that is renewed; no token without a file.

    While the file cannot be read in time the token before is used. Raises OSError if there is none, or it was refused.
    """

    def __init__(self, path: Path | None, header: str = "", read_at: float = float("-inf")) -> None:
        self._path = path
        self._header = header
        self._read_at = read_at
        self._looks = Looks(str(path), threads=1)

    async def __call__(self, refused: bool) -> str:
        now = time.monotonic()
        if self._path is not None and (refused or now - self._read_at >= TOKEN_AGE):
            try:
                text = await self._looks.at("token", self._path.read_text, brief=True)
            except LookTimeoutError:
                if refused or not self._header:
                    raise
            else:
                self._header, self._read_at = f"Bearer {text.strip()}", now
        return self._header


class _KubeConfig:
    """Kubeconfig files, and the credentials of their current context. paths: as in KUBECONFIG."""

    def __init__(self, paths: str) -> None:
        self._paths = paths
        self._reading = asyncio.Lock()
        self._reads = 0
        self._next_read = 0.0  # not before, in monotonic seconds
        self._failure = ""  # of the last reading
        self._token_file = _TokenFile(None)

    async def load(self) -> Access:
        """Read the files and get credentials anew; this may run a credential plugin."""
        self._credentials = credentials = await self._read()
        self._token_file = _TokenFile(Path(credentials.token_file), credentials.authorization, time.monotonic())
        self._reads += 1
        tls = None
        if credentials.url.startswith("https:"):
            with self._named("certificate-authority"), _file(credentials.authority) as authority:
                tls = _tls(authority)
            if not credentials.verify:
                tls.check_hostname = False
                tls.verify_mode = ssl.CERT_NONE
            if credentials.certificate:
                named = self._named("client-certificate or client-key")
                with named, _file(credentials.certificate) as certificate, _file(credentials.key) as key:
                    tls.load_cert_chain(certificate, key or None)
        return Access(
            credentials.url, tls, self, credentials.proxy, credentials.server_name, f"kubeconfig {self._paths}"
        )

    @contextlib.contextmanager
    def _named(self, field: str) -> Iterator[None]:
        """Name the file and the field in an error of TLS."""
        try:
            yield
        except (OSError, ValueError) as error:
            raise KubeConfigError(f"{self._paths}: {field} cannot be used: {error}") from error

    async def __call__(self, refused: bool) -> str:
        reads = self._reads
        async with self._reading:
            if self._credentials.token_file:
                return await self._token_file(refused)
            if reads == self._reads and (refused or self._expired()):  # no other request has done it meanwhile
                await self._renew(refused)
            return self._credentials.authorization

    def _expired(self) -> bool:
        expires = self._credentials.expires
        return expires is not None and expires <= time.time()

    async def _renew(self, refused: bool) -> None:
        """Get credentials anew; for RENEW seconds the last failure stands, and what was got is not requested again."""
        if time.monotonic() >= self._next_read:
            self._failure = ""
            try:
                await self.load()
            except (KubeConfigError, OSError, ValueError) as error:
                self._failure = str(error)
            if refused or self._failure or self._expired():
                self._next_read = time.monotonic() + RENEW
        if self._failure:
            raise KubeConfigError(self._failure)

    async def _read(self) -> Credentials:
        """Have the files read by a process that ends then."""
        code = f"import sys; sys.path[:] = {sys.path!r}; from dra_bridge.kube import kubeconfig; kubeconfig.main()"
        # At a terminal its plugin has to be in the foreground; elsewhere they are a group, and end together.
        group = None if os.isatty(2) else 0
        reader = await asyncio.create_subprocess_exec(
            sys.executable, "-c", code, self._paths, stdout=asyncio.subprocess.PIPE, process_group=group
        )
        try:
            async with asyncio.timeout(EXEC_TIMEOUT):
                printed, _ = await reader.communicate()
            answer = msgspec.json.decode(printed, type=Credentials | Failure)
        except TimeoutError:
            late = f"took longer than {EXEC_TIMEOUT:g} s; its credential plugin, if it has one, may wait for a login"
            raise KubeConfigError(f"no credentials: reading {self._paths} {late}") from None
        except msgspec.MsgspecError as error:
            ended = f"the process that reads it ended with {reader.returncode}"
            raise KubeConfigError(f"{self._paths}: {ended}") from error
        finally:
            if reader.returncode is None:
                if group is None:
                    reader.kill()
                else:
                    os.killpg(reader.pid, signal.SIGKILL)
                await reader.communicate()
        if isinstance(answer, Failure):
            raise KubeConfigError(answer.reason)
        return answer


@contextlib.contextmanager
def _file(content: bytes | None) -> Iterator[str]:
    """Give the path of a file in memory, "" if there is no content: the ssl module reads certificates from files."""
    if not content:
        yield ""
        return
    with os.fdopen(os.memfd_create("pem"), "wb") as file:
        file.write(content)
        file.flush()
        yield f"/proc/self/fd/{file.fileno()}"
