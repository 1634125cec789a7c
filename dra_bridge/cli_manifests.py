"""The commands `manifests` and `convert`, which do not use the API server: they read files and print manifests."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from deviceplugin.cli import CommandError, CommandLine, standard_input
from deviceplugin.device import counted, printable
from deviceplugin.naming import NAME, SUBDOMAIN, NamingError, check_resource, parse_quantity
from deviceplugin.version import VERSION

if TYPE_CHECKING:
    from deviceplugin.config import Config
    from deviceplugin.source import DeviceSource
    from dra_bridge.convert.convert import ManifestText
    from dra_bridge.convert.pods import CustomPath

PLUGIN_NAME: Final = "deviceplugin"
"""The default namespace and name of an agent that serves only `limits`."""
_CLASS_NAME: Final = rf"(?!.{{254}}){SUBDOMAIN}"
"""Matches the name of a DeviceClass or RuntimeClass."""
_LABEL: Final = rf"(?:(?=[^/=]{{1,253}}/){SUBDOMAIN}/)?(?=[^/=]{{1,63}}=){NAME}=(?:(?!.{{64}}){NAME})?"
"""Matches a label of a node and its value, KEY=VALUE."""
_SUFFIXES: Final = {".json", ".yaml", ".yml"}
_CONVERT: Final = """
Replace the limits of pods by claims, in manifests, and print them; what is to be said about them goes to the standard
error. Nothing else of the text changes. The exit status is 1 if something was refused: it is printed as it was.
"""


def add_manifests(line: CommandLine) -> None:
    """Add the command `manifests`."""
    about = "Print what to apply to a cluster to have the agent on its nodes."
    examples = (
        "manifests --config devices.yaml --image registry.example/deviceplugin:1 | kubectl apply -f -",
        "manifests --config devices.yaml --plugin-only > limits-only.yaml",
        "manifests --source agent.py --command 'python /app/agent.py' --image registry.example/agent:1",
    )
    manifests = line.add("manifests", _manifests, about, examples)
    what = manifests.add_mutually_exclusive_group(required=True)
    what.add_argument("--config", type=Path, metavar="FILE", help="the config file (YAML)")
    about = "an own agent's Python file: it is run up to its `dra_bridge.run(...)`, for resources and drivers"
    what.add_argument("--source", type=Path, metavar="FILE", help=about)
    _add_deployment(manifests)


def add_convert(line: CommandLine) -> None:
    """Add the command `convert`."""
    command = line.add("convert", _convert, "Print manifests with claims in place of limits, or the other way round.")
    command.description = _CONVERT
    add_files(command, "manifests (default: -)")
    about = "the namespace of objects that name none; it is written into their templates"
    command.add_argument("--namespace", "-n", type=_name, metavar="NAME", help=about)
    about = "the DeviceClass for an extended resource, beside those of DeviceClasses in the manifests; may be repeated"
    command.add_argument("--class", dest="classes", action="append", default=[], metavar="NAME=CLASS", help=about)
    about = "where a custom resource has pod templates, such as RayCluster=spec.workerGroupSpecs[*].template"
    command.add_argument(
        "--pod-template-path", type=_custom, action="append", default=[], metavar="KIND=PATH", help=about
    )
    about = "the version of resource.k8s.io for the templates (default: %(default)s)"
    command.add_argument("--resource-api", choices=("v1", "v1beta2", "v1beta1"), default="v1", help=about)
    either = command.add_mutually_exclusive_group()
    about = "print what --patch names instead: a Kustomize component that converts, or the templates that it needs"
    either.add_argument("--patch", choices=("kustomize", "templates"), help=about)
    either.add_argument("--reverse", action="store_true", help="print the manifests as they were before")


def add_files(command: argparse.ArgumentParser, about: str) -> None:
    """Add the option --filename for files, directories and standard input. about: the end of the option's help text."""
    command.add_argument(
        "-f",
        "--filename",
        dest="files",
        action="append",
        default=[],
        metavar="FILE",
        help=f"a file, a directory with files of YAML and JSON below it, or - for standard input: {about}",
    )


