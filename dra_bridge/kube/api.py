"""Defines the kinds of API objects with their versions and names, and the errors of requests to the API server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple

import msgspec

Object = dict[str, Any]  # A Kubernetes object, as a dict decoded from JSON.

GROUP: Final = "resource.k8s.io"


class Kind(NamedTuple):
    """A kind of objects. An empty `version` stands for the version of resource.k8s.io that the client has chosen."""

    group: str
    version: str
    plural: str
    kind: str

    def api_version(self, version: str) -> str:
        """Return the `apiVersion` of this kind's objects in a version of the kind's group."""
        return f"{self.group}/{version}" if self.group else version


NODES: Final = Kind("", "v1", "nodes", "Node")
PODS: Final = Kind("", "v1", "pods", "Pod")
EVENTS: Final = Kind("", "v1", "events", "Event")
CLUSTER_ROLE_BINDINGS: Final = Kind("rbac.authorization.k8s.io", "v1", "clusterrolebindings", "ClusterRoleBinding")
SELF_SUBJECT_REVIEWS: Final = Kind("authentication.k8s.io", "v1", "selfsubjectreviews", "SelfSubjectReview")
LEASES: Final = Kind("coordination.k8s.io", "v1", "leases", "Lease")
DAEMON_SETS: Final = Kind("apps", "v1", "daemonsets", "DaemonSet")
RESOURCE_SLICES: Final = Kind(GROUP, "", "resourceslices", "ResourceSlice")
DEVICE_CLASSES: Final = Kind(GROUP, "", "deviceclasses", "DeviceClass")
RESOURCE_CLAIMS: Final = Kind(GROUP, "", "resourceclaims", "ResourceClaim")


def is_older(body: Object, than: Object) -> bool:
    """Return whether `body` is an older state of an object than `than`, as the resource versions of both show.

    Resource versions are compared as numbers. Kubernetes permits this since 1.35. In older versions, the API server's
    resource versions are increasing numbers as well.
    """
    version, other = (str(state["metadata"].get("resourceVersion", "")) for state in (body, than))
    return version.isdecimal() and other.isdecimal() and int(version) < int(other)


def selectors_of(field_selector: str, label_selector: str) -> dict[str, str]:
    """Return the query parameters of those selectors that are not empty."""
    both = {"fieldSelector": field_selector, "labelSelector": label_selector}
    return {key: value for key, value in both.items() if value}


class ClusterError(Exception):
    """Raised when a request to the API server fails. This class is the base class of all errors of this package."""


class AccessError(ClusterError):
    """Raised when no configuration for an API server is found, or when the configuration cannot be used."""


class UnsupportedError(ClusterError):
    """Raised when the API server serves no version of resource.k8s.io that this client knows."""


class VersionChangedError(ClusterError):
    """Raised when an object was made for another version of resource.k8s.io than the client now uses."""


class Cause(msgspec.Struct, frozen=True):
    """One reason why the API server refused a request. field: the wrong field of the object.

    message: the server's text.
    """

    field: str = ""
    message: str = ""


class ApiError(ClusterError):
    """Raised when the API server refused a request or did not respond.

    code: the HTTP status, 0 without a response. reason: the server's reason in one word, or "" without a reason.
    causes: one `Cause` for each wrong field. retry_after: seconds that the server asks the client to wait before the
    next request, 0 if the server does not ask for a wait.
    """

    def __init__(
        self, message: str, *, code: int = 0, reason: str = "", causes: Sequence[Cause] = (), retry_after: float = 0.0
    ) -> None:
        super().__init__(f"{code} {reason}: {message}" if code else message)
        self.message = message
        self.code = code
        self.reason = reason
        self.causes = causes
        self.retry_after = retry_after


class UnavailableError(ApiError):
    """Raised when the API server did not respond, or cannot handle the request now. A later try may succeed.

    The error is also raised for a response that cannot come from an API server: a 404 that does not name the requested
    object, or a body that is not the requested object.
    """


class UnreadableError(UnavailableError):
    """Raised when the API server's response is too large or cannot be decoded.

    The server still counts as reachable. If the request was a write, it is unknown whether the server executed it.
    """


class OversizedError(UnreadableError):
    """Raised when a response is larger than the client accepts. The rest of the response was not read."""


class ForbiddenError(ApiError):
    """Raised when the client lacks the right to send the request (403)."""


class NotFoundError(ApiError):
    """Raised when the API server responds that the requested object does not exist (a 404 that names the object)."""


class ConflictError(ApiError):
    """Raised when the object has changed, has another UID, or exists already (409; Conflict or AlreadyExists)."""


class GoneError(ApiError):
    """Raised when a watch or list cannot continue at a resourceVersion, because it is too old (410)."""


class InvalidError(ApiError):
    """Raised when the API server will never accept the request (400, 413, 415, 422).

    causes: one `Cause` for each wrong field.
    """


_ERRORS: Final[Mapping[int, type[ApiError]]] = {
    **dict.fromkeys((400, 413, 415, 422), InvalidError),
    **dict.fromkeys((404, 408, 429), UnavailableError),
    403: ForbiddenError,
    409: ConflictError,
    410: GoneError,
}


class _Details(msgspec.Struct):
    name: str = ""
    group: str = ""
    kind: str = ""
    causes: list[Cause] = []
    retry_after: int = msgspec.field(default=0, name="retryAfterSeconds")

    def name_object(self, kind: Kind, name: str) -> bool:
        # NewNotFound of k8s.io/apimachinery puts the plural of the resource into `kind`. A 404 does not name the object
        # if it comes from a proxy, or is caused by a missing namespace, kind or version.
        kinds, groups = ("", kind.plural, kind.kind), ("", kind.group)
        return bool(name) and self.name == name and self.kind in kinds and self.group in groups


class _Status(msgspec.Struct):
    kind: Literal["Status"]
    code: int = 500
    reason: str = ""
    message: str = "no message"
    details: _Details = msgspec.field(default_factory=_Details)

    def error(self, kind: Kind | None = None, name: str = "") -> ApiError:
        error = _ERRORS.get(self.code) or (UnavailableError if self.code >= 500 else ApiError)
        if self.code == 404 and self.reason == "NotFound" and kind and self.details.name_object(kind, name):
            error = NotFoundError
        return error(
            self.message,
            code=self.code,
            reason=self.reason,
            causes=self.details.causes,
            retry_after=float(self.details.retry_after),
        )


_DECODER: Final = msgspec.json.Decoder(_Status)


def error_of(
    code: int, body: bytes | Object, retry_after: str = "", *, kind: Kind | None = None, name: str = ""
) -> ApiError:
    """Return the error for a response. code: the response's HTTP status.

    body: the response's body, which is a Status object or any text.

    kind, name: the kind and name of the requested object. For a 404 that names this object, the result is a
    NotFoundError.
    """
    try:
        status = _DECODER.decode(body) if isinstance(body, bytes) else msgspec.convert(body, _Status)
    except (msgspec.MsgspecError, RecursionError):
        status = _Status("Status", message=_beginning(body) or "no further answer")
    status.code = code
    if retry_after.isdecimal():
        status.details.retry_after = int(retry_after[:9])
    return status.error(kind, name)


def _beginning(body: bytes | Object) -> str:
    return (body if isinstance(body, bytes) else b"")[:400].decode(errors="replace").strip()


def error_of_status(status: Object) -> ApiError:
    """Return the error for a Status object in a watch. Raises ValueError for any other object."""
    return msgspec.convert(status, _Status).error()
