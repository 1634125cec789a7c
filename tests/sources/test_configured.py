"""A resource of the config file as a source: its entries and its settings."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from pathlib import Path
from typing import cast

import pytest

from deviceplugin.config import OPEN, Lock, parse
from deviceplugin.device import ContainerEdits, Device, DeviceNode, Mount, Version, natural
from deviceplugin.identity import identities
from deviceplugin.source import DeviceSource
from deviceplugin.sources import ConfiguredSource
from deviceplugin.sources import configured as configured_source


def configured(fields: str) -> ConfiguredSource:
    """Return the source of a resource with these fields, in YAML."""
    return ConfiguredSource(parse(f"resources: [{{name: example.com/a, {fields}}}]").resources[0])


def lists(source: DeviceSource) -> contextlib.aclosing[AsyncGenerator[Sequence[Device]]]:
    return contextlib.aclosing(cast("AsyncGenerator[Sequence[Device]]", source.watch()))


async def following(watch: AsyncGenerator[Sequence[Device]]) -> Sequence[Device]:
    async with asyncio.timeout(10):
        return await anext(watch)


async def first(source: DeviceSource) -> Sequence[Device]:
    async with lists(source) as watch:
        return await following(watch)


async def test_devices_beyond_the_lock_are_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A path is served only if the path and its symlink's target are allowed; a path that is left out is logged."""
    (tmp_path / "in").mkdir()
    (tmp_path / "secret").touch()
    (tmp_path / "in/plain").touch()
    (tmp_path / "in/null").symlink_to("/dev/null")
    (tmp_path / "in/stolen").symlink_to(tmp_path / "secret")
    found = parse(f"resources: [{{name: example.com/a, devices: [path: {tmp_path}/in/*]}}]").resources[0]

    async def left(lock: Lock) -> list[str]:
        source = ConfiguredSource(found, lock)
        return [device.id.split("-")[-2] for device in await first(source)]

    assert await left(OPEN) == ["null", "plain", "stolen"]
    assert await left(Lock(host_paths=(f"{tmp_path}/in",))) == ["null", "plain"]
    assert "stolen" in caplog.text
    assert f"`run --allow-host-path={tmp_path}/secret` allows it" in caplog.text
    assert await left(Lock(host_paths=(f"{tmp_path}/in", "/dev/zero"))) == ["plain"]


class Scripted(DeviceSource):
    """An entry that yields the lists of a queue; an exception in the queue is raised."""

    def __init__(self, *script: Sequence[Device] | Exception) -> None:
        self.queue: asyncio.Queue[Sequence[Device] | Exception] = asyncio.Queue()
        for step in script:
            self.queue.put_nowait(step)

    async def watch(self) -> AsyncIterator[Sequence[Device]]:
        while True:
            step = await self.queue.get()
            if isinstance(step, Exception):
                raise step
            yield step


def scripted(*entries: DeviceSource) -> ConfiguredSource:
    source = configured("devices: [path: /dev/null]")
    source.entries = entries
    return source


def test_source_is_what_the_resource_says() -> None:
    """The source has the name, driver, sharing and topology of the resource in the config file."""
    source = configured("driver: a.example.com, devices: [path: /x], sharing: {replicas: 3}, topology: false")
    assert (source.resource, source.driver) == ("example.com/a", "a.example.com")
    assert (source.replicas, source.topology) == (3, False)


async def test_entries_are_listed_together_in_their_order(tmp_path: Path) -> None:
    """The devices of all entries make one list, in the order of the entries."""
    (tmp_path / "x").touch()
    (tmp_path / "y").touch()
    source = configured(
        f"""devices: [
            path: {tmp_path}/y, simulated: {{count: 2}}, group: [{tmp_path}/x, /dev/null], simulated: {{count: 1}}
        ]"""
    )
    devices = await first(source)
    assert [device.id.rpartition("-")[0] or device.id for device in devices][1:3] == ["sim", "sim"]
    assert len(devices) == 5
    assert len({device.id for device in devices}) == 5


