"""Device plugins for comparisons: a source in the framework, and an equal servicer that uses only grpc.aio.

The commands are `python -m tests.bench.plugin framework --kubelet-root DIR` and `python -m tests.bench.plugin bare
SOCKET`.

Two further commands are for measurements of adoption. `vendor DIRECTORY` runs the servicer, and registers it in the
directory in which an agent adopts plugins. `forwarder SOCKET TO` forwards the bytes of Allocate from SOCKET to the
plugin at TO.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Sequence
from typing import Any

from deviceplugin import ContainerEdits, Device, DeviceSource, run

COUNT = 8
OPTIONS = (("grpc.default_authority", "localhost"),)


class Source(DeviceSource):
    """Devices that each have a device node and an environment variable."""

    resource = "example.com/bench"

    async def watch(self) -> AsyncIterator[Sequence[Device]]:
        """Yield the list of devices once."""
        yield [
            Device(
                f"dev-{number}",
                nodes=[f"/dev/bench{number}"],
                numa=number % 2,
                edits=ContainerEdits(env={f"BENCH_{number}": "1"}),
            )
            for number in range(COUNT)
        ]


async def bare(address: str, directory: str = "") -> None:
    """Serve Allocate without the framework. directory: the directory of a kubelet.sock at which to register, or ""."""
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

        async def GetDevicePluginOptions(self, request: pb.Empty, context: Any) -> pb.DevicePluginOptions:  # noqa: N802
            return pb.DevicePluginOptions()

        async def ListAndWatch(  # noqa: N802
            self, request: pb.Empty, context: Any
        ) -> AsyncIterator[pb.ListAndWatchResponse]:
            yield pb.ListAndWatchResponse(devices=[pb.Device(ID=name, health="Healthy") for name in paths])
            await asyncio.Event().wait()

    server = grpc.aio.server()
    pb_grpc.add_DevicePluginServicer_to_server(Servicer(), server)  # type: ignore[abstract]  # these calls are enough
    server.add_insecure_port(address)
    await server.start()
    if directory:
        async with grpc.aio.insecure_channel(f"unix:{directory}/kubelet.sock", options=OPTIONS) as channel:
            request = pb.RegisterRequest(version="v1beta1", endpoint="vendor.sock", resource_name=Source.resource)
            await pb_grpc.RegistrationStub(channel).Register(request)  # type: ignore[misc]
    await server.wait_for_termination()


async def forward(address: str, to: str) -> None:
    """Forward the bytes of each Allocate to the plugin at `to`; serve no other call."""
    import grpc
    import grpc.aio

    name = "/v1beta1.DevicePlugin/Allocate"
    async with grpc.aio.insecure_channel(to, options=OPTIONS) as channel:
        call: Any = channel.unary_unary(name)  # type: ignore[call-arg]

        async def allocate(request: bytes, context: Any) -> bytes:
            return bytes(await call(request))

        server = grpc.aio.server()
        handlers = {"Allocate": grpc.unary_unary_rpc_method_handler(allocate)}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("v1beta1.DevicePlugin", handlers),))
        server.add_insecure_port(address)
        await server.start()
        await server.wait_for_termination()


if __name__ == "__main__":
    if sys.argv[1] == "bare":
        asyncio.run(bare(sys.argv[2]))
    elif sys.argv[1] == "vendor":
        asyncio.run(bare(f"unix:{sys.argv[2]}/vendor.sock", sys.argv[2]))
    elif sys.argv[1] == "forwarder":
        asyncio.run(forward(sys.argv[2], sys.argv[3]))
    else:
        run(Source(), argv=sys.argv[2:])
