"""The source of NVIDIA GPUs and partitions: makes devices of what the driver tells."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Final, Literal

from deviceplugin.device import ContainerEdits, Device, Health
from deviceplugin.health import Finding, Rules
from deviceplugin.source import DeviceSource, Measured
from deviceplugin.sources.nvidia.devices import DeviceMaker, place_of
from deviceplugin.sources.nvidia.driver import shared
from deviceplugin.sources.nvidia.health import APPLICATION_XIDS, GpuHealth
from deviceplugin.sources.nvidia.injection import Injection
from deviceplugin.sources.nvidia.links import links_of_devices
from deviceplugin.sources.nvidia.mig import SeenProfiles
from deviceplugin.sources.nvidia.places import Places
from deviceplugin.sources.nvidia.values import Gpu, News, NvmlError, NvmlScan, Partition, Xid

_LOG: Final = logging.getLogger(__name__)

VISIBLE: Final = "NVIDIA_VISIBLE_DEVICES"

Mig = Literal["none", "single", "mixed"]


class NvidiaSource(DeviceSource):
    """NVIDIA GPUs, or partitions of them; ids are their UUIDs.

    Args:
        mig: "none" lists whole GPUs; "single" partitions, which must all be of one profile; "mixed" the
            GPUs that are not partitioned, while `profiles` says which profiles there are.
        profile: list the partitions of this profile only, whatever `mig` says.
        injection: how a container gets them: "env", NVIDIA_VISIBLE_DEVICES; "cdi", the names of an
            existing CDI spec of nvidia.com/gpu; "nodes", device nodes.
        ignore_xids: XIDs that do not make a GPU unhealthy.
        rules: when looks and XIDs change a device's health.
        period: seconds between looks.
        library: where libnvidia-ml.so.1 is, if not where programs look.
        resource: the resource's name, where the source is used by itself.
        places: where everything else is; overrides `library`.
        clock: seconds that only grow.

    """

    def __init__(
        self,
        *,
        mig: Mig = "none",
        profile: str | None = None,
        injection: Injection = "env",
        ignore_xids: Iterable[int] = APPLICATION_XIDS,
        rules: Rules = Rules(quiet=300.0),  # noqa: B008  # frozen
        period: float = 10.0,
        library: str | None = None,
        resource: str = "",
        places: Places | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if resource:
            self.resource = resource
        self.mig: Mig = mig
        self.profile = profile
        self.injection: Injection = injection
        self.notes: tuple[str, ...] = ()
        self._period = period
        self._places = places or Places(library=library or "")
        self._clock = clock
        self._health = GpuHealth(rules, ignore_xids)
        self._maker = DeviceMaker(self._places, injection)
        self._profiles = SeenProfiles()
        self._scan = NvmlScan((), {})
        self._links: Mapping[frozenset[str], float] = MappingProxyType({})
        self._error = ""

    def __repr__(self) -> str:
        return f"NvidiaSource(mig={self.mig!r}{f', profile={self.profile!r}' if self.profile else ''})"

    @property
    def rules(self) -> Rules:
        """When looks and XIDs change a device's health."""
        return self._health.rules

    @property
    def ignore_xids(self) -> frozenset[int]:
        """XIDs that do not make a GPU unhealthy."""
        return self._health.ignore_xids

    async def watch(self) -> AsyncIterator[Sequence[Device]]:
        """Yield the devices as soon as NVML was looked at, and whenever they or their health change."""
        listed: list[Device] | None = None
        with shared(self._places).subscribe(self._period) as subscription:
            while True:
                for news in await subscription.take():
                    self.take(news)
                devices = await asyncio.to_thread(self.devices)
                if devices != listed:
                    listed = devices
                    yield devices

    def take(self, news: News) -> None:
        """Take in what the driver has to tell, and judge the devices' health anew."""
        now = self._clock()
        if isinstance(news, Xid):
            self._health.take_xid(news, self._scan.gpus, now)
        elif isinstance(news, NvmlError):
            if str(news) != self._error:
                self._error = str(news)
                _LOG.warning("%s; waiting for it", news)
            self._health.take_error(news, now)
        else:
            if self._error:
                self._error = ""
                _LOG.info("NVML answers again")
            self._scan = news
            findings: dict[str, Finding] = {}
            for gpu in news.gpus:
                finding = news.findings[gpu.uuid]
                findings[gpu.uuid] = finding
                for partition in gpu.partitions or ():
                    findings[partition.uuid] = finding
                    self._profiles.add(partition.profile)
            self._health.take_findings(findings, now)

    def devices(self) -> list[Device]:
        """Return the devices as of the last news; reads CDI specs and what the driver keeps in proc."""
        scan, notes = self._scan, list(self._scan.notes)
        if self._error:
            notes.append(self._error)
        listed: list[tuple[Gpu, Partition | None]] = []
        parents: dict[str, str] = {}
        for gpu in scan.gpus:
            if self.profile is None and (self.mig == "none" or gpu.partitions is None):
                listed.append((gpu, None))
                if gpu.partitions is not None:
                    notes.append(f"GPU {gpu.index} is in MIG mode and given out whole; see mig: single and mixed")
            elif self.profile is not None or self.mig == "single":
                for partition in gpu.partitions or ():
                    if self.profile in (None, partition.profile):
                        listed.append((gpu, partition))
                        parents[partition.uuid] = gpu.uuid
        made = self._maker.make(listed, scan)
        self._links = links_of_devices(scan.links, made, parents)
        unequal = self._unequal(scan) if self.mig == "single" and self.profile is None else ""
        if unequal:
            notes.append(unequal)
        self.notes = tuple(notes)
        return [self._judged(device, unequal) for device in made.values()]

    def _judged(self, device: Device, unequal: str) -> Device:
        course = self._health.course_of(device.id)
        if unequal:
            return device.with_health(Health.UNHEALTHY, unequal)
        if self.injection == "cdi" and not device.edits.cdi and course.health is not Health.UNHEALTHY:
            where = " and ".join(self._places.cdi)
            missing = f"no CDI spec in {where} names it; `nvidia-ctk cdi generate` makes one"
            return device.with_health(Health.UNHEALTHY, missing)
        return device.with_health(course.health, course.message)

    def _unequal(self, scan: NvmlScan) -> str:
        """Return what is wrong if mig: single does not fit what is there."""
        profiles = sorted({part.profile for gpu in scan.gpus for part in gpu.partitions or ()})
        if len(profiles) > 1:
            return f"mig: single wants partitions of one profile, there are {' and '.join(profiles)}; see mig: mixed"
        if any(gpu.partitions is None for gpu in scan.gpus) and any(gpu.partitions for gpu in scan.gpus):
            return "mig: single wants all GPUs in MIG mode, some are not; see mig: mixed"
        return ""

    def edits(self, devices: Sequence[Device]) -> ContainerEdits:
        """Return the variable that the NVIDIA container runtime reads.

        With other ways of injection it says that there is nothing to do: images set it to `all`, and
        a container would see every GPU where that runtime is the default one.
        """
        # The kubelet names them in any order; the container numbers its GPUs by this one.
        ordered = sorted(devices, key=place_of)
        visible = ",".join(device.id for device in ordered) if self.injection == "env" else "void"
        return ContainerEdits(env={VISIBLE: visible})

    @property
    def links(self) -> Mapping[frozenset[str], float]:
        """How close the devices are, as of the last discovery."""
        return self._links

    def profiles(self) -> AsyncGenerator[Sequence[str], None]:
        """Yield the MIG profiles that have been seen, all of them, whenever there is one more."""
        return self._profiles.watch()

    async def measure(self, devices: Sequence[Device]) -> Measured:
        """Return how busy the GPUs are, and how often which XID came."""
        ids = [device.id for device in devices]
        found = await shared(self._places).measure(ids)
        for name in ids:
            if counts := self._health.xids_of(name):
                found.setdefault(name, {})["xid_errors_total"] = dict(counts)
        return found
