"""Operations that record which hardware holders have, and which other device nodes the holders can open.

Pure functions. Callers use these functions like the operations of `deviceplugin.register.operations`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import NamedTuple

import msgspec

from deviceplugin.exclusion import other_hardware, titled
from deviceplugin.identity import UNIDENTIFIED, Identity, Tokens, identified, reachable, same_hardware, shown
from deviceplugin.register.question import View, Wanted, allocation_unit, claim_unit, refusal, wanted_use
from deviceplugin.register.records import (
    NONE,
    Allocation,
    AllocationRecord,
    Amount,
    Change,
    Claim,
    Decision,
    Operation,
    RecordKey,
    RegisterSnapshot,
)


def adopt(
    identities: Mapping[RecordKey, Identity], boot: str, at_paths: Mapping[AllocationRecord, Tokens] = NONE
) -> Operation[None]:
    """For each holder's record without an identity of this boot, record the present identity of the device.

    A recorded identity that consists of all nodes of an AllocateResponse is replaced as well, if it includes a node of
    the device. The device nodes to which the device's paths lead now are recorded as nodes that a holder from Allocate
    can open, because the runtime resolves the paths of the AllocateResponse at each start of the container. at_paths:
    for allocations whose AllocateResponse lacks some of these paths, the tokens at the paths of the response
    (`deviceplugin.register.opened`). For a prepared claim no such nodes are recorded, because its containers can open
    only the nodes in the claim's CDI file (`renew`).
    """

    def adopted(recorded: Identity, key: RecordKey, opened: Tokens | None = None, *, follows: bool = True) -> Identity:
        now = identities.get(key, UNIDENTIFIED)
        known = not now.says_more_than(recorded) or not same_hardware(now.in_boot(boot), recorded.in_boot(boot))
        identity = recorded if known else now
        if opened is not None:
            now = msgspec.structs.replace(now, tokens=now.tokens & opened)
        return identity.reaching(now if follows else Identity(now.boot, within=now.within))

    def decide(state: RegisterSnapshot) -> Decision[None]:
        changes = []
        for name, allocation in state.allocations.items():
            key = (allocation.resource, allocation.device)
            identity = adopted(allocation.identity, key, at_paths.get(allocation) if at_paths else None)
            if identity != allocation.identity:
                changes.append(Change("allocations", name, replace(allocation, identity=identity)))
        for name, claim in state.claims.items():
            devices = tuple(
                device
                if device.admin
                else msgspec.structs.replace(
                    device,
                    identity=adopted(device.identity, (device.resource, device.device), follows=claim.result is None),
                )
                for device in claim.devices
            )
            if devices != claim.devices:
                changes.append(Change("claims", name, replace(claim, devices=devices), durable=claim.durable))
        return Decision(None, tuple(changes))

    return decide


def reach(resource: str, ids: Collection[str], nodes: Tokens, view: View) -> Operation[str]:
    """Record the device nodes that a container with these granted kubelet ids of an adopted resource can open.

    The result is the reason why the container must not get the nodes, because another holder has the device of a node;
    "" if it may get them. nodes: the tokens of the device nodes in the AllocateResponse.
    """

    def decide(state: RegisterSnapshot) -> Decision[str]:
        found = {name: state.allocations[resource, name] for name in ids if (resource, name) in state.allocations}
        if ended := sorted(set(ids) - found.keys()):
            return Decision(f"the grant of {titled((resource, ended[0]))} has ended")
        opened = Identity(view.boot, reached=nodes)
        uses = [
            wanted_use(allocation_unit(resource, name), Wanted((resource, record.device), opened, record.amount), view)
            for name, record in found.items()
        ]
        if why := refusal(uses, state, view):
            return Decision(why)
        changes = []
        for name, record in found.items():
            now = record.identity.valid_in(view.boot)
            changed = replace(record, identity=Identity(view.boot, reached=reachable(now.tokens) | now.reached | nodes))
            changes.append(Change("allocations", (resource, name), changed))
        return Decision("", tuple(changes))

    return decide


class StartNodes(NamedTuple):
    """The device nodes of a starting container.

    present: for each of the container's ids, the present tokens of those device nodes whose numbers can change. whole:
    the ids of the devices of which `present` contains all device nodes. plain: the ids of devices whose paths are no
    symlinks, so that the AllocateResponse names the device nodes themselves.
    """

    present: Mapping[str, Tokens]
    whole: frozenset[str] = frozenset()
    plain: frozenset[str] = frozenset()


def start(resource: str, nodes: StartNodes, view: View, begun: Collection[Allocation] = ()) -> Operation[str]:
    """Record the device nodes that a starting container gets.

    The result is the reason why the container must not start; "" if it may start. A container must not start if a path
    leads to another device than at the grant, or to a device that another holder has or can open. begun: those
    allocations in the kubelet's checkpoint that belong to pending grants of the container's ids.

    The former instance of the container has ended, and containers of one pod that have the same id run one after the
    other (init containers). So if all holders of an id are in one pod, the holders are recorded as able to open only
    the id's present nodes, or no node if the container must not start. Otherwise two containers whose devices have
    swapped their numbers would block each other.
    """
    present = nodes.present

    def decide(state: RegisterSnapshot) -> Decision[str]:
        records = {name: state.allocations[resource, name] for name in present if (resource, name) in state.allocations}
        at_start = replace(view, present={(resource, of.device): present[name] for name, of in records.items()})
        uses = [
            wanted_use(
                allocation_unit(resource, name),
                Wanted((resource, of.device), identified(present[name], view.boot), of.amount),
                at_start,
            )
            for name, of in records.items()
        ]
        why = _other_nodes(records, present, nodes.plain, view.boot) or refusal(uses, state, at_start)
        changes: list[Change] = []
        for name, before in records.items():
            opened = frozenset[str]() if why else present[name]
            new = {allocation.pod_uid for allocation in begun if allocation[2:] == (resource, name)}
            pods = new.union(pod for pod, _ in before.holders)
            if name not in nodes.whole or (before.pending and not new) or before.former or len(pods) > 1:
                after = before.identity.reaching(identified(opened, view.boot))
            else:
                after = before.identity.reaching_only(opened)
            if after != before.identity:
                changes.append(Change("allocations", (resource, name), replace(before, identity=after)))
        return Decision(why, tuple(changes))

    return decide


def _other_nodes(
    records: Mapping[str, AllocationRecord], present: Mapping[str, Tokens], plain: frozenset[str], boot: str
) -> str:
    """Return an error if an id has other hardware than at its grant, or an id in `plain` has other nodes; else ""."""
    for name, record in records.items():
        was, key = record.identity.in_boot(boot), (record.resource, record.device)
        if was and (why := other_hardware(key, was, present[name])):
            return why
        if name in plain and record.identity.sure and not reachable(was) <= present[name]:
            now = shown(reachable(present[name]))
            return f"{titled(key)} had the nodes {shown(reachable(was))} and has {now} now: delete the pod"
    return ""


class Renewed(NamedTuple):
    """The result of `renew`. claim: the claim's new record; None if the record has not changed.

    refused: for each of the claim's requests that did not get the new device nodes, the reason.
    """

    claim: Claim | None
    refused: Mapping[str, str]


def renew(
    before: Claim,
    wanted: Mapping[str, Mapping[RecordKey, Tokens]],
    answered: Callable[[Collection[str]], str],
    view: View,
) -> Operation[Renewed]:
    """Record the new device nodes of a claim's devices, and the claim's new Prepare response.

    before: the claim's record; if the claim has another response by now, nothing is recorded. wanted: for each request,
    the present tokens of the devices whose nodes the claim's containers should get. A request is refused while another
    holder has, or can open, one of these nodes. answered: a function that returns the claim's new Prepare response; its
    argument is the refused requests.
    """

    def decide(state: RegisterSnapshot) -> Decision[Renewed]:
        key = before.driver, before.uid
        recorded = state.claims.get(key)
        if recorded is None or recorded.result != before.result:
            return Decision(Renewed(None, {}))
        refused: dict[str, str] = {}
        given: dict[RecordKey, Identity] = {}
        for request, present in wanted.items():
            at_present = replace(view, present=present)
            uses = [
                wanted_use(
                    claim_unit(*key),
                    Wanted(one, identified(present[one], view.boot), Amount(device.amount.part)),
                    at_present,
                )
                for device in recorded.devices
                if not device.admin and (one := (device.resource, device.device)) in present
            ]
            if why := refusal(uses, state, at_present):
                refused[request] = why
            else:
                given |= {one: identified(tokens, view.boot) for one, tokens in present.items()}
        devices = tuple(
            msgspec.structs.replace(
                device, identity=device.identity.reaching(given.get((device.resource, device.device), UNIDENTIFIED))
            )
            for device in recorded.devices
        )
        record = replace(recorded, devices=devices, result=answered(refused))
        if record == recorded:
            return Decision(Renewed(None, refused))
        record = replace(record, sequence=state.sequence + 1)
        return Decision(Renewed(record, refused), (Change("claims", key, record, durable=record.durable),))

    return decide


def leave(before: Claim, nodes: Tokens, result: str) -> Operation[Claim | None]:
    """Record that a claim's containers cannot open `nodes` any more, and record `result` as the claim's response.

    The caller uses this operation after the containers that could open these device nodes have ended. before: the
    claim's record. result: the claim's new Prepare response. If the claim has another response by now, nothing is
    recorded, and the operation's result is None.
    """

    def decide(state: RegisterSnapshot) -> Decision[Claim | None]:
        key = before.driver, before.uid
        recorded = state.claims.get(key)
        if recorded is None or recorded.result != before.result:
            return Decision(None)
        devices = tuple(
            msgspec.structs.replace(device, identity=device.identity.leaving(nodes)) for device in recorded.devices
        )
        record = replace(recorded, devices=devices, result=result, sequence=state.sequence + 1)
        return Decision(record, (Change("claims", key, record, durable=record.durable),))

    return decide
