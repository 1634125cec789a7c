"""Converts the manifests in YAML streams, and collects remarks and the ResourceClaimTemplates. Pure functions."""

from __future__ import annotations

import contextlib
import copy
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import yaml

from deviceplugin.naming import RESOURCE
from dra_bridge.convert import edits
from dra_bridge.convert.documents import BOM, Document, Tree, UnwritableError, YamlTextError, documents
from dra_bridge.convert.edits import Edit
from dra_bridge.convert.pods import (
    ContainerChange,
    CustomPath,
    Path,
    PodChange,
    limits_elsewhere,
    objects_in,
    pod_change,
    pod_specs,
)
from dra_bridge.convert.remarks import Remark, RemarkKind, UnconvertibleError
from dra_bridge.convert.surroundings import Surroundings
from dra_bridge.convert.templates import ClaimApi, ClaimedDevices, template_name
from dra_bridge.manifests import to_yaml


class ManifestText(NamedTuple):
    """A file's name and its text."""

    name: str
    text: str


@dataclass(frozen=True, slots=True)
class Conversion:
    """The settings of a conversion of manifests from `limits` to claims.

    classes: for each resource, the name of its DeviceClass; the DeviceClasses in the manifests are added. namespace:
    the namespace of objects that name no namespace; "" if unknown. version: the version of resource.k8s.io in which
    ResourceClaimTemplates are written. custom: the paths at which custom resources have pod specs.
    """

    classes: Mapping[str, str]
    namespace: str = ""
    version: ClaimApi = "v1"
    custom: Sequence[CustomPath] = ()


class ChangedPod(NamedTuple):
    """A pod spec to convert: the object that contains the pod spec, the path to the pod spec, and the changes."""

    body: Mapping[str, Any]
    path: Path
    change: PodChange


@dataclass(slots=True)
class Converted:
    """The result of a conversion. texts: the new texts of the streams. pods: the converted pod specs.

    templates: the ResourceClaimTemplate for each `ClaimedDevices` that the pods' claims request.
    """

    texts: list[str] = field(default_factory=list)
    remarks: list[Remark] = field(default_factory=list)
    pods: list[ChangedPod] = field(default_factory=list)
    templates: dict[ClaimedDevices, dict[str, Any]] = field(default_factory=dict)


class _Source(NamedTuple):
    """A document and its parsed tree. problem: why the document cannot be parsed (`tree` is then None), else ""."""

    file: str
    document: Document
    tree: Tree | None
    problem: str


def convert(streams: Iterable[ManifestText], how: Conversion) -> Converted:
    """Replace the limits of pods by claims in all documents of the streams."""
    done = Converted()
    read = [(stream, list(_read(stream))) for stream in streams]
    objects = [body for _, sources in read for one in sources if one.tree for _, body in objects_in(one.tree.object)]
    around = Surroundings.of(objects, how.classes, how.namespace)
    for stream, sources in read:
        bom = BOM if stream.text.startswith(BOM) else ""
        done.texts.append(bom + "".join(_converted(source, how, around, done) for source in sources))
    if done.pods:
        done.remarks.insert(0, Remark(RemarkKind.UNCHANGED_PODS, read[0][0].name, 1, ""))
    return done


def reverse(streams: Iterable[ManifestText]) -> list[str]:
    """Undo conversions: return the texts that the streams had before `convert` changed them."""
    return [edits.reversed_stream(stream.text) for stream in streams]


def lost(streams: Iterable[ManifestText]) -> Iterator[str]:
    """Yield a warning for each document in which `reverse` also undoes what was changed after the conversion."""
    for stream in streams:
        for source in _read(stream):
            text = edits.reversed_stream(source.document.text)
            if source.tree is None or text == source.document.text or template_name(source.tree.object) is not None:
                continue
            with contextlib.suppress(YamlTextError, RecursionError):
                if _without_devices(source.tree.object) != _without_devices(Tree(text).object):
                    where = f"{source.file}:{source.document.line}"
                    yield f"{where}: warning: marked lines were changed after the conversion; this is undone, too"


def _without_devices(value: Any) -> Any:
    """Return a value of a manifest without what a conversion adds and removes."""
    if isinstance(value, list):
        return [_without_devices(one) for one in value]
    if not isinstance(value, dict):
        return value
    kept = {key: _without_devices(one) for key, one in value.items() if key not in ("resourceClaims", "claims")}
    for part in ("limits", "requests"):
        if isinstance(kept.get(part), dict):
            kept[part] = {name: one for name, one in kept[part].items() if not re.fullmatch(RESOURCE, str(name))}
    return {key: one for key, one in kept.items() if one or key not in ("limits", "requests", "resources")}


