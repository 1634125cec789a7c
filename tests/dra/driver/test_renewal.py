"""CDI files of prepared claims get a device's new device number, and never the number of another device."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from deviceplugin import identity
from deviceplugin.device import ContainerEdits, Device, DeviceNode
from deviceplugin.register.store import Changes
from dra_bridge.driver.claim_files import REST
from tests.dra.driver.served import ServedDriver, claim, result, served_driver
from tests.waits import until

TTY, PTMX = (f"char:{os.major(n)}:{os.minor(n)}" for n in (os.stat(f"/dev/{x}").st_rdev for x in ("tty", "ptmx")))


class Stick:
    """A device whose device node is a link in a directory `by-path` (named by the port) or `by-id`."""

    def __init__(self, directory: Path, links: str) -> None:
        self.link = directory / links / "x"
        self.link.parent.mkdir()
        self.link.symlink_to("/dev/tty")
        self.device = Device("d0", nodes=[str(self.link)], edits=ContainerEdits({"A": "1"}, nodes=["/dev/null"]))

    def lead(self, to: str) -> Device:
        self.link.unlink()
        self.link.symlink_to(to)
        return self.device


@pytest.fixture(params=["by-path", "by-id"])
async def stick(tmp_path: Path, request: pytest.FixtureRequest) -> Stick:
    return Stick(tmp_path, request.param)


@pytest.fixture
async def here(tmp_path: Path, stick: Stick) -> AsyncIterator[ServedDriver]:
    made = await served_driver(tmp_path, devices=[stick.device])
    await identity.publish(made.inventory, [stick.device], {})
    yield made
    await made.end()


def numbers(here: ServedDriver, *cdi_ids: str) -> dict[str, str]:
    nodes = [node for edits in here.edits(*cdi_ids) for node in edits["deviceNodes"]]
    return {node["path"]: f"char:{node['major']}:{node['minor']}" for node in nodes}


async def test_a_file_follows_what_is_the_same_device(
    here: ServedDriver, stick: Stick, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a device in the same port (a `by-path` link) has a new device number, its claim's CDI file gets this number.

    For a link in `by-id` nothing shows that the device is the same one, and the file stays as it is. A restarted agent
    also renews the file.
    """
    monkeypatch.setattr("dra_bridge.driver.renewal.CHECK", 0.01)
    await here.give("1", "d0")
    (answer,) = (await here.prepared("1")).devices
    await identity.publish(here.inventory, [stick.lead("/dev/ptmx")], {})
    same = stick.link.parent.name == "by-path"
    assert await here.driver.renewal.renew("1") is same
    assert not await here.driver.renewal.renew("1")
    assert numbers(here, *answer.cdi_ids)[str(stick.link)] == (PTMX if same else TTY)
    assert len(numbers(here, *answer.cdi_ids)) == 2, "nodes that are not the device's stay"
    (held,) = here.async_ledger.snapshot.claims["fpga.example.com", "1"].devices
    assert TTY in held.identity.tokens
    assert (PTMX in held.identity.reached) is same
    assert here.own["1"].devices is not None
    assert here.own["1"].devices[0].identity == held.identity
    after = await here.again(devices=[stick.lead("/dev/tty")])
    await identity.publish(after.inventory, [stick.device], {})
    keeping = asyncio.create_task(after.driver.renewal.keep())
    await until(lambda: numbers(after, *answer.cdi_ids)[str(stick.link)] == TTY)
    keeping.cancel()


@pytest.mark.parametrize("change", ["more", "fewer", "renamed", "read-only"])
@pytest.mark.parametrize("stick", ["by-path"], indirect=True)
async def test_a_claim_keeps_its_nodes_when_the_configuration_gives_its_device_others(
    here: ServedDriver, stick: Stick, change: str
) -> None:
    """A claim keeps its device nodes when the configuration adds, removes or renames nodes, or changes their rights."""
    other = stick.link.with_name("y")
    other.symlink_to("/dev/ptmx")
    x, y = DeviceNode(str(stick.link)), DeviceNode(str(other), "/dev/y")
    now = {
        "more": [x, y],
        "fewer": [x],
        "renamed": [DeviceNode(str(stick.link), "/dev/x")],
        "read-only": [DeviceNode(str(stick.link), permissions="r")],
    }[change]

    async def publish(nodes: list[DeviceNode]) -> None:
        await identity.publish(here.inventory, [Device("d0", nodes=nodes, edits=stick.device.edits)], {})

    await publish([x, y] if change == "fewer" else [x])
    await here.give("1", "d0")
    (answer,) = (await here.prepared("1")).devices
    had, claims = here.edits(*answer.cdi_ids), dict(here.async_ledger.snapshot.claims)
    for nodes in (now, [y]):  # The device node y alone is at most a part of the granted nodes.
        await publish(nodes)
        assert not await here.driver.renewal.renew("1")
        assert here.edits(*answer.cdi_ids) == had
        assert here.async_ledger.snapshot.claims == claims


@pytest.mark.parametrize("stick", ["by-id"], indirect=True)
async def test_a_file_has_all_nodes_of_a_device_that_its_source_identifies(here: ServedDriver) -> None:
    """A claim's CDI file gets all device nodes that the source now lists for the granted identity, without sysfs."""
    name = identity.port("usb:1-2")
    await identity.publish(here.inventory, [Device("d0", nodes=["/dev/tty"], identity=name)], {})
    await here.give("1", "d0")
    (answer,) = (await here.prepared("1")).devices
    await identity.publish(here.inventory, [Device("d0", nodes=["/dev/ptmx", "/dev/tty"], identity=name)], {})
    assert await here.driver.renewal.renew("1")
    assert numbers(here, *answer.cdi_ids) == {"/dev/tty": TTY, "/dev/ptmx": PTMX}
    await identity.publish(here.inventory, [Device("d0", nodes=["/dev/ptmx"], identity=name)], {})
    assert await here.driver.renewal.renew("1")
    assert numbers(here, *answer.cdi_ids) == {"/dev/ptmx": PTMX}


@pytest.mark.parametrize("stick", ["by-path"], indirect=True)
async def test_a_file_stays_while_its_device_is_gone_or_of_another_boot(here: ServedDriver, stick: Stick) -> None:
    """A claim's CDI file stays while its device is not listed, and after a reboot."""
    here.claims.add(claim("1", result("d0")))
    await here.prepared("1")
    stick.lead("/dev/ptmx")
    here.inventory.publish([])
    assert not await here.driver.renewal.renew("1")
    assert not await here.driver.renewal.renew("2"), "a claim that is not prepared has no file"
    after = await here.again(devices=[stick.device], boot="2")
    assert not await after.driver.renewal.renew("1")


@pytest.mark.parametrize("stick", ["by-path"], indirect=True)
async def test_a_driver_without_claims_sleeps_until_it_has_one(
    here: ServedDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A driver without claims does not check device numbers; the first recorded claim ends its wait."""
    monkeypatch.setattr("dra_bridge.driver.renewal.CHECK", 0.25)
    waits, after = list[float](), Changes.after

    async def noted(changes: Changes, count: int, timeout: float) -> None:
        waits.append(timeout)
        await after(changes, count, timeout)

    monkeypatch.setattr(Changes, "after", noted)
    keeping = asyncio.create_task(here.driver.renewal.keep())
    await until(lambda: bool(waits))
    assert waits == [REST]
    await here.give("1", "d0")
    await here.prepared("1")
    await until(lambda: 0.25 in waits)
    keeping.cancel()
