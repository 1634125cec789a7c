from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from deviceplugin import ContainerEdits, Device, DeviceSource
from deviceplugin.kubelet.registration import RegistrationTiming
from deviceplugin.testing import FakeKubelet, PodFailedError, Served, serve

R = "example.com/thing"
PYTEST = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]


class Things(DeviceSource):
    resource = "example.com/thing"

    def __init__(self, *ids: str, resource: str = "") -> None:
        self.ids = ids
        if resource:
            self.resource = resource

    async def watch(self) -> AsyncIterator[Sequence[Device]]:
        yield [Device(name, nodes=["/dev/null"]) for name in self.ids]


def test_served(fake_kubelet: FakeKubelet, served: Callable[..., Served]) -> None:
    """With the fixtures `served` and `fake_kubelet`, a test of two lines has a pod that gets a source's device."""
    served(Things("a", "b"))
    assert fake_kubelet.run_pod("p", {"example.com/thing": 1}).nodes[0].container == "/dev/null"


def test_several_sources_and_agents(fake_kubelet: FakeKubelet, served: Callable[..., Served]) -> None:
    """One call of `served` serves several sources with one agent; each further call starts a further agent."""
    both = served(Things("a"), Things("b", resource="example.com/other"))
    served(Things("c", resource="example.com/third"))
    assert fake_kubelet.resources() == {"example.com/thing", "example.com/other", "example.com/third"}
    assert {status.resource for status in both.agent.status().resources} == {"example.com/thing", "example.com/other"}


def test_serve_ends_with_its_context(fake_kubelet: FakeKubelet) -> None:
    """The agent that `serve` starts ends with the `with` block, and the kubelet has none of its devices any more."""
    with serve(Things("a"), fake_kubelet) as running:
        assert fake_kubelet.allocatable("example.com/thing") == 1
    assert not running.alive
    fake_kubelet.wait_devices("example.com/thing", 0)


def test_a_failing_test_ends_the_agent(fake_kubelet: FakeKubelet) -> None:
    """An exception inside the `with` block of `serve` passes through, and the agent ends."""
    with pytest.raises(KeyError), serve(Things("a"), fake_kubelet) as running:
        raise KeyError
    assert not running.alive


def test_an_agent_that_cannot_serve(fake_kubelet: FakeKubelet, served: Callable[..., Served]) -> None:
    """`wait_registered` raises at once if the agent has ended, with the agent's error as the cause."""
    served(Things("a"))
    second = Served([Things("a")], fake_kubelet, timing=RegistrationTiming(takeover=0.0))
    fake_kubelet.wait_until(lambda: not second.alive)
    with pytest.raises(RuntimeError, match="ended") as failure:
        second.wait_registered()
    assert "another process" in str(failure.value.__cause__)


def test_an_agent_that_cannot_be_made(fake_kubelet: FakeKubelet) -> None:
    """`wait_registered` and `agent` raise if the agent could not be created, here with two sources of one resource."""
    running = Served([Things("a"), Things("b")], fake_kubelet)
    with pytest.raises(RuntimeError):
        running.wait_registered()
    with pytest.raises(RuntimeError, match="could not be created"):
        running.agent  # noqa: B018
    with pytest.raises(Exception, match=r"example\.com/thing"):
        running.stop()


class Failing(Things):
    """A source that raises in `watch`, before or after a first list."""

    resource = "example.com/failing"

    def __init__(self, error: Exception, *ids: str) -> None:
        super().__init__(*ids)
        self._error = error

    async def watch(self) -> AsyncIterator[Sequence[Device]]:
        if self.ids:
            yield [Device(name) for name in self.ids]
        raise self._error


class Blocking(Failing):
    """A source like `Failing` whose `watch` is a plain generator, which runs in a thread."""

    def watch(self) -> Iterator[Sequence[Device]]:  # type: ignore[override]
        if self.ids:
            yield [Device(name) for name in self.ids]
        raise self._error


MISSING = FileNotFoundError(2, "No such file or directory", "/sys/class/nonesuch")


