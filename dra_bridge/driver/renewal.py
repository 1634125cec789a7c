"""Updates the CDI files of claims when device nodes of the claims' devices change.

A CDI file contains device numbers, and the runtime does not read the host path. So a restarted container gets nodes
with the numbers in the file. A USB stick that is unplugged and plugged in again has other numbers than before, and
another stick may get its former number.

A claim keeps the device nodes that it was prepared with. If the configuration gives a device other nodes, claims that
have the device do not get these. A node of the granted hardware that has another number now, or that comes with the
hardware, such as the node of a USB device in another port, is written into the file (`identity.belongs`).

A number that a claim's devices do not have any more is removed from the file at once (`Prepared.stale`). Containers
that were started before can still open the node with this number, until all of them have ended
(`deviceplugin.kubelet.containers.restarted`). A number of a node that another holder can open is not written into the
file. Until all nodes of a request's devices can be in the file, the file lacks the request's CDI devices
(`Prepared.withheld`), so that the runtime does not create the container, and the kubelet tries again (containerd 2.1
and CRI-O 1.34: "unresolvable CDI devices").

The register records each step before the file changes. After a crash, the next agent writes the file from the
register's record.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import logging
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import msgspec

from deviceplugin import cdi
from deviceplugin.adoption.source import AdoptedSource
from deviceplugin.backoff import Backoff
from deviceplugin.cdi_specs import token_of
from deviceplugin.device import Device
from deviceplugin.exclusion import DeviceKey
from deviceplugin.identity import (
    Identity,
    Tokens,
    agree,
    belongs,
    moved,
    reachable,
    shown,
    tokens_by_number,
    tokens_now,
)
from deviceplugin.looks import LookTimeoutError
from deviceplugin.register.identification import leave, renew
from deviceplugin.register.records import Claim, LedgerError
from deviceplugin.register.register import Register
from dra_bridge.driver import claim_files
from dra_bridge.driver.claim_devices import ServedDevices
from dra_bridge.driver.claim_files import CHECK, REST
from dra_bridge.driver.claims import ClaimError, ClaimRef, Prepared, prepared_of
from dra_bridge.driver.preparation import ClaimPreparation

_LOG: Final = logging.getLogger(__name__)

DEBOUNCE: Final = 0.05
"""Seconds from a change of the register to the next comparison of the inventories, because the start of a pod causes
several changes."""
SETTLED: Final = 1.0
"""Seconds after which a runtime has certainly read a changed CDI file, because a runtime watches the directory
(container-device-interface 1.0, cache.go: watch)."""


_Entry = Mapping[str, Any]
"""An entry of a device node in a CDI spec."""


@dataclass(slots=True)
class _DevicesNow:
    """The present state of the devices of one request.

    nodes: the CDI entries of the present nodes that belong to the granted hardware. own: for each device, its identity
    tokens (such as device numbers) that no other device has, without those of other hardware. former: tokens of the
    nodes that belonged to the devices until now. gone: those of `former` whose numbers now belong to other hardware or
    to none; their nodes are removed from the spec. known: the devices' tokens in the register. lost: device numbers in
    the register that are not in the spec, and that the devices do not have now. away: whether a device is unplugged or
    is other hardware now, or its nodes cannot be read or are newer than the inventory.
    """

    nodes: list[_Entry] = field(default_factory=list)
    own: dict[DeviceKey, Tokens] = field(default_factory=dict)
    former: Tokens = frozenset()
    gone: Tokens = frozenset()
    known: Tokens = frozenset()
    lost: Tokens = frozenset()
    away: bool = False

    @property
    def numbers(self) -> Tokens:
        """The tokens of those nodes that only these devices have."""
        return reachable(frozenset[str]().union(*self.own.values()))

    def given(self, before: Tokens, *, refused: bool) -> list[_Entry]:
        """Return the entries of device nodes for the CDI file.

        before: the tokens (device numbers) of the device nodes in the present CDI file. refused: whether the register
        refused to grant the claim new device numbers.
        """
        new = self.numbers - before if refused or self.away else frozenset()
        return [node for node in self.nodes if token_of(node) not in new]


class ClaimRenewal:
    """Renews the CDI files of one driver's claims. register: the register of devices' identities and holders."""

    def __init__(self, served: ServedDevices, preparation: ClaimPreparation, register: Register) -> None:
        self._served, self._preparation, self._register = served, preparation, register
        self._records, self._files = preparation.records, preparation.files
        self._waiting: set[str] = set()
        """The UIDs of claims that wait until no other holder can open a present node of their devices."""
        self._leaving: set[str] = set()
        """The UIDs of claims whose containers may still open nodes with numbers that are not in the CDI file any
        more."""
        self._since: dict[str, float] = {}
        """For each UID in `_leaving`, when the file was last written or `Prepared.starts` was read (monotonic
        seconds)."""

    async def keep(self) -> None:
        """Renew the CDI files of claims until cancelled.

        A change of an inventory renews the files of all claims. A change of the register renews the files of waiting
        claims (`_waiting`). A failed renewal is repeated after 1 to 60 s.
        """
        seen: object = None
        failed: set[str] = set()
        tried, look_at, retry_at = -1, 0.0, 0.0
        failing, looking = Backoff(first=1.0, most=60.0), Backoff(first=1.0, most=10.0)
        while True:
            changes = self._records.ledger.changes
            count, leaving = changes.count, set(self._leaving)
            inventories = [served.inventory for served in self._served.resources]
            now = tuple((id(inventory), inventory.snapshot.version) for inventory in inventories)
            claims = {claim.uid for claim in self._records.all()} if now != seen else set[str]()
            if now == seen and count != tried:
                claims |= self._waiting
            if failed and time.monotonic() >= retry_at:
                claims |= failed
            errors = {uid for uid in sorted(claims) if await self._try(uid)}
            failed = failed - claims | errors
            if errors:  # An error for one claim does not delay the others.
                retry_at = time.monotonic() + failing.next()
            elif not failed:
                failing.reset()
            if self._leaving - leaving:
                look_at = looking.tries = 0
            if self._leaving and time.monotonic() >= look_at:
                for uid in sorted(self._leaving):
                    await self._try(uid, left=True)
                look_at = time.monotonic() + looking.next()
            seen, tried = now, count
            if claims:
                await asyncio.sleep(CHECK)
            # This loop is not notified of a change of the served resources. So while the driver has claims, the loop
            # compares the served resources every `CHECK` seconds.
            await changes.after(count, CHECK if self._records.all() else REST)
            await asyncio.sleep(DEBOUNCE)

    async def _try(self, uid: str, *, left: bool = False) -> bool:
        """Call `renew` for a claim, or `look_left` if `left` is true; return whether this failed."""
        try:
            async with self._records.locked(uid):
                await (self.look_left(uid) if left else self.renew(uid))
        except (cdi.CdiError, ClaimError, LedgerError, LookTimeoutError, OSError) as error:
            extra = {"driver": self._records.driver, "claim": uid}
            _LOG.warning("the CDI file of claim %s cannot be renewed: %s", uid, error, extra=extra)
            return True
        return False

    def _recorded(self, uid: str) -> tuple[Claim, Prepared] | None:
        """Return a claim's record and Prepare response; None if there is no response of this boot, or no CDI spec."""
        claim = self._records.get(uid)
        prepared = prepared_of(claim) if claim is not None else None
        if claim is None or prepared is None or not prepared.spec or prepared.boot != self._files.boot:
            return None
        return claim, prepared

    async def renew(self, uid: str) -> bool:
        """Write the present device nodes into a claim's CDI file; return whether the file changed.

        The caller has the claim's lock. A number that, according to sysfs, belongs to another device or to none is
        removed. Raises CdiError, LedgerError, LookTimeoutError.
        """
        self._waiting.discard(uid)
        self._leaving.discard(uid)
        if (recorded := self._recorded(uid)) is None:
            return False
        claim, prepared = recorded
        if prepared.stale:
            self._leaving.add(uid)
        found, error = await self._found(claim, prepared)
        numbers = _numbers(prepared.spec)
        wanted = {
            request: of.own
            for request, of in found.items()
            if not of.away and (request in prepared.withheld or of.lost or not of.numbers <= numbers & of.known)
        }
        if wanted or answered(prepared, found, ()) != prepared:

            def result(refused: Collection[str]) -> str:
                after = answered(prepared, found, refused)
                return _encoded(after) if after != prepared else str(claim.result)

            view = dataclasses.replace(self._register.view(), boot=self._files.boot)
            renewed = await self._records.ledger.do(renew(claim, wanted, result, view))
            if renewed.refused:
                self._waiting.add(uid)
            if renewed.claim is not None:
                await self._changed(prepared, renewed.claim, renewed.refused)
                return True
        if error is not None:
            raise error
        return False

    async def _changed(self, before: Prepared, claim: Claim, refused: Mapping[str, str]) -> None:
        """Write the files of a claim whose Prepare response has changed."""
        after = prepared_of(claim)
        assert after is not None
        await self._files.write(claim, after)
        if after.stale:
            self._leaving.add(claim.uid)
            self._since.pop(claim.uid, None)
        extra = {"driver": claim.driver, "claim": claim.title}
        _LOG.info("claim %s: the nodes of its devices have changed; its CDI file is renewed", claim.title, extra=extra)
        if after.withheld - before.withheld:
            why = next(iter(refused.values()), "a device is away, or another one has its number")
            text = "claim %s: its containers do not start before they can get all of their devices: %s"
            _LOG.warning(text, claim.title, why, extra=extra)
            self._preparation.events.refused(ClaimRef(claim.namespace, claim.name, claim.uid), why, why)
        self._register.notify()

    async def _found(self, claim: Claim, prepared: Prepared) -> tuple[dict[str, _DevicesNow], cdi.CdiError | None]:
        """Return, for each request, the present state of its devices; and an error if nodes could not be read."""
        boot, by_name, numbers = self._files.boot, self._served.by_name, _numbers(prepared.spec)
        found: dict[str, _DevicesNow] = {}
        keys = {(device.resource, device.device) for device in claim.devices}
        followed: set[DeviceKey] = set()
        error: cdi.CdiError | None = None
        for answer in prepared.devices:
            served, device = by_name.get(answer.device, (None, None))
            if served is None or device is None:
                continue
            now, key = served.inventory.snapshot, (served.inventory.snapshot.resource, device.id)
            if key not in keys or isinstance(served.source, AdoptedSource):
                followed.add(key)
                continue
            of, granted = found.setdefault(answer.request, _DevicesNow()), _granted(claim, key, boot)
            listed = now.identities.get(device.id, frozenset())
            if device.id in now.gone or not agree(listed, granted.tokens):
                of.away = True
                continue
            try:
                nodes, tokens = await served.inventory.looks.at("renew", _looked_at, device, brief=True)
            except cdi.CdiError as failure:
                error, of.away = failure, True
                continue
            if not (agree(tokens, listed) and reachable(listed) <= tokens):
                # The source's list of devices is older than the nodes, so the claim waits for the next list.
                self._waiting.add(claim.uid)
                of.away = True
                continue
            before = _entries(prepared.spec).get(answer.request, ())
            named = device.identity in granted.tokens - reachable(granted.tokens)
            own, other = _of_granted(nodes, granted.tokens, before, named=named)
            its = frozenset[str]().union(*(node.tokens for node in own))
            of.nodes += [node.entry for node in own if not _renamed(node.entry, before)]
            of.own[key] = listed.difference(*(node.tokens - its for node in other))
            had = reachable(granted.tokens) | granted.reached
            if missing := had & numbers - its:
                of.gone |= missing if named else await self._moved(missing, granted)
            if lost := had - granted.left - numbers - prepared.stale:
                of.lost |= await self._moved(lost, granted)
            of.former |= had
            of.known |= had - granted.left
            followed.add(key)
        for key in keys - followed:
            granted = _granted(claim, key, boot)
            if had := (reachable(granted.tokens) | granted.reached) & numbers:
                stale = await self._moved(had, granted)
                for request in _requests(prepared.spec, stale):
                    of = found.setdefault(request, _DevicesNow(away=True))
                    of.former |= stale
                    of.gone |= stale
        return found, error

    async def _moved(self, numbers: Tokens, granted: Identity) -> Tokens:
        """Return those of `numbers` that, as sysfs shows, no longer belong to the granted hardware."""
        return await self._files.reading.at("renew", moved, numbers, granted.tokens, brief=True)

    async def look_left(self, uid: str) -> bool:
        """Record that a claim's stale device numbers are unused, if all containers that could open them have ended.

        Returns whether this was recorded. The caller has the claim's lock. Raises CdiError, ClaimError, LedgerError,
        LookTimeoutError, OSError.
        """
        if (recorded := self._recorded(uid)) is None or not recorded[1].stale:
            self._leaving.discard(uid)
            return False
        claim, prepared = recorded
        now = time.monotonic()
        if (prepared.starts is None and await self._files.write(claim, prepared)) or uid not in self._since:
            self._since[uid] = now
        if prepared.starts is None and now - self._since[uid] < SETTLED:
            return False
        users = frozenset().union(*await self._preparation.users(ClaimRef(claim.namespace, claim.name, uid)))
        if (recorded := self._recorded(uid)) is None or not recorded[0].pods:
            return False
        claim = recorded[0]
        if prepared.starts is None:
            after = msgspec.structs.replace(prepared, starts=await self._preparation.host.starts(users))
            self._since[uid] = time.monotonic()
            nodes: Tokens = frozenset()
        elif await self._preparation.host.restarted(prepared.starts, users, now - self._since[uid]):
            after = msgspec.structs.replace(prepared, starts=None, stale=frozenset())
            nodes = prepared.stale
        else:
            return False
        renewed = await self._records.ledger.do(leave(claim, nodes, _encoded(after)))
        if renewed is None or not nodes:
            return False
        self._leaving.discard(uid)
        await self._files.write(renewed, after)
        extra = {"driver": claim.driver, "claim": claim.title}
        _LOG.info("claim %s: none of its containers can still open %s", claim.title, shown(nodes), extra=extra)
        self._register.notify()
        return True


