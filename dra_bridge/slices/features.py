"""Features of the API server that slices use: which a slice or a pool needs, and which the server has."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Iterable, Mapping
from typing import Final, Literal

from dra_bridge.kube import RESOURCE_SLICES, Cluster, InvalidError, Object
from dra_bridge.slices.desired import MAX_NAME, Capabilities, Desired, Pool, slice_name, taints_of
from dra_bridge.slices.versions import in_version, neutral

__all__ = ["WITHOUT", "Feature", "ServerFeatures", "features_of", "needs_of"]

logger: Final = logging.getLogger(__name__)

Feature = Literal["taints", "sharing", "counters"]

WITHOUT: Final[Mapping[Feature, str]] = {
    "taints": "the API server drops device taints (feature gate DRADeviceTaints is off): "
    "unhealthy devices are left out of the slices instead",
    "sharing": "the API server drops consumable capacity (feature gate DRAConsumableCapacity is off): "
    "each shared device goes to one claim at a time",
    "counters": "the API server does not take shared counters (feature gate DRAPartitionableDevices is off, "
    "or a server before 1.35): devices that consume counters are not offered",
}
"""What is done without a feature, one sentence each."""


class ServerFeatures:
    """What the API server is known to keep of the fields that it is sent."""

    def __init__(self, cluster: Cluster, probe_again: float) -> None:
        """Know nothing yet.

        probe_again: seconds after which a feature that the server lacked may be asked for again.
        """
        self._cluster = cluster
        self._probe_again = probe_again
        self._probed_at = 0.0
        self._known: dict[Feature, bool] = {}

    @property
    def capabilities(self) -> Capabilities:
        """What is known, or believed until it is."""
        return Capabilities(
            **{feature: self._known.get(feature, True) for feature in ("taints", "sharing", "counters")}
        )

    @property
    def missing(self) -> set[Feature]:
        """The features that the server lacks."""
        return {feature for feature, there in self._known.items() if not there}

    def learn(self, body: Object) -> None:
        """See what the server has kept in the devices of a slice."""
        for feature in _used_by(body["spec"].get("devices") or ()):
            self._known[feature] = True

    def lacks(self, feature: Feature) -> None:
        """Note that the server has dropped a feature's fields, or has refused them."""
        self._known[feature] = False

    def forget_missing(self) -> None:
        """Believe again in what the server lacked, if that is long ago: it may be another server by now."""
        if asyncio.get_running_loop().time() - self._probed_at < self._probe_again:
            return
        for feature in self.missing:
            del self._known[feature]

    async def probe(self, pool: Pool, wanted: Desired, version: str) -> bool:
        """Ask, by a write that is not kept, for features that are needed and not known yet; True if one is not there.

        So nothing is published that would be wrong without them: an unhealthy device without its
        taint, or partitions that exclude each other without their counters.
        """
        unknown: set[Feature] = set()
        for body in wanted.slices:
            unknown |= features_of(body)
        unknown -= self._known.keys()
        asked = frozenset(unknown)
        if unknown:
            self._probed_at = asyncio.get_running_loop().time()
        while unknown:
            body = in_version(_probe_body(pool, unknown), version)
            try:
                answer = neutral(await self._cluster.create(RESOURCE_SLICES, body, dry_run=True))
            except InvalidError as error:
                if "counters" in unknown:  # before 1.35 counters had to lie in the same slice
                    self.lacks("counters")
                    unknown.discard("counters")
                    continue
                logger.debug("dry run: %s", error)
                self._known.update(dict.fromkeys(unknown, True))  # what is really written will tell
                break
            kept = features_of(answer)
            self._known.update({feature: feature in kept for feature in unknown})
            break
        return not all(self._known.get(feature, True) for feature in asked)


def features_of(body: Object) -> set[Feature]:
    """Return the features that a slice uses."""
    spec = body["spec"]
    found = _used_by(spec.get("devices") or ())
    if spec.get("sharedCounters"):
        found.add("counters")
    return found


def _used_by(devices: Iterable[Object]) -> set[Feature]:
    found: set[Feature] = set()
    for device in devices:
        if device.get("taints"):
            found.add("taints")
        if device.get("allowMultipleAllocations"):
            found.add("sharing")
        if device.get("consumesCounters"):
            found.add("counters")
    return found


def needs_of(pool: Pool) -> set[Feature]:
    """Return the features that a pool makes use of where they are."""
    needs: set[Feature] = set()
    for offer in pool.offers:
        for device in offer.devices:
            if not offer.offers(device.id):
                continue
            if offer.takes(device.id) > 1:
                needs.add("sharing")
            if taints_of(pool, device):
                needs.add("taints")
            if device.consumes:
                needs.add("counters")
    return needs


def _probe_body(pool: Pool, features: Collection[Feature]) -> Object:
    device: Object = {"name": "probe"}
    if "taints" in features:
        device["taints"] = [{"key": f"{pool.driver}/unhealthy", "effect": "NoSchedule"}]
    if "sharing" in features:
        device["allowMultipleAllocations"] = True
    if "counters" in features:
        device["consumesCounters"] = [{"counterSet": "probe", "counters": {"probe": {"value": "1"}}}]
    return {
        "metadata": {"name": slice_name(pool.node, pool.driver, 0)[: MAX_NAME - 6] + "-probe"},
        "spec": {
            "driver": pool.driver,
            "nodeName": pool.node,
            "pool": {"name": pool.node, "generation": 0, "resourceSliceCount": 1},
            "devices": [device],
        },
    }
