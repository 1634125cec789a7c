"""The DRA driver: what a prepared claim gets, the errors of a claim, and that nothing is left behind."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import math
import os
import re
import shutil
import threading
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deviceplugin import cdi, identity, looks
from deviceplugin.device import ContainerEdits, Device, Health
from deviceplugin.identity import Identity
from deviceplugin.inventory import Inventory
from deviceplugin.kubelet.cgroups import PodProcesses
from deviceplugin.kubelet.claim_state import ClaimStateError, PreparedClaim
from deviceplugin.register import operations
from deviceplugin.register.claim_files import ClaimFile
from deviceplugin.register.question import View
from deviceplugin.register.records import UNKNOWN, WHOLE, Amount, Claim, ClaimDevice, LedgerError, Side, State
from deviceplugin.register.register import Register, RegisterHost
from deviceplugin.register.rules import ClaimEvidence, Evidence
from dra_bridge.driver import (
    ClaimError,
    ClaimRef,
    ClusterClaims,
    Driver,
    DriverHost,
    DriverNode,
    Prepared,
    RunningPods,
    ServedResource,
    claim_api,
    claim_files,
    preparation,
)
from dra_bridge.driver.claims import ClaimConfig, Opaque, Reason, decoded_config, is_over
from dra_bridge.kube import Cluster
from dra_bridge.ledger.worker import AsyncLedger
from dra_bridge.testing.apiserver import FakeApiServer, Fault
from tests.dra.driver.served import (
    NODE,
    T0,
    D,
    FakeClaims,
    Plain,
    R,
    Serve,
    ServedDriver,
    claim,
    opaque,
    ref,
    result,
    served_driver,
)
from tests.dra.ledger.samples import adopt
from tests.waits import until

ENDED = PodProcesses(frozenset())
"""No process of any pod runs."""


class Inner(msgspec.Struct):
    level: int = 0


class Params(msgspec.Struct):
    mode: str = "plain"
    threads: int = 1
    inner: Inner = msgspec.field(default_factory=Inner)


@pytest.fixture
async def here(serve: Serve) -> ServedDriver:
    return await serve()


@pytest.fixture
def source() -> Hooked:
    return Hooked()


@pytest.fixture
async def hooked(serve: Serve, source: Hooked) -> ServedDriver:
    """A driver whose source has every hook; the hook `released` has been called for all devices."""
    here = await serve(source)
    here.register.releases.look(R, all_known=True)
    await until(lambda: not here.register.releases.unreleased())
    source.calls.clear()
    return here


# What a claim gets.


async def test_a_claim_gets_its_device_and_is_recorded(here: ServedDriver) -> None:
    """Prepare returns request, pool, device and a CDI device with the container edits that the plugin would give."""
    here.claims.add(claim("1", result("d0")))
    answer = await here.prepared("1")
    (device,) = answer.devices
    assert (device.request, device.pool, device.device) == ("fpga", NODE, "d0")
    assert here.edits(*device.cdi_ids) == [
        {
            "env": ["FPGA_0=1"],
            "deviceNodes": [{"path": "/dev/null", "type": "c", "major": 1, "minor": 3, "permissions": "rw"}],
        }
    ]
    assert here.async_ledger.snapshot.claims[D, "1"].held == {(R, "d0")}
    assert here.driver.statistics.prepare.done == 1


async def test_a_claim_that_cannot_be_read_is_not_answered_from_the_record(here: ServedDriver) -> None:
    """While the API server is away, a repeated Prepare fails, because the claim's allocation may have changed."""
    here.claims.add(claim("1", result("d0")))
    first = await here.prepared("1")
    here.claims.broken = ConnectionError("the API server is away")
    answer = await here.refusal("1")
    assert (answer.reason, str(answer)) == ("api", "claim default/claim-1: the API server is away")
    assert (D, "1") in here.async_ledger.snapshot.claims
    here.claims.broken = None
    assert await here.prepared("1") == first


async def test_each_request_has_a_cdi_device_of_its_own(here: ServedDriver) -> None:
    """A container gets the devices of its own requests only; all devices of a request are in one CDI device."""
    here.claims.add(claim("1", result("d0", "left"), result("d1", "left"), result("d2", "right")))
    answer = await here.prepared("1")
    left, second, right = answer.devices
    assert (len(left.cdi_ids), len(second.cdi_ids), len(right.cdi_ids)) == (1, 0, 1)
    assert here.edits(*left.cdi_ids)[0]["env"] == ["FPGA_0=1", "FPGA_1=1"]
    assert here.edits(*right.cdi_ids)[0]["env"] == ["FPGA_2=1"]


async def test_administrative_access_holds_nothing(here: ServedDriver) -> None:
    """A claim with adminAccess to a device for limits gets the device's container edits without holding the device."""
    await here.async_ledger.do(adopt(R, ["p"], Side.PLUGIN, T0))
    here.inventory.publish([*here.inventory.snapshot.devices.values(), Device("p", nodes=["/dev/zero"])])
    here.claims.add(claim("1", result("p", adminAccess=True)))
    (device,) = (await here.prepared("1")).devices
    assert here.edits(*device.cdi_ids)[0]["deviceNodes"]
    assert here.async_ledger.snapshot.claims[D, "1"].held == frozenset()
    assert [found.devices for found in here.driver.claim_evidence((), R)] == [frozenset()]


async def test_administrative_access_disturbs_nobody(hooked: ServedDriver, source: Hooked) -> None:
    """For a claim with adminAccess `edits` is the only hook that is called; an unhealthy device is given as well."""
    devices = list(hooked.inventory.snapshot.devices.values())
    hooked.inventory.publish([devices[0].with_health(Health.UNHEALTHY, "sick"), *devices[1:]])
    hooked.claims.add(claim("1", result("d0", adminAccess=True), result("d1", adminAccess=True)))
    await hooked.prepared("1")
    assert await hooked.unprepare("1") is None
    assert [call[0] for call in source.calls] == ["edits"]


@pytest.mark.parametrize("how", ["ends", "fails", "is over"])
async def test_administrative_access_does_not_undo_what_is_set_up_for_another_claim(
    hooked: ServedDriver, source: Hooked, how: str
) -> None:
    """When an adminAccess claim ends or fails, its device stays set up for the other claim that holds it."""
    parameters = [opaque({"mode": "other"})]
    hooked.claims.add(claim("1", result("d0")), claim("2", result("d0", adminAccess=True), config=parameters))
    await hooked.prepared("1")
    source.calls.clear()
    if how == "fails":
        source.fails.add("edits")
        await hooked.refusal("2")
    else:
        await hooked.prepared("2")
        if how == "ends":
            assert await hooked.unprepare("2") is None
        else:
            del hooked.claims.claims["claim-2"]
            assert await hooked.driver.reconciler.reconcile({"1"}, ENDED) == {"unprepared": ["2"]}
    assert list(hooked.async_ledger.snapshot.claims) == [(D, "1")]
    assert [call[0] for call in source.calls] == ["edits"]


async def test_devices_without_edits_need_no_file(serve: Serve) -> None:
    """A device without container edits has no CDI device and no CDI file, because CDI refuses empty devices."""
    here = await serve(devices=[Device("d0")])
    here.claims.add(claim("1", result("d0")))
    assert (await here.prepared("1")).devices[0].cdi_ids == ()
    assert here.files == []


class Hooked(Plain):
    """A source that has every hook and notes the hooks' calls. fails: the names of hooks that raise an error."""

    config_type = Params

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.fails: set[str] = set()

    def _note(self, name: str, *what: Any) -> None:
        self.calls.append((name, *what))
        if name in self.fails:
            raise RuntimeError(f"{name} is out of order")

    def devices_of(self, hook: str) -> list[list[str]]:
        """Return the devices of each call of a hook."""
        return [call[1] for call in self.calls if call[0] == hook]

    def edits(self, devices: Sequence[Device]) -> ContainerEdits:
        self._note("edits", [device.id for device in devices])
        return ContainerEdits({"ALL": ",".join(device.id for device in devices), "FPGA_0": "mine"}, cdi=["v.com/c=n"])

    def reset(self, devices: Sequence[Device]) -> None:
        self._note("reset", [device.id for device in devices])

    async def prepare(self, devices: Sequence[Device], config: Params) -> ContainerEdits:
        self._note("prepare", [device.id for device in devices], config)
        return ContainerEdits({"MODE": config.mode})

    def unprepare(self, devices: Sequence[Device]) -> None:
        self._note("unprepare", [device.id for device in devices])

    def released(self, devices: Sequence[Device]) -> None:
        self._note("released", [device.id for device in devices])