def _custom(text: str) -> CustomPath:
    from dra_bridge.convert.pods import CustomPath

    try:
        return CustomPath.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _classes(given: list[str]) -> dict[str, str]:
    classes: dict[str, str] = {}
    for text in given:
        name, _, class_name = text.partition("=")
        try:
            check_resource(name)
        except NamingError as error:
            raise CommandError(f"dra-bridge convert: --class {text}: {error}") from error
        if class_name and not re.fullmatch(_CLASS_NAME, class_name):
            raise CommandError(f"dra-bridge convert: --class {text}: {class_name!r} is not the name of a DeviceClass")
        if not class_name or classes.setdefault(name, class_name) != class_name:
            raise CommandError(f"dra-bridge convert: --class {text}: write NAME=CLASS, once for each resource")
    return classes


def _paths(files: list[str]) -> Iterator[Path]:
    for name in files:
        path = Path(name)
        if name == "-" or not path.is_dir():
            yield path
            continue
        below = path.rglob("*")
        yield from sorted(one for one in below if one.suffix in _SUFFIXES and one.is_file())


def read_files(files: list[str]) -> Iterator[tuple[str, bytes]]:
    """Yield the name and content of each file, of all files in directories, and of the standard input (-).

    Raises CommandError if a file cannot be read.
    """
    try:
        paths = list(_paths(files))
    except OSError as error:
        raise CommandError(f"{', '.join(files)} cannot be searched: {error}") from error
    if not paths:
        raise CommandError(f"there are no files of YAML or JSON in {', '.join(files)}")
    for path in paths:
        try:
            data = standard_input().read() if str(path) == "-" else path.read_bytes()
        except OSError as error:
            raise CommandError(f"{path} cannot be read: {error.strerror or error}") from error
        yield "<stdin>" if str(path) == "-" else str(path), data


def _streams(files: list[str]) -> list[ManifestText]:
    from dra_bridge.convert.convert import ManifestText

    streams = []
    for name, data in read_files(files):
        try:
            streams.append(ManifestText(name, data.decode()))
        except UnicodeDecodeError as error:
            line = data.count(b"\n", 0, error.start) + 1
            raise CommandError(f"{name}:{line}: is not UTF-8 text; save it as UTF-8") from error
    return streams


def _convert(options: argparse.Namespace) -> int:
    from dra_bridge.convert import kustomize
    from dra_bridge.convert.convert import Conversion, convert, joined, lost, reverse, title
    from dra_bridge.convert.remarks import Level

    classes = _classes(options.classes)
    streams = _streams(options.files or ["-"])
    if options.reverse:
        _write(joined(reverse(streams)))
        warnings = list(lost(streams))
        for warning in warnings:
            print(printable(warning), file=sys.stderr)
        return int(bool(warnings))
    how = Conversion(classes, options.namespace or "", options.resource_api, options.pod_template_path)
    converted = convert(streams, how)
    if options.patch == "kustomize" and (nameless := [pod.body for pod in converted.pods if not _has_name(pod.body)]):
        names = ", ".join(dict.fromkeys(map(title, nameless)))
        raise CommandError(f"dra-bridge convert: no patch can name an object without metadata.name: {names}")
    if options.patch:
        _write(kustomize.component(converted, how) if options.patch == "kustomize" else kustomize.templates(converted))
    else:
        _write(joined(converted.texts))
    for remark in converted.remarks:
        print(printable(str(remark)), file=sys.stderr)
    changed = counted(sum(len(pod.change.containers) for pod in converted.pods), "container")
    print(f"converted: {changed}; {counted(len(converted.templates), 'ResourceClaimTemplate')}", file=sys.stderr)
    return int(any(remark.kind.level is Level.REFUSED for remark in converted.remarks))


def _has_name(body: Mapping[str, Any]) -> bool:
    return bool((body.get("metadata") or {}).get("name"))


def _write(text: str) -> None:
    """Write a text to standard output as bytes, because on some systems Python's text layer changes the line ends."""
    sys.stdout.flush()
    sys.stdout.buffer.write(text.encode())


def matching(pattern: str, problem: str, convert: Callable[[str], Any] = str) -> Callable[[str], Any]:
    """Return a parser for an argument that must match a pattern. problem: the end of the error message."""

    def read(text: str) -> Any:
        if not re.fullmatch(pattern, text, re.DOTALL):
            raise argparse.ArgumentTypeError(f"{text!r} {problem}")
        return convert(text)

    return read


