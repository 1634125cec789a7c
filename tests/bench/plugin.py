"""The two that are compared: a source served by the framework, and a bare grpc.aio servicer that does the same by hand.

`python -m tests.bench.plugin framework --kubelet-root DIR`, `python -m tests.bench.plugin bare SOCKET`.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Sequence
from typing import Any

from deviceplugin import ContainerEdits, Device, DeviceSource, run

COUNT = 8


class Source(DeviceSource):
    """Devices with a node and a variable each, and one hook that names them all."""

    resource = "example.com/bench"

    async def watch(self) -> AsyncIterator[Sequence[Device]]:
        """List them once."""
        yield [
            Device(
                f"dev-{number}",
                nodes=[f"/dev/bench{number}"],
                numa=number % 2,
                edits=ContainerEdits(env={f"BENCH_{number}": "1"}),
            )
            for number in range(COUNT)
        ]


async def bare(address: str) -> None:
    """Serve Allocate as one would write it for one's own devices."""
    import grpc
    import grpc.aio

    from deviceplugin.wire import deviceplugin_pb2 as pb
    from deviceplugin.wire import deviceplugin_pb2_grpc as pb_grpc

    paths = {f"dev-{number}": (f"/dev/bench{number}", f"BENCH_{number}") for number in range(COUNT)}
    healthy = dict.fromkeys(paths, True)

    class Servicer(pb_grpc.DevicePluginServicer):
        async def Allocate(self, request: pb.AllocateRequest, context: Any) -> pb.AllocateResponse:  # noqa: N802
            response = pb.AllocateResponse()
            for container in request.container_requests:
                one = response.container_responses.add()
                for name in container.devices_ids:
                    if not healthy.get(name):
                        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"no healthy device {name}")
                    path, variable = paths[name]
                    one.envs[variable] = "1"
                    one.devices.add(host_path=path, container_path=path, permissions="rw")
            return response

    server = grpc.aio.server()
    pb_grpc.add_DevicePluginServicer_to_server(Servicer(), server)  # type: ignore[abstract]  # one call is enough
    server.add_insecure_port(address)
    await server.start()
    await server.wait_for_termination()


if __name__ == "__main__":
    if sys.argv[1] == "bare":
        asyncio.run(bare(sys.argv[2]))
    else:
        run(Source(), argv=sys.argv[2:])
