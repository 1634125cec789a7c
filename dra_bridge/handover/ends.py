"""Collects the evidence that is needed to commit moves, and commits them. Deletes records of unplugged devices."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from deviceplugin.backoff import Backoff
from deviceplugin.register import operations
from deviceplugin.register.records import Claim, Decision, Operation, RegisterSnapshot, Side, State
from deviceplugin.register.rules import ClusterEvidence, KubeletEvidence, MoveWait
from dra_bridge.handover.admission import served_by_dra
from dra_bridge.handover.moved import MovedResource, Successor
from dra_bridge.handover.planner import held_and_expected

_LOG: Final = logging.getLogger(__name__)
_NO_SUCCESSOR: Final[tuple[Successor | None, Collection[str]]] = (None, ())


def shown_unhealthy(
    devices: Iterable[str], sent: tuple[float, frozenset[str]] | None, device_id_of: Callable[[str], str]
) -> dict[str, float]:
    """Return the devices without a Healthy id in the last ListAndWatch list, each with the time of that list.

    sent: when the last list was sent (monotonic seconds), and its Healthy ids; None if the kubelet has no stream open.
    """
    if sent is None:
        return {}
    at, healthy_ids = sent
    return dict.fromkeys(frozenset(devices).difference(map(device_id_of, healthy_ids)), at)


async def end_moves_to_dra(
    moved: MovedResource, before: RegisterSnapshot, waiting: dict[str, MoveWait]
) -> tuple[str, ...]:
    """Commit the moves to DRA that can end, and return the moved devices. Does not call the API server.

    before: the register's present records. waiting: a mapping to which the function adds, for each device whose move to
    DRA still waits, the reason.
    """
    resource, streams, ids = moved.name, moved.endpoint.streams, moved.endpoint.ids
    devices = moved.moving.in_state(before, resource, State.TO_DRA)
    if not devices:
        return ()
    streams.refresh()
    sent = streams.shown()
    shown = shown_unhealthy(devices, sent, ids.device_id_of)
    if not shown:
        missing = "the kubelet to listen" if sent is None else "ListAndWatch to show it Unhealthy"
        waiting.update(dict.fromkeys(devices, MoveWait(missing)))
        return ()
    seen = await moved.evidence.scan(resource, [device_id for device in shown for device_id in ids.ids_of(device)])
    if seen is None:
        waiting.update(dict.fromkeys(devices, MoveWait("a moment without an Allocate in flight")))
        return ()
    proof = KubeletEvidence(before.sequence, shown, seen)
    done = await moved.register.store.do(operations.commit_to_dra(resource, devices, proof, time.time()))
    waiting.update(done.waiting)
    return done.devices


def pass_on(
    resource: str, devices: Collection[str], evidence: ClusterEvidence, driver: str, now: float
) -> Operation[operations.Committed]:
    """Return an operation that completes moves to the plugin, and begins the devices' moves to another driver's claims.

    Both are one change of the records, so ListAndWatch never shows the devices Healthy. For the arguments see
    `operations.commit_to_plugin`; driver: the driver whose claims will get the devices.
    """

    def decide(state: RegisterSnapshot) -> Decision[operations.Committed]:
        left = operations.commit_to_plugin(resource, devices, evidence, now)(state)
        between = state.with_changes(left.changes, state.sequence)
        reason = f"the resource's driver is {driver} now"
        begun = operations.begin_move(resource, left.answer.devices, Side.DRA, now, reason, driver)(between)
        return Decision(left.answer, begun.changes)

    return decide


@dataclass(slots=True)
class _ClaimQuery:
    """The repeated reads of the claim that prevents the move of a device.

    waits: the delays between two reads of the claim. claim: the claim's namespace/name; "" if no such claim is known.
    device: the device to look for in the claim's allocation; None to look for any device of the resource, in a claim
    for a pod's `limits`. due: when to read the claim again (monotonic seconds).
    """

    waits: Backoff
    claim: str = ""
    device: str | None = None
    due: float = 0.0


def _waits_for_limits(claim: str) -> MoveWait:
    text = f"claim {claim} (its pod has a device by limits: until it ends, a kubelet restart would end others)"
    return MoveWait(text, on_holder=True, claim=claim)


@dataclass(slots=True, eq=False)
class MovesToPlugin:
    """Completes moves of a resource's devices to the device plugin, with few requests to the API server.

    Once the API server has accepted the slice without a device, the agent lists the claims once, for all devices that
    wait at that time. While a claim's allocation names the device, the agent reads only this claim again, first after
    0.5 s, then after growing delays of up to 5 min. When the allocation no longer names the device, the agent lists the
    claims again. A failed list is repeated within 30 s.

    No move ends while a pod has a device of the resource for its `limits` through DRA, unless the move is forced.
    Otherwise pods could start with devices of the device plugin, and a kubelet restart would end these pods
    (`dra_bridge.handover.admission`). Meanwhile devices go on to the driver that the resource names now, if the share
    assigns them to claims (`pass_on`).

    queries: for each (device, sequence number of the device's record), the reads of a claim; so each move begins with a
    new read. waits: a function that returns the delays between two reads of a claim. limited: whether pods have, or may
    get, devices of the resource for their `limits` through DRA. The value becomes True when the ledger (the file of
    records) names such a pod. The value becomes False when the ledger file names no such pod, and either a list of
    claims names no such pod, or no device waits.
    """

    moved: MovedResource
    waits: Callable[[], Backoff] = lambda: Backoff(first=0.5, most=300.0)
    queries: dict[tuple[str, int], _ClaimQuery] = field(default_factory=dict)
    limited: bool = False
    _limits: _ClaimQuery | None = None
    """The next read of the claims that give pods devices for their `limits`. None if the ledger file alone determines
    `limited`."""

    async def commit(
        self,
        before: RegisterSnapshot,
        waiting: dict[str, MoveWait],
        forced: Callable[[], bool],
        kept: Callable[[], Collection[str]],
    ) -> tuple[str, ...]:
        """Commit the moves to the device plugin that can end, and return the moved devices.

        before: the register's present records. waiting: a mapping to which the method adds, for each device whose move
        still waits, the reason. forced: a function that returns whether moves are forced now. The result may change
        while the claims are listed. kept: a function that returns the devices whose moves will be reversed instead of
        committed once `limited` is False.
        """
        moved, mine = self.moved, self.moved.name
        devices = moved.moving.in_state(before, mine, State.TO_PLUGIN)
        by_ledger = served_by_dra(before, mine)
        self.limited = bool(by_ledger or (self.limited and devices))
        if not devices:
            self.queries, self._limits = {}, None
            return ()
        claims = {name: claim for claim in before.claims.values() for of, name in claim.held if of == mine}
        queries = self._known(before, devices, claims)
        served = [] if forced() else by_ledger
        _, onward = self._onward(name for name in devices if name not in claims) if served else _NO_SUCCESSOR
        withdrawn = {}
        for name in devices:
            if name in claims:
                waiting[name] = MoveWait.for_claim(claims[name].title)
            elif served and name not in onward:
                waiting[name] = _waits_for_limits(served[0].title)
            elif (at := moved.slices.withdrawn(mine, name)) is None:
                others = moved.slices.offering(mine, name)
                what = f"the end of slice {others} of others, which offers it" if others else ""
                waiting[name] = MoveWait(what or "the API server to accept the slice without it")
            else:
                withdrawn[name] = at
        asked = [queries[name] for name in withdrawn]
        if by_ledger or not self.limited or forced():
            self._limits = None
        elif any(moved.slices.withdrawn(mine, name) is None for name in devices):
            wait = MoveWait("the API server to accept the slice without the others")
            waiting.update(dict.fromkeys(withdrawn, wait))
            return ()
        else:
            self._limits = self._limits or _ClaimQuery(Backoff(first=0.5, most=30.0))
            asked.append(self._limits)
        lists = await self._read(asked)
        for name in withdrawn:
            waiting[name] = self._waits_for(queries[name])
        if not lists:
            return ()
        allocations = await moved.evidence.allocated()
        allocated = {device: claim for (resource, device), claim in allocations.claims.items() if resource == mine}
        limits = sorted(key for key in allocations.limits if key[0] == mine)
        keeps: Collection[str] = ()
        if self._limits is not None:
            self.limited = bool(limits)
            self._limits.claim = allocations.claims[limits[0]] if limits else ""
            keeps = () if limits else kept()
        bound = bool(served or limits) and not forced()
        idle = (name for name in withdrawn if name not in allocated)
        successor, onward = self._onward(idle) if bound else _NO_SUCCESSOR
        for name in withdrawn:
            queries[name].claim, queries[name].device = allocated.get(name, ""), name
            if limits and name not in (*allocated, *onward) and not forced():
                queries[name].claim, queries[name].device = allocations.claims[limits[0]], None
            waiting[name] = self._waits_for(queries[name])
        arrived = {
            name: at
            for name, at in withdrawn.items()
            # A slice of another driver may have begun to offer the device while the claims were listed.
            if (name in onward if bound else name not in keeps) and moved.slices.withdrawn(mine, name) == at
        }
        evidence = ClusterEvidence(before.sequence, arrived, allocations.at, allocated)
        if successor is None:
            done = await moved.register.store.do(operations.commit_to_plugin(mine, arrived, evidence, time.time()))
            waiting.update(done.waiting)
            return done.devices
        passing = pass_on(mine, arrived, evidence, successor.driver, time.time())
        done = await moved.register.store.do(passing)
        waiting.update(done.waiting)
        if done.devices:
            successor.passed_on(done.devices)
            moved.side.moved(mine)
        return ()

    def _onward(self, idle: Iterable[str]) -> tuple[Successor | None, Collection[str]]:
        """Return the moves of the driver that the resource names now, and those of these devices that go on to it."""
        if not self.moved.moving.leaving or (successor := self.moved.side.successor(self.moved.name)) is None:
            return _NO_SUCCESSOR
        return successor, successor.takes(frozenset(idle))

    @staticmethod
    def _waits_for(query: _ClaimQuery) -> MoveWait:
        if not query.claim:
            return MoveWait("a list of claims")
        return _waits_for_limits(query.claim) if query.device is None else MoveWait.for_claim(query.claim)

    def _known(
        self, now: RegisterSnapshot, devices: Iterable[str], prepared: Mapping[str, Claim]
    ) -> dict[str, _ClaimQuery]:
        """Return, for each of these devices, the query for its claim.

        prepared: the claims in the ledger file, each under the name of its device.
        """
        keys = {name: (name, now.device(self.moved.name, name).sequence) for name in devices}
        self.queries = {key: self.queries.get(key) or _ClaimQuery(self.waits()) for key in keys.values()}
        for name, key in keys.items():
            # A device with a claim in the ledger file gets a new query for this claim, without a delay from earlier
            # reads.
            if (claim := prepared.get(name)) is not None:
                self.queries[key] = _ClaimQuery(self.waits(), claim.title if claim.name else "", name)
        return {name: self.queries[key] for name, key in keys.items()}

    async def _read(self, queries: Collection[_ClaimQuery]) -> bool:
        """Read the claims whose queries are due. Return whether all claims have to be listed now.

        A list is necessary if a due query names no claim after these reads. The query's device waits, but no known
        claim prevents the device's move.
        """
        now = time.monotonic()
        due = [query for query in queries if query.due <= now]
        for query in due:
            query.due = now + query.waits.next()  # The delay grows even if the read fails.
            if query.claim and not await self.moved.evidence.allocates(query.claim, self.moved.name, query.device):
                query.claim = ""
        if all(query.claim for query in due):
            return False
        unnamed = [query for query in queries if not query.claim]
        again = min(max(query.due for query in unnamed), now + 30.0)
        for query in unnamed:
            query.due = again
        return True


async def forget_unplugged(moved: MovedResource, waiting: dict[str, MoveWait]) -> None:
    """Delete the records of unplugged devices that have no holder and are in no claim's allocation.

    An unplugged device on the DRA side, or moving there, first moves to the device plugin, because the end of this move
    proves that no claim has the device. waiting: a mapping to which the function adds, for each unplugged device whose
    record has to stay, the reason.
    """
    resource, now = moved.name, moved.register.snapshot
    unplugged = moved.moving.of(now, resource).keys() - moved.inventory.snapshot.devices.keys()
    if not (unplugged and moved.inventory.snapshot.listed):
        return
    if allocations := now.allocations_on(resource, unplugged):
        waiting.update({allocation.device: MoveWait.for_pod(allocation.pod) for allocation in allocations})
        await moved.evidence.scan(resource, {allocation.device_id for allocation in allocations})
    now, devices = moved.register.snapshot, moved.inventory.snapshot.devices
    held, _ = held_and_expected(now)
    gone = {
        name: record.state
        for name, record in moved.moving.of(now, resource).items()
        if name not in devices and (resource, name) not in held
    }
    if leaving := [name for name, state in gone.items() if state in (State.DRA, State.TO_DRA)]:
        back = operations.begin_move(resource, leaving, Side.PLUGIN, time.time(), "it is unplugged")
        await moved.register.store.do(back)
        moved.side.moved(resource)
    over = [name for name, state in gone.items() if state in (State.PLUGIN, State.QUARANTINED)]
    if over and (forgotten := await moved.register.store.do(operations.forget(resource, over))):
        names = ", ".join(forgotten)
        extra = {"resource": resource, "device": names}
        _LOG.info("the records of unplugged devices without a holder are deleted: %s", names, extra=extra)
        moved.side.moved(resource)
