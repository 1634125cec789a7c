"""The names under which a driver publishes its devices, while resources of the driver come and go."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager

import pytest

from deviceplugin.naming import device_name
from dra_bridge.handover.share import Share
from dra_bridge.node.bridge import Bridge
from dra_bridge.node.share import NO_DEVICES, HandoverPolicy
from dra_bridge.testing.node import FakeNode
from tests.dra import agents
from tests.dra.agents import Listed
from tests.waits import until

A, B = "example.com/a", "example.com/b"
D = "d.example.com"
ALL = Share(part=1.0)


ALONE = {"0": (A, "0"), "1": (A, "1")}
BOTH = ALONE | {device_name(one, "b--"): (B, one) for one in ("0", "1")}


def running(
    node: FakeNode, *resources: str, share: Share = ALL, ids: Sequence[str] = ("0", "1")
) -> AbstractAsyncContextManager[Bridge]:
    return agents.running(agents.bridge(node, [Listed(name, D, *ids) for name in resources], share))


@pytest.mark.parametrize("damaged", [False, True])
async def test_a_claim_is_known_by_its_file_when_no_device_has_its_name(
    node: FakeNode, caplog: pytest.LogCaptureFixture, *, damaged: bool
) -> None:
    """If the ledger is lost and devices have other ids, the claim's file shows which device the claim had.

    If the file is damaged as well, all devices are withheld.
    """
    async with running(node, A) as bridge:
        await until(lambda: len(published(node)) == 2)
        pod = await asyncio.to_thread(lambda: node.start_pod("p", template={D: 1}).wait_running(60))
        (device,) = node.devices_of(pod)
        path = bridge.ledger_path
    for file in path.parent.glob(f"{path.name}*"):
        file.unlink()
    if damaged:
        (own,) = (node.root / "cdi").glob("*/*.claim")
        own.write_bytes(b"{")
        node.damage_claim_state("deleted")
        await asyncio.to_thread(node.restart)
        for file in (node.root / "cdi").glob("*.json"):
            file.unlink()
    async with running(node, A, share=NO_DEVICES, ids=("x", "y")) as bridge:
        if damaged:
            why = "devices are withheld because their holders are not known: x: it is not known what claim"
            await until(lambda: any(said.startswith(why) for said in caplog.messages))
            assert not any(one.health == "Healthy" for one in node.devices(A).values())
        else:
            await until(lambda: any(one.health == "Healthy" for one in node.devices(A).values()))
            (claim,) = bridge.drivers[D].async_ledger.snapshot.claims.values()
            assert claim.held == {(A, device)}


def published(node: FakeNode) -> dict[str, str]:
    """Return the resource of each published device."""
    devices = [one for body in node.server.objects() for one in body["spec"].get("devices") or ()]
    return {one["name"]: one["attributes"]["extendedResource"]["string"] for one in devices}


def resources(names: Mapping[str, tuple[str, str]]) -> dict[str, str]:
    return {name: resource for name, (resource, _) in names.items()}


def known(bridge: Bridge) -> dict[str, tuple[str, str]]:
    """Return the devices that the driver finds by the published names in claims."""
    if D not in bridge.drivers:
        return {}
    devices = bridge.drivers[D].driver.devices.by_name
    return {name: (served.source.resource, device.id) for name, (served, device) in devices.items()}


async def test_published_names_stay_when_resources_come_and_go(node: FakeNode) -> None:
    """A published name stays when a resource is added or removed, and after a restart without the API server."""
    async with running(node, A) as bridge:
        await until(lambda: published(node) == resources(ALONE))
        pod = node.start_pod("p", template={D: 1})
        await asyncio.to_thread(pod.wait_running, 60)
        await bridge.reconfigure({B: Listed(B, D, "0", "1")}, dict.fromkeys((A, B), HandoverPolicy(ALL)), [A])
        await until(lambda: published(node) == resources(BOTH))
        assert known(bridge) == BOTH
    with node.server.outage():
        async with running(node, B, A) as bridge:
            await until(lambda: known(bridge) == BOTH)
    async with running(node, B, A) as bridge:
        await until(lambda: published(node) == resources(BOTH))
        await asyncio.to_thread(pod.delete, 60)
        assert not bridge.drivers[D].async_ledger.snapshot.claims
        await bridge.reconfigure({}, {B: HandoverPolicy(ALL)}, [B])
        await until(lambda: published(node).keys() == BOTH.keys() - ALONE.keys())
    async with running(node, A, B):
        await until(lambda: published(node) == resources(BOTH))


async def test_published_names_survive_the_loss_of_the_ledger(node: FakeNode) -> None:
    """After a loss of the ledger, the agent takes the published names of devices from the slices in the API server."""
    async with running(node, A) as bridge:
        await until(lambda: published(node) == resources(ALONE))
        await bridge.reconfigure({B: Listed(B, D, "0", "1")}, dict.fromkeys((A, B), HandoverPolicy(ALL)), [A])
        await until(lambda: published(node) == resources(BOTH))
        path = bridge.ledger_path
    for file in path.parent.glob(f"{path.name}*"):
        file.unlink()
    async with running(node, A, B) as bridge:
        await until(lambda: known(bridge) == BOTH)
        assert published(node) == resources(BOTH)


async def test_resources_that_begin_together_all_carry_their_names(node: FakeNode) -> None:
    """If a driver begins with two resources, the published names of their devices begin with the resource's name.

    The names stay when one of the resources is removed.
    """
    async with running(node, A, B):
        await until(lambda: published(node).keys() == {"a--0", "a--1", "b--0", "b--1"})
    async with running(node, A) as bridge:
        await until(lambda: published(node).keys() == {"a--0", "a--1"})
        assert known(bridge).keys() == {"a--0", "a--1"}
