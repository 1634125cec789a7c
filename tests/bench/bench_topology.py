"""Measures the choice of devices (`deviceplugin.topology`), and compares it with limits and with a simple algorithm.

`python -m tests.bench.bench_topology` takes a minute. Its exit status is 1 if a limit is exceeded. Each time is the CPU
time of the shortest of several calls. Ratios are to a brute force over all sets, which compares only the sets' total
scores, and not the devices that remain. For 8 devices, the brute force is faster.
"""

from __future__ import annotations

import math
import random
import sys
import time
from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import combinations

from deviceplugin.topology import numa_compact, preferred
from tests.test_topology import TOPOLOGIES, Day, Scores, amount, climb, gpus, scores, tree

LIMITS = {8: 1.0, 16: 8.0, 64: 30.0}
"""Maximum milliseconds of a choice, by the number of devices."""


def machines(count: int) -> dict[str, Scores]:
    """Return the scores of several topologies with `count` devices: of real machines, regular ones, and random ones."""
    random_ = random.Random(count)
    made: dict[str, Callable[[int, int], float]] = {
        "uniform": lambda _a, _b: 1810,
        "nothing known": lambda _a, _b: 0,
        "pairs on switches, sockets": tree((2, 50), (4, 40), (count // 2, 20)),
        "switches of four": tree((4, 50), (8, 30)),
        "two islands, one short": lambda a, b: 100 if (a < count - 2) == (b < count - 2) else 10,
        "ring": lambda a, b: 100 if b - a in (1, count - 1) else 10,
        "all but a ring": lambda a, b: 10 if b - a in (1, count - 1) else 100,
        "torus": lambda a, b: 100 if (a // 4 == b // 4) + (a % 4 == b % 4) and (b - a) % 4 != 2 else 10,
        "hypercube": lambda a, b: 100 if (a ^ b).bit_count() == 1 else 10,
        "any whole scores": lambda _a, _b: random_.randint(0, 1860),
        "any fractions": lambda _a, _b: random_.random(),
        "any of six levels": lambda _a, _b: random_.choice((10, 20, 30, 40, 50, 60)),
        "half of the links": lambda _a, _b: random_.randint(0, 1),
        "eight of ten links": lambda _a, _b: int(random_.random() < 0.8),
    }
    known = {name: score for name, (size, score) in TOPOLOGIES.items() if size == count}
    return known | {name: scores(count, level) for name, level in made.items()}


def shortest(call: Callable[[], object], times: int) -> float:
    """Return the CPU time in milliseconds of the shortest of `times` calls."""
    best = math.inf
    for _ in range(times):
        began = time.process_time()
        call()
        best = min(best, time.process_time() - began)
    return best * 1e3


def plain(ids: Sequence[str], size: int, score: Scores) -> tuple[str, ...]:
    """Return the set with the highest total score, by a comparison of all sets."""
    return max(combinations(ids, size), key=lambda some: sum(score[frozenset(pair)] for pair in combinations(some, 2)))


def speed(count: int) -> bool:
    """Print the slowest size of request for each topology; return whether all choices are within the limit."""
    ids, limit, fine = gpus(*range(count)), LIMITS[count], True
    sizes = range(1, count + 1) if count <= 16 else (1, 2, 3, 4, 6, 8, 12, 16, 24, 31, 32, 33, 40, 48, 56, 60, 63, 64)
    against = 3 if count > 16 else 4
    print(
        f"\n{count} devices, limit {limit:g} ms        slowest      ms  of limit   size {against}: ms   brute   ratio"
    )

    def line(name: str, score: Scores) -> bool:
        took = {size: shortest(partial(preferred, ids, (), size, score), 4) for size in sizes}
        slowest = max(took, key=lambda size: took[size])
        took[slowest] = ours = min(took[slowest], shortest(partial(preferred, ids, (), slowest, score), 9))
        brute = shortest(partial(plain, ids, against, score), 1)
        shown = f"{slowest:>7} {ours:>7.2f} {ours / limit:>9.2f}   {took[against]:>10.2f} {brute:>7.1f} "
        print(f"  {name:<29} {shown} {brute / took[against]:>6.1f}{'' if ours <= limit else '   MISSED'}")
        return ours <= limit

    for name, score in machines(count).items():
        fine = line(name, score) and fine
    return fine


def quality() -> bool:
    """Print the total scores of choices among 64 devices, relative to the best known; return whether they suffice."""
    random_, ids, fine = random.Random(1), gpus(*range(64)), True
    print("\n64 devices: total, of the best of 100 climbs from random sets (limit 0.98), the lowest of five sizes")
    for name, score in machines(64).items():
        ratios = []
        for size in (3, 8, 16, 24, 40):
            best = climb(ids, size, score, random_, 100)
            ratios.append(amount(preferred(ids, (), size, score), score) / best if best else 1)
        fine = fine and min(ratios) >= 0.98
        print(f"  {name:<32} {min(ratios):>8.3f}{'' if min(ratios) >= 0.98 else '   MISSED'}")
    return fine


def days() -> bool:
    """Print choices' mean scores while pods come and go, relative to the best partition's; return if none is lower."""
    fine = True
    print("\nMean score of what was given over 9,000 events, of that by the best partition (limit 1), by load")
    for name, (count, score) in TOPOLOGIES.items():
        if count > 8:
            continue
        day = Day(count, score)
        partition = day.partition()
        ours = cache(lambda free, size: frozenset(preferred(free, (), size, score)))  # noqa: B023
        for sizes in ([1, 2, 4, 8][: count.bit_length()], range(1, count + 1)):
            ratios = [
                sum(day.mean(ours, seed, sizes, load) for seed in range(3))
                / sum(day.mean(partition, seed, sizes, load) for seed in range(3))
                for load in (0.5, 0.6, 0.7)
            ]
            fine = fine and min(ratios) >= 1 - 1e-9
            shown = ", ".join(map(str, sizes))
            print(f"  {name:<20} sizes {shown:<24} {' '.join(f'{ratio:.4f}' for ratio in ratios)}")
    return fine


def numa() -> None:
    """Print the time of a choice among 10,000 devices of which only the NUMA nodes are known."""
    devices = {f"sim-{number}": (number % 2,) for number in range(10_000)}
    print("\n10,000 devices, NUMA nodes alone")
    for size in (4, 5000):
        took = shortest(partial(numa_compact, devices, list(devices), (), size), 5)
        print(f"  size {size:<6} {took:.1f} ms")


def main() -> int:
    """Run all measurements; return 1 if a limit is exceeded."""
    fine = [*(speed(count) for count in LIMITS), quality(), days()]
    numa()
    print("\nAll limits are kept." if all(fine) else "\nA LIMIT WAS MISSED")
    return 0 if all(fine) else 1


if __name__ == "__main__":
    sys.exit(main())
