"""The types of the config file: what is annotated here is checked, and becomes the JSON schema under api/.

A new kind of device is one more field of `DeviceEntry`, and a case in `deviceplugin.sources.configured.build_entry`.
A class's description in the schema is set as `__doc__`: `python -OO`, which the image runs, removes docstrings.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from deviceplugin.config import texts
from deviceplugin.device import AttributeValue, Version
from deviceplugin.source import Policy

AbsolutePath = Annotated[str, texts.ABSOLUTE_PATH]
AttributeName = Annotated[str, texts.ATTRIBUTE_NAME]
Glob = Annotated[str, texts.GLOB]
HexId = Annotated[str, texts.HEX_ID]
Pattern = Annotated[str, texts.PATTERN]


def _about(description: str, examples: list[Any] | None = None) -> Meta:
    return Meta(description=description, examples=examples)


class _Strict(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A mapping of the file: every key known, every value typed."""


class SimulatedConfig(_Strict, frozen=True, kw_only=True):
    __doc__ = "Devices that exist in name only, for trying things out and for tests; ids sim-0, sim-1, ..."

    count: Annotated[int, Meta(ge=1, le=65536, description="How many.")]
    numa: Annotated[
        Annotated[int, Meta(ge=1, le=1024)] | None, _about("Over how many NUMA nodes they are spread, in blocks.")
    ] = None
    unhealthy_file: Annotated[
        AbsolutePath | None,
        _about(
            "A file, watched, that names the unhealthy ones: on each line an id and, after a space, "
            "why. Missing or empty means that all are healthy."
        ),
    ] = None


class NvidiaConfig(_Strict, frozen=True, kw_only=True):
    __doc__ = "NVIDIA GPUs, or their MIG partitions; needs the extra `nvidia`."

    mig: Annotated[
        Literal["none", "single", "mixed"],
        _about(
            "none: whole GPUs. single: the partitions, which must all be of one profile, under this "
            "resource's name. mixed: GPUs that are not partitioned under this name, partitions as "
            "mig-<profile> in its domain, such as nvidia.com/mig-1g.10gb; those are for pods, for claims give each "
            "profile a resource with `profile` and `driver`."
        ),
    ] = "none"
    profile: Annotated[str, texts.MIG_PROFILE] | None = None
    injection: Annotated[
        Literal["env", "cdi", "nodes"],
        _about(
            "How a container gets them. env: NVIDIA_VISIBLE_DEVICES, for the NVIDIA container runtime. "
            "cdi: the names of the node's CDI spec for nvidia.com/gpu. nodes: device nodes and nothing else."
        ),
    ] = "env"
    # By default those that programs cause, not the hardware: the list that NVIDIA's own plugin skips.
    ignore_xids: Annotated[
        tuple[Annotated[int, Meta(ge=0, le=65535)], ...],
        _about("XIDs that say nothing about the GPU; by default those that applications cause."),
    ] = (13, 31, 43, 45, 68, 109)
    recovery: Annotated[
        Annotated[int, Meta(ge=0, le=31_536_000)] | Literal["never"],
        _about(
            "Seconds without another fault after which successful probes make a GPU healthy again after an XID; "
            "never leaves it unhealthy until the agent is started again."
        ),
    ] = 300
    library: Annotated[
        AbsolutePath | None,
        _about("Where libnvidia-ml.so.1 is, if not where programs look; `run` loads it only with --allow-commands."),
    ] = None


class PciConfig(_Strict, frozen=True, kw_only=True):
    __doc__ = "PCI devices that have all of this."

    vendor: HexId | None = None
    device: HexId | None = None
    class_: Annotated[str, texts.PCI_CLASS] | None = msgspec.field(default=None, name="class")
    driver: Annotated[Pattern | None, _about("The kernel driver bound to it, such as vfio-pci; a pattern.")] = None
    address: Annotated[
        Pattern | None, _about("Its address, such as 0000:3b:00.0; a pattern.", examples=["0000:3b:*"])
    ] = None
    functions: Annotated[
        Literal["all", "physical", "virtual"],
        _about("physical leaves out SR-IOV's virtual functions, virtual leaves out all others."),
    ] = "all"