def answered(prepared: Prepared, found: Mapping[str, _DevicesNow], refused: Collection[str]) -> Prepared:
    """Return the new Prepare response for a claim whose devices have other nodes now.

    found: the present state of each request's devices. refused: requests whose new numbers the register has refused.
    """
    before = _numbers(prepared.spec)
    nodes = {request: of.given(before, refused=request in refused) for request, of in found.items()}
    former = frozenset[str]().union(*(of.former for of in found.values()))
    gone = frozenset[str]().union(
        *(of.gone | _replaced(_entries(prepared.spec).get(request, ()), of) for request, of in found.items())
    )
    spec = with_nodes(prepared.spec, nodes, former, gone)
    after = _numbers(spec)
    dropped = (before - after) & former
    away = {
        request
        for request, of in found.items()
        if of.away and (request in prepared.withheld or _requests(prepared.spec, dropped & of.former))
    }
    unseen = prepared.withheld - found.keys()
    return msgspec.structs.replace(
        prepared,
        spec=spec,
        withheld=frozenset(refused) | away | unseen,
        stale=prepared.stale.union(dropped, *(of.lost for of in found.values())) - after,
        starts=None if dropped else prepared.starts,
    )


def _granted(claim: Claim, key: DeviceKey, boot: str) -> Identity:
    """Return the identity that a claim's device had at the grant in this boot, merged from all shares of the device."""
    of = [device.identity for device in claim.devices if (device.resource, device.device) == key]
    tokens, reached, left = set[str](), set[str](), set[str]()
    for identity in of:
        tokens |= identity.in_boot(boot)
        reached |= identity.valid_in(boot).reached
        left |= identity.left
    return Identity(boot, frozenset(tokens), reached=frozenset(reached), left=frozenset(left))


