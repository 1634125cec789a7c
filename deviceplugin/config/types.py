"""Defines the types of the config file. The annotations of the types are the rules for the values in a file.

The JSON schema in api/ is generated from these types. To add a kind of device, add a field to `DeviceEntry`, and a case
to `deviceplugin.sources.configured.build_entry`. The schema's description of a class is assigned to `__doc__`, because
the image runs `python -OO`, which removes docstrings.
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
    """A mapping in the config file. An unknown key, or a value of a wrong type, is an error."""


class SimulatedConfig(_Strict, frozen=True, kw_only=True):
    __doc__ = "Simulated devices without hardware, for tests and trials. Their ids are sim-0, sim-1 and so on."

    count: Annotated[int, Meta(ge=1, le=65536, description="The number of devices.")]
    numa: Annotated[
        Annotated[int, Meta(ge=1, le=1024)] | None,
        _about("The number of NUMA nodes. Each NUMA node has a block of consecutive devices."),
    ] = None
    unhealthy_file: Annotated[
        AbsolutePath | None,
        _about(
            "The path of a file with the unhealthy devices: on each line an id, a space and the reason. The agent "
            "reads the file again when it changes. If the file is missing or empty, all devices are healthy."
        ),
    ] = None


class NvidiaConfig(_Strict, frozen=True, kw_only=True):
    __doc__ = "NVIDIA GPUs, or their MIG partitions; needs the extra `nvidia`."

    mig: Annotated[
        Literal["none", "single", "mixed"],
        _about(
            "The devices of this resource. none: whole GPUs. single: partitions, which must all have the same profile. "
            "mixed: unpartitioned GPUs; for each profile that no resource has as `profile`, its partitions are a "
            "further resource, named mig-<profile> in the same domain, such as nvidia.com/mig-1g.10gb. These are for "
            "limits only, and not shared. To share partitions, or give them to claims, configure a resource with "
            "`profile`."
        ),
    ] = "none"
    profile: Annotated[str, texts.MIG_PROFILE] | None = None
    injection: Annotated[
        Literal["env", "cdi", "nodes"],
        _about(
            "How a container gets the GPUs. env: by the variable NVIDIA_VISIBLE_DEVICES, for the NVIDIA container "
            "runtime. cdi: by the device names in the node's CDI spec for nvidia.com/gpu. nodes: by device nodes only."
        ),
    ] = "env"
    # The default is the list of XIDs that NVIDIA's own plugin ignores, because programs cause them, not the hardware.
    ignore_xids: Annotated[
        tuple[Annotated[int, Meta(ge=0, le=65535)], ...],
        _about("XIDs (error numbers) that do not make a GPU unhealthy. The default XIDs are caused by applications."),
    ] = (13, 31, 43, 45, 68, 109)
    recovery: Annotated[
        Annotated[int, Meta(ge=0, le=31_536_000)] | Literal["never"],
        _about(
            "Seconds without a further fault after which successful probes make a GPU healthy again after an XID. "
            "never: the GPU stays unhealthy until the agent restarts."
        ),
    ] = 300
    library: Annotated[
        AbsolutePath | None,
        _about(
            "The path of libnvidia-ml.so.1, if the loader does not find it. `run` loads the library from this path "
            "only with --allow-commands."
        ),
    ] = None

    @property
    def mixed(self) -> bool:
        """Whether these GPUs bring a resource for each MIG profile. `mig` has no effect beside `profile`."""
        return self.mig == "mixed" and self.profile is None


class PciConfig(_Strict, frozen=True, kw_only=True):
    __doc__ = "PCI devices that match all of these keys."

    vendor: HexId | None = None
    device: HexId | None = None
    class_: Annotated[str, texts.PCI_CLASS] | None = msgspec.field(default=None, name="class")
    driver: Annotated[
        Pattern | None, _about("The name of the kernel driver bound to the device, such as vfio-pci; a pattern.")
    ] = None
    address: Annotated[
        Pattern | None, _about("The PCI address, such as 0000:3b:00.0; a pattern.", examples=["0000:3b:*"])
    ] = None
    functions: Annotated[
        Literal["all", "physical", "virtual"],
        _about("The functions to list. physical: all but the virtual functions of SR-IOV. virtual: only the virtual."),
    ] = "all"


class UsbConfig(_Strict, frozen=True, kw_only=True):
    __doc__ = "USB devices that match all of these keys. Hubs never match."

    vendor: HexId | None = None
    product: HexId | None = None
    serial: Annotated[Pattern | None, _about("The serial number; a pattern.")] = None


class PluginConfig(_Strict, frozen=True, kw_only=True):
    __doc__ = (
        "Devices of a vendor's device plugin. The plugin registers in the directory of the option --adopt, lists the "
        "devices and answers Allocate. `run` serves such devices only with this option. The keys below concern claims."
    )

    claims: Annotated[
        bool,
        _about(
            "Whether the devices are for claims although the agent does not know this plugin. The plugin's answer must "
            "then depend on the ids alone, and the plugin must not search for the pod, neither in the API server nor "
            "in PodResources."
        ),
    ] = False
    answer: Annotated[
        Literal["request", "claim"],
        _about(
            "How often Allocate is called for a claim. request: once for each request of the claim. claim: once for "
            "the whole claim; each container that uses any request of the claim then gets the whole answer."
        ),
    ] = "request"
    pre_start: Annotated[
        Literal["each", "once"],
        _about(
            "When the plugin needs PreStartContainer. each: before each start of a container, which is impossible for "
            "claims, so claims are refused. once: it is enough to call PreStartContainer when the claim is prepared."
        ),
    ] = "each"
    drop_annotations: Annotated[
        tuple[Pattern, ...],
        _about(
            "Patterns of annotations that are dropped from the plugin's answers for claims. Any other annotation in an "
            "answer is an error."
        ),
    ] = ()


_CONTAINER = _about(
    "The path in the container; by default the path on the host. {id} and {name} stand for the device's id and the "
    "last part of its path. In a pod with user namespaces, the path must exist on the host as well.",
    examples=["/dev/modem", "/dev/cameras/{name}"],
)


class PartConfig(_Strict, frozen=True, kw_only=True):
    __doc__ = "A part of each device of a group."

    path: Annotated[Glob, _about("A glob. Each device has one of the paths that match the glob.")]
    container: Annotated[AbsolutePath | None, _CONTAINER] = None
    optional: Annotated[bool, _about("Whether there are also devices without this part.")] = False


class DeviceEntry(_Strict, frozen=True, kw_only=True):
    __doc__ = "A selection of devices by exactly one of these keys. The key `container` is allowed only with `path`."

    path: Annotated[
        Glob | None,
        _about(
            "Each path that the glob matches is a device. A symlink is followed each time that a container starts, and "
            "the path in the container is that of the symlink. A plain file or socket is mounted. `run` accepts a path "
            "outside of /dev, or a symlink that leads out of /dev, only with --allow-host-path."
        ),
    ] = None
    simulated: SimulatedConfig | None = None
    group: Annotated[
        Annotated[tuple[Glob | PartConfig, ...], Meta(min_length=2, extra_json_schema={"uniqueItems": True})] | None,
        _about(
            "Several globs. The paths that belong together form one device: paths of the same USB device or PCI "
            "function, else paths for which the wildcards match the same text."
        ),
    ] = None
    nvidia: NvidiaConfig | None = None
    pci: PciConfig | None = None
    usb: Annotated[
        UsbConfig
        | Annotated[
            tuple[UsbConfig, ...],
            Meta(min_length=2, description="Ids that one device has in turn; its port then identifies the device."),
        ]
        | None,
        _about(
            "USB devices by their ids. A list names all ids of a device whose ids change, for example when its "
            "firmware is loaded. All devices in one port that have an id of the list then count as the same device.",
            examples=[
                {"vendor": "0403"},
                [{"vendor": "1a6e", "product": "089a"}, {"vendor": "18d1", "product": "9302"}],
            ],
        ),
    ] = None
    plugin: PluginConfig | None = None
    container: Annotated[AbsolutePath | None, _CONTAINER] = None

    @property
    def usb_ids(self) -> tuple[UsbConfig, ...]:
        """The filters of the entry for USB devices. A device belongs to the entry if it matches at least one filter."""
        return (self.usb,) if isinstance(self.usb, UsbConfig) else self.usb or ()

    @property
    def parts(self) -> tuple[PartConfig, ...]:
        """The globs of `path` or `group`, with their options. Each device consists of one path for each glob."""
        parts = self.group or ((PartConfig(path=self.path, container=self.container),) if self.path is not None else ())
        return tuple(PartConfig(path=part) if isinstance(part, str) else part for part in parts)

    @property
    def globs(self) -> tuple[str, ...]:
        """The globs of `path` or `group`, without their options."""
        return tuple(part.path for part in self.parts)


KINDS = tuple(name for name in DeviceEntry.__struct_fields__ if name != "container")
"""The keys of an entry that select a kind of device. An entry has exactly one of these keys."""


class MountConfig(_Strict, frozen=True, kw_only=True):
    __doc__ = "A file or directory of the host that is mounted into containers with a device."

    host: Annotated[
        AbsolutePath, _about("The path on the host. `run` accepts a path outside of /dev only with --allow-host-path.")
    ]
    container: Annotated[AbsolutePath, _about("The path in the container.")]
    readonly: Annotated[bool, _about("Whether the mount is read-only.")] = True


class SharingConfig(_Strict, frozen=True, kw_only=True):
    __doc__ = "How many containers may have one device at the same time."

    replicas: Annotated[
        Annotated[int, Meta(ge=1, le=10_000)]
        | Annotated[
            Mapping[Pattern, Annotated[int, Meta(ge=1, le=10_000)]],
            _about(
                "The number for each pattern. A pattern matches a device's id, path, address or a word of its product "
                "name, in upper or lower case. The first pattern that matches a device counts. A device without a "
                "matching pattern has the number 1."
            ),
        ],
        _about("How many containers may share each device.", examples=[4, {"a100": 4, "t4": 2}]),
    ] = 1

    @property
    def most(self) -> int:
        """The highest number of replicas that a device may have."""
        return self.replicas if isinstance(self.replicas, int) else max(self.replicas.values(), default=1)


class CommandProbeConfig(_Strict, frozen=True, kw_only=True):
    __doc__ = (
        "A command that probes one device. Exit status 0 means healthy, 75 unknown, any other status unhealthy. The "
        "command runs with the agent's rights, which may be those of root on the node. `run` accepts a command only "
        "with --allow-commands."
    )

    command: Annotated[
        tuple[Annotated[str, texts.WORD], ...],
        Meta(
            min_length=1,
            description="The program and its arguments, without a shell. {id} and {node} stand for the device's id and "
            "first node. The environment has the id in DEVICE_ID and all nodes in DEVICE_NODES.",
        ),
    ]
    timeout: Annotated[
        int, Meta(ge=1, le=600, description="Seconds after which the command is killed, and counts as a failed probe.")
    ] = 10


class HealthConfig(_Strict, frozen=True, kw_only=True):
    __doc__ = "How the devices' health is probed, and when probes change it."

    probe: Annotated[
        Literal["none", "open"] | CommandProbeConfig,
        _about(
            "The probe of each device. open: the agent opens the device's nodes, which resets some serial devices. A "
            "command: the agent runs the command. none: only the source of the devices, such as NVML for GPUs, reports "
            "their health."
        ),
    ] = "none"
    period: Annotated[int, Meta(ge=1, le=86_400, description="Seconds between probes.")] = 10
    failures: Annotated[
        int, Meta(ge=1, le=1000, description="The number of failed probes in a row that make a device unhealthy.")
    ] = 3
    successes: Annotated[
        int, Meta(ge=1, le=1000, description="The number of good probes in a row that make a device healthy again.")
    ] = 2


class DraConfig(_Strict, frozen=True, kw_only=True):
    __doc__ = "How dra-bridge divides the devices between limits (extended resource) and claims (DRA)."

    share: Annotated[
        Annotated[int, Meta(ge=0, le=1_000_000)] | Annotated[str, texts.SHARE],
        _about(
            "How many devices are for claims: none, all, a number, or a percentage.", examples=["none", "all", 4, "50%"]
        ),
    ] = "none"
    drain: Annotated[
        Literal["cordon", "wait"],
        _about(
            "What happens to a device that must move between limits and claims while a pod or claim holds it. cordon: "
            "new pods and claims no longer get the device, and it moves when it has no holder. wait: the device stays "
            "available until it has no holder, unless an allocated claim needs it."
        ),
    ] = "cordon"
    unhealthy: Annotated[
        Literal["NoSchedule", "NoExecute"],
        _about(
            "The effect of the taint on an unhealthy device. NoSchedule: new claims do not get the device. NoExecute: "
            "pods that use the device are also ended. If one resource of a driver has NoExecute, this effect applies "
            "to all devices of the driver."
        ),
    ] = "NoSchedule"


class VersionAttribute(_Strict, frozen=True, kw_only=True):
    __doc__ = "An attribute that selectors compare as a version."

    version: Annotated[str, texts.SEMVER]


class ResourceConfig(_Strict, frozen=True, kw_only=True, eq=False):
    __doc__ = "A resource and its devices. A reload of the file does not change a resource whose keys are unchanged."

    name: Annotated[str, texts.RESOURCE_NAME]
    driver: Annotated[str, texts.DRIVER_NAME] | None = None
    devices: Annotated[
        tuple[DeviceEntry, ...],
        Meta(min_length=1, description="Selections of devices. The resource has the devices of all entries together."),
    ]
    permissions: Annotated[str, texts.PERMISSIONS] = "rw"
    env: Annotated[
        Mapping[Annotated[str, texts.ENV_NAME], Annotated[str, texts.ENV_VALUE]],
        _about(
            "Environment variables of containers with a device. {id}, {path} and {name} stand for the device's id, its "
            "path in the container, and the last part of its path on the host. If a container has several devices, "
            "their values are joined by commas.",
            examples=[{"CAMERA": "{path}"}],
        ),
    ] = msgspec.field(default_factory=dict)
    nodes: Annotated[
        tuple[AbsolutePath, ...],
        _about(
            "Further device nodes for containers with a device, such as control nodes, with the same permissions. "
            "Several devices and resources may have the same further nodes.",
            examples=[["/dev/mapper/control"]],
        ),
    ] = ()
    mounts: Annotated[tuple[MountConfig, ...], _about("Mounts of containers with a device.")] = ()
    annotations: Annotated[
        Mapping[Annotated[str, texts.ANNOTATION_NAME], str],
        _about("Annotations for the container runtime, for containers with a device; not annotations of the pod."),
    ] = msgspec.field(default_factory=dict)
    cdi: Annotated[
        tuple[Annotated[str, texts.CDI_NAME], ...], _about("Further CDI devices for containers with a device.")
    ] = ()
    include: Annotated[
        tuple[Pattern, ...],
        _about("If set, only devices whose id, path, PCI address or symlink target matches one of these patterns."),
    ] = ()
    exclude: Annotated[
        tuple[Pattern, ...], _about("Devices that match one of these patterns, as in `include`, are left out.")
    ] = ()
    health: HealthConfig = HealthConfig()
    sharing: SharingConfig = SharingConfig()
    topology: Annotated[bool, _about("Whether the kubelet gets the devices' NUMA nodes.")] = True
    metadata: Annotated[
        bool,
        _about(
            "Whether containers get files in /var/run/kubernetes.io/dra-device-attributes (KEP-5304) with the driver, "
            "name and attributes of their devices."
        ),
    ] = False
    policy: Annotated[
        Policy,
        _about(
            "The choice of devices for a container that requests several. links: closely linked devices, and replicas "
            "of different devices. packed: replicas of as few devices as possible. distributed: replicas of the "
            "devices with the fewest replicas in use. none: the first free ids."
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
        _about("Attributes by which claims select devices. A name without a domain belongs to the driver's domain."),
    ] = msgspec.field(default_factory=dict)
    capacity: Annotated[
        Mapping[AttributeName, Annotated[int, Meta(ge=0, le=2**63 - 1)] | Annotated[str, texts.QUANTITY]],
        _about("Capacities of the devices, by which claims select devices."),
    ] = msgspec.field(default_factory=dict)
    dra: DraConfig = DraConfig()

    def __post_init__(self) -> None:
        """Put the permissions into the order rwm. So the resources of an earlier and a new config can be compared."""
        msgspec.structs.force_setattr(self, "permissions", "".join(mode for mode in "rwm" if mode in self.permissions))

    @property
    def plugin(self) -> PluginConfig | None:
        """The settings of the vendor's plugin that lists the resource's devices; None for other resources."""
        return next((entry.plugin for entry in self.devices if entry.plugin is not None), None)

    @property
    def adopted(self) -> bool:
        """Whether a vendor's plugin lists the resource's devices."""
        return self.plugin is not None

    def __eq__(self, other: object) -> bool:
        # Fields cannot be compared by ==: an attribute that was 1 and is now true has changed, although 1 == True.
        return isinstance(other, ResourceConfig) and self._bytes() == other._bytes()

    def __ne__(self, other: object) -> bool:
        return not self == other  # The `__ne__` of Struct would compare identities.

    def __hash__(self) -> int:
        return hash(self._bytes())

    def _bytes(self) -> bytes:
        # The order of keys does not matter, except in `sharing`: there the first pattern that matches applies.
        return msgspec.json.encode(self, order="deterministic") + msgspec.json.encode(self.sharing)


def typed_attributes(attributes: Mapping[str, bool | int | str | VersionAttribute]) -> dict[str, AttributeValue]:
    """Convert a config's attributes to attributes of a Device."""
    return {
        name: Version(value.version) if isinstance(value, VersionAttribute) else value
        for name, value in attributes.items()
    }


