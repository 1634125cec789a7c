"""Detects that another plugin has registered a resource with the kubelet. The kubelet does not report this.

Facts (kubelet 1.36.3 and 1.37.1, devicemanager/manager.go, plugin/v1beta1/handler.go): Register of an already
registered resource succeeds. The kubelet continues to read the lists of both plugins. The list that the kubelet read
last counts, and Allocate goes to the plugin that registered last. When the plugin that registered last leaves, kubelet
1.36 counts all devices as unhealthy and the resource's plugin as stopped, even if another plugin has an open stream;
kubelet 1.37 continues with another plugin and with the last list of any plugin. After each list, the kubelet writes its
checkpoint.
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
"""Seconds after which the kubelet has certainly read a list and written its checkpoint, even on a slow disk."""
LISTED: Final = 1.0
"""Seconds within which a plugin's list is in the checkpoint after the plugin has created its socket."""
_TICK: Final = 0.01
"""Seconds by which a file's modification time may be earlier than the clock at the write."""
_OWN: Final = re.compile(r"kubelet\.sock|.*-[0-9a-f]{8}\.sock")
"""Names of the sockets of the kubelet and of this framework, which are not counted as other plugins' sockets.

A lock lets only one process of this framework serve a resource.
"""
_TIME: Final = re.compile(r"\d{9,}")
"""The Unix time of the plugin's start, which some plugins (GKE's, generic-device-plugin) put into their sockets' names.
"""

Socket = tuple[str, FileIdentity]


class SentList(NamedTuple):
    """The healthy ids of a list that was sent to the kubelet. at: when the list was sent, in Unix seconds."""

    at: float
    ids: frozenset[str]


class Finding(NamedTuple):
    """The evidence that another plugin has registered a resource; `reason` is "" if there is none.

    again: seconds until the next decision, even without a change. sure: whether the evidence proves that another plugin
    has registered the resource; otherwise this is only possible. A socket alone is a proof only if the socket has the
    name of the adopted plugin's socket, because a plugin of another resource that registers again with the same list
    causes the same evidence.
    """

    reason: str = ""
    again: float = math.inf
    sure: bool = True


@dataclass(frozen=True, slots=True)
class KubeletRecord:
    """The checkpoint's entries that concern a resource.

    written: when the kubelet wrote the checkpoint (Unix seconds). registered: the healthy ids of the resource. others:
    the healthy ids of resources that this process does not serve. foreign: allocations of the resource that another
    plugin has answered.
    """

    written: float
    registered: frozenset[str]
    others: Mapping[str, frozenset[str]]
    foreign: frozenset[Allocation]


def foreign_sockets(sockets: Mapping[str, FileIdentity]) -> frozenset[Socket]:
    """Return those sockets in the device plugin directory that belong to other plugins."""
    return frozenset(socket for socket in sockets.items() if not _OWN.fullmatch(socket[0]))


def contradiction(record: KubeletRecord, sent: Sequence[SentList], now: float, taken: bool = False) -> str | None:
    """Describe how the kubelet's list differs from the agent's; "" if both are equal, None if that is not known yet.

    sent: the lists since Register, the oldest first, after the ids in the earlier checkpoint. now: Unix seconds. taken:
    whether the kubelet already had the last list, so that the kubelet cannot read an older list of the agent any more.
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
    """Finds out from the checkpoint and from sockets whether another plugin has registered a resource."""

    def __init__(self) -> None:
        self._known: frozenset[Socket] = frozenset()
        self._foreign: frozenset[Allocation] = frozenset()
        self._before: tuple[SentList, ...] = ()
        self._taken: SentList | None = None
        """The agent's list that the kubelet has certainly read; None if this is known of no list."""
        self._others: Mapping[str, frozenset[str]] = {}
        self._new: dict[Socket, tuple[float, Mapping[str, frozenset[str]]]] = {}
        """Sockets that appeared since Register: when they were created (Unix seconds), and the healthy ids of other
        resources before."""

    def begin(self, record: KubeletRecord | None, there: frozenset[Socket]) -> None:
        """Record the state before Register is called, because it proves no plugin that registers later."""
        now = time.time()
        self._known, self._new, self._taken = there, {}, None
        # A kubelet that has just started has no devices until a plugin sends it a list.
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
        # The agent's first list replaces the state before Register, even if the kubelet takes long to read that list.
        before = tuple(sent_list._replace(at=sent[0].at) for sent_list in self._before)
        differs = contradiction(record, (*before, *sent), now, self._taken == last)
        if differs:
            return Finding(differs)
        # The kubelet may have read only an earlier, equal list of the agent, and may still read the lists between the
        # two.
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
                break  # A finding by another socket causes a Register, after which all sockets are known.
            if not listed:
                continue  # The plugin of this socket has not sent a list yet.
            if record.others != others and not sure:
                self._known |= {socket}  # The plugin's list was for another resource.
                del self._new[socket]
            elif now < due:
                again = min(again, due - now)
            else:
                why = "named as its adopted plugin's" if sure else "the devices of no other resource have changed since"
                return Finding(f"the socket {socket[0]} is new, and {why}", sure=sure)
        self._others = record.others
        return Finding("", again)
