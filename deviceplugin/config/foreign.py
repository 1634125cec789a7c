"""Converts settings of other device plugins to a config file, for `deviceplugin import`. Pure functions.

The known formats are those of 2026: generic-device-plugin's config and flags (config.go, deviceplugin/path.go, usb.go),
smarter-device-manager's conf.yaml, and the config file of NVIDIA's plugin (api/config/v1).
"""

from __future__ import annotations

import contextlib
import re
import shlex
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import yaml

from deviceplugin.config import document
from deviceplugin.config.document import ConfigError
from deviceplugin.config.texts import ATTRIBUTES, PARTITION
from deviceplugin.device import printable

GENERIC_DOMAIN: Final = "squat.ai"
SMARTER_DOMAIN: Final = "smarter-devices"
NVIDIA_GPU: Final = "nvidia.com/gpu"
NVIDIA_PART: Final = re.compile(rf"nvidia\.com/mig-({PARTITION}(?:[.-]{ATTRIBUTES})?)")
"""The name of a resource of MIG partitions in NVIDIA's plugin: the profile with a dot in place of a plus sign."""
NVIDIA_INJECTIONS: Final[Mapping[str, str]] = {"envvar": "env", "cdi-annotations": "cdi", "cdi-cri": "cdi"}
NVIDIA_FLAGS: Final = frozenset({"migStrategy", "deviceListStrategy"})
"""The flags in the config file of NVIDIA's plugin that the import converts. For each other flag that is set, the import
only adds a note."""
NVIDIA_VALUES: Final = frozenset(
    {
        *("compatWithCPUManager", "migStrategy", "failOnInitError", "deviceListStrategy", "deviceIDStrategy"),
        *("nvidiaDriverRoot", "gdrcopyEnabled", "gdsEnabled", "mofedEnabled", "deviceDiscoveryStrategy"),
    }
)
"""Values of NVIDIA's Helm chart (values.yaml) that set flags of the plugin directly, not in the plugin's config file.
"""
MAX_SHOWN: Final = 100
"""Maximum characters of a setting in a note."""
NVIDIA_ARGUMENT: Final = re.compile(
    r"(?<!\S)--((?:mig|device-(?:list|id|discovery))-strategy|pass-device-specs|nvidia-driver-root|"
    r"(?:gds|gdrcopy|mofed)-enabled)(?![-\w])(?:[= \t]+([^\s\"']+))?"
)
"""Matches an argument of NVIDIA's plugin that sets a flag of its config file, with the value."""
OTHER_IDS: Final = (
    "{}: its device ids. Its pods run on, and the agent finds their devices by their containers' device nodes; if the "
    "plugin gave them a directory or a mount, the resource offers no device until they end (docs/existing-plugin.md)"
)
DIRECTORIES: Final = frozenset({"/dev/snd", "/dev/dri", "/dev/input", "/dev/bus/usb", "/dev/net", "/dev/vfio"})
"""Directories that the settings of other plugins often name as if each of them were a device."""
NUMBERED: Final[Mapping[str, str]] = {
    "ttyUSB": "/dev/serial/by-id/...",
    "ttyACM": "/dev/serial/by-id/...",
    "video": "/dev/v4l/by-id/...",
}
"""For each name of device nodes (without their number) whose numbers can change: an example of the links that udev
makes for these nodes."""
CORAL: Final = ({"vendor": "1a6e", "product": "089a"}, {"vendor": "18d1", "product": "9302"})
"""The USB ids of the Coral accelerator, before and after its firmware is loaded."""


class Imported(NamedTuple):
    """The result of an import. resources: the entries for the key `resources` of a config file.

    notes: texts for the user about settings that cannot be expressed in a config file.
    """

    resources: list[dict[str, Any]]
    notes: list[str]


class UnknownSettingsError(ValueError):
    """Raised if a text does not contain the settings of a known plugin."""


class _FormError(ValueError):
    """Raised if a setting has another form than its plugin reads. The message names the setting and the correction."""


