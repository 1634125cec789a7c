"""Notices that another plugin has registered a resource with the kubelet, which tells nobody.

Facts (kubelet 1.36.3 and 1.37.1, devicemanager/manager.go, plugin/v1beta1/handler.go): Register of a name that is
registered succeeds. The kubelet goes on to take the lists of both plugins, the last one counts, and Allocate goes to
the plugin that registered last. When that one leaves, 1.36 counts all devices as unhealthy and the plugin as stopped,
whoever else has a stream open; 1.37 goes on with another plugin and with the last list, whosever it was. After each
list the kubelet writes its checkpoint.
"""

from __future__ import annotations

import itertools
import math
import re
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from deviceplugin.files import FileIdentity
from deviceplugin.register.records import Allocation

LATE: Final = 5.0
"""Seconds after which the kubelet has taken a list and has written it down, on a slow disk, too."""
LISTED: Final = 1.0
"""Seconds from a new socket to the list of its plugin in the checkpoint."""
_TICK: Final = 0.01
"""Seconds by which a file's time may lag behind the clock."""
_OWN: Final = re.compile(r"kubelet\.sock|.*-[0-9a-f]{8}\.sock")
"""Sockets of the kubelet and of this framework, of which a lock lets one process serve a resource."""
_TIME: Final = re.compile(r"\d{9,}")
"""The Unix time of the start, which some plugins have in the names of their sockets (GKE's, generic-device-plugin)."""

Socket = tuple[str, FileIdentity]


class SentList(NamedTuple):
    """The healthy ids of a list that was sent to the kubelet. at: Unix seconds."""

    at: float
    ids: frozenset[str]


class Finding(NamedTuple):
    """Why another plugin has registered a resource, "" if none has.

    again: seconds until something is to be decided though nothing has changed.
    sure: it has, else it may have. By its socket alone it is known only where that is named as the adopted plugin's: a
    plugin of another resource that comes back with the same list looks the same.
    """

    reason: str = ""
    again: float = math.inf
    sure: bool = True


@dataclass(frozen=True, slots=True)
class KubeletRecord:
    """What the checkpoint says that concerns a resource.

    written: when the kubelet wrote it (Unix seconds). registered: the healthy ids of the resource. others: those of
    resources that this process does not serve. foreign: allocations of the resource that another plugin has answered.
    """

    written: float
    registered: frozenset[str]
    others: Mapping[str, frozenset[str]]
    foreign: frozenset[Allocation]


def foreign_sockets(sockets: Mapping[str, FileIdentity]) -> frozenset[Socket]:
    """Return those of the sockets in the device plugin directory that are other plugins'."""
    return frozenset(socket for socket in sockets.items() if not _OWN.fullmatch(socket[0]))


def contradiction(record: KubeletRecord, sent: Sequence[SentList], now: float, taken: bool = False) -> str | None:
    """Return in words how the kubelet's list differs from ours; "" if it does not, None if that is not known yet.

    sent: the lists since Register, the oldest first, and before them what the checkpoint had. now: Unix seconds. taken:
    the kubelet had the last one before, and nothing of ours that is older can come.
    """
    if not sent or record.written < sent[-1].at - _TICK:
        return None
    if record.registered == sent[-1].ids:
        return ""
    recent = [sent_list.ids for sent_list, after in itertools.pairwise(sent) if after.at > now - LATE]
    if now < sent[-1].at + LATE and record.registered in recent and not taken:
        return None
    return f"its checkpoint has {_counted(record.registered)}, but this plugin sent {_counted(sent[-1].ids)}"


def _counted(ids: Collection[str]) -> str:
    names = [*sorted(ids)[:3], *(["..."] if len(ids) > 3 else [])]
    return f"{len(ids)} healthy devices" + (f" ({', '.join(names)})" if names else "")


class ForeignPluginWatch:
    """Compares what the kubelet does with a resource to what its registered plugin would have it do."""

    def __init__(self) -> None:
        self._known: frozenset[Socket] = frozenset()
        self._foreign: frozenset[Allocation] = frozenset()
        self._before: tuple[SentList, ...] = ()
        self._taken: SentList | None = None
        """The list that the kubelet is known to have taken."""
        self._others: Mapping[str, frozenset[str]] = {}
        self._new: dict[Socket, tuple[float, Mapping[str, frozenset[str]]]] = {}
        """Sockets that came since Register: when they were made (Unix seconds), and what others had before."""

    def begin(self, record: KubeletRecord | None, there: frozenset[Socket]) -> None:
        """Take what is there before Register is called: it is no sign of a plugin that registers after it."""
        now = time.time()
        self._known, self._new, self._taken = there, {}, None
        # A kubelet that has just started has no devices until it has a list.
        self._before = (SentList(now, frozenset()),)
        if record is not None:
            self._foreign, self._others = record.foreign, record.others
            self._before = (*self._before, SentList(now, record.registered))

    def found(
        self,
        record: KubeletRecord | None,
        there: frozenset[Socket],
        sent: Sequence[SentList],
        now: float | None = None,
        *,
        plugin: str = "",
    ) -> Finding:
        """Return whether another plugin has registered the resource.

        sent: see `contradiction`. now: Unix seconds. plugin: the name of the adopted plugin's socket, "" for none.
        """
        now = time.time() if now is None else now
        self._new = {socket: noted for socket, noted in self._new.items() if socket in there}
        for socket in there - self._known - self._new.keys():
            self._new[socket] = socket[1].modified_ns / 1e9, self._others
        if record is None:
            return Finding(again=LATE)
        for foreign in sorted(record.foreign - self._foreign):
            return Finding(f"the kubelet gave {foreign.device_id} of it to the pod with UID {foreign.pod_uid}")
        if not sent:
            return Finding()
        last = sent[-1]
        # What was before Register is replaced by the first list, however long the kubelet took to listen.
        before = tuple(sent_list._replace(at=sent[0].at) for sent_list in self._before)
        differs = contradiction(record, (*before, *sent), now, self._taken == last)
        if differs:
            return Finding(differs)
        # An equal one of ours may be the one that the kubelet is at; then those between them are still to come.
        if differs == "" and all(sent_list.ids != last.ids for sent_list in sent[:-1]):
            self._taken = last
        again = math.inf if differs == "" else max(LISTED, sent[-1].at + LATE - now)
        own = {socket for socket in self._new if plugin and _TIME.sub("", socket[0]) == _TIME.sub("", plugin)}
        for socket in sorted(self._new, key=lambda socket: (socket not in own, socket)):
            since, others = self._new[socket]
            listed, sure = record.written >= since - _TICK, socket in own
            due = since + (LISTED if listed else LATE)
            if sure and now < due:
                again = min(again, due - now)
                break  # a finding by another socket would have Register called, which makes all sockets known
            if not listed:
                continue  # its plugin has sent no list yet
            if record.others != others and not sure:
                self._known |= {socket}  # the list was that of another resource
                del self._new[socket]
            elif now < due:
                again = min(again, due - now)
            else:
                why = "named as its adopted plugin's" if sure else "the devices of no other resource have changed since"
                return Finding(f"the socket {socket[0]} is new, and {why}", sure=sure)
        self._others = record.others
        return Finding("", again)
