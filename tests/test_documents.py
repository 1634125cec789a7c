"""The README, the documents and the examples agree with the code."""

from __future__ import annotations

import inspect
import re
import runpy
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from deviceplugin import DeviceSource, Health, config
from deviceplugin.metrics.collectors import LOOP_TIMEOUT
from deviceplugin.naming import class_name
from deviceplugin.testing import FakeKubelet, serve
from deviceplugin.version import installing
from dra_bridge import cli as bridge_cli
from dra_bridge.manifests import Deployment, manifests
from dra_bridge.testing import serve_both
from tests.cluster.matrix import VERSIONS
from tests.cluster.node import FEATURE_GATES
from tests.programs import running

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
EXAMPLES = ROOT / "examples"
TWENTY = EXAMPLES / "01-a-device-in-twenty-lines.py"


def blocks(language: str, text: str = README) -> list[str]:
    """Return the code blocks of one language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


@pytest.fixture
def twenty(fake_kubelet: FakeKubelet) -> Iterator[subprocess.Popen[str]]:
    """Run the plugin of the README, the example with twenty lines."""
    command = [sys.executable, str(TWENTY), *fake_kubelet.arguments]
    with running(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        yield process


def test_twenty_lines_are_twenty_and_in_the_readme() -> None:
    """The example has at most 20 lines, and the README shows it unchanged."""
    text = TWENTY.read_text()
    assert len(text.splitlines()) <= 20
    guard = r'if __name__ == "__main__":.*\n    '
    assert re.sub(guard, "", text) == re.sub(guard, "", blocks("python")[0])


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_examples_can_be_imported(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An import of an example serves no devices and prints nothing."""
    found = runpy.run_path(str(path), run_name="imported")
    assert [one for one in found.values() if isinstance(one, type) and issubclass(one, DeviceSource)]
    assert capsys.readouterr() == ("", "")


def test_twenty_lines_are_a_plugin(fake_kubelet: FakeKubelet, twenty: subprocess.Popen[str]) -> None:
    """The example registers, a pod gets its node and variable, and SIGTERM ends the program with 0."""
    fake_kubelet.wait_allocatable("example.com/toy", 2)
    pod = fake_kubelet.run_pod("reader", {"example.com/toy": 1})
    (name,) = pod.device_ids
    assert [node.container for node in pod.nodes] == [f"/dev/{name}"]
    assert pod.env == {"TOYS": name}
    twenty.terminate()
    out, _ = twenty.communicate(timeout=20)
    assert f"made ready: {name}" in out
    assert twenty.returncode == 0


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("0*.yaml")), ids=lambda path: path.name)
def test_example_files_are_valid(path: Path) -> None:
    """Each example config file is valid, and is in the README of the examples."""
    assert config.load(path).resources
    assert path.name in (EXAMPLES / "README.md").read_text()


