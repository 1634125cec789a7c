"""A caller of Allocate in a process of its own: `python -m tests.bench.caller TASKS`.

Reads lines "ADDRESS SECONDS" from stdin, calls for that long from so many tasks at once, and answers each with how
many calls were answered.
"""

from __future__ import annotations

import asyncio
import sys
import time

import grpc.aio

from deviceplugin.wire import deviceplugin_pb2 as pb
from deviceplugin.wire import deviceplugin_pb2_grpc as pb_grpc
from tests.bench.kubelet import OPTIONS


async def calls(address: str, seconds: float, tasks: int) -> int:
    """Return how many calls were answered."""
    async with grpc.aio.insecure_channel(address, options=OPTIONS) as channel:
        stub = pb_grpc.DevicePluginStub(channel)
        request = pb.AllocateRequest(container_requests=[pb.ContainerAllocateRequest(devices_ids=["dev-3"])])
        await stub.Allocate(request)  # type: ignore[misc]  # the stub of an aio channel
        until = time.monotonic() + seconds
        done = 0

        async def caller() -> None:
            nonlocal done
            while time.monotonic() < until:
                await stub.Allocate(request)  # type: ignore[misc]
                done += 1

        await asyncio.gather(*(caller() for _ in range(tasks)))
    return done


if __name__ == "__main__":
    for line in sys.stdin:
        where, how_long = line.split()
        print(asyncio.run(calls(where, float(how_long), int(sys.argv[1]))), flush=True)
