"""Writes of other clients to the agent's pool of ResourceSlices: they are found, reported, and undone."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dra_bridge.kube import Cluster, UnavailableError
from dra_bridge.slices.desired import NAMES, own_name, slice_name
from dra_bridge.slices.foreign import OFTEN, WINDOW, ForeignKind, ForeignWrite, manager_of, problems
from dra_bridge.slices.plan import UNGROWABLE, generation_of
from dra_bridge.slices.plan import plan as plan_of
from dra_bridge.slices.publisher import Publisher
from dra_bridge.testing.apiserver import FakeApiServer, Fault
from dra_bridge.testing.scheduler import offered
from tests.dra.slices.test_publisher import DRIVER, NODE, applied, became, client, many, pool, running, slices
from tests.waits import until

MOST = 2**63 - 1
"""The highest generation that the API server accepts."""
HERE = {"nodeName": NODE}
SELECTOR = {"nodeSelectorTerms": [{"matchExpressions": [{"key": "gpus", "operator": "Exists"}]}]}
NODELESS: dict[str, dict[str, Any]] = {
    "allNodes": {"allNodes": True},
    "nodeSelector": {"nodeSelector": SELECTOR},
    "perDeviceNodeSelection": {"perDeviceNodeSelection": True},
}


def foreign(
    name: str = "foreign", generation: int = 1, count: int = 1, device: str = "ghost", **spec: Any
) -> dict[str, Any]:
    """Return a slice of another client in the agent's pool."""
    where = spec or HERE
    per_device = {"allNodes": True} if "perDeviceNodeSelection" in where else {}
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceSlice",
        "metadata": {"name": name},
        "spec": {
            "driver": DRIVER,
            "pool": {"name": NODE, "generation": generation, "resourceSliceCount": count},
            "devices": [{"name": device, **per_device}],
            **where,
        },
    }


@contextlib.asynccontextmanager
async def publishing(
    server: FakeApiServer, devices: int = 2, noticed: list[tuple[str, ForeignKind, str]] | None = None, **options: Any
) -> AsyncIterator[Publisher]:
    """Run a publisher of this many devices; the block begins once the API server has the devices."""
    seen = noticed if noticed is not None else []
    async with client(server) as cluster:
        publisher = Publisher(cluster, NODE, noticed=lambda *what: seen.append(what), **{"burst": 10_000, **options})
        async with running(publisher, pool(*many(devices))):
            yield publisher


def in_use(server: FakeApiServer) -> list[str]:
    """Return the devices that a scheduler can allocate to claims on this node."""
    return [device["name"] for _, _, device in offered(server.objects(), NODE)]


async def becomes(server: FakeApiServer, *devices: str) -> None:
    """Wait until the scheduler sees these devices, and the pool has no slice of other clients."""

    def whole(it: FakeApiServer) -> bool:
        names = {body["metadata"]["name"] for body in it.objects()}
        return in_use(it) == list(devices) and all(own_name(NODE, DRIVER, name) for name in names)

    await asyncio.to_thread(server.wait_for, whole)


def kinds(publisher: Publisher) -> dict[ForeignKind, int]:
    return dict(publisher.state(DRIVER).overcome)


# --- writes of other clients that the agent undoes ----------------------------------------------------


@pytest.mark.parametrize("generation", [0, 1, 2, 1000, UNGROWABLE - 1, UNGROWABLE, MOST - 1, MOST])
@pytest.mark.parametrize("count", [1, 2, 7])
async def test_a_slice_in_the_pool(server: FakeApiServer, generation: int, count: int) -> None:
    """Another client's slice in the agent's pool is deleted at any generation and count; the pool can still change."""
    noticed: list[tuple[str, ForeignKind, str]] = []
    async with publishing(server, noticed=noticed) as publisher:
        server.create(foreign(generation=generation, count=count))
        await becomes(server, "gpu0", "gpu1")
        await became(publisher, pool(*many(3)))
        await becomes(server, "gpu0", "gpu1", "gpu2")
        kind = ForeignKind.GENERATION if generation >= UNGROWABLE else ForeignKind.SLICE
        await until(lambda: kinds(publisher) == {kind: 1}, "it is counted")
        assert [(driver, of) for driver, of, _ in noticed] == [(DRIVER, kind)]
        assert "slice foreign " in noticed[0][2]
        await until(lambda: publisher.state(DRIVER).foreign == (), "it is not shown any more")


