"""The share of devices that claims get, by the config file or the Node's annotation `<driver>/dra-share`."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, get_args

from deviceplugin.config import Config
from deviceplugin.register import operations
from deviceplugin.register.records import LedgerError
from dra_bridge.driver.tasks import Tasks
from dra_bridge.handover.share import Drain, Share, ShareError, parse_share
from dra_bridge.ledger.worker import AsyncLedger
from dra_bridge.rollout import progress

_LOG: Final = logging.getLogger(__name__)

SHARE: Final = "share"
"""The section of the ledger's settings that has the last valid share of the Node's annotation, by driver."""

NONE: Final = Share(0)


@dataclass(frozen=True, slots=True)
class HandoverPolicy:
    """How the config divides a resource's devices. unhealthy: the effect of the taint on broken devices."""

    share: Share = NONE
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
    """The share that the Node asks of one driver. The ledger keeps the last valid one, for use beside an invalid one.

    share: None if the config's shares apply. text: the annotation, "" if there is none. refused: the text that is not a
    share and was logged.
    """

    driver: str
    ledger: AsyncLedger
    tasks: Tasks
    share: Share | None = None
    text: str = ""
    refused: str | None = None

    def of(self, policy: HandoverPolicy) -> Share:
        """Return the share of a resource with this policy."""
        return self.share if self.share is not None else policy.share

    def read(self, annotations: Mapping[str, str] | None) -> bool:
        """Take the share from the Node's annotations; return whether anything changed."""
        before = self.share, self.text
        key = progress.share_annotation(self.driver)
        kept = self.ledger.snapshot.setting(SHARE, self.driver)
        text = kept if annotations is None else annotations.get(key)
        self.text = text or ""
        try:
            self.share = parse_share(text) if text is not None else None
        except ShareError as error:
            self.share = parse_share(kept) if kept is not None else None
            if text != self.refused:
                stays = f"the share {kept} from before" if kept is not None else "the configuration's share"
                _LOG.error("annotation %s of the node: %s; %s stays", key, error, stays)
            self.refused = text
        else:
            self.refused = None
            if text != kept:
                self.tasks.start(self._keep(text))
        return before != (self.share, self.text)

    async def _keep(self, text: str | None) -> None:
        try:
            await self.ledger.do(operations.set_setting(SHARE, self.driver, text))
        except LedgerError as error:
            _LOG.warning("%s: the share %s cannot be recorded for the next start: %s", self.driver, text, error)
