"""Converts other device plugins' settings to a config file, for `deviceplugin import`. Pure.

The formats, as of 2026: generic-device-plugin's config and flags (config.go, deviceplugin/path.go, usb.go),
smarter-device-manager's conf.yaml, and the config file of NVIDIA's plugin (api/config/v1).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import yaml

GENERIC_DOMAIN: Final = "squat.ai"
SMARTER_DOMAIN: Final = "smarter-devices"
NVIDIA_INJECTIONS: Final[Mapping[str, str]] = {"envvar": "env", "cdi-annotations": "cdi", "cdi-cri": "cdi"}
OTHER_IDS: Final = (
    "{} uses other device ids: end its pods before the first start of this agent (docs/existing-plugin.md)"
)


class Imported(NamedTuple):
    """The result of an import. resources: entries of a config file.

    notes: for the user, the settings that cannot be expressed in a config file.
    """

    resources: list[dict[str, Any]]
    notes: list[str]


class UnknownSettingsError(ValueError):
    """Raised if a text does not have the settings of a known plugin."""


def imported(text: str) -> Imported:
    """Convert the settings of another device plugin to those of a config file.

    text: the plugin's own file, a ConfigMap that contains it, or a DaemonSet with generic-device-plugin's flags. Raises
    UnknownSettingsError.
    """
    made = Imported([], [])
    try:
        for document in yaml.safe_load_all(text):
            for settings in _settings(document):
                _take(settings, made)
    except yaml.YAMLError as error:
        raise UnknownSettingsError(f"it is not YAML: {error}") from error
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UnknownSettingsError(f"its settings have another form: {type(error).__name__}: {error}") from error
    if not made.resources:
        known = "generic-device-plugin, smarter-device-manager, NVIDIA's device plugin"
        raise UnknownSettingsError("\n".join(["it has no devices of a plugin that is known: " + known, *made.notes]))
    return Imported(made.resources, list(dict.fromkeys(made.notes)))


def as_file(made: Imported) -> str:
    """Return the text of a config file. Its comments name the settings that were not imported."""
    notes = "".join(f"# not imported: {note}\n" for note in made.notes)
    return notes + yaml.safe_dump({"resources": made.resources}, sort_keys=False)


def _settings(document: Any) -> Iterator[Any]:
    """Yield the settings of a plugin that a YAML document has.

    The settings are the document itself, the values of a ConfigMap, or the flags of a workload's containers.
    """
    kind = document.get("kind") if isinstance(document, dict) else None
    if kind == "List":
        for item in document.get("items") or ():
            yield from _settings(item)
    elif kind == "ConfigMap":
        for value in (document.get("data") or {}).values():
            yield from yaml.safe_load_all(value)
    elif kind in ("DaemonSet", "Deployment", "Pod"):
        pod = document["spec"] if kind == "Pod" else document["spec"]["template"]["spec"]
        for container in pod.get("containers") or ():
            yield _flags([*(container.get("command") or ()), *(container.get("args") or ())])
    else:
        yield document


def _flags(words: Sequence[str]) -> dict[str, Any]:
    """Return generic-device-plugin's settings, as in its config, from its flags."""
    settings: dict[str, Any] = {"devices": []}
    pairs = iter(words)
    for word in pairs:
        name, equals, value = str(word).partition("=")
        if name in ("--device", "--domain"):
            value = value if equals else next(pairs, "")
            if name == "--domain":
                settings["domain"] = value
            else:
                settings["devices"].append(yaml.safe_load(value))
    return settings


def _take(settings: Any, made: Imported) -> None:
    if isinstance(settings, list) and all(isinstance(one, dict) and "devicematch" in one for one in settings):
        _smarter(settings, made)
    elif isinstance(settings, dict) and isinstance(devices := settings.get("devices", settings.get("device")), list):
        for spec in devices:
            _generic(str(settings.get("domain") or GENERIC_DOMAIN), spec, made)
    elif isinstance(settings, dict) and settings.get("version") == "v1":
        _nvidia(settings, made)


def _generic(domain: str, spec: Any, made: Imported) -> None:
    if not isinstance(spec, dict) or "name" not in spec:
        made.notes.append(f"generic-device-plugin: {spec!r} is an older form of --device; write it as YAML first")
        return
    name = f"{domain}/{spec['name']}"
    note = _noting(name, made)
    entries: list[dict[str, Any]] = []
    counts, permissions = set(), set()
    for group in spec.get("groups") or ():
        counts.add(int(group.get("count") or 1))
        paths = group.get("paths") or ()
        for path in paths:
            permissions.add("".join(one for one in "rwm" if one in (path.get("permissions") or "mrw")))
            for key in ("readOnly", "limit"):
                if path.get(key):
                    note(f"{key} of {path['path']}")
            if path.get("type") == "Mount":
                note(f"type Mount of {path['path']}: files and sockets are mounted, directories are left out")
        parts = [{"path": str(path["path"])} | _container(path) for path in paths]
        if len(parts) == 1:
            entries += parts
        elif parts:
            entries.append({"group": [part if "container" in part else part["path"] for part in parts]})
        for usb in group.get("usb") or ():
            entry = {key: str(usb[key]) for key in ("vendor", "product", "serial") if usb.get(key)}
            entries.append({"usb": {key: one.zfill(4) if key != "serial" else one for key, one in entry.items()}})
        if group.get("usb"):
            note("that all USB devices of a group are one device (here each is one)")
    if not entries:
        note("it has no devices")
        return
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
    made.notes.append(OTHER_IDS.format("generic-device-plugin"))


