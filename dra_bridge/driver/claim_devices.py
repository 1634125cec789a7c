"""The devices of claims: what a claim is granted of each, the register's grant, and the hooks around their use."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import partial
from operator import attrgetter
from typing import Final

from deviceplugin import naming
from deviceplugin.adoption.answers import AnswerError
from deviceplugin.adoption.source import AdoptedSource
from deviceplugin.device import ContainerEdits, Device, EditConflictError
from deviceplugin.exclusion import DeviceConflictError, DeviceKey, titled
from deviceplugin.identity import agree, identified, shown
from deviceplugin.register import operations
from deviceplugin.register.outlook import outlook
from deviceplugin.register.question import View, takes_of
from deviceplugin.register.records import Amount, Claim, ClaimDevice, Operation
from deviceplugin.register.register import HookWorksError, Register
from deviceplugin.register.rules import Excluded, Refused
from deviceplugin.source import DeviceSource
from dra_bridge.driver.claim_api import ClaimEvents
from dra_bridge.driver.claims import Awaited, ClaimAllocation, ClaimError, ClaimRef, Reason, Result
from dra_bridge.driver.host import DriverHost
from dra_bridge.driver.records import ClaimRecords
from dra_bridge.driver.served import RequestDevices, ServedDevices
from dra_bridge.driver.statistics import ClaimStatistics

Made = Sequence[tuple[RequestDevices, ContainerEdits]]
"""The devices of each request and source, and what containers with them get."""
_Decided = Operation[Claim | Refused | Excluded]
_SETUP: Final = frozenset({"reset", "edits", "prepare"})
"""The hooks that are called while a claim's devices are set up."""


