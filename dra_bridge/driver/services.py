"""The gRPC services that the kubelet calls at a DRA driver: its claims, and the health of its devices."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from typing import Any, Final

import grpc.aio

from deviceplugin.device import Health
from dra_bridge.driver.claims import ClaimError, ClaimRef
from dra_bridge.driver.driver import Driver
from dra_bridge.wire import dra_health_v1_pb2 as health_pb
from dra_bridge.wire import (
    dra_health_v1_pb2_grpc,
    dra_health_v1alpha1_pb2_grpc,
    dra_v1_pb2,
    dra_v1_pb2_grpc,
    dra_v1beta1_pb2,
    dra_v1beta1_pb2_grpc,
)

_MAX_MESSAGE: Final = 1000
_HEALTH: Final = {
    Health.HEALTHY: health_pb.HEALTHY,
    Health.UNHEALTHY: health_pb.UNHEALTHY,
    Health.UNKNOWN: health_pb.UNKNOWN,
}


class _ClaimService(dra_v1_pb2_grpc.DRAPluginServicer, dra_v1beta1_pb2_grpc.DRAPluginServicer):
    """DRAPlugin in one version, whose messages `pb` are. Both have the same messages, but v1beta1 has no `share_id`."""

    def __init__(self, driver: Driver, pb: Any) -> None:
        self._driver = driver
        self._pb = pb
        self._shares = "share_id" in pb.Device.DESCRIPTOR.fields_by_name

    async def NodePrepareResources(self, request: Any, context: object) -> Any:  # noqa: N802  # the API's name
        response = self._pb.NodePrepareResourcesResponse()
        for uid, answer in (await self._driver.prepare(_refs(request))).items():
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
                if device.share and self._shares:
                    listed.share_id = device.share
        return response

    async def NodeUnprepareResources(self, request: Any, context: object) -> Any:  # noqa: N802
        response = self._pb.NodeUnprepareResourcesResponse()
        for uid, answer in (await self._driver.unprepare(_refs(request))).items():
            response.claims[uid].error = "" if answer is None else str(answer)
        return response


def _refs(request: Any) -> list[ClaimRef]:
    return [ClaimRef(claim.namespace, claim.name, claim.uid) for claim in request.claims]


def health_list(driver: Driver, now: float) -> health_pb.NodeWatchResourcesResponse:
    """Return the complete list of the devices' health. now: Unix seconds."""
    response = health_pb.NodeWatchResourcesResponse()
    for name, (_, device) in driver.devices.by_name.items():
        response.devices.add(
            device=health_pb.DeviceIdentifier(pool_name=driver.pool, device_name=name),
            health=_HEALTH[device.health],
            last_updated_time=int(now),
            message=device.message.encode(errors="replace")[:_MAX_MESSAGE].decode(errors="ignore"),
        )
    return response


class HealthService(
    dra_health_v1_pb2_grpc.DRAResourceHealthServicer, dra_health_v1alpha1_pb2_grpc.DRAResourceHealthServicer
):
    """DRAResourceHealth, v1 and v1alpha1. It sends the list at once, with each change, and to keep the stream alive.

    keep_alive: seconds between two lists without a change.
    """

    def __init__(self, driver: Driver, keep_alive: float) -> None:
        self._driver = driver
        self._keep_alive = keep_alive
        self._changed = asyncio.Event()
        self._ended = False
        self._unsubscribe: list[Callable[[], None]] = []
        self.follow()

    def follow(self) -> None:
        """Follow the inventories that the driver serves now, and send their lists."""
        self._leave()
        resources = self._driver.devices.resources
        self._unsubscribe = [served.inventory.subscribe(lambda _: self._wake()) for served in resources]
        self._wake()

    async def NodeWatchResources(self, request: object, context: object) -> AsyncIterator[Any]:  # noqa: N802
        """Send lists until the kubelet goes or the service ends."""
        while not self._ended:
            changed = self._changed
            yield health_list(self._driver, time.time())
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._keep_alive):
                    await changed.wait()

    def end(self) -> None:
        """End all streams."""
        self._ended = True
        self._leave()
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _leave(self) -> None:
        for unsubscribe in self._unsubscribe:
            unsubscribe()
        self._unsubscribe = []


def add_to_server(driver: Driver, health: HealthService, server: grpc.aio.Server) -> None:
    """Serve a driver's claims and the health of its devices in all versions of the kubelet's API."""
    dra_v1_pb2_grpc.add_DRAPluginServicer_to_server(_ClaimService(driver, dra_v1_pb2), server)
    dra_v1beta1_pb2_grpc.add_DRAPluginServicer_to_server(_ClaimService(driver, dra_v1beta1_pb2), server)
    dra_health_v1_pb2_grpc.add_DRAResourceHealthServicer_to_server(health, server)
    dra_health_v1alpha1_pb2_grpc.add_DRAResourceHealthServicer_to_server(health, server)
