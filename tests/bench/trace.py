"""Counts the product's functions and modules that one call, or one step of a move, passes through.

    python -m tests.bench.trace

An agent with both sides serves four simulated devices of a config file to the fake node, two of them to claims. On it
one pod with a device by limits starts, then one with a claim, which ends; then the Node asks for a third device for
claims.

A path begins with the product's method that has the name of the call; the path of the move begins where `Handover.run`
goes on. Counted is what runs in that task, in the tasks that it starts, and in the worker threads that these wait for,
until all these tasks have ended: by `sys.setprofile` in each thread, and by a context variable, which tasks and
`asyncio.to_thread` inherit. A move wakes other tasks (lists, slices), which are not counted. It also asks the task that
makes all scans for one, and waits for the result. This scan is a path of its own, evidence, traced beside the move: it
begins with `HolderScanner.read`, and includes all scans until the end of the move.

functions: distinct pairs of file and qualified name, in both packages without `wire` and `testing`. In Python 3.11 a
comprehension is a function of its own. Since 3.12 it belongs to the function around it, so that the numbers are lower.
modules: distinct files. Questions: calls of their functions; in a move their number depends on how often it waits.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import sys
import threading
from collections import Counter
from collections.abc import Callable, Coroutine, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import Any, Final, NamedTuple

import pytest

import deviceplugin
import dra_bridge
from deviceplugin import identity, looks
from deviceplugin.config import parse
from deviceplugin.exclusion import HardwareIndex
from deviceplugin.kubelet import cgroups
from deviceplugin.node.scanning import HolderScanner
from deviceplugin.register.question import refusal
from deviceplugin.register.records import Operation
from deviceplugin.register.register import ListedHardware, Register
from deviceplugin.sources.configured import ConfiguredSource
from dra_bridge.handover.moves import Handover
from dra_bridge.ledger.worker import AsyncLedger
from dra_bridge.rollout import fleet, progress
from dra_bridge.testing.apiserver import FakeApiServer
from dra_bridge.testing.node import FakeNode
from dra_bridge.testing.serving import serve_both
from tests.scenarios.node import wait_for

RESOURCE: Final = "example.com/sim"
DRIVER: Final = "sim.example.com"
CONFIG: Final = f"resources: [{{name: {RESOURCE}, driver: {DRIVER}, devices: [{{simulated: {{count: 4}}}}]}}]"
TIMEOUT: Final = 30.0
"""Seconds that a pod, a move, or the tasks of a call may take."""


class Size(NamedTuple):
    """The number of functions and modules of a path."""

    functions: int
    modules: int


LIMITS: Final = {
    "Allocate": Size(98, 25),
    "NodePrepareResources": Size(171, 36),
    "NodeUnprepareResources": Size(95, 21),
    "move": Size(132, 29),
    "evidence": Size(283, 43),
}
"""Sizes that tests/test_trace.py lets no path exceed; lower them with each change that shortens a path."""
GOALS: Final = {"Allocate": Size(85, 15), "NodePrepareResources": Size(130, 22), "move": Size(175, 23)}


def codes_of(*functions: object) -> frozenset[CodeType]:
    """Return the code of those that are functions."""
    return frozenset(function.__code__ for function in functions if isinstance(function, FunctionType))


QUESTIONS: Final = {
    "snapshot of the register taken": codes_of(vars(Register)["snapshot"].fget),
    "input of the question made (view)": codes_of(Register.view),
    "listed hardware asked for": codes_of(ListedHardware.now),
    "identity read": codes_of(
        HardwareIndex.tokens,
        *vars(identity.Identity).values(),
        *(one for one in vars(identity).values() if getattr(one, "__module__", "") == identity.__name__),
    ),
    "question decided": codes_of(refusal),
}

_PACKAGES: Final = tuple(str(Path(str(package.__file__)).parent) + "/" for package in (deviceplugin, dra_bridge))


@functools.cache
def is_counted(code: CodeType) -> bool:
    """Return whether this is code of the product, apart from generated code and fakes."""
    file = code.co_filename
    return file.startswith(_PACKAGES) and "/wire/" not in file and "/testing/" not in file


@dataclass(slots=True, eq=False)
class Trace:
    """What one path passes through.

    begins: returns whether the path begins with this code. calls: how often each code was entered; a coroutine is
    entered again each time that it goes on. tasks: those that it started.
    """

    begins: Callable[[CodeType], bool]
    begun: bool = False
    ended: bool = False
    calls: Counter[CodeType] = field(default_factory=Counter)
    tasks: set[asyncio.Future[Any]] = field(default_factory=set)

    @property
    def size(self) -> Size:
        """Its functions and modules."""
        names = {(code.co_filename, code.co_qualname) for code in self.calls}
        return Size(len(names), len({file for file, _ in names}))

    @property
    def idle(self) -> bool:
        """Whether it has begun, and all its tasks have ended."""
        return self.begun and all(task.done() for task in tuple(self.tasks))

    def asked(self, question: str) -> int:
        """Return how often a question was asked."""
        return sum(self.calls[code] for code in QUESTIONS[question])


_RUNNING: Final[contextvars.ContextVar[Trace | None]] = contextvars.ContextVar("_RUNNING", default=None)


class Tracer:
    """Traces one path after the other, in threads that start while it is installed."""

    def __init__(self) -> None:
        self._next: tuple[Trace, ...] = ()

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Have threads that start meanwhile report their calls.

        An operation of the ledger belongs to the path that asks for it, also if it runs together with others.
        """
        before, do = threading.getprofile(), AsyncLedger.do
        threading.setprofile(self._called)

        def do_here(ledger: AsyncLedger, operation: Operation[Any]) -> asyncio.Future[Any]:
            context = contextvars.copy_context()
            return do(ledger, lambda state: context.run(operation, state))

        try:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(AsyncLedger, "do", do_here)
                patch.setattr(looks, "PROMPT", TIMEOUT)  # On a loaded machine, a late look takes further functions.
                patch.setattr(cgroups, "TREES", TIMEOUT)  # The search for cgroup trees is a matter of time as well.
                yield
        finally:
            threading.setprofile(before)

    @contextmanager
    def tracing(self, *begins: Callable[[CodeType], bool]) -> Iterator[tuple[Trace, ...]]:
        """Trace the next paths that begin so, until their tasks and this context, which waits for them, have ended."""
        self._next = traces = tuple(map(Trace, begins))
        try:
            yield traces
            wait_for("the end of the paths' tasks", lambda: all(trace.idle for trace in traces), TIMEOUT)
        finally:
            self._next = ()
            for trace in traces:
                trace.ended = True

    def _called(self, frame: FrameType, event: str, argument: object) -> None:
        if event != "call" or not is_counted(frame.f_code):
            return
        trace = _RUNNING.get()
        if trace is None or trace.ended:
            for following in self._next:
                if following.begins(frame.f_code):
                    if not following.begun:
                        asyncio.get_running_loop().set_task_factory(_noted_task)
                    trace, following.begun = following, True
                    _RUNNING.set(trace)
        if trace is not None and not trace.ended:
            trace.calls[frame.f_code] += 1


