"""Detects that another plugin has registered a resource with the kubelet. The kubelet does not report this.

Facts (kubelet 1.36.3 and 1.37.1, devicemanager/manager.go, plugin/v1beta1/handler.go): Register of an already
registered resource succeeds. The kubelet continues to read the ListAndWatch lists of both plugins. The list that the
kubelet read last counts, but the kubelet calls Allocate of the plugin that registered last. When the plugin that
registered last disconnects, kubelet 1.36 counts all devices as unhealthy and the resource's plugin as stopped, even if
another plugin has an open stream; kubelet 1.37 continues with another plugin, and with the last list that any plugin
has sent. After each list, the kubelet writes its checkpoint.
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
"""Seconds within which the kubelet certainly reads a sent device list and writes its checkpoint, even on a slow
disk."""
LISTED: Final = 1.0
"""Seconds after the creation of a plugin's socket within which the plugin's device list is in the checkpoint."""
_TICK: Final = 0.01
"""Seconds by which a file's modification time may be earlier than the clock showed when the file was written."""
_OWN: Final = re.compile(r"kubelet\.sock|.*-[0-9a-f]{8}\.sock")
"""Names of the sockets of the kubelet and of this framework, which are not counted as other plugins' sockets.

A lock lets only one process of this framework serve a resource.
"""
_TIME: Final = re.compile(r"\d{9,}")
"""The Unix time of the plugin's start, which some plugins (GKE's, generic-device-plugin) put into their sockets' names.
"""

Socket = tuple[str, FileIdentity]


class SentList(NamedTuple):
    """The healthy ids of a device list that was sent to the kubelet. at: when the list was sent (Unix seconds)."""

    at: float
    ids: frozenset[str]


class Finding(NamedTuple):
    """The evidence that another plugin has registered a resource; `reason` is "" if there is none.

    again: seconds after which to decide again, even if nothing has changed. sure: whether the evidence proves that
    another plugin has registered the resource; otherwise this is only possible. A new socket alone proves this only if
    its name is that of the adopted plugin's socket; otherwise a plugin of another resource may have registered again
    with the same list.
    """

    reason: str = ""
    again: float = math.inf
    sure: bool = True


@dataclass(frozen=True, slots=True)
class KubeletRecord:
    """The checkpoint's entries that concern a resource.

    written: when the kubelet wrote the checkpoint (Unix seconds). registered: the healthy ids of the resource. others:
    for each resource that other processes serve, its healthy ids. foreign: allocations of the resource whose
    AllocateResponse is another plugin's.
    """

    written: float
    registered: frozenset[str]
    others: Mapping[str, frozenset[str]]
    foreign: frozenset[Allocation]


def foreign_sockets(sockets: Mapping[str, FileIdentity]) -> frozenset[Socket]:
    """Return those sockets in the device plugin directory that belong to other plugins."""
    return frozenset(socket for socket in sockets.items() if not _OWN.fullmatch(socket[0]))


def contradiction(record: KubeletRecord, sent: Sequence[SentList], now: float, taken: bool = False) -> str | None:
    """Describe how the kubelet's device list differs from the agent's; "" if they are equal, None if not known yet.

    sent: the ids in the checkpoint before Register, then the lists that the agent has sent since, the oldest first.
    now: Unix seconds. taken: whether the kubelet has read the last list, so that it cannot read an older list of the
    agent any more.
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
    """Detects, from the checkpoint and from plugins' sockets, that another plugin has registered a resource."""

    def __init__(self) -> None:
        self._known: frozenset[Socket] = frozenset()
        self._foreign: frozenset[Allocation] = frozenset()
        self._before: tuple[SentList, ...] = ()
        self._taken: SentList | None = None
        """The last device list of the agent that the kubelet has certainly read; None if there is no such list."""
        self._others: Mapping[str, frozenset[str]] = {}
        self._new: dict[Socket, tuple[float, Mapping[str, frozenset[str]]]] = {}
        """For each socket that appeared since Register: when it was created (Unix seconds), and which ids of other
        resources were healthy before."""

    def begin(self, record: KubeletRecord | None, there: frozenset[Socket]) -> None:
        """Record checkpoint and sockets before Register: these are no evidence of a plugin that registers later."""
        now = time.time()
        self._known, self._new, self._taken = there, {}, None
        # A kubelet that has just started counts no devices until a plugin sends a list.
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
        # Until the kubelet has read the agent's first list, however late, it may still have the list from before
        # Register.
        before = tuple(sent_list._replace(at=sent[0].at) for sent_list in self._before)
        differs = contradiction(record, (*before, *sent), now, self._taken == last)
        if differs:
            return Finding(differs)
        # If an earlier list of the agent had the same ids, the kubelet may have read only that earlier list so far.
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
                break  # A finding causes a new Register, and after it all present sockets count as known.
            if not listed:
                continue  # The plugin that made this socket may not have sent a device list yet.
            if record.others != others and not sure:
                self._known |= {socket}  # The plugin of this socket has sent a device list for another resource.
                del self._new[socket]
            elif now < due:
                again = min(again, due - now)
            else:
                why = "named as its adopted plugin's" if sure else "the devices of no other resource have changed since"
                return Finding(f"the socket {socket[0]} is new, and {why}", sure=sure)
        self._others = record.others
        return Finding("", again)
