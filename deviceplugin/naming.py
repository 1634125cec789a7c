"""Checks names and quantities by the rules of the Kubernetes API, before they are sent to the API. Pure functions.

Names in the config file are checked when the file is read, and names of a source before they are published. The rules
are those of kube-apiserver 1.36 (pkg/apis/resource/validation, pkg/apis/core/validation).
"""

from __future__ import annotations

import hashlib
import os
import re
import socket
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from fractions import Fraction
from typing import Any, Final

from deviceplugin.device import LABEL, LABEL_IN_WORDS, QUANTITY, Device, Version


class NamingError(ValueError):
    """Raised when the Kubernetes API would refuse a name, a value or a quantity; the message gives the reason."""


def node_name() -> str:
    """Return this node's name: $NODE_NAME (from the downward API), or the host's name."""
    return os.environ.get("NODE_NAME") or socket.gethostname()


PCIE_ROOT: Final = "resource.kubernetes.io/pcieRoot"
"""The standard attribute for a device's PCIe root complex, `pci<domain>:<bus>` (dynamic-resource-allocation 0.36)."""

PCI_BUS_ID: Final = "resource.kubernetes.io/pciBusID"
"""The standard attribute for a PCI address, `<domain>:<bus>:<device>.<function>` (dynamic-resource-allocation 0.36)."""

NUMA_NODE: Final = "resource.kubernetes.io/numaNode"
"""The standard attribute for a device's NUMA node, never -1 (dynamic-resource-allocation 0.37), added by the bridge."""

EXTENDED_RESOURCE: Final = "extendedResource"
"""The attribute with the device's extended resource, which the bridge adds to each device in ResourceSlices."""

SHARES: Final = "shares"
"""The capacity with the number of claims that may share a device, which the bridge adds to a shared device in
ResourceSlices. By default, a claim takes 1 of this capacity."""

MAX_ENTRIES: Final = 32
"""Maximum number of attributes and capacities together that one device may have."""
MAX_CONSUMED_SETS: Final = 2
_MAX_LABEL: Final = 63
MAX_DRIVER: Final = 63
_MAX_IDENTIFIER: Final = 32
_MAX_VALUE: Final = 64
_MAX_COUNTERS: Final = 32  # Maximum number of counters in one counter set.

SUBDOMAIN: Final = r"[a-z0-9](?:[-a-z0-9]*[a-z0-9])?(?:\.[a-z0-9](?:[-a-z0-9]*[a-z0-9])?)*"
_IDENTIFIER: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
NAME: Final = r"[A-Za-z0-9](?:[-A-Za-z0-9_.]*[A-Za-z0-9])?"
# The part before the slash is shorter than the usual 253 characters, because the key of a quota for the resource,
# requests.NAME, must be a qualified name too.
RESOURCE: Final = rf"(?!requests\.)(?![^/]*kubernetes\.io/)(?=[^/]{{1,244}}/[^/]{{1,63}}$){SUBDOMAIN}/{NAME}"
_PRE: Final = r"(?:0|[1-9][0-9]*|[0-9]*[a-zA-Z-][0-9a-zA-Z-]*)"
SEMVER: Final = (
    r"(?:0|[1-9][0-9]*)\.(?:0|[1-9][0-9]*)\.(?:0|[1-9][0-9]*)"
    rf"(?:-{_PRE}(?:\.{_PRE})*)?(?:\+[0-9a-zA-Z-]+(?:\.[0-9a-zA-Z-]+)*)?"
)
_FACTORS: Final[Mapping[str, Fraction]] = {
    "": Fraction(1),
    **{suffix: Fraction(1, 1000**power) for power, suffix in enumerate("mun", 1)},
    **{suffix: Fraction(1000**power) for power, suffix in enumerate("kMGTPE", 1)},
    **{f"{suffix}i": Fraction(1024**power) for power, suffix in enumerate("KMGTPE", 1)},
}
_HASHED: Final = re.compile(r".*--[0-9a-f]{10}")
_HASH: Final = 10


