"""Chooses the devices that a container gets together: pure functions over ids, NUMA nodes and link scores.

Ids without scores or NUMA nodes cause no error; they are chosen last. Ids are in natural order: sim-2 before sim-10.
"""

from __future__ import annotations

import enum
import heapq
import math
import sys
import time
from array import array
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import reduce
from itertools import combinations, islice, product
from operator import add, neg, or_, sub
from types import MappingProxyType
from typing import Any, Final

from deviceplugin.device import natural

_NOTHING: Final[Mapping[Any, Any]] = MappingProxyType({})
Ids = Collection[str]
Matrix = Sequence[Sequence[int]]
Score = Mapping[frozenset[str], float]
"""For each pair of devices, frozenset({a, b}): the link score. A higher score means closer. A missing pair has score 0.
"""

# For each width in bits: the type code of an `array` of numbers of this width.
_WIDTHS: Final = {16: "H", 32: "I", 64: "Q"}
# If there are more sets of devices than this, not all sets are compared. Sets that differ only in interchangeable
# devices count as one set.
_EXACT: Final = 1 << 16
# The later requests for which a request for one device should leave good devices, as (devices, number of requests).
_USUAL: Final = ((4, 2), (2, 4))
# Number of steps after which `_served_alike` gives up its search.
BUDGET: Final = 40_000
_STARTS: Final = 24  # Number of sets with which the heuristic starts.
_SWAPS: Final = 32  # Number of swaps that the heuristic tries from each set.
_DENSE: Final = 256  # Maximum number of devices for which a matrix of all scores is made.


class Link(enum.IntEnum):
    """The link score of two devices: a level of the PCIe topology, plus NVLINK for each NVLink between them."""

    NVLINK = 100
    SAME_BOARD = 60
    ONE_SWITCH = 50
    SEVERAL_SWITCHES = 40
    HOST_BRIDGE = 30
    SAME_CPU = 20
    CROSS_CPU = 10


def _in_order(devices: Iterable[str]) -> list[str]:
    return sorted(set(devices), key=natural)


def preferred(available: Ids, must_include: Ids, size: int, score: Score, *, deadline: float = 0.25) -> list[str]:
    """Choose the `size` devices of `available` with the highest link scores to each other.

    score: usually the number of NVLinks x 100 plus the level of PCIe (see Link). The total of devices is the sum of the
    scores of all their pairs. Each of these rules decides among the sets that are equal by the rules before it:

    1. The set has the highest total. 2. The remaining devices allow the highest total for the next request of this
    size, then for the request after that, and so on, until fewer than `size` devices are left. 3. The remaining devices
    together have the highest total. 4. The set has the smallest ids, in natural order.

    If `size` is 1, rule 2 is about other requests: the remaining devices allow the highest totals for two successive
    requests of four devices, then for four requests of two devices.

    The result is exact for up to 16 devices, and for more if enough of them are interchangeable. Otherwise a heuristic
    applies rules 1, 3 and 4 within a fixed number of steps (some 10 ms for 64 devices), or until `deadline` seconds
    have passed. Two calls with the same input can differ only because of the deadline. The order of ids and repeated
    ids do not matter.

    All of `must_include` is in the result, even if it is longer than `size` or not in `available`. If there are too few
    devices, all of them are returned. Scores that are no integers are rounded to twelve digits of the largest score.
    The result is in the natural order of the ids.
    """
    stop = time.perf_counter() + deadline
    required = _in_order(must_include)
    free = _in_order(set(available).difference(required))
    missing = size - len(required)
    if missing <= 0 or not free:
        return required
    if len(free) > max(_DENSE, missing):
        free = _pool(free, required, missing, score)
    if missing >= len(free):
        return _in_order(required + free)
    matrix, bonus = _matrix(free, required, score)
    classes = _interchangeable(matrix, bonus)
    if len(free) <= 64 and math.prod(len(members) + 1 for members in classes) <= _EXACT:
        chosen = _Sets(matrix, bonus, classes).choose(missing, size)
    else:
        chosen = _approximate(matrix, bonus, missing, {members[0] for members in classes}, stop)
    return _in_order([*required, *(free[at] for at in chosen)])


