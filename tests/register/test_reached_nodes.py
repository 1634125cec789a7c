"""Random grants of devices, of parts of them, and of an adopted plugin's ids, whose responses have devices' nodes."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from deviceplugin.exclusion import Hardware, HardwareIndex
from deviceplugin.identity import UNIDENTIFIED, Tokens
from deviceplugin.register import operations
from deviceplugin.register.identification import reach
from deviceplugin.register.question import Use, View, Wanted
from deviceplugin.register.records import WHOLE, Change, Decision, RegisterSnapshot

LISTED, PARTS, ADOPTED, BOOT = "example.com/listed", "example.com/part", "vendor.example/adopted", "1"
NODES = {f"d{number}": frozenset({f"char:240:{number}"}) for number in range(4)}
UNLISTED = "d3"
"""No resource lists this device, only its parts; so it is known by its node alone."""
CONTROL = "char:195:255"
HARDWARE = HardwareIndex(
    {(LISTED, name): Hardware(tokens) for name, tokens in NODES.items() if name != UNLISTED}
    | {
        (PARTS, f"{part}-{name}"): Hardware(frozenset({f"uuid:{part}-{name}"}), within=tokens)
        for name, tokens in NODES.items()
        for part in "ab"
    },
    BOOT,
)
VIEW = View(BOOT, present=HARDWARE.tokens_by_device, listed=HARDWARE.listed)

Step = Callable[[RegisterSnapshot, View], RegisterSnapshot]
_ids = st.sampled_from(sorted(NODES))
_responses = st.frozensets(
    st.sampled_from([CONTROL, *(node for nodes in NODES.values() for node in nodes)]), max_size=3
)


def allocate(name: str) -> Step:
    """Return a step in which a pod requests a listed device."""
    return _allocate(LISTED, name)


def allocate_part(name: str, whole: str) -> Step:
    """Return a step in which a pod requests a part of a device."""
    return _allocate(PARTS, f"{name}-{whole}")


def _allocate(resource: str, name: str) -> Step:
    wanted = Wanted((resource, name), HARDWARE.identities[resource, name], WHOLE)
    return lambda state, view: state.following(operations.grant(resource, {name: wanted}, view, 1.0)(state))


def forward(name: str, nodes: Tokens) -> Step:
    """Return a step in which the adopted plugin responds to an Allocate of its id `name` with these nodes.

    If the pod must not get the nodes, the kubelet rejects the pod, and the id has no holder afterwards.
    """

    def step(state: RegisterSnapshot, view: View) -> RegisterSnapshot:
        was = state.allocations.get((ADOPTED, name))
        wanted = Wanted((ADOPTED, name), UNIDENTIFIED, WHOLE)
        state = state.following(operations.grant(ADOPTED, {name: wanted}, view, 1.0)(state))
        decision: Decision[str] = reach(ADOPTED, [name], nodes, view)(state)
        return end(ADOPTED, name)(state, view) if decision.answer and was is None else state.following(decision)

    return step


def end(resource: str, name: str) -> Step:
    """Return a step in which an allocation ends."""

    def step(state: RegisterSnapshot, view: View) -> RegisterSnapshot:
        present = (resource, name) in state.allocations
        changes = [Change("allocations", (resource, name), None)] if present else []
        return state.with_changes(changes, state.sequence + 1)

    return step


_steps = st.one_of(
    st.builds(allocate, st.sampled_from(sorted(NODES.keys() - {UNLISTED}))),
    st.builds(forward, _ids, _responses),
    st.builds(allocate_part, st.sampled_from("ab"), _ids),
    st.builds(end, st.sampled_from([LISTED, ADOPTED]), _ids),
    st.builds(lambda part, whole: end(PARTS, f"{part}-{whole}"), st.sampled_from("ab"), _ids),
)


def beside(names: Collection[str]) -> View:
    """Return a view in which claims of another driver have these devices, and each claim a control node.

    Only the nodes of such claims are known.
    """
    others = (Use(("other", name), "a claim", None, NODES[name] | {CONTROL}, None) for name in sorted(names))
    return replace(VIEW, others=tuple(others))


@given(st.frozensets(_ids, max_size=2), st.lists(_steps, max_size=12))
def test_a_device_has_holders_of_one_kind(taken: frozenset[str], steps: list[Step]) -> None:
    """A device is held by another driver's claim, as a whole, in parts, or through an adopted id's nodes."""
    state, view = RegisterSnapshot(), beside(taken)
    by_others: Tokens = frozenset().union(*(NODES[name] for name in taken))
    for step in steps:
        state = step(state, view)
        opened: Tokens = frozenset().union(*(record.identity.reached for record in state.allocations_of(ADOPTED)))
        parts: Tokens = frozenset().union(*(record.identity.within for record in state.allocations_of(PARTS)))
        for record in state.allocations_of(LISTED):
            assert record.identity.tokens.isdisjoint(opened | parts | by_others)
        assert parts.isdisjoint(opened | by_others)
        assert opened.isdisjoint(by_others)


def test_parts_of_one_device_have_holders_at_the_same_time() -> None:
    """Two parts of a device can have holders at the same time; then the whole device is refused."""
    state = RegisterSnapshot()
    for step in (allocate_part("a", "d0"), allocate_part("b", "d0"), allocate("d1"), allocate("d0")):
        state = step(state, VIEW)
    assert state.allocations.keys() == {(PARTS, "a-d0"), (PARTS, "b-d0"), (LISTED, "d1")}


def test_control_nodes_are_of_all() -> None:
    """Holders of devices and of parts, and adopted ids, do not exclude each other by a control node in all responses.

    A claim of another driver has this control node as well.
    """
    state, steps = RegisterSnapshot(), [allocate("d0"), allocate_part("a", UNLISTED)]
    for step in (*steps, forward("d0", frozenset({CONTROL})), forward("d1", frozenset({CONTROL}))):
        state = step(state, beside(["d2"]))
    assert state.allocations.keys() == {(LISTED, "d0"), (PARTS, "a-d3"), (ADOPTED, "d0"), (ADOPTED, "d1")}


def test_a_device_that_is_known_by_its_node_alone() -> None:
    """Another driver's claim, a part's holder and an adopted id exclude each other if they have an unlisted device."""
    part, adopted = allocate_part("a", UNLISTED), forward("d0", NODES[UNLISTED])
    for steps, taken, granted in (
        ((part, adopted), [], {(PARTS, "a-d3")}),
        ((adopted, part), [], {(ADOPTED, "d0")}),
        ((adopted, part), [UNLISTED], set()),
    ):
        state = RegisterSnapshot()
        for step in steps:
            state = step(state, beside(taken))
        assert state.allocations.keys() == granted
