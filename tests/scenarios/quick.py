"""Run a plugin's script, or `-m MODULE`, with agents that scan for holders twice a second.

The fake kubelet is fast; a period of five seconds, and the seconds for which a grant is kept whose pod ended
before a scan, are most of what a scenario would wait for. On a real node the scenarios run with those that users have.
"""

from __future__ import annotations

import functools
import runpy
import sys

from deviceplugin.node import agent
from deviceplugin.register import rules

PERIOD = 0.5
"""Seconds between two scans, and between two that show a grant without a pod to be over."""


def main(arguments: list[str]) -> None:
    """Run `FILE [ARGUMENT ...]` or `-m MODULE [ARGUMENT ...]` as python would."""
    agent.Agent.__init__ = functools.partialmethod(agent.Agent.__init__, period=PERIOD)  # type: ignore[assignment]
    rules.WELL_APART = PERIOD  # type: ignore[misc]
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