def choose(
    policy: str,
    available: Ids,
    must_include: Ids,
    size: int,
    *,
    score: Score = _NOTHING,
    physical: Mapping[str, str] = _NOTHING,
) -> list[str]:
    """Choose `size` of the `available` ids, with all of `must_include`, by a policy of `DeviceSource`.

    score: as for `preferred`, between physical devices. physical: for each id on this node, also ids in use, the device
    of which the id is a replica; an id without an entry is a device of its own. Raises ValueError if there is no such
    policy.
    """
    match policy:
        case "links":
            return links(available, must_include, size, score, physical)
        case "packed":
            return packed(available, must_include, size, physical)
        case "distributed":
            return distributed(available, must_include, size, physical)
        case "none":
            return numa_compact({}, available, must_include, size)
    raise ValueError(f"there is no policy {policy!r}")


def links(available: Ids, must_include: Ids, size: int, score: Score, physical: Mapping[str, str]) -> list[str]:
    """Choose replicas of different devices; choose the devices with the highest link scores to each other.

    A second replica of a device is chosen only after one replica of each device. Of each device, the available replica
    with the smallest id comes first. Without replicas, the result is the result of `preferred`.
    """
    taken = set(must_include)
    free = _by_device(set(available) - taken, physical)
    required = {physical.get(name, name) for name in taken}
    while (missing := size - len(taken)) > 0 and free:
        devices = preferred([*free, *required], required, missing + len(required), score)
        taken.update(free[device].pop() for device in devices if device not in required)
        free = {device: some for device, some in free.items() if some}
        required = set()
    return _in_order(taken)


def packed(available: Ids, must_include: Ids, size: int, physical: Mapping[str, str]) -> list[str]:
    """Choose replicas of as few devices as possible. Devices with the fewest free replicas come first.

    Devices with a replica in `must_include` come first. The rules are those of `numa_compact`, with devices in place of
    NUMA nodes.
    """
    devices = _in_order(physical.get(name, name) for name in {*available, *must_include})
    places = {device: (place,) for place, device in enumerate(devices)}
    nodes = {name: places[physical.get(name, name)] for name in {*available, *must_include}}
    return numa_compact(nodes, available, must_include, size)


def distributed(available: Ids, must_include: Ids, size: int, physical: Mapping[str, str]) -> list[str]:
    """Choose replicas one by one: each time, a replica of the device with the fewest replicas in use.

    Ids in use are the ids in `physical` that are not in `available`, and the ids already chosen. Among equal devices,
    the device with the most free replicas is chosen, then the smallest id.
    """
    taken = set(must_include)
    free = _by_device(set(available) - taken, physical)
    used = Counter(physical.get(name, name) for name in {*physical, *taken}.difference(set(available) - taken))
    heap = [(used[device], -len(free[device]), place, device) for place, device in enumerate(_in_order(free))]
    heapq.heapify(heap)
    while len(taken) < size and heap:
        count, left, place, device = heapq.heappop(heap)
        taken.add(free[device].pop())
        if left < -1:
            heapq.heappush(heap, (count + 1, left + 1, place, device))
    return _in_order(taken)


def _by_device(ids: Iterable[str], physical: Mapping[str, str]) -> dict[str, list[str]]:
    """Return, for each device, those of its ids that are in `ids`, the smallest id last."""
    devices: dict[str, list[str]] = {}
    for name in sorted(ids, key=natural, reverse=True):
        devices.setdefault(physical.get(name, name), []).append(name)
    return devices


def arranged(devices: Collection[str], score: Score) -> list[str]:
    """Return the devices in an order in which blocks of 2, 4, 8 and so on devices have high link scores.

    The scheduler allocates devices in the order of a ResourceSlice. `preferred` chooses the first half of the order
    (rounded to a power of two). Then each half is ordered in the same way.
    """
    ids = _in_order(devices)
    if len(ids) < 3 or not score:
        return ids
    half = 1 << (len(ids) - 1).bit_length() - 1
    first = preferred(ids, (), half, score)
    return arranged(first, score) + arranged(set(ids).difference(first), score)


def numa_scores(devices: Mapping[str, Sequence[int]]) -> dict[frozenset[str], float]:
    """Return a score for each pair of devices: 20 if they have a NUMA node in common, else 10.

    A pair with a device without a NUMA node is left out. The result has up to n^2/2 pairs, so use `numa_compact` for
    many devices.
    """
    placed = [(device, frozenset(nodes)) for device, nodes in devices.items() if nodes]
    return {
        frozenset((first, other)): float(Link.CROSS_CPU if nodes.isdisjoint(others) else Link.SAME_CPU)
        for (first, nodes), (other, others) in combinations(placed, 2)
    }


