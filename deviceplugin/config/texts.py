"""Defines the texts that a config file may contain (names, paths, patterns), and advice for invalid texts.

The regular expressions are used in Python and in the JSON schema, so they contain only syntax that Python and
ECMAScript have in common.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final

from msgspec import Meta

from deviceplugin import device, naming
from deviceplugin.naming import NAME, SUBDOMAIN

MAX_TEXT: Final = 131_071
"""Maximum characters of any text in the config file. Linux has this limit for one environment variable or argument
(MAX_ARG_STRLEN)."""
MAX_PATH: Final = 4095
"""Maximum characters of a path (PATH_MAX without its NUL), and of each other text that has no limit of its own."""

PARTITION: Final = r"[1-9]g\.[1-9][0-9]{0,3}gb"
"""The slices and the memory of a MIG partition, in names of profiles and of resources: `1g.10gb`."""
ATTRIBUTES: Final = r"[a-z]+(?:\.[a-z]+)*"
"""The attributes at the end of such a name, without the sign before them: `me.all`."""
PROFILE: Final = rf"(?:[1-9]c\.)?{PARTITION}(?:[+-]{ATTRIBUTES})?"
"""The name of a MIG profile, as NVIDIA's driver writes it. The attributes at its end (2026) are +me, +me.all, +gfx and
-me."""

_QUALIFIED = rf"(?:(?=[^/]{{1,253}}/){SUBDOMAIN}/)?(?=[^/]{{1,63}}$){NAME}"
_STEP = r"/(?!\.{1,2}(?:/|$))[^/\x00]+"
# An unclosed bracket is not allowed: fnmatch would match it literally, but in a config it is usually a mistake. So is a
# `^` after the bracket, which fnmatch, unlike bash and Go, takes as one of the characters.
_CLASS = r"\[(?:![^/\x00]|[^!^/\x00])[^\]/\x00]*\]"
_GLOB_STEP = rf"/(?!\.{{1,2}}(?:/|$))(?:[^/\x00\[]|{_CLASS})+"


def _text(
    pattern: str,
    advice: str | Callable[[str], str],
    description: str,
    longest: int = MAX_PATH,
    examples: list[str] | None = None,
) -> Meta:
    """Return the msgspec annotation for a text that must match `pattern`.

    advice: the message with the correction for an invalid text; the invalid text replaces {!r} in the message. longest:
    the maximum number of characters.
    """
    advise = advice.format if isinstance(advice, str) else advice
    return Meta(
        pattern=f"^{pattern}$", max_length=longest, description=description, examples=examples, extra={"advice": advise}
    )


def _class_advice(text: str) -> str:
    if "[^" in text:
        return f"`[^` is not supported in {text!r}; write [! for any character but those in the brackets"
    return f"{text!r} has a `[` without its `]`; write [[] for the character itself"


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
        return _class_advice(path)
    parts = [part for part in path.split("/") if part not in {"", "."}]
    if not parts:
        return f"{path!r} names the root directory; name what lies in it"
    if ".." in parts:
        return f"{path!r} goes up with `..`; write the path that is meant"
    return f"{path!r} has empty or `.` steps; write /{'/'.join(parts)}"


def _pattern_advice(pattern: str) -> str:
    if not pattern or "\x00" in pattern:
        return "a pattern cannot be empty, nor contain a NUL character"
    return _class_advice(pattern)


def _id_advice(value: str) -> str:
    if ids := re.fullmatch(r"([0-9a-fA-F]{4}):([0-9a-fA-F]{4})", value):
        return f'{value!r} is two ids; write "{ids[1]}" as `vendor`, "{ids[2]}" as `product` (of pci: `device`)'
    return f'{value!r} is not an id of four hexadecimal digits; write it in quotes, such as "8086"'


def _profile_advice(value: str) -> str:
    named = re.search(r"([0-9]c\.)?[0-9]g\.[0-9]+gb([+.-][a-z.]+)?$", value.lower())
    # The name of a partition's resource has a dot in place of the plus sign.
    guess = named[0].replace("gb.", "gb+") if named else ""
    right = f"here {guess}" if re.fullmatch(PROFILE, guess) else "such as 1g.10gb or 1g.10gb+me"
    return f"{value!r} is not a MIG profile; write it as nvidia-smi does, {right}"


RESOURCE_NAME = _text(
    naming.RESOURCE,
    naming.resource_advice,
    "The name of the extended resource, as in pods' limits: a vendor domain, a slash, a name.",
    examples=["example.com/serial", "example.com/gpu"],
)
DRIVER_NAME = _text(
    SUBDOMAIN,
    "{!r} is not a DRA driver's name: a DNS name in lower case, such as gpu.example.com",
    "The name of the DRA driver by which dra-bridge serves the same devices to claims; a DNS name.",
    longest=naming.MAX_DRIVER,
    examples=["serial.example.com"],
)
GLOB = _text(
    rf"(?![^\x00]*\*\*)(?:{_GLOB_STEP})+",
    _path_advice,
    "A glob of absolute paths. As in a shell, *, ? and [abc] match within one directory.",
    examples=["/dev/ttyUSB*", "/dev/serial/by-id/*", "/dev/kvm"],
)
ABSOLUTE_PATH = _text(rf"(?:{_STEP})+", _path_advice, "An absolute path.", examples=["/opt/vendor/lib"])
PERMISSIONS = _text(
    r"(?!.*r.*r)(?!.*w.*w)(?!.*m.*m)[rwm]{1,3}",
    "{!r} is not a set of permissions; write any of r (read), w (write) and m (mknod), such as rw",
    "The permissions of containers for the device nodes: r (read), w (write), m (mknod).",
    examples=["rw", "r", "rwm"],
)
ENV_NAME = _text(
    r"[-._a-zA-Z][-._a-zA-Z0-9]*",
    "{!r} is not a variable's name: letters, digits, '_', '-' and '.', not beginning with a digit",
    "An environment variable's name.",
)
ENV_VALUE = _text(
    r"[^\x00]*", "a variable cannot contain a NUL character", "The text of an environment variable.", longest=MAX_TEXT
)
ANNOTATION_NAME = _text(
    _QUALIFIED,
    "{!r} is not an annotation's name: a name of 63 characters, or domain/name",
    "An annotation's name, with or without a domain.",
)
CDI_NAME = _text(
    device.CDI_NAME,
    "{!r} is not a CDI device's full name; write vendor/class=name, such as example.com/nic=nic0",
    "The full name of a CDI device, vendor/class=name, whose CDI spec must be on the node.",
    examples=["example.com/nic=nic0"],
)
ATTRIBUTE_NAME = _text(
    rf"(?:(?=[^/]{{1,63}}/){SUBDOMAIN}/)?[A-Za-z_][A-Za-z0-9_]{{0,31}}",
    "{!r} is not the name of an attribute or capacity: a letter or '_', then letters, digits and '_', "
    "32 at the most, with or without a domain before it, such as model or example.com/model",
    "A name as in resource.k8s.io: an identifier of at most 32 characters, with or without a domain.",
)
QUANTITY = _text(
    r"\+?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[KMGTPE]i|[numkMGTPE]|[eE][+-]?[0-9]{1,3})?",
    "{!r} is not a quantity of Kubernetes; write a number, with a suffix if need be, such as 16Gi",
    "A Kubernetes quantity.",
    longest=64,
    examples=["16Gi", "500m"],
)
SEMVER = _text(
    naming.SEMVER,
    "{!r} is not a semantic version; write major.minor.patch, such as 1.2.0",
    "A semantic version.",
    longest=64,
    examples=["1.2.0"],
)
ATTRIBUTE_TEXT = _text(r"[\s\S]*", "is not text", "Text.", longest=64)
HEX_ID = _text(
    r"(?:0x)?[0-9a-fA-F]{4}",
    _id_advice,
    "An id of four hexadecimal digits, with or without 0x before it. Write the id in quotes, because YAML may read it "
    "as a number.",
    examples=["8086", "0x10de"],
)
PCI_CLASS = _text(
    r"(?:0x)?(?:[0-9a-fA-F]{2}){1,3}",
    '{!r} is not a PCI class; write two, four or six hexadecimal digits in quotes, such as "0300"',
    "A PCI class in quotes: two hexadecimal digits (base class), four (with subclass) or six (with interface).",
    examples=["03", "0108"],
)
MIG_PROFILE = _text(
    PROFILE,
    _profile_advice,
    "If set, the devices are the partitions of this profile, and `mig` has no effect.",
    examples=["1g.10gb", "1g.10gb+me"],
)
PATTERN = _text(
    r"(?:[^\x00\[]|\[(?:![^\x00]|[^!^\x00])[^\]\x00]*\])+",
    _pattern_advice,
    "A pattern as in a shell, with *, ? and [abc]. A * matches any text, slashes included.",
)
WORD = _text(r"[^\x00]*", "an argument cannot contain a NUL character", "The program or an argument.", longest=MAX_TEXT)
SHARE = Meta(
    pattern=r"^(?:none|all|(?:100|[1-9]?[0-9])%)$",
    extra={
        "advice": "{!r} is not a share of the devices; "
        "write none, all, a number of devices, or a percentage such as 50%".format
    },
)
