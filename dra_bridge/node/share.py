"""The share of devices that claims get, by the config file or the Node's annotation `<driver>/dra-share`."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, get_args

from deviceplugin.config import Config
from deviceplugin.register import operations
from deviceplugin.register.records import LedgerError
from deviceplugin.tasks import Tasks
from dra_bridge.handover.share import Drain, Share, ShareError, parse_requested, parse_share
from dra_bridge.ledger.worker import AsyncLedger
from dra_bridge.rollout import progress

_LOG: Final = logging.getLogger(__name__)

SHARE: Final = "share"
"""The section of the ledger's settings that has the last valid share of the Node's annotation, by driver."""

SHARE_NODE: Final = "share's node"
"""The section that has the UID of the Node which that share is of, by driver."""

NO_DEVICES: Final = Share(0)


@dataclass(frozen=True, slots=True)
class HandoverPolicy:
    """How the config divides a resource's devices. unhealthy: the effect of the taint on broken devices."""

    share: Share = NO_DEVICES
    drain: Drain = "cordon"
    unhealthy: str = "NoSchedule"

    def __post_init__(self) -> None:
        if self.drain not in get_args(Drain):
            raise ShareError(f"drain must be one of {', '.join(get_args(Drain))}, not {self.drain!r}")


def policies_of(config: Config) -> dict[str, HandoverPolicy]:
    """Return the policies of a config file's resources."""
    return {
        resource.name: HandoverPolicy(parse_share(resource.dra.share), resource.dra.drain, resource.dra.unhealthy)
        for resource in config.resources
    }


@dataclass(slots=True, eq=False)
class DriverShare:
    """The share that the Node requests of one driver. The ledger keeps the last valid one.

    It stays beside an invalid one, and where another Node comes without any: a Node object that is deleted and
    recreated (by repair, say) undoes no migration. share: None if the config's shares apply. text: the annotation,
    "" if there is none. kept: the share of the Node before, while it stays for that reason. refused: the text that is
    not a share and was logged. requested_on: the UID of the Node that had the last request, also before the ledger has
    it. warned: the UID of the Node for which it was logged that the share stays.
    """

    driver: str
    ledger: AsyncLedger
    tasks: Tasks
    share: Share | None = None
    text: str = ""
    kept: str = ""
    refused: str | None = None
    requested_on: str | None = None
    warned: str = ""

    def of(self, policy: HandoverPolicy) -> Share:
        """Return the share of a resource with this policy."""
        return self.share if self.share is not None else policy.share

    def read(self, annotations: Mapping[str, str] | None, node: str) -> bool:
        """Take the share from the Node's annotations; return whether anything changed.

        annotations: None while they are not known. node: the UID of the Node that has them.
        """
        before = self.share, self.text, self.kept
        key = progress.share_annotation(self.driver)
        kept = self.ledger.snapshot.setting(SHARE, self.driver)
        requested_on = self.requested_on or self.ledger.snapshot.setting(SHARE_NODE, self.driver)
        text = kept if annotations is None else annotations.get(key)
        self.text, self.kept = text or "", ""
        if text is None and kept is not None and requested_on not in (None, node):
            self.share, self.kept = parse_requested(kept), kept
            if self.warned != node:
                stays = "the Node was recreated without the annotation %s; the previous share %s stays in effect"
                _LOG.warning(stays, key, kept, extra={"driver": self.driver})
            self.warned = node
            return before != (self.share, self.text, self.kept)
        try:
            self.share = parse_requested(text) if text is not None else None
        except ShareError as error:
            self.share = parse_requested(kept) if kept is not None else None
            if text != self.refused:
                stays = f"the previous share {kept}" if kept is not None else "the share of the config"
                _LOG.error("annotation %s of the node: %s; %s stays in effect", key, error, stays)
            self.refused = text
        else:
            self.refused = None
            if annotations is not None and text is not None:
                self.requested_on = node
            if text != kept or (annotations is not None and text is not None and requested_on != node):
                self.tasks.start(self._keep(text, node))
        return before != (self.share, self.text, self.kept)

    async def _keep(self, text: str | None, node: str) -> None:
        try:
            await self.ledger.do(operations.set_setting(SHARE_NODE, self.driver, node if text is not None else None))
            await self.ledger.do(operations.set_setting(SHARE, self.driver, text))
        except LedgerError as error:
            _LOG.warning(
                "the share %s cannot be recorded for the next start: %s", text, error, extra={"driver": self.driver}
            )
