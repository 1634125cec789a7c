"""Reads kubeconfig files with kubernetes_asyncio, in a process of its own: `auth` starts it and reads what it prints.

The library takes 45 MB, which an agent would keep. The process also runs the credential plugin, whose terminal it
shares.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
from pathlib import Path
from typing import Any

import msgspec

from deviceplugin.version import installing


class KubeConfigError(Exception):
    """Raised when a kubeconfig is missing or wrong, or gives no credentials."""


class Credentials(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """What kubeconfig files say of their current context. Certificates and keys are PEM.

    authorization: the Authorization header, "" for none. token_file: the absolute path of the file that it is from, ""
    for none. expires: when it has to be read again (Unix seconds), if a credential plugin says so. authority: what
    signs the server's certificate, None for the system's CAs. verify: whether that is checked.
    """

    url: str
    authorization: str = ""
    token_file: str = ""
    expires: float | None = None
    authority: bytes | None = None
    certificate: bytes = b""
    key: bytes = b""
    verify: bool = True
    proxy: str = ""
    server_name: str = ""


class Failure(msgspec.Struct, frozen=True, tag=True):
    """Why there are no credentials."""

    reason: str


def main() -> None:
    """Print the credentials in kubeconfig files (the first argument, as in KUBECONFIG), or the failure, as JSON."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # the parent says what an interruption means
    with os.fdopen(os.dup(1), "wb") as output:
        os.dup2(2, 1)  # kubernetes_asyncio tells plugins that a person is there if the standard output is a terminal
        try:
            answer: Credentials | Failure = asyncio.run(_read(sys.argv[1]))
        except KubeConfigError as error:
            answer = Failure(str(error))
        output.write(msgspec.json.encode(answer))


async def _read(paths: str) -> Credentials:
    try:
        from kubernetes_asyncio.client import Configuration
        from kubernetes_asyncio.config.kube_config import KubeConfigLoader, KubeConfigMerger
    except ImportError as error:
        raise KubeConfigError(f"a kubeconfig needs kubernetes_asyncio: {error}; {installing('cli')}") from error
    logging.getLogger("kubernetes_asyncio").setLevel(logging.CRITICAL)  # it raises what it logs, too
    if not any(Path(path).expanduser().is_file() for path in paths.split(os.pathsep) if path):
        empty = ", and $KUBECONFIG is empty" if os.environ.get("KUBECONFIG") == "" else ""
        raise KubeConfigError(f"there is no kubeconfig {paths}{empty}")
    try:
        merger, configuration = KubeConfigMerger(paths), Configuration()
        user, file = _user(merger.config)

        def save(_: object) -> None:  # new tokens of an OIDC provider, as kubectl does: the old ones may be void
            with contextlib.suppress(OSError):
                merger.save_changes()

        loader = KubeConfigLoader(merger.config, config_base_path=None, config_persister=save)
    except (AttributeError, LookupError, TypeError) as error:  # the library expects other types
        lacks = "clusters, contexts, users and current-context"
        raise KubeConfigError(f"{paths} is not a kubeconfig, a mapping with {lacks}") from error
    except Exception as error:
        raise KubeConfigError(f"{paths}: {error or type(error).__name__}") from error
    plugin = user.get("exec") or {}
    source = f"credential plugin {plugin['command']}" if plugin else paths
    try:
        await loader.load_and_set(configuration)
        authorization = str(configuration.api_key.get("BearerToken", ""))
        authority, certificate, key = map(
            _content, (configuration.ssl_ca_cert, configuration.cert_file, configuration.key_file)
        )
    except Exception as error:
        hint = f"; {hint.strip()}" if (hint := plugin.get("installHint")) else ""
        raise KubeConfigError(f"no credentials: {source}: {error or type(error).__name__}{hint}") from error
    if plugin and not authorization and not certificate:
        raise KubeConfigError(f"no credentials: {source} printed neither a token nor a certificate")
    expiry = getattr(loader, "exec_plugin_expiry", None)
    by_file = "tokenFile" in user and user.keys().isdisjoint(("token", "exec", "auth-provider"))
    return Credentials(
        url=str(configuration.host),
        authorization=authorization,
        token_file=str(file.parent / user["tokenFile"]) if by_file else "",
        expires=expiry.timestamp() if expiry else None,
        authority=authority,
        certificate=certificate or b"",
        key=key or b"",
        verify=bool(configuration.verify_ssl),
        proxy=configuration.proxy or "",
        server_name=configuration.tls_server_name or "",
    )


def _content(path: str | None) -> bytes | None:
    return Path(path).read_bytes() if path else None


def _user(merged: Any) -> tuple[dict[str, Any], Path]:
    """Return the user of the current context, {} if it has none, and the file that has it.

    The command of a credential plugin with a slash in it is relative to the directory of its file, which the library
    does not know.
    """
    context = merged["contexts"].get_with_name(merged["current-context"])
    name = context["context"].safe_get("user")
    entry = merged["users"].get_with_name(name, safe=True) if name else None
    user: dict[str, Any] = (entry and entry["user"].value) or {}
    file = Path(entry.path if entry else "").absolute()
    if os.sep in (user.get("exec") or {}).get("command", ""):
        user["exec"]["command"] = str(file.parent / user["exec"]["command"])
    return user, file
