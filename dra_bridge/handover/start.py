"""The begin of moves: what the share asks for, once the scheduler knows of it."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from deviceplugin.device import counted, natural
from deviceplugin.register import operations
from deviceplugin.register.records import RegisterSnapshot, Side, State
from deviceplugin.register.rules import MoveWait
from dra_bridge.handover.admission import counts_of, may_leave, resources_served_by_dra
from dra_bridge.handover.allocatable import AllocatableStatus
from dra_bridge.handover.moved import MovedResource
from dra_bridge.handover.planner import FollowingMove, Plan, followers, groups, leading, plan
from dra_bridge.handover.share import Drain, Share

_LOG: Final = logging.getLogger(__name__)
_BLOCKED: Final = MoveWait(
    "pods of one side to end: a kubelet restart would end pods of the plugin side beside pods that DRA serves by "
    "limits",
    on_holder=True,
)


@dataclass(slots=True, eq=False)
class MoveStarter:
    """Begins moves of one resource's devices, so that their sides become as the share says.

    allocatable: see `Handover`. draining: devices on the plugin side that are to leave it, so
    that new pods had better get others. blocked: what devices wait for whose moves cannot begin. begun: how many moves
    have begun, by direction.
    """

    moved: MovedResource
    share: Share
    drain: Drain
    allocatable: AllocatableStatus | None
    draining: frozenset[str] = frozenset()
    blocked: Mapping[str, MoveWait] = field(default_factory=dict)
    begun: Counter[str] = field(default_factory=Counter)

    @property
    def resource(self) -> str:
        """The resource."""
        return self.moved.name

    def ask(self, share: Share, drain: Drain | None) -> None:
        """Ask for another share from now on, and for another way to drain if there is one."""
        drain = drain or self.drain
        if (share, drain) != (self.share, self.drain):
            text = "the requested share of claims is %s (before: %s)"
            _LOG.info(text, share, self.share, extra={"resource": self.resource})
            self.share, self.drain = share, drain

    async def begin(self, *, limited: bool) -> bool:
        """Begin the moves that the share asks for, once the scheduler knows how many devices stay; return if any.

        limited: see `MovesToPlugin`.
        """
        wanted = self._planned(limited=limited)
        while await self._announced(wanted.to_dra):
            wanted = self._planned(limited=limited)  # meanwhile pods may have got other devices
        self.draining = self._followed(wanted.draining)
        for devices, side in ((wanted.to_dra, Side.DRA), (wanted.to_plugin, Side.PLUGIN)):
            if devices:
                await self._begin_move(devices, side, f"the share is {self.share}", for_claim=False)
        following = self._following()
        while await self._announced([each.device for each in following if each.side is Side.DRA]):
            following = self._following()
        for each in following:
            await self._begin_move((each.device,), each.side, each.reason, for_claim=each.for_claim)
        return bool(wanted or following)

    def _following(self) -> list[FollowingMove]:
        listed = self._listed()
        return followers(self.moved.ledger.snapshot, self.resource, listed, self.moved.together(listed))

    def _listed(self) -> dict[str, State]:
        """Return the states of the devices that count."""
        listed = self.moved.inventory.snapshot
        return {
            name: record.state
            for name, record in self.moved.moving.of(self.moved.ledger.snapshot, self.resource).items()
            if name in listed.devices and name not in listed.gone
        }

    def kept(self) -> frozenset[str]:
        """Return the devices that would begin to move to DRA now if `MovesToPlugin.limited` were False."""
        return self._followed(self._planned(limited=False).to_dra)

    def _planned(self, *, limited: bool) -> Plan:
        """Return what the share asks for, as far as it makes no kubelet restart end a pod.

        limited: see `MovesToPlugin`.
        """
        now = self.moved.ledger.snapshot
        listed = self._listed()
        leaders, held, expected = leading(now, self.resource, listed, self.moved.together(listed))
        linked = groups(self.moved.inventory.devices, self.moved.endpoint.source.links)

        def planned(states: Mapping[str, State], drain: Drain) -> Plan:
            return plan(states, held, self.share, drain, linked, expected)

        wanted = planned(leaders, self.drain)
        self.blocked = {}
        if self.share.forced:
            return wanted
        served = resources_served_by_dra(now) | ({self.resource} if limited else set())
        bound = {name for name in leaders if served and any(of in served for of, _ in self.moved.group(name))}
        waiting = {name for name in bound if leaders[name] is State.TO_PLUGIN}
        if back := bound.intersection(planned(leaders | dict.fromkeys(waiting, State.DRA), self.drain).to_plugin):
            # None arrives on the plugin's side before the pods that DRA serves by limits have ended, and no other ones
            # come once the slices offer nothing. What claims are to keep turns round then.
            leaves = {name for name in bound if leaders[name] is State.DRA} if self.drain == "cordon" else set()
            self.blocked = dict.fromkeys(back - leaves - waiting, _BLOCKED)
            return Plan((), tuple(sorted(leaves, key=natural)))
        if self._may_leave(now, wanted.to_dra):
            return wanted
        chosen: list[str] = []
        # What pods hold is not withdrawn: it leaves when it is idle.
        for name in planned(leaders, "wait").to_dra:
            if self._may_leave(now, [*chosen, name]):
                chosen.append(name)
        rest = (wanted.draining | frozenset(wanted.to_dra)).difference(chosen)
        self.blocked = dict.fromkeys(rest, _BLOCKED)
        return Plan(tuple(chosen), (), rest)

    def _may_leave(self, now: RegisterSnapshot, leaders: Iterable[str]) -> bool:
        """Return whether these devices and those that move with them may leave for DRA together, of each resource."""
        leaving: dict[str, set[str]] = {}
        for of, name in {member for leader in leaders for member in self.moved.group(leader)}:
            leaving.setdefault(of, set()).add(name)
        for of, names in leaving.items():
            if (endpoint := self.moved.side.endpoint(of)) is not None:
                shown = endpoint.streams.staying()
                ids = {device_id for name in names for device_id in endpoint.ids.ids_of(name)}
                if not may_leave(counts_of(now, of, shown), len(ids if shown is None else ids & shown)):
                    return False
        return True

    def _followed(self, leaders: Iterable[str]) -> frozenset[str]:
        """Return these devices and those of this resource that move with them."""
        listed = self._listed()
        return frozenset(
            device
            for name in leaders
            for of, device in self.moved.group(name)
            if of == self.resource and device in listed
        )

    async def _announced(self, leaving: Collection[str]) -> bool:
        """Let the scheduler know how many devices stay on the plugin side; return whether it had to be waited for."""
        if self.allocatable is None or not leaving or (healthy := self.moved.endpoint.streams.healthy()) is None:
            return False
        staying = healthy - {device_id for name in leaving for device_id in self.moved.endpoint.ids.ids_of(name)}
        if staying == healthy:
            return False
        self.draining |= self._followed(leaving)  # until then new pods had better get others
        return await self.allocatable.lower(self.resource, len(staying))

    async def _begin_move(self, devices: Sequence[str], side: Side, reason: str, *, for_claim: bool) -> None:
        now, driver = time.time(), self.moved.moving.driver
        begin = operations.begin_move(self.resource, devices, side, now, reason, driver, for_claim=for_claim)
        moves = await self.moved.ledger.do(begin)
        self.begun.update(state.value for state in moves.values())
        text = "%s begin to move to the %s side (%s)" if len(moves) > 1 else "%s begins to move to the %s side (%s)"
        _LOG.info(text, counted(len(moves)), side.text, reason, extra={"resource": self.resource})
        for name, state in moves.items():
            extra = {"resource": self.resource, "device": name}
            _LOG.debug("device %s is %s", name, state.text, extra=extra)
