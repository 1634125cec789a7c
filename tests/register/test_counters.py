"""Whatever the config, pods and claims together never consume more of a shared counter than the hardware has."""

from __future__ import annotations

import asyncio

from deviceplugin.device import ContainerEdits, Device
from deviceplugin.testing import FakePod
from dra_bridge.testing.node import FakeNode
from tests.dra.agents import Listed
from tests.register.node import A, B, D, E, Here, serving, some

Q = "10Gi"


def part(name: str, takes: str = Q, total: str = Q, identity: str = "") -> Device:
    """Return a partition of a chip, which by default consumes all of the chip's memory."""
    return Device(
        name,
        edits=ContainerEdits({f"DEVICE_{name}": "1"}),
        consumes={"chip": {"memory": takes}},
        counters={"chip": {"memory": total}},
        identity=identity,
    )


def source(resource: str, driver: str, *names: str) -> Listed:
    """Return a source that lists partitions with these names."""
    made = Listed(resource, driver)
    made.lists = asyncio.Queue()
    made.list(*map(part, names))
    return made


async def both_run(here: Here, first: FakePod, resource: str) -> bool:
    """Return whether the first pod still runs, and a new pod with a limit of one device of the resource runs too."""
    other = await here.run("other", {resource: 1})
    return first.running and other.running


async def test_a_pods_part_counts_after_its_resource_is_gone_over_a_restart(node: FakeNode) -> None:
    """A pod holds a partition of a resource that the restarted plugin does not serve: other partitions are refused."""
    async with serving(node, source(A, D, "a0"), source(B, D, "b0"), both=False) as here:
        await here.until(lambda: here.healthy(A) and here.healthy(B))
        first = await here.run("p", {A: 1})
        assert first.running
        await here.scans()
    async with serving(node, source(B, D, "b0"), both=False) as here:
        await here.until(lambda: B in node.resources())
        await here.scans()
        assert not await both_run(here, first, B)


async def test_a_part_that_takes_what_is_not_declared_is_not_offered(node: FakeNode) -> None:
    """A device that consumes from an undeclared counter set, or more than a counter has, is withheld."""
    one = source(A, D)
    one.list(part("a0"), Device("a1", consumes={"chop": {"memory": Q}}), part("a2", takes="20Gi"))
    async with serving(node, one, both=False) as here:
        await here.until(lambda: node.devices(A).keys() == {"a0", "a1", "a2"})
        assert here.healthy(A) == {"a0"}
        why = here.withheld(A)
        assert why["a1"].endswith("from counter memory of chop, which is not declared, or declared in different ways")
        assert why["a2"] == f"it takes {20 << 30} from counter memory of chip, which has {10 << 30}"


@some(
    "to, names, amount",
    [(D, "a0 a1", "10"), (E, "a0 a1", "10Gi"), ("", "a0 a1", "10"), (D, "a0", "10Gi")],
    [D, E, ""],
    ["a0 a1", "a0"],
    ["10", "10Gi"],
)
async def test_a_claims_part_counts_for_the_plugin_alone(node: FakeNode, to: str, names: str, amount: str) -> None:
    """A claim holds a partition when `deviceplugin run` replaces `dra-bridge run`: no pod gets a part of its chip.

    to: the driver in the new config. names: the listed partitions, which have the same counters.
    """

    def made(driver: str) -> Listed:
        one = source(A, driver)
        one.list(*(part(name, amount, amount) for name in names.split()))
        return one

    async with serving(node, made(D), share="all") as here:
        await here.until(lambda: here.sliced() == set(names.split()))
        first = await here.claimant("c")
    async with serving(node, made(to), both=False) as here:
        await here.until(lambda: A in node.resources())
        await here.scans()
        assert not await both_run(here, first, A)
