"""Finds out which optional features of the API server a slice uses, and which of them the server has."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from dra_bridge.kube import RESOURCE_SLICES, Cluster, InvalidError, Object
from dra_bridge.slices.desired import MAX_NAME, Desired, Feature, Pool, slice_name
from dra_bridge.slices.plan import in_version, neutral

logger: Final = logging.getLogger(__name__)

WITHOUT: Final[Mapping[Feature, str]] = {
    "taints": "the API server drops device taints (feature gate DRADeviceTaints is off): "
    "unhealthy devices are left out of the slices instead",
    "sharing": "the API server drops consumable capacity (feature gate DRAConsumableCapacity is off): "
    "each shared device goes to one claim at a time",
    "counters": "the API server does not take shared counters (feature gate DRAPartitionableDevices is off, "
    "or a server before 1.35): devices that consume counters are not offered",
    "lists": "the API server takes no lists as attributes (feature gate DRAListTypeAttributes is off): "
    "devices with several NUMA nodes have no attribute resource.kubernetes.io/numaNode",
}
"""For each feature, a sentence that states how the slices differ if the API server lacks the feature."""
_FIELDS: Final[Mapping[Feature, str]] = {
    "taints": "taints",
    "sharing": "allowMultipleAllocations",
    "counters": "consumesCounters",
}
"""For each feature, the field of a device that a server without the feature drops. "lists" has no field: a list is the
value of an attribute."""
_REFUSED: Final = frozenset[Feature]({"counters", "lists"})
"""Features without which an API server may refuse the whole slice instead of dropping a field."""


@dataclass(slots=True)
class ServerFeatures:
    """The optional features that the API server has, or lacks, as far as the agent knows.

    probe_again: minimum seconds until a missing feature is tested again, because the API server may have been upgraded.
    """

    cluster: Cluster
    probe_again: float
    _probed_at: float = 0.0
    _known: dict[Feature, bool] = field(default_factory=dict)

    @property
    def missing(self) -> frozenset[Feature]:
        """The features that the server is known to lack; features that were not tested are not included."""
        return frozenset(feature for feature, there in self._known.items() if not there)

    def learn(self, body: Object) -> None:
        """Record that the server has the features whose fields are in a slice that the server has stored."""
        self._known.update(dict.fromkeys(_used_by(body["spec"].get("devices") or ()), True))

    def lacks(self, features: Iterable[Feature]) -> None:
        """Record that the server lacks these features, because it has dropped or refused their fields."""
        self._known.update(dict.fromkeys(features, False))

    def refused(self) -> None:
        """Forget that the server has `counters` and `lists`, because a server without them may have refused a slice."""
        for feature in _REFUSED:
            if self._known.get(feature):
                del self._known[feature]

    def forget_missing(self) -> None:
        """Forget which features are missing, if the last test was at least `probe_again` seconds ago."""
        if asyncio.get_running_loop().time() - self._probed_at >= self.probe_again:
            for feature in self.missing:
                del self._known[feature]

    async def probe(self, pool: Pool, wanted: Desired, version: str) -> bool:
        """Test, by a dry-run create, the unknown features of the wanted slices. Return whether the server lacks one.

        The test precedes the first real write. So the agent never publishes an unhealthy device without its taint, or
        partitions that exclude each other without their counters.
        """
        unknown = set[Feature]().union(*map(features_of, wanted.slices)) - self._known.keys()
        asked = frozenset(unknown)
        if unknown:
            self._probed_at = asyncio.get_running_loop().time()
            for feature in sorted(unknown & _REFUSED):
                await self._probe(pool, {feature}, version)
            await self._probe(pool, unknown - _REFUSED, version)
        return not asked.isdisjoint(self.missing)

    async def _probe(self, pool: Pool, unknown: Collection[Feature], version: str) -> None:
        if not unknown:
            return
        body = in_version(_probe_body(pool, unknown), version)
        try:
            kept = features_of(neutral(await self.cluster.create(RESOURCE_SLICES, body, dry_run=True)))
        except InvalidError as error:  # API servers before 1.35 refuse the probe's slice.
            logger.debug("the API server refused the dry run of a slice: %s", error)
            # A refused dry run shows nothing about features whose fields the server would drop. So these features count
            # as present until the response to a real write lacks their fields.
            kept = set(unknown) - _REFUSED
        self._known.update({feature: feature in kept for feature in unknown})


def features_of(body: Object) -> set[Feature]:
    """Return the features that a slice uses."""
    shared: set[Feature] = {"counters"} if body["spec"].get("sharedCounters") else set()
    return shared | _used_by(body["spec"].get("devices") or ())


def _used_by(devices: Iterable[Object]) -> set[Feature]:
    used: set[Feature] = set()
    for device in devices:
        used.update(feature for feature, name in _FIELDS.items() if device.get(name))
        if any("ints" in attribute for attribute in (device.get("attributes") or {}).values()):
            used.add("lists")
    return used


def _probe_body(pool: Pool, features: Collection[Feature]) -> Object:
    values: Mapping[Feature, object] = {
        "taints": [{"key": f"{pool.driver}/unhealthy", "effect": "NoSchedule"}],
        "sharing": True,
        "counters": [{"counterSet": "probe", "counters": {"probe": {"value": "1"}}}],
    }
    return {
        "metadata": {"generateName": slice_name(pool.node, pool.driver, 0)[: MAX_NAME - 12] + "-probe-"},
        "spec": {
            "driver": pool.driver,
            "nodeName": pool.node,
            "pool": {"name": pool.node, "generation": 0, "resourceSliceCount": 1},
            "devices": [
                {
                    "name": "probe",
                    **{_FIELDS[feature]: values[feature] for feature in features if feature in values},
                    **({"attributes": {"probe": {"ints": [0, 1]}}} if "lists" in features else {}),
                }
            ],
        },
    }
