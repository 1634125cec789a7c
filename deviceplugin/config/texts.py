"""The texts that a config file holds (names, paths, patterns): the form of each, and the advice on a wrong one.

The patterns are read by Python and, in the JSON schema, by ECMAScript: only what both know.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Annotated, Final

from msgspec import Meta

MAX_TEXT: Final = 131_071
"""Characters of one text; Linux passes no longer variable or argument to a program (MAX_ARG_STRLEN)."""
MAX_PATH: Final = 4095
"""Characters of a path (PATH_MAX without its NUL), and of everything that does not say otherwise."""

_LABEL = r"[a-z0-9](?:[-a-z0-9]*[a-z0-9])?"
_SUBDOMAIN = rf"{_LABEL}(?:\.{_LABEL})*"
_NAME = r"[A-Za-z0-9](?:[-A-Za-z0-9_.]*[A-Za-z0-9])?"
_QUALIFIED = rf"(?:(?=[^/]{{1,253}}/){_SUBDOMAIN}/)?(?=[^/]{{1,63}}$){_NAME}"
_STEP = r"/(?!\.{1,2}(?:/|$))[^/\x00]+"
# A bracket that is not closed would match itself (fnmatch); it is a mistake far more often than that.
_CLASS = r"\[(?:![^/\x00]|[^!/\x00])[^\]/\x00]*\]"
_GLOB_STEP = rf"/(?!\.{{1,2}}(?:/|$))(?:[^/\x00\[]|{_CLASS})+"
_SEMVER = (
    r"(?:0|[1-9]\d*)\.(?:0|[1-9]\d*)\.(?:0|[1-9]\d*)"
    r"(?:-(?:0|[1-9]\d*|\d*[a-zA-Z-][0-9a-zA-Z-]*)(?:\.(?:0|[1-9]\d*|\d*[a-zA-Z-][0-9a-zA-Z-]*))*)?"
    r"(?:\+[0-9a-zA-Z-]+(?:\.[0-9a-zA-Z-]+)*)?"
)


def text_meta(
    pattern: str,
    advice: Callable[[str], str],
    description: str,
    *,
    longest: int = MAX_PATH,
    examples: list[str] | None = None,
) -> Meta:
    """Text of a certain form; `advice` says of a wrong one what is wrong and what would be right."""
    return Meta(
        pattern=f"^{pattern}$",
        max_length=longest,
        description=description,
        examples=examples,
        extra={"advice": advice},
    )


def _resource_name_advice(name: str) -> str:
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
    if not re.fullmatch(_SUBDOMAIN, domain) or len(domain) > 244:
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


def _driver_advice(name: str) -> str:
    return f"{name!r} is not a DRA driver's name: a DNS name in lower case, such as gpu.example.com"


def _path_advice(path: str) -> str:
    if not path:
        return "the path is empty; write an absolute path, such as /dev/ttyUSB0"
    if path.startswith(("~", "$")):
        return f"{path!r} is not absolute, and neither ~ nor variables are expanded; write the path in full"
    if not path.startswith("/"):
        guess = re.sub(r"^(\.{1,2}/)+", "", path).strip("/")
        return f"{path!r} is a relative path; write an absolute one" + (
            f", such as {'/' if guess.startswith('dev/') else '/dev/'}{guess}" if guess and "." not in guess else ""
        )
    if "\x00" in path:
        return "a path cannot contain a NUL character"
    if "**" in path:
        return f"`**` is not supported in {path!r}; write one `*` for each level of directories"
    if re.fullmatch(rf"(?:{_STEP})+", path):
        return f"{path!r} has a `[` without its `]`; write [[] for the character itself"
    parts = [part for part in path.split("/") if part not in {"", "."}]
    if not parts:
        return f"{path!r} names the root directory; name what lies in it"
    if ".." in parts:
        return f"{path!r} goes up with `..`; write the path that is meant"
    return f"{path!r} has empty or `.` steps; write /{'/'.join(parts)}"


def share_advice(share: str) -> str:
    """Say of a wrong share what would be right."""
    return f"{share!r} is not a share of the devices; write none, all, a number of devices, or a percentage such as 50%"


def _attribute_name_advice(name: str) -> str:
    return (
        f"{name!r} is not the name of an attribute or capacity: a letter or '_', then letters, digits and '_', "
        "32 at the most, with or without a domain before it, such as model or example.com/model"
    )


ResourceName = Annotated[
    str,
    text_meta(
        rf"(?!requests\.)(?![^/]*kubernetes\.io/)(?=[^/]{{1,244}}/[^/]{{1,63}}$){_SUBDOMAIN}/{_NAME}",
        _resource_name_advice,
        "The extended resource that pods ask for in their limits: a vendor domain, a slash, a name.",
        examples=["example.com/serial", "example.com/gpu"],
    ),
]
DriverName = Annotated[
    str,
    text_meta(
        _SUBDOMAIN,
        _driver_advice,
        "The DRA driver through which claims find the same devices (dra-bridge); a DNS name.",
        longest=63,
        examples=["serial.example.com"],
    ),
]
Glob = Annotated[
    str,
    text_meta(
        rf"(?![^\x00]*\*\*)(?:{_GLOB_STEP})+",
        _path_advice,
        "An absolute path; *, ? and [abc] match within one directory, as in a shell.",
        examples=["/dev/ttyUSB*", "/dev/serial/by-id/*", "/dev/kvm"],
    ),
]
AbsolutePath = Annotated[
    str, text_meta(rf"(?:{_STEP})+", _path_advice, "An absolute path.", examples=["/opt/vendor/lib"])
]
Permissions = Annotated[
    str,
    text_meta(
        r"(?!.*r.*r)(?!.*w.*w)(?!.*m.*m)[rwm]{1,3}",
        lambda text: f"{text!r} are no permissions; write any of r (read), w (write) and m (mknod), such as rw",
        "What a container may do with the device nodes: r read, w write, m mknod.",
        examples=["rw", "r", "rwm"],
    ),
]
EnvName = Annotated[
    str,
    text_meta(
        r"[-._a-zA-Z][-._a-zA-Z0-9]*",
        lambda text: (
            f"{text!r} is not a variable's name: letters, digits, '_', '-' and '.', not beginning with a digit"
        ),
        "An environment variable's name.",
    ),
]
EnvValue = Annotated[
    str,
    text_meta(
        r"[^\x00]*",
        lambda _: "a variable cannot contain a NUL character",
        "An environment variable's value, text.",
        longest=MAX_TEXT,
    ),
]
AnnotationName = Annotated[
    str,
    text_meta(
        _QUALIFIED,
        lambda text: f"{text!r} is not an annotation's name: a name of 63 characters, or domain/name",
        "An annotation's name, with or without a domain.",
    ),
]
CdiName = Annotated[
    str,
    text_meta(
        r"[a-zA-Z0-9](?:[-a-zA-Z0-9_.]*[a-zA-Z0-9])?/[a-zA-Z](?:[-a-zA-Z0-9_]*[a-zA-Z0-9])?"
        r"=[a-zA-Z0-9](?:[-a-zA-Z0-9_.:]*[a-zA-Z0-9])?",
        lambda text: f"{text!r} is not a CDI device's full name; write vendor/class=name, such as example.com/nic=nic0",
        "A CDI device's full name, vendor/class=name; its spec must be on the node.",
        examples=["example.com/nic=nic0"],
    ),
]
AttributeName = Annotated[
    str,
    text_meta(
        rf"(?:(?=[^/]{{1,63}}/){_SUBDOMAIN}/)?[A-Za-z_][A-Za-z0-9_]{{0,31}}",
        _attribute_name_advice,
        "A name of resource.k8s.io: an identifier of 32 characters, with or without a domain.",
    ),
]
Quantity = Annotated[
    str,
    text_meta(
        r"\+?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[KMGTPE]i|[numkMGTPE]|[eE][+-]?[0-9]{1,3})?",
        lambda text: (
            f"{text!r} is not a quantity of Kubernetes; write a number, with a suffix if need be, such as 16Gi"
        ),
        "An amount as Kubernetes writes them.",
        longest=64,
        examples=["16Gi", "500m"],
    ),
]
SemVer = Annotated[
    str,
    text_meta(
        _SEMVER,
        lambda text: f"{text!r} is not a semantic version; write major.minor.patch, such as 1.2.0",
        "A semantic version.",
        longest=64,
        examples=["1.2.0"],
    ),
]
AttributeText = Annotated[
    str,
    text_meta(
        r"[\s\S]*",
        lambda _: "is not text",
        "Text.",
        longest=64,
    ),
]
Integer = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
HexId = Annotated[
    str,
    text_meta(
        r"(?:0x)?[0-9a-fA-F]{4}",
        lambda text: f'{text!r} is not an id of four hexadecimal digits; write it in quotes, such as "8086"',
        "An id of four hexadecimal digits, with or without 0x before it; quote it, or YAML may take it for a number.",
        examples=["8086", "0x10de"],
    ),
]
PciClass = Annotated[
    str,
    text_meta(
        r"(?:0x)?(?:[0-9a-fA-F]{2}){1,3}",
        lambda text: (
            f'{text!r} is not a PCI class; write two, four or six hexadecimal digits in quotes, such as "0300"'
        ),
        "A PCI class: two (base class), four (and subclass) or six (and interface) hexadecimal digits; in quotes.",
        examples=["03", "0108"],
    ),
]
Pattern = Annotated[
    str,
    text_meta(
        r"(?:[^\x00\[]|\[(?:![^\x00]|[^!\x00])[^\]\x00]*\])+",
        lambda text: (
            f"{text!r} has a `[` without its `]`; write [[] for the character itself"
            if text and "\x00" not in text
            else "a pattern cannot be empty, nor contain a NUL character"
        ),
        "A pattern as in a shell: *, ? and [abc]; * matches anything.",
    ),
]
Word = Annotated[
    str,
    text_meta(
        r"[^\x00]*",
        lambda _: "an argument cannot contain a NUL character",
        "An argument of a command, text.",
        longest=MAX_TEXT,
    ),
]
