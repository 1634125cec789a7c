"""Mutations: each switches off a rule or a kind of evidence of holders, so that the model finds a double allocation."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, Final
from unittest.mock import patch

from deviceplugin.device import Device
from deviceplugin.exclusion import DeviceKey
from deviceplugin.hook_runs import HookRuns
from deviceplugin.kubelet import checkpoint, holders, orphaned_claims
from deviceplugin.kubelet.cgroups import PodProcesses
from deviceplugin.kubelet.device_list import DeviceIds
from deviceplugin.kubelet.servicer import Endpoint
from deviceplugin.register import claim_files, offers, operations, question, register, rules
from deviceplugin.register.question import Use, View
from deviceplugin.register.records import Allocation, DeviceRecord, RegisterSnapshot
from deviceplugin.register.releases import Releases
from deviceplugin.register.rules import ClusterEvidence, KubeletEvidence, KubeletSnapshot, Refused
from deviceplugin.source import DeviceSource
from dra_bridge.driver import Prepared
from dra_bridge.driver.preparation import ClaimPreparation
from dra_bridge.ledger.store import Ledger

Replacement = Callable[..., Any]

_PREPARE, _TO_DRA, _TO_PLUGIN = rules.prepare_refusal, rules.to_dra_waits_for, rules.to_plugin_waits_for
_REFUSAL: Final = question.refusal
_HOLDERS: Final = holders.holders
_CLAIM_IS_OVER: Final = holders.claim_is_over


def _nobody(*_: object) -> None:
    return None


def _nothing(*_: object) -> str:
    return ""


def _prepare_by_state(now: RegisterSnapshot, driver: str, resource: str, device: str) -> Refused | None:
    return _PREPARE(replace(now, allocations={}, index={}), driver, resource, device)


def _refusal_by_side(wanted: Collection[Use], state: RegisterSnapshot, view: View) -> str:
    kinds = {one.unit[0] for one in wanted}
    return _REFUSAL(wanted, state, view, own=lambda use: use.unit[0] not in kinds)


BY_STATE: Final = ((rules, "prepare_refusal", _prepare_by_state), (operations, "refusal", _refusal_by_side))
"""A grant ignores holders of the other kind (pods or claims): their check would hide that a move ended too early."""


def _old_commit_to_dra(now: RegisterSnapshot, record: DeviceRecord, evidence: KubeletEvidence) -> rules.MoveWait | None:
    return _TO_DRA(now, replace(record, sequence=0), evidence)


def _old_commit_to_plugin(
    now: RegisterSnapshot, record: DeviceRecord, evidence: ClusterEvidence
) -> rules.MoveWait | None:
    return _TO_PLUGIN(now, replace(record, sequence=0), evidence)


def _released_at_once(_record: object, snapshot: KubeletSnapshot) -> bool:
    return snapshot.current


def _with_evidence(change: Callable[[holders.HolderEvidence], holders.HolderEvidence]) -> Replacement:
    def decide(known: Any, seen: holders.HolderEvidence, at: float = 0.0) -> holders.HolderSnapshot:
        return _HOLDERS(known, change(seen), at)

    return decide


def _unnamed(seen: holders.HolderEvidence) -> holders.HolderEvidence:
    return replace(seen, checkpoints=[replace(one, allocations=frozenset()) for one in seen.checkpoints])


def _without_uids(known: Any, seen: holders.HolderEvidence, at: float = 0.0) -> holders.HolderSnapshot:
    named = [replace(one, allocations=_anonymous(one.allocations)) for one in seen.checkpoints]
    return _HOLDERS(_anonymous(known), replace(seen, checkpoints=named), at)


def _anonymous(allocations: Any) -> frozenset[Allocation]:
    return frozenset(one._replace(pod_uid="") for one in allocations)


def _shows_if_visible(pods: PodProcesses, _uid: str) -> bool:
    return pods.running is not None


def _nobody_runs(*_: object) -> dict[str, str]:
    return {}


def _over_unless_named(uid: str, _pods: object, named: Any, _processes: object) -> bool:
    return uid not in named


def _over_unless_running(uid: str, pods: Any, _named: object, processes: PodProcesses) -> bool:
    return _CLAIM_IS_OVER(uid, pods, (), processes)


MUTATIONS: Final[dict[str, tuple[tuple[object, str, Replacement], ...]]] = {
    "Allocate": (*BY_STATE, (rules, "allocate_refusal", _nobody)),
    "Prepare": (*BY_STATE, (rules, "prepare_refusal", _nobody)),
    "the question, between claims": ((operations, "refusal", _nothing),),
    "commit to DRA": ((rules, "to_dra_waits_for", _nobody), *BY_STATE),
    "commit to the plugin": ((rules, "to_plugin_waits_for", _nobody), *BY_STATE),
    "grant without a pod": ((rules, "grant_is_over", _released_at_once), *BY_STATE),
    "commit to DRA: evidence from after the move began": ((rules, "to_dra_waits_for", _old_commit_to_dra), *BY_STATE),
    "commit to the plugin: evidence from after the move began": (
        (rules, "to_plugin_waits_for", _old_commit_to_plugin),
        *BY_STATE,
    ),
    "the checkpoint must be current": ((holders, "holders", _with_evidence(lambda seen: replace(seen, current=True))),),
    "more checkpoints than writers": ((checkpoint, "shows_present", bool),),
    "the checkpoint's names": ((holders, "holders", _with_evidence(_unnamed)),),
    "processes": (
        (holders, "holders", _with_evidence(lambda seen: replace(seen, pods=PodProcesses(running=frozenset())))),
    ),
    "cgroups count where they would show the pod": ((PodProcesses, "shows", _shows_if_visible),),
    "processes at a grant": ((holders, "running", _nobody_runs),),
    "holder: pod UIDs": ((holders, "holders", _without_uids),),
    "claims: the kubelet's claim state": ((holders, "claim_is_over", _over_unless_running),),
    "claims: processes": ((holders, "claim_is_over", _over_unless_named),),
}


# Mutations for the walks of tests.model.walk.

_USES: Final = question.uses
_USE: Final = question._use
_BEGIN: Final = HookRuns._begin
_TOO_MANY: Final = "has too many holders"


def _pairwise(wanted: Collection[Use], state: RegisterSnapshot, view: View, *args: Any, **more: Any) -> str:
    """Compare a request with each present holder alone, not with all holders together."""
    points = {point for one in wanted for point in one.points}
    for unit in {one.unit for one in _USES(state, points, view)}:
        own = more.get("own", lambda use: False)
        alone = {**more, "own": lambda use, unit=unit, own=own: use.unit != unit or own(use)}
        if why := _REFUSAL(wanted, state, view, *args, **alone):
            return why
    return ""


def _no_tokens(*_: object) -> frozenset[str]:
    return frozenset()


def _no_nodes(names: Iterable[str], *_: object) -> dict[str, frozenset[str]]:
    return dict.fromkeys(names, frozenset())


def _unidentified(*arguments: Any) -> Use:
    """Return a device's use without identity tokens, so that uses are compared by the device's name alone."""
    return _USE(*arguments)._replace(tokens=frozenset(), reached=frozenset(), within=frozenset())


def _all_released(*_: object) -> dict[DeviceKey, str]:
    """Return that no device waits for `released`; else other names of held hardware would wait for this hook, too."""
    return {}


def _prepare_of_any_driver(now: RegisterSnapshot, driver: str, resource: str, device: str) -> Refused | None:
    records = {key: replace(record, driver="") for key, record in now.devices.items()}
    return _PREPARE(replace(now, devices=records), driver, resource, device)


def _refusal_by_driver(wanted: Collection[Use], state: RegisterSnapshot, view: View) -> str:
    drivers = {one.unit[:2] for one in wanted if one.unit[0] == "claim"}
    return _REFUSAL(wanted, state, view, own=lambda use: use.unit[0] == "claim" and use.unit[:2] not in drivers)


def _times_now(ids: DeviceIds, device: Device, times: int) -> int:
    return times


def _held_by_record(endpoint: Endpoint, device: str) -> bool:
    return endpoint._register.is_held((endpoint.resource, device))


def _left_alone(runs: HookRuns, run: Any, work: object) -> None:
    run.left = True
    runs._end(run)


def _begun_by_name(runs: HookRuns, hook: str, source: DeviceSource, devices: Iterable[Device]) -> Any:
    run = _BEGIN(runs, hook, source, devices)
    run.tokens = dict.fromkeys(run.tokens, frozenset())
    return run


def _same_boot(preparation: ClaimPreparation, former: Prepared, allocation: object) -> bool:
    return former.boot == preparation.files.boot


def _no_files(*_: object) -> tuple[()]:
    return ()


QUESTION: Final = ((operations, "refusal"), (register, "refusal"), (offers, "refusal"))
BY_DRIVER: Final = ((operations, "refusal", _refusal_by_driver),)
"""A grant ignores claims of other drivers: their check would hide that Prepare ignores the driver of a device."""

WALKS: Final[dict[str, tuple[str, tuple[tuple[object, str, Replacement], ...], str]]] = {
    "the amounts are summed": ("every name", tuple((*where, _pairwise) for where in QUESTION), _TOO_MANY),
    "identity": (
        "every name",
        ((question, "_use", _unidentified), (Releases, "unreleased", _all_released)),
        _TOO_MANY,
    ),
    "Prepare: the driver": (
        "former driver",
        (*BY_DRIVER, (rules, "prepare_refusal", _prepare_of_any_driver)),
        _TOO_MANY,
    ),
    "Prepare: the driver, beside a pod by limits": (
        "on to another driver",
        (*BY_DRIVER, (rules, "prepare_refusal", _prepare_of_any_driver)),
        _TOO_MANY,
    ),
    "replicas stay while a device is held": (
        "other replicas by list",
        ((DeviceIds, "_times_of", _times_now),),
        "any more, which pods hold",
    ),
    "replicas stay while an Allocate is in flight": (
        "other replicas during an Allocate",
        ((Endpoint, "_is_held", _held_by_record),),
        "any more, which pods hold",
    ),
    "hooks that work on are holders": ("hook", ((HookRuns, "_leave", _left_alone),), _TOO_MANY),
    "hooks hold what they began with": ("hook", ((HookRuns, "_begin", _begun_by_name),), _TOO_MANY),
    "a claim's allocation": ("allocated anew", ((ClaimPreparation, "_stands", _same_boot),), "and its pod got"),
    "device nodes of other vendors": ("foreign hardware", ((orphaned_claims, "nodes_by_name", _no_nodes),), _TOO_MANY),
    "the copy of the allocations": ("register and checkpoint lost", ((Ledger, "_copied", _no_files),), _TOO_MANY),
    "pods that may have a grant": ("checkpoint lost", ((holders, "possible_holders", _no_tokens),), _TOO_MANY),
    "the claims' own files": (
        "register and claim state lost",
        ((claim_files, "read_all", _no_files),),
        _TOO_MANY,
    ),
}
"""For each mutation: the plan (of test_walks.py) that then fails, the replaced functions, and the failure's text."""


@contextmanager
def without(what: str) -> Iterator[None]:
    """Switch off a rule, or a kind of evidence of devices' holders, until the end of the block."""
    with patched(MUTATIONS[what]):
        yield


@contextmanager
def patched(replacements: tuple[tuple[object, str, Replacement], ...]) -> Iterator[None]:
    """Replace these functions until the end of the block."""
    with ExitStack() as stack:
        for module, name, replacement in replacements:
            stack.enter_context(patch.object(module, name, replacement))
        yield
