"""Kubeconfig files of tests, and a reader of these files that starts no process.

An agent or a command reads a kubeconfig in a separate process that imports kubernetes_asyncio, which takes nearly 0.5 s
of CPU time. `tests.dra.kube.test_auth` tests this process; other tests use this reader or the fixture `read_here`.
`python -m tests.kubeconfigs` is dra-bridge with this reader.
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
    """Run dra-bridge, which reads only the server's URL of a file made by `written`, without kubernetes_asyncio."""
    auth.read_apart = _server_alone
    return cli.main(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
