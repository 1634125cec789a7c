"""A minimal kubelet for measurements: it accepts Register, connects to the plugin, and receives the device lists."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self

import grpc

from deviceplugin.testing import claim_state
from deviceplugin.wire import deviceplugin_pb2 as pb
from deviceplugin.wire import deviceplugin_pb2_grpc as pb_grpc

OPTIONS = (("grpc.default_authority", "localhost"), ("grpc.use_local_subchannel_pool", 1))


class Kubelet(pb_grpc.RegistrationServicer):
    """A minimal kubelet, whose directory stays the same over its restarts. All times are monotonic seconds."""

    def __init__(self) -> None:
        self.root = Path(tempfile.mkdtemp(prefix="b-", dir="/tmp"))  # the paths of sockets must be short
        self.directory = self.root / "device-plugins"
        self.directory.mkdir()
        claim_state.write(self.root, [])  # a kubelet with DRA writes its claim state at its first start
        self.changed = threading.Condition()
        self.registered: list[tuple[float, str]] = []
        """For each call of Register: its time, and the file name of the plugin's socket."""
        self.lists: list[tuple[float, list[str]]] = []
        """For each received device list: its time, and the ids of its unhealthy devices."""
        self._server: grpc.Server | None = None
        self._channel: grpc.Channel | None = None
        self._count = 0

    def start(self) -> float:
        """Delete the plugins' sockets and begin to serve. Return the time just before kubelet.sock is created."""
        for path in self.directory.iterdir():
            if stat.S_ISSOCK(path.stat().st_mode):
                path.unlink()
        self._count += 1
        private = self.root / f"{self._count}.sock"
        self._server = grpc.server(ThreadPoolExecutor(4))
        pb_grpc.add_RegistrationServicer_to_server(self, self._server)
        self._server.add_insecure_port(f"unix:{private}")
        self._server.start()
        at = time.monotonic()
        os.link(private, self.directory / "kubelet.sock")
        return at

    def stop(self) -> None:
        """End all connections and remove kubelet.sock."""
        if self._channel is not None:
            self._channel.close()
            self._channel = None
        if self._server is not None:
            self._server.stop(None).wait(10)
            self._server = None
        (self.directory / "kubelet.sock").unlink(missing_ok=True)

    def restart(self) -> float:
        """Restart the kubelet; return the seconds from the new kubelet.sock to Register."""
        before = len(self.registered)
        self.stop()
        began = self.start()
        self.wait(lambda: len(self.registered) > before, "Register")
        return self.registered[-1][0] - began

    def close(self) -> None:
        """Stop, and remove the kubelet's directory."""
        self.stop()
        shutil.rmtree(self.root, ignore_errors=True)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def Register(self, request: pb.RegisterRequest, context: Any) -> pb.Empty:  # noqa: N802
        """Record the time, and connect to the plugin."""
        at = time.monotonic()
        self._channel = grpc.insecure_channel(f"unix:{self.directory / request.endpoint}", options=OPTIONS)
        stub = pb_grpc.DevicePluginStub(self._channel)
        stub.GetDevicePluginOptions(pb.Empty(), timeout=5)
        threading.Thread(target=self._listen, args=(stub,), daemon=True).start()
        with self.changed:
            self.registered.append((at, request.endpoint))
            self.changed.notify_all()
        return pb.Empty()

    def _listen(self, stub: Any) -> None:
        with contextlib.suppress(grpc.RpcError, ValueError):
            for message in stub.ListAndWatch(pb.Empty()):
                at = time.monotonic()
                unhealthy = [device.ID for device in message.devices if device.health != "Healthy"]
                with self.changed:
                    self.lists.append((at, unhealthy))
                    self.changed.notify_all()

    def wait(self, predicate: Any, what: str, timeout: float = 30.0) -> None:
        """Wait until `predicate` is true, at most `timeout` seconds. what: the awaited event, for the error message."""
        with self.changed:
            if not self.changed.wait_for(predicate, timeout):
                raise TimeoutError(f"no {what} within {timeout} s")

    @property
    def plugin(self) -> str:
        """The address of the plugin that has registered last."""
        return f"unix:{self.directory / self.registered[-1][1]}"
