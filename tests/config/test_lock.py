"""The lock: the commands and host paths that a config file may use."""

from __future__ import annotations

from pathlib import Path

import pytest

from deviceplugin.config import ConfigError, Lock, load, needed, parse

FILE = """\
resources:
  - name: example.com/a
    devices:
      - path: /run/x*/ctl
      - group: [/dev/a*, /opt/*]
      - simulated: {count: 1, unhealthy_file: /run/bad}
      - nvidia: {library: /opt/libnvidia-ml.so.1}
    nodes: [/dev/control, /etc/control]
    mounts: [{host: /opt/x, container: /x}]
    health: {probe: {command: [look, "{node}"]}}
"""
PLACES = {
    4: "$.resources[0].devices[0].path: '/run/x*/ctl' is a path of the host outside of /dev; "
    "`run --allow-host-path=/run/x*/ctl` allows it",
    5: "$.resources[0].devices[1].group[1]: '/opt/*' is a path of the host outside of /dev",
    6: "$.resources[0].devices[2].simulated.unhealthy_file: '/run/bad' is a path of the host",
    7: "$.resources[0].devices[3].nvidia.library: the agent would execute this, which is not allowed; "
    "`run --allow-commands` allows it",
    8: "$.resources[0].nodes[1]: '/etc/control' is a path of the host",
    9: "$.resources[0].mounts[0].host: '/opt/x' is a path of the host",
    10: "$.resources[0].health.probe.command: the agent would execute this",
}
"""By line of FILE: the line's problem if nothing except /dev is allowed."""


def problems(text: str, lock: Lock) -> dict[int, str]:
    """Return the problems of a file under a lock (what files may use), by line."""
    try:
        parse(text, "file", lock)
    except ConfigError as error:
        return {problem.line: f"{problem.path}: {problem.message}" for problem in error.problems}
    return {}


def one(path: str) -> str:
    return f"resources: [{{name: a/b, devices: [{{path: '{path}'}}]}}]"


def test_all_that_is_not_allowed_is_said_with_its_place() -> None:
    """Each command or host path that is not allowed is an error with file, line, key, and the option that allows it."""
    found = problems(FILE, Lock())
    assert found.keys() == PLACES.keys()
    for line, words in PLACES.items():
        assert found[line].startswith(words)
    with pytest.raises(ConfigError, match=r"^file:4: \$\.resources\[0\]\.devices\[0\]\.path: .*--allow-host-path="):
        parse(FILE, "file", Lock())


def test_what_a_file_needs_allows_it_and_nothing_beside() -> None:
    """The --allow options that are derived from a config file allow its paths and commands, and no other path."""
    lock = needed(parse(FILE))
    paths = ("/etc/control", "/opt/*", "/opt/libnvidia-ml.so.1", "/opt/x", "/run/bad", "/run/x*/ctl")
    assert lock == Lock(True, tuple(path for path in paths if "nvidia" not in path))
    assert problems(FILE, lock) == {}
    assert lock.arguments() == ["--allow-commands", *(f"--allow-host-path={path}" for path in lock.host_paths)]
    for changed in (FILE.replace("/run/x*/ctl", "/run/*/ctl"), FILE.replace("host: /opt/x", "host: /srv")):
        assert len(problems(changed, lock)) == 1
    silent = "resources: [{name: a/b, devices: [path: /dev/x], nodes: [/dev/y], health: {probe: open}}]"
    assert needed(parse(silent)) == Lock()
    assert Lock().arguments() == []


@pytest.mark.parametrize(
    ("path", "prefixes", "allowed"),
    [
        ("/dev/ttyUSB*", (), True),
        ("/dev", (), True),
        ("/device/x", (), False),
        ("/de?/sda", (), False),
        ("/*/sda", (), False),
        ("/run/x", (), False),
        ("/run/x/y", ("/run/x",), True),
        ("/run/xy", ("/run/x",), False),
        ("/run/x", ("/run/x/",), True),
        ("/run", ("/run/x",), False),
        ("/dev/x", ("/run/x",), True),
        ("/run/x1/y", ("/run/x*",), True),
        ("/run/x*", ("/run/x*",), True),
        ("/run/x?", ("/run/x*",), False),
        ("/run/*", ("/run/x*",), False),
        ("/run/y/x1", ("/run/x*",), False),
        ("/dev/ttyUSB0", ("/dev/ttyUSB*",), True),
        ("/dev/sda", ("/dev/ttyUSB*",), False),
        ("/dev/sda", ("/dev/ttyUSB*", "/dev"), True),
        ("/etc/x", ("/",), True),
        ("/dev/x", ("/",), True),
    ],
)
def test_prefixes(path: str, prefixes: tuple[str, ...], allowed: bool) -> None:
    """A prefix allows itself and paths below it, by whole components; a prefix below /dev replaces /dev."""
    assert Lock(host_paths=prefixes).allows(path) is allowed
    assert (problems(one(path), Lock(host_paths=prefixes)) == {}) is allowed


@pytest.mark.parametrize("path", ["/dev/../etc/shadow", "/dev/./../etc", "/dev//x"])
def test_paths_that_go_up_are_no_paths_at_all(path: str) -> None:
    """A path with . or .. components is refused under any lock."""
    assert len(problems(one(path), Lock(host_paths=("/",)))) == 1
    mount = f"resources: [{{name: a/b, devices: [path: /dev/x], mounts: [{{host: {path}, container: /x}}]}}]"
    assert len(problems(mount, Lock(host_paths=("/",)))) == 1


def test_a_mount_is_where_its_links_lead(tmp_path: Path) -> None:
    """A symlink out of the allowed paths is refused, one within is not; a prefix counts by its real path, too."""
    real, link = tmp_path / "real", tmp_path / "link"
    (real / "in").mkdir(parents=True)
    link.symlink_to(real)
    (real / "out").symlink_to("/etc")

    def refused(host: Path, *prefixes: Path) -> str:
        text = f"resources: [{{name: a/b, devices: [path: /dev/x], mounts: [{{host: {host}, container: /x}}]}}]"
        return "".join(problems(text, Lock.resolved(False, map(str, prefixes))).values())

    assert not refused(real / "in", real)
    assert f"'{real}/out' is a symlink out of the allowed paths: '/etc' is a path of the host outside of" in refused(
        real / "out", real
    )
    assert not refused(real / "out", real, Path("/etc"))
    assert not refused(link / "in", link / "in")
    assert "is a symlink out of the allowed paths" in refused(link, link)
    assert not refused(Path("/run/none"), Path("/run"))


def test_a_file_is_read_under_its_lock(tmp_path: Path) -> None:
    """A file is checked under its lock, and the error names the file."""
    file = tmp_path / "config.yaml"
    file.write_text(FILE)
    load(file)
    with pytest.raises(ConfigError, match=rf"^{file}:4: .*--allow-host-path"):
        load(file, Lock(commands=True))
