"""How close GPUs are to each other, as scores, and what follows for the devices made of them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

from deviceplugin.sources.nvidia.library import BROKEN, GONE, optional, pci_address, text
from deviceplugin.sources.nvidia.values import Gpu

_LEVELS: Final = {0: 60.0, 10: 50.0, 20: 40.0, 30: 30.0, 40: 20.0, 50: 10.0}
"""NVML's PCIe levels on the scale of link scores: same board, one switch, several, host bridge, CPU, across."""
_NVLINK: Final = 100.0
_SWITCH: Final = 2


def read_links(nv: Any, gpus: Sequence[Gpu], handles: Mapping[str, Any]) -> Mapping[frozenset[str], float]:
    """Return how close the GPUs are; what one of them does not tell is left out, none of it fails a scan."""
    direct: dict[frozenset[str], int] = {}
    switched: dict[str, int] = {}
    by_address = {gpu.address: gpu.uuid for gpu in gpus if gpu.address}
    for gpu in gpus:
        if (handle := handles.get(gpu.uuid)) is not None:
            with contextlib.suppress(nv.NVMLError):
                for other in _ends(nv, handle):
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
            ends = handles.get(one.uuid), handles.get(other_gpu.uuid)
            level = None
            if None not in ends:
                with contextlib.suppress(nv.NVMLError):
                    level = optional(nv, nv.nvmlDeviceGetTopologyCommonAncestor, *ends)
            score = _NVLINK * count + _LEVELS.get(-1 if level is None else level, 0.0)
            if score:
                scores[pair] = score
    return MappingProxyType(scores)


def _ends(nv: Any, handle: Any) -> Iterator[str | None]:
    """Yield of each NVLink that is up the PCI address of its other end, None for a switch."""
    for link in range(nv.NVML_NVLINK_MAX_LINKS):
        try:
            if not nv.nvmlDeviceGetNvLinkState(handle, link):
                continue
        except nv.NVMLError as error:
            if error.value in BROKEN or error.value in GONE:
                raise
            if error.value == 2:  # no such link, nor any after it
                return
            continue
        if optional(nv, nv.nvmlDeviceGetNvLinkRemoteDeviceType, handle, link) == _SWITCH:
            yield None
        elif (pci := optional(nv, nv.nvmlDeviceGetNvLinkRemotePciInfo, handle, link)) is not None:
            yield pci_address(text(pci.busId))


def links_of_devices(
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
