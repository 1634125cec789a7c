"""What an author can write wrong in a source is refused where it is written."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any

import pytest

import dra_bridge
from deviceplugin import Device, DeviceSource, hooks, run
from deviceplugin.inventory import Inventory
from deviceplugin.naming import NamingError
from deviceplugin.node.agent import Agent
from deviceplugin.node.following import SourceFollower
from deviceplugin.source_check import check_source
from deviceplugin.testing import FakeKubelet, Served


class Toys(DeviceSource):
    resource = "example.com/toy"

    async def watch(self) -> AsyncIterator[Sequence[Device]]:
        yield [Device("a")]


def source_with(**members: object) -> type[DeviceSource]:
    """Define a class of sources with these methods and attributes."""
    return type("Wrong", (Toys,), members)


def nothing(*_: object) -> None:
    """Do nothing."""


async def coroutine(*_: object) -> None:
    """Do nothing, and be awaited for it."""


def generator(*_: object) -> Iterator[int]:
    yield 0


async def generate(*_: object) -> AsyncIterator[int]:
    yield 0


@pytest.mark.parametrize(
    ("name", "hook"),
    [
        ("edit", "edits"),
        ("relesed", "released"),
        ("release", "released"),
        ("Reset", "reset"),
        ("perfer", "prefer"),
        ("prepair", "prepare"),
        ("unprepar", "unprepare"),
        ("mesure", "measure"),
        ("replica_of", "replicas_of"),
        ("child_source", "child_sources"),
        ("link", "links"),
    ],
)
def test_a_misspelt_hook_is_an_error_of_its_class(name: str, hook: str) -> None:
    """A method that is almost called like a hook would never be called; its class cannot be defined."""
    with pytest.raises(TypeError, match=rf"Wrong\.{name} is no hook and would never be called; did you mean {hook}\?"):
        source_with(**{name: nothing})


@pytest.mark.parametrize("name", ["_edit", "devices", "match", "reload", "helper", "scan", "update"])
def test_methods_of_other_names_are_the_authors(name: str) -> None:
    """A private method, and one whose name is like no hook's, are taken for what they are."""
    check_source(source_with(**{name: nothing})())


def test_a_name_like_that_of_a_hook_the_class_has_is_a_helpers() -> None:
    """Who has the hook has not misspelt it, and attributes and base classes of others are nobody's mistake."""
    check_source(source_with(released=nothing, release=nothing)())
    check_source(source_with(edit="text")())
    other = type("Other", (), {"release": nothing})
    check_source(type("Both", (Toys, other), {})())


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ({"resource": "laser"}, r"Wrong\.resource: .* must be vendor-domain/name such as example.com/gpu, not 'laser'"),
        ({"resource": "kubernetes.io/laser"}, r"Wrong\.resource: .*vendor's own"),
        ({"driver": "Laser"}, r"Wrong\.driver: .* in lower case such as gpu.example.com, not 'Laser'"),
    ],
)
def test_a_wrong_name_is_an_error_of_its_class(members: dict[str, object], message: str) -> None:
    """A resource without a domain, and a driver's name that the API refuses, are found when the class is defined."""
    with pytest.raises(NamingError, match=message):
        source_with(**members)


def late(**attributes: object) -> DeviceSource:
    """Return a source whose attributes are set after its class was defined."""
    source = Toys()
    vars(source).update(attributes)
    return source


MISTAKES: list[tuple[Callable[[], Any], str]] = [
    (lambda: Toys, r"Toys is a class; a source is an instance of it: Toys\(\)"),
    (lambda: [Toys()], r"\[<.*Toys.*>\] is no source; a source is an instance of a class derived from DeviceSource"),
    (lambda: "example.com/toy", r"'example.com/toy' is no source"),
    (lambda: late(resource="laser"), r"Toys\.resource: .* not 'laser'"),
    (lambda: late(resource=None), r"Toys\.resource must be a string, not None"),
    (lambda: late(driver=5), r"Toys\.driver must be a string, not 5"),
    (lambda: source_with(watch=coroutine)(), r"Wrong\.watch must yield lists of devices, not return one"),
    (lambda: source_with(edits=generator)(), r"Wrong\.edits must return its result, not yield it"),
    (lambda: source_with(reset=generate)(), r"Wrong\.reset must return its result, not yield it"),
    (lambda: source_with(replicas_of=coroutine)(), r"Wrong\.replicas_of must be a plain function, not async"),
    (lambda: source_with(child_sources=coroutine)(), r"Wrong\.child_sources must be an async generator"),
    (lambda: source_with(child_sources=generator)(), r"Wrong\.child_sources must be an async generator"),
    (lambda: source_with(links=nothing)(), r"Wrong\.links must be a property: write @property"),
]