@pytest.mark.parametrize(
    ("kind", "error", "text"),
    [
        (Failing, OSError("no such hardware"), "OSErr"),
        (Blocking, OSError("no such hardware"), "OSErr"),
        (Failing, MISSING, "FileNotFoundError: .* '/sys/class/nonesuch'"),
    ],
    ids=["async", "plain", "a missing file is named"],
)
def test_a_watch_that_fails_is_not_waited_for(
    served: Callable[..., Served], kind: type[Failing], error: OSError, text: str
) -> None:
    """If `watch` raises before its first list, `served` fails at once, and the exception is the cause of its error."""
    began = time.monotonic()
    with pytest.raises(
        RuntimeError, match=rf"example\.com/failing: watch failed before its first list: {text}"
    ) as failure:
        served(Things("a"), kind(error), timeout=60.0)
    assert failure.value.__cause__ is error
    assert time.monotonic() - began < 30.0


class Alike(Things):
    """A source with two device ids of the same identity."""

    async def watch(self) -> AsyncIterator[Sequence[Device]]:
        yield [Device(name, identity="serial-7") for name in ("a", "b")]


def test_devices_that_exclude_each_other_are_named(fake_kubelet: FakeKubelet, served: Callable[..., Served]) -> None:
    """The error of a pod that gets no device names the withheld device and the device that excludes it."""
    served(Alike())
    fake_kubelet.run_pod("p", {R: 1})
    reason = r"0 free.*; withheld: [ab]: .*\b[ab]\b"
    with pytest.raises(PodFailedError, match=reason.replace("0 free", "0 are free")):
        fake_kubelet.run_pod("q", {R: 1})
    fake_kubelet.wait_allocatable(R, 1)
    with pytest.raises(TimeoutError, match=reason):
        fake_kubelet.start_pod("r", {R: 1}).wait_running(timeout=0.1)


def test_a_health_of_a_wrong_type_fails_the_test(served: Callable[..., Served]) -> None:
    """A device whose health has a wrong type fails the test; the error has the device, the field and valid values."""

    class Wrong(Things):
        async def watch(self) -> AsyncIterator[Sequence[Device]]:
            yield [Device("a", health=False)]  # type: ignore[arg-type]

    with pytest.raises(RuntimeError, match=r"device 'a': health must be Health\.HEALTHY, .*, not False"):
        served(Wrong(), timeout=60.0)


def test_a_watch_that_fails_later_does_not_matter(fake_kubelet: FakeKubelet, served: Callable[..., Served]) -> None:
    """If `watch` fails after its first list, the listed devices are still served."""
    running = served(Failing(OSError("unplugged"), "a"))
    fake_kubelet.wait_until(lambda: "unplugged" in running.agent.status().resources[0].source_error)
    running.wait_registered()
    assert fake_kubelet.run_pod("p", {"example.com/failing": 1}).device_ids == ("a",)


class Silent(Things):
    """A source that never yields a list."""

    resource = "example.com/silent"

    async def watch(self) -> AsyncIterator[Sequence[Device]]:
        await asyncio.Event().wait()
        yield ()


def test_a_watch_that_lists_nothing_is_named(fake_kubelet: FakeKubelet, served: Callable[..., Served]) -> None:
    """If a source gives no list, the timeout error of `served` names this source, and not the other one."""

    with pytest.raises(TimeoutError, match=r"\['example.com/silent'\] to be registered, with a first list"):
        served(Things("a"), Silent(), timeout=1.0)


class Refusing(Things):
    def edits(self, devices: Sequence[Device]) -> ContainerEdits:
        raise KeyError("nope")


def test_a_pod_that_fails_fails_its_test(fake_kubelet: FakeKubelet, served: Callable[..., Served]) -> None:
    """`run_pod` raises with the reason of a failed pod, unless `check` is False."""
    served(Refusing("a"))
    with pytest.raises(PodFailedError, match=r"edits of .* failed: KeyError: 'nope' \(.*plugin\.py:\d+\)"):
        fake_kubelet.run_pod("p", {"example.com/thing": 1})
    assert fake_kubelet.run_pod("q", {"example.com/thing": 1}, check=False).phase == "Failed"


