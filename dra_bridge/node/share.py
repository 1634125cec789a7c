"""Reads how many devices should be for DRA (the share): from the config or the annotation `<driver>/dra-share`."""

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
"""The section of the ledger file's settings with, for each driver, the last valid text of the Node's share
annotation."""

SHARE_NODE: Final = "share's node"
"""The section of the ledger file's settings with, for each driver, the UID of the Node that had the annotation in
`SHARE`."""

NO_DEVICES: Final = Share(0)


@dataclass(frozen=True, slots=True)
class HandoverPolicy:
    """The settings for DRA in a resource's config.

    unhealthy: the effect of the taint that unhealthy devices get in slices.
    """

    share: Share = NO_DEVICES
    drain: Drain = "cordon"
    unhealthy: str = "NoSchedule"

    def __post_init__(self) -> None:
        if self.drain not in get_args(Drain):
            raise ShareError(f"drain must be one of {', '.join(get_args(Drain))}, not {self.drain!r}")


def policies_of(config: Config) -> dict[str, HandoverPolicy]:
    """Return the DRA settings of each resource in a config."""
    return {
        resource.name: HandoverPolicy(parse_share(resource.dra.share), resource.dra.drain, resource.dra.unhealthy)
        for resource in config.resources
    }


@dataclass(slots=True, eq=False)
class DriverShare:
    """The share of one driver's devices that should be for claims, as the Node's annotation requests.

    The ledger file stores the last valid share. The stored share stays in effect if the requested share is invalid, or
    if the Node object was replaced by a Node without this annotation. So no devices move back if a Node is deleted and
    created again, for example by a repair. share: the requested share; None if the shares in the config apply. text:
    the Node's annotation, "" if there is none. kept: the share of the replaced Node, while this share is in effect.
    refused: the last invalid text that was logged. requested_on: the UID of the Node with the last request, even before
    the ledger has this UID. warned: the UID of the last Node for which the agent logged that the former share stays in
    effect. recording: the text that is being recorded in the ledger; None if no text is.
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
    recording: tuple[str | None] | None = None

    def of(self, policy: HandoverPolicy) -> Share:
        """Return the share that applies to a resource with this policy."""
        return self.share if self.share is not None else policy.share

    def read(self, annotations: Mapping[str, str] | None, node: str) -> bool:
        """Read the requested share from the Node's annotations. Return whether the share or its text changed.

        annotations: None while the Node has not been read. node: the UID of the Node.
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
            recorded = kept if self.recording is None else self.recording[0]
            if text != recorded or (annotations is not None and text is not None and requested_on != node):
                self.recording = (text,)
                self.tasks.start(self._record(self.recording, node))
        return before != (self.share, self.text, self.kept)

    async def _record(self, recording: tuple[str | None], node: str) -> None:
        (text,) = recording
        try:
            await self.ledger.do(operations.set_setting(SHARE_NODE, self.driver, node if text is not None else None))
            await self.ledger.do(operations.set_setting(SHARE, self.driver, text))
        except LedgerError as error:
            _LOG.warning(
                "the share %s cannot be recorded for the next start: %s", text, error, extra={"driver": self.driver}
            )
        finally:
            if self.recording is recording:
                self.recording = None
