"""The command `convert`, which changes limits in manifests to claims: converted pods, refusals, remarks, patches."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from dra_bridge import cli
from dra_bridge.convert import kustomize
from dra_bridge.convert.convert import Conversion, Converted, ManifestText, convert
from dra_bridge.convert.pods import CustomPath
from dra_bridge.convert.remarks import Level, RemarkKind
from dra_bridge.convert.templates import ClaimedDevices, claim_name
from tests.dra.objects import body
from tests.source import ROOT

GPU = "nvidia.com/gpu"
CLASS = "gpu.nvidia.com"
HOW = Conversion({GPU: CLASS})


def converted(text: str, how: Conversion = HOW) -> Converted:
    return convert([ManifestText("in.yaml", text)], how)


def container(name: str, count: object = 1, **more: Any) -> dict[str, Any]:
    return {"name": name, "image": "x", "resources": {"limits": {GPU: count}}, **more}


def pod(*containers: dict[str, Any], **spec: Any) -> dict[str, Any]:
    return body("Pod", "p", spec={"containers": list(containers), **spec})


def workload(kind: str, *containers: dict[str, Any], **metadata: str) -> dict[str, Any]:
    spec: dict[str, Any] = {"template": {"spec": {"containers": list(containers)}}}
    if kind == "CronJob":
        spec = {"jobTemplate": {"spec": spec}}
    return body(kind, "w", meta=metadata, spec=spec)


def stream(*objects: dict[str, Any]) -> str:
    return yaml.safe_dump_all(objects, sort_keys=False)


def result(*objects: dict[str, Any], how: Conversion = HOW) -> list[dict[str, Any]]:
    """Return the converted objects; fail if an object is refused."""
    done = converted(stream(*objects), how)
    assert [one for one in done.remarks if one.kind.level is Level.REFUSED] == []
    return [one for one in yaml.safe_load_all(done.texts[0]) if one]


def names(objects: list[dict[str, Any]]) -> list[tuple[str, str]]:
    return [
        (one["metadata"].get("namespace", ""), one["metadata"]["name"]) for one in objects if "Template" in one["kind"]
    ]


KINDS = ["Deployment", "StatefulSet", "DaemonSet", "ReplicaSet", "Job", "CronJob", "ReplicationController"]


@pytest.mark.parametrize("kind", KINDS)
def test_kinds_with_pods_are_converted(kind: str) -> None:
    """Objects of each API kind with a pod template get a ResourceClaimTemplate, and claims in place of limits."""
    template, whole = result(workload(kind, container("a", 2)))
    assert template["spec"]["spec"]["devices"]["requests"] == [
        {"name": "devices", "exactly": {"deviceClassName": CLASS, "count": 2}}
    ]
    spec = whole["spec"]["jobTemplate"]["spec"] if kind == "CronJob" else whole["spec"]
    spec = spec["template"]["spec"]
    assert spec["resourceClaims"] == [{"name": "gpu-a", "resourceClaimTemplateName": f"{CLASS}-2"}]
    assert spec["containers"][0]["resources"] == {"claims": [{"name": "gpu-a"}]}


def test_kinds_of_others_pass() -> None:
    """An object of an API group that is not Kubernetes' own is left as it is, unless a path to its pods is given."""
    text = stream({**workload("Job", container("a")), "apiVersion": "batch.volcano.sh/v1alpha1"})
    assert converted(text).texts == [text]


def test_custom_resources_are_converted_by_path() -> None:
    """Pod templates and pod specs in custom resources are converted if a path through lists and maps leads to them."""
    groups = [{"template": {"spec": {"containers": [container(name)]}}} for name in "ab"]
    worker = {"template": {"spec": {"containers": [container("c")]}}}
    ray = {**body("RayCluster", "r", spec={"groups": groups}), "apiVersion": "ray.io/v1"}
    mpi = {**body("MPIJob", "m", spec={"replicas": {"Worker": worker}}), "apiVersion": "kubeflow.org/v1"}
    paths = [
        CustomPath.parse("RayCluster=spec.groups[*].template"),
        CustomPath.parse("MPIJob=spec.replicas.*.template.spec"),
    ]
    _, ray, mpi = result(ray, mpi, how=Conversion({GPU: CLASS}, custom=paths))
    claims = [group["template"]["spec"]["resourceClaims"][0]["name"] for group in ray["spec"]["groups"]]
    assert claims == ["gpu-a", "gpu-b"]
    assert mpi["spec"]["replicas"]["Worker"]["template"]["spec"]["resourceClaims"][0]["name"] == "gpu-c"


