"""The release: its workflow, the kubectl plugin, and consistent addresses and versions."""

from __future__ import annotations

import configparser
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from deviceplugin.version import VERSION
from tests import package, version
from tests.cluster import build
from tests.programs import tool

ROOT = Path(__file__).parent.parent
KREW = ROOT / "examples" / "krew"
WORKFLOWS = ROOT / ".github" / "workflows"
DOCKERFILE = (ROOT / "examples" / "Dockerfile").read_text()


def address() -> str:
    """Return the project's address, which setup.cfg has."""
    settings = configparser.ConfigParser()
    settings.read(ROOT / "setup.cfg")
    return settings["metadata"]["url"]


PACKAGE = f"deviceplugin[bridge,cli] @ {address()}/releases/download/v{VERSION}/deviceplugin-{VERSION}-py3-none-any.whl"
"""The wheel of the release, which the krew program installs until the package index has the package."""


def test_project_has_one_address() -> None:
    """Wherever the project's address stands, it is that of setup.cfg."""
    owner = address().rsplit("/", 1)[0]
    files = [
        "setup.cfg",
        "charts/dra-bridge/Chart.yaml",
        "charts/dra-bridge/README.md",
        "examples/krew/dra-bridge.yaml",
    ]
    found = [
        link
        for name in files
        for link in re.findall(r"https://github\.com/[^/\s]+/[^/\s)]+", (ROOT / name).read_text())
    ]
    assert set(found) == {address()}, f"{owner} is not the owner everywhere"
    assert len(found) > len(files)


def test_version_is_set_everywhere(tmp_path: Path) -> None:
    """Each file of `version.FILES` has the present version, and one command sets it in all of them."""
    assert "\nversion = attr: deviceplugin.version.VERSION\n" in (ROOT / "setup.cfg").read_text()
    assert {name: set(those) for name, those in version.found().items()} == {key: {VERSION} for key in version.FILES}
    for name in version.FILES:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, tmp_path / name)
    assert version.main(["9.8.7"], tmp_path) == 0
    assert {one for those in version.found(tmp_path).values() for one in those} == {"9.8.7"}
    assert [name for name in version.FILES if VERSION in (tmp_path / name).read_text()] == []


def test_no_other_file_has_the_version() -> None:
    """No other file has the version, as the command that sets the version would not change it there."""
    parts = ("README.md", "api", "charts", "deviceplugin", "docs", "dra_bridge", "examples", ".github", "setup.cfg")
    files = [path for part in parts for path in (ROOT / part, *(ROOT / part).rglob("*")) if path.is_file()]
    named = re.compile(rf"(deviceplugin[-:]|/v|ersion: v?|==){re.escape(VERSION)}")
    texts = {str(path.relative_to(ROOT)): path for path in files if path.suffix != ".pyc"}
    found = {name for name, path in texts.items() if named.search(path.read_text(errors="replace"))}
    assert found <= set(version.FILES)


def test_krew_manifest() -> None:
    """The manifest names this version's archive, whose files are here, and the program runs this version."""
    manifest: dict[str, Any] = yaml.safe_load((KREW / "dra-bridge.yaml").read_text())
    spec = manifest["spec"]
    assert (manifest["kind"], manifest["metadata"]["name"]) == ("Plugin", "dra-bridge")
    (platform,) = spec["platforms"]
    assert platform["uri"] == f"{address()}/releases/download/v{VERSION}/kubectl-dra_bridge.tar.gz"
    assert (KREW / platform["bin"]).stat().st_mode & 0o111
    assert {one["from"] for one in platform["files"]} == {platform["bin"], "LICENSE"}
    assert f"package='{PACKAGE}'" in (KREW / platform["bin"]).read_text()


@pytest.mark.parametrize("runner", ["uvx", "pipx", ""])
def test_krew_program(tmp_path: Path, runner: str) -> None:
    """The krew program runs the package with the available runner, or names the package to install."""
    if runner:
        (tmp_path / runner).write_text('#!/bin/sh\nprintf "%s\\n" "$@"\nexit 3\n')
        (tmp_path / runner).chmod(0o755)
    command = ["/bin/sh", str(KREW / "kubectl-dra_bridge"), "status", "--node", "a b"]
    done = subprocess.run(command, env={"PATH": str(tmp_path)}, capture_output=True, text=True)
    if runner:
        arguments = done.stdout.splitlines()
        assert arguments[-4:] == ["kubectl-dra_bridge", "status", "--node", "a b"]
        assert PACKAGE in arguments
        assert done.returncode == 3
    else:
        assert done.returncode == 2
        assert f"pip install '{PACKAGE}'" in done.stderr


