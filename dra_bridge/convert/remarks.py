"""Defines the remarks of `convert` on manifests: on parts that stay unchanged, and on effects of the new claims.

docs/manifests.md lists all kinds of remarks; a test compares that page with this module.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Level(Enum):
    """The importance of a remark."""

    NOTE = "note"
    WARNING = "warning"
    REFUSED = "refused"
    """`convert` leaves the object, or the whole document, unchanged."""


class RemarkKind(Enum):
    """The kind of a remark: a name, a level, and a text for users, to which a remark adds details."""

    UNCHANGED_PODS = (
        "unchanged-pods",
        Level.NOTE,
        "nothing has to be converted for nodes of Kubernetes 1.36 and newer whose allocatable is 0: DRA serves "
        "unchanged pods there, if the DeviceClass names the resource",
    )
    NO_CLASS = (
        "no-class",
        Level.WARNING,
        "no one DeviceClass is known; give --class NAME=CLASS, or the DeviceClass that names it with the manifests",
    )
    ELSEWHERE = (
        "elsewhere",
        Level.WARNING,
        "asks at a place that is no known pod; if pods are made of it, give --pod-template-path KIND=PATH",
    )
    CUSTOM = (
        "custom",
        Level.WARNING,
        "the operator of a custom resource may count limits itself, as Ray does: set such numbers by hand",
    )
    NOT_YAML = ("not-yaml", Level.WARNING, "the document cannot be read and stays as it was")
    PREEMPTING = (
        "preempting-priority",
        Level.WARNING,
        "a pod with claims preempts no other pod for their devices, whatever its priority",
    )
    IMMUTABLE = (
        "immutable",
        Level.WARNING,
        "where it exists already the API server refuses the change: delete it first, or give it another name",
    )
    AUTOSCALED = (
        "autoscaled",
        Level.WARNING,
        "is scaled by metrics; those that count limits, such as kube_pod_container_resource_limits, do not see claims",
    )
    QUOTA = (
        "quota",
        Level.WARNING,
        "limits the resource: before Kubernetes 1.36 claims are not counted by it, from 1.36 only if the DeviceClass "
        "names the resource",
    )
    SCHEDULER = ("scheduler", Level.WARNING, "another scheduler has to know claims (DRA)")
    TOO_MANY = ("too-many", Level.REFUSED, "a claim has at most 32 devices")
    NOT_A_COUNT = ("not-a-count", Level.REFUSED, "the limit is no whole number of devices")
    REQUEST_DIFFERS = ("request-differs", Level.REFUSED, "the request is not the limit, which the API server refuses")
    INIT_CONTAINER = (
        "init-container",
        Level.REFUSED,
        "by limits containers that start later use the devices of init containers again, by claims both add up: give "
        "both the same number, or write the claims by hand",
    )
    NODE_NAME = (
        "node-name",
        Level.REFUSED,
        "spec.nodeName passes the scheduler by, which alone allocates claims: select the node by a label",
    )
    NAME_TAKEN = ("name-taken", Level.REFUSED, "there is another one of that name")
    IN_PLACE = ("in-place", Level.REFUSED, "the text cannot be changed in place")

    def __init__(self, key: str, level: Level, text: str) -> None:
        self.key = key
        self.level = level
        self.text = text


@dataclass(frozen=True, slots=True)
class Remark:
    """One remark. line: the line's number, from 1.

    subject: the object's kind and name, and the container's name if the remark concerns a container.
    """

    kind: RemarkKind
    file: str
    line: int
    subject: str
    detail: str = ""

    def __str__(self) -> str:
        detail = f"{self.detail}: " if self.detail else ""
        subject = f"{self.subject}: " if self.subject else ""
        return f"{self.file}:{self.line}: {self.kind.level.value}: {subject}{detail}{self.kind.text} [{self.kind.key}]"


class UnconvertibleError(Exception):
    """Raised when an object cannot be converted."""

    def __init__(self, kind: RemarkKind, subject: str = "", detail: str = "") -> None:
        super().__init__(kind, subject, detail)
        self.kind = kind
        self.subject = subject
        self.detail = detail
