"""Makes NVML's blocking calls in one thread: scans of all GPUs, and waits for the driver's events between scans."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Mapping, Sequence
from typing import Any, Final

from deviceplugin import sysfs
from deviceplugin.health import ProbeResult, Verdict
from deviceplugin.naming import PCI_BUS_ID, PCIE_ROOT
from deviceplugin.sources import bus
from deviceplugin.sources.nvidia import nvml, readings
from deviceplugin.sources.nvidia.nvml import Gpu, NvmlError, NvmlScan, Partition, Places, Xid, optional, text

_LOG: Final = logging.getLogger(__name__)

FAILED_WAITS: Final = 3
"""Number of failed waits for events after which the session stops waiting for events until the GPUs change."""
_TIMEOUT: Final = 10
_REPLACED: Final = 18
_XID_EVENT: Final = 0x8
_MIG_EVENT: Final = 0x100
_MISSING: Final = {3, 4, 13}
"""The codes of NVML's errors NOT_SUPPORTED, NO_PERMISSION and FUNCTION_NOT_FOUND, which do not make a GPU unhealthy."""
_RECOVERY_ACTION: Final = 230
"""The number of NVML's field that contains the recovery action recommended by the driver. nvidia-ml-py has a name for
this field only since version 12.560."""
_ACTIONS: Final = {
    0: "",
    1: "it needs a reset",
    2: "the node needs a reboot",
    3: "its traffic with other GPUs must be drained",
    4: "it needs to be drained and reset",
    5: "",  # A reset of the IMEX domain concerns other nodes, not this GPU.
    6: "its bus needs a reset",
    7: "the machine needs a reboot",
}


