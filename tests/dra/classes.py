"""DeviceClasses as users of the drivers in these tests have them, and drivers that cannot be served."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

from dra_bridge.driver import Registrar

__all__ = ["device_class", "unserved"]


def device_class(driver: str) -> dict[str, Any]:
    """Return a class of all devices of a driver, called like it; `dra_bridge.testing.serving` has a resource's."""
    spec = {"selectors": [{"cel": {"expression": f'device.driver == "{driver}"'}}]}
    return {"apiVersion": "resource.k8s.io/v1", "kind": "DeviceClass", "metadata": {"name": driver}, "spec": spec}


@contextlib.contextmanager
def unserved(driver: str) -> Iterator[None]:
    """Have no socket of a driver be made."""
    bind = Registrar._bind

    async def refuse(self: Registrar, server: Any, path: Path) -> None:
        if self.driver.name == driver:
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        await bind(self, server, path)

    with patch.object(Registrar, "_bind", refuse):
        yield