def imported(text: str, parse: Callable[[str], object]) -> Imported:
    """Convert the settings of another device plugin to the resources of a config file.

    text: the plugin's config file, its flags, or YAML that contains one of them at any depth: a ConfigMap, a DaemonSet,
    the `args` of a container, values of a Helm chart. parse: the reader of config files, which checks the result.
    Raises UnknownSettingsError.
    """
    made = Imported([], [])
    try:
        for take, settings in _in_text(text, whole=True):
            with _left_out(f"the settings {str(settings)[:MAX_SHOWN]}", made):
                take(settings, made)
    except (yaml.YAMLError, ConfigError) as error:
        raise UnknownSettingsError(f"it is not YAML: {error}") from error
    resources: dict[str, dict[str, Any]] = {}
    mixed = ""
    for one in made.resources:
        name = one["name"]
        if name not in resources and any(entry.get("nvidia", {}).get("mig") == "mixed" for entry in one["devices"]):
            if mixed:
                made.notes.append(f"{name}: {mixed} of another config has its partitions; write a config file for each")
                continue
            mixed = name
        if resources.setdefault(name, one) != one:
            other = str({key: value for key, value in one.items() if key != "name"})[:MAX_SHOWN]
            made.notes.append(f"{name}: other settings under the same name, {other}; the first are taken")
    valid = _valid(list(resources.values()), made, parse)
    if not valid:
        known = "generic-device-plugin, smarter-device-manager, NVIDIA's device plugin"
        raise UnknownSettingsError(
            "\n".join(
                [f"it has no devices of a plugin that is known: {known}", *_mistakes(text), *dict.fromkeys(made.notes)]
            )
        )
    return Imported(valid, list(dict.fromkeys(made.notes)))


def _mistakes(text: str) -> list[str]:
    """Return why a text is no YAML, with the line, as a list; [] if it is YAML."""
    try:
        document.compose_all(text)
    except (yaml.YAMLError, ConfigError) as error:
        return [f"it is not YAML: {error}"]
    return []


def _valid(resources: list[dict[str, Any]], made: Imported, parse: Callable[[str], object]) -> list[dict[str, Any]]:
    """Return the resources that a config file may have together. Add a note about each reason to leave one out."""
    with contextlib.suppress(ConfigError):
        parse(as_file(Imported(resources, [])))
        return resources
    kept: list[dict[str, Any]] = []
    for one in resources:
        try:
            parse(as_file(Imported([*kept, one], [])))
        except ConfigError as error:
            for problem in error.problems:
                key = problem.path.removeprefix(f"$.resources[{len(kept)}].")
                made.notes.append(f"{one['name']}: left out: {key}: {problem.message}")
        else:
            kept.append(one)
    return kept


@contextlib.contextmanager
def _left_out(what: str, made: Imported) -> Iterator[None]:
    """If settings have another form than their plugin reads, add a note. what: the settings' name in the note."""
    try:
        yield
    except _FormError as error:
        made.notes.append(f"{what}: left out: {error}")
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        made.notes.append(f"{what}: left out: another form than the plugin reads ({type(error).__name__}: {error})")


