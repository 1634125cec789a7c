"""Paths as devices: what a glob finds, the ids, and how changes are noticed."""

from __future__ import annotations

import asyncio
import contextlib
import glob as standard
import os
import stat
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import cast

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from deviceplugin.config.types import PartConfig
from deviceplugin.device import Device, Mount
from deviceplugin.sources.path import PathSource, device_id, numa_of
from tests.sources.trees import Tree

NEVER = 3600.0
"""Seconds between rescans in tests of file events."""
ROOT = os.geteuid() == 0


def ids(devices: Sequence[Device]) -> list[str]:
    return [device.id for device in devices]


def aliases(devices: Sequence[Device]) -> list[str]:
    """Return the last part of the devices' container paths."""
    return [os.path.basename(path) for device in devices for path in paths(device)]


def paths(device: Device) -> list[str]:
    edits = device.container_edits
    return [node.path for node in edits.device_nodes] + [mount.container for mount in edits.mounts]


def hosts(device: Device) -> list[str]:
    edits = device.container_edits
    return [node.real for node in edits.device_nodes] + [mount.host for mount in edits.mounts]


def null(path: Path) -> Path:
    """Make a path that is a device node: /dev/null, by symlink."""
    path.symlink_to("/dev/null")
    return path


@contextlib.asynccontextmanager
async def watching(source: PathSource) -> AsyncIterator[Callable[..., Awaitable[Sequence[Device]]]]:
    """Watch a source; gives a function that waits for the next list, or for the next that fits a condition."""
    async with contextlib.aclosing(cast("AsyncGenerator[Sequence[Device]]", source.watch())) as lists:

        async def following(fits: Callable[[Sequence[Device]], bool] = lambda _: True) -> Sequence[Device]:
            async with asyncio.timeout(10):
                async for devices in lists:
                    if fits(devices):
                        return devices
            raise AssertionError("the source ended")

        yield following


# Paths that are found.


def test_node_is_given_as_node(tmp_path: Path) -> None:
    """A device node is passed to containers as a node, with the given permissions."""
    (device,) = PathSource("/dev/null", permissions="r").scan()
    (node,) = device.container_edits.device_nodes
    assert (node.host, node.path, node.permissions) == ("/dev/null", "/dev/null", "r")
    assert not device.edits


def test_alias_is_kept_inside(tmp_path: Path) -> None:
    """A symlink to a node is used by its own path on the host and in the container; the device has its target."""
    null(tmp_path / "second")
    (tmp_path / "first").symlink_to("second")
    (device,) = PathSource(f"{tmp_path}/fir*").scan()
    (node,) = device.container_edits.device_nodes
    assert (node.host, node.path, node.real) == (f"{tmp_path}/first", f"{tmp_path}/first", "/dev/null")
    assert device.id == device_id(f"{tmp_path}/first")


def test_path_below_a_linked_directory_is_resolved(tmp_path: Path) -> None:
    """A path below a symlinked directory is resolved on the host and kept in the container."""
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "x").touch()
    (tmp_path / "link").symlink_to("real")
    (device,) = PathSource(f"{tmp_path}/link/*").scan()
    assert device.edits.mounts == (Mount(f"{tmp_path}/real/x", f"{tmp_path}/link/x", readonly=False),)


@pytest.mark.parametrize(("permissions", "readonly"), [("r", True), ("rw", False), ("w", False), ("rwm", False)])
def test_plain_file_is_mounted(tmp_path: Path, permissions: str, readonly: bool) -> None:
    """A plain file is mounted, writable if the permissions allow it."""
    (tmp_path / "file").touch()
    (device,) = PathSource(f"{tmp_path}/file", permissions=permissions).scan()
    assert not device.nodes
    assert device.edits.mounts == (Mount(f"{tmp_path}/file", f"{tmp_path}/file", readonly=readonly),)


