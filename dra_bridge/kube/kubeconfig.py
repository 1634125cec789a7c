"""Reads kubeconfig files with kubernetes_asyncio, in a separate process that `auth` starts.

The library takes 45 MB of memory. In the agent's own process, this memory would stay in use. The separate process also
runs the credential plugin, which can use the process's terminal. The process prints the result for `auth`.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import logging
import os
import signal
import sys
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

import msgspec

from deviceplugin.version import installing


class KubeConfigError(Exception):
    """Raised when a kubeconfig is missing or wrong, or when it gives no credentials."""


class Credentials(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The server and credentials of a kubeconfig's current context. Certificates and keys are PEM.

    authorization: the Authorization header, "" for none. token_file: the absolute path of the token's file, "" for
    none. expires: when the credentials of a credential plugin expire (Unix seconds), so that the kubeconfig must be
    read again; None if the plugin states no time. authority: the CA that signs the server's certificate, None for the
    system's CAs. verify: whether the client checks the server's certificate.
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
    """The result that the process prints if it found no credentials. reason: the message of the error."""

    reason: str


def main() -> None:
    """Print credentials or a failure as JSON.

    The first command-line argument has the paths of the kubeconfigs, joined by colons as in KUBECONFIG.
    """
    # An interruption ends this process without a traceback; the parent process reports the interruption.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    # If the parent process has ended, no one reads the answer.
    with contextlib.suppress(BrokenPipeError), os.fdopen(os.dup(1), "wb") as output:
        # kubernetes_asyncio lets credential plugins ask the user only if standard output is a terminal; so this
        # process uses standard error as standard output.
        os.dup2(2, 1)
        try:
            answer: Credentials | Failure = asyncio.run(read(sys.argv[1]))
        except KubeConfigError as error:
            answer = Failure(str(error))
        output.write(msgspec.json.encode(answer))


async def read(paths: str) -> Credentials:
    """Read kubeconfigs in this process. Raises KubeConfigError.

    paths: the paths of the files, joined by colons as in KUBECONFIG.
    """
    try:
        _leave_out_api_objects()
        from kubernetes_asyncio.client.configuration import Configuration
        from kubernetes_asyncio.config.kube_config import KubeConfigLoader, KubeConfigMerger
    except ImportError as error:
        raise KubeConfigError(f"a kubeconfig needs kubernetes_asyncio: {error}; {installing('cli')}") from error
    # The library logs errors that it also raises, so the library's log is not needed.
    logging.getLogger("kubernetes_asyncio").setLevel(logging.CRITICAL)
    if not any(Path(path).expanduser().is_file() for path in paths.split(os.pathsep) if path):
        is_default = paths == "~/.kube/config" and os.environ.get("KUBECONFIG") == ""
        empty = ", and $KUBECONFIG is empty" if is_default else ""
        raise KubeConfigError(f"there is no kubeconfig {paths}{empty}")
    try:
        merger, configuration = KubeConfigMerger(paths), Configuration()
        user, file = _user(merger.config)

        # New tokens of an OIDC provider are saved, as kubectl does, because the old tokens may be invalid afterwards.
        def save(_: object) -> None:
            with contextlib.suppress(OSError):
                merger.save_changes()

        loader = KubeConfigLoader(merger.config, config_base_path=None, config_persister=save)
    # For values of unexpected types, the library raises errors such as AttributeError.
    except (AttributeError, LookupError, TypeError) as error:
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


def _leave_out_api_objects() -> None:
    """Add kubernetes_asyncio and its `client` to sys.modules without running their __init__. Raises ImportError.

    Their __init__ files import the classes of all API objects: 850 modules, most of the time and memory of this
    process. The library's reader of kubeconfigs needs only `Configuration`. The reader also imports `ApiClient`, but
    only for functions that this process does not call, so None replaces `ApiClient` (versions 32 to 36).
    """
    where = None
    for name in ("kubernetes_asyncio", "kubernetes_asyncio.client"):
        spec = PathFinder.find_spec(name, where)
        if spec is None or spec.submodule_search_locations is None:
            raise ImportError(f"there is no package {name}")
        package = sys.modules[name] = importlib.util.module_from_spec(spec)
        where = list(spec.submodule_search_locations)
    configuration = importlib.import_module("kubernetes_asyncio.client.configuration")
    vars(package).update(Configuration=configuration.Configuration, ApiClient=None)


def _content(path: str | None) -> bytes | None:
    return Path(path).read_bytes() if path else None


def _user(merged: Any) -> tuple[dict[str, Any], Path]:
    """Return the user of the current context ({} without a user), and the path of the kubeconfig with this user.

    If the command of a credential plugin contains a slash, the command is relative to the directory of this kubeconfig.
    The library does not know this directory, so the function makes the command absolute.
    """
    context = merged["contexts"].get_with_name(merged["current-context"])
    name = context["context"].safe_get("user")
    entry = merged["users"].get_with_name(name, safe=True) if name else None
    user: dict[str, Any] = (entry and entry["user"].value) or {}
    file = Path(entry.path if entry else "").absolute()
    if os.sep in (user.get("exec") or {}).get("command", ""):
        user["exec"]["command"] = str(file.parent / user["exec"]["command"])
    return user, file
