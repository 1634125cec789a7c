"""Metadata files, which describe a claim's devices to its containers (KEP-5304)."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from deviceplugin.device import Device, Version
from deviceplugin.device_metadata import DIRECTORY, VERSIONS
from deviceplugin.hooks import HookError
from deviceplugin.naming import NUMA_NODE, PCI_BUS_ID
from dra_bridge.driver import ClaimError
from tests.dra.driver.served import NODE, D, Plain, R, ServedDriver, claim, ref, result, served_driver
from tests.waits import until

CARD = Device(
    "card0",
    numa=1,
    attributes={"model": "u280", "lanes": 16, "ecc": True, "firmware": Version("1.2.3"), PCI_BUS_ID: "0000:01:00.0"},
)
SAYS = {
    "extendedResource": {"string": R},
    "model": {"string": "u280"},
    "lanes": {"int": 16},
    "ecc": {"bool": True},
    "firmware": {"version": "1.2.3"},
    PCI_BUS_ID: {"string": "0000:01:00.0"},
    NUMA_NODE: {"int": 1},
}


class Described(Plain):
    """A source whose devices have metadata files."""

    metadata = True
    replicas = 1


@pytest.fixture
async def here(tmp_path: Path) -> AsyncIterator[ServedDriver]:
    made = await served_driver(tmp_path, Described(), devices=[CARD, Device("card1", numa=[0, 1])])
    yield made
    await made.end()


def mounts(here: ServedDriver, *cdi_ids: str) -> dict[str, Path]:
    """Return the mounts of these CDI devices: the path on the host, by the path in the container."""
    found = [mount for edits in here.edits(*cdi_ids) for mount in edits.get("mounts", ())]
    assert all("ro" in mount["options"] for mount in found)
    return {mount["containerPath"]: Path(mount["hostPath"]) for mount in found}


def objects(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def metadata_files(here: ServedDriver) -> list[str]:
    return [name for name in here.all_files if ".metadata" in name]


async def test_a_file_of_each_request_says_in_each_version_what_its_devices_are(here: ServedDriver) -> None:
    """Each request has a file with its devices in all metadata versions, at the path that Kubernetes' helper uses."""
    both = claim("1", result("card0", "first/big"), result("card1", "second"))
    both["metadata"]["annotations"] = {"resource.kubernetes.io/pod-claim-name": "cards"}
    here.claims.add(both)
    answer = await here.prepared("1")
    first, second = (mounts(here, *device.cdi_ids) for device in answer.devices)
    assert first.keys() == {f"{DIRECTORY}/resourceclaimtemplates/cards/first/{D}-metadata.json"}
    assert second.keys() == {f"{DIRECTORY}/resourceclaimtemplates/cards/second/{D}-metadata.json"}
    (path,) = first.values()
    assert path.stat().st_mode & 0o777 == 0o644
    assert objects(path) == [
        {
            "kind": "DeviceMetadata",
            "apiVersion": f"metadata.resource.k8s.io/{version}",
            "metadata": {"name": "claim-1", "namespace": "default", "uid": "1", "generation": 1},
            "podClaimName": "cards",
            "requests": [
                {
                    "name": "first/big",
                    "devices": [{"driver": D, "pool": NODE, "name": "card0", "attributes": SAYS}],
                }
            ],
        }
        for version in VERSIONS
    ]
    (device,) = objects(*second.values())[0]["requests"][0]["devices"]
    assert device["attributes"][NUMA_NODE] == {"ints": [0, 1]}


async def test_a_claim_that_a_pod_names_is_found_by_its_name(here: ServedDriver) -> None:
    """If a pod names a claim directly, the claim's metadata file is at a path with the claim's name."""
    await here.give("1", "card0")
    (answer,) = (await here.prepared("1")).devices
    (inside,) = mounts(here, *answer.cdi_ids)
    assert inside == f"{DIRECTORY}/resourceclaims/claim-1/fpga/{D}-metadata.json"


async def test_nobody_gets_files_that_did_not_ask(tmp_path: Path) -> None:
    """A source without the setting `metadata` gets no metadata files."""
    here = await served_driver(tmp_path, devices=[CARD])
    await here.give("1", "card0")
    assert not metadata_files(here)
    assert here.files == []
    await here.end()


async def test_files_go_with_the_claim(here: ServedDriver) -> None:
    """Unprepare removes the metadata files and drafts of its claim only."""
    await here.give("1", "card0")
    await here.give("11", "card1")
    (file,) = (name for name in metadata_files(here) if f"_{'1'}_" in name)
    (here.cdi / "deviceplugin" / f"{file}.0f").touch()
    assert await here.unprepare("1") is None
    assert metadata_files(here) == [f"{D}_11_fpga.metadata"]
    assert await here.unprepare("11") is None
    assert not metadata_files(here)


async def test_files_of_a_claim_that_nobody_knows_are_removed(here: ServedDriver) -> None:
    """A metadata file of a claim that the ledger lacks is found, and an Unprepare of that claim removes it."""
    await here.give("1", "card0")
    (name,) = metadata_files(here)
    orphan = here.cdi / "deviceplugin" / name.replace("_1_", "_2_")
    orphan.write_text("")
    after = await here.again(devices=[CARD])
    assert "2" in await after.driver.files.claims()
    assert await after.driver.unprepare([ref("2")]) == {"2": None}
    assert metadata_files(after) == [name]


async def test_files_that_are_lost_are_written_again(here: ServedDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lost metadata file is written again with its former content, also after a restart of the agent."""
    monkeypatch.setattr("dra_bridge.driver.claim_files.CHECK", 0.01)
    await here.give("1", "card0")
    (name,) = metadata_files(here)
    path = here.cdi / "deviceplugin" / name
    text = path.read_text()
    path.unlink()
    after = await here.again(devices=[Device("card0")])
    keeping = asyncio.create_task(after.driver.files.keep())
    await until(path.exists)
    keeping.cancel()
    assert path.read_text() == text


async def test_a_prepare_that_fails_leaves_no_file(tmp_path: Path) -> None:
    """A Prepare that fails leaves no file: if a hook fails, or if the metadata file cannot be written."""

    class Failing(Described):
        fails = True

        def prepare(self, devices: object, config: object) -> None:
            if self.fails:
                raise HookError("no")

    source = Failing()
    here = await served_driver(tmp_path, source, devices=[CARD])
    here.claims.add(claim("1", result("card0")))
    assert isinstance((await here.prepare("1"))["1"], ClaimError)
    assert not here.all_files
    source.fails = False
    in_the_way = here.cdi / "deviceplugin" / f"{D}_1_fpga.metadata"
    in_the_way.mkdir(parents=True)
    assert "metadata" in str((await here.prepare("1"))["1"])
    assert not here.files
    in_the_way.rmdir()
    assert await here.unprepare("1") is None
    assert not here.all_files
    assert not here.async_ledger.snapshot.claims
    await here.end()