def numa_compact(devices: Mapping[str, Sequence[int]], available: Ids, must_include: Ids, size: int) -> list[str]:
    """Choose `size` of the `available` ids on as few NUMA nodes as possible; O(n log n).

    devices: for each id, its NUMA nodes, empty (or no entry) if unknown; a device near several nodes counts for each of
    these nodes. The nodes of `must_include` are used first: if one of them has enough free devices, only this node is
    used; otherwise all free devices of these nodes are chosen. The other devices are chosen from the node with the
    fewest free devices among the nodes with enough; if no node has enough, all devices of the node with the most are
    chosen, and so on. Devices with unknown NUMA nodes are chosen last. Among equals, the lower node and the smaller id
    are chosen first. As with `preferred`, the result has all of `must_include`, and all devices if there are too few.
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
    opened = Counter(node for device in taken for node in set(devices.get(device, ())))

    def take(candidates: Iterable[str]) -> None:
        nonlocal missing
        for device in heapq.nsmallest(missing, candidates, key=natural):
            for node in set(devices.get(device, ())):
                nodes[node].discard(device)
            taken.add(device)
            free.discard(device)
            missing -= 1

    by_use = sorted(opened.keys() & nodes.keys(), key=lambda node: (-opened[node], node))
    if enough := [node for node in by_use if len(nodes[node]) >= missing]:
        take(nodes[min(enough, key=lambda node: (-opened[node], len(nodes[node]), node))].copy())
    for node in by_use:
        take(nodes[node].copy())
    # An entry's number of free devices may be outdated, because devices near several nodes are taken for other nodes.
    # As the number only decreases, such an entry is corrected and put back.
    largest = [(-len(members), node) for node, members in nodes.items()]
    heapq.heapify(largest)
    while missing and largest:
        stale, node = heapq.heappop(largest)
        count = len(nodes[node])
        if count < -stale:
            heapq.heappush(largest, (-count, node))
            continue
        if count >= missing:
            node = min((n for n in nodes if len(nodes[n]) >= missing), key=lambda n: (len(nodes[n]), n))
        take(nodes[node].copy())
    take(free.copy())
    return _in_order(taken)


def _matrix(free: Sequence[str], required: Sequence[str], score: Score) -> tuple[list[list[int]], list[int]]:
    """Return the scores of all pairs of `free`, and each free device's total score with `required`, as integers from 0.

    The smallest number becomes 0 by subtraction from all, which does not change the ranking of sets of equal size.
    """
    among = [score.get(frozenset(pair), 0) for pair in combinations(free, 2)]
    beside = [score.get(frozenset(pair), 0) for pair in product(free, required)]
    # The number of bits of a score is so small that all sums stay below 2^60.
    whole = _integers([*among, *beside], 46 - (len(required) + 1).bit_length())
    pairs = whole[: len(among)]
    bonus = [sum(whole[at : at + len(required)]) for at in range(len(among), len(whole), len(required) or 1)]
    lowest, least = min(pairs, default=0), min(bonus, default=0)
    unit = math.gcd(*(value - lowest for value in pairs), *(value - least for value in bonus)) or 1
    matrix = [[0] * len(free) for _ in free]
    for (first, other), value in zip(combinations(range(len(free)), 2), pairs, strict=True):
        matrix[first][other] = matrix[other][first] = (value - lowest) // unit
    return matrix, [(value - least) // unit for value in bonus] or [0] * len(free)


def _integers(values: list[float], bits: int) -> list[int]:
    """Return the values, multiplied by a common factor, as integers of at most `bits` bits.

    If all values already are integers of at most `bits` bits, they are not changed.
    """
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
    """Return classes of devices with equal scores to all other devices; the class of the first device is last."""
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


class _Sets:
    """All sets of some devices (at most 2^16 sets). Sets that differ only in interchangeable devices count as one set.

    An integer represents a set. It has a digit for each class of interchangeable devices: the number of devices of this
    class in the set. So the difference of a set's and a subset's integers represents the set without the subset. Some
    long integers contain a number for each set, so that one addition changes the numbers of all sets. Other long
    integers contain a bit for each set, so that one AND filters all sets.
    """

    def __init__(self, matrix: Matrix, bonus: Sequence[int], classes: list[list[int]]) -> None:
        self.classes = classes
        self.weights: list[int] = []
        sizes = bytes(1)
        most = sum(map(sum, matrix)) + sum(bonus)
        # Each number has so many bits that no sum overflows into the next number.
        width = next(width for width in _WIDTHS if most >> width == 0)
        totals, ones = 0, [1]
        for place, members in enumerate(classes):
            weight, count, row = len(sizes), len(members), matrix[members[0]]
            near, within = _linear(classes[:place], row, ones, width), row[members[-1]] * ones[-1]
            totals = _joined(totals, near, within, count, width * weight)
            ones.append(_joined(ones[-1], 0, 0, count, width * weight))
            sizes = b"".join(sizes.translate(bytes(range(n, 256)) + bytes(n)) for n in range(count + 1))
            self.weights.append(weight)
        self.whole = len(sizes) - 1
        """The integer of the set of all devices. This integer minus a set's integer is the integer of the set's
        complement."""
        self.sizes = sizes + b"\xff" * len(sizes)
        """For each set, the number of its devices; 255 for negative integers, which represent no set.

        One set is a subset of another if and only if the size of their difference is the difference of their sizes.
        """
        self.totals = self._numbers(totals, width)
        """For each set, the total of the scores of all its pairs."""
        self.firsts = self._numbers(totals + _linear(classes, bonus, ones, width), width) if any(bonus) else self.totals
        """For each set, the total of the scores of all its pairs, plus the scores of its devices with the required
        devices."""

    def _numbers(self, table: int, width: int) -> array[int]:
        numbers = array(_WIDTHS[width])
        numbers.frombytes(table.to_bytes((self.whole + 1) * width // 8, "little"))
        if sys.byteorder == "big":
            numbers.byteswap()
        return numbers

    def choose(self, missing: int, size: int) -> list[int]:
        """Return the best set of devices. missing: number of devices in it. size: assumed size of later requests."""
        left = self.sizes[self.whole] - missing
        candidates = self._of_size(missing)
        ties = _highest(candidates, self.firsts)
        for following, most in ((size, left),) if size > 1 else _USUAL:
            later = min(left // following, most)
            if later and len(ties) > 1:
                candidates = candidates if following == missing else self._of_size(following)
                ties = self._best_left(ties, candidates, later, 1 if size > 1 else None)
        return self._members(self._ordered(ties)[0])

    def _of_size(self, size: int) -> list[int]:
        levels: list[list[int]] = [[0], *([] for _ in range(size))]
        left = self.sizes[self.whole]
        for members, weight in zip(self.classes, self.weights, strict=True):
            left -= len(members)
            for total in range(size, max(size - left, 1) - 1, -1):
                for n in range(1, min(len(members), total) + 1):
                    levels[total] += [part + weight * n for part in levels[total - n]]
        return levels[size]

    def _members(self, subset: int) -> list[int]:
        """Return the devices of a set; of each class, the devices with the smallest ids."""
        smallest: list[int] = []
        for members, weight in zip(self.classes[::-1], self.weights[::-1], strict=True):
            count, subset = divmod(subset, weight)
            smallest += members[:count]
        return sorted(smallest)

    def _ordered(self, ties: Iterable[int]) -> list[int]:
        """Sort sets of equal rank: by the total of the remaining devices (the highest first), then by ids."""
        # If each device is a class of its own, a higher integer means smaller ids, so the integers are the sort keys.
        by_ids = sorted(ties, key=neg if len(self.classes) == self.sizes[self.whole] else self._members)
        return sorted(by_ids, key=lambda subset: -self.totals[self.whole - subset])

    def _best_left(self, ties: list[int], candidates: list[int], later: int, enough: int | None) -> list[int]:
        """Return those sets of `ties` whose remaining devices allow the highest totals for `later` further requests.

        candidates: all sets of the size of these requests. enough: the maximum number of sets to return, None for all.
        """
        sizes, size = self.sizes, self.sizes[candidates[0]]
        # For each possible remainder, a number with a bit for each set that leaves this remainder.
        remainders = {self.whole - tie: 1 << at for at, tie in enumerate(ties)}
        for request in range(later):
            fitting = self._parts_of(remainders)
            candidates = [subset for subset in candidates if fitting[subset] == "1"]
            best = _highest(candidates, self.totals)
            if request == 0 and (alike := self._served_alike(ties, best, later, enough)):
                return alike  # With these sets, each later request gets the highest possible total.
            smaller: dict[int, int] = {}
            for remainder, origins in remainders.items():
                rest = sizes[remainder] - size
                for next_one in [remainder - subset for subset in best if sizes[remainder - subset] == rest]:
                    smaller[next_one] = smaller.get(next_one, 0) | origins
            remainders = smaller
        origins = reduce(or_, remainders.values())
        return [tie for at, tie in enumerate(ties) if origins >> at & 1]

    def _served_alike(self, ties: list[int], best: list[int], later: int, enough: int | None) -> list[int]:
        """Return up to `enough` sets of `ties` whose remaining devices contain `later` disjoint sets of `best`.

        The result is [] if there is no such set, or if the search takes more steps than `BUDGET`.
        """
        budget, sizes, size = BUDGET, self.sizes, self.sizes[best[0]]

        def serves(remainder: int, some: Sequence[int], requests: int) -> bool:
            nonlocal budget
            budget -= 10 + len(some)
            if budget < 0:
                return True
            rest = sizes[remainder] - size
            fitting = [subset for subset in some if sizes[remainder - subset] == rest]
            if requests == 1 or not fitting:
                return bool(fitting)
            # The order of requests does not matter, so sets before `subset` need not be tried again.
            return any(serves(remainder - subset, fitting[at:], requests - 1) for at, subset in enumerate(fitting))

        serving = (tie for tie in self._ordered(ties) if serves(self.whole - tie, best, later))
        served = list(islice(serving, enough))
        return served if budget >= 0 else []

    def _parts_of(self, several: Iterable[int]) -> str:
        """Return a string with "1" for each set that is a subset of one of these sets, and "0" for all other sets."""
        flags = bytearray(b"0") * (self.whole + 1)
        for subset in several:
            flags[~subset] = ord("1")
        bits, count = int(flags, 2), self.whole + 1
        for members, weight in zip(self.classes, self.weights, strict=True):
            period = weight * (len(members) + 1)
            some = (1 << period) - (1 << weight)  # These sets contain a device of this class.
            while period < count:
                some |= some << period
                period *= 2
            for _ in members:
                bits |= (bits & some) >> weight
        return format(bits, f"0{count}b")[::-1]


def _linear(classes: Iterable[Sequence[int]], values: Sequence[int], ones: Iterable[int], width: int) -> int:
    """Return one integer that contains, for each set, the sum of its devices' values. Each sum has `width` bits."""
    sums, shift = 0, width
    for members, base in zip(classes, ones, strict=False):
        sums = _joined(sums, values[members[0]] * base, 0, len(members), shift)
        shift *= len(members) + 1
    return sums


