"""The source of NVIDIA GPUs and MIG partitions. It judges their health by scans and by XIDs (the driver's errors)."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Final

from deviceplugin.config.types import NvidiaConfig
from deviceplugin.device import ContainerEdits, Device, Health
from deviceplugin.health import HealthHistory, HealthRules, ProbeResult, worst
from deviceplugin.looks import Looks
from deviceplugin.source import DeviceSource, Measured
from deviceplugin.sources.nvidia.devices import links_of_devices, make_devices, position_of
from deviceplugin.sources.nvidia.driver import shared
from deviceplugin.sources.nvidia.nvml import Gpu, NvmlError, NvmlScan, NvmlUpdate, Partition, Places, Xid

_LOG: Final = logging.getLogger(__name__)
VISIBLE: Final = "NVIDIA_VISIBLE_DEVICES"


class NvidiaSource(DeviceSource):
    """Lists NVIDIA GPUs, or MIG partitions, with UUIDs as ids.

    rules: the rules of health. period: seconds between scans. clock: a function that returns monotonic seconds.
    """

    links: Mapping[frozenset[str], float] = MappingProxyType({})

    def __init__(
        self,
        wanted: NvidiaConfig = NvidiaConfig(),  # noqa: B008  # frozen
        *,
        rules: HealthRules = HealthRules(quiet=300.0),  # noqa: B008  # frozen
        period: float = 10.0,
        resource: str = "",
        places: Places = Places(),  # noqa: B008  # frozen
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.resource = resource or self.resource
        self.wanted = wanted
        self.health = GpuHealth(rules, wanted.ignore_xids, clock)
        self.notes: tuple[str, ...] = ()
        self._period = period
        self.places = places
        self.seen_profiles: list[str] = []
        """All MIG profiles that partitions have had so far."""
        self._more_profiles = asyncio.Event()
        self._scan = NvmlScan((), {})
        self._error = ""
        self._looks = Looks("CDI specs and /proc/driver", threads=1, resource=self.resource)

    def __repr__(self) -> str:
        return f"NvidiaSource({self.wanted})"

    async def watch(self) -> AsyncIterator[Sequence[Device]]:
        """Yield the devices after the first scan, and whenever devices or their health change."""
        listed: list[Device] | None = None
        with shared(self.places).subscribe(self._period) as updates:
            while True:
                self.update(await updates.get())
                while not updates.empty():
                    self.update(updates.get_nowait())
                known = (*self.notes, self._error)
                devices = await self._looks.until_answered("scan", self.devices)
                for note in self.notes:
                    if note not in known:
                        _LOG.info("%s", note, extra={"resource": self.resource})
                if devices != listed:
                    listed = devices
                    yield devices

    def update(self, update: NvmlUpdate) -> None:
        """Process an update from the thread that calls NVML: a scan, an XID, or an error that concerns all GPUs."""
        if isinstance(update, Xid):
            self.health.count_xid(update, self._scan.gpus)
        elif isinstance(update, NvmlError):
            if str(update) != self._error:
                self._error = str(update)
                _LOG.warning("no NVIDIA GPU can be read, trying again: %s", update)
            self.health.judge_error(update)
        else:
            if self._error:
                self._error = ""
                _LOG.info("the NVIDIA GPUs can be read again")
            self._scan = update
            profiles = [part.profile for gpu in update.gpus for part in gpu.partitions or ()]
            if more := [profile for profile in dict.fromkeys(profiles) if profile not in self.seen_profiles]:
                self.seen_profiles += more
                self._more_profiles.set()
            self.health.judge_scan(update)

    def devices(self) -> list[Device]:
        """Return the devices after the last update. The method blocks, because it reads CDI specs and /proc."""
        scan, notes = self._scan, list(self._scan.notes)
        if self._error:
            notes.append(self._error)
        listed: list[tuple[Gpu, Partition | None]] = []
        for gpu in scan.gpus:
            if self.wanted.profile is None and (self.wanted.mig == "none" or gpu.partitions is None):
                listed.append((gpu, None))
                if gpu.partitions is not None:
                    notes.append(f"GPU {gpu.index} is in MIG mode and offered whole; see mig: single and mixed")
            elif self.wanted.profile is not None or self.wanted.mig == "single":
                listed += [(gpu, part) for part in gpu.partitions or () if self.wanted.profile in (None, part.profile)]
        made = make_devices(listed, scan, self.places, self.wanted.injection)
        parents = {part.uuid: gpu.uuid for gpu, part in listed if part is not None}
        self.links = links_of_devices(scan.links, [device.id for device in made], parents)
        unequal = self._unequal(scan) if self.wanted.mig == "single" and self.wanted.profile is None else ""
        if unequal:
            notes.append(unequal)
        if self.wanted.profile is not None and scan.gpus and not listed:
            found = sorted({part.profile for gpu in scan.gpus for part in gpu.partitions or ()})
            notes.append(f"no partition has the profile {self.wanted.profile}; there are {', '.join(found) or 'none'}")
        self.notes = tuple(notes)
        return [self._with_health(device, unequal) for device in made]

    def _with_health(self, device: Device, unequal: str) -> Device:
        history = self.health.histories[device.id]
        if unequal:
            return device.with_health(Health.UNHEALTHY, unequal)
        if self.wanted.injection == "cdi" and not device.edits.cdi and history.health is not Health.UNHEALTHY:
            where = " and ".join(self.places.cdi)
            missing = f"no CDI spec in {where} names it; `nvidia-ctk cdi generate` makes one"
            return device.with_health(Health.UNHEALTHY, missing)
        return device.with_health(*worst((device.health, device.message), (history.health, history.message)))

    def _unequal(self, scan: NvmlScan) -> str:
        """Return the reason why the setting `mig: single` is not possible with these GPUs; "" if it is possible."""
        profiles = sorted({part.profile for gpu in scan.gpus for part in gpu.partitions or ()})
        if len(profiles) > 1:
            return f"mig: single wants partitions of one profile, there are {' and '.join(profiles)}; see mig: mixed"
        if any(gpu.partitions is None for gpu in scan.gpus) and any(gpu.partitions for gpu in scan.gpus):
            return "mig: single wants all GPUs in MIG mode, some are not; see mig: mixed"
        return ""

    def edits(self, devices: Sequence[Device]) -> ContainerEdits:
        """Return the environment variable by which the NVIDIA container runtime selects the GPUs of a container.

        If containers get GPUs by CDI or device nodes, the variable's value is `void`. Without the variable, the value
        `all` in many images would apply, and the container would get all GPUs if the NVIDIA runtime is the default.
        """
        # The ids are sorted, because the kubelet passes the devices in any order, and the container numbers its GPUs in
        # the order of the variable.
        ordered = sorted(devices, key=position_of)
        visible = ",".join(device.id for device in ordered) if self.wanted.injection == "env" else "void"
        return ContainerEdits(env={VISIBLE: visible})

    async def profiles(self) -> AsyncGenerator[Sequence[str], None]:
        """Yield `seen_profiles` whenever there is a new profile."""
        while True:
            self._more_profiles.clear()
            if self.seen_profiles:
                yield tuple(self.seen_profiles)
            await self._more_profiles.wait()

    async def measure(self, devices: Sequence[Device]) -> Measured:
        """Return the load of these GPUs or partitions, and the number of reports of each XID."""
        ids = [device.id for device in devices]
        measured = await shared(self.places).measure(ids)
        for name in ids:
            if counts := self.health.counts.get(name):
                measured.setdefault(name, {})["xid_errors_total"] = dict(counts)
        return measured


class GpuHealth:
    """The health of GPUs and partitions, and the number of reports of each XID."""

    def __init__(self, rules: HealthRules, ignore_xids: Iterable[int], clock: Callable[[], float]) -> None:
        self.histories: dict[str, HealthHistory] = {}
        """For each UUID of a GPU or partition of the last scan, its health history."""
        self.counts: dict[str, Counter[str]] = {}
        """For each UUID, the number of reports of each XID."""
        self._rules = rules
        self.ignore_xids = frozenset(ignore_xids)
        self._clock = clock
        self._times: Counter[tuple[str | None, int]] = Counter()

    def judge_scan(self, scan: NvmlScan) -> None:
        """Update the health of all GPUs and partitions of a scan, and remove all others."""
        findings = {gpu.uuid: scan.findings[gpu.uuid] for gpu in scan.gpus}
        findings |= {part.uuid: findings[gpu.uuid] for gpu in scan.gpus for part in gpu.partitions or ()}
        self.histories = {name: self.histories.get(name, HealthHistory()) for name in findings}
        self._judge(findings)

    def judge_error(self, error: NvmlError) -> None:
        """Update the health of all known GPUs and partitions after an error that made all of them unreadable."""
        self._judge(dict.fromkeys(self.histories, (error.verdict, str(error))))

    def count_xid(self, xid: Xid, gpus: Iterable[Gpu]) -> None:
        """Count an XID, and mark the affected GPUs and partitions as unhealthy."""
        now = self._clock()
        ignored = xid.code in self.ignore_xids
        self._times[xid.gpu, xid.code] += 1
        times = self._times[xid.gpu, xid.code]
        # Only the 1st, 2nd, 4th, 8th and so on report of an XID is logged, so that a program in a loop does not fill
        # the log.
        if times & (times - 1) == 0:
            level = logging.INFO if ignored else logging.WARNING
            _LOG.log(level, "XID %d of GPU %s, %d so far", xid.code, xid.gpu or "unknown", times)
        for gpu in gpus:
            if xid.gpu not in (None, gpu.uuid):
                continue
            hit = [gpu.uuid] if xid.instance is None else []
            parts = (part for part in gpu.partitions or () if xid.instance in (None, part.instance))
            hit += [part.uuid for part in parts if xid.compute in (None, part.compute)]
            for name in {gpu.uuid, *hit}:
                self.counts.setdefault(name, Counter())[str(xid.code)] += 1
            for name in () if ignored else hit:
                self._set(name, self.histories[name].faulted(f"XID {xid.code}", now))

    def _judge(self, findings: Mapping[str, ProbeResult]) -> None:
        now = self._clock()
        for name, (verdict, message) in findings.items():
            self._set(name, self.histories[name].checked(verdict, message, now, self._rules))

    def _set(self, name: str, history: HealthHistory) -> None:
        before = self.histories[name]
        self.histories[name] = history
        if before.health is not history.health and (before.known or history.health is Health.UNHEALTHY):
            _LOG.debug("%s is %s%s", name, history.health.value, f": {history.message}" if history.message else "")
