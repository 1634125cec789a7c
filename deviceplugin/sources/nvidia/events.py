"""The events of the NVIDIA driver: XIDs, and partitions that come and go."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from deviceplugin.sources.nvidia.library import ANY, optional, pointer
from deviceplugin.sources.nvidia.values import Gpu, Xid

FAILED_WAITS: Final = 3
"""Waits for events that may fail one after another; then no more are made until something changes."""
_TIMEOUT: Final = 10
_XID_EVENT: Final = 0x8
_MIG_EVENT: Final = 0x100


class EventListener:
    """Has the driver tell of the GPUs that answer."""

    def __init__(self) -> None:
        self.notes: tuple[str, ...] = ()
        self._set: Any = None
        self._registered: dict[int, str] = {}
        self._watched: frozenset[str] = frozenset()
        self._pending: list[Xid] = []
        self._failures = 0

    @property
    def listening(self) -> bool:
        """Whether any GPU tells of its XIDs."""
        return bool(self._registered)

    @property
    def is_open(self) -> bool:
        """Whether there is anything to wait for."""
        return self._set is not None

    def close(self, nv: Any) -> None:
        """Let go of the driver's events; nv is None where the library was not opened."""
        self._watched = frozenset()
        events, self._set = self._set, None
        if nv is None or events is None:
            return
        with contextlib.suppress(nv.NVMLError):
            nv.nvmlEventSetFree(events)

    def watch(self, nv: Any, gpus: Sequence[Gpu], handles: Mapping[str, Any]) -> None:
        """Listen to these GPUs, and to no others."""
        names = frozenset(gpu.uuid for gpu in gpus)
        if names != self._watched:
            self._failures = 0
            self._listen(nv, gpus, handles)
            self._watched = names

    def wait(self, nv: Any, seconds: float) -> tuple[list[Xid], bool, Any]:
        """Wait for events so long; return the XIDs that came, whether a scan is due, and what went wrong."""
        xids, self._pending = self._pending, []
        came, due, error = self._collect(nv, 0 if xids else max(1, int(seconds * 1000)))
        return xids + came, due, error

    def failed(self, error: Any) -> None:
        """Note that a wait failed; after some of them no more are made."""
        self._failures += 1
        if self._failures == FAILED_WAITS:
            self._registered = {}
            self.notes = (f"the driver's events fail, XIDs are not heard of: {error}",)

    def _listen(self, nv: Any, gpus: Sequence[Gpu], handles: Mapping[str, Any]) -> None:
        """Have the driver tell of XIDs and of partitions that come and go, where it can."""
        if self._set is not None:
            self._pending += self._collect(nv, 0)[0]
            with contextlib.suppress(nv.NVMLError):
                nv.nvmlEventSetFree(self._set)
        self._registered, notes = {}, []
        self._set = optional(nv, nv.nvmlEventSetCreate)
        if self._set is None:
            self.notes = ("the driver has no events: XIDs will not be heard of",)
            return
        for gpu in gpus:
            handle = handles.get(gpu.uuid)
            if handle is None:
                continue
            supported = _or_none(nv, nv.nvmlDeviceGetSupportedEventTypes, handle)
            wanted = (_XID_EVENT | _MIG_EVENT) & (supported or 0)
            if wanted & _XID_EVENT and _or_none(nv, _registers, nv, handle, wanted, self._set):
                self._registered[pointer(handle)] = gpu.uuid
            else:
                notes.append(f"GPU {gpu.index} tells of no XIDs; its health follows from looking at it alone")
        self.notes = tuple(notes)

    def _collect(self, nv: Any, patience: int) -> tuple[list[Xid], bool, Any]:
        """Return the events that came within so many milliseconds, whether a scan is due, and what went wrong."""
        xids: list[Xid] = []
        due = False
        for _ in range(1000):  # a storm is taken in portions
            try:
                data = nv.nvmlEventSetWait_v2(self._set, patience)
            except nv.NVMLError as error:
                return xids, due, None if error.value == _TIMEOUT else error
            patience = 0
            if data.eventType == _XID_EVENT:
                xids.append(
                    Xid(
                        self._registered.get(pointer(data.device)),
                        int(data.eventData),
                        None if data.gpuInstanceId == ANY else int(data.gpuInstanceId),
                        None if data.computeInstanceId == ANY else int(data.computeInstanceId),
                    )
                )
            else:
                due = True
        return xids, due, None


def _or_none(nv: Any, function: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return function(*arguments)
    except nv.NVMLError:
        return None


def _registers(nv: Any, handle: Any, wanted: int, events: Any) -> bool:
    nv.nvmlDeviceRegisterEvents(handle, wanted, events)
    return True
