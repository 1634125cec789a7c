"""Keeps this node's ResourceSlices on the API server equal to the wanted slices."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import aclosing, suppress
from dataclasses import replace
from functools import partial
from typing import Any, Final

from deviceplugin.tasks import SharedCall, in_time
from dra_bridge import kube
from dra_bridge.kube import RESOURCE_SLICES, ApiError, Cluster, NotFoundError, Object, WatchState
from dra_bridge.slices.desired import Desired, Pool, desired, own_name
from dra_bridge.slices.features import WITHOUT, ServerFeatures, features_of
from dra_bridge.slices.foreign import (
    ForeignKind,
    ForeignWrite,
    foreign_slices,
    is_own,
    kind_of,
    manager_of,
    remembered,
    sentence,
)
from dra_bridge.slices.mirror import Mirror, SliceScope
from dra_bridge.slices.observed import Comparison, ObservedPool
from dra_bridge.slices.plan import Write, generation_of, in_version, neutral, plan
from dra_bridge.slices.published import PoolState as PoolState
from dra_bridge.slices.published import PublishedDriver, RateLimit, SliceWatch

logger: Final = logging.getLogger(__name__)

ROUNDS: Final = 6
"""Maximum number of rounds of writes in sequence. If the slices still differ from the wanted ones, the publisher
waits."""
DELETES: Final = 16
"""Maximum number of foreign slices that are deleted in one round of writes."""
FEW: Final = 4
"""Number of drivers that each have their own watch of slices without a node. All further drivers share one watch.