async def test_hooks_run_in_order_with_the_requests_devices_and_parameters(
    hooked: ServedDriver, source: Hooked
) -> None:
    """Prepare calls the hooks reset, edits and prepare; Unprepare calls unprepare and released.

    Each hook gets the devices of the request. `prepare` also gets the request's parameters: those of the claim override
    those of the class, and `apiVersion` and `kind` are ignored.
    """
    config = [
        opaque({"mode": "fast"}, "other"),
        opaque({"threads": 8, "apiVersion": "v1", "kind": "Fpga"}, "fpga"),
        opaque({"mode": "class", "threads": 2}, source="FromClass"),
        opaque({"bad": 1}, driver="other.example.com"),
    ]
    hooked.claims.add(claim("1", result("d0"), result("d1"), config=config))
    answer = await hooked.prepared("1")
    assert source.calls == [
        ("reset", ["d0", "d1"]),
        ("edits", ["d0", "d1"]),
        ("prepare", ["d0", "d1"], Params("class", 8)),
    ]
    assert answer.devices[0].cdi_ids[1] == "v.com/c=n"
    assert sorted(hooked.edits(answer.devices[0].cdi_ids[0])[0]["env"]) == [
        "ALL=d0,d1",
        "FPGA_0=mine",
        "FPGA_1=1",
        "MODE=class",
    ]
    source.calls.clear()
    assert await hooked.unprepare("1") is None
    await hooked.driver.tasks.wait()
    assert source.calls == [("unprepare", ["d0", "d1"]), ("released", ["d0", "d1"])]
    assert hooked.files == []
    assert not hooked.async_ledger.snapshot.claims


async def test_a_device_that_a_request_has_twice_is_one_device(hooked: ServedDriver, source: Hooked) -> None:
    """A request has two shares of one device: each hook gets the device once, the answer names both shares."""
    hooked.claims.add(claim("1", result("d0", shareID="x"), result("d0", shareID="y")))
    prepared = await hooked.prepared("1")
    assert [device.share for device in prepared.devices] == ["x", "y"]
    assert [call[:2] for call in source.calls] == [(name, ["d0"]) for name in ("reset", "edits", "prepare")]


@pytest.mark.parametrize("how", ["one after the other", "at once", "one fails"])
async def test_a_shared_device_is_unprepared_when_its_last_claim_ends(
    hooked: ServedDriver, source: Hooked, how: str
) -> None:
    """A shared device is reset for its first claim, and unprepared and released when its last claim ends.

    A device of one claim only is unprepared when that claim ends.
    """
    hooked.claims.add(claim("1", result("d0", shareID="x"), result("d1", "own")), claim("2", result("d0", shareID="y")))
    await hooked.prepared("1")
    if how == "one fails":
        source.fails.add("prepare")
        await hooked.refusal("2")
        source.fails.clear()
        assert source.devices_of("unprepare") == []
        assert await hooked.unprepare("1") is None
        assert source.devices_of("unprepare") == [["d0", "d1"]]
    else:
        await hooked.prepared("2")
        assert source.devices_of("prepare") == [["d0"], ["d1"], ["d0"]]
        if how == "at once":
            assert await hooked.driver.unprepare([ref("1"), ref("2")]) == {"1": None, "2": None}
        else:
            assert [await hooked.unprepare(uid) for uid in "12"] == [None, None]
        assert source.devices_of("unprepare") == [["d1"], ["d0"]]
    assert source.devices_of("reset") == [["d0"], ["d1"]]
    await hooked.driver.tasks.wait()
    assert sorted(device for devices in source.devices_of("released") for device in devices) == ["d0", "d1"]
    assert not hooked.async_ledger.snapshot.claims


@pytest.mark.parametrize("sharer", ["another claim", "the same claim"])
async def test_a_device_is_not_shared_with_other_parameters(hooked: ServedDriver, source: Hooked, sharer: str) -> None:
    """A claim for a shared device with other parameters than its holder's is refused; the error names the holder.

    With the same parameters, or after the holder has ended, the claim is prepared.
    """

    def sharing(uid: str, **parameters: Any) -> dict[str, Any]:
        return claim(uid, result("d0", shareID=uid), config=[opaque(parameters)])

    if sharer == "the same claim":
        both = [opaque({"mode": "fast"}, "a"), opaque({"mode": "slow"}, "b")]
        hooked.claims.add(claim("1", result("d0", "a", shareID="x"), result("d0", "b", shareID="y"), config=both))
        assert "with claim default/claim-1, which has it with other parameters" in await hooked.refused("1")
        assert source.calls == []
        return
    hooked.claims.add(sharing("1", mode="fast"), sharing("2", mode="slow"), sharing("3", threads=1, mode="fast"))
    await hooked.prepared("1")
    source.calls.clear()
    refusal = await hooked.refusal("2")
    shared = f"device 'd0' of {R} is shared with claim default/claim-1"
    assert str(refusal) == f"{shared}, which has it with other parameters"
    assert source.calls == []
    assert list(hooked.async_ledger.snapshot.claims) == [(D, "1")]
    await hooked.prepared("3")
    assert [await hooked.unprepare(uid) for uid in "13"] == [None, None]
    await hooked.prepared("2")
    assert ("prepare", ["d0"], Params("slow")) in source.calls


async def test_of_two_claims_at_once_with_other_parameters_one_gets_the_shared_device(hooked: ServedDriver) -> None:
    """Two claims with different parameters share a device and are prepared at once: one of them is refused."""
    for uid in "12":
        hooked.claims.add(claim(uid, result("d0", shareID=uid), config=[opaque({"threads": int(uid)})]))
    answers = await hooked.prepare("1", "2")
    assert sorted(type(answer).__name__ for answer in answers.values()) == ["ClaimError", "Prepared"]


@pytest.mark.parametrize("hook", ["reset", "prepare", "unprepare"])
async def test_a_hook_that_works_on_after_its_timeout_has_the_device_to_itself(serve: Serve, hook: str) -> None:
    """If a hook runs beyond its timeout, calls for its device are refused and no other hook runs until it ends."""
    over = threading.Event()
    working: list[str] = []

    class Slow(Hooked):
        hook_timeout = 0.05

        def prepare(self, devices: Sequence[Device], config: Params) -> None:  # type: ignore[override]
            self._note("prepare", [device.id for device in devices])

        def _note(self, name: str, *what: Any) -> None:
            assert not working, "one hook at a time"
            super()._note(name, *what)
            if name == hook and not over.is_set():
                working.append(name)
                over.wait()
                working.clear()

    source = Slow()
    here = await serve(source)
    here.claims.add(claim("1", result("d0")), claim("2", result("d0")), claim("3", result("d1")))
    if hook == "unprepare":
        await here.prepared("1")
        first: object = await here.unprepare("1")
    else:
        first = (await here.prepare("1"))["1"]
    assert str(first) == f"{hook} of {R} did not answer within 0.05 s"
    still = f"d0 of {R}: `{hook}` is still running on it, after its timeout"
    calls = len(source.calls)
    try:
        asked = [await here.unprepare("1")]
        if hook != "unprepare":
            asked += [one for one in (await here.prepare("1")).values() if isinstance(one, ClaimError)]
        assert [str(one) for one in asked] == [still] * len(asked)
        refusal = await here.refusal("2")
        # The claim still has the device if its Prepare could not be undone.
        assert "held by claim default/claim-1" in str(refusal) or str(refusal) == still
        assert len(source.calls) == calls
        source.hook_timeout = 5.0
    finally:
        over.set()
    async with asyncio.timeout(20):
        while await here.unprepare("1") is not None:
            pass
    assert source.calls[calls][0] == "unprepare"
    await here.prepared("2")


@pytest.mark.parametrize("hook", ["edits", "reset", "prepare"])
async def test_a_hook_that_fails_costs_its_claim_only_and_is_undone(
    hooked: ServedDriver, source: Hooked, hook: str
) -> None:
    """If a hook fails in Prepare, the claim's error has its message, `unprepare` is called, and the next try succeeds.

    After an `unprepare` that fails, the claim keeps its device until the next Unprepare.
    """
    hooked.claims.add(claim("1", result("d0")))
    source.fails.add(hook)
    assert f"{hook} is out of order" in await hooked.refused("1")
    assert ("unprepare", ["d0"]) in source.calls
    source.fails.clear()
    await hooked.prepared("1")
    source.fails.add("unprepare")
    assert "unprepare is out of order" in str(await hooked.unprepare("1"))
    assert hooked.async_ledger.snapshot.claims, "it is still ours"
    source.fails.clear()
    assert await hooked.unprepare("1") is None


