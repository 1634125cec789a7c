"""Decodes the API server's responses: whole objects in JSON, and the allocations of ResourceClaims in protobuf.

A tenant can write any number of claims of up to 1.5 MB, whose parameters nest up to 10,000 levels (apimachinery 1.36,
sigs.k8s.io/json). In protobuf, the parameters are one field, which the agent does not decode. So the parameters' depth
and content cannot harm the agent, and an object's size is limited by etcd.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, Generic, NamedTuple, TypeVar

import msgspec
from google.protobuf.message import DecodeError

from dra_bridge.kube.api import NODES, Kind, Object
from dra_bridge.wire import objects_pb2 as pb

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

MAGIC: Final = b"k8s\0"
"""The first bytes of each response in Kubernetes' protobuf encoding."""
FOR_LIMITS: Final = "resource.kubernetes.io/extended-resource-claim"
"""The scheduler sets this annotation to "true" on claims that it makes for the `limits` of a pod (1.34 and later)."""
POD_CLAIM: Final = "resource.kubernetes.io/pod-claim-name"
"""The annotation of a claim made from a template: the claim's name in the pod's spec."""

MAX_PAGE: Final = 4 * 2**20
"""Maximum bytes of a list's page for which the client has requested more than one object. A larger page is not read
further, and is requested again with fewer objects."""
PAGE: Final = 2 * 2**20
"""Number of bytes that a page should have. `next_limit` computes how many objects the client requests so that the next
page has about this size."""
MAX_LIMIT: Final = 500
"""Maximum number of objects that a request asks for in one page, as in client-go."""
FIRST_LIMIT: Final = 100
"""Number of objects that the request for a list's first page asks for."""


class Form(NamedTuple, Generic[T_co]):
    """The encoding of a response. accept: the Accept header of the request.

    decode: a function that decodes the response's body. The function raises ValueError for a wrong body, and may raise
    RecursionError.
    """

    accept: str
    decode: Callable[[bytes | bytearray], T_co]


class Page(NamedTuple, Generic[T_co]):
    """A page of a list. resource_version: the resourceVersion of the whole list, as the page states it.

    more: the token for the next page; "" on the last page. size: the bytes of the page.
    """

    items: Sequence[T_co]
    resource_version: str
    more: str
    size: int


def next_limit(limit: int, count: int, size: int) -> int:
    """Return the parameter `limit` (maximum number of objects) for the next page of a list.

    limit: the parameter for the last page. count, size: number of objects and bytes of the last page.
    """
    fitting = max(1, count) * PAGE // max(1, size)
    return max(1, min(MAX_LIMIT, 4 * limit, fitting))


def smaller_limit(limit: int) -> int:
    """Return the smaller parameter `limit` for a second request of a page that was too large with `limit`."""
    return max(1, limit // 8)


JSON: Final[Form[Object]] = Form("application/json", msgspec.json.Decoder(dict[str, Any]).decode)


def trim_node(node: Object) -> None:
    """Remove the images and managed fields of a Node, which are most of its bytes and are never used."""
    node["metadata"].pop("managedFields", None)
    (node.get("status") or {}).pop("images", None)


def page_of(kind: Kind) -> Form[Page[Object]]:
    """Return the `Form` that decodes a list's page with whole objects of a kind."""

    def decode(body: bytes | bytearray) -> Page[Object]:
        answer = JSON.decode(body)
        metadata = answer.get("metadata")
        if (
            answer.get("kind") != f"{kind.kind}List"
            or not isinstance(metadata, dict)
            or not metadata.get("resourceVersion")
        ):
            raise ValueError("the body is not the requested list")
        more = str(metadata.get("continue") or "")
        items = answer.get("items") or []
        for node in items if kind is NODES else ():
            trim_node(node)
        return Page(items, str(metadata["resourceVersion"]), more, len(body))

    return Form(JSON.accept, decode)


class ClaimResult(NamedTuple):
    """A device that is allocated to a claim."""

    driver: str
    pool: str
    device: str
    admin: bool


class ReservedPod(NamedTuple):
    """A pod for which a claim is reserved."""

    name: str
    uid: str


class ListedClaim(NamedTuple):
    """The fields of a claim that agents use from lists of claims.

    for_limits: whether the scheduler made the claim for the `limits` of a pod. results: the devices of the claim's
    allocation. pods: the pods for which the claim is reserved.
    """

    uid: str
    namespace: str
    name: str
    for_limits: bool
    results: tuple[ClaimResult, ...]
    pods: tuple[ReservedPod, ...]

    @property
    def title(self) -> str:
        """The claim's namespace/name."""
        return f"{self.namespace}/{self.name}"


def _raw(body: bytes | bytearray, kind: str) -> bytes:
    envelope = pb.Envelope.FromString(bytes(body[len(MAGIC) :])) if body.startswith(MAGIC) else None
    if envelope is None or envelope.type.kind != kind.encode():
        raise ValueError(f"the body is not a {kind} in protobuf")
    return envelope.raw


def _text(data: bytes) -> str:
    return data.decode(errors="replace")


def _claim(data: bytes) -> ListedClaim:
    claim = pb.Claim.FromString(data)
    metadata, status = claim.metadata, claim.status
    return ListedClaim(
        _text(metadata.uid),
        _text(metadata.namespace),
        _text(metadata.name),
        any((one.key, one.value) == (FOR_LIMITS.encode(), b"true") for one in metadata.annotations),
        tuple(
            ClaimResult(_text(one.driver), _text(one.pool), _text(one.device), one.admin_access)
            for one in status.allocation.devices.results
        ),
        tuple(ReservedPod(_text(one.name), _text(one.uid)) for one in status.reserved_for if one.resource == b"pods"),
    )


def _protobuf(decode: Callable[[bytes | bytearray], T]) -> Form[T]:
    def decoded(body: bytes | bytearray) -> T:
        try:
            return decode(body)
        except DecodeError as error:
            raise ValueError(f"the body is not protobuf: {error}") from error

    return Form("application/vnd.kubernetes.protobuf", decoded)


def _claim_page(body: bytes | bytearray) -> Page[ListedClaim]:
    listed = pb.List.FromString(_raw(body, "ResourceClaimList"))
    if not listed.metadata.resource_version:
        raise ValueError("the body is not the requested list")
    version, more = _text(listed.metadata.resource_version), _text(listed.metadata.more)
    return Page([_claim(item) for item in listed.items], version, more, len(body))


CLAIM: Final = _protobuf(lambda body: _claim(_raw(body, "ResourceClaim")))
CLAIMS: Final = _protobuf(_claim_page)


def refusal_of(body: bytes | bytearray) -> Object | None:
    """Convert an error response (a Status) in protobuf to the form of its JSON.

    Return None if the body is no such Status.
    """
    try:
        status = pb.Refusal.FromString(_raw(body, "Status"))
    except (DecodeError, ValueError):
        return None
    names = {key: _text(getattr(status.details, key)) for key in ("name", "group", "kind")}
    details = {**names, "retryAfterSeconds": status.details.retry_after_seconds}
    return {"kind": "Status", "reason": _text(status.reason), "message": _text(status.message), "details": details}
