"""How the API server is reached: its address, whom to trust, and what to say who one is.

In a pod that is the service account, whose token the kubelet renews. Everywhere else it is a
kubeconfig file, which lightkube reads; only then it is loaded, because every node would pay for it.
"""

from __future__ import annotations

import asyncio
import json
import os
import ssl
import sys
import time
import urllib.parse
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

if TYPE_CHECKING:
    from lightkube.config.kubeconfig import SingleConfig
    from lightkube.config.models import UserExec

__all__ = ["Access", "AccessError", "from_environment", "from_server"]

SERVICE_ACCOUNT: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""Where the kubelet puts a pod's token and the cluster's CA."""

TOKEN_AGE: Final = 60.0
"""Seconds after which a token's file is read again, as client-go does; it is renewed long before it expires."""


EXEC_GROUP: Final = "client.authentication.k8s.io"
EXEC_PATIENCE: Final = 120.0
"""Seconds that a credential plugin may take: somebody may have to log in."""


class AccessError(Exception):
    """Raised when there is no configuration to reach an API server with, or it cannot be used."""


@dataclass(frozen=True, slots=True)
class Access:
    """One way to a server. authorize: returns the Authorization header, "" for none.

    authorize takes whether the last one was refused (401) and a new one is wanted; it raises
    AccessError or OSError where there is none.
    """

    url: str
    tls: ssl.SSLContext | None
    authorize: Callable[[bool], Awaitable[str]]


def from_environment(kubeconfig: str | os.PathLike[str] | None = None) -> Access:
    """Return what a kubeconfig file says, else the pod's service account, else KUBECONFIG or ~/.kube/config.

    Raises:
        AccessError: there is none of these, or it makes no sense.
        OSError: a file cannot be read.

    """
    if kubeconfig:
        return _from_file(os.fspath(kubeconfig))
    host = os.environ.get("KUBERNETES_SERVICE_HOST")
    if host and (SERVICE_ACCOUNT / "token").exists():
        host = f"[{host}]" if ":" in host else host
        url = f"https://{host}:{os.environ.get('KUBERNETES_SERVICE_PORT') or 443}"
        return from_server(url, token_file=SERVICE_ACCOUNT / "token", ca_file=str(SERVICE_ACCOUNT / "ca.crt"))
    named = [path for path in os.environ.get("KUBECONFIG", "").split(os.pathsep) if path]
    file = next((path for path in named if Path(path).expanduser().exists()), named[0] if named else "~/.kube/config")
    return _from_file(file)


def from_server(url: str, *, token: str = "", token_file: Path | None = None, ca_file: str = "") -> Access:
    """Return the access to a server with a bearer token, or the file of one."""
    secure = urllib.parse.urlsplit(url).scheme == "https"
    tls = ssl.create_default_context(cafile=ca_file or None) if secure else None
    if token_file is not None:
        return Access(url, tls, _TokenFile(token_file))
    header = f"Bearer {token}" if token else ""

    async def authorize(again: bool) -> str:
        return header

    return Access(url, tls, authorize)


