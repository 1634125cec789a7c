"""Calls Allocate from TASKS simultaneous tasks: `python -m tests.bench.caller TASKS`.

For each line "ADDRESS SECONDS" of standard input, the program calls the plugin at ADDRESS for SECONDS seconds, and
prints the number of completed calls.
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
    """Call Allocate for some seconds from `tasks` tasks at the same time; return the number of completed calls."""
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
