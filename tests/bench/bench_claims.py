"""Measures one list of all claims, as a device's move from DRA to the plugin needs it: bytes, seconds, peak memory.

`python -m tests.bench claims` runs the measurement. The client is a separate process that runs this module. The server
encodes the claims in advance, so that the measured time is mostly the client's.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import threading
import time
import urllib.parse
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import NamedTuple

from dra_bridge.wire import objects_pb2 as pb

NODE = "n1"


class Listing(NamedTuple):
    """The results of one list of claims.

    found: number of claims with a device of this node. requests: number of GET requests. size: bytes of all responses.
    peak: growth of the peak resident memory, in bytes.
    """

    found: int
    requests: int
    size: int
    seconds: float
    peak: float


def client(url: str) -> None:
    """List the claims of the server at `url` as the agent does; print the `Listing` as JSON."""
    import dra_bridge.node.bridge  # noqa: F401
    from dra_bridge.kube import Cluster, ListedClaim
    from dra_bridge.node.claim_lists import ClaimLists

    async def listed() -> Listing:
        async with Cluster.from_server(url) as cluster:
            await cluster.version()
            lists, found = ClaimLists(cluster), list[str]()

            def visit(claim: ListedClaim) -> None:
                if any(result.pool == NODE for result in claim.results):
                    found.append(claim.uid)

            asked, before, began = cluster.statistics.requests["GET"], highest(), time.perf_counter()
            await lists.read(visit)
            seconds, requests = time.perf_counter() - began, cluster.statistics.requests["GET"] - asked
            return Listing(len(found), requests, lists.statistics.bytes, seconds, highest() - before)

    print(json.dumps(asyncio.run(listed())))


def highest() -> int:
    """Return the peak resident memory of this process in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def claims(count: int, size: int) -> list[bytes]:
    """Return `count` encoded claims of about `size` bytes. A tenth is allocated, and ten have devices of this node."""
    made = []
    spec = b"x" * size
    for number in range(count):
        name = f"claim-{number:05}".encode()
        claim = pb.Claim(metadata=pb.Metadata(name=name, namespace=b"team", uid=name), spec=spec)
        if number % max(1, count // 10) == 0 or number % 10 == 0:
            pool = NODE if number % max(1, count // 10) == 0 else "other"
            claim.status.allocation.devices.results.add(driver=b"d.example.com", pool=pool.encode(), device=name)
        made.append(claim.SerializeToString())
    return made


@contextlib.contextmanager
def serving(items: Sequence[bytes]) -> Iterator[str]:
    """Serve these claims, and yield the server's URL. The pages of a list have the requested number of claims."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002
            """Write nothing."""

        def do_GET(self) -> None:
            path, _, text = self.path.partition("?")
            if path == "/apis/resource.k8s.io":
                body = json.dumps({"kind": "APIGroup", "versions": [{"version": "v1"}]}).encode()
            elif path == "/apis/resource.k8s.io/v1":
                body = json.dumps({"kind": "APIResourceList", "resources": [{"name": "resourceslices"}]}).encode()
            else:
                query = dict(urllib.parse.parse_qsl(text))
                begin, limit = int(query.get("continue", 0)), int(query["limit"])
                more = str(begin + limit).encode() if begin + limit < len(items) else b""
                listed = pb.List(metadata=pb.ListMetadata(resource_version=b"7", more=more))
                listed.items.extend(items[begin : begin + limit])
                kind = pb.Type(kind=b"ResourceClaimList")
                body = b"k8s\0" + pb.Envelope(type=kind, raw=listed.SerializeToString()).SerializeToString()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            with contextlib.suppress(OSError):  # the client ends the connection at a page that is too large
                self.wfile.write(body)

    class Server(ThreadingHTTPServer):
        def handle_error(self, request: object, client_address: object) -> None:
            """Print nothing if a client ends its connection."""

    with Server(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


def measure(count: int, size: int) -> Listing:
    """Run a server with `count` claims of about `size` bytes, and a client; return the client's result."""
    from tests.programs import image_environment

    environment = {**os.environ, **image_environment()}
    with serving(claims(count, size)) as url:
        command = [sys.executable, "-m", "tests.bench.bench_claims", url]
        for _ in range(2):  # the first run writes the bytecode that an image contains
            done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120, env=environment)
    return Listing(*json.loads(done.stdout))


if __name__ == "__main__":
    client(sys.argv[1])