class _TokenFile:
    """A bearer token that somebody renews."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._header = ""
        self._read_at = float("-inf")

    async def __call__(self, again: bool) -> str:
        now = time.monotonic()
        if again or now - self._read_at >= TOKEN_AGE:
            self._header = f"Bearer {self._path.read_text().strip()}"
            self._read_at = now
        return self._header


def _from_file(path: str) -> Access:
    import yaml
    from lightkube.config import client_adapter
    from lightkube.config.kubeconfig import KubeConfig
    from lightkube.config.models import User
    from lightkube.core.exceptions import ConfigError

    try:
        single = KubeConfig.from_file(path).get()
        if single is None:
            raise AccessError(f"{path} names no current context")
        user = single.user or User()
        url = single.cluster.server
        secure = urllib.parse.urlsplit(url).scheme == "https"
        tls = client_adapter.verify_cluster(single.cluster, user, single.abs_file) if secure else None
        if user.token_file is not None:
            return Access(url, tls, _TokenFile(Path(single.abs_file(user.token_file))))
        if user.exec is not None:
            return Access(url, tls, _ExecPlugin(single, user.exec))
        return Access(url, tls, _Flow(single, client_adapter.user_auth(user)))
    except (ConfigError, yaml.YAMLError, AttributeError, KeyError, TypeError, ValueError) as error:
        said = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise AccessError(f"{path}: {said}") from error


class _ExecPlugin:
    """A program that prints a token, as client-go calls it (client.authentication.k8s.io/v1 and v1beta1).

    lightkube calls those of v1beta1 only, tells them nothing of the cluster and never looks at a
    token's end.
    """

    def __init__(self, single: SingleConfig, plugin: UserExec) -> None:
        group, _, version = plugin.apiVersion.rpartition("/")
        if group != EXEC_GROUP or version not in {"v1", "v1beta1"}:
            raise ValueError(f"user.exec.apiVersion is {plugin.apiVersion!r}; {EXEC_GROUP}/v1 and v1beta1 are known")
        self._plugin = plugin
        # A path with a slash in it begins where the file is; a mere name is looked for as a shell does.
        self._command = str(single.abs_file(plugin.command)) if os.sep in plugin.command else plugin.command
        info = {
            "apiVersion": plugin.apiVersion,
            "kind": "ExecCredential",
            "spec": {"interactive": sys.stdin is not None and sys.stdin.isatty()},
        }
        self._environment = {
            **{one.name: one.value for one in plugin.env or ()},
            "KUBERNETES_EXEC_INFO": json.dumps(info),
        }
        self._header = ""
        self._ends = float("inf")
        self._runs = 0
        self._turn = asyncio.Lock()

    async def __call__(self, again: bool) -> str:
        runs = self._runs
        async with self._turn:
            refused = again and runs == self._runs  # nobody else has had it run meanwhile
            if not self._header or refused or time.time() >= self._ends:
                self._header, self._ends = self._credential(await self._printed())
                self._runs += 1
        return self._header

    async def _printed(self) -> bytes:
        try:
            process = await asyncio.create_subprocess_exec(
                self._command,
                *(self._plugin.args or ()),
                env={**os.environ, **self._environment},
                stdout=asyncio.subprocess.PIPE,
            )
        except OSError as error:
            hint = f"; {self._plugin.installHint.strip()}" if self._plugin.installHint else ""
            raise AccessError(f"no credentials: {self._command} cannot be run: {error.strerror}{hint}") from error
        try:
            async with asyncio.timeout(EXEC_PATIENCE):
                printed, _ = await process.communicate()
        except TimeoutError:
            raise AccessError(f"no credentials: {self._command} did not end in {EXEC_PATIENCE:g} s") from None
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        if process.returncode:
            raise AccessError(f"no credentials: {self._command} ended with {process.returncode}")
        return printed

    def _credential(self, printed: bytes) -> tuple[str, float]:
        """Return the header and until when it is good (Unix seconds)."""
        try:
            status = json.loads(printed)["status"]
            if not (token := status.get("token")):
                raise AccessError(
                    f"no credentials: {self._command} printed no token; certificates are not taken from it"
                )
            ends = status.get("expirationTimestamp")
            return f"Bearer {token}", datetime.fromisoformat(ends).timestamp() if ends else float("inf")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise AccessError(f"no credentials: what {self._command} printed is no ExecCredential: {error}") from error


class _Flow:
    """The header as lightkube makes it: of a token or a password."""

    def __init__(self, single: SingleConfig, auth: Any) -> None:
        self._url = single.cluster.server
        self._auth = auth
        self._header: str | None = None

    async def __call__(self, again: bool) -> str:
        if self._auth is None:
            return ""
        if self._header is None or again:
            import httpx2
            from lightkube.core.exceptions import ConfigError

            # A flow yields the request as it is to be sent; told of a 401, it yields another one or ends.
            request = httpx2.Request("GET", self._url)
            flow = cast("AsyncGenerator[httpx2.Request, httpx2.Response]", self._auth.async_auth_flow(request))
            try:
                async with aclosing(flow):
                    request = await anext(flow)
                    if again:
                        request = await flow.asend(httpx2.Response(401))
            except StopAsyncIteration:
                pass
            except (ConfigError, KeyError, ValueError) as error:
                raise AccessError(f"no credentials: {error}") from error
            self._header = str(request.headers.get("Authorization", ""))
        return self._header
