"""Calls of an author's hooks: errors, timeouts and cancellation."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Iterator

import pytest

from deviceplugin import hooks
from deviceplugin.hooks import HookError, HookTimeoutError, call


@pytest.fixture
def released() -> Iterator[threading.Event]:
    """The event that ends hanging threads, set at the end of the test."""
    event = threading.Event()
    yield event
    event.set()


async def none_hangs() -> None:
    """Wait until no call hangs any more, in a thread or in this loop."""
    async with asyncio.timeout(5):
        while asyncio.all_tasks() - {asyncio.current_task()} or any(  # noqa: ASYNC110  # they tell nobody
            thread.name.startswith("hook ") for thread in threading.enumerate()
        ):
            await asyncio.sleep(0.001)


async def test_plain_hook_runs_beside_the_loop() -> None:
    """A plain function runs in another thread, so that it may block."""
    thread = await call("hook", threading.current_thread, timeout=5)
    assert thread is not threading.current_thread()
    assert thread.daemon


async def test_coroutine_hook_runs_in_the_loop() -> None:
    """A coroutine function runs in the loop's own thread."""

    async def hook(value: int) -> tuple[int, threading.Thread]:
        return value, threading.current_thread()

    assert await call("hook", hook, 3, timeout=5) == (3, threading.current_thread())


async def test_plain_hook_may_return_an_awaitable() -> None:
    """A plain function that returns a coroutine (a lambda, a wrapper) has it awaited."""

    async def answer() -> int:
        return 42

    assert await call("hook", lambda: answer(), timeout=5) == 42


@pytest.mark.parametrize("asynchronous", [False, True])
async def test_a_failed_hook_says_where(caplog: pytest.LogCaptureFixture, *, asynchronous: bool) -> None:
    """A failed hook's error has file and line of the hook's own code; at DEBUG the log has the traceback."""

    def plain() -> None:
        os.environ["NOPE"]

    async def coroutine() -> None:
        plain()

    caplog.set_level("DEBUG", "deviceplugin.hooks")
    with pytest.raises(HookError, match=r"edits of x failed: KeyError: 'NOPE' \(.*test_hooks\.py:\d+\)") as caught:
        await call("edits of x", coroutine if asynchronous else plain, timeout=20)
    assert isinstance(caught.value.__cause__, KeyError)
    assert 'os.environ["NOPE"]' in caplog.text


async def test_a_coroutine_that_blocks_is_named(caplog: pytest.LogCaptureFixture) -> None:
    """The log names a coroutine hook that blocked the event loop, and so the whole agent, beyond its timeout."""

    async def reset() -> None:
        time.sleep(hooks.LATE + 0.2)  # noqa: ASYNC251  # what it must not do

    await call("reset of x", reset, timeout=0.01)
    assert "reset of x blocked the whole agent for" in caplog.text


@pytest.mark.parametrize(
    "error", [ValueError("no"), KeyError("k"), StopIteration(), SystemExit(3), KeyboardInterrupt()]
)
async def test_raising_plain_hook_fails_its_call_only(error: BaseException) -> None:
    """Any exception of a plain hook, also SystemExit, is a HookError of its own call and names the hook."""

    def hook() -> None:
        raise error

    with pytest.raises(HookError, match=r"reset of example.com/r failed: "):
        await call("reset of example.com/r", hook, timeout=5)


async def test_coroutine_hook_that_cancels_itself_is_an_error() -> None:
    """A hook that ends with CancelledError raises HookError in its caller, and does not cancel it."""

    async def hook() -> None:
        raise asyncio.CancelledError

    with pytest.raises(HookError, match="was cancelled"):
        await call("hook", hook, timeout=5)


async def test_hanging_plain_hook_is_given_up(released: threading.Event) -> None:
    """A call of a plain hook that hangs fails after its timeout; the loop goes on, and later calls work."""
    with pytest.raises(HookTimeoutError, match=r"hook did not answer within 0.01 s"):
        await call("hook", released.wait, timeout=0.01)
    assert await call("hook", lambda: 1, timeout=5) == 1
    released.set()
    await none_hangs()


