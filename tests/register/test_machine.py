"""No hardware is held for more than its whole, whatever is configured, listed, lost and started in whatever order."""

from __future__ import annotations

import os
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.register.machine import Machine, PluginMachine

EXAMPLES = int(os.environ.get("REGISTER_EXAMPLES", "12"))
"""For each machine: some 3 s each."""
PHASES = (Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink)


def walk(machine: type[Machine], **options: Any) -> None:
    """Let a machine walk."""
    checks = list(HealthCheck)
    run_state_machine_as_test(machine, settings=settings(deadline=None, suppress_health_check=checks, **options))


@pytest.mark.explore
@pytest.mark.parametrize("machine", [Machine, PluginMachine])
def test_no_hardware_is_held_for_more_than_its_whole(machine: type[Machine]) -> None:
    """Not even for a moment; and when nobody is left, every device is offered again."""
    walk(machine, max_examples=EXAMPLES, stateful_step_count=20, phases=PHASES)


@pytest.mark.parametrize("machine", [Machine, PluginMachine])
def test_a_few_walks(machine: type[Machine]) -> None:
    """The same, as far as two seconds go; always the same walks."""
    phases = [Phase.generate]
    walk(machine, max_examples=2, stateful_step_count=5, phases=phases, derandomize=True, database=None)
