"""The end of moves to the plugin side: gathers what rule R6 asks for."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field

from deviceplugin.backoff import Backoff
from deviceplugin.exclusion import Key
from dra_bridge.handover.planner import in_state
from dra_bridge.ledger import operations
from dra_bridge.ledger.records import Claim, Snapshot, State
from dra_bridge.ledger.rules import ClusterEvidence, HolderWait
from dra_bridge.ledger.worker import AsyncLedger

ReadClaim = Callable[[str, str, str], Awaitable[bool]]
"""Reads a claim, by namespace/name; returns whether its allocation names a device of this node (resource, id)."""
ListClaims = Callable[[], Awaitable[Mapping[Key, str]]]
"""Lists all claims, consistently; returns namespace/name by the device of this node that an allocation names."""
Withdrawn = Callable[[str, str], float | None]
"""Returns since when (monotonic seconds) the API server has had slices without a device, if it has."""


@dataclass(slots=True)
class _ClaimQuery:
    """Which claim's allocation names a device, "" if none is known, and when to ask again (monotonic seconds)."""

    waits: Backoff
    claim: str = ""
    due: float = 0.0


@dataclass(slots=True)
class _ClaimQueries:
    """Asks which claims' allocations name devices of one resource that move to the plugin side, as seldom as it can.

    A device costs one list of the claims once the API server has taken the slice without it (one list for all devices
    that wait then). While a claim's allocation names it, that claim is read after 0.5 s at first and 5 min at most, and
    the claims are listed again when it names it no longer. A list that fails is tried again after 30 s at most.

    queries: by device and the sequence of its record: each move asks anew.
    """

    resource: str
    read_claim: ReadClaim
    waits: Callable[[], Backoff]
    queries: dict[tuple[str, int], _ClaimQuery] = field(default_factory=dict)

    def of(self, now: Snapshot, devices: Iterable[str], prepared: Mapping[str, Claim]) -> dict[str, _ClaimQuery]:
        """Return what is known of the claims that name these devices. prepared: claims by device."""
        keys = {name: (name, now.device(self.resource, name).sequence) for name in devices}
        self.queries = {key: self.queries.get(key) or _ClaimQuery(self.waits()) for key in keys.values()}
        for name, key in keys.items():
            if (claim := prepared.get(name)) is not None:  # when it is unprepared, it is read first, and soon
                self.queries[key] = _ClaimQuery(self.waits(), claim.title if claim.name else "")
        return {name: self.queries[key] for name, key in keys.items()}

    async def read(self, queries: Mapping[str, _ClaimQuery], devices: Iterable[str]) -> bool:
        """Read the claims that are due; return whether it is time to list the claims.

        It is when no claim is known, or none any more, that names one of the devices that are due.
        """
        now = time.monotonic()
        due = {name: queries[name] for name in devices if queries[name].due <= now}
        for name, query in due.items():
            query.due = now + query.waits.next()  # also if the API server does not answer
            if query.claim and not await self.read_claim(query.claim, self.resource, name):
                query.claim = ""
        if all(query.claim for query in due.values()):
            return False
        unnamed = [queries[name] for name in devices if not queries[name].claim]
        again = min(max(query.due for query in unnamed), now + 30.0)
        for query in unnamed:
            query.due = again
        return True


class MovesToPlugin:
    """Ends moves of one resource's devices to the plugin side; `_ClaimQueries` says what they cost the API server."""

    def __init__(
        self,
        resource: str,
        async_ledger: AsyncLedger,
        list_claims: ListClaims,
        read_claim: ReadClaim,
        withdrawn: Withdrawn,
        waits: Callable[[], Backoff],
    ) -> None:
        self._resource = resource
        self._ledger = async_ledger
        self._list_claims = list_claims
        self._withdrawn = withdrawn
        self._queries = _ClaimQueries(resource, read_claim, waits)

    async def commit(self, waiting: dict[str, str]) -> tuple[str, ...]:
        """Commit the moves that can end; return their devices. waiting: what the others wait for is added."""
        before = self._ledger.snapshot
        devices = in_state(before, self._resource, State.TO_PLUGIN)
        claims = {name: one for one in before.claims.values() for of, name in one.held if of == self._resource}
        queries = self._queries.of(before, devices, claims)
        withdrawn = {}
        for name in devices:
            if name in claims:
                waiting[name] = HolderWait("its claim")
            elif (at := self._withdrawn(self._resource, name)) is None:
                waiting[name] = "the API server to accept the slice without it"
            else:
                withdrawn[name] = at
        lists = await self._queries.read(queries, withdrawn)
        for name in withdrawn:
            claim = queries[name].claim
            waiting[name] = HolderWait(f"claim {claim}") if claim else "a list of claims"
        if not lists:
            return ()
        at = time.monotonic()
        found = await self._list_claims()
        allocated = {device: claim for (resource, device), claim in found.items() if resource == self._resource}
        for name in withdrawn:
            queries[name].claim = allocated.get(name, "")
        evidence = ClusterEvidence(before.sequence, withdrawn, at, allocated)
        done = await self._ledger.do(operations.commit_to_plugin(self._resource, withdrawn, evidence, time.time()))
        waiting.update(done.waiting)
        return done.devices
