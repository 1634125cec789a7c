"""Logs the devices that are first listed, appear, vanish, become unhealthy, recover, are allocated or become free."""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Collection
from typing import Final

from deviceplugin.device import counted
from deviceplugin.inventory import InventorySnapshot, changes
from deviceplugin.register.records import Allocation

_LOG: Final = logging.getLogger(__name__)

SHOWN: Final = 8
"""Maximum number of changes between two snapshots to log at INFO or WARNING. Further changes are logged at DEBUG. The
vanishing or failure of a device with a holder is always logged as WARNING."""


class InventoryLog:
    """Logs the changes of one resource's inventory (the resource's present devices).

    The inventory calls the instance after each change. holder: a function that returns the holder of a device as text;
    "" if the device has no holder.
    """

    def __init__(self, resource: str, holder: Callable[[str], str] = lambda device: "") -> None:
        self._before = InventorySnapshot(resource)
        self._holder = holder

    def __call__(self, now: InventorySnapshot) -> None:
        """Log the changes since the previous snapshot."""
        before, self._before, resource = self._before, now, now.resource
        if not before.listed and now.listed:
            healths = Counter(device.health.value for device in now.devices.values())
            words = ", ".join(f"{count} {health}" for health, count in sorted(healths.items()))
            count = counted(len(now.devices))
            _LOG.info("the source lists %s (%s)", count, words or "none", extra={"resource": resource})
        listed = list(changes(before, now))
        for number, change in enumerate(listed):
            holder = self._holder(change.device) if change.bad else ""
            # A device that was unplugged while it had no holder is not broken, so no warning is needed.
            broken = change.bad and change.device not in now.gone
            extra = {"resource": resource, "device": change.device}
            text = f"{change.text}; {holder} has it" if holder else change.text
            if number >= SHOWN and not holder:
                level = logging.DEBUG
            else:
                level = logging.WARNING if broken or holder else logging.INFO
            _LOG.log(level, "device %s %s", change.device, text, extra=extra)
        if len(listed) > SHOWN:
            _LOG.info("%d more devices changed", len(listed) - SHOWN, extra={"resource": resource})


class HolderLog:
    """Logs which pods got or released devices since the last scan. The first scan logs all pods that have devices.

    title: a function that returns, for a pod's UID, the pod's name, or the UID if the name is not known.
    """

    def __init__(self, title: Callable[[str], str]) -> None:
        self._title = title
        self._before: frozenset[Allocation] | None = None
        self._titles: dict[str, str] = {}
        """For each UID of a pod with devices, the pod's name in the last log line; the UID if the name was unknown."""

    def __call__(self, held: Collection[Allocation]) -> None:
        """Log the changes since the previous scan."""
        now = frozenset(held)
        before, self._before = self._before, now
        if before is None:
            verbs = [("has", now)]
        else:
            verbs = [("gave back", before - now), ("got", now - before)] if now != before else []
        for verb, those in verbs:
            by_pod: dict[tuple[str, str], set[str]] = defaultdict(set)
            for allocation in those:
                by_pod[allocation.resource, allocation.pod_uid].add(allocation.device_id)
            for (resource, pod_uid), ids in sorted(by_pod.items()):
                pod = self._title(pod_uid)
                if pod == pod_uid:  # The name is unknown, or the pod's log directory is gone.
                    pod = self._titles.get(pod_uid, pod)
                self._titles[pod_uid] = pod
                extra = {"resource": resource, "pod": pod}
                _LOG.info("pod %s %s %s", pod, verb, counted(len(ids)), extra=extra)
                for name in sorted(ids) if _LOG.isEnabledFor(logging.DEBUG) else ():
                    _LOG.debug("pod %s %s %s", pod, verb, name, extra={**extra, "device": name})
        if verbs:
            held_now = {allocation.pod_uid for allocation in now}
            self._titles = {uid: title for uid, title in self._titles.items() if uid in held_now}
