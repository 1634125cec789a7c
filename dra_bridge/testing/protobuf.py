"""Encodes responses in protobuf as kube-apiserver does: ResourceClaims, lists of ResourceClaims, Status objects."""

from __future__ import annotations

import json

from dra_bridge.kube.api import Object
from dra_bridge.wire import objects_pb2 as pb

MEDIA_TYPE = "application/vnd.kubernetes.protobuf"


def encoded(answer: Object) -> bytes:
    """Encode a response in protobuf; of a claim, only the fields in `api/dra_bridge/wire/objects.proto`."""
    kind = str(answer["kind"])
    if kind == "Status":
        raw = _refusal(answer)
    elif kind == "ResourceClaim":
        raw = _claim(answer)
    elif kind == "ResourceClaimList":
        metadata = answer["metadata"]
        page = pb.ListMetadata(
            resource_version=metadata["resourceVersion"].encode(), more=metadata.get("continue", "").encode()
        )
        raw = pb.List(metadata=page, items=map(_claim, answer["items"])).SerializeToString()
    else:
        raise NotImplementedError(kind)
    kind_of = pb.Type(api_version=str(answer.get("apiVersion", "v1")).encode(), kind=kind.encode())
    return b"k8s\0" + pb.Envelope(type=kind_of, raw=raw).SerializeToString()


def _claim(body: Object) -> bytes:
    metadata, status = body["metadata"], body.get("status") or {}
    results = ((status.get("allocation") or {}).get("devices") or {}).get("results") or ()
    made = pb.Claim(spec=json.dumps(body.get("spec") or {}).encode())
    for key in ("name", "namespace", "uid"):
        setattr(made.metadata, key, metadata.get(key, "").encode())
    for key, value in (metadata.get("annotations") or {}).items():
        made.metadata.annotations.add(key=key.encode(), value=value.encode())
    for result in results:
        named = {key: result.get(key, "").encode() for key in ("driver", "pool", "device")}
        made.status.allocation.devices.results.add(**named, admin_access=bool(result.get("adminAccess")))
    for user in status.get("reservedFor") or ():
        made.status.reserved_for.add(**{key: user.get(key, "").encode() for key in ("resource", "name", "uid")})
    return made.SerializeToString()


def _refusal(status: Object) -> bytes:
    details = status.get("details") or {}
    made = pb.Refusal(
        message=status.get("message", "").encode(),
        reason=status.get("reason", "").encode(),
        code=status.get("code", 0),
    )
    for key in ("name", "group", "kind"):
        setattr(made.details, key, details.get(key, "").encode())
    made.details.retry_after_seconds = details.get("retryAfterSeconds", 0)
    return made.SerializeToString()
