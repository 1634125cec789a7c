"""Keeps one driver's ResourceSlices as the API server has them, by lists, watches, and answers to writes."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from dra_bridge.kube import Object, is_older
from dra_bridge.slices.foreign import is_own, offered_in
from dra_bridge.slices.plan import UNGROWABLE, annotations_of, fingerprint, generation_of

MOST_NAMES: Final = 16384
"""Names of devices that slices do not offer any more, of which it is remembered since when."""


class SliceScope(Enum):
    """Which slices of a driver a list and its watch are of. `spec.nodeName` is all that they can be selected by."""

    NODE = "node"
    """Those that name this node."""
    NODELESS = "nodeless"
    """Those that name no node, which may be of this node's pool."""


def scope_of(body: Object) -> SliceScope:
    """Return by which list and watch a slice is found."""
    return SliceScope.NODE if body["spec"].get("nodeName") else SliceScope.NODELESS


@dataclass(slots=True, eq=False)
class Mirror:
    """One driver's slices as the API server has them, and what is remembered of earlier ones; bodies of version v1.

    bodies: by name, also those that others wrote into the pool. listed: the scopes whose bodies are those of a list and
    its watch; the others must be listed again. generation: the highest one that was ever written, or that an unanswered
    write makes necessary; of what others wrote only what is below `UNGROWABLE` counts. mutations: see
    `plan.ServerMutations`. times: see `plan.Times`. answers: by name, what the server had after the last write here.
    taken: names of wanted slices that others have taken. deletions: the scope of slices that were deleted here and
    whose deletion the watch has not reported yet, by UID. gone: UIDs of slices whose deletion the watch has reported
    since the last write began; the writer clears it.
    """

    driver: str
    node: str
    bodies: dict[str, Object] = field(default_factory=dict)
    listed: set[SliceScope] = field(default_factory=set)
    generation: int = 0
    mutations: dict[str, tuple[str, str]] = field(default_factory=dict)
    times: dict[tuple[str, str, str], str] = field(default_factory=dict)
    answers: dict[str, tuple[object, ...]] = field(default_factory=dict)
    taken: set[str] = field(default_factory=set)
    deletions: dict[str, SliceScope] = field(default_factory=dict)
    gone: set[str] = field(default_factory=set)
    _withdrawn: dict[str, float] = field(default_factory=dict)
    """When slices offered a device for the last time (monotonic seconds), by name; of those that none offers now."""
    _floor: float = 0.0
    """When devices of which `_withdrawn` says nothing may have been offered for the last time."""

    @property
    def whole(self) -> bool:
        """Whether the bodies are all that the API server has."""
        return self.listed == set(SliceScope)

    def withdrawn(self, device: str) -> float | None:
        """Return since when (monotonic seconds) no slice of the pool has offered a device; None if one may offer it."""
        if not self.whole or self.offering(device):
            return None
        return self._withdrawn.get(device, self._floor)

    def offering(self, device: str) -> str:
        """Return the name of a slice that offers a device in the pool, of whatever generation; "" if there is none."""
        return next((name for name, body in self.bodies.items() if device in offered_in(body, self.node)), "")

    def relist(self, scope: SliceScope, *, new_watch: bool = False) -> None:
        """Forget the bodies of a scope; those of a new list follow, each by `keep`.

        new_watch: the watch begins anew after it.
        """
        for name in [name for name, body in self.bodies.items() if scope_of(body) is scope]:
            self._forget(name)
        self.listed.add(scope)
        if new_watch:
            self.deletions = {uid: of for uid, of in self.deletions.items() if of is not scope}

    def keep(self, body: Object) -> None:
        """Take a slice for what the server has, unless a newer state of it is known."""
        if self._has_newer(body):
            return
        name = body["metadata"]["name"]
        self._forget(name)
        self.bodies[name] = body
        if body["spec"]["pool"]["name"] == self.node and (generation := generation_of(body)) < UNGROWABLE:
            self.generation = max(self.generation, generation)
        if not is_own(body, self.driver, self.node):
            return
        devices = body["spec"].get("devices") or ()
        names = {device["name"] for device in devices}
        self.times = {key: since for key, since in self.times.items() if key[0] not in names}
        for device in devices:
            for taint in device.get("taints") or ():
                if taint.get("timeAdded"):
                    self.times[device["name"], taint["key"], taint["effect"]] = taint["timeAdded"]

    def observe(self, body: Object, *, deleted: bool) -> bool:
        """Take what the watch reports of a slice; return False if it was known, or is older than the last write."""
        metadata = body["metadata"]
        name, uid = metadata["name"], metadata.get("uid", "")
        if deleted:
            self.gone.add(uid)
        if uid in self.deletions and not deleted and metadata.get("deletionTimestamp"):
            del self.deletions[uid]  # it is there still: it waits for its finalizers
        if self._has_newer(body) or uid in self.deletions:
            if deleted:
                self.deletions.pop(uid, None)
            return False
        if deleted:
            return self._forget(name)
        mirrored = self.bodies.get(name)
        self.keep(body)
        version = metadata.get("resourceVersion")
        return mirrored is None or mirrored["metadata"].get("resourceVersion") != version

    def _has_newer(self, body: Object) -> bool:
        mirrored = self.bodies.get(body["metadata"]["name"])
        return mirrored is not None and is_older(body, mirrored)

    def _forget(self, name: str) -> bool:
        body = self.bodies.pop(name, None)
        if body is None:
            return False
        now = time.monotonic()
        if len(self._withdrawn) > MOST_NAMES:
            self._withdrawn.clear()
            self._floor = now
        self._withdrawn |= dict.fromkeys(offered_in(body, self.node), now)
        return True

    def wrote(self, sent: Object, answer: Object) -> bool:
        """Remember what the server made of a slice that was written here; return whether it changed it."""
        name = sent["metadata"]["name"]
        self.answers[name] = _content(answer)
        self.generation = max(self.generation, generation_of(sent))
        want, have = fingerprint(sent), fingerprint(answer)
        if want == have:
            self.mutations.pop(name, None)
            return False
        self.mutations[name] = (want, have)
        return True

    def edited(self, name: str) -> bool:
        """Return whether others have changed a slice since it was written here."""
        return name in self.bodies and name in self.answers and self.answers[name] != _content(self.bodies[name])

    def lost(self, name: str) -> bool:
        """Return whether others have deleted a slice that was written here."""
        return name in self.answers and name not in self.bodies

    def deleted(self, body: Object) -> None:
        """Forget a slice that was deleted here. Another one may have its name already, by the watch."""
        name, uid = body["metadata"]["name"], body["metadata"].get("uid", "")
        if name in self.bodies and self.bodies[name]["metadata"].get("uid", "") == uid:
            self._forget(name)
        if uid not in self.gone:
            self.deletions[uid] = scope_of(body)
        self.mutations.pop(name, None)
        self.answers.pop(name, None)

    def unanswered(self, body: Object) -> None:
        """Note a write that may have been carried out, or may be later: the next one is of a newer generation."""
        self.listed.clear()
        self.answers.pop(body["metadata"]["name"], None)
        self.generation = max(self.generation, generation_of(body)) + 1


def _content(body: Object) -> tuple[object, ...]:
    return fingerprint(body), generation_of(body), annotations_of(body)[0]
