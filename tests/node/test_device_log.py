"""Log lines about devices: events at INFO, with fields."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable

import pytest

from deviceplugin.device import Device, Health
from deviceplugin.inventory import Inventory
from deviceplugin.node import logs
from deviceplugin.node.device_log import SHOWN, HolderLog, InventoryLog
from deviceplugin.register.records import Allocation
from deviceplugin.sources.simulated import SimulatedSource
from deviceplugin.testing import FakeKubelet, Served
from tests.waits import wait

R = "example.com/gpu"


@pytest.fixture
def inventory(caplog: pytest.LogCaptureFixture) -> Inventory:
    caplog.set_level(logging.INFO)
    made = Inventory(R)
    made.subscribe(InventoryLog(R))
    return made


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    lines = [f"{record.levelname} {vars(record)['resource']}: {record.getMessage()}" for record in caplog.records]
    caplog.clear()
    return lines


def test_a_devices_life_is_in_the_log(inventory: Inventory, caplog: pytest.LogCaptureFixture) -> None:
    """A device that is listed, fails, recovers, vanishes or appears has a log line, with the reason."""
    inventory.publish([Device("a"), Device("b", health=Health.UNHEALTHY, message="no fan")])
    assert said(caplog) == [
        f"INFO {R}: the source lists 2 devices (1 healthy, 1 unhealthy)",
        f"WARNING {R}: device b is unhealthy: no fan",
    ]
    inventory.publish([Device("a", health=Health.UNHEALTHY, message="XID 79"), Device("b")])
    assert said(caplog) == [f"WARNING {R}: device a is unhealthy: XID 79", f"INFO {R}: device b recovered"]
    inventory.publish([Device("a"), Device("c")])
    assert said(caplog) == [
        f"INFO {R}: device a recovered",
        f"INFO {R}: device c appeared",
        f"INFO {R}: device b vanished",
    ]
    inventory.forget(["b"])
    inventory.publish([Device("c"), Device("a")])
    assert said(caplog) == [f"INFO {R}: device b is removed: it is unlisted and has no holder"]


def test_the_holder_of_a_broken_device_is_said(caplog: pytest.LogCaptureFixture) -> None:
    """If a device that a pod holds fails or vanishes, a warning names the pod, even if many other devices change."""
    caplog.set_level(logging.INFO)
    made = Inventory(R)
    made.subscribe(InventoryLog(R, lambda device: "pod team/train" if device == "z" else ""))
    made.publish([*(Device(str(number)) for number in range(SHOWN)), Device("z")])
    said(caplog)
    made.publish([])
    lines = said(caplog)
    assert f"WARNING {R}: device z vanished; pod team/train has it" in lines
    assert f"INFO {R}: device 0 vanished" in lines
    unknown = Device("0", health=Health.UNKNOWN, message="?")
    made.publish([Device("z", health=Health.UNHEALTHY, message="XID 79"), unknown])
    assert f"INFO {R}: device 0 is of unknown health: ?" in said(caplog)


def test_many_changes_at_once_are_few_lines(inventory: Inventory, caplog: pytest.LogCaptureFixture) -> None:
    """If many devices change at once, the first changes have a log line each, and the others are counted."""
    inventory.publish([])
    said(caplog)
    inventory.publish([Device(str(number)) for number in range(SHOWN + 3)])
    lines = said(caplog)
    assert len(lines) == SHOWN + 1
    assert lines[-1] == f"INFO {R}: 3 more devices changed"


def test_allocations_are_counted_by_pod(caplog: pytest.LogCaptureFixture) -> None:
    """A change of a pod's devices is logged once: their number at INFO, their ids at DEBUG."""
    log = HolderLog({"u1": "team/train"}.__getitem__)
    held = [Allocation("u1", "main", R, one) for one in ("a", "b")]
    with caplog.at_level(logging.INFO):
        log([])
        log(held)
        log(held)
        assert said(caplog) == [f"INFO {R}: pod team/train got 2 devices"]
    with caplog.at_level(logging.DEBUG):
        log(held[:1])
        assert said(caplog) == [
            f"INFO {R}: pod team/train gave back 1 device",
            f"DEBUG {R}: pod team/train gave back b",
        ]


def test_a_pod_that_has_ended_keeps_its_name(caplog: pytest.LogCaptureFixture) -> None:
    """The line about a pod that gave back its devices has the pod's name, though the kubelet no longer lists it."""
    names = {"u1": "team/train"}
    log = HolderLog(lambda uid: names.get(uid, uid))
    with caplog.at_level(logging.INFO):
        log([])
        log([Allocation("u1", "main", R, "a")])
        names.clear()
        log([])
        assert said(caplog)[-1] == f"INFO {R}: pod team/train gave back 1 device"


def test_what_was_held_before_was_not_just_allocated(caplog: pytest.LogCaptureFixture) -> None:
    """After the agent starts, its first log line about a pod says that the pod has a device, not that it got one."""
    with caplog.at_level(logging.INFO):
        HolderLog({"u1": "team/train"}.__getitem__)([Allocation("u1", "main", R, "a")])
        assert said(caplog) == [f"INFO {R}: pod team/train has 1 device"]


def test_json_lines_have_fields_and_text_lines_do_not_repeat_them(
    fake_kubelet: FakeKubelet, served: Callable[..., Served], caplog: pytest.LogCaptureFixture
) -> None:
    """Resource, device and pod are fields of a JSON line."""
    caplog.set_level(logging.DEBUG)
    served(SimulatedSource(1, resource=R), report_holders=True, period=0.05)
    fake_kubelet.run_pod("p", {R: 1})
    wait(lambda: "pod default/p got sim-0" in caplog.text)
    lines = [json.loads(logs.JsonFormatter().format(record)) for record in caplog.records]
    (got,) = [line for line in lines if line["msg"].endswith("got 1 device")]
    assert (got["level"], got["resource"], got["pod"]) == ("info", R, "default/p")
    (named,) = [line for line in lines if line["msg"].endswith("got sim-0")]
    assert (named["level"], named["resource"], named["device"], named["pod"]) == ("debug", R, "sim-0", "default/p")
    texts = [logs.TextFormatter().format(record) for record in caplog.records]
    assert [text for text in texts if text.endswith(f"{R}: pod default/p got sim-0")]
