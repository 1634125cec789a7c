"""The choice of devices that are close to each other."""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache
from itertools import combinations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from deviceplugin import topology
from deviceplugin.device import natural
from deviceplugin.topology import (
    Link,
    arranged,
    choose,
    distributed,
    links,
    numa_compact,
    numa_scores,
    packed,
)

PATIENT = 60.0
"""Seconds for a search: the tests check the answer and not the time that a busy machine needs."""

preferred = functools.partial(topology.preferred, deadline=PATIENT)

Scores = dict[frozenset[str], float]


def sims(*numbers: int) -> list[str]:
    return [f"sim-{number}" for number in numbers]


def scores(count: int, level: Callable[[int, int], float]) -> Scores:
    """Scores of pairs of gpu0, gpu1 and so on. level: returns the score of two numbers, the lower first."""
    return {frozenset((f"gpu{one}", f"gpu{other}")): level(one, other) for one, other in combinations(range(count), 2)}


def gpus(*numbers: int) -> list[str]:
    return [f"gpu{number}" for number in numbers]


def tree(*levels: tuple[int, int], last: int = Link.CROSS_CPU) -> Callable[[int, int], float]:
    """Scores of blocks of consecutive devices. levels: pairs of block size and score, the smallest block first."""

    def level(one: int, other: int) -> float:
        return next((score for size, score in levels if one // size == other // size), last)

    return level


# The hybrid cube mesh of V100: six NVLinks each, `nvidia-smi topo -m` gives NV1 or NV2.
CUBE_MESH = {
    (0, 1): 1, (0, 2): 1, (0, 3): 2, (0, 4): 2, (1, 2): 2, (1, 3): 1, (1, 5): 2, (2, 3): 2,
    (2, 6): 1, (3, 7): 1, (4, 5): 1, (4, 6): 1, (4, 7): 2, (5, 6): 2, (5, 7): 1, (6, 7): 2,
}  # fmt: skip
SWITCHES = tree((2, Link.ONE_SWITCH), (4, Link.HOST_BRIDGE))
TOPOLOGIES: dict[str, tuple[int, Scores]] = {
    "DGX-1V": (8, scores(8, lambda a, b: Link.NVLINK * CUBE_MESH.get((a, b), 0) + SWITCHES(a, b))),
    "DGX A100": (8, scores(8, lambda a, b: 12 * Link.NVLINK + SWITCHES(a, b))),
    "HGX H100": (8, scores(8, lambda _a, _b: 18 * Link.NVLINK + Link.CROSS_CPU)),
    "4 in pairs": (4, scores(4, tree((2, Link.ONE_SWITCH)))),
    "2 sockets": (8, scores(8, SWITCHES)),
    "2 sockets, 2 boards": (8, scores(8, tree((2, Link.SAME_BOARD), (4, Link.SEVERAL_SWITCHES)))),
    "ring": (8, scores(8, lambda a, b: Link.NVLINK if b - a in (1, 7) else Link.CROSS_CPU)),
    "DGX-2": (16, scores(16, lambda _a, _b: 6 * Link.NVLINK + Link.CROSS_CPU)),
    "DGX-2 on PCIe": (16, scores(16, lambda a, b: 6 * Link.NVLINK + tree((2, 50), (4, 40), (8, 20))(a, b))),
    "16 on 4 switches": (16, scores(16, tree((4, Link.ONE_SWITCH), (8, Link.SAME_CPU)))),
    "16 in a torus": (16, scores(16, lambda a, b: 100 * ((a // 4 == b // 4) + (a % 4 == b % 4)) * ((b - a) % 4 != 2))),
}


def reference(
    available: Collection[str], must_include: Collection[str], size: int, score: Mapping[frozenset[str], float]
) -> list[str]:
    """The docstring of `preferred`, implemented word by word, by brute force."""
    required = sorted(set(must_include), key=natural)
    free = sorted(set(available) - set(required), key=natural)
    missing = min(size - len(required), len(free))
    if missing <= 0:
        return required

    @cache
    def total(devices: frozenset[str]) -> float:
        return sum(score.get(frozenset(pair), 0) for pair in combinations(sorted(devices), 2))

    @cache
    def served(left: frozenset[str], size: int, most: int) -> tuple[float, ...]:
        if len(left) < size or not most:
            return ()
        sets = [frozenset(some) for some in combinations(sorted(left), size)]
        highest = max(map(total, sets))
        return (highest, *max(served(left - some, size, most - 1) for some in sets if total(some) == highest))

    sets = [frozenset(some) for some in combinations(free, missing)]
    highest = max(total(some.union(required)) for some in sets)
    everything = frozenset(free)

    def worth(some: frozenset[str]) -> tuple[object, ...]:
        left = everything - some
        if size == 1:
            return served(left, 4, 2), served(left, 2, 4), total(left)
        return served(left, size, len(left)), total(left)

    best = max((some for some in sets if total(some.union(required)) == highest), key=worth)
    return sorted(best.union(required), key=natural)


def amount(devices: Collection[str], score: Mapping[frozenset[str], float]) -> float:
    return sum(score.get(frozenset(pair), 0) for pair in combinations(devices, 2))


@st.composite
def requests(draw: st.DrawFn, most: int) -> tuple[list[str], list[str], int, Scores]:
    count = draw(st.integers(1, most))
    ids = draw(st.permutations(gpus(*range(count))))
    values: list[float] = draw(
        st.sampled_from([[0, 1], [0, 100], [10, 20, 50], [-3, 0, 3], list(range(9)), [0.5, 0.25, 7.0]])
    )
    known = draw(st.lists(st.sampled_from(values), min_size=count * count, max_size=count * count))
    score = {frozenset((ids[a], ids[b])): known[a * count + b] for a, b in combinations(range(count), 2)}
    if draw(st.booleans()):  # blocks of devices with equal scores
        block = draw(st.integers(1, count))
        score = {
            frozenset((ids[a], ids[b])): known[a // block * count + b // block]
            for a, b in combinations(range(count), 2)
        }
    available = draw(st.lists(st.sampled_from(ids), unique=True)) if draw(st.booleans()) else list(ids)
    must_include = draw(st.lists(st.sampled_from(ids), max_size=3, unique=True)) if draw(st.booleans()) else []
    return available, must_include, draw(st.integers(0, count + 1)), score


class TestPreferred:
    """`preferred` returns the set with the highest total, then with the best remainder, then with the smallest ids."""

    @given(requests(8))
    @settings(max_examples=6 * settings().max_examples)
    def test_it_is_what_the_docstring_says(self, request: tuple[list[str], list[str], int, Scores]) -> None:
        """With up to 8 devices, any scores and any request, the result is that of brute force."""
        assert preferred(*request) == reference(*request)

    @pytest.mark.parametrize(
        "size",
        [1, 4, 8, *(pytest.param(size, marks=pytest.mark.explore) for size in (2, 3, 5, 6, 7, 10, 13, 16))],
    )
    @pytest.mark.parametrize(
        "name",
        [
            "16 on 4 switches",
            "any",
            *(pytest.param(name, marks=pytest.mark.explore) for name in ("16 in a torus", "few", "fragments")),
        ],
    )
    def test_sixteen(self, name: str, size: int) -> None:
        """With 16 devices, the result is that of brute force."""
        random_ = random.Random(f"{name} {size}")
        made = {
            "any": lambda _a, _b: random_.random(),
            "few": lambda _a, _b: random_.choice((10, 20, 110)),
            "fragments": lambda a, b: 0 if (b - a) in (1, 5, 6) else 1,
        }
        score = scores(16, made[name]) if name in made else TOPOLOGIES[name][1]
        ids = random_.sample(gpus(*range(16)), 16)
        assert preferred(ids, (), size, score) == reference(ids, (), size, score)

    def test_ties_among_sixteen_are_broken_by_what_is_left_in_the_end(self) -> None:
        """Of two islands of 9 and 7, four devices come from the island of 7, which leaves the island of 9 whole."""
        score = scores(16, lambda a, b: 100 if (a < 9) == (b < 9) else 10)
        assert (
            preferred(gpus(*range(16)), (), 4, score)
            == reference(gpus(*range(16)), (), 4, score)
            == gpus(9, 10, 11, 12)
        )

    def test_natural_order_decides_in_the_end(self) -> None:
        """Among sets of equal scores the smallest ids in natural order are taken: 2 comes before 10."""
        count, score = TOPOLOGIES["DGX-2"]
        for size in range(1, count + 1):
            assert preferred(gpus(*range(count)), (), size, score) == gpus(*range(size))
        assert preferred(gpus(10, 9, 12, 2), (), 2, {}) == gpus(2, 9)

    def test_numa_scores_make_it_compact(self) -> None:
        """With NUMA scores only, one node is used if possible: the one with the fewest devices that are enough."""
        numa = {f"gpu{number}": (0,) if number < 5 else (1,) for number in range(8)}
        score = numa_scores(numa)
        assert score[frozenset(gpus(0, 1))] == Link.SAME_CPU
        assert score[frozenset(gpus(4, 5))] == Link.CROSS_CPU
        for size, best in ((2, gpus(5, 6)), (3, gpus(5, 6, 7)), (4, gpus(0, 1, 2, 3)), (5, gpus(0, 1, 2, 3, 4))):
            assert preferred(list(numa), (), size, score) == numa_compact(numa, list(numa), (), size) == best
        assert numa_scores({"gpu0": (0, 1), "gpu1": (1,), "gpu2": ()}) == {frozenset(gpus(0, 1)): Link.SAME_CPU}

    @given(
        st.lists(st.text(max_size=3), max_size=14),
        st.lists(st.text(max_size=3), max_size=4),
        st.integers(-3, 20),
        st.dictionaries(
            st.frozensets(st.text(max_size=3), max_size=3), st.one_of(st.integers(), st.floats(width=16)), max_size=12
        ),
    )
    @example(["a", "b", "c"], [], 2, {frozenset("ab"): math.nan, frozenset("bc"): math.inf, frozenset("ac"): -math.inf})
    @example(["a", "b", "c"], [], 2, {frozenset("ab"): 10**400, frozenset("bc"): -(10**400), frozenset("ac"): 1e-300})
    def test_it_never_raises(self, available: list[str], must: list[str], size: int, score: Scores) -> None:
        """For any input the result has the required devices and as many others as possible, sorted, each once."""
        chosen = preferred(available, must, size, score)
        assert set(must) <= set(chosen) <= {*available, *must}
        assert len(chosen) == max(len(set(must)), min(size, len({*available, *must})))
        assert chosen == sorted(set(chosen), key=natural)

    @given(requests(9), st.randoms(use_true_random=False))
    def test_the_order_of_the_input_does_not_matter(
        self, request: tuple[list[str], list[str], int, Scores], random_: random.Random
    ) -> None:
        """Order and duplicates of the input do not change the result."""
        available, must, size, score = request
        pairs = list(score.items())
        random_.shuffle(pairs)
        others = random_.sample(available, len(available)) + available[:2]
        assert preferred(others, must[::-1], size, dict(pairs)) == preferred(set(available), tuple(must), size, score)

    def test_fractions_are_told_apart(self) -> None:
        """Scores may be fractions and differ in magnitude; huge and tiny scores are compared by value."""
        assert preferred("abc", (), 2, {frozenset("ab"): 0.1, frozenset("bc"): 0.10000001}) == ["b", "c"]
        assert preferred("abc", (), 2, {frozenset("ab"): 1 << 200, frozenset("bc"): (1 << 200) + (1 << 180)}) == [
            "b",
            "c",
        ]
        assert preferred("abc", (), 2, {frozenset("ab"): 1e-9, frozenset("bc"): 2e-9}) == ["b", "c"]

    def test_the_shortcuts_change_nothing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The search gives the same result if it gives up its shortcut at once (`BUDGET` is its limit of steps)."""
        cases = [(name, size) for name in ("16 in a torus", "16 on 4 switches", "DGX-1V") for size in (1, 2, 3, 4)]
        quick = [preferred(gpus(*range(15)), ["gpu3"][: size - 1], size, TOPOLOGIES[name][1]) for name, size in cases]
        monkeypatch.setattr(topology, "BUDGET", -1)
        assert quick == [
            preferred(gpus(*range(15)), ["gpu3"][: size - 1], size, TOPOLOGIES[name][1]) for name, size in cases
        ]


def climb(ids: Sequence[str], size: int, score: Scores, random_: random.Random, starts: int) -> float:
    """Return the best total of many random sets, each improved by the best swaps until no swap helps."""
    rows = [[score.get(frozenset((one, other)), 0) for other in ids] for one in ids]
    best = -math.inf
    for _ in range(starts):
        inside = set(random_.sample(range(len(ids)), size))
        gains = [sum(row[device] for device in inside) for row in rows]
        while True:
            change, goes, enters = max(
                (gains[enters] - gains[goes] - rows[goes][enters], goes, enters)
                for goes in inside
                for enters in range(len(ids))
                if enters not in inside
            )
            if change <= 0:
                break
            inside ^= {goes, enters}
            gains = [gain - row[goes] + row[enters] for gain, row in zip(gains, rows, strict=True)]
        best = max(best, sum(gains[device] for device in inside) / 2)
    return best


class TestMany:
    """With more than 16 devices a search replaces brute force."""

    @pytest.mark.parametrize("count", [17, pytest.param(32, marks=pytest.mark.explore), 64])
    @pytest.mark.parametrize("kind", ["any", "sparse", "tree", "islands"])
    def test_it_is_nearly_the_best_known(self, kind: str, count: int) -> None:
        """The search reaches 0.98 of the best total of many random starts, and keeps the required devices."""
        random_ = random.Random(f"{kind} {count}")
        places = sorted(random_.sample(range(2 * count), count))
        by_tree = tree((4, 60), (8, 40), (32, 20))
        score = scores(
            count,
            {
                "any": lambda _a, _b: random_.randint(0, 300),
                "sparse": lambda _a, _b: 100 * (random_.random() < 0.3),
                "tree": lambda a, b: by_tree(places[a], places[b]),
                "islands": lambda a, b: 100 if places[a] % 9 == places[b] % 9 else 10,
            }[kind],
        )
        ids = gpus(*range(count))
        for size in (2, 3, 5, 8, 13, count // 2, count - 4):
            chosen = preferred(ids, (), size, score)
            assert len(chosen) == size
            assert amount(chosen, score) >= 0.98 * climb(ids, size, score, random_, 12)
            assert chosen == preferred(ids[::-1], (), size, score)
            kept = preferred(ids, ["gpu5", "gpu11"], size, score)
            assert len(kept) == size
            assert {"gpu5", "gpu11"} <= set(kept)

    def test_alike_devices_are_counted(self) -> None:
        """64 devices on 4 switches give few different sets: the search tries all of them and finds the best fit."""
        score = scores(64, lambda a, b: 50 if a % 4 == b % 4 else 10)
        available = [f"gpu{number}" for number in range(64) if number not in (1, 2, 5, 6, 9)]
        assert preferred(available, (), 13, score) == gpus(*range(13, 64, 4))
        assert preferred(available, (), 14, score) == gpus(*range(10, 64, 4))

    def test_a_hidden_clique_is_found(self) -> None:
        """The search finds twelve devices that are all close to each other, among 64 with a third of pairs close."""
        random_ = random.Random(3)
        hidden = set(random_.sample(range(64), 12))
        score = scores(64, lambda a, b: 100 if {a, b} <= hidden else random_.choice((0, 0, 100)))
        assert preferred(gpus(*range(64)), (), 12, score) == sorted(gpus(*hidden), key=natural)

    def test_hundreds_and_thousands(self) -> None:
        """Requests among 300 and 10,000 devices: sets grow from the closest devices."""
        ids = gpus(*range(300))
        score = scores(300, lambda a, b: 50 if a // 6 == b // 6 else 10)
        for size in (1, 4, 6, 12, 290):
            chosen = preferred(ids, (), size, score)
            assert len(chosen) == size
            whole, rest = divmod(size, 6)
            assert amount(chosen, score) == 10 * math.comb(size, 2) + 40 * (whole * 15 + math.comb(rest, 2))
        assert set(gpus(30, 31, 32)) < set(preferred(ids, ["gpu32"], 6, score)) == set(gpus(*range(30, 36)))
        many = gpus(*range(10_000))
        assert preferred(many, ["gpu77"], 4, {frozenset(gpus(500, 900)): 3}) == gpus(0, 77, 500, 900)
        assert preferred(many, (), 3, {}) == gpus(0, 1, 2)
        odd = {
            frozenset(gpus(1)): 5.0,
            frozenset(gpus(1, 2)): 10**400,
            frozenset(gpus(1, 3)): 0.5,
            frozenset("xy"): 7.0,
        }
        assert preferred(ids, gpus(3), 3, odd) == gpus(1, 2, 3)
        worse = {frozenset(("gpu0", other)): -1.0 for other in gpus(*range(1, 300))}
        assert "gpu0" not in preferred(ids, (), 290, worse)
        assert len(preferred(ids, gpus(0), 299, worse | {frozenset(gpus(3, 4)): -math.inf})) == 299

    def test_a_deadline_that_is_over_still_gives_a_set(self) -> None:
        """With a deadline of 0 s the first set that is found is the result."""
        score = scores(40, lambda a, b: (a * b) % 7)
        assert len(preferred(gpus(*range(40)), ["gpu3"], 9, score, deadline=0)) == 9


class Day:
    """A sequence of pods that start and end, the same for every rule."""

    def __init__(self, count: int, score: Scores) -> None:
        self.ids = gpus(*range(count))
        self.total = cache(functools.partial(amount, score=score))

    def mean(
        self, rule: Callable[[frozenset[str], int], frozenset[str]], seed: int, sizes: Sequence[int], load: float
    ) -> float:
        """Return the mean score of the allocated sets. load: the proportion of requests among the events."""
        random_, free, held, given = random.Random(seed), frozenset(self.ids), list[frozenset[str]](), list[float]()
        for _ in range(3000):
            if random_.random() < load:
                size = random_.choice(sizes)
                if size <= len(free):
                    held.append(rule(free, size))
                    free -= held[-1]
                    given.append(self.total(held[-1]))
            elif held:
                free |= held.pop(random_.randrange(len(held)))
        return sum(given) / len(given)

    def partition(self) -> Callable[[frozenset[str], int], frozenset[str]]:
        """Return the rule to compare with: the best set of the best partition of all free devices."""
        total = self.total

        @cache
        def value(free: frozenset[str], size: int) -> float:
            return max(
                (total(some) + value(free - some, size) for some in map(frozenset, combinations(free, size))), default=0
            )

        @cache
        def rule(free: frozenset[str], size: int) -> frozenset[str]:
            sets = map(frozenset, combinations(sorted(free, key=natural), size))
            return max(sets, key=lambda some: (total(some) + value(free - some, size), total(some)))

        return rule


class TestDay:
    """Over many requests and releases, the mean score is no worse than that of the best partition."""

    SMALL = (
        "DGX-1V",
        "2 sockets, 2 boards",
        *(
            pytest.param(name, marks=pytest.mark.explore)
            for name in ("4 in pairs", "ring", "DGX A100", "HGX H100", "2 sockets")
        ),
    )

    def worst(self, machine: tuple[int, Scores], streams: Sequence[Sequence[int]]) -> float:
        """Return the lowest mean at low to high load, divided by the mean of the partition rule."""
        count, score = machine
        day = Day(count, score)
        partition = day.partition()
        ours = cache(lambda free, size: frozenset(preferred(free, (), size, score)))
        return min(
            sum(day.mean(ours, seed, some, load) for seed in range(3))
            / sum(day.mean(partition, seed, some, load) for seed in range(3))
            for some in ([size for size in sizes if size <= count] for sizes in streams)
            for load in (0.5, 0.6, 0.7)
        )

    @pytest.mark.parametrize("name", SMALL)
    def test_known_machines(self, name: str) -> None:
        """The mean score is no worse than the partition rule's, except on the hybrid cube mesh without single devices.

        On this machine the highest total of a request takes one of the two closest pairs among four devices, and the
        next request would score higher with both halves of a ring.
        """
        mixed = ((1, 2, 4, 8), range(1, 9), (1, 2), (1, 2, 3, 4), (1, 1, 1, 2, 2, 4))
        assert self.worst(TOPOLOGIES[name], mixed) >= 1 - 1e-9
        without_one = self.worst(TOPOLOGIES[name], ((2,), (3,), (4,), (2, 4), (2, 3), (2, 4, 8)))
        assert without_one >= (0.97 if name == "DGX-1V" else 1 - 1e-9)

    def test_machines_that_nobody_built(self) -> None:
        """With random scores the mean is no worse than the partition rule's on average, and never by more than 5 %."""
        ratios = []
        for seed in range(6):
            random_ = random.Random(seed)
            score = scores(8, lambda _a, _b: random_.choice((10, 20, 30, 50)) + random_.choice((0, 0, 100, 200)))  # noqa: B023
            ratios.append(self.worst((8, score), ((1, 2, 4, 8), range(1, 9), (1, 2))))
        assert sum(ratios) / len(ratios) >= 1
        assert min(ratios) > 0.95


class TestPolicies:
    """The policies that choose among replicas."""

    ids = tuple(f"gpu{device}::{replica}" for device in range(4) for replica in range(3))
    physical: Mapping[str, str] = {one: one.partition("::")[0] for one in ids}
    score = TOPOLOGIES["4 in pairs"][1]

    def test_links_takes_replicas_of_different_devices(self) -> None:
        """`links` takes the closest devices, and a second replica of a device only after one replica of each."""
        assert links(self.ids, (), 2, self.score, self.physical) == ["gpu0::0", "gpu1::0"]
        assert links(self.ids, ["gpu2::1"], 2, self.score, self.physical) == ["gpu2::1", "gpu3::0"]
        assert len({self.physical[one] for one in links(self.ids, (), 4, self.score, self.physical)}) == 4
        assert len({self.physical[one] for one in links(self.ids, (), 5, self.score, self.physical)}) == 4
        assert len(links(self.ids, (), 5, self.score, self.physical)) == 5
        assert links(self.ids, ["gpu0::1", "gpu0::2"], 4, self.score, self.physical)[:3] == [
            "gpu0::1",
            "gpu0::2",
            "gpu1::0",
        ]
        assert links(gpus(0, 2, 3), (), 2, self.score, {}) == gpus(2, 3)

    def test_packed_fills_up_a_device(self) -> None:
        """`packed` takes the device with the fewest free replicas that are enough, and the required device first."""
        free = [one for one in self.ids if one not in ("gpu1::0", "gpu2::0", "gpu2::2")]
        assert packed(free, (), 1, self.physical) == ["gpu2::1"]
        assert packed(free, (), 2, self.physical) == ["gpu1::1", "gpu1::2"]
        assert packed(free, ["gpu3::2"], 2, self.physical) == ["gpu3::0", "gpu3::2"]
        assert packed(self.ids, (), 4, self.physical) == ["gpu0::0", "gpu0::1", "gpu0::2", "gpu1::0"]

    def test_distributed_spreads_over_devices(self) -> None:
        """`distributed` takes each replica from the least used device, counting the replicas already chosen."""
        free = [one for one in self.ids if one not in ("gpu0::0", "gpu2::0", "gpu2::2")]
        assert distributed(free, (), 1, self.physical) == ["gpu1::0"]
        assert distributed(free, (), 3, self.physical) == ["gpu0::1", "gpu1::0", "gpu3::0"]
        assert distributed(free, ["gpu1::1"], 2, self.physical) == ["gpu1::1", "gpu3::0"]
        assert distributed(self.ids, (), 12, self.physical) == list(self.ids)

    def test_none_takes_the_smallest_ids(self) -> None:
        """`none` takes the smallest ids in natural order."""
        assert choose("none", sims(10, 9, 2), sims(10), 2) == sims(2, 10)

    @given(
        st.sampled_from(["links", "packed", "distributed", "none"]),
        st.lists(st.sampled_from([*ids, "x", "y"])),
        st.lists(st.sampled_from([*ids, "z"]), max_size=3),
        st.integers(-2, 16),
        st.booleans(),
    )
    def test_every_policy_keeps_the_contract(
        self, policy: str, available: list[str], must: list[str], size: int, known: bool
    ) -> None:
        """For any input each policy returns the required ids and as many others as possible, sorted, each once."""
        physical = self.physical if known else {}
        chosen = choose(policy, available, must, size, score=self.score, physical=physical)
        assert set(must) <= set(chosen) <= {*available, *must}
        assert len(chosen) == max(len(set(must)), min(size, len({*available, *must})))
        assert chosen == sorted(set(chosen), key=natural)
        assert chosen == choose(policy, available[::-1], must * 2, size, score=self.score, physical=physical)

    def test_an_unknown_policy_is_an_error(self) -> None:
        """An unknown policy raises ValueError."""
        with pytest.raises(ValueError, match="best"):
            choose("best", (), (), 1)


class TestArranged:
    """`arranged` orders devices so that the first ones of the order are close."""

    def test_blocks_are_close(self) -> None:
        """Aligned blocks of 2 and 4 in the order are the best sets of these sizes."""
        mixed = [0, 4, 1, 5, 2, 6, 3, 7]
        score = scores(8, lambda a, b: SWITCHES(mixed.index(a), mixed.index(b)))
        order = arranged(gpus(*range(8)), score)
        assert sorted(order) == gpus(*range(8))
        for start in (0, 4):
            assert amount(order[start : start + 4], score) == 2 * 50 + 4 * 30
        for start in (0, 2, 4, 6):
            assert amount(order[start : start + 2], score) == 50

    def test_any_number(self) -> None:
        """The order has each device once, also without scores."""
        score = scores(13, lambda a, b: (a * b) % 5)
        assert sorted(arranged(gpus(*range(13)), score), key=natural) == gpus(*range(13))
        assert arranged(gpus(10, 2, 1), {}) == gpus(1, 2, 10)
        assert arranged((), score) == []


class TestNumaCompact:
    """`numa_compact` uses few NUMA nodes, the best fit, and natural order."""

    def test_ids_are_compared_naturally(self) -> None:
        """Digits in ids are compared by their value, at any length."""
        assert sorted(["sim-10", "sim-2", "sim-02", "sim", "9" * 5000, "3a"], key=natural) == [
            "3a", "9" * 5000, "sim", "sim-02", "sim-2", "sim-10",
        ]  # fmt: skip

    def test_the_node_with_the_fewest_free_devices_that_fits_is_used(self) -> None:
        """The node with the fewest free devices that are enough is used, which keeps the larger node whole."""
        devices = {f"sim-{n}": (0,) if n < 8 else (1,) for n in range(12)}
        assert numa_compact(devices, list(devices), [], 4) == sims(8, 9, 10, 11)
        assert numa_compact(devices, list(devices), [], 5) == sims(0, 1, 2, 3, 4)

    def test_the_nodes_of_required_devices_come_first(self) -> None:
        """Other devices are taken from the node of a required device first."""
        devices = {f"sim-{n}": (0,) if n < 8 else (1,) for n in range(12)}
        assert numa_compact(devices, list(devices), ["sim-11"], 3) == sims(8, 9, 11)
        assert numa_compact(devices, list(devices), ["sim-11"], 6) == sims(0, 1, 8, 9, 10, 11)

    def test_unknown_numa_comes_last(self) -> None:
        """Devices without a NUMA node are taken only when no other device is left."""
        devices: dict[str, tuple[int, ...]] = {"sim-1": (), "sim-5": (1,), "sim-7": (0,)}
        assert numa_compact(devices, ["sim-1", "sim-5", "sim-7", "new"], [], 3) == ["new", "sim-5", "sim-7"]
        assert numa_compact({}, sims(10, 9, 2), [], 2) == sims(2, 9)

    def test_a_device_near_two_nodes_counts_for_both(self) -> None:
        """A device of two NUMA nodes counts for both."""
        devices: dict[str, tuple[int, ...]] = {"sim-0": (0,), "sim-1": (0, 1), "sim-2": (1,), "sim-3": (1,)}
        assert numa_compact(devices, list(devices), [], 2) == sims(0, 1)
        assert numa_compact(devices, list(devices), [], 3) == sims(1, 2, 3)
        assert numa_compact(devices, list(devices), [], 4) == sims(0, 1, 2, 3)

    @given(
        st.dictionaries(st.sampled_from(sims(*range(14))), st.lists(st.integers(0, 3), max_size=2)),
        st.lists(st.sampled_from(sims(*range(14)))),
        st.lists(st.sampled_from(sims(*range(14))), max_size=3),
        st.integers(-1, 16),
    )
    def test_it_uses_as_few_nodes_as_there_can_be(
        self, devices: dict[str, list[int]], available: list[str], must: list[str], size: int
    ) -> None:
        """The result has as few NUMA nodes as possible, if each device has one node and no device is required."""
        chosen = numa_compact(devices, available, must, size)
        assert set(must) <= set(chosen) <= {*available, *must}
        assert len(chosen) == max(len(set(must)), min(size, len({*available, *must})))
        assert chosen == sorted(set(chosen), key=natural) == numa_compact(devices, available[::-1], must, size)
        single = {device: nodes[0] for device, nodes in devices.items() if len(nodes) == 1}
        if not must and set(available) <= single.keys() and 0 < size <= len(set(available)):
            free = sorted(([single[one] for one in set(available)].count(node) for node in range(4)), reverse=True)
            needed = next(count for count in range(5) if sum(free[:count]) >= size)
            assert len({single[one] for one in chosen}) == needed
