"""Writes a conversion as Kustomize patches, for manifests that must stay unchanged. Pure functions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from dra_bridge.convert.convert import ChangedPod, Conversion, Converted, claimed
from dra_bridge.manifests import to_yaml

TEMPLATES: Final = "claim-templates.yaml"
"""The name of the file with the ResourceClaimTemplates, to which the Kustomize component refers."""


def component(converted: Converted, how: Conversion) -> str:
    """Return a Kustomize component, as YAML, whose patches convert the objects."""
    by_object: dict[int, tuple[Mapping[str, Any], list[dict[str, Any]]]] = {}
    for pod in converted.pods:
        by_object.setdefault(id(pod.body), (pod.body, []))[1].extend(_operations(pod, how))
    patches = [
        {"target": _target(body), "patch": to_yaml([operations]).removeprefix("---\n")}
        for body, operations in by_object.values()
    ]
    head = {"apiVersion": "kustomize.config.k8s.io/v1alpha1", "kind": "Component"}
    return to_yaml([{**head, "resources": [TEMPLATES], "patches": patches}])


def templates(converted: Converted) -> str:
    """Return the ResourceClaimTemplates of a conversion as YAML."""
    return to_yaml(converted.templates.values())


def _target(body: Mapping[str, Any]) -> dict[str, str]:
    group, _, version = str(body.get("apiVersion")).rpartition("/")
    metadata = body.get("metadata") or {}
    target = {"group": group, "version": version, "kind": str(body.get("kind")), "name": str(metadata.get("name"))}
    if metadata.get("namespace"):
        target["namespace"] = str(metadata["namespace"])
    return {key: text for key, text in target.items() if text}


def _operations(pod: ChangedPod, how: Conversion) -> list[dict[str, Any]]:
    """Return the operations of a JSON patch (RFC 6902) for a pod spec.

    For each container, the patch first tests its name.
    """
    spec: Any = pod.body
    for step in pod.path:
        spec = spec[step]
    found = []
    for change in pod.change.containers:
        part, index = change.path
        container = spec[part][index]
        where = (*pod.path, *change.path)
        found.append({"op": "test", "path": _pointer(*where, "name"), "value": change.name})
        for given in ("limits", "requests"):
            names = container["resources"].get(given) or {}
            gone = [_pointer(*where, "resources", given, name) for name in change.resources if name in names]
            found += [{"op": "remove", "path": path} for path in gone]
        claims = [{"name": name} for name in change.claims]
        found += _added((*where, "resources", "claims"), container["resources"].get("claims"), claims)
    claims = [
        {
            "name": name,
            "resourceClaimTemplateName": claimed(pod.body, claim.class_name, claim.count, how).template,
        }
        for name, claim in pod.change.claims.items()
    ]
    return [*found, *_added((*pod.path, "resourceClaims"), spec.get("resourceClaims"), claims)]


def _added(path: Iterable[str | int], there: Any, items: list[dict[str, str]]) -> list[dict[str, Any]]:
    if not there:
        return [{"op": "add", "path": _pointer(*path), "value": items}]
    return [{"op": "add", "path": _pointer(*path, "-"), "value": item} for item in items]


def _pointer(*steps: str | int) -> str:
    return "".join("/" + str(step).replace("~", "~0").replace("/", "~1") for step in steps)
