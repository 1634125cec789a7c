"""NVML as one thread uses it: what GPUs there are and how they do."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

from deviceplugin.health import Finding, Verdict
from deviceplugin.sources import sysfs
from deviceplugin.sources.nvidia.events import EventListener
from deviceplugin.sources.nvidia.library import (
    BROKEN,
    GONE,
    constant_in_words,
    entered,
    field_value,
    left,
    load,
    optional,
    pci_address,
    text,
    unload,
)
from deviceplugin.sources.nvidia.links import read_links
from deviceplugin.sources.nvidia.measure import measure
from deviceplugin.sources.nvidia.mig import PartitionReader
from deviceplugin.sources.nvidia.values import Gpu, NvmlError, NvmlScan, Xid

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
        self._order: dict[int, str] = {}
        self._handles: dict[str, Any] = {}
        self._partitions = PartitionReader()
        self._links: Mapping[frozenset[str], float] = MappingProxyType({})
        self._linked: frozenset[str] = frozenset()
        self._events = EventListener()

    def close(self) -> None:
        """Let go of the library."""
        nv, self._nv = self._nv, None
        self._known.clear()
        self._partitions.clear()
        self._order.clear()
        self._handles.clear()
        self._linked = frozenset()
        self._events.close(nv)
        if nv is None:
            return
        with contextlib.suppress(nv.NVMLError):
            nv.nvmlShutdown()
        left(self)

    def _open(self) -> Any:
        """Return NVML, initialized; again if GPUs came or went, which it only sees then."""
        there = self._addresses()
        if self._nv is not None and there != self._there:
            self.close()
        if self._nv is None:
            nv = load(self._library)
            try:
                nv.nvmlInit()
            except nv.NVMLError as error:
                if error.value == 18:
                    unload(nv)  # the new driver's library may lie there already
                if error.value in GONE:
                    raise NvmlError(GONE[error.value]) from error
                raise NvmlError(f"NVML cannot be used: {error}", Verdict.UNREADABLE) from error
            self._nv = nv
            self._there = there
            entered(self)
        return self._nv

    def _addresses(self) -> frozenset[str]:
        try:
            return frozenset(os.listdir(self._gpus_of_proc))
        except OSError:
            return frozenset()

    def scan(self) -> NvmlScan:
        """Return what there is.

        Raises:
            NvmlError: nothing can be learned.

        """
        nv = self._open()
        try:
            return self._scan(nv)
        except nv.NVMLError as error:
            self._raise_if_gone(error)
            raise NvmlError(f"NVML fails: {error}", Verdict.UNREADABLE) from error

    def _scan(self, nv: Any) -> NvmlScan:
        gpus: list[Gpu] = []
        findings: dict[str, Finding] = {}
        notes: list[str] = []
        handles: dict[str, Any] = {}
        for index in range(nv.nvmlDeviceGetCount()):
            try:
                handle = nv.nvmlDeviceGetHandleByIndex(index)
                uuid = text(nv.nvmlDeviceGetUUID(handle))
                gpu = self._known.get(uuid)
                if gpu is None or gpu.index != index:
                    gpu = self._identify(nv, handle, uuid, index)
                finding = self._check(nv, handle)
            except nv.NVMLError as error:
                self._raise_if_gone(error)
                lost = self._known.get(self._order.get(index, ""))
                if lost is None:
                    notes.append(f"GPU {index} cannot be read: {error}")
                    continue
                gpu, finding, handle = lost, _finding(error), self._handles.get(lost.uuid)
            else:
                gpu = self._partitions.read(nv, handle, gpu, handles)
            self._known[gpu.uuid] = gpu
            self._order[index] = gpu.uuid
            if handle is not None:
                handles[gpu.uuid] = handle
            gpus.append(gpu)
            findings[gpu.uuid] = finding
        self._handles = handles
        uuids = frozenset(gpu.uuid for gpu in gpus)
        if uuids != self._linked:
            self._links = read_links(nv, gpus, self._handles)
            self._linked = uuids
        answering = [gpu for gpu in gpus if findings[gpu.uuid][0] is not Verdict.BAD]
        self._events.watch(nv, answering, self._handles)  # waiting fails for all while one of them is lost
        driver = optional(nv, nv.nvmlSystemGetDriverVersion)
        cuda = optional(nv, nv.nvmlSystemGetCudaDriverVersion)
        return NvmlScan(
            tuple(gpus),
            findings,
            text(driver),
            f"{cuda // 1000}.{cuda % 1000 // 10}" if cuda else "",
            self._links,
            self._events.listening,
            (*notes, *self._events.notes),
        )

    def _raise_if_gone(self, error: Any) -> None:
        """Raise NvmlError if an error says that nothing will work any more."""
        if error.value in GONE:
            nv = self._nv
            self.close()
            if error.value == 18:
                unload(nv)
            raise NvmlError(GONE[error.value]) from error

    def _identify(self, nv: Any, handle: Any, uuid: str, index: int) -> Gpu:
        pci = optional(nv, nv.nvmlDeviceGetPciInfo, handle)
        address = pci_address(text(pci.busId)) if pci is not None else ""
        directory = os.path.realpath(f"{self._sysfs}/bus/pci/devices/{address}") if address else ""
        memory = optional(nv, nv.nvmlDeviceGetMemoryInfo, handle)
        numa = sysfs.numa_node(directory) if directory else None
        root = re.search(r"pci[0-9a-f]{4,8}:[0-9a-f]{2}", directory)
        return Gpu(
            uuid,
            index,
            optional(nv, nv.nvmlDeviceGetMinorNumber, handle),
            address,
            text(optional(nv, nv.nvmlDeviceGetName, handle)),
            constant_in_words(nv, "NVML_BRAND_", optional(nv, nv.nvmlDeviceGetBrand, handle)),
            constant_in_words(nv, "NVML_DEVICE_ARCH_", optional(nv, nv.nvmlDeviceGetArchitecture, handle)),
            optional(nv, nv.nvmlDeviceGetCudaComputeCapability, handle),
            memory.total >> 20 if memory is not None else 0,
            text(optional(nv, nv.nvmlDeviceGetSerial, handle)),
            numa if numa is not None else _near(nv, handle),
            root[0] if root else "",
        )

    def _check(self, nv: Any, handle: Any) -> Finding:
        """Return whether a GPU answers, and what it says of its state."""
        for function, arguments in ((nv.nvmlDeviceGetMemoryInfo, ()), (nv.nvmlDeviceGetTemperature, (0,))):
            try:
                function(handle, *arguments)
            except nv.NVMLError as error:
                self._raise_if_gone(error)
                if error.value not in _MISSING:
                    return _finding(error)
        action = int(field_value(nv, handle, _RECOVERY_ACTION) or 0)
        if action not in _ACTIONS:
            return Verdict.UNREADABLE, f"the driver asks for recovery action {action}, which is not known"
        if _ACTIONS[action]:
            return Verdict.BAD, _ACTIONS[action]
        return Verdict.GOOD, ""

    def wait(self, seconds: float) -> tuple[list[Xid], bool]:
        """Wait for events so long; return the XIDs that came, and whether a scan is due now.

        Raises:
            NvmlError: nothing will work any more.

        """
        nv = self._nv
        if nv is None or not self._events.is_open:
            return [], True
        xids, due, error = self._events.wait(nv, seconds)
        if error is not None:
            self._raise_if_gone(error)
            self._events.failed(error)
        return xids, due or error is not None

    def measure(self, ids: Sequence[str]) -> dict[str, dict[str, Any]]:
        """Return how busy GPUs and partitions are, by UUID; what one cannot tell is left out."""
        return {} if self._nv is None else measure(self._nv, self._handles, self._known, ids)


def _near(nv: Any, handle: Any) -> int | None:
    """Return the NUMA node that the driver names, where sysfs names none."""
    mask = optional(nv, nv.nvmlDeviceGetMemoryAffinity, handle, 1, nv.NVML_AFFINITY_SCOPE_NODE)
    bits = int(mask[0]) if mask is not None else 0
    return bits.bit_length() - 1 if bits and bits & (bits - 1) == 0 else None


def _finding(error: Any) -> Finding:
    if error.value in BROKEN:
        return Verdict.BAD, BROKEN[error.value]
    return Verdict.UNREADABLE, f"it cannot be read: {error}"