# The errors of a claim.


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"metadata": {"uid": "2", "name": "claim-1"}}, "was recreated"),
        ({"status": {}}, "not allocated"),
        ({"status": None}, "not allocated"),
        ({"status": {"allocation": {}}}, "names no device of driver"),
        ({"metadata": 7}, "cannot be parsed"),
        ({"status": claim("1", result("d0"), pods=[])["status"]}, "not reserved"),
    ],
)
async def test_a_claim_that_is_not_the_one_meant_is_refused(here: ServedDriver, change: Any, message: str) -> None:
    """A claim that was recreated, deallocated, cannot be parsed, or is not reserved is refused with a reason.

    A claim that is not reserved must not be prepared (nvidia k8s-dra-driver-gpu#1162).
    """
    here.claims.add({**claim("1", result("d0")), **change} if "metadata" not in change else claim("1"))
    here.claims.claims["claim-1"].update(change)
    assert message in await here.refused("1")


@pytest.mark.parametrize(
    ("what", "message"),
    [
        (result("d9"), "no device 'd9'"),
        (result("d0", driver="other.example.com"), "names no device of driver"),
        (result("d0", pool="node-2"), "pool 'node-2'"),
        (result("sick"), "unhealthy: it smokes"),
    ],
)
async def test_a_device_that_cannot_be_had_is_named(here: ServedDriver, what: dict[str, Any], message: str) -> None:
    """A claim to an unknown or unhealthy device, or one of another driver or pool, is refused with the reason."""
    sick = Device("sick", health=Health.UNHEALTHY, message="it smokes")
    here.inventory.publish([*here.inventory.snapshot.devices.values(), sick])
    here.claims.add(claim("1", what))
    assert message in await here.refused("1")


async def test_an_unhealthy_device_is_given_to_who_tolerates_it(here: ServedDriver) -> None:
    """A claim that tolerates `unhealthy` gets an unhealthy device; a device that is gone is refused."""
    devices = list(here.inventory.snapshot.devices.values())
    here.inventory.publish([*devices[1:], devices[0].with_health(Health.UNHEALTHY, "sick")])
    tolerated = result("d0", tolerations=[{"key": f"{D}/unhealthy", "operator": "Exists"}])
    here.claims.add(claim("1", tolerated), claim("2", tolerated))
    await here.prepared("1")
    await here.unprepare("1")
    here.inventory.publish(devices[1:])
    assert "gone" in await here.refused("2")


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"mode": 3}, "Expected `str`, got `int` - at `$.mode`"),
        ({"thread": 3}, "unknown field thread; there are mode, threads, inner"),
        ({"inner": {"level": 1, "depth": 2}}, "unknown field inner.depth; there are level"),
        ({"": 1}, "unknown field ''; there are mode"),
        ([1], "must be an object"),
        (None, "must be an object"),
    ],
)
async def test_wrong_parameters_name_the_field_and_the_request(
    hooked: ServedDriver, parameters: Any, message: str
) -> None:
    """The error names the request and the wrong field of the claim's parameters."""
    hooked.claims.add(claim("1", result("d0", "fpga/big"), config=[opaque(parameters, "fpga")]))
    text = await hooked.refused("1")
    assert message in text
    assert "'fpga/big'" in text
    assert "parameters of the claim" in text


@pytest.mark.parametrize(
    ("of_class", "of_claim", "said"),
    [
        ({"mode": 3}, {"threads": 2}, "parameters of the class: Expected `str`, got `int` - at `$.mode`"),
        ({"threads": 2}, {"mode": 3}, "parameters of the claim: Expected `str`, got `int` - at `$.mode`"),
        ({"inner": {"level": "x"}}, {}, "parameters of the class: Expected `int`, got `str` - at `$.inner.level`"),
        ({"thread": 2}, {"threads": 2}, "parameters of the class: unknown field thread"),
        ({"inner": {"depth": 2}}, {"inner": {"level": 2}}, "parameters of the class: unknown field inner.depth"),
    ],
)
def test_wrong_parameters_are_told_to_who_wrote_them(of_class: Any, of_claim: Any, said: str) -> None:
    """The error says whether the wrong parameters are the class's (an administrator wrote them) or the claim's."""
    pieces = [
        ClaimConfig(source, [], Opaque(D, parameters))
        for source, parameters in (("FromClass", of_class), ("FromClaim", of_claim))
    ]
    with pytest.raises(ClaimError, match=re.escape(said)):
        decoded_config(Params, pieces, "fpga")


def test_parameters_of_a_subrequest_are_for_it_alone() -> None:
    """Parameters for a subrequest apply to it alone; parameters for the whole request apply to each alternative."""
    pieces = [
        ClaimConfig("FromClaim", [request], Opaque(D, parameters))
        for request, parameters in (("fpga/big", {"threads": 8}), ("fpga", {"mode": "fast"}), ("other", {"mode": 1}))
    ]
    assert decoded_config(Params, pieces, "fpga/big") == Params("fast", 8)
    assert decoded_config(Params, pieces, "fpga/small") == Params("fast", 1)


async def test_a_failure_that_repeats_is_logged_once(here: ServedDriver, caplog: pytest.LogCaptureFixture) -> None:
    """A failure that repeats (here: the source takes no parameters) is logged once; another failure is logged again."""

    def said() -> int:
        warnings = [one for one in caplog.records if "cannot prepare claim" in one.getMessage()]
        return sum(one.levelno == logging.WARNING for one in warnings)

    here.claims.add(claim("1", result("d0"), config=[opaque({"mode": "fast"})]))
    for _ in range(3):
        assert "accepts no parameters" in await here.refused("1")
    assert said() == 1
    here.claims.add(claim("1", result("d0"), config=[opaque({"mode": "slow", "more": 1})]))
    await here.unprepare("1")
    await here.refused("1")
    assert said() == 2


async def test_a_device_of_the_plugins_side_is_refused_and_pulled(serve: Serve) -> None:
    """A claim for a device that is for limits is refused, causes one Event, and begins the device's move to DRA."""
    here = await serve(side=Side.PLUGIN)
    here.claims.add(claim("1", result("d0")))
    assert "device 'd0' of example.com/fpga is moving" in await here.refused("1")
    assert here.async_ledger.snapshot.device(R, "d0").state is State.TO_DRA
    await here.refused("1")
    await here.driver.tasks.wait()
    assert len(here.claims.events) == 1, "said once"


# Time and order.


async def test_a_claim_is_given_up_well_before_the_kubelet_does(serve: Serve) -> None:
    """While the API server hangs, Prepare fails after its deadline, and no file and no record is left."""
    here = await serve(deadline=0.05)
    here.claims.add(claim("1", result("d0")))
    here.claims.gate = asyncio.Event()
    assert "not done within 0.05 s" in await here.refused("1")


async def test_a_call_is_answered_in_time_though_the_undoing_of_a_claim_hangs(serve: Serve) -> None:
    """The undo of a failed Prepare hangs: the call is answered in time, and a later try succeeds."""
    go = asyncio.Event()

    class Stuck(Hooked):
        hook_timeout = 60.0

        async def unprepare(self, devices: Sequence[Device]) -> None:  # type: ignore[override]
            await go.wait()

    source = Stuck()
    source.fails.add("prepare")
    # Only the hanging `unprepare` reaches a deadline, also on a busy machine: the rest of the call takes less time.
    here = await serve(source, deadline=20.0, call_deadline=1.5)
    here.claims.add(claim("1", result("d0")))
    answers = await here.prepare("1", "none")
    assert str(answers["1"]) == "claim default/claim-1: not done within 1.5 s; it goes on"
    assert "does not exist" in str(answers["none"])
    go.set()
    source.fails.clear()
    async with asyncio.timeout(20):
        while not isinstance((await here.prepare("1"))["1"], Prepared):
            pass


async def test_prepares_of_one_claim_wait_for_each_other_and_of_two_do_not(here: ServedDriver) -> None:
    """A retry waits for the first try of its claim and gives the same answer; another claim does not wait."""
    here.claims.add(claim("1", result("d0")), claim("2", result("d1")))
    here.claims.gate = asyncio.Event()
    first, retry = (asyncio.create_task(here.prepare("1")) for _ in range(2))
    other = asyncio.create_task(here.prepare("2"))
    await here.claims.asked(2)
    here.claims.gate.set()
    assert (await first) == (await retry)
    await other
    assert (here.claims.gets, here.driver.statistics.prepared_again) == (3, 1)


