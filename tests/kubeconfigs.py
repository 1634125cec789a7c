"""Kubeconfig files of tests, and readers that need no process of their own.

An agent or a command has the file read by a process that imports kubernetes_asyncio: nearly half a second of a core
each time. `tests.dra.kube.test_auth` tests that process; elsewhere one of these readers takes its place.
`python -m tests.kubeconfigs` is dra-bridge with the cheaper one.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dra_bridge import cli
from dra_bridge.kube import auth, kubeconfig
from dra_bridge.kube.kubeconfig import Credentials


def written(path: Path, url: str, user: Mapping[str, Any] | None = None, **cluster: Any) -> Path:
    """Write a file whose current context is a user of the server at this URL; return its path."""
    body = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "c",
        "contexts": [{"name": "c", "context": {"cluster": "k", "user": "u"}}],
        "clusters": [{"name": "k", "cluster": {"server": url, **cluster}}],
        "users": [{"name": "u", "user": dict(user or {})}],
    }
    path.write_text(json.dumps(body))
    return path


async def read_here(files: auth._KubeConfig) -> Credentials:
    """Read them as the other process does."""
    return await kubeconfig._read(files._paths)


async def _server_alone(files: auth._KubeConfig) -> Credentials:
    (cluster,) = json.loads(Path(files._paths).read_text())["clusters"]
    return Credentials(url=cluster["cluster"]["server"])


def main(arguments: Sequence[str]) -> int:
    """Be dra-bridge, which takes of a kubeconfig that is `written` the server alone, without kubernetes_asyncio."""
    auth._KubeConfig._read = _server_alone  # type: ignore[method-assign,assignment]
    return cli.main(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
