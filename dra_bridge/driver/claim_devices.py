"""Finds and grants the devices of claims, and calls sources' hooks before and after the use of the devices."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from operator import attrgetter
from typing import Any, Final, NamedTuple

import msgspec

from deviceplugin import naming
from deviceplugin.adoption.answers import AnswerError
from deviceplugin.adoption.source import AdoptedSource
from deviceplugin.device import ContainerEdits, Device, EditConflictError, Health, in_order
from deviceplugin.exclusion import NO_TOKENS, DeviceConflictError, DeviceKey, titled
from deviceplugin.identity import Identity, Tokens, agree, identified, shown
from deviceplugin.inventory import GONE, Inventory, InventorySnapshot
from deviceplugin.kubelet.given_devices import GivenDevices
from deviceplugin.register import operations
from deviceplugin.register.question import View, takes_of
from deviceplugin.register.records import Amount, Claim, ClaimDevice, Operation, Outlook
from deviceplugin.register.register import HookWorksError, Register
from deviceplugin.register.rules import Excluded, Refused, outlook
from deviceplugin.register.waits import RefusedClaim
from deviceplugin.source import DeviceSource
from dra_bridge.driver.claim_api import ClaimEvents
from dra_bridge.driver.claims import (
    Awaited,
    ClaimAllocation,
    ClaimError,
    ClaimRecords,
    ClaimRef,
    Reason,
    Result,
    decoded_config,
)
from dra_bridge.driver.host import DriverHost
from dra_bridge.driver.statistics import ClaimStatistics


class ServedResource(NamedTuple):
    """One resource whose devices a driver gives to claims."""

    source: DeviceSource
    inventory: Inventory


@dataclass(frozen=True, slots=True)
class RequestDevices:
    """The devices that one request of a claim gets from one source.

    request: the request's name without the subrequest. members: each device with its result in the allocation; a device
    of which the claim has several shares has several results. records: for each member, the record that the register
    should grant. config: the request's parameters. by_others: True if hooks of the source or a vendor's plugin set up
    the devices.
    """

    request: str
    served: ServedResource
    members: tuple[tuple[Device, Result], ...]
    config: Any
    admin: bool
    records: tuple[ClaimDevice, ...]
    by_others: bool

    @property
    def devices(self) -> tuple[Device, ...]:
        """The devices of the request in natural order, each once, even if the claim has several shares of a device."""
        devices: dict[str, Device] = {}
        for device, _ in self.members:
            devices[device.id] = device
        return tuple(in_order(devices.values()))

    def edits(self, extra: ContainerEdits | None = None) -> ContainerEdits:
        """Return the devices' edits, merged with `extra`, the edits of hooks. Raises ClaimError on a conflict."""
        try:
            return ContainerEdits.merge(map(attrgetter("container_edits"), self.devices), winner=extra)
        except EditConflictError as error:
            raise ClaimError(
                Reason.CONFLICT,
                f"request {self.request!r}: the container edits of its devices cannot be merged: {error}",
            ) from error


_Names = dict[str, tuple[ServedResource, Device]]
"""Maps each published name of a device to the resource and the device."""


@dataclass(slots=True)
class ServedDevices:
    """The devices of a driver's resources. host: the agent that the driver belongs to."""

    driver: str
    resources: Sequence[ServedResource]
    host: DriverHost
    _named: tuple[object, Mapping[str, str], tuple[InventorySnapshot, ...], _Names] = field(
        default=(None, {}, (), {}), init=False
    )
    """The input of the last computation of `by_name` (resources, qualifiers, snapshots), and the result of this
    computation."""

    def replace(self, resources: Sequence[ServedResource]) -> None:
        """Replace the driver's resources."""
        self.resources = resources

    @property
    def by_name(self) -> Mapping[str, tuple[ServedResource, Device]]:
        """A mapping from each published name of a device of these resources to the resource and the device."""
        resources, snapshots = self.resources, dict[str, InventorySnapshot]()
        for served in resources:
            snapshots[served.source.resource] = served.inventory.snapshot
        qualifiers, now = self.host.qualifiers(list(snapshots)), tuple(snapshots.values())
        # All elements are read from one tuple, because another thread may replace the tuple.
        made_of, called, listed, names = self._named
        if made_of is not resources or qualifiers != called or any(map(operator.is_not, now, listed)):
            published = naming.published_names(qualifiers, {name: each.devices for name, each in snapshots.items()})
            by_resource = {served.source.resource: served for served in resources}
            names = {name: (by_resource[of], snapshots[of].devices[one]) for name, (of, one) in published.items()}
            self._named = resources, dict(qualifiers), now, names
        return names


