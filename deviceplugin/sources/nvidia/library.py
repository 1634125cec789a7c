"""The NVML library behind nvidia-ml-py: how it is loaded and unloaded, and what its answers are in Python."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any, Final, cast

from deviceplugin.sources.nvidia.values import NvmlError

LIBRARY: Final = "libnvidia-ml.so.1"

GONE: Final = {1: "NVML was shut down", 9: "the NVIDIA driver is not loaded", 18: "the NVIDIA driver was replaced"}
BROKEN: Final = {15: "it has fallen off the bus", 16: "it needs a reset", 28: "it is gone"}
"""Errors by their code: GONE of all of NVML, BROKEN of one GPU."""
ANY: Final = 0xFFFFFFFF
"""Of all links, or of no partition."""

_lock: Final = threading.Lock()
_loaded: Final[list[Any]] = []
"""Libraries that are to be unloaded once nobody is in them."""
_users: Final[set[object]] = set()
"""Those who have the library initialized; one of them may be in a call at any time."""


def load(library: str) -> ModuleType:
    """Return nvidia-ml-py with the library loaded.

    Raises:
        NvmlError: one of them is not there.

    """
    try:
        import pynvml  # type: ignore[import-untyped]
    except ImportError as error:
        raise NvmlError("nvidia-ml-py is not installed; pip install 'deviceplugin[nvidia]'") from error
    with _lock:
        if pynvml.nvmlLib is None:
            try:
                # Not left to pynvml: it would neither take a path nor load another one later.
                pynvml.nvmlLib = ctypes.CDLL(library or LIBRARY)
            except OSError as error:
                raise NvmlError(f"NVML is not there: {error}") from error
    return cast("ModuleType", pynvml)


def unload(nv: Any) -> None:
    """Have the library loaded anew: another file may have taken its place."""
    import _ctypes

    with _lock:
        loaded, nv.nvmlLib = nv.nvmlLib, None
        nv._nvmlGetFunctionPointer_cache.clear()  # noqa: SLF001  # of functions of the old library
        if loaded is not None:
            _loaded.append(loaded)
        if not _users:
            while _loaded:
                _ctypes.dlclose(_loaded.pop()._handle)  # noqa: SLF001


def entered(user: object) -> None:
    """Note that somebody has the library initialized, and may be in a call at any time."""
    with _lock:
        _users.add(user)


def left(user: object) -> None:
    """Note that somebody makes no more calls."""
    with _lock:
        _users.discard(user)


def optional(nv: Any, function: Callable[..., Any], *arguments: Any) -> Any:
    """Call what not every driver or GPU supports; None if this one does not, or does not know."""
    try:
        return function(*arguments)
    except nv.NVMLError as error:
        if error.value in BROKEN or error.value in GONE:
            raise
        return None


def field_value(nv: Any, handle: Any, *wanted: Any) -> float | None:
    """Return one of NVML's many field values; None where it is not supported."""
    values = optional(nv, nv.nvmlDeviceGetFieldValues, handle, [wanted if len(wanted) > 1 else wanted[0]])
    if values is None or values[0].nvmlReturn != 0:
        return None
    value = values[0].value
    kinds = {0: "dVal", 1: "uiVal", 2: "ulVal", 3: "ullVal", 4: "sllVal", 5: "siVal", 6: "usVal"}
    name = kinds.get(values[0].valueType)
    return None if name is None else cast("float", getattr(value, name, None))


def pointer(handle: Any) -> int:
    """Return what a handle points to, by which two are compared."""
    return ctypes.cast(handle, ctypes.c_void_p).value or 0


def text(value: Any) -> str:
    """Return what NVML gave as text; nothing is empty text."""
    return value.decode(errors="replace") if isinstance(value, bytes) else value or ""


def pci_address(bus_id: str) -> str:
    """Return a PCI address as sysfs has it; NVML writes the domain with eight digits."""
    domain, _, rest = bus_id.lower().partition(":")
    return f"{int(domain, 16):04x}:{rest}" if rest else bus_id.lower()


def constant_in_words(nv: Any, prefix: str, value: int | None) -> str:
    """Return the name of one of NVML's constants in words: Ampere, Tesla."""
    if value is None:
        return ""
    for name, number in vars(nv).items():
        if name.startswith(prefix) and number == value and not name.endswith(("_UNKNOWN", "_COUNT")):
            return str(name.removeprefix(prefix)).replace("_", " ").title()
    return ""
