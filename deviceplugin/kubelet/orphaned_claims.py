"""Finds claims of DRA drivers that this process does not run, so that no pod gets the devices of these claims.

Such claims remain after `dra-bridge run` was replaced by `deviceplugin run`, and after a resource's driver was renamed
or removed from the configuration. For each of these claims, a file of an earlier agent
(`deviceplugin.register.claim_files`) names the claim's devices. Claims of vendors' drivers are found as well. The
devices of a claim of a vendor's driver are known only by the device nodes in CDI specs, because the vendor's driver has
other names for devices. While no spec has a claim's CDI device, for example because the vendor's driver has not started
again after a reboot, the claim may hold any device.
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple

from deviceplugin import cdi
from deviceplugin.cdi_specs import directories, nodes_by_name
from deviceplugin.files import FileIdentity, file_identity
from deviceplugin.identity import Tokens, boot_id
from deviceplugin.kubelet import claim_state
from deviceplugin.kubelet.cgroups import PodReader
from deviceplugin.kubelet.claim_state import ClaimStateError, ClaimStateMissingError, PreparedClaim
from deviceplugin.kubelet.holders import EvidenceSource
from deviceplugin.register import claim_files
from deviceplugin.register.claim_files import ClaimFile
from deviceplugin.register.question import Use, claim_unit, part_of, takes_recorded

ENDING: Final = 1.0
"""Seconds between two checks whether pods still run, if the kubelet's claim state no longer names their claims."""

_UNKNOWN: Final = "it is not known whether a claim holds it"


def _is_ours(claim: PreparedClaim, driver: str) -> bool:
    """Return whether a claim's CDI ids show that an agent of this project prepared this driver's devices for the claim.

    The result is False for a claim whose containers get no edits, because such a claim has no CDI ids.
    """
    kinds = {f"{vendor}/{cdi.CLASS}" for vendor in (driver, f"dra.{driver}")}
    names = (cdi_id.partition("=") for cdi_id in claim.cdi_ids.get(driver, ()))
    return any(kind in kinds and name.startswith(f"{cdi.HOLDING}_{claim.uid}_") for kind, _, name in names)


def _through(title: str, *drivers: str) -> str:
    return f"claim {title} through driver {', '.join(drivers)}, which is not served here"


class _Held(NamedTuple):
    """The devices that claims of drivers outside this process hold, as far as known.

    unknown: why unknown claims may hold devices (files cannot be read); "" if the claims are known. lost: why a known
    claim may hold any device (its file or CDI spec is missing or damaged); "" if there is no such claim. drivers: for
    each driver with a claim whose devices are unknown, the reason. sources: the kinds of evidence whose failure makes
    holders unknown.
    """

    uses: tuple[Use, ...] = ()
    unknown: str = ""
    lost: str = ""
    drivers: Mapping[str, str] = {}
    sources: frozenset[EvidenceSource] = frozenset()


