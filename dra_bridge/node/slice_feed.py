"""Computes the wanted slices of one driver from its devices, and reports the progress of moves in the Lease."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Final

from deviceplugin import naming
from deviceplugin.register import operations
from deviceplugin.tasks import in_time
from dra_bridge.driver import Registrar
from dra_bridge.kube import RESOURCE_SLICES
from dra_bridge.node.resource import DriverContext, section
from dra_bridge.rollout import progress
from dra_bridge.slices.desired import Offer, Pool
from dra_bridge.slices.foreign import is_own

_LOG: Final = logging.getLogger(__name__)
FIRST: Final = 5.0
"""Maximum seconds for which the first slices wait for two events: the kubelet has registered the driver, and the
holders of all devices are known."""
HOLDERS: Final = 10.0
"""Minimum seconds between two progress reports of a driver in the Lease, if only the holders of devices have
changed."""
RETRY: Final = 5.0
"""Seconds until the slices are computed again after their computation has failed."""
NAMES: Final = 2.0
"""Maximum seconds for which `decide_names` waits for the watch of slices. After this time, `decide_names` lists the
slices."""
DEBOUNCE: Final = 0.1
"""Seconds from a change of devices to the computation of new slices. Changes within this time are combined."""


async def decide_names(context: DriverContext, resource: str) -> bool:
    """Decide and record the published names of a resource's devices. Return False if they were recorded before.

    Published and allocated devices keep their names. If the ledger file has no names, because it is new or was lost,
    the former names are read from the slices, or from the last report, at the API server.

    Raises LedgerError, ClusterError or TimeoutError if the names cannot be decided now.
    """
    kept = context.qualifiers()
    if resource in kept:
        return False
    services = context.node.agent.services.values()
    served = [service.resource for service in services if service.source.driver == context.name]
    if not kept:
        pool = context.node.name
        selector = f"spec.nodeName={pool},spec.driver={context.name}"
        async with asyncio.timeout(5.0):
            slices = await context.node.publisher.listed(context.name, NAMES)
            if slices is None:
                slices = (await context.node.cluster.list(RESOURCE_SLICES, field_selector=selector)).items
            leases = await context.node.lease.read()
        own = [body for body in slices if is_own(body, context.name, pool)]
        before = progress.read(context.name, [*own, *leases])
        kept = before.qualifiers if before is not None else {}
    for name, qualifier in naming.kept_qualifiers(kept, served).items():
        await context.ledger.do(operations.set_setting(section(context.name), name, qualifier))
    return True


class SliceFeed:
    """Passes one driver's wanted slices to the publisher. Tells moves since when no slice offers a device."""

    def __init__(self, context: DriverContext, registrar: Registrar) -> None:
        self._context = context
        self._publisher, self._register = context.node.publisher, context.node.agent.register
        self._registrar = registrar
        self._changed = asyncio.Event()
        self._passed = asyncio.Event()
        self._without: dict[tuple[str, str], tuple[int, float | None]] = {}
        """For each device that the slices must not contain: the ticket (`Publisher.want`) of the first slices without
        the device, and when the API server accepted these slices (monotonic seconds; None if not yet)."""
        self._reported: tuple[progress.Progress, str, float] | None = None
        """The last report, its text without holders, and when this report was made (monotonic seconds)."""
        self._begun = False
        """Whether slices may be passed to the publisher, because the first report was written."""

    def publish(self) -> None:
        """Compute the slices again, after `DEBOUNCE` seconds."""
        self._changed.set()

    def withdrawn(self, resource: str, device: str) -> float | None:
        """Return the time since which no slice offers a device (monotonic seconds); None if a slice may offer it.

        Slices of other programs are checked too, and the agent's own slice, because another program may have added the
        device.
        """
        ticket, at = self._without.get((resource, device), (0, None))
        if at is None and ticket and self._publisher.state(self._context.name).accepted >= ticket:
            at = time.monotonic()
            self._without[resource, device] = ticket, at
        since = self._publisher.withdrawn(self._context.name, self._published(resource, device))
        return None if at is None or since is None else max(at, since)

    def offering(self, resource: str, device: str) -> str:
        """Return the name of a slice of another program that offers the device; "" if there is none."""
        return self._publisher.offering(self._context.name, self._published(resource, device))

    def _published(self, resource: str, device: str) -> str:
        qualifier = self._context.qualifiers().get(resource, "")
        return naming.device_name(device, qualifier)

    async def run(self) -> None:
        """Compute the slices and pass them to the publisher after each change (`publish`), until cancelled."""
        first = time.monotonic() + FIRST
        rest: float | None = 0.0
        while True:
            await in_time(self._changed.wait(), rest)
            await asyncio.sleep(DEBOUNCE)
            self._changed.clear()
            for runtime in self._context.resources.values():
                # A device may have been plugged in while its record was deleted, so the device must be reconciled
                # again.
                runtime.changed.set()
            rest = first - time.monotonic()
            # The first slices wait until the driver is registered. Before that, the start of a pod with a claim fails,
            # and the kubelet tries again only a minute later. An earlier agent's slices stay until the ledger file was
            # compared with evidence.
            reconciled = all(runtime.reconciled.is_set() for runtime in self._context.resources.values())
            if rest <= 0 or (self._registrar.statistics.registrations and reconciled):
                try:
                    rest = None
                    if self._may_publish():
                        await self._begin()
                        rest = self._pass_on()
                except Exception:  # A failure with one driver's devices must not stop other drivers.
                    _LOG.exception(
                        "cannot compute the slices; published slices stay", extra={"driver": self._context.name}
                    )
                    rest = RETRY

    async def follow_accepted(self) -> None:
        """Until cancelled, wake moves of devices when the API server has accepted the slices for which they wait."""
        while True:
            self._passed.clear()
            state = self._publisher.state(self._context.name)
            if state.accepted < state.wanted:
                await self._publisher.accepted(self._context.name, state.wanted)
                for runtime in self._context.resources.values():
                    runtime.handover.wake()
            else:
                await self._passed.wait()

    def _may_publish(self) -> bool:
        if self._context.node.watch.annotations is None:
            return False  # The unread Node annotations may request a pool without devices (rollout).
        # If the driver has resources, the published names of their devices are needed first. A driver without resources
        # needs no names, because its slices are removed.
        if self._context.resources and not self._context.qualifiers():
            return False
        snapshots = [runtime.listed for runtime in self._context.resources.values()]
        keys = {(snapshot.resource, name) for snapshot in snapshots for name in snapshot.devices}
        return any(self._context.ready(*key) for key in keys) or (not keys and all(each.listed for each in snapshots))

    async def _begin(self) -> None:
        """Write the report before the first slices, which may replace a slice that has an older agent's report."""
        if not self._begun:
            report, _ = self._report()
            self._context.node.lease.report(self._context.name, report)
            await self._context.node.lease.attempted(FIRST)
            self._begun = True

    def _pass_on(self) -> float | None:
        """Pass the report to the Lease and the slices to the publisher.

        Return the seconds until the next call is due; None if no call is due before a change.
        """
        report, rest = self._report()
        self._context.node.lease.report(self._context.name, report)
        offers, without, qualifiers = [], [], self._context.qualifiers()
        records = self._context.ledger.snapshot
        for resource, runtime in self._context.resources.items():
            source, snapshot = runtime.service.source, runtime.listed
            recorded = records.of(resource)
            if runtime.leaving:
                without += [(resource, name) for name in snapshot.devices.keys() | recorded.keys()]
                continue
            mine = {name for name, at in recorded.items() if at.state.offered and at.driver == self._context.name}
            names = snapshot.devices.keys() & mine
            offered = frozenset(name for name in names if self._context.ready(resource, name))
            if self._context.bypassed(resource):
                offered = frozenset(name for name in offered if records.claims_on(resource, (name,)))
            if offered:
                withheld = self._register.withheld(resource, "dra")
                self._register.offered(resource, "dra", withheld)
                offered -= withheld.ids.keys()
            without += [(resource, name) for name in (snapshot.devices.keys() | recorded.keys()) - offered]
            replicas = {name: len(runtime.service.ids_now(device)) for name, device in snapshot.devices.items()}
            order = runtime.order.of(snapshot.devices.keys(), source.links)
            offers.append(Offer(snapshot, offered, replicas, order, qualifiers.get(resource, "")))
        effects = {runtime.policy.unhealthy for runtime in self._context.resources.values()}
        unhealthy = "NoExecute" if "NoExecute" in effects else "NoSchedule"
        driver = self._context.name
        # An agent that has lost its ledger reads the published names from this annotation. The annotation also marks
        # the slice as one of this agent for the admission policies, which permit a former driver to delete the slice.
        named = {progress.annotation(driver): progress.encoded(progress.Progress({}, qualifiers=dict(qualifiers)))}
        # A cluster autoscaler treats a node with an empty pool as idle, and a node without a pool as unready if other
        # nodes of its group have a pool. So an empty pool is published only in two cases: if a rollout requests this
        # (for all nodes of the rollout), or while Karpenter initializes the node. If Karpenter created the node for
        # claims, Karpenter waits for a complete pool of the claims' driver (1.14,
        # nodeclaim/lifecycle/initialization.go), and the devices move to the pool only after that.
        asked = progress.pool_annotation(driver) in (self._context.node.watch.annotations or {})
        empty = bool(offers) and (asked or (self._context.node.watch.uninitialized and self._wants_devices()))
        pool = Pool(driver, self._context.node.name, tuple(offers), unhealthy, named, empty)  # type: ignore[arg-type]
        ticket = self._publisher.want(pool)
        self._without = {key: self._without.get(key, (ticket, None)) for key in without}
        self._passed.set()
        return rest

    def _wants_devices(self) -> bool:
        """Return whether a share requests devices for the DRA side."""
        share = self._context.share
        return any(share.of(each.policy).of(len(each.listed.devices)) for each in self._context.resources.values())

    def _report(self) -> tuple[str, float | None]:
        """Return the report ("" for none), and the seconds until a report with changed holders may be written.

        A changed state of a device changes the report at once; changed holders alone change the report at most every
        `HOLDERS` seconds.
        """
        if all(runtime.leaving for runtime in self._context.resources.values()):
            return "", None
        records, now, rest = self._context.ledger.snapshot, time.monotonic(), None
        shares: dict[str, str] = {}
        waits: dict[tuple[str, str], str] = {}
        gone: set[tuple[str, str]] = set()
        for resource, runtime in self._context.resources.items():
            if runtime.leaving:
                continue
            listed = runtime.listed
            shares[resource] = str(runtime.handover.share)
            for context in self._context.node.contexts.values():  # The contexts of former drivers are included.
                if (one := context.resources.get(resource)) is not None:
                    waits |= {(resource, device): what.text for device, what in one.handover.waiting.items()}
            gone |= {(resource, name) for name in records.of(resource).keys() - (listed.devices.keys() - listed.gone)}
        share, qualifiers = self._context.share, self._context.qualifiers()
        current = progress.progress(
            records,
            shares,
            waits,
            requested=share.text,
            kept=share.kept,
            gone=gone,
            qualifiers=qualifiers,
            most=self._context.node.lease.most,
        )
        sides = progress.encoded(progress.without_holders(current))
        if self._reported is None or current != self._reported[0]:
            if self._reported is not None and sides == self._reported[1] and self._reported[2] + HOLDERS > now:
                current, rest = self._reported[0], self._reported[2] + HOLDERS - now
            else:
                self._reported = current, sides, now
        return progress.encoded(current), rest
