"""Hooks run one at a time per device, and a hook that goes on after its timeout blocks its device."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence

import pytest

from deviceplugin import hook_runs
from deviceplugin.device import Device
from deviceplugin.exclusion import DeviceKey
from deviceplugin.hook_runs import DeviceBusyError, HookRuns
from deviceplugin.hooks import HookError, HookStatistics, HookTimeoutError
from deviceplugin.identity import Tokens
from deviceplugin.source import DeviceSource

R = "example.com/r"
STILL = "is still running on it, after its timeout"


class HookedSource(DeviceSource):
    """A source whose hooks do the test's work; the devices a and b are the same hardware."""

    resource = R
    hook_timeout = 5.0

    def __init__(self) -> None:
        self.changes: asyncio.Queue[None] = asyncio.Queue()
        self.known: dict[DeviceKey, Tokens] = {}
        self.runs = HookRuns(self)
        self.statistics = HookStatistics()
        self.work: Callable[[str], Awaitable[None] | None] = lambda device: None

    def notify(self) -> None:
        self.changes.put_nowait(None)

    def tokens(self, key: DeviceKey) -> Tokens:
        return self.known.get(key, frozenset())

    def with_peers(self, keys: Iterable[DeviceKey]) -> set[DeviceKey]:
        return {other for key in keys for other in (((R, "a"), (R, "b")) if key[1] in "ab" else (key,))}

    def reset(self, devices: Sequence[Device]) -> Awaitable[None] | None:
        return self.work(devices[0].id)

    def released(self, devices: Sequence[Device]) -> Awaitable[None] | None:
        return self.work(devices[0].id)

    def waits(self) -> asyncio.Event:
        """Let hooks wait for the returned event."""
        go_on = asyncio.Event()

        async def work(device: str) -> None:
            await go_on.wait()

        self.work = work
        return go_on

    def hangs(self, over: threading.Event, timeout: float) -> None:
        """Let hooks hang in a thread, with this timeout."""
        self.hook_timeout = timeout

        def work(device: str) -> None:
            over.wait()

        self.work = work

    async def call(self, device: str) -> None:
        await self.runs.call(self.statistics, "reset", self, [Device(device)])

    def start(self, device: str) -> asyncio.Task[str]:
        return self.runs.start(self.statistics, "released", self, [Device(device)])

    async def wait(self, device: str, *, resets: bool = True) -> None:
        await self.runs.wait([(R, device)], resets=resets)


@pytest.fixture
def over() -> Iterator[threading.Event]:
    """The event that ends hanging threads, set at the end of the test."""
    event = threading.Event()
    yield event
    event.set()


async def test_hooks_of_one_thing_run_one_after_the_other_in_their_order() -> None:
    """Hooks of a and b, which are one hardware, run one after the other in order; a hook of c runs beside them."""
    source, go_on, two = HookedSource(), asyncio.Event(), asyncio.Event()
    running: list[str] = []
    order: list[str] = []

    async def work(device: str) -> None:
        assert device == "c" or running in ([], ["c"])
        order.append(device)
        running.append(device)
        if len(running) == 2:
            two.set()
        await go_on.wait()
        running.remove(device)

    source.work = work
    tasks = [source.start(device) for device in "abac"]
    await two.wait()
    assert running == ["a", "c"]
    go_on.set()
    assert await asyncio.gather(*tasks) == [""] * 4
    assert [one for one in order if one != "c"] == ["a", "b", "a"]
    assert source.changes.empty()
    assert source.statistics.calls == {(R, "released"): 4}


async def test_whoever_gets_a_device_waits_for_its_hooks() -> None:
    """A caller that gets a device waits for running hooks of its hardware, and not for those of other devices."""
    source = HookedSource()
    go_on = source.waits()
    task = source.start("a")
    waiting = asyncio.create_task(source.wait("b"))
    await source.wait("c")
    assert not waiting.done()
    go_on.set()
    await waiting
    assert await task == ""


async def test_a_reset_is_not_waited_for_by_who_calls_one() -> None:
    """A wait with `resets=False` does not wait for a running reset; a wait with resets does."""
    source = HookedSource()
    go_on = source.waits()
    calling = asyncio.create_task(source.call("a"))
    await asyncio.sleep(0)
    await source.wait("a", resets=False)
    waiting = asyncio.create_task(source.wait("a"))
    await asyncio.sleep(0)
    assert not waiting.done()
    go_on.set()
    await asyncio.gather(calling, waiting)


async def test_a_thread_that_works_on_holds_its_devices_until_it_ends(over: threading.Event) -> None:
    """A hook in a thread that goes on after its timeout blocks its device; other calls raise DeviceBusyError."""
    source = HookedSource()
    source.hangs(over, 0.01)
    with pytest.raises(HookTimeoutError):
        await source.call("a")
    await source.changes.get()
    assert source.runs.overdue == {(R, "a"): f"`reset` {STILL}"}
    message = f"a of {R}: `reset` {STILL}"
    assert await source.start("b") == message
    for refused in (source.call("b"), source.wait("a"), source.wait("b", resets=False)):
        with pytest.raises(DeviceBusyError, match=message):
            await refused
    assert source.statistics.calls == {(R, "reset"): 1}, "who is refused has not called"
    await source.wait("c")
    over.set()
    await source.changes.get()
    assert source.runs.overdue == {}
    await source.wait("a")
    await source.call("b")


