"""The health of GPUs and partitions, from scans and XIDs."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Final

from deviceplugin.device import Health
from deviceplugin.health import Finding, HealthHistory, Rules
from deviceplugin.sources.nvidia.values import Gpu, NvmlError, Xid

_LOG: Final = logging.getLogger(__name__)

APPLICATION_XIDS: Final = (13, 31, 43, 45, 68, 109)
"""XIDs that programs cause, not the hardware (the list that NVIDIA's own plugin skips)."""


class GpuHealth:
    """Judges the health of what was found, by rules of its own; counts XIDs."""

    def __init__(self, rules: Rules, ignore_xids: Iterable[int]) -> None:
        self.rules = rules
        self.ignore_xids = frozenset(ignore_xids)
        self._courses: dict[str, HealthHistory] = {}
        self._counts: dict[str, dict[str, int]] = {}
        self._times: dict[tuple[str | None, int], int] = {}

    def course_of(self, name: str) -> HealthHistory:
        """Return the course of a GPU or partition that was found."""
        return self._courses[name]

    def xids_of(self, name: str) -> Mapping[str, int]:
        """Return how often each XID came."""
        return self._counts.get(name, {})

    def take_findings(self, findings: Mapping[str, Finding], now: float) -> None:
        """Judge all that a scan found; what it did not find is forgotten."""
        courses, self._courses = self._courses, {}
        for name, (verdict, message) in findings.items():
            before = courses.get(name, HealthHistory())
            self._courses[name] = before
            self._follow(name, before.checked(verdict, message, now, self.rules))

    def take_error(self, error: NvmlError, now: float) -> None:
        """Judge all that is known, where nothing can be learned of any."""
        for name, course in self._courses.items():
            self._follow(name, course.checked(error.verdict, str(error), now, self.rules))

    def take_xid(self, xid: Xid, gpus: Iterable[Gpu], now: float) -> None:
        """Count an XID of these GPUs, and judge those that it hit."""
        ignored = xid.code in self.ignore_xids
        times = self._times[xid.gpu, xid.code] = self._times.get((xid.gpu, xid.code), 0) + 1
        if times & (times - 1) == 0:  # a program in a loop must not fill the log
            level = logging.INFO if ignored else logging.WARNING
            _LOG.log(level, "XID %d of GPU %s, %d so far", xid.code, xid.gpu or "unknown", times)
        for gpu in gpus:
            if xid.gpu not in (None, gpu.uuid):
                continue
            hit = [] if xid.instance is not None else [gpu.uuid]
            for partition in gpu.partitions or ():
                if xid.instance in (None, partition.instance) and xid.compute in (None, partition.compute):
                    hit.append(partition.uuid)  # noqa: PERF401  # clearer so
            for name in {gpu.uuid, *hit}:
                counts = self._counts.setdefault(name, {})
                counts[str(xid.code)] = counts.get(str(xid.code), 0) + 1
            if not ignored:
                for name in hit:
                    self._follow(name, self._courses[name].faulted(f"XID {xid.code}", now))

    def _follow(self, name: str, course: HealthHistory) -> None:
        before = self._courses[name]
        self._courses[name] = course
        if before.health is not course.health and (before.known or course.health is Health.UNHEALTHY):
            level = logging.INFO if course.health is Health.HEALTHY else logging.WARNING
            _LOG.log(level, "%s is %s%s", name, course.health.value, f": {course.message}" if course.message else "")