def test_wrong_arguments_are_refused_at_once(fake_kubelet: FakeKubelet, served: Callable[..., Served]) -> None:
    """Wrong arguments of `run_pod`, `start_pod`, `wait_until` and `served` raise TypeError; no pod is created."""
    wrong: Any
    for wrong in ({"example.com/thing": "1"}, "example.com/thing", {1: 1}):
        for start in (fake_kubelet.run_pod, fake_kubelet.start_pod):
            with pytest.raises(TypeError, match=r"limits must be a dict such as {'example\.com/fpga': 1}, not "):
                start("p", wrong)
    wrong = True
    with pytest.raises(TypeError, match=r"wait_until takes a function such as lambda: \.\.\., not True"):
        fake_kubelet.wait_until(wrong)
    with pytest.raises(TypeError, match="there is no source to serve"):
        served()
    with pytest.raises(TypeError, match=r"Things is a class; a source is an instance of it: Things\(\)"):
        served(Things)
    assert not fake_kubelet.pods


def test_the_end_of_an_agent_names_its_cause(fake_kubelet: FakeKubelet, served: Callable[..., Served]) -> None:
    """If the agent ends instead of serving, the error of `served` has the cause."""
    with pytest.raises(RuntimeError, match=r"the agent has ended: .*two sources for one resource: example\.com"):
        served(Things("a"), Things("b"))
    with pytest.raises(RuntimeError, match=r"the agent has ended: .*perod"):
        served(Things("a"), perod=0.1)


def test_wait_until_takes_any_condition(fake_kubelet: FakeKubelet) -> None:
    """`wait_until` notices changes outside the kubelet, and its condition may call the kubelet."""
    over = threading.Event()
    asked = 0

    def condition() -> bool:
        nonlocal asked
        asked += 1
        # The condition is called without the kubelet's lock, which another thread can take.
        thread = threading.Thread(target=fake_kubelet.resources, daemon=True)
        thread.start()
        thread.join(20.0)
        assert not thread.is_alive()
        if asked == 3:
            over.set()
        return over.is_set()

    fake_kubelet.wait_until(condition, 60.0)
    assert asked == 3
    with pytest.raises(TimeoutError, match=r"waited 0\.05 s for the moon; up: True"):
        fake_kubelet.wait_until(lambda: False, 0.05, "the moon")


def test_wait_until_refuses_a_coroutine_function(fake_kubelet: FakeKubelet) -> None:
    """`wait_until` refuses a coroutine function, whose result is always true."""

    async def condition() -> bool:
        return False

    with pytest.raises(TypeError, match="takes a plain function"):
        fake_kubelet.wait_until(condition)


def test_period_is_how_soon_released_is_called(fake_kubelet: FakeKubelet, served: Callable[..., Served]) -> None:
    """With a short `period`, `released` is called soon after the end of a pod."""

    class Releasing(Things):
        def __init__(self) -> None:
            super().__init__("a")
            self.free: list[str] = []

        def released(self, devices: Sequence[Device]) -> None:
            self.free += [device.id for device in devices]

    source = Releasing()
    served(source, period=0.05)
    fake_kubelet.wait_until(lambda: source.free == ["a"], 60.0, "the first release, of all idle devices")
    fake_kubelet.run_pod("p", {"example.com/thing": 1}).delete()
    fake_kubelet.wait_until(lambda: source.free == ["a", "a"], 60.0)


def test_the_plugin_is_cheap() -> None:
    """The pytest plugin, which every pytest run imports, imports neither gRPC nor asyncio."""
    code = "import sys, deviceplugin.testing.plugin; print({'grpc', 'asyncio', 'google.protobuf'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout == "set()\n"


def test_a_crash_fails_the_test(tmp_path: Path) -> None:
    """A test in which a real kubelet would have crashed fails at its end."""
    test = tmp_path / "test_it.py"
    test.write_text("def test_it(fake_kubelet):\n    fake_kubelet.crashes.append('a nil pointer')\n")
    result = subprocess.run([*PYTEST, str(test)], check=False, capture_output=True, text=True)
    assert result.returncode == 1
    assert "a nil pointer" in result.stdout


def test_names_are_found() -> None:
    """Every name in `__all__` can be imported, and other names cannot."""
    import deviceplugin.testing

    for name in deviceplugin.testing.__all__:
        assert getattr(deviceplugin.testing, name).__name__ == name
    with pytest.raises(AttributeError):
        deviceplugin.testing.Nonsense  # noqa: B018
