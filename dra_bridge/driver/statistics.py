"""Defines the statistics of a driver's calls, for metrics."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from deviceplugin.durations import Durations
from deviceplugin.hooks import HookStatistics


@dataclass(slots=True)
class CallStatistics:
    """Statistics of Prepare or of Unprepare. A call with several claims counts once for each claim.

    done: number of claims with success. failures: for each reason, the number of claims with an error. durations:
    seconds for each claim.
    """

    done: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    durations: Durations = field(default_factory=Durations)


@dataclass(slots=True)
class ClaimStatistics:
    """Statistics of a driver. All values only grow, except `in_flight`, the running calls. Durations are in seconds.

    waits: durations of claims' waits for holders that were about to end, including waits without success.
    prepared_again: number of Prepares of claims that were already prepared. hooks: statistics of the calls of hooks for
    claims. claim_reads, claim_read_seconds: number and total duration of reads of claims from the API server.
    """

    prepare: CallStatistics = field(default_factory=CallStatistics)
    unprepare: CallStatistics = field(default_factory=CallStatistics)
    waits: Durations = field(default_factory=Durations)
    prepared_again: int = 0
    hooks: HookStatistics = field(default_factory=HookStatistics)
    claim_reads: int = 0
    claim_read_seconds: float = 0.0
    in_flight: int = 0
