"""What NVML tells of GPUs and their partitions, as values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from deviceplugin.health import Finding, Verdict


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
class NvmlScan:
    """What one scan of all GPUs found. findings: by GPU; links: how close two GPUs are, by the pair of UUIDs."""

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


class NvmlError(Exception):
    """Raised when nothing can be learned of any GPU; verdict says what that means for those known so far."""

    def __init__(self, message: str, verdict: Verdict = Verdict.BAD) -> None:
        super().__init__(message)
        self.verdict = verdict


News = NvmlScan | Xid | NvmlError