@dataclass(frozen=True, slots=True)
class ClaimDevices:
    """Has the register grant devices to claims, and calls the sources' hooks around their use.

    A claim for an idle device of the plugin's side begins its move. register, host: see `Driver`. events: get the
    refusals. statistics: get the seconds that hooks took. ending: UIDs of the claims that are being taken back; of
    those that share a device one is the last.
    """

    records: ClaimRecords
    served: ServedDevices
    register: Register
    events: ClaimEvents
    statistics: ClaimStatistics
    host: DriverHost
    ending: set[str] = field(default_factory=set)

    def granted(self, groups: Sequence[RequestDevices], allocation: ClaimAllocation, boot: str) -> list[ClaimDevice]:
        """Return what a claim is to be granted of its devices. boot: the node's."""
        devices: list[ClaimDevice] = []
        for group in groups:
            for device, result in group.members:
                times = self.register.times(group.served.source.resource, device) if result.share_id else None
                devices.append(granted_device(group, device, result, boot, times, limits=allocation.limits))
        return devices

    @staticmethod
    def changed_by(groups: Sequence[RequestDevices]) -> bool:
        """Return whether the setup of a claim's devices calls code of others: hooks of sources, vendors' plugins."""
        for group in groups:
            source = group.served.source
            if isinstance(source, AdoptedSource) or not _SETUP.isdisjoint(source.hooks):
                return True
        return False

    async def reserve(self, ref: ClaimRef, record: Claim, *, durable: bool) -> None:
        """Have the register reserve a claim's devices while they are set up; `confirm` completes it.

        durable: see `operations.reserve`. Raises ClaimError: a device is not to be had, or is set up with other
        parameters.
        """
        await self._decide(ref, record, sorted(record.held), partial(operations.reserve, durable=durable))

    async def confirm(self, ref: ClaimRef, record: Claim) -> None:
        """Record a reserved claim with its answer, if its devices still are what they were when they were reserved.

        Raises ClaimError: one is not, or the register does not grant it any more.
        """
        try:
            await self.register.verify_granted(record.held)
        except DeviceConflictError as error:
            raise self._refused(ref, str(error), str(error)) from error
        await self._decide(ref, record, (), operations.prepare)

    async def grant(self, ref: ClaimRef, record: Claim) -> None:
        """Record a claim with its answer, if nobody holds what excludes its devices; they are verified before.

        Raises ClaimError: a device is not to be had, or is set up with other parameters.
        """
        await self._decide(ref, record, sorted(record.held), operations.prepare)

    async def _decide(
        self, ref: ClaimRef, record: Claim, verified: Collection[DeviceKey], operation: Callable[..., _Decided]
    ) -> None:
        along: set[DeviceKey] = set()
        for key in record.held:
            along.update(self.register.listed.group(*key))

        def decide(view: View) -> _Decided:
            if verified:
                self._check_identities(record)
            return operation(record, view, move_idle=True, along=frozenset(along))

        try:
            answer = await self.register.decide(verified, decide)
        except HookWorksError as error:
            raise self._refused(ref, str(error), str(error), self._awaited(record)) from error
        except DeviceConflictError as error:
            raise self._refused(ref, str(error), str(error)) from error
        if isinstance(answer, Claim):
            return
        if isinstance(answer, Refused) and answer.moving:
            self.host.claims_changed()
        kind = answer.message if isinstance(answer, Excluded) else answer.record.state.value
        raise self._refused(ref, kind, answer.message, self._awaited(record) if answer.outlook.waits else None)

    def _check_identities(self, record: Claim) -> None:
        """Raise DeviceConflictError if a device has come to stand for other hardware since the claim was read."""
        for device in record.devices:
            key, was = (device.resource, device.device), device.identity.tokens
            served = self.register.listed.served.get(device.resource)
            if device.admin or not was or served is None or device.device not in served.inventory.snapshot.devices:
                continue
            if not agree(was, now := self.register.tokens(key)):
                raise DeviceConflictError(f"{titled(key)} has just become {shown(now)}, it was {shown(was)}")

    def _awaited(self, record: Claim) -> Awaited:
        return Awaited(record.held, lambda: outlook(self.register.snapshot, record, self.register.view()))

    def _refused(self, ref: ClaimRef, kind: str, message: str, awaited: Awaited | None = None) -> ClaimError:
        self.events.refused(ref, kind, message)
        return ClaimError(Reason.REFUSED, message, awaited)

    async def edits(self, uid: str, groups: Sequence[RequestDevices]) -> Made:
        """Set up a claim's devices and return what containers with them get.

        The answers of vendors' plugins have to fit together: nothing tells which container gets which.

        Raises HookError: a hook failed. ClaimError: edits contradict each other, a hook returned something else, or a
        plugin refuses.
        """
        made: list[tuple[RequestDevices, ContainerEdits]] = []
        adopted: list[RequestDevices] = []
        for group in groups:
            if isinstance(group.served.source, AdoptedSource):
                adopted.append(group)
            else:
                made.append((group, await self._edits(uid, group)))
        return [*made, *await self._answers(uid, adopted)] if adopted else made

    async def _answers(self, uid: str, groups: Sequence[RequestDevices]) -> Made:
        """Return what the plugins of adopted resources answer."""
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

    @staticmethod
    async def _answer(uid: str, group: RequestDevices) -> ContainerEdits:
        source = group.served.source
        assert isinstance(source, AdoptedSource)
        try:
            return await source.answer(group.devices, uid)
        except AnswerError as error:
            raise ClaimError(Reason.PLUGIN, f"request {group.request!r}: {source.resource}: {error}") from error

    async def _edits(self, uid: str, group: RequestDevices) -> ContainerEdits:
        """Set up a group's devices for a claim and return the edits of the devices, then those of the hooks.

        Administrative access changes nothing: the devices are set up for others.
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
        try:
            return ContainerEdits.merge(map(attrgetter("container_edits"), devices), winner=extra)
        except EditConflictError as error:
            raise ClaimError(Reason.CONFLICT, f"request {group.request!r}: the devices' edits: {error}") from error

    def forget(self, uid: str) -> None:
        """Have late answers of vendors' plugins to a claim that ends dropped."""
        for served in self.served.resources:
            if isinstance(served.source, AdoptedSource):
                served.source.forget(uid)

    async def unprepare(self, claim: Claim) -> None:
        """Undo what `prepare` hooks did for a claim to devices that no other claim holds.

        Raises HookError: a hook failed.
        """
        for (source, _), devices in self.served.of_claim(claim):
            if "unprepare" in source.hooks and (alone := self._alone(claim.uid, source, devices)):
                await self.register.hooks.call(self.statistics.hooks, "unprepare", source, alone)

    def _alone(self, uid: str, source: DeviceSource, devices: Sequence[Device]) -> list[Device]:
        """Return the devices that no other claim holds, but for those that are ending, too."""
        mine = {(self.records.driver, claim_uid) for claim_uid in (uid, *self.ending)}
        others = (claim.held for key, claim in self.records.ledger.snapshot.claims.items() if key not in mine)
        held: frozenset[DeviceKey] = frozenset().union(*others)
        return [device for device in devices if (source.resource, device.id) not in held]

    def released(self, claim: Claim) -> None:
        """Have `released` called for devices of an ended claim that nobody holds any more."""
        for (source, _), devices in self.served.of_claim(claim):
            if "released" not in source.hooks:
                continue
            idle = [device for device in devices if self.register.is_free((source.resource, device.id))]
            if idle:
                self.register.hooks.start(self.statistics.hooks, "released", source, idle)


def granted_device(
    asked: RequestDevices, device: Device, result: Result, boot: str, times: int | None = None, *, limits: bool = False
) -> ClaimDevice:
    """Return what a claim is granted of a device now.

    asked: the request that the device is for. boot: the node's. times: how often the device is offered; None: as its
    inventory says. limits: whether the claim stands for a pod's `limits`.
    """
    now, admin = asked.served.inventory.snapshot, asked.admin
    tokens = now.identities.get(device.id, frozenset())
    part = "0" if admin else _part(times or now.replicas.get(device.id, 1), result)
    return ClaimDevice(
        now.resource,
        device.id,
        result.share_id or "",
        admin,
        identified(tokens, boot),
        Amount(part, () if admin else takes_of(device)),
        asked.parameters,
        limits,
    )


def _part(times: int, result: Result) -> str:
    """Return which part of a device a claim has: its shares of those that there are now; "" if that is not known."""
    if not result.share_id:
        return "1"
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
