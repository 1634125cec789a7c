"""Clients that ask for more than they are due: `python -m tests.bench.flood HOST:PORT CONNECTIONS REQUESTS`.

Each connection sends so many requests for /status at once, reads what comes, and is made anew when the server ends it.
Runs until stdin ends; then prints how many connections were made.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys

REQUEST = b"GET /status HTTP/1.1\r\nHost: node\r\n\r\n"


async def client(host: str, port: int, requests: int, made: list[int]) -> None:
    """Be one of them."""
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
    """Be all of them."""
    host, _, port = address.rpartition(":")
    made = [0]
    tasks = [asyncio.create_task(client(host, int(port), requests, made)) for _ in range(count)]
    await asyncio.to_thread(sys.stdin.read)
    for task in tasks:
        task.cancel()
    return made[0]


if __name__ == "__main__":
    print(asyncio.run(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))), flush=True)
