"""Runs the stand-in for a vendor's plugin as a process, for a test."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from deviceplugin.testing import foreign
from tests.forks import Forked
from tests.scenarios.node import wait_for

RESOURCE = "vendor.example/gadget"


def resource(*ids: str, name: str = RESOURCE, **answer: Any) -> dict[str, Any]:
    """Return a resource with healthy devices for the plugin's config file. answer: how the plugin answers Allocate."""
    return {"name": name, "devices": dict.fromkeys(ids or ("g0", "g1"), "Healthy"), "answer": answer}


class Vendor:
    """The stand-in plugin: its process, its configuration file, and its record of calls."""

    def __init__(self, where: Path, directory: Path, *resources: Mapping[str, Any], **quirks: Any) -> None:
        self.file, self.notes, self.log = (where / f"vendor.{end}" for end in ("json", "notes", "log"))
        self.directory = directory
        self.quirks = quirks
        self.process: Forked | None = None
        self.show(*(resources or (resource(),)))

    def show(self, *resources: Mapping[str, Any]) -> None:
        """Write other resources into the plugin's configuration file."""
        self.resources: Sequence[Mapping[str, Any]] = resources
        foreign.write(self.file, resources, **self.quirks)

    def health(self, **health: str) -> None:
        """Set the health of the first resource's devices by id; the plugin no longer lists other devices."""
        self.show({**self.resources[0], "devices": health}, *self.resources[1:])

    def start(self) -> Vendor:
        arguments = [str(self.file), "--directory", str(self.directory), "--notes", str(self.notes)]
        arguments += ["--registry", str(self.directory / "plugins_registry")]
        self.process = Forked(["-m", "deviceplugin.testing.foreign", *arguments], self.log)
        return self

    def stop(self, *, kill: bool = False) -> None:
        if self.process is not None:
            (self.process.kill if kill else self.process.terminate)()
            self.process.wait(10)
            self.process = None

    def move(self, directory: Path) -> None:
        """Restart the plugin's process with another directory for its sockets."""
        self.stop()
        self.directory = directory
        self.start()

    def status(self, timeout: float = 30.0) -> int:
        """Wait until the plugin's process has ended, and return its exit status."""
        assert self.process is not None
        return self.process.wait(timeout)

    def calls(self, call: str) -> list[dict[str, Any]]:
        return foreign.calls(self.notes, call)

    def wait(self, call: str, count: int = 1, timeout: float = 30.0) -> dict[str, Any]:
        """Wait until the plugin has recorded `count` events of the kind `call`, and return the last one."""
        enough: Callable[[], bool] = lambda: len(self.calls(call)) >= count  # noqa: E731
        wait_for(f"{count} {call}: {self.log.read_text()[-2000:]}", enough, timeout)
        return self.calls(call)[-1]