class UsbConfig(_Strict, frozen=True, kw_only=True):
    __doc__ = "USB devices that have all of this. Hubs are none."

    vendor: HexId | None = None
    product: HexId | None = None
    serial: Annotated[Pattern | None, _about("The serial number; a pattern.")] = None


class PluginConfig(_Strict, frozen=True, kw_only=True):
    __doc__ = (
        "Devices that a vendor's own device plugin lists, which registers in the directory of --adopt and answers "
        "Allocate; `run` serves them only with that option. What is below is for claims."
    )

    claims: Annotated[
        bool,
        _about(
            "Lets claims have the devices of a plugin that the agent does not know. Its answer must depend on the ids "
            "alone, and it must look for no pod, neither in the API server nor in PodResources."
        ),
    ] = False
    answer: Annotated[
        Literal["request", "claim"],
        _about(
            "request: Allocate is called for each request of a claim. claim: once for all of a claim, and each "
            "container that has a part of the claim gets the answer."
        ),
    ] = "request"
    pre_start: Annotated[
        Literal["each", "once"],
        _about(
            "When the plugin wants PreStartContainer: before each start of a container, which claims cannot give, or "
            "only once, when the claim is prepared."
        ),
    ] = "each"
    drop_annotations: Annotated[
        tuple[Pattern, ...],
        _about("Annotations of its answers, by pattern, that containers with claims do without; others are an error."),
    ] = ()


class DeviceEntry(_Strict, frozen=True, kw_only=True):
    __doc__ = "Where devices come from; exactly one of these."

    path: Annotated[
        Glob | None,
        _about(
            "Each path that the glob matches is a device. A symlink is resolved on the host and "
            "kept as the name inside the container; a plain file or socket is mounted. Outside of /dev `run` takes "
            "it, and what its symlinks lead to, only with --allow-host-path."
        ),
    ] = None
    simulated: SimulatedConfig | None = None
    group: Annotated[
        Annotated[tuple[Glob, ...], Meta(min_length=2, extra_json_schema={"uniqueItems": True})] | None,
        _about("The n-th matches of each glob together make one device."),
    ] = None
    nvidia: NvidiaConfig | None = None
    pci: PciConfig | None = None
    usb: UsbConfig | None = None
    plugin: PluginConfig | None = None

    @property
    def globs(self) -> tuple[str, ...]:
        """The globs of a path or a group."""
        return self.group or ((self.path,) if self.path is not None else ())


class MountConfig(_Strict, frozen=True, kw_only=True):
    __doc__ = "A file or directory of the host that containers with a device see."

    host: Annotated[
        AbsolutePath, _about("Where it is on the host; outside of /dev `run` takes it only with --allow-host-path.")
    ]
    container: Annotated[AbsolutePath, _about("Where the container finds it.")]
    readonly: Annotated[bool, _about("Whether the container may only read it.")] = True


class SharingConfig(_Strict, frozen=True, kw_only=True):
    __doc__ = "How many containers may have one device at the same time."

    replicas: Annotated[
        Annotated[int, Meta(ge=1, le=10_000)]
        | Annotated[
            Mapping[Pattern, Annotated[int, Meta(ge=1, le=10_000)]],
            _about(
                "By name: a pattern that an id, a path, an address or a word of the product's name fits, "
                "upper or lower case. The first that fits counts; what none fits is offered once."
            ),
        ],
        _about("How often each device is offered.", examples=[4, {"a100": 4, "t4": 2}]),
    ] = 1

    @property
    def most(self) -> int:
        """The highest count of replicas."""
        return self.replicas if isinstance(self.replicas, int) else max(self.replicas.values(), default=1)