def test_directory_is_left_out(tmp_path: Path) -> None:
    """A directory that a glob matches beside other paths is ignored."""
    (tmp_path / "a").mkdir()
    (tmp_path / "b").touch()
    source = PathSource(f"{tmp_path}/*")
    assert aliases(source.scan()) == ["b"]


async def test_glob_that_finds_directories_alone_says_so(tmp_path: Path) -> None:
    """A glob that matches only a directory gives no device, and a note with advice."""
    (tmp_path / "snd").mkdir()
    source = PathSource(f"{tmp_path}/snd", rescan=NEVER)
    async with watching(source) as following:
        assert await following() == []
    assert source.notes == (
        f"{tmp_path}/snd matches a directory, which is not a device; name what lies in it: {tmp_path}/snd/*",
    )


async def test_glob_that_finds_nothing_says_so(tmp_path: Path) -> None:
    """A glob that matches nothing gives a note, until a path appears."""
    source = PathSource(f"{tmp_path}/tty*", rescan=NEVER)
    async with watching(source) as following:
        assert await following() == []
        assert "matches nothing now" in source.notes[0]
        (tmp_path / "tty0").touch()
        assert len(await following()) == 1
        assert source.notes == ()


def test_dangling_symlink_is_left_out(tmp_path: Path) -> None:
    """A symlink without a target, or to itself, is no device."""
    (tmp_path / "a").symlink_to("nowhere")
    (tmp_path / "b").symlink_to("b")
    assert PathSource(f"{tmp_path}/*").scan() == []
    assert PathSource(f"{tmp_path}/*/x").scan() == []


def test_name_that_is_not_text_is_left_out(tmp_path: Path) -> None:
    """A file whose name is not UTF-8 is left out."""
    (tmp_path / "a").touch()
    with contextlib.suppress(OSError):  # not every file system takes such names
        os.close(os.open(os.fsencode(tmp_path) + b"/\xff", os.O_CREAT))
    assert aliases(PathSource(f"{tmp_path}/*").scan()) == ["a"]


@pytest.mark.skipif(ROOT, reason="root may read everything")
def test_directory_that_cannot_be_read_is_said(tmp_path: Path) -> None:
    """A directory that may not be read gives no devices, and a note."""
    (tmp_path / "dark").mkdir(mode=0)
    source = PathSource(f"{tmp_path}/dark/*")
    devices = source.scan()
    assert devices == []
    assert "cannot be read" in source.notes[0]


def test_order_is_that_of_people(tmp_path: Path) -> None:
    """Devices are sorted with numbers as numbers: 2 comes before 10."""
    for number in (10, 2, 1):
        (tmp_path / f"tty{number}").touch()
    assert aliases(PathSource(f"{tmp_path}/tty*").scan()) == ["tty1", "tty2", "tty10"]


def test_relative_glob_is_refused() -> None:
    """A relative path, and a class of characters that begins with ^ (as in bash and Go), are ValueErrors."""
    with pytest.raises(ValueError, match="absolute"):
        PathSource("dev/x")
    with pytest.raises(ValueError, match=r"\[!"):
        PathSource("/dev/tty[^U]*")


_NAMES = st.sampled_from(["a", "ab", "b1", "b2", ".h", "[x]", "é"])
_PATTERNS = st.sampled_from(["*", "a*", "?", "b[12]", "b[!1]", "[[]x]", ".*", "a", "nothing", "[", "ab"])


@given(st.sets(st.lists(_NAMES, min_size=1, max_size=3).map(tuple)), st.lists(_PATTERNS, min_size=1, max_size=3))
@example({("a", "b1"), ("ab", "b1")}, ["a*", "b1"])
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_globs_match_as_in_python(
    tmp_path_factory: pytest.TempPathFactory, tree: set[tuple[str, ...]], pattern: list[str]
) -> None:
    """A glob finds the same files as Python's glob.glob."""
    root = tmp_path_factory.mktemp("tree")
    for names in sorted(tree):
        with contextlib.suppress(FileExistsError, NotADirectoryError):
            (root.joinpath(*names[:-1])).mkdir(parents=True, exist_ok=True)
            root.joinpath(*names).touch()
    glob = f"{root}/{'/'.join(pattern)}"
    found = {path for device in PathSource(glob).scan() for path in paths(device)}
    assert found == {path for path in standard.glob(glob) if not os.path.isdir(path)}


