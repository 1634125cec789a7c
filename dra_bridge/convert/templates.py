"""Makes ResourceClaimTemplates, each for a number of devices of one DeviceClass. Pure functions."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Container
from dataclasses import dataclass
from typing import Any, Final, Literal

ClaimApi = Literal["v1", "v1beta2", "v1beta1"]
KIND: Final = "ResourceClaimTemplate"
REQUEST: Final = "devices"
"""The name of the only request in each template."""
_MAX_NAME: Final = 253
_MAX_LABEL: Final = 63
_HASH: Final = 10


@dataclass(frozen=True, slots=True)
class ClaimedDevices:
    """A number of devices of a DeviceClass, for objects of one namespace ("" for objects that name no namespace)."""

    namespace: str
    class_name: str
    count: int

    @property
    def template(self) -> str:
        """The name of the ResourceClaimTemplate for these devices, which depends only on class and count."""
        return _fitting(f"{self.class_name}-{self.count}", _MAX_NAME)

    def body(self, version: ClaimApi) -> dict[str, Any]:
        """Return the ResourceClaimTemplate in a version of resource.k8s.io."""
        exactly = {"deviceClassName": self.class_name, "count": self.count}
        request = {"name": REQUEST, **(exactly if version == "v1beta1" else {"exactly": exactly})}
        namespace = {"namespace": self.namespace} if self.namespace else {}
        return {
            "apiVersion": f"resource.k8s.io/{version}",
            "kind": KIND,
            "metadata": {"name": self.template, **namespace},
            "spec": {"spec": {"devices": {"requests": [request]}}},
        }


def claim_name(resource: str, container: str, others: Container[str] = ()) -> str:
    """Return the name (a DNS label) that a container's claim for a resource gets in the pod.

    others: the names of the pod's other new claims. If they have the usual name, the claim gets a hashed one.
    """
    word = re.sub(r"[^a-z0-9]+", "-", resource.rpartition("/")[2].lower()).strip("-") or "x"
    name = _fitting(f"{word}-{container}", _MAX_LABEL)
    return name if name not in others else _hashed(name, _MAX_LABEL, f"{resource} {container}")


def template_name(body: object) -> str | None:
    """Return the name of a ResourceClaimTemplate; None if the object is of another kind."""
    if not isinstance(body, dict) or body.get("kind") != KIND:
        return None
    metadata = body.get("metadata")
    return str(metadata.get("name")) if isinstance(metadata, dict) else ""


def _fitting(name: str, most: int) -> str:
    if len(name) <= most:
        return name
    return _hashed(name, most, name)


def _hashed(name: str, most: int, whole: str) -> str:
    digits = hashlib.sha256(whole.encode()).hexdigest()[:_HASH]
    return f"{name[: most - _HASH - 1].rstrip('-.')}-{digits}"