def test_daemonset_carries_a_valid_file_and_runs_it() -> None:
    """The DaemonSet's ConfigMap is a valid config file, mounted as a directory at the path in the arguments."""
    map_, daemonset = yaml.safe_load_all((EXAMPLES / "daemonset.yaml").read_text())
    assert config.parse(map_["data"]["config.yaml"], "daemonset.yaml").resources
    pod = daemonset["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert "--config=/etc/deviceplugin/config.yaml" in container["args"]
    mounts = {mount["mountPath"]: mount for mount in container["volumeMounts"]}
    assert mounts["/var/lib/kubelet"]["readOnly"]
    assert mounts["/host/sys/fs/cgroup"]["readOnly"]
    assert "--cgroup-root=/host/sys/fs/cgroup" in container["args"]
    assert "subPath" not in mounts["/etc/deviceplugin"]
    assert not mounts["/var/lib/kubelet/device-plugins"].get("readOnly")
    assert (
        daemonset["spec"]["selector"]["matchLabels"].items()
        <= daemonset["spec"]["template"]["metadata"]["labels"].items()
    )
    assert daemonset["spec"]["updateStrategy"]["rollingUpdate"]["maxSurge"] == 0


def test_daemonset_has_the_rights_of_a_plugin_alone() -> None:
    """examples/daemonset.yaml has the privileges, mounts and token that `manifests` prints for its config file."""

    def rights(daemonset: dict[str, Any]) -> dict[str, Any]:
        pod = daemonset["spec"]["template"]["spec"]
        (container,) = pod["containers"]
        paths = {one["name"]: one["hostPath"]["path"] for one in pod["volumes"] if "hostPath" in one}
        mounts = {paths[one["name"]]: {**one, "name": ""} for one in container["volumeMounts"] if one["name"] in paths}
        return {"mounts": mounts, **container["securityContext"], "token": pod["automountServiceAccountToken"]}

    map_, daemonset = yaml.safe_load_all((EXAMPLES / "daemonset.yaml").read_text())
    text = map_["data"]["config.yaml"]
    assert rights(daemonset) == rights(manifests(config.parse(text), text)[-1])


def test_daemonset_is_what_manifests_print_for_limits_only(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """examples/daemonset.yaml has the name, resources and probes that `manifests` prints for its config file."""
    map_, daemonset = yaml.safe_load_all((EXAMPLES / "daemonset.yaml").read_text())
    file = tmp_path / "config.yaml"
    file.write_text(map_["data"]["config.yaml"])
    assert bridge_cli.main(["manifests", "--config", str(file)]) == 0
    *_, printed = yaml.safe_load_all(capsys.readouterr().out)
    assert printed["metadata"]["name"] == daemonset["metadata"]["name"]
    (mine,), (theirs,) = (one["spec"]["template"]["spec"]["containers"] for one in (daemonset, printed))
    for part in ("resources", "startupProbe", "livenessProbe", "readinessProbe", "securityContext", "ports"):
        assert mine[part] == theirs[part], part


@pytest.mark.parametrize("path", sorted((EXAMPLES / "claims").glob("*.yaml")), ids=lambda path: path.name)
def test_examples_of_claims_start_anywhere(path: Path) -> None:
    """The examples of claims use public images with a fixed version."""
    images = re.findall(r"image: (\S+)", path.read_text())
    assert images
    assert all(re.fullmatch(r"[a-z]+:[0-9.]+", image) for image in images)


def test_the_deployment_of_a_stick(tmp_path: Path) -> None:
    """The example Deployment of a USB stick has the resource of its config, and a probe that needs the device node."""
    text = (EXAMPLES / "stick-deployment.yaml").read_text()
    deployment = yaml.safe_load(text)
    assert (deployment["spec"]["strategy"], deployment["spec"]["replicas"]) == ({"type": "Recreate"}, 1)
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    lines = [line.removeprefix("#   ") for line in text.splitlines() if line.startswith("#   ")]
    (resource,) = config.parse("\n".join(lines)).resources
    assert container["resources"]["limits"] == {resource.name: 1}
    probe = container["livenessProbe"]["exec"]["command"]
    (tmp_path / "file").touch()
    for node, works in (("/dev/null", True), (str(tmp_path / "file"), False), (str(tmp_path / "none"), False)):
        command = [word.replace("/dev/zigbee", node) for word in probe]
        assert (subprocess.run(command, check=False, capture_output=True).returncode == 0) is works, node


def test_probes_wait_longer_than_the_agent_takes() -> None:
    """The timeouts of all probes are longer than the agent's check of its event loop, and than 1 s."""
    text = "resources: [{name: a/b, driver: b.a, devices: [path: /dev/x]}]"
    _, plugin = yaml.safe_load_all((EXAMPLES / "daemonset.yaml").read_text())
    (bridge,) = (one for one in manifests(config.parse(text), text) if one["kind"] == "DaemonSet")
    for daemonset, count in ((plugin, 3), (bridge, 3)):
        (container,) = daemonset["spec"]["template"]["spec"]["containers"]
        probes = [value for key, value in container.items() if key.endswith("Probe")]
        assert len(probes) == count
        assert all(probe["timeoutSeconds"] > LOOP_TIMEOUT > 1 for probe in probes)


def test_the_plugin_alone_is_confined_as_the_bridge_is() -> None:
    """examples/daemonset.yaml has the security context of the bridge's manifests, and needs no --allow option."""
    configmap, plugin = yaml.safe_load_all((EXAMPLES / "daemonset.yaml").read_text())
    found = config.parse(configmap["data"]["config.yaml"], lock=config.Lock())
    assert config.needed(found) == config.Lock()
    (bridge,) = (one for one in manifests(found, "x") if one["kind"] == "DaemonSet")
    contexts = [one["spec"]["template"]["spec"]["containers"][0]["securityContext"] for one in (plugin, bridge)]
    assert contexts[0] == contexts[1]
    assert contexts[0]["capabilities"] == {"drop": ["ALL"]}


def test_nothing_is_installed_from_the_index_before_it_is_there() -> None:
    """All install commands name the repository or a wheel, as the package index does not have the package yet."""
    parts = ("README.md", "charts", "deviceplugin", "docs", "dra_bridge", "examples", ".github", "CONTRIBUTING.md")
    files = [path for part in parts for path in (ROOT / part, *(ROOT / part).rglob("*")) if path.is_file()]
    wrong = re.compile(r"(install|--from|--spec) '?deviceplugin(\[|=|'| )")
    assert len(files) > 200
    assert [path for path in files if path.suffix != ".pyc" and wrong.search(path.read_text(errors="replace"))] == []
    page = (ROOT / "docs" / "operations.md").read_text()
    assert all(f"\n{one}" in page for one in installing("bridge,cli").split(" in the repository, or "))


def test_pages_of_nvidia_name_the_class() -> None:
    """The page and the example of NVIDIA GPUs have the generated name of the DeviceClass."""
    example = config.load(EXAMPLES / "06-nvidia-gpus.yaml").resources[0]
    nvidia = ROOT / "docs" / "devices" / "nvidia.md"
    (shown,) = blocks("yaml", nvidia.read_text())
    (resource,) = config.parse(shown, nvidia.name).resources
    assert (resource.name, resource.driver) == (example.name, example.driver)
    name = class_name(example.name, example.driver or "")
    for page in (nvidia, EXAMPLES / "06-nvidia-gpus.yaml"):
        assert name in page.read_text(), page


def test_ci_runs_the_readmes_test_command() -> None:
    """The README's commands are one line each, and CI runs the test command of the README."""
    demo, tests = (block.strip() for block in blocks("sh")[:2])
    assert demo.endswith("dra-bridge demo")
    assert "\n" not in demo + tests
    assert tests in (ROOT / ".ci" / "run").read_text().splitlines()
    assert tests in (ROOT / "CONTRIBUTING.md").read_text()


def test_ruff_has_one_version() -> None:
    """The pre-commit hook has the ruff version of `tox -e lint`."""
    (tox,) = re.findall(r"^deps = ruff==(.+)$", (ROOT / "tox.ini").read_text(), re.MULTILINE)
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    (ruff,) = (repository for repository in hooks if repository["repo"].endswith("/ruff-pre-commit"))
    assert ruff["rev"] == f"v{tox}"


def test_workflow_runs_tox_on_each_python() -> None:
    """The workflow's Python versions are the package's classifiers, and it runs tox."""
    named = re.findall(r"Programming Language :: Python :: (3\.\d+)$", (ROOT / "setup.cfg").read_text(), re.MULTILINE)
    job = yaml.safe_load((ROOT / ".github" / "workflows" / "test.yml").read_text())["jobs"]["tox"]
    assert job["strategy"]["matrix"]["python"] == named
    commands = [step["run"] for step in job["steps"] if "run" in step]
    assert commands[-3:] == ["tox", "tox -e package", "tox -e explore"]


@pytest.mark.parametrize(
    "path", sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml")), ids=lambda path: path.name
)
def test_issue_forms_are_yaml(path: Path) -> None:
    """Each field of an issue form has a label and a unique id."""
    form = yaml.safe_load(path.read_text())
    fields = [field for field in form.get("body", ()) if field["type"] != "markdown"]
    assert all(field["attributes"]["label"] for field in fields)
    assert len({field["id"] for field in fields}) == len(fields)


DOCUMENTS = [
    *(path.relative_to(ROOT).as_posix() for path in sorted(ROOT.glob("*.md"))),
    *(path.relative_to(ROOT).as_posix() for path in sorted((ROOT / "docs").rglob("*.md"))),
    "examples/README.md",
    "examples/monitoring/README.md",
]


def anchors(text: str) -> set[str]:
    """Return the anchors of a document: GitHub's for its headings, and explicit ones."""
    heads = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL), re.MULTILINE)
    named = set(re.findall(r"^\((\S+)\)=$", text, re.MULTILINE))
    return named | {re.sub(r"[^\w\- ]", "", head).strip().lower().replace(" ", "-") for head in heads}


