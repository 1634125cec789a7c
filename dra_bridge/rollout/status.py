"""Reads the data of `dra-bridge status`: the API server's objects, and the answers of agents."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dra_bridge.kube import Cluster, ForbiddenError, UnreadableError
from dra_bridge.rollout import fleet
from dra_bridge.rollout.agents import ask_agents
from dra_bridge.rollout.display import FleetStatus
from dra_bridge.rollout.fleet import NodeView
from dra_bridge.rollout.restarts import ended_by_restart
from dra_bridge.rollout.rollout import read_nodes
from dra_bridge.rollout.waiting import hints, other_classes


async def read_status(
    cluster: Cluster,
    driver: str,
    names: Sequence[str],
    namespace: str,
    listed: Callable[[Sequence[NodeView]], None] = lambda nodes: None,
) -> FleetStatus:
    """Read the status of these nodes, or of all. namespace: of the agents, "" for that of the bindings of `manifests`.

    listed: called with the agents' reports, before claims are read and the agents are asked.
    Raises RolloutError if the driver or a node does not exist, ClusterError if the API server does not answer.
    """
    nodes = await read_nodes(cluster, driver, names, namespace, listed=listed)
    # For nodes without a Lease and slices, only their agent knows the devices.
    asked = set(names) | {view.node for view in nodes if view.devices}
    answers = await ask_agents(cluster, asked, namespace, others=not names)
    nodes = [fleet.with_answers(view, answers) for view in nodes]
    problems = fleet.problems(answers)
    try:
        problems += await ended_by_restart(cluster, nodes, problems)
        waiting = await hints(cluster, nodes)
    except (ForbiddenError, UnreadableError) as error:
        waiting = [f"pods that wait for devices are not known: {error}"]
    unknown = [*fleet.unknown(nodes, answers), *await other_classes(cluster, nodes)]
    return FleetStatus(nodes, problems, waiting, unknown)