Made = Sequence[tuple[RequestDevices, ContainerEdits]]
"""A list of pairs: the devices that one request gets from one source, and the container edits for these devices."""
_Decided = Operation[Claim | Refused | Excluded]
_SETUP: Final = frozenset({"reset", "edits", "prepare"})
"""The hooks that are called while a claim's devices are set up."""


@dataclass(frozen=True, slots=True)
class ClaimDevices:
    """Grants devices to claims through the register, and calls sources' hooks before and after the use of devices.

    If a claim needs a device that is on the plugin side and idle, the register begins to move this device to DRA.

    register, host: see `Driver`. events: writes Events about refusals. statistics: stores the durations of hooks.
    ending: UIDs of the claims that are being unprepared; they do not count as further users of a shared device, so the
    hook `unprepare` is called even if all claims of a device end together.
    """

    records: ClaimRecords
    served: ServedDevices
    register: Register
    events: ClaimEvents
    statistics: ClaimStatistics
    host: DriverHost
    ending: set[str] = field(default_factory=set)

    def requested(self, allocation: ClaimAllocation, boot: str) -> list[RequestDevices]:
        """Return the devices that each request of a claim gets from each source. boot: the node's boot.

        Raises ClaimError if a device is unknown, unplugged or unhealthy, if the parameters are wrong, or if a request
        for administrative access has a device of a vendor's plugin.
        """
        by_request: dict[tuple[str, str, bool], list[tuple[Device, Result]]] = {}
        by_name, limits = self.served.by_name, allocation.limits
        for result in allocation.results:
            if result.device not in by_name:
                what = f"driver {self.served.driver} has no device {result.device!r} here"
                raise ClaimError(Reason.MISSING, f"request {result.request!r}: {what}")
            served, device = by_name[result.device]
            admin = bool(result.admin_access)
            if not admin:
                self._check_usable(served, device, result)
            elif isinstance(served.source, AdoptedSource):
                what = "administrative access is not possible: the vendor's plugin would allocate what others hold"
                raise ClaimError(Reason.ADMIN, f"request {result.request!r}: {served.source.resource}: {what}")
            by_request.setdefault((result.request, served.source.resource, admin), []).append((device, result))
        requested: list[RequestDevices] = []
        for (request, resource, admin), members in by_request.items():
            served = by_name[members[0][1].device][0]
            source, records = served.source, list[ClaimDevice]()
            config = decoded_config(source.config_type, allocation.config, request)
            parameters = "" if config is None or admin else compared_parameters(source, config)
            for device, result in members:
                times = self.register.times(resource, device) if result.share_id else None
                records.append(granted_device(served, device, result, boot, parameters, times, limits=limits))
            by_others = isinstance(source, AdoptedSource) or not _SETUP.isdisjoint(source.hooks)
            name = request.partition("/")[0]
            requested.append(RequestDevices(name, served, tuple(members), config, admin, tuple(records), by_others))
        return requested

    def _check_usable(self, served: ServedResource, device: Device, result: Result) -> None:
        what, key = f"request {result.request!r}: device {result.device!r}", (served.source.resource, device.id)
        if not device.health.usable:
            accepted = {None, "", f"{self.served.driver}/unhealthy"}
            tolerated = any(toleration.get("key") in accepted for toleration in result.tolerations or ())
            if device.message == GONE or not tolerated:
                raise ClaimError(Reason.UNHEALTHY, f"{what} is unhealthy: {device.message or 'no reason was given'}")
        if self.host.bypassed(served.source.resource):
            why = "another plugin of its resource has registered with the kubelet instead of this agent"
            raise ClaimError(Reason.PLUGIN, f"{what}: {why}; pods with limits may be getting the device now")
        if not self.host.ready(*key):
            awaited = Awaited((key,), lambda: Outlook.FREE if self.host.ready(*key) else Outlook.UNKNOWN)
            text = f"{what}: its holder is not known yet: the agent has just started"
            raise ClaimError(Reason.STARTING, text, awaited)

    async def confirm(self, ref: ClaimRef, record: Claim) -> None:
        """Record a reserved claim with its Prepare response, if each device is still the reserved hardware.

        The listed devices whose nodes a vendor's plugin gave to the claim are verified too. Raises ClaimError if a
        device is other hardware now, or if the register does not grant the device any more.
        """
        opened = frozenset[str]().union(*(device.identity.reached for device in record.devices))
        try:
            await self.register.verify_granted(record.held)
        except DeviceConflictError as error:
            raise self._refused(ref, str(error), str(error)) from error
        await self.grant(ref, record, operations.prepare, self.register.hardware().having_any(opened))

    async def grant(
        self,
        ref: ClaimRef,
        record: Claim,
        operation: Callable[..., _Decided],
        verified: Collection[DeviceKey] | None = None,
    ) -> None:
        """Verify a claim's devices, then record the claim, unless other holders of the devices prevent this.

        operation: `operations.prepare` records the claim with its Prepare response. `operations.reserve` only reserves
        the devices before their setup; after the setup, `confirm` completes the grant. verified: the devices to verify;
        None for all devices of the claim. Raises ClaimError if a device cannot be granted, or if another claim has set
        up a device with other parameters.
        """
        verified = sorted(record.held) if verified is None else verified
        along: set[DeviceKey] = set()
        for resource, device in record.held:
            along.update(self.register.listed.groups(resource, (device,))[device])

        def decide(view: View) -> _Decided:
            for device in record.devices if verified else ():
                # The inventory may have changed since the claim's devices were found.
                key, was = (device.resource, device.device), device.identity.tokens
                served = self.register.listed.served.get(device.resource)
                if device.admin or not was or served is None or device.device not in served.inventory.snapshot.devices:
                    continue
                if not agree(was, now := self.register.tokens(key)):
                    raise DeviceConflictError(
                        f"{titled(key)} has just become {shown(now)}; before, it was {shown(was)}"
                    )
            return operation(record, view, move_idle=True, along=frozenset(along))

        try:
            answer = await self.register.decide(verified, decide)
        except HookWorksError as error:
            raise self._refused(ref, str(error), str(error), self._awaited(record)) from error
        except DeviceConflictError as error:
            raise self._refused(ref, str(error), str(error)) from error
        if isinstance(answer, Claim):
            return
        if isinstance(answer, Refused) and answer.record.state.allocates:
            # `dra_bridge.handover` reads the refused claims, and moves their devices to DRA even if pods hold them.
            now = self.register.snapshot
            devices = {key: now.device(*key).sequence for key in record.held}
            self.register.waits.refuse((record.driver, record.uid), RefusedClaim(record.title, devices))
            self.host.claims_changed()
        kind = answer.message if isinstance(answer, Excluded) else answer.record.state.value
        raise self._refused(ref, kind, answer.message, self._awaited(record) if answer.outlook.waits else None)

    def _awaited(self, record: Claim) -> Awaited:
        return Awaited(record.held, lambda: outlook(self.register.snapshot, record, self.register.view()))

    def _refused(self, ref: ClaimRef, kind: str, message: str, awaited: Awaited | None = None) -> ClaimError:
        self.events.refused(ref, kind, message)
        return ClaimError(Reason.REFUSED, message, awaited)

    async def set_up(self, record: Claim, groups: Sequence[RequestDevices]) -> tuple[Made, Claim]:
        """Set up a claim's devices by hooks and vendors' plugins, and return the edits for the claim's containers.

        The second value is the claim's record, with the device nodes that vendors' plugins gave to the claim. `confirm`
        refuses the claim if another holder has the device of such a node. The AllocateResponses of vendors' plugins
        must not contradict each other, because the driver does not know which container gets which response.

        Raises HookError if a hook failed. Raises ClaimError if edits contradict each other, if a hook returned a value
        of a wrong type, or if a plugin refuses.
        """
        made: list[tuple[RequestDevices, ContainerEdits]] = []
        uid, adopted = record.uid, list[RequestDevices]()
        for group in groups:
            if isinstance(group.served.source, AdoptedSource):
                adopted.append(group)
            else:
                made.append((group, group.edits(await self._call_hooks(uid, group))))
        if not adopted:
            return made, record
        answers = await self._answers(uid, adopted)
        return [*made, *answers], await self._opening(record, answers)

    async def _answers(self, uid: str, groups: Sequence[RequestDevices]) -> Made:
        """Request devices of adopted resources from vendors' plugins, and return the edits in the AllocateResponses."""
        calls: dict[object, list[RequestDevices]] = {}
        for number, group in enumerate(groups):
            source = group.served.source
            together = isinstance(source, AdoptedSource) and source.adopted.together
            calls.setdefault(source.resource if together else number, []).append(group)
        made, answers = [], []
        for alike in calls.values():
            members = tuple(member for group in alike for member in group.members)
            answer = await self._answer(uid, dataclasses.replace(alike[0], members=members))
            answers.append(answer)
            made += [(group, answer) for group in alike]
        try:
            ContainerEdits.merge(answers)
        except EditConflictError as error:
            what = "the answers of vendors' plugins to the requests of this claim contradict each other"
            how = "with `answer: claim` under `plugin` the requests of one resource are allocated together"
            raise ClaimError(Reason.CONFLICT, f"{what}: {error}; {how}") from error
        return made

    async def _opening(self, record: Claim, answers: Made) -> Claim:
        """Return a claim's record with the devices in vendors' AllocateResponses. Raises LookTimeoutError."""
        opened: dict[DeviceKey, Tokens] = {}
        for group, edits in answers:
            source, ids = group.served.source, [device.id for device in group.devices]
            assert isinstance(source, AdoptedSource)
            nodes = await source.opened(GivenDevices.in_edits(edits), ids)
            for name in ids:
                key = source.resource, name
                opened[key] = opened.get(key, NO_TOKENS) | nodes
        if not any(opened.values()):
            return record
        devices = []
        for device in record.devices:
            nodes = opened.get((device.resource, device.device), NO_TOKENS)
            identity = Identity(self.register.boot, reached=nodes) if nodes else device.identity
            devices.append(msgspec.structs.replace(device, identity=identity))
        return dataclasses.replace(record, devices=tuple(devices))

    @staticmethod
    async def _answer(uid: str, group: RequestDevices) -> ContainerEdits:
        source = group.served.source
        assert isinstance(source, AdoptedSource)
        try:
            return await source.answer(group.devices, uid)
        except AnswerError as error:
            raise ClaimError(Reason.PLUGIN, f"request {group.request!r}: {source.resource}: {error}") from error

    async def _call_hooks(self, uid: str, group: RequestDevices) -> ContainerEdits | None:
        """Call the hooks that set up the devices of one request. Return the hooks' edits, None if there are none.

        For a claim with administrative access, only the hook `edits` is called, because other claims may use the
        devices.
        """
        source, devices = group.served.source, group.devices
        run, statistics = self.register.hooks, self.statistics.hooks
        hooks_called = source.hooks - {"reset", "prepare"} if group.admin else source.hooks
        if "reset" in hooks_called and (alone := self._alone(uid, source, devices)):
            await run.call(statistics, "reset", source, alone)
        extra: ContainerEdits | None = None
        if "edits" in hooks_called:
            extra = _edits_of(source, "edits", await statistics.call("edits", source, source.edits, devices))
        if "prepare" in hooks_called:
            made = await run.call(statistics, "prepare", source, devices, group.config)
            if made is not None:
                before = (extra,) if extra is not None else ()
                extra = ContainerEdits.merge(before, winner=_edits_of(source, "prepare", made))
        return extra

    def forget(self, uid: str) -> None:
        """Forget an ended claim's refusal, and drop vendors' AllocateResponses that arrive later for this claim."""
        self.register.waits.refused.pop((self.records.driver, uid), None)
        for served in self.served.resources:
            if isinstance(served.source, AdoptedSource):
                served.source.forget(uid)

    async def unprepare(self, claim: Claim) -> None:
        """Call the hook `unprepare` for a claim's devices, except for the devices that another claim holds.

        Raises HookError if a hook failed.
        """
        for source, inventory in self.served.resources:
            if "unprepare" in source.hooks:
                listed, held = inventory.snapshot.devices, list[Device]()
                for resource, name in claim.held:
                    if resource == source.resource:
                        held.append(listed.get(name) or Device(name, health=Health.UNHEALTHY, message=GONE))
                if alone := self._alone(claim.uid, source, in_order(held)):
                    await self.register.hooks.call(self.statistics.hooks, "unprepare", source, alone)

    def _alone(self, uid: str, source: DeviceSource, devices: Sequence[Device]) -> list[Device]:
        """Return those of these devices that no other claim holds, not counting claims that are being unprepared."""
        mine = {(self.records.driver, claim_uid) for claim_uid in (uid, *self.ending)}
        others = (claim.held for key, claim in self.records.ledger.snapshot.claims.items() if key not in mine)
        held: frozenset[DeviceKey] = frozenset().union(*others)
        return [device for device in devices if (source.resource, device.id) not in held]

    def released(self, claim: Claim) -> None:
        """Call the hook `released` for those devices of an ended claim that have no holder any more."""
        for resource in sorted({resource for resource, _ in claim.held}):
            served = self.register.listed.served.get(resource)
            if served is not None and "released" in served.source.hooks:
                self.register.releases.look(resource, all_known=False)