async def test_a_hook_holds_what_its_device_was_when_it_began(over: threading.Event) -> None:
    """A hook blocks the hardware that its device was when the hook began, also if another id gets that hardware."""
    source = HookedSource()
    source.hangs(over, 0.01)
    tokens = source.known = {(R, "c"): frozenset({"uuid:1"}), (R, "d"): frozenset({"uuid:2"})}
    with pytest.raises(HookTimeoutError):
        await source.call("c")
    await source.changes.get()
    await source.wait("d")
    tokens[R, "c"], tokens[R, "d"] = tokens[R, "d"], tokens[R, "c"]
    assert source.runs.held == {(R, "c"): {"uuid:1"}}
    for refused in (source.call("d"), source.wait("d")):
        with pytest.raises(DeviceBusyError, match=f"c of {R}: `reset` {STILL}"):
            await refused
    over.set()
    await source.changes.get()
    await source.wait("d")


async def test_who_waits_is_refused_when_the_hook_turns_out_to_work_on(over: threading.Event) -> None:
    """Of four concurrent calls for one device one runs into the timeout, and the others raise DeviceBusyError."""
    source = HookedSource()
    source.hangs(over, 0.05)
    answers = await asyncio.gather(*(source.call("a") for _ in range(4)), return_exceptions=True)
    assert [type(one) for one in answers] == [HookTimeoutError, *[DeviceBusyError] * 3]
    assert source.statistics.calls == {(R, "reset"): 1}


async def test_nobody_waits_for_longer_than_a_hook_may_take() -> None:
    """A call waits for a running hook at most as long as the hook timeout; a hook in the background waits longer."""
    source, begun, go_on = HookedSource(), asyncio.Event(), asyncio.Event()

    async def work(device: str) -> None:
        begun.set()
        await go_on.wait()

    source.work = work
    first = source.start("a")
    await begun.wait()
    source.hook_timeout = 0.01
    with pytest.raises(DeviceBusyError, match=f"a of {R}: `released` is still running on it$"):
        await source.call("a")
    background = source.start("a")
    source.hook_timeout = 5.0
    go_on.set()
    assert [await first, await background] == ["", ""]


async def test_a_coroutine_that_ends_when_it_is_cancelled_holds_nothing() -> None:
    """A coroutine hook that ends when it is cancelled after its timeout does not block its device."""
    source = HookedSource()
    source.hook_timeout = 0.01
    source.waits()
    with pytest.raises(HookTimeoutError):
        await source.call("a")
    await source.wait("a")
    assert source.changes.empty()


@pytest.mark.parametrize("how", ["timeout", "cancelled"])
async def test_a_coroutine_that_ignores_its_cancellation_holds_its_devices(
    monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """A coroutine hook that ignores its cancellation blocks its device, after a timeout or a cancelled call."""
    monkeypatch.setattr(hook_runs, "CANCELLED", 0.01)
    source, begun, go_on = HookedSource(), asyncio.Event(), asyncio.Event()

    async def work(device: str) -> None:
        begun.set()
        while not go_on.is_set():
            try:
                await go_on.wait()
            except asyncio.CancelledError:
                pass

    source.work = work
    source.hook_timeout = 0.01 if how == "timeout" else 60.0
    calling = asyncio.create_task(source.call("a"))
    await begun.wait()
    if how == "cancelled":
        calling.cancel()
    with pytest.raises(HookTimeoutError if how == "timeout" else asyncio.CancelledError):
        await calling
    with pytest.raises(DeviceBusyError, match=STILL):
        await source.wait("a")
    await source.changes.get()
    assert source.runs.overdue
    go_on.set()
    await source.changes.get()
    assert source.runs.overdue == {}
    await source.wait("a")


async def test_a_caller_that_is_cancelled_while_it_waits_leaves_nothing() -> None:
    """The hook of a caller that is cancelled while it waits is not called, and blocks no later caller."""
    source = HookedSource()
    go_on = source.waits()
    first, second = asyncio.create_task(source.call("a")), asyncio.create_task(source.call("a"))
    await asyncio.sleep(0)
    second.cancel()
    with pytest.raises(asyncio.CancelledError):
        await second
    go_on.set()
    await first
    await source.wait("a")
    assert source.statistics.calls == {(R, "reset"): 1}


async def test_a_hook_that_fails_lets_the_next_one_go_on() -> None:
    """After a hook fails the next one runs; the error goes to the caller, or to the task in the background."""
    source = HookedSource()

    def work(device: str) -> None:
        raise OSError("no such hardware")

    source.work = work
    with pytest.raises(HookError, match="no such hardware"):
        await source.call("a")
    assert "no such hardware" in await source.start("a")
    await source.wait("a")