# Names.


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/dev/ttyUSB0", "ttyUSB0"),
        ("/dev/snd/pcmC0D0c", "snd--pcmC0D0c"),
        ("/dev/bus/usb/001/002", "bus--usb--001--002"),
        ("/dev/dri/by-path/pci-0000:00:02.0-card", "dri-by-path-pci-0000-00-02.0-card-3419ceeb"),
        ("/srv/x", "srv-x-c0fdb799"),
        # Of a long path the last part's begin and end stay, such as product and serial number.
        (
            "/dev/serial/by-id/usb-FTDI_FT232R_USB_UART_A50285BI-if00-port0",
            "FTDI_FT232R_USB_UART_A50285BI-if00-port0-177f329c",
        ),
        (
            "/dev/serial/by-id/usb-ITead_Sonoff_Zigbee_3.0_USB_Dongle_Plus_b8d41edbd7bfec119f0b1d5ba6d59a9e-if00-port0",
            "ITead_Sonoff-f0b1d5ba6d59a9e-if00-port0-5f502ad2",
        ),
    ],
)
def test_id_is_readable(path: str, name: str) -> None:
    """The id of a device is its path with the characters that an id may have; if any is lost, a hash is added."""
    assert device_id(path) == name


_STEPS = st.lists(st.text(st.sampled_from("ab-_.:/é A0"), min_size=1, max_size=30), min_size=1, max_size=4)
_PATHS = st.builds(lambda root, steps: root + "/".join(steps), st.sampled_from(["/dev/", "/"]), _STEPS)


@given(_PATHS, _PATHS)
@example("/dev/a/b", "/dev/a--b")
@example("/dev/a-/b", "/dev/a/-b")
@example("/a", "/dev/a")
@example("/dev/x", "/x")
@example("/dev/a/b", "/dev/a-b")
def test_ids_are_unique_and_fit(one: str, other: str) -> None:
    """Ids have at most 52 characters and no colon, and two paths never have one id."""
    for path in (one, other):
        name = device_id(path)
        assert 0 < len(name) <= 52
        assert name.isascii()
        assert name.isprintable()
        assert " " not in name
        assert ":" not in name
        Device(name)
    assert (device_id(one) == device_id(other)) == (one == other)


# NUMA.


def sysfs(root: Path, *, numa: str, kind: str = "char", numbers: str = "1:3") -> str:
    """Make a sysfs where a device is below a PCI device of this NUMA node."""
    pci = root / "sys" / "devices" / "pci0000:00" / "0000:00:1f.0"
    leaf = pci / "usb1" / "1-1" / "tty"
    leaf.mkdir(parents=True)
    (pci / "numa_node").write_text(numa)
    (root / "sys" / "devices" / "pci0000:00" / "numa_node").write_text("7\n")
    place = root / "sys" / "dev" / kind
    place.mkdir(parents=True)
    (place / numbers).symlink_to("../../devices/pci0000:00/0000:00:1f.0/usb1/1-1/tty")
    return str(root / "sys")


@pytest.mark.parametrize(("numa", "node"), [("1\n", 1), ("-1\n", 7)])
def test_numa_node_is_that_of_the_nearest_ancestor(tmp_path: Path, numa: str, node: int) -> None:
    """A device node is on the NUMA node of the nearest ancestor in sysfs that has one; -1 means none."""
    (device,) = PathSource("/dev/null", sysfs=sysfs(tmp_path, numa=numa)).scan()
    assert device.numa_nodes == (node,)


def test_block_devices_have_numa_nodes_too(tmp_path: Path) -> None:
    """The NUMA node of a block device is found among block devices."""
    root = sysfs(tmp_path, numa="1", kind="block", numbers="8:1")
    assert numa_of(stat.S_IFBLK, os.makedev(8, 1), root) == 1
    assert numa_of(stat.S_IFCHR, os.makedev(8, 1), root) is None


