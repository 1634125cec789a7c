"""The pytest plugin: fixtures `fake_kubelet` and `served`.

Every pytest run on a machine where the package is installed imports this module, so it imports
nothing heavy itself.
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
    """Give a running fake kubelet; at the end the test fails if a real one would have crashed."""
    from deviceplugin.testing.kubelet import FakeKubelet

    with FakeKubelet() as kubelet:
        yield kubelet
        crashes = list(kubelet.crashes)
    assert not crashes, f"a real kubelet would have crashed: {crashes}"


@pytest.fixture
def served(fake_kubelet: FakeKubelet) -> Iterator[Callable[..., Served]]:
    """Give a function that runs an agent with its sources until the test ends.

    served(*sources, timeout=10.0, period=5.0, **options) returns a `Served` once all sources are registered; `serve`
    describes its arguments and errors. `period`, in seconds, is what a test of `released` makes small.
    """
    with contextlib.ExitStack() as stack:

        def start(*sources: DeviceSource, **options: Any) -> Served:
            return stack.enter_context(serve(sources, fake_kubelet, **options))

        yield start
