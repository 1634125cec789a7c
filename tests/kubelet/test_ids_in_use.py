"""Which ids are in use, and when they come free."""

from __future__ import annotations

from collections.abc import Iterable

from hypothesis import given
from hypothesis import strategies as st

from deviceplugin.kubelet.checkpoint import Allocation
from deviceplugin.kubelet.holders import WELL_APART, IdsInUse


def held(ids: Iterable[str], pod: str = "u1", container: str = "main") -> set[Allocation]:
    return {Allocation(pod, container, "example.com/r", one) for one in ids}


def known_of(known: IdsInUse) -> tuple[set[str], set[str]]:
    """Return the ids in use, and those that came free."""
    return set(known.ids), set(known.freed)


def test_a_device_comes_free_once_with_the_first_scan_without_a_holder() -> None:
    """A granted id is in use at once, and freed when its holder has ended."""
    known = IdsInUse().granted(["a"])
    assert known.ids == {"a"}
    known = known.observed(held("a"), 0.0, awake=True)
    assert known_of(known) == ({"a"}, set())
    assert not known.pending
    known = known.observed((), 1.0, awake=True)
    assert known_of(known) == (set(), {"a"})
    assert known.observed((), 2.0, awake=True).freed == frozenset()


def test_a_grant_whose_container_is_never_named_ends_after_two_awake_checkpoints_well_apart() -> None:
    """The kubelet may reject a pod after Allocate; a checkpoint that was not asked for proves nothing."""
    known = IdsInUse().granted(["a"])
    for at, awake in ((0.0, False), (10.0, True), (10.0 + WELL_APART / 2, True), (10.0 + 2 * WELL_APART, False)):
        known = known.observed((), at, awake=awake)
        assert known_of(known) == ({"a"}, set())
    assert known.observed((), 10.0 + 2 * WELL_APART, awake=True).freed == {"a"}


def test_a_grant_to_the_next_pod_keeps_the_id_in_use() -> None:
    """The former holder's end frees nothing while the new holder's container is not named yet."""
    known = IdsInUse().observed(held("a"), 0.0, awake=True).granted(["a"]).observed((), 1.0, awake=True)
    assert known_of(known) == ({"a"}, set())
    known = known.observed(held("a", "u2"), 2.0, awake=True)
    assert not known.pending
    assert not known.freed
    assert known.observed((), 3.0, awake=True).freed == {"a"}


def test_a_container_that_was_named_before_is_not_the_new_holder() -> None:
    """E0: the same pod's init container, or a former pod's, leaves the grant pending."""
    known = IdsInUse().granted(["a"]).observed(held("a", container="init"), 0.0, awake=True).granted(["a"])
    known = known.observed(held("a", container="init"), 1.0, awake=True)
    assert set(known.pending) == {"a"}
    known = known.observed(held("a", container="init") | held("a"), 2.0, awake=True)
    assert not known.pending


def test_each_grant_waits_as_long_as_the_first() -> None:
    """An id that is granted again waits for its new pod."""
    known = IdsInUse().granted(["a"]).observed((), 0.0, awake=True).granted(["a"])
    known = known.observed((), WELL_APART, awake=True)
    assert known.ids == {"a"}
    assert known.observed((), 2 * WELL_APART, awake=True).freed == {"a"}


_steps = st.lists(
    st.tuples(
        st.sampled_from(["grant", "scan", "sleeping scan"]),
        st.frozensets(st.sampled_from("abc")),
        st.sampled_from(["u1", "u2"]),
        st.sampled_from([0.1, 3.0, 60.0]),
    ),
    max_size=12,
)


@given(_steps)
def test_every_use_ends_in_one_release(steps: list[tuple[str, frozenset[str], str, float]]) -> None:
    """Whatever is seen, each id that was in use is freed in the end, and never while it is held."""
    known, owed, now = IdsInUse(), set[str](), 0.0
    for what, ids, pod, passed in (*steps, *[("scan", frozenset[str](), "u1", WELL_APART)] * 3):
        now += passed
        owed |= ids
        if what == "grant":
            known = known.granted(ids)
            continue
        known = known.observed(held(ids, pod), now, awake=what == "scan")
        assert known.freed.isdisjoint(ids)
        assert known.freed.isdisjoint(known.ids)
        assert known.freed <= owed
        owed -= known.freed
    assert owed == known.ids == set()