def _noted_task(
    loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, Any] | Generator[Any, None, Any], **options: Any
) -> asyncio.Future[Any]:
    task = asyncio.Task(work, loop=loop, **options)
    if (trace := _RUNNING.get()) is not None and not trace.ended:
        trace.tasks.add(task)
    return task


def traces() -> dict[str, Trace]:
    """Run a node and trace each path; return the traces by the names of `LIMITS`."""
    source = ConfiguredSource(parse(CONFIG, "config").resources[0])
    tracer, found = Tracer(), {}
    with (
        tracer.installed(),
        FakeApiServer() as server,
        FakeNode(server, "node") as node,
        serve_both(source, node, share=2),
    ):
        with tracer.tracing(named("Allocate")) as (found["Allocate"],):
            node.start_pod("limits", {RESOURCE: 1}).wait_running(TIMEOUT)
        with tracer.tracing(named("NodePrepareResources")) as (found["NodePrepareResources"],):
            pod = node.start_pod("claim", template={DRIVER: 1}).wait_running(TIMEOUT)
        with tracer.tracing(named("NodeUnprepareResources")) as (found["NodeUnprepareResources"],):
            pod.delete()
        paths = [codes_of(Handover.run).__contains__, codes_of(HolderScanner.read).__contains__]
        with tracer.tracing(*paths) as (found["move"], found["evidence"]):
            annotation = {progress.share_annotation(DRIVER): "3"}
            server.patch("nodes", "node", {"metadata": {"annotations": annotation}})
            node.wait_until(lambda: _arrived(server, 3), TIMEOUT, "the move to end")
    return {name: found[name] for name in LIMITS}


def named(method: str) -> Callable[[CodeType], bool]:
    """Return what tells the code of the product's method of this name."""
    return lambda code: code.co_name == method


def _arrived(server: FakeApiServer, share: int) -> bool:
    """Return whether a node's slices offer so many devices, and its agent reports that no device moves."""
    (view,) = fleet.views(DRIVER, [server.get("nodes", "node")], (), leases=server.objects("leases"))
    offered = sum(len(each["spec"].get("devices", ())) for each in server.objects())
    return offered == share and view.reported is not None and fleet.finished(view)


def main() -> int:
    """Print the traces; return 1 if a limit is exceeded."""
    exceeded = False
    for name, trace in traces().items():
        size, limit, goal = trace.size, LIMITS[name], GOALS.get(name)
        wanted = f"; goal: {goal.functions} in {goal.modules}" if goal is not None else ""
        limited = f"limit: {limit.functions} in {limit.modules}"
        print(f"{name}: {size.functions} functions in {size.modules} modules ({limited}{wanted})")
        for question in QUESTIONS:
            print(f"    {question:<36} {trace.asked(question):>4}")
        exceeded |= size.functions > limit.functions or size.modules > limit.modules
    return int(exceeded)


if __name__ == "__main__":
    sys.exit(main())
