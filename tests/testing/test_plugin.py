from __future__ import annotations

import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

import pytest

from deviceplugin import Device, DeviceSource
from deviceplugin.kubelet.registration import Timing
from deviceplugin.testing import FakeKubelet, Served, serve

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
    """The fixtures together give an author's pod its device, in two lines."""
    served(Things("a", "b"))
    assert fake_kubelet.run_pod("p", {"example.com/thing": 1}).nodes[0].container == "/dev/null"


def test_several_sources_and_agents(fake_kubelet: FakeKubelet, served: Callable[..., Served]) -> None:
    """One call serves several sources with one agent; further calls make further agents."""
    both = served(Things("a"), Things("b", resource="example.com/other"))
    served(Things("c", resource="example.com/third"))
    assert fake_kubelet.resources() == {"example.com/thing", "example.com/other", "example.com/third"}
    assert {status.resource for status in both.agent.status().resources} == {"example.com/thing", "example.com/other"}


def test_serve_ends_with_its_context(fake_kubelet: FakeKubelet) -> None:
    """The agent of `serve` ends with the context, and its devices with it."""
    with serve(Things("a"), fake_kubelet) as running:
        assert fake_kubelet.allocatable("example.com/thing") == 1
    assert not running.alive
    fake_kubelet.wait_devices("example.com/thing", 0)


def test_a_failing_test_ends_the_agent(fake_kubelet: FakeKubelet) -> None:
    """An error inside the context of `serve` goes through, and the agent ends."""
    with pytest.raises(KeyError), serve(Things("a"), fake_kubelet) as running:
        raise KeyError
    assert not running.alive


def test_an_agent_that_cannot_serve(fake_kubelet: FakeKubelet, served: Callable[..., Served]) -> None:
    """An agent that ends at once is not waited for; its error is the cause of what the test sees."""
    served(Things("a"))
    second = Served([Things("a")], fake_kubelet, timing=Timing(takeover=0.0))
    fake_kubelet.wait_until(lambda: not second.alive)
    with pytest.raises(RuntimeError, match="ended") as failure:
        second.wait_registered()
    assert "another process" in str(failure.value.__cause__)


def test_an_agent_that_cannot_be_made(fake_kubelet: FakeKubelet) -> None:
    """The same goes for sources that no agent can be made of."""
    running = Served([Things("a"), Things("b")], fake_kubelet)
    with pytest.raises(RuntimeError):
        running.wait_registered()
    with pytest.raises(RuntimeError, match="could not be made"):
        running.agent  # noqa: B018
    with pytest.raises(Exception, match=r"example\.com/thing"):
        running.stop()


def test_without_a_kubelet(fake_kubelet: FakeKubelet) -> None:
    """An agent can be started while the kubelet is down, and registers when it comes."""
    fake_kubelet.stop()
    with serve(Things("a"), fake_kubelet, timeout=None) as running:
        assert running.alive
        fake_kubelet.start()
        running.wait_registered()


def test_the_plugin_is_cheap() -> None:
    """The pytest plugin, which every pytest run imports, imports neither gRPC nor asyncio."""
    code = "import sys, deviceplugin.testing.plugin; print({'grpc', 'asyncio', 'google.protobuf'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout == "set()\n"


def test_a_crash_fails_the_test(tmp_path: Path) -> None:
    """A test during which a real kubelet would have crashed fails in the end."""
    test = tmp_path / "test_it.py"
    test.write_text("def test_it(fake_kubelet):\n    fake_kubelet.crashes.append('a nil pointer')\n")
    result = subprocess.run([*PYTEST, str(test)], check=False, capture_output=True, text=True)
    assert result.returncode == 1
    assert "a nil pointer" in result.stdout


def test_names_are_found() -> None:
    """Every name the package promises is there, and others are not."""
    import deviceplugin.testing

    for name in deviceplugin.testing.__all__:
        assert getattr(deviceplugin.testing, name).__name__ == name
    with pytest.raises(AttributeError):
        deviceplugin.testing.Nonsense  # noqa: B018
