"""A DRA driver and a device plugin with minimal handlers in Python. `tests.bench.peers` compares the agent with them.

`python -m tests.bench.empty DRIVER RESOURCE DIRECTORY` registers both with the kubelet. Prepare reads the claim and
writes a CDI file, without any check. Unprepare removes the file. Allocate returns a device node of DIRECTORY. Nothing
is recorded or checked, so a device may get several holders. The program uses the API server with the credentials of a
pod's service account.
"""

from __future__ import annotations

import asyncio
import json
import os
import ssl
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import aiohttp
import grpc.aio

from deviceplugin.wire import deviceplugin_pb2 as pb
from deviceplugin.wire import deviceplugin_pb2_grpc as pb_grpc
from deviceplugin.wire import pluginregistration_pb2 as registration
from deviceplugin.wire import pluginregistration_pb2_grpc as registration_grpc
from dra_bridge.wire import dra_v1_pb2 as v1
from dra_bridge.wire import dra_v1_pb2_grpc as v1_grpc

KUBELET = Path("/var/lib/kubelet")
CDI = Path("/var/run/cdi")
ACCOUNT = Path("/run/secrets/kubernetes.io/serviceaccount")
OPTIONS = (("grpc.default_authority", "localhost"),)


class Driver(v1_grpc.DRAPluginServicer, registration_grpc.RegistrationServicer):
    """The DRA driver: handles the kubelet's registration calls, and Prepare and Unprepare of claims."""

    def __init__(self, name: str, client: aiohttp.ClientSession) -> None:
        self.name, self.client = name, client
        self.socket = KUBELET / "plugins" / f"{name}.sock"

    async def GetInfo(self, request: object, context: object) -> registration.PluginInfo:  # noqa: N802
        """Return the driver's name, endpoint and version."""
        return registration.PluginInfo(
            type="DRAPlugin", name=self.name, endpoint=str(self.socket), supported_versions=["v1.DRAPlugin"]
        )

    async def NotifyRegistrationStatus(  # noqa: N802
        self, request: object, context: object
    ) -> registration.RegistrationStatusResponse:
        """Ignore whether the kubelet accepts the driver."""
        return registration.RegistrationStatusResponse()

    async def NodePrepareResources(  # noqa: N802
        self, request: v1.NodePrepareResourcesRequest, context: object
    ) -> v1.NodePrepareResourcesResponse:
        """Read each claim, write its CDI file, and return its devices."""
        response = v1.NodePrepareResourcesResponse()
        for claim in request.claims:
            path = f"/apis/resource.k8s.io/v1/namespaces/{claim.namespace}/resourceclaims/{claim.name}"
            async with self.client.get(path) as answer:
                results = json.loads(await answer.read())["status"]["allocation"]["devices"]["results"]
            edits = {"name": claim.uid, "containerEdits": {"env": ["EMPTY=1"]}}
            draft = self._file(claim.uid).with_suffix(".draft")
            draft.write_text(json.dumps({"cdiVersion": "0.5.0", "kind": f"{self.name}/claim", "devices": [edits]}))
            draft.rename(self._file(claim.uid))
            for result in results:
                response.claims[claim.uid].devices.add(
                    request_names=[result["request"]],
                    pool_name=result["pool"],
                    device_name=result["device"],
                    cdi_device_ids=[f"{self.name}/claim={claim.uid}"],
                )
        return response

    async def NodeUnprepareResources(  # noqa: N802
        self, request: v1.NodeUnprepareResourcesRequest, context: object
    ) -> v1.NodeUnprepareResourcesResponse:
        """Remove each claim's CDI file."""
        response = v1.NodeUnprepareResourcesResponse()
        for claim in request.claims:
            with suppress(FileNotFoundError):
                os.remove(self._file(claim.uid))
            response.claims[claim.uid].error = ""
        return response

    def _file(self, uid: str) -> Path:
        return CDI / f"{self.name}-claim_{uid}.json"


class Plugin(pb_grpc.DevicePluginServicer):
    """The device plugin: handles the kubelet's calls for `limits`."""

    def __init__(self, directory: Path) -> None:
        self.paths = {path.name: str(path) for path in sorted(directory.iterdir())}

    async def GetDevicePluginOptions(self, request: object, context: object) -> pb.DevicePluginOptions:  # noqa: N802
        """Return no options, so that the kubelet makes no optional calls."""
        return pb.DevicePluginOptions()

    async def ListAndWatch(self, request: object, context: object) -> AsyncIterator[pb.ListAndWatchResponse]:  # noqa: N802
        """Send one list of the devices."""
        yield pb.ListAndWatchResponse(devices=[pb.Device(ID=name, health="Healthy") for name in self.paths])
        await asyncio.Event().wait()

    async def Allocate(self, request: pb.AllocateRequest, context: object) -> pb.AllocateResponse:  # noqa: N802
        """Return the device nodes of the requested devices."""
        response = pb.AllocateResponse()
        for container in request.container_requests:
            one = response.container_responses.add()
            for name in container.devices_ids:
                one.devices.add(host_path=self.paths[name], container_path=self.paths[name], permissions="rw")
        return response


async def listening(path: Path, add: Callable[[Any, grpc.aio.Server], None], servicer: object) -> grpc.aio.Server:
    """Start and return a server of one service at a socket."""
    server = grpc.aio.server()
    add(servicer, server)
    server.add_insecure_port(f"unix:{path}")
    await server.start()
    return server


async def main(driver: str, resource: str, directory: str) -> None:
    """Register the driver and the plugin, and serve until the process is killed."""
    server = f"https://{os.environ['KUBERNETES_SERVICE_HOST']}:{os.environ['KUBERNETES_SERVICE_PORT']}"
    headers = {"Authorization": f"Bearer {(ACCOUNT / 'token').read_text()}"}
    tls = aiohttp.TCPConnector(ssl=ssl.create_default_context(cafile=ACCOUNT / "ca.crt"), keepalive_timeout=60)
    async with aiohttp.ClientSession(server, headers=headers, connector=tls) as client:
        claims, plugins = Driver(driver, client), KUBELET / "device-plugins"
        registry = KUBELET / "plugins_registry"
        pods = Plugin(Path(directory))  # type: ignore[abstract]  # these calls are enough
        serving = [
            await listening(claims.socket, v1_grpc.add_DRAPluginServicer_to_server, claims),
            await listening(registry / f"{driver}.sock", registration_grpc.add_RegistrationServicer_to_server, claims),
            await listening(plugins / f"{driver}.sock", pb_grpc.add_DevicePluginServicer_to_server, pods),
        ]
        async with grpc.aio.insecure_channel(f"unix:{plugins}/kubelet.sock", options=OPTIONS) as channel:
            request = pb.RegisterRequest(version="v1beta1", endpoint=f"{driver}.sock", resource_name=resource)
            await pb_grpc.RegistrationStub(channel).Register(request)  # type: ignore[misc]  # the stub of an aio channel
        await asyncio.gather(*(each.wait_for_termination() for each in serving))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
