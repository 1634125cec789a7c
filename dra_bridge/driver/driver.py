"""One DRA driver of this node: handles the kubelet's calls, and returns which devices the driver's claims hold."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

import grpc.aio

from deviceplugin import cdi
from deviceplugin.kubelet.claim_state import PreparedClaim
from deviceplugin.looks import Looks
from deviceplugin.register.register import Register
from deviceplugin.register.rules import ClaimEvidence
from deviceplugin.tasks import Tasks
from dra_bridge.driver import evidence
from dra_bridge.driver.claim_api import ClaimEvents, ClusterClaims
from dra_bridge.driver.claim_devices import ClaimDevices, ServedDevices, ServedResource
from dra_bridge.driver.claim_files import ClaimFiles
from dra_bridge.driver.claims import ClaimError, ClaimRecords, ClaimRef, Prepared, Reason
from dra_bridge.driver.host import DriverHost
from dra_bridge.driver.preparation import ClaimPreparation
from dra_bridge.driver.reconciliation import ClaimReconciler
from dra_bridge.driver.renewal import ClaimRenewal
from dra_bridge.driver.statistics import ClaimStatistics
from dra_bridge.driver.waiting import MARGIN, WaitLimit
from dra_bridge.wire import dra_v1_pb2_grpc, dra_v1beta1_pb2_grpc

_T = TypeVar("_T")

DEADLINE: Final = 30.0
"""Maximum seconds to prepare or unprepare one claim. The kubelet waits 45 s for a call with several claims (kubelet
1.36, cm/dra/plugin)."""

CALL_DEADLINE: Final = 43.0
"""Maximum seconds of one call of the kubelet, which may name several claims. The kubelet waits 45 s. The value is
larger than `DEADLINE`, so that hooks have time to undo the changes for a claim that failed at its deadline.
"""

RESERVE: Final = 2.0
"""Seconds before the deadline of the kubelet's call at which the response states an error for each unfinished claim."""


@dataclass(frozen=True, slots=True)
class DriverNode:
    """The objects that the DRA drivers of a node share.

    pool: the pool's name, which is the node's name. agent: the agent's name, which the claims' files state. report:
    whether to write `status.devices` of claims, which costs a GET and a PATCH for each claim. boot: the id of the
    node's boot; "" to use the kernel's boot id. cdi_looks: the thread for all reads and writes of `cdi_directory`.
    """

    pool: str
    register: Register
    api: ClusterClaims
    cdi_directory: str = cdi.DIRECTORY
    agent: str = ""
    report: bool = False
    boot: str = ""
    cdi_looks: Looks = field(default_factory=lambda: Looks("the CDI directory", threads=1))


