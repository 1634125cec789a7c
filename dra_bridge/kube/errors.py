"""Errors of the API server's client, and the error that a refusal or a Status object stands for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal, NamedTuple

import msgspec

from dra_bridge.kube.kinds import Kind, Object

__all__ = [
    "AccessError",
    "AlreadyExistsError",
    "ApiError",
    "Cause",
    "ClusterError",
    "ConflictError",
    "ForbiddenError",
    "GoneError",
    "InvalidError",
    "NotFoundError",
    "UnauthorizedError",
    "UnavailableError",
    "UnsupportedError",
    "VersionChangedError",
    "error_of",
    "error_of_status",
]


class ClusterError(Exception):
    """Raised when something about the API server fails; the base of all errors of this package."""


class AccessError(ClusterError):
    """Raised when there is no configuration to reach an API server with, or it cannot be used."""


class UnsupportedError(ClusterError):
    """Raised when the API server serves no version of resource.k8s.io that is spoken here."""


class VersionChangedError(ClusterError):
    """Raised when an object was made for a version of resource.k8s.io that is not the chosen one any more."""


class Cause(NamedTuple):
    """One detail of a refusal: the field, a reason for programs, and a message for people."""

    field: str
    reason: str
    message: str


class ApiError(ClusterError):
    """Raised when a request was refused, or not answered.

    Attributes:
        code: the HTTP status, 0 if there was no answer.
        reason: the server's reason in one word, may be empty.
        message: what the server said.
        causes: its details, one for each wrong field.
        retry_after: seconds that the server asks to wait, 0 if it does not.

    """

    def __init__(
        self,
        message: str,
        *,
        code: int = 0,
        reason: str = "",
        causes: tuple[Cause, ...] = (),
        retry_after: float = 0.0,
    ) -> None:
        self.code = code
        self.reason = reason
        self.message = message
        self.causes = causes
        self.retry_after = retry_after
        super().__init__(f"{code} {reason}: {message}" if code else message)


class UnavailableError(ApiError):
    """Raised when the API server did not answer in time, not at all, or cannot serve now; try later.

    Also when the answer cannot be that of an API server to this request: a 404 that does not name
    the object that was asked for, or another object in its place.
    """


class UnauthorizedError(ApiError):
    """Raised when the API server does not know who asks (401)."""


class ForbiddenError(ApiError):
    """Raised when the one who asks may not do that (403)."""


class NotFoundError(ApiError):
    """Raised when the API server says that the object which was asked for does not exist, and names it (404)."""


class ConflictError(ApiError):
    """Raised when the object is another by now: newer, or another UID (409)."""


class AlreadyExistsError(ConflictError):
    """Raised when an object of that name exists (409)."""


class GoneError(ApiError):
    """Raised when a position in the history is too old to go on from (410)."""


class InvalidError(ApiError):
    """Raised when the API server will never take this; `causes` names the fields (400, 413, 422)."""


_ERRORS: Final[Mapping[int, type[ApiError]]] = {
    400: InvalidError,
    401: UnauthorizedError,
    403: ForbiddenError,
    404: UnavailableError,
    408: UnavailableError,
    409: ConflictError,
    410: GoneError,
    413: InvalidError,
    415: InvalidError,
    422: InvalidError,
    429: UnavailableError,
}


class _Cause(msgspec.Struct):
    field: str = ""
    reason: str = ""
    message: str = ""


class _Details(msgspec.Struct):
    name: str = ""
    group: str = ""
    kind: str = ""
    causes: list[_Cause] = []
    retry_after: int = msgspec.field(default=0, name="retryAfterSeconds")


class _Status(msgspec.Struct):
    """What of a metav1.Status matters here."""

    kind: Literal["Status"]
    code: int = 500
    reason: str = ""
    message: str = "no message"
    details: _Details = msgspec.field(default_factory=_Details)


def error_of(code: int, body: bytes, retry_after: str = "", *, kind: Kind | None = None, name: str = "") -> ApiError:
    """Return the error that an answer stands for; `body` is a Status object, or any text.

    kind, name: the object that was asked for, if it was one.
    """
    try:
        status = msgspec.json.decode(body, type=_Status)
    except (msgspec.MsgspecError, RecursionError):
        status = _Status("Status", message=body[:400].decode(errors="replace").strip() or "no further answer")
    status.code = code
    if retry_after.isdecimal():
        status.details.retry_after = int(retry_after[:9])
    return _error_of(status, kind, name)


def error_of_status(status: Object) -> ApiError:
    """Return the error that a Status object stands for, as a watch sends it.

    Raises:
        ValueError: it is no Status.

    """
    return _error_of(msgspec.convert(status, _Status), None, "")


def _error_of(status: _Status, kind: Kind | None, name: str) -> ApiError:
    error = _ERRORS.get(status.code) or (UnavailableError if status.code >= 500 else ApiError)
    if status.reason == "AlreadyExists":
        error = AlreadyExistsError
    elif status.code == 404 and status.reason == "NotFound" and kind is not None and _names(status.details, kind, name):
        error = NotFoundError
    return error(
        status.message,
        code=status.code,
        reason=status.reason,
        causes=tuple(Cause(cause.field, cause.reason, cause.message) for cause in status.details.causes),
        retry_after=float(status.details.retry_after),
    )


def _names(details: _Details, kind: Kind, name: str) -> bool:
    """Whether the details of a Status name this object, as NewNotFound of k8s.io/apimachinery writes them.

    `kind` is the resource's plural there. A proxy, a namespace that is missing, a kind or a version
    that is not served name something else or nothing.
    """
    return (
        bool(name)
        and details.name == name
        and details.kind in ("", kind.plural, kind.kind)
        and details.group in ("", kind.group)
    )
