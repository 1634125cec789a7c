"""Finds how to access the API server: the server's address and CA, and the client's credentials.

In a pod, the client uses the pod's service account. Elsewhere the client uses a kubeconfig file, which a separate
process reads (module `kubeconfig`).
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
"""The directory into which the kubelet writes a pod's token and the cluster's CA."""

NAMESPACE: Final = "dra-bridge"
"""The namespace of agents outside of pods, and the default namespace of the objects that `dra-bridge manifests`
makes."""

TOKEN_AGE: Final = 60.0
"""Seconds after which the client reads the token's file again, as client-go does. A delay is harmless, because the
kubelet writes a new token long before the old token expires."""

EXEC_TIMEOUT: Final = 120.0
"""Maximum seconds to read a kubeconfig. The time includes a wait of a credential plugin for the user's login."""

RENEW: Final = 30.0
"""Minimum seconds between two reads of the configuration after a read failed or the server refused the credentials.

A read is expensive, because it starts a process, takes some 0.4 s of CPU, and runs the credential plugin.
"""

_CLAIMS: Final = msgspec.json.Decoder(dict[str, object])
_ANSWER: Final[msgspec.json.Decoder[Credentials | Failure]] = msgspec.json.Decoder(Credentials | Failure)


@dataclass(frozen=True, slots=True)
class Access:
    """The address of an API server, and what a client needs to connect to it.

    authorize: a function that returns the Authorization header, "" for none. The function's argument states whether the
    server refused the last header (401), so that a new header is needed. The function raises KubeConfigError or OSError
    if there are no credentials. proxy: the URL of an HTTP proxy, "" for none. server_name: the name in the server's
    certificate, "" if this name is the URL's host. source: the file or option from which this address and these
    credentials come, for messages.
    """

    url: str
    tls: ssl.SSLContext | None
    authorize: Callable[[bool], Awaitable[str]]
    proxy: str = ""
    server_name: str = ""
    source: str = ""


def own_namespace() -> str:
    """Return the namespace of this process's pod; `NAMESPACE` outside of a pod."""
    try:
        return (SERVICE_ACCOUNT / "namespace").read_text().strip() or NAMESPACE
    except OSError:
        return NAMESPACE


class TokenLife(NamedTuple):
    """The times (Unix seconds) at which a token was issued and at which the token expires."""

    issued: float
    expires: float

    @property
    def overdue(self) -> float:
        """The time when 90 % of the token's life have passed. The kubelet renews a token after 80 % of its life."""
        return self.issued + 0.9 * (self.expires - self.issued)


def token_life(authorization: str) -> TokenLife | None:
    """Return when a ServiceAccount's token was issued and expires; None for credentials without these times.

    The token is a JSON Web Token. Only the API server verifies the token's signature.
    """
    try:
        _, payload, _ = authorization.removeprefix("Bearer ").split(".")
        claims = _CLAIMS.decode(base64.urlsafe_b64decode(f"{payload}==="))
        return TokenLife(float(str(claims["iat"])), float(str(claims["exp"])))
    except (ValueError, KeyError, msgspec.MsgspecError):
        return None


