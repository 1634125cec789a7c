"""The command line `deviceplugin`: its output and its exit status."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from deviceplugin import cli
from deviceplugin.naming import node_name
from deviceplugin.node.options import parse_run as options_of
from deviceplugin.testing.kubelet import FakeKubelet
from deviceplugin.version import VERSION
from tests.programs import running

GOOD = "resources:\n  - name: example.com/sim\n    devices:\n      - simulated: {count: 2, numa: 2}\n"
BAD = "resources:\n  - name: sim\n    devices: []\n"


@pytest.fixture
def good(tmp_path: Path) -> Path:
    (file := tmp_path / "good.yaml").write_text(GOOD)
    return file


@pytest.fixture
def bad(tmp_path: Path) -> Path:
    (file := tmp_path / "bad.yaml").write_text(BAD)
    return file


def usage(*argv: str) -> int:
    """Run a command line that ends with SystemExit; return its status."""
    with pytest.raises(SystemExit) as caught:
        cli.main(argv)
    code = caught.value.code
    assert isinstance(code, int)
    return code


def in_process_of_its_own(*argv: str, after: str = "") -> subprocess.CompletedProcess[str]:
    """Run a command line in a process of its own, and then the code `after`."""
    code = f"import sys\nfrom deviceplugin.cli import main\nstatus = main({list(argv)!r})\n{after}\nsys.exit(status)"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)


# validate


def test_good_file_is_said_to_be_good(good: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`validate` reports each valid file, and ends with 0."""
    assert cli.main(["validate", str(good), "--config", str(good)]) == 0
    assert capsys.readouterr().out == f"{good}: good, 1 resource\n" * 2


