"""Decides what the device plugin may give out; a ledger does so where devices are served to claims too."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Literal, Protocol

import grpc

from deviceplugin.exclusion import Key
from deviceplugin.identity import Tokens

Side = Literal["plugin", "dra", ""]
"""Where a device is: on neither side if it is quarantined."""


class Refusal(Exception):  # noqa: N818  # the field's word; it is an answer, not a fault
    """Raised when a call is refused; carries the gRPC code that the kubelet gets."""

    def __init__(self, code: grpc.StatusCode, reason: str, details: str) -> None:
        super().__init__(details)
        self.code = code
        self.reason = reason
        self.details = details


class AllocationGate(Protocol):
    """Decides which devices the plugin side may offer and allocate. The bodies are the answers without a ledger."""

    def offers(self, resource: str, device: str) -> bool:
        """Return whether the plugin side offers this device."""
        return True

    def avoids(self, resource: str) -> Collection[str]:
        """Return the devices that new pods had better not get, if there are enough others."""
        return ()

    def claimed(self, resource: str, device: str) -> bool:
        """Return whether a claim holds the device, or may."""
        return False

    def withheld(self, resource: str) -> Mapping[str, str]:
        """Return the devices that are offered to nobody for now, and why."""
        return {}

    def held(self) -> Mapping[Key, Tokens]:
        """Return the devices that a ledger counts as held, also unlisted ones, and what they were when granted."""
        return {}

    def side(self, resource: str, device: str) -> Side:
        """Return on which side the device is."""
        return "plugin"

    async def grant(self, resource: str, names: Sequence[str], devices: Sequence[str]) -> None:
        """Record that these ids (of these devices) are given out; raise Refusal if they may not be."""


class AllowAll(AllocationGate):
    """An allocation gate for a node with the plugin side alone: everything is offered and granted."""

    async def grant(self, resource: str, names: Sequence[str], devices: Sequence[str]) -> None:
        """Grant everything."""
