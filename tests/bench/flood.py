"""Sends a flood of requests to an agent: `python -m tests.bench.flood HOST:PORT CONNECTIONS REQUESTS`.

On each of CONNECTIONS connections, a client sends REQUESTS requests for /status at once, and reads the responses. If
the server ends a connection, the client opens a new one. When standard input ends, the program prints the number of
connections that were opened, and ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys

REQUEST = b"GET /status HTTP/1.1\r\nHost: node\r\n\r\n"


async def client(host: str, port: int, requests: int, made: list[int]) -> None:
    """Run one client. made: its only element counts the connections of all clients."""
    while True:
        with contextlib.suppress(OSError):
            reader, writer = await asyncio.open_connection(host, port)
            made[0] += 1
            try:
                writer.write(REQUEST * requests)
                while await reader.read(1 << 18):
                    pass
            finally:
                writer.close()


async def main(address: str, count: int, requests: int) -> int:
    """Run `count` clients until standard input ends; return the number of connections that were opened."""
    host, _, port = address.rpartition(":")
    made = [0]
    tasks = [asyncio.create_task(client(host, int(port), requests, made)) for _ in range(count)]
    await asyncio.to_thread(sys.stdin.read)
    for task in tasks:
        task.cancel()
    return made[0]


if __name__ == "__main__":
    print(asyncio.run(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))), flush=True)