def test_bad_file_is_explained(good: Path, bad: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`validate` explains an invalid file on standard error, goes on with the next file, and ends with 2."""
    assert cli.main(["validate", str(bad), str(good)]) == 2
    said = capsys.readouterr()
    assert said.out == f"{good}: good, 1 resource\n"
    assert said.err.splitlines()[:3] == [
        f"{bad}:2: $.resources[0].name: 'sim' is not an extended resource's name: it has no vendor domain; "
        "did you mean example.com/sim?",
        f"{bad}:3: $.resources[0].devices: the list is empty; it needs at least 1",
        f"{bad} cannot be used: 2 problems",
    ]
    assert cli.main(["validate"]) == 2
    assert "name a config file" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["validate", "schema"])
def test_checks_load_no_grpc(good: Path, command: str) -> None:
    """`validate` and `schema` load neither gRPC, asyncio, aiohttp, watchdog nor rich."""
    argv = [command, str(good)] if command == "validate" else [command]
    heavy = "print([name for name in ('grpc', 'asyncio', 'aiohttp', 'watchdog', 'rich') if name in sys.modules])"
    done = in_process_of_its_own(*argv, after=heavy)
    assert done.returncode == 0
    assert done.stdout.splitlines()[-1] == "[]"


# devices


def test_devices_are_shown_in_columns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`devices` prints the devices that `run` would serve now in aligned columns, and notes below the table."""
    (tmp_path / "alias").symlink_to("/dev/null")
    (tmp_path / "unhealthy").write_text("sim-1 too hot\n")
    file = tmp_path / "config.yaml"
    file.write_text(
        f"""
resources:
  - name: example.com/null
    devices: [path: {tmp_path}/alias, path: {tmp_path}/tty*]
    sharing: {{replicas: 3}}
    mounts: [{{host: /opt, container: /opt}}]
  - name: example.com/sim
    devices: [simulated: {{count: 2, numa: 2, unhealthy_file: {tmp_path}/unhealthy}}]
  - name: example.com/apart
    devices: [simulated: {{count: 1, numa: 1}}]
    topology: false
"""
    )
    assert cli.main(["devices", "--config", str(file)]) == 0
    lines = capsys.readouterr().out.splitlines()
    header = lines[0]
    columns = [header.index(name) for name in header.split()]
    rows = [
        [line[at:end].strip() for at, end in zip(columns, [*columns[1:], None], strict=True)] for line in lines[1:5]
    ]
    assert header.split() == ["RESOURCE", "DEVICE", "HEALTH", "REPLICAS", "NUMA", "NODES"]
    assert rows[0][2:] == ["healthy", "3", "-", f"{tmp_path}/alias -> /dev/null"]
    assert rows[1] == ["example.com/sim", "sim-0", "healthy", "1", "0", "-"]
    assert rows[2] == ["example.com/sim", "sim-1", "unhealthy (too hot)", "1", "1", "-"]
    assert rows[3] == ["example.com/apart", "sim-0", "healthy", "1", "-", "-"]
    assert lines[6:] == [
        "example.com/null: 1 device, offered 3 times in all",
        f"  {tmp_path}/tty* matches nothing now; what is plugged in later is found",
        "example.com/sim: 2 devices, 1 of them unhealthy",
        "  no device node, containers get what the resource's own keys say: sim-0, sim-1",
        "example.com/apart: 1 device",
        "  no device node, containers get what the resource's own keys say: sim-0",
    ]


def test_devices_are_given_to_programs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`devices -o json` prints the devices and notes as JSON."""
    (tmp_path / "file").touch()
    file = tmp_path / "config.yaml"
    file.write_text(
        f"resources: [{{name: a.b/c, driver: c.a.b, devices: [path: /dev/null, path: {tmp_path}/fil?, path: /dev/x*],"
        " permissions: r, sharing: {replicas: 2}}]"
    )
    assert cli.main(["devices", "--config", str(file), "-o", "json"]) == 0
    (resource,) = json.loads(capsys.readouterr().out)["resources"]
    null, plain = resource.pop("devices")
    assert resource == {
        "name": "a.b/c",
        "driver": "c.a.b",
        "topology": True,
        "offered": 4,
        "notes": [
            "/dev/x* matches nothing now; what is plugged in later is found",
            f"not a device node, containers get it as a mount: {tmp_path}/file",
        ],
    }
    assert null == {
        "id": "null",
        "health": "healthy",
        "message": "",
        "replicas": 2,
        "numa": [],
        "nodes": [{"host": "/dev/null", "container": "/dev/null", "permissions": "r"}],
        "mounts": [],
    }
    assert plain["mounts"] == [{"host": f"{tmp_path}/file", "container": f"{tmp_path}/file", "readonly": True}]


def test_source_that_never_lists_is_said(
    good: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A resource whose devices cannot be listed is reported, and the status is 1."""

    async def stuck(_: Any) -> Any:
        raise TimeoutError

    monkeypatch.setattr(cli, "first_list", stuck)
    assert cli.main(["devices", "--config", str(good)]) == 1
    assert "example.com/sim: its devices cannot be listed: TimeoutError" in capsys.readouterr().err


def test_terminal_gets_a_table(good: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """On a terminal the table is rich's where it is installed, and plain columns where it is not."""
    pytest.importorskip("rich")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert cli.main(["devices", "--config", str(good)]) == 0
    with_rich = capsys.readouterr().out
    monkeypatch.setitem(sys.modules, "rich.console", None)
    assert cli.main(["devices", "--config", str(good)]) == 0
    plain = capsys.readouterr().out
    assert all("sim-1" in text and "RESOURCE" in text for text in (with_rich, plain))


def test_a_table_fits_into_the_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a terminal, long paths are on lines of their own, not cut; in a file, each device has one line."""
    places = [tmp_path / f"a-device-directory-with-a-long-name/serial-number-{number}-of-a-port" for number in (1, 2)]
    places[0].parent.mkdir()
    for place in places:
        place.touch()
    file = tmp_path / "config.yaml"
    name = "example.com/serial-ports-of-the-laboratory"
    file.write_text(json.dumps({"resources": [{"name": name, "devices": [{"path": f"{places[0].parent}/*"}]}]}))
    assert cli.main(["devices", str(file)]) == 0
    assert max(map(len, capsys.readouterr().out.splitlines())) > 120
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    for columns in (80, 120):
        monkeypatch.setenv("COLUMNS", str(columns))
        assert cli.main(["devices", str(file)]) == 0
        table = capsys.readouterr().out.partition("\n\n")[0].splitlines()
        assert (table[0].split(), table[1]) == (["DEVICE", "HEALTH", "REPLICAS", "NUMA"], name)
        assert [line.split()[1:] for line in table[2::2]] == [["healthy", "1", "-"]] * len(places)
        assert table[3::2] == [f"      {place}" for place in places]


@pytest.mark.parametrize("command", ["devices", "validate"])
def test_output_that_is_full_is_said(good: Path, command: str) -> None:
    """If the output cannot be written, one line reports it, and the status is 1."""
    argv = [sys.executable, "-m", "deviceplugin", command, str(good)]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(argv, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    said = "the output cannot be written: No space left on device"
    assert (done.returncode, done.stderr.splitlines()[-1]) == (1, said)
    assert "Traceback" not in done.stderr


def test_reader_that_leaves_early_is_no_error(good: Path) -> None:
    """Output into a closed pipe ends without a message, with 0."""
    code = f"from deviceplugin.cli import main\nimport sys\nsys.exit(main(['devices', '--config', {str(good)!r}]))"
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [sys.executable, "-u", "-c", code], stdout=writing, stderr=subprocess.PIPE, text=True, timeout=60, check=False
    )
    os.close(writing)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("argv", [["{}"], ["--config", "{}"], ["-"]])
def test_devices_of_a_file_or_of_standard_input(
    argv: list[str], good: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`devices` takes its file as an argument or with `--config`, and `-` is standard input."""
    with good.open() as file:
        monkeypatch.setattr(sys, "stdin", file)
        assert cli.main(["devices", *(word.format(good) for word in argv)]) == 0
    assert "\nexample.com/sim: 2 devices\n" in capsys.readouterr().out


def test_validate_notes_what_is_no_device_node(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Paths to plain files and simulated devices are valid; `validate` notes that they have no device node."""
    for number in range(5):
        (tmp_path / f"file{number}").touch()
    file = tmp_path / "config.yaml"
    file.write_text(
        f"resources: [{{name: a.b/c, devices: [path: /dev/null, path: {tmp_path}/file*]}}, "
        "{name: a.b/d, devices: [simulated: {count: 1}]}]"
    )
    assert cli.main(["validate", str(file)]) == 0
    assert capsys.readouterr().err.splitlines() == [
        f"{file}: note: `run` takes it only with '--allow-host-path={tmp_path}/file*'",
        f"{file}: note: a.b/d: simulated devices have no device node",
        f"{file}: warning: a.b/c: not a device node, containers get it as a mount: {tmp_path}/file0, {tmp_path}/file1, "
        f"{tmp_path}/file2 and 2 more",
    ]


def test_validate_of_standard_input(
    bad: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`validate -` reads standard input, and names it <stdin> in errors."""
    with bad.open() as file:
        monkeypatch.setattr(sys, "stdin", file)
        assert cli.main(["validate", "-"]) == 2
    assert capsys.readouterr().err.startswith("<stdin>:2: $.resources[0].name: ")


@pytest.mark.parametrize(
    ("name", "argv", "words"),
    [
        ("stdin", ["validate", "-"], "the standard input is closed\n"),
        ("stdin", ["import", "-"], "the standard input is closed\n"),
        ("stdout", ["schema"], "the standard output or error is closed; redirect it to /dev/null\n"),
    ],
)
def test_closed_streams(
    name: str, argv: list[str], words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A stream that is needed and was closed by the caller (`<&-`, `>&-`) is an error with status 2."""
    monkeypatch.setattr(sys, name, None)
    assert cli.main(argv) == 2
    assert capsys.readouterr().err == words


# schema, version, help, wrong usage


def test_schema_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    """`schema` prints the file's JSON schema."""
    assert cli.main(["schema"]) == 0
    assert json.loads(capsys.readouterr().out)["$schema"].endswith("2020-12/schema")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_is_printed(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    """`completion` prints a script for each shell, with the commands in it."""
    pytest.importorskip("shtab")
    assert cli.main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert "deviceplugin" in script
    assert "validate" in script


def test_completion_completes(tmp_path: Path) -> None:
    """In bash the printed script completes commands, options and files."""
    pytest.importorskip("shtab")
    script = in_process_of_its_own("completion", "bash").stdout
    (tmp_path / "a-file").touch()
    for words, found in (("vali", "validate"), ("run --metrics-", "--metrics-address"), ("devices a-", "a-file")):
        number = len(words.split())
        ask = f"COMP_WORDS=(deviceplugin {words}); COMP_CWORD={number}; _shtab_deviceplugin; echo ${{COMPREPLY[@]}}"
        done = subprocess.run(
            ["bash", "-c", f"{script}\n{ask}"], capture_output=True, text=True, cwd=tmp_path, timeout=60, check=False
        )
        assert done.stdout.split() == [found]


def test_completion_without_its_extra(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Without shtab the error names the extra that installs it."""
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert cli.main(["completion", "bash"]) == 2
    advice = f"pip install '.[cli]' in the repository, or pip install 'deviceplugin-{VERSION}-py3-none-any.whl[cli]'"
    assert capsys.readouterr().err == f"shtab is not installed; {advice}\n"


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--version"], "deviceplugin 0."),
        (["--help"], "exit status: 0 success"),
        (["run", "--help"], "exit status: 0 success"),
        (["devices", "--help"], "exit status: 0 success"),
    ],
)
def test_help_and_version(argv: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Help explains the exit status, `--version` prints the version, and both end with 0."""
    assert usage(*argv) == 0
    assert said in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ([], "required: COMMAND"),
        (["fly"], "invalid choice: 'fly'"),
        (["run"], "required: --config"),
        (["run", "--conf", "x"], "--config"),
        (["run", "--config", "x", "--log-format", "xml"], "invalid choice: 'xml'"),
        (["run", "--config", "x", "--metrics-address", "9410"], "write :9410 for all addresses"),
        (["run", "--config", "x", "--metrics-address", ":x"], "is not HOST:PORT"),
        (["run", "--config", "x", "--metrics-address", ":99999"], "is not HOST:PORT"),
        (["run", "--config", "x", "--metrics-address", "::1:80"], "in brackets: [::1]:80"),
        *(
            (["run", "--config", "x", f"--allow-host-path={path}"], "is not an absolute path without . and ..")
            for path in ("run/x", "/run/../etc", "/./x", "")
        ),
    ],
)
def test_wrong_usage_is_said(argv: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Wrong usage is reported on standard error, with status 2."""
    assert usage(*argv) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("hold", [[], ["--hold"]])
def test_demo_is_run(hold: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """`demo` runs the demo, passes `--hold` on, and ends with the demo's status."""
    held: list[bool] = []

    def main(hold: bool) -> int:
        held.append(hold)
        return 7

    monkeypatch.setattr("deviceplugin.demo.main", main)
    assert cli.main(["demo", *hold]) == 7
    assert held == [bool(hold)]


def test_interrupt_ends_quietly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control-C ends a command without a traceback, with status 130."""

    def interrupted(hold: bool) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("deviceplugin.demo.main", interrupted)
    assert cli.main(["demo"]) == 130


# run


@pytest.mark.parametrize(
    ("argv", "plugins", "socket", "metrics"),
    [
        ([], "/var/lib/kubelet/device-plugins", "/var/lib/kubelet/pod-resources/kubelet.sock", None),
        (["--kubelet-root=k"], "{}/k/device-plugins", "{}/k/pod-resources/kubelet.sock", None),
        (["--device-plugin-dir=/d", "--pod-resources-socket=/s", "--metrics-address=:1"], "/d", "/s", ":1"),
    ],
)
def test_options_of_an_authors_plugin(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, argv: list[str], plugins: str, socket: str, metrics: str | None
) -> None:
    """An author's own plugin takes the same options as `run`; a relative path is below the working directory."""
    monkeypatch.chdir(tmp_path)
    options = options_of(argv)
    assert str(options.paths.plugins) == plugins.format(tmp_path)
    assert str(options.paths.pod_resources) == socket.format(tmp_path)
    assert options.metrics_address == metrics
    with pytest.raises(SystemExit, match="2"):
        options_of(["--device-plugin-dir", ""])


@pytest.mark.parametrize("argv", [["devices"], ["run"], ["run", "--log-format=json"]])
def test_bad_file_is_not_used(bad: Path, argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """`devices` and `run` explain an invalid file, as text or as a line of JSON, and end with 2."""
    assert cli.main([*argv, "--config", str(bad)]) == 2
    out, error = capsys.readouterr()
    assert out == ""
    if "--log-format=json" in argv:
        said = json.loads(error)
        assert (said["line"], said["path"]) == (2, "$.resources[0].name")
        error = said["msg"]
    assert error.startswith(f"{bad}:2: $.resources[0].name: ")
    assert "Traceback" not in error


def test_file_beyond_its_options_is_not_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`run` refuses commands and host paths that no option allows; `validate` and `devices` name the options."""
    file = tmp_path / "config.yaml"
    (tmp_path / "link").symlink_to("/proc/version")
    file.write_text(
        f"resources:\n- name: a.b/c\n  devices: [path: {tmp_path}/link]\n  health: {{probe: {{command: ['true']}}}}\n"
    )
    run = ["run", "--config", str(file), "--kubelet-root", f"/{'x' * 300}"]
    assert cli.main(run) == 2
    assert capsys.readouterr().err.splitlines() == [
        f"{file}:3: $.resources[0].devices[0].path: '{tmp_path}/link' is a path of the host outside of /dev; "
        f"`run --allow-host-path={tmp_path}/link` allows it",
        f"{file}:4: $.resources[0].health.probe.command: the agent would execute this, which is not allowed; "
        "`run --allow-commands` allows it",
        f"{file} cannot be used: 2 problems",
    ]
    own = f"{file}: note: `run` takes it only with --allow-commands --allow-host-path={tmp_path}/link"
    assert cli.main(["validate", str(file)]) == 0
    assert capsys.readouterr().err.splitlines()[0] == own
    assert cli.main(["devices", str(file)]) == 0
    assert capsys.readouterr().err.splitlines() == [f"{own} --allow-host-path=/proc/version"]
    # The agent has no access to the kubelet's directory: the name is too long, which also fails for root.
    assert cli.main([*run, "--allow-commands", "--allow-host-path", str(tmp_path)]) == 1
    errors = capsys.readouterr().err
    assert "device-plugins: File name too long; the agent needs write access to the kubelet's" in errors
    assert "Traceback" not in errors


def test_devices_are_served_until_sigterm(good: Path, fake_kubelet: FakeKubelet) -> None:
    """`run` serves the file's devices to the kubelet until SIGTERM, then ends with 0 and leaves no socket."""
    command = [
        *(sys.executable, "-m", "deviceplugin", "run", "--config", str(good), "--log-format", "json"),
        *fake_kubelet.arguments,
    ]
    with running(command, stderr=subprocess.PIPE) as process:
        fake_kubelet.wait_allocatable("example.com/sim", 2, timeout=30)
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=30)
    assert process.returncode == 0
    lines = [json.loads(line) for line in errors.splitlines()]
    # watchdog itself logs an error if its thread is about to end.
    assert {line["level"] for line in lines if not line["logger"].startswith("watchdog")} == {"info"}, errors
    said = [line["msg"] for line in lines]
    assert said[0] == f"version {VERSION} starts on node {node_name()}: config file {good}"
    assert "SIGTERM: the agent ends; pods keep their devices" in said
    sockets = [entry.name for entry in fake_kubelet.device_plugin_dir.iterdir() if entry.is_socket()]
    assert sockets == ["kubelet.sock"]


def test_validate_warns_of_one_thing_under_two_ids(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two resources with the same device are valid, with a warning; an excluded device causes no warning."""
    (tmp_path / "node").touch()
    (tmp_path / "link").symlink_to("node")
    file = tmp_path / "config.yaml"
    text = (
        f"resources: [{{name: a.b/c, devices: [path: {tmp_path}/node]}}, {{name: a.b/d, devices: [path: {tmp_path}/l*]"
    )
    file.write_text(f"{text}}}]")
    assert cli.main(["validate", str(file)]) == 0
    said = capsys.readouterr()
    assert said.out == f"{file}: good, 2 resources\n"
    assert "of a.b/c are the same hardware (file " in said.err
    assert "`nodes`" not in said.err
    assert "neither is offered" not in said.err
    file.write_text(f"{text}, driver: a.b, dra: {{share: all}}}}]")
    assert cli.main(["validate", str(file)]) == 0
    assert "; neither is offered, since" in capsys.readouterr().err
    file.write_text(f"{text}, exclude: ['*link*']}}]")
    assert cli.main(["validate", str(file)]) == 0
    assert "the same hardware" not in capsys.readouterr().err


def test_validate_agrees_with_devices_about_two_paths_to_one_device(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of several paths in one resource to one file, a device is made of one; `devices` names the others."""
    (tmp_path / "node").touch()
    for number in range(5):
        (tmp_path / f"link{number}").symlink_to("node")
    file = tmp_path / "config.yaml"
    file.write_text(f"resources: [{{name: a.b/c, devices: [path: {tmp_path}/*nk*, path: {tmp_path}/node]}}]")
    assert cli.main(["validate", str(file)]) == 0
    assert "the same hardware" not in capsys.readouterr().err
    file.write_text(f"resources: [{{name: a.b/c, devices: [path: {tmp_path}/link0, path: {tmp_path}/link0]}}]")
    assert cli.main(["devices", str(file)]) == 0
    out = capsys.readouterr().out
    assert "a.b/c: 1 device\n" in out
    assert "found by two entries and served once, as the first entry has it" in " ".join(out.split())


def test_validate_says_where_a_shared_node_belongs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """If two devices share a node and have others of their own, the warning says where the shared node belongs."""
    entries = []
    for name in ("first", "second"):
        (tmp_path / name).touch()
        entries.append(f"{{name: a.b/{name}, devices: [{{group: [{tmp_path}/{name}, '/dev/tt[y]']}}]}}")
    file = tmp_path / "config.yaml"
    file.write_text(f"resources: [{', '.join(entries)}]")
    assert cli.main(["validate", str(file)]) == 0
    said = capsys.readouterr().err
    assert "(char 5:0): while one is held, the other is given to nobody; a node that they only share" in said


@pytest.mark.parametrize(("share", "noted"), [(9, True), (8, False), ("all", False)])
def test_validate_notes_a_share_beyond_the_devices(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], share: object, *, noted: bool
) -> None:
    """A `dra.share` (devices for claims) above the number of simulated devices is valid, with a note."""
    file = tmp_path / "config.yaml"
    devices = "[simulated: {count: 8}]"
    text = f"resources: [{{name: a.b/c, driver: a.b, dra: {{share: {share}}}, devices: {devices}}}]"
    file.write_text(text)
    assert cli.main(["validate", str(file)]) == 0
    assert ("note: a.b/c: `dra: {share: 9}` of 8 devices: all go to claims" in capsys.readouterr().err) is noted
