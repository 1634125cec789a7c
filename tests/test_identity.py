"""Identities of devices beyond their ids: sets of tokens, which name hardware, places and device numbers."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from pathlib import Path

import pytest

from deviceplugin import identity
from deviceplugin.device import ContainerEdits, Device, Mount
from deviceplugin.inventory import Inventory
from deviceplugin.sources.path import PathSource
from tests.sources.trees import Tree


def nodes(numbers: Mapping[str, tuple[str, int, int]]) -> identity.Stat:
    """Return a function in place of `os.stat`, for which these paths are device nodes with these numbers."""

    def look(path: str) -> os.stat_result:
        if path not in numbers:
            raise FileNotFoundError(path)
        kind, major, minor = numbers[path]
        mode = stat.S_IFCHR if kind == "char" else stat.S_IFBLK
        return os.stat_result((mode, 7, 5, 1, 0, 0, 0, 0, 0, 0), {"st_rdev": os.makedev(major, minor)})

    return look


NODES = nodes(
    {
        "/dev/null": ("char", 1, 3),
        "/dev/ctl": ("char", 195, 255),
        "/dev/g0": ("char", 195, 0),
        "/dev/g1": ("char", 195, 1),
        "/dev/link0": ("char", 195, 0),
        "/dev/ram": ("block", 1, 3),
    }
)


@pytest.mark.parametrize(
    ("devices", "tokens"),
    [
        ({"a": ["/dev/g0"], "b": ["/dev/g1"]}, {"a": {"char:195:0"}, "b": {"char:195:1"}}),
        ({"a": ["/dev/g0", "/dev/ctl"], "b": ["/dev/g1", "/dev/ctl"]}, {"a": {"char:195:0"}, "b": {"char:195:1"}}),
        ({"a": ["/dev/g0"], "b": ["/dev/link0"]}, {"a": {"char:195:0"}, "b": {"char:195:0"}}),
        ({"a": ["/dev/g0"], "b": ["/dev/g0", "/dev/g1"]}, {"a": {"char:195:0"}, "b": {"char:195:0", "char:195:1"}}),
        # The node that only device a has is missing now.
        ({"a": ["/dev/none", "/dev/ctl"], "b": ["/dev/g1", "/dev/ctl"]}, {"a": {"char:195:255"}, "b": {"char:195:1"}}),
        ({"a": ["/dev/null"], "b": ["/dev/null", "/dev/g0"]}, {"a": set(), "b": {"char:195:0"}}),
        ({"a": ["/dev/ram"]}, {"a": {"block:1:3"}}),
        ({"a": ["/dev/none"], "b": []}, {"a": set(), "b": set()}),
    ],
)
def test_a_device_is_known_by_the_numbers_that_no_other_one_has(
    devices: Mapping[str, list[str]], tokens: Mapping[str, set[str]]
) -> None:
    """A node of several devices identifies a device only if the device has no other node; major number 1 never does."""
    listed = [Device(name, nodes=paths) for name, paths in devices.items()]
    assert identity.identities(listed, NODES).tokens == tokens


def test_what_the_source_says_identifies_beside_distinctive_numbers() -> None:
    """A device is identified by what its source states, such as a PCI address, and by the numbers of its nodes."""
    listed = [Device("a", nodes=["/dev/g0", "/dev/ctl"], identity="pci:a"), Device("b", nodes=["/dev/ctl"])]
    assert identity.identities(listed, NODES).tokens == {
        "a": {"char:195:0", "char:195:255", "pci:a"},
        "b": {"char:195:255"},
    }, "b has nothing else, and a's containers get it"


def test_nodes_of_edits_do_not_identify() -> None:
    """Device nodes in a device's container edits are not part of the device's identity."""
    device = Device("a", nodes=["/dev/g0"], edits=ContainerEdits(nodes=["/dev/ctl"]))
    assert identity.identities([device], NODES).tokens == {"a": {"char:195:0"}}


def test_paths_are_known_by_what_they_lead_to(tmp_path: Path) -> None:
    """Two links to one file have one identity, two files have two; /dev/null has none."""
    for name in ("one", "two"):
        (tmp_path / name).touch()
    (tmp_path / "one-again").symlink_to(tmp_path / "one")
    one, again, two = PathSource(f"{tmp_path}/*").scan()
    assert one.identity == again.identity != two.identity
    assert one.identity.startswith("file:")
    (null,) = PathSource("/dev/null").scan()
    assert null.identity == ""
    (group,) = PathSource(f"{tmp_path}/two", "/dev/null").scan()
    assert group.identity == two.identity
    assert identity.tokens_now(group) == {two.identity}


def test_a_directory_stands_for_all_nodes_below_it(tmp_path: Path) -> None:
    """A directory counts as all device nodes below it, because a runtime gives a container each of them."""
    (tmp_path / "snd" / "by-path").mkdir(parents=True)
    for name in ("snd/controlC0", "snd/by-path/pcm"):
        (tmp_path / name).symlink_to("/dev/tty" if name.endswith("pcm") else "/dev/ptmx")
    assert identity.numbers_of([str(tmp_path / "snd")]) == identity.numbers_of(["/dev/tty", "/dev/ptmx"])
    assert len(identity.numbers_of([str(tmp_path / "snd")])) == 2


def test_what_a_device_is_now_is_found_by_its_paths(tmp_path: Path) -> None:
    """The tokens of a device are read from its paths: a file that was replaced is other hardware."""
    path = tmp_path / "f"
    path.touch()
    (device,) = PathSource(str(path)).scan()
    assert identity.tokens_now(device) == {device.identity}
    (tmp_path / "g").touch()
    os.replace(tmp_path / "g", path)
    assert device.identity not in identity.tokens_now(device)
    moved = Device("a", nodes=["/dev/g0"], identity="char:195:1")
    assert identity.tokens_now(moved, NODES) == {"char:195:0"}
    known = Device("a", nodes=["/dev/g0"], identity="pci:a", edits=ContainerEdits(mounts=[Mount("/etc", "/etc")]))
    assert identity.tokens_now(known, NODES) == {"pci:a", "char:195:0"}


def test_a_record_counts_during_one_boot() -> None:
    """A recorded identity is valid during one boot only, as device numbers change at a boot."""
    tokens = frozenset({"char:1:2", "pci:a"})
    record = identity.identified(tokens, "x")
    assert record.in_boot("x") == tokens
    assert record.in_boot("y") == identity.UNIDENTIFIED.in_boot("y") == frozenset()
    assert identity.identified(frozenset(), "x") == identity.UNIDENTIFIED


def test_an_identity_has_no_spaces() -> None:
    """An identity with a space is refused."""
    with pytest.raises(ValueError, match="identity"):
        Device("a", identity="a b")


async def test_a_changed_identity_is_a_change_of_the_list(tmp_path: Path) -> None:
    """Other hardware for a device changes the list, also if the source lists the device with equal values."""
    inventory = Inventory("r")
    path = tmp_path / "f"
    path.touch()
    devices = [Device("a", identity="x")]
    assert await identity.publish(inventory, devices, {})
    assert not await identity.publish(inventory, devices, {})
    assert inventory.snapshot.identities == {"a": {"x"}}
    assert inventory.publish(devices, {"a": frozenset({"y"})})
    assert inventory.publish([])
    assert inventory.snapshot.identities == {"a": {"y"}}, "a gone device is still what it was"
    assert inventory.forget(["a"])
    assert inventory.snapshot.identities == {}


@pytest.mark.parametrize("name", ["block:wwn-5000", "char:", "file:serial-7"])
def test_an_identity_may_begin_like_a_token(name: str) -> None:
    """An identity that looks like a token is kept as it is, beside the token of the node's number."""
    device = Device("a", nodes=["/dev/g0"], identity=name)
    assert identity.tokens_now(device, NODES) == {"char:195:0", name}


