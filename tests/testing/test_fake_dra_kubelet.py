"""The fake kubelet's DRA part behaves like kubelet 1.36.3; the tests use a minimal driver (`BareDriver`)."""

from __future__ import annotations

import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from deviceplugin.testing import claim_state
from deviceplugin.testing.claim_state import AnsweredDevice, DevicesOfClaim
from dra_bridge.testing.kubelet import FakeDraKubelet, FakeDraPod, PodError
from tests.testing.bare_dra import DRIVER, BareDriver

POD = FakeDraPod("p", "pod-1", ["c"], {"main": [("c", "r")]})
OTHER = FakeDraPod("q", "pod-2", ["c"], {"main": [("c", "r")]})
DEVICE = AnsweredDevice(("r",), "n", "d-c", ("x/y=c",), None)


def claim(namespace: str, name: str) -> dict[str, Any]:
    """Return a claim of this name that is allocated, and reserved for both pods."""
    return {
        "metadata": {"namespace": namespace, "name": name, "uid": f"uid-{name}"},
        "status": {
            "reservedFor": [{"uid": POD.uid}, {"uid": OTHER.uid}],
            "allocation": {"devices": {"results": [{"driver": DRIVER}]}},
        },
    }


@pytest.fixture
def root() -> Iterator[Path]:
    # The path must be short: a socket's path has at most 107 bytes.
    path = Path(tempfile.mkdtemp(prefix="k"))
    yield path
    shutil.rmtree(path)


@pytest.fixture
def kubelet(root: Path) -> Iterator[FakeDraKubelet]:
    with FakeDraKubelet(root, claim) as running:
        yield running


@pytest.fixture
def driver(root: Path, kubelet: FakeDraKubelet) -> Iterator[BareDriver]:
    made = BareDriver(root)
    kubelet.wait_registered(DRIVER)
    yield made
    made.stop()


def state(root: Path) -> list[DevicesOfClaim]:
    return claim_state.from_json((root / claim_state.FILE_NAME).read_bytes())


def remembered(*pods: FakeDraPod, devices: int = 1) -> list[DevicesOfClaim]:
    return [DevicesOfClaim("default", "c", "uid-c", {DRIVER: [DEVICE] * devices}, {pod.uid for pod in pods})]


class TestConnection:
    def test_its_end_disturbs_no_thread_of_grpcio(
        self, kubelet: FakeDraKubelet, driver: BareDriver, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """If the kubelet stops while grpcio's thread is about to poll the connection, the thread ends without error."""
        arrived, let_go, watching = threading.Event(), threading.Event(), set()

        def now() -> float:
            if sys._getframe(1).f_code.co_name == "_poll_connectivity":
                watching.add(threading.current_thread())
                arrived.set()
                assert let_go.wait(10)
            return time.time()

        raised: list[object] = []
        monkeypatch.setattr(threading, "excepthook", raised.append)
        monkeypatch.setattr("grpc._channel.time", SimpleNamespace(**{**vars(time), "time": now}))
        assert arrived.wait(10)
        kubelet.stop()
        let_go.set()
        for thread in watching:
            thread.join(10)
            assert not thread.is_alive()
        assert not raised

    def test_its_end_ends_the_calls_in_flight(self, kubelet: FakeDraKubelet, driver: BareDriver) -> None:
        """When the kubelet stops, its calls to the driver end, even a call that the driver has not answered."""
        arrived, let_go = threading.Event(), threading.Event()

        def hang(method: str) -> None:
            arrived.set()
            assert let_go.wait(10)

        driver.before_answer = hang
        with ThreadPoolExecutor(1) as pool:
            preparing = pool.submit(kubelet.prepare_pod, POD)
            assert arrived.wait(10)
            (plugin,) = kubelet.plugins(DRIVER)
            kubelet.stop()
            with pytest.raises(PodError, match="NodePrepareResources: the connection is closed"):
                preparing.result(5)
            let_go.set()
        assert not plugin.calls


class TestClaimState:
    def test_the_claim_is_there_before_the_driver_is_called(
        self, root: Path, kubelet: FakeDraKubelet, driver: BareDriver
    ) -> None:
        """Before a driver is called, the claim is in the claim state without devices, also if the call fails."""
        seen = []

        def fail(method: str) -> None:
            seen.append((method, state(root)))
            raise RuntimeError("broken")

        driver.before_answer = fail
        with pytest.raises(PodError, match="broken"):
            kubelet.prepare_pod(POD)
        assert seen == [("NodePrepareResources", remembered(POD, devices=0))]
        assert state(root) == remembered(POD, devices=0)

    def test_devices_and_pods_come_and_go(self, root: Path, kubelet: FakeDraKubelet, driver: BareDriver) -> None:
        """The claim state has the devices after Prepare; the claim leaves it after the last pod's end and Unprepare."""
        kubelet.prepare_pod(POD)
        assert state(root) == remembered(POD)
        kubelet.prepare_pod(OTHER)
        assert state(root) == remembered(POD, OTHER)
        kubelet.unprepare_pod(POD)
        assert state(root) == remembered(OTHER)
        assert driver.unprepared == []
        seen = []
        driver.before_answer = lambda method: seen.append(state(root))
        kubelet.unprepare_pod(OTHER)
        assert seen == [remembered(OTHER)]
        assert state(root) == []
        assert (driver.prepared, driver.unprepared) == (["c"], ["c"])

    def test_a_restart_reads_it(self, root: Path, kubelet: FakeDraKubelet, driver: BareDriver) -> None:
        """After a restart the kubelet knows claims from the claim state, to which a second Prepare adds its devices."""
        kubelet.prepare_pod(POD)
        kubelet.restart()
        kubelet.wait_registered(DRIVER)
        assert state(root) == remembered(POD)
        kubelet.prepare_pod(POD)
        assert state(root) == remembered(POD, devices=2)
        kubelet.unprepare_pod(POD)
        assert driver.unprepared == ["c"]

    def test_claims_of_inactive_pods_are_unprepared(
        self, root: Path, kubelet: FakeDraKubelet, driver: BareDriver
    ) -> None:
        """The kubelet's reconciler unprepares only claims without an active pod, and tries again after a failure."""
        kubelet.prepare_pod(POD)
        kubelet.prepare_pod(OTHER)
        kubelet.reconcile_claims({POD.uid, OTHER.uid})
        assert state(root) == remembered(POD, OTHER)
        kubelet.reconcile_claims({OTHER.uid})
        assert [claim.pods for claim in state(root)] == [{OTHER.uid}]

        def fail(method: str) -> None:
            raise RuntimeError("broken")

        driver.before_answer = fail
        kubelet.reconcile_claims(set())
        assert state(root) == remembered(OTHER)
        driver.before_answer = lambda method: None
        kubelet.reconcile_claims(set())
        assert (state(root), driver.unprepared) == ([], ["c"])
