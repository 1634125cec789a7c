"""How many functions and modules a call of the kubelet, and a device's move from plugin to DRA, pass through."""

from __future__ import annotations

import pytest

from tests.bench.trace import LIMITS, Trace, traces


@pytest.fixture(scope="module")
def traced() -> dict[str, Trace]:
    return traces()


@pytest.mark.parametrize("path", LIMITS)
def test_a_path_is_no_longer_than_its_limit(path: str, traced: dict[str, Trace]) -> None:
    """A call or a device's move passes through at most as many functions and modules as its limit allows."""
    size, limit = traced[path].size, LIMITS[path]
    exceeded = size.functions > limit.functions or size.modules > limit.modules
    assert not exceeded, f"{size}, limit: {limit}"


def test_the_question_is_decided_where_a_device_is_granted(traced: dict[str, Trace]) -> None:
    """Allocate and NodePrepareResources decide whether a device may be given; NodeUnprepareResources does not."""
    calls = [path for path in LIMITS if path not in ("move", "evidence")]
    decided = {path: traced[path].asked("question decided") > 0 for path in calls}
    assert decided == {"Allocate": True, "NodePrepareResources": True, "NodeUnprepareResources": False}