def compared_parameters(source: DeviceSource, config: Any) -> str:
    """Return a request's parameters as JSON, to compare them with the parameters of other claims that share a device.

    Returns "" if the source has no hook `prepare`, because only this hook uses the parameters.
    """
    return msgspec.json.encode(config, order="sorted").decode() if "prepare" in source.hooks else ""


def granted_device(
    served: ServedResource,
    device: Device,
    result: Result,
    boot: str,
    parameters: str = "",
    times: int | None = None,
    *,
    limits: bool = False,
) -> ClaimDevice:
    """Return the record by which a claim requests a device from the register, with values of the present inventory.

    boot: the node's boot. parameters: see `compared_parameters`. times: number of claims that may share the device;
    None for the number in the inventory. limits: whether the scheduler made the claim for a pod's `limits`.
    """
    now, admin = served.inventory.snapshot, bool(result.admin_access)
    tokens = now.identities.get(device.id, frozenset())
    part = "0" if admin else "1"
    if result.share_id and not admin:
        part = _part(times or now.replicas.get(device.id, 1), result)
    return ClaimDevice(
        now.resource,
        device.id,
        result.share_id or "",
        admin,
        identified(tokens, boot, within=now.larger.get(device.id, ())),
        Amount(part, () if admin else takes_of(device)),
        parameters,
        limits,
    )


def _part(times: int, result: Result) -> str:
    """Return the part of a device that a claim gets: the claim's consumed shares divided by `times`; "" if unknown."""
    capacity = result.consumed_capacity or {}
    consumed = {naming.qualified(name, result.driver): amount for name, amount in capacity.items()}
    try:
        shares = naming.parse_quantity(consumed[naming.qualified(naming.SHARES, result.driver)])
    except (KeyError, naming.NamingError):
        return ""
    part = shares / times
    return str(min(part, Fraction(1))) if part > 0 else ""


def _edits_of(source: DeviceSource, hook: str, answer: object) -> ContainerEdits:
    if not isinstance(answer, ContainerEdits):
        what = f"{hook} of {source.resource} returned {type(answer).__name__}, not ContainerEdits"
        raise ClaimError(Reason.HOOK, what)
    return answer