def test_what_sysfs_does_not_know_has_no_numa_node(tmp_path: Path) -> None:
    """Plain files, unknown devices and garbage in sysfs have no NUMA node."""
    assert numa_of(stat.S_IFREG, 0, "/sys") is None
    assert numa_of(stat.S_IFCHR, os.makedev(1, 3), str(tmp_path)) is None
    root = sysfs(tmp_path, numa="garbage")
    (tmp_path / "sys" / "devices" / "pci0000:00" / "numa_node").unlink()
    assert numa_of(stat.S_IFCHR, os.makedev(1, 3), root) is None


# Groups.


def touch(root: Path, *names: str) -> None:
    for name in names:
        (root / name).touch()


def parts(devices: Sequence[Device]) -> list[tuple[str, ...]]:
    return [tuple(map(os.path.basename, paths(device))) for device in devices]


def test_what_the_wildcards_match_makes_one_device(tmp_path: Path) -> None:
    """Paths with the same text at the wildcards are one device, named after the first path; a note says so."""
    touch(tmp_path, "a1", "a2", "a10", "b2", "b10")
    source = PathSource(f"{tmp_path}/a*", f"{tmp_path}/b*")
    devices = source.scan()
    assert parts(devices) == [("a2", "b2"), ("a10", "b10")]
    assert ids(devices) == [device_id(f"{tmp_path}/a2"), device_id(f"{tmp_path}/a10")]
    assert list(source.notes) == [
        f"paired by the text of the wildcards: {tmp_path}/a2, {tmp_path}/a10",
        f"left out, since nothing shows which parts belong together: {tmp_path}/a1",
    ]


def test_order_pairs_nothing(tmp_path: Path) -> None:
    """Paths with different texts are not paired by their order; one path of each glob is a device."""
    touch(tmp_path, "a1", "a3", "b2", "b4")
    source = PathSource(f"{tmp_path}/a*", f"{tmp_path}/b*")
    assert source.scan() == []
    assert "left out" in source.notes[0]
    (tmp_path / "a1").unlink()
    (tmp_path / "b4").unlink()
    assert parts(source.scan()) == [("a3", "b2")]


def test_parts_of_one_device_in_sysfs_are_paired(tmp_path: Path) -> None:
    """card0 and renderD129 are one device if sysfs shows one GPU for both."""
    tree = Tree(tmp_path)
    for address, numbers in (("0000:01:00.0", ("1:3", "1:8")), ("0000:02:00.0", ("1:5", "1:9"))):
        for number, below in zip(numbers, ("drm/cardX", "drm/renderX"), strict=True):
            tree.number(number, tree.sys / f"devices/pci0000:00/{address}", below)
    for name, target in (("card0", "null"), ("card1", "zero"), ("renderD128", "urandom"), ("renderD129", "random")):
        (tmp_path / name).symlink_to(f"/dev/{target}")
    source = PathSource(f"{tmp_path}/card*", f"{tmp_path}/renderD*", sysfs=str(tree.sys))
    assert parts(source.scan()) == [("card0", "renderD129"), ("card1", "renderD128")]
    (note,) = source.notes
    assert note == f"paired by the device in sysfs: {tmp_path}/card0 (0000:01:00.0), {tmp_path}/card1 (0000:02:00.0)"


def test_a_path_may_have_another_name_in_the_container(tmp_path: Path) -> None:
    """A path may have another path in the container; {id} and {name} are replaced."""
    null(tmp_path / "cam0")
    touch(tmp_path, "file0")
    (node,) = PathSource(PartConfig(path=f"{tmp_path}/cam*", container="/dev/cameras/{name}")).scan()
    (file,) = PathSource(PartConfig(path=f"{tmp_path}/file*", container="/run/{id}")).scan()
    assert paths(node) == ["/dev/cameras/cam0"]
    assert node.container_edits.device_nodes[0].host == f"{tmp_path}/cam0"
    assert paths(file) == [f"/run/{file.id}"]
    assert node.id == device_id(f"{tmp_path}/cam0")