def parse_quantity(value: int | str) -> Fraction:
    """Return the exact value of an int or of a Kubernetes quantity ("16Gi", "250m"). Raises NamingError."""
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise NamingError(f"must be an integer or a quantity such as 16Gi, not {value!r}")
    if isinstance(value, int):
        return Fraction(value)
    match = QUANTITY.fullmatch(value)
    if match is None:
        raise NamingError(f"must be a quantity such as 16Gi, 250m or 4, not {value!r}")
    suffix = match["suffix"]
    factor = _FACTORS[suffix] if suffix in _FACTORS else Fraction(10) ** int(suffix[1:])
    number = Fraction(f"0{match['number']}".rstrip(".")) * factor
    return -number if match["sign"] == "-" else number


def whole_quantity(value: object) -> int:
    """Return a quantity as an integer; 0 if the value is no quantity."""
    try:
        return int(parse_quantity(value))  # type: ignore[arg-type]  # parse_quantity refuses other types
    except NamingError:
        return 0


def pod_amounts(spec: Mapping[str, Any], amounts: Callable[[Any], Mapping[str, int]]) -> dict[str, int]:
    """Return the amount of each resource that a pod requests, as the scheduler counts it.

    The amount is the sum over containers and sidecars, or over an init container and the sidecars before it if that is
    more (Kubernetes 1.36, component-helpers/resource, AggregateContainerRequests). amounts: returns those of a
    container.
    """
    most, kept = Counter[str](), Counter[str]()
    for container in spec.get("initContainers") or ():
        own = kept + Counter(amounts(container))
        most |= own
        if container.get("restartPolicy") == "Always":
            kept = own
    for container in spec.get("containers") or ():
        kept += Counter(amounts(container))
    return dict(most | kept)


def check_label(name: str, what: str = "the name") -> None:
    """Raise NamingError unless the name is a DNS label. what: a description of the name for the message."""
    if not LABEL.fullmatch(name):
        raise NamingError(f"{what} must be {LABEL_IN_WORDS}, not {name!r}")


def check_driver(name: str) -> None:
    """Raise NamingError unless a DRA driver may have this name: a DNS subdomain of at most 63 characters.

    The API accepts upper-case letters with a warning, but refuses a taint whose key is made from such a name.
    """
    if len(name) > MAX_DRIVER:
        raise NamingError(f"a driver's name has at most {MAX_DRIVER} characters, {name!r} has {len(name)}")
    if not re.fullmatch(SUBDOMAIN, name):
        raise NamingError(f"a driver's name must be a DNS name in lower case such as gpu.example.com, not {name!r}")


def check_resource(name: str) -> None:
    """Raise NamingError unless an extended resource may have this name: vendor-domain/name, not in kubernetes.io."""
    if not re.fullmatch(RESOURCE, name):
        raise NamingError(resource_advice(name))


def resource_advice(name: str) -> str:
    """Return a text about an invalid name of an extended resource: the mistake and the correction."""
    like = "write a domain of yours and a name, such as example.com/gpu"
    domain, slash, rest = name.partition("/")
    if name.startswith("requests."):
        return f"a resource name must not start with `requests.`, which is for quotas; {like}"
    if not slash:
        guess = re.sub(r"[^A-Za-z0-9_.-]", "-", name).strip("-_.")
        like = f"did you mean example.com/{guess}?" if guess else like
        return f"{name!r} is not an extended resource's name: it has no vendor domain; {like}"
    if domain.endswith("kubernetes.io"):
        return f"names under {domain} belong to Kubernetes, the kubelet refuses them; {like}"
    if not re.fullmatch(SUBDOMAIN, domain) or len(domain) > 244:
        return (
            f"the vendor domain {domain!r} is not a DNS name: lower-case letters, digits, '-' and '.', "
            f"244 characters at the most; {like}"
        )
    if "/" in rest:
        return f"{name!r} has more than one slash; {like}"
    if len(rest) > 63:
        return f"the part after the slash is {len(rest)} characters long, 63 are allowed"
    return (
        f"the part after the slash, {rest!r}, must be letters, digits, '-', '_' and '.', "
        f"and begin and end with a letter or digit; {like}"
    )