@dataclass(eq=False)
class OrphanedClaims:
    """The claims of drivers that this process does not run, from claim files and the kubelet's claim state.

    A claim with a claim file holds the file's devices while the claim state names the claim, while the claim state
    cannot be read, or while processes of the claim's pods may run. Only `refresh` reads files; the other methods return
    results of the last `refresh`. boot: the id of the node's boot.
    """

    kubelet_root: Path
    served: Collection[str]
    cdi_directory: str
    pods: PodReader
    boot: str = field(default_factory=boot_id)
    _state: FileIdentity | None = field(default=None, init=False)
    _directory: FileIdentity | None = field(default=None, init=False)
    _read_for: frozenset[str] = field(default=frozenset(), init=False)
    """The drivers of this process at the last read of claim files, which left out the claims of these drivers."""
    _claims: tuple[PreparedClaim, ...] = field(default=(), init=False)
    _problem: ClaimStateError | None = field(default=None, init=False)
    _files: tuple[ClaimFile, ...] | OSError = field(default=(), init=False)
    _remembered: dict[tuple[str, str], ClaimFile] = field(default_factory=dict, init=False)
    """For each (driver, claim UID) in the claim state: the last content of the claim's file."""
    _nodes: Mapping[str, Tokens] = field(default_factory=dict, init=False)
    """For each CDI device of these claims that a spec has, or had: the tokens of its nodes, as long as a claim has it.
    A container keeps the nodes when the spec is removed or changed."""
    _made_from: object = field(default=None, init=False)
    _made_at: float = field(default=-math.inf, init=False)
    _unnamed: bool = field(default=False, init=False)
    """Whether an agent's claim file exists for a claim that the kubelet's claim state does not name."""
    _held: _Held = field(default=_Held(unknown=f"{_UNKNOWN}: the claims' files have not been read yet"), init=False)
    _own: str = field(default="", init=False)

    def __post_init__(self) -> None:
        self._own = cdi.own_directory(self.cdi_directory)

    def problem(self, driver: str | None = None) -> str:
        """Return why it is unknown which devices of a resource claims of other drivers hold; "" if it is known.

        driver: the driver that the resource's configuration names.
        """
        held = self._held
        return held.unknown or held.lost or held.drivers.get(driver or "", "")

    def lost(self) -> str:
        """Return why a claim of a driver that this process does not run may hold any device; "" if no claim may.

        The claim state has such a claim, and its file (of an agent of this project) or CDI spec is missing or damaged.
        """
        return self._held.lost

    def unknown(self) -> frozenset[EvidenceSource]:
        """Return the kinds of evidence whose failure makes it unknown which devices claims of other drivers hold."""
        return self._held.sources

    def uses(self) -> tuple[Use, ...]:
        """Return the uses of devices by claims of other drivers.

        The returned object stays the same until a use changes. While the kubelet's claim state cannot be read, the
        result has the uses by the claims in the last readable claim state.
        """
        return self._held.uses

    def refresh(self, served: frozenset[str]) -> None:
        """Read the kubelet's claim state and the claim files again, if they have changed. Blocks.

        served: the drivers of this process, whose claims are left out. If the file system hangs, the known uses stay
        valid, because no agent can write claim files to a hanging file system.
        """
        now = time.monotonic()
        state, directory = file_identity(self.kubelet_root / claim_state.FILE_NAME), file_identity(self._own)
        if state is None or self._state != state:
            self._read_state(state)
        if directory is None or self._directory != directory or self._read_for != served:
            self._read_files(directory, served)
        # `foreign` has each claim with devices of a driver that this process does not run.
        foreign = [claim for claim in self._claims if not served.issuperset(claim.devices)]
        self._nodes = self._nodes_of(foreign) if foreign else {}
        made_from = foreign, self._problem, self._files, served, self._nodes
        if made_from != self._made_from or (self._unnamed and now - self._made_at >= ENDING):
            held = self._decide(self._counted(foreign, served), foreign, served)
            self._held = held._replace(uses=self._held.uses) if held.uses == self._held.uses else held
            self._made_from, self._made_at = made_from, now

    def _read_state(self, file: FileIdentity | None) -> None:
        self._state = file
        try:
            self._claims, self._problem = claim_state.read(self.kubelet_root), None
        except ClaimStateError as error:
            self._problem = error

    def _read_files(self, directory: FileIdentity | None, served: frozenset[str]) -> None:
        self._read_for = served
        self._directory = directory if directory is not None and directory.settled else None
        try:
            self._files = claim_files.read_all(self._own, served)
        except OSError as error:
            self._files = error

    def _nodes_of(self, claims: Iterable[PreparedClaim]) -> dict[str, Tokens]:
        """Read the CDI specs; return for each CDI device of these claims the tokens of its nodes (see `_nodes`)."""
        names = frozenset[str]().union(*(of for claim in claims for of in claim.cdi_ids.values()))
        found, former = nodes_by_name(names, directories(self.cdi_directory)), self._nodes
        known = names & (former.keys() | found.keys())
        return {name: former.get(name, frozenset()) | found.get(name, frozenset()) for name in known}

    def _counted(self, claims: Sequence[PreparedClaim], served: Collection[str]) -> list[ClaimFile]:
        """Return the claim files whose devices may still be held.

        claims: the claims in the claim state with devices of drivers that this process does not serve. served: this
        process's drivers.
        """
        files = () if isinstance(self._files, OSError) else self._files
        current = {(file.driver, file.uid): file for file in files}
        named = {(driver, claim.uid) for claim in claims for driver in claim.devices}
        # When a claim is unprepared, its file is removed before the kubelet drops the claim from its claim state. Until
        # then the last content of the file counts.
        self._remembered = {key: file for key, file in (self._remembered | current).items() if key in named}
        foreign = [file for key, file in (self._remembered | current).items() if key[0] not in served]
        unnamed = [file for file in foreign if (file.driver, file.uid) not in named]
        self._unnamed = bool(unnamed)
        if not unnamed or self._problem is not None:
            return foreign
        processes = self.pods.read()

        def over(file: ClaimFile) -> bool:
            runs = not file.pods or any(map(processes.may_run, file.pods))
            return file.devices is not None and not (file.boot == self.boot and runs)

        return [file for file in foreign if file not in unnamed or not over(file)]

    def _decide(self, files: Sequence[ClaimFile], claims: Sequence[PreparedClaim], served: Collection[str]) -> _Held:
        uses: list[Use] = []
        drivers: dict[str, str] = {}
        problems: list[object] = [self._files] if isinstance(self._files, OSError) else []
        sources = {EvidenceSource.CLAIM_FILES} if problems else set()
        if self._problem is not None and not isinstance(self._problem, ClaimStateMissingError):
            problems.append(self._problem)
            sources.add(EvidenceSource.CLAIM_STATE)
        lost: list[str] = []
        for file in files:
            who = _through(file.title, file.driver)
            if file.devices is None:
                lost.append(f"the file of {who}, cannot be read")
            for device in file.devices or ():
                if not device.admin:
                    key, part = (device.resource, device.device), part_of(device.amount)
                    unit, takes = claim_unit(file.driver, file.uid), takes_recorded(device.amount, file.driver)
                    now = device.identity.valid_in(self.boot)
                    uses.append(Use(unit, who, key, now.tokens, part, takes, within=now.within))
        for claim in claims:
            filed = {file.driver for file in files if file.uid == claim.uid and file.devices is not None}
            others = claim.devices.keys() - served - filed
            names = frozenset[str]().union(*(claim.cdi_ids.get(driver, ()) for driver in others))
            if tokens := frozenset[str]().union(*(self._nodes.get(name, ()) for name in names)):
                uses.append(Use(("foreign", claim.uid), _through(claim.title, *sorted(others)), None, tokens, None))
            for driver in sorted(others):
                who = _through(claim.title, driver)
                unnamed = sorted(claim.cdi_ids.get(driver, frozenset()) - self._nodes.keys())
                if _is_ours(claim, driver):
                    lost.append(f"there is no file of {who}, in {self._own}")
                elif unnamed:
                    places = " or ".join(directories(self.cdi_directory))
                    lost.append(f"no CDI spec in {places} has {unnamed[0]}, a device of {who}")
                if claim.devices[driver]:
                    drivers[driver] = f"it is not known what claim {claim.title} through driver {driver} holds"
        unknown, why = (f"{_UNKNOWN}: {those[0]}" if those else "" for those in (problems, lost))
        sources |= {EvidenceSource.CLAIM_FILES} if lost else set()
        return _Held(tuple(uses), unknown, why, drivers, frozenset(sources))
