"""When the hook `released` is called, and that devices for which it fails are neither granted nor offered."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, cast

import pytest

from deviceplugin.device import Device
from deviceplugin.exclusion import DeviceConflictError
from deviceplugin.register import releases
from deviceplugin.register.records import Allocation
from deviceplugin.source import DeviceSource
from tests.register.test_register import R, RegisterInMemory, key, part, turns

S = "example.com/same"


class Wiped(DeviceSource):
    """A source that records the calls of `released`; this hook fails for the devices in `broken`."""

    resource = R
    driver = "fpga.example.com"

    def __init__(self, replicas: int = 1) -> None:
        self.replicas = replicas
        self.calls: list[list[str]] = []
        self.broken: set[str] = set()

    async def released(self, devices: Sequence[Device]) -> None:
        names = [device.id for device in devices]
        self.calls.append(names)
        if self.broken & set(names):
            raise OSError("no answer")


def wiping(here: RegisterInMemory, replicas: int = 1) -> Wiped:
    source = Wiped(replicas)
    here.services[R].source = cast("Any", source)
    return source


async def look(here: RegisterInMemory) -> None:
    """Call `released` for the devices that need it, as a scan does, and let the hooks end."""
    here.register.releases.look(R, all_known=True)
    await turns()


async def test_every_device_is_released_once_before_its_first_grant() -> None:
    """`released` is called once for each device before the first grant of the device, by a scan or by the grant."""
    here = RegisterInMemory(a="n1", b="n2", c="n3")
    source = wiping(here)
    await here.grant("b")
    assert source.calls == [["b"]]
    await look(here)
    await look(here)
    assert source.calls == [["b"], ["a", "c"]]
    await here.grant("a")
    assert len(source.calls) == 2


async def test_devices_of_unknown_pods_are_not_released_by_a_scan() -> None:
    """While not all pods are known, a scan does not call `released`, but a grant does."""
    here = RegisterInMemory(a="n1")
    source = wiping(here)
    here.register.releases.look(R, all_known=False)
    await turns()
    assert source.calls == []
    await here.grant("a")
    assert source.calls == [["a"]]


async def test_a_device_is_released_after_each_holder() -> None:
    """If `released` fails after the holder's end, the device is withheld; `released` is not called again at once."""
    here = RegisterInMemory(a="n1")
    source = wiping(here)
    await here.grant("a")
    await here.end("a")
    source.broken.add("a")
    await here.refused("a", why=r"a of .*: withheld until `released` succeeds: released of .*: no answer")
    assert here.withheld() == here.withheld("dra") == {"a"}
    await here.refused("a", why="withheld until")
    assert source.calls == [["a"]] * 2, "it is not called again at once"


async def test_a_failed_release_is_tried_alone_after_a_while(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """If `released` fails for two devices, it is called for each alone later, and only the broken one is withheld."""
    caplog.set_level("INFO")
    monkeypatch.setattr(releases, "FIRST", 0.0)
    here = RegisterInMemory(a="n1", b="n2")
    source = wiping(here)
    source.broken.add("a")
    await look(here)
    assert here.withheld() == {"a", "b"}
    await look(here)
    assert source.calls == [["a", "b"], ["a"], ["b"]]
    assert here.withheld() == {"a"}
    source.broken.clear()
    await look(here)
    assert here.withheld() == set()
    assert caplog.messages[-1] == "device a is no longer withheld: `released` has succeeded"
    await here.grant("a", "b")


async def test_a_holder_during_the_hook_makes_another_call_due() -> None:
    """If a holder appears while `released` runs, `released` is called again after this holder has ended."""
    here = RegisterInMemory(a="n1")
    source = wiping(here)
    go = asyncio.Event()

    async def slow(devices: Sequence[Device]) -> None:
        source.calls.append([device.id for device in devices])
        await go.wait()

    source.released = slow  # type: ignore[method-assign]
    here.register.releases.look(R, all_known=True)
    await turns()
    await here.register.add_holders([Allocation("u1", "main", R, "a")])
    go.set()
    await turns()
    await here.end("a")
    await look(here)
    assert source.calls == [["a"], ["a"]]


async def test_the_same_hardware_under_another_name_waits_too() -> None:
    """If `released` fails for a device, the same hardware is refused under another resource, too."""
    here = RegisterInMemory(a="n1")
    here.add(S, b="n1")
    source = wiping(here)
    source.broken.add("a")
    with pytest.raises(DeviceConflictError, match=r"a of .*: withheld until `released` succeeds"):
        await here.grant("b", resource=S)
    assert source.calls == [["a"]]


async def test_a_shared_device_is_released_when_its_last_holder_has_ended() -> None:
    """`released` is called for a shared device only after its last holder has ended."""
    here = RegisterInMemory(replicas=2, a="n1")
    source = wiping(here, 2)
    first, second = here.services[R].ids_now(Device("a"))
    await here.grant(first)
    await here.grant(second)
    await here.end(first)
    await look(here)
    await here.grant(first)
    assert source.calls == [["a"]]
    await here.end(first, second)
    await look(here)
    assert source.calls == [["a"]] * 2


async def test_the_whole_is_not_released_while_a_part_is_held() -> None:
    """While a pod holds one part of a device, `released` is called for the other part, but not for the whole."""
    here = RegisterInMemory(part("half", 5), part("other", 5), part("whole", 10))
    source = wiping(here)
    await here.grant("half")
    assert source.calls == [["half"]]
    await look(here)
    assert source.calls == [["half"], ["other"]]
    await here.grant("other")
    await here.end("half", "other")
    source.broken.add("whole")
    await look(here)
    assert source.calls[2:] == [["half", "other", "whole"]]
    assert here.withheld() == {"half", "other", "whole"}


async def test_an_id_that_comes_to_stand_for_other_hardware_is_not_released() -> None:
    """If a device id comes to stand for other hardware, `released` is called again before the id counts as free."""
    here = RegisterInMemory(a="n1", b="n2")
    source = wiping(here)
    await look(here)
    here.list(a="n9", b="n2")
    await look(here)
    assert source.calls == [["a", "b"], ["a"]]
    assert here.register.is_free(key("a"))