@pytest.mark.parametrize("generation", [1, 5, MOST])
@pytest.mark.parametrize("how", NODELESS)
async def test_a_slice_without_a_node(server: FakeApiServer, how: str, generation: int) -> None:
    """A slice of another client in the agent's pool is found and deleted although it has no nodeName."""
    async with publishing(server) as publisher:
        server.create(foreign(generation=generation, **NODELESS[how]))
        await becomes(server, "gpu0", "gpu1")
        await until(lambda: sum(kinds(publisher).values()) == 1, "it is counted")
        await became(publisher, pool(*many(3)))
        await becomes(server, "gpu0", "gpu1", "gpu2")


async def test_what_is_there_before_the_agent(server: FakeApiServer) -> None:
    """Slices that other clients wrote into the pool while no agent ran are deleted at the agent's start."""
    server.create(foreign("one", MOST))
    server.create(foreign("two", MOST, allNodes=True))
    async with publishing(server) as publisher:
        await becomes(server, "gpu0", "gpu1")
        assert generation_of(server.objects()[0]) < UNGROWABLE
        await until(lambda: kinds(publisher) == {ForeignKind.GENERATION: 2}, "both are counted")


EDITS: dict[str, Callable[[dict[str, Any]], object]] = {
    "generation": lambda spec: spec["pool"].update(generation=MOST),
    "lower generation": lambda spec: spec["pool"].update(generation=0),
    "count": lambda spec: spec["pool"].update(resourceSliceCount=9),
    "a device more": lambda spec: spec["devices"].append({"name": "ghost"}),
    "a device less": lambda spec: spec["devices"].pop(),
    "all at once": lambda spec: spec.update(
        pool={**spec["pool"], "generation": MOST, "resourceSliceCount": 2}, devices=[{"name": "ghost"}]
    ),
    "binding conditions": lambda spec: spec["devices"][0].update(
        bindingConditions=["never"], bindingFailureConditions=["x"]
    ),
    "an attribute": lambda spec: spec["devices"][0]["attributes"].update(x={"bool": True}),
}


@pytest.mark.parametrize("devices", [2, 200])
@pytest.mark.parametrize("edit", EDITS)
async def test_an_edited_slice(server: FakeApiServer, edit: str, devices: int) -> None:
    """If another client edits a slice of the agent, the agent restores it, and the pool can still change."""
    async with publishing(server, devices) as publisher:
        before = server.objects()
        body = server.objects()[-1]
        EDITS[edit](body["spec"])
        server.replace(body)
        await asyncio.to_thread(
            server.wait_for,
            lambda it: (
                [one["spec"]["devices"] for one in it.objects()] == [one["spec"]["devices"] for one in before]
                and len(in_use(it)) == devices
            ),
        )
        kind = ForeignKind.GENERATION if edit in ("generation", "all at once") else ForeignKind.EDITED
        await until(lambda: kinds(publisher) == {kind: 1}, "it is counted")
        await became(publisher, pool(*many(devices + 1)))
        assert len(in_use(server)) == devices + 1


async def test_edited_while_no_agent_ran(server: FakeApiServer) -> None:
    """If another client gave all of the agent's slices the highest generation, they are made again in generation 1."""
    async with publishing(server, 200):
        pass
    for body in server.objects():
        body["spec"]["pool"]["generation"] = MOST
        server.replace(body)
    async with publishing(server, 200) as publisher:
        assert {generation_of(body) for body in server.objects()} == {1}
        await became(publisher, pool(*many(201)))
        assert len(in_use(server)) == 201


@pytest.mark.parametrize("whose", ["another driver's", "another node's", "a slice without a node"])
async def test_a_name_that_is_taken(server: FakeApiServer, whose: str) -> None:
    """If another client's slice has the name of the agent's slice, the agent uses another name."""
    spec: dict[str, Any] = {"another driver's": HERE, "another node's": {"nodeName": "node2"}}.get(
        whose, {"allNodes": True}
    )
    body = foreign(slice_name(NODE, DRIVER, 0), **spec)
    if whose == "another driver's":
        body["spec"]["driver"] = "other.example.com"
    if whose == "another node's":
        body["spec"]["pool"]["name"] = "node2"
    server.create(body)
    async with publishing(server) as publisher:
        await asyncio.to_thread(
            server.wait_for, lambda it: [name for name in in_use(it) if name != "ghost"] == ["gpu0", "gpu1"]
        )
        await became(publisher, pool(*many(3)))
        names = {one["metadata"]["name"] for one in server.objects() if len(one["spec"]["devices"]) == 3}
        assert names == {slice_name(NODE, DRIVER, 0, {slice_name(NODE, DRIVER, 0)})}
        expected = ForeignKind.NODELESS if whose == "a slice without a node" else ForeignKind.NAME
        await until(lambda: kinds(publisher) == {expected: 1}, "it is counted")


