from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deviceplugin.testing.numa import Hint, TopologyPolicy, device_hints, merge

TWO_BY_TWO = {"a": (0,), "b": (0,), "c": (1,), "d": (1,)}


@pytest.mark.parametrize(
    ("devices", "free", "reusable", "count", "expected"),
    [
        ({"a": (), "b": ()}, "a", "", 1, None),
        (TWO_BY_TWO, "abcd", "", 2, [({0}, True), ({1}, True), ({0, 1}, False)]),
        (TWO_BY_TWO, "ac", "", 2, [({0, 1}, False)]),
        (TWO_BY_TWO, "a", "", 2, []),
        (TWO_BY_TWO, "bc", "a", 2, [({0}, True), ({0, 1}, False)]),
        ({"a": (7,), "b": (0,)}, "ab", "", 1, [({0}, True)]),
    ],
    ids=[
        "devices without NUMA nodes give no hints",
        "the least number of nodes is preferred",
        "what is taken makes wide hints unpreferred",
        "too few devices give an empty list",
        "a reused device binds the node",
        "nodes that the machine lacks are left out",
    ],
)
def test_hints(
    devices: dict[str, tuple[int, ...]],
    free: str,
    reusable: str,
    count: int,
    expected: list[tuple[set[int], bool]] | None,
) -> None:
    """A resource's hints are the sets of NUMA nodes that have enough devices; those with the fewest are preferred."""
    hints = device_hints(devices, list(free), list(reusable), count, (0, 1))
    assert (None if hints is None else [(set(hint.nodes or ()), hint.preferred) for hint in hints]) == expected


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