STICK, OTHER = (frozenset({f"hardware:usb:1:2:{serial}#1.0/tty"}) for serial in "AB")
N0, N1 = frozenset({"char:188:0"}), frozenset({"char:188:1"})


@pytest.mark.parametrize(
    ("was", "now", "same"),
    [
        (N0 | STICK, N1 | STICK, True),
        (N0 | STICK, N0 | OTHER, False),
        (N0 | STICK, N0, True),
        (N0, N0 | OTHER, True),
        (N0 | STICK, N1 | OTHER, False),
        (N0, N1, False),
        (N0 | {"port:/dev/serial/by-path/x"}, N1 | {"port:/dev/serial/by-path/x"}, True),
        (N0 | STICK, frozenset(), True),
        (N0 | STICK, N0 | {"hardware:usb:1:2:A#1.1/tty"}, True),
    ],
)
def test_hardware_counts_before_numbers(was: identity.Tokens, now: identity.Tokens, same: bool) -> None:
    """If two sets of tokens both name hardware, the hardware decides whether they are one device; else the numbers."""
    assert identity.same_hardware(was, now) is identity.same_hardware(now, was) is same


def test_a_node_has_the_hardware_behind_it_and_its_place(tmp_path: Path) -> None:
    """Tokens name a node's hardware and place; holders of a link in `by-path` hold the place, others the hardware."""
    tree = Tree(tmp_path)
    tree.number("195:0", tree.usb("1-2", 4, serial="A5"), "1-2:1.0/tty/ttyACM0")
    look = nodes({"/dev/x/by-id/a": ("char", 195, 0), "/dev/x/by-path/p": ("char", 195, 0)})
    stick = {f"hardware:usb:0403:6001:{name}#1.0/tty/ttyACM" for name in ("A5", "A5@1-2")}
    by_id, by_path = Device("a", nodes=["/dev/x/by-id/a"]), Device("p", nodes=["/dev/x/by-path/p"])
    place, port = "place:usb:1-2#1.0/tty/ttyACM", "port:/dev/x/by-path/p"
    expected = {"a": {"char:195:0", *stick, place}, "p": {"char:195:0", *stick, place, port}}
    assert identity.identities([by_id, by_path], look, str(tree.sys)).tokens == expected
    assert identity.tokens_now(by_id, look, str(tree.sys)) == expected["a"]
    assert identity.tokens_now(by_path, look, str(tree.sys)) == expected["p"]
    in_port = Device("u", nodes=["/dev/x/by-id/a"], identity=identity.port("usb:1-2"))
    assert identity.tokens_now(in_port, look, str(tree.sys)) == {"char:195:0", *stick, place, "port:usb:1-2"}
    assert identity.lasting(frozenset(expected["a"])) == {"char:195:0", *stick}
    assert identity.lasting(frozenset(expected["p"])) == {"char:195:0", place, port}


