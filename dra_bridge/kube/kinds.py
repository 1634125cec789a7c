"""Kinds of objects of the API server, and the paths and selectors by which they are asked for."""

from __future__ import annotations

import urllib.parse
from typing import Any, Final, NamedTuple

Object = dict[str, Any]
"""A Kubernetes object as JSON has it."""

GROUP: Final = "resource.k8s.io"


class Kind(NamedTuple):
    """A kind of objects. `version` empty means the version of resource.k8s.io that was chosen."""

    group: str
    version: str
    plural: str
    kind: str
    namespaced: bool

    def api_version(self, version: str) -> str:
        """Return the `apiVersion` of its objects in a version of its group."""
        return f"{self.group}/{version}" if self.group else version


NODES: Final = Kind("", "v1", "nodes", "Node", False)
PODS: Final = Kind("", "v1", "pods", "Pod", True)
EVENTS: Final = Kind("", "v1", "events", "Event", True)
RESOURCE_SLICES: Final = Kind(GROUP, "", "resourceslices", "ResourceSlice", False)
RESOURCE_CLAIMS: Final = Kind(GROUP, "", "resourceclaims", "ResourceClaim", True)


def path_of(kind: Kind, version: str, name: str, namespace: str, subresource: str = "") -> str:
    """Return the path of one object, or of all of a kind if `name` is empty."""
    parts = ["apis", kind.group, version] if kind.group else ["api", version]
    if kind.namespaced and namespace:
        parts += ["namespaces", namespace]
    parts += [kind.plural, name, subresource]
    return "/" + "/".join(urllib.parse.quote(part, safe="") for part in parts if part)


def selectors_of(field_selector: str, label_selector: str) -> dict[str, str]:
    """Return the query parameters of the selectors that are given."""
    both = {"fieldSelector": field_selector, "labelSelector": label_selector}
    return {key: value for key, value in both.items() if value}
