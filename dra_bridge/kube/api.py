"""What the API server and its client exchange: kinds of objects, their paths, and errors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple

import msgspec

Object = dict[str, Any]  # a Kubernetes object as JSON has it

GROUP: Final = "resource.k8s.io"


class Kind(NamedTuple):
    """A kind of objects. `version` empty means the version of resource.k8s.io that was chosen."""

    group: str
    version: str
    plural: str
    kind: str

    def api_version(self, version: str) -> str:
        """Return the `apiVersion` of its objects in a version of its group."""
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
    """Return whether a state of an object is older than another (versions compare as numbers since 1.35, and did)."""
    version, other = (str(state["metadata"].get("resourceVersion", "")) for state in (body, than))
    return version.isdecimal() and other.isdecimal() and int(version) < int(other)


def selectors_of(field_selector: str, label_selector: str) -> dict[str, str]:
    """Return the query parameters of the selectors that are given."""
    both = {"fieldSelector": field_selector, "labelSelector": label_selector}
    return {key: value for key, value in both.items() if value}


class ClusterError(Exception):
    """Raised when something about the API server fails; the base of all errors of this package."""


class AccessError(ClusterError):
    """Raised when there is no configuration to reach an API server with, or it cannot be used."""


class UnsupportedError(ClusterError):
    """Raised when the API server serves no version of resource.k8s.io that this client knows."""


class VersionChangedError(ClusterError):
    """Raised when an object was made for a version of resource.k8s.io that is not the chosen one any more."""


class Cause(msgspec.Struct, frozen=True):
    """One detail of a refusal: the field, and a message for people."""

    field: str = ""
    message: str = ""


class ApiError(ClusterError):
    """Raised when a request was refused, or not answered.

    code: the HTTP status, 0 if there was no answer. reason: the server's, in one word; may be empty. causes: one for
    each wrong field. retry_after: seconds that the server asks to wait, 0 if it does not.
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
    """Raised when the API server did not answer, or cannot serve now; try later.

    Also when the answer cannot be that of an API server to this request: a 404 that does not name the requested
    object, or another object in its place.
    """


class UnreadableError(UnavailableError):
    """Raised when the API server answered, and with more than is taken at once or with what cannot be decoded.

    The server is not lost. Like one without an answer, a write may have been carried out.
    """


class OversizedError(UnreadableError):
    """Raised when an answer is larger than is taken at once; the rest of it was not read."""


class ForbiddenError(ApiError):
    """Raised when the client lacks the right to do that (403)."""


class NotFoundError(ApiError):
    """Raised when the API server says that the requested object does not exist, and names it (404)."""


class ConflictError(ApiError):
    """Raised when the object changed, has another UID, or exists already (409; reason Conflict or AlreadyExists)."""


class GoneError(ApiError):
    """Raised when a resourceVersion is too old to continue from (410)."""


class InvalidError(ApiError):
    """Raised when the API server will never accept this; `causes` names the fields (400, 413, 415, 422)."""


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
        # As NewNotFound of k8s.io/apimachinery writes them: `kind` is the resource's plural there. A proxy, a missing
        # namespace, and a kind or version that is not served name something else or nothing.
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


def error_of(
    code: int, body: bytes | Object, retry_after: str = "", *, kind: Kind | None = None, name: str = ""
) -> ApiError:
    """Return the error that an answer about an object stands for; `body` is a Status object, or any text."""
    try:
        status = msgspec.json.decode(body, type=_Status) if isinstance(body, bytes) else msgspec.convert(body, _Status)
    except (msgspec.MsgspecError, RecursionError):
        status = _Status("Status", message=_beginning(body) or "no further answer")
    status.code = code
    if retry_after.isdecimal():
        status.details.retry_after = int(retry_after[:9])
    return status.error(kind, name)


def _beginning(body: bytes | Object) -> str:
    return (body if isinstance(body, bytes) else b"")[:400].decode(errors="replace").strip()


def error_of_status(status: Object) -> ApiError:
    """Return the error that a Status object in a watch stands for. Raises ValueError if it is no Status."""
    return msgspec.convert(status, _Status).error()