class Session:
    """A session of NVML. The first scan opens the session.

    A later scan opens the session again if the driver was replaced, or GPUs were added or removed.
    """

    def __init__(self, places: Places) -> None:
        self._places = places
        self._nv: Any = None
        self._addresses: frozenset[str] = frozenset()
        self._gpus: dict[int, Gpu] = {}
        self._handles: dict[str, Any] = {}
        self._partitions: dict[str, Partition] = {}
        self._links: Mapping[frozenset[str], float] = {}
        self._linked: frozenset[str] = frozenset()
        self._events = EventListener(None)

    def close(self) -> None:
        """Shut NVML down if it is initialized."""
        nv, self._nv = self._nv, None
        self._gpus.clear()
        self._handles.clear()
        self._partitions.clear()
        self._linked = frozenset()
        if nv is not None:
            self._events.close()
            with contextlib.suppress(nv.NVMLError):
                nv.nvmlShutdown()
            nvml.release(self)

    def _open(self) -> Any:
        """Initialize NVML if necessary, and return the module of nvidia-ml-py.

        NVML is initialized again if GPUs were added or removed, because NVML reads the list of GPUs only when it is
        initialized.
        """
        try:
            addresses = frozenset(os.listdir(f"{self._places.proc}/driver/nvidia/gpus"))
        except OSError:
            addresses = frozenset()
        if self._nv is not None and addresses != self._addresses:
            self.close()
        if self._nv is None:
            nv = nvml.load(self._places.library, self)
            try:
                nv.nvmlInit()
            except nv.NVMLError as error:
                nvml.release(self)
                self._raise_if_gone(nv, error)
                raise NvmlError(f"NVML cannot be used: {error}", Verdict.UNREADABLE) from error
            self._nv, self._addresses, self._events = nv, addresses, EventListener(nv)
        return self._nv

    def scan(self) -> NvmlScan:
        """Return all GPUs and their state; raise NvmlError if no GPU can be read."""
        nv = self._open()
        try:
            return self._scan(nv)
        except nv.NVMLError as error:
            self._raise_if_gone(nv, error)
            raise NvmlError(f"NVML fails: {error}", Verdict.UNREADABLE) from error

    def _scan(self, nv: Any) -> NvmlScan:
        gpus: list[Gpu] = []
        findings: dict[str, ProbeResult] = {}
        notes: list[str] = []
        handles: dict[str, Any] = {}
        for index in range(nv.nvmlDeviceGetCount()):
            try:
                handle = nv.nvmlDeviceGetHandleByIndex(index)
                uuid = text(nv.nvmlDeviceGetUUID(handle))
                before = self._gpus.get(index)
                gpu = before if before is not None and before.uuid == uuid else self._identify(nv, handle, uuid, index)
                finding = self.check(nv, handle)
            except nv.NVMLError as error:
                self._raise_if_gone(nv, error)
                if index not in self._gpus:
                    notes.append(f"GPU {index} cannot be read: {error}")
                    continue
                gpu, finding = self._gpus[index], _finding(error)
                handle = self._handles.get(gpu.uuid)
            else:
                gpu = readings.with_partitions(nv, handle, gpu, handles, self._partitions)
            self._gpus[index] = gpu
            if handle is not None:
                handles[gpu.uuid] = handle
            gpus.append(gpu)
            findings[gpu.uuid] = finding
        self._handles = handles
        uuids = frozenset(findings)
        if uuids != self._linked:
            self._links = readings.read_links(nv, gpus, handles)
            self._linked = uuids
        # Lost GPUs are left out, because with one of them the wait for events would fail for all GPUs.
        self._events.watch([gpu for gpu in gpus if findings[gpu.uuid][0] is not Verdict.BAD], handles)
        driver = text(optional(nv, nv.nvmlSystemGetDriverVersion))
        cuda = optional(nv, nv.nvmlSystemGetCudaDriverVersion)
        cuda = f"{cuda // 1000}.{cuda % 1000 // 10}" if cuda else ""
        notes += self._events.notes
        return NvmlScan(tuple(gpus), findings, driver, cuda, self._links, bool(self._events.registered), tuple(notes))

    def _raise_if_gone(self, nv: Any, error: Any) -> None:
        """If all later calls would fail after this error, shut NVML down and raise NvmlError."""
        if error.value in nvml.GONE:
            self.close()
            if error.value == _REPLACED:
                nvml.unload(nv)  # The next scan loads the file again, which may be the library of the new driver.
            raise NvmlError(nvml.GONE[error.value]) from error

    def _identify(self, nv: Any, handle: Any, uuid: str, index: int) -> Gpu:
        pci = optional(nv, nv.nvmlDeviceGetPciInfo, handle)
        address = nvml.pci_address(text(pci.busId)) if pci is not None else ""
        directory = os.path.realpath(f"{self._places.sysfs}/bus/pci/devices/{address}") if address else ""
        memory = optional(nv, nv.nvmlDeviceGetMemoryInfo, handle)
        numa = sysfs.numa_node(directory) if directory else None
        numa = _numa_of_memory(nv, handle) if numa is None else numa
        minor = optional(nv, nv.nvmlDeviceGetMinorNumber, handle)
        brand = optional(nv, nv.nvmlDeviceGetBrand, handle)
        architecture = optional(nv, nv.nvmlDeviceGetArchitecture, handle)
        attributes = {
            "index": index,
            "minor": minor,
            PCI_BUS_ID: address,
            PCIE_ROOT: bus.pcie_root(directory),
            "productName": text(optional(nv, nv.nvmlDeviceGetName, handle)),
            "brand": nvml.constant_in_words(nv, "NVML_BRAND_", brand),
            "serial": text(optional(nv, nv.nvmlDeviceGetSerial, handle)),
            "architecture": nvml.constant_in_words(nv, "NVML_DEVICE_ARCH_", architecture),
            "cudaComputeCapability": nvml.version(optional(nv, nv.nvmlDeviceGetCudaComputeCapability, handle)),
        }
        return Gpu(uuid, index, minor, address, memory.total >> 20 if memory is not None else 0, numa, attributes)

    def check(self, nv: Any, handle: Any) -> ProbeResult:
        """Return a GPU's health, from its responses to calls and the driver's recommended recovery action."""
        for function, arguments in ((nv.nvmlDeviceGetMemoryInfo, ()), (nv.nvmlDeviceGetTemperature, (0,))):
            try:
                function(handle, *arguments)
            except nv.NVMLError as error:
                self._raise_if_gone(nv, error)
                if error.value not in _MISSING:
                    return _finding(error)
        action = int(nvml.field_value(nv, handle, _RECOVERY_ACTION) or 0)
        if action not in _ACTIONS:
            return Verdict.UNREADABLE, f"the driver asks for recovery action {action}, which is not known"
        return (Verdict.BAD if _ACTIONS[action] else Verdict.GOOD), _ACTIONS[action]

    def wait(self, seconds: float) -> tuple[list[Xid], bool]:
        """Wait for the driver's events, at most `seconds`. Return (the new XIDs, whether a scan is due).

        Raises NvmlError after an error that makes all later calls of NVML fail.
        """
        xids, due, error = self._events.wait(seconds)
        if error is not None:
            self._raise_if_gone(self._nv, error)
        return xids, due or error is not None

    def measure(self, ids: Sequence[str]) -> dict[str, dict[str, Any]]:
        """Return, for each UUID of a GPU or partition, its measured values (such as memory, in base units) by name.

        Values that are not reported are left out.
        """
        measured: dict[str, dict[str, Any]] = {}
        whole = {gpu.uuid for gpu in self._gpus.values()}
        for name in ids:
            if (handle := self._handles.get(name)) is not None:
                measure = readings.measure_gpu if name in whole else readings.measure_memory
                try:
                    measured[name] = measure(self._nv, handle)
                except self._nv.NVMLError as error:
                    _LOG.debug("the load of %s cannot be read: %s", name, error)
        return measured