@pytest.mark.parametrize("name", DOCUMENTS)
def test_links_lead_somewhere(name: str) -> None:
    """Every relative link in a document leads to an existing file, and to a heading in it."""
    document = ROOT / name
    for link in re.findall(r"\]\(([^)]+)\)", document.read_text()):
        path, _, anchor = link.partition("#")
        if "://" in path:
            continue
        target = document.parent / path if path else document
        assert target.exists(), link
        assert not anchor or anchor in anchors(target.read_text()), link


def test_pages_are_on_the_index() -> None:
    """Every page of docs/ is in the table and the table of contents of docs/index.md or docs/devices.md."""
    for directory, page in (("", "index.md"), ("devices/", "devices.md")):
        index = (ROOT / "docs" / page).read_text()
        for path in (ROOT / "docs" / directory).glob("*.md"):
            if path.name != "index.md":
                assert f"]({directory}{path.name})" in index, path.name
                assert f"\n{directory}{path.stem}\n" in index, path.name


def test_pages_need_no_script() -> None:
    """Code blocks have languages that need no script; diagrams are text."""
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    assert {language for page in pages for language in re.findall(r"^```(\w+)$", page.read_text(), re.MULTILINE)} <= {
        "console",
        "json",
        "python",
        "sh",
        "text",
        "yaml",
    }


