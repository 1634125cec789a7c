"""Reads the data for `dra-bridge status` from the API server's objects and from the agents' responses."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from dra_bridge.kube import Cluster, ForbiddenError, UnreadableError
from dra_bridge.rollout import fleet, waiting
from dra_bridge.rollout.agents import ask_agents
from dra_bridge.rollout.display import FleetStatus
from dra_bridge.rollout.fleet import NodeView
from dra_bridge.rollout.pods import nodes_by_name, pods_by_node
from dra_bridge.rollout.restarts import ended_by_restart, mixed
from dra_bridge.rollout.rollout import read_nodes

_T = TypeVar("_T")


async def read_status(
    cluster: Cluster,
    driver: str,
    names: Sequence[str],
    namespace: str,
    listed: Callable[[Sequence[NodeView]], None] = lambda nodes: None,
) -> FleetStatus:
    """Read the status of these nodes; without names, of all nodes.

    namespace: the agents' namespace; "" for the namespaces that the agents' ClusterRoleBindings name. listed: a
    function that is called with the agents' reports, before claims are read and the agents are asked. Raises
    RolloutError if the driver or a node does not exist, ClusterError if the API server does not respond.
    """
    nodes = await read_nodes(cluster, driver, names, namespace, listed=listed)
    # If a node has neither Lease nor slices, only the node's agent knows its devices.
    asked = set(names) | {view.node for view in nodes if view.devices}
    answers, (waits, unread), contested = await asyncio.gather(
        ask_agents(cluster, asked, namespace, others=not names),
        _read(waiting.waits(cluster, nodes), []),
        waiting.other_classes(cluster, nodes),
    )
    nodes = [fleet.with_answers(view, answers) for view in nodes]
    problems = fleet.problems(answers)
    unknown = [*fleet.unknown(nodes, answers), *(text for _, text in contested.values())]
    detailed = {view.node for view in nodes if waits or mixed(view)}
    resources = {name for view in nodes if view.reported is not None for name in view.reported.resources}
    pods, unread_pods = await _read(pods_by_node(cluster, detailed, resources), None)
    hints = [f"pods that wait for devices are not known: {error}" for error in (unread or unread_pods,) if error]
    if pods is not None:
        problems += ended_by_restart(nodes, pods, problems)
        taken = {resource: device_class for resource, (device_class, _) in contested.items()}
        hints += waiting.hints(nodes, await nodes_by_name(cluster, detailed if waits else ()), pods, waits, taken)
    return FleetStatus(nodes, problems, hints, unknown)


async def _read(reading: Awaitable[_T], default: _T) -> tuple[_T, str]:
    """Return two values: the result of a read and "", or the default and the error's text."""
    try:
        return await reading, ""
    except (ForbiddenError, UnreadableError) as error:
        return default, str(error)