def test_each_namespace_class_and_count_has_one_template() -> None:
    """Objects of one namespace use the same ResourceClaimTemplates, which come before the first of these objects."""
    objects = [
        workload("Deployment", container("a"), container("b", "2"), namespace="x"),
        workload("StatefulSet", container("a"), namespace="x"),
        workload("Deployment", container("a")),
    ]
    assert names(result(*objects)) == [("x", f"{CLASS}-1"), ("x", f"{CLASS}-2"), ("", f"{CLASS}-1")]
    there = result(*objects, how=Conversion({GPU: CLASS}, namespace="x"))
    assert names(there) == [("x", f"{CLASS}-1"), ("x", f"{CLASS}-2")]
    assert names(result(*result(*objects), *objects)) == names(result(*objects))


def test_templates_come_in_the_order_of_the_containers() -> None:
    """ResourceClaimTemplates come in the order of the containers, so each run of `convert` prints the same text."""
    counts = [str(number) for number in range(9, 0, -1)]
    pod = workload("Deployment", *(container(f"c{count}", count) for count in counts))
    assert names(result(pod)) == [("", f"{CLASS}-{count}") for count in counts]


def test_names_follow_from_what_they_stand_for() -> None:
    """Names of templates and claims are valid in the API: long names are cut and get a hash of the whole name."""
    assert ClaimedDevices("", CLASS, 3).template == f"{CLASS}-3"
    long = ClaimedDevices("", "a." * 120 + "b", 3).template
    assert len(long) <= 253
    assert long != ClaimedDevices("", "a." * 120 + "b", 4).template
    assert claim_name("example.com/A_b.c", "main") == "a-b-c-main"
    assert re.fullmatch(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", claim_name("example.com/" + "x" * 63, "y" * 63))


def test_claims_of_equal_names_are_told_apart() -> None:
    """Claims of two resources whose names end alike, and of two containers, get different names in a pod."""
    how = Conversion({"a.com/gpu": "a", "b.com/gpu": "b", "a.com/gpu-x": "c"})
    two = {"name": "m", "resources": {"limits": {"a.com/gpu": 1, "b.com/gpu": 1, "a.com/gpu-x": 1}}}
    given = pod(two, {"name": "x-m", "resources": {"limits": {"a.com/gpu": 1}}})
    (changed,) = [one for one in result(given, how=how) if one["kind"] == "Pod"]
    claims = [claim["name"] for one in changed["spec"]["containers"] for claim in one["resources"]["claims"]]
    assert len(set(claims)) == 4
    assert {"gpu-m", "gpu-x-m"} < set(claims)
    assert all(re.fullmatch(r"gpu(-x)?-m(-[0-9a-f]{10})?", name) for name in claims)
    assert {one["name"] for one in changed["spec"]["resourceClaims"]} == set(claims)


def test_classes_of_the_manifests_are_known() -> None:
    """A DeviceClass with the extended resource's name is used, unless the command line names another class."""
    known = body("DeviceClass", "c", spec={"extendedResourceName": GPU})
    assert names(result(known, pod(container("a")), how=Conversion({}))) == [("", "c-1")]
    assert names(result(known, pod(container("a")))) == [("", f"{CLASS}-1")]


def test_init_containers_use_devices_that_limits_reuse() -> None:
    """An init container uses the claim of a later container with the same count; otherwise it gets its own claim."""
    first, sidecar = container("first"), container("side", restartPolicy="Always")
    whole = result(pod(container("a"), initContainers=[first, sidecar]))[-1]["spec"]
    assert [claim["name"] for claim in whole["resourceClaims"]] == ["gpu-a", "gpu-side"]
    assert [one["resources"]["claims"][0]["name"] for one in whole["initContainers"]] == ["gpu-a", "gpu-side"]
    alone = result(pod({"name": "a"}, initContainers=[container("first"), container("second")]))[-1]["spec"]
    assert [one["resources"]["claims"][0]["name"] for one in alone["initContainers"]] == ["gpu-first", "gpu-first"]


def test_versions_of_the_api_differ() -> None:
    """In v1beta1 the DeviceClass is a field of the template's request; in later versions it is in `exactly`."""
    (template, _) = result(pod(container("a")), how=Conversion({GPU: CLASS}, version="v1beta1"))
    assert template["apiVersion"] == "resource.k8s.io/v1beta1"
    assert template["spec"]["spec"]["devices"]["requests"] == [
        {"name": "devices", "deviceClassName": CLASS, "count": 1}
    ]


def quota(**hard: str) -> dict[str, Any]:
    return body("ResourceQuota", "q", spec={"hard": hard})


def autoscaler(kind: str, key: str) -> dict[str, Any]:
    target = {"apiVersion": "apps/v1", "kind": "Deployment", "name": "w"}
    return {**body(kind, "h", spec={key: target}), "apiVersion": "autoscaling/v2"}


DEPLOYMENT = workload("Deployment", container("a"))
TAKEN = body("ResourceClaimTemplate", f"{CLASS}-1", spec={"x": 1})
RAY = {**body("RayCluster", "r"), "apiVersion": "ray.io/v1"}
SAID: dict[str, tuple[RemarkKind, list[dict[str, Any]], str]] = {
    "unchanged": (RemarkKind.UNCHANGED_PODS, [DEPLOYMENT], ""),
    "no class": (RemarkKind.NO_CLASS, [pod({"name": "a", "resources": {"limits": {"a.b/c": 1}}})], "a.b/c"),
    "two classes": (
        RemarkKind.NO_CLASS,
        [
            *(body("DeviceClass", name, spec={"extendedResourceName": "a.b/c"}) for name in "xyx"),
            pod({"name": "a", "resources": {"limits": {"a.b/c": 1}}}),
        ],
        "a.b/c (several: x, y)",
    ),
    "a model": (
        RemarkKind.ELSEWHERE,
        [{**RAY, "spec": {"groups": [{"resources": {"limits": {GPU: 1}}}]}}],
        GPU,
    ),
    "a custom resource": (RemarkKind.CUSTOM, [{**RAY, "spec": {"template": pod(container("a"))}}], ""),
    "priority": (RemarkKind.PREEMPTING, [pod(container("a"), priorityClassName="high")], "high"),
    "a Job": (RemarkKind.IMMUTABLE, [workload("Job", container("a"))], ""),
    "a Pod": (RemarkKind.IMMUTABLE, [pod(container("a"))], ""),
    "HPA": (RemarkKind.AUTOSCALED, [DEPLOYMENT, autoscaler("HorizontalPodAutoscaler", "scaleTargetRef")], "h"),
    "VPA": (RemarkKind.AUTOSCALED, [autoscaler("VerticalPodAutoscaler", "targetRef"), DEPLOYMENT], "h"),
    "quota": (RemarkKind.QUOTA, [quota(**{f"requests.{GPU}": "4"}), DEPLOYMENT], "q"),
    "scheduler": (RemarkKind.SCHEDULER, [pod(container("a"), schedulerName="volcano")], "volcano"),
    "33": (RemarkKind.TOO_MANY, [pod(container("a", 33))], "33"),
    "a half": (RemarkKind.NOT_A_COUNT, [pod(container("a", "500m"))], "500m"),
    "words": (RemarkKind.NOT_A_COUNT, [pod(container("a", "many"))], "many"),
    "a request alone": (RemarkKind.NOT_A_COUNT, [pod({"name": "a", "resources": {"requests": {GPU: 1}}})], "None"),
    "another request": (
        RemarkKind.REQUEST_DIFFERS,
        [pod({"name": "a", "resources": {"requests": {GPU: 1}, "limits": {GPU: 2}}})],
        "the request is 1, the limit is 2",
    ),
    "init": (RemarkKind.INIT_CONTAINER, [pod(container("a", 2), initContainers=[container("i")])], "1, beside 2"),
    "init and sidecar": (
        RemarkKind.INIT_CONTAINER,
        [pod({"name": "a"}, initContainers=[container("s", restartPolicy="Always"), container("i")])],
        "1, beside 1",
    ),
    "node name": (RemarkKind.NODE_NAME, [pod(container("a"), nodeName="n1")], "n1"),
    "claim's name": (RemarkKind.NAME_TAKEN, [pod(container("a"), resourceClaims=[{"name": "gpu-a"}])], "gpu-a"),
    "template's name": (RemarkKind.NAME_TAKEN, [TAKEN, pod(container("a"))], f"{CLASS}-1"),
}


@pytest.mark.parametrize("case", SAID)
def test_what_is_refused_or_different_is_said(case: str) -> None:
    """Each remark of `convert` has a line of the file, a detail and its kind; a refused object is printed unchanged."""
    kind, objects, detail = SAID[case]
    text = stream(*objects)
    done = converted(text, Conversion({GPU: CLASS}, custom=[CustomPath.parse("RayCluster=spec.template")]))
    (remark,) = [one for one in done.remarks if one.kind is kind]
    assert detail in remark.detail
    assert str(remark).startswith(f"in.yaml:{remark.line}: {kind.level.value}: ")
    assert str(remark).endswith(f"{kind.text} [{kind.key}]")
    assert (done.texts == [text]) == (
        kind.level is Level.REFUSED or kind in (RemarkKind.NO_CLASS, RemarkKind.ELSEWHERE)
    )


def test_nothing_is_said_where_all_is_well() -> None:
    """If no priority, quota or autoscaler concerns the pods, the only remark is a note; without limits there's none."""
    patient = body("PriorityClass", "low", preemptionPolicy="Never")
    calm = workload("Deployment", container("a"))
    calm["spec"]["template"]["spec"]["priorityClassName"] = "low"
    other = {**quota(**{f"requests.{GPU}": "1"}), "metadata": {"name": "q", "namespace": "elsewhere"}}
    done = converted(stream(patient, other, calm, autoscaler("HorizontalPodAutoscaler", "x")))
    assert [one.kind for one in done.remarks] == [RemarkKind.UNCHANGED_PODS]
    assert converted(stream(pod({"name": "a"}), pod(container("b", 0)))).remarks == []


def test_a_document_that_is_not_yaml_does_not_hinder_others() -> None:
    """A document that is not YAML is printed unchanged with a remark; the other documents are converted."""
    broken = "a: {{ .Values.x }}: [\n"
    done = converted(f"{broken}---\n{stream(pod(container('a')))}")
    assert done.texts[0].startswith(broken)
    assert [one.kind for one in done.remarks][:2] == [RemarkKind.UNCHANGED_PODS, RemarkKind.NOT_YAML]
    assert len(done.pods) == 1


def test_every_remark_is_on_the_page_and_tested() -> None:
    """docs/manifests.md lists each kind of remark with its level; each kind has a test case."""
    page = (ROOT / "docs" / "manifests.md").read_text()
    listed = dict(re.findall(r"^\| `([a-z-]+)` \| (note|warning|refused) \|", page, re.MULTILINE))
    assert listed == {kind.key: kind.level.value for kind in RemarkKind}
    elsewhere = {RemarkKind.NOT_YAML, RemarkKind.IN_PLACE}
    assert {kind for kind, _, _ in SAID.values()} == set(RemarkKind) - elsewhere


# The command line.


def run(monkeypatch: pytest.MonkeyPatch, *argv: str, text: str = "") -> int:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
    return cli.main(["convert", *argv])


def test_it_is_a_filter_in_both_directions(
    monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    """`convert` reads manifests from standard input; remarks go to standard error; --reverse restores the input."""
    text = "\ufeff# first\r\n" + stream(DEPLOYMENT).replace("\n", "\r\n")
    assert run(monkeypatch, "--class", f"{GPU}={CLASS}", text=text) == 0
    out, error = capfdbinary.readouterr()
    assert b"resourceClaimTemplateName" in out
    assert b"converted: 1 container; 1 ResourceClaimTemplate\n" in error
    assert b"<stdin>:1: note" in error
    assert run(monkeypatch, "--reverse", text=out.decode()) == 0
    assert capfdbinary.readouterr() == (text.encode(), b"")


@pytest.mark.parametrize("style", ["yaml", "json"])
def test_changes_that_reverse_undoes_are_named(
    style: str, monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    """`--reverse` warns, with status 1, of a change on a marked line after the conversion, as it undoes the change."""
    given = pod({"name": "m", "resources": {"limits": {"cpu": 1, "memory": "2Gi", GPU: 1}}})
    text = json.dumps(given) if style == "json" else yaml.safe_dump(given, default_flow_style=None)
    assert run(monkeypatch, "--class", f"{GPU}={CLASS}", text=text) == 0
    marked = capfdbinary.readouterr().out.decode()
    assert run(monkeypatch, "--reverse", text=marked) == 0
    capfdbinary.readouterr()
    changed = "\n".join(
        line if "dra-bridge: was" in line else line.replace("2Gi", "3Gi") for line in marked.split("\n")
    )
    assert run(monkeypatch, "--reverse", text=changed) == 1
    assert b"warning: marked lines were changed after the conversion" in capfdbinary.readouterr().err


def test_files_and_directories_are_read(
    monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes], tmp_path: Path
) -> None:
    """Files of a directory are read in the order of their names; a refused object gives exit status 1."""
    (tmp_path / "b" / "deep").mkdir(parents=True)
    (tmp_path / "b" / "deep" / "2.yml").write_text(stream(pod(container("a", 33))).rstrip("\n"))
    (tmp_path / "b" / "1.json").write_text('{"apiVersion": "v1", "kind": "List", "items": []}')
    (tmp_path / "b" / "notes.txt").write_text("no manifest: [")
    (tmp_path / "c.yaml").write_text(stream(DEPLOYMENT))
    argv = ("-f", str(tmp_path / "b"), "-f", str(tmp_path / "c.yaml"), "--class", f"{GPU}={CLASS}", "-n", "x")
    assert run(monkeypatch, *argv) == 1
    out, error = capfdbinary.readouterr()
    assert [one["kind"] for one in yaml.safe_load_all(out)] == ["List", "Pod", "ResourceClaimTemplate", "Deployment"]
    assert f"{tmp_path / 'b/deep/2.yml'}:1: refused: Pod p, container a: {GPU}: 33: " in error.decode()


WRONG = {
    "no such file": (("-f", "/nonexistent"), "/nonexistent cannot be read: No such file or directory"),
    "no class": (("--class", GPU), "write NAME=CLASS"),
    "two classes": (("--class", f"{GPU}=a", "--class", f"{GPU}=b"), "once for each resource"),
    "no resource": (("--class", "gpu=a"), "'gpu' is not an extended resource's name"),
    "no manifests": (("-f", "{empty}"), "there are no files of YAML or JSON in"),
    "no UTF-8": (("-f", "{latin}", "-f", "/dev/null"), "latin.yaml:2: is not UTF-8"),
    "no class's name": (("--class", f"{GPU}=BAD name"), "'BAD name' is not the name of a DeviceClass"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_arguments_end_with_2(
    case: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Wrong arguments are an error with status 2, and nothing is printed on standard output."""
    argv, words = WRONG[case]
    (tmp_path / "empty").mkdir()
    (tmp_path / "latin.yaml").write_bytes(b"\na: \xe9\n")
    places = {"empty": str(tmp_path / "empty"), "latin": str(tmp_path / "latin.yaml")}
    assert run(monkeypatch, *(one.format(**places) for one in argv)) == 2
    out, error = capsys.readouterr()
    assert out == ""
    assert words in error


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--pod-template-path", "spec.template"], "RayCluster=spec.workerGroupSpecs[*].template"),
        (["-n", "Bad NS"], "'Bad NS' is not a name"),
    ],
)
def test_wrong_values_of_options_are_usage(argv: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A --pod-template-path without a kind, or a wrong namespace, is wrong usage; the error shows a valid value."""
    with pytest.raises(SystemExit) as ended:
        cli.main(["convert", *argv])
    assert ended.value.code == 2
    assert words in capsys.readouterr().err


def test_a_directory_that_cannot_be_searched(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """An error in the search for files, as in /proc, is an error with status 2."""

    def vanished(*_: object) -> Iterator[Path]:
        yield Path("/proc/1/net")
        raise OSError(22, "Invalid argument", "/proc/1/net")

    monkeypatch.setattr(Path, "rglob", vanished)
    assert run(monkeypatch, "-f", str(tmp_path)) == 2
    assert "cannot be searched: [Errno 22] Invalid argument: '/proc/1/net'" in capsys.readouterr().err


def test_no_patch_can_name_an_object_without_a_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`--patch kustomize` refuses an object with generateName, which the other outputs convert."""
    body = pod(container("a"))
    body["metadata"] = {"generateName": "p-"}
    argv = ("--class", f"{GPU}={CLASS}")
    assert run(monkeypatch, *argv, "--patch", "kustomize", text=stream(body)) == 2
    assert "no patch can name an object without metadata.name: Pod p-" in capsys.readouterr().err
    assert run(monkeypatch, *argv, text=stream(body)) == 0


def patched(whole: Any, operations: list[dict[str, Any]]) -> Any:
    """Apply a JSON patch (RFC 6902): test, remove, add."""
    for one in operations:
        *steps, last = [step.replace("~1", "/").replace("~0", "~") for step in one["path"].split("/")[1:]]
        part = whole
        for step in steps:
            part = part[int(step) if isinstance(part, list) else step]
        if one["op"] == "test":
            assert part[last] == one["value"]
        elif one["op"] == "remove":
            del part[last]
        elif isinstance(part, list):
            part.append(one["value"])
        else:
            part[last] = one["value"]
    return whole


def test_patches_do_what_converting_does() -> None:
    """The patches of the kustomize component have the same result as `convert`, except that empty limits may stay."""
    given = workload("Deployment", container("a"), container("b", 2), namespace="x")
    given["spec"]["template"]["spec"]["resourceClaims"] = [{"name": "mine"}]
    done = converted(stream(given))
    (component,) = yaml.safe_load_all(kustomize.component(done, HOW))
    (patch,) = component["patches"]
    assert patch["target"] == {"group": "apps", "version": "v1", "kind": "Deployment", "name": "w", "namespace": "x"}
    whole = patched(given, yaml.safe_load(patch["patch"]))["spec"]["template"]["spec"]
    expected = list(yaml.safe_load_all(done.texts[0]))[-1]["spec"]["template"]["spec"]
    claims = sorted(map(str, whole["resourceClaims"]))
    assert claims == sorted(map(str, expected["resourceClaims"]))
    for one, other in zip(whole["containers"], expected["containers"], strict=True):
        assert one["resources"].pop("limits") == {}
        assert one == other
    assert list(yaml.safe_load_all(kustomize.templates(done))) == [
        one for one in yaml.safe_load_all(done.texts[0]) if one["kind"] == "ResourceClaimTemplate"
    ]


def test_it_loads_neither_client_nor_event_loop() -> None:
    """`convert` loads neither aiohttp, gRPC nor a Kubernetes client."""
    code = "from dra_bridge import cli; cli.main(['convert', '-f', '/dev/null']); import sys; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()
    assert {"aiohttp", "grpc", "kubernetes_asyncio"}.isdisjoint(loaded)
