"""Collects facts for a conversion, such as DeviceClasses and quotas, from all objects of the manifests. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from dra_bridge.convert.pods import PodChange, containers_of, extended_resources, is_builtin
from dra_bridge.convert.remarks import RemarkKind, UnconvertibleError
from dra_bridge.convert.templates import ClaimedDevices, template_name

_IMMUTABLE: Final = {"Job", "Pod"}
_AUTOSCALERS: Final = {"HorizontalPodAutoscaler": "scaleTargetRef", "VerticalPodAutoscaler": "targetRef"}


@dataclass(frozen=True, slots=True)
class Surroundings:
    """Facts from all objects of the manifests. namespace: the namespace of objects that name no namespace.

    classes: for each resource, the name of its DeviceClass. rivals: for each resource that several DeviceClasses name,
    their names; `classes` lacks it. patient: names of PriorityClasses whose pods preempt no
    other pods. autoscaled: for the (namespace, kind, name) of each object that an autoscaler scales, the autoscaler's
    kind and name. quotas: for each limit in a ResourceQuota, the quota's namespace and name, and the resource. specs:
    for the (namespace, name) of each ResourceClaimTemplate, the template's spec.
    """

    namespace: str
    classes: Mapping[str, str]
    rivals: Mapping[str, str]
    patient: frozenset[str]
    autoscaled: Mapping[tuple[str, str, str], str]
    quotas: frozenset[tuple[str, str, str]]
    specs: Mapping[tuple[str, str], Any]

    @classmethod
    def of(cls, objects: Iterable[Mapping[str, Any]], classes: Mapping[str, str], namespace: str) -> Surroundings:
        """Collect the facts from objects.

        classes: for each resource, the name of its DeviceClass; these names override the DeviceClasses in the objects.
        """
        named: dict[str, set[str]] = {}
        patient, quotas = set(), set()
        autoscaled, specs = {}, {}
        for body in objects:
            kind = str(body.get("kind"))
            spec = _mapping(body.get("spec"))
            metadata = _mapping(body.get("metadata"))
            name, place = str(metadata.get("name")), str(metadata.get("namespace") or namespace)
            if kind == "DeviceClass" and spec.get("extendedResourceName"):
                named.setdefault(str(spec["extendedResourceName"]), set()).add(name)
            elif kind == "PriorityClass" and body.get("preemptionPolicy") == "Never":
                patient.add(name)
            elif kind in _AUTOSCALERS:
                target = _mapping(spec.get(_AUTOSCALERS[kind]))
                autoscaled[place, str(target.get("kind")), str(target.get("name"))] = f"{kind} {name}"
            elif kind == "ResourceQuota":
                hard = _mapping(spec.get("hard"))
                quotas |= {(place, name, str(key).removeprefix("requests.")) for key in hard}
            elif template_name(body) is not None:
                specs[place, name] = body.get("spec")
        known = {resource: min(names) for resource, names in named.items() if len(names) == 1} | dict(classes)
        rivals = {resource: ", ".join(sorted(names)) for resource, names in named.items() if resource not in known}
        return cls(namespace, known, rivals, frozenset(patient), autoscaled, frozenset(quotas), specs)

    def unknown(self, spec: Mapping[str, Any]) -> set[str]:
        """Return the extended resources in a pod spec's limits without one known DeviceClass, with those of several."""
        asked = {name for _, container in containers_of(spec) for name in extended_resources(container)}
        return {
            f"{resource} (several: {self.rivals[resource]})" if resource in self.rivals else resource
            for resource in asked - self.classes.keys()
        }

    def warnings(
        self, body: Mapping[str, Any], spec: Mapping[str, Any], change: PodChange
    ) -> Iterator[tuple[RemarkKind, str]]:
        """Yield warnings about effects of claims on the pods of a converted object."""
        metadata = _mapping(body.get("metadata"))
        kind, name = str(body.get("kind")), str(metadata.get("name"))
        namespace = str(metadata.get("namespace") or self.namespace)
        priority = str(spec.get("priorityClassName") or "")
        if priority and priority not in self.patient and spec.get("preemptionPolicy") != "Never":
            yield RemarkKind.PREEMPTING, f"priorityClassName: {priority}"
        if not is_builtin(body):
            yield RemarkKind.CUSTOM, ""
        if kind in _IMMUTABLE:
            yield RemarkKind.IMMUTABLE, ""
        if scaled := self.autoscaled.get((namespace, kind, name)):
            yield RemarkKind.AUTOSCALED, scaled
        resources = {claim.resource for claim in change.claims.values()}
        for place, quota, resource in sorted(self.quotas):
            if place == namespace and resource in resources:
                yield RemarkKind.QUOTA, f"ResourceQuota {quota}, requests.{resource}"
        if spec.get("schedulerName") not in (None, "", "default-scheduler"):
            yield RemarkKind.SCHEDULER, f"schedulerName: {spec['schedulerName']}"

    def has_template(self, devices: ClaimedDevices, body: Mapping[str, Any]) -> bool:
        """Return whether the manifests contain the ResourceClaimTemplate of these devices.

        Raises UnconvertibleError if a different template has the same name.
        """
        found = self.specs.get((devices.namespace, devices.template))
        if found is not None and found != body["spec"]:
            raise UnconvertibleError(
                RemarkKind.NAME_TAKEN, "", f"the manifests have a ResourceClaimTemplate {devices.template}"
            )
        return found is not None


def _mapping(part: Any) -> Mapping[str, Any]:
    return part if isinstance(part, dict) else {}
