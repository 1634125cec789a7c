"""The command `plan`, which reads a cluster or dumps of a cluster, and changes nothing."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

from deviceplugin.cli import CommandError, CommandLine
from deviceplugin.node import logs
from deviceplugin.tables import terminal_width
from dra_bridge.cli_manifests import add_files, read_files
from dra_bridge.node.options import add_kubeconfig

if TYPE_CHECKING:
    from dra_bridge.plan.objects import ClusterObjects
    from dra_bridge.plan.view import Target

_PLAN: Final = """
Say what a migration from limits to claims runs into in this cluster, or in dumps of it, before anything moves; nothing
is changed. Exit status: 0 without findings but notes, 3 with warnings, 4 with blockers, 5 if something was not read,
2 for wrong arguments.
"""


def add_plan(line: CommandLine) -> None:
    """Add the command `plan`."""
    command = line.add("plan", _plan, "Say what a migration to claims runs into; change nothing.")
    command.description = _PLAN
    what = command.add_mutually_exclusive_group()
    what.add_argument("--config", type=Path, metavar="FILE", help="the config file (YAML) of the agents")
    about = "the driver's name; DeviceClasses say which resources it has (default: all extended resources)"
    what.add_argument("--driver", default="", metavar="NAME", help=about)
    about = "the share that claims are to get: none, all, a number of devices, a percentage"
    command.add_argument("--share", default="", metavar="SHARE", help=about)
    command.add_argument("--selector", "-l", default="", metavar="LABELS", help="which nodes, such as pool=gpu")
    where = command.add_mutually_exclusive_group()
    where.add_argument("--namespace", "-n", default="", metavar="NAME", help="the pods and quotas of this namespace")
    where.add_argument("--all-namespaces", "-A", action="store_true", help="those of all namespaces (the default)")
    add_files(command, "dumps in place of the cluster, such as kubectl get nodes,pods,... -A -o json")
    about = "the cluster has no objects of this kind (else a kind that no dump has counts as not read); may be repeated"
    command.add_argument("--without", action="append", default=[], metavar="KIND", help=about)
    command.add_argument(
        "-o", "--output", choices=("table", "json", "markdown"), default="table", help="output (default: %(default)s)"
    )
    about = "leave out findings of this code, such as DB801; may be repeated"
    command.add_argument("--ignore", action="append", default=[], metavar="CODE", help=about)
    add_kubeconfig(command)


def _plan(options: argparse.Namespace) -> int:
    if options.output == "table":
        print("reading", ", ".join(options.files) or "the cluster", "...", file=sys.stderr, flush=True)
    from dra_bridge.plan import display
    from dra_bridge.plan.checks import migration_plan
    from dra_bridge.plan.findings import FindingKind
    from dra_bridge.plan.objects import CUT, part
    from dra_bridge.plan.view import ClusterView

    ignored = frozenset(options.ignore)
    if unknown := ignored - {kind.code for kind in FindingKind}:
        raise CommandError(f"dra-bridge plan: --ignore {min(unknown)}: no finding has this code")
    if wrong := set(options.without) - {*CUT, "kubelets"}:
        known = ", ".join(["kubelets", *CUT])
        raise CommandError(f"dra-bridge plan: --without {min(wrong)}: no such kind; the kinds are {known}")
    share = _share(options.share)
    if options.files:
        objects, selected = _read_files(options)
    else:
        objects, selected = _read_cluster(options)
    if selected == frozenset() and objects.of("Node"):
        raise CommandError(f"dra-bridge plan: --selector {options.selector}: no node has these labels")
    view = ClusterView(objects, _targets(options, share, objects), options.namespace, selected)
    if view.namespace and not any(part(pod, "metadata", "namespace") == view.namespace for pod in objects.of("Pod")):
        print(f"no pod that was read is in the namespace {view.namespace}", file=sys.stderr)
    plan = migration_plan(view, ignored)
    match options.output:
        case "json":
            print(json.dumps(display.as_json(plan), indent=2))
        case "markdown":
            print(display.markdown(plan))
        case _:
            print(display.table(plan, terminal_width()))
    return plan.status


def _share(text: str) -> str:
    from dra_bridge.handover.share import ShareError, parse_share

    try:
        return str(parse_share(text)) if text else ""
    except ShareError as error:
        raise CommandError(f"dra-bridge plan: --share: {error}") from error


def _targets(options: argparse.Namespace, share: str, objects: ClusterObjects) -> tuple[Target, ...]:
    """Return the resources to migrate that the options name; an empty result stands for all extended resources."""
    from deviceplugin import config
    from dra_bridge.plan.view import Target, resources_of

    if options.config:
        resources = [one for one in config.load(options.config).resources if one.driver]
        if not resources:
            raise CommandError(f"{options.config}: no resource names a driver; set `driver` for each that is to move")
        return tuple(Target(one.name, one.driver or "", share or str(one.dra.share)) for one in resources)
    if options.driver:
        resources_named = resources_of(objects, options.driver)
        if not resources_named:
            raise CommandError(f"no DeviceClass of driver {options.driver} names a resource; give --config FILE")
        return tuple(Target(name, options.driver, share) for name in resources_named)
    return ()


def _read_files(options: argparse.Namespace) -> tuple[ClusterObjects, frozenset[str] | None]:
    from dra_bridge.plan.dumps import DumpError, by_kind, objects_of
    from dra_bridge.plan.objects import CUT, NAMED, ClusterObjects, Unread, name_of
    from dra_bridge.plan.view import matching

    found = []
    unread = []
    for name, data in read_files(options.files):
        try:
            found += list(objects_of(data))
        except DumpError as error:
            unread.append(Unread(name, str(error), pods=True))
    kinds = by_kind(found)
    lacking = sorted(CUT.keys() - kinds.keys() - {"ConfigMap"} - set(options.without))
    if "ConfigMap" not in options.without:
        have = {name_of(one) for one in kinds.get("ConfigMap", ())}
        lacking += [f"ConfigMap {space}/{name}" for space, name in NAMED if name not in have]
    reason = "no dump has one; if the cluster has none, say --without"
    unread += [Unread(kind, reason, kind == "Pod") for kind in lacking]
    if "kubelets" not in options.without:
        unread.append(
            Unread("kubelets", "no dump has their configuration (Topology Manager, gates); --without kubelets")
        )
    objects = ClusterObjects(kinds, time.time(), tuple(unread))
    try:
        return objects, matching(objects, options.selector)
    except ValueError as error:
        raise CommandError(f"dra-bridge plan: --selector: {error}") from error


def _read_cluster(options: argparse.Namespace) -> tuple[ClusterObjects, frozenset[str] | None]:
    from dra_bridge.kube import AccessError, Cluster, ClusterError
    from dra_bridge.plan.reading import read_cluster

    async def ask() -> tuple[ClusterObjects, frozenset[str] | None]:
        async with Cluster.from_environment(options.kubeconfig) as cluster:
            try:
                return await read_cluster(cluster, options.selector)
            except ClusterError as error:
                status = 2 if isinstance(error, AccessError) else 1
                raise CommandError(f"{cluster.where}: {error}" if cluster.where else error, status) from error

    logs.setup("text", "error")
    return asyncio.run(ask())