_name: Final = matching(
    r"(?!.{64})[a-z0-9]([-a-z0-9]*[a-z0-9])?",
    "is not a name; write at most 63 lower-case letters, digits and dashes, no dash at either end",
)


def _add_deployment(parser: argparse.ArgumentParser) -> None:
    """Add the options of `manifests.Deployment`.

    If an option is not given, the default value of the field in `Deployment` applies.
    """

    def add(option: str, field: str, about: str, default: str = "", **more: Any) -> None:
        about += f" (default: {default})" if default else ""
        parser.add_argument(option, dest=field, default=argparse.SUPPRESS, help=about, **more)

    directory = matching("/+[^/].*", "is not an absolute path below /; write the nodes' own, such as /var/lib/x")
    file = matching("/+[^/]+/+.*[^/]", "is not the path of a socket in a directory below /")
    class_name = matching(_CLASS_NAME, "is not the name of a RuntimeClass")
    image = matching(r"\S+", "is not an image")
    wrong = "is not one label of nodes, KEY=VALUE; repeat the option for each label"
    label = matching(_LABEL, wrong, lambda text: tuple(text.split("=", 1)))
    apis, policies = ("v1", "v1beta2", "v1beta1"), ("Always", "IfNotPresent", "Never")
    no_names = "leave extendedResourceName out, as v1beta1 and v1beta2 do: servers before 1.34 refuse it"
    status = "run the agent with --claim-status, and give it the right to patch the status of claims"
    runtime = "RuntimeClass of the agent's pod: `nvidia` for GPUs where it is not the nodes' default"
    selector = "a label that nodes must have; may be repeated"
    add("--image", "image", "the agent's image", f"deviceplugin:{VERSION}", type=image, metavar="IMAGE")
    command = "what runs an own agent in the image, such as 'python /app/agent.py'; with --source"
    add("--command", "own_command", command, type=lambda text: tuple(shlex.split(text)))
    add("--pull-policy", "pull_policy", "imagePullPolicy", "IfNotPresent", choices=policies)
    named = f"dra-bridge, {PLUGIN_NAME} for limits only"
    add("--namespace", "namespace", "the namespace of the agent", named, type=_name, metavar="NAME")
    add("--name", "name", "the name of the DaemonSet and of its other objects", named, type=_name, metavar="NAME")
    add("--resource-api", "version", "the version of resource.k8s.io for the DeviceClasses", "v1", choices=apis)
    add("--no-extended-resource", "extended_resource", no_names, action="store_false")
    root, plugins = "/var/lib/kubelet", "/var/lib/kubelet/device-plugins, whatever its --root-dir is"
    add("--kubelet-root", "kubelet_root", "the kubelet's --root-dir", root, type=directory, metavar="DIR")
    about = "where the kubelet has kubelet.sock"
    add("--device-plugin-dir", "device_plugin_directory", about, plugins, type=directory, metavar="DIR")
    about, socket = "the kubelet's PodResources service", "pod-resources/kubelet.sock in its --root-dir"
    add("--pod-resources-socket", "pod_resources_socket", about, socket, type=file, metavar="PATH")
    cgroups, pod_logs = "/sys/fs/cgroup", "/var/log/pods"
    add("--cgroup-root", "cgroup_root", "the nodes' cgroup file system", cgroups, type=directory, metavar="DIR")
    add("--pod-log-dir", "pod_log_directory", "the kubelet's podLogsDir", pod_logs, type=directory, metavar="DIR")
    add("--cdi-dir", "cdi_directory", "where runtimes find CDI specs", "/var/run/cdi", type=directory, metavar="DIR")
    add("--claim-status", "claim_status", status, action="store_true")
    own_level = "give the agents a priority level of their own at the API server (FlowSchema); for large clusters"
    add("--flow-schema", "flow_schema", own_level, action="store_true")
    add("--metrics-port", "metrics_port", "port of metrics and probes, 0 for none", "9410", type=_port, metavar="PORT")
    add("--runtime-class", "runtime_class", runtime, "none", type=class_name, metavar="NAME")
    judged = "auto: if the config opens device nodes; of an own agent auto means never"
    add("--privileged", "privileged", judged, "auto", choices=("auto", "always", "never"))
    below_sys = matching("/sys/+[^/].*", "is not a directory below /sys; write /sys/devices, for example")
    written = "a directory below /sys that hooks write to; may be repeated (without DIR: /sys/devices)"
    often: dict[str, Any] = {"nargs": "?", "const": "/sys/devices", "action": "append"}
    add("--writable-sys", "writable_sys", written, type=below_sys, metavar="DIR", **often)
    about = "write the agent's units of systemd to DIR, and print what to apply where agents are no pods"
    parser.add_argument("--systemd", type=Path, metavar="DIR", help=about)
    alone = "serve pods by limits only, with `deviceplugin run`; the default if the file names no driver"
    add("--plugin-only", "plugin_only", alone, action="store_true")
    add("--memory", "memory", "the container's limit", "128Mi", type=_memory, metavar="QUANTITY")
    number = matching("0*[1-9][0-9]*", "is not a number of devices, at least 1", int)
    about = "print a ResourceQuota: devices of each resource, by limits and claims together, for each --tenant"
    add("--quota", "quota", about, type=number, metavar="N")
    about = "a namespace with that quota; may be repeated"
    add("--tenant", "tenants", about, type=_name, action="append", metavar="NAME")
    minor = matching(r"1\.[0-9]+", "is not like 1.36", lambda text: int(text[2:]))
    add("--kubernetes", "kubernetes", "the API server's version; a quota of 1.35 has two keys", "1.36", type=minor)
    about = "print a ConfigMap with the deviceClassMappings for Kueue's configuration"
    add("--kueue", "kueue", about, action="store_true")
    about = "print a policy that refuses wrong parameters in claims and classes; `values`: only those of the chart"
    checks: dict[str, Any] = {"nargs": "?", "const": "policy", "choices": ("policy", "values")}
    parser.add_argument("--check-parameters", help=about, **checks)
    add("--node-selector", "node_selector", selector, type=label, action="append", metavar="KEY=VALUE")


