"""Runs an agent in a separate thread, for tests and demonstrations. The module does not need pytest."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from deviceplugin.blocking import LoopWatch
    from deviceplugin.node.agent import Agent
    from deviceplugin.node.process import Program
    from deviceplugin.source import DeviceSource
    from deviceplugin.testing.kubelet import FakeKubelet

__all__ = ["Served", "serve"]


_S = TypeVar("_S", bound="Served")


class Served:
    """An agent that runs in its own thread and event loop.

    agent: the agent, whose event loop is not the caller's. error: the exception that ended the agent, or None.
    """

    def __init__(self, sources: Sequence[DeviceSource], kubelet: FakeKubelet, **options: Any) -> None:
        from deviceplugin.source_check import check_sources

        check_sources(sources)
        self.error: BaseException | None = None
        self._kubelet = kubelet
        self._sources = list(sources)
        self._options = options
        self._made = threading.Event()
        self._over = threading.Event()
        self._agent: Agent | None = None
        self._watch: LoopWatch | None = None
        self._thread = threading.Thread(target=self._main, name="agent", daemon=True)
        self._thread.start()
        self._made.wait()
        kubelet.statuses.append(lambda: self.agent.status().resources if self.alive else ())

    @property
    def agent(self) -> Agent:
        """The agent."""
        if self._agent is None:
            raise RuntimeError(f"the agent could not be created: {self.error!r}") from self.error
        return self._agent

    @property
    def alive(self) -> bool:
        """Whether the agent runs."""
        return not self._over.is_set()

    def wait_registered(self, timeout: float = 30.0) -> None:
        """Wait until the kubelet has a registration and a device list of every source.

        Raises:
            RuntimeError: a source's `watch` failed before its first list, or the agent ended; the error is the cause.
            BlockedLoopError: a coroutine of a source blocks the agent.
            TimeoutError: a registration or a list is missing after `timeout` seconds.
        """
        waiting = [source.resource for source in self._sources if source.resource]

        def ready() -> bool:
            resources = self._kubelet.resources()
            waiting[:] = [name for name in waiting if not (self._kubelet.streams(name) and name in resources)]
            return not waiting

        self._kubelet.wait_until(
            lambda: not self.alive or self._failure() is not None or bool(self._blocking) or ready(),
            timeout,
            lambda: f"{waiting} to be registered, with a first list of `watch`",
        )
        self._raise_end()
        self._raise_blocked()
        if (failure := self._failure()) is not None:
            name, cause = failure
            # The text has type and message, because the repr of an OSError lacks the file's path.
            why = f"{type(cause).__name__}: {cause}"
            raise RuntimeError(f"{name}: watch failed before its first list: {why}") from cause

    def stop(self, timeout: float = 30.0) -> None:
        """End the agent.

        Raises:
            TimeoutError: the agent does not end in time.
            BaseException: the exception that ended the agent.
            BlockedLoopError: a coroutine of a source has blocked the agent, for some seconds or repeatedly.
        """
        if self._agent is not None:
            self._agent.stop()
        self._thread.join(0.0 if self._blocked else timeout)
        if self._thread.is_alive():
            raise TimeoutError(f"the agent has not ended within {timeout} s")
        if self.error is not None:
            raise self.error
        self._raise_blocked()

    def _raise_blocked(self) -> None:
        if blocking := self._blocking:
            from deviceplugin.blocking import REMEDY, BlockedLoopError

            raise BlockedLoopError(f"{blocking} blocks the whole agent: {REMEDY}")

    @property
    def _blocking(self) -> str:
        """The line that has blocked the agent."""
        return self._blocked or (self._watch.found if self._watch is not None else "")

    @property
    def _blocked(self) -> str:
        return self._watch.blocked if self._watch is not None else ""

    def _raise_end(self) -> None:
        if not self.alive:
            raise RuntimeError(f"the agent has ended: {self.error!r}") from self.error

    def _failure(self) -> tuple[str, Exception] | None:
        """Return a resource whose source failed before its first list, and the exception; None if no source failed."""
        for name, service in list(self._agent.services.items() if self._agent is not None else ()):
            if service.follower.failure is not None and not service.inventory.snapshot.listed:
                return name, service.follower.failure
        return None

    def _main(self) -> None:
        import asyncio

        try:
            asyncio.run(self._run())
        except BaseException as error:  # The caller of `stop` gets the exception.
            self.error = error
        finally:
            self._over.set()
            self._made.set()
            self._kubelet.notify()

    async def _run(self) -> None:
        from deviceplugin.blocking import LoopWatch

        program = self._program()
        self._agent = program.agent
        self._watch = LoopWatch(period=0.5)
        self._made.set()
        try:
            await program.run()
        finally:
            self._watch.end()

    def _program(self) -> Program:
        """Return the program that runs in the event loop of the agent's thread."""
        from deviceplugin.node.agent import Agent
        from deviceplugin.node.process import Program

        return Program(Agent(self._sources, self._kubelet.paths, **self._options))


@contextlib.contextmanager
def serve(
    sources: DeviceSource | Sequence[DeviceSource],
    kubelet: FakeKubelet,
    *,
    timeout: float | None = 30.0,
    period: float = 5.0,
    **options: Any,
) -> Iterator[Served]:
    """Run an agent with these sources against a fake kubelet while the context lasts.

    timeout: seconds to wait until all sources are registered; None does not wait. period: seconds between two scans for
    the holders of devices. The first or second scan after a pod's end calls `released` and removes devices that are
    gone, so a period of 0.1 makes tests of this quick. options: further arguments of `Agent`.

    Raises what `Served.wait_registered` raises; TypeError or NamingError if a source cannot be served at all.
    """
    listed = [*sources] if isinstance(sources, Sequence) else [sources]
    with running_while(Served(listed, kubelet, period=period, **options), timeout) as running:
        yield running


@contextlib.contextmanager
def running_while(running: _S, timeout: float | None) -> Iterator[_S]:
    """Stop an agent when the context ends. timeout: seconds to wait first for its registration; None does not wait."""
    try:
        if timeout is not None:
            running.wait_registered(timeout)
        yield running
    except BaseException:
        with contextlib.suppress(BaseException):
            running.stop()
        raise
    running.stop()