async def test_an_unprepare_ends_a_prepare_under_way_and_nothing_is_left(serve: Serve) -> None:
    """An Unprepare cancels a Prepare whose hook runs, and undoes it (nvidia k8s-dra-driver-gpu#1162)."""
    begun, go = asyncio.Event(), asyncio.Event()

    class Slow(Hooked):
        async def prepare(self, devices: Sequence[Device], config: Params) -> ContainerEdits:
            begun.set()
            await go.wait()
            return ContainerEdits()

    source = Slow()
    here = await serve(source)
    here.claims.add(claim("1", result("d0")))
    late = asyncio.create_task(here.prepare("1"))
    await begun.wait()
    assert here.async_ledger.snapshot.claims[D, "1"].result is None
    assert await here.unprepare("1") is None
    answer = (await late)["1"]
    assert isinstance(answer, ClaimError)
    assert answer.reason is Reason.OVERTAKEN
    assert ("unprepare", ["d0"]) in source.calls
    assert here.files == []
    assert not here.async_ledger.snapshot.claims


async def test_a_prepare_that_the_end_of_the_driver_ends_is_not_taken_for_an_overtaken_one(here: ServedDriver) -> None:
    """A Prepare that ends because the driver closes fails with the reason STOPPED, not OVERTAKEN."""
    here.claims.add(claim("1", result("d0")))
    here.claims.gate = asyncio.Event()
    preparing = asyncio.create_task(here.prepare("1"))
    await here.claims.asked(1)
    await here.driver.close()
    answer = (await preparing)["1"]
    assert isinstance(answer, ClaimError)
    assert answer.reason is Reason.STOPPED


@pytest.mark.parametrize("known", [False, True])
async def test_an_unprepare_waits_for_a_file_that_is_being_written(
    here: ServedDriver, monkeypatch: pytest.MonkeyPatch, known: bool
) -> None:
    """An Unprepare waits until the CDI file that a first or repeated Prepare writes is there, and then removes it."""
    writing, go, write = threading.Event(), threading.Event(), claim_files.CdiStore.write

    def slow(store: claim_files.CdiStore, uid: str, data: bytes) -> bool:
        writing.set()
        assert go.wait(20)
        return write(store, uid, data)

    here.claims.add(claim("1", result("d0")))
    if known:
        await here.prepared("1")
        (here.cdi / here.files[0]).unlink()
    monkeypatch.setattr(claim_files.CdiStore, "write", slow)
    monkeypatch.setattr(looks, "PROMPT", 0.001)
    preparing = asyncio.create_task(here.prepare("1"))
    await asyncio.to_thread(writing.wait)
    unpreparing = asyncio.create_task(here.unprepare("1"))
    done, _ = await asyncio.wait({unpreparing}, timeout=0.3)
    assert not done, "the claim is unprepared while its file is being written"
    go.set()
    assert await unpreparing is None
    assert "cancelled by Unprepare" in str((await preparing)["1"])
    assert here.files == []
    assert not here.async_ledger.snapshot.claims


