"""CDI specs: their content, their version, and how their files are written."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deviceplugin import cdi
from deviceplugin.cdi import CdiError
from deviceplugin.device import ContainerEdits, DeviceNode, Mount
from dra_bridge.driver import claim_files
from dra_bridge.driver.claim_files import CdiStore

DRIVER = "fpga.example.com"
UID = "0f9c1e2a-7c1d-4a55-9d7e-0a1b2c3d4e5f"


def test_a_spec_has_what_the_plugin_door_would_give() -> None:
    """A CDI spec has the variables, device nodes, permissions and mounts that the device plugin would give."""
    edits = ContainerEdits(
        env={"FPGA": "0"}, nodes=["/dev/null"], mounts=[Mount("/opt", "/opt/fpga", readonly=False), Mount("/a", "/b")]
    )
    assert claim_files.build(DRIVER, {"claim_1_fpga": edits}) == {
        "cdiVersion": "0.3.0",
        "kind": "fpga.example.com/claim",
        "devices": [
            {
                "name": "claim_1_fpga",
                "containerEdits": {
                    "env": ["FPGA=0"],
                    "deviceNodes": [{"path": "/dev/null", "type": "c", "major": 1, "minor": 3, "permissions": "rw"}],
                    "mounts": [
                        {"hostPath": "/opt", "containerPath": "/opt/fpga", "options": ["rbind", "rprivate", "rw"]},
                        {"hostPath": "/a", "containerPath": "/b", "options": ["rbind", "rprivate", "ro"]},
                    ],
                },
            }
        ],
    }


@pytest.mark.parametrize(
    ("name", "nodes", "version"),
    [
        ("a", ["/dev/null"], "0.3.0"),
        ("0", ["/dev/null"], "0.5.0"),
        ("a", [DeviceNode("/dev/null", "/dev/fpga")], "0.5.0"),
    ],
)
def test_the_version_is_as_low_as_the_content_allows(name: str, nodes: list[DeviceNode | str], version: str) -> None:
    """A CDI spec has the lowest version with its features, because runtimes refuse a version too new or too low."""
    assert claim_files.build(DRIVER, {name: ContainerEdits(nodes=nodes)})["cdiVersion"] == version


def test_a_symbolic_link_is_resolved_and_stays_the_containers_name(tmp_path: Path) -> None:
    """A link to a device node is resolved for `hostPath` (containerd#12060), and `path` keeps the link's name."""
    link = tmp_path / "by-id"
    link.symlink_to("/dev/zero")
    spec = claim_files.build(DRIVER, {"a": ContainerEdits(nodes=[DeviceNode(str(link), permissions="mr")])})
    assert spec["devices"][0]["containerEdits"]["deviceNodes"] == [
        {"path": str(link), "hostPath": "/dev/zero", "type": "c", "major": 1, "minor": 5, "permissions": "rm"}
    ]


@pytest.mark.parametrize("directory", [False, True])
def test_a_node_has_the_numbers_of_when_it_was_prepared(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, directory: bool
) -> None:
    """A CDI spec has the type and numbers of a device node, so a restarted container gets the same device."""
    host = tmp_path / "disk"
    host.touch()
    original = os.stat

    def status(path: str, **options: bool) -> os.stat_result | SimpleNamespace:
        if path != str(host):
            return original(path, **options)
        return SimpleNamespace(st_mode=stat.S_IFBLK, st_rdev=os.makedev(259, 7))

    monkeypatch.setattr("deviceplugin.cdi.os.lstat" if directory else "deviceplugin.cdi.os.stat", status)
    node = DeviceNode(str(tmp_path if directory else host), "/dev/disk")
    spec = claim_files.build(DRIVER, {"a": ContainerEdits(nodes=[node])})
    (found,) = spec["devices"][0]["containerEdits"]["deviceNodes"]
    assert (found["hostPath"], found["type"], found["major"], found["minor"]) == (str(host), "b", 259, 7)


def test_a_directory_stands_for_the_nodes_in_it(tmp_path: Path) -> None:
    """A directory in container edits stands for all device nodes below it; other files in it are left out."""
    (tmp_path / "sub").mkdir()
    os.mkfifo(tmp_path / "sub" / "pipe")
    (tmp_path / "file").write_text("")
    spec = claim_files.build(DRIVER, {"a": ContainerEdits(nodes=[DeviceNode(str(tmp_path), "/dev/all")])})
    assert spec["devices"][0]["containerEdits"]["deviceNodes"] == [
        {"path": "/dev/all/sub/pipe", "hostPath": f"{tmp_path}/sub/pipe", "permissions": "rw"}
    ]


@pytest.mark.parametrize(
    ("devices", "message"),
    [
        ({}, "needs a device"),
        ({"a": ContainerEdits()}, "would be empty"),
        ({"a": ContainerEdits(annotations={"a": "b"})}, "would be empty"),
        ({"a b": ContainerEdits(env={"A": "1"})}, "cannot be the name"),
        ({"a": ContainerEdits(env={"A\0": "1"})}, "environment variable"),
        ({"a": ContainerEdits(env={"A": "\0"})}, "NUL"),
        ({"a": ContainerEdits(nodes=["/dev/there-is-no-such-node"])}, "No such file"),
        ({"a": ContainerEdits(nodes=["/etc/hostname"])}, "neither"),
        ({"a": ContainerEdits(nodes=["/etc/ssl"])}, "without device nodes"),
        ({"a": ContainerEdits(mounts=[Mount("/a\0", "/b")])}, "NUL"),
    ],
)
def test_what_a_runtime_would_refuse_is_refused_with_a_reason(devices: dict[str, ContainerEdits], message: str) -> None:
    """Container edits that make a CDI runtime refuse the file, and so all devices of its vendor, are an error."""
    with pytest.raises(CdiError, match=message):
        claim_files.build(DRIVER, devices)


def test_text_that_is_not_unicode_is_refused() -> None:
    """A variable whose text is not valid Unicode is an error, because JSON cannot encode it."""
    with pytest.raises(CdiError, match="JSON"):
        claim_files.encode(claim_files.build(DRIVER, {"a": ContainerEdits(env={"A": "\udc80"})}))


def test_a_driver_that_begins_with_a_digit_is_a_vendor_all_the_same() -> None:
    """A driver's name that begins with a digit gets the prefix `dra.` as CDI vendor; a name with a space fails."""
    assert cdi.qualified("3dfx.example.com", "a") == "dra.3dfx.example.com/claim=a"
    with pytest.raises(CdiError):
        cdi.vendor_of("no spaces please")


def test_a_file_appears_whole_and_is_written_only_when_it_differs(tmp_path: Path) -> None:
    """The first write of a CDI file makes directory and file; a second write of the same data changes nothing."""
    store = CdiStore(DRIVER, str(tmp_path / "run" / "cdi"))
    data = claim_files.encode(claim_files.build(DRIVER, {"claim_x_r": ContainerEdits(env={"A": "1"})}))
    assert store.list() == frozenset()
    assert store.write(UID, data)
    assert not store.write(UID, data)
    assert json.loads(Path(store.path(UID)).read_bytes())["kind"] == "fpga.example.com/claim"
    assert store.device_names(UID) == ("claim_x_r",)
    assert os.listdir(store.directory) == [f"fpga.example.com-claim_{UID}.json"]
    assert store.list() == {UID}
    assert store.remove(UID)
    assert not store.remove(UID)
    assert store.read(UID) is None
    assert store.device_names(UID) == ()


def test_other_drivers_files_and_strange_names_are_left_alone(tmp_path: Path) -> None:
    """A driver lists only its own CDI files with valid names.

    While it lists them, it removes its drafts and no other file.
    """
    names = ["nvidia.com-gpu.json", "fpga.example.com-claim_..json", "other.example.com-claim_x.json"]
    for name in (*names, f".fpga.example.com-claim_{UID}.4711"):
        (tmp_path / name).write_text("not JSON")
    store = CdiStore(DRIVER, str(tmp_path))
    assert store.list() == frozenset()
    assert sorted(os.listdir(tmp_path)) == sorted(names)


def test_a_file_that_is_being_written_is_no_leftover(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While CDI files are listed, a draft that is being written stays, and a draft of a former agent is removed."""
    store, rename = CdiStore(DRIVER, str(tmp_path)), os.rename

    def meanwhile(draft: str, path: str) -> None:
        assert store.list() == frozenset()
        rename(draft, path)

    monkeypatch.setattr(os, "rename", meanwhile)
    assert store.write(UID, b"{}")
    assert store.list() == {UID}
    (tmp_path / f".fpga.example.com-claim_{UID}.0123456789abcdef").touch()  # a draft of a former agent
    assert store.list() == {UID}
    assert os.listdir(tmp_path) == [os.path.basename(store.path(UID))]


def test_a_link_in_the_place_of_a_draft_is_not_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The name of a draft is random; a link of that name makes the write fail, and the link's target stays as it is."""
    store, target = CdiStore(DRIVER, str(tmp_path / "cdi")), tmp_path / "target"
    target.write_text("precious")
    drafts: list[str] = []

    def linked(path: str, flags: int, *mode: int) -> int:
        drafts.append(path)
        os.symlink(target, path)
        return opened(path, flags, *mode)

    opened = os.open
    os.mkdir(store.directory)
    for _ in range(2):
        with monkeypatch.context() as patch:
            patch.setattr(os, "open", linked)
            with pytest.raises(CdiError, match="exists"):
                store.write(UID, b"{}")
    assert len(set(drafts)) == 2
    assert target.read_text() == "precious"
    assert store.write(UID, b"{}")
    assert store.list() == {UID}


@pytest.mark.parametrize("uid", ["", "../x", "a/b", ".", "a" * 65, "a\0b", "-a"])
def test_a_uid_never_leads_out_of_the_directory(tmp_path: Path, uid: str) -> None:
    """A UID that is not a plain name of at most 64 characters is an error: no path leads out of the directory."""
    with pytest.raises(CdiError):
        CdiStore(DRIVER, str(tmp_path)).path(uid)


def test_a_directory_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    """A directory that cannot be written, or one in place of a file, is an error; no draft is left."""
    (tmp_path / "file").write_text("")
    store = CdiStore(DRIVER, str(tmp_path / "file"))
    with pytest.raises(CdiError, match="cannot write"):
        store.write(UID, b"{}")
    assert not store.remove(UID)
    os.makedirs(CdiStore(DRIVER, str(tmp_path)).path(UID))
    with pytest.raises(CdiError, match="cannot remove"):
        CdiStore(DRIVER, str(tmp_path)).remove(UID)
    with pytest.raises(CdiError, match="cannot write"):
        CdiStore(DRIVER, str(tmp_path)).write(UID, b"{}")
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".")]


