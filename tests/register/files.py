"""The files of the register of holders: how a test loses them."""

from __future__ import annotations

from pathlib import Path

__all__ = ["lose_copies", "lose_register", "registers"]

_REGISTERS = ("plugins/*/ledger.db*", "plugins/dra-bridge/register.db*")


def lose_register(root: Path, cdi: Path | None = None) -> None:
    """Delete the register below the kubelet's root directory while no agent runs; locks stay.

    cdi: the directory of CDI files; then the copy of the allocations there is lost, too.
    """
    for path in registers(root):
        path.unlink()
    if cdi is not None:
        lose_copies(cdi)


def registers(root: Path) -> list[Path]:
    """Return the files of the register below the kubelet's root directory, without locks."""
    return [path for pattern in _REGISTERS for path in root.glob(pattern) if path.suffix != ".lock"]


def lose_copies(cdi: Path) -> None:
    """Delete the copy of the allocations in the directory of CDI files."""
    for path in cdi.glob("*/*.allocations"):
        path.unlink()