@tool("actionlint")
@pytest.mark.parametrize("path", sorted(WORKFLOWS.glob("*.yml")), ids=lambda path: path.name)
def test_workflows(path: Path) -> None:
    """actionlint finds no problem in the workflows."""
    # actionlint knows an action's inputs by the action's major version, not by a commit.
    text = re.sub(r"@[0-9a-f]{40} # (v\d+)\S*", r"@\1", path.read_text())
    command = [str(build.ensure_tool("actionlint")), "-no-color", "-stdin-filename", str(path), "-"]
    done = subprocess.run(command, input=text, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_actions_are_pinned() -> None:
    """All workflows name an action by the same commit, with its version as a comment, and images by a digest."""
    lines = [line for path in WORKFLOWS.glob("*.yml") for line in re.findall(r"uses: *(.+)", path.read_text())]
    pinned = {line for line in lines if re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", line)}
    assert set(lines) - pinned == {"./.github/workflows/test.yml"}
    assert len({line.partition("@")[0] for line in pinned}) == len(pinned) > 5
    images = {
        image
        for path in WORKFLOWS.glob("*.yml")
        for image in re.findall(r"^ +image: (\S+)$", path.read_text(), re.MULTILINE)
    }
    assert images == set(re.findall(r"^FROM (\S+@sha256:\S+)", DOCKERFILE, re.MULTILINE))


def test_what_is_released_was_tested() -> None:
    """A release waits for all checks, also on the real node; an image must start before it is attested and signed."""
    jobs = yaml.safe_load((WORKFLOWS / "release.yml").read_text())["jobs"]
    assert jobs["checks"] == {"uses": "./.github/workflows/test.yml"}
    needed = {name: job.get("needs", []) for name, job in jobs.items()}
    assert [name for name, needs in needed.items() if not needs] == ["checks"]
    steps = [step.get("name", step.get("uses", step.get("run", ""))) for step in jobs["image"]["steps"]]
    starts, *vouches = (
        next(at for at, step in enumerate(steps) if step.startswith(begin))
        for begin in ("the image starts", "actions/attest", "cosign sign")
    )
    assert starts < min(vouches)
    tested = yaml.safe_load((WORKFLOWS / "test.yml").read_text())["jobs"]
    commands = {name: [step["run"] for step in job["steps"] if "run" in step] for name, job in tested.items()}
    assert {"tox", "tox -e explore"} <= set(commands["tox"])
    assert "tox -e coverage" in commands["coverage"]
    assert commands["node"][-1].startswith("tox -e cluster ")


def test_code_has_owners() -> None:
    """The code owners are the maintainers team of the project's owner."""
    owner = address().split("/")[-2]
    lines = [line for line in (WORKFLOWS.parent / "CODEOWNERS").read_text().splitlines() if not line.startswith("#")]
    assert lines
    assert all(line.split()[1:] == [f"@{owner}/maintainers"] for line in lines)


def test_pins_are_kept_up_to_date() -> None:
    """Dependabot looks where actions, the image's lock and its base are pinned."""
    updates = yaml.safe_load((WORKFLOWS.parent / "dependabot.yml").read_text())["updates"]
    places = {one["package-ecosystem"]: one["directory"].lstrip("/") for one in updates}
    assert places.keys() == {"github-actions", "pip", "docker"}
    assert "--hash=" in (ROOT / places["pip"] / "requirements.txt").read_text()
    # Dependabot does not read a base image that is named by an ARG.
    assert "\nFROM python:" in (ROOT / places["docker"] / "Dockerfile").read_text()


def test_the_release_knows_its_files() -> None:
    """Each text that the workflow replaces in the chart and in the krew manifest occurs once."""
    script = (WORKFLOWS / "release.yml").read_text()
    values = (ROOT / "charts" / "dra-bridge" / "values.yaml").read_text()
    for key in ("repository", "tag", "digest"):
        assert f"s|^  {key}: .*|" in script
        assert len(re.findall(rf"^  {key}: ", values, re.MULTILINE)) == 1
    assert (ROOT / "charts" / "dra-bridge" / "Chart.yaml").read_text().count("image: deviceplugin:") == 1
    assert re.sub("^#.*", "", (KREW / "dra-bridge.yaml").read_text(), flags=re.MULTILINE).count("SHA256") == 1


def test_rights_of_the_release() -> None:
    """Only the job for PyPI has an id-token, in its own environment, and no job uses a stored secret."""
    text = (WORKFLOWS / "release.yml").read_text()
    workflow = yaml.safe_load(text)
    assert workflow["permissions"] == {"contents": "read"}
    assert workflow["jobs"]["pypi"]["permissions"] == {"id-token": "write"}
    assert [name for name, job in workflow["jobs"].items() if "environment" in job] == ["pypi"]
    assert "secrets." not in text


def test_platforms_of_the_image() -> None:
    """The image is built for the platforms of the page, and started on each of them."""
    steps = yaml.safe_load((WORKFLOWS / "release.yml").read_text())["jobs"]["image"]["steps"]
    (platforms,) = (step["with"]["platforms"] for step in steps if "platforms" in step.get("with", {}))
    started = re.findall(r"docker run --rm --platform (\S+)", "".join(step.get("run", "") for step in steps))
    assert platforms.split(",") == started
    page = (ROOT / "docs" / "platforms.md").read_text()
    assert f"--platform {platforms}`" in page
    assert f"is for {' and '.join(one.removeprefix('linux/') for one in started)};" in page


def test_links_on_pypi() -> None:
    """A description with a link that leads nowhere is refused, as is a source distribution that lacks a file."""
    package.check_links("[a](https://example.com/x) [b](#part)")
    with pytest.raises(package.PackageError, match=r"docs/x\.md"):
        package.check_links("[a](docs/x.md)")
    if (ROOT / ".git").exists():
        with pytest.raises(package.PackageError, match=r"lacks .*tox.ini"):
            package.check_files(["setup.cfg"])