def _read(stream: ManifestText) -> Iterator[_Source]:
    for document in documents(stream.text.removeprefix(BOM)):
        try:
            yield _Source(stream.name, document, Tree(document.text), "")
        except YamlTextError as error:
            yield _Source(stream.name, document, None, str(error))


def _converted(source: _Source, how: Conversion, around: Surroundings, done: Converted) -> str:
    """Return a document's converted text, and add the document's converted pods, templates and remarks to `done`."""
    text = source.document.text
    if source.tree is None:
        done.remarks.append(Remark(RemarkKind.NOT_YAML, source.file, source.document.line, "", source.problem))
        return text
    places: list[tuple[Path, ChangedPod]] = []
    warnings: list[tuple[_Says, RemarkKind, str]] = []
    for path, body in objects_in(source.tree.object):
        say = _Says(source, path, body, done.remarks)
        specs = list(pod_specs(body, how.custom))
        try:
            changes = [(spec_path, spec, pod_change(spec, around.classes)) for spec_path, spec in specs]
        except UnconvertibleError as error:
            say(error.kind, error.detail, error.subject)
            continue
        for resource in sorted(limits_elsewhere(body, around.classes, {spec_path for spec_path, _ in specs})):
            say(RemarkKind.ELSEWHERE, resource)
        for spec_path, spec, change in changes:
            for resource in sorted(around.unknown(spec)):
                say(RemarkKind.NO_CLASS, resource)
            if change is not None:
                places.append(((*path, *spec_path), ChangedPod(body, spec_path, change)))
                warnings += [(say, *warning) for warning in around.warnings(body, spec, change)]
    if not places:
        return text
    new = {
        devices: devices.body(how.version)
        for _, pod in places
        for devices in _devices(pod, how)
        if devices not in done.templates
    }
    first = _Says(source, places[0][0], places[0][1].body, done.remarks)
    try:
        needed = [
            to_yaml([body]).removeprefix("---\n")
            for devices, body in new.items()
            if not around.has_template(devices, body)
        ]
        result = _rewritten(source.document, source.tree, places, how)
        result = edits.with_documents(Document(result, source.document.line), needed)
        if edits.reversed_stream(result) != edits.reversed_stream(text):
            raise UnwritableError("the change would mark a line that begins or ends within a text of several lines")
    except UnconvertibleError as error:
        first(error.kind, error.detail, error.subject)
        return text
    except (UnwritableError, RecursionError) as error:
        first(RemarkKind.IN_PLACE, str(error))
        return text
    for say, kind, detail in warnings:
        say(kind, detail)
    done.pods += [pod for _, pod in places]
    done.templates |= new
    return result


class _Says:
    """A function that adds a remark to a list. All remarks are about one object of a document."""

    def __init__(self, source: _Source, path: Path, body: Mapping[str, Any], remarks: list[Remark]) -> None:
        self._source = source
        self._path = path
        self._body = body
        self._remarks = remarks

    def __call__(self, kind: RemarkKind, detail: str = "", container: str = "") -> None:
        subject = title(self._body) + (f", container {container}" if container else "")
        assert self._source.tree is not None
        line = self._source.document.line + self._source.tree.line_of(self._path)
        self._remarks.append(Remark(kind, self._source.file, line, subject, detail))


def title(body: Mapping[str, Any]) -> str:
    """Return kind, namespace and name of an object."""
    metadata = body.get("metadata")
    metadata = metadata if isinstance(metadata, dict) else {}
    name = metadata.get("name") or metadata.get("generateName") or "?"
    namespace = f"{metadata['namespace']}/" if metadata.get("namespace") else ""
    return f"{body.get('kind')} {namespace}{name}"


def _devices(pod: ChangedPod, how: Conversion) -> list[ClaimedDevices]:
    """Return the devices that a pod's claims request, without duplicates, in the order of the containers."""
    each = (claimed(pod.body, claim.class_name, claim.count, how) for claim in pod.change.claims.values())
    return list(dict.fromkeys(each))


def claimed(body: Mapping[str, Any], class_name: str, count: int, how: Conversion) -> ClaimedDevices:
    """Return the `ClaimedDevices` for `count` devices of a DeviceClass, in the namespace of the object `body`."""
    metadata = body.get("metadata")
    namespace = metadata.get("namespace") if isinstance(metadata, dict) else None
    return ClaimedDevices(str(namespace or how.namespace), class_name, count)