def _container(path: Mapping[str, Any]) -> dict[str, str]:
    inside = path.get("mountPath")
    return {"container": str(inside)} if inside else {}


def _smarter(entries: Sequence[Mapping[str, Any]], made: Imported) -> None:
    for entry in entries:
        match = str(entry["devicematch"])
        glob = _as_glob(match.removeprefix("^").removesuffix("$"))
        name = f"{SMARTER_DOMAIN}/{(glob or '').partition('*')[0].partition('[')[0].replace('/', '_')}"
        if glob is None or name.endswith("/"):
            made.notes.append(f"smarter-device-manager: devicematch {match!r}: write its paths as a glob")
            continue
        note = _noting(name, made)
        resource: dict[str, Any] = {"name": name, "devices": [{"path": f"/dev/{glob}"}]}
        if (count := int(entry.get("nummaxdevices") or 1)) > 1:
            resource["sharing"] = {"replicas": count}
        if re.search(r"[*\[]", glob):
            note("a resource for each device, such as ...0; pods ask for any device of this one")
        made.resources.append(resource)
        made.notes.append("smarter-device-manager: a directory such as /dev/snd: name its nodes, by `path` or `group`")
    made.notes.append(OTHER_IDS.format("smarter-device-manager"))


def _as_glob(pattern: str) -> str | None:
    """Convert a regular expression to a glob; return None if no glob matches the same texts."""
    parts = []
    for part in re.findall(r"(?:\[[^\]]+\]|\\d|\.)[*+]|\[[^\]]+\]|\\d|\\.|.", pattern):
        if part[-1] in "*+" and len(part) > 1:
            parts.append("*")
        elif part == r"\d":
            parts.append("[0-9]")
        elif part.startswith("["):
            parts.append(part)
        elif re.fullmatch(r"\\?[-\w/:]|\\\.", part):
            parts.append(part[-1])
        else:
            return None
    return "".join(parts)


def _nvidia(settings: Mapping[str, Any], made: Imported) -> None:
    flags = settings.get("flags") or {}
    plugin = flags.get("plugin") or {}
    nvidia: dict[str, Any] = {}
    if (mig := flags.get("migStrategy", "none")) != "none":
        nvidia["mig"] = mig
    strategies = plugin.get("deviceListStrategy") or "envvar"
    for strategy in [strategies] if isinstance(strategies, str) else strategies:
        if strategy not in NVIDIA_INJECTIONS:
            made.notes.append(f"NVIDIA: deviceListStrategy {strategy}")
        elif "injection" not in nvidia and NVIDIA_INJECTIONS[strategy] != "env":
            nvidia["injection"] = NVIDIA_INJECTIONS[strategy]
    sharing = settings.get("sharing") or {}
    if sharing.get("mps"):
        made.notes.append("NVIDIA: MPS; keep NVIDIA's plugin for it, or adopt it (docs/existing-plugin.md)")
    slicing = sharing.get("timeSlicing") or {}
    shared = slicing.get("resources") or ()
    if slicing.get("failRequestsGreaterThanOne"):
        made.notes.append("NVIDIA: failRequestsGreaterThanOne; a pod that wants several replicas gets several GPUs")
    for one in shared:
        name = str(one.get("rename") or one["name"])
        if slicing.get("renameByDefault") and not one.get("rename"):
            name += ".shared"
        note = _noting(name, made)
        if one.get("devices", "all") != "all":
            note(f"devices {one['devices']}: all GPUs get the replicas; `sharing.replicas` may name them by UUID")
        profile = re.fullmatch(r"nvidia\.com/mig-(.+)", str(one["name"]))
        of = {**nvidia, "profile": profile[1]} if profile else nvidia
        if profile:
            of = {key: value for key, value in of.items() if key != "mig"}
        sharing_here = {"replicas": int(one.get("replicas") or 1)}
        made.resources.append({"name": name, "devices": [{"nvidia": of}], "sharing": sharing_here})
    if not any(one["name"] == "nvidia.com/gpu" for one in shared):
        made.resources.insert(0, {"name": "nvidia.com/gpu", "devices": [{"nvidia": nvidia}]})
    for key in ("resources", "imex"):
        if settings.get(key):
            made.notes.append(f"NVIDIA: {key}")


def _noting(name: str, made: Imported) -> Callable[[str], None]:
    return lambda what: made.notes.append(f"{name}: {what}")
