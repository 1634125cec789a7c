"""`convert` and `reverse` on any text: what they change, and that `reverse` restores the text."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from dra_bridge.convert.convert import Conversion, Converted, ManifestText, convert, lost, reverse
from dra_bridge.convert.documents import Tree, YamlTextError, documents
from dra_bridge.convert.edits import ADDED, WAS
from dra_bridge.convert.pods import containers_of, objects_in, pod_specs
from dra_bridge.convert.remarks import Level
from tests.dra.convert.texts import CLASSES, GPU, Manifest, manifests

HOW = Conversion(CLASSES)


def converted(text: str, how: Conversion = HOW) -> Converted:
    return convert([ManifestText("in.yaml", text)], how)


def back(text: str) -> str:
    return reverse([ManifestText("in.yaml", text)])[0]


def objects(text: str) -> Iterator[dict[str, Any]]:
    """Yield the objects of the documents that are YAML."""
    for document in documents(text.removeprefix("\ufeff")):
        try:
            body = Tree(document.text).object
        except YamlTextError:
            continue
        yield from (one for _, one in objects_in(body))


def claimed(text: str) -> list[tuple[str, int]]:
    """Return the name of each container that got a claim, and the number of devices in the claim's template."""
    bodies = list(objects(text))
    counts = {
        one["metadata"]["name"]: one["spec"]["spec"]["devices"]["requests"][0]["exactly"]["count"]
        for one in bodies
        if one.get("kind") == "ResourceClaimTemplate"
    }
    found = []
    for body in bodies:
        for _, spec in pod_specs(body, ()):
            named = {one["name"]: one.get("resourceClaimTemplateName") for one in spec.get("resourceClaims") or ()}
            for _, container in containers_of(spec):
                claims = (container.get("resources") or {}).get("claims") or ()
                found += [(container["name"], counts[named[claim["name"]]]) for claim in claims]
    return found


def limits(text: str) -> list[dict[str, Any]]:
    """Return requests and limits of each container in one dict; a limit replaces the request of the same resource."""
    specs = [spec for body in objects(text) for _, spec in pod_specs(body, ())]
    found = [container.get("resources") or {} for spec in specs for _, container in containers_of(spec)]
    return [{**(one.get("requests") or {}), **(one.get("limits") or {})} for one in found]


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(manifests())
def test_every_layout_is_converted_and_taken_back(manifest: Manifest) -> None:
    """Containers get claims for their number of devices, nothing else changes, and `reverse` restores the text."""
    done = converted(manifest.text)
    assert [str(one) for one in done.remarks if one.kind.level is Level.REFUSED] == []
    (text,) = done.texts
    assert claimed(text) == list(manifest.wanted)
    expected = [{k: v for k, v in one.items() if k != GPU or v in (0, "0")} for one in limits(manifest.text)]
    assert limits(text) == expected
    assert back(text) == manifest.text
    assert back(manifest.text) == manifest.text
    assert list(lost([ManifestText("in.yaml", text)])) == []


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(manifests())
def test_what_is_converted_stays(manifest: Manifest) -> None:
    """A second conversion changes nothing, and a conversion after `reverse` gives the same text."""
    (text,) = converted(manifest.text).texts
    assert converted(text).texts == [text]
    assert converted(back(text)).texts == [text]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(manifests())
def test_lines_stay(manifest: Manifest) -> None:
    """Each line of the input is in the output of `convert`, in the same order, unchanged or as a comment."""
    (text,) = converted(manifest.text).texts
    rest = iter(text.removeprefix("\ufeff").split("\n"))
    for line in manifest.text.removeprefix("\ufeff").split("\n"):
        comment = line[: len(line) - len(line.lstrip(" "))] + WAS + line.lstrip(" ")
        assert any(one in (line, comment) for one in rest), line


SIGNS = [
    "---",
    "...",
    "\n",
    "\r\n",
    "  ",
    "- ",
    "\t",
    "{",
    "}",
    "[",
    "]",
    ": ",
    ", ",
    "#",
    " # x",
    "&a ",
    "*a",
    "|",
    "'",
]
WORDS = ["kind: Pod", "apiVersion: v1", "spec", "containers", "resources", "limits", GPU, "1", "<<", "name: x"]
RARE = ["%YAML 1.1", ADDED, WAS, "\ufeff", "\x85", "\u2028", "é", "\U0001f600", "!!str ", "? ", "null", "~", '"', ">-"]
PIECES = st.sampled_from([*SIGNS, *WORDS, *RARE])


@settings(max_examples=300, deadline=None)
@given(st.one_of(st.text(), st.lists(PIECES, max_size=40).map("".join)))
@example("apiVersion: v1\nkind: Pod\nspec: &a {containers: [{resources: {limits: {nvidia.com/gpu: 1}}}], x: *a}")
@example(
    "apiVersion: v1\nkind: Pod\nspec: {containers: [{resources: {limits: {nvidia.com/gpu: 1}}}]}\nx: "
    + 300 * "["
    + 300 * "]"
)
@example("apiVersion: v1\nkind: Pod\nspec:\n  containers:\n  - resources: {limits: &a {nvidia.com/gpu: 1}}\n  x: *a")
def test_any_text_goes_through(text: str) -> None:
    """`convert` takes any text, and changes none without pods to convert; `reverse` gives the same before and after."""
    done = converted(text)
    assert back(done.texts[0]) == back(text)
    if not done.pods:
        assert done.texts == [text]


POD = "apiVersion: v1\nkind: Pod\nmetadata: {name: p}\nspec:\n"
ASKS = "resources: {limits: {nvidia.com/gpu: 1}}"
UNWRITABLE = {
    "an alias": f"{POD}  containers:\n  - {ASKS.replace(': {', ': &r {', 1)}\n  - {{name: b, resources: *r}}\n",
    "a merge": f"{POD}  x: &x {{limits: {{nvidia.com/gpu: 1}}}}\n  containers:\n  - resources:\n      <<: *x\n",
    "a merged container": f"x: &x\n  name: a\n  {ASKS}\n{POD}  containers:\n  - <<: *x\n",
    "a value that others use": f"{POD}  containers:\n  - {ASKS.replace('1', '&n 1')}\n  x: *n\n",
    "the same key twice": f"{POD}  containers:\n  - resources: {{}}\n    {ASKS}\n",
    "a document on the line ---": f"--- {{apiVersion: v1, kind: Pod, spec: {{containers: [{{{ASKS}}}]}}}}\n",
    "a text of several lines": f"apiVersion: v1\nkind: Pod\nspec: {{x: 'a\n  b', containers: [{{{ASKS}}}]}}\n",
    "a directive": f"%YAML 1.1\n---\n{POD}  containers: [{{{ASKS}}}]\n",
}


@pytest.mark.parametrize("text", UNWRITABLE.values(), ids=UNWRITABLE.keys())
def test_what_cannot_be_changed_in_place_stays(text: str) -> None:
    """A manifest that `convert` cannot edit in place is refused with the pod's name, and printed unchanged."""
    done = converted(text)
    assert done.texts == [text]
    (remark,) = [one for one in done.remarks if one.kind.level is Level.REFUSED]
    assert (remark.kind.key, remark.subject.split()[0]) == ("in-place", "Pod")
