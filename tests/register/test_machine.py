"""No hardware is held for more than its whole, whatever is configured, listed, lost and started in whatever order."""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.register.machine import Machine, PluginMachine

EXAMPLES = int(os.environ.get("REGISTER_EXAMPLES", "25"))


def run(machine: type[Machine], examples: int, steps: int) -> None:
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples, stateful_step_count=steps, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )


@pytest.mark.explore
@pytest.mark.parametrize("machine", [Machine, PluginMachine])
def test_no_hardware_is_held_for_more_than_its_whole(machine: type[Machine]) -> None:
    """Not even for a moment; and when nobody is left, every device is offered again."""
    run(machine, EXAMPLES, 20)


@pytest.mark.parametrize("machine", [Machine, PluginMachine])
def test_a_few_walks(machine: type[Machine]) -> None:
    """The same, as far as a few seconds go."""
    run(machine, 2, 6)