async def test_hanging_coroutine_hook_is_cancelled() -> None:
    """A coroutine hook that takes too long is cancelled and can clean up."""
    cleaned = asyncio.Event()

    async def hook() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cleaned.set()

    with pytest.raises(HookTimeoutError):
        await call("hook", hook, timeout=0.01)
    async with asyncio.timeout(5):
        await cleaned.wait()
    await none_hangs()


async def test_coroutine_hook_that_swallows_cancellation_is_left_behind() -> None:
    """A coroutine hook that ignores its cancellation does not block its caller, and may end later with an error."""
    free, ended = asyncio.Event(), asyncio.Event()

    async def hook() -> None:
        while not free.is_set():
            try:
                await free.wait()
            except asyncio.CancelledError:
                pass
        ended.set()
        raise ValueError("too late for anybody")

    with pytest.raises(HookTimeoutError):
        await call("hook", hook, timeout=0.01)
    assert not ended.is_set()
    free.set()
    await none_hangs()
    assert ended.is_set()


async def test_error_after_the_timeout_is_nobodys(released: threading.Event) -> None:
    """An exception that a hook raises after its timeout is dropped, and nothing is written to stderr."""

    def hook() -> None:
        released.wait()
        raise ValueError("too late")

    with pytest.raises(HookTimeoutError):
        await call("hook", hook, timeout=0.01)
    released.set()
    await none_hangs()


async def test_too_many_hanging_hooks_fail_at_once(released: threading.Event, monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of hanging threads of a hook is limited: beyond the limit, a call of the hook fails at once."""
    monkeypatch.setattr(hooks, "MAX_STUCK", 3)
    for _ in range(3):
        with pytest.raises(HookTimeoutError, match="did not answer"):
            await call("hook", released.wait, timeout=0.001)
    with pytest.raises(HookTimeoutError, match="was not called: 3 earlier calls of it still hang"):
        await call("hook", released.wait, timeout=60)
    assert await call("another hook", lambda: "at once", timeout=5) == "at once"
    released.set()
    await none_hangs()
    assert await call("hook", lambda: "again", timeout=5) == "again"


async def test_timeout_covers_thread_and_awaitable_together(released: threading.Event) -> None:
    """A plain hook that returns an awaitable has one timeout for both."""

    async def forever() -> None:
        await asyncio.Event().wait()

    loop = asyncio.get_running_loop()
    began = loop.time()
    with pytest.raises(HookTimeoutError):
        await call("hook", lambda: forever(), timeout=0.05)
    assert loop.time() - began < 1
    await none_hangs()


async def test_cancelled_caller_lets_go_of_the_hook(released: threading.Event) -> None:
    """When the caller is cancelled (the kubelet gave up), the hook is left behind, not waited for."""
    begun = asyncio.Event()
    loop = asyncio.get_running_loop()

    def hook() -> None:
        loop.call_soon_threadsafe(begun.set)
        released.wait()

    caller = asyncio.create_task(call("hook", hook, timeout=60))
    await begun.wait()
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    released.set()
    await none_hangs()


def test_hook_that_outlives_its_loop_counts_until_it_ends(
    released: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hanging thread counts towards the limit until it ends, also after the loop of its call was closed."""
    monkeypatch.setattr(hooks, "MAX_STUCK", 1)
    with pytest.raises(HookTimeoutError, match="did not answer"):
        asyncio.run(call("hook", released.wait, timeout=0.01))
    with pytest.raises(HookTimeoutError, match="was not called"):
        asyncio.run(call("hook", released.wait, timeout=0.01))
    released.set()
    asyncio.run(none_hangs())
    assert asyncio.run(call("hook", lambda: "again", timeout=5)) == "again"
