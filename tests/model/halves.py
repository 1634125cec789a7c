"""An exploration of all states of two devices, tens of millions, without a visit of each state.

A state has a part that belongs to no device (`Shared`) and two halves; a half is a device with its pods and claims.
There are two kinds of steps. Most steps belong to one device: they change its half, whatever the other half is, and are
possible if the node has room for one more pod or claim. The other steps are common (`FACTS`): they lead each half to a
result that depends on the half's own state and on some facts about the other half. A common step that is not possible
changes nothing. So from states that differ only in the second half, a step leads to states that differ only there.

The states with the same `Shared` are therefore a table: for each first half, the set of second halves that were seen
with it, as the bits of a number. A step handles a whole row at once. As devices differ in their names only, the table
is symmetric. No state is dropped, and no two states are merged: in the end the tables have all states that can be
reached, and no other state.

The steps are the steps of `Small.successors`, applied to states of two halves; this module adds the facts only.
Tests show that the facts are enough: they compare `Halves.after` with `Small.successors`, state by state, and for
smaller nodes with all states that `explore` finds. A wrong state is wrong because of one of its devices, so each half
is checked once, beside an idle half.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterator
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from typing import Final, NamedTuple

from deviceplugin.register.records import State
from tests.model.small import STATES, UNKNOWN, Device, Pod, Request, Small, Stage, Step, SystemState

TO_DRA: Final = STATES.index(State.TO_DRA)
TO_PLUGIN: Final = STATES.index(State.TO_PLUGIN)


class Shared(NamedTuple):
    """The part of a state that belongs to no device.

    step, written, late: as in `Stage`. sent, want: whether the agent has sent a list, and whether it wants a slice.
    """

    step: Step
    written: bool
    late: bool
    alive: bool
    sent: bool
    want: bool
    damaged: bool
    writing: bool


class Half(NamedTuple):
    """The part of a state that belongs to one device. pods, claims: those of this device, which has number 0 there."""

    device: Device
    pods: tuple[Pod, ...] = ()
    claims: tuple[Request, ...] = ()
    sent: bool = False
    received: bool = False
    want: bool = False
    slice: bool = False
    moving: bool = False
    first: bool = False
    second: bool = False


Parts = tuple[Shared, Half, Half]

IDLE_HALF: Final = Half(Device(STATES.index(State.PLUGIN)))
SETTLED: Final = IDLE_HALF._replace(sent=True, received=True)


def parted(system: SystemState) -> Parts:
    """Return a state's parts: the part that belongs to no device, and each device's part (half)."""
    stage = system.stage
    halves = []
    for number, device in enumerate(system.devices):
        pods = sorted(pod._replace(device=0) for pod in system.pods if pod.at and pod.device == number)
        claims = sorted(claim._replace(device=0) for claim in system.claims if claim.device == number)
        half = Half(
            device,
            tuple(pods),
            tuple(claims),
            bool(system.sent) and system.sent[number],
            system.received[number],
            bool(system.want) and system.want[number],
            system.slice[number],
            stage.moving[number],
            stage.first[number],
            stage.second[number],
        )
        halves.append(half)
    shared = Shared(
        stage.step,
        stage.written,
        stage.late,
        system.alive,
        bool(system.sent),
        bool(system.want),
        system.damaged,
        system.writing,
    )
    return shared, halves[0], halves[1]


def joined(shared: Shared, one: Half, two: Half) -> SystemState:
    """Return the state with these parts: the part that belongs to no device, and each device's part (half)."""
    both = (one, two)
    pods = [pod._replace(device=number) for number, half in enumerate(both) for pod in half.pods]
    pods = sorted([*pods, Pod(), Pod()][:2])
    claims = [claim._replace(device=number) for number, half in enumerate(both) for claim in half.claims]
    claims = sorted([*claims, Request(), Request()][:2])
    return SystemState(
        (one.device, two.device),
        (pods[0], pods[1]),
        (claims[0], claims[1]),
        (one.sent, two.sent) if shared.sent else (),
        (one.received, two.received),
        (one.want, two.want) if shared.want else (),
        (one.slice, two.slice),
        Stage(
            shared.step,
            (one.moving, two.moving),
            (one.first, two.first),
            (one.second, two.second),
            shared.written,
            shared.late,
        ),
        shared.alive,
        shared.damaged,
        shared.writing,
    )


# The common steps, which concern the parts of both devices (the halves).


def nothing(_half: Half) -> Hashable:
    """Return no facts: the step's result for the other device does not depend on this device's part (half)."""
    return ()


def withdrawal(half: Half) -> Hashable:
    """Return whether the device may go to limits, whether it is also out of the slice, and whether the slice is as
    the agent wants it."""
    free = half.device.state == TO_PLUGIN and not any(claim.record for claim in half.claims)
    return free, free and not half.slice, half.want == half.slice