def _memory(text: str) -> str:
    with contextlib.suppress(NamingError):
        if parse_quantity(text) >= 32 << 20:
            return text
    raise argparse.ArgumentTypeError(f"{text!r} is not a memory limit of at least 32Mi; write 128Mi, for example")


def _port(text: str) -> int:
    if not text.isascii() or not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port")
    return int(text)


def _manifests(options: argparse.Namespace) -> int:
    from deviceplugin import config
    from dra_bridge.manifests import Deployment, manifests, privileges, to_yaml, wide_mounts
    from dra_bridge.units import rights, written

    fields = {field.name for field in dataclasses.fields(Deployment)}
    given = {key: value for key, value in vars(options).items() if key in fields}
    given["writable_sys"] = tuple(dict.fromkeys(given.get("writable_sys", ())))
    if "node_selector" in given:
        given["node_selector"] = dict(labels := given["node_selector"])
        if len(given["node_selector"]) < len(set(labels)):
            raise CommandError(
                "dra-bridge manifests: --node-selector gives two values for one label, but a node has only one"
            )
    given["tenants"] = tuple(dict.fromkeys(given.get("tenants", ())))
    if ("quota" in given) != bool(given["tenants"]):
        raise CommandError("dra-bridge manifests: --quota and --tenant need each other")
    if bool(options.source) != bool(given.get("own_command")):
        raise CommandError("dra-bridge manifests: --source and --command need each other")
    sources: Sequence[DeviceSource] = ()
    try:
        if options.source:
            text, (loaded, sources) = "", _served_by(options.source)
        else:
            text = options.config.read_text(encoding="utf-8")
            loaded = config.parse(text, str(options.config))
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise CommandError(f"{options.config or options.source} cannot be read: {reason}") from error
    if given.get("plugin_only") or not any(resource.driver for resource in loaded.resources):
        given = {"name": PLUGIN_NAME, "namespace": PLUGIN_NAME, **given}
    if options.check_parameters:
        given["parameters"] = _parameters(loaded, sources)
    deployment = Deployment(**given)
    if options.check_parameters == "values":
        sys.stdout.write(to_yaml([{"checkParameters": deployment.parameters}]))
        return 0
    try:
        units = written(options.systemd, loaded, deployment) if options.systemd else []
        printed = to_yaml(rights(loaded, deployment) if units else manifests(loaded, text, deployment))
    except ValueError as error:  # A ValueError shows, for example, that a socket's path is too long.
        raise CommandError(error) from error
    sys.stdout.write(printed)
    if units:
        return 0  # The messages below concern only agents in pods.
    for reason in privileges(loaded, deployment) if deployment.privileged == "auto" else ():
        print(f"the agent is privileged: {reason}; --privileged never leaves it out", file=sys.stderr)
    for directory in wide_mounts(loaded):
        why = "through what lies there it could take over the node; name paths in a directory of their own"
        print(f"the agent sees all of {directory}: {why}", file=sys.stderr)
    if deployment.writable_sys:
        what = "of its node: it can change how every device there works"
        print(f"the agent may write to {', '.join(deployment.writable_sys)} {what}", file=sys.stderr)
    if options.source and deployment.privileged == "auto":
        print("the agent is not privileged; --privileged always if it opens device nodes", file=sys.stderr)
    metrics = loaded.metrics
    files = list(dict.fromkeys(filter(None, (metrics.certificate, metrics.key, metrics.token))))
    if deployment.metrics_port and files:
        print(f"mount into the DaemonSet's container, from a Secret say: {', '.join(files)}", file=sys.stderr)
    return 0


