"""The ledger between the plugin door and the kubelet's books.

As the endpoint's doorkeeper it says what the plugin side offers (R3) and records what it gives
out before the answer leaves (R1); as an observer of the kubelet's books it releases what is over
(R7) and notices what contradicts the ledger.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Final, cast

import grpc

from deviceplugin import ledger
from deviceplugin.agent import Look
from deviceplugin.endpoint import Refusal
from deviceplugin.ledger import Desk, Held, KubeletSnapshot, LedgerError
from deviceplugin.podresources import Holder

__all__ = ["Keeper", "held_units", "unsure_of"]

_LOG: Final = logging.getLogger(__name__)


Behind = Callable[[str], str]
"""What tells the device behind an id of the kubelet's (`Endpoint.behind`), also one from before sharing was changed."""


def held_units(
    held: Mapping[str, Iterable[Holder]], behind: Behind, unsure: Collection[str] = frozenset()
) -> dict[str, Held]:
    """Return who holds what as the ledger wants it: by the kubelet's id, one pod each.

    unsure: ids that an old checkpoint says are held; those that nothing else says so of are not sure.
    """
    units = {}
    for unit, holders in held.items():
        first = max(holders)  # one with a name, if there is any
        pod = f"{first.namespace}/{first.pod}" if first.pod else first.uid
        units[unit] = Held(behind(unit), pod, sure=bool(first.pod) or unit not in unsure)
    return units


def unsure_of(seen: Look, resource: str) -> frozenset[str]:
    """Return the ids of a resource of which a look is not sure that they are held."""
    return frozenset(name for of, name in seen.unsure if of == resource)


class Keeper:
    """Asks the ledger for the plugin door.

    Args:
        desk: the ledger's face.
        behind: what tells the device behind an id of the kubelet's, by resource; the resources that
            the ledger decides about. Others are offered and granted freely.
        changed: called after something was released, found or quarantined.
        quarantined: called with (resource, device) after a device was quarantined.

    Attributes:
        heard: (resource, device) of those about which this process has heard the evidence (R8).
            No other is offered or given out: the ledger may have lost what came last.
        steer: which devices of a resource new pods had better not get (drain: wait).

    """

    def __init__(
        self,
        desk: Desk,
        behind: Mapping[str, Behind],
        changed: Callable[[], None] = lambda: None,
        quarantined: Callable[[str, str], None] = lambda resource, device: None,
    ) -> None:
        self._desk = desk
        self.behind = behind
        self.changed = changed
        self.quarantined = quarantined
        self.heard: set[tuple[str, str]] = set()
        self.steer: Callable[[str], Collection[str]] = lambda resource: ()

    # The doorkeeper.

    def offers(self, resource: str, device: str) -> bool:
        """Return whether the plugin side shows this device healthy (R3); not before its evidence was heard."""
        if resource not in self.behind:
            return True
        if (resource, device) not in self.heard:
            return False
        record = self._desk.snapshot.devices.get((resource, device))
        return record is not None and record.state.healthy

    async def grant(self, resource: str, names: Sequence[str], devices: Sequence[str]) -> None:
        """Record that these ids are given out (R1).

        Raises:
            Refusal: a device is not on the plugin side, nothing is known of it yet, or the ledger
                cannot be written.

        """
        if resource not in self.behind:
            return
        if unheard := [device for device in devices if (resource, device) not in self.heard]:
            details = f"{resource}: who holds {', '.join(unheard)} is not known yet; the agent has just started"
            raise Refusal(grpc.StatusCode.UNAVAILABLE, "starting", details)
        units = {name: self.behind[resource](name) for name in names}
        try:
            answer = await self._desk.do(ledger.grant(resource, units, time.time()))
        except LedgerError as error:
            raise Refusal(
                grpc.StatusCode.UNAVAILABLE, "ledger", f"{resource}: the ledger cannot be written: {error}"
            ) from error
        if isinstance(answer, ledger.Refused):
            raise Refusal(grpc.StatusCode.FAILED_PRECONDITION, "side", answer.message)

    def avoids(self, resource: str) -> Collection[str]:
        """Return the devices that new pods had better not get."""
        return self.steer(resource)

    # The observer.

    def wants_books(self) -> bool:
        """Return whether anything is given out."""
        return bool(self._desk.snapshot.holds)

    def before_look(self) -> object:
        """Remember where the ledger stood."""
        return self._desk.snapshot.sequence

    async def after_look(self, before: object, seen: Look) -> None:
        """Release what the kubelet shows no more, take in what it shows and the ledger does not know."""
        news = False
        for resource, behind in tuple(self.behind.items()):  # a reload may drop one meanwhile
            units = held_units(seen.holdings.of(resource), behind, unsure_of(seen, resource))
            snapshot = KubeletSnapshot(cast("int", before), seen.at, quiet=True, held=units)
            try:
                found = await self._desk.do(ledger.observe(resource, snapshot, time.time()))
            except LedgerError as error:
                _LOG.warning("%s: the ledger cannot be written: %s", resource, error)
                continue
            for unit in found.found:
                _LOG.info("%s: pod %s holds %s, which the ledger did not know", resource, units[unit].pod, unit)
            for device in found.quarantined:
                self.quarantined(resource, device)
            news = news or bool(found.released or found.found or found.quarantined)
        if news:
            self.changed()
