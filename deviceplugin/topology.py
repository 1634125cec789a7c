"""Which devices go best together: pure functions over sets of ids, NUMA nodes and link scores.

The servicer asks this module what to prefer, the DRA side in which order to publish. Nothing here
does I/O or knows a Device; what is not known about an id costs that id its place, never an error.
Ids are compared naturally: "sim-2" comes before "sim-10".

`preferred` is exact for up to 16 devices, in milliseconds and without a compiled library, for two
reasons. Interchangeable devices (all 16 behind one NVSwitch, the two on one PCIe switch) are
counted, not told apart. And what is left are at most 2^16 sets, few enough to keep a number of
each in one long integer: one addition then adds to all of them, one AND filters all of them.
"""

from __future__ import annotations

import enum
import heapq
import math
import re
import sys
import time
from array import array
from collections import Counter, deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import combinations, groupby, islice, product
from operator import add, itemgetter, neg, sub
from types import MappingProxyType
from typing import Any, Final, NamedTuple

__all__ = [
    "Link",
    "Policy",
    "arranged",
    "choose",
    "distributed",
    "links",
    "natural",
    "numa_compact",
    "numa_scores",
    "packed",
    "preferred",
    "unordered",
]

_NOTHING: Final[Mapping[Any, Any]] = MappingProxyType({})
Score = Mapping[frozenset[str], float]
"""How close two devices are, by frozenset({a, b}); higher is closer, a pair that is missing has 0."""

_DIGITS: Final = re.compile(r"([0-9]+)")
_LANES: Final = {16: "H", 32: "I", 64: "Q"}
"""Widths of the lanes of a long integer, in bits, and what an array calls them."""
_EXACT: Final = 1 << 16
"""Sets of devices (interchangeable ones counted) up to which all are looked at."""
_USUAL: Final = ((4, 2), (2, 4))
"""Requests that may follow one for a single device: their size, and how many are looked at."""
_BUDGET: Final = 40_000
"""Sets that are tried on what is left before all of it is looked at together."""
_STEPS: Final = 500
"""Devices that the search adds, all sets that it grows together."""
_SWAPS: Final = 100
"""Swaps that the search tries on each of the best sets."""
_STARTS: Final = 8
"""How many sets are the best."""
_DENSE: Final = 256
"""Devices up to which scores are looked at as a matrix."""


class Link(enum.IntEnum):
    """How near two devices are, on the scale that `preferred` is used with.

    The levels of PCIe are exclusive; NVLinks come on top, NVLINK for each.
    """

    NVLINK = 100
    SAME_BOARD = 60
    ONE_SWITCH = 50
    SEVERAL_SWITCHES = 40
    HOST_BRIDGE = 30
    SAME_CPU = 20
    CROSS_CPU = 10


def natural(device: str) -> tuple[object, ...]:
    """Return a sort key that compares runs of digits by value: sim-2, sim-02, sim-10."""
    parts: list[object] = _DIGITS.split(device)
    for at in range(1, len(parts), 2):
        number = str(parts[at]).lstrip("0")
        parts[at] = (len(number), number)
    return tuple(parts), device


def _in_order(devices: Iterable[str]) -> list[str]:
    return sorted(set(devices), key=natural)