def _parameters(loaded: Config, sources: Sequence[DeviceSource]) -> dict[str, str]:
    """Return, for each driver without child sources, the CEL expression that checks the parameters of claims.

    A child source (`DeviceSource.child_sources`) may be added later and accept other parameters, so a driver with child
    sources has no expression.
    """
    from deviceplugin.source import DeviceSource
    from dra_bridge.parameters import expression

    parents = {one.driver for one in sources if type(one).child_sources is not DeviceSource.child_sources}
    drivers = dict.fromkeys(one.driver for one in loaded.resources if one.driver and one.driver not in parents)
    found = {driver: expression(one.config_type for one in sources if one.driver == driver) for driver in drivers}
    return {driver: text for driver, text in found.items() if text}


class _Given(BaseException):
    """Raised by the function that replaces `dra_bridge.run` in `_served_by`, so that no agent starts.

    The exception's arguments are the device sources, and the settings of metrics.
    """


def _served_by(file: Path) -> tuple[Config, Sequence[DeviceSource]]:
    """Return the config and the device sources of a Python file that calls `dra_bridge.run`.

    The file is executed until it calls `run`. During the execution, a function that starts no agent replaces `run`.
    """
    import runpy

    import deviceplugin
    import dra_bridge
    from deviceplugin.config import Config, MetricsConfig, ResourceConfig
    from deviceplugin.naming import check_resource
    from deviceplugin.node.options import metrics_config
    from deviceplugin.source_check import check_sources

    def run(*sources: DeviceSource, **more: Any) -> None:
        check_sources(sources)
        for source in sources:
            if not source.driver:
                raise CommandError(f"{file}: {source!r} names no driver; set `driver`")
            check_resource(source.resource)
        files = {name: more.get(name) for name in ("certificate", "key", "client_ca", "token")}
        raise _Given(sources, metrics_config(**files) or MetricsConfig())

    def run_alone(*_: object, **__: object) -> None:
        raise CommandError(f"{file} calls deviceplugin.run, which serves no claims: see examples/daemonset.yaml")

    vars(dra_bridge)["run"], vars(deviceplugin)["run"] = run, run_alone
    try:
        runpy.run_path(str(file), run_name="__main__")
    except _Given as given:
        sources, metrics = given.args
        resources = tuple(ResourceConfig(name=source.resource, driver=source.driver, devices=()) for source in sources)
        return Config(resources=resources, metrics=metrics), sources
    except (CommandError, OSError):
        raise
    except (Exception, SystemExit) as error:
        raise CommandError(f"{file} cannot be run: {type(error).__name__}: {error}") from error
    finally:
        del vars(dra_bridge)["run"], vars(deviceplugin)["run"]
    raise CommandError(f"{file} does not call dra_bridge.run")