class Driver:
    """One DRA driver of this node. A `Driver` object belongs to one event loop.

    host: the agent that the driver belongs to. deadline: seconds for one claim. call_deadline: seconds for a call. For
    a claim that is unfinished at the call's deadline, the response states an error, but the preparation continues.
    """

    def __init__(
        self,
        name: str,
        node: DriverNode,
        served: Sequence[ServedResource] = (),
        host: DriverHost | None = None,
        *,
        deadline: float = DEADLINE,
        call_deadline: float = CALL_DEADLINE,
    ) -> None:
        host, api, register = host or DriverHost(), node.api, node.register
        self.name: Final = name
        self.pool: Final = node.pool
        self.statistics = statistics = ClaimStatistics()
        self.records = records = ClaimRecords(name, node.pool, register.store)
        self.devices = served_devices = ServedDevices(name, tuple(served), host)
        self.files = files = ClaimFiles(
            records, node.cdi_directory, node.cdi_looks, node.boot or register.boot, node.agent
        )
        self.waits: Final = register.waits
        self._call_deadline, self._register = call_deadline, register
        self._limits: set[WaitLimit] = set()
        """The time limits of the running calls of `prepare`."""
        self.tasks = tasks = Tasks()
        events = ClaimEvents(records, api, tasks, node.report)
        devices = ClaimDevices(records, served_devices, register, events, statistics, host)
        self._preparation = ClaimPreparation(api, devices, files, tasks, deadline)
        self.renewal: Final = ClaimRenewal(served_devices, self._preparation, register)
        self.reconciler = ClaimReconciler(records, api, files, self._preparation)

    async def prepare(
        self, claims: Iterable[ClaimRef], remaining: float | None = None
    ) -> dict[str, Prepared | ClaimError]:
        """Prepare claims independently of each other; return a response or error for each claim UID.

        remaining: seconds until the caller's deadline. Claims wait for devices whose holders are about to end, until
        shortly before this deadline. Without a deadline, claims do not wait. If the caller cancels the call, waiting
        claims are refused.
        """
        limit = WaitLimit(0.0 if remaining is None else time.monotonic() + remaining - MARGIN)
        self._limits.add(limit)
        tasks: dict[ClaimRef, asyncio.Task[Prepared | ClaimError]] = {}
        for claim in claims:
            tasks[claim] = self.tasks.start(self._preparation.prepare(claim, limit))
        try:
            return await self._answers(tasks, remaining)
        finally:
            self._limits.discard(limit)
            if not all(map(asyncio.Task.done, tasks.values())):
                limit.until = 0.0
                self._register.store.changes.note()

    def end_waits(self) -> None:
        """Refuse the claims that wait for devices. `Registrar` calls this method before its server stops."""
        for limit in self._limits:
            limit.until = 0.0
        self._register.store.changes.note()

    async def unprepare(self, claims: Iterable[ClaimRef]) -> dict[str, ClaimError | None]:
        """Unprepare claims, even claims without a record in the ledger, independently of each other.

        Returns, for each claim UID, the error, or None if the claim is unprepared.
        """
        tasks: dict[ClaimRef, asyncio.Task[ClaimError | None]] = {}
        for claim in claims:
            tasks[claim] = self.tasks.start(self._preparation.unprepare(claim))
        return await self._answers(tasks)

    async def _answers(
        self, tasks: Mapping[ClaimRef, asyncio.Task[_T]], remaining: float | None = None
    ) -> dict[str, _T | ClaimError]:
        # If the call is cancelled, the work for its claims continues, and the caller's next call for these claims
        # returns the results.
        latest = self._call_deadline
        deadline = latest if remaining is None else min(latest, max(0.0, remaining - RESERVE))
        if tasks:
            await asyncio.wait(tasks.values(), timeout=deadline)
        answers: dict[str, _T | ClaimError] = {}
        for claim, task in tasks.items():
            if not task.done():
                late = f"claim {claim.title}: not done within {deadline:.3g} s; it goes on"
                answers[claim.uid] = ClaimError(Reason.TIMEOUT, late)
            elif task.cancelled():  # The task was cancelled before it began.
                answers[claim.uid] = ClaimError(Reason.STOPPED, "the driver is stopping")
            elif (error := task.exception()) is not None:
                answers[claim.uid] = ClaimError(Reason.INTERNAL, f"internal error: {error!r}")
            else:
                answers[claim.uid] = task.result()
        return answers

    def claim_evidence(self, prepared: Iterable[PreparedClaim], resource: str) -> list[ClaimEvidence]:
        """Return evidence of this driver's claims, from the claims' files and from the kubelet's claim state. Blocks.

        The agent's own file of a claim states the claim's devices of every resource. For a claim without such a file,
        the devices of this resource are taken from the claim's CDI file and the claim state. prepared: the claims in
        the kubelet's claim state.

        Raises OSError if the files cannot be read, CdiError if the devices of a claim are neither in the ledger
        file, nor in a file of the claim, nor in the claim state.
        """
        state = [claim for claim in prepared if self.name in claim.devices]
        pods = {claim.uid: claim.pod_uids for claim in state}
        files, boot, ids = {file.uid: file for file in self.files.read()}, self.files.boot, self._ids(resource)
        unknown = {uid for uid, file in files.items() if file.devices is None and self.records.get(uid) is None}
        claims = [
            evidence.of_file(file, resource, pods.get(uid, frozenset()))
            for uid, file in files.items()
            if file.devices is not None
        ]
        filed = {claim.uid for claim in claims}
        for claim in (*evidence.in_state(state, self.name, self.pool), *self.files.holding()):
            if claim.shares and claim.uid not in filed:
                unknown.discard(claim.uid)
                claims.append(claim.evidence(self.name, resource, ids, boot))
        if unknown:
            uid = min(unknown)
            raise cdi.CdiError(f"it is not known what claim {uid} holds: {self.files.path(uid)} names no devices")
        return [claim for claim in claims if claim.granted]

    def _ids(self, resource: str) -> dict[str, str]:
        """Return, for each published name of a device of the resource, the device's id."""
        named = self.devices.by_name.items()
        return {name: device.id for name, (served, device) in named if served.source.resource == resource}

    async def close(self) -> None:
        """End the driver's background tasks."""
        await self.tasks.close()


class ClaimService(dra_v1_pb2_grpc.DRAPluginServicer, dra_v1beta1_pb2_grpc.DRAPluginServicer):
    """The gRPC service DRAPlugin in one version. pb: the module with the messages of this version.

    Both versions have the same messages, but v1beta1 has no `share_id`.
    """

    def __init__(self, driver: Driver, pb: Any) -> None:
        self._driver = driver
        self._pb = pb
        self._shares = "share_id" in pb.Device.DESCRIPTOR.fields_by_name

    # The names of the methods below are those of the kubelet's API.

    async def NodePrepareResources(  # noqa: N802
        self, request: Any, context: grpc.aio.ServicerContext[Any, Any]
    ) -> Any:
        """Prepare the claims of a request; the response has the devices or the error of each claim."""
        claims = [ClaimRef(claim.namespace, claim.name, claim.uid) for claim in request.claims]
        response = self._pb.NodePrepareResourcesResponse()
        for uid, answer in (await self._driver.prepare(claims, context.time_remaining())).items():
            entry = response.claims[uid]
            if isinstance(answer, ClaimError):
                entry.error = str(answer)
                continue
            for device in answer.devices:
                listed = entry.devices.add(
                    request_names=[device.request],
                    pool_name=device.pool,
                    device_name=device.device,
                    cdi_device_ids=device.cdi_ids,
                )
                if device.share and self._shares:
                    listed.share_id = device.share
        return response

    async def NodeUnprepareResources(self, request: Any, context: object) -> Any:  # noqa: N802
        """Unprepare the claims of a request; the response has the error of each claim, or ""."""
        claims = [ClaimRef(claim.namespace, claim.name, claim.uid) for claim in request.claims]
        response = self._pb.NodeUnprepareResourcesResponse()
        for uid, answer in (await self._driver.unprepare(claims)).items():
            response.claims[uid].error = "" if answer is None else str(answer)
        return response
