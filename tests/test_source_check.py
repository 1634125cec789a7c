"""Mistakes in a source of devices are refused with the place of the mistake."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from functools import partial
from typing import Any

import pytest

import dra_bridge
from deviceplugin import ContainerEdits, Device, DeviceSource, hooks, run
from deviceplugin.inventory import Inventory
from deviceplugin.naming import NamingError
from deviceplugin.node.agent import Agent
from deviceplugin.node.following import SourceFollower
from deviceplugin.source_check import check_source
from deviceplugin.testing import FakeKubelet, Served
from tests.waits import until


class Toys(DeviceSource):
    resource = "example.com/toy"

    async def watch(self) -> AsyncIterator[Sequence[Device]]:
        yield [Device("a")]


def source_with(**members: object) -> type[DeviceSource]:
    """Define a class of sources with these methods and attributes."""
    return type("Wrong", (Toys,), members)


def nothing(*_: object) -> None:
    """Do nothing."""


class Receiver:
    """A receiver of lists that sets an event after each list."""

    def __init__(self, published: asyncio.Event | None = None) -> None:
        self.published = published or asyncio.Event()

    def take_source(self, source: DeviceSource) -> None:
        """Do nothing."""

    def listed(self) -> None:
        self.published.set()


async def coroutine(*_: object) -> None:
    """Do nothing, as a coroutine function."""


def generator(*_: object) -> Iterator[int]:
    yield 0


def refusing(*_: object) -> Any:
    raise OSError("no")


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
        ("allocate", "edits"),
        ("list_and_watch", "watch"),
        ("ListAndWatch", "watch"),
    ],
)
def test_a_misspelt_hook_is_an_error_of_its_class(name: str, hook: str) -> None:
    """A method with a name similar to that of a hook is an error when its class is defined."""
    with pytest.raises(TypeError, match=rf"Wrong\.{name} is no hook and would never be called; did you mean {hook}\?"):
        type("Wrong", (DeviceSource,), {name: nothing})


@pytest.mark.parametrize(
    ("name", "value", "meant"),
    [
        ("recource", "example.com/x", "resource"),
        ("resource_name", "example.com/x", "resource"),
        ("config_typ", dict, "config_type"),
        ("replica", 2, "replicas"),
        ("hook_timout", 2, "hook_timeout"),
    ],
)
def test_a_misspelt_setting_is_an_error_of_its_class(name: str, value: object, meant: str) -> None:
    """An attribute with a name similar to that of a setting is an error when its class is defined."""
    with pytest.raises(TypeError, match=rf"Wrong\.{name} is no setting and has no effect; did you mean {meant}\?"):
        type("Wrong", (DeviceSource,), {name: value})
    type("Right", (DeviceSource,), {name: [value]})  # an attribute whose value has another type is the author's own


def test_a_misspelt_property_is_a_property() -> None:
    """A property `link` is taken for a misspelt `links`, which is a property; a method `link` is accepted."""
    with pytest.raises(TypeError, match=r"Wrong\.link is no hook and would never be called; did you mean links\?"):
        type("Wrong", (DeviceSource,), {"link": property(nothing)})
    type("Right", (DeviceSource,), {"link": nothing})


@pytest.mark.parametrize("name", ["_edit", "devices", "match", "reload", "helper", "scan", "update"])
def test_methods_of_other_names_are_the_authors(name: str) -> None:
    """Private methods, and methods with other names, are accepted."""
    check_source(source_with(**{name: nothing})())


def test_a_name_like_that_of_a_hook_the_class_has_is_a_helpers() -> None:
    """A name similar to a hook's is accepted if the class has the hook, for attributes, and from another base class."""
    check_source(source_with(released=nothing, release=nothing)())
    check_source(source_with(edit="text")())
    other = type("Other", (), {"release": nothing})
    check_source(type("Both", (Toys, other), {})())


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ({"resource": "laser"}, r"Wrong\.resource: 'laser' .* no vendor domain; did you mean example.com/laser"),
        ({"resource": "kubernetes.io/laser"}, r"Wrong\.resource: names under kubernetes.io belong to Kubernetes"),
        ({"driver": "Laser"}, r"Wrong\.driver: .* in lower case such as gpu.example.com, not 'Laser'"),
    ],
)
def test_a_wrong_name_is_an_error_of_its_class(members: dict[str, object], message: str) -> None:
    """A resource name without a domain, and an invalid driver name, are errors when the class is defined."""
    with pytest.raises(NamingError, match=message):
        source_with(**members)