def _encoded(prepared: Prepared) -> str:
    return msgspec.json.encode(prepared, order="deterministic").decode()


class _Node(NamedTuple):
    """A present device node of a device. entry: its entry in a CDI spec. tokens: see `tokens_by_number`."""

    entry: _Entry
    tokens: Tokens


def _looked_at(device: Device) -> tuple[list[_Node], Tokens]:
    """Return the device nodes of a device, and the device's identity. Blocks. Raises CdiError."""
    entries = [
        (node.host, entry) for node, of in cdi.described(device.container_edits.device_nodes).items() for entry in of
    ]
    tokens = tokens_by_number({number: host for host, entry in entries if (number := token_of(entry))})
    return [_Node(entry, tokens.get(token_of(entry), frozenset())) for _, entry in entries], tokens_now(device)


def _of_granted(
    nodes: Sequence[_Node], granted: Tokens, before: Sequence[_Entry], *, named: bool
) -> tuple[Sequence[_Node], Sequence[_Node]]:
    """Return the nodes that belong to the granted hardware, and the other nodes.

    The configuration can have given a device other nodes since the claim was prepared. granted: the tokens of the
    granted hardware. before: the request's entries in the claim's CDI spec. If sysfs does not show a node's hardware,
    the node belongs to the granted hardware if one of these entries has the same paths. named: whether the source
    identifies the device by a text; then all nodes whose hardware sysfs does not show belong to the granted hardware.
    """
    paths = {(entry["path"], entry.get("hostPath")) for entry in before}

    def belong(node: _Node) -> bool:
        known = len(node.tokens) > 1
        same = (node.entry["path"], node.entry.get("hostPath")) in paths
        return belongs(node.tokens, granted) or (not known and (named or same))

    own = [node for node in nodes if belong(node)]
    return own, [node for node in nodes if node not in own]