async def from_environment(kubeconfig: str | os.PathLike[str] | None = None, account: Path | None = None) -> Access:
    """Return the `Access` from `kubeconfig`, else from the service account, else from KUBECONFIG or ~/.kube/config.

    kubeconfig: the path of a kubeconfig file, or None. account: the directory of a service account; None for the pod's
    service account, if this process runs in a pod.

    Raises KubeConfigError if no configuration is found or the configuration cannot be used, OSError if a file cannot be
    read.
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
    """Return the `Access` to the server at a URL. token_file: a file with the bearer token, None for none."""
    secure = urllib.parse.urlsplit(url).scheme == "https"
    tls = await Looks(ca_file or "the system's CAs", threads=1).at("certificates", _tls, ca_file) if secure else None
    return Access(url, tls, _TokenFile(token_file))


def _tls(ca_file: str | None) -> ssl.SSLContext:
    """Return the TLS context that verifies the server by the CAs in `ca_file`; without a file, by the system's CAs.

    CAs and certificates without key identifiers are accepted, as in Go; by default, Python refuses them since 3.13
    (VERIFY_X509_STRICT). An intermediate CA in the file is accepted as a root.
    """
    context = ssl.create_default_context(cafile=ca_file or None)
    if ca_file:
        context.verify_flags &= ~ssl.VERIFY_X509_STRICT
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    return context


class _TokenFile:
    """Returns the Authorization header, with a bearer token from a file that another program renews; "" without a file.

    If the file cannot be read in time, the previous token is used. Raises OSError if there is no previous token, or if
    the server has refused it.
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
    """The credentials of the current context of kubeconfig files.

    paths: the paths of the files, joined by colons as in KUBECONFIG.
    """

    def __init__(self, paths: str) -> None:
        self._paths = paths
        self._reading = asyncio.Lock()
        self._reads = 0
        self._next_read = 0.0  # The earliest time to read the files again (monotonic seconds).
        self._failure = ""  # The error of the last read of the files, if it failed.
        self._token_file = _TokenFile(None)

    async def load(self) -> Access:
        """Read the files and return the access with new credentials. The read may run a credential plugin."""
        self._credentials = credentials = await read_apart(self._paths)
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
        """Convert a TLS error inside this context manager to KubeConfigError.

        The message has the kubeconfigs' paths and the name of the wrong field.
        """
        try:
            yield
        except (OSError, ValueError) as error:
            raise KubeConfigError(f"{self._paths}: {field} cannot be used: {error}") from error

    async def __call__(self, refused: bool) -> str:
        reads = self._reads
        async with self._reading:
            if self._credentials.token_file:
                return await self._token_file(refused)
            # If another request has renewed the credentials during the wait for the lock, they are not renewed again.
            if reads == self._reads and (refused or self._expired()):
                await self._renew(refused)
            return self._credentials.authorization

    def _expired(self) -> bool:
        expires = self._credentials.expires
        return expires is not None and expires <= time.time()

    async def _renew(self, refused: bool) -> None:
        """Read the files again for new credentials, unless `_next_read` is in the future.

        Raises KubeConfigError if the last read has failed. The next read comes at least `RENEW` seconds later if this
        read fails, if the server has refused the credentials, or if the new credentials have expired already.
        """
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


async def read_apart(paths: str) -> Credentials:
    """Read kubeconfigs in a separate process. Raises KubeConfigError.

    paths: the paths of the files, joined by colons as in KUBECONFIG.
    """
    code = f"import sys; sys.path[:] = {sys.path!r}; from dra_bridge.kube import kubeconfig; kubeconfig.main()"
    # At a terminal, a credential plugin must be in the foreground to ask the user. Without a terminal, the process and
    # its plugin form a process group, so that both can be killed together.
    group = None if os.isatty(2) else 0
    reader = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, paths, stdout=asyncio.subprocess.PIPE, process_group=group
    )
    try:
        async with asyncio.timeout(EXEC_TIMEOUT):
            printed, _ = await reader.communicate()
        answer = _ANSWER.decode(printed)
    except TimeoutError:
        late = f"took longer than {EXEC_TIMEOUT:g} s; its credential plugin, if it has one, may wait for a login"
        raise KubeConfigError(f"no credentials: reading {paths} {late}") from None
    except msgspec.MsgspecError as error:
        ended = f"the process that reads it ended with {reader.returncode}"
        raise KubeConfigError(f"{paths}: {ended}") from error
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
    """Yield the path of a file in memory with this content; "" if there is no content.

    The ssl module reads certificates only from files.
    """
    if not content:
        yield ""
        return
    with os.fdopen(os.memfd_create("pem"), "wb") as file:
        file.write(content)
        file.flush()
        yield f"/proc/self/fd/{file.fileno()}"