class EventListener:
    """Reads the driver's events while NVML is initialized: XIDs, and partitions that appear or disappear."""

    def __init__(self, nv: Any) -> None:
        self.notes: tuple[str, ...] = ()
        self.registered: dict[int, str] = {}
        """For the pointer in the handle of each GPU that reports XIDs: the GPU's UUID."""
        self._nv = nv
        self._set: Any = None
        self._watched: frozenset[str] = frozenset()
        self._pending: list[Xid] = []
        self._failures = 0

    def close(self) -> None:
        """Free NVML's event set."""
        events, self._set = self._set, None
        if events is not None:
            with contextlib.suppress(self._nv.NVMLError):
                self._nv.nvmlEventSetFree(events)

    def watch(self, gpus: Sequence[Gpu], handles: Mapping[str, Any]) -> None:
        """Register for the events of exactly these GPUs."""
        nv, uuids = self._nv, frozenset(gpu.uuid for gpu in gpus)
        if uuids == self._watched:
            return
        if self._set is not None:
            self._pending += self._collect(0)[0]
        self.close()
        self.registered, self._failures = {}, 0
        self._set = optional(nv, nv.nvmlEventSetCreate)
        self._watched = uuids
        if self._set is None:
            self.notes = ("the driver has no events, so XIDs are not received",)
            return
        notes = []
        for gpu in gpus:
            if (handle := handles.get(gpu.uuid)) is None:
                continue
            with contextlib.suppress(nv.NVMLError):
                wanted = (_XID_EVENT | _MIG_EVENT) & (nv.nvmlDeviceGetSupportedEventTypes(handle) or 0)
                if wanted & _XID_EVENT:
                    nv.nvmlDeviceRegisterEvents(handle, wanted, self._set)
                    self.registered[nvml.pointer(handle)] = gpu.uuid
                    continue
            notes.append(f"GPU {gpu.index} reports no XIDs; its health follows from scans alone")
        self.notes = tuple(notes)

    def wait(self, seconds: float) -> tuple[list[Xid], bool, Any]:
        """Wait up to `seconds` for events. Return (new XIDs, whether a scan is due, the error of the wait or None)."""
        if self._set is None:
            return [], True, None
        xids, self._pending = self._pending, []
        came, due, error = self._collect(0 if xids else max(1, int(seconds * 1000)))
        self._failures += error is not None
        if error is not None and self._failures == FAILED_WAITS:
            self.registered = {}
            self.notes = (f"the driver's events fail, so XIDs are not received: {error}",)
        return xids + came, due, error

    def _collect(self, milliseconds: int) -> tuple[list[Xid], bool, Any]:
        xids: list[Xid] = []
        due = False
        # One call of `_collect` reads at most 1000 events. The next call reads the events after these.
        for _ in range(1000):
            try:
                data = self._nv.nvmlEventSetWait_v2(self._set, milliseconds)
            except self._nv.NVMLError as error:
                return xids, due, None if error.value == _TIMEOUT else error
            milliseconds = 0
            if data.eventType != _XID_EVENT:
                due = True
                continue
            gpu = self.registered.get(nvml.pointer(data.device))
            ids = (int(data.gpuInstanceId), int(data.computeInstanceId))
            xids.append(Xid(gpu, int(data.eventData), *(None if number == nvml.ANY else number for number in ids)))
        return xids, due, None


def _numa_of_memory(nv: Any, handle: Any) -> int | None:
    """Return the NUMA node of a GPU's memory; None if the driver names no node or several nodes."""
    mask = optional(nv, nv.nvmlDeviceGetMemoryAffinity, handle, 1, nv.NVML_AFFINITY_SCOPE_NODE)
    bits = int(mask[0]) if mask is not None else 0
    return bits.bit_length() - 1 if bits.bit_count() == 1 else None


def _finding(error: Any) -> ProbeResult:
    if error.value in nvml.BROKEN:
        return Verdict.BAD, nvml.BROKEN[error.value]
    return Verdict.UNREADABLE, f"it cannot be read: {error}"