def preferred(
    available: Collection[str], must_include: Collection[str], size: int, score: Score, *, deadline: float = 0.25
) -> list[str]:
    """Choose the `size` devices out of `available` that are closest together.

    score: how close two devices are, by frozenset({a, b}), usually NVLinks x 100 plus the level of
    PCIe (see Link); missing pairs have 0. Chosen is the set with

    1. the highest total of its pairs' scores; among equals the one that leaves the best remainder:
    2. the highest total that the next request of this size can get, then the one after it, and so
       on until fewer than `size` devices are left, each served by this rule;
    3. the highest total of all pairs that are left;
    4. the smallest ids, in natural order.

    A single device is the one whose loss hurts least: in place of 2, what two requests for four
    devices can still get, one after the other, and then, among equals, what four requests for two.

    All of this is exact for up to 16 devices, and beyond as long as enough of them are
    interchangeable. Otherwise a search follows 1, 3 and 4 as far as it gets in a fixed number of
    steps (some 10 ms for 64 devices) or, should the machine be that slow, until `deadline` seconds
    have passed: only then can two calls differ. The order and the repetitions of the input never
    matter.

    `must_include` is always kept, even if it is longer than `size` or not `available`; if there are
    too few devices, all of them are returned. Scores that are no integers are rounded to twelve
    digits of the largest. The list is in the natural order of the ids.
    """
    stop = time.perf_counter() + deadline
    required = _in_order(must_include)
    free = _in_order(set(available).difference(required))
    missing = size - len(required)
    if missing <= 0 or not free:
        return required
    if missing >= len(free):
        return _in_order(required + free)
    if len(free) > _DENSE:
        free = _pool(free, required, missing, score)
        if missing >= len(free):
            return _in_order(required + free)
    matrix, bonus = _matrix(free, required, score)
    classes = _interchangeable(matrix, bonus)
    if len(free) <= 64 and math.prod(len(members) + 1 for members in classes) <= _EXACT:
        chosen = _Lattice(matrix, bonus, classes).choose(missing, size)
    else:
        chosen = _search(matrix, bonus, missing, classes, stop)
    return _in_order([*required, *(free[at] for at in chosen)])


class Policy(enum.StrEnum):
    """What makes devices go well together."""

    LINKS = "links"
    """Devices that are closely linked, as `preferred` says; replicas of different devices."""
    PACKED = "packed"
    """Replicas of as few devices as possible."""
    DISTRIBUTED = "distributed"
    """Replicas of the devices that are used least."""
    NONE = "none"
    """Any, in natural order."""


def choose(
    policy: Policy | str,
    available: Collection[str],
    must_include: Collection[str],
    size: int,
    *,
    score: Score = _NOTHING,
    physical: Mapping[str, str] = _NOTHING,
) -> list[str]:
    """Choose `size` of the `available` ids by a policy; `must_include` is always kept.

    score: as for `preferred`, between physical devices. physical: the device of each id on this
    node, given or not; an id that is missing is a device by itself.

    Raises:
        ValueError: there is no such policy.

    """
    match Policy(policy):
        case Policy.LINKS:
            return links(available, must_include, size, score, physical)
        case Policy.PACKED:
            return packed(available, must_include, size, physical)
        case Policy.DISTRIBUTED:
            return distributed(available, must_include, size, physical)
    return unordered(available, must_include, size)


def links(
    available: Collection[str], must_include: Collection[str], size: int, score: Score, physical: Mapping[str, str]
) -> list[str]:
    """Choose replicas of different devices that are closest together.

    Once every device that is free has given one, the next round begins. Of a device the smallest
    id is taken. Without replicas this is `preferred`.
    """
    taken = set(must_include)
    free = _by_device(set(available) - taken, physical)
    required = {physical.get(one, one) for one in taken}
    while (missing := size - len(taken)) > 0 and free:
        devices = preferred([*free, *required], required, missing + len(required), score)
        for device in devices:
            if device not in required:
                taken.add(free[device].pop())
        free = {device: some for device, some in free.items() if some}
        required = set()
    return _in_order(taken)


def packed(
    available: Collection[str], must_include: Collection[str], size: int, physical: Mapping[str, str]
) -> list[str]:
    """Choose replicas of as few devices as possible, of those that have the fewest free replicas.

    The devices of `must_include` come first; see `numa_compact`, whose nodes are the devices here.
    """
    devices = _in_order(physical.get(one, one) for one in {*available, *must_include})
    places = {device: (place,) for place, device in enumerate(devices)}
    nodes = {one: places[physical.get(one, one)] for one in {*available, *must_include}}
    return numa_compact(nodes, available, must_include, size)


def distributed(
    available: Collection[str], must_include: Collection[str], size: int, physical: Mapping[str, str]
) -> list[str]:
    """Choose replicas one by one, each of the device that has the fewest in use by then.

    In use are those that `physical` has and that are not `available`, and what is chosen. Among
    equals the device with the most free replicas, then the smallest id.
    """
    taken = set(must_include)
    free = _by_device(set(available) - taken, physical)
    used = Counter(physical.get(one, one) for one in {*physical, *taken}.difference(set(available) - taken))
    order = {device: place for place, device in enumerate(_in_order(free))}
    heap = [(used[device], -len(some), order[device], device) for device, some in free.items()]
    heapq.heapify(heap)
    while len(taken) < size and heap:
        count, left, place, device = heapq.heappop(heap)
        taken.add(free[device].pop())
        if left < -1:
            heapq.heappush(heap, (count + 1, left + 1, place, device))
    return _in_order(taken)