class MetricsConfig(_Strict, frozen=True, kw_only=True):
    __doc__ = "How the agent serves metrics at --metrics-address. The agent reads these keys only at its start."

    certificate: Annotated[
        AbsolutePath | None,
        _about("The file of a certificate (PEM) for TLS. The agent reads the file again when it changes."),
    ] = None
    key: Annotated[
        AbsolutePath | None, _about("The file of the certificate's key; by default the file of the certificate.")
    ] = None
    client_ca: Annotated[
        AbsolutePath | None,
        _about(
            "The file (PEM) with the authorities of client certificates. With this key, every client except the "
            "kubelet's probes needs a certificate. The key requires `certificate`."
        ),
    ] = None
    min_version: Annotated[Literal["1.2", "1.3"], _about("The minimum version of TLS.")] = "1.2"
    token: Annotated[
        AbsolutePath | None,
        _about("A file with a bearer token, which every client except the kubelet's probes must send."),
    ] = None
    period: Annotated[int, Meta(ge=1, le=3600, description="Seconds between measurements of the devices' load.")] = 10
    dcgm: Annotated[bool, _about("Whether metrics are also served under the names of NVIDIA's DCGM exporter.")] = False


class Config(_Strict, frozen=True, kw_only=True):
    __doc__ = (
        "The config of a node agent. Everyone who can write this file decides which commands the agent runs, and which "
        "files of the host the agent gives to pods, within the limits of --allow-commands and --allow-host-path of "
        "`run`."
    )

    resources: Annotated[
        tuple[ResourceConfig, ...], Meta(min_length=1, description="The resources. No two have the same name.")
    ]
    metrics: MetricsConfig = MetricsConfig()

    @property
    def profiles(self) -> frozenset[str]:
        """The MIG profiles whose partitions the resources list."""
        listed = (entry.nvidia for resource in self.resources for entry in resource.devices)
        return frozenset(one.profile for one in listed if one is not None and one.profile is not None)


def schema() -> dict[str, Any]:
    """Return the JSON schema of the config file (draft 2020-12), for editors and for checks without this package.

    A schema cannot express some rules (`deviceplugin.config.rules`), for example that resource names are unique. Such
    rules are checked only by `parse`.
    """
    made = msgspec.json.schema(Config)
    definitions: dict[str, Any] = made["$defs"]
    for definition in definitions.values():
        for place in definition["properties"].values():
            _tidy(place)
    entry = definitions["DeviceEntry"]
    entry["oneOf"] = [{"required": [kind]} for kind in KINDS]
    entry["dependentRequired"] = {"container": ["path"]}
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
    """Simplify the schema of an optional key: remove null from its types, and remove an empty default."""
    options = [option for option in place.get("anyOf", []) if option != {"type": "null"}]
    if len(options) == 1:
        del place["anyOf"]
        place.update({**options[0], **place})
    elif options:
        place["anyOf"] = options
    if not isinstance(place.get("default"), (str, bool, int)):
        place.pop("default", None)
