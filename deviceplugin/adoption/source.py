"""A resource whose devices a vendor's plugin lists: its source, and the endpoint that passes the kubelet's calls on."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Any

import grpc.aio

from deviceplugin.adoption.plugins import Listed, VendorPlugin, VendorPlugins
from deviceplugin.device import MAX_ID, Device, Health, printable
from deviceplugin.kubelet.device_list import DeviceIds
from deviceplugin.kubelet.servicer import Endpoint, Refusal
from deviceplugin.register.records import NONE
from deviceplugin.source import DeviceSource
from deviceplugin.wire import deviceplugin_pb2 as pb


class VendorDevice(Device):
    """A device whose id is a vendor's: it may have spaces, slashes and any length."""

    def _check_id(self) -> None:
        pass


class AdoptedSource(DeviceSource):
    """The devices of a resource as the plugin lists them that has registered it with the agent."""

    def __init__(self, resource: str, plugins: VendorPlugins) -> None:
        self.resource = resource
        self.plugins = plugins

    async def watch(self) -> AsyncIterator[Sequence[Device]]:
        """Yield what the plugin lists; sets, so that what it repeats or reorders is no change."""
        async for devices in self.plugins.lists(self.resource):
            yield [_device(name, devices) for name in devices]


def _device(name: str, devices: Listed) -> Device:
    problem, numa = devices[name]
    health = Health.UNHEALTHY if problem else Health.HEALTHY
    return VendorDevice(name, health=health, numa=numa or None, message=problem)


class VendorIds(DeviceIds):
    """Ids that mean what the vendor's plugin means by them: one that looks like a replica's is a device's."""

    def device_id_of(self, name: str) -> str:
        """Return the id itself."""
        return name

    def offered_as(self, name: str) -> str:
        """Return the id itself."""
        return name

    def names_of(self, device: Device) -> tuple[str, ...]:
        """Return the id alone."""
        return (device.id,)


class AdoptedEndpoint(Endpoint):
    """Passes the kubelet's calls on to the vendor's plugin; its answers go back as they came, byte for byte.

    The register is asked as for any other resource: what is held is known, and refused to others.
    """

    IDS = VendorIds
    AWAITS = "its plugin"
    source: AdoptedSource

    @property
    def options(self) -> pb.DevicePluginOptions:
        """What the plugin wants."""
        plugin = self.source.plugins.plugin(self.resource)
        return plugin.options if plugin is not None else pb.DevicePluginOptions()

    @property
    def ready(self) -> bool:
        """Whether the plugin lives: without it the kubelet sees what it sees without the agent, an endpoint that ends.

        So a plugin that goes back to the kubelet's directory finds nobody there. Until 1.36 the kubelet drops it when
        the stream of another endpoint of the resource ends after it has registered.
        """
        plugin = self.source.plugins.plugin(self.resource)
        return super().ready and plugin is not None and plugin.alive

    def add_to(self, server: grpc.aio.Server) -> None:
        """Have a server answer the kubelet's calls by this; requests and answers that are passed on stay bytes."""
        handlers = {
            "GetDevicePluginOptions": grpc.unary_unary_rpc_method_handler(
                self.GetDevicePluginOptions, pb.Empty.FromString, pb.DevicePluginOptions.SerializeToString
            ),
            "ListAndWatch": grpc.unary_stream_rpc_method_handler(
                self.ListAndWatch, pb.Empty.FromString, pb.ListAndWatchResponse.SerializeToString
            ),
            "GetPreferredAllocation": grpc.unary_unary_rpc_method_handler(self._prefer),
            "Allocate": grpc.unary_unary_rpc_method_handler(self._pass_allocate, pb.AllocateRequest.FromString),
            "PreStartContainer": grpc.unary_unary_rpc_method_handler(self._pre_start),
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("v1beta1.DevicePlugin", handlers),))

    async def _pass_allocate(self, request: pb.AllocateRequest, context: Any) -> bytes:
        return await self.allocate(request, context, self._forward)

    async def _forward(self, wanted: Sequence[tuple[str, ...]]) -> bytes:
        """Record the grant, then ask the plugin; if it fails or hangs, the grant ends as that of a rejected pod does.

        Its ids are checked against the plugin's own list: some plugins answer ids that they do not know with success.
        """
        plugin, names = self._plugin(), [name for ids in wanted for name in ids]
        for name in names:
            if name not in (plugin.devices or {}):
                shown = printable(name[:MAX_ID])
                raise self._refusal("unknown", f"its plugin does not list device {shown}", grpc.StatusCode.NOT_FOUND)
        await self._refuse_held(names)
        await self._grant(names, NONE)
        async with self.source.plugins.turn:
            return b"".join([await self._ask(plugin, ids) for ids in wanted])

    async def _ask(self, plugin: VendorPlugin, ids: Iterable[str]) -> bytes:
        request = pb.AllocateRequest(container_requests=[pb.ContainerAllocateRequest(devices_ids=ids)])
        try:
            return await plugin.call("Allocate", request.SerializeToString())
        except grpc.aio.AioRpcError as error:
            raise Refusal(error.code(), "plugin", f"{error.details()}") from error

    def _plugin(self) -> VendorPlugin:
        plugin = self.source.plugins.plugin(self.resource)
        if plugin is None or not plugin.alive:
            raise self._refusal("plugin", "its plugin has gone", grpc.StatusCode.UNAVAILABLE)
        return plugin

    async def _prefer(self, request: bytes, context: Any) -> bytes:
        with self._allocations.busy(self._allocations.AFTER_PREFERENCE):
            return await self._pass("GetPreferredAllocation", request, context)

    async def _pre_start(self, request: bytes, context: Any) -> bytes:
        with self._calls.busy(0.0):
            return await self._pass("PreStartContainer", request, context)

    async def _pass(self, method: str, request: bytes, context: Any) -> bytes:
        """Pass a call on; what the plugin answers, or that it fails, is the answer."""
        try:
            return await self._plugin().call(method, request)
        except Refusal as refusal:
            await context.abort(refusal.code, refusal.details)
        except grpc.aio.AioRpcError as error:
            await context.abort(error.code(), f"{error.details()}")
        raise AssertionError  # abort raises