class CommandProbeConfig(_Strict, frozen=True, kw_only=True):
    __doc__ = (
        "A command that looks at one device: status 0 is good, 75 tells nothing, any other is bad. It runs with the "
        "agent's rights, root's on the node perhaps; `run` takes it only with --allow-commands."
    )

    command: Annotated[
        tuple[Annotated[str, texts.WORD], ...],
        Meta(
            min_length=1,
            description="Program and arguments, no shell; {id} and {node} stand for the device's id and first node, "
            "which are also in DEVICE_ID and DEVICE_NODES.",
        ),
    ]
    timeout: Annotated[int, Meta(ge=1, le=600, description="Seconds after which it is killed; a failed probe.")] = 10


class HealthConfig(_Strict, frozen=True, kw_only=True):
    __doc__ = "How the devices' health is probed, and when probes change it."

    probe: Annotated[
        Literal["none", "open"] | CommandProbeConfig,
        _about(
            "open: open the device's nodes (which resets some serial devices). command: run something. "
            "With none there is only what the kind of device tells by itself."
        ),
    ] = "none"
    period: Annotated[int, Meta(ge=1, le=86_400, description="Seconds between probes.")] = 10
    failures: Annotated[int, Meta(ge=1, le=1000, description="Failed probes in a row that make it unhealthy.")] = 3
    successes: Annotated[int, Meta(ge=1, le=1000, description="Good probes in a row that make it healthy again.")] = 2


class DraConfig(_Strict, frozen=True, kw_only=True):
    __doc__ = "How the devices are divided between pods (extended resource) and claims (DRA); for dra-bridge."

    share: Annotated[
        Annotated[int, Meta(ge=0, le=1_000_000)] | Annotated[str, texts.SHARE],
        _about("Devices that claims get: none, all, a number, or a percentage.", examples=["none", "all", 4, "50%"]),
    ] = "none"
    drain: Annotated[
        Literal["cordon", "wait"],
        _about(
            "What becomes of a device that is to move while a pod holds it: cordon withdraws it at once, "
            "wait leaves it alone until it is idle."
        ),
    ] = "cordon"
    unhealthy: Annotated[
        Literal["NoSchedule", "NoExecute"],
        _about(
            "What the taint on an unhealthy device does: NoSchedule keeps new claims away, NoExecute "
            "ends the pods that use it as well. One resource with NoExecute means it for its whole driver."
        ),
    ] = "NoSchedule"


class VersionAttribute(_Strict, frozen=True, kw_only=True):
    __doc__ = "An attribute that selectors compare as a version."

    version: Annotated[str, texts.SEMVER]


class ResourceConfig(_Strict, frozen=True, kw_only=True, eq=False):
    __doc__ = "A resource and its devices. Two that are equal are served alike: a reload leaves it alone."

    name: Annotated[str, texts.RESOURCE_NAME]
    driver: Annotated[str, texts.DRIVER_NAME] | None = None
    devices: Annotated[
        tuple[DeviceEntry, ...], Meta(min_length=1, description="Where its devices come from; all entries together.")
    ]
    permissions: Annotated[str, texts.PERMISSIONS] = "rw"
    env: Annotated[
        Mapping[Annotated[str, texts.ENV_NAME], Annotated[str, texts.ENV_VALUE]],
        _about("Variables of containers that hold a device."),
    ] = msgspec.field(default_factory=dict)
    nodes: Annotated[
        tuple[AbsolutePath, ...],
        _about(
            "Device nodes that such containers get besides, with the same permissions: control nodes, "
            "which devices of this resource and of others share.",
            examples=[["/dev/mapper/control"]],
        ),
    ] = ()
    mounts: Annotated[tuple[MountConfig, ...], _about("What such containers see of the host.")] = ()
    annotations: Annotated[
        Mapping[Annotated[str, texts.ANNOTATION_NAME], str],
        _about("Annotations of such containers, for the container runtime (they are not the pod's)."),
    ] = msgspec.field(default_factory=dict)
    cdi: Annotated[
        tuple[Annotated[str, texts.CDI_NAME], ...], _about("CDI devices that such containers get as well.")
    ] = ()
    include: Annotated[
        tuple[Pattern, ...],
        _about("Only devices that one of these fits: their id, path, PCI address, or a symlink's target."),
    ] = ()
    exclude: Annotated[tuple[Pattern, ...], _about("No devices that one of these fits.")] = ()
    health: HealthConfig = HealthConfig()
    sharing: SharingConfig = SharingConfig()
    topology: Annotated[bool, _about("Whether the kubelet is told the devices' NUMA nodes; false leaves them out.")] = (
        True
    )
    prefer: Annotated[
        Policy,
        _about(
            "Which devices a pod gets that wants several. links: closely linked ones, replicas of "
            "different devices. packed: replicas of few devices. distributed: replicas of the devices that are used "
            "least. none: the first."
        ),
    ] = "links"
    attributes: Annotated[
        Mapping[
            AttributeName,
            bool
            | Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
            | Annotated[str, texts.ATTRIBUTE_TEXT]
            | VersionAttribute,
        ],
        _about("What claims can select on; names without a domain fall under the driver's."),
    ] = msgspec.field(default_factory=dict)
    capacity: Annotated[
        Mapping[AttributeName, Annotated[int, Meta(ge=0, le=2**63 - 1)] | Annotated[str, texts.QUANTITY]],
        _about("Amounts that claims can select on."),
    ] = msgspec.field(default_factory=dict)
    dra: DraConfig = DraConfig()

    @property
    def plugin(self) -> PluginConfig | None:
        """What is said of a vendor's own plugin that lists the devices; None if none does."""
        return next((entry.plugin for entry in self.devices if entry.plugin is not None), None)

    @property
    def adopted(self) -> bool:
        """Whether a vendor's own plugin lists the devices."""
        return self.plugin is not None

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