names = st.text(min_size=1, max_size=5)


@given(
    name=st.text(max_size=8),
    env=st.dictionaries(
        st.text(st.characters(exclude_characters="="), min_size=1, max_size=5), st.text(max_size=5), max_size=3
    ),
    nodes=st.lists(st.sampled_from(["/dev/null", "/dev/zero", "/dev/none"]), max_size=3),
    paths=st.lists(st.tuples(st.text(max_size=6), st.text(max_size=6)), max_size=2),
)
def test_any_edits_become_a_valid_spec_or_an_error(
    name: str, env: dict[str, str], nodes: list[str], paths: list[tuple[str, str]]
) -> None:
    """Any container edits give a CDI spec with a valid name, variables, permissions and absolute paths, or an error."""
    edits = ContainerEdits(env, nodes, [Mount(f"/{host}", f"/{inside}") for host, inside in paths])
    try:
        spec = json.loads(claim_files.encode(claim_files.build(DRIVER, {name: edits})))
    except CdiError:
        return
    (device,) = spec["devices"]
    assert device["name"][0].isalnum()
    assert device["name"][-1].isalnum()
    assert device["name"].isascii()
    contents = device["containerEdits"]
    assert contents
    assert all(variable.index("=") > 0 for variable in contents.get("env", ()))
    assert all(node["path"].startswith("/") and node["permissions"] for node in contents.get("deviceNodes", ()))
    assert spec["cdiVersion"] == ("0.3.0" if device["name"][0].isalpha() else "0.5.0")
