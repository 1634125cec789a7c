"""Loads and unloads the NVML library through nvidia-ml-py, and converts NVML's results to Python values."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, Final, cast

from deviceplugin import cdi_specs
from deviceplugin.device import AttributeValue, Version
from deviceplugin.health import ProbeResult, Verdict
from deviceplugin.version import installing

LIBRARY: Final = "libnvidia-ml.so.1"

GONE: Final = {1: "NVML was shut down", 9: "the NVIDIA driver is not loaded", 18: "the NVIDIA driver was replaced"}
"""NVML's error codes that concern all GPUs, with texts for messages. After such an error, all calls fail."""
BROKEN: Final = {15: "it has fallen off the bus", 16: "it needs a reset", 28: "it is gone"}
"""NVML's error codes for a single broken GPU, with texts for messages."""
ANY: Final = 0xFFFFFFFF
"""A number with two meanings in NVML. As the link number in a request, it stands for the sum over all links of a GPU.
As an instance number in an XID event, it means that the event names no such instance."""

_lock: Final = threading.Lock()
_replaced: Final[list[Any]] = []
"""Replaced libraries that are still loaded. Each of them is unloaded when no session can be in one of its calls."""
_users: Final[set[object]] = set()
"""The sessions that have loaded the library. Each of them may be in one of the library's calls."""


@dataclass(frozen=True, slots=True)
class Places:
    """The paths of the driver's files. library: NVML's library, "" for the linker's choice. cdi: CDI directories."""

    library: str = ""
    sysfs: str = "/sys"
    proc: str = "/proc"
    dev: str = "/dev"
    cdi: tuple[str, ...] = cdi_specs.DIRECTORIES


@dataclass(frozen=True, slots=True)
class Partition:
    """A MIG device. instance, compute: the ids of its GPU instance and compute instance.

    memory: the partition's memory in MiB. placement: the partition's first memory slice, and the number of its slices;
    None if the driver does not report them.
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
    """A GPU. memory: the GPU's memory in MiB.

    attributes: the attributes of the GPU's device and of its partitions' devices. partitions: the GPU's partitions;
    None if MIG mode is off.
    """

    uuid: str
    index: int
    minor: int | None = None
    address: str = ""
    memory: int = 0
    numa: int | None = None
    attributes: Mapping[str, AttributeValue | None] = field(default_factory=dict)
    partitions: tuple[Partition, ...] | None = None


@dataclass(frozen=True, slots=True)
class NvmlScan:
    """The result of a scan of all GPUs.

    findings: for each UUID, the health. links: for each pair of GPUs, the link score. listening: whether any GPU
    reports XIDs.
    """

    gpus: tuple[Gpu, ...]
    findings: Mapping[str, ProbeResult]
    driver: str = ""
    cuda: str = ""
    links: Mapping[frozenset[str], float] = field(default_factory=dict)
    listening: bool = False
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Xid:
    """An error that the driver reports for a GPU or a partition. gpu: None if the driver did not name the GPU."""

    gpu: str | None
    code: int
    instance: int | None = None
    compute: int | None = None


class NvmlError(Exception):
    """Raised when no GPU can be read. verdict: the result that then counts as the probe result of all known GPUs."""

    def __init__(self, message: str, verdict: Verdict = Verdict.BAD) -> None:
        super().__init__(message)
        self.verdict = verdict


NvmlUpdate = NvmlScan | Xid | NvmlError


def load(library: str, user: object) -> ModuleType:
    """Load the NVML library, and return nvidia-ml-py; raise NvmlError if either is missing.

    The library stays in memory until `release` is called for this user. user: the session, which may be in a call of
    the library.
    """
    try:
        import pynvml  # type: ignore[import-untyped]
    except ImportError as error:
        raise NvmlError(f"nvidia-ml-py is not installed; {installing('nvidia')}") from error
    with _lock:
        if pynvml.nvmlLib is None:
            try:
                # pynvml itself cannot load a library from another path, or a replaced library.
                pynvml.nvmlLib = ctypes.CDLL(library or LIBRARY)
            except OSError as error:
                raise NvmlError(f"NVML is missing: {error}") from error
        _users.add(user)
    return cast("ModuleType", pynvml)


def unload(nv: Any) -> None:
    """Make the next `load` read the library's file again, because the file may have been replaced."""
    import _ctypes

    with _lock:
        library, nv.nvmlLib = nv.nvmlLib, None
        nv._nvmlGetFunctionPointer_cache.clear()  # noqa: SLF001  # of functions of the old library
        if library is not None:
            _replaced.append(library)
        if not _users:
            while _replaced:
                _ctypes.dlclose(_replaced.pop()._handle)  # noqa: SLF001


def release(user: object) -> None:
    """Record that this session makes no more calls of the library."""
    with _lock:
        _users.discard(user)


def optional(nv: Any, function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function that a driver or GPU may not support. Return None if it is unsupported or has no value."""
    try:
        return function(*arguments)
    except nv.NVMLError as error:
        if error.value in BROKEN or error.value in GONE:
            raise
        return None


def field_value(nv: Any, handle: Any, *wanted: Any) -> float | None:
    """Return the value of an NVML field; None if it is not supported. wanted: the field's id, or id and scope."""
    values = optional(nv, nv.nvmlDeviceGetFieldValues, handle, [wanted if len(wanted) > 1 else wanted[0]])
    if values is None or values[0].nvmlReturn != 0:
        return None
    kinds = {0: "dVal", 1: "uiVal", 2: "ulVal", 3: "ullVal", 4: "sllVal", 5: "siVal", 6: "usVal"}
    name = kinds.get(values[0].valueType)
    return None if name is None else cast("float", getattr(values[0].value, name, None))


def pointer(handle: Any) -> int:
    """Return the pointer in NVML's handle of a GPU, which is the same in all handles of the GPU."""
    return ctypes.cast(handle, ctypes.c_void_p).value or 0


def text(value: Any) -> str:
    """Return NVML's text as str; "" for None."""
    return value.decode(errors="replace") if isinstance(value, bytes) else value or ""


def pci_address(bus_id: str) -> str:
    """Convert a PCI address to the form of sysfs. NVML writes the domain with eight digits."""
    domain, _, rest = bus_id.lower().partition(":")
    return f"{int(domain, 16):04x}:{rest}" if rest else bus_id.lower()


def constant_in_words(nv: Any, prefix: str, value: int | None) -> str:
    """Return the name of NVML's constant with this prefix and value as words, such as Ampere; "" if unknown."""
    for name, number in vars(nv).items():
        if name.startswith(prefix) and number == value and not name.endswith(("_UNKNOWN", "_COUNT")):
            return str(name.removeprefix(prefix)).replace("_", " ").title()
    return ""


def version(numbers: Sequence[int | str] | None) -> Version | None:
    """Return up to three numbers as a semantic version: 535.104.05 is 535.104.5, 12.2 is 12.2.0."""
    parts = [str(int(number)) for number in (numbers or ())[:3]]
    return Version(".".join((*parts, "0", "0")[:3])) if parts else None
