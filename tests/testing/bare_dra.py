"""A minimal DRA driver without this project's agent, for tests of the fake kubelet."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc

from deviceplugin.wire import pluginregistration_pb2 as pb
from deviceplugin.wire.pluginregistration_pb2_grpc import RegistrationServicer, add_RegistrationServicer_to_server
from dra_bridge.wire import dra_v1_pb2 as v1
from dra_bridge.wire.dra_v1_pb2_grpc import DRAPluginServicer, add_DRAPluginServicer_to_server

DRIVER = "bare.example.com"


class BareDriver(RegistrationServicer, DRAPluginServicer):
    """A driver that answers Prepare of a claim with a device d-<claim>, and records the claims' names.

    before_answer: called with a method before its answer; an exception fails the call.
    """

    def __init__(self, root: Path, name: str = DRIVER) -> None:
        self.name = name
        self.prepared: list[str] = []
        self.unprepared: list[str] = []
        self.before_answer: Callable[[str], None] = lambda method: None
        self._socket = root / "plugins" / f"{name}.sock"
        self._servers = []
        for path in (self._socket, root / "plugins_registry" / f"{name}-reg.sock"):
            server = grpc.server(ThreadPoolExecutor(4))
            add_RegistrationServicer_to_server(self, server)
            add_DRAPluginServicer_to_server(self, server)
            server.add_insecure_port(f"unix:{path}")
            server.start()
            self._servers.append(server)

    def stop(self) -> None:
        for server in self._servers:
            server.stop(None).wait()

    def GetInfo(self, request: pb.InfoRequest, context: grpc.ServicerContext) -> pb.PluginInfo:  # noqa: N802
        return pb.PluginInfo(
            type="DRAPlugin", name=self.name, endpoint=str(self._socket), supported_versions=["v1.DRAPlugin"]
        )

    def NotifyRegistrationStatus(  # noqa: N802
        self, request: pb.RegistrationStatus, context: grpc.ServicerContext
    ) -> pb.RegistrationStatusResponse:
        return pb.RegistrationStatusResponse()

    def NodePrepareResources(  # noqa: N802
        self, request: v1.NodePrepareResourcesRequest, context: grpc.ServicerContext
    ) -> v1.NodePrepareResourcesResponse:
        self.before_answer("NodePrepareResources")
        response = v1.NodePrepareResourcesResponse()
        for claim in request.claims:
            self.prepared.append(claim.name)
            device = v1.Device(
                request_names=["r"], pool_name="n", device_name=f"d-{claim.name}", cdi_device_ids=[f"x/y={claim.name}"]
            )
            response.claims[claim.uid].CopyFrom(v1.NodePrepareResourceResponse(devices=[device]))
        return response

    def NodeUnprepareResources(  # noqa: N802
        self, request: v1.NodeUnprepareResourcesRequest, context: grpc.ServicerContext
    ) -> v1.NodeUnprepareResourcesResponse:
        self.before_answer("NodeUnprepareResources")
        response = v1.NodeUnprepareResourcesResponse()
        for claim in request.claims:
            self.unprepared.append(claim.name)
            response.claims[claim.uid].SetInParent()
        return response
