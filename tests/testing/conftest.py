from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from deviceplugin.testing import FakeKubelet
from tests.testing.bare import BarePlugin


@pytest.fixture
def kubelets() -> Iterator[Callable[..., FakeKubelet]]:
    """Return a function that starts a fake kubelet with these options."""
    with contextlib.ExitStack() as stack:
        yield lambda **options: stack.enter_context(FakeKubelet(**options))


@pytest.fixture
def plugins() -> Iterator[Callable[..., BarePlugin]]:
    """Return a function that starts a `BarePlugin` and, by default, registers it with a fake kubelet."""
    made = []

    def make(kubelet: FakeKubelet, *devices: Any, register: bool = True, **options: Any) -> BarePlugin:
        plugin = BarePlugin(kubelet.device_plugin_dir, *devices, **options)
        made.append(plugin)
        if register:
            before = len(kubelet.updates(plugin.resource))
            plugin.register()
            kubelet.wait_until(lambda: len(kubelet.updates(plugin.resource)) > before, 10, "the first list")
        return plugin

    yield make
    for plugin in made:
        plugin.stop()
