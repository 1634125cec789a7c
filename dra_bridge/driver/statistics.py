"""What a driver has done so far, for metrics."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from deviceplugin.durations import Durations
from deviceplugin.hooks import HookStatistics


@dataclass(slots=True)
class CallStatistics:
    """The calls of one kind so far, counted by claim. failures: by reason. durations: failures included."""

    done: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    durations: Durations = field(default_factory=Durations)


@dataclass(slots=True)
class ClaimStatistics:
    """What a driver has done so far. All but `in_flight` only grows. Durations in seconds.

    waits: of claims for holders that were about to end, also in vain. prepared_again: claims that were prepared
    already. claim_reads: of claims from the API server. hooks: called
    for claims.
    """

    prepare: CallStatistics = field(default_factory=CallStatistics)
    unprepare: CallStatistics = field(default_factory=CallStatistics)
    waits: Durations = field(default_factory=Durations)
    prepared_again: int = 0
    hooks: HookStatistics = field(default_factory=HookStatistics)
    claim_reads: int = 0
    claim_read_seconds: float = 0.0
    in_flight: int = 0