def _joined(layer: int, step: int, growth: int, count: int, shift: int) -> int:
    """Return the integer `layer` (a number for each set), with numbers added for sets with devices of one more class.

    step: the first of the `count` devices adds this to each number. Each further device adds `growth` more than before.
    """
    joined = layer
    for n in range(1, count + 1):
        layer += step + (n - 1) * growth if growth else step
        joined |= layer << shift * n
    return joined


def _highest(sets: list[int], totals: Sequence[int]) -> list[int]:
    values = list(map(totals.__getitem__, sets))
    highest = max(values)
    return [subset for subset, total in zip(sets, values, strict=True) if total == highest]


def _approximate(matrix: Matrix, bonus: Sequence[int], missing: int, firsts: Collection[int], stop: float) -> list[int]:
    """Return a set with a high total whose remaining devices have a high total too, found in a fixed number of steps.

    Each start is a set of one device of `firsts` and the devices closest to it. Swaps improve these sets until `stop`
    (perf_counter).
    """
    degrees = [sum(row) for row in matrix]
    order = sorted(
        range(len(matrix)), key=lambda device: -bonus[device] - sum(heapq.nlargest(missing - 1, matrix[device]))
    )
    starts: list[list[int]] = []
    for at, first in enumerate(order):
        if first in firsts and len(starts) < _STARTS:
            gains = list(map(add, bonus, matrix[first]))
            others = order[at + 1 :] + order[:at]  # Among devices with equal scores, each start takes different ones.
            starts.append([first, *sorted(others, key=gains.__getitem__, reverse=True)][:missing])
    # The scores of remaining devices are scaled down, so that all of them together count less than the smallest
    # difference between the totals of two sets.
    unit = 1 + 2 * sum(degrees)
    pairs = [[(unit + 1) * value for value in row] for row in matrix]
    nodes = [unit * value - degree for value, degree in zip(bonus, degrees, strict=True)]
    improved = [_improved(pairs, nodes, chosen, stop) for chosen in starts]
    return _swapped_while_better(pairs, nodes, max(improved, key=lambda walk: walk[0])[1], stop)