async def test_devices_carry_what_the_resource_says(tmp_path: Path) -> None:
    """Each device carries the resource's env, mounts, annotations and CDI names beside its own nodes and mounts."""
    (tmp_path / "x").touch()
    source = configured(
        f"""
        devices: [path: /dev/null, path: {tmp_path}/x],
        permissions: r, env: {{A: b}}, annotations: {{k: v}}, cdi: [a.b/c=d],
        mounts: [{{host: /opt/a, container: /opt/b, readonly: false}}]
        """
    )
    null, file = await first(source)
    assert null.container_edits == ContainerEdits(
        env={"A": "b"},
        nodes=[DeviceNode("/dev/null", permissions="r")],
        mounts=[Mount("/opt/a", "/opt/b", readonly=False)],
        annotations={"k": "v"},
        cdi=["a.b/c=d"],
    )
    assert Mount(f"{tmp_path}/x", f"{tmp_path}/x") in file.edits.mounts
    assert Mount("/opt/a", "/opt/b", readonly=False) in file.edits.mounts
    merged = ContainerEdits.merge([null.container_edits, file.container_edits])
    assert merged.env == {"A": "b"}


async def test_nodes_that_devices_share_do_not_make_them_one_thing(tmp_path: Path) -> None:
    """Nodes that all devices of a resource share are in each container, and do not make devices the same hardware."""
    for name in ("one", "other"):
        (tmp_path / name).touch()
    (one,) = await first(configured(f"devices: [path: {tmp_path}/one], nodes: [/dev/tty], permissions: r"))
    (other,) = await first(configured(f"devices: [path: {tmp_path}/other], nodes: [/dev/tty]"))
    assert one.container_edits.nodes == (DeviceNode("/dev/tty", permissions="r"),)
    assert identities([one]).tokens.keys() == {one.id}
    assert identities([one]).tokens[one.id].isdisjoint(identities([other]).tokens[other.id])
    (tmp_path / "third").touch()
    both = await first(configured(f"devices: [group: [{tmp_path}/third, /dev/tty]]"))
    assert len(identities(both).tokens[both[0].id]) == 2


async def test_attributes_and_capacity_are_laid_over() -> None:
    """The resource's attributes and capacity replace those of the devices."""
    source = configured(
        "devices: [simulated: {count: 1}], attributes: {model: x, v: {version: 1.0.0}}, capacity: {memory: 1Gi}"
    )
    source.entries = (Scripted([Device("a", attributes={"model": "own", "more": 1}, capacity={"slots": 2})]),)
    (device,) = await first(source)
    assert device.attributes == {"model": "x", "more": 1, "v": "1.0.0"}
    assert isinstance(device.attributes["v"], Version)
    assert device.capacity == {"slots": 2, "memory": "1Gi"}


async def test_change_of_one_entry_is_listed() -> None:
    """When one entry's devices change, the list changes, and the other devices stay the same objects."""
    one, other = Scripted([Device("a")]), Scripted([Device("b")])
    source = scripted(one, other)
    async with lists(source) as watch:
        before = await following(watch)
        other.queue.put_nowait([Device("b"), Device("c")])
        after = await following(watch)
    assert [device.id for device in after] == ["a", "b", "c"]
    assert after[0] is before[0]