def _mapping(settings: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Return the mapping at `key`, empty if it is not set. Raises _FormError."""
    value = settings.get(key) or {}
    if not isinstance(value, dict):
        raise _FormError(f"{key}: {str(value)[:MAX_SHOWN]}; write a mapping")
    return value


def _entries(settings: Mapping[str, Any], key: str, required: str) -> list[Mapping[str, Any]]:
    """Return the mappings in the list at `key`; each has the key `required`. Raises _FormError."""
    entries = settings.get(key) or []
    for one in entries if isinstance(entries, list) else [entries]:
        if entries is one or not isinstance(one, dict) or one.get(required) is None:
            raise _FormError(f"{key}: {str(one)[:MAX_SHOWN]}; write a list of mappings, each with {required}")
    return list(entries)


def _number(settings: Mapping[str, Any], key: str) -> int:
    """Return a number of devices or replicas, 1 if it is not set. Raises _FormError."""
    number = settings.get(key)
    if number is not None and not re.fullmatch("[0-9]{1,9}", str(number)):
        raise _FormError(f"{key}: {str(number)[:MAX_SHOWN]}; write a whole number of at least 1")
    return int(number or 0) or 1


def has_settings(node: yaml.Node, file: str) -> bool:
    """Return whether a YAML node contains the settings of a known plugin, at any depth. Raises ConfigError."""
    return any(True for _ in _in_node(node, file))


def as_file(made: Imported) -> str:
    """Return the imported resources as the text of a config file. Its comments name the settings that are left out."""
    notes = "".join(f"# not imported: {printable(note)}\n" for note in made.notes)
    return notes + yaml.dump({"resources": made.resources}, Dumper=_ConfigDumper, sort_keys=False)


class _ConfigDumper(yaml.SafeDumper):
    """Writes YAML. Texts that YAML 1.1 or this project's config file would read as numbers are put into quotes."""


_ConfigDumper.add_implicit_resolver(
    f"{document.TAG}float", re.compile(r"[-+]?[0-9]+[eE][-+]?[0-9]+$"), list("-+0123456789")
)


# The functions below find the settings of plugins in a text.

_Take = Callable[[Any, Imported], None]
"""A function that converts the settings of one kind of plugin, and adds the result to `Imported`."""


def _in_text(text: str, *, whole: bool = False) -> Iterator[tuple[_Take, Any]]:
    """Yield the settings in a text: YAML that contains settings, or a command line with generic-device-plugin's flags.

    whole: whether `text` is the whole text to import, not only a value in the whole text. If a whole text is neither
    YAML nor such a command line, this function raises yaml.YAMLError or ConfigError.
    """
    try:
        nodes = document.compose_all(text)
    except (yaml.YAMLError, ConfigError):
        if whole and not document.FLAG.search(text):
            raise
        nodes = []
    # A text that is only itself is not searched again; YAML keeps other spaces at its ends than `str.strip`.
    alone = {text, text.strip()}
    nodes = [node for node in nodes if document.kind(node) in {"map", "seq"} or document.scalar_text(node) not in alone]
    if not nodes and document.FLAG.search(text):
        yield _flags, _words(text)
    elif not nodes:
        yield from ((_nvidia_argument, found.groups()) for found in NVIDIA_ARGUMENT.finditer(text))
    for node in nodes:
        yield from _in_node(node)


def _in_node(root: yaml.Node, file: str = "<text>") -> Iterator[tuple[_Take, Any]]:
    """Yield the settings in a YAML node: the node itself if it is settings, otherwise settings at any depth in it."""
    left, seen = [document.plain(root, file)], set[int]()
    while left:
        node = left.pop()
        if isinstance(node, dict) and _taker(node) is None and (NVIDIA_VALUES | {"gfd"}) & node.keys():
            yield _nvidia_values, node
        if isinstance(node, dict) and NVIDIA_ARGUMENT.fullmatch(flag := _flag_of(node.get("name"))):
            yield _nvidia_argument, (flag.removeprefix("--"), node.get("value"))
        if take := _taker(node):
            yield take, node
        elif isinstance(node, str):
            yield from _in_text(node)
        elif isinstance(node, (list, dict)) and id(node) not in seen:
            seen.add(id(node))
            left += reversed(_parts(node))


def _parts(node: list[Any] | dict[str, Any]) -> list[Any]:
    """Return those values in a list or mapping that may contain settings.

    All words of a container's keys `command` and `args` with flags form one value.
    """
    if isinstance(node, list):
        return node
    flags = [key for key in ("command", "args") if _taker(node.get(key)) is _flags]
    # `metadata` is skipped: an annotation there may be a copy of the object (kubectl's last-applied-configuration).
    values = [value for key, value in node.items() if key != "metadata" and key not in flags]
    return [[word for key in flags for word in node[key]], *values]


def _taker(node: Any) -> _Take | None:
    """Return the conversion function for a node with the settings of a plugin; None for other nodes."""
    if isinstance(node, list):
        if node and all(isinstance(one, dict) and "devicematch" in one for one in node):
            return _smarter
        flags = (document.FLAG.match(one) for one in node if isinstance(one, str))
        return _flags if any(flag and flag[1] in {"device", "config"} for flag in flags) else None
    if not isinstance(node, dict):
        return None
    if "devicematch" in node:
        return lambda node, made: _smarter([node], made)
    if _is_spec(node):
        return lambda node, made: _generic(node, GENERIC_DOMAIN, made)
    specs = node.get("devices", node.get("device"))
    if isinstance(specs, list) and any(map(_is_spec, specs)):
        return _generic_file
    if node.get("version") == "v1" and (len(node) == 1 or {"flags", "sharing"} & node.keys()):
        return _nvidia
    if "version" not in node and isinstance(node.get("flags"), dict) and NVIDIA_VALUES & node["flags"].keys():
        return _nvidia
    sharing = (node.get("timeSlicing"), node.get("mps"))
    if any(isinstance(one, dict) and "resources" in one for one in sharing):
        return lambda node, made: _nvidia({"sharing": node}, made)
    return None


def _is_spec(node: Any) -> bool:
    """Return whether a node describes a resource in the form of generic-device-plugin."""
    groups = node.get("groups") if isinstance(node, dict) and "name" in node else None
    return isinstance(groups, list) and any(isinstance(one, dict) and {"paths", "usb"} & one.keys() for one in groups)


def _words(text: str) -> list[str]:
    """Return the words of a command line (flags and their values), without the quotes."""
    _, *parts = document.FLAG.split(text.replace("\\\n", " "))
    return [word for name, value in zip(parts[::2], parts[1::2], strict=True) for word in (f"--{name}", _plain(value))]


def _plain(value: str) -> str:
    return shlex.split(value)[0] if value.startswith(("'", '"')) else textwrap.dedent(value).strip()


# generic-device-plugin.


def _flags(words: Sequence[Any], made: Imported) -> None:
    """Convert generic-device-plugin's flags. A flag and its value are one word (`--flag=value`) or two words."""
    settings: dict[str, Any] = {"devices": []}
    pairs = iter(words)
    for word in pairs:
        if not (flag := document.FLAG.match(str(word))):
            continue
        name, (_, equals, value) = flag[1], str(word).partition("=")
        value = value if equals else str(next(pairs, ""))
        if name == "device":
            settings["devices"] += _specs(value, made)
        elif name == "domain":
            settings["domain"] = value
        elif name == "config":
            made.notes.append(f"generic-device-plugin: --config {value}: import that file, or its ConfigMap")
        else:
            made.notes.append(f"generic-device-plugin: --{name} {value}")
    _generic_file(settings, made)


def _specs(value: str, made: Imported) -> list[Any]:
    """Return the devices in a value of the flag --device.

    In older versions of the plugin, the value is a name and globs.
    """
    name, *globs = value.split(",")
    if globs and re.fullmatch(r"[a-z0-9-]+", name):
        return [{"name": name, "groups": [{"paths": [{"path": glob.strip()}]} for glob in globs]}]
    try:
        return list(map(document.plain, document.compose_all(value)))
    except (yaml.YAMLError, ConfigError):
        made.notes.append(f"generic-device-plugin: --device {value}: it is not YAML")
        return []


def _generic_file(settings: Mapping[str, Any], made: Imported) -> None:
    for spec in settings.get("devices", settings.get("device")) or ():
        _generic(spec, str(settings.get("domain") or GENERIC_DOMAIN), made)


def _generic(spec: Any, domain: str, made: Imported) -> None:
    if not isinstance(spec, dict) or "name" not in spec:
        made.notes.append(f"generic-device-plugin: {spec!r} has another form; write it as YAML with a name and groups")
        return
    name = f"{domain}/{spec['name']}"
    with _left_out(name, made):
        _generic_resource(spec, name, made)
    made.notes.append(OTHER_IDS.format("generic-device-plugin"))
    if domain == GENERIC_DOMAIN:
        made.notes.append(f"the domain, if it was not given: {domain} is that of version 0.1, later ones have devic.es")


def _generic_resource(spec: Mapping[str, Any], name: str, made: Imported) -> None:
    note = _noting(name, made)
    entries: list[dict[str, Any]] = []
    counts, permissions = set(), set()
    for group in spec.get("groups") or ():
        if not isinstance(group, dict):
            raise _FormError(f"groups: {str(group)[:MAX_SHOWN]}; write a mapping with paths or usb")
        counts.add(_number(group, "count"))
        paths = _entries(group, "paths", "path")
        permissions |= {"".join(one for one in "rwm" if one in str(path.get("permissions") or "mrw")) for path in paths}
        parts = [_path(path, note) for path in paths]
        if len(parts) == 1:
            entries.append({key: value for key, value in parts[0].items() if key != "optional"})
        elif parts:
            if all("optional" in part for part in parts):  # In a config file, not all paths of a group may be optional.
                del parts[0]["optional"]
            entries.append({"group": [part if len(part) > 1 else part["path"] for part in parts]})
        entries += _usb(_entries(group, "usb", "vendor"), note)
    if not entries:
        note("it has no devices")
        return
    # The Coral accelerator changes its USB id. If each of its two ids has an entry, one entry with both ids replaces
    # the two entries.
    if all({"usb": one} in entries for one in CORAL):
        entries = [entry for entry in entries if entry.get("usb") not in CORAL] + [{"usb": list(CORAL)}]
    resource: dict[str, Any] = {"name": name, "devices": entries}
    if len(permissions) > 1:
        note(f"permissions of each path ({', '.join(sorted(permissions))}); all get the first")
    if permissions and (first := min(permissions)) != "rw":
        resource["permissions"] = first
    if len(counts) > 1:
        note(f"a count for each group ({', '.join(map(str, sorted(counts)))}); all get the lowest")
    if min(counts) > 1:
        resource["sharing"] = {"replicas": min(counts)}
    made.resources.append(resource)


def _path(path: Mapping[str, Any], note: Callable[[str], None]) -> dict[str, Any]:
    """Convert a path of generic-device-plugin to an item of the key `group` in this project's config file.

    Add a note for each option that a config file cannot express.
    """
    host, inside = _of_go(str(path["path"])), str(path.get("mountPath") or "")
    for key in ("readOnly", "limit"):
        if path.get(key):
            note(f"{key} of {host}")
    if path.get("type") == "Mount":
        note(f"type Mount of {host}: files and sockets are mounted, directories are left out")
    elif host.rstrip("/") in DIRECTORIES:
        note(f"{host} as a directory: name its nodes, by `path` or `group`")
    _note_number(host, note)
    part: dict[str, Any] = {"path": host}
    if inside:
        part["container"] = f"{inside}{{name}}" if inside.endswith("/") else inside
    return part | ({"optional": True} if path.get("optional") else {})


def _four_digits(text: str) -> str:
    return f"{int(text, 16):04x}" if re.fullmatch("(?:0x)?[0-9a-fA-F]{1,4}", text) else text


def _of_go(glob: str) -> str:
    """Convert a glob of Go (filepath.Match), which has `[^` for `[!`, and a backslash for `[*]`. Raises _FormError."""
    if wrong := re.search(r"\[(?:!|[^]]*\\)[^]]*\]?", glob):
        raise _FormError(f"path: {glob}: write {wrong[0]} with neither a ! at its beginning nor a backslash")
    return re.sub(r"\\(.)", lambda escaped: re.sub(r"([*?[])", r"[\1]", escaped[1]), glob).replace("[^", "[!")


def _usb(specs: Sequence[Mapping[str, Any]], note: Callable[[str], None]) -> list[dict[str, Any]]:
    """Return the config file's entry for the USB devices of one generic-device-plugin group, as a list.

    The list is empty if the group has no USB device. If the group has several ids, the entry lists them as ids that one
    device has in turn.
    """
    keys = ("vendor", "product", "serial")
    given = [{key: str(spec[key]) for key in keys if spec.get(key)} for spec in specs]
    ids = [{key: text if key == "serial" else _four_digits(text) for key, text in one.items()} for one in given]
    if len(ids) > 1:
        note("several USB devices as one; here the ids of a group are those that one device has in turn")
    elif ids:
        note("all USB devices of a group as one (here each is one)")
    return [{"usb": ids if len(ids) > 1 else ids[0]}] if ids else []


# smarter-device-manager and NVIDIA's plugin.


def _smarter(entries: Sequence[Mapping[str, Any]], made: Imported) -> None:
    for entry in entries:
        with _left_out(f"smarter-device-manager: devicematch {str(entry['devicematch'])!r}", made):
            _smarter_resource(entry, made)
    made.notes.append(OTHER_IDS.format("smarter-device-manager"))


def _smarter_resource(entry: Mapping[str, Any], made: Imported) -> None:
    match = str(entry["devicematch"])
    glob = _as_glob(match)
    first = re.sub(r"[^-\w]", "_", re.split(r"[*?[]", glob.lstrip("*?"))[0]).strip("-_")
    if not first:
        raise _FormError("no glob matches the same names; write its paths as globs")
    path, name = f"/dev/{glob}", f"{SMARTER_DOMAIN}/{first}"
    note = _noting(name, made)
    resource: dict[str, Any] = {"name": name, "devices": [{"path": path}]}
    if (count := _number(entry, "nummaxdevices")) > 1:
        resource["sharing"] = {"replicas": count}
    if re.search(r"[*?[]", glob):
        note("a resource for each device, such as ...0; pods ask for any device of this one")
    if "]*" in glob:
        note(f"{match} exactly: {path} needs one character of each [...], and any text may follow it")
    if not (match.startswith("^") and match.endswith("$")):
        note(f"{match} in other directories (it lacks ^ or $): {path} is in one")
    made.resources.append(resource)
    if path in DIRECTORIES:
        note(f"{path} as a directory: name its nodes, by `path` or `group`")
    _note_number(path, note)


_PART: Final = re.compile(r"(?P<any>\.[*+]?)|(?P<one>\\d|\[\^?[-\w.:]+\])(?P<times>[*+]?)|\\[-/:.]|[-/:\w]")
"""Matches a part of a regular expression that a glob can have, too."""


def _as_glob(match: str) -> str:
    """Convert a regular expression, which matches anywhere unless it has ^ and $, to a glob.

    A set of characters that is repeated becomes the set and `*`, which matches more names (`[0-9]+` becomes `[0-9]*`).
    Raises _FormError if no glob matches the same names in one directory otherwise.
    """
    pattern = match.removeprefix("^").removesuffix("$")
    parts, at = ["*"] * (not match.startswith("^")), 0
    while at < len(pattern):
        part = _PART.match(pattern, at)
        if part is None or (part["times"] and part["one"].startswith("[^")):
            raise _FormError("no glob matches the same names; write its paths as globs")
        if part["any"]:
            parts.append({".": "?", ".*": "*", ".+": "?*"}[part["any"]])
        elif part["one"]:
            set_ = part["one"].replace("\\d", "[0-9]").replace("[^", "[!")
            parts.append(set_ + "*" * bool(part["times"]))
        else:
            parts.append(part[0][-1])
        at = part.end()
    parts += ["*"] * (not match.endswith("$"))
    return re.sub(r"\*+", "*", "".join(parts))


def _nvidia(settings: Mapping[str, Any], made: Imported) -> None:
    flags = _mapping(settings, "flags")
    plugin = _mapping(flags, "plugin")
    nvidia: dict[str, Any] = {}
    mig = flags.get("migStrategy")  # None if the file does not set it: then a flag or environment variable may.
    if mig not in (None, "none"):
        nvidia["mig"] = mig
    _nvidia_flags({**{key: value for key, value in flags.items() if key != "plugin"}, **plugin}, made)
    strategies = plugin.get("deviceListStrategy") or "envvar"
    for strategy in [strategies] if isinstance(strategies, str) else strategies:
        if strategy not in NVIDIA_INJECTIONS:
            made.notes.append(f"NVIDIA: deviceListStrategy {strategy}")
        elif "injection" not in nvidia and NVIDIA_INJECTIONS[strategy] != "env":
            nvidia["injection"] = NVIDIA_INJECTIONS[strategy]
    sharing = _mapping(settings, "sharing")
    if sharing.get("mps"):
        made.notes.append("NVIDIA: MPS; keep NVIDIA's plugin for it, or adopt it (docs/existing-plugin.md)")
    slicing = _mapping(sharing, "timeSlicing")
    shared = [(_nvidia_name(one["name"]), one) for one in _entries(slicing, "resources", "name")]
    if slicing.get("failRequestsGreaterThanOne"):
        made.notes.append("NVIDIA: failRequestsGreaterThanOne; a pod that wants several replicas gets several GPUs")
    for base, one in shared:
        name = f"{base}.shared" if slicing.get("renameByDefault") else base
        note = _noting(name, made)
        part = NVIDIA_PART.fullmatch(base)
        if (part is None and base != NVIDIA_GPU) or (part is not None and mig in {"none", "single"}):
            note("NVIDIA's plugin has no such resource" + (f" with migStrategy {mig}" if part else ""))
            continue
        if one.get("rename") and _nvidia_name(one["rename"]) != name:
            note(f"rename {one['rename']}: NVIDIA's plugin ignores it too")
        if one.get("devices", "all") != "all":
            note(f"devices {one['devices']}: all GPUs get the replicas; `sharing.replicas` may name them by UUID")
        of = nvidia
        if part:
            of = {key: value for key, value in nvidia.items() if key != "mig"}
            of["profile"] = part[1].replace("gb.", "gb+")
        with _left_out(name, made):
            sharing_here = {"replicas": _number(one, "replicas")}
            made.resources.append({"name": name, "devices": [{"nvidia": of}], "sharing": sharing_here})
    if not any(base == NVIDIA_GPU for base, _ in shared):
        made.resources.insert(0, {"name": NVIDIA_GPU, "devices": [{"nvidia": nvidia}]})
    for key in ("resources", "imex"):
        if settings.get(key):
            made.notes.append(f"NVIDIA: {key}")


def _nvidia_name(name: object) -> str:
    """Return a resource name in the config file of NVIDIA's plugin with its domain, which the plugin adds itself."""
    return f"nvidia.com/{str(name).removeprefix('nvidia.com/')}"


def _nvidia_flags(flags: Mapping[str, Any], made: Imported) -> None:
    """Add a note for each flag that is set and cannot be imported.

    A flag that makes UUIDs the device ids needs no note, because UUIDs are the default of this project too.
    """
    for key, value in flags.items():
        if value and key not in NVIDIA_FLAGS and (key, value) != ("deviceIDStrategy", "uuid"):
            made.notes.append(f"NVIDIA: {key}" + ("" if isinstance(value, dict) else f" {value}"))


def _flag_of(variable: object) -> str:
    """Return the argument for which an environment variable stands, such as --mig-strategy for MIG_STRATEGY."""
    return "--" + variable.lower().replace("_", "-") if isinstance(variable, str) and variable.isupper() else ""


def _nvidia_argument(argument: tuple[str, Any], made: Imported) -> None:
    """Add a note for an argument or environment variable of NVIDIA's plugin, as only its config is imported."""
    flag, value = argument
    if value not in (False, "false", "none", "envvar", "uuid"):
        shown = "" if value is None else f" {value}"
        made.notes.append(
            f"NVIDIA: --{flag}{shown}, which its plugin prefers to the config; set it in the entry's `nvidia`"
        )


def _nvidia_values(values: Mapping[str, Any], made: Imported) -> None:
    """Add a note for each of NVIDIA_VALUES that is set, because only the config in NVIDIA's chart is imported."""
    for key in sorted(NVIDIA_VALUES & values.keys()):
        if values[key]:
            made.notes.append(f"NVIDIA: {key} {values[key]} as a value of the chart; the config's flags are read")
    gfd = values.get("gfd")
    if isinstance(gfd, dict) and gfd.get("enabled"):
        made.notes.append("NVIDIA: gfd; the labels of GPU feature discovery are not made")


def _note_number(path: str, note: Callable[[str], None]) -> None:
    """Add a note if a path without wildcards ends with a number that can change, such as /dev/ttyUSB0."""
    if (numbered := re.fullmatch(r"/dev/([A-Za-z]+)[0-9]+", path)) and (link := NUMBERED.get(numbered[1])):
        note(f"{path} as one certain device: its number can change when it is plugged in again; name its link {link}")


def _noting(name: str, made: Imported) -> Callable[[str], None]:
    return lambda what: made.notes.append(f"{name}: {what}")