def _gains(pairs: Matrix, nodes: Sequence[int], chosen: Iterable[int]) -> list[int]:
    """Return each device's gain: its own value plus the scores of its pairs with the chosen devices."""
    return [value + sum(map(row.__getitem__, chosen)) for value, row in zip(nodes, pairs, strict=True)]


def _improved(pairs: Matrix, nodes: Sequence[int], start: Sequence[int], stop: float) -> tuple[int, set[int]]:
    """Return the best set of a series of swaps, with its value. Each swap replaces the worst device by the best other.

    Two swapped devices are not swapped back for some steps, so the series goes on even if no swap improves the set.
    """
    gains, chosen, others = _gains(pairs, nodes, start), sorted(start), sorted({*range(len(nodes))}.difference(start))
    # In `value` each pair of devices counts twice, so each device's own value is counted twice too.
    value = sum(gains[device] + nodes[device] for device in chosen)
    best, best_set = value, set(chosen)
    entered, gone = list[int](), list[int]()
    kept_in, kept_out = min(len(chosen) // 3, 8), min(len(others) // 4, 12)
    for step in range(_SWAPS):
        if step % 16 == 0 and time.perf_counter() > stop:
            break
        others.remove(enters := max(others, key=gains.__getitem__))
        value += 2 * gains[enters]
        gains = list(map(add, gains, pairs[enters]))
        chosen.remove(goes := min(chosen, key=gains.__getitem__))
        value -= 2 * gains[goes]
        gains = list(map(sub, gains, pairs[goes]))
        entered.append(enters)
        gone.append(goes)
        if len(entered) > kept_in or not chosen:
            chosen.append(entered.pop(0))
        if len(gone) > kept_out or not others:
            others.append(gone.pop(0))
        if value > best:
            best, best_set = value, {*chosen, *entered}
    return best, best_set


def _swapped_while_better(pairs: Matrix, nodes: Sequence[int], chosen: set[int], stop: float) -> list[int]:
    """Swap chosen devices while a swap raises the set's value, or gives lower ids at the same value. Return the set."""
    gains = _gains(pairs, nodes, chosen)
    swapped = True
    while swapped and time.perf_counter() < stop:
        swapped = False
        for goes in sorted(chosen, reverse=True):
            row, least = pairs[goes], gains[goes]
            changes = (
                (gains[device] - row[device] - least, -device) for device in range(len(nodes)) if device not in chosen
            )
            change, enters = max(changes)
            if change > 0 or (change == 0 and -enters < goes):
                chosen = chosen - {goes} | {-enters}
                gains = _gains(pairs, nodes, chosen)
                swapped = True
    return sorted(chosen)


def _pool(free: Sequence[str], required: Sequence[str], missing: int, score: Score) -> list[str]:
    """For more than _DENSE devices, return those that good sets may contain, so that the score matrix stays small."""
    places = {device: place for place, device in enumerate(free)}
    near: dict[int, dict[int, float]] = {place: {} for place in range(len(free))}
    bonus = [0.0] * len(free)
    for pair, value in score.items():
        ends = [places[device] for device in pair if device in places]
        if len(pair) == len(ends) == 2:
            near[ends[0]][ends[1]] = near[ends[1]][ends[0]] = _finite(value)
        elif len(pair) == 2 and ends and not pair.isdisjoint(required):
            bonus[ends[0]] += _finite(value)

    def estimate(place: int) -> tuple[float, int]:
        return -bonus[place] - sum(heapq.nlargest(missing - 1, near[place].values())), place

    pool: set[int] = set()
    order = sorted(near, key=estimate)
    for first in order[:16]:
        heap, grown = [(0.0, first)], set[int]()
        while heap and len(grown) < missing:
            latest = heapq.heappop(heap)[1]
            if latest not in grown:
                grown.add(latest)
                for other, value in near[latest].items():
                    if value + bonus[other] > 0:
                        heapq.heappush(heap, (-value - bonus[other], other))
        pool |= grown
        if len(pool) + missing > _DENSE:
            break
    pool.update(islice((place for place in order if place not in pool), max(0, missing - len(pool))))
    return [free[place] for place in sorted(pool)]
