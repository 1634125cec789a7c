"""The files of the register of holders: how a test loses them."""

from __future__ import annotations

from pathlib import Path

__all__ = ["lose_copies", "lose_register"]

_REGISTERS = ("plugins/*/ledger.db*", "plugins/dra-bridge/register.db*")


def lose_register(root: Path, cdi: Path | None = None) -> None:
    """Delete the register below the kubelet's root directory while no agent runs; locks stay.

    cdi: the directory of CDI files; then the copy of the allocations there is lost, too.
    """
    for pattern in _REGISTERS:
        for path in root.glob(pattern):
            if path.suffix != ".lock":
                path.unlink()
    if cdi is not None:
        lose_copies(cdi)


def lose_copies(cdi: Path) -> None:
    """Delete the copy of the allocations in the directory of CDI files."""
    for path in cdi.glob("*.allocations"):
        path.unlink()
