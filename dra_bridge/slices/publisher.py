"""Keeps this node's ResourceSlices on the API server equal to the desired ones."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Iterable
from contextlib import aclosing, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final

from dra_bridge import kube
from dra_bridge.kube import RESOURCE_SLICES, ApiError, Cluster, NotFoundError, Object
from dra_bridge.slices.desired import Desired, Pool, desired
from dra_bridge.slices.features import WITHOUT, ServerFeatures, features_of
from dra_bridge.slices.mirror import Mirror
from dra_bridge.slices.plan import Write, generation_of, in_version, neutral, plan

logger: Final = logging.getLogger(__name__)

ROUNDS: Final = 6
"""How often in a row slices are written until the server has them as they are wanted."""


@dataclass(frozen=True, slots=True)
class PoolState:
    """The state of a driver's pool.

    wanted, accepted: the tickets of the newest `want` and of the newest one that the API server has. slices: how many
    there are. devices: names of the devices in them. unsupported: features that the server lacks. problems: what was
    left out and why, or what keeps the server from accepting it. writes: successful ones.
    """

    wanted: int = 0
    accepted: int = 0
    generation: int = 0
    slices: int = 0
    devices: frozenset[str] = frozenset()
    unsupported: frozenset[str] = frozenset()
    problems: tuple[str, ...] = ()
    writes: int = 0


class _RateLimit:
    """Makes rounds of writes wait when there were too many lately: agents that disagree must not flood the server.

    The first round for a ticket is what this node itself wants (each device that moves takes two or three): ten times
    as many of these are allowed.
    """

    def __init__(self, burst: int, per_second: float) -> None:
        self._burst = burst
        self._per_second = per_second
        self._ticket = 0
        self._rounds = deque[float](maxlen=burst), deque[float](maxlen=10 * burst)
        """When the last rounds of writes began: again for the same ticket, and the first for each."""

    async def round(self, ticket: int) -> bool:
        """Count a round of writes; wait first, and return True, if there were too many lately."""
        now = asyncio.get_running_loop().time()
        first = ticket != self._ticket
        self._ticket = ticket
        rounds, times = self._rounds[first], 10 if first else 1
        many = len(rounds) == rounds.maxlen and now - rounds[0] < self._burst / self._per_second
        if many:
            await asyncio.sleep(1.0 / (self._per_second * times))
        rounds.append(now)
        return many


@dataclass(slots=True, eq=False)
class _PublishedDriver:
    """The publisher's state of one driver."""

    pool: Pool
    rate_limit: _RateLimit
    state: PoolState = field(default_factory=PoolState)
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    mirror: Mirror = field(default_factory=Mirror)
    warned: set[str] = field(default_factory=set)