def test_a_device_is_a_part_of_the_nodes_that_contain_it(tmp_path: Path) -> None:
    """The tokens of nodes that contain a device's hardware are kept apart from its own, which are left out of them."""
    tree = Tree(tmp_path)
    usb = tree.usb("1-2", 4, serial="A5")
    for number, below in (("189:3", ""), ("195:0", "1-2:1.0/tty/ttyACM0")):
        tree.number(number, usb, below)
        (usb / below / "dev").write_text(f"{number}\n")
    look = nodes({"/dev/tty": ("char", 195, 0), "/dev/bus": ("char", 189, 3)})
    listed = [Device("part", nodes=["/dev/tty"]), Device("whole", nodes=["/dev/bus"])]
    both = Device("both", nodes=["/dev/tty", "/dev/bus"])
    assert identity.identities(listed, look, str(tree.sys)).containing == {"part": {"char:189:3"}}
    assert identity.identities([both], look, str(tree.sys)).containing == {}


def test_a_number_has_moved_when_sysfs_shows_other_hardware_or_none(tmp_path: Path) -> None:
    """A granted device number has moved if sysfs no longer shows the granted hardware, or its port, at this number."""
    tree = Tree(tmp_path)
    tree.number("195:0", tree.usb("1-2", 4, serial="A5"), "1-2:1.0/tty/ttyACM0")
    tree.number("195:1", tree.usb("1-3", 5, serial="B6"), "1-3:1.0/tty/ttyACM1")
    numbers = {"char:195:0", "char:195:1", "char:195:2"}
    stick, port = frozenset({"hardware:usb:0403:6001:A5#1.0/tty/ttyACM"}), frozenset({"place:usb:1-2#1.0/tty/ttyACM"})
    for granted in (stick, port):
        assert identity.moved(numbers, granted, str(tree.sys)) == {"char:195:1", "char:195:2"}
    assert identity.moved(numbers, frozenset({"char:195:0"}), str(tree.sys)) == frozenset()


def test_a_holder_that_leaves_nodes_has_them_again_when_it_reaches_them() -> None:
    """If a holder can no longer open its nodes, its hardware tokens stay; nodes that it can open again count again."""
    held = identity.identified(N0 | STICK, "1").reaching(identity.identified(N1, "1"))
    left = held.leaving(N0 | N1)
    assert (left.tokens, left.reached, left.left) == (N0 | STICK, frozenset(), N0)
    assert left.reaching(identity.identified(N0, "1")) == identity.identified(N0 | STICK, "1")


def test_what_a_holder_reaches_is_not_what_the_device_is() -> None:
    """If a holder can open further nodes, it holds their numbers in this boot, but not the hardware behind them."""
    held = identity.identified(N0 | STICK, "1").reaching(identity.identified(N1 | OTHER, "1"))
    assert (held.in_boot("1"), held.valid_in("1").reached) == (N0 | STICK, N1)
    assert held.valid_in("2") == identity.UNIDENTIFIED
    assert held.reaching(identity.identified(frozenset({"char:1:2"}), "2")) == held