def test_rules_are_listed_once_and_cited_by_name() -> None:
    """The architecture page lists all rules with numbers; code and other pages do not cite the numbers."""
    page = (ROOT / "docs" / "architecture.md").read_text()
    listed = re.findall(r"^- \*\*([RE]\d+) \w", page, re.MULTILINE)
    assert listed == [*(f"R{number}" for number in range(1, 13)), *(f"E{number}" for number in range(4))]
    assert set(re.findall(r"\b(?:R[0-9]+|E[0-9])\b", page)) == set(listed)
    paths = [
        *(path for path in (ROOT / "docs").rglob("*.md") if path.name != "architecture.md"),
        *(path for name in ("deviceplugin", "dra_bridge") for path in (ROOT / name).rglob("*.py")),
    ]
    cited = {path.name: rules for path in paths if (rules := re.findall(r"\b(?:R[0-9]+|E[0-9])\b", path.read_text()))}
    assert cited == {}


WITH_FILES = [
    *("README.md", "docs/devices.md", "docs/limits-to-claims.md"),
    *(f"docs/devices/{one.name}" for one in (ROOT / "docs" / "devices").iterdir()),
]


@pytest.mark.parametrize("name", WITH_FILES)
def test_config_files_on_pages_are_valid(name: str) -> None:
    """Each config file on a page is valid."""
    texts = [block for block in blocks("yaml", (ROOT / name).read_text()) if re.match(r"(#.*\n)?resources:", block)]
    assert texts
    for text in texts:
        assert config.parse(text, name).resources


def test_tested_versions_stand_in_one_place() -> None:
    """The support page has the versions of the matrix and the classifiers; no other page has tested versions."""
    page = (ROOT / "docs" / "support.md").read_text()
    (named,) = re.findall(r"tested\]\(support-matrix\.md\) with (1\.[^|]+) \|", page)
    assert re.findall(r"1\.\d+", named) == [version.rpartition(".")[0] for version in VERSIONS]
    pythons = re.findall(r"Programming Language :: Python :: (3\.\d+)$", (ROOT / "setup.cfg").read_text(), re.MULTILINE)
    assert f"| Python | {pythons[0]} to {pythons[-1]}, on Linux |" in page
    pages = {ROOT / "README.md", ROOT / "SECURITY.md", *(ROOT / "docs").rglob("*.md")} - {
        ROOT / "docs/support-matrix.md"
    }
    said = [one.name for one in pages if re.search(r"tested[^|\n]* with (Kubernetes )?1\.\d", one.read_text())]
    assert said == ["support.md"]


