"""What devices were when they were granted, as the kubelet's checkpoint keeps it.

The kubelet keeps the answer to Allocate with the allocation (`AllocResp`; kubelet 1.36, devicemanager/checkpoint).
An annotation in it says what the granted devices were. The kubelet merges the annotations of several resources, so each
has a key of its own. Answers without it (of other plugins or of another boot) name host paths of device nodes, which
are as good as their numbers now.
"""

from __future__ import annotations

import base64
import functools
import json
from collections.abc import Mapping
from typing import NamedTuple

from google.protobuf.message import DecodeError

from deviceplugin.identity import Tokens, numbers_of
from deviceplugin.wire import deviceplugin_pb2 as pb


class Granted(NamedTuple):
    """What a device was when it was granted. shared: its holder may not have it alone."""

    tokens: Tokens = frozenset()
    shared: bool = False


def annotation(resource: str) -> str:
    """Return the annotation's key."""
    return f"{resource}.identity"


def annotate(response: pb.ContainerAllocateResponse, resource: str, devices: Mapping[str, Granted], boot: str) -> None:
    """Have an answer say what the devices are. devices: by the kubelet's id; those without tokens are left out."""
    known = {device_id: sorted(one.tokens) for device_id, one in devices.items() if one.tokens}
    if known:
        shared = [device_id for device_id in known if devices[device_id].shared]
        value = {"boot": boot, "devices": known, "shared": shared}
        response.annotations[annotation(resource)] = json.dumps(value, separators=(",", ":"))


def granted(response: str, resource: str, device_id: str, boot: str) -> Granted:
    """Return what a device was by the answer to Allocate, as the checkpoint has it. May block for device nodes."""
    of, devices, paths = _decoded(response, resource)
    if of == boot and device_id in devices:
        return devices[device_id]
    return Granted(numbers_of(paths), shared=True)  # without the annotation its holder may share it


@functools.lru_cache(maxsize=256)
def _decoded(response: str, resource: str) -> tuple[str, Mapping[str, Granted], tuple[str, ...]]:
    """Return the boot and the devices of the annotation, and the host paths of device nodes."""
    try:
        message = pb.ContainerAllocateResponse.FromString(base64.b64decode(response))
    except (ValueError, DecodeError):
        return "", {}, ()
    paths = tuple(device.host_path for device in message.devices)
    try:
        value = json.loads(message.annotations.get(annotation(resource), ""))
        shared = frozenset(map(str, value["shared"]))
        devices = {
            str(name): Granted(frozenset(map(str, tokens)), name in shared) for name, tokens in value["devices"].items()
        }
        return str(value["boot"]), devices, paths
    except (ValueError, KeyError, TypeError, AttributeError):
        return "", {}, paths
