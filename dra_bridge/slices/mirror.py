"""Keeps a local copy of one driver's ResourceSlices, from lists, watches and the responses to writes."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from dra_bridge.kube import Object, is_older
from dra_bridge.slices.foreign import is_own, offered_in
from dra_bridge.slices.plan import UNGROWABLE, annotations_of, fingerprint, generation_of

MOST_NAMES: Final = 16384
"""Maximum number of devices for which the copy stores the time since which no slice offers the device."""


class SliceScope(Enum):
    """The two groups of a driver's slices. A list or watch selects one group by the field `spec.nodeName`."""

    NODE = "node"
    """Slices that name this node."""
    NODELESS = "nodeless"
    """Slices that name no node. Such slices can be in this node's pool, too."""


def scope_of(body: Object) -> SliceScope:
    """Return a slice's scope: NODE if the slice names a node, otherwise NODELESS."""
    return SliceScope.NODE if body["spec"].get("nodeName") else SliceScope.NODELESS


@dataclass(slots=True, eq=False)
class Mirror:
    """A copy of one driver's slices on the API server, and facts about earlier slices. All bodies are of version v1.

    bodies: for each name, the slice, also a foreign slice. listed: the scopes whose slices were listed and are watched;
    other scopes must be listed again. generation: the highest generation that was ever written. After a write without a
    response, the number is increased by one. Generations in foreign slices are included if they are below `UNGROWABLE`.
    mutations: see `plan.ServerMutations`. times: see `plan.Times`. answers: for each slice name, the slice's content in
    the server's response to the agent's last write. taken: names that foreign slices have, so that the agent's slices
    cannot have them. deletions: for the UID of each slice that the agent deleted, the slice's scope, until the watch
    reports the deletion. gone: UIDs of slices whose deletion the watch has reported since the last write began; the
    writer clears this set.
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
    """For each device name that no slice offers now, the time when a slice last offered it (monotonic seconds)."""
    _floor: float = 0.0
    """For devices that are not in `_withdrawn`: the last time when a slice may have offered them (monotonic
    seconds)."""

    @property
    def whole(self) -> bool:
        """Whether this copy has all slices of both scopes."""
        return self.listed == set(SliceScope)

    def withdrawn(self, device: str) -> float | None:
        """Return since when no slice in the pool offers a device (monotonic seconds); None if a slice may offer it."""
        if not self.whole or self.offering(device):
            return None
        return self._withdrawn.get(device, self._floor)

    def offering(self, device: str) -> str:
        """Return the name of a slice, of any generation, that offers a device in the pool; "" if there is none."""
        return next((name for name, body in self.bodies.items() if device in offered_in(body, self.node)), "")

    def relist(self, scope: SliceScope, *, new_watch: bool = False) -> None:
        """Forget all slices of a scope. The caller then passes each slice of a new list to `keep`.

        new_watch: whether a new watch begins after the list.
        """
        for name in [name for name, body in self.bodies.items() if scope_of(body) is scope]:
            self._forget(name)
        self.listed.add(scope)
        if new_watch:
            self.deletions = {uid: of for uid, of in self.deletions.items() if of is not scope}

    def keep(self, body: Object) -> None:
        """Store `body` as a slice's present state, unless the copy has a newer version of the slice."""
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
        """Apply one event of the watch to the copy.

        Return False if the event changes nothing, or is older than the agent's last write.
        """
        metadata = body["metadata"]
        name, uid = metadata["name"], metadata.get("uid", "")
        if deleted:
            self.gone.add(uid)
        if uid in self.deletions and not deleted and metadata.get("deletionTimestamp"):
            del self.deletions[uid]  # The slice still exists and waits for its finalizers.
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
        """Record the server's response to a write of the agent. Return whether the server has changed the content."""
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
        """Return whether another program has changed a slice since the agent wrote it."""
        return name in self.bodies and name in self.answers and self.answers[name] != _content(self.bodies[name])

    def lost(self, name: str) -> bool:
        """Return whether another program has deleted a slice that the agent wrote."""
        return name in self.answers and name not in self.bodies

    def deleted(self, body: Object) -> None:
        """Forget a slice that the agent has deleted.

        A new slice of the same name stays in the copy.
        """
        name, uid = body["metadata"]["name"], body["metadata"].get("uid", "")
        if name in self.bodies and self.bodies[name]["metadata"].get("uid", "") == uid:
            self._forget(name)
        if uid not in self.gone:
            self.deletions[uid] = scope_of(body)
        self.mutations.pop(name, None)
        self.answers.pop(name, None)

    def unanswered(self, body: Object) -> None:
        """Record a write to which the server did not respond.

        The server may still execute the write later. So the next write gets a higher generation.
        """
        self.listed.clear()
        self.answers.pop(body["metadata"]["name"], None)
        self.generation = max(self.generation, generation_of(body)) + 1


def _content(body: Object) -> tuple[object, ...]:
    return fingerprint(body), generation_of(body), annotations_of(body)[0]