def _rewritten(document: Document, tree: Tree, places: Sequence[tuple[Path, ChangedPod]], how: Conversion) -> str:
    """Return a document's text after the edits that replace limits by claims.

    Raises UnwritableError if the new text does not parse to the expected object.
    """
    changes: list[Edit] = []
    expected = copy.deepcopy(tree.object)
    for path, pod in places:
        claims = {
            name: claimed(pod.body, claim.class_name, claim.count, how).template
            for name, claim in pod.change.claims.items()
        }
        spec = expected
        for step in path:
            spec = spec[step]
        _apply(spec, pod.change, claims)
        changes += _edits(document.text, tree, path, pod.change, claims)
    result = edits.marked(document.text, changes)
    try:
        same = Tree(result).object == expected
    except YamlTextError as error:
        raise UnwritableError(f"the layout of the YAML does not allow the change ({error})") from None
    if not same:
        raise UnwritableError("the layout of the YAML does not allow the change")
    return result


def _apply(spec: Any, change: PodChange, claims: Mapping[str, str]) -> None:
    """Replace limits by claims in a parsed pod spec, in place. claims: for each new claim, its template's name."""
    new = [{"name": name, "resourceClaimTemplateName": template} for name, template in claims.items()]
    spec["resourceClaims"] = [*new, *(spec.get("resourceClaims") or [])]
    for container in change.containers:
        part, index = container.path
        resources = spec[part][index]["resources"]
        for given in ("limits", "requests"):
            there = resources.get(given) or {}
            kept = {name: value for name, value in there.items() if name not in container.resources}
            if kept:
                resources[given] = kept
            elif there:
                del resources[given]
        resources["claims"] = [*({"name": name} for name in container.claims), *(resources.get("claims") or [])]


def _edits(text: str, tree: Tree, path: Path, change: PodChange, claims: Mapping[str, str]) -> list[Edit]:
    """Return the edits that replace limits by claims in the text of one pod spec. Raises UnwritableError."""
    spec = tree.mapping(tree.at(path))
    items = [_flow({"name": name, "resourceClaimTemplateName": template}, spec) for name, template in claims.items()]
    found = [_listed(text, tree, spec, "resourceClaims", items, ())]
    for container in change.containers:
        found += _container_edits(text, tree, tree.at((*path, *container.path)), container)
    return found


def _container_edits(text: str, tree: Tree, node: yaml.Node, change: ContainerChange) -> list[Edit]:
    resources = tree.mapping(tree.entry(node, "resources")[1])
    found, gone = [], set()
    for part in ("limits", "requests"):
        if not any(key.value == part for key, _ in resources.value):
            continue
        given = tree.entry(resources, part)[1]
        names = {key.value for key, _ in given.value} if isinstance(given, yaml.MappingNode) else set()
        if not names & set(change.resources):
            continue
        for name in sorted(names & set(change.resources)):
            tree.entry(given, name)  # `entry` raises UnwritableError for an alias.
        if names <= set(change.resources):
            gone.add(part)
        else:
            found += edits.removed(text, tree.mapping(given), change.resources)
    found += edits.removed(text, resources, gone)
    items = [_flow({"name": name}, resources) for name in change.claims]
    return [*found, _listed(text, tree, resources, "claims", items, gone)]


def _listed(
    text: str, tree: Tree, mapping: yaml.MappingNode, key: str, items: Sequence[str], gone: Iterable[str]
) -> Edit:
    """Return the edit that adds items to the list at `key` in a mapping, or adds `key` with a new list.

    gone: the keys of the mapping that other edits remove.
    """
    if any(one.value == key for one, _ in mapping.value):
        return edits.with_items(text, tree.entry(mapping, key)[1], items)
    return edits.with_list(text, mapping, key, items, set(gone))


def _flow(value: Mapping[str, str], mapping: yaml.MappingNode) -> str:
    """Return a mapping in YAML's flow style. If the surrounding `mapping` is JSON, the result is JSON as well."""
    if mapping.flow_style and mapping.value and mapping.value[0][0].style == '"':
        return json.dumps(value)
    return "{" + ", ".join(f"{key}: {_scalar(text)}" for key, text in value.items()) + "}"


def _scalar(text: str) -> str:
    """Return a text as a scalar in YAML's flow style, with quotes if YAML would not read it as a string otherwise."""
    dumped: str = yaml.safe_dump([text], default_flow_style=True, width=10_000)
    return dumped.strip()[1:-1]


def joined(texts: Sequence[str]) -> str:
    """Join the texts of YAML streams to one stream, with `---` between streams."""
    whole = ""
    for text in texts:
        if whole.strip() and not text.startswith("---"):
            text = f"---\n{text}"
        if whole and not whole.endswith("\n"):
            whole += "\n"
        whole += text.removeprefix(BOM) if whole else text
    return whole
