"""Keeps one driver's ResourceSlices as the API server has them, by lists, the watch, and answers to writes."""

from __future__ import annotations

from dataclasses import dataclass, field

from dra_bridge.kube import Object, is_older
from dra_bridge.slices.plan import fingerprint, generation_of


@dataclass(slots=True, eq=False)
class Mirror:
    """One driver's slices as the API server has them, and what is remembered of earlier ones; bodies of version v1.

    bodies: by name. listed: whether the bodies are those of a list and its watch; if not, the slices must be listed
    again. generation: the highest one that was ever written, or that an unanswered write makes necessary. mutations:
    see `plan.ServerMutations`. times: see `plan.Times`. deletions: UIDs of slices that were deleted here and whose
    deletion the watch has not reported yet. gone: UIDs of slices whose deletion the watch has reported since the last
    write began; the writer clears it.
    """

    bodies: dict[str, Object] = field(default_factory=dict)
    listed: bool = False
    generation: int = 0
    mutations: dict[str, tuple[str, str]] = field(default_factory=dict)
    times: dict[tuple[str, str, str], str] = field(default_factory=dict)
    deletions: set[str] = field(default_factory=set)
    gone: set[str] = field(default_factory=set)

    def relist(self, *, new_watch: bool = False) -> None:
        """Forget the bodies; those of a new list follow, each by `keep`. new_watch: the watch begins anew after it."""
        self.bodies.clear()
        self.listed = True
        if new_watch:
            self.deletions.clear()

    def keep(self, body: Object) -> None:
        """Take a slice for what the server has, unless a newer state of it is known."""
        if self._has_newer(body):
            return
        self.bodies[body["metadata"]["name"]] = body
        self.generation = max(self.generation, generation_of(body))
        devices = body["spec"].get("devices") or ()
        names = {device["name"] for device in devices}
        self.times = {key: since for key, since in self.times.items() if key[0] not in names}
        for device in devices:
            for taint in device.get("taints") or ():
                if taint.get("timeAdded"):
                    self.times[device["name"], taint["key"], taint["effect"]] = taint["timeAdded"]

    def observe(self, body: Object, *, deleted: bool) -> bool:
        """Take what the watch reports of a slice; return False if it was known, or is older than the last write."""
        name, uid = body["metadata"]["name"], body["metadata"].get("uid", "")
        if deleted:
            self.gone.add(uid)
        if self._has_newer(body) or uid in self.deletions:
            if deleted:
                self.deletions.discard(uid)
            return False
        if deleted:
            return self.bodies.pop(name, None) is not None
        mirrored = self.bodies.get(name)
        self.keep(body)
        version = body["metadata"].get("resourceVersion")
        return mirrored is None or mirrored["metadata"].get("resourceVersion") != version

    def _has_newer(self, body: Object) -> bool:
        mirrored = self.bodies.get(body["metadata"]["name"])
        return mirrored is not None and is_older(body, mirrored)

    def deleted(self, body: Object) -> None:
        """Forget a slice that was deleted here."""
        name = body["metadata"]["name"]
        self.bodies.pop(name, None)
        self.deletions.add(body["metadata"].get("uid", ""))
        self.mutations.pop(name, None)

    def compare(self, sent: Object, answer: Object) -> bool:
        """Remember what the server made of a slice; return whether it changed it."""
        want, have = fingerprint(sent), fingerprint(answer)
        if want == have:
            self.mutations.pop(sent["metadata"]["name"], None)
            return False
        self.mutations[sent["metadata"]["name"]] = (want, have)
        return True

    def unanswered(self, body: Object) -> None:
        """Note a write that may have been carried out, or may be later: the next one is of a newer generation."""
        self.listed = False
        self.generation = max(self.generation, generation_of(body)) + 1
