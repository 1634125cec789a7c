"""Counts the functions and modules of the product that one call of the kubelet, or one move of a device, uses.

    python -m tests.bench.trace

An agent with device plugin and DRA driver serves four simulated devices to the fake node, two of them for claims. One
pod with a device by limits starts. Then a pod with a claim starts and ends. Then the Node's annotation requests a third
device for claims: a device moves from the plugin to DRA.

A path is the code that handles one call. It begins with the product's method that has the call's name. The path of the
move begins where `Handover.run` continues. A path includes the code in its first task, in the tasks that this task
starts, and in the worker threads for which these tasks wait, until all these tasks have ended. The code is observed by
`threading.setprofile`. A context variable, which tasks and `asyncio.to_thread` inherit, assigns it to the path. A move
wakes other tasks (device lists, slices), which are not counted. A move also has another task scan for devices' holders,
and waits for the result. This scan is traced as a separate path, "evidence". It begins with `HolderScanner.read`, and
includes all scans until the end of the move.

The number of functions is the number of distinct pairs of file and qualified name, in both packages without `wire` and
`testing`. In Python 3.11, a comprehension counts as a function. Since 3.12, it is part of the surrounding function, so
the numbers are lower. The number of modules is the number of distinct files. For each of `QUESTIONS`, the number of
calls of its functions is printed; in a move, this number depends on how often the move waits.
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
"""Maximum seconds for the start of a pod, a move, or the tasks of a call."""


class Size(NamedTuple):
    """The number of functions and modules of a path (a traced call)."""

    functions: int
    modules: int


LIMITS: Final = {
    "Allocate": Size(96, 24),
    "NodePrepareResources": Size(170, 35),
    "NodeUnprepareResources": Size(94, 21),
    "move": Size(132, 29),
    "evidence": Size(254, 39),
}
"""The maximum sizes of the paths (traced calls), which tests/test_trace.py checks.

A change that shortens a path should lower its limit.
"""
GOALS: Final = {"Allocate": Size(85, 15), "NodePrepareResources": Size(130, 22), "move": Size(175, 23)}


def codes_of(*functions: object) -> frozenset[CodeType]:
    """Return the code objects of those arguments that are functions."""
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
    """Return whether code belongs to the product, without generated code (`wire`) and fakes (`testing`)."""
    file = code.co_filename
    return file.startswith(_PACKAGES) and "/wire/" not in file and "/testing/" not in file


@dataclass(slots=True, eq=False)
class Trace:
    """The code that one path (a traced call) has used.

    begins: a function that returns whether the path begins with a code object. calls: how often each code object was
    entered; a coroutine is entered again each time that it continues. tasks: the tasks that the path has started.
    """

    begins: Callable[[CodeType], bool]
    begun: bool = False
    ended: bool = False
    calls: Counter[CodeType] = field(default_factory=Counter)
    tasks: set[asyncio.Future[Any]] = field(default_factory=set)

    @property
    def size(self) -> Size:
        """The number of functions and modules that the traced call has used."""
        names = {(code.co_filename, code.co_qualname) for code in self.calls}
        return Size(len(names), len({file for file, _ in names}))

    @property
    def idle(self) -> bool:
        """Whether the traced call has begun, and all its tasks have ended."""
        return self.begun and all(task.done() for task in tuple(self.tasks))

    def asked(self, question: str) -> int:
        """Return how often this path called the functions of one entry of `QUESTIONS`."""
        return sum(self.calls[code] for code in QUESTIONS[question])


_RUNNING: Final[contextvars.ContextVar[Trace | None]] = contextvars.ContextVar("_RUNNING", default=None)


class Tracer:
    """Traces paths (calls) in the threads that start while the context `installed` is active."""

    def __init__(self) -> None:
        self._next: tuple[Trace, ...] = ()

    @contextmanager
    def installed(self) -> Iterator[None]:
        """While the context is active, observe the calls in each thread that starts.

        An operation of the ledger belongs to the path that requested it, even if the ledger executes operations of
        several paths together.
        """
        before, do = threading.getprofile(), AsyncLedger.do
        threading.setprofile(self._called)

        def do_here(ledger: AsyncLedger, operation: Operation[Any]) -> asyncio.Future[Any]:
            context = contextvars.copy_context()
            return do(ledger, lambda state: context.run(operation, state))

        try:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(AsyncLedger, "do", do_here)
                patch.setattr(looks, "PROMPT", TIMEOUT)  # A late file access would use further functions.
                patch.setattr(cgroups, "TREES", TIMEOUT)  # The search for cgroup trees depends on time as well.
                yield
        finally:
            threading.setprofile(before)

    @contextmanager
    def tracing(self, *begins: Callable[[CodeType], bool]) -> Iterator[tuple[Trace, ...]]:
        """Trace the next path of each function in `begins`.

        The end of the context waits until all tasks of these paths have ended.

        begins: functions that return whether a path begins with a code object.
        """
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
    """Run a fake node and trace each path; return the traces by the paths' names in `LIMITS`."""
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
    """Return a function that returns whether a code object is of a method with this name."""
    return lambda code: code.co_name == method


def _arrived(server: FakeApiServer, share: int) -> bool:
    """Return whether the node's slices offer `share` devices, and the agent reports that no device is moving."""
    (view,) = fleet.views(DRIVER, [server.get("nodes", "node")], (), leases=server.objects("leases"))
    offered = sum(len(each["spec"].get("devices", ())) for each in server.objects())
    return offered == share and view.reported is not None and fleet.finished(view)


def main() -> int:
    """Print the size of each path; return 1 if a limit is exceeded."""
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
