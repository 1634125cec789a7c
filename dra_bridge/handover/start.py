"""Begins the moves that the share requires, after the Node's number of allocatable devices was lowered."""

from __future__ import annotations

import functools
import logging
import time
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from deviceplugin.device import counted, natural
from deviceplugin.register import operations
from deviceplugin.register.records import Side, State
from deviceplugin.register.rules import MoveWait
from dra_bridge.handover.admission import counts_of, may_leave, resources_served_by_dra
from dra_bridge.handover.allocatable import AllocatableStatus
from dra_bridge.handover.moved import MovedResource
from dra_bridge.handover.planner import Movable, Plan, exchanged, followers, groups, leading, plan
from dra_bridge.handover.share import Drain, Share

_LOG: Final = logging.getLogger(__name__)
_BLOCKED: Final = MoveWait(
    "pods of one side to end: a kubelet restart would end pods of the plugin side beside pods that DRA serves by "
    "limits",
    on_holder=True,
)


@dataclass(slots=True, eq=False)
class MoveStarter:
    """Begins moves of one resource's devices, so that DRA gets as many as requested (the share).

    allocatable: see `Handover`. draining: devices that will leave the device plugin; new pods should get other devices
    if possible. blocked: for each device whose move cannot begin, the reason. begun: for each direction, the number of
    moves that have begun.
    """

    moved: MovedResource
    share: Share
    drain: Drain
    allocatable: AllocatableStatus | None
    draining: frozenset[str] = frozenset()
    blocked: Mapping[str, MoveWait] = field(default_factory=dict)
    begun: Counter[str] = field(default_factory=Counter)

    def ask(self, share: Share, drain: Drain | None) -> None:
        """Request another share for DRA. drain: see `Drain`; None keeps the present value."""
        drain = drain or self.drain
        if (share, drain) != (self.share, self.drain):
            text = "the requested share of claims is %s (before: %s)"
            _LOG.info(text, share, self.share, extra={"resource": self.moved.name})
            self.share, self.drain = share, drain

    async def begin(self, *, limited: bool) -> bool:
        """Begin the moves that the share requires. Return whether any move began.

        Before devices leave the device plugin, the Node's number of allocatable devices is lowered. limited: see
        `MovesToPlugin`.
        """
        while True:
            movable = self.moved.movable()
            wanted = self._planned(movable, limited=limited)
            if not (wanted.to_dra and await self._announced(movable, wanted.to_dra)):
                # If `_announced` has waited, choose devices again, because pods may have got other devices meanwhile.
                break
        self.blocked = dict.fromkeys(wanted.blocked, _BLOCKED)
        self.draining = movable.with_groups(wanted.draining)
        for devices, side in ((wanted.to_dra, Side.DRA), (wanted.to_plugin, Side.PLUGIN)):
            if devices:
                await self._begin_move(devices, side, f"the share is {self.share}", for_claim=False)
        begun = bool(wanted.to_dra or wanted.to_plugin)
        if begun:
            movable = self.moved.movable()
        while following := followers(movable):
            leaving = [each.device for each in following if each.side is Side.DRA]
            if not (leaving and await self._announced(movable, leaving)):
                break
            movable = self.moved.movable()
        for each in following:
            await self._begin_move((each.device,), each.side, each.reason, for_claim=each.for_claim)
        return begun or bool(following)

    def kept(self) -> frozenset[str]:
        """Return the devices that would now begin to move to DRA if `MovesToPlugin.limited` were False."""
        movable = self.moved.movable()
        return movable.with_groups(self._planned(movable, limited=False).to_dra)

    def takes(self, leaving: Collection[str]) -> frozenset[str]:
        """Return the devices to take over from a former driver; see `Successor`."""
        movable = self.moved.movable(leaving)
        leaders, held, expected = leading(movable)
        chosen = movable.with_groups(plan(leaders, held, self.share, self.drain, expected=expected).to_dra)
        keys = {(movable.resource, name) for name in leaving}
        return frozenset(name for name in chosen.intersection(leaving) if keys.issuperset(movable.together[name]))

    def _planned(self, movable: Movable, *, limited: bool) -> Plan:
        """Return the moves that the share requires, except moves after which a kubelet restart would end a pod.

        limited: see `MovesToPlugin`.
        """
        leaders, held, expected = leading(movable)
        devices, source = self.moved.inventory.snapshot.devices, self.moved.endpoint.source
        linked = functools.cache(lambda: groups(devices, source.links))
        wanted = plan(leaders, held, self.share, self.drain, linked, expected)
        if self.share.forced:
            return wanted
        served = resources_served_by_dra(movable.now)
        if limited:
            served.add(movable.resource)
        bound = {name for name in leaders if any(of in served for of, _ in movable.together[name])} if served else None
        if bound:
            waiting = {name for name in bound if leaders[name] is State.TO_PLUGIN}
            as_if = leaders | dict.fromkeys(waiting, State.DRA)
            if back := bound.intersection(plan(as_if, held, self.share, self.drain, linked, expected).to_plugin):
                # While a pod has a device for its `limits` through DRA, no device returns to the device plugin. With
                # `drain` "cordon", all devices begin to move to the device plugin, so that no new pod can get a device
                # through DRA. Later, the moves are reversed for those devices that the share assigns to DRA.
                leaves = {name for name in bound if leaders[name] is State.DRA} if self.drain == "cordon" else set()
                return Plan((), tuple(sorted(leaves, key=natural)), blocked=frozenset(back - leaves - waiting))
        if not (wanted.to_dra or wanted.to_plugin or bound):
            instead = exchanged(leaders, held, expected)
            if instead.to_dra and self._may_leave(movable, instead.to_dra):
                return replace(instead, draining=wanted.draining)
        if not wanted.to_dra or self._may_leave(movable, wanted.to_dra):
            return wanted
        chosen: list[str] = []
        # Only idle devices are withdrawn now. A device that a pod holds leaves the device plugin when it is idle.
        for name in plan(leaders, held, self.share, "wait", linked, expected).to_dra:
            if self._may_leave(movable, [*chosen, name]):
                chosen.append(name)
        rest = (wanted.draining | frozenset(wanted.to_dra)).difference(chosen)
        return Plan(tuple(chosen), (), rest, rest)

    def _may_leave(self, movable: Movable, leaders: Iterable[str]) -> bool:
        """Return whether all devices in the groups of these leaders may move to DRA at once (`may_leave`)."""
        leaving: dict[str, set[str]] = {}
        for leader in leaders:
            for of, name in movable.together[leader]:
                leaving.setdefault(of, set()).add(name)
        for of, names in leaving.items():
            if (endpoint := self.moved.side.endpoint(of)) is not None:
                shown = endpoint.streams.staying()
                ids: set[str] = set()
                for name in names:
                    ids.update(endpoint.ids.ids_of(name))
                if not may_leave(counts_of(movable.now, of, shown), len(ids if shown is None else ids & shown)):
                    return False
        return True

    async def _announced(self, movable: Movable, leaving: Collection[str]) -> bool:
        """Lower the Node's number of allocatable devices to those that stay. Return whether the method had to wait."""
        if self.allocatable is None or (healthy := self.moved.endpoint.streams.healthy()) is None:
            return False
        staying = set(healthy)
        for name in leaving:
            staying.difference_update(self.moved.endpoint.ids.ids_of(name))
        if len(staying) == len(healthy):
            return False
        # Until these devices begin to move, new pods should get other devices.
        self.draining |= movable.with_groups(leaving)
        return await self.allocatable.lower(self.moved.name, len(staying))

    async def _begin_move(self, devices: Sequence[str], side: Side, reason: str, *, for_claim: bool) -> None:
        now, driver = time.time(), self.moved.moving.driver
        begin = operations.begin_move(self.moved.name, devices, side, now, reason, driver, for_claim=for_claim)
        moves = await self.moved.register.store.do(begin)
        text = "%s begin to move to the %s side (%s)" if len(moves) > 1 else "%s begins to move to the %s side (%s)"
        _LOG.info(text, counted(len(moves)), side.text, reason, extra={"resource": self.moved.name})
        for name, state in moves.items():
            self.begun[state.value] += 1
            extra = {"resource": self.moved.name, "device": name}
            _LOG.debug("the state of device %s has changed: it is %s", name, state.text, extra=extra)
