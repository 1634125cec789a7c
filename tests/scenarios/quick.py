"""Run a plugin's script, or `-m MODULE`, with agents that scan for holders five times a second.

With the default periods, a scenario on the fake kubelet would mostly wait: for the agent's next scan, for the end of a
grant whose pod ended before a scan, for the agent's next request that makes the kubelet write its checkpoint, and for
the scan after a grant. On a real node the scenarios run with the default periods.
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable
from typing import Any

from deviceplugin.kubelet import request_schedule
from deviceplugin.node import scanning
from deviceplugin.register import rules

PERIOD = 0.2
"""Seconds between scans, between the scans that end a grant without a pod, and at most between checkpoint requests."""
_INIT = scanning.HolderScanner.__init__


def quick_scanner(scanner: scanning.HolderScanner, *arguments: Any, **more: Any) -> None:
    """Make a scanner with the short period PERIOD."""
    _INIT(scanner, *arguments, **more)
    scanner.period = PERIOD


def hurry(replace: Callable[[Any, str, Any], None] = setattr) -> None:
    """Make this process's agents request checkpoints often, and scan soon after a grant. replace: like `setattr`."""
    replace(rules, "WELL_APART", PERIOD)
    replace(request_schedule, "MOST_REQUEST", PERIOD)
    replace(request_schedule, "FIRST_REQUEST", PERIOD / 4)
    replace(scanning, "SOON", PERIOD / 4)


def scan_often() -> None:
    """Make the agents of this process scan often, and request checkpoints as often."""
    scanning.HolderScanner.__init__ = quick_scanner  # type: ignore[assignment]
    hurry()


def main(arguments: list[str]) -> None:
    """Run `FILE [ARGUMENT ...]` or `-m MODULE [ARGUMENT ...]` as python would."""
    scan_often()
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
