"""How the API server is reached: its address, its CA, and the client's credentials.

In a pod that is the service account. Everywhere else it is a kubeconfig, which kubernetes_asyncio reads; it is loaded
only then, because it takes 45 MB.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import ssl
import time
import urllib.parse
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from deviceplugin.version import installing

SERVICE_ACCOUNT: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""Where the kubelet puts a pod's token and the cluster's CA."""

TOKEN_AGE: Final = 60.0
"""Seconds after which a token's file is read again, as client-go does; it is renewed long before it expires."""

EXEC_TIMEOUT: Final = 120.0  # seconds that a credential plugin may take: it may ask a person to log in


class KubeConfigError(Exception):
    """Raised when a kubeconfig is missing or wrong, or gives no credentials."""


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


async def from_environment(kubeconfig: str | os.PathLike[str] | None = None) -> Access:
    """Return what a kubeconfig file says, else the pod's service account, else KUBECONFIG or ~/.kube/config.

    Raises KubeConfigError if there is none of these or it cannot be used, OSError if a file cannot be read.
    """
    host = os.environ.get("KUBERNETES_SERVICE_HOST")
    if not kubeconfig and host and (SERVICE_ACCOUNT / "token").exists():
        host = f"[{host}]" if ":" in host else host
        url = f"https://{host}:{os.environ.get('KUBERNETES_SERVICE_PORT') or 443}"
        return await from_server(url, token_file=SERVICE_ACCOUNT / "token", ca_file=str(SERVICE_ACCOUNT / "ca.crt"))
    return await _KubeConfig(os.fspath(kubeconfig or os.environ.get("KUBECONFIG") or "~/.kube/config")).load()


async def from_server(url: str, *, token_file: Path | None = None, ca_file: str = "") -> Access:
    """Return the access to a server, with the bearer token in a file if one is given."""
    tls = _tls(ca_file) if urllib.parse.urlsplit(url).scheme == "https" else None
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


@dataclass(slots=True)
class _TokenFile:
    """A bearer token in a file that is renewed; no token without a file."""

    path: Path | None
    header: str = ""
    read_at: float = float("-inf")

    async def __call__(self, refused: bool) -> str:
        now = time.monotonic()
        if self.path is not None and (refused or now - self.read_at >= TOKEN_AGE):
            self.header, self.read_at = f"Bearer {self.path.read_text().strip()}", now
        return self.header


class _KubeConfig:
    """Kubeconfig files, and the credentials of their current context. paths: as in KUBECONFIG."""

    def __init__(self, paths: str) -> None:
        self._paths = paths
        self._refreshing = asyncio.Lock()
        self._loads = 0

    async def load(self) -> Access:
        """Read the files and get credentials anew; this may run a credential plugin."""
        try:
            from kubernetes_asyncio.client import Configuration
            from kubernetes_asyncio.config.kube_config import KubeConfigLoader, KubeConfigMerger
        except ImportError as error:
            raise KubeConfigError(f"a kubeconfig needs kubernetes_asyncio: {error}; {installing('cli')}") from error
        logging.getLogger("kubernetes_asyncio").setLevel(logging.CRITICAL)  # it raises what it logs, too
        if not any(Path(path).expanduser().is_file() for path in self._paths.split(os.pathsep) if path):
            empty = ", and $KUBECONFIG is empty" if os.environ.get("KUBECONFIG") == "" else ""
            raise KubeConfigError(f"there is no kubeconfig {self._paths}{empty}")
        try:
            merged = KubeConfigMerger(self._paths).config
            self._plugin = _plugin(merged)
            self._loader = KubeConfigLoader(merged, config_base_path=None)
            self._configuration = found = Configuration()
        except (AttributeError, LookupError, TypeError) as error:  # the library expects other types
            lacks = "clusters, contexts, users and current-context"
            raise KubeConfigError(f"{self._paths} is not a kubeconfig, a mapping with {lacks}") from error
        except Exception as error:
            raise KubeConfigError(f"{self._paths}: {error or type(error).__name__}") from error
        await self._refresh()
        self._loads += 1
        tls, url = None, str(found.host)
        if url.startswith("https:"):
            with self._named("certificate-authority"):
                tls = _tls(found.ssl_ca_cert)
            if not found.verify_ssl:
                tls.check_hostname = False
                tls.verify_mode = ssl.CERT_NONE
            if found.cert_file:
                with self._named("client-certificate or client-key"):
                    tls.load_cert_chain(found.cert_file, found.key_file)
        return Access(url, tls, self, found.proxy or "", found.tls_server_name or "", f"kubeconfig {self._paths}")

    @contextlib.contextmanager
    def _named(self, field: str) -> Iterator[None]:
        """Name the file and the field in an error of TLS."""
        try:
            yield
        except (OSError, ValueError) as error:
            raise KubeConfigError(f"{self._paths}: {field} cannot be used: {error}") from error

    async def __call__(self, refused: bool) -> str:
        loads = self._loads
        async with self._refreshing:
            if refused and loads == self._loads:  # no other request has loaded it meanwhile
                await self.load()
            elif self._is_due():
                await self._refresh()
            return str(self._configuration.api_key.get("BearerToken", ""))

    def _is_due(self) -> bool:
        """Whether to ask the library, which runs a plugin again only if its token is about to expire."""
        if self._plugin:
            return hasattr(self._loader, "exec_plugin_expiry")
        return time.monotonic() - self._refreshed_at >= TOKEN_AGE

    async def _refresh(self) -> None:
        source = f"credential plugin {self._plugin['command']}" if self._plugin else self._paths
        try:
            async with asyncio.timeout(EXEC_TIMEOUT):
                await self._loader.load_and_set(self._configuration)
        except TimeoutError:
            raise KubeConfigError(f"no credentials: {source} did not end in {EXEC_TIMEOUT:g} s") from None
        except Exception as error:
            hint = f"; {hint.strip()}" if (hint := self._plugin.get("installHint")) else ""
            raise KubeConfigError(f"no credentials: {source}: {error or type(error).__name__}{hint}") from error
        if self._plugin and "BearerToken" not in self._configuration.api_key and not self._configuration.cert_file:
            raise KubeConfigError(f"no credentials: {source} printed neither a token nor a certificate")
        self._refreshed_at = time.monotonic()


def _plugin(merged: Any) -> dict[str, Any]:
    """Return the credential plugin of the current context, {} if it has none.

    A command with a slash in it is relative to the directory of its file, which the library does not know.
    """
    context = merged["contexts"].get_with_name(merged["current-context"])
    name = context["context"].safe_get("user")
    user = merged["users"].get_with_name(name, safe=True) if name else None
    plugin: dict[str, Any] = (user and user["user"].safe_get("exec")) or {}
    if user and os.sep in plugin.get("command", ""):
        plugin["command"] = str(Path(user.path).absolute().parent / plugin["command"])
    return plugin