def check_attribute_name(name: str) -> None:
    """Raise NamingError unless an attribute or capacity may have this name: identifier, or domain/identifier."""
    domain, slash, identifier = name.rpartition("/")
    if slash and (len(domain) > MAX_DRIVER or not re.fullmatch(SUBDOMAIN, domain)):
        raise NamingError(f"the domain of {name!r} must be a DNS name in lower case of at most {MAX_DRIVER} characters")
    if len(identifier) > _MAX_IDENTIFIER or not _IDENTIFIER.fullmatch(identifier):
        raise NamingError(
            f"{name!r}: a name is 1 to {_MAX_IDENTIFIER} letters, digits and '_', not beginning with a digit"
            " (a domain and a slash may stand before it)"
        )


def check_attribute(name: str, value: object) -> None:
    """Raise NamingError unless an attribute's name and value are valid.

    Values: a str (64 bytes), an int (64 bits), a bool or a Version.
    """
    check_attribute_name(name)
    if isinstance(value, bool):
        return
    if isinstance(value, int):
        if not -(2**63) <= value < 2**63:
            raise NamingError(f"attribute {name!r}: {value} does not fit into 64 bits")
        return
    if not isinstance(value, str):
        raise NamingError(f"attribute {name!r} must be a string, an integer, a boolean or a Version, not {value!r}")
    if len(value.encode()) > _MAX_VALUE:
        raise NamingError(f"attribute {name!r} has at most {_MAX_VALUE} bytes, not {value!r}")
    if isinstance(value, Version) and not re.fullmatch(SEMVER, value):
        raise NamingError(f"attribute {name!r} must be a semantic version such as 1.2.3, not {str(value)!r}")


def check_capacity(name: str, value: object) -> None:
    """Raise NamingError for an invalid name, and for a value that is negative, or neither an int nor a quantity."""
    check_attribute_name(name)
    _check_quantity(f"capacity {name!r}", value)


def check_counters(set_name: str, counters: Mapping[str, int | str]) -> None:
    """Raise NamingError unless a counter set has valid names (DNS labels), 1 to 32 counters and no negative amount."""
    check_label(set_name, "a counter set's name")
    if not 0 < len(counters) <= _MAX_COUNTERS:
        raise NamingError(f"counter set {set_name!r} must have 1 to {_MAX_COUNTERS} counters, not {len(counters)}")
    for name, value in counters.items():
        check_label(name, f"a counter's name in set {set_name!r}")
        _check_quantity(f"counter {name!r} of set {set_name!r}", value)


def problems(device: Device, driver: str) -> Iterator[tuple[str, str]]:
    """Yield the reasons why the API would refuse a device, as ("attributes" or "capacity", sentence)."""
    names: dict[str, str] = {}
    for name, value in device.attributes.items():
        try:
            check_attribute(name, value)
        except NamingError as error:
            yield "attributes", str(error)
        full = qualified(name, driver)
        if names.setdefault(full, name) != name:
            yield "attributes", f"attributes {names[full]!r} and {name!r} are the same to driver {driver}"
    for name, value in device.capacity.items():
        try:
            check_capacity(name, value)
        except NamingError as error:
            yield "capacity", str(error)
    # Two entries are reserved for the bridge: the attribute with the resource's name, the capacity of a shared device.
    most, count = MAX_ENTRIES - 2, len(device.attributes) + len(device.capacity)
    if count > most:
        where = "attributes" if device.attributes else "capacity"
        yield where, f"a device has {most} attributes and capacities at the most, not {count}"


def qualified(name: str, driver: str) -> str:
    """Return the full name of an attribute or capacity; a name without a domain belongs to the driver's domain."""
    return name if "/" in name else f"{driver}/{name}"


def canonical_resource(resource: str) -> str:
    """Return the value of EXTENDED_RESOURCE for a resource: its name, or, if that is too long, its end with a hash."""
    if len(resource) <= _MAX_VALUE:
        return resource
    return f"{resource[-(_MAX_VALUE - _HASH - 1) :]}-{_hash(resource)}"


