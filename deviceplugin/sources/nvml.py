"""NVIDIA GPUs and their MIG partitions, by way of NVML (nvidia-ml-py, the extra `nvidia`).

From the hardware up: `Session` is the library, blocking; `Lane` is the one thread it is called in,
with a deadline on each call, because a driver may hang; `Driver` looks from time to time, listens for
XIDs in between, and is shared by all sources of a loop; `NvidiaSource` makes devices of what it hears
and judges their health by its own rules.

What the driver does not support is neither good nor bad. A library or driver that is not there (yet,
or for a while: it is being replaced) is waited for.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import logging
import os
import queue
import re
import threading
import time
import weakref
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType, ModuleType
from typing import Any, Final, Literal, TypeVar, cast

from deviceplugin import filewatch
from deviceplugin.device import AttributeValue, ContainerEdits, Device, DeviceNode, Health, Version
from deviceplugin.health import Course, Finding, Rules, Verdict
from deviceplugin.naming import PCI_BUS_ID, PCIE_ROOT
from deviceplugin.source import DeviceSource, Measured
from deviceplugin.sources import sysfs

__all__ = ["APPLICATION_XIDS", "Gpu", "Look", "NvidiaSource", "Partition", "Trouble", "Xid", "resource_of"]

_LOG: Final = logging.getLogger(__name__)
_T = TypeVar("_T")

APPLICATION_XIDS: Final = (13, 31, 43, 45, 68, 109)
"""XIDs that programs cause, not the hardware (the list that NVIDIA's own plugin skips)."""
LIBRARY: Final = "libnvidia-ml.so.1"
LOOK_TIMEOUT: Final = 60.0
"""Seconds for a look; the first one may wake eight sleeping GPUs."""
EVENT_WAIT: Final = 1.0
"""Seconds that one wait for events takes at the most; others who want the library wait as long."""
CALL_GRACE: Final = 10.0
DEAF: Final = 3
"""Waits for events that may fail one after another; then no more are made until something changes."""
GAP: Final = 0.5
"""Seconds between two looks at the least, however many hints there are."""
CDI_DIRS: Final = ("/etc/cdi", "/var/run/cdi")
CDI_KIND: Final = "nvidia.com/gpu"
VISIBLE: Final = "NVIDIA_VISIBLE_DEVICES"
COMMON_NODES: Final = ("nvidiactl", "nvidia-uvm", "nvidia-uvm-tools", "nvidia-modeset")

Injection = Literal["env", "cdi", "nodes"]
Mig = Literal["none", "single", "mixed"]

# --- what is known --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Partition:
    """A MIG device. instance, compute: ids of its GPU instance and compute instance; memory in MiB.

    placement: first memory slice and how many, None if the driver does not tell.
    """

    uuid: str
    index: int
    profile: str
    instance: int
    compute: int
    memory: int
    placement: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU as it is until its next discovery. memory in MiB; partitions is None without MIG mode."""

    uuid: str
    index: int
    minor: int | None = None
    address: str = ""
    product: str = ""
    brand: str = ""
    architecture: str = ""
    capability: tuple[int, int] | None = None
    memory: int = 0
    serial: str = ""
    numa: int | None = None
    root: str = ""
    partitions: tuple[Partition, ...] | None = None


@dataclass(frozen=True, slots=True)
class Look:
    """What one look found. findings: by GPU; links: how close two GPUs are, by the pair of UUIDs."""

    gpus: tuple[Gpu, ...]
    findings: Mapping[str, Finding]
    driver: str = ""
    cuda: str = ""
    links: Mapping[frozenset[str], float] = field(default_factory=lambda: MappingProxyType({}))
    listening: bool = False
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Xid:
    """An error that the driver reported of a GPU (None: of which one it could not say) or a partition of it."""

    gpu: str | None
    code: int
    instance: int | None = None
    compute: int | None = None


class Trouble(Exception):  # noqa: N818  # news like a look or an XID
    """Raised when nothing can be learned of any GPU; verdict says what that means for those known so far."""

    def __init__(self, message: str, verdict: Verdict = Verdict.BAD) -> None:
        super().__init__(message)
        self.verdict = verdict


News = Look | Xid | Trouble


def resource_of(profile: str) -> str:
    """Return what users know partitions of a profile by, behind the domain: mig-1g.10gb, mig-1g.10gb.me."""
    return "mig-" + profile.replace("+", ".")


# --- the library ----------------------------------------------------------------------------------

_GONE: Final = {1: "NVML was shut down", 9: "the NVIDIA driver is not loaded", 18: "the NVIDIA driver was replaced"}
_BROKEN: Final = {15: "it has fallen off the bus", 16: "it needs a reset", 28: "it is gone"}
_TIMEOUT: Final = 10
_MISSING: Final = {3, 4, 13}
"""NOT_SUPPORTED, NO_PERMISSION, FUNCTION_NOT_FOUND: nothing is said, neither good nor bad."""
_RECOVERY_ACTION: Final = 230
"""The field value by which a driver asks for help; nvidia-ml-py has no name for it before 12.560."""
_ACTIONS: Final = {
    0: "",
    1: "it needs a reset",
    2: "the node needs a reboot",
    3: "its traffic with other GPUs must be drained",
    4: "it needs to be drained and reset",
    5: "",  # its IMEX domain does: other nodes, not this GPU
    6: "its bus needs a reset",
    7: "the machine needs a reboot",
}
_LEVELS: Final = {0: 60.0, 10: 50.0, 20: 40.0, 30: 30.0, 40: 20.0, 50: 10.0}
"""NVML's PCIe levels on the scale of link scores: same board, one switch, several, host bridge, CPU, across."""
_NVLINK: Final = 100.0
_SWITCH: Final = 2
_ANY: Final = 0xFFFFFFFF
_XID_EVENT: Final = 0x8
_MIG_EVENT: Final = 0x100
_THROTTLED: Final = {
    0x4: "sw_power_cap",
    0x8: "hw_slowdown",
    0x10: "sync_boost",
    0x20: "sw_thermal",
    0x40: "hw_thermal",
    0x80: "hw_power_brake",
}
_CLOCKS: Final = {0: "graphics", 1: "sm", 2: "memory", 3: "video"}
_library_lock: Final = threading.Lock()
_loaded: Final[list[Any]] = []
"""Libraries that are to be unloaded once nobody is in them."""
_inside: Final[set[Session]] = set()
"""Sessions that have the library initialized; one of them may be in a call at any time."""


class Session:
    """NVML as long as it works; blocking, for one thread.

    library: its path, empty for where programs look. sysfs_root, proc: where these are.
    """

    def __init__(self, library: str = "", *, sysfs_root: str = "/sys", proc: str = "/proc") -> None:
        self._library = library
        self._sysfs = sysfs_root
        self._gpus_of_proc = f"{proc}/driver/nvidia/gpus"
        self._nv: Any = None
        self._there: frozenset[str] = frozenset()
        self._known: dict[str, Gpu] = {}
        self._partitions: dict[str, Partition] = {}
        self._order: dict[int, str] = {}
        self._handles: dict[str, Any] = {}
        self._links: Mapping[frozenset[str], float] = MappingProxyType({})
        self._linked: frozenset[str] = frozenset()
        self._events: Any = None
        self._registered: dict[int, str] = {}
        self._watched: frozenset[str] = frozenset()
        self._pending: list[Xid] = []
        self._deaf = 0
        self._notes: tuple[str, ...] = ()

    # Opening and closing.

    def close(self) -> None:
        """Let go of the library."""
        nv, self._nv = self._nv, None
        self._known.clear()
        self._partitions.clear()
        self._order.clear()
        self._handles.clear()
        self._linked = self._watched = frozenset()
        events, self._events = self._events, None
        if nv is None:
            return
        with contextlib.suppress(nv.NVMLError):
            if events is not None:
                nv.nvmlEventSetFree(events)
        with contextlib.suppress(nv.NVMLError):
            nv.nvmlShutdown()
        with _library_lock:
            _inside.discard(self)

    def _open(self) -> Any:
        """Return NVML, initialized; again if GPUs came or went, which it only sees then."""
        there = self._addresses()
        if self._nv is not None and there != self._there:
            self.close()
        if self._nv is None:
            nv = _load(self._library)
            try:
                nv.nvmlInit()
            except nv.NVMLError as error:
                if error.value == 18:
                    _unload(nv)  # the new driver's library may lie there already
                if error.value in _GONE:
                    raise Trouble(_GONE[error.value]) from error
                raise Trouble(f"NVML cannot be used: {error}", Verdict.UNREADABLE) from error
            self._nv = nv
            self._there = there
            with _library_lock:
                _inside.add(self)
        return self._nv

    def _addresses(self) -> frozenset[str]:
        try:
            return frozenset(os.listdir(self._gpus_of_proc))
        except OSError:
            return frozenset()

    # Looking.

    def look(self) -> Look:
        """Return what there is.

        Raises:
            Trouble: nothing can be learned.

        """
        nv = self._open()
        try:
            return self._look(nv)
        except nv.NVMLError as error:
            self._trouble(error)
            raise Trouble(f"NVML fails: {error}", Verdict.UNREADABLE) from error

    def _look(self, nv: Any) -> Look:
        gpus: list[Gpu] = []
        findings: dict[str, Finding] = {}
        notes: list[str] = []
        handles: dict[str, Any] = {}
        for index in range(nv.nvmlDeviceGetCount()):
            try:
                handle = nv.nvmlDeviceGetHandleByIndex(index)
                uuid = _text(nv.nvmlDeviceGetUUID(handle))
                gpu = self._known.get(uuid)
                if gpu is None or gpu.index != index:
                    gpu = self._identify(nv, handle, uuid, index)
                finding = self._check(nv, handle)
            except nv.NVMLError as error:
                self._trouble(error)
                lost = self._known.get(self._order.get(index, ""))
                if lost is None:
                    notes.append(f"GPU {index} cannot be read: {error}")
                    continue
                gpu, finding, handle = lost, _finding(error), self._handles.get(lost.uuid)
            else:
                gpu = self._partitioned(nv, handle, gpu, handles)
            self._known[gpu.uuid] = gpu
            self._order[index] = gpu.uuid
            if handle is not None:
                handles[gpu.uuid] = handle
            gpus.append(gpu)
            findings[gpu.uuid] = finding
        self._handles = handles
        uuids = frozenset(gpu.uuid for gpu in gpus)
        if uuids != self._linked:
            self._links = self._read_links(nv, gpus)
            self._linked = uuids
        answering = frozenset(name for name, (verdict, _) in findings.items() if verdict is not Verdict.BAD)
        if answering != self._watched:  # waiting fails for all while one of them is lost
            self._deaf = 0
            self._listen(nv, [gpu for gpu in gpus if gpu.uuid in answering])
            self._watched = answering
        driver = self._optional(nv.nvmlSystemGetDriverVersion)
        cuda = self._optional(nv.nvmlSystemGetCudaDriverVersion)
        return Look(
            tuple(gpus),
            findings,
            _text(driver),
            f"{cuda // 1000}.{cuda % 1000 // 10}" if cuda else "",
            self._links,
            bool(self._registered),
            (*notes, *self._notes),
        )

    def _trouble(self, error: Any) -> None:
        """Raise Trouble if an error says that nothing will work any more."""
        if error.value in _GONE:
            nv = self._nv
            self.close()
            if error.value == 18:
                _unload(nv)
            raise Trouble(_GONE[error.value]) from error

    def _optional(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call what not every driver or GPU supports; None if this one does not, or does not know."""
        try:
            return function(*arguments)
        except self._nv.NVMLError as error:
            if error.value in _BROKEN or error.value in _GONE:
                raise
            return None

    def _identify(self, nv: Any, handle: Any, uuid: str, index: int) -> Gpu:
        optional = self._optional
        pci = optional(nv.nvmlDeviceGetPciInfo, handle)
        address = _address(_text(pci.busId)) if pci is not None else ""
        directory = os.path.realpath(f"{self._sysfs}/bus/pci/devices/{address}") if address else ""
        memory = optional(nv.nvmlDeviceGetMemoryInfo, handle)
        numa = sysfs.numa_node(directory) if directory else None
        root = re.search(r"pci[0-9a-f]{4,8}:[0-9a-f]{2}", directory)
        return Gpu(
            uuid,
            index,
            optional(nv.nvmlDeviceGetMinorNumber, handle),
            address,
            _text(optional(nv.nvmlDeviceGetName, handle)),
            _constant(nv, "NVML_BRAND_", optional(nv.nvmlDeviceGetBrand, handle)),
            _constant(nv, "NVML_DEVICE_ARCH_", optional(nv.nvmlDeviceGetArchitecture, handle)),
            optional(nv.nvmlDeviceGetCudaComputeCapability, handle),
            memory.total >> 20 if memory is not None else 0,
            _text(optional(nv.nvmlDeviceGetSerial, handle)),
            numa if numa is not None else self._near(nv, handle),
            root[0] if root else "",
        )

    def _near(self, nv: Any, handle: Any) -> int | None:
        """Return the NUMA node that the driver names, where sysfs names none."""
        mask = self._optional(nv.nvmlDeviceGetMemoryAffinity, handle, 1, nv.NVML_AFFINITY_SCOPE_NODE)
        bits = int(mask[0]) if mask is not None else 0
        return bits.bit_length() - 1 if bits and bits & (bits - 1) == 0 else None

    def _check(self, nv: Any, handle: Any) -> Finding:
        """Return whether a GPU answers, and what it says of its state."""
        for function, arguments in ((nv.nvmlDeviceGetMemoryInfo, ()), (nv.nvmlDeviceGetTemperature, (0,))):
            try:
                function(handle, *arguments)
            except nv.NVMLError as error:
                self._trouble(error)
                if error.value not in _MISSING:
                    return _finding(error)
        action = int(self._field(nv, handle, _RECOVERY_ACTION) or 0)
        if action not in _ACTIONS:
            return Verdict.UNREADABLE, f"the driver asks for recovery action {action}, which is not known"
        if _ACTIONS[action]:
            return Verdict.BAD, _ACTIONS[action]
        return Verdict.GOOD, ""

    def _field(self, nv: Any, handle: Any, *wanted: Any) -> float | None:
        """Return one of NVML's many field values; None where it is not supported."""
        values = self._optional(nv.nvmlDeviceGetFieldValues, handle, [wanted if len(wanted) > 1 else wanted[0]])
        if values is None or values[0].nvmlReturn != 0:
            return None
        value = values[0].value
        kinds = {0: "dVal", 1: "uiVal", 2: "ulVal", 3: "ullVal", 4: "sllVal", 5: "siVal", 6: "usVal"}
        name = kinds.get(values[0].valueType)
        return None if name is None else cast("float", getattr(value, name, None))

    # Partitions.

    def _partitioned(self, nv: Any, handle: Any, gpu: Gpu, handles: dict[str, Any]) -> Gpu:
        """Return the GPU with the partitions that it has now."""
        mode = self._optional(nv.nvmlDeviceGetMigMode, handle)
        if mode is None or mode[0] != 1:
            return gpu if gpu.partitions is None else _with_partitions(gpu, None)
        found = []
        for index in range(self._optional(nv.nvmlDeviceGetMaxMigDeviceCount, handle) or 0):
            mig = self._optional(nv.nvmlDeviceGetMigDeviceHandleByIndex, handle, index)
            if mig is None:
                continue
            uuid = _text(self._optional(nv.nvmlDeviceGetUUID, mig))
            if not uuid:
                continue
            handles[uuid] = mig
            known = self._partitions.get(uuid)
            if known is None or known.index != index:
                known = self._partitions[uuid] = self._partition(nv, handle, mig, uuid, index, gpu)
            found.append(known)
        partitions = tuple(found)
        return gpu if gpu.partitions == partitions else _with_partitions(gpu, partitions)

    def _partition(self, nv: Any, parent: Any, mig: Any, uuid: str, index: int, gpu: Gpu) -> Partition:
        optional = self._optional
        instance = optional(nv.nvmlDeviceGetGpuInstanceId, mig)
        compute = optional(nv.nvmlDeviceGetComputeInstanceId, mig)
        attributes = optional(nv.nvmlDeviceGetAttributes_v2, mig)
        name = _text(optional(nv.nvmlDeviceGetName, mig))
        memory = int(attributes.memorySizeMB) if attributes is not None else 0
        named = re.search(r" MIG (\S+)$", name)
        if named:
            profile = named[1]
        elif attributes is not None:
            slices = (int(attributes.computeInstanceSliceCount), int(attributes.gpuInstanceSliceCount))
            profile = profile_of(*slices, memory, gpu.memory)
        else:
            profile = "unknown"
        placement = None
        if instance is not None and (held := optional(nv.nvmlDeviceGetGpuInstanceById, parent, instance)) is not None:
            info = optional(nv.nvmlGpuInstanceGetInfo, held)
            if info is not None:
                placement = (int(info.placement.start), int(info.placement.size))
        return Partition(
            uuid,
            index,
            profile,
            instance if instance is not None else -1,
            compute if compute is not None else -1,
            memory,
            placement,
        )

    # Links.

    def _read_links(self, nv: Any, gpus: Sequence[Gpu]) -> Mapping[frozenset[str], float]:
        """Return how close the GPUs are; what one of them does not tell is left out, none of it fails a look."""
        direct: dict[frozenset[str], int] = {}
        switched: dict[str, int] = {}
        by_address = {gpu.address: gpu.uuid for gpu in gpus if gpu.address}
        for gpu in gpus:
            if (handle := self._handles.get(gpu.uuid)) is not None:
                with contextlib.suppress(nv.NVMLError):
                    for other in self._ends(nv, handle):
                        if other is None:
                            switched[gpu.uuid] = switched.get(gpu.uuid, 0) + 1
                        elif (peer := by_address.get(other)) is not None and peer != gpu.uuid:
                            pair = frozenset((gpu.uuid, peer))
                            direct[pair] = direct.get(pair, 0) + 1
        scores: dict[frozenset[str], float] = {}
        for at, one in enumerate(gpus):
            for other_gpu in gpus[at + 1 :]:
                pair = frozenset((one.uuid, other_gpu.uuid))
                # Each end tells of a direct link, so it is counted twice; through switches all reach all.
                count = -(-direct.get(pair, 0) // 2)
                count += min(switched.get(one.uuid, 0), switched.get(other_gpu.uuid, 0))
                ends = self._handles.get(one.uuid), self._handles.get(other_gpu.uuid)
                level = None
                if None not in ends:
                    with contextlib.suppress(nv.NVMLError):
                        level = self._optional(nv.nvmlDeviceGetTopologyCommonAncestor, *ends)
                score = _NVLINK * count + _LEVELS.get(-1 if level is None else level, 0.0)
                if score:
                    scores[pair] = score
        return MappingProxyType(scores)

    def _ends(self, nv: Any, handle: Any) -> Iterator[str | None]:
        """Yield of each NVLink that is up the PCI address of its other end, None for a switch."""
        for link in range(nv.NVML_NVLINK_MAX_LINKS):
            try:
                if not nv.nvmlDeviceGetNvLinkState(handle, link):
                    continue
            except nv.NVMLError as error:
                if error.value in _BROKEN or error.value in _GONE:
                    raise
                if error.value == 2:  # no such link, nor any after it
                    return
                continue
            if self._optional(nv.nvmlDeviceGetNvLinkRemoteDeviceType, handle, link) == _SWITCH:
                yield None
            elif (pci := self._optional(nv.nvmlDeviceGetNvLinkRemotePciInfo, handle, link)) is not None:
                yield _address(_text(pci.busId))

    # Events.

    def _listen(self, nv: Any, gpus: Sequence[Gpu]) -> None:
        """Have the driver tell of XIDs and of partitions that come and go, where it can."""
        if self._events is not None:
            self._pending += self._heard(nv, 0)[0]
            with contextlib.suppress(nv.NVMLError):
                nv.nvmlEventSetFree(self._events)
        self._registered, notes = {}, []
        self._events = self._optional(nv.nvmlEventSetCreate)
        if self._events is None:
            self._notes = ("the driver has no events: XIDs will not be heard of",)
            return
        for gpu in gpus:
            handle = self._handles.get(gpu.uuid)
            if handle is None:
                continue
            supported = self._quiet(nv, nv.nvmlDeviceGetSupportedEventTypes, handle)
            wanted = (_XID_EVENT | _MIG_EVENT) & (supported or 0)
            if wanted & _XID_EVENT and self._quiet(nv, _registers, nv, handle, wanted, self._events):
                self._registered[_pointer(handle)] = gpu.uuid
            else:
                notes.append(f"GPU {gpu.index} tells of no XIDs; its health follows from looking at it alone")
        self._notes = tuple(notes)

    def _quiet(self, nv: Any, function: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return function(*arguments)
        except nv.NVMLError:
            return None

    def wait(self, seconds: float) -> tuple[list[Xid], bool]:
        """Wait for events so long; return the XIDs that came, and whether a look is due now.

        Raises:
            Trouble: nothing will work any more.

        """
        nv = self._nv
        if nv is None or self._events is None:
            return [], True
        xids, self._pending = self._pending, []
        heard, due, error = self._heard(nv, 0 if xids else max(1, int(seconds * 1000)))
        if error is not None:
            self._trouble(error)
            self._deaf += 1
            if self._deaf == DEAF:
                self._registered = {}
                self._notes = (f"the driver's events fail, XIDs are not heard of: {error}",)
        return xids + heard, due or error is not None

    def _heard(self, nv: Any, patience: int) -> tuple[list[Xid], bool, Any]:
        """Return the events that came within so many milliseconds, whether a look is due, and what went wrong."""
        xids: list[Xid] = []
        due = False
        for _ in range(1000):  # a storm is taken in portions
            try:
                data = nv.nvmlEventSetWait_v2(self._events, patience)
            except nv.NVMLError as error:
                return xids, due, None if error.value == _TIMEOUT else error
            patience = 0
            if data.eventType == _XID_EVENT:
                xids.append(
                    Xid(
                        self._registered.get(_pointer(data.device)),
                        int(data.eventData),
                        None if data.gpuInstanceId == _ANY else int(data.gpuInstanceId),
                        None if data.computeInstanceId == _ANY else int(data.computeInstanceId),
                    )
                )
            else:
                due = True
        return xids, due, None

    # Measuring.

    def measure(self, ids: Sequence[str]) -> dict[str, dict[str, Any]]:
        """Return how busy GPUs and partitions are, by UUID; what one cannot tell is left out."""
        nv = self._nv
        if nv is None:
            return {}
        found: dict[str, dict[str, Any]] = {}
        for name in ids:
            handle = self._handles.get(name)
            if handle is None:
                continue
            try:
                whole = name in self._known
                found[name] = self._measure_gpu(nv, handle) if whole else self._measure_memory(nv, handle)
            except nv.NVMLError as error:
                _LOG.debug("%s cannot be measured: %s", name, error)
        return found

    def _measure_memory(self, nv: Any, handle: Any) -> dict[str, Any]:
        memory = self._optional(nv.nvmlDeviceGetMemoryInfo, handle)
        if memory is None:
            return {}
        return {"memory_used_bytes": memory.used, "memory_total_bytes": memory.total}

    def _measure_gpu(self, nv: Any, handle: Any) -> dict[str, Any]:
        optional = self._optional

        def scaled(factor: float, function: Callable[..., Any], *arguments: Any) -> float | None:
            value = optional(function, handle, *arguments)
            value = value[0] if isinstance(value, list) else value
            return None if value is None else value * factor

        values = self._measure_memory(nv, handle)
        if (busy := optional(nv.nvmlDeviceGetUtilizationRates, handle)) is not None:
            values |= {"utilization_ratio": busy.gpu / 100, "memory_utilization_ratio": busy.memory / 100}
        values |= {
            "encoder_utilization_ratio": scaled(0.01, nv.nvmlDeviceGetEncoderUtilization),
            "decoder_utilization_ratio": scaled(0.01, nv.nvmlDeviceGetDecoderUtilization),
            "temperature_celsius": {
                "gpu": scaled(1, nv.nvmlDeviceGetTemperature, 0),
                "memory": self._field(nv, handle, nv.NVML_FI_DEV_MEMORY_TEMP) or None,
            },
            "power_watts": scaled(0.001, nv.nvmlDeviceGetPowerUsage),
            "power_limit_watts": scaled(0.001, nv.nvmlDeviceGetEnforcedPowerLimit),
            "energy_joules_total": scaled(0.001, nv.nvmlDeviceGetTotalEnergyConsumption),
            "clock_hertz": {name: scaled(1e6, nv.nvmlDeviceGetClockInfo, kind) for kind, name in _CLOCKS.items()},
            "ecc_errors_total": {
                "corrected": scaled(1, nv.nvmlDeviceGetTotalEccErrors, 0, 1),
                "uncorrected": scaled(1, nv.nvmlDeviceGetTotalEccErrors, 1, 1),
            },
            "pcie_bytes_per_second": {
                "transmit": scaled(1000, nv.nvmlDeviceGetPcieThroughput, 0),
                "receive": scaled(1000, nv.nvmlDeviceGetPcieThroughput, 1),
            },
            "pcie_replays_total": scaled(1, nv.nvmlDeviceGetPcieReplayCounter),
            "nvlink_bytes_total": {
                "transmit": self._kib(nv, handle, nv.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX),
                "receive": self._kib(nv, handle, nv.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX),
            },
            "fan_ratio": scaled(0.01, nv.nvmlDeviceGetFanSpeed),
        }
        if (reasons := optional(nv.nvmlDeviceGetCurrentClocksThrottleReasons, handle)) is not None:
            values["throttled"] = {name: int(bool(reasons & bit)) for bit, name in _THROTTLED.items()}
        return values

    def _kib(self, nv: Any, handle: Any, wanted: int) -> float | None:
        value = self._field(nv, handle, wanted, _ANY)  # of all links together
        return None if value is None else value * 1024


def profile_of(compute: int, slices: int, memory: int, whole: int) -> str:
    """Return a MIG profile's name from its slices and its memory and the GPU's, both in MiB.

    NVIDIA names the memory by eighths of the GPU's, rounded up, in whole GiB. A compute instance that is
    a part of its GPU instance carries its own slices in front.
    """
    gib = -(-whole // 1024)
    eighths = -(-memory * 8 // whole) if whole else 0
    size = round(eighths * gib / 8) if whole else round(memory / 1024)
    return f"{slices}g.{size}gb" if compute == slices else f"{compute}c.{slices}g.{size}gb"


def _load(library: str) -> ModuleType:
    """Return nvidia-ml-py with the library loaded.

    Raises:
        Trouble: one of them is not there.

    """
    try:
        import pynvml  # type: ignore[import-untyped]
    except ImportError as error:
        raise Trouble("nvidia-ml-py is not installed; pip install 'deviceplugin[nvidia]'") from error
    with _library_lock:
        if pynvml.nvmlLib is None:
            try:
                # Not left to pynvml: it would neither take a path nor load another one later.
                pynvml.nvmlLib = ctypes.CDLL(library or LIBRARY)
            except OSError as error:
                raise Trouble(f"NVML is not there: {error}") from error
    return cast("ModuleType", pynvml)


def _unload(nv: Any) -> None:
    """Have the library loaded anew: another file may have taken its place."""
    import _ctypes

    with _library_lock:
        loaded, nv.nvmlLib = nv.nvmlLib, None
        nv._nvmlGetFunctionPointer_cache.clear()  # noqa: SLF001  # of functions of the old library
        if loaded is not None:
            _loaded.append(loaded)
        if not _inside:
            while _loaded:
                _ctypes.dlclose(_loaded.pop()._handle)  # noqa: SLF001


def _registers(nv: Any, handle: Any, wanted: int, events: Any) -> bool:
    nv.nvmlDeviceRegisterEvents(handle, wanted, events)
    return True


def _finding(error: Any) -> Finding:
    if error.value in _BROKEN:
        return Verdict.BAD, _BROKEN[error.value]
    return Verdict.UNREADABLE, f"it cannot be read: {error}"


def _pointer(handle: Any) -> int:
    return ctypes.cast(handle, ctypes.c_void_p).value or 0


def _text(value: Any) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value or ""


def _address(bus_id: str) -> str:
    """Return a PCI address as sysfs has it; NVML writes the domain with eight digits."""
    domain, _, rest = bus_id.lower().partition(":")
    return f"{int(domain, 16):04x}:{rest}" if rest else bus_id.lower()


def _constant(nv: Any, prefix: str, value: int | None) -> str:
    """Return the name of one of NVML's constants in words: Ampere, Tesla."""
    if value is None:
        return ""
    for name, number in vars(nv).items():
        if name.startswith(prefix) and number == value and not name.endswith(("_UNKNOWN", "_COUNT")):
            return str(name.removeprefix(prefix)).replace("_", " ").title()
    return ""


def _with_partitions(gpu: Gpu, partitions: tuple[Partition, ...] | None) -> Gpu:
    return replace(gpu, partitions=partitions)


# --- the thread -----------------------------------------------------------------------------------


class Lane:
    """One thread in which blocking calls are made, one after another, each with a deadline.

    A call that hangs keeps the thread, and no other call is begun meanwhile: a second thread would
    hang beside it. The lane is free again when it returns.
    """

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._overdue: list[threading.Event] = []
        threading.Thread(target=self._work, name=name, daemon=True).start()

    async def call(self, function: Callable[..., _T], *arguments: Any, timeout: float) -> _T:
        """Call a function in the lane and return what it returns.

        Raises:
            Trouble: it, or one before it, did not answer in time.

        """
        self._overdue = [job for job in self._overdue if not job.is_set()]
        if self._overdue:
            raise Trouble("NVML still hangs", Verdict.UNREADABLE)
        loop = asyncio.get_running_loop()
        future: asyncio.Future[_T] = loop.create_future()
        over = threading.Event()

        def settle(outcome: Any, error: BaseException | None) -> None:
            if future.done():
                return
            if error is None:
                future.set_result(outcome)
            else:
                future.set_exception(error)

        def run() -> None:
            outcome, error = None, None
            try:
                if not future.done():
                    outcome = function(*arguments)
            except Exception as raised:  # the caller's
                error = raised
            finally:
                over.set()
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(settle, outcome, error)

        self._jobs.put(run)
        try:
            async with asyncio.timeout(timeout):
                return await future
        except TimeoutError:
            self._overdue.append(over)
            raise Trouble(f"NVML did not answer within {timeout:g} s", Verdict.UNREADABLE) from None

    def close(self, last: Callable[[], None]) -> None:
        """Have the thread end after a last call."""
        self._jobs.put(last)
        self._jobs.put(None)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()


# --- looking and listening ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Places:
    """Where everything is: the library (empty: where programs look), sysfs, proc, dev, CDI specs."""

    library: str = ""
    sysfs: str = "/sys"
    proc: str = "/proc"
    dev: str = "/dev"
    cdi: tuple[str, ...] = CDI_DIRS


class Feed:
    """What one source has not taken in yet."""

    def __init__(self, period: float) -> None:
        self.period = period
        self._news: deque[News] = deque(maxlen=10_000)
        self._came = asyncio.Event()

    def tell(self, news: News) -> None:
        """Add to it."""
        self._news.append(news)
        self._came.set()

    async def take(self) -> list[News]:
        """Wait for news and return them all."""
        await self._came.wait()
        self._came.clear()
        news = list(self._news)
        self._news.clear()
        return news


class Driver:
    """Looks at all GPUs from time to time and listens in between, for as long as somebody wants to know."""

    def __init__(self, places: Places) -> None:
        self.places = places
        self.session = Session(places.library, sysfs_root=places.sysfs, proc=places.proc)
        self.lane: Lane | None = None
        self._feeds: set[Feed] = set()
        self._task: asyncio.Task[None] | None = None
        self._last: News | None = None

    @contextlib.contextmanager
    def feed(self, period: float) -> Iterator[Feed]:
        """Hear of everything while in the context; looks are made at least each `period` seconds."""
        feed = Feed(period)
        if self._last is not None:
            feed.tell(self._last)
        self._feeds.add(feed)
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name="nvml")
        try:
            yield feed
        finally:
            self._feeds.discard(feed)
            if not self._feeds:
                self._task.cancel()
                self._task = self._last = None
                if self.lane is not None:
                    session, self.session = (
                        self.session,
                        Session(self.places.library, sysfs_root=self.places.sysfs, proc=self.places.proc),
                    )
                    self.lane.close(session.close)
                    self.lane = None

    async def measure(self, ids: Sequence[str]) -> dict[str, dict[str, Any]]:
        """Return how busy these are.

        Raises:
            Trouble: NVML does not answer.

        """
        if self.lane is None:
            return {}
        return await self.lane.call(self.session.measure, ids, timeout=EVENT_WAIT + CALL_GRACE)

    def _tell(self, news: News) -> None:
        if not isinstance(news, Xid):
            self._last = news
        for feed in self._feeds:
            feed.tell(news)

    async def _run(self) -> None:
        lane = self.lane = Lane("nvml")
        session = self.session
        pause = GAP
        with filewatch.shared().watch([self.places.dev, *self.places.cdi]) as watch:
            while True:
                period = min((feed.period for feed in self._feeds), default=10.0)
                try:
                    look = await lane.call(session.look, timeout=LOOK_TIMEOUT)
                except Trouble as trouble:
                    self._tell(trouble)
                    pause = min(2 * pause, max(period, GAP))
                    await watch.wait(pause)
                    continue
                except Exception as error:
                    _LOG.exception("looking at the GPUs failed")
                    self._tell(Trouble(f"{type(error).__name__}: {error}", Verdict.UNREADABLE))
                    await watch.wait(period)
                    continue
                pause = GAP
                self._tell(look)
                await self._listen(lane, session, watch, look, period)

    async def _listen(self, lane: Lane, session: Session, watch: filewatch.Watch, look: Look, period: float) -> None:
        """Pass on what the driver tells until the next look is due."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        hinted = False
        while not (hinted and loop.time() - began >= GAP) and (left := began + period - loop.time()) > 0:
            if not look.listening:
                hinted |= await watch.wait(min(left, GAP) if hinted else left)
                continue
            try:
                xids, due = await lane.call(session.wait, min(left, EVENT_WAIT), timeout=EVENT_WAIT + CALL_GRACE)
            except Trouble as trouble:
                self._tell(trouble)
                return
            for xid in xids:
                self._tell(xid)
            if due:
                hinted = True
                await watch.wait(max(0.0, began + GAP - loop.time()))
            hinted |= await watch.wait(0)


_drivers: Final[weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[Places, Driver]]] = (
    weakref.WeakKeyDictionary()
)


def shared(places: Places) -> Driver:
    """Return the running loop's one driver for these places."""
    drivers = _drivers.setdefault(asyncio.get_running_loop(), {})
    return drivers.setdefault(places, Driver(places))


# --- the source -----------------------------------------------------------------------------------


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
        self.ignore_xids = frozenset(ignore_xids)
        self.rules = rules
        self.notes: tuple[str, ...] = ()
        self._period = period
        self._places = places or Places(library=library or "")
        self._clock = clock
        self._look = Look((), {})
        self._courses: dict[str, Course] = {}
        self._counts: dict[str, dict[str, int]] = {}
        self._times: dict[tuple[str | None, int], int] = {}
        self._links: Mapping[frozenset[str], float] = MappingProxyType({})
        self._made: dict[str, tuple[tuple[object, ...], Device]] = {}
        self._specs = _CdiSpecs(self._places.cdi)
        self._seen_profiles: list[str] = []
        self._new_profile = asyncio.Event()
        self._trouble = ""

    def __repr__(self) -> str:
        return f"NvidiaSource(mig={self.mig!r}{f', profile={self.profile!r}' if self.profile else ''})"

    async def watch(self) -> AsyncIterator[Sequence[Device]]:
        """Yield the devices as soon as NVML was looked at, and whenever they or their health change."""
        listed: list[Device] | None = None
        with shared(self._places).feed(self._period) as feed:
            while True:
                for news in await feed.take():
                    self.take(news)
                devices = await asyncio.to_thread(self.devices)
                if devices != listed:
                    listed = devices
                    yield devices

    def take(self, news: News) -> None:
        """Take in what the driver has to tell, and judge the devices' health anew."""
        now = self._clock()
        if isinstance(news, Xid):
            self._take_xid(news, now)
        elif isinstance(news, Trouble):
            if str(news) != self._trouble:
                self._trouble = str(news)
                _LOG.warning("%s; waiting for it", news)
            for name, course in self._courses.items():
                self._follow(name, course.looked(news.verdict, str(news), now, self.rules))
        else:
            if self._trouble:
                self._trouble = ""
                _LOG.info("NVML answers again")
            self._look = news
            findings: dict[str, Finding] = {}
            for gpu in news.gpus:
                finding = news.findings[gpu.uuid]
                findings[gpu.uuid] = finding
                for partition in gpu.partitions or ():
                    findings[partition.uuid] = finding
                    if partition.profile not in self._seen_profiles:
                        self._seen_profiles.append(partition.profile)
                        self._new_profile.set()
            courses, self._courses = self._courses, {}
            for name, (verdict, message) in findings.items():
                before = courses.get(name, Course())
                self._courses[name] = before
                self._follow(name, before.looked(verdict, message, now, self.rules))

    def _take_xid(self, xid: Xid, now: float) -> None:
        ignored = xid.code in self.ignore_xids
        times = self._times[xid.gpu, xid.code] = self._times.get((xid.gpu, xid.code), 0) + 1
        if times & (times - 1) == 0:  # a program in a loop must not fill the log
            level = logging.INFO if ignored else logging.WARNING
            _LOG.log(level, "XID %d of GPU %s, %d so far", xid.code, xid.gpu or "unknown", times)
        for gpu in self._look.gpus:
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

    def _follow(self, name: str, course: Course) -> None:
        before = self._courses[name]
        self._courses[name] = course
        if before.health is not course.health and (before.known or course.health is Health.UNHEALTHY):
            level = logging.INFO if course.health is Health.HEALTHY else logging.WARNING
            _LOG.log(level, "%s is %s%s", name, course.health.value, f": {course.message}" if course.message else "")

    def devices(self) -> list[Device]:
        """Return the devices as of the last news; reads CDI specs and what the driver keeps in proc."""
        look, notes = self._look, list(self._look.notes)
        if self._trouble:
            notes.append(self._trouble)
        if self.injection == "cdi":
            self._specs.read()
        made: dict[str, tuple[tuple[object, ...], Device]] = {}
        partitions: dict[str, str] = {}
        for gpu in look.gpus:
            if self.profile is None and (self.mig == "none" or gpu.partitions is None):
                facts: tuple[object, ...] = (gpu.uuid, gpu, look.driver, look.cuda, self._cdi_name(gpu, None))
                made[gpu.uuid] = self._remembered(facts, gpu, None)
                if gpu.partitions is not None:
                    notes.append(f"GPU {gpu.index} is in MIG mode and given out whole; see mig: single and mixed")
            elif self.profile is not None or self.mig == "single":
                for partition in gpu.partitions or ():
                    if self.profile in (None, partition.profile):
                        facts = (partition, gpu, look.driver, look.cuda, self._cdi_name(gpu, partition))
                        made[partition.uuid] = self._remembered(facts, gpu, partition)
                        partitions[partition.uuid] = gpu.uuid
        self._made = made
        self._links = _links(look.links, made, partitions)
        unequal = self._unequal(look) if self.mig == "single" and self.profile is None else ""
        if unequal:
            notes.append(unequal)
        self.notes = tuple(notes)
        return [self._judged(device, unequal) for _, device in made.values()]

    def _judged(self, device: Device, unequal: str) -> Device:
        course = self._courses[device.id]
        if unequal:
            return device.with_health(Health.UNHEALTHY, unequal)
        if self.injection == "cdi" and not device.edits.cdi and course.health is not Health.UNHEALTHY:
            where = " and ".join(self._places.cdi)
            missing = f"no CDI spec in {where} names it; `nvidia-ctk cdi generate` makes one"
            return device.with_health(Health.UNHEALTHY, missing)
        return device.with_health(course.health, course.message)

    def _unequal(self, look: Look) -> str:
        """Return what is wrong if mig: single does not fit what is there."""
        profiles = sorted({part.profile for gpu in look.gpus for part in gpu.partitions or ()})
        if len(profiles) > 1:
            return f"mig: single wants partitions of one profile, there are {' and '.join(profiles)}; see mig: mixed"
        if any(gpu.partitions is None for gpu in look.gpus) and any(gpu.partitions for gpu in look.gpus):
            return "mig: single wants all GPUs in MIG mode, some are not; see mig: mixed"
        return ""

    def _remembered(
        self, facts: tuple[object, ...], gpu: Gpu, partition: Partition | None
    ) -> tuple[tuple[object, ...], Device]:
        known = self._made.get(partition.uuid if partition is not None else gpu.uuid)
        if known is not None and known[0] == facts:
            return known
        return facts, self._make(gpu, partition)

    def _make(self, gpu: Gpu, partition: Partition | None) -> Device:
        attributes: dict[str, AttributeValue | None] = {
            "type": "gpu" if partition is None else "mig",
            "uuid": gpu.uuid if partition is None else partition.uuid,
            "index": gpu.index,
            "minor": gpu.minor,
            PCI_BUS_ID: gpu.address,
            PCIE_ROOT: gpu.root,
            "numaNode": gpu.numa,
            "productName": gpu.product,
            "brand": gpu.brand,
            "serial": gpu.serial,
            "architecture": gpu.architecture,
            "cudaComputeCapability": _version(*gpu.capability) if gpu.capability else None,
            "driverVersion": _version(*re.findall(r"[0-9]+", self._look.driver)),
            "cudaDriverVersion": _version(*re.findall(r"[0-9]+", self._look.cuda)),
        }
        memory = gpu.memory
        if partition is not None:
            memory = partition.memory
            start, size = partition.placement or (None, None)
            attributes |= {
                "index": partition.index,
                "profile": partition.profile,
                "parentUUID": gpu.uuid,
                "parentIndex": gpu.index,
                "parentMinor": gpu.minor,
                "minor": None,
                "serial": None,
                "gpuInstance": partition.instance,
                "computeInstance": partition.compute,
                "placementStart": start,
                "placementSize": size,
            }
        own, common = self._nodes(gpu, partition) if self.injection == "nodes" else ([], [])
        name = self._cdi_name(gpu, partition) if self.injection == "cdi" else None
        return Device(
            str(attributes["uuid"]),
            nodes=own,
            numa=gpu.numa,
            attributes={key: value for key, value in attributes.items() if value not in (None, "")},
            capacity={"memory": f"{memory}Mi"} if memory else {},
            edits=ContainerEdits(nodes=common, cdi=[f"{CDI_KIND}={name}"] if name else ()),
            identity=f"uuid:{attributes['uuid']}",
        )

    def _nodes(self, gpu: Gpu, partition: Partition | None) -> tuple[list[DeviceNode], list[DeviceNode]]:
        """Return the device nodes that are a device's own, and those that it shares with others."""
        dev = self._places.dev
        whole = [] if gpu.minor is None else [DeviceNode(f"{dev}/nvidia{gpu.minor}", f"/dev/nvidia{gpu.minor}")]
        common = [
            DeviceNode(f"{dev}/{name}", f"/dev/{name}") for name in COMMON_NODES if os.path.exists(f"{dev}/{name}")
        ]
        if partition is None:
            return whole, common
        base = f"{self._places.proc}/driver/nvidia/capabilities/gpu{gpu.minor}/mig/gi{partition.instance}"
        caps = [_capability(f"{base}/access"), _capability(f"{base}/ci{partition.compute}/access")]
        nodes = [
            DeviceNode(f"{dev}/nvidia-caps/nvidia-cap{cap}", f"/dev/nvidia-caps/nvidia-cap{cap}")
            for cap in caps
            if cap is not None
        ]
        # Compute instances of one GPU instance share the first; the last is the partition's own.
        return nodes[-1:], [*whole, *common, *nodes[:-1]]

    def _cdi_name(self, gpu: Gpu, partition: Partition | None) -> str | None:
        if self.injection != "cdi":
            return None
        if partition is None:
            names = (gpu.uuid, str(gpu.index), f"gpu{gpu.index}")
        else:
            place = f"{gpu.index}:{partition.index}"
            names = (partition.uuid, place, f"mig{place}")
        return next((name for name in names if name in self._specs.names), None)

    def edits(self, devices: Sequence[Device]) -> ContainerEdits:
        """Return the variable that the NVIDIA container runtime reads.

        With other ways of injection it says that there is nothing to do: images set it to `all`, and
        a container would see every GPU where that runtime is the default one.
        """
        # The kubelet names them in any order; the container numbers its GPUs by this one.
        ordered = sorted(devices, key=_place)
        visible = ",".join(device.id for device in ordered) if self.injection == "env" else "void"
        return ContainerEdits(env={VISIBLE: visible})

    @property
    def links(self) -> Mapping[frozenset[str], float]:
        """How close the devices are, as of the last discovery."""
        return self._links

    async def profiles(self) -> AsyncGenerator[Sequence[str], None]:
        """Yield the MIG profiles that have been seen, all of them, whenever there is one more."""
        while True:
            self._new_profile.clear()
            if self._seen_profiles:
                yield tuple(self._seen_profiles)
            await self._new_profile.wait()

    async def measure(self, devices: Sequence[Device]) -> Measured:
        """Return how busy the GPUs are, and how often which XID came."""
        ids = [device.id for device in devices]
        found = await shared(self._places).measure(ids)
        for name in ids:
            if counts := self._counts.get(name):
                found.setdefault(name, {})["xid_errors_total"] = dict(counts)
        return found


def _place(device: Device) -> tuple[int, int]:
    """Return where a GPU, or a partition of it, stands among the others."""
    index = int(device.attributes.get("index", 0))
    return (int(device.attributes["parentIndex"]), index) if "parentIndex" in device.attributes else (index, 0)


def _links(
    between: Mapping[frozenset[str], float], made: Mapping[str, object], parents: Mapping[str, str]
) -> Mapping[frozenset[str], float]:
    """Return the scores of the devices that are listed; partitions of one GPU are on one board."""
    if not parents:
        return between if len(made) * (len(made) - 1) // 2 == len(between) else _restricted(between, made)
    scores: dict[frozenset[str], float] = {}
    names = list(made)
    for at, one in enumerate(names):
        for other in names[at + 1 :]:
            ends = frozenset((parents.get(one, one), parents.get(other, other)))
            # NVLink does not reach from partition to partition, what is left is the PCIe level.
            score = _LEVELS[0] if len(ends) == 1 else between.get(ends, 0.0) % _NVLINK
            if score:
                scores[frozenset((one, other))] = score
    return MappingProxyType(scores)


def _restricted(between: Mapping[frozenset[str], float], made: Mapping[str, object]) -> Mapping[frozenset[str], float]:
    return MappingProxyType({pair: score for pair, score in between.items() if pair <= made.keys()})


def _version(*numbers: int | str) -> Version | None:
    """Return up to three numbers as a semantic version: 535.104.05 is 535.104.5, 12.2 is 12.2.0."""
    parts = [str(int(number)) for number in numbers[:3]]
    return Version(".".join((*parts, "0", "0")[:3])) if parts else None


def _capability(path: str) -> int | None:
    """Return the minor number of the node that gives a MIG capability."""
    found = re.search(r"DeviceFileMinor:\s*([0-9]+)", _whole(path))
    return int(found[1]) if found else None


def _whole(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as stream:
            return stream.read()
    except OSError:
        return ""


class _CdiSpecs:
    """The names of nvidia.com/gpu that CDI specs know; read again when a file changes."""

    def __init__(self, directories: Sequence[str]) -> None:
        self.names: frozenset[str] = frozenset()
        self._directories = directories
        self._seen: dict[str, tuple[tuple[int, ...], frozenset[str]]] = {}

    def read(self) -> None:
        """Look at the files; blocks."""
        seen: dict[str, tuple[tuple[int, ...], frozenset[str]]] = {}
        for directory in self._directories:
            try:
                files = [f"{directory}/{name}" for name in sorted(os.listdir(directory))]
            except OSError:
                continue
            for file in files:
                if file.endswith((".json", ".yaml", ".yml")):
                    with contextlib.suppress(OSError):
                        status = os.stat(file)
                        state = (status.st_ino, status.st_mtime_ns, status.st_size)
                        known = self._seen.get(file)
                        seen[file] = known if known is not None and known[0] == state else (state, _spec_names(file))
        self._seen = seen
        self.names = frozenset(name for _, names in seen.values() for name in names)


def _spec_names(file: str) -> frozenset[str]:
    import yaml

    text = _whole(file)
    if CDI_KIND not in text:
        return frozenset()
    try:
        spec = json.loads(text) if file.endswith(".json") else yaml.safe_load(text)
        if spec.get("kind") != CDI_KIND:
            return frozenset()
        return frozenset(str(device["name"]) for device in spec.get("devices", ()))
    except (ValueError, yaml.YAMLError, AttributeError, KeyError, TypeError) as error:
        _LOG.warning("%s is no CDI spec: %s", file, error)
        return frozenset()
