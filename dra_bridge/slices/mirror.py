"""The mirror of one driver's ResourceSlices on the API server, by what lists, the watch and answers say of them."""

from __future__ import annotations

from dra_bridge.kube import Object
from dra_bridge.slices.plan import fingerprint, generation_of

__all__ = ["Mirror"]


class Mirror:
    """One driver's slices as the API server has them, and what is remembered of earlier ones."""

    def __init__(self) -> None:
        self.bodies: dict[str, Object] = {}
        """By name, as resource.k8s.io/v1 has them."""
        self.listed = False
        """Whether the bodies were filled from a list since they were last in doubt."""
        self.generation = 0
        """The highest one that was ever written, or that an unanswered write makes necessary."""
        self.mutations: dict[str, tuple[str, str]] = {}
        """See `plan.ServerMutations`."""
        self.times: dict[tuple[str, str, str], str] = {}
        """See `plan.Times`."""
        self._deleted: set[str] = set()
        """UIDs of slices that were deleted here and whose end the watch has not told yet."""
        self._gone: set[str] = set()
        """UIDs of slices that the watch has told the end of since a write began whose answer is out."""

    def relist(self) -> None:
        """Forget the bodies; those of a new list follow, each by `keep`."""
        self.bodies.clear()
        self.listed = True

    def restart(self) -> None:
        """Forget the bodies as in `relist`, and what the watch had still to tell: it begins anew."""
        self.relist()
        self._deleted.clear()

    def doubt(self) -> None:
        """Note that what the server has is not known: it must be listed."""
        self.listed = False

    def keep(self, body: Object) -> None:
        """Take a slice, as resource.k8s.io/v1 has it, for what the server has."""
        self.bodies[body["metadata"]["name"]] = body
        self.generation = max(self.generation, generation_of(body))
        devices = body["spec"].get("devices") or ()
        if self.times:
            names = {device["name"] for device in devices}
            self.times = {key: since for key, since in self.times.items() if key[0] not in names}
        for device in devices:
            for taint in device.get("taints") or ():
                if taint.get("timeAdded"):
                    self.times[device["name"], taint["key"], taint["effect"]] = taint["timeAdded"]

    def is_echo(self, item: Object, *, deleted: bool) -> bool:
        """Take what the watch tells; return whether it is from before the last write here."""
        metadata = item["metadata"]
        if deleted:
            self._gone.add(metadata.get("uid", ""))
        if not self.has_newer(item) and metadata.get("uid") not in self._deleted:
            return False
        if deleted:
            self._deleted.discard(metadata.get("uid"))
        return True

    def has_newer(self, item: Object) -> bool:
        """Return whether a newer state of this slice is known."""
        known = self.bodies.get(item["metadata"]["name"])
        return known is not None and _newer(known, item)

    def drop(self, name: str) -> bool:
        """Forget a slice of which the watch tells the end; return whether it was known."""
        return self.bodies.pop(name, None) is not None

    def deleted(self, body: Object) -> None:
        """Forget a slice that was deleted here."""
        name = body["metadata"]["name"]
        self.bodies.pop(name, None)
        self._deleted.add(body["metadata"].get("uid", ""))
        self.mutations.pop(name, None)

    def sending(self) -> None:
        """Note that a write begins: from here on `is_gone` knows what the watch tells the end of."""
        self._gone.clear()

    def is_gone(self, answer: Object) -> bool:
        """Return whether the watch told the end of a slice before the answer to its write came."""
        return answer["metadata"].get("uid", "") in self._gone

    def compare(self, sent: Object, answer: Object) -> bool:
        """Remember what the server made of a slice; return whether it is something else."""
        want, have = fingerprint(sent), fingerprint(answer)
        if want == have:
            self.mutations.pop(sent["metadata"]["name"], None)
            return False
        self.mutations[sent["metadata"]["name"]] = (want, have)
        return True

    def unanswered(self, body: Object) -> None:
        """Note a write that may have been carried out, or may be later: the next one is of a newer generation."""
        self.doubt()
        self.generation = max(self.generation, generation_of(body)) + 1


def _newer(known: Object, item: Object) -> bool:
    """Whether what is known of a slice is newer than this (versions compare as numbers since 1.35, and did before)."""
    one, other = known["metadata"].get("resourceVersion", ""), item["metadata"].get("resourceVersion", "")
    return one.isdecimal() and other.isdecimal() and int(one) > int(other)