async def test_a_prepare_waits_for_a_file_that_is_being_removed(
    here: ServedDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An Unprepare past its deadline keeps its claim locked until the CDI file is removed; then a Prepare succeeds."""
    removing, go, remove = threading.Event(), threading.Event(), claim_files.CdiStore.remove

    def slow(store: claim_files.CdiStore, uid: str) -> bool:
        removing.set()
        assert go.wait(20)
        return remove(store, uid)

    await here.give("1", "d0")
    here = await here.again(deadline=0.1)
    monkeypatch.setattr(claim_files.CdiStore, "remove", slow)
    monkeypatch.setattr(looks, "PROMPT", 0.001)
    unpreparing = asyncio.create_task(here.unprepare("1"))
    await asyncio.to_thread(removing.wait)
    done, _ = await asyncio.wait({unpreparing}, timeout=0.4)
    assert not done, "the claim's lock was released while its file was being removed"
    go.set()
    assert "not done within" in str(await unpreparing)
    monkeypatch.undo()
    await here.prepared("1")
    assert len(here.files) == 1


async def test_a_claim_is_not_prepared_while_its_record_goes(
    here: ServedDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the disk hangs, an Unprepare past its deadline keeps its claim locked; later a Prepare succeeds."""
    monkeypatch.setattr(looks, "PROMPT", 0.001)
    await here.give("1", "d0")
    here = await here.again(deadline=0.1)
    disk, taken = threading.Event(), threading.Event()

    def work() -> None:
        with here.async_ledger.ledger.guard:
            taken.set()
            disk.wait(60)

    here.async_ledger.looks.begin("record", work)
    await asyncio.to_thread(taken.wait, 60)
    unpreparing = asyncio.create_task(here.unprepare("1"))
    await asyncio.wait({unpreparing}, timeout=0.3)
    for _ in range(3):
        assert "not done within" in str((await here.prepare("1"))["1"])
    disk.set()
    assert "not done within" in str(await unpreparing)
    assert not here.async_ledger.snapshot.claims
    await here.prepared("1")
    assert here.files


async def test_a_caller_that_goes_away_does_not_stop_the_work(here: ServedDriver) -> None:
    """A Prepare whose caller is cancelled is done all the same, and a repeated call finds it done."""
    here.claims.add(claim("1", result("d0")))
    here.claims.gate = asyncio.Event()
    call = asyncio.create_task(here.prepare("1"))
    await here.claims.asked(1)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    here.claims.gate.set()
    await here.prepared("1")
    assert here.driver.statistics.prepared_again == 1


async def test_a_cdi_directory_that_cannot_be_written_is_the_claims_error(here: ServedDriver) -> None:
    """If the CDI directory cannot be written, Prepare fails and leaves no record; afterwards it succeeds."""
    here.cdi.write_text("in the way")
    here.claims.add(claim("1", result("d0")))
    assert "cannot write" in str(await here.refusal("1"))
    assert not here.async_ledger.snapshot.claims
    here.cdi.unlink()
    await here.prepared("1")


# Restarts.


async def test_a_restart_answers_the_same_and_writes_lost_files_again(here: ServedDriver) -> None:
    """After the agent was killed, a lost CDI file is restored, an unknown one removed, and Prepare answers the same."""
    here.claims.add(claim("1", result("d0")))
    first = await here.prepared("1")
    (kept,) = here.files
    (here.cdi / kept).rename(here.cdi / f"{D}-claim_leftover.json")
    after = await here.again()
    done = await after.driver.reconciler.reconcile((), ENDED)
    assert done == {"rewritten": ["1"], "removed": ["leftover"]}
    assert after.files == [kept]
    assert await after.prepared("1") == first
    assert await after.driver.reconciler.reconcile((), ENDED) == {}


async def test_after_a_reboot_devices_are_set_up_again(hooked: ServedDriver, source: Hooked) -> None:
    """After a reboot a claim still holds its device, and Prepare sets the device up again (k8s-dra-driver-gpu#951)."""
    await hooked.give("1", "d0")
    source.calls.clear()
    after = await hooked.again(source, boot="2")
    assert await after.driver.reconciler.reconcile((), ENDED) == {"reopened": ["1"]}
    assert after.async_ledger.snapshot.claims_on(R, ["d0"])
    assert (await after.prepared("1")).boot == "2"
    assert [name for name, *_ in source.calls] == ["reset", "edits", "prepare"]
    third = await after.again(source, boot="3")
    assert (await third.prepared("1")).boot == "3", "also without a reconcile before"


async def test_files_that_vanish_are_written_again_at_once(
    here: ServedDriver, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Lost CDI files of prepared claims, and only these, are written again, also after a loss of the directory."""
    monkeypatch.setattr("dra_bridge.driver.claim_files.CHECK", 0.01)

    async def reconciled_until(*uids: str) -> None:
        await until(lambda: here.files == [f"{D}-claim_{uid}.json" for uid in uids])

    here.claims.add(*(claim(str(n), result(f"d{n}")) for n in range(3)))
    for uid in ("0", "1", "2"):
        await here.prepared(uid)
    (here.cdi / here.files[0]).unlink()
    keeping = asyncio.create_task(here.driver.files.keep())
    await reconciled_until("0", "1", "2")
    (here.cdi / here.files[1]).unlink()
    await reconciled_until("0", "1", "2")
    await here.unprepare("1")
    shutil.rmtree(here.cdi)
    await reconciled_until("0", "2")
    here.cdi.rename(here.cdi.with_name("elsewhere"))
    here.cdi.write_text("in the way")
    await until(lambda: "cannot write" in caplog.text)
    here.cdi.unlink()
    await reconciled_until("0", "2")
    keeping.cancel()
    with pytest.raises(asyncio.CancelledError):
        await keeping


@pytest.mark.parametrize("how", ["gone", "recreated", "deallocated", "reallocated"])
async def test_claims_that_went_away_while_the_agent_was_down_are_unprepared(
    hooked: ServedDriver, source: Hooked, how: str
) -> None:
    """A claim that is gone, recreated, deallocated or reallocated is unprepared once no pod uses it.

    The claim stays prepared while the API server is away, the kubelet counts the claim as prepared, or its pod runs or
    may run.
    """
    hooked.claims.add(claim("1", result("d0")), claim("2", result("d1")))
    await hooked.prepared("1")
    await hooked.prepared("2")
    after = await hooked.again(source)
    if how == "gone":
        del hooked.claims.claims["claim-1"]
    elif how == "recreated":
        hooked.claims.add(claim("9", result("d0"), name="claim-1"))
    elif how == "deallocated":
        hooked.claims.claims["claim-1"]["status"] = {}
    else:
        hooked.claims.add(claim("1", result("d3")))
    hooked.claims.broken = ConnectionError("away")
    assert await after.driver.reconciler.reconcile((), ENDED) == {"unknown": ["1", "2"]}
    hooked.claims.broken = None
    for named, pods in (
        ({"1"}, ENDED),  # the kubelet counts the claim as prepared, and will unprepare it
        (set[str](), PodProcesses(frozenset({"pod-uid"}))),  # the claim's finalizer was removed while its pod runs
        (set[str](), PodProcesses(None, frozenset({"pod-uid"}))),
        (set[str](), PodProcesses()),  # it is not known whether the claim's pod runs
    ):
        assert await after.driver.reconciler.reconcile(named, pods) == {}
    assert await after.driver.reconciler.reconcile((), ENDED) == {"unprepared": ["1"]}
    assert ("unprepare", ["d0"]) in source.calls
    assert list(after.async_ledger.snapshot.claims) == [(D, "2")]


async def test_a_prepare_that_a_crash_cut_short_can_be_undone_and_done_again(
    hooked: ServedDriver, source: Hooked
) -> None:
    """A claim reserved on disk before a crash can be unprepared or prepared again (nvidia k8s-dra-driver-gpu#840)."""
    for uid, device in (("1", "d0"), ("2", "d1")):
        hooked.claims.add(claim(uid, result(device)))
        started = Claim(D, uid, "default", f"claim-{uid}", (ClaimDevice(R, device),), None, T0)
        await hooked.async_ledger.do(operations.reserve(started, View(), durable=True))
    after = await hooked.again(source)
    assert await after.driver.reconciler.reconcile((), ENDED) == {}
    assert await after.unprepare("1") is None
    assert ("unprepare", ["d0"]) in source.calls
    await after.prepared("2")
    assert ("prepare", ["d1"], Params()) in source.calls


# The files that the agent keeps of claims.


async def test_each_claim_has_a_file_of_its_own(hooked: ServedDriver) -> None:
    """Until Unprepare the agent keeps a file of each claim, beside the CDI file, with devices, pods and parameters."""
    await hooked.async_ledger.do(adopt(R, ["bare"], Side.DRA, T0))
    hooked.inventory.publish([*hooked.inventory.snapshot.devices.values(), Device("bare")])
    hooked.claims.add(
        claim("1", result("d0"), result("d1", "seen", adminAccess=True), config=[opaque({"mode": "fast"}, "fpga")]),
        claim("2", result("bare")),
    )
    await hooked.prepared("1")
    await hooked.prepared("2")
    fast, plain = '{"inner":{"level":0},"mode":"fast","threads":1}', '{"inner":{"level":0},"mode":"plain","threads":1}'
    seen, whole = Identity("1"), Amount("1")
    held = {
        "1": (
            ClaimDevice(R, "d0", identity=seen, amount=whole, parameters=fast),
            ClaimDevice(R, "d1", admin=True, identity=seen, amount=Amount("0")),
        ),
        "2": (ClaimDevice(R, "bare", identity=seen, amount=whole, parameters=plain),),
    }
    pods = frozenset({"pod-uid"})
    assert hooked.own == {
        uid: ClaimFile(driver=D, uid=uid, namespace="default", name=f"claim-{uid}", boot="1", pods=pods, devices=its)
        for uid, its in held.items()
    }
    await hooked.unprepare("1")
    await hooked.unprepare("2")
    assert hooked.all_files == []


@pytest.mark.parametrize("hooks", [True, False])
async def test_a_claims_file_is_there_before_its_answer(
    hooks: bool, serve: Serve, source: Hooked, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A claim's file is written before its ledger record if the source has hooks, else after it.

    Prepare fails if this write fails.
    """
    here = await serve(source if hooks else None)
    seen: list[list[str]] = []
    prepare = operations.prepare

    def noted(*args: Any, **more: Any) -> Any:
        seen.append(sorted(here.own))
        return prepare(*args, **more)

    monkeypatch.setattr(operations, "prepare", noted)
    here.claims.add(claim("1", result("d0")), claim("2", result("d1")))
    await here.prepared("1")
    assert seen == [["1"] if hooks else []]
    assert here.own.keys() == {"1"}
    os.mkdir(here.cdi / "deviceplugin" / f"{D}_2.claim")
    answer = await here.refusal("2")
    assert answer.reason == "cdi"


class Relisted(RegisterHost):
    """A host for the register; each time its source is read again, it lists d0 with the identity in `now`."""

    def __init__(self, inventory: Inventory) -> None:
        served: Any = SimpleNamespace(source=Plain(), inventory=inventory, ids_now=lambda device: (device.id,))
        self.services = {R: served}
        self.now: Sequence[str] = ()

    async def reread(self, *, checkpoint: bool = True) -> None:
        """List d0 with the first token in `now` as its identity, and all tokens as what sysfs shows of its hardware."""
        device, tokens = Device("d0", identity=self.now[0]), frozenset(self.now)
        self.services[R].inventory.publish([device], {"d0": tokens})


@pytest.mark.parametrize(
    ("first", "now"),
    [(["first"], ["other"]), (["same", "hardware:usb:1:2:A#tty"], ["same", "hardware:usb:1:2:B#tty"])],
    ids=["identity", "hardware behind one number"],
)
async def test_a_claim_is_refused_a_device_that_becomes_another_while_it_is_prepared(
    tmp_path: Path, first: Sequence[str], now: Sequence[str]
) -> None:
    """A device becomes another one during Prepare: the claim is refused, and the next try gets the new device."""
    inventory, ledger = Inventory(R), await AsyncLedger.open(str(tmp_path / "ledger.db"))
    host, api = Relisted(inventory), FakeClaims()
    host.now = first
    await host.reread()
    await ledger.do(adopt(R, inventory.snapshot.devices, Side.DRA, T0))
    node = DriverNode(NODE, Register(host, ledger), api, str(tmp_path / "cdi"), boot="1")
    driver = Driver(D, node, [ServedResource(Plain(), inventory)])
    api.add(claim("1", result("d0")))
    host.now = now
    answer = (await driver.prepare([ref("1")]))["1"]
    changed = f"has just become {identity.shown(now)}; before, it was {identity.shown(first)}"
    assert f"d0 of example.com/fpga {changed}" in str(answer)
    assert not ledger.snapshot.claims
    assert isinstance((await driver.prepare([ref("1")]))["1"], Prepared)
    await driver.close()
    await ledger.close()


async def test_a_claims_file_has_what_is_learned_later(here: ServedDriver) -> None:
    """Pods that come to share a claim are added to the file that the agent keeps of the claim.

    If the file was removed, the addition does not write it again; a reconcile does.
    """
    await here.give("1", "d0")
    await here.async_ledger.do(operations.describe(D, "1", "", "", ["second"]))
    await here.driver.files.describe("1")
    assert here.own["1"].pods == {"pod-uid", "second"}
    os.remove(here.cdi / "deviceplugin" / f"{D}_1.claim")
    await here.driver.files.describe("1")
    await here.driver.files.describe("unknown")
    assert here.own == {}
    assert await here.driver.reconciler.reconcile((), ENDED) == {"rewritten": ["1"]}
    assert here.own["1"].pods == {"pod-uid", "second"}


async def test_an_own_file_that_vanishes_is_written_again_at_once(
    here: ServedDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the agent's file of a claim is removed, it is restored at once, also for a claim without container edits."""
    monkeypatch.setattr("dra_bridge.driver.claim_files.CHECK", 0.01)
    await here.async_ledger.do(adopt(R, ["bare"], Side.DRA, T0))
    here.inventory.publish([*here.inventory.snapshot.devices.values(), Device("bare")])
    here.claims.add(claim("1", result("d0")), claim("2", result("bare")))
    for uid in ("1", "2"):
        await here.prepared(uid)
    await here.async_ledger.do(operations.reopen(D, "1"))
    before = here.own
    keeping = asyncio.create_task(here.driver.files.keep())
    for uid in ("1", "2"):
        os.remove(here.cdi / "deviceplugin" / f"{D}_{uid}.claim")
        await until(lambda: here.own == before)
    keeping.cancel()
    with pytest.raises(asyncio.CancelledError):
        await keeping


async def lost(here: ServedDriver, *prepared: PreparedClaim) -> ServedDriver:
    """Return the driver after the ledger was lost and rebuilt. prepared: the claims in the kubelet's claim state."""
    await here.async_ledger.close()
    os.remove(here.path)
    after = await here.again()
    evidence = Evidence(claims=after.driver.claim_evidence(prepared, R))
    await after.async_ledger.do(operations.reconcile_evidence(R, evidence, ["d0", "d1", "d2", "d3"], Side.PLUGIN, T0))
    return after


class Halves(Plain):
    """A source whose devices have two shares each."""

    replicas = 2


SHARE: dict[str, Any] = {"shareID": "s", "consumedCapacity": {"shares": "1"}}


async def test_a_claim_whose_file_is_lost_shares_with_nobody(serve: Serve) -> None:
    """A claim whose record and file are lost counts with the whole device, as its CDI file does not show its part."""
    here = await serve(Halves())
    here.claims.add(claim("1", result("d0", **SHARE)), claim("2", result("d0", **{**SHARE, "shareID": "t"})))
    await here.prepared("1")
    os.remove(here.cdi / "deviceplugin" / f"{D}_1.claim")
    after = await lost(here)
    assert (D, "1") in after.async_ledger.snapshot.claims
    await after.refusal("2")


async def test_pods_of_file_and_claim_state_count(here: ServedDriver) -> None:
    """A claim's pods are those in the agent's file of the claim and those in the kubelet's claim state."""
    await here.give("1", "d0")
    second = dataclasses.replace(in_claim_state((NODE, "d0", "")), pod_uids=frozenset({"second"}))
    (found,) = here.driver.claim_evidence([second], R)
    assert found.pods == {"pod-uid", "second"}


async def test_a_damaged_file_says_nothing_where_no_other_does(here: ServedDriver) -> None:
    """If the agent's file of a claim is damaged, the claim has the devices of its CDI file or of the claim state.

    The kubelet writes the claim state. If the claim is in neither of them and not in the ledger, its devices are
    unknown: an error.
    """
    await here.give("1", "d0")
    (here.cdi / "deviceplugin" / f"{D}_1.claim").write_bytes(b"{")
    (here.cdi / "deviceplugin" / "other.example.com_1.claim").write_bytes(b"{")
    state = in_claim_state((NODE, "d1", ""))
    assert [one.devices for one in here.driver.claim_evidence([], R)] == [{"d0"}]
    os.remove(here.cdi / here.files[0])
    assert here.driver.claim_evidence([], R) == []
    await here.async_ledger.do(operations.unprepare(D, "1"))
    assert [one.devices for one in here.driver.claim_evidence([state], R)] == [{"d1"}]
    with pytest.raises(cdi.CdiError, match=f"not known what claim 1 holds.*{D}_1.claim"):
        here.driver.claim_evidence([], R)


async def test_a_claim_without_known_pods_runs_until_the_next_boot(here: ServedDriver) -> None:
    """A claim with unknown pods is over after a reboot; a claim with known pods is over when none of them runs."""
    await here.give("1", "d0")
    os.remove(here.cdi / "deviceplugin" / f"{D}_1.claim")
    after = await lost(here)
    (found,) = after.async_ledger.snapshot.claims.values()
    assert (found.name, found.pods) == ("", frozenset())
    assert not is_over(found, "1", (), ENDED)
    assert is_over(found, "2", (), ENDED)
    assert not is_over(found, "2", ("1",), ENDED)
    await after.async_ledger.do(operations.describe(D, "1", "", "", ["p"]))
    assert await after.driver.reconciler.reconcile((), ENDED) == {}, "nobody can be asked for a claim without a name"
    known = dataclasses.replace(found, pods=frozenset({"p"}))
    assert is_over(known, "1", (), ENDED)
    assert not is_over(known, "1", (), PodProcesses(frozenset({"p"})))
    assert not is_over(known, "1", (), PodProcesses(frozenset({"q"})), ["q"]), "it may be one of its pods"


async def test_files_of_claims_that_the_kubelet_counts_as_prepared_are_not_swept(here: ServedDriver) -> None:
    """A reconcile keeps files of a claim that the ledger lacks while the kubelet counts the claim as prepared."""
    await here.give("1", "d0")
    (kept,) = here.files
    await here.async_ledger.do(operations.unprepare(D, "1"))
    assert await here.driver.reconciler.reconcile({"1"}, ENDED) == {}
    assert await here.driver.reconciler.reconcile((), ENDED, sweep=False) == {}
    assert here.files == [kept]
    (here.cdi / "deviceplugin" / f"{D}_bare.claim").write_bytes(b"")
    assert await here.driver.reconciler.reconcile((), ENDED) == {"removed": ["1", "bare"]}
    assert here.all_files == []


def in_claim_state(*devices: tuple[str, str, str], admin: Sequence[str] = ()) -> PreparedClaim:
    """Return a claim in the kubelet's claim state. devices: (pool, device, share). admin: devices with adminAccess."""
    pods, cdi_ids = frozenset({"pod-uid"}), frozenset({f"{D}/claim=admin_1_look", f"{D}/claim=claim_1_fpga"})
    requests = frozenset((D, "look" if name in admin else "fpga", name) for _, name, _ in devices)
    return PreparedClaim("1", "default", "claim-1", pods, {D: frozenset(devices)}, {D: cdi_ids}, requests)


async def test_the_kubelets_claim_state_is_evidence(here: ServedDriver) -> None:
    """The kubelet's claim state shows a claim's devices of this driver and pool, their shares, its pods and name."""
    state = in_claim_state((NODE, "d0", ""), (NODE, "d1", "s"), (NODE, "d2", ""), (NODE, "x", ""), admin=["d2"])
    elsewhere = in_claim_state(("other-pool", "d3", ""))
    other = PreparedClaim("2", "default", "c", frozenset(), {"other.example.com": frozenset({(NODE, "d0", "")})})
    (found,) = here.driver.claim_evidence([state, elsewhere, other], R)
    granted = (
        ClaimDevice(R, "d0", identity=Identity("1"), amount=WHOLE),
        ClaimDevice(R, "d1", "s", identity=Identity("1"), amount=UNKNOWN),
    )
    names = "default", "claim-1", frozenset({"pod-uid"})
    assert found == ClaimEvidence(D, "1", frozenset({"d0", "d1"}), True, *names, granted)
    assert here.driver.claim_evidence([state], "example.com/other") == []


async def test_two_resources_of_one_driver_and_two_drivers_share_a_ledger(here: ServedDriver) -> None:
    """If two resources of a driver have a device d0 each, a claim can get both devices by names with a prefix."""

    class Other(Plain):
        resource = "example.com/nic"

    inventory = Inventory("example.com/nic")
    inventory.publish([Device("d0", nodes=["/dev/zero"])])
    await here.async_ledger.do(adopt("example.com/nic", ["d0"], Side.DRA, T0))
    both = Driver(
        D,
        DriverNode(NODE, Register(store=here.async_ledger), here.claims, str(here.cdi), boot="1"),
        [*here.driver.devices.resources, ServedResource(Other(), inventory)],
    )
    names = {f"{served.source.resource} {device.id}": name for name, (served, device) in both.devices.by_name.items()}
    here.claims.add(claim("1", result(names[f"{R} d0"]), result(names["example.com/nic d0"])))
    answer = (await both.prepare([ref("1")]))["1"]
    assert isinstance(answer, Prepared)
    assert here.async_ledger.snapshot.claims[D, "1"].held == {(R, "d0"), ("example.com/nic", "d0")}
    for resource in (R, "example.com/nic"):
        assert [found.devices for found in both.claim_evidence((), resource)] == [frozenset({"d0"})]
    await both.close()


async def test_the_claims_status_is_written_in_the_background_if_wanted(here: ServedDriver) -> None:
    """By default Prepare does not write the claim's status; with `report` the status is written in the background."""
    here.claims.add(claim("1", result("d0", shareID="s")))
    await here.prepared("1")
    await here.driver.tasks.wait()
    assert here.claims.statuses == []
    await here.unprepare("1")
    here = await here.again(report=True)
    await here.prepared("1")
    await here.driver.tasks.wait()
    ((uid, driver, (entry,)),) = here.claims.statuses
    assert (uid, driver) == ("1", D)
    assert (entry["device"], entry["shareID"]) == ("d0", "s")
    assert entry["conditions"][0]["type"] == "Ready"


# The API server.


FOREIGN: dict[str, Any] = {"driver": "other.example.com", "pool": "p", "device": "x", "conditions": []}
MINE: dict[str, Any] = {"driver": D, "pool": NODE, "device": "d0", "conditions": []}
"""Entries of this driver and of another driver in the devices of a claim's status."""


@pytest.fixture
def stored(server: FakeApiServer) -> ClaimRef:
    """A claim that the API server has."""
    body = {**claim("1", result("d0")), "metadata": {"namespace": "default", "name": "claim-1"}}
    return ref(server.create(body)["metadata"]["uid"], "claim-1")


@pytest.fixture
async def api(server: FakeApiServer) -> AsyncIterator[ClusterClaims]:
    async with Cluster.from_server(server.url, deadline=5.0) as cluster:
        yield ClusterClaims(cluster, NODE)


def write(server: FakeApiServer, *devices: Mapping[str, Any]) -> None:
    """Have another driver write the claim's status."""
    body = server.get("resourceclaims", "claim-1", "default")
    server.replace({**body, "status": {"devices": devices}})


def written(server: FakeApiServer) -> list[Any]:
    return list(server.get("resourceclaims", "claim-1", "default")["status"]["devices"])


async def test_claims_are_read_and_their_status_written_beside_that_of_others(
    server: FakeApiServer, api: ClusterClaims, stored: ClaimRef
) -> None:
    """Writing the claim's status keeps other drivers' entries; a claim with another UID or name is not written."""
    write(server, FOREIGN)
    found = await api.get_claim("default", "claim-1")
    assert found is not None
    assert found["metadata"]["uid"] == stored.uid
    assert await api.get_claim("default", "nobody") is None
    mine = {**MINE, "conditions": [{"type": "Ready", "status": "True"}]}
    for claim_ref in (ref("another", "claim-1"), ref("1", "nobody"), stored, stored):
        await api.set_devices(claim_ref, D, [mine])
        assert written(server) == ([FOREIGN, mine] if claim_ref is stored else [FOREIGN])
    await api.claim_event(stored, "DeviceNotAvailable", "why")
    (event,) = server.objects("events")
    assert (event["reason"], event["involvedObject"]["uid"]) == ("DeviceNotAvailable", stored.uid)


async def test_what_another_driver_writes_meanwhile_is_not_lost(
    server: FakeApiServer, api: ClusterClaims, stored: ClaimRef, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another driver writes the claim's status between read and write: the status is read again, both entries stay."""
    get, times = api.get_claim, 0

    async def overtaken(namespace: str, name: str) -> Mapping[str, Any] | None:
        nonlocal times
        times += 1
        found = await get(namespace, name)
        if times == 1:
            write(server, FOREIGN)
        return found

    monkeypatch.setattr(api, "get_claim", overtaken)
    await api.set_devices(stored, D, [MINE])
    assert written(server) == [FOREIGN, MINE]
    assert times == 2


async def test_a_conflict_is_tried_again_and_a_refusal_is_not(
    server: FakeApiServer, api: ClusterClaims, stored: ClaimRef, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A write with a conflict is repeated; if a driver's write is refused, this driver's writes pause for a while."""
    server.fail(lambda request: request.method == "PATCH", Fault(code=409))
    await api.set_devices(stored, D, [MINE])
    assert written(server) == [MINE]
    server.fail(lambda request: request.method == "PATCH", Fault(code=403))
    await api.set_devices(stored, D, [])
    count = len(server.requests())
    await api.set_devices(stored, D, [MINE])
    assert len(server.requests()) == count
    await api.set_devices(stored, FOREIGN["driver"], [FOREIGN])
    assert written(server) == [MINE, FOREIGN]
    monkeypatch.setattr(claim_api, "AGAIN", 0.0)
    await api.set_devices(stored, D, [])
    assert written(server) == [FOREIGN]


# Arbitrary claims and requests.

scalars = st.none() | st.booleans() | st.integers() | st.text(max_size=6)
anything = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=8,
)


def mostly(good: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.integers(0, 40).flatmap(lambda number: anything if number == 40 else good)


def fields(optional: Mapping[str, Any] | None = None, **each: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Return a hypothesis strategy for objects with these fields, whose values are mostly valid."""
    required: dict[str, Any] = {name: mostly(good) for name, good in each.items()}
    return st.fixed_dictionaries(required, optional=optional or {})


results = fields(
    {"adminAccess": mostly(st.booleans()), "shareID": mostly(st.just("s")), "tolerations": anything},
    request=st.sampled_from(["fpga", "fpga/a", "b"]),
    driver=st.just(D),
    pool=st.just(NODE),
    device=st.sampled_from(["d0", "d1", "d2"]),
)
parameters = st.sampled_from([{"mode": "x"}, {"threads": 2}, {"inner": {"level": 3}}, {}])
opaques = st.fixed_dictionaries({"driver": st.just(D), "parameters": st.one_of(parameters, anything)})
configs = fields(
    {"opaque": mostly(opaques)}, source=st.just("FromClass"), requests=st.lists(st.just("fpga"), max_size=1)
)
allocations = fields(
    devices=fields(results=st.lists(results, min_size=1, max_size=3), config=st.lists(configs, max_size=2))
)
claims_of_any_kind = mostly(
    fields(
        metadata=st.just({"uid": "1", "name": "claim-1"}),
        status=fields(reservedFor=st.just([{"uid": "p"}]), allocation=allocations),
    )
)


@given(found=claims_of_any_kind, hooked=st.booleans(), fails=st.sampled_from(["", "", "", "edits", "reset", "prepare"]))
def test_any_claim_is_answered_and_an_error_leaves_nothing(
    tmp_path_factory: pytest.TempPathFactory, found: Any, hooked: bool, fails: str
) -> None:
    """Prepare answers for any content of a claim; after an error or an Unprepare, no file and no record is left."""

    async def run() -> None:
        source = Hooked() if hooked else Plain()
        if isinstance(source, Hooked):
            source.fails.add(fails)
        here = await served_driver(tmp_path_factory.mktemp("any"), source)
        here.claims.claims["claim-1"] = found
        answer = (await here.prepare("1"))["1"]
        if isinstance(answer, ClaimError):
            assert str(answer)
            assert "internal error" not in str(answer)
            assert here.files == []
            assert not here.async_ledger.snapshot.claims
        else:
            assert len(here.files) == 1
            named = [name for device in answer.devices for name in device.cdi_ids if name.startswith(D)]
            assert all(here.edits(*named))
            assert list(here.async_ledger.snapshot.claims) == [(D, "1")]
            assert len({device.request for device in answer.devices}) == len(named)
        assert await here.unprepare("1") is None
        assert here.files == []
        assert not here.async_ledger.snapshot.claims
        await here.end()

    asyncio.run(run())


@settings(max_examples=30)
@given(refs=st.lists(st.builds(ClaimRef, st.text(max_size=8), st.text(max_size=8), st.text(max_size=8)), max_size=4))
def test_any_request_is_answered_in_full(tmp_path_factory: pytest.TempPathFactory, refs: list[ClaimRef]) -> None:
    """Prepare and Unprepare answer for each UID of a request, whatever its text."""

    async def run() -> None:
        here = await served_driver(tmp_path_factory.mktemp("any"))
        uids = {one.uid for one in refs}
        answers = await here.driver.prepare(refs)
        assert set(answers) == uids
        assert all(isinstance(answer, ClaimError) for answer in answers.values())
        assert await here.driver.unprepare(refs) == dict.fromkeys(uids)
        assert here.files == []
        await here.end()

    asyncio.run(run())


class NotYet(DriverHost):
    """An agent that gives no device to claims yet."""

    def __init__(self, *, ready: bool, bypassed: bool) -> None:
        self.is_ready, self.is_bypassed = ready, bypassed

    def ready(self, resource: str, device: str) -> bool:
        return self.is_ready

    def bypassed(self, resource: str) -> bool:
        return self.is_bypassed


@pytest.mark.parametrize(
    ("ready", "bypassed", "reason", "text"),
    [
        (False, False, "starting", "the agent has just started"),
        (True, True, "plugin", "another plugin of its resource has registered with the kubelet instead of this agent"),
    ],
)
async def test_why_a_device_is_not_given_yet(
    serve: Serve, *, ready: bool, bypassed: bool, reason: str, text: str
) -> None:
    """A claim is refused just after the agent's start, or while another plugin serves the device's resource."""
    here = await serve(host=NotYet(ready=ready, bypassed=bypassed))
    here.claims.add(claim("1", result("d0")))
    error = await here.refusal("1")
    assert error.reason == reason
    assert text in str(error)


class Pods(DriverHost):
    """The driver's host with these running pods. unlisted: pods not in the kubelet's list. error: raised by a read."""

    def __init__(self, *running: str, unlisted: Sequence[str] = ()) -> None:
        self.now = RunningPods(frozenset(running), dict.fromkeys(unlisted, math.inf))
        self.error: Exception | None = None

    async def running_pods(self) -> RunningPods:
        if self.error is not None:
            raise self.error
        return self.now

    def end(self) -> None:
        self.now = RunningPods()


@pytest.mark.parametrize("unlisted", [False, True])
async def test_a_claim_whose_pods_processes_run_on_is_answered_as_unprepared_and_held(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, *, unlisted: bool
) -> None:
    """While a process of a claim's pod runs, Unprepare first fails and later succeeds, but the claim keeps its device.

    The kubelet kills the processes left in a pod's cgroup only after the pod's claims are unprepared. While they run,
    another claim for the device is refused, and so is the same claim after a new allocation.
    """
    pod = "other" if unlisted else "pod-uid"
    pods = Pods(pod, unlisted=[pod] if unlisted else [])
    here = await serve(host=pods)
    await here.give("1", "d0")
    assert await here.unprepare("1") is not None
    monkeypatch.setattr(preparation, "PATIENCE", 0.0)
    assert await here.unprepare("1") is None
    assert here.own["1"].pods == {"pod-uid"}
    # Another claim for the same device is refused, and so is the same claim after it was allocated another device.
    here.claims.add(claim("2", result("d0")))
    assert "held by claim default/claim-1" in str(await here.refusal("2"))
    here.claims.add(claim("1", result("d1")))
    assert f"processes of pod {pod} run" in str(await here.refusal("1"))
    assert here.async_ledger.snapshot.claims[D, "1"].held == {(R, "d0")}
    # The kubelet did not list this running pod: it is not known to use the claim, and is not recorded as its pod.
    assert here.async_ledger.snapshot.claims[D, "1"].pods == {"pod-uid"}
    del here.claims.claims["claim-1"]
    assert await here.driver.reconciler.reconcile((), PodProcesses(frozenset({pod})), pods.now.unlisted) == {}
    pods.end()
    assert await here.driver.reconciler.reconcile((), PodProcesses(frozenset())) == {"unprepared": ["1"]}
    await here.prepared("2")


@pytest.mark.parametrize("unlisted", [False, True])
async def test_a_prepared_claim_that_is_allocated_anew_is_prepared_anew(serve: Serve, *, unlisted: bool) -> None:
    """A reallocated claim gets its new device, and frees the former one, once no pod with the former device runs."""
    pod = "other" if unlisted else "pod-uid"
    source, pods = Hooked(), Pods(pod, unlisted=[pod] if unlisted else [])
    here = await serve(source, host=pods)
    here.claims.add(claim("1", result("d0")))
    (before,) = (await here.prepared("1")).devices
    source.calls.clear()
    here.claims.add(claim("1", result("d1"), pods=["new"]), claim("2", result("d0")))
    for _ in range(2):
        assert f"processes of pod {pod} run" in str(await here.refusal("1"))
    assert here.async_ledger.snapshot.claims[D, "1"].held == {(R, "d0")}
    assert source.calls == []
    assert len(here.files) == 1
    pods.end()
    (device,) = (await here.prepared("1")).devices
    assert device.device == "d1"
    # A restarted kubelet also gives the runtime the CDI ids of the former answer, so these name the new device, too.
    assert "FPGA_1=1" in here.edits(before.cdi_ids[0])[0]["env"]
    assert [call[:2] for call in source.calls if call[0] != "released"] == [
        ("unprepare", ["d0"]),
        *((name, ["d1"]) for name in ("reset", "edits", "prepare")),
    ]
    assert here.async_ledger.snapshot.claims[D, "1"].pods == {"new"}
    # The claim's own pod runs now: a repeated Prepare does not wait until this pod ends.
    pods.now = RunningPods(frozenset({"new"}))
    assert (await here.prepared("1")).devices == (device,)
    await here.prepared("2")


@pytest.mark.parametrize("change", ["device", "request", "share", "one more"])
async def test_any_difference_of_the_allocation_is_a_new_preparation(here: ServedDriver, change: str) -> None:
    """A repeated Prepare with another device, request or share, or one more device, prepares the claim anew."""
    here.claims.add(claim("1", result("d0", shareID="x")))
    await here.prepared("1")
    allocations = {
        "device": [result("d1", shareID="x")],
        "request": [result("d0", "other", shareID="x")],
        "share": [result("d0", shareID="y")],
        "one more": [result("d0", shareID="x"), result("d1")],
    }
    here.claims.add(claim("1", *allocations[change], pods=["new"]))
    answer = await here.prepared("1")
    found = [(one.request, one.device, one.share) for one in answer.devices]
    assert found == [(one["request"], one["device"], one.get("shareID", "")) for one in allocations[change]]
    assert here.async_ledger.snapshot.claims[D, "1"].held == {(R, device) for _, device, _ in found}
    assert here.driver.statistics.prepared_again == 0


async def test_a_claim_that_is_allocated_anew_waits_for_pods_that_are_not_known(here: ServedDriver) -> None:
    """If it is unknown which pods have a claim's former device, Prepare of a new allocation waits for an Unprepare."""
    made = claim("1", result("d0"))
    made["status"]["reservedFor"] = [{"resource": "jobs", "apiGroup": "batch", "uid": "j"}]
    here.claims.add(made)
    await here.prepared("1")
    here.claims.add(claim("1", result("d1"), pods=["new"]))
    assert "it is not known which pods use its former devices" in str(await here.refusal("1"))
    assert await here.unprepare("1") is None
    await here.prepared("1")


async def test_after_a_reboot_a_claim_that_is_allocated_anew_waits_for_nobody(
    hooked: ServedDriver, source: Hooked
) -> None:
    """After a reboot, a claim with a new allocation is prepared at once; its former device is unprepared first."""
    await hooked.give("1", "d0")
    hooked.claims.add(claim("1", result("d1"), pods=["new"]))
    after = await hooked.again(source, boot="2", host=Pods("pod-uid"))
    source.calls.clear()
    await after.prepared("1")
    assert ("unprepare", ["d0"]) in source.calls
    assert after.async_ledger.snapshot.claims[D, "1"].held == {(R, "d1")}


async def test_pods_that_came_to_share_a_claim_count_before_it_is_unprepared(serve: Serve) -> None:
    """A pod that came to share a claim, and that is recorded just before an Unprepare, keeps the claim prepared."""

    class Recorded(Pods):
        async def running_pods(self) -> RunningPods:
            await made.async_ledger.do(operations.describe(D, "1", "default", "claim-1", ["later"]))
            return self.now

    pods = Recorded("later")
    here = made = await serve(host=pods)
    await here.give("1", "d0")
    assert "processes of pod later run" in str(await here.unprepare("1"))
    pods.end()
    assert await here.unprepare("1") is None


async def test_a_pod_that_ran_before_a_claim_was_prepared_does_not_use_it(serve: Serve) -> None:
    """A pod that ran before a claim was prepared does not prevent an Unprepare, except after the agent's restart."""
    pods = Pods("bystander", unlisted=["bystander"])
    pods.now.unlisted["bystander"] = time.monotonic()  # type: ignore[index]
    here = await serve(host=pods)
    await here.give("1", "d0")
    assert await here.unprepare("1") is None
    await here.prepared("1")
    here = await here.again(host=pods)
    assert await here.unprepare("1") is not None, "an agent that starts does not know what ran before"


@pytest.mark.parametrize("error", [ClaimStateError("torn"), OSError("cgroups"), LedgerError("full")])
async def test_a_claim_stays_prepared_while_its_pods_cannot_be_known(serve: Serve, error: Exception) -> None:
    """If running pods cannot be read, Unprepare fails, also for a claim with known pods: other pods may share it."""
    pods = Pods()
    here = await serve(host=pods)
    await here.give("1", "d0")
    assert here.async_ledger.snapshot.claims[D, "1"].pods
    pods.error = error
    assert "not known which pods use it" in str(await here.unprepare("1"))
    assert (D, "1") in here.async_ledger.snapshot.claims
    pods.error = None
    assert await here.unprepare("1") is None