def late(**attributes: object) -> DeviceSource:
    """Return a source with attributes that were set after its class was defined."""
    source = Toys()
    vars(source).update(attributes)
    return source


MISTAKES: list[tuple[Callable[[], Any], str]] = [
    (lambda: Toys, r"Toys is a class; a source is an instance of it: Toys\(\)"),
    (lambda: [Toys()], r"\[<.*Toys.*>\] is not a source; a source is an instance of a class derived from DeviceSource"),
    (lambda: "example.com/toy", r"'example.com/toy' is not a source"),
    (lambda: late(resource="laser"), r"Toys\.resource: 'laser' .* no vendor domain"),
    (lambda: late(resource=None), r"Toys\.resource must be a string, not None"),
    (lambda: late(driver=5), r"Toys\.driver must be a string, not 5"),
    (lambda: source_with(watch=coroutine)(), r"Wrong\.watch must yield lists of devices, not return one"),
    (lambda: source_with(watch=DeviceSource.watch)(), r"Wrong has no `watch`; define it"),
    (lambda: source_with(edits=generator)(), r"Wrong\.edits must return its result, not yield it"),
    (lambda: source_with(reset=generate)(), r"Wrong\.reset must return its result, not yield it"),
    (lambda: source_with(replicas_of=coroutine)(), r"Wrong\.replicas_of must be a plain function, not async"),
    (lambda: source_with(child_sources=coroutine)(), r"Wrong\.child_sources must be an async generator"),
    (lambda: source_with(child_sources=generator)(), r"Wrong\.child_sources must be an async generator"),
    (lambda: source_with(links=nothing)(), r"Wrong\.links must be a property: write @property"),
    (lambda: source_with(links={("a", "b"): 1.0})(), r"Wrong\.links must have a number for each frozenset of two ids"),
    (lambda: source_with(links={frozenset("ab"): "x"})(), r"Wrong\.links must have a number .*, not .*: 'x'"),
    (lambda: source_with(links=None)(), r"Wrong\.links must be a dict, not None"),
    (lambda: source_with(links=property(refusing))(), r"Wrong\.links failed: OSError: no"),
    (lambda: source_with(replicas="2")(), r"Wrong\.replicas must be a number of at least 1, not '2'"),
    (lambda: source_with(replicas=0)(), r"Wrong\.replicas must be a number of at least 1, not 0"),
    (lambda: source_with(replicas=nothing)(), r"Wrong\.replicas must be a number of at least 1, not <"),
    (lambda: source_with(replicas=None)(), r"Wrong\.replicas must be a number of at least 1, not None"),
    (lambda: source_with(hook_timeout="10s")(), r"Wrong\.hook_timeout must be a number of seconds .*, not '10s'"),
    (lambda: source_with(policy="pakced")(), r"Wrong\.policy must be one of links, packed, distributed, none, not"),
    (lambda: source_with(edits=ContainerEdits())(), r"Wrong\.edits must be a method, not ContainerEdits\("),
    (lambda: source_with(edits=lambda self: None)(), r"Wrong\.edits is called as edits\(devices\): too many"),
    (
        lambda: source_with(reset=lambda self, device: None)(),
        r"Wrong\.reset gets a list of devices, whatever its length: call its parameter `devices`, not `device`",
    ),
    (
        lambda: source_with(prepare=lambda self, device, config: None)(),
        r"Wrong\.prepare gets a list of devices, .*, not `device`",
    ),
    (lambda: source_with(prefer=lambda self, devices: devices)(), r"as prefer\(available, must_include, size\)"),
    (lambda: source_with(config_type={"mode": str})(), r"Wrong\.config_type must be a class .*, not {'mode'"),
    (lambda: source_with(config_type=Toys)(), r"Wrong\.config_type must be a class .*, not <class"),
    (lambda: source_with(config_type=5)(), r"Wrong\.config_type must be a class .*, not 5"),
]


