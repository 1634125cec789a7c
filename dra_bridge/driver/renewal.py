"""Updates the CDI files of claims when the nodes of their devices change.

A CDI file contains device numbers, and the runtime does not read the host path. So a restarted container gets the
numbers in the file. A USB stick that drops off the bus and comes back has other numbers than before.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec

from deviceplugin import cdi
from deviceplugin.adoption.source import AdoptedSource
from deviceplugin.backoff import Backoff
from deviceplugin.device import Device
from deviceplugin.exclusion import DeviceKey
from deviceplugin.identity import Identity, NodeKind, Tokens, agree, identified, node_token, tokens_now
from deviceplugin.inventory import Inventory
from deviceplugin.looks import LookTimeoutError
from deviceplugin.register.identification import renew
from deviceplugin.register.records import Claim, LedgerError
from deviceplugin.register.register import Register
from dra_bridge.driver import cdi_files
from dra_bridge.driver.claim_files import CHECK, REST, ClaimFiles
from dra_bridge.driver.records import ClaimRecords, Prepared, prepared_of
from dra_bridge.driver.served import ServedDevices

_LOG: Final = logging.getLogger(__name__)


class ClaimRenewal:
    """Renews the CDI files of one driver's claims. register: knows the present identities and holders of devices."""

    def __init__(self, records: ClaimRecords, served: ServedDevices, files: ClaimFiles, register: Register) -> None:
        self._records, self._served, self._files, self._register = records, served, files, register
        self._waiting: set[str] = set()
        """The UIDs of claims whose files wait until another holder of a device's present node has ended."""

    async def keep(self) -> None:
        """Renew the CDI files after each change of an inventory, and those that wait again, until cancelled."""
        seen: object = None
        backoff = Backoff(first=1.0, most=60.0)
        while True:
            changes = self._records.ledger.changes
            count = changes.count
            if not self._records.all():
                await changes.after(count, REST)
                continue
            inventories = [served.inventory for served in self._served.resources]
            now = tuple((id(inventory), inventory.snapshot.version) for inventory in inventories)
            claims = [claim.uid for claim in self._records.all() if now != seen or claim.uid in self._waiting]
            if claims:
                errors = [why for uid in claims if (why := await self._try(uid))]
                if errors:
                    await asyncio.sleep(backoff.next())
                    continue
                seen = now
                backoff.reset()
            await asyncio.sleep(CHECK)

    async def _try(self, uid: str) -> str:
        """Renew a claim's CDI file; return why this failed, or ""."""
        try:
            async with self._records.locked(uid):
                await self.renew(uid)
        except (cdi.CdiError, LedgerError, LookTimeoutError) as error:
            extra = {"driver": self._records.driver, "claim": uid}
            _LOG.warning("the CDI file of claim %s cannot be renewed: %s", uid, error, extra=extra)
            return str(error)
        return ""

    async def renew(self, uid: str) -> bool:
        """Write the present device nodes into a claim's CDI file; return whether the file changed.

        The caller has the claim's lock. A device's entry is left unchanged if the device is other hardware than the
        claim was granted, or if the hardware has another holder by now. Raises CdiError, LedgerError, LookTimeoutError.
        """
        self._waiting.discard(uid)
        claim = self._records.get(uid)
        prepared = prepared_of(claim) if claim is not None else None
        if claim is None or claim.result is None or prepared is None or not prepared.spec:
            return False
        if prepared.boot != self._files.boot:
            return False
        nodes: dict[str, list[dict[str, Any]]] = {}
        held: set[str] = set()
        identities: dict[DeviceKey, Identity] = {}
        for request, inventory, device in self._listed(claim, prepared):
            key = inventory.snapshot.resource, device.id
            described, tokens = await inventory.looks.at("renew", _looked_at, device, brief=True)
            granted = [each.identity for each in claim.devices if (each.resource, each.device) == key]
            was = frozenset[str]().union(*(identity.in_boot(self._files.boot) for identity in granted))
            if not agree(tokens, was):
                continue
            if self._is_of_others(claim, key):
                self._waiting.add(uid)
                continue
            nodes.setdefault(request, []).extend(described)
            held |= was.union(*(identity.reaches(self._files.boot) for identity in granted))
            identities[key] = identified(tokens, self._files.boot)
        names = {name: name.split("_")[2] for name in _names(prepared.spec)}
        spec = with_nodes(
            prepared.spec, {name: nodes[of] for name, of in names.items() if of in nodes}, frozenset(held)
        )
        if spec == prepared.spec:
            return False
        after = msgspec.structs.replace(prepared, spec=spec)
        result = msgspec.json.encode(after).decode()
        renewed = await self._records.ledger.do(renew(claim.driver, uid, claim.result, result, identities))
        if renewed is not None:
            await self._files.write(renewed, after)
            extra = {"driver": claim.driver, "claim": claim.title}
            _LOG.info(
                "claim %s: the nodes of its devices have changed; its CDI file is renewed", claim.title, extra=extra
            )
        return renewed is not None

    def _listed(self, claim: Claim, prepared: Prepared) -> Iterator[tuple[str, Inventory, Device]]:
        """Yield a claim's devices in the inventories, each with its request, without devices of vendors' plugins."""
        by_name = self._served.by_name
        for answered in prepared.devices:
            served, device = by_name.get(answered.device, (None, None))
            if served is not None and device is not None and not isinstance(served.source, AdoptedSource):
                key = served.inventory.snapshot.resource, device.id
                if key in claim.held and device.id not in served.inventory.snapshot.gone:
                    yield answered.request, served.inventory, device

    def _is_of_others(self, claim: Claim, key: DeviceKey) -> bool:
        """Return whether a device's present hardware has another holder, under another device id or resource."""
        others = self._register.listed.now().aliases(key) - claim.held
        return any(map(self._register.is_held, others))


