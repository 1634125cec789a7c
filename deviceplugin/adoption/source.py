"""Serves the resource of a vendor's plugin: a source with the plugin's devices, and an endpoint that forwards calls."""

from __future__ import annotations

import os
import re
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import grpc.aio

from deviceplugin import looked_at
from deviceplugin.adoption.answers import AnswerError, devices_of, edits_of
from deviceplugin.adoption.plugins import VendorCallError, VendorList, VendorPlugin, VendorPlugins
from deviceplugin.device import MAX_ID, AttributeValue, ContainerEdits, Device, Health, Mount, counted, printable
from deviceplugin.exclusion import DeviceConflictError
from deviceplugin.identity import Tokens
from deviceplugin.kubelet.device_list import DeviceIds, Entry
from deviceplugin.kubelet.given_devices import GivenDevices
from deviceplugin.kubelet.servicer import Endpoint, Refusal
from deviceplugin.looks import Looks, LookTimeoutError
from deviceplugin.register.identification import reach
from deviceplugin.register.records import NONE, LedgerError
from deviceplugin.source import DeviceSource
from deviceplugin.wire import deviceplugin_pb2 as pb


class VendorDevice(Device):
    """A device with a vendor's id, which may have spaces, slashes and any length."""

    def _check_id(self) -> None:
        pass


ANSWER: Final = 25.0
"""Seconds for which a claim's Prepare waits for the plugin's response. The number is less than the driver's limit of
30 s for a claim, and the kubelet's limit of 45 s for a call.
"""


@dataclass(frozen=True, slots=True)
class Adopted:
    """The settings of an adopted resource that concern claims.

    attributes, capacity: the attributes and capacity of each device; `{id}` in a text is replaced by the device's id.
    together: whether the plugin gets one Allocate for all requests of a claim. dropped_annotations: patterns of
    annotations to leave out of the plugin's responses. pre_start_once: whether the plugin needs only one
    PreStartContainer for a claim, at Prepare. ids: a regular expression for the device ids of the plugin that is known
    to work with claims, "" for any ids. If an id does not match, another plugin serves the resource.
    """

    driver: str | None = None
    attributes: Mapping[str, AttributeValue] = field(default_factory=dict)
    capacity: Mapping[str, int | str] = field(default_factory=dict)
    together: bool = False
    dropped_annotations: tuple[str, ...] = ()
    pre_start_once: bool = False
    ids: str = ""


class AdoptedSource(DeviceSource):
    """The source of an adopted resource: lists the devices in the device list of the vendor's plugin."""

    def __init__(self, resource: str, plugins: VendorPlugins, adopted: Adopted | None = None) -> None:
        self.resource = resource
        self.plugins = plugins
        self.adopted = adopted or Adopted()
        self.driver = self.adopted.driver
        self._looks = Looks(resource, resource=resource)

    async def watch(self) -> AsyncIterator[Sequence[Device]]:
        """Yield the devices of the plugin now, and again whenever its device list has changed."""
        async for devices in self.plugins.lists(self.resource):
            yield [self._device(name, devices) for name in devices]

    def _device(self, name: str, devices: VendorList) -> Device:
        problem, numa = devices[name]
        health = Health.UNHEALTHY if problem else Health.HEALTHY
        attributes = {
            key: type(value)(value.replace("{id}", name)) if isinstance(value, str) else value
            for key, value in self.adopted.attributes.items()
        }
        capacity = self.adopted.capacity
        return VendorDevice(
            name, health=health, numa=numa or None, message=problem, attributes=attributes, capacity=capacity
        )

    async def answer(self, devices: Sequence[Device], uid: str) -> ContainerEdits:
        """Let the plugin allocate devices to a claim's request; return the edits for the containers.

        uid: the claim's UID. While an Allocate for the same claim and devices is running, a repeated call of this
        method waits for its response. Raises AnswerError if there is no response, or the response has fields without
        equivalent in CDI.
        """
        plugin, ids = self.plugins.plugin(self.resource), [device.id for device in devices]
        if plugin is None or not plugin.alive:
            raise AnswerError("the vendor's plugin is not connected")
        for name in ids:
            if name not in (plugin.devices or {}):
                raise AnswerError(f"the vendor's plugin does not list device {printable(name[:MAX_ID])}")
            if self.adopted.ids and not re.fullmatch(self.adopted.ids, name):
                raise AnswerError(
                    f"the known plugin of this resource never has the id {printable(name[:MAX_ID])}, so another plugin "
                    "runs; if that plugin can serve claims, write `claims: true` under `plugin`"
                )
        if plugin.options.pre_start_required and not self.adopted.pre_start_once:
            raise AnswerError(
                "the vendor's plugin wants PreStartContainer before each start of a container, which claims cannot "
                "give; if one call, when the claim is prepared, is enough, write `pre_start: once` under `plugin`"
            )
        try:
            answer = await self.plugins.allocate_claim(plugin, uid, ids, ANSWER)
        except TimeoutError:
            text = f"the vendor's plugin has not answered Allocate of {counted(len(ids))} for {ANSWER:g} s"
            raise AnswerError(f"{text}; the next try waits for the same call") from None
        except ConnectionError:
            raise AnswerError("the agent is stopping") from None
        except LookupError:
            why = "has listed the devices again meanwhile, or allocated them to others"
            raise AnswerError(f"the vendor's plugin {why}; the next try asks it again") from None
        except VendorCallError as error:
            text = (
                f"{error}; the next try asks it again" if error.unanswered else f"the vendor's plugin refuses: {error}"
            )
            raise AnswerError(text) from error
        edits = edits_of(answer, self.adopted.dropped_annotations)
        try:
            missing = await self._looks.at("answer", _missing, edits.mounts, brief=True)
        except LookTimeoutError as error:
            raise AnswerError(f"the vendor's plugin answers with a mount that cannot be read: {error}") from error
        if missing:
            raise AnswerError(
                f"the vendor's plugin answers with a mount of {missing}, which does not exist on the host"
            )
        return edits

    async def opened(self, given: GivenDevices, ids: Collection[str]) -> Tokens:
        """Return, and remember, the tokens of the devices in the plugin's response for these device ids.

        Raises LookTimeoutError.
        """
        nodes = frozenset[str]()
        if any(given):
            nodes = await self._looks.at("answer", given.tokens, self.plugins.cdi_directories, brief=True)
        if (plugin := self.plugins.plugin(self.resource)) is not None:
            plugin.opens.update(dict.fromkeys(ids, nodes))
        return nodes

    def forget(self, uid: str) -> None:
        """Drop the plugin's unused responses for a claim that has ended."""
        if (plugin := self.plugins.plugin(self.resource)) is not None:
            plugin.forget(uid)


