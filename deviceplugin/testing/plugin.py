"""The pytest plugin: fixtures `fake_kubelet` and `served`.

If the package is installed, every pytest run imports this module. So it imports large modules only in the fixtures.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

from deviceplugin.testing.serving import Served, serve

if TYPE_CHECKING:
    from deviceplugin.source import DeviceSource
    from deviceplugin.testing.kubelet import FakeKubelet

__all__ = ["Served", "fake_kubelet", "serve", "served"]


@pytest.fixture
def fake_kubelet() -> Iterator[FakeKubelet]:
    """Provide a running fake kubelet. The test fails at its end if a real kubelet would have crashed."""
    from deviceplugin.testing.kubelet import FakeKubelet

    with FakeKubelet() as kubelet:
        yield kubelet
        crashes = list(kubelet.crashes)
    assert not crashes, f"a real kubelet would have crashed: {crashes}"


@pytest.fixture
def served(fake_kubelet: FakeKubelet) -> Iterator[Callable[..., Served]]:
    """Provide a function that runs an agent with the given device sources until the test ends.

    served(*sources, timeout=30.0, period=5.0, **options) returns a `Served` once all sources are registered; `serve`
    describes the arguments and errors. A test of a source's `released` uses a small `period` (in seconds).
    """
    with contextlib.ExitStack() as stack:

        def start(*sources: DeviceSource, **options: Any) -> Served:
            return stack.enter_context(serve(sources, fake_kubelet, **options))

        yield start