def device_name(device: str, qualifier: str = "") -> str:
    """Return the published name of the device with this id: a DNS label, which depends only on the arguments.

    If the id is a DNS label, the name is the id. Any other id gets a hashed name: a shortened label, `--`, and ten
    digits of the id's SHA-256. An id that looks like a hashed name gets a hashed name too, so two ids never have the
    same name.

    qualifier: the prefix for the device's resource (`qualifiers`); `--` separates prefix and name.
    """
    plain = LABEL.fullmatch(device) and not _HASHED.fullmatch(device)
    if not qualifier:
        return device if plain else _hashed(device, device)
    name = f"{qualifier}--{device}"
    # If the qualifier or the id contains "--", the name is hashed, so that names with different qualifiers differ.
    if plain and "--" not in device and "--" not in qualifier and LABEL.fullmatch(name):
        return name
    return _hashed(f"{_slug(qualifier)[:20]}--{_slug(device)}", f"{qualifier}\0{device}")


def qualifiers(resources: Iterable[str]) -> dict[str, str]:
    """Return, for each resource of one driver, the argument `qualifier` of `device_name` for the resource's devices.

    The qualifier is "" for a driver's only resource. If a driver has several resources, the qualifier is the text after
    the slash in the resource's name, or a label with a hash if this text is no DNS label or not unique. So devices of
    different resources have different published names.
    """
    words = {name: name.rpartition("/")[2] for name in resources}
    if len(words) < 2:
        return dict.fromkeys(words, "")
    count = Counter(words.values())
    return {
        name: word if count[word] == 1 and _plain_word(word) else _hashed_word(name) for name, word in words.items()
    }


def class_name(resource: str, driver: str) -> str:
    """Return the name of the DeviceClass of a resource.

    The name does not depend on the driver's other resources. With the driver fpga.example.com, the class of
    example.com/fpga has the name of the driver, and the class of example.com/half is half.fpga.example.com. If the
    resource has another domain than the driver, or the text after its slash is no DNS label, the class's name contains
    a hash of the resource's whole name.
    """
    domain, _, word = resource.partition("/")
    if f"{word}.{domain}" == driver:
        return driver
    plain = domain == driver.partition(".")[2] and _plain_word(word)
    return f"{word if plain else _hashed_word(resource)}.{driver}"


def kept_qualifiers(kept: Mapping[str, str], resources: Iterable[str]) -> dict[str, str]:
    """Return the qualifier of each resource of a driver: the kept qualifier, or a new one that differs from all others.

    kept: the qualifiers of earlier published names, including resources that the driver no longer has. A kept qualifier
    does not change, so that published names do not change when another resource is added.
    """
    made = qualifiers((*kept, *resources))
    end = "--" if "" in kept.values() else ""
    return {name: kept.get(name, word + end) for name, word in made.items()}


def published_names(words: Mapping[str, str], devices: Mapping[str, Iterable[str]]) -> dict[str, tuple[str, str]]:
    """Return, for each published device name of one driver, (resource, device id). words: each resource's qualifier."""
    return {
        device_name(name, words[resource]): (resource, name)
        for resource, ids in devices.items()
        if resource in words
        for name in ids
    }


def _check_quantity(what: str, value: object) -> None:
    try:
        number = parse_quantity(value)  # type: ignore[arg-type]  # it says what it is not
    except NamingError as error:
        raise NamingError(f"{what} {error}") from None
    if not 0 <= number < 2**63:
        raise NamingError(f"{what} must be at least 0 and fit into 64 bits, not {value!r}")


def _plain_word(word: str) -> bool:
    return len(word) <= 20 and "--" not in word and LABEL.fullmatch(word) is not None


def _hashed_word(resource: str) -> str:
    """Return a DNS label with a hash of the resource's name, so that different resources get different labels."""
    return f"{_slug(resource.rpartition('/')[2])[:9].rstrip('-')}-{_hash(resource)}"


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:_HASH]


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-") or "x"


def _hashed(readable: str, whole: str) -> str:
    head = "--".join(_slug(part) for part in readable.split("--"))
    return f"{head[: _MAX_LABEL - _HASH - 2].rstrip('-')}--{_hash(whole)}"
