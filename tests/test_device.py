"""Values that describe devices."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deviceplugin import ContainerEdits, Device, DeviceNode, Health, Mount, Version
from deviceplugin.device import MAX_ID, EditConflictError


def test_unknown_health_is_still_usable() -> None:
    """A device of unknown health is usable; only an unhealthy device is not."""
    assert {health for health in Health if health.usable} == {Health.HEALTHY, Health.UNKNOWN}


def test_plain_path_is_a_node_read_and_write() -> None:
    """A string among the nodes stands for that node, at the same path, read and write."""
    device = Device("a", nodes=["/dev/a", DeviceNode("/dev/b", "/dev/c", "r")])
    assert device.nodes == (DeviceNode("/dev/a", "", "rw"), DeviceNode("/dev/b", "/dev/c", "r"))
    assert [node.path for node in device.container_edits.device_nodes] == ["/dev/a", "/dev/c"]


@pytest.mark.parametrize("permissions", ["", "x", "rx", "rw ", "RW"])
def test_permissions_are_checked(permissions: str) -> None:
    """Permissions are made of r, w and m and are not empty."""
    with pytest.raises(ValueError, match="permissions"):
        DeviceNode("/dev/a", permissions=permissions)


@pytest.mark.parametrize("path", ["", "dev/a", "./a"])
def test_paths_are_absolute(path: str) -> None:
    """Relative and empty paths are refused, with the path in the message."""
    for make in (lambda: DeviceNode(path), lambda: Mount(path, "/a"), lambda: Mount("/a", path)):
        with pytest.raises(ValueError, match="absolute"):
            make()
    with pytest.raises(ValueError, match="container path"):
        DeviceNode("/dev/a", "relative")


@pytest.mark.parametrize("name", ["", "a" * (MAX_ID + 1), "a b", "a\n", "a\x00"])
def test_bad_ids_are_refused(name: str) -> None:
    """An id is 1 to 63 printable characters without spaces."""
    with pytest.raises(ValueError, match="device id"):
        Device(name)


def test_numa_is_one_several_or_unknown() -> None:
    """`numa` takes one node, several nodes or None; -1 counts as None."""
    assert Device("a").numa_nodes == ()
    assert Device("a", numa=0).numa_nodes == (0,)
    assert Device("a", numa=[1, 0]).numa_nodes == (1, 0)
    assert Device("a", numa=-1).numa_nodes == Device("a", numa=[-1]).numa_nodes == ()  # sysfs has -1 if it is unknown
    assert Device("a", numa=[-1, 1]).numa_nodes == (1,)
    assert Device("a", numa=-1) == Device("a", numa=None)


def test_health_changes_make_another_device_and_only_then() -> None:
    """A device in the same health with the same message is the same object."""
    device = Device("a", attributes={"model": "x"})
    assert device.with_health(Health.HEALTHY) is device
    sick = device.with_health(Health.UNHEALTHY, "hot")
    assert (sick.health, sick.message, sick.attributes) == (Health.UNHEALTHY, "hot", {"model": "x"})
    assert sick.with_health(Health.HEALTHY) == device


def test_edits_of_a_device_are_its_nodes_and_more() -> None:
    """The edits of a device have its nodes first, then the nodes and other fields of its own edits."""
    edits = ContainerEdits(env={"A": "1"}, nodes=["/dev/b"], cdi=["v.com/c=d"])
    whole = Device("a", nodes=["/dev/a"], edits=edits).container_edits
    assert [node.host for node in whole.device_nodes] == ["/dev/a", "/dev/b"]
    assert (whole.env, whole.cdi) == ({"A": "1"}, ("v.com/c=d",))
    assert not Device("a").container_edits


def test_version_is_text_of_its_own_kind() -> None:
    """A Version equals its text, and has a type of its own."""
    assert Version("1.2.3") == "1.2.3"
    assert isinstance(Version("1.2.3"), Version)


def test_merge_keeps_what_is_said_twice_once() -> None:
    """A merge has a variable, node, mount, annotation and CDI name that several devices need only once."""
    shared = ContainerEdits({"A": "1"}, ["/dev/ctl"], [Mount("/a", "/b")], {"n": "v"}, ["v.com/c=all"])
    assert ContainerEdits.merge([shared, shared]) == shared
    assert ContainerEdits.merge([]) == ContainerEdits()
    assert not ContainerEdits.merge([])


def test_merge_of_one_device_finds_its_own_contradictions() -> None:
    """Duplicates in a device's own nodes and edits are merged, and contradictions raise EditConflictError."""
    twice = Device("a", nodes=["/dev/a"], edits=ContainerEdits(nodes=["/dev/a"], cdi=["v.com/c=a", "v.com/c=a"]))
    assert ContainerEdits.merge([twice.container_edits]) == ContainerEdits(nodes=["/dev/a"], cdi=["v.com/c=a"])
    wrong = Device("a", nodes=["/dev/a"], edits=ContainerEdits(nodes=[DeviceNode("/dev/b", "/dev/a")]))
    with pytest.raises(EditConflictError, match="device node '/dev/a'"):
        ContainerEdits.merge([wrong.container_edits])