def unlisted(half: Half) -> bool:
    """Return whether a pod was granted this half's device, and is not in the checkpoint yet."""
    return any(pod.unlisted for pod in half.pods)


Steps = Callable[[Small, SystemState], Iterator[tuple[str, SystemState]]]

FACTS: Final[dict[str, tuple[Steps, Callable[[Half], Hashable]]]] = {
    "receive": (Small.kubelet, nothing),
    "write": (Small.kubelet, nothing),
    "draft": (Small.kubelet, nothing),
    "write late": (Small.kubelet, nothing),
    "lose checkpoint": (Small.kubelet, lambda half: any(pod.unrecorded for pod in half.pods)),
    "send": (Small.side, nothing),
    "want": (Small.offering, nothing),
    "accept": (Small.offering, nothing),
    "request": (Small.gathering, lambda half: (half.device.state == TO_DRA, half.sent)),
    "withdrawn": (Small.gathering, withdrawal),
    "read checkpoint": (Small.gathering, nothing),
    "read another": (Small.gathering, nothing),
    "observe": (Small.gathering, lambda half: half.moving),
    "commit to dra": (Small.gathering, nothing),
    "list claims": (Small.gathering, nothing),
    "commit to plugin": (Small.gathering, nothing),
    "tick": (Small.fate, lambda half: (half.device.absent == 1, unlisted(half))),
    "kubelet restarts": (Small.fate, nothing),
    "agent dies": (Small.fate, nothing),
    "agent dies, ledger lost": (Small.fate, lambda half: any(pod.forgotten for pod in half.pods)),
    "agent starts": (Small.fate, lambda half: (half.device.state == UNKNOWN, unlisted(half))),
}
"""For each step of both devices: the method of `Small` that yields it, and what it needs of the other device."""

GATHERING: Final = (
    ("request", "withdrawn"),
    ("read checkpoint",),
    ("observe",),
    ("read another",),
    ("commit to dra",),
    ("list claims",),
    ("commit to plugin",),
)


def possible(small: Small, shared: Shared) -> tuple[str, ...]:
    """Return the steps of both devices that may be possible in states with this part that belongs to no device."""
    found = ["receive", "write", "tick"]
    if small.slow:
        found.append("write late" if shared.writing else "draft")
    if "lose" in small.faults:
        found.append("lose checkpoint")
    if shared.alive:
        found += ["send", "want", "accept", *GATHERING[shared.step]]
    if small.crashes:
        found += ["kubelet restarts", "agent dies" if shared.alive else "agent starts"]
        if shared.alive and small.damage and not shared.damaged:
            found.append("agent dies, ledger lost")
    return tuple(found)


# Sets of small numbers, as bit masks.


def bits(mask: int) -> list[int]:
    """Return the numbers whose bits are 1 in a mask."""
    text = bin(mask)[:1:-1]
    found = []
    at = text.find("1")
    while at >= 0:
        found.append(at)
        at = text.find("1", at + 1)
    return found


