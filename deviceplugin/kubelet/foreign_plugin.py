"""Detects that another plugin has registered a resource with the kubelet. The kubelet does not report it.

The kubelet works as follows (1.36.3 and 1.37.1, devicemanager/manager.go, plugin/v1beta1/handler.go). Register succeeds
for a resource that is already registered. The kubelet then reads the ListAndWatch lists of both plugins, and uses the
list that it read last. But it calls Allocate of the plugin that registered last. When this plugin disconnects, kubelet
1.36 counts all devices as unhealthy and the resource's plugin as stopped, even if another plugin has an open stream.
Kubelet 1.37 continues with another plugin, and with the last list that any plugin has sent. After each list, the
kubelet writes its checkpoint.
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
"""Maximum seconds by which a file's modification time may be earlier than the clock at the time of the write."""
_OWN: Final = re.compile(r"kubelet\.sock|.*-[0-9a-f]{8}\.sock")
"""Names of the sockets of the kubelet and of this framework, which do not count as other plugins' sockets.

A lock file ensures that only one process of this framework serves a resource.
"""
_TIME: Final = re.compile(r"\d{9,}")
"""The Unix time of the plugin's start, which some plugins (GKE's, generic-device-plugin) put into their sockets' names.
"""

Socket = tuple[str, FileIdentity]


class SentList(NamedTuple):
    """The healthy ids of a device list that was sent to the kubelet. at: the time of the sending (Unix seconds)."""

    at: float
    ids: frozenset[str]


class Finding(NamedTuple):
    """The evidence that another plugin has registered a resource.

    reason: the evidence as text; "" if there is none. again: seconds after which to decide again, even if nothing has
    changed. sure: whether the evidence is a proof. A new socket alone is a proof only if it has the name of the adopted
    plugin's socket. Otherwise, the socket may be of a plugin that has registered another resource again with the same
    device list.
    """

    reason: str = ""
    again: float = math.inf
    sure: bool = True


@dataclass(frozen=True, slots=True)
class KubeletRecord:
    """The checkpoint's entries that concern a resource.

    written: the time at which the kubelet wrote the checkpoint (Unix seconds). registered: the healthy ids of the
    resource. others: for each resource that other processes serve, its healthy ids. foreign: the allocations of the
    resource whose AllocateResponse is from another plugin.
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
    now: the present time (Unix seconds). taken: whether the kubelet has certainly read the last list of the agent, so
    that the kubelet's list cannot be an older list of the agent.
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
        """For each socket that appeared since Register: the time of its creation (Unix seconds), and the healthy ids of
        other resources before that time."""

    def begin(self, record: KubeletRecord | None, there: frozenset[Socket]) -> None:
        """Record the checkpoint and sockets from before a Register, which are no evidence of a later plugin."""
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
        """Return the evidence that another plugin has registered the resource; its `reason` is "" if there is none.

        sent: the lists that the agent has sent since Register, the oldest first. now: the present time (Unix seconds).
        plugin: the name of the adopted plugin's socket, "" for none.
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
        # Until the kubelet has read the agent's first list, which may take any time, the kubelet may still have the
        # list from before Register.
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
                break  # The other sockets need no check: a finding causes a new Register, which makes them known.
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
