"""Kubeconfig files of tests, and a reader that needs no process of its own.

An agent or a command has the file read by a process that imports kubernetes_asyncio: nearly half a second of a core
each time. `tests.dra.kube.test_auth` tests that process; elsewhere this reader, or the fixture `read_here`, takes its
place.
`python -m tests.kubeconfigs` is dra-bridge with the cheaper one.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dra_bridge import cli
from dra_bridge.kube import auth
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


async def _server_alone(paths: str) -> Credentials:
    (cluster,) = json.loads(Path(paths).read_text())["clusters"]
    return Credentials(url=cluster["cluster"]["server"])


def main(arguments: Sequence[str]) -> int:
    """Be dra-bridge, which takes of a kubeconfig that is `written` the server alone, without kubernetes_asyncio."""
    auth.read_apart = _server_alone
    return cli.main(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