@pytest.mark.parametrize(
    ("one", "two", "what"),
    [
        (ContainerEdits({"A": "1"}), ContainerEdits({"A": "2"}), "environment variable 'A'"),
        (ContainerEdits(annotations={"A": "1"}), ContainerEdits(annotations={"A": "2"}), "annotation 'A'"),
        (
            ContainerEdits(nodes=[DeviceNode("/dev/a", "/dev/x")]),
            ContainerEdits(nodes=[DeviceNode("/dev/b", "/dev/x")]),
            "device node '/dev/x'",
        ),
        (ContainerEdits(mounts=[Mount("/a", "/x")]), ContainerEdits(mounts=[Mount("/b", "/x")]), "mount at '/x'"),
    ],
)
def test_merge_refuses_contradictions_unless_settled(one: ContainerEdits, two: ContainerEdits, what: str) -> None:
    """A merge of contradicting edits is an error that names the contradiction, unless a `winner` decides."""
    with pytest.raises(EditConflictError, match=what):
        ContainerEdits.merge([one, two])
    assert ContainerEdits.merge([one, two], winner=two) == two


_names = st.sampled_from("abc")
_edits = st.builds(
    ContainerEdits,
    env=st.dictionaries(_names, _names),
    nodes=st.lists(_names.map("/dev/{}".format)),
    cdi=st.lists(_names.map("v.com/c={}".format)),
)


@given(st.lists(_edits), _edits)
def test_winner_wins_and_nothing_is_lost(edits: list[ContainerEdits], winner: ContainerEdits) -> None:
    """A merge has all values of `winner`; values of other edits are kept too, or raise EditConflictError."""
    try:
        merged = ContainerEdits.merge(edits, winner)
    except EditConflictError:
        values = [(key, value) for edit in edits for key, value in edit.env.items() if key not in winner.env]
        assert len(dict(values)) < len(set(values))
        return
    assert winner.env.items() <= merged.env.items()
    for edit in (*edits, winner):
        assert edit.env.keys() <= merged.env.keys()
        assert set(edit.device_nodes) <= set(merged.device_nodes)
        assert set(edit.cdi) <= set(merged.cdi)
    assert len(set(merged.cdi)) == len(merged.cdi)