async def test_failing_entry_costs_itself_only(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An entry that fails keeps its last list and is tried again; the other entries are not affected."""
    monkeypatch.setattr(configured_source, "RETRY", (0.01, 0.02))
    one, other = Scripted([Device("a")], RuntimeError("out of luck")), Scripted([Device("b")])
    source = scripted(one, other)
    async with lists(source) as watch:
        assert [device.id for device in await following(watch)] == ["a", "b"]
        other.queue.put_nowait([Device("c")])
        assert [device.id for device in await following(watch)] == ["a", "c"]
        one.queue.put_nowait([Device("d")])
        assert [device.id for device in await following(watch)] == ["d", "c"]
    assert "out of luck" in caplog.text


async def test_entry_that_fails_at_once_holds_nothing_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """An entry that fails before its first list does not delay the others."""
    monkeypatch.setattr(configured_source, "RETRY", (0.01, 0.02))
    source = scripted(Scripted(RuntimeError("no driver"), [Device("late")]), Scripted([Device("b")]))
    async with lists(source) as watch:
        devices = await following(watch)
        while len(devices) < 2:
            devices = await following(watch)
    assert [device.id for device in devices] == ["late", "b"]


async def test_slow_entry_joins_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first list comes without a slow entry after a limited time; the entry's devices join a later list."""
    monkeypatch.setattr(configured_source, "FIRST_LIST", 0.05)
    slow = Scripted()
    async with lists(scripted(slow, Scripted([Device("b")]))) as watch:
        assert [device.id for device in await following(watch)] == ["b"]
        slow.queue.put_nowait([Device("a")])
        assert [device.id for device in await following(watch)] == ["a", "b"]


async def test_device_found_twice_is_served_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A device that two entries find, or that has two names, is served once under the first name, with a note."""
    (tmp_path / "tty0").touch()
    (tmp_path / "alias").symlink_to("tty0")
    source = configured(f"devices: [{{path: {tmp_path}/a*}}, {{path: {tmp_path}/tty*}}, {{path: {tmp_path}/alia?}}]")
    (device,) = await first(source)
    assert device.edits.mounts[0].container == f"{tmp_path}/alias"
    assert sum("is left out" in note for note in source.notes) == 1
    assert sum("served once" in note for note in source.notes) == 1
    assert len([record for record in caplog.records if record.levelname == "WARNING"]) == 2


async def test_name_that_is_served_stays(tmp_path: Path) -> None:
    """A device in use keeps its name when an earlier entry finds it under another name."""
    (tmp_path / "tty0").touch()
    source = configured(f"devices: [{{path: {tmp_path}/a*}}, {{path: {tmp_path}/tty*}}]")
    async with lists(source) as watch:
        (before,) = await following(watch)
        (tmp_path / "alias").symlink_to("tty0")
        (after,) = await following(watch)
        assert after is before
        assert any("is left out" in note for note in source.notes)
        (tmp_path / "alias").unlink()
        while source.notes != (f"{tmp_path}/a* matches nothing now; what is plugged in later is found",):
            await following(watch)


async def test_notes_are_those_of_all_entries(tmp_path: Path) -> None:
    """The source has the notes of its entries as long as the notes apply."""
    source = configured(f"devices: [{{path: {tmp_path}/a*}}, {{path: {tmp_path}/b*}}]")
    async with lists(source) as watch:
        assert await following(watch) == []
        assert len(list(source.notes)) == 2
        (tmp_path / "a").touch()
        assert len(await following(watch)) == 1
        assert list(source.notes) == [f"{tmp_path}/b* matches nothing now; what is plugged in later is found"]


async def test_end_of_the_watch_ends_the_entries() -> None:
    """When the watch ends, the watches of the entries end."""
    before = asyncio.all_tasks()
    async with lists(scripted(Scripted([Device("a")]), Scripted([]))) as watch:
        await following(watch)
        assert len(asyncio.all_tasks()) > len(before)
    assert asyncio.all_tasks() == before


async def test_variables_say_which_devices_a_container_has(tmp_path: Path) -> None:
    """Variables have the id, container path and name of each device, in the order of the ids."""
    for name, target in (("cam10", "tty"), ("cam2", "ptmx")):
        (tmp_path / name).symlink_to(f"/dev/{target}")
    source = configured(
        f"devices: [{{path: '{tmp_path}/cam*', container: '/dev/cameras/{{name}}'}}, simulated: {{count: 1}}], "
        "env: {CAMERA: '{path}', NAME: 'n={name}', ID: '{id}', PLAIN: '{x} y'}, mounts: [{host: /etc, container: /etc}]"
    )
    async with lists(source) as watch:
        devices = {device.id: device for device in await following(watch)}
        cameras = [devices[name] for name in sorted(devices, key=natural) if name != "sim-0"]
        inside = [camera.container_edits.device_nodes[0].path for camera in cameras]
        assert set(inside) == {"/dev/cameras/cam2", "/dev/cameras/cam10"}
        assert "edits" in source.hooks
        edits = await source.edits(cameras[::-1])
        assert edits.env == {
            "CAMERA": ",".join(inside),
            "NAME": ",".join(f"n={Path(path).name}" for path in inside),
            "ID": ",".join(camera.id for camera in cameras),
            "PLAIN": "{x} y",
        }
        merged = ContainerEdits.merge((camera.container_edits for camera in cameras), winner=edits)
        assert merged.env == edits.env
        assert (await source.edits([devices["sim-0"]])).env == {"CAMERA": "", "NAME": "n=sim-0", "ID": "sim-0"} | {
            "PLAIN": "{x} y"
        }