def test_optional_parts_are_there_or_not(tmp_path: Path) -> None:
    """A group's device is named after a part that is not optional, and exists without its optional part as well."""
    touch(tmp_path, "a1", "a2", "b2", "b3")
    optional = PartConfig(path=f"{tmp_path}/b*", optional=True)
    source = PathSource(optional, f"{tmp_path}/a*")
    assert parts(source.scan()) == [("a1",), ("a2", "b2")]
    assert ids(source.scan()) == [device_id(f"{tmp_path}/a1"), device_id(f"{tmp_path}/a2")]
    (tmp_path / "b2").unlink()
    assert parts(source.scan()) == [("a1",), ("a2",)]


def test_nodes_and_files_can_be_grouped(tmp_path: Path) -> None:
    """A group may have a node, which is passed as such, and a plain file, which is mounted."""
    null(tmp_path / "a0")
    touch(tmp_path, "b0")
    (device,) = PathSource(f"{tmp_path}/a*", f"{tmp_path}/b*", permissions="r").scan()
    assert hosts(device) == ["/dev/null", f"{tmp_path}/b0"]


def test_group_is_close_to_all_its_numa_nodes(tmp_path: Path) -> None:
    """A group has the NUMA nodes of all its parts."""
    root = sysfs(tmp_path, numa="1", numbers="1:3")
    other = tmp_path / "sys" / "devices" / "other"
    other.mkdir()
    (other / "numa_node").write_text("0")
    (tmp_path / "sys" / "dev" / "char" / "1:5").symlink_to("../../devices/other")
    (device,) = PathSource("/dev/null", "/dev/zero", sysfs=root).scan()
    assert device.numa_nodes == (0, 1)


async def test_what_belongs_together_stays_together(tmp_path: Path) -> None:
    """When a part of a device goes, that device goes, and the other devices keep their parts."""
    touch(tmp_path, "a0", "a1", "a2", "b0", "b1", "b2")
    source = PathSource(f"{tmp_path}/a*", f"{tmp_path}/b*", rescan=NEVER)
    async with watching(source) as following:
        assert parts(await following()) == [("a0", "b0"), ("a1", "b1"), ("a2", "b2")]
        (tmp_path / "a0").unlink()
        assert parts(await following()) == [("a1", "b1"), ("a2", "b2")]
        (tmp_path / "b2").unlink()
        assert parts(await following(lambda devices: len(devices) == 1)) == [("a1", "b1")]


# Watching.


async def test_directories_may_come_and_go(tmp_path: Path) -> None:
    """Each directory and each path of a glob may appear, go and appear again; no rescan is needed."""
    async with watching(PathSource(f"{tmp_path}/serial/*/port*", rescan=NEVER)) as following:
        assert await following() == []
        for _ in range(3):
            (tmp_path / "serial" / "one").mkdir(parents=True)
            (tmp_path / "serial" / "one" / "port0").touch()
            assert aliases(await following(len)) == ["port0"]
            (tmp_path / "serial" / "two").mkdir()
            (tmp_path / "serial" / "two" / "port1").touch()
            assert aliases(await following(lambda devices: len(devices) == 2)) == ["port0", "port1"]
            for name in ("one/port0", "two/port1"):
                (tmp_path / "serial" / name).unlink()
            for name in ("one", "two"):
                (tmp_path / "serial" / name).rmdir()
            (tmp_path / "serial").rmdir()
            assert await following(lambda devices: not devices) == []


async def test_moved_symlink_is_followed(tmp_path: Path) -> None:
    """If the target of a symlink changes, its device stays, with another host path."""
    touch(tmp_path, "one", "two")
    link = tmp_path / "link"
    link.symlink_to("one")
    async with watching(PathSource(str(link), rescan=NEVER)) as following:
        (before,) = await following()
        (tmp_path / "new").symlink_to("two")
        os.replace(tmp_path / "new", link)
        (after,) = await following(len)
    assert (hosts(before), hosts(after)) == ([f"{tmp_path}/one"], [f"{tmp_path}/two"])
    assert before.id == after.id