def mask_of(numbers: Collection[int]) -> int:
    """Return a mask in which the bits with these numbers are 1."""
    raw = bytearray(max(numbers) // 8 + 1)
    for number in numbers:
        raw[number >> 3] |= 1 << (number & 7)
    return int.from_bytes(raw, "little")


class Ways(dict[int, int]):
    """The results of a step of both devices for one device's part (half), by the half's number in a block.

    theirs: the facts about the other device's half, which are the same for all results. to: the block that the step
    leads to, by the facts about the half.
    """

    def __init__(self, block: Block, word: str, theirs: Hashable) -> None:
        self.block = block
        self.word = word
        self.theirs = theirs
        self.to: dict[Hashable, Block] = {}

    def __missing__(self, number: int) -> int:
        block = self.block
        system = joined(block.shared, block.halves[number], block.example[self.word][self.theirs])
        steps = FACTS[self.word][0](block.all.small, system)
        return self.learn(number, next((after for what, after in steps if what == self.word), system))

    def learn(self, number: int, after: SystemState) -> int:
        """Record the result of the step for one device's part of the state (half)."""
        shared, half, _ = parted(after)
        block = self.block.all.block(shared)
        assert self.to.setdefault(self.block.kinds[self.word][number], block) is block, "the facts do not suffice"
        found = self[number] = block.number(half)
        return found


class Block:
    """All states with the same `Shared`. The number of a half (a device's part) is its index in this block."""

    def __init__(self, halves: Halves, shared: Shared) -> None:
        self.all = halves
        self.shared = shared
        self.words = possible(halves.small, shared)
        self.numbers: dict[Half, int] = {}
        self.halves: list[Half] = []
        self.rows: list[int] = []
        self.fresh: dict[int, int] = {}
        self.size: list[tuple[int, int]] = []
        self.sizes: dict[tuple[int, int], int] = defaultdict(int)
        self.kinds: dict[str, list[Hashable]] = {word: [] for word in self.words}
        self.example: dict[str, dict[Hashable, Half]] = {word: {} for word in self.words}
        self.ways: dict[tuple[str, Hashable], Ways] = {}
        self._own: dict[int, list[int]] = {}

    def number(self, half: Half) -> int:
        """Return the number in this block of a half (a device's part of a state)."""
        known = self.numbers.get(half)
        if known is None:
            known = self.numbers[half] = len(self.halves)
            self.halves.append(half)
            self.rows.append(0)
            self.size.append((len(half.pods), len(half.claims)))
            self.sizes[self.size[known]] |= 1 << known
            for word in self.words:
                kind = FACTS[word][1](half)
                self.kinds[word].append(kind)
                self.example[word].setdefault(kind, half)
        return known

    def room(self, number: int) -> int:
        """Return a mask of the halves (devices' parts) with which the node has no more pods and claims than allowed."""
        mine, small = self.size[number], self.all.small
        found = 0
        for (pods, claims), members in self.sizes.items():
            if pods + mine[0] <= small.pods and claims + mine[1] <= small.claims:
                found |= members
        return found

    def add(self, number: int, partners: int) -> None:
        """Add the states of a half (a device's part) with these halves of the other device. partners: a mask."""
        new = partners & ~self.rows[number]
        if new:
            if not self.rows[number] and not self.all.problem:
                self.all.problem = self.all.wrong(joined(self.shared, self.halves[number], IDLE_HALF))
            self.rows[number] |= new
            self.fresh[number] = self.fresh.get(number, 0) | new

    def own(self, number: int) -> list[int]:
        """Return the numbers of the halves (a device's parts of states) that steps of this device alone lead to."""
        known = self._own.get(number)
        if known is None:
            half = self.halves[number]
            system = joined(self.shared, half, IDLE_HALF)
            found: dict[int, None] = {}
            everybodys = dict.fromkeys((word for word in self.words if FACTS[word][1] is nothing), system)
            for what, after in self.all.small.successors(system):
                if what in everybodys:
                    everybodys[what] = after
                elif what not in FACTS:
                    shared, one, two = parted(after)
                    assert shared == self.shared
                    assert half == one or two == IDLE_HALF, f"{what} changes both"
                    found[self.number(one)] = None
            for word, after in everybodys.items():
                self.way(word, ()).learn(number, after)
            known = self._own[number] = list(found)
        return known

    def way(self, word: str, theirs: Hashable) -> Ways:
        """Return the results of a step of both devices. theirs: the facts about the other device's part (half)."""
        known = self.ways.get((word, theirs))
        if known is None:
            known = self.ways[word, theirs] = Ways(self, word, theirs)
        return known

    def proceed(self) -> None:
        """Take every step from the states that are new in this block."""
        fresh, self.fresh = self.fresh, {}
        alike = defaultdict(list)
        for number, partners in fresh.items():
            alike[partners].append(number)
        for partners, ones in alike.items():
            others = bits(partners)
            mirrored = mask_of(ones)
            for other in others:
                self.add(other, mirrored)
            for one in ones:
                for after in self.own(one):
                    grown = self.size[after] != self.size[one]
                    self.add(after, partners & self.room(after) if grown else partners)
            for other in others:
                self.own(other)
            for word in self.words:
                self._together(word, ones, others)

    def _together(self, word: str, ones: list[int], others: list[int]) -> None:
        """Take a step of both devices, from each state with a half in `ones` and the other half in `others`.

        A half is a device's part of a state; the lists have the numbers of halves in this block.
        """
        left, right = self._sorted(word, ones), self._sorted(word, others)
        for mine, some in left.items():
            for theirs, partners in right.items():
                ways, back = self.way(word, theirs), self.way(word, mine)
                after = set(map(ways.__getitem__, some))
                beside = set(map(back.__getitem__, partners))
                to = ways.to[mine]
                assert back.to[theirs] is to, "the halves do not agree where a step leads"
                # Rows and columns of a block are kept equal, so the smaller number of rows is enough.
                if len(after) > len(beside):
                    after, beside = beside, after
                arrived = mask_of(beside)
                for number in after:
                    to.add(number, arrived)

    def _sorted(self, word: str, numbers: list[int]) -> dict[Hashable, list[int]]:
        """Return the numbers of halves (devices' parts of states) by the facts that the step's result depends on."""
        if len(self.example[word]) == 1:
            return {self.kinds[word][0]: numbers}
        kinds = self.kinds[word]
        found: dict[Hashable, list[int]] = defaultdict(list)
        for number in numbers:
            found[kinds[number]].append(number)
        return found


@dataclass(frozen=True, slots=True)
class Found:
    """The result: how many states (names of devices do not count) and halves there are, and a problem or ""."""

    states: int
    halves: int
    problem: str


class Halves:
    """Every state of two devices that the steps of a `Small` lead to.

    wrong: a function that returns what is wrong with a state of one device; `Small.wrong` unless given.
    """

    def __init__(self, small: Small, wrong: Callable[[SystemState], str] | None = None) -> None:
        assert len(small.names) == 2
        self.small = small
        self.wrong = wrong or small.wrong
        self.problem = ""
        self.blocks: dict[Shared, Block] = {}

    def block(self, shared: Shared) -> Block:
        """Return the block of the states with this part that belongs to no device."""
        known = self.blocks.get(shared)
        if known is None:
            known = self.blocks[shared] = Block(self, shared)
        return known

    def explore(self, first: SystemState) -> Found:
        """Visit all states that can be reached from `first`, until one is wrong."""
        shared, one, two = parted(first)
        block = self.block(shared)
        block.add(block.number(one), 1 << block.number(two))
        # Blocks in which the agent has more evidence about holders come later: many of their states go on together.
        while not self.problem and (waiting := [block for block in self.blocks.values() if block.fresh]):
            min(waiting, key=lambda block: (block.shared.step, block.shared.late)).proceed()
        return Found(self.states(), sum(len(block.halves) for block in self.blocks.values()), self.problem)

    def states(self) -> int:
        """Return the number of states that were seen; states that differ only in the devices' names count once."""
        rows = [(number, row) for block in self.blocks.values() for number, row in enumerate(block.rows)]
        return (sum(row.bit_count() for _, row in rows) + sum(row >> number & 1 for number, row in rows)) // 2

    def seen(self, system: SystemState) -> bool:
        """Return whether a state was seen."""
        shared, one, two = parted(system)
        block = self.blocks.get(shared)
        if block is None or one not in block.numbers or two not in block.numbers:
            return False
        return bool(block.rows[block.numbers[one]] >> block.numbers[two] & 1)

    def some(self, count: int, seed: int = 0) -> Iterator[SystemState]:
        """Yield `count` random states of those that were seen, all with the same probability."""
        rows = [(block, number) for block in self.blocks.values() for number in range(len(block.rows))]
        sizes = [block.rows[number].bit_count() for block, number in rows]
        chance = random.Random(seed)
        for block, number in chance.choices(rows, sizes, k=count):
            other = chance.choice(bits(block.rows[number]))
            yield joined(block.shared, block.halves[number], block.halves[other])

    def after(self, system: SystemState) -> set[Parts]:
        """Return the states that the steps from a seen state lead to, without the state itself."""
        shared, one, two = parted(system)
        block = self.blocks[shared]
        here, there = block.numbers[one], block.numbers[two]
        found = set()
        for after in block.own(here):
            if block.room(after) >> there & 1:
                found.add((shared, block.halves[after], two))
        for after in block.own(there):
            if block.room(after) >> here & 1:
                found.add((shared, one, block.halves[after]))
        for word in block.words:
            mine, theirs = block.kinds[word][here], block.kinds[word][there]
            ways, back = block.way(word, theirs), block.way(word, mine)
            left, right = ways[here], back[there]
            to = ways.to[mine]
            found.add((to.shared, to.halves[left], to.halves[right]))
        return found - {(shared, one, two)}

    def endless(self, *, serve: bool) -> str:
        """Return where the steps of `Small.ending` run in a circle; "" if they always end.

        None of these steps returns the part of a state that belongs to no device (`Shared`) to an earlier value: the
        agent starts, ends its search for holders without beginning another, and sends what it has not sent yet. The
        other steps change one device's part (half), whatever the other half is: if no half can come back to itself, no
        state can.
        """
        for shared, block in self.blocks.items():
            ways = {}
            for half in block.halves:
                after = [parted(system) for system in self.small.ending(joined(shared, half, IDLE_HALF), serve=serve)]
                ways[half] = {one for here, one, _ in after if here == shared and one != half}
            try:
                TopologicalSorter(ways).prepare()
            except CycleError as error:
                return f"{shared}: {error.args[1]}"
        return ""

    def ended(self, *, serve: bool) -> Iterator[SystemState]:
        """Yield the states in which all that was begun has ended (`Small.ending`), each once for all device names."""
        for shared, block in self.blocks.items():
            if not (shared.alive and shared.sent and shared.want) or shared.step:
                continue
            ended = [
                number
                for number, half in enumerate(block.halves)
                if next(self.small.ending(joined(shared, half, SETTLED), serve=serve), None) is None
            ]
            if not ended:
                continue
            among = mask_of(ended)
            for number in ended:
                for other in bits(block.rows[number] & among):
                    if number <= other:
                        yield joined(shared, block.halves[number], block.halves[other])
