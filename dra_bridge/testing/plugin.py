"""The pytest plugin: fixtures `fake_node` and `bridged`, for claims.

If the package is installed, every pytest run imports this module. So it imports large modules only in the fixtures.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from deviceplugin.source import DeviceSource
    from dra_bridge.testing.node import FakeNode
    from dra_bridge.testing.serving import ServedBoth

__all__ = ["bridged", "fake_node"]


@pytest.fixture
def fake_node() -> Iterator[FakeNode]:
    """Provide a running fake node with its API server.

    The test fails at its end if a real kubelet would have crashed.
    """
    from dra_bridge.testing.apiserver import FakeApiServer
    from dra_bridge.testing.node import FakeNode

    with FakeApiServer() as server, FakeNode(server) as node:
        yield node
        crashes = list(node.crashes)
    assert not crashes, f"a real kubelet would have crashed: {crashes}"


@pytest.fixture
def bridged(fake_node: FakeNode) -> Iterator[Callable[..., ServedBoth]]:
    """Provide a function that serves the devices of sources to pods and to claims until the test ends.

    bridged(*sources, share="none", drain="cordon", timeout=20.0, period=0.2, **options) returns once as many devices
    are available to claims as the share demands; `serve_both` describes the arguments and errors.
    """
    from dra_bridge.testing.serving import serve_both

    with contextlib.ExitStack() as stack:

        def start(*sources: DeviceSource, **options: Any) -> ServedBoth:
            return stack.enter_context(serve_both(sources, fake_node, **options))

        yield start
