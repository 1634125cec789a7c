"""The kubelet's gRPC services of a DRA driver, v1 and v1beta1: two thin adapters of one implementation."""

from __future__ import annotations

from collections.abc import Iterable

import grpc.aio

from dra_bridge.driver.claims import ClaimError, ClaimRef
from dra_bridge.driver.preparation import Driver
from dra_bridge.wire import dra_v1_pb2, dra_v1_pb2_grpc, dra_v1beta1_pb2, dra_v1beta1_pb2_grpc

__all__ = ["add_to_server"]


class _V1(dra_v1_pb2_grpc.DRAPluginServicer):
    """k8s.io.kubelet.pkg.apis.dra.v1."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver

    async def NodePrepareResources(  # noqa: N802  # the API's name, as below
        self, request: dra_v1_pb2.NodePrepareResourcesRequest, context: object
    ) -> dra_v1_pb2.NodePrepareResourcesResponse:
        """Prepare claims before the sandbox of a pod is made."""
        response = dra_v1_pb2.NodePrepareResourcesResponse()
        for uid, answer in (await self._driver.prepare(_refs(request.claims))).items():
            entry = response.claims[uid]
            if isinstance(answer, ClaimError):
                entry.error = str(answer)
                continue
            for device in answer.devices:
                listed = entry.devices.add(
                    request_names=[device.request],
                    pool_name=device.pool,
                    device_name=device.device,
                    cdi_device_ids=device.cdi_ids,
                )
                if device.share:
                    listed.share_id = device.share
        return response

    async def NodeUnprepareResources(  # noqa: N802
        self, request: dra_v1_pb2.NodeUnprepareResourcesRequest, context: object
    ) -> dra_v1_pb2.NodeUnprepareResourcesResponse:
        """Unprepare claims after their last pod."""
        response = dra_v1_pb2.NodeUnprepareResourcesResponse()
        for uid, answer in (await self._driver.unprepare(_refs(request.claims))).items():
            response.claims[uid].error = "" if answer is None else str(answer)
        return response


class _V1Beta1(dra_v1beta1_pb2_grpc.DRAPluginServicer):
    """k8s.io.kubelet.pkg.apis.dra.v1beta1: the same without shares."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver

    async def NodePrepareResources(  # noqa: N802
        self, request: dra_v1beta1_pb2.NodePrepareResourcesRequest, context: object
    ) -> dra_v1beta1_pb2.NodePrepareResourcesResponse:
        """Prepare claims before the sandbox of a pod is made."""
        response = dra_v1beta1_pb2.NodePrepareResourcesResponse()
        for uid, answer in (await self._driver.prepare(_refs(request.claims))).items():
            entry = response.claims[uid]
            if isinstance(answer, ClaimError):
                entry.error = str(answer)
                continue
            for device in answer.devices:
                entry.devices.add(
                    request_names=[device.request],
                    pool_name=device.pool,
                    device_name=device.device,
                    cdi_device_ids=device.cdi_ids,
                )
        return response

    async def NodeUnprepareResources(  # noqa: N802
        self, request: dra_v1beta1_pb2.NodeUnprepareResourcesRequest, context: object
    ) -> dra_v1beta1_pb2.NodeUnprepareResourcesResponse:
        """Unprepare claims after their last pod."""
        response = dra_v1beta1_pb2.NodeUnprepareResourcesResponse()
        for uid, answer in (await self._driver.unprepare(_refs(request.claims))).items():
            response.claims[uid].error = "" if answer is None else str(answer)
        return response


def _refs(claims: Iterable[dra_v1_pb2.Claim] | Iterable[dra_v1beta1_pb2.Claim]) -> list[ClaimRef]:
    return [ClaimRef(claim.namespace, claim.name, claim.uid) for claim in claims]


def add_to_server(driver: Driver, server: grpc.aio.Server) -> None:
    """Serve a driver in both versions of the kubelet's API."""
    dra_v1_pb2_grpc.add_DRAPluginServicer_to_server(_V1(driver), server)
    dra_v1beta1_pb2_grpc.add_DRAPluginServicer_to_server(_V1Beta1(driver), server)
