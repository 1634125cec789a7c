"""What devices were when they were granted, and how much of them was, as the kubelet's checkpoint keeps it.

The kubelet keeps the answer to Allocate with the allocation (`AllocResp`; kubelet 1.36, devicemanager/checkpoint).
An annotation in it says what the granted devices were. The kubelet merges the annotations of several resources, so each
has a key of its own. Answers without it (of other plugins or of another boot) name host paths of device nodes, which
are as good as their numbers now.
"""

from __future__ import annotations

import base64
import functools
import json
from collections.abc import Callable, Iterable, Mapping
from operator import attrgetter
from typing import Final

import msgspec
from google.protobuf.message import DecodeError

from deviceplugin.identity import UNIDENTIFIED, Tokens, identified, numbers_of
from deviceplugin.naming import NamingError, parse_quantity
from deviceplugin.register.question import Wanted
from deviceplugin.register.records import UNKNOWN, Amount
from deviceplugin.wire import deviceplugin_pb2 as pb


def annotation(resource: str) -> str:
    """Return the annotation's key."""
    return f"{resource}.identity"


def annotate(response: pb.ContainerAllocateResponse, resource: str, devices: Mapping[str, Wanted], boot: str) -> None:
    """Have an answer say what the devices are, and how much of each was granted. devices: by the kubelet's id."""
    by_id: dict[str, object] = {}
    for device_id, wanted in devices.items():
        by_id[device_id] = {
            "device": wanted.key[1],
            "tokens": sorted(wanted.identity.tokens),
            "part": wanted.amount.part,
            "takes": wanted.amount.takes,
            "scope": wanted.amount.scope,
        }
    text = json.dumps({"boot": boot, "devices": by_id}, separators=(",", ":"))
    response.annotations[annotation(resource)] = text


def granted(
    response: str,
    resource: str,
    device_id: str,
    boot: str,
    numbers: Callable[[Iterable[str]], Tokens] = numbers_of,
) -> Wanted:
    """Return what a device was by the answer to Allocate, as the checkpoint has it. May block for device nodes.

    Without the annotation of this boot its paths tell what it is: with all devices of the answer, and control nodes.
    How much of it was granted is not known without any annotation. numbers: returns the numbers of those of some paths
    that are device nodes.
    """
    of, devices, paths = _decoded(response, resource)
    wanted = devices.get(device_id, Wanted((resource, ""), UNIDENTIFIED, UNKNOWN))
    return wanted if of == boot else wanted._replace(identity=identified(numbers(paths), boot, sure=False))


def nodes_missing(response: str, resource: str, wanted: Wanted, boot: str) -> bool:
    """Return whether an answer of another boot names device nodes none of which was there when it was `granted`."""
    of, _, paths = _decoded(response, resource)
    return of != boot and bool(paths) and not wanted.identity.tokens


def ours(wanted: Wanted) -> bool:
    """Return whether `granted` found that this framework has given a device."""
    return bool(wanted.key[1])


@functools.lru_cache(maxsize=256)
def _decoded(response: str, resource: str) -> tuple[str, Mapping[str, Wanted], tuple[str, ...]]:
    """Return the boot and the devices of the annotation, and the host paths of device nodes."""
    try:
        message = pb.ContainerAllocateResponse.FromString(base64.b64decode(response))
    except (ValueError, DecodeError):
        return "", {}, ()
    paths = tuple(map(attrgetter("host_path"), message.devices))
    devices: dict[str, Wanted] = {}
    try:
        value = _DECODER.decode(message.annotations.get(annotation(resource), ""))
        for name, device in value.devices.items():
            for _, _, quantity in device.takes:
                parse_quantity(quantity)
            amount = Amount(device.part, device.takes, device.scope)
            devices[name] = Wanted((resource, device.device), identified(device.tokens, value.boot), amount)
    except (msgspec.MsgspecError, NamingError):
        return "", {}, paths
    return value.boot, devices, paths


class _GrantedDevice(msgspec.Struct, frozen=True):
    device: str
    tokens: frozenset[str] = frozenset()
    part: str = ""
    takes: tuple[tuple[str, str, str], ...] = ()
    scope: str = ""


class _Annotation(msgspec.Struct, frozen=True):
    boot: str
    devices: dict[str, _GrantedDevice]


_DECODER: Final = msgspec.json.Decoder(_Annotation)
"""Made here: msgspec 0.22 crashes if several threads are the first to decode a type."""