def _missing(mounts: Sequence[Mount]) -> str:
    """Return the first host path of these mounts that does not exist; "" if all exist.

    Only paths in /dev are checked, because an agent in a pod sees no other directory of the host.
    """
    in_pod = "KUBERNETES_SERVICE_HOST" in os.environ
    hosts = (mount.host for mount in mounts if not in_pod or mount.host.startswith("/dev/"))
    return next((host for host in hosts if not _is_there(host)), "")


def _is_there(path: str) -> bool:
    looked_at.at(path)
    return os.path.lexists(path)


class VendorIds(DeviceIds):
    """The kubelet ids of a vendor's devices.

    Each kubelet id is the device's own id, even if the id looks like a replica's.
    """

    def device_id_of(self, name: str) -> str:
        """Return `name`, because a vendor's device has the same id at the kubelet."""
        return name

    def offered_as(self, name: str) -> str:
        """Return `name`, because a vendor's device has the same id at the kubelet."""
        return name

    def names_of(self, device: Device) -> tuple[str, ...]:
        """Return the kubelet ids of a device: only the device's own id."""
        return (device.id,)


class AdoptedEndpoint(Endpoint):
    """Forwards the kubelet's calls to the vendor's plugin, and the plugin's responses to the kubelet, byte for byte.

    The register grants or refuses the devices before an Allocate is forwarded, as for any other resource.
    """

    IDS = VendorIds
    source: AdoptedSource

    @property
    def options(self) -> pb.DevicePluginOptions:
        """The options of the vendor's plugin, but without PreStartContainer while no pod can get its devices."""
        plugin, options = self.source.plugins.plugin(self.resource), pb.DevicePluginOptions()
        if plugin is not None:
            options.CopyFrom(plugin.options)
            if options.pre_start_required:
                options.pre_start_required = self._register.snapshot.serves_pods(self.resource)
        return options

    @property
    def ready(self) -> bool:
        """Whether the plugin is connected. While it is not, the agent has no ListAndWatch stream at the kubelet.

        A plugin that restarts may register with the kubelet itself. If the agent's stream ended after that, a kubelet
        up to 1.36 would drop the plugin's registration. So the agent's stream ends as soon as the plugin disconnects,
        unless devices are `kept_back`.
        """
        plugin = self.source.plugins.plugin(self.resource)
        return super().ready and plugin is not None and plugin.alive

    @property
    def awaits(self) -> str:
        """The plugin for which this endpoint waits, as text for messages.

        If the plugin has registered with the kubelet itself, the text says that its pod must be restarted.
        """
        if not self.source.plugins.registered_elsewhere(self.resource):
            return "the vendor's plugin"
        return (
            "the vendor's plugin, which has registered with the kubelet instead of this agent; if the node offers none "
            "of the plugin's devices, restart the plugin's pod: a kubelet may count the plugin as stopped"
        )

    @property
    def kept_back(self) -> frozenset[str]:
        """The ids of devices that claims hold or may get, which the agent keeps registered as unhealthy.

        If the agent did not register them, the plugin would register them with the kubelet, and allocate them to pods.
        The kubelet calls Allocate of the endpoint that registered last, and the agent's endpoint refuses these ids. The
        kubelet got each of these devices as Unhealthy before the device moved to DRA, so it has not allocated the
        device since. If a claim is known only from its file, the ids are from the file, because the register has no
        records of the claim's devices.
        """
        snapshot = self._register.snapshot
        for_claims = {record.device for record in snapshot.of(self.resource).values() if not record.state.allocates}
        held = (device for claim in snapshot.claims.values() for device in claim.devices)
        return frozenset(for_claims.union(device.device for device in held if device.resource == self.resource))

    @property
    def plugin_socket(self) -> str:
        """The socket name of the plugin that registered last, even if it is disconnected; "" if none has registered."""
        plugin = self.source.plugins.plugin(self.resource)
        return "" if plugin is None else plugin.socket.name

    def _lines_if_listed(self) -> tuple[Entry, ...] | None:
        lines = super()._lines_if_listed()
        return self.ids.entries(lambda device: False, ()) if lines is None and self.kept_back else lines

    def keep_registered(self, registered: Collection[str]) -> None:
        """Add to the device list, as unhealthy, the ids that pods have or may be getting, but the plugin does not list.

        The kubelet may be waiting for an Allocate of such an id at another plugin of the resource. The kubelet crashes
        if it gets a list without the id before it has the response (1.36.3, devicemanager/manager.go,
        allocateContainerResources).
        """
        held = self._holders.snapshot.of(self.resource) if self._holders is not None else ()
        self.ids.keep({*registered, *held, *self._register.snapshot.of(self.resource)})

    def add_to(self, server: grpc.aio.Server) -> None:
        """Add this endpoint's calls to a gRPC server. Forwarded requests and responses stay bytes."""
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

    async def _forward(self, wanted: Sequence[tuple[str, ...]], ids: Mapping[str, str]) -> bytes:
        """Record the grant, call the plugin's Allocate, and record the device nodes in its response.

        If a step fails, the kubelet rejects the pod, and a later scan ends the grant. The agent checks the ids against
        the plugin's list, because some plugins accept unknown ids. Only the response shows which hardware an id stands
        for. If another resource lists the device of a node in the response, and the device has a holder, the Allocate
        is refused.
        """
        plugin = self._plugin()
        for name in ids:
            if name not in (plugin.devices or {}):
                shown = printable(name[:MAX_ID])
                raise self._refusal(
                    "unknown", f"the vendor's plugin does not list device {shown}", grpc.StatusCode.NOT_FOUND
                )
        await self._refuse_held(list(ids))
        await self._grant(ids, NONE)
        try:
            answer = await self.source.plugins.allocate(plugin, wanted)
        except VendorCallError as error:
            raise Refusal(error.code, "plugin", self._words(error)) from error
        if nodes := await self.source.opened(devices_of(answer), ids):
            listed = self._register.hardware().having_any(nodes)
            try:
                why = await self._register.decide(listed, partial(reach, self.resource, tuple(ids), nodes))
            except DeviceConflictError as error:
                why = str(error)
            except LedgerError as error:
                raise self._unrecorded(error) from error
            if why:
                raise self._refusal("excluded", f"{why} (the vendor's plugin answers with its device node)")
        return answer

    def _words(self, error: VendorCallError) -> str:
        """Return the error text for the kubelet. A message of the plugin itself stays unchanged."""
        return f"{self.resource}: {error}" if error.unanswered else str(error)

    def _plugin(self) -> VendorPlugin:
        plugin = self.source.plugins.plugin(self.resource)
        if plugin is None or not plugin.alive:
            raise self._refusal("plugin", "the vendor's plugin has disconnected", grpc.StatusCode.UNAVAILABLE)
        return plugin

    async def _prefer(self, request: bytes, context: Any) -> bytes:
        with self._calls.busy(0.0), self._allocations.busy(self._allocations.AFTER_PREFERENCE):
            return await self._pass("GetPreferredAllocation", request, context)

    async def _pre_start(self, request: bytes, context: Any) -> bytes:
        with self._calls.busy(0.0):
            return await self._pass("PreStartContainer", request, context)

    async def _pass(self, method: str, request: bytes, context: Any) -> bytes:
        """Forward a call to the plugin, and the plugin's response or error to the kubelet."""
        try:
            return await self._plugin().call_in_turn(method, request)
        except Refusal as refusal:
            await context.abort(refusal.code, refusal.details)
        except VendorCallError as error:
            await context.abort(error.code, self._words(error))
        raise AssertionError  # `abort` always raises an exception.