@pytest.mark.parametrize(("make", "message"), MISTAKES)
def test_what_cannot_be_served_is_refused_at_the_start(make: Callable[[], Any], message: str) -> None:
    """`run` of both packages and `Agent` raise for a source that cannot be served."""
    for start in (run, dra_bridge.run):
        with pytest.raises((TypeError, NamingError), match=message):
            start(make(), argv=[])
    with pytest.raises((TypeError, NamingError), match=message):
        Agent([make()])


@pytest.mark.parametrize(
    ("members", "warned"),
    [
        (
            {"reset": nothing, "hook_timeout": 60},
            "the kubelet gives up PreStartContainer, which calls `reset`, after 30 s",
        ),
        ({"reset": nothing, "hook_timeout": 60, "driver": "a.example.com"}, "NodePrepareResources, .*after 45 s"),
        ({"prepare": nothing, "hook_timeout": 60, "driver": "a.example.com"}, "NodePrepareResources, .*after 45 s"),
        ({"reset": nothing, "hook_timeout": 20}, ""),
        ({"released": nothing, "hook_timeout": 60}, ""),
        ({"prepare": nothing, "hook_timeout": 60}, ""),
    ],
)
def test_a_timeout_longer_than_the_kubelets_is_warned_of(
    members: dict[str, object], warned: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A hook timeout above the timeout of the kubelet's call is logged as a warning when the agent is created."""
    Agent([source_with(**members)()])
    texts = [one.getMessage() for one in caplog.records if one.levelname == "WARNING"]
    if warned:
        (text,) = texts
        assert re.search(rf"^hook_timeout is 60 s, but .*{warned}", text)
    else:
        assert texts == []


def yielding(listed: Any) -> Iterator[DeviceSource]:
    """Return two sources whose `watch` yields this value: by a plain and by an asynchronous generator."""

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
        (lambda: {"a": Device("a")}, r"lists of Device, not dict: {'a': Device("),
        (lambda: [coroutine()], r"lists of Device, not of a coroutine: nobody awaited it"),
    ],
)
async def test_lists_of_anything_else_are_refused_with_their_place(listed: Callable[[], Any], instead: str) -> None:
    """Anything but a list of devices is a failure of the source with class, file and line; nothing is published."""
    for source in yielding(listed):
        inventory = Inventory(source.resource)
        follower = SourceFollower(source, inventory, Receiver())
        follower.start()
        try:
            await until(partial(getattr, follower, "failure"))
            assert not inventory.snapshot.listed
            place = r"TypeError: Wrong\.watch \(.*test_source_check\.py:\d+\) must yield "
            assert re.fullmatch(place + re.escape(instead) + ".*", follower.error)
        finally:
            await follower.end()


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ({"watch": lambda _: iter([[Device("a"), Device("a")]])}, r"Wrong\.watch: device id 'a' is listed twice"),
        ({"watch": lambda _: [Device("a")]}, r"Wrong\.watch \(.*check\.py:\d+\) must yield .*: write yield \[\.\.\.\]"),
        ({"replicas": 2, "replicas_of": lambda *_: 5}, r"replicas_of must return 1 to 2 .*, not 5 for device 'a'"),
        ({"replicas": 2, "replicas_of": lambda *_: "2"}, r"Wrong\.replicas_of must return 1 to 2 .*, not '2'"),
        ({"replicas": 2, "replicas_of": refusing}, "OSError: no"),
    ],
)
def test_what_cannot_be_served_of_a_list_fails_its_test(
    served: Callable[..., Served], members: dict[str, Any], message: str
) -> None:
    """A duplicate id, and an invalid number of replicas, are failures of the source."""
    with pytest.raises(RuntimeError, match="watch failed before its first list") as failure:
        served(source_with(**members)())
    cause = failure.value.__cause__
    assert re.search(message, f"{type(cause).__name__}: {cause}")


