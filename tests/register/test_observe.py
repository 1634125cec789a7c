"""How the result of a scan changes the register: which grants end, and which holders are added."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from deviceplugin.identity import UNIDENTIFIED, Identity, identified
from deviceplugin.register import operations
from deviceplugin.register.operations import Observed
from deviceplugin.register.question import View, Wanted
from deviceplugin.register.records import UNKNOWN, WHOLE, AllocationRecord, Amount, DeviceRecord, Operation, State
from deviceplugin.register.records import Change as Changed
from deviceplugin.register.rules import WELL_APART, KubeletSnapshot, ObservedAllocation
from deviceplugin.register.store import MemoryStore

R = "example.com/r"
HALF = Amount("1/2")


class Known:
    """A register's records of one resource, and what the last scan changed."""

    def __init__(self) -> None:
        self.store = MemoryStore()
        self.last = Observed()

    def do(self, operation: Operation[object]) -> object:
        """Run an operation, and record its changes at once."""
        decision = operation(self.store.snapshot)
        now = self.store.snapshot
        self.store.snapshot = now.with_changes(decision.changes, now.sequence + 1) if decision.changes else now
        return decision.answer

    def granted(self, ids: Iterable[str], identity: Identity = UNIDENTIFIED, amount: Amount = WHOLE) -> Known:
        wanted = {one: Wanted((R, one.partition("::")[0]), identity, amount) for one in ids}
        assert self.do(operations.grant(R, wanted, View(), 0.0)) is None
        return self

    def observed(
        self, held: Iterable[ObservedAllocation | str], at: float, *, current: bool = True, sequence: int | None = None
    ) -> Known:
        """Record a scan's result. sequence: the register's sequence when it began, or None for the present."""
        ids = {one if isinstance(one, str) else one.device: one for one in held}
        by_id = {name: named(name) if isinstance(one, str) else one for name, one in ids.items()}
        begun = self.store.snapshot.sequence if sequence is None else sequence
        self.last = self.observe(KubeletSnapshot(begun, at, current, by_id))
        return self

    def observe(self, seen: KubeletSnapshot) -> Observed:
        done = self.do(operations.observe(R, seen, 0.0))
        assert isinstance(done, Observed)
        return done

    @property
    def ids(self) -> set[str]:
        return {device_id for _, device_id in self.store.snapshot.allocations}

    @property
    def freed(self) -> set[str]:
        return set(self.last.released)

    @property
    def pending(self) -> set[str]:
        return {one.device_id for one in self.store.snapshot.allocations.values() if one.pending}

    def record(self, device_id: str) -> AllocationRecord:
        return self.store.snapshot.allocations[R, device_id]


def named(
    device: str, pod: str = "u1", *containers: str, sure: bool = True, identity: Identity = UNIDENTIFIED
) -> ObservedAllocation:
    holders = frozenset((pod, one) for one in containers or ("main",))
    return ObservedAllocation(device, pod, sure, holders, identity=identity)


def known_of(known: Known) -> tuple[set[str], set[str]]:
    """Return the ids in use, and the ids that the last scan freed."""
    return known.ids, known.freed


def test_a_grant_whose_container_is_never_named_ends_after_two_awake_checkpoints_well_apart() -> None:
    """A grant ends if two current checkpoints, `WELL_APART` seconds apart, do not name its container."""
    known = Known().granted(["a"])
    for at, current in ((0.0, False), (10.0, True), (10.0 + WELL_APART / 2, True), (10.0 + 2 * WELL_APART, False)):
        known.observed((), at, current=current)
        assert known_of(known) == ({"a"}, set())
    assert known.observed((), 10.0 + WELL_APART).freed == {"a"}


def test_a_grant_to_the_next_pod_keeps_the_id_in_use() -> None:
    """If the former holder ends before a checkpoint names the container of the next grant, the id stays in use."""
    known = Known().observed(["a"], 0.0).granted(["a"]).observed((), 1.0)
    assert known_of(known) == ({"a"}, set())
    known.observed([named("a", "u2")], 2.0)
    assert not known.pending
    assert not known.freed
    assert known.observed((), 3.0).freed == {"a"}


def test_a_container_that_was_named_before_is_not_the_new_holder() -> None:
    """A container that a checkpoint named before a grant is not taken for the grant's container: it stays unknown."""
    init = named("a", "u1", "init")
    known = Known().granted(["a"]).observed([init], 0.0).granted(["a"]).observed([init], 1.0)
    assert known.pending == {"a"}
    known.observed([named("a", "u1", "init", "main")], 2.0)
    assert not known.pending


def test_the_response_of_the_grant_shows_the_new_holder() -> None:
    """The grant's response in the checkpoint names its container, even if this container was a holder before."""
    known = Known().granted(["a"]).observed(["a"], 0.0).granted(["a"]).observed(["a"], 1.0)
    assert known.pending == {"a"}
    known.observed([replace(named("a"), begun=True)], 2.0)
    assert not known.pending
    assert known.record("a").holders == {("u1", "main")}