async def test_the_name_of_the_probe_cannot_be_taken(server: FakeApiServer) -> None:
    """The dry run that detects features creates an object without a name, so that no other object can have the name."""
    async with publishing(server):
        pass
    names = {one.body["metadata"].get("name") for one in server.requests("POST") if "dryRun" in one.query}
    assert names <= {None}


async def test_another_pool_on_the_node_is_named(server: FakeApiServer) -> None:
    """A foreign slice in another pool on this node is reported, and not deleted: its devices cannot be prepared."""
    noticed: list[tuple[str, ForeignKind, str]] = []
    body = foreign()
    body["spec"]["pool"]["name"] = "fabric"
    server.create(body)
    async with publishing(server, noticed=noticed) as publisher:
        (one,) = publisher.state(DRIVER).foreign
        assert (one.kind, one.devices) == (ForeignKind.POOL, frozenset())
        assert [of for _, of, _ in noticed] == [ForeignKind.POOL]
        assert len(server.objects()) == 2


async def test_slices_of_other_nodes_pools_are_left_alone(server: FakeApiServer) -> None:
    """A slice without a nodeName in another node's pool is left to the agent of that node."""
    body = foreign(allNodes=True)
    body["spec"]["pool"]["name"] = "node2"
    server.create(body)
    async with publishing(server) as publisher:
        assert publisher.state(DRIVER).foreign == ()
        assert {one["metadata"]["name"] for one in server.objects()} == {"foreign", slice_name(NODE, DRIVER, 0)}


# --- writes of other clients that the agent cannot undo -----------------------------------------------


@pytest.mark.parametrize("code", [403, 422])
@pytest.mark.parametrize("generation", [1, 50, MOST])
async def test_a_slice_that_may_not_be_deleted(server: FakeApiServer, code: int, generation: int) -> None:
    """If the deletion of another client's slice is refused, the agent's slices are accepted all the same.

    `problems` has the kubectl command for the deletion. The slice is deleted once deletions are allowed.
    """
    server.fail(
        lambda request: request.method == "DELETE", Fault(code=code, message="a policy says no"), times=1_000_000
    )
    async with publishing(server) as publisher:
        server.create(foreign(generation=generation, device="gpu0"))
        await until(lambda: any(one.refused for one in publisher.state(DRIVER).foreign), "the refusal is shown")
        await became(publisher, pool(*many(3)))
        (text,) = problems(DRIVER, publisher.state(DRIVER).foreign, ())
        assert "a policy says no" in text
        assert "kubectl delete resourceslice foreign" in text
        if generation < UNGROWABLE:
            assert in_use(server) == ["gpu0", "gpu1", "gpu2"]  # the agent's slices have a higher generation
        server.heal()
        await becomes(server, "gpu0", "gpu1", "gpu2")
        await until(lambda: publisher.state(DRIVER).foreign == (), "it is not shown any more")


async def test_a_slice_with_a_finalizer_is_there_until_it_is_gone(server: FakeApiServer) -> None:
    """A slice that waits for its finalizers is not deleted again; until it is gone, its devices count as offered."""
    async with publishing(server) as publisher:
        body = foreign(generation=MOST)
        body["metadata"]["finalizers"] = ["example.com/stays"]
        server.create(body)
        await until(lambda: any(one.finalizers for one in publisher.state(DRIVER).foreign), "it is being deleted")
        await became(publisher, pool(*many(3)))
        (text,) = problems(DRIVER, publisher.state(DRIVER).foreign, ())
        assert "waits for its finalizers: example.com/stays" in text
        assert publisher.withdrawn(DRIVER, "ghost") is None
        assert publisher.offering(DRIVER, "ghost") == "foreign"
        assert len(server.requests("DELETE")) == 1
        body = server.get("resourceslices", "foreign")
        body["metadata"]["finalizers"] = []
        server.replace(body)
        await becomes(server, "gpu0", "gpu1", "gpu2")
        await until(lambda: publisher.withdrawn(DRIVER, "ghost") is not None, "it is withdrawn")