class Publisher:
    """Makes this node's slices on the API server equal to the desired ones, and keeps them so.

    There is one watch for all drivers. Slices of other drivers, nodes and pools are not touched. It writes only after
    a slice was changed or deleted (the kubelet deletes all slices of its node when it starts). A failed write is
    repeated until it succeeds.
    """

    def __init__(
        self, cluster: Cluster, node: str, *, burst: int = 10, per_second: float = 0.5, probe_again: float = 60.0
    ) -> None:
        """Do nothing yet: `want` sets the desired slices, `run` writes them.

        burst, per_second: how many rounds of writes a driver may make at once, and how fast that is regained.
        probe_again: see `ServerFeatures`.
        """
        self.cluster: Final = cluster
        self._node = node
        self._rate_limit = partial(_RateLimit, burst, per_second)
        self._features = ServerFeatures(cluster, probe_again)
        self._drivers: dict[str, _PublishedDriver] = {}
        self._group: asyncio.TaskGroup | None = None
        self._listed = asyncio.Event()
        self._owner: Object | None = None
        self._changed = asyncio.Event()

    def want(self, pool: Pool) -> int:
        """Set the desired pool of a driver; return a ticket for `accepted`.

        Raises ValueError if the pool is for another node.
        """
        if pool.node != self._node:
            raise ValueError(f"this publisher is for node {self._node}, not {pool.node}")
        driver = self._drivers.get(pool.driver)
        if driver is None:
            driver = self._drivers[pool.driver] = _PublishedDriver(pool, self._rate_limit())
            if self._group is not None:
                self._start(driver, self._group)
        elif driver.pool == pool:
            return driver.state.wanted
        driver.pool = pool
        self._set(driver, wanted=driver.state.wanted + 1)
        driver.wake.set()
        return driver.state.wanted

    def state(self, driver: str) -> PoolState:
        """Return the state of a driver's pool."""
        entry = self._drivers.get(driver)
        return entry.state if entry else PoolState()

    async def accepted(self, driver: str, ticket: int) -> PoolState:
        """Wait until the API server has the pool of this ticket or of a later one."""
        while (state := self.state(driver)).accepted < ticket:
            await self._changed.wait()
        return state

    async def run(self) -> None:
        """Publish until cancelled. The slices stay then, since claims in use need them."""
        async with asyncio.TaskGroup() as group:
            self._group = group
            for driver in self._drivers.values():
                self._start(driver, group)
            try:
                await self._watch()
            finally:
                self._group = None  # a group that is ending takes no more workers

    async def _watch(self) -> None:
        selector = f"spec.nodeName={self._node}"
        async with aclosing(self.cluster.follow(RESOURCE_SLICES, field_selector=selector)) as events:
            async for event in events:
                if isinstance(event, kube.Changed):
                    self._observe(neutral(event.object), deleted=event.type == "DELETED")
                    continue
                self._owner = None  # the Node may be another one
                for driver in self._drivers.values():
                    driver.mirror.relist(new_watch=True)
                for item in event.items:
                    self._keep(neutral(item))
                self._features.forget_missing()
                for driver in self._drivers.values():
                    driver.wake.set()
                self._listed.set()

    def _observe(self, body: Object, *, deleted: bool) -> None:
        driver = self._driver_of(body)
        if driver is None or not driver.mirror.observe(body, deleted=deleted):
            return
        if deleted:
            self._owner = None  # the Node may be another one
        else:
            self._features.learn(body)
        driver.wake.set()

    def _keep(self, body: Object) -> None:
        driver = self._driver_of(body)
        if driver is not None:
            driver.mirror.keep(body)
            self._features.learn(body)

    def _driver_of(self, body: Object) -> _PublishedDriver | None:
        spec = body.get("spec") or {}
        if spec.get("nodeName") != self._node or (spec.get("pool") or {}).get("name") != self._node:
            return None
        return self._drivers.get(spec.get("driver", ""))

    def _start(self, driver: _PublishedDriver, group: asyncio.TaskGroup) -> None:
        group.create_task(self._work(driver), name=f"slices of {driver.pool.driver}")

    async def _work(self, driver: _PublishedDriver) -> None:
        backoff = self.cluster.backoff.fresh()
        conflicts = 0
        while True:
            await driver.wake.wait()
            await self._listed.wait()
            driver.wake.clear()
            wait, done = 0.0, False
            try:
                if not driver.mirror.listed:  # it joined after the watch began, or what the server has is in doubt
                    selector = f"spec.nodeName={self._node},spec.driver={driver.pool.driver}"
                    listing = await self.cluster.list(RESOURCE_SLICES, field_selector=selector)
                    driver.mirror.relist()
                    for item in listing.items:
                        self._keep(neutral(item))
                done = await self._reconcile(driver)
            except (kube.ConflictError, NotFoundError, kube.VersionChangedError) as error:
                # What the server has is not what the watch reported: read it, and try again.
                driver.mirror.listed = False
                conflicts += 1
                if isinstance(error, NotFoundError):
                    self._owner = None
                if conflicts > 1:
                    wait = backoff.next()
                if conflicts == 5:
                    self._problem(driver, f"the slices cannot be written: {error}")
            except kube.InvalidError as error:
                causes = "; ".join(f"{cause.field}: {cause.message}" for cause in error.causes[:5])
                self._problem(driver, f"the API server refuses the slices: {causes or error.message}")
                # It may be a policy that was just changed and that not every server knows yet. Once the waits have
                # grown to their maximum, only something else that is wanted will help.
                wait = backoff.next()
                if wait > backoff.most / 2:
                    wait = 10 * backoff.longest()
            except (ApiError, kube.UnsupportedError) as error:
                if not isinstance(error, kube.UnavailableError) or error.code:
                    self._problem(driver, f"the slices cannot be written: {error}")
                wait = backoff.next()
                if isinstance(error, ApiError):
                    wait = max(wait, min(error.retry_after, backoff.most))
            except Exception as error:  # one driver's devices must not end the others
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

    async def _pause(self, driver: _PublishedDriver, seconds: float) -> None:
        """Wait after a failure; end early if the desired slices change and the server answers."""
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

    async def _reconcile(self, driver: _PublishedDriver) -> bool:
        """Write the desired slices; return False if they do not become stable."""
        pool, ticket = driver.pool, driver.state.wanted
        version = await self.cluster.version()
        for _ in range(ROUNDS):
            wanted = desired(pool, without=self._features.missing)
            if wanted is None:
                return True
            if await self._features.probe(pool, wanted, version):
                continue
            await self._know_owner(wanted)
            writes = plan(
                wanted.slices,
                list(driver.mirror.bodies.values()),
                owner=self._owner,
                generation=driver.mirror.generation,
                mutations=driver.mirror.mutations,
                times=driver.mirror.times,
            )
            if not writes:
                self._finish(driver, wanted, ticket)
                return True
            if await driver.rate_limit.round(ticket) and driver.state.wanted != ticket:
                return True  # something newer is wanted and has woken the worker
            for write in writes:
                try:
                    await self._write(driver, write, version)
                except kube.UnavailableError as error:
                    if error.code != 429:
                        # It may have been carried out, or may be later. So the slices are read again and written in
                        # a generation that is newer than all. The late write then names an older resourceVersion and
                        # is refused, or it makes a slice of an older generation, which the scheduler does not use.
                        driver.mirror.unanswered(write.body)
                    raise
        self._problem(driver, f"the API server still has other slices after {ROUNDS} rounds of writes")
        return False

    async def _know_owner(self, wanted: Desired) -> None:
        if self._owner is None and wanted.slices:
            node = await self.cluster.get(kube.NODES, self._node)
            self._owner = {
                "apiVersion": "v1",
                "kind": "Node",
                "name": self._node,
                "uid": node["metadata"]["uid"],
                "controller": True,
            }

    async def _write(self, driver: _PublishedDriver, write: Write, version: str) -> None:
        metadata = write.body["metadata"]
        if write.verb == "delete":
            with suppress(NotFoundError):
                await self.cluster.delete(RESOURCE_SLICES, metadata["name"], uid=metadata.get("uid", ""))
            driver.mirror.deleted(write.body)
        else:
            body = in_version(write.body, version)
            send = self.cluster.create if write.verb == "create" else self.cluster.replace
            driver.mirror.gone.clear()
            answer = neutral(await send(RESOURCE_SLICES, body))
            # What the server dropped or changed is not sent again.
            missing = features_of(write.body) - features_of(answer)
            self._features.lacks(missing)
            if driver.mirror.compare(write.body, answer) and not missing:
                text = "the API server or a webhook changes the slices that are written; they are not written again"
                self._warn_once(driver, text)
            if answer["metadata"].get("uid", "") in driver.mirror.gone:
                driver.wake.set()  # it has been deleted since, and the watch was faster than the answer
            else:
                self._keep(answer)
        self._set(driver, writes=driver.state.writes + 1)

    def _finish(self, driver: _PublishedDriver, wanted: Desired, ticket: int) -> None:
        unsupported = self._features.missing & wanted.needs
        for message in (*(WITHOUT[feature] for feature in sorted(unsupported)), *wanted.problems):
            self._warn_once(driver, message)
        bodies = driver.mirror.bodies.values()
        self._set(
            driver,
            accepted=max(ticket, driver.state.accepted),
            generation=max(map(generation_of, bodies), default=0),
            slices=len(bodies),
            devices=frozenset(device["name"] for body in bodies for device in body["spec"].get("devices") or ()),
            unsupported=frozenset(unsupported),
            problems=wanted.problems,
        )

    def _problem(self, driver: _PublishedDriver, message: str) -> None:
        self._set(driver, problems=tuple(dict.fromkeys((*driver.state.problems, message)))[-20:])
        self._warn_once(driver, message)

    def _warn_once(self, driver: _PublishedDriver, message: str) -> None:
        if message not in driver.warned:
            if len(driver.warned) >= 1000:
                driver.warned.clear()
            driver.warned.add(message)
            logger.warning("%s", message, extra={"driver": driver.pool.driver})

    def _set(self, driver: _PublishedDriver, **changes: Any) -> None:
        driver.state = replace(driver.state, **changes)
        self._changed.set()
        self._changed = asyncio.Event()


async def remove_slices(cluster: Cluster, drivers: Iterable[str], node: str = "") -> int:
    """Delete the slices of these drivers, on one node or on all; return how many there were.

    For uninstalling; a publisher that still runs would write them again.
    """
    removed = 0
    for driver in drivers:
        selector = f"spec.driver={driver}" + (f",spec.nodeName={node}" if node else "")
        for item in (await cluster.list(RESOURCE_SLICES, field_selector=selector)).items:
            with suppress(NotFoundError):
                await cluster.delete(RESOURCE_SLICES, item["metadata"]["name"], uid=item["metadata"].get("uid", ""))
                removed += 1
    return removed
