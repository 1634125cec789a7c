"""Withholds devices from pods that claims hold through drivers which this process does not serve.

There are such claims after `dra-bridge run` was replaced by `deviceplugin run`, and after a resource's driver was
renamed or taken out of the configuration. The kubelet's claim state names them, even if the bridge's ledger is lost.
It has the names that the driver published, which are made of device ids, and CDI devices, whose files tell the device
nodes; so a device under another name is withheld, too.
"""

from __future__ import annotations

import json
import logging
import math
import os
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from deviceplugin import cdi
from deviceplugin.exclusion import Key
from deviceplugin.files import FileIdentity, file_identity
from deviceplugin.identity import Kind, Tokens, node_token, numbers_of
from deviceplugin.kubelet import claim_state
from deviceplugin.kubelet.claim_state import ClaimStateError, ClaimStateMissingError, PreparedClaim
from deviceplugin.register.question import Use

_LOG: Final = logging.getLogger(__name__)

FRESH: Final = 0.005
"""Seconds for which the claim state counts as unchanged: a list asks of each device, and a look is a system call."""

_KINDS: Final[Mapping[str, Kind]] = {"c": "char", "u": "char", "b": "block"}  # by the type in a CDI file


def orphaned(claims: Iterable[PreparedClaim], served: Collection[str] = ()) -> dict[str, str]:
    """Return what claims of drivers other than `served` hold: the holder in words by published device name."""
    return {
        name: f"claim {claim.title} through driver {driver}, which is not served here"
        for claim in claims
        for driver, devices in sorted(claim.devices.items())
        if driver not in served
        for name in sorted({name for _, name, _ in devices} - only_seen(claim, driver))
    }


def only_seen(claim: PreparedClaim, driver: str) -> frozenset[str]:
    """Return the names of a driver's devices that a claim has administrative access to and does not hold.

    The bridge's CDI ids tell: `<driver>/claim=admin_<claim UID>_<request>_<device>...` (dra_bridge.driver). A device
    that is also in another request of the claim is held.
    """
    prefix = cdi.qualified(driver, f"admin_{claim.uid}_")
    ids = (name.removeprefix(prefix).split("_") for name in claim.cdi_ids if name.startswith(prefix))
    seen = {(request, device) for request, *devices in ids for device in devices}
    held = {device for of, request, device in claim.requests if of == driver and (request, device) not in seen}
    return frozenset(device for _, device in seen if device not in held)


def nodes_of(claim: PreparedClaim, served: Collection[str], directory: str = cdi.DIRECTORY) -> Tokens:
    """Return which device nodes a claim's containers got through drivers other than `served`. Reads CDI files.

    A CDI file of a claim is named after its kind and the claim's UID (the convention of the CDI library). The numbers
    in it are those that the containers got; where there are none, the node is as good as its number now.
    """
    mine = tuple(cdi.qualified(driver, "") for driver in served)
    seen = tuple(cdi.qualified(driver, f"admin_{claim.uid}_") for driver in claim.devices)
    found: set[str] = set()
    for kind, _, name in (one.partition("=") for one in claim.cdi_ids if not one.startswith((*mine, *seen))):
        try:
            with open(os.path.join(directory, f"{kind.replace('/', '-')}_{claim.uid}.json"), "rb") as file:
                listed = json.load(file)["devices"]
            for device in listed:
                if device["name"] == name:
                    for node in device["containerEdits"].get("deviceNodes") or ():
                        found |= _numbers(node)
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            continue  # only the published names tell what it holds
    return frozenset(found)


def _numbers(node: Mapping[str, Any]) -> Tokens:
    kind = _KINDS.get(node.get("type", ""))
    if kind is not None and node.get("major"):
        return frozenset({node_token(kind, int(node["major"]), int(node.get("minor", 0)))} - {""})
    return numbers_of([node.get("hostPath") or node["path"]])


@dataclass(eq=False)
class OrphanedClaims:
    """The claims of drivers other than `served()`, by the kubelet's claim state. fresh: see `FRESH`."""

    kubelet_root: Path
    served: Callable[[], Collection[str]] = tuple
    cdi_directory: str = cdi.DIRECTORY
    fresh: float = FRESH
    _looked_at: float = field(default=-math.inf, init=False)
    _file: FileIdentity | None = field(default=None, init=False)
    _claims: tuple[PreparedClaim, ...] | ClaimStateError = field(default=(), init=False)
    _version: tuple[object, frozenset[str]] = field(default=(None, frozenset()), init=False)
    """The claims and the served drivers from which the two below were made."""
    _names: dict[str, str] = field(default_factory=dict, init=False)
    _nodes: dict[Key, Tokens] = field(default_factory=dict, init=False)
    _uses: tuple[object, tuple[Use, ...]] = field(default=(None, ()), init=False)

    def problem(self, driver: str | None = "") -> str:
        """Return why it is not known what such claims hold; "" if it is. driver: the one that the config names."""
        claims, plugins = self._current(), self.kubelet_root / "plugins"
        if not isinstance(claims, ClaimStateError):
            return ""
        # A kubelet without Dynamic Resource Allocation has none; then no driver ever had a directory there.
        may_hold = not isinstance(claims, ClaimStateMissingError) or (
            driver and (not os.path.isdir(plugins) or os.path.isdir(plugins / driver))
        )
        return f"it is not known whether a claim holds it: {claims}" if may_hold else ""

    def uses(self) -> tuple[Use, ...]:
        """Return what such claims hold; the same object until it changes."""
        held = self.held()
        if self._uses[0] is not held:
            uses = tuple(Use(("foreign", *key), " ".join(key), None, tokens, None) for key, tokens in held.items())
            self._uses = held, uses
        return self._uses[1]

    def reread(self) -> None:
        """Look at the file again at the next question, for an answer that must not be older than the question."""
        self._looked_at = -math.inf

    def held(self) -> Mapping[Key, Tokens]:
        """Return which device nodes such claims hold, by the driver and the claim in words; the same until it changes.

        While the claim state cannot be read, the former answer stays.
        """
        self._current()
        return self._nodes

    def _current(self) -> tuple[PreparedClaim, ...] | ClaimStateError:
        """Return the claims, or why they cannot be read; read the file if it has changed."""
        now = time.monotonic()
        if now - self._looked_at >= self.fresh:
            self._looked_at = now
            file = file_identity(self.kubelet_root / claim_state.FILE_NAME)
            if file is None or self._file != file:
                self._file = file
                try:
                    self._claims = claim_state.read(self.kubelet_root)
                except ClaimStateError as error:
                    self._claims = error
        claims, served = self._claims, frozenset(self.served())
        if isinstance(claims, ClaimStateError) or (self._version[0] is claims and self._version[1] == served):
            return claims
        nodes: dict[Key, Tokens] = {}
        for claim in claims:
            others = claim.devices.keys() - served
            if others and (tokens := nodes_of(claim, served, self.cdi_directory)):
                key = ", ".join(sorted(others)), f"claim {claim.title}"
                nodes[key] = nodes.get(key, frozenset()) | tokens
        if nodes != self._nodes:
            self._nodes = nodes
        self._names, self._version = orphaned(claims, served), (claims, served)
        return claims
