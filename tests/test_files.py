"""Writing a file by a draft that is renamed, and comparing directories across mounts."""

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from deviceplugin import files


@pytest.mark.parametrize("left", ["nothing", "a draft", "a link"])
def test_put_replaces_what_is_there(tmp_path: Path, left: str) -> None:
    """`put` replaces the file, also if a crash left a draft; a link in place of the draft is not followed."""
    path, draft, other = tmp_path / "file", tmp_path / "draft", tmp_path.parent / f"{tmp_path.name}-other"
    other.write_bytes(b"precious")
    path.write_bytes(b"former")
    if left == "a draft":
        draft.write_bytes(b"half of something longer")
    if left == "a link":
        draft.symlink_to(other)
    files.put(str(path), b"new", str(draft), 0o600)
    assert path.read_bytes() == b"new"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert not path.is_symlink()
    assert other.read_bytes() == b"precious"
    assert os.listdir(tmp_path) == ["file"]


def test_put_that_fails_leaves_the_former_file_and_no_draft(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the draft cannot be written, for example on a full disk, the former file stays and no draft is left."""
    path = tmp_path / "file"
    path.write_bytes(b"former")

    def full(descriptor: int, *_args: object) -> None:
        os.close(descriptor)
        raise OSError("no space left")

    monkeypatch.setattr(files, "open", full, raising=False)
    with pytest.raises(OSError, match="no space left"):
        files.put(str(path), b"new", str(tmp_path / "draft"), 0o600)
    assert path.read_bytes() == b"former"
    assert os.listdir(tmp_path) == ["file"]


def test_a_file_that_has_its_content_already_stays(tmp_path: Path) -> None:
    """`put_changed` creates the directory, leaves a file with the same bytes, and replaces another one."""
    path, draft = tmp_path / "a" / "b" / "f", str(tmp_path / "a" / "b" / "draft")
    assert files.put_changed(str(path), b"one", draft, 0o600)
    before = files.file_identity(path)
    assert not files.put_changed(str(path), b"one", draft, 0o600)
    assert files.file_identity(path) == before
    assert files.put_changed(str(path), b"two", draft, 0o600)
    assert path.read_bytes() == b"two"


def test_a_directory_has_one_place_in_all_mounts(tmp_path: Path) -> None:
    """`place_of` gives one result for a directory: before it exists, through a link, and with a space in its name."""
    directory = tmp_path / "with a space"
    place = files.place_of(directory)
    assert place.endswith("/with a space")
    directory.mkdir()
    (tmp_path / "link").symlink_to(directory)
    assert place == files.place_of(directory) == files.place_of(tmp_path / "link")
    assert place != files.place_of(tmp_path)
    assert files.place_of("/proc") != files.place_of("/")


def test_the_place_in_another_mount_namespace(tmp_path: Path) -> None:
    """For a bind mount, `place_of` returns the place of the mounted directory, even after the directory is removed."""
    directory, point = tmp_path / "plugins \\ one", tmp_path / "point"
    directory.mkdir()
    point.mkdir()
    program = "import sys; from deviceplugin.files import place_of; print(place_of(sys.argv[1]))"
    look = [sys.executable, "-c", program, str(point)]
    script = 'mount --bind "$1" "$2" && shift 2 && "$@" && rmdir "$D" && "$@"'
    command = ["unshare", "--map-root-user", "--mount", "sh", "-c", script, "sh", str(directory), str(point), *look]
    ran = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "D": str(directory)})
    if ran.returncode and not ran.stdout:
        pytest.skip(f"no mount namespace here: {ran.stderr}")
    assert ran.stdout.splitlines() == [files.place_of(directory)] * 2, ran.stderr


def test_no_place_is_known_without_proc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where /proc cannot be read, as in a sandbox that hides the mounts, `place_of` returns ""."""

    def hidden(*_args: object) -> None:
        raise FileNotFoundError("/proc/self/fdinfo")

    monkeypatch.setattr(os, "open", hidden)
    assert files.place_of(tmp_path) == ""