async def test_target_of_a_symlink_is_watched(tmp_path: Path) -> None:
    """The target at the end of a chain of symlinks may appear and go."""
    for name in ("links", "middle", "targets"):
        (tmp_path / name).mkdir()
    (tmp_path / "links" / "a").symlink_to("../middle/b")
    (tmp_path / "middle" / "b").symlink_to(tmp_path / "targets" / "c")
    async with watching(PathSource(f"{tmp_path}/links/*", rescan=NEVER)) as following:
        assert await following() == []
        touch(tmp_path, "targets/c")
        assert hosts((await following())[0]) == [f"{tmp_path}/targets/c"]
        (tmp_path / "targets" / "c").unlink()
        assert await following() == []
        (tmp_path / "middle" / "b").unlink()
        touch(tmp_path, "middle/b")
        assert hosts((await following(len))[0]) == [f"{tmp_path}/middle/b"]


async def test_linked_directory_is_watched(tmp_path: Path) -> None:
    """If the symlink of a glob's directory changes, as in a ConfigMap update, the devices are those of its target."""
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        touch(tmp_path, f"{name}/x")
    (tmp_path / "current").symlink_to("one")
    async with watching(PathSource(f"{tmp_path}/current/*", rescan=NEVER)) as following:
        assert hosts((await following())[0]) == [f"{tmp_path}/one/x"]
        (tmp_path / "new").symlink_to("two")
        os.replace(tmp_path / "new", tmp_path / "current")
        devices = await following(lambda devices: bool(devices) and hosts(devices[0]) != [f"{tmp_path}/one/x"])
        assert hosts(devices[0]) == [f"{tmp_path}/two/x"]


async def test_rescan_finds_what_no_event_tells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without file events a rescan finds the change."""
    monkeypatch.setattr("deviceplugin.filewatch.Watch.hint", lambda *_: None)
    async with watching(PathSource(f"{tmp_path}/*", rescan=0.02)) as following:
        assert await following() == []
        touch(tmp_path, "x")
        assert aliases(await following()) == ["x"]


async def test_churn_of_others_is_not_listed(tmp_path: Path) -> None:
    """Files that do not match the glob cause no new list."""
    async with watching(PathSource(f"{tmp_path}/tty*", rescan=NEVER)) as following:
        await following()
        for number in range(50):
            touch(tmp_path, f"other{number}")
        touch(tmp_path, "tty0")
        assert aliases(await following()) == ["tty0"]


async def test_unchanged_devices_are_the_same_objects(tmp_path: Path) -> None:
    """Unchanged devices are the same objects after another scan."""
    touch(tmp_path, "a", "b")
    source = PathSource(f"{tmp_path}/*")
    before = source.scan()
    touch(tmp_path, "c")
    after = source.scan()
    assert [one is other for one, other in zip(before, after, strict=False)] == [True, True]


@pytest.mark.skipif(not ROOT, reason="only root makes device nodes")
async def test_replaced_node_is_found_without_an_event(tmp_path: Path) -> None:
    """Without a file event a rescan finds a node that was replaced, also with the same inode."""
    os.mknod(tmp_path / "node", stat.S_IFCHR | 0o600, os.makedev(1, 5))
    source = PathSource(f"{tmp_path}/n*", sysfs=sysfs(tmp_path, numa="1", numbers="1:3"), rescan=0.05)
    async with watching(source) as following:
        (before,) = await following()
        (tmp_path / "node").unlink()
        os.mknod(tmp_path / "node", stat.S_IFCHR | 0o600, os.makedev(1, 3))
        (after,) = await following(lambda devices: bool(devices) and devices[0].numa_nodes == (1,))
    assert (before.numa_nodes, before.id) == ((), after.id)
