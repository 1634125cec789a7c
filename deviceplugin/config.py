"""The user's file: YAML to frozen, typed values, or errors that say where and what would be right.

The types below are the file format: what is annotated there is checked here, and becomes the JSON
schema under api/. A new kind of device is one more field of `DeviceEntry` (and a builder in
`deviceplugin.sources`). Values only; nothing here looks at devices, and gRPC is not imported.

YAML as of version 1.2's core schema: `on`, `no`, `12:30` and `0644` are text, `true` and `false` are
the only booleans, so that no value means something other than it says. Anchors and merge keys work.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NamedTuple

import msgspec
import yaml
from msgspec import Meta, Struct

from deviceplugin import naming
from deviceplugin.device import AttributeValue, Device, Version, printable

try:
    from yaml import CSafeLoader as _BaseLoader
except ImportError:  # PyYAML without libyaml: slower, the same
    from yaml import SafeLoader as _BaseLoader  # type: ignore[assignment]

__all__ = [
    "CommandProbeConfig",
    "Config",
    "ConfigError",
    "DeviceEntry",
    "DraConfig",
    "HealthConfig",
    "MountConfig",
    "NvidiaConfig",
    "PciConfig",
    "Problem",
    "ResourceConfig",
    "SharingConfig",
    "SimulatedConfig",
    "UsbConfig",
    "VersionAttribute",
    "load",
    "parse",
    "schema",
    "sides_conflict",
]

# --- errors ---------------------------------------------------------------------------------------


class Problem(NamedTuple):
    """One thing wrong with a file: its line (from 1), its place in it, and what would be right."""

    line: int
    path: str
    message: str


class ConfigError(ValueError):
    """Raised when a config file cannot be used; carries all problems that were found.

    Attributes:
        file: the file's name as it was given.
        problems: in the order of their lines, at least one.

    """

    def __init__(self, file: str, problems: list[Problem]) -> None:
        self.file = file
        self.problems = tuple(sorted(problems, key=lambda problem: problem.line))
        super().__init__(file, self.problems)

    @property
    def line(self) -> int:
        """The first problem's line, from 1; 0 if it is about the file itself."""
        return self.problems[0].line

    @property
    def path(self) -> str:
        """The first problem's place in the file, `$.resources[0].devices[1]`."""
        return self.problems[0].path

    @property
    def message(self) -> str:
        """The first problem in words."""
        return self.problems[0].message

    def __str__(self) -> str:
        lines = []
        for line, path, message in self.problems[:MAX_SHOWN]:
            where = f"{self.file}:{line}" if line else self.file
            lines.append(f"{where}: {message}" if path == "$" and not line else f"{where}: {path}: {message}")
        if len(self.problems) > MAX_SHOWN:
            atleast = "at least " if len(self.problems) == MAX_PROBLEMS else ""
            lines.append(f"{self.file}: and {atleast}{len(self.problems) - MAX_SHOWN} more")
        return "\n".join(lines)


MAX_SHOWN: Final = 25
"""Problems that an error's text shows; all are in `problems`."""
MAX_BYTES: Final = 4 << 20
"""Size of a file (a ConfigMap holds 1 MiB)."""
MAX_PROBLEMS: Final = 100
"""Problems after which reading stops; the search for similar names takes most of a millisecond each."""
MAX_VALUES: Final = 50_000
"""Values of a file, before and after its aliases are followed. A value takes up to 500 bytes of memory."""
MAX_TEXT: Final = 131_071
"""Characters of one text; Linux passes no longer variable or argument to a program (MAX_ARG_STRLEN)."""
MAX_PATH: Final = 4095
"""Characters of a path (PATH_MAX without its NUL), and of everything that does not say otherwise."""
MAX_DIRECTIVES: Final = 32
"""%TAG directives. libyaml compares each with all before it: 200,000 of them take minutes."""
MAX_DEPTH: Final = 32
"""Nesting of lists and mappings in a file; libyaml's composer overflows the stack beyond some 10,000."""

# --- what text may look like ----------------------------------------------------------------------
# The patterns are read by Python and, in the JSON schema, by ECMAScript: only what both know.

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