def _looked_at(device: Device) -> tuple[list[dict[str, Any]], Tokens]:
    """Return the CDI entries of a device's nodes, and the device's identity. Blocks. Raises CdiError."""
    described = cdi.described(device.container_edits.device_nodes)
    return [node for of in described.values() for node in of], tokens_now(device)


def with_nodes(spec: str, nodes: Mapping[str, Sequence[Mapping[str, Any]]], held: Tokens) -> str:
    """Return the CDI spec `spec` of `cdi_files.build`, with the present nodes of the devices.

    If the nodes have not changed, the text is the same. nodes: present nodes by the CDI device's name, as `described`
    returns them. held: tokens of the nodes that belonged to the devices until now: such a node stays in the spec only
    if it is still a present node. Nodes with other tokens stay unchanged.
    """
    decoded = msgspec.json.decode(spec)
    before = msgspec.json.encode(decoded)
    for device in decoded["devices"]:
        if (now := nodes.get(device["name"])) is not None:
            edits = device["containerEdits"]
            former = {node["path"]: node for node in edits.get("deviceNodes", ())}
            other = {path for path, node in former.items() if _token(node) not in held}
            paths = other | {node["path"] for node in now}
            after = {path: node for path, node in former.items() if path in paths}
            after |= {node["path"]: dict(node) for node in now if node["path"] not in other}
            if after:
                edits["deviceNodes"] = list(after.values())
    decoded["cdiVersion"] = cdi_files.version(decoded["devices"])
    after_all = cdi_files.encode(decoded)
    return spec if after_all == before else after_all.decode()


def _token(node: Mapping[str, Any]) -> str:
    """Return the token of a device node in a CDI spec; "" for a pipe."""
    kinds: dict[str, NodeKind] = {"c": "char", "b": "block"}
    kind = kinds.get(node.get("type", ""))
    return node_token(kind, node["major"], node["minor"]) if kind is not None else ""


def _names(spec: str) -> list[str]:
    return [device["name"] for device in msgspec.json.decode(spec)["devices"]]