class Fighter:
    """A client that creates a slice in the pool again whenever it is deleted."""

    def __init__(self, server: FakeApiServer, body: dict[str, Any]) -> None:
        self.server, self.body, self.written = server, body, 0

    async def run(self) -> None:
        """Create the slice again and again, until cancelled."""
        position = -1
        while True:
            if self.body["metadata"]["name"] not in {one["metadata"]["name"] for one in self.server.objects()}:
                self.server.create(self.body)
                self.written += 1
            position = await asyncio.to_thread(self.server.wait_changed, position, 0.05)


@contextlib.asynccontextmanager
async def fighting(server: FakeApiServer, body: dict[str, Any]) -> AsyncIterator[Fighter]:
    fighter = Fighter(server, body)
    task = asyncio.create_task(fighter.run())
    try:
        yield fighter
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


@pytest.mark.parametrize("generation", [1, MOST])
async def test_somebody_who_writes_again_and_again(server: FakeApiServer, generation: int) -> None:
    """If another client writes a slice again and again, the agent limits its own writes, and `problems` reports it."""
    body = foreign(generation=generation)
    async with publishing(server, burst=OFTEN, per_second=0.001) as publisher, fighting(server, body) as fighter:
        await until(lambda: sum(kinds(publisher).values()) >= OFTEN - 1, "it is undone again and again")
        state = publisher.state(DRIVER)
        writes = len(server.writes)
        last = ForeignWrite(ForeignKind.SLICE, "foreign", "", state.recent[-1].at)
        (text,) = [one for one in problems(DRIVER, (), (*state.recent, last)) if "again and again" in one]
        assert "slice foreign" in text
        assert fighter.written <= OFTEN + 1
        assert len(server.writes) == writes


async def test_a_move_ends_during_a_fight(server: FakeApiServer) -> None:
    """While another client writes again and again, the agent's own slices are still accepted."""
    async with publishing(server) as publisher, fighting(server, foreign(generation=3)):
        for count in range(3, 8):
            await became(publisher, pool(*many(count)))
            assert f"gpu{count - 1}" in {
                device["name"] for one in server.objects() for device in one["spec"]["devices"]
            }
        assert publisher.state(DRIVER).problems == ()


async def test_one_round_deletes_a_bounded_number(server: FakeApiServer) -> None:
    """40 foreign slices are all deleted, although each round deletes a limited number."""
    for number in range(40):
        server.create(foreign(f"foreign-{number}", MOST, count=40, device=f"ghost{number}"))
    async with publishing(server) as publisher:
        await becomes(server, "gpu0", "gpu1")
        await until(lambda: kinds(publisher) == {ForeignKind.GENERATION: 40}, "all are counted")


# --- moves to the plugin side -----------------------------------------------------------------------


@pytest.mark.parametrize("generation", [0, 1, MOST])
@pytest.mark.parametrize("where", [HERE, *NODELESS.values()], ids=["nodeName", *NODELESS])
async def test_a_device_in_a_slice_of_others_is_not_withdrawn(
    server: FakeApiServer, generation: int, where: dict[str, Any]
) -> None:
    """A device counts as offered while a foreign slice has it, and as withdrawn since that slice was deleted."""
    refused = Fault(code=403)
    async with publishing(server) as publisher:
        await became(publisher, pool(*many(1)))
        before = publisher.withdrawn(DRIVER, "gpu1")
        assert before is not None
        server.fail(lambda request: request.method == "DELETE", refused, times=1_000_000)
        server.create(foreign(generation=generation, device="gpu1", **where))
        await until(lambda: publisher.withdrawn(DRIVER, "gpu1") is None, "it counts as offered")
        await until(lambda: publisher.offering(DRIVER, "gpu1") == "foreign", "it is said by which slice")
        server.heal()
        await until(lambda: publisher.withdrawn(DRIVER, "gpu1") is not None, "it is withdrawn again")
        after = publisher.withdrawn(DRIVER, "gpu1")
        assert after is not None
        assert after > before


async def test_a_device_that_others_add_to_the_own_slice_is_not_withdrawn(server: FakeApiServer) -> None:
    """If another client adds a withdrawn device to the agent's slice, the time of its withdrawal starts again."""
    async with publishing(server) as publisher:
        await became(publisher, pool(*many(1)))
        before = publisher.withdrawn(DRIVER, "gpu1")
        (body,) = server.objects()
        body["spec"]["devices"].append({"name": "gpu1"})
        server.replace(body)
        await until(lambda: publisher.withdrawn(DRIVER, "gpu1") not in (None, before), "it is withdrawn anew")
        assert in_use(server) == ["gpu0"]