def _text(
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


def _share_advice(share: str) -> str:
    return f"{share!r} is not a share of the devices; write none, all, a number of devices, or a percentage such as 50%"


def _attribute_name_advice(name: str) -> str:
    return (
        f"{name!r} is not the name of an attribute or capacity: a letter or '_', then letters, digits and '_', "
        "32 at the most, with or without a domain before it, such as model or example.com/model"
    )


ResourceName = Annotated[
    str,
    _text(
        rf"(?!requests\.)(?![^/]*kubernetes\.io/)(?=[^/]{{1,244}}/[^/]{{1,63}}$){_SUBDOMAIN}/{_NAME}",
        _resource_name_advice,
        "The extended resource that pods ask for in their limits: a vendor domain, a slash, a name.",
        examples=["example.com/serial", "example.com/gpu"],
    ),
]
DriverName = Annotated[
    str,
    _text(
        _SUBDOMAIN,
        _driver_advice,
        "The DRA driver through which claims find the same devices (dra-bridge); a DNS name.",
        longest=63,
        examples=["serial.example.com"],
    ),
]
Glob = Annotated[
    str,
    _text(
        rf"(?![^\x00]*\*\*)(?:{_GLOB_STEP})+",
        _path_advice,
        "An absolute path; *, ? and [abc] match within one directory, as in a shell.",
        examples=["/dev/ttyUSB*", "/dev/serial/by-id/*", "/dev/kvm"],
    ),
]
AbsolutePath = Annotated[str, _text(rf"(?:{_STEP})+", _path_advice, "An absolute path.", examples=["/opt/vendor/lib"])]
Permissions = Annotated[
    str,
    _text(
        r"(?!.*r.*r)(?!.*w.*w)(?!.*m.*m)[rwm]{1,3}",
        lambda text: f"{text!r} are no permissions; write any of r (read), w (write) and m (mknod), such as rw",
        "What a container may do with the device nodes: r read, w write, m mknod.",
        examples=["rw", "r", "rwm"],
    ),
]
EnvName = Annotated[
    str,
    _text(
        r"[-._a-zA-Z][-._a-zA-Z0-9]*",
        lambda text: (
            f"{text!r} is not a variable's name: letters, digits, '_', '-' and '.', not beginning with a digit"
        ),
        "An environment variable's name.",
    ),
]
EnvValue = Annotated[
    str,
    _text(
        r"[^\x00]*",
        lambda _: "a variable cannot contain a NUL character",
        "An environment variable's value, text.",
        longest=MAX_TEXT,
    ),
]
AnnotationName = Annotated[
    str,
    _text(
        _QUALIFIED,
        lambda text: f"{text!r} is not an annotation's name: a name of 63 characters, or domain/name",
        "An annotation's name, with or without a domain.",
    ),
]
CdiName = Annotated[
    str,
    _text(
        r"[a-zA-Z0-9](?:[-a-zA-Z0-9_.]*[a-zA-Z0-9])?/[a-zA-Z](?:[-a-zA-Z0-9_]*[a-zA-Z0-9])?"
        r"=[a-zA-Z0-9](?:[-a-zA-Z0-9_.:]*[a-zA-Z0-9])?",
        lambda text: f"{text!r} is not a CDI device's full name; write vendor/class=name, such as example.com/nic=nic0",
        "A CDI device's full name, vendor/class=name; its spec must be on the node.",
        examples=["example.com/nic=nic0"],
    ),
]
AttributeName = Annotated[
    str,
    _text(
        rf"(?:(?=[^/]{{1,63}}/){_SUBDOMAIN}/)?[A-Za-z_][A-Za-z0-9_]{{0,31}}",
        _attribute_name_advice,
        "A name of resource.k8s.io: an identifier of 32 characters, with or without a domain.",
    ),
]
Quantity = Annotated[
    str,
    _text(
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
    _text(
        _SEMVER,
        lambda text: f"{text!r} is not a semantic version; write major.minor.patch, such as 1.2.0",
        "A semantic version.",
        longest=64,
        examples=["1.2.0"],
    ),
]
AttributeText = Annotated[
    str,
    _text(
        r"[\s\S]*",
        lambda _: "is not text",
        "Text.",
        longest=64,
    ),
]
Integer = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
HexId = Annotated[
    str,
    _text(
        r"(?:0x)?[0-9a-fA-F]{4}",
        lambda text: f'{text!r} is not an id of four hexadecimal digits; write it in quotes, such as "8086"',
        "An id of four hexadecimal digits, with or without 0x before it; quote it, or YAML may take it for a number.",
        examples=["8086", "0x10de"],
    ),
]
PciClass = Annotated[
    str,
    _text(
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
    _text(
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
    _text(
        r"[^\x00]*",
        lambda _: "an argument cannot contain a NUL character",
        "An argument of a command, text.",
        longest=MAX_TEXT,
    ),
]

# --- the file -------------------------------------------------------------------------------------


class _Strict(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A mapping of the file: every key known, every value typed."""


class SimulatedConfig(_Strict, frozen=True, kw_only=True):
    """Devices that exist in name only, for trying things out and for tests; ids sim-0, sim-1, ..."""

    count: Annotated[int, Meta(ge=1, le=65536, description="How many.")]
    numa: (
        Annotated[int, Meta(ge=1, le=1024, description="Over how many NUMA nodes they are spread, in blocks.")] | None
    ) = None
    unhealthy_file: (
        Annotated[
            AbsolutePath,
            Meta(
                description="A file, watched, that names the unhealthy ones: on each line an id and, after a space, "
                "why. Missing or empty means that all are healthy."
            ),
        ]
        | None
    ) = None


class NvidiaConfig(_Strict, frozen=True, kw_only=True):
    """NVIDIA GPUs, or their MIG partitions; needs the extra `nvidia`."""

    mig: Annotated[
        Literal["none", "single", "mixed"],
        Meta(
            description="none: whole GPUs. single: the partitions, which must all be of one profile, under this "
            "resource's name. mixed: GPUs that are not partitioned under this name, partitions as "
            "mig-<profile> in its domain, such as nvidia.com/mig-1g.10gb; those are for pods, for claims give each "
            "profile a resource with `profile` and `driver`."
        ),
    ] = "none"
    profile: (
        Annotated[
            str,
            _text(
                r"(?:[0-9]c\.)?[0-9]g\.[0-9]{1,4}gb(?:[+.-][a-z0-9.+]+)?",
                lambda text: f"{text!r} is not a MIG profile; write it as nvidia-smi does, such as 1g.10gb",
                "Partitions of this profile only, whatever `mig` says.",
                examples=["1g.10gb", "3g.40gb"],
            ),
        ]
        | None
    ) = None
    injection: Annotated[
        Literal["env", "cdi", "nodes"],
        Meta(
            description="How a container gets them. env: NVIDIA_VISIBLE_DEVICES, for the NVIDIA container runtime. "
            "cdi: the names of the node's CDI spec for nvidia.com/gpu. nodes: device nodes and nothing else."
        ),
    ] = "env"
    ignore_xids: Annotated[
        tuple[Annotated[int, Meta(ge=0, le=65535)], ...],
        Meta(description="XIDs that say nothing about the GPU; by default those that applications cause."),
    ] = (13, 31, 43, 45, 68, 109)
    recovery: Annotated[
        Annotated[int, Meta(ge=0, le=31_536_000)] | Literal["never"],
        Meta(
            description="Seconds without another fault after which good looks make a GPU healthy again after an XID; "
            "never leaves it unhealthy until the agent is started again."
        ),
    ] = 300
    library: (
        Annotated[AbsolutePath, Meta(description="Where libnvidia-ml.so.1 is, if not where programs look.")] | None
    ) = None


class PciConfig(_Strict, frozen=True, kw_only=True):
    """PCI devices that have all of this."""

    vendor: HexId | None = None
    device: HexId | None = None
    class_: PciClass | None = msgspec.field(default=None, name="class")
    driver: (
        Annotated[Pattern, Meta(description="The kernel driver bound to it, such as vfio-pci; a pattern.")] | None
    ) = None
    address: (
        Annotated[Pattern, Meta(description="Its address, such as 0000:3b:00.0; a pattern.", examples=["0000:3b:*"])]
        | None
    ) = None
    functions: Annotated[
        Literal["all", "physical", "virtual"],
        Meta(description="physical leaves out SR-IOV's virtual functions, virtual leaves out all others."),
    ] = "all"


class UsbConfig(_Strict, frozen=True, kw_only=True):
    """USB devices that have all of this. Hubs are none."""

    vendor: HexId | None = None
    product: HexId | None = None
    serial: Annotated[Pattern, Meta(description="The serial number; a pattern.")] | None = None


class DeviceEntry(_Strict, frozen=True, kw_only=True):
    """Where devices come from; exactly one of these."""

    path: (
        Annotated[
            Glob,
            Meta(
                description="Each path that the glob matches is a device. A symlink is resolved on the host and "
                "kept as the name inside the container; a plain file or socket is mounted."
            ),
        ]
        | None
    ) = None
    simulated: SimulatedConfig | None = None
    group: (
        Annotated[
            tuple[Glob, ...],
            Meta(
                min_length=2,
                description="The n-th matches of each glob together make one device.",
                extra_json_schema={"uniqueItems": True},
            ),
        ]
        | None
    ) = None

    nvidia: NvidiaConfig | None = None
    pci: PciConfig | None = None
    usb: UsbConfig | None = None

    @property
    def kind(self) -> str:
        """The one key that is given: path, simulated, group, nvidia, pci, usb."""
        return next(name for name in self.__struct_fields__ if getattr(self, name) is not None)


class MountConfig(_Strict, frozen=True, kw_only=True):
    """A file or directory of the host that containers with a device see."""

    host: Annotated[AbsolutePath, Meta(description="Where it is on the host.")]
    container: Annotated[AbsolutePath, Meta(description="Where the container finds it.")]
    readonly: Annotated[bool, Meta(description="Whether the container may only read it.")] = True


class SharingConfig(_Strict, frozen=True, kw_only=True):
    """How many containers may have one device at the same time."""

    replicas: Annotated[
        Annotated[int, Meta(ge=1, le=10_000)]
        | Annotated[
            Mapping[Pattern, Annotated[int, Meta(ge=1, le=10_000)]],
            Meta(
                description="By name: a pattern that an id, a path, an address or a word of the product's name fits, "
                "upper or lower case. The first that fits counts; what none fits is offered once."
            ),
        ],
        Meta(description="How often each device is offered.", examples=[4, {"a100": 4, "t4": 2}]),
    ] = 1

    @property
    def most(self) -> int:
        """The most that any device is offered."""
        return self.replicas if isinstance(self.replicas, int) else max(self.replicas.values(), default=1)


class CommandProbeConfig(_Strict, frozen=True, kw_only=True):
    """A command that looks at one device: status 0 is good, 75 tells nothing, any other is bad."""

    command: Annotated[
        tuple[Word, ...],
        Meta(
            min_length=1,
            description="Program and arguments, no shell; {id} and {node} stand for the device's id and first node, "
            "which are also in DEVICE_ID and DEVICE_NODES.",
        ),
    ]
    timeout: Annotated[int, Meta(ge=1, le=600, description="Seconds after which it is killed; a bad look.")] = 10


class HealthConfig(_Strict, frozen=True, kw_only=True):
    """How the devices' health is looked at, and when looks change it."""

    probe: Annotated[
        Literal["none", "open"] | CommandProbeConfig,
        Meta(
            description="open: open the device's nodes (which resets some serial devices). command: run something. "
            "With none there is only what the kind of device tells by itself."
        ),
    ] = "none"
    period: Annotated[int, Meta(ge=1, le=86_400, description="Seconds between looks.")] = 10
    failures: Annotated[int, Meta(ge=1, le=1000, description="Bad looks in a row that make it unhealthy.")] = 3
    successes: Annotated[int, Meta(ge=1, le=1000, description="Good looks in a row that make it healthy again.")] = 2


class DraConfig(_Strict, frozen=True, kw_only=True):
    """How the devices are divided between pods (extended resource) and claims (DRA); for dra-bridge."""

    share: Annotated[
        Annotated[int, Meta(ge=0, le=1_000_000)]
        | Annotated[
            str,
            Meta(pattern=r"^(?:none|all|(?:100|[1-9]?[0-9])%)$", extra={"advice": _share_advice}),
        ],
        Meta(
            description="Devices that claims get: none, all, a number, or a percentage.",
            examples=["none", "all", 4, "50%"],
        ),
    ] = "none"
    drain: Annotated[
        Literal["cordon", "wait"],
        Meta(
            description="What becomes of a device that is to move while a pod holds it: cordon withdraws it at once, "
            "wait leaves it alone until it is idle."
        ),
    ] = "cordon"
    unhealthy: Annotated[
        Literal["NoSchedule", "NoExecute"],
        Meta(
            description="What the taint on an unhealthy device does: NoSchedule keeps new claims away, NoExecute "
            "ends the pods that use it as well. One resource with NoExecute means it for its whole driver."
        ),
    ] = "NoSchedule"


class VersionAttribute(_Strict, frozen=True, kw_only=True):
    """An attribute that selectors compare as a version."""

    version: SemVer


class ResourceConfig(_Strict, frozen=True, kw_only=True, eq=False):
    """A resource and its devices. Two that are equal are served alike: a reload leaves it alone."""

    name: ResourceName
    driver: DriverName | None = None
    devices: Annotated[
        tuple[DeviceEntry, ...], Meta(min_length=1, description="Where its devices come from; all entries together.")
    ]
    permissions: Permissions = "rw"
    env: Annotated[Mapping[EnvName, EnvValue], Meta(description="Variables of containers that hold a device.")] = (
        msgspec.field(default_factory=dict)
    )
    nodes: Annotated[
        tuple[AbsolutePath, ...],
        Meta(
            description="Device nodes that such containers get besides, with the same permissions: control nodes, "
            "which devices of this resource and of others share.",
            examples=[["/dev/mapper/control"]],
        ),
    ] = ()
    mounts: Annotated[tuple[MountConfig, ...], Meta(description="What such containers see of the host.")] = ()
    annotations: Annotated[
        Mapping[AnnotationName, str],
        Meta(description="Annotations of such containers, for the container runtime (they are not the pod's)."),
    ] = msgspec.field(default_factory=dict)
    cdi: Annotated[tuple[CdiName, ...], Meta(description="CDI devices that such containers get as well.")] = ()
    include: Annotated[
        tuple[Pattern, ...],
        Meta(description="Only devices that one of these fits: their id, path, PCI address, or a symlink's target."),
    ] = ()
    exclude: Annotated[tuple[Pattern, ...], Meta(description="No devices that one of these fits.")] = ()
    health: HealthConfig = HealthConfig()
    sharing: SharingConfig = SharingConfig()
    topology: Annotated[
        bool, Meta(description="Whether the kubelet is told the devices' NUMA nodes; false leaves them out.")
    ] = True
    prefer: Annotated[
        Literal["links", "packed", "distributed", "none"],
        Meta(
            description="Which devices a pod gets that wants several. links: closely linked ones, replicas of "
            "different devices. packed: replicas of few devices. distributed: replicas of the devices that are used "
            "least. none: the first."
        ),
    ] = "links"
    attributes: Annotated[
        Mapping[AttributeName, bool | Integer | AttributeText | VersionAttribute],
        Meta(description="What claims can select on; names without a domain fall under the driver's."),
    ] = msgspec.field(default_factory=dict)
    capacity: Annotated[
        Mapping[AttributeName, Annotated[int, Meta(ge=0, le=2**63 - 1)] | Quantity],
        Meta(description="Amounts that claims can select on."),
    ] = msgspec.field(default_factory=dict)
    dra: DraConfig = DraConfig()

    @property
    def device_attributes(self) -> Mapping[str, AttributeValue]:
        """The attributes as a Device has them."""
        return _attributes(self.attributes)

    def __eq__(self, other: object) -> bool:
        # Not field by field: an attribute that was 1 and is now true has changed, and 1 == True.
        return isinstance(other, ResourceConfig) and self._bytes() == other._bytes()

    def __ne__(self, other: object) -> bool:
        return not self == other  # Struct brings one of its own, which would compare identities

    def __hash__(self) -> int:
        return hash(self._bytes())

    def _bytes(self) -> bytes:
        # The order of names does not matter, but that of patterns of which the first counts.
        return msgspec.json.encode(self, order="deterministic") + msgspec.json.encode(self.sharing)


def _attributes(
    attributes: Mapping[str, bool | int | str | VersionAttribute],
) -> dict[str, AttributeValue]:
    return {
        name: Version(value.version) if isinstance(value, VersionAttribute) else value
        for name, value in attributes.items()
    }


class MetricsConfig(_Strict, frozen=True, kw_only=True):
    """How metrics are served where --metrics-address says; read at the agent's start."""

    certificate: (
        Annotated[AbsolutePath, Meta(description="A certificate (PEM) for TLS, read again when it is renewed.")] | None
    ) = None
    key: Annotated[AbsolutePath, Meta(description="Its key; if not given, the same file.")] | None = None
    client_ca: (
        Annotated[
            AbsolutePath,
            Meta(
                description="Authorities (PEM) of client certificates; everybody but the kubelet's probes must then "
                "have one. Needs `certificate`."
            ),
        ]
        | None
    ) = None
    min_version: Annotated[Literal["1.2", "1.3"], Meta(description="The least version of TLS.")] = "1.2"
    token: (
        Annotated[
            AbsolutePath,
            Meta(description="A file with the bearer token that everybody but the kubelet's probes must bring."),
        ]
        | None
    ) = None
    period: Annotated[int, Meta(ge=1, le=3600, description="Seconds between measurements of the devices' load.")] = 10
    dcgm: Annotated[
        bool, Meta(description="Whether the names of NVIDIA's DCGM exporter are given beside the own ones.")
    ] = False


class Config(_Strict, frozen=True, kw_only=True):
    """What a node agent serves."""

    resources: Annotated[tuple[ResourceConfig, ...], Meta(min_length=1, description="The resources, each once.")]
    metrics: MetricsConfig = MetricsConfig()


# --- reading --------------------------------------------------------------------------------------


def load(path: str | Path) -> Config:
    """Read a config file.

    Raises:
        ConfigError: it cannot be read, or what it says cannot be served.

    """
    file = str(path)
    try:
        with open(path, "rb") as stream:
            data = stream.read(MAX_BYTES + 1)
    except IsADirectoryError:
        raise _about(file, "is a directory; name the file in it") from None
    except OSError as error:
        raise _about(file, f"cannot be read: {error.strerror or error}") from None
    except ValueError as error:  # a NUL in the path
        raise _about(file, f"cannot be read: {error}") from None
    return parse(data, file)


def parse(text: str | bytes, file: str = "<config>") -> Config:
    """Read a config from text; `file` is what errors call it.

    Raises:
        ConfigError: what it says cannot be served.

    """
    reader = _Reader(file)
    config = reader.read(_compose(text, file), _info(), "$")
    if reader.problems:
        raise ConfigError(file, reader.problems)
    assert isinstance(config, Config)
    return config


def _about(file: str, message: str, line: int = 0) -> ConfigError:
    return ConfigError(file, [Problem(line, "$", message)])


class _Loader(_BaseLoader):
    """Composes nodes; scalars are resolved as YAML 1.2's core schema does."""

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012  # PyYAML's way: not to inherit those of YAML 1.1


_TAG: Final = "tag:yaml.org,2002:"
for _name, _pattern, _first in (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?(?:0|[1-9][0-9]*)", list("-+0123456789")),
    ("float", r"[-+]?(?:\.[0-9]+|(?:0|[1-9][0-9]*)(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?", list("-+.0123456789")),
    ("float", r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)", list("-+.")),
    ("merge", r"<<", ["<"]),
):
    _Loader.add_implicit_resolver(_TAG + _name, re.compile(rf"^(?:{_pattern})\Z"), _first)


def _compose(text: str | bytes, file: str) -> yaml.Node:
    try:
        data = text.encode() if isinstance(text, str) else text
        if len(data) > MAX_BYTES:
            raise _about(file, f"is larger than {MAX_BYTES >> 20} MiB; this is not a config file")
        text = data.decode("utf-8-sig")
        if data.count(b"%TAG") > MAX_DIRECTIVES:
            raise _about(file, f"has more than {MAX_DIRECTIVES} %TAG directives")
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise _about(file, "is not UTF-8 text; save it as UTF-8", line) from None
    except UnicodeEncodeError as error:
        raise _about(file, f"is not text: {error.reason}", text[: error.start].count("\n") + 1) from None  # type: ignore[arg-type]
    try:
        _bound(text, file)
        node: yaml.Node | None = yaml.compose(text, Loader=_Loader)
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        code = error.character if isinstance(error.character, int) else ord(error.character)  # libyaml or not
        raise _about(file, f"is not YAML: the character #x{code:04x} is not allowed", line) from None
    except yaml.MarkedYAMLError as error:
        raise _syntax(text, file, error) from None
    if node is None or node.tag == _TAG + "null":
        raise _about(file, "is empty; it needs `resources:`, a list of resources with `name:` and `devices:`", 1)
    return node


def _bound(text: str, file: str) -> None:
    """Reject what would take too much time or memory to compose.

    Raises:
        ConfigError: the file has too many values or levels, or a text that is too long.

    """
    depth = values = 0
    for event in yaml.parse(text, Loader=_Loader):
        line = event.start_mark.line + 1 if event.start_mark is not None else 0
        if isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        elif isinstance(event, yaml.NodeEvent):
            values += 1
            depth += isinstance(event, yaml.CollectionStartEvent)
            if depth > MAX_DEPTH:
                raise _about(file, f"is nested deeper than {MAX_DEPTH} levels", line)
            if values > MAX_VALUES:
                raise _about(file, f"has more than {MAX_VALUES} values", line)
            if isinstance(event, yaml.ScalarEvent) and len(event.value) > MAX_TEXT:
                raise _about(file, f"has a text of {len(event.value)} characters; at most {MAX_TEXT} are allowed", line)


def _syntax(text: str, file: str, error: yaml.MarkedYAMLError) -> ConfigError:
    mark = error.problem_mark or error.context_mark
    line = mark.line + 1 if mark is not None else 0
    said = ": ".join(part for part in (error.context, error.problem) if part)
    if mark is not None and "\t" in text[text.rfind("\n", 0, mark.index) + 1 :].partition("\n")[0]:
        said += "; the line contains a tab, YAML indents with spaces only"
    if "another document" in said:
        said = "a second document begins here; one file holds one document"
    elif "undefined alias" in said:
        said += "; an anchor (&name) must come before its alias (*name)"
    return _about(file, f"is not valid YAML: {said}", line)


def _info() -> Any:
    """Return the types of the file as msgspec describes them; made once, it takes a while."""
    global _INFO
    if _INFO is None:
        import msgspec.inspect

        _INFO = msgspec.inspect.type_info(Config)
    return _INFO


_INFO: Any = None
_BAD: Final = object()
"""Stands for a value about which a problem has been reported."""
_WORDS: Final = {
    "StrType": "text",
    "IntType": "a whole number",
    "BoolType": "true or false",
    "VarTupleType": "a list",
    "DictType": "a mapping",
    "StructType": "a mapping",
}


class _Reader:
    """Goes through a file's nodes along the types; collects problems instead of stopping at one."""

    def __init__(self, file: str) -> None:
        self.file = file
        self.problems: list[Problem] = []
        self.names: dict[str, int] = {}
        self.groups: dict[str, tuple[int, frozenset[str]]] = {}
        """By path without wildcards: the line of the first group that has it, and that group."""
        self._values = 0
        self._merging: set[int] = set()

    def report(self, node: yaml.Node, path: str, message: str) -> Any:
        if len(message) > 600:
            message = f"{message[:300]} ... {message[-200:]}"
        self.problems.append(Problem(node.start_mark.line + 1, printable(path), printable(message)))
        if len(self.problems) == MAX_PROBLEMS:
            raise ConfigError(self.file, self.problems)
        return _BAD

    def read(self, node: yaml.Node, info: Any, path: str, advice: Callable[[str], str] | None = None) -> Any:
        self._count(node)
        kind = type(info).__name__
        if kind == "Metadata":
            return self.read(node, info.type, path, (info.extra or {}).get("advice", advice))
        if node.tag == _TAG + "null":
            return self.report(node, path, f"has no value; expected {_expected(info)}")
        if kind == "UnionType":
            return self._union(node, info, path, advice)
        if kind in {"StructType", "DictType"} and isinstance(node, yaml.MappingNode) and _plain(node):
            return self._struct(node, info, path) if kind == "StructType" else self._dict(node, info, path)
        if kind == "VarTupleType" and isinstance(node, yaml.SequenceNode) and _plain(node):
            return self._tuple(node, info, path)
        if kind in {"StrType", "LiteralType"} and node.tag == _TAG + "str" and isinstance(node, yaml.ScalarNode):
            return self._string(node, info, path, advice)
        value = _scalar(node)
        if kind == "BoolType" and node.tag == _TAG + "bool" and value.lower() in {"true", "false"}:
            return value.lower() == "true"
        if kind == "IntType" and node.tag == _TAG + "int" and re.fullmatch(r"[-+]?[0-9]{1,40}", value):
            return self._integer(node, info, path)
        return self.report(node, path, _mismatch(node, info))

    def _count(self, node: yaml.Node) -> None:
        self._values += 1
        if self._values > MAX_VALUES:
            raise _about(
                self.file,
                f"has more than {MAX_VALUES} values once its aliases are followed; use fewer aliases",
                node.start_mark.line + 1,
            )

    def _union(self, node: yaml.Node, info: Any, path: str, advice: Callable[[str], str] | None) -> Any:
        options = [option for option in info.types if type(option).__name__ != "NoneType"]
        if len(options) == 1:
            return self.read(node, options[0], path, advice)
        for option in options:
            if _accepts(option, node):
                if type(option).__name__ == "LiteralType" and isinstance(node, yaml.ScalarNode):
                    return self._word(node, option, info, path)
                return self.read(node, option, path, advice)
        return self.report(node, path, _mismatch(node, info))

    def _string(self, node: yaml.ScalarNode, info: Any, path: str, advice: Callable[[str], str] | None) -> Any:
        value: str = node.value
        if type(info).__name__ == "LiteralType":
            return self._word(node, info, info, path)
        if info.max_length is not None and len(value) > info.max_length:
            return self.report(node, path, f"has {len(value)} characters; at most {info.max_length} are allowed")
        if info.pattern is None or re.fullmatch(info.pattern, value):
            return value
        assert advice is not None
        return self.report(node, path, advice(value))

    def _word(self, node: yaml.ScalarNode, info: Any, wanted: Any, path: str) -> Any:
        """Read one of some words; wanted: these, and what else would be right."""
        value: str = node.value
        if value in info.values:
            return value
        guess = _close(value, info.values)
        end = f"; did you mean {guess!r}?" if guess else ""
        said = f"{value!r} is not one of {_or(info.values)}"
        return self.report(node, path, (said if info is wanted else _mismatch(node, wanted)) + end)

    def _integer(self, node: yaml.Node, info: Any, path: str) -> Any:
        value = int(_scalar(node))
        if (info.ge is None or value >= info.ge) and (info.le is None or value <= info.le):
            return value
        return self.report(node, path, f"must be {info.ge} to {info.le}, not {value}")

    def _tuple(self, node: yaml.SequenceNode, info: Any, path: str) -> Any:
        if len(node.value) < (info.min_length or 0):
            few = "the list is empty" if not node.value else f"the list has only {len(node.value)}"
            return self.report(node, path, f"{few}; it needs at least {info.min_length}")
        values = [self.read(item, info.item_type, f"{path}[{index}]") for index, item in enumerate(node.value)]
        return _BAD if _BAD in values else tuple(values)

    def _dict(self, node: yaml.MappingNode, info: Any, path: str) -> Any:
        values: dict[Any, Any] = {}
        for key, value in self._pairs(node, path):
            place = _below(path, str(key.value))
            name = self.read(key, info.key_type, place)
            values[name] = self.read(value, info.value_type, place)
        return _BAD if _BAD in values or _BAD in values.values() else values

    def _struct(self, node: yaml.MappingNode, info: Any, path: str) -> Any:
        fields = {field.encode_name: field for field in info.fields}
        before = len(self.problems)
        values: dict[str, Any] = {}
        nodes: dict[str, yaml.Node] = {}
        meant: set[str | None] = set()
        for key, value in self._pairs(node, path):
            name = str(key.value)
            if name in fields:
                nodes[name] = value
                values[name] = self.read(value, fields[name].type, _below(path, name))
            else:
                guess = _close(name, fields)
                meant.add(guess)
                advice = f"did you mean {guess!r}?" if guess else f"there are {', '.join(fields)}"
                self.report(key, _below(path, name), f"unknown key {name!r}; {advice}")
        for name, field in fields.items():
            if field.required and name not in values and name not in meant:
                self.report(node, path, f"{name!r} is missing")
        good = {name: value for name, value in values.items() if value is not _BAD}
        rule = _RULES.get(info.cls)
        if rule is not None:
            rule(self, node, path, nodes, good)
        if len(self.problems) > before:
            return _BAD
        return info.cls(**{fields[name].name: value for name, value in good.items()})

    def _pairs(self, node: yaml.MappingNode, path: str) -> list[tuple[yaml.Node, yaml.Node]]:
        """Return a mapping's keys and values, merge keys followed, doubtful keys reported."""
        pairs: dict[str, tuple[yaml.Node, yaml.Node]] = {}
        merges: list[yaml.Node] = []
        for key, value in node.value:
            if key.tag == _TAG + "merge":
                merges.append(value)
            elif key.tag != _TAG + "str" or not isinstance(key, yaml.ScalarNode):
                self.report(key, path, f"a key must be text, not {_got(key)}; put it in quotes")
            elif key.value in pairs:
                first = pairs[key.value][0].start_mark.line + 1
                self.report(
                    key, _below(path, key.value), f"the key {key.value!r} is given twice, first on line {first}"
                )
            else:
                pairs[key.value] = key, value
        for merge in merges:
            for key, value in self._merged(merge, path):
                pairs.setdefault(str(key.value), (key, value))
        return list(pairs.values())

    def _merged(self, node: yaml.Node, path: str) -> list[tuple[yaml.Node, yaml.Node]]:
        self._count(node)
        parts = node.value if isinstance(node, yaml.SequenceNode) else [node]
        pairs: dict[str, tuple[yaml.Node, yaml.Node]] = {}
        for part in parts:
            self._count(part)
            if not isinstance(part, yaml.MappingNode):
                self.report(node, path, f"`<<` merges a mapping or a list of mappings, not {_got(part)}")
            elif id(part) in self._merging:
                self.report(node, path, "`<<` merges a mapping into itself")
            else:
                self._merging.add(id(part))
                for key, value in self._pairs(part, path):
                    self._count(key)
                    pairs.setdefault(str(key.value), (key, value))
                self._merging.discard(id(part))
        return list(pairs.values())


def _plain(node: yaml.CollectionNode) -> bool:
    return node.tag in {_TAG + "map", _TAG + "seq"}


def _scalar(node: yaml.Node) -> str:
    """Return a scalar's text, and "" for a collection, whose nodes may be nested without end."""
    return str(node.value) if isinstance(node, yaml.ScalarNode) else ""


_TAGS: Final = {
    "StrType": "str",
    "LiteralType": "str",
    "IntType": "int",
    "BoolType": "bool",
    "StructType": "map",
    "DictType": "map",
    "VarTupleType": "seq",
}


def _kinds(info: Any) -> set[str]:
    kind = type(info).__name__
    if kind == "Metadata":
        return _kinds(info.type)
    if kind == "UnionType":
        return set().union(*map(_kinds, info.types))
    return {kind}


def _accepts(info: Any, node: yaml.Node) -> bool:
    return any(_TAG + _TAGS.get(kind, "") == node.tag for kind in _kinds(info))


def _expected(info: Any) -> str:
    kind = type(info).__name__
    if kind == "Metadata":
        return _expected(info.type)
    if kind == "UnionType":
        return _or([_expected(option) for option in info.types if type(option).__name__ != "NoneType"])
    if kind == "LiteralType":
        return _or(info.values)
    if kind == "StructType":
        if info.cls is DeviceEntry:
            return f"a mapping with one of {_or(DeviceEntry.__struct_fields__)}"
        required = [field.encode_name for field in info.fields if field.required]
        return f"a mapping with {' and '.join(required or [field.encode_name for field in info.fields])}"
    return _WORDS.get(kind, kind)


def _got(node: yaml.Node) -> str:
    if isinstance(node, yaml.CollectionNode) and not _plain(node):
        return f"something tagged {node.tag}"
    if isinstance(node, yaml.MappingNode):
        return "a mapping"
    if isinstance(node, yaml.SequenceNode):
        return "a list"
    value = _scalar(node)
    text = value if len(value) <= 60 else f"{value[:57]}..."
    what = node.tag.removeprefix(_TAG)
    if what == "null":
        return "nothing"
    return {"str": f"the text {text!r}", "int": f"the number {text}", "float": f"the number {text}", "bool": text}.get(
        what, f"something tagged {node.tag}"
    )


def _mismatch(node: yaml.Node, info: Any) -> str:
    said = f"expected {_expected(info)}, got {_got(node)}"
    what, value = node.tag.removeprefix(_TAG), _scalar(node)
    kinds = _kinds(info)
    if "StrType" in kinds and what in {"int", "float", "bool"}:
        return f'{said}; write "{value}" in quotes'
    if "BoolType" in kinds and what == "str" and value.lower() in {"yes", "on", "y", "no", "off", "n", "true", "false"}:
        return f"{said}; write {'true' if value.lower() in {'yes', 'on', 'y', 'true'} else 'false'}"
    if "IntType" in kinds and what == "str" and re.fullmatch(r"\s*[0-9]{1,18}\s*", value):
        return f"{said}; write {int(value)}"
    if "VarTupleType" in kinds:
        return f"{said}; begin each item on a line of its own with a dash"
    if getattr(info, "cls", None) is DeviceEntry and what == "str" and value.startswith("/"):
        return f"{said}; write path: {value}"
    return said


def _below(path: str, key: str) -> str:
    return f"{path}.{key}" if re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", key) else f'{path}["{key[:80]}"]'


def _or(words: Iterable[object]) -> str:
    *most, last = map(str, words)
    return f"{', '.join(most)} or {last}" if most else last


def _close(word: str, known: Iterable[str]) -> str | None:
    import difflib

    lowered = {name.lower(): name for name in known}
    close = difflib.get_close_matches(word.lower()[:64], lowered, n=1, cutoff=0.6)
    return lowered[close[0]] if close else None


# --- what no type can say -------------------------------------------------------------------------

_Nodes = Mapping[str, yaml.Node]


def _entry_rule(reader: _Reader, node: yaml.Node, path: str, nodes: _Nodes, values: dict[str, Any]) -> None:
    kinds = DeviceEntry.__struct_fields__
    if not nodes and not node.value:  # an unknown key has been reported
        reader.report(node, path, f"an entry needs one of {_or(kinds)}")
    elif len(nodes) > 1:
        reader.report(
            node, path, f"an entry has one of {_or(kinds)}, not {' and '.join(nodes)}; make each an entry of its own"
        )
    for kind in ("pci", "usb"):
        if kind in values and values[kind] == type(values[kind])():
            named = [field.encode_name for field in msgspec.structs.fields(type(values[kind]))]
            reader.report(nodes[kind], f"{path}.{kind}", f"would be every {kind.upper()} device; give {_or(named)}")
    group = values.get("group", ())
    if len(set(group)) < len(group):
        reader.report(nodes["group"], f"{path}.group", "the same glob is given twice; a device has each node once")
    elif group:
        _group_rule(reader, path, nodes["group"], group)


def _group_rule(reader: _Reader, path: str, node: yaml.Node, group: tuple[str, ...]) -> None:
    """Refuse a node of two groups that have other nodes each: it may be one that they share, or what they are."""
    mine, seen = frozenset(group), set[frozenset[str]]()
    for index, (member, place) in enumerate(zip(group, node.value, strict=True)):
        if re.search(r"[*?[]", member):
            continue
        line, other = reader.groups.setdefault(member, (place.start_mark.line + 1, mine))
        if other in seen or other <= mine or mine <= other:
            seen.add(other)
            continue
        reader.report(
            place,
            f"{path}.group[{index}]",
            f"{member} is in another group, too, on line {line}; if their devices share it, put it under `nodes` of "
            f"both resources instead; if one device excludes the other, write {member[:-1]}[{member[-1]}]",
        )
        break


def _resource_rule(reader: _Reader, node: yaml.Node, path: str, nodes: _Nodes, values: dict[str, Any]) -> None:
    name = values.get("name")
    if name is not None:
        if name in reader.names:
            reader.report(
                nodes["name"],
                f"{path}.name",
                f"the resource {name!r} is there already, on line {reader.names[name]}; put its devices into one list",
            )
        reader.names.setdefault(name, nodes["name"].start_mark.line + 1)
    graphics = [index for index, entry in enumerate(values.get("devices", ())) if entry.nvidia is not None]
    if len(graphics) > 1:
        reader.report(
            nodes["devices"],
            f"{path}.devices[{graphics[1]}]",
            "a resource has one nvidia entry; choose among the GPUs with include and exclude",
        )
    own = {path for entry in values.get("devices", ()) for path in (entry.path, *(entry.group or ()))}
    for index, shared in enumerate(values.get("nodes", ())):
        if shared in own:
            reader.report(
                nodes["nodes"],
                f"{path}.nodes[{index}]",
                f"{shared!r} is a device of this resource, or shared, not both",
            )
    if "permissions" in values:
        values["permissions"] = "".join(mode for mode in "rwm" if mode in values["permissions"])
    places: set[str] = set()
    for index, mount in enumerate(values.get("mounts", ())):
        if mount.container in places:
            reader.report(
                nodes["mounts"],
                f"{path}.mounts[{index}].container",
                f"something is mounted at {mount.container!r} already",
            )
        places.add(mount.container)
    _claim_rule(reader, path, nodes, values)


def _claim_rule(reader: _Reader, path: str, nodes: _Nodes, values: dict[str, Any]) -> None:
    driver = values.get("driver")
    if "dra" in nodes and "driver" not in nodes:
        reader.report(
            nodes["dra"],
            f"{path}.dra",
            "claims need a driver's name; write driver: and a DNS name, such as gpu.example.com",
        )
    # What no pattern says, in the words of those who will publish it.
    attributes, capacity = values.get("attributes", {}), values.get("capacity", {})
    device = Device("x", attributes=_attributes(attributes), capacity=capacity)
    for problem in naming.attribute_problems(device, driver or "example.com"):
        reader.report(nodes["attributes"], f"{path}.attributes", problem)
    for problem in naming.capacity_problems(device):
        reader.report(nodes["capacity"], f"{path}.capacity", problem)
    most = naming.MAX_ENTRIES - 2  # as naming.check_device: two are the DRA door's own
    if len(attributes) + len(capacity) > most:
        reader.report(
            nodes["attributes" if attributes else "capacity"],
            f"{path}.{'attributes' if attributes else 'capacity'}",
            f"a device has {most} attributes and capacities at the most, not {len(attributes) + len(capacity)}",
        )


def _config_rule(reader: _Reader, node: yaml.Node, path: str, nodes: _Nodes, values: dict[str, Any]) -> None:
    """Refuse drivers over the same devices whose shares put these on different sides: neither would offer them."""
    resources: tuple[ResourceConfig, ...] = values.get("resources", ())
    first: dict[object, int] = {}
    filters: dict[object, int] = {}
    for index, one in enumerate(resources):
        kept = filters.setdefault((one.include, one.exclude), index)
        places = [(kept, place) for entry in one.devices for place in _places(entry)]
        for number in dict.fromkeys(first.setdefault(place, index) for place in places):
            other = resources[number]
            if sides_conflict(one, other):
                reader.report(
                    nodes["resources"].value[index],
                    f"{path}.resources[{index}]",
                    f"it has devices of {other.name} ({path}.resources[{number}]) under another driver and on other "
                    "sides, so they would be offered to nobody; give both the share none, or both the share all",
                )
                break


def _places(entry: DeviceEntry) -> tuple[object, ...]:
    """Return what two entries have in common that find the same devices."""
    found = (entry.path, *(entry.group or ()), entry.pci, entry.usb, entry.nvidia)
    return tuple(one for one in found if one is not None)


def sides_conflict(one: ResourceConfig, other: ResourceConfig) -> bool:
    """Return whether a device of both resources would be offered to nobody: it is not on one side alone."""
    sides = {_side_of(one), _side_of(other)}
    return one.driver != other.driver and (len(sides) > 1 or None in sides)


def _side_of(resource: ResourceConfig) -> str | None:
    """Return the side of all of a resource's devices; None if they are divided."""
    if resource.driver is None or resource.dra.share in (0, "none", "0%"):
        return "plugin"
    return "dra" if resource.dra.share in ("all", "100%") else None


def _metrics_rule(reader: _Reader, node: yaml.Node, path: str, nodes: _Nodes, values: dict[str, Any]) -> None:
    for name in ("key", "client_ca"):
        if name in nodes and "certificate" not in nodes:
            reader.report(nodes[name], f"{path}.{name}", "there is no TLS without `certificate`")


_RULES: Final[dict[type, Callable[[_Reader, yaml.Node, str, _Nodes, dict[str, Any]], None]]] = {
    DeviceEntry: _entry_rule,
    ResourceConfig: _resource_rule,
    MetricsConfig: _metrics_rule,
    Config: _config_rule,
}

# --- the JSON schema ------------------------------------------------------------------------------


def schema() -> dict[str, Any]:
    """Return the file's JSON schema (draft 2020-12), for editors and for checks without this package.

    What it cannot say is checked by `parse` alone: resources named twice, two mounts at one place, a node of two
    groups, attributes that are the same with and without the driver's domain.
    """
    made = msgspec.json.schema(Config)
    definitions: dict[str, Any] = made["$defs"]
    for definition in definitions.values():
        for place in definition["properties"].values():
            _tidy(place)
    entry = definitions["DeviceEntry"]
    entry["oneOf"] = [{"required": [kind]} for kind in entry["properties"]]
    definitions["ResourceConfig"]["dependentRequired"] = {"dra": ["driver"]}
    definitions["MetricsConfig"]["dependentRequired"] = {"key": ["certificate"], "client_ca": ["certificate"]}
    config = definitions.pop("Config")
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **config,
        "title": "The config file of deviceplugin and dra-bridge",
        "$defs": definitions,
    }


def _tidy(place: dict[str, Any]) -> None:
    """Make a key that may be left out look so: not null, and no default that says nothing."""
    options = [option for option in place.get("anyOf", []) if option != {"type": "null"}]
    if len(options) == 1:
        del place["anyOf"]
        place.update({**options[0], **place})
    if not isinstance(place.get("default"), (str, bool, int)):
        place.pop("default", None)