@pytest.mark.parametrize(("make", "message"), MISTAKES)
def test_what_cannot_be_served_is_refused_at_the_start(make: Callable[[], Any], message: str) -> None:
    """`run` of either package raises in the author's own line, and no agent is made of it."""
    for start in (run, dra_bridge.run):
        with pytest.raises((TypeError, NamingError), match=message):
            start(make(), argv=[])
    with pytest.raises((TypeError, NamingError), match=message):
        Agent([make()])


def yielding(listed: Any) -> Iterator[DeviceSource]:
    """Return sources that yield this, one of each kind of generator."""

    def plain(_: object) -> Iterator[Any]:
        yield listed()

    async def asynchronous(_: object) -> AsyncIterator[Any]:
        yield listed()

    for watch in (plain, asynchronous):
        yield source_with(watch=watch)()


@pytest.mark.parametrize(
    ("listed", "instead"),
    [
        (lambda: Device("a"), r"lists of Device, not a Device: write yield [Device('a')]"),
        (lambda: "a", r"lists of Device, not strings: write Device('a')"),
        (lambda: ["a", "b"], r"lists of Device, not of strings: write Device('a')"),
        (lambda: [Device("a"), {"id": "b"}], r"lists of Device, not of dict: {'id': 'b'}"),
        (lambda: None, r"lists of Device, not NoneType: None"),
        (lambda: coroutine(), r"lists of Device, not a coroutine: nobody awaited it; write `await` before the call"),
        (lambda: [coroutine()], r"lists of Device, not of a coroutine: nobody awaited it"),
    ],
)
async def test_lists_of_anything_else_are_refused_with_their_place(listed: Callable[[], Any], instead: str) -> None:
    """What is no list of devices is the source's failure, which names class, file and line; nothing is published."""
    for source in yielding(listed):
        inventory = Inventory(source.resource)
        follower = SourceFollower(source, inventory, nothing, nothing)
        follower.start()
        try:
            async with asyncio.timeout(20):
                while follower.failure is None:  # noqa: ASYNC110  # nothing notifies of it
                    await asyncio.sleep(0.001)
            assert not inventory.snapshot.listed
            place = r"TypeError: Wrong\.watch \(.*test_source_check\.py:\d+\) must yield "
            assert re.fullmatch(place + re.escape(instead) + ".*", follower.error)
        finally:
            await follower.end()


async def test_a_generator_of_devices_is_a_list() -> None:
    """Any iterable of devices is taken, also one that can be read once only."""
    for source in yielding(lambda: (Device(name, nodes=["/dev/null"]) for name in "ab")):
        inventory = Inventory(source.resource)
        published = asyncio.Event()
        follower = SourceFollower(source, inventory, nothing, published.set)
        follower.start()
        async with asyncio.timeout(20):
            await published.wait()
        await follower.end()
        assert list(inventory.snapshot.devices) == ["a", "b"]


async def test_a_hook_that_returns_a_coroutine_has_failed() -> None:
    """A coroutine hook that returns another coroutine has forgotten to await it: its work was not done."""

    async def reset() -> Any:
        return coroutine()

    with pytest.raises(hooks.HookError, match="reset of x returned a coroutine: nobody awaited it; write `await`"):
        await hooks.call("reset of x", reset, timeout=5.0)
    await hooks.call("reset of x", lambda: coroutine(), timeout=5.0)  # a plain function may hand one on


def test_child_sources_are_checked(
    fake_kubelet: FakeKubelet, served: Callable[..., Served], caplog: pytest.LogCaptureFixture
) -> None:
    """A child source that cannot be served is named in the log; its parent is served."""

    async def child_sources(_: object) -> AsyncIterator[Sequence[Any]]:
        yield [Toys]

    served(source_with(child_sources=child_sources)())
    fake_kubelet.wait_until(lambda: "TypeError: Toys is a class" in caplog.text)
    assert fake_kubelet.run_pod("p", {"example.com/toy": 1}).device_ids == ("a",)