@pytest.mark.parametrize(
    ("kind", "fields", "message"),
    [
        (Device, {"id": "a", "health": False}, "device 'a': health must be Health.HEALTHY, .*, not False"),
        (Device, {"id": "a", "health": "Unhealthy"}, "device 'a': health must be .*UNHEALTHY.*, not 'Unhealthy'"),
        (Device, {"id": "a", "health": True}, "device 'a': health must be"),
        (Device, {"id": "a", "numa": "0"}, "device 'a': numa must be a NUMA node such as 0, .*, not '0'"),
        (Device, {"id": "a", "numa": ["0"]}, r"device 'a': numa must be .* not \['0'\]"),
        (Device, {"id": "a", "numa": True}, "device 'a': numa must be .* not True"),
        (Device, {"id": "a", "nodes": [Path("/dev/a")]}, "device 'a': .* a string such as '/dev/a', not PosixPath"),
        (Device, {"id": "a", "nodes": Path("/dev/a")}, "device 'a': nodes must be a sequence of device nodes"),
        (Device, {"id": "a", "nodes": "/dev/a"}, "sequence of device nodes"),
        (ContainerEdits, {"nodes": "/dev/a"}, "sequence of device nodes"),
        (Device, {"id": "a", "nodes": ["dev/a"]}, "device 'a': .* absolute path, not 'dev/a'"),
        (Device, {"id": "a", "edits": {"env": {"N": "1"}}}, r"device 'a': edits must be ContainerEdits\("),
        (Device, {"id": "a", "message": None}, "device 'a': message must be a string such as 'None', not None"),
        (Device, {"id": "a", "identity": 7}, "device 'a': identity must be a string such as '7', not 7"),
        (Device, {"id": "a", "part_of": "b"}, "device 'a': part_of must be a sequence of identities"),
        (Device, {"id": "a", "part_of": ["b c"]}, "device 'a': part_of is printable characters without spaces"),
        (Device, {"id": "a", "attributes": ["x"]}, r"device 'a': attributes must be a dict .*, not \['x'\]"),
        (Device, {"id": 5}, "a device's id must be a string such as '5', not 5"),
        (ContainerEdits, {"env": {"N": 1}}, "env: the value of 'N' must be a string such as '1', not 1"),
        (ContainerEdits, {"env": {1: "N"}}, "env: the name 1 must be a string such as '1'"),
        (ContainerEdits, {"env": ["N=1"]}, "env must be a dict of strings"),
        (ContainerEdits, {"annotations": {"n": None}}, "annotations: the value of 'n' must be a string"),
        (ContainerEdits, {"mounts": ["/a"]}, r"an entry of mounts must be Mount\(host, container\), not '/a'"),
        (ContainerEdits, {"cdi": "v.com/c=d"}, "cdi must be a sequence of names such as .*, not the string"),
        (ContainerEdits, {"cdi": [1]}, "cdi must be made of strings such as"),
        (ContainerEdits, {"cdi": ["nonsense"]}, "cdi must be .* such as 'vendor.com/class=name', not 'nonsense'"),
        (ContainerEdits, {"cdi": ["v.com/c=d-"]}, "cdi must be .* such as 'vendor.com/class=name', not 'v.com/c=d-'"),
        (ContainerEdits, {"cdi": None}, "cdi must be a sequence of names such as .*, not None"),
        (ContainerEdits, {"mounts": None}, "mounts must be a sequence of .*, not None"),
        (ContainerEdits, {"mounts": Mount("/a", "/b")}, "mounts must be a sequence of .*, not Mount"),
        (ContainerEdits, {"env": {"A=B": "1"}}, "'A=B': a variable's name is not empty and has no '='"),
        (ContainerEdits, {"env": {"": "1"}}, "'': a variable's name is not empty and has no '='"),
        (Mount, {"host": "/a", "container": "/b", "readonly": "yes"}, "readonly must be True or False, not 'yes'"),
        (DeviceNode, {"host": "/dev/a", "permissions": 5}, "permissions must be a string .* not 5"),
        (DeviceNode, {"host": "/dev/a", "container": None}, "container path must be a string"),
        (Device, {"id": "a", "numa": -2}, "device 'a': numa must be .*, not -2"),
        (Device, {"id": "a", "numa": 1024}, r"device 'a': numa must be .* 1023 at the most, .* not 1024"),
        (Device, {"id": "a", "numa": [0, 10**20]}, r"device 'a': numa must be .*, not \[0, 1000"),
        (Device, {"id": "a", "attributes": {"x": 1.5}}, r"attributes: the value of 'x' must be .* Version, not 1\.5"),
        (Device, {"id": "a", "attributes": {"x": None}}, "device 'a': attributes: the value of 'x' must be"),
        (Device, {"id": "a", "attributes": {1: 1}}, "device 'a': attributes: the name 1 must be a string such as '1'"),
        (Device, {"id": "a", "capacity": {"mem": 1.5}}, "device 'a': capacity: the value of 'mem' must be an integer"),
        (Device, {"id": "a", "capacity": {"mem": "16Gb"}}, "quantity such as '16Gi', not '16Gb'"),
        (Device, {"id": "a", "capacity": {"mem": None}}, "quantity such as '16Gi', not None"),
        (Device, {"id": "a", "consumes": {"mem": "4Gi"}}, "consumes must be {set: {counter: amount}}.*, not '4Gi'"),
        (Device, {"id": "a", "consumes": {"set": 1}}, r"device 'a': consumes must be {set: {counter: amount}}"),
        (Device, {"id": "a", "consumes": {"set": {2: 1}}}, "device 'a': consumes: the name 2 must be a string"),
        (Device, {"id": "a", "counters": {"a": {"b": 1.5}}}, r"counters: the value of 'b' must be .* not 1\.5"),
    ],
)
def test_values_of_a_wrong_type_are_refused_where_they_are_written(
    kind: Callable[..., object], fields: dict[str, Any], message: str
) -> None:
    """A value of a wrong type raises at once, with the device, the field and the valid values."""
    with pytest.raises((TypeError, ValueError), match=message):
        kind(**fields)