def typed_attributes(attributes: Mapping[str, bool | int | str | VersionAttribute]) -> dict[str, AttributeValue]:
    """Return a file's attributes as a Device has them."""
    return {
        name: Version(value.version) if isinstance(value, VersionAttribute) else value
        for name, value in attributes.items()
    }


class MetricsConfig(_Strict, frozen=True, kw_only=True):
    __doc__ = "How metrics are served where --metrics-address says; read at the agent's start."

    certificate: Annotated[
        AbsolutePath | None, _about("A certificate (PEM) for TLS, read again when it is renewed.")
    ] = None
    key: Annotated[AbsolutePath | None, _about("Its key; if not given, the same file.")] = None
    client_ca: Annotated[
        AbsolutePath | None,
        _about(
            "Authorities (PEM) of client certificates; everybody but the kubelet's probes must then "
            "have one. Needs `certificate`."
        ),
    ] = None
    min_version: Annotated[Literal["1.2", "1.3"], _about("The least version of TLS.")] = "1.2"
    token: Annotated[
        AbsolutePath | None, _about("A file with the bearer token that everybody but the kubelet's probes must bring.")
    ] = None
    period: Annotated[int, Meta(ge=1, le=3600, description="Seconds between measurements of the devices' load.")] = 10
    dcgm: Annotated[bool, _about("Whether the names of NVIDIA's DCGM exporter are given beside the own ones.")] = False


class Config(_Strict, frozen=True, kw_only=True):
    __doc__ = (
        "What a node agent serves. Whoever may write this file decides what the agent executes and hands out of the "
        "host, within what --allow-commands and --allow-host-path of `run` allow."
    )

    resources: Annotated[tuple[ResourceConfig, ...], Meta(min_length=1, description="The resources, each once.")]
    metrics: MetricsConfig = MetricsConfig()


def schema() -> dict[str, Any]:
    """Return the file's JSON schema (draft 2020-12), for editors and for checks without this package.

    `parse` alone checks what a schema cannot express (`deviceplugin.config.rules`), such as a resource named twice.
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
    """Describe an optional key as one that may be left out: not as null, and without an empty default."""
    options = [option for option in place.get("anyOf", []) if option != {"type": "null"}]
    if len(options) == 1:
        del place["anyOf"]
        place.update({**options[0], **place})
    if not isinstance(place.get("default"), (str, bool, int)):
        place.pop("default", None)