def test_support_page_names_every_feature() -> None:
    """The support page has each feature gate of the real node with its version."""
    page = (ROOT / "docs" / "support.md").read_text()
    found = dict(re.findall(r"^\|[^|]+\| `(\w+)` \| 1\.(\d+) \|", page, re.MULTILINE))
    assert found == {name: str(since) for name, since in FEATURE_GATES.items()}


def test_the_code_of_the_pages_runs(tmp_path: Path) -> None:
    """The README's tests of its plugin, and all code of docs/sources.md and docs/testing.md, pass."""
    plugin, *tests = blocks("python")
    assert tests
    modules = {"readme": tests} | {
        page: blocks("python", (ROOT / "docs" / f"{page}.md").read_text()) for page in ("sources", "testing")
    }
    (tmp_path / "toys.py").write_text(plugin)
    (tmp_path / "conftest.py").write_text("from dra_bridge.testing.plugin import bridged, fake_node\n")
    for name, code in modules.items():
        (tmp_path / f"test_{name}.py").write_text("\n\n".join(code))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stdout
    counts = {name: "".join(code).count("def test_") for name, code in modules.items()}
    assert min(counts.values()) > 0
    assert f"{sum(counts.values())} passed" in done.stdout


def test_the_authors_page_has_all_hooks() -> None:
    """The code of docs/sources.md has every hook of a source and every health."""
    code = "\n\n".join(blocks("python", (ROOT / "docs" / "sources.md").read_text()))
    names = {*DeviceSource.HOOKS, "watch", "replicas_of", "links", "child_sources"}
    assert names <= set(re.findall(r"def (\w+)\(self", code))
    assert all(f"Health.{health.name}" in code for health in Health)


def test_the_kits_page_has_the_signatures() -> None:
    """docs/testing.md shows the keyword arguments and defaults of `serve` and `serve_both`."""
    page = (ROOT / "docs" / "testing.md").read_text()
    for fixture, manager in (("served", serve), ("bridged", serve_both)):
        named = [one for one in inspect.signature(manager).parameters.values() if one.kind is one.KEYWORD_ONLY]
        shown = ", ".join(f"{one.name}={one.default!r}" for one in named).replace("'", '"')
        assert f"| `{fixture}(*sources, {shown})` |" in page


def test_the_example_of_an_own_plugin_runs(tmp_path: Path) -> None:
    """The tests in examples/own-plugin pass there and in a copy of it; its Dockerfile uses existing files."""
    example = EXAMPLES / "own-plugin"
    shutil.copytree(example, tmp_path / "own", ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:asyncio", "-p", "no:randomly"]
    done = subprocess.run(command, cwd=tmp_path / "own", capture_output=True, text=True)
    assert "2 passed" in done.stdout, done.stdout + done.stderr
    command += ["-p", "no:timeout", "-p", "no:xdist"]  # The extra `test` has no plugins of pytest.
    done = subprocess.run(command, cwd=example, capture_output=True, text=True)
    assert "2 passed" in done.stdout, done.stdout + done.stderr
    text = (example / "Dockerfile").read_text()
    assert re.findall(r"^FROM (.+)$", text, re.MULTILINE) == [Deployment().image]
    copied = re.findall(r"^COPY (\S+) /app/$", text, re.MULTILINE)
    assert copied == ["toys.py"]
    assert (example / copied[0]).exists()


def test_the_kits_page_names_every_fault() -> None:
    """docs/testing.md names each method of the fake kubelet for faults."""
    text = (ROOT / "docs" / "testing.md").read_text()
    faults = inspect.getsource(FakeKubelet).partition("# Faults.")[2].partition("# Pods.")[0]
    assert all(f"`{name}" in text for name in re.findall(r"def (\w+)\(self", faults))


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="there is no systemd-analyze")
@pytest.mark.parametrize("name", ["deviceplugin.service", "dra-bridge.service", "dra-bridge-token.service"])
def test_the_units_are_right_to_systemd(tmp_path: Path, name: str) -> None:
    """`systemd-analyze verify` finds no problem in the example units, with /bin/true as the program."""
    text = (ROOT / "examples" / "systemd" / name).read_text()
    (tmp_path / name).write_text(re.sub(r"/opt/deviceplugin/bin/\S+ run", "/bin/true run", text))
    done = subprocess.run(
        ["systemd-analyze", "verify", str(tmp_path / name)], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")