def test_a_name_that_only_an_old_checkpoint_has_is_not_the_new_holder() -> None:
    """A container that only an old checkpoint names is not the grant's: its pod may have ended before the grant."""
    known = Known().granted(["a"]).observed([named("a", sure=False)], 0.0)
    assert known.pending == {"a"}
    assert not known.record("a").holders
    known.observed([named("a")], 1.0)
    assert not known.pending


def test_a_scan_that_began_before_a_grant_says_nothing_of_it() -> None:
    """A scan that began before a grant neither ends the grant nor names its container."""
    known = Known().observed(["a"], 0.0)
    begun = known.store.snapshot.sequence
    known.granted(["a", "b"])
    assert not known.observed((), 2 * WELL_APART, sequence=begun).freed
    assert known.pending == known.ids == {"a", "b"}


def test_what_is_found_is_recorded_as_what_its_answer_says() -> None:
    """An id that a scan finds is recorded with the identity and amount in its AllocateResponse."""
    identity = identified(frozenset({"n1"}), "boot")
    half = ObservedAllocation("a", "p", holders=frozenset({("u1", "main")}), identity=identity, amount=HALF)
    known = Known()
    done = known.observe(KubeletSnapshot(0, 0.0, True, {"a::0": half}))
    assert done.found == ("a::0",)
    record = known.record("a::0")
    assert (record.device, record.identity, record.amount, record.pending) == ("a", identity, HALF, False)


def test_what_is_not_known_of_a_holding_is_taken_from_its_answer() -> None:
    """If identity and amount of a holder are unknown, they are taken from its AllocateResponse; known values stay."""
    known = Known()
    known.do(operations.add_holders([("u1", "main", R, "a::0"), ("u2", "main", R, "b::1")], 0.0))
    assert [known.record(one).amount for one in ("a::0", "b::1")] == [UNKNOWN, UNKNOWN]
    assert [known.record(one).device for one in ("a::0", "b::1")] == ["a", "b"]
    first, second = (identified(frozenset({one}), "boot") for one in ("n1", "n2"))
    for identity, amount in ((first, HALF), (second, WHOLE)):
        one = ObservedAllocation("a", "p", holders=frozenset({("u1", "main")}), identity=identity, amount=amount)
        known.observe(KubeletSnapshot(known.store.snapshot.sequence, 0.0, True, {"a::0": one}))
        assert (known.record("a::0").identity, known.record("a::0").amount) == (first, HALF)
    assert known.ids == {"a::0"}


def test_a_device_that_is_found_before_its_list_gets_its_name_with_it() -> None:
    """An id such as x::1, found before the device list, gets the right device's name once there is a list."""
    known = Known()
    holders = frozenset({("u1", "main")})
    for device in ("x", "x::1"):
        seen = {"x::1": ObservedAllocation(device, "p", holders=holders)}
        known.observe(KubeletSnapshot(known.store.snapshot.sequence, 0.0, True, seen))
        assert known.record("x::1").device == device


def test_further_holders_are_recorded_beside_those_before() -> None:
    """Further holders are added to an id's record; holders that it already has change nothing."""
    known = Known().granted(["a"], amount=HALF)
    for _ in range(2):
        known.do(operations.add_holders([("u1", "main", R, "a"), ("u2", "", R, "a")], 0.0))
        record = known.record("a")
        assert record.holders == {("u1", "main"), ("u2", "")}
        assert (record.pending, record.amount) == (True, HALF)
        sequence = known.store.snapshot.sequence
    known.do(operations.add_holders([("u1", "main", R, "a")], 0.0))
    assert known.store.snapshot.sequence == sequence


def test_a_pod_that_holds_what_is_on_the_other_side_quarantines_it() -> None:
    """A device for claims that a pod holds by limits is quarantined, unless only an old checkpoint says so."""
    for sure in (False, True):
        known = Known()
        device = Changed("devices", (R, "a"), DeviceRecord(R, "a", State.DRA, 0.0))
        known.store.snapshot = known.store.snapshot.with_changes([device], 1)
        known.observed([named("a", sure=sure)], 0.0)
        assert known.last.quarantined == (("a",) if sure else ())
        state = State.QUARANTINED if sure else State.DRA
        assert known.store.snapshot.device(R, "a").state is state


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
    """Whatever scans and grants happen, each id that was used is freed in the end, and never while it is held."""
    known, owed, now = Known(), set[str](), 0.0
    for what, ids, pod, passed in (*steps, *[("scan", frozenset[str](), "u1", WELL_APART)] * 3):
        now += passed
        owed |= ids
        if what == "grant":
            known.granted(ids)
            continue
        known.observed([named(one, pod) for one in ids], now, current=what == "scan")
        assert known.freed.isdisjoint(ids)
        assert known.freed.isdisjoint(known.ids)
        assert known.freed <= owed
        owed -= known.freed
    assert owed == known.ids == set()