def unordered(available: Collection[str], must_include: Collection[str], size: int) -> list[str]:
    """Choose the smallest ids."""
    taken = set(must_include)
    taken.update(heapq.nsmallest(size - len(taken), set(available) - taken, key=natural))
    return _in_order(taken)


def _by_device(ids: Iterable[str], physical: Mapping[str, str]) -> dict[str, list[str]]:
    """Return the ids of each device, the smallest last."""
    devices: dict[str, list[str]] = {}
    for one in sorted(ids, key=natural, reverse=True):
        devices.setdefault(physical.get(one, one), []).append(one)
    return devices


def arranged(devices: Collection[str], score: Score) -> list[str]:
    """Return the devices in an order whose blocks of 2, 4, 8 and so on are close together.

    Who takes devices from the front, as the scheduler does with those of a slice, then takes good
    sets: the first half (up to the next power of two) is what `preferred` gives, and so on in both.
    """
    ids = _in_order(devices)
    if len(ids) < 3 or not score:
        return ids
    half = 1 << (len(ids) - 1).bit_length() - 1
    first = preferred(ids, (), half, score)
    return arranged(first, score) + arranged(set(ids).difference(first), score)


def numa_scores(devices: Mapping[str, Sequence[int]]) -> dict[frozenset[str], float]:
    """Return scores from NUMA nodes alone: 20 for devices that share one, 10 across nodes.

    devices: id to its NUMA nodes; one without any has no scores. There are n^2/2 pairs: for many
    devices use `numa_compact`, which needs none.
    """
    known = [(device, frozenset(nodes)) for device, nodes in devices.items() if nodes]
    return {
        frozenset((one, other)): float(Link.CROSS_CPU if nodes.isdisjoint(others) else Link.SAME_CPU)
        for (one, nodes), (other, others) in combinations(known, 2)
    }


def numa_compact(
    devices: Mapping[str, Sequence[int]], available: Collection[str], must_include: Collection[str], size: int
) -> list[str]:
    """Choose `size` of the `available` ids on as few NUMA nodes as possible; O(n log n).

    devices: id to its NUMA nodes, empty (or no entry) if unknown; a device near several nodes
    counts for each of them. The nodes of `must_include` come first; one of them that can hold all
    that is missing is enough. Otherwise they are emptied, and what is still missing comes from the
    node with the fewest free devices that holds it all, or, while there is none, from the node with
    the most. Devices of unknown NUMA come last. Ties: the lower node, then the smaller id.

    `must_include` is always kept, even if it is longer than `size` or not `available`; if there are
    too few devices, all of them are returned. The list is in the natural order of the ids.
    """
    taken = set(must_include)
    free = set(available) - taken
    missing = min(size - len(taken), len(free))
    if missing <= 0:
        return _in_order(taken)
    nodes: dict[int, set[str]] = {}
    for device in free:
        for node in devices.get(device, ()):
            nodes.setdefault(node, set()).add(device)
    opened: dict[int, int] = {}
    for device in taken:
        for node in set(devices.get(device, ())):
            opened[node] = opened.get(node, 0) + 1

    def take(candidates: Iterable[str], count: int) -> None:
        nonlocal missing
        for device in heapq.nsmallest(count, candidates, key=natural):
            for node in set(devices.get(device, ())):
                nodes[node].discard(device)
            taken.add(device)
            free.discard(device)
            missing -= 1

    holding = [node for node in opened if len(nodes.get(node, ())) >= missing]
    if holding:
        take(nodes[min(holding, key=lambda node: (-opened[node], len(nodes[node]), node))], missing)
    for node in sorted(opened, key=lambda node: (-opened[node], node)):
        if node in nodes:
            take(set(nodes[node]), missing)
    # Sizes only shrink (by devices near several nodes), so a stale entry is put back with its true size.
    largest = [(-len(members), node) for node, members in nodes.items()]
    heapq.heapify(largest)
    while missing and largest:
        stale, node = heapq.heappop(largest)
        members = nodes[node]
        if len(members) < -stale:
            if members:
                heapq.heappush(largest, (-len(members), node))
            continue
        if len(members) >= missing:
            node = min((n for n in nodes if len(nodes[n]) >= missing), key=lambda n: (len(nodes[n]), n))
        take(set(nodes[node]), missing)
    take(free, missing)
    return _in_order(taken)