def test_a_list_that_cannot_be_used_harms_no_other_source(
    fake_kubelet: FakeKubelet, served: Callable[..., Served], caplog: pytest.LogCaptureFixture
) -> None:
    """A list that cannot be compared with other devices fails its source only, whose last list stays."""
    amounts: dict[str, Any] = {"memory": 4}
    again = threading.Event()

    def watch(_: object) -> Iterator[Sequence[Device]]:
        yield [Device("a", consumes={"gpu0": {"memory": 1}}, counters={"gpu0": {"memory": 4}})]
        again.wait(60.0)
        part = Device("a", consumes={"gpu0": amounts})
        amounts["memory"] = "much"  # changes the value after the constructor has checked it
        yield [part, Device("b")]

    bad, good = source_with(watch=watch)(), source_with(resource="example.com/good")()
    running = served(bad, good)
    again.set()
    fake_kubelet.wait_until(lambda: "much" in running.agent.services[bad.resource].follower.error)
    fake_kubelet.wait_until(lambda: "its last list of 1 devices stays" in caplog.text)
    assert fake_kubelet.allocatable("example.com/toy") == 1
    assert fake_kubelet.run_pod("p", {"example.com/good": 1, "example.com/toy": 1}).phase == "Running"


async def test_a_generator_of_devices_is_a_list() -> None:
    """Any iterable of devices is accepted, also a generator."""
    for source in yielding(lambda: (Device(name, nodes=["/dev/null"]) for name in "ab")):
        inventory = Inventory(source.resource)
        published = asyncio.Event()
        follower = SourceFollower(source, inventory, Receiver(published))
        follower.start()
        async with asyncio.timeout(20):
            await published.wait()
        await follower.end()
        assert list(inventory.snapshot.devices) == ["a", "b"]


async def test_a_hook_that_returns_a_coroutine_has_failed() -> None:
    """A coroutine hook that returns another coroutine has failed: its work was not awaited."""

    async def reset() -> Any:
        return coroutine()

    with pytest.raises(hooks.HookError, match="reset of x returned a coroutine: nobody awaited it; write `await`"):
        await hooks.call("reset of x", reset, timeout=5.0)
    await hooks.call("reset of x", lambda: coroutine(), timeout=5.0)  # a plain function may return a coroutine


def test_child_sources_are_checked(
    fake_kubelet: FakeKubelet, served: Callable[..., Served], caplog: pytest.LogCaptureFixture
) -> None:
    """An invalid child source is named in the log; its parent is served."""

    async def child_sources(_: object) -> AsyncIterator[Sequence[Any]]:
        yield [Toys]

    served(source_with(child_sources=child_sources)())
    fake_kubelet.wait_until(lambda: "TypeError: Toys is a class" in caplog.text)
    assert fake_kubelet.run_pod("p", {"example.com/toy": 1}).device_ids == ("a",)


def test_child_sources_that_fail_are_tried_again(
    fake_kubelet: FakeKubelet, served: Callable[..., Served], caplog: pytest.LogCaptureFixture
) -> None:
    """After an error `child_sources` is called again; the log names class and hook."""
    half = {"resource": "example.com/half"}
    yielded: Iterator[Any] = iter(
        [source_with()(), [source_with(**half)(), source_with(**half)()], [source_with(**half)()]]
    )

    async def child_sources(_: object) -> AsyncIterator[Any]:
        yield next(yielded)

    served(source_with(child_sources=child_sources)())
    fake_kubelet.wait_allocatable("example.com/half", 1, 60.0)
    assert "TypeError: Wrong.child_sources must yield lists of sources, not <" in caplog.text
    assert "TypeError: Wrong.child_sources: two sources for one resource: example.com/half" in caplog.text


def test_a_preference_that_is_none_is_named(
    fake_kubelet: FakeKubelet, served: Callable[..., Served], caplog: pytest.LogCaptureFixture
) -> None:
    """A `prefer` that returns None is named in the log, and the pod gets a device."""
    served(source_with(prefer=nothing)())
    assert fake_kubelet.run_pod("p", {"example.com/toy": 1}).device_ids == ("a",)
    assert "prefer must return devices or their ids, not None" in caplog.text


async def test_run_inside_of_a_loop_is_one_error(recwarn: pytest.WarningsRecorder) -> None:
    """`run` raises inside a running event loop, and leaves no coroutine unawaited."""
    for start in (run, dra_bridge.run):
        with pytest.raises(RuntimeError, match="running event loop"):
            start(Toys(), argv=["--node-name", "n"] if start is dra_bridge.run else [])
    assert not [one for one in recwarn if "_serve" in str(one.message)]