A field selector cannot name several drivers, so the shared watch gets the slices without a node of all drivers of the
cluster. A node with few drivers does not need these slices. A watch for each of many drivers would take much memory.
"""
LINES: Final = 10.0
"""Minimum seconds between two log lines at WARNING about the same kind of foreign writes."""


class Publisher:
    """Makes the API server's slices of this node equal to the wanted slices, and keeps them equal.

    A watch for all drivers reports the slices that name this node. Other watches report slices that name no node, see
    `FEW`. The API server has indexes for these watches (registry/resource/resourceslice/strategy.go, 1.32 to 1.37). The
    publisher writes again only after a slice was changed or deleted; the kubelet deletes all slices of its node when it
    starts. A failed write is repeated until it succeeds.

    A driver's pool belongs to the agent. The agent undoes what other programs write into the pool, see
    `dra_bridge.slices.foreign`. The agent does not touch slices of other drivers, nodes and pools.
    """

    def __init__(
        self,
        cluster: Cluster,
        node: str,
        *,
        burst: int = 10,
        per_second: float = 0.5,
        probe_again: float = 60.0,
        noticed: Callable[[str, ForeignKind, str], None] = lambda driver, kind, what: None,
    ) -> None:
        """Create a publisher that writes nothing yet: `want` sets the wanted slices, `run` writes them.

        burst: number of rounds of writes for one driver without a wait. per_second: maximum rounds per second after the
        burst. probe_again: seconds between tests of missing features. noticed: a function that is called after a
        foreign write was undone, or if the undo is impossible. Its arguments: the driver, the kind of the write, and a
        sentence that describes the write.
        """
        self.cluster: Final = cluster
        self._node = node
        self._rate_limit = partial(RateLimit, burst, per_second)
        self._features = ServerFeatures(cluster, probe_again)
        self._drivers: dict[str, PublishedDriver] = {}
        self._group: asyncio.TaskGroup | None = None
        self._of_node = SliceWatch(SliceScope.NODE, RESOURCE_SLICES.plural, f"spec.nodeName={node}")
        self._nodeless = SliceWatch(SliceScope.NODELESS, "slices of all drivers without a node", "spec.nodeName=")
        """The watch that the drivers after the first `FEW` share."""
        self._owner: Object | None = None
        self._read_node = SharedCall(lambda: self.cluster.get(kube.NODES, self._node))
        self._changed = asyncio.Event()
        self._noticed = noticed
        self.watch: Final = self._of_node.state
        """The state of the watch of the slices that name the node."""

    def want(self, pool: Pool) -> int:
        """Set the wanted pool of a driver. Return a ticket: the number by which `accepted` waits for this pool.

        Raises ValueError if the pool is for another node.
        """
        if pool.node != self._node:
            raise ValueError(f"the pool is for node {pool.node}, but this publisher writes for node {self._node}")
        driver = self._drivers.get(pool.driver)
        if driver is None:
            nodeless = self._nodeless
            if len(self._drivers) < FEW:
                title = f"slices of {pool.driver} without a node"
                nodeless = SliceWatch(SliceScope.NODELESS, title, f"spec.driver={pool.driver},spec.nodeName=")
            mirror = Mirror(pool.driver, self._node)
            driver = self._drivers[pool.driver] = PublishedDriver(pool, self._rate_limit(), mirror, nodeless)
            for watch in (self._of_node, nodeless):
                if watch.alive:
                    self._relist(driver, watch)
            if self._group is not None:
                self._start(driver, self._group)
        elif driver.pool == pool:
            return driver.state.wanted
        driver.pool = pool
        self._set(driver, wanted=driver.state.wanted + 1)
        driver.wake.set()
        return driver.state.wanted

    async def listed(self, driver: str, seconds: float) -> list[Object] | None:
        """Return a driver's watched slices that name the node; None if the watch does not begin within `seconds`."""
        await in_time(self._of_node.listed.wait(), seconds)
        if not self._of_node.alive:
            return None
        return [body for body in self._of_node.bodies.values() if body["spec"]["driver"] == driver]

    def state(self, driver: str) -> PoolState:
        """Return which slices of a driver's pool the API server has accepted."""
        entry = self._drivers.get(driver)
        return entry.state if entry else PoolState()

    def withdrawn(self, driver: str, device: str) -> float | None:
        """Return since when (monotonic seconds) no slice on the API server offers a device of a driver's pool.

        None means that a slice offers the device, or that the API server's slices are not known. A foreign slice of any
        generation counts, because the scheduler may use it after the other slices are deleted. device: the device's
        published name.
        """
        entry = self._drivers.get(driver)
        if entry is None or entry.lapse(self.watch, time.monotonic()) is not None:
            return None
        return entry.mirror.withdrawn(device)

    def offering(self, driver: str, device: str) -> str:
        """Return the name of a foreign slice that offers a device of a driver's pool; "" if there is none."""
        found = (one.name for one in self.state(driver).foreign if device in one.devices)
        return next(found, "")

    def observed(self, driver: str, now: float) -> ObservedPool:
        """Return the agent's present knowledge of a driver's pool. Any thread may call this. now: monotonic seconds."""
        if (entry := self._drivers.get(driver)) is None:
            return ObservedPool(Comparison(), accepted=False, lapse=self.watch.lapse(now))
        return entry.observed(self.watch, self._owner, self._features.missing, now)

    @property
    def watches(self) -> Mapping[str, WatchState]:
        """The state of each watch; the key names the watched slices. Any thread may read this property."""
        nodeless = [driver.nodeless for driver in list(self._drivers.values())]
        return {watch.title: watch.state for watch in (self._of_node, *nodeless)}

    def failures(self, driver: str) -> Mapping[int, int]:
        """Return, for each HTTP status, how many tries to write a driver's slices have failed.

        The status 0 stands for tries without a response.
        """
        entry = self._drivers.get(driver)
        return dict(entry.failures) if entry is not None else {}

    async def accepted(self, driver: str, ticket: int) -> PoolState:
        """Wait until the API server has accepted the pool of this ticket or of a later one. Return the pool's state."""
        while (state := self.state(driver)).accepted < ticket:
            await self._changed.wait()
        return state

    async def run(self) -> None:
        """Publish until cancelled. The slices stay on the API server afterwards, because prepared claims need them."""
        async with asyncio.TaskGroup() as group:
            self._group = group
            for driver in self._drivers.values():
                self._start(driver, group)
            try:
                await self._follow(self._of_node)
            finally:
                self._group = None  # The task group is ending now, and accepts no new workers.

    async def _follow(self, watch: SliceWatch) -> None:
        follow = self.cluster.follow(
            RESOURCE_SLICES, watch.state, field_selector=watch.selector, keep=self._is_of_this_node
        )
        async with aclosing(follow) as events:
            async for event in events:
                if isinstance(event, kube.Changed):
                    if self._is_of_this_node(event.object):
                        self._observe(watch, neutral(event.object), deleted=event.type == "DELETED")
                    continue
                watch.bodies = {body["metadata"]["name"]: body for body in map(neutral, event.items)}
                drivers = [one for one in self._drivers.values() if watch in (self._of_node, one.nodeless)]
                for driver in drivers:
                    self._relist(driver, watch, new_watch=True)
                if watch is self._of_node:
                    self._owner = None  # Read the Node again: it may have been replaced.
                    self._features.forget_missing()
                for driver in drivers:
                    driver.show()
                    driver.wake.set()
                watch.listed.set()

    def _selector(self, driver: PublishedDriver, scope: SliceScope) -> str:
        return f"spec.driver={driver.pool.driver},spec.nodeName={self._node if scope is SliceScope.NODE else ''}"

    def _observe(self, watch: SliceWatch, body: Object, *, deleted: bool) -> None:
        watch.bodies.pop(body["metadata"]["name"], None)
        if not deleted:
            watch.bodies[body["metadata"]["name"]] = body
        driver = self._drivers.get(body["spec"]["driver"])
        if driver is None or watch not in (self._of_node, driver.nodeless):
            return
        if not driver.mirror.observe(body, deleted=deleted):
            return
        if deleted:
            self._owner = None  # Read the Node again: it may have been replaced.
        else:
            self._features.learn(body)
        driver.show()
        driver.wake.set()

    def _relist(self, driver: PublishedDriver, watch: SliceWatch, *, new_watch: bool = False) -> None:
        driver.mirror.relist(watch.scope, new_watch=new_watch)
        for body in watch.bodies.values():
            if body["spec"]["driver"] == driver.pool.driver:
                self._keep(driver, body)

    def _keep(self, driver: PublishedDriver, body: Object) -> None:
        driver.mirror.keep(body)
        self._features.learn(body)

    def _is_of_this_node(self, body: Object) -> bool:
        """Return whether a slice names this node, or names no node and is in a pool of this node's name."""
        spec = body.get("spec") or {}
        return bool((spec.get("nodeName") or (spec.get("pool") or {}).get("name")) == self._node)

    def _start(self, driver: PublishedDriver, group: asyncio.TaskGroup) -> None:
        group.create_task(self._work(driver), name=f"slices of {driver.pool.driver}")
        if not driver.nodeless.begun:
            driver.nodeless.begun = True
            group.create_task(self._follow(driver.nodeless), name=driver.nodeless.title)

    async def _work(self, driver: PublishedDriver) -> None:
        backoff = self.cluster.backoff.fresh()
        conflicts = 0
        while True:
            await driver.wake.wait()
            await self._of_node.listed.wait()
            await driver.nodeless.listed.wait()
            driver.wake.clear()
            wait, done = 0.0, False
            try:
                done = await self._try(driver)
            except (kube.ConflictError, NotFoundError, kube.VersionChangedError) as error:
                # The local copy of the slices was out of date: list the server's slices, and try again.
                driver.mirror.listed.clear()
                conflicts += 1
                if isinstance(error, NotFoundError):
                    self._owner = None
                if conflicts > 1:
                    wait = backoff.next()
                if conflicts == 5:
                    self._problem(driver, f"the slices cannot be written: {error}")
            except kube.InvalidError as error:
                self._features.refused()
                causes = "; ".join(f"{cause.field}: {cause.message}" for cause in error.causes[:5])
                self._problem(driver, f"the API server refuses the slices: {causes or error.message}")
                # An admission policy may have changed a short time ago, and some API servers may not know the change
                # yet. So the write is tried again after growing pauses, and later only seldom.
                wait = backoff.next()
                if wait > backoff.most / 2:
                    wait = 10 * backoff.longest()
            except (ApiError, kube.UnsupportedError) as error:
                if not isinstance(error, kube.UnavailableError) or error.code:
                    self._problem(driver, f"the slices cannot be written: {error}")
                wait = backoff.next()
                if isinstance(error, ApiError):
                    wait = max(wait, min(error.retry_after, backoff.most))
            except Exception as error:  # A failure with one driver's devices must not end other drivers' workers.
                self._problem(driver, f"the slices cannot be made: {type(error).__name__}: {error}")
                wait = backoff.next()
            else:
                conflicts = 0
                backoff.reset()
                wait = 0.0 if done else backoff.longest()
            if not done:
                driver.wake.set()
            if wait:
                await self._pause(driver, wait)

    async def _try(self, driver: PublishedDriver) -> bool:
        """List the server's slices if necessary, and write the wanted slices.

        Return False if the API server's slices still differ from the wanted ones after `ROUNDS` rounds of writes.
        """
        try:
            # A scope must be listed if its watch was lost when the driver was added, or if the result of a write is
            # unknown.
            for scope in [one for one in SliceScope if one not in driver.mirror.listed]:
                selector = self._selector(driver, scope)
                listing = await self.cluster.list(RESOURCE_SLICES, field_selector=selector)
                driver.mirror.relist(scope)
                for item in filter(self._is_of_this_node, listing.items):
                    self._keep(driver, neutral(item))
            done = await self._reconcile(driver)
        except Exception as error:
            driver.failed(error)
            raise
        finally:
            driver.show()
        if done:
            driver.failing = None
        return done

    async def _pause(self, driver: PublishedDriver, seconds: float) -> None:
        """Wait after a failure. Return early if the wanted slices change while the API server can be reached."""
        ticket = driver.state.wanted

        async def newer() -> None:
            while driver.state.wanted == ticket or self.cluster.statistics.lost_since is not None:
                await self._changed.wait()

        waits = {asyncio.ensure_future(self.cluster.pause(seconds)), asyncio.ensure_future(newer())}
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in waits:
                task.cancel()

    async def _reconcile(self, driver: PublishedDriver) -> bool:
        """Write the wanted slices. Return False if the server's slices still differ after `ROUNDS` rounds."""
        pool, ticket, mirror = driver.pool, driver.state.wanted, driver.mirror
        version = await self.cluster.version()
        for _ in range(ROUNDS):
            self._see_foreign(driver)
            wanted = desired(pool, without=self._features.missing, taken=mirror.taken)
            if wanted is None:
                return True
            if await self._features.probe(pool, wanted, version):
                continue
            await self._know_owner(wanted)
            bodies = list(mirror.bodies.values())
            writes = plan(
                wanted.slices,
                [body for body in bodies if body["spec"]["pool"]["name"] == self._node],
                owner=self._owner,
                generation=mirror.generation,
                mutations=mirror.mutations,
                times=mirror.times,
            )
            writes = [write for write in writes if not self._is_foreign(write)]
            # A foreign slice does not keep the pool from being accepted, because the foreign slice may never disappear.
            clearing = self._clearing(driver)
            if not writes:
                self._finish(driver, wanted, ticket)
                if not clearing:
                    return True
            if await driver.rate_limit.round(ticket) and driver.state.wanted != ticket:
                return True  # The wanted slices changed during the wait, so the worker begins again.
            for write in writes:
                await self._write(driver, write, version)
            for body in clearing:
                await self._clear(driver, body)
        if driver.state.accepted >= ticket:
            # The slices differ again only because other programs write. The rate limit bounds how often the agent
            # undoes such writes.
            driver.wake.set()
            return True
        text = f"the API server still has other slices after {ROUNDS} rounds of writes"
        driver.failed(kube.ClusterError(text))
        self._problem(driver, text)
        return False

    def _is_foreign(self, write: Write) -> bool:
        return write.verb == "delete" and not is_own(write.body, write.body["spec"]["driver"], self._node)

    def _see_foreign(self, driver: PublishedDriver) -> None:
        """Record the foreign slices in the pool, and their names, which the wanted slices then do not get."""
        bodies, name = driver.mirror.bodies, driver.pool.driver
        driver.refused = {uid: why for uid, why in driver.refused.items() if uid in set(map(_uid, bodies.values()))}
        refused = {uid: why for uid, (why, _) in driver.refused.items()}
        foreign = tuple(foreign_slices(bodies.values(), name, self._node, refused))
        driver.mirror.taken |= {one.name for one in foreign if own_name(self._node, name, one.name)}
        if foreign != driver.state.foreign:
            known = {one.uid for one in driver.state.foreign}
            self._set(driver, foreign=foreign)
            for one in foreign:
                if one.kind is ForeignKind.POOL and one.uid not in known:
                    self._report(driver, one.kind, sentence(one.kind, one.name, one.manager))

    def _clearing(self, driver: PublishedDriver) -> list[Object]:
        """Return up to `DELETES` foreign slices to delete now, beginning with slices of the highest generation."""
        now = time.monotonic()
        found = [
            body
            for body in driver.mirror.bodies.values()
            if body["spec"]["pool"]["name"] == self._node
            and not is_own(body, driver.pool.driver, self._node)
            and not body["metadata"].get("deletionTimestamp")
            and driver.refused.get(_uid(body), ("", 0.0))[1] <= now
        ]
        return sorted(found, key=generation_of, reverse=True)[:DELETES]

    async def _clear(self, driver: PublishedDriver, body: Object) -> None:
        """Delete a foreign slice. If the API server refuses the deletion, try again later.

        A slice with finalizers stays until other programs have removed its finalizers.
        """
        kind, name, manager = kind_of(body, self._node), body["metadata"]["name"], manager_of(body)
        try:
            await self._delete(driver, body)
        except (kube.ForbiddenError, kube.InvalidError) as error:  # Admission policies cause an InvalidError.
            again = 10 * self.cluster.backoff.longest()
            driver.refused[_uid(body)] = (error.message, time.monotonic() + again)
            asyncio.get_running_loop().call_later(again + 0.01, driver.wake.set)
            what = f"{sentence(kind, name, manager)}; it cannot be deleted: {error.message}"
        else:
            left = driver.mirror.bodies.get(name)
            if left is not None and _uid(left) == _uid(body):
                what = f"{sentence(kind, name, manager)}; it is being deleted and waits for its finalizers"
            else:
                self._overcame(driver, kind, name, manager)
                return
        self._report(driver, kind, what)

    def _report(self, driver: PublishedDriver, kind: ForeignKind, what: str) -> None:
        """Log a foreign write, and pass it to `noticed`.

        At WARNING, only one line for each kind is logged in `LINES` seconds.
        """
        now = time.monotonic()
        rarely = now - driver.reported.get(kind, -math.inf) < LINES
        if not rarely:
            driver.reported[kind] = now
        logger.log(logging.DEBUG if rarely else logging.WARNING, "%s", what, extra={"driver": driver.pool.driver})
        self._noticed(driver.pool.driver, kind, what)

    def _overcame(self, driver: PublishedDriver, kind: ForeignKind, name: str, manager: str) -> None:
        """Count and report a foreign write that the agent has undone."""
        state, what = driver.state, sentence(kind, name, manager)
        recent = remembered(state.recent, ForeignWrite(kind, name, manager, time.monotonic()))
        self._set(driver, overcome={**state.overcome, kind: state.overcome.get(kind, 0) + 1}, recent=recent)
        if kind is not ForeignKind.DELETED:  # The kubelet deletes slices at each start.
            self._report(driver, kind, f"{what}; the agent has undone it")

    async def _know_owner(self, wanted: Desired) -> None:
        if self._owner is None and wanted.slices:
            node = await self._read_node()
            self._owner = {
                "apiVersion": "v1",
                "kind": "Node",
                "name": self._node,
                "uid": node["metadata"]["uid"],
                "controller": True,
            }

    async def _write(self, driver: PublishedDriver, write: Write, version: str) -> None:
        """Execute a write: create, replace or delete one of the agent's own slices."""
        mirror, name = driver.mirror, write.body["metadata"]["name"]
        if write.verb == "delete":
            await self._delete(driver, write.body)
            return
        undone = self._undone(mirror, name)
        manager = manager_of(mirror.bodies[name]) if name in mirror.bodies else ""
        body = in_version(write.body, version)
        send = self.cluster.create if write.verb == "create" else self.cluster.replace
        mirror.gone.clear()
        try:
            answer = neutral(await send(RESOURCE_SLICES, body))
        except kube.UnavailableError as error:
            if error.code != 429:
                # The server may have executed this write, or may execute it later. So the slices are listed again, and
                # written in a generation above all others. If the server executes this write later, it fails because
                # its resourceVersion is old, or it creates a slice of an older generation, which the scheduler does not
                # use.
                mirror.unanswered(write.body)
            raise
        except kube.ConflictError:
            if write.verb == "create" and await self._is_taken(driver, name):
                mirror.taken.add(name)
                self._overcame(driver, ForeignKind.NAME, name, "")
            raise
        # Fields that the server has dropped show that it lacks features. Fields that it has changed are recorded as
        # mutations, so that they are not sent again.
        missing = features_of(write.body) - features_of(answer)
        self._features.lacks(missing)
        if mirror.wrote(write.body, answer) and not missing:
            text = "the API server or a webhook changes the slices that are written; they are not written again"
            self._warn_once(driver, text)
        if _uid(answer) in mirror.gone:
            # The slice was deleted meanwhile: the watch reported the deletion before the response to the write arrived.
            driver.wake.set()
        else:
            self._keep(driver, answer)
        self._set(driver, writes=driver.state.writes + 1)
        if undone is not None:
            self._overcame(driver, undone, name, manager)

    def _undone(self, mirror: Mirror, name: str) -> ForeignKind | None:
        """Return the kind of another program's change that the next write of this slice undoes; None for no change."""
        if mirror.lost(name):
            return ForeignKind.DELETED
        if (body := mirror.bodies.get(name)) is None:
            return None
        if generation_of(body) > mirror.generation:
            return ForeignKind.GENERATION
        return ForeignKind.EDITED if mirror.edited(name) else None

    async def _is_taken(self, driver: PublishedDriver, name: str) -> bool:
        """Return whether a slice outside the pool has this name.

        Such a slice is not in the agent's lists and watches, but prevents the create of another slice with this name.
        """
        try:
            found = neutral(await self.cluster.get(RESOURCE_SLICES, name))
        except NotFoundError:
            return False
        return not is_own(found, driver.pool.driver, self._node)

    async def _delete(self, driver: PublishedDriver, body: Object) -> None:
        metadata, left = body["metadata"], None
        driver.mirror.gone.clear()
        try:
            with suppress(NotFoundError):
                left = await self.cluster.delete(RESOURCE_SLICES, metadata["name"], uid=metadata.get("uid", ""))
        except kube.UnavailableError as error:
            if error.code != 429:
                # The server may have deleted the slice, or may delete it later, so the slices are listed again.
                driver.mirror.listed.clear()
            raise
        if left is not None and left["metadata"].get("finalizers"):
            driver.mirror.keep(neutral(left))
        else:
            driver.mirror.deleted(body)
        self._set(driver, writes=driver.state.writes + 1)

    def _finish(self, driver: PublishedDriver, wanted: Desired, ticket: int) -> None:
        unsupported = self._features.missing & wanted.needs
        for message in (*(WITHOUT[feature] for feature in sorted(unsupported)), *wanted.problems):
            self._warn_once(driver, message)
        bodies = [body for body in driver.mirror.bodies.values() if is_own(body, driver.pool.driver, self._node)]
        self._set(
            driver,
            accepted=max(ticket, driver.state.accepted),
            generation=max(map(generation_of, bodies), default=0),
            slices=len(bodies),
            devices=frozenset(device["name"] for body in bodies for device in body["spec"].get("devices") or ()),
            unsupported=frozenset(unsupported),
            problems=wanted.problems,
        )
        driver.left_out = wanted.problems

    def _problem(self, driver: PublishedDriver, message: str) -> None:
        """Record why the last try to write failed, instead of the reason of the previous try."""
        self._set(driver, problems=(*driver.left_out, message))
        self._warn_once(driver, message)

    def _warn_once(self, driver: PublishedDriver, message: str) -> None:
        if message not in driver.warned:
            if len(driver.warned) >= 1000:
                driver.warned.clear()
            driver.warned.add(message)
            logger.warning("%s", message, extra={"driver": driver.pool.driver})

    def _set(self, driver: PublishedDriver, **changes: Any) -> None:
        driver.state = replace(driver.state, **changes)
        self._changed.set()
        self._changed = asyncio.Event()


def _uid(body: Object) -> str:
    return str(body["metadata"].get("uid", ""))


async def remove_slices(cluster: Cluster, drivers: Iterable[str], node: str = "") -> int:
    """Delete the slices of these drivers on one node, or on all nodes (""). Return the number of deleted slices.

    This function is for the uninstallation. No publisher may run, because a running publisher writes the slices again.
    """
    removed = 0
    for driver in drivers:
        selector = f"spec.driver={driver}" + (f",spec.nodeName={node}" if node else "")
        for item in (await cluster.list(RESOURCE_SLICES, field_selector=selector)).items:
            with suppress(NotFoundError):
                await cluster.delete(RESOURCE_SLICES, item["metadata"]["name"], uid=item["metadata"].get("uid", ""))
                removed += 1
    return removed
