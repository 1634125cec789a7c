from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deviceplugin.testing.numa import Hint, TopologyPolicy, device_hints, merge

TWO_BY_TWO = {"a": (0,), "b": (0,), "c": (1,), "d": (1,)}


def masks(hints: list[Hint] | None) -> list[tuple[set[int], bool]] | None:
    return None if hints is None else [(set(h.nodes or ()), h.preferred) for h in hints]


def test_devices_without_numa_nodes_give_no_hints() -> None:
    """A resource whose devices have no NUMA nodes gives no hints (None)."""
    assert device_hints({"a": (), "b": ()}, ["a"], [], 1, (0, 1)) is None


def test_preferred_is_the_least_number_of_nodes() -> None:
    """The preferred hints are those with the least number of NUMA nodes that would suffice if all devices were free."""
    hints = device_hints(TWO_BY_TWO, TWO_BY_TWO, [], 2, (0, 1))
    assert masks(hints) == [({0}, True), ({1}, True), ({0, 1}, False)]


def test_what_is_taken_makes_wide_hints_unpreferred() -> None:
    """If each of two NUMA nodes has one free device, two devices need both nodes, and that hint is not preferred."""
    assert masks(device_hints(TWO_BY_TWO, ["a", "c"], [], 2, (0, 1))) == [({0, 1}, False)]


def test_too_few_devices_give_an_empty_list() -> None:
    """Too few free devices give an empty list of hints, not None."""
    assert device_hints(TWO_BY_TWO, ["a"], [], 2, (0, 1)) == []


def test_reusable_devices_bind_the_node() -> None:
    """All hints include the NUMA node of a device that the container reuses from an init container."""
    assert masks(device_hints(TWO_BY_TWO, ["b", "c"], ["a"], 2, (0, 1))) == [({0}, True), ({0, 1}, False)]


def test_unknown_nodes_are_left_out() -> None:
    """NUMA nodes that the machine does not have are ignored."""
    assert masks(device_hints({"a": (7,), "b": (0,)}, ["a", "b"], [], 1, (0, 1))) == [({0}, True)]


@pytest.mark.parametrize(
    ("policy", "hints", "expected"),
    [
        ("none", [[Hint(frozenset({1}), True)]], (None, True)),
        ("best-effort", [], (frozenset({0, 1}), True)),
        ("single-numa-node", [None], (None, True)),
        ("best-effort", [[]], (frozenset({0, 1}), True)),
        ("restricted", [[]], (frozenset({0, 1}), False)),
        ("restricted", [[Hint(frozenset({0, 1}), True)]], (frozenset({0, 1}), True)),
        ("single-numa-node", [[Hint(frozenset({0, 1}), True)]], (None, False)),
        ("single-numa-node", [[Hint(frozenset({1}), True), Hint(frozenset({0, 1}), False)]], (frozenset({1}), True)),
        (
            "restricted",
            [
                [Hint(frozenset({0}), True), Hint(frozenset({0, 1}), False)],
                [Hint(frozenset({1}), True), Hint(frozenset({0, 1}), False)],
            ],
            (frozenset({0}), False),
        ),
        (
            "best-effort",
            [[Hint(frozenset({0}), True), Hint(frozenset({1}), True)], [Hint(frozenset({1}), True)]],
            (frozenset({1}), True),
        ),
    ],
)
def test_merge(
    policy: TopologyPolicy, hints: list[list[Hint] | None], expected: tuple[frozenset[int] | None, bool]
) -> None:
    """Each topology policy merges hints and admits pods as the kubelet's documentation and source say."""
    assert merge(policy, hints, (0, 1)) == expected


HINTS = st.lists(
    st.builds(Hint, st.none() | st.frozensets(st.integers(0, 3), min_size=1, max_size=4).map(frozenset), st.booleans()),
    max_size=4,
)


@given(st.lists(st.none() | HINTS, max_size=3), st.sampled_from(("best-effort", "restricted", "single-numa-node")))
def test_a_preferred_merge_is_one_that_all_prefer(hints: list[list[Hint] | None], policy: TopologyPolicy) -> None:
    """Except with best-effort, a pod is admitted only if preferred hints of all resources name the same NUMA nodes."""
    nodes, admitted = merge(policy, hints, (0, 1, 2, 3))
    if policy == "best-effort":
        assert admitted
    elif admitted:
        offered = [[Hint(None, True)] if one is None else one for one in hints]
        combinations = itertools.product(*offered)
        named = [{h.nodes for h in one if h.nodes is not None} for one in combinations if all(h.preferred for h in one)]
        wanted = nodes if nodes is not None else frozenset((0, 1, 2, 3))
        assert {wanted} in named or set() in named