async def test_an_unanswered_write_beside_the_highest_generation(
    server: FakeApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a write without an answer, the next generation is above the agent's own, and below the foreign slice's."""
    async with publishing(server) as publisher:
        replace, lost = Cluster.replace, list[Any]()

        async def unanswered(cluster: Cluster, kind: Any, body: Any, *more: Any, **options: Any) -> Any:
            if lost:
                return await replace(cluster, kind, body, *more, **options)
            lost.append(body)
            server.create(foreign(generation=MOST))
            raise UnavailableError("no answer in time")

        monkeypatch.setattr(Cluster, "replace", unanswered)
        await became(publisher, pool(*many(3)))
        await becomes(server, "gpu0", "gpu1", "gpu2")
        (body,) = server.objects()
        assert generation_of(lost[0]) < generation_of(body) < UNGROWABLE


async def test_an_unanswered_delete_of_the_highest_generation(server: FakeApiServer) -> None:
    """If the answer to the delete of a foreign slice is lost, the agent's generation stays below that slice's."""
    async with publishing(server) as publisher:
        server.fail(lambda request: request.method == "DELETE", Fault(done=True))
        server.create(foreign(generation=MOST))
        await becomes(server, "gpu0", "gpu1")
        await became(publisher, pool(*many(3)))
        assert generation_of(server.objects()[0]) < 10


# --- decisions --------------------------------------------------------------------------------------


generations = st.one_of(st.integers(0, 3), st.sampled_from([UNGROWABLE - 1, UNGROWABLE, MOST - 1, MOST]))


@given(
    st.lists(st.tuples(generations, st.integers(1, 3), st.sampled_from(["gpu0", "ghost"])), max_size=3),
    st.lists(generations, max_size=3),
    st.integers(1, 200),
    st.integers(0, 5),
)
def test_plans_converge_beside_what_others_write(
    others: list[tuple[int, int, str]], edited: list[int], devices: int, remembered: int
) -> None:
    """With any foreign slices, three plans reach the wanted slices, in a generation that can still grow."""
    wanted = slices(pool(*many(devices)))
    state = applied([], plan_of(wanted, []))
    for body, generation in zip(state, edited, strict=False):
        body["spec"]["pool"]["generation"] = generation
    state += [foreign(f"foreign-{n}", *other) for n, other in enumerate(others)]
    for _ in range(3):
        writes = plan_of(wanted, state, generation=remembered)
        assert all(generation_of(body) <= UNGROWABLE for verb, body in writes if verb != "delete")
        state = applied(state, writes)
    assert plan_of(wanted, state, generation=remembered) == []
    names = [device["name"] for _, _, device in offered(state, NODE)]
    assert Counter(names) == Counter(device.id for device in many(devices))


def test_names_differ_from_those_that_are_taken() -> None:
    """Each slice has a fixed number of possible names, which `own_name` accepts; it rejects all others."""
    taken: set[str] = set()
    for _ in range(NAMES):
        name = slice_name(NODE, DRIVER, 3, taken)
        assert name not in taken
        assert own_name(NODE, DRIVER, name)
        taken.add(name)
    for other in ("", "foreign", "foreign-1", f"{NODE}-{DRIVER}-0", slice_name("node2", DRIVER, 0), "x-٣"):
        assert not own_name(NODE, DRIVER, other)


def test_the_writer_is_the_last_that_is_not_the_agent() -> None:
    """The writer of a slice is its latest field manager; of two at the same time, the one that is not the agent."""
    early, late = "2026-01-01T00:00:00Z", "2026-01-01T00:00:01Z"
    fields = [{"manager": "dra-bridge", "time": late}, {"manager": "kubectl-edit", "time": late},
              {"manager": "helm", "time": early}]  # fmt: skip
    assert manager_of({"metadata": {"managedFields": fields}}) == "kubectl-edit"
    assert manager_of({"metadata": {"managedFields": fields[::2]}}) == "dra-bridge"
    assert manager_of({"metadata": {}}) == ""


def test_few_writes_of_others_are_no_problem() -> None:
    """Only OFTEN foreign writes within the window are a problem; fewer, or older ones, are not."""
    writes = [ForeignWrite(ForeignKind.DELETED, "a", "", at) for at in range(OFTEN)]
    assert list(problems(DRIVER, (), writes[1:], now=float(OFTEN))) == []
    (text,) = problems(DRIVER, (), writes, now=float(OFTEN))
    assert f"{OFTEN} times in the last 10 minutes" in text
    assert list(problems(DRIVER, (), writes, now=WINDOW)) == []