def _matrix(free: Sequence[str], required: Sequence[str], score: Score) -> tuple[list[list[int]], list[int]]:
    """Return the scores among `free` as integers of at least 0, and of each with all `required`.

    All pairs are raised by the same amount, which changes no order among sets of one size.
    """
    count = len(free)
    among = [score.get(frozenset(pair), 0) for pair in combinations(free, 2)]
    beside = [score.get(frozenset(pair), 0) for pair in product(free, required)]
    whole = _integers([*among, *beside], 46 - (len(required) + 1).bit_length())  # sums stay below 2^60
    bonus = [sum(whole[at : at + len(required)]) for at in range(len(among), len(whole), len(required) or 1)]
    least = min(bonus, default=0)
    bonus = [value - least for value in bonus] or [0] * count
    pairs = whole[: len(among)]
    lowest = min(pairs, default=0)
    unit = math.gcd(*bonus, *(value - lowest for value in pairs)) or 1
    rest = iter([(value - lowest) // unit for value in pairs])
    matrix: list[list[int]] = []
    for row in range(count):
        matrix.append([*(above[row] for above in matrix), 0, *islice(rest, count - 1 - row)])
    return matrix, [value // unit for value in bonus]


def _integers(values: list[float], bits: int) -> list[int]:
    """Return the values as integers of so many bits, on one scale; exactly if they are such integers."""
    if set(map(type, values)) != {int}:
        values = [_finite(value) for value in values]
    largest = max(map(abs, values), default=0)
    if largest < 1 << bits and all(value == int(value) for value in values):
        return [int(value) for value in values]
    shift = bits - math.frexp(_finite(largest))[1]
    return [round(math.ldexp(_finite(value), shift)) for value in values]


def _finite(value: float) -> float:
    return 0 if value != value else min(max(value, -1e300), 1e300)


def _interchangeable(matrix: Sequence[list[int]], bonus: Sequence[int]) -> list[list[int]]:
    """Return the classes of devices that have the same scores with all others, the last first."""
    classes: list[list[int]] = []
    sums = [sum(row) for row in matrix]
    for device, row in enumerate(matrix):
        for members in classes:
            first = members[0]
            if sums[device] == sums[first] and bonus[device] == bonus[first]:
                swapped = row.copy()
                swapped[device], swapped[first] = swapped[first], 0
                if swapped == matrix[first]:
                    members.append(device)
                    break
        else:
            classes.append([device])
    return classes[::-1]


def _highest(states: Sequence[int], totals: Sequence[int]) -> tuple[int, list[int]]:
    """Return the highest total of any of the states, and the states that have it."""
    found = itemgetter(*states)(totals) if len(states) > 1 else (totals[states[0]],)
    highest = max(found)
    ties, at = [], -1
    for _ in range(found.count(highest)):
        at = found.index(highest, at + 1)
        ties.append(states[at])
    return highest, ties


class _Lattice:
    """All sets of some devices, where interchangeable devices are counted instead of told apart.

    A state says how many devices of each class are in a set. It is a number whose digits are these
    counts (digit `c` has the weight `weights[c]` and goes up to the size of class `c`), so that a
    set taken out of another is a subtraction. A family of states is an integer with a bit for each.
    """

    def __init__(self, matrix: Sequence[Sequence[int]], bonus: Sequence[int], classes: list[list[int]]) -> None:
        self.devices = len(matrix)
        self.single = len(classes) == len(matrix)
        self.classes = classes
        self.weights: list[int] = []
        sizes = bytes(1)
        for members in classes:
            self.weights.append(len(sizes))
            sizes = b"".join(sizes.translate(bytes(range(n, 256)) + bytes(n)) for n in range(len(members) + 1))
        self.states = len(sizes)
        self.sizes = sizes
        """How many devices each state has; a state is part of another if taking it out takes that many."""
        self._at_least: dict[tuple[int, int], int] = {}
        # A lane of each long integer holds one state's number; no sum may reach the next lane.
        most = sum(map(sum, matrix)) + sum(bonus)
        self._width = next(width for width in _LANES if most >> width == 0)
        table, ones = 0, 1
        for place, (members, weight) in enumerate(zip(classes, self.weights, strict=True)):
            row = matrix[members[0]]
            within = row[members[1]] if len(members) > 1 else 0
            near = self._lanes([row[other[0]] * n for n in range(len(other) + 1)] for other in classes[:place])
            layer, lane = table, ones
            for n in range(1, len(members) + 1):
                layer = layer + near
                table |= layer << self._width * weight * n
                ones |= lane << self._width * weight * n
                near += within * lane
        self.totals = self._numbers(table)
        """The total of all pairs' scores in each state."""
        self.firsts = self.totals
        """The same with the required devices."""
        if any(bonus):
            extra = self._lanes([bonus[members[0]] * n for n in range(len(members) + 1)] for members in classes)
            self.firsts = self._numbers(table + extra)

    def _lanes(self, parts: Iterable[Sequence[int]]) -> int:
        """Return, for each state, the sum over its classes of parts[class][count], one a lane."""
        lanes, ones, shift = 0, 1, self._width
        for part in parts:
            layer, lane = lanes, ones
            for n in range(1, len(part)):
                lanes |= layer + part[n] * lane << shift * n
                ones |= lane << shift * n
            shift *= len(part)
        return lanes

    def _numbers(self, lanes: int) -> array[int]:
        numbers = array(_LANES[self._width])
        numbers.frombytes(lanes.to_bytes(self.states * self._width // 8, sys.byteorder))
        return numbers if sys.byteorder == "little" else numbers[::-1]

    def level(self, size: int) -> list[int]:
        """Return the states with `size` devices."""
        levels: list[list[int]] = [[0], *([] for _ in range(size))]
        left = self.devices
        for members, weight in zip(self.classes, self.weights, strict=True):
            left -= len(members)
            for total in range(size, max(size - left, 1) - 1, -1):
                for n in range(1, min(len(members), total) + 1):
                    more = weight * n
                    levels[total] += [state + more for state in levels[total - n]]
        return levels[size]

    def counts(self, state: int) -> Iterator[tuple[int, int]]:
        """Yield the classes of which the state has devices, and how many."""
        for place in range(len(self.classes) - 1, -1, -1):
            count, state = divmod(state, self.weights[place])
            if count:
                yield place, count

    def members(self, state: int) -> list[int]:
        """Return the state's devices, of each class the smallest."""
        return sorted(device for place, count in self.counts(state) for device in self.classes[place][:count])

    def choose(self, missing: int, size: int) -> list[int]:
        """Return the best set of `missing` devices, if all later requests are for `size`."""
        level = self.level(missing)
        _, ties = _highest(level, self.firsts)
        left = self.devices - missing
        for following, most in ((size, left),) if size > 1 else _USUAL:
            later = min(left // following, most)
            if later and len(ties) > 1:
                level = level if following == missing else self.level(following)
                ties = self._best_left(ties, later, level, 1 if size > 1 else None)
        return self.members(next(self._ordered(ties)))

    def _ordered(self, ties: Iterable[int]) -> Iterator[int]:
        """Yield first those that leave the highest total, among equals those with the smallest ids."""

        def left(state: int) -> int:
            return self.totals[-1 - state]

        for _, alike in groupby(sorted(ties, key=left, reverse=True), left):
            # Where each device has a digit of its own, a higher number means smaller ids.
            yield from sorted(alike, key=neg if self.single else self.members)

    def _best_left(self, ties: list[int], later: int, level: list[int], enough: int | None) -> list[int]:
        """Return the ties that leave most for `later` requests, one after another.

        level: the states with as many devices as they are for. enough: how many ties to return if
        there are more, the first ones; None for all.

        Forward, request by request: all states that can be left if each request gets the highest
        total that any of them can give, and the sets that have this total. Then, which of the ties
        these came from.
        """
        whole = self.states - 1
        families, served = [self._family(whole - state for state in ties)], list[tuple[int, list[int]]]()
        while True:
            fitting = self._flags(self._below(families[-1]))
            level = [state for state in level if fitting[state] == "1"]
            served.append(_highest(level, self.totals))
            if len(served) == later:
                break
            if len(served) == 1 and (found := self._serving(ties, served * later, enough)):
                return found  # none can do better than to serve all alike
            families.append(self._without(families[-1], served[-1][1]))
        if later > 1 and (found := self._serving(ties, served, enough)):
            return found
        good = families[-1] & self._above(self._family(served[-1][1]))
        for family, (_, bucket) in zip(families[-2::-1], served[-2::-1], strict=True):
            good = family & self._with(good, bucket)
        left = self._flags(good)
        return [state for state in ties if left[whole - state] == "1"]

    def _serving(self, ties: list[int], served: Sequence[tuple[int, list[int]]], enough: int | None) -> list[int]:
        """Return the first of the ties that leave what was served, none if that takes too long."""
        budget, sizes = _BUDGET, self.sizes
        size = sizes[served[0][1][0]]

        def serves(left: int, request: int, bucket: Sequence[int]) -> bool:
            nonlocal budget
            budget -= 10 + len(bucket)
            if budget < 0:
                return True
            fitting = [state for state in bucket if state <= left and sizes[left - state] == sizes[left] - size]
            if request == len(served) - 1 or not fitting:
                return bool(fitting)
            alike = served[request][0] == served[request + 1][0]  # then their order does not matter
            return any(
                serves(left - state, request + 1, fitting[at:] if alike else served[request + 1][1])
                for at, state in enumerate(fitting)
            )

        serving = (tie for tie in self._ordered(ties) if serves(self.states - 1 - tie, 0, served[0][1]))
        found = list(islice(serving, enough))
        return found if budget >= 0 else []

    def _family(self, states: Iterable[int]) -> int:
        flags = bytearray(b"0") * self.states
        for state in states:
            flags[~state] = 49
        return int(flags, 2)

    def _flags(self, family: int) -> str:
        return format(family, f"0{self.states}b")[::-1]

    def _having(self, place: int, count: int) -> int:
        """Return the family of states with at least `count` devices of the class."""
        family = self._at_least.get((place, count))
        if family is None:
            weight, period = self.weights[place], self.weights[place] * (len(self.classes[place]) + 1)
            family = (1 << period) - (1 << weight * count)
            while period < self.states:
                family |= family << period
                period *= 2
            family = self._at_least[place, count] = family & (1 << self.states) - 1
        return family

    def _below(self, family: int) -> int:
        """Return the states that are part of one in the family."""
        for place, (members, weight) in enumerate(zip(self.classes, self.weights, strict=True)):
            some = self._having(place, 1)
            for _ in members:
                family |= (family & some) >> weight
        return family

    def _above(self, family: int) -> int:
        """Return the states that have one of the family as a part."""
        for place, (members, weight) in enumerate(zip(self.classes, self.weights, strict=True)):
            some = self._having(place, 1)
            for _ in members:
                family |= (family << weight) & some
        return family

    def _without(self, family: int, taken: Iterable[int]) -> int:
        """Return what is left when one of `taken` is taken out of a state of the family."""
        left, uppers = 0, dict[int, int]()
        for lower, several in self._halves(taken):
            some = 0
            for upper in several:
                found = uppers.get(upper)
                if found is None:
                    found = uppers[upper] = self._holding(family, upper) >> upper
                some |= found
            left |= self._holding(some, lower) >> lower
        return left

    def _with(self, family: int, added: Iterable[int]) -> int:
        """Return what it was before: the inverse of `_without`."""
        whole, uppers = 0, dict[int, int]()
        for lower, several in self._halves(added):
            some = 0
            for upper in several:
                found = uppers.get(upper)
                if found is None:
                    found = uppers[upper] = self._holding(family << upper, upper)
                some |= found
            whole |= self._holding(some << lower, lower)
        return whole

    def _holding(self, family: int, state: int) -> int:
        for place, count in self.counts(state):
            family &= self._having(place, count)
        return family

    def _halves(self, states: Iterable[int]) -> Iterable[tuple[int, list[int]]]:
        """Split states into the counts of the lower half of the classes and those of the upper."""
        middle = self.weights[len(self.weights) // 2]
        halves: dict[int, list[int]] = {}
        for state in states:
            lower = state % middle
            halves.setdefault(lower, []).append(state - lower)
        return halves.items()


class _Ranked(NamedTuple):
    total: int
    left: int
    chosen: set[int]


class _Grown(NamedTuple):
    total: int
    chosen: list[int]
    others: list[int]
    gains: list[int]
    """What each device adds to the chosen ones."""


def _search(
    matrix: Sequence[Sequence[int]], bonus: Sequence[int], missing: int, classes: Sequence[Sequence[int]], stop: float
) -> list[int]:
    """Look for a set with a high total that leaves a high total, in a fixed number of steps.

    Sets are grown greedily from many devices, the best of them improved by swaps. More than half of
    the devices are found by looking for those to leave out, about a half of them both ways.
    stop: when to end at the latest, on the clock of perf_counter.
    """
    count, everything = len(matrix), set(range(len(matrix)))
    degrees = [sum(row) for row in matrix]
    costs = [value + degree for value, degree in zip(bonus, degrees, strict=True)]
    ways = (False, True) if count < 3 * missing < 2 * count else (2 * missing > count,)
    found: list[_Ranked] = []
    for leaving in ways:
        nodes = [-cost for cost in costs] if leaving else list(bonus)
        base = sum(degrees) // 2 + sum(bonus) if leaving else 0

        def ranked(total: int, some: Iterable[int], *, leaving: bool = leaving, base: int = base) -> _Ranked:
            chosen = everything.difference(some) if leaving else set(some)
            # The total of what is left is, up to a constant, the total less these costs.
            return _Ranked(base + total, -sum(costs[device] for device in chosen), chosen)

        size = count - missing if leaving else missing
        hopes = {one[0]: nodes[one[0]] + sum(heapq.nlargest(size - 1, matrix[one[0]])) for one in classes}
        firsts = sorted(hopes, key=lambda first: (-hopes[first], first))[: _STEPS // (size * len(ways)) + 1]
        grown = [(ranked(one.total, one.chosen), one) for one in _grown(matrix, nodes, size, firsts, stop)]
        grown.sort(key=lambda one: one[0][:2], reverse=True)
        found.append(grown[0][0])
        found += (ranked(*_swapped(matrix, start, stop)) for _, start in grown[: _STARTS // len(ways)])
    chosen = max(found, key=lambda one: one[:2]).chosen
    unit = 1 + 2 * sum(degrees)  # all that is left counts less than any difference in what is taken
    pairs = [[(unit + 1) * value for value in row] for row in matrix]
    nodes = [unit * value - degree for value, degree in zip(bonus, degrees, strict=True)]
    return _settle(pairs, nodes, chosen, stop)


def _grown(
    pairs: Sequence[Sequence[int]], nodes: list[int], size: int, firsts: Iterable[int], stop: float
) -> list[_Grown]:
    """Return sets with a high total of their pairs and nodes, each grown from one device."""
    grown: list[_Grown] = []
    for first in firsts:
        # Among equals the first is taken: every other start sees the devices in another order.
        chosen, others = [first], _dealt(len(nodes), len(grown) if len(grown) % 2 else 0)
        gains, total = nodes, nodes[first]
        while True:
            others.remove(chosen[-1])
            gains = list(map(add, gains, pairs[chosen[-1]]))
            if len(chosen) == size:
                break
            chosen.append(max(others, key=gains.__getitem__))
            total += gains[chosen[-1]]
        grown.append(_Grown(total, chosen, others, gains))
        if time.perf_counter() > stop:
            break
    return grown


def _dealt(count: int, times: int) -> list[int]:
    """Return the numbers below `count` as if dealt like cards, in an order that differs each time."""
    step = next(step for step in range(1 + 2 * times, count + 3 + 2 * times) if math.gcd(step, count) == 1)
    return [*range(count)] if step == 1 else [place * step % count for place in range(count)]


def _swapped(pairs: Sequence[Sequence[int]], start: _Grown, stop: float) -> tuple[int, set[int]]:
    """Return the best set on a walk of swaps: the best comes in, the worst goes out.

    Neither turns back for a while, so that the walk leaves the sets that no single swap improves.
    """
    total, chosen, others, gains = start.total, start.chosen.copy(), start.others.copy(), start.gains
    best, found = total, set(chosen)
    entered, kept_in = deque[int](), max(1, min(len(chosen) // 3, 8))
    gone, kept_out = deque[int](), max(1, min(len(others) // 4, 12))
    for step in range(_SWAPS):
        if step % 16 == 0 and time.perf_counter() > stop:
            break
        enters = max(others, key=gains.__getitem__)
        total += gains[enters]
        others.remove(enters)
        gains = list(map(add, gains, pairs[enters]))
        goes = min(chosen, key=gains.__getitem__)
        total -= gains[goes]
        chosen.remove(goes)
        gains = list(map(sub, gains, pairs[goes]))
        entered.append(enters)
        gone.append(goes)
        if len(entered) > kept_in or not chosen:
            chosen.append(entered.popleft())
        if len(gone) > kept_out:
            others.append(gone.popleft())
        if total > best:
            best, found = total, {*chosen, *entered}
    return best, found


def _settle(pairs: Sequence[Sequence[int]], nodes: list[int], chosen: set[int], stop: float) -> list[int]:
    """Return the set after all swaps that improve it, or keep its total and lower the ids."""
    gains = nodes
    for device in chosen:
        gains = list(map(add, gains, pairs[device]))

    def swap() -> tuple[int, int] | None:
        for goes in sorted(chosen, reverse=True):
            row, least = pairs[goes], gains[goes]
            for enters, gain in enumerate(gains):
                change = gain - row[enters] - least
                if (change > 0 or (change == 0 and enters < goes)) and enters not in chosen:
                    return goes, enters
        return None

    while time.perf_counter() < stop and (better := swap()):
        goes, enters = better
        chosen = chosen - {goes} | {enters}
        gains = list(map(add, map(sub, gains, pairs[goes]), pairs[enters]))
    return sorted(chosen)


def _pool(free: Sequence[str], required: Sequence[str], missing: int, score: Score) -> list[str]:
    """Return the devices, out of very many, among which to look: sets grown greedily from the best."""
    places = {device: place for place, device in enumerate([*free, *required])}
    near: dict[int, dict[int, float]] = {}
    for pair, value in score.items():
        if len(pair) == 2 and pair <= places.keys():
            one, other = (places[device] for device in pair)
            near.setdefault(one, {})[other] = near.setdefault(other, {})[one] = _finite(value)
    bonus: dict[int, float] = {}
    for place in range(len(free), len(places)):
        for other, value in near.get(place, {}).items():
            bonus[other] = bonus.get(other, 0) + value
    hopes = {
        place: bonus.get(place, 0) + sum(heapq.nlargest(missing - 1, some.values()))
        for place, some in near.items()
        if place < len(free)
    }
    everyone = sorted((-bonus.get(place, 0), place) for place in range(len(free)))

    def grown(first: int) -> set[int]:
        gains, heap, chosen, latest = bonus.copy(), everyone.copy(), {first}, first
        while len(chosen) < missing:
            for other, value in near.get(latest, {}).items():
                if other < len(free):
                    gains[other] = gains.get(other, 0) + value
                    heapq.heappush(heap, (-gains[other], other))
            gain, latest = heapq.heappop(heap)
            while latest in chosen or -gain != gains.get(latest, 0):
                gain, latest = heapq.heappop(heap)
            chosen.add(latest)
        return chosen

    pool: set[int] = set()
    for first in heapq.nsmallest(16, hopes, key=lambda place: (-hopes[place], place)) or [0]:
        pool |= grown(first)
        if len(pool) + missing > _DENSE:
            break
    return [free[place] for place in sorted(pool)]
