"""Random grants of devices, of parts of them, and of an adopted plugin's ids, whose responses have devices' nodes."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from deviceplugin.identity import UNIDENTIFIED, Tokens, identified
from deviceplugin.register import operations
from deviceplugin.register.identification import reach
from deviceplugin.register.question import View, Wanted
from deviceplugin.register.records import WHOLE, Change, Decision, RegisterSnapshot

LISTED, PARTS, ADOPTED, BOOT = "example.com/listed", "example.com/part", "vendor.example/adopted", "1"
NODES = {f"d{number}": frozenset({f"char:240:{number}"}) for number in range(3)}
CONTROL = "char:195:255"
VIEW = View(BOOT, present={(LISTED, name): tokens for name, tokens in NODES.items()})

Step = Callable[[RegisterSnapshot], RegisterSnapshot]
_ids = st.sampled_from(sorted(NODES))
_responses = st.frozensets(
    st.sampled_from([CONTROL, *(node for nodes in NODES.values() for node in nodes)]), max_size=3
)


def allocate(name: str) -> Step:
    """Return a step in which a pod requests a listed device."""
    wanted = Wanted((LISTED, name), identified(NODES[name], BOOT), WHOLE)
    return lambda state: state.following(operations.grant(LISTED, {name: wanted}, VIEW, 1.0)(state))


def allocate_part(name: str, whole: str) -> Step:
    """Return a step in which a pod requests a part of a listed device."""
    own = frozenset({f"uuid:{name}-{whole}"})
    wanted = Wanted((PARTS, f"{name}-{whole}"), identified(own, BOOT, within=NODES[whole]), WHOLE)
    return lambda state: state.following(operations.grant(PARTS, {wanted.key[1]: wanted}, VIEW, 1.0)(state))


def forward(name: str, nodes: Tokens) -> Step:
    """Return a step in which the adopted plugin responds to an Allocate of its id `name` with these nodes.

    If the pod must not get the nodes, the kubelet rejects the pod, and the id has no holder afterwards.
    """

    def step(state: RegisterSnapshot) -> RegisterSnapshot:
        was = state.allocations.get((ADOPTED, name))
        wanted = Wanted((ADOPTED, name), UNIDENTIFIED, WHOLE)
        state = state.following(operations.grant(ADOPTED, {name: wanted}, VIEW, 1.0)(state))
        decision: Decision[str] = reach(ADOPTED, [name], nodes, VIEW)(state)
        return end(ADOPTED, name)(state) if decision.answer and was is None else state.following(decision)

    return step


def end(resource: str, name: str) -> Step:
    """Return a step in which an allocation ends."""

    def step(state: RegisterSnapshot) -> RegisterSnapshot:
        present = (resource, name) in state.allocations
        changes = [Change("allocations", (resource, name), None)] if present else []
        return state.with_changes(changes, state.sequence + 1)

    return step


_steps = st.one_of(
    st.builds(allocate, _ids),
    st.builds(forward, _ids, _responses),
    st.builds(allocate_part, st.sampled_from("ab"), _ids),
    st.builds(end, st.sampled_from([LISTED, ADOPTED]), _ids),
    st.builds(lambda part, whole: end(PARTS, f"{part}-{whole}"), st.sampled_from("ab"), _ids),
)


@given(st.lists(_steps, max_size=12))
def test_a_listed_device_is_held_whole_or_in_parts_or_through_an_adopted_id(steps: list[Step]) -> None:
    """After any steps a device is held in one way only: as a whole, in parts, or through an adopted id's nodes."""
    state = RegisterSnapshot()
    for step in steps:
        state = step(state)
        opened: Tokens = frozenset().union(*(record.identity.reached for record in state.allocations_of(ADOPTED)))
        parts: Tokens = frozenset().union(*(record.identity.within for record in state.allocations_of(PARTS)))
        for record in state.allocations_of(LISTED):
            assert record.identity.tokens.isdisjoint(opened | parts)
        assert parts.isdisjoint(opened)


def test_parts_of_one_device_have_holders_at_the_same_time() -> None:
    """Two parts of a device can have holders at the same time; then the whole device is refused."""
    state = RegisterSnapshot()
    for step in (allocate_part("a", "d0"), allocate_part("b", "d0"), allocate("d1"), allocate("d0")):
        state = step(state)
    assert state.allocations.keys() == {(PARTS, "a-d0"), (PARTS, "b-d0"), (LISTED, "d1")}


def test_control_nodes_are_of_all() -> None:
    """A device and several adopted ids can have holders together although all responses name one control node."""
    state = RegisterSnapshot()
    for step in (allocate("d0"), forward("d0", frozenset({CONTROL})), forward("d1", frozenset({CONTROL}))):
        state = step(state)
    assert state.allocations.keys() == {(LISTED, "d0"), (ADOPTED, "d0"), (ADOPTED, "d1")}