def _renamed(node: _Entry, before: Sequence[_Entry]) -> bool:
    """Return whether a node is in `before` only at another path."""
    paths = {entry["path"]: token_of(entry) == token_of(node) for entry in before}
    return node["path"] not in paths and any(paths.values())


def _replaced(before: Sequence[_Entry], now: _DevicesNow) -> Tokens:
    """Return the numbers of the devices in `before` at paths at which the devices have other numbers now."""
    at = {node["path"]: token_of(node) for node in now.nodes}
    had = {entry["path"]: token_of(entry) for entry in before}
    return now.former & {number for path, number in had.items() if at.get(path, number) != number}


def with_nodes(spec: str, nodes: Mapping[str, Sequence[_Entry]], held: Tokens, gone: Tokens) -> str:
    """Return `spec`, a CDI spec that `claim_files.build` has made, with the present nodes of the devices.

    If the nodes have not changed, the text stays the same. nodes: for each request, the present nodes, as `described`
    returns them. held: the tokens of the nodes that belonged to the devices until now; only such nodes are replaced by
    present nodes with the same path and another number. gone: the tokens of nodes that are removed. All other nodes
    stay unchanged.
    """
    decoded = msgspec.json.decode(spec)
    before = msgspec.json.encode(decoded)
    for device in decoded["devices"]:
        if (now := nodes.get(claim_files.request_of(device["name"]))) is not None:
            edits = device["containerEdits"]
            former = {node["path"]: node for node in edits.get("deviceNodes", ())}
            paths = {node["path"]: token_of(node) for node in now}
            after = {path: node for path, node in former.items() if path in paths or token_of(node) not in gone}
            kept = {
                path for path, node in after.items() if token_of(node) not in held or token_of(node) == paths.get(path)
            }
            after |= {node["path"]: dict(node) for node in now if node["path"] not in kept}
            edits["deviceNodes"] = list(after.values())
            if not after:
                del edits["deviceNodes"]
    decoded["cdiVersion"] = claim_files.version(decoded["devices"])
    after_all = claim_files.encode(decoded)
    return spec if after_all == before else after_all.decode()


@functools.lru_cache(maxsize=256)
def _entries(spec: str) -> Mapping[str, Sequence[_Entry]]:
    """Return, for each request, the entries of its device nodes in a CDI spec."""
    entries: dict[str, list[_Entry]] = {}
    for device in msgspec.json.decode(spec)["devices"]:
        request = claim_files.request_of(device["name"])
        entries.setdefault(request, []).extend(device["containerEdits"].get("deviceNodes", ()))
    return entries


def _numbers(spec: str) -> Tokens:
    return frozenset(token_of(node) for entries in _entries(spec).values() for node in entries) - {""}


def _requests(spec: str, numbers: Tokens) -> set[str]:
    """Return the requests whose CDI devices have one of these numbers."""
    return {request for request, entries in _entries(spec).items() if not numbers.isdisjoint(map(token_of, entries))}
