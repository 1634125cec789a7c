"""A whole node whose containers say what they really got: what is done to it, and who has how much of which hardware.

The truth is the runtime's: hardware is what the started container was given by its variables, a part is as large as the
kubelet's list or the claim's slice said when it was granted. No record of the agent is asked.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import stat
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, Self

from deviceplugin.testing import FakeContainer, FakePod, PluginCallError, Rpc
from deviceplugin.testing import claim_state as claim_states
from dra_bridge.testing.apiserver import FakeApiServer
from dra_bridge.testing.kubelet import AnsweredDevice, DevicesOfClaim, PodError
from dra_bridge.testing.node import FakeNode
from tests.dra.objects import claim_body, device_class
from tests.register.agent import Card, Config, Kind, Place, Process, variable

A: Final = "example.com/a"
B: Final = "example.com/b"
D: Final = "d.example.com"
E: Final = "e.example.com"
FOREIGN: Final = "nic.example.org"
NODE: Final = "node"
HARDWARE: Final = ("h0", "h1", "h2")

SHARES: Final = {"none": 0, "1": 1, "all": len(HARDWARE)}

QUIET: Final = 0.06
"""Seconds without any change after which a step is over."""
MOST: Final = 1.5
"""Seconds after which a step is over although things change."""
MOVE: Final = 0.25
"""Seconds that idle devices get to move; holders may keep them where they are."""
BRIEF: Final = 0.4
"""Seconds that a pod gets to start or to end; refusals are fine."""
AT_LAST: Final = 15.0
"""Seconds after which each device has to be offered again when nobody is left."""

File = Literal["register", "copy", "checkpoint", "claims", "slices"]
PodKind = Literal["", "static", "rejected", "init"]
End = Literal["delete", "force", "hang", "complete"]
Key = tuple[str, str]


class DoubleHoldingError(AssertionError):
    """Raised when a piece of hardware is held for more than its whole."""


class LostDeviceError(AssertionError):
    """Raised when a device is offered nowhere although nobody holds it."""


class Use(NamedTuple):
    """That an owner has a part of a piece of hardware."""

    owner: tuple[str, ...]
    unit: str
    hardware: str
    part: Fraction


class TrueNode(FakeNode):
    """A node that knows what its containers really got."""

    def __init__(self, server: FakeApiServer, **options: Any) -> None:
        super().__init__(server, NODE, pod_resources_qps=1e6, pod_resources_burst=1_000_000, **options)
        self.doubles: list[str] = []
        """Each start of a container by which hardware was held for more than its whole."""
        self._resolved: dict[Key, list[tuple[str, dict[str, str]]]] = {}
        self._uses: dict[Key, tuple[Use, ...]] = {}
        self._shown: dict[Key, int] = {}
        self._parts: dict[tuple[str, ...], Fraction] = {}
        self._allocations: dict[Key, tuple[Any, ...]] = {}
        self._prepared: dict[str, tuple[Any, ...]] = {}
        self._times: dict[tuple[str, str, str, str, str], int] = {}

    # What is noted on the way.

    @contextlib.contextmanager
    def recorded(self, method: str, resource: str, request: Any) -> Iterator[Rpc]:
        if method == "Allocate":
            for one in request.container_requests:
                self._shown |= {(resource, name): self._times_shown(resource, name) for name in one.devices_ids}
        with super().recorded(method, resource, request) as rpc:
            yield rpc

    def schedule(self) -> None:
        before = self._sliced()
        super().schedule()
        after = self._sliced()
        for claim in self.server.objects("resourceclaims"):
            for one in _results(claim):
                key = (claim["metadata"]["uid"], one["driver"], one["pool"], one["device"], one.get("shareID", ""))
                if key not in self._times:
                    at = (one["driver"], one["device"])
                    self._times[key] = max(before.get(at, 1), after.get(at, 1)) if one.get("shareID") else 1

    def prepare_pod(self, pod: FakePod) -> None:
        for name in self.claims_of(pod):
            claim = self._get_claim(pod.namespace, name)
            known = self.dra.claim(pod.namespace, name)
            if claim is None:
                continue
            uid = claim["metadata"]["uid"]
            # A kubelet that counts the claim as prepared asks nobody, whatever it is allocated now.
            if not (known is not None and known.prepared and uid in self._prepared):
                self._prepared[uid] = _identity(claim)
            self._allocations[pod.uid, name] = self._prepared[uid]
        super().prepare_pod(pod)

    def cdi_devices(self, pod: FakePod, container: FakeContainer) -> Sequence[str]:
        """Resolve CDI devices as a runtime does, from the files as they are now."""
        names = super().cdi_devices(pod, container)
        known: dict[str, dict[str, str]] = {}
        for file in self.cdi.glob("*.json"):
            with contextlib.suppress(FileNotFoundError):
                spec = json.loads(file.read_bytes())
                for one in spec["devices"]:
                    listed = one["containerEdits"].get("env", ())
                    known[f"{spec['kind']}={one['name']}"] = dict(text.split("=", 1) for text in listed)
        if missing := [name for name in names if name not in known]:
            raise PluginCallError(f"unresolvable CDI devices {missing}")
        found: list[tuple[str, dict[str, str]]] = []
        for name in self.claims_of(pod):
            info = self.dra.claim(pod.namespace, name)
            listed = [one for devices in info.drivers.values() for one in devices] if info is not None else []
            found += [(name, known[cdi]) for one in listed for cdi in one.cdi_ids if cdi in known]
        self._resolved[pod.uid, container.name] = found
        return names

    def start_container(self, pod: FakePod, container: FakeContainer) -> None:
        with self.changed:
            super().start_container(pod, container)
            self._uses[pod.uid, container.name] = (*self._of_plugins(pod, container), *self._of_claims(pod, container))
            self._add_up(f"{pod.name}/{container.name}", {one.hardware for one in self._uses[pod.uid, container.name]})

    def _of_plugins(self, pod: FakePod, container: FakeContainer) -> Iterator[Use]:
        for resource, ids in container.devices.items():
            for name in ids:
                device = name.partition("::")[0]
                key = (pod.uid, container.name, resource, name)
                if key not in self._parts:
                    times = max(self._shown.get((resource, name), 1), self._times_shown(resource, name))
                    self._parts[key] = Fraction(1, times) if "::" in name else Fraction(1)
                hardware = container.env[variable(resource, device)]
                yield Use(("pod", pod.name, pod.uid), f"{resource} {name}", hardware, self._parts[key])

    def _of_claims(self, pod: FakePod, container: FakeContainer) -> Iterator[Use]:
        for name, env in self._resolved.pop((pod.uid, container.name), ()):
            uid, *results = self._allocations[pod.uid, name]
            times = max((self._times.get((uid, *one[:4]), 1) for one in results), default=1)
            part = Fraction(0) if any(one[4] for one in results) else Fraction(1, times)
            for key, hardware in env.items():
                if key.startswith("HARDWARE_"):
                    yield Use(("claim", name, uid, repr(results)), key, hardware, part)

    def _times_shown(self, resource: str, name: str) -> int:
        """Return into how many parts a device is divided by what the kubelet knows; not less than it is."""
        device = name.partition("::")[0]
        numbers = [int(one.partition("::")[2]) for one in self.devices(resource) if one.startswith(f"{device}::")]
        return max(numbers, default=0) + 1

    def _sliced(self) -> dict[Key, int]:
        """Return how often each published device is offered, by driver and name."""
        return {
            (spec["driver"], one["name"]): int(((one.get("capacity") or {}).get("shares") or {}).get("value") or 1)
            for spec in (each["spec"] for each in self.server.objects())
            for one in spec.get("devices") or ()
        }

    # Who has what.

    def uses(self) -> set[Use]:
        """Return what running containers have."""
        with self.changed:
            return {
                use
                for pod in (*self.pods.values(), *self.orphans.values())
                for container in pod.all_containers.values()
                if container.state == "running"
                for use in self._uses.get((pod.uid, container.name), ())
            }

    def _add_up(self, who: str, hardware: set[str]) -> None:
        for one in sorted(hardware):
            parts: dict[tuple[str, ...], Fraction] = defaultdict(Fraction)
            holders = [use for use in self.uses() if use.hardware == one]
            for use in holders:
                parts[use.owner] += use.part
            total = sum((min(Fraction(1), part) for part in parts.values()), Fraction(0))
            if total > 1:
                listed = "; ".join(sorted(f"{' '.join(use.owner[:2])}: {use.part} as {use.unit}" for use in holders))
                self.doubles.append(f"{one} is held {total} times when {who} starts: {listed}")


@dataclass
class Started:
    """A pod that was started; claim: of its own name, "" for one that is made for it or none."""

    pod: FakePod
    claim: str = ""
    hangs: bool = False

    @property
    def rests(self) -> bool:
        """Whether it runs, has ended, or waits for the scheduler."""
        pod = self.pod
        return pod.running or pod.terminal or pod.gone or pod.deleting or bool(pod.waits_for)


class CheckedNode:
    """A node, its agent and what is on it.

    kind: see `agent.Kind`. both: a bridge; otherwise the plugin side alone. period: seconds between two looks of the
    agent at who holds what.
    """

    def __init__(self, kind: Kind = "file", *, both: bool = True, period: float = 0.02, config: Config) -> None:
        self.kind = kind
        self.period = period
        self.both = both
        self.said: list[str] = []
        """What was done, and what came of it."""
        self._stack = contextlib.ExitStack()
        try:
            self._begin(config)
        except BaseException:
            self._stack.close()
            raise

    def _begin(self, config: Config) -> None:
        self.server = self._stack.enter_context(FakeApiServer())
        for driver in (D, E):
            self.server.create(device_class(driver))
        self.node = self._stack.enter_context(TrueNode(self.server))
        self.home = Path(tempfile.mkdtemp(prefix="register-"))
        self._stack.callback(shutil.rmtree, self.home, ignore_errors=True)
        self.hardware = self.home / "hardware"
        self.hardware.mkdir()
        for number, name in enumerate(HARDWARE):
            if self.kind == "node" and not _make_node(self.hardware / name, number):
                self.kind = "file"
            (self.hardware / name).touch()
        self.config: Config = dict(config)
        self.cards: dict[str, dict[str, Card]] = {A: {}, B: {}}
        for resource, name, one in ((A, "d0", "h0"), (A, "d1", "h1"), (B, "d0", "h0"), (B, "x1", "h2")):
            self.cards[resource][name] = Card(name, self._hardware(resource, name, one))
        self.agent: Process | None = None
        self.started: list[Started] = []
        self.lost: dict[str, set[File]] = {}
        self.lost_now: set[File] = set()
        """Those that an agent makes anew, and that were lost since one ran last."""
        self._numbers = 0
        self._stack.callback(self._kill)
        self.start_agent()

    def close(self) -> None:
        """End everything at once."""
        self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _hardware(self, resource: str, name: str, wanted: str) -> str:
        """Return what a name stands for. Where only names tell, a name always means the same."""
        return f"{resource.partition('/')[2]}-{name}" if self.kind == "name" else wanted

    # The agent and its config.

    def start_agent(self) -> None:
        """Start an agent, if none runs."""
        if self.agent is not None:
            return
        url = self.server.url if self.both else ""
        place = Place(self.node.paths, url, NODE, self.node.cdi, self.hardware, self.kind, self.period)
        self._numbers += 1
        lists = {name: tuple(cards.values()) for name, cards in self.cards.items()}
        self.agent = Process(place, self.config, lists, self.home / f"agent-{self._numbers}.log")
        self._wait_served()
        self.settle()
        if self.node.is_up:
            self.lost_now.clear()

    def end_agent(self, *, kill: bool) -> None:
        """End the agent as SIGKILL does, or as SIGTERM.

        The memory of a plugin alone is all that is left of pods that the kubelet lost with its checkpoint: it stays.
        """
        if self.agent is not None and (self.both or not any("checkpoint" in one for one in self._lost().values())):
            self._end_agent(kill=kill)

    def _end_agent(self, *, kill: bool) -> None:
        if self.agent is not None:
            agent, self.agent = self.agent, None
            if kill:
                agent.kill()
            else:
                agent.stop()

    def _kill(self) -> None:
        self._end_agent(kill=True)

    def _lost(self) -> dict[str, set[File]]:
        """Return the files that were lost for good, by the UIDs of pods that ran then and still do."""
        self.lost = {one.pod.uid: self.lost.get(one.pod.uid, set()) for one in self.started if not one.pod.gone}
        return self.lost

    def _wait_served(self) -> None:
        """Wait until the kubelet knows what is served, and for a moment until the sides are as they should be."""
        if self.node.is_up and self.agent is not None:
            self._wait(self._is_served, MOST)
            self._wait(self._is_divided, MOVE)
            self._wait(lambda: all(one.rests for one in self.started), BRIEF)

    def _is_served(self) -> bool:
        drivers = {one.driver for one in self.config.values() if one.driver and self.both}
        return all(self.node.streams(name) for name in self.config) and all(
            any(one.connected and one.told for one in self.node.dra.plugins(driver)) for driver in drivers
        )

    def _is_divided(self) -> bool:
        """Return whether each resource's devices are on the sides that its share asks for; holders may prevent that."""
        sliced = self._published()
        for resource, settings in self.config.items():
            listed = self.cards[resource]
            of_claims = {name for name in listed if (settings.driver, f"{resource} {name}") in sliced}
            of_pods = self._healthy(resource) & listed.keys()
            wanted = 0 if not (self.both and settings.driver) else SHARES[settings.share]
            if len(of_claims) != min(wanted, len(listed)) or len(of_pods) != len(listed) - len(of_claims):
                return False
        return True

    def _published(self) -> set[Key]:
        """Return the devices that are offered to claims, by driver and by resource and name."""
        return {
            (spec["driver"], one["attributes"]["name"]["string"])
            for spec in (each["spec"] for each in self.server.objects())
            for one in spec.get("devices") or ()
        }

    def _healthy(self, resource: str) -> set[str]:
        """Return the devices that are offered to pods."""
        devices = self.node.devices(resource)
        return {name.partition("::")[0] for name, one in devices.items() if one.health == "Healthy"}

    def reload(self, config: Config) -> None:
        """Have the agent take a config."""
        self.config = dict(config)
        if self.agent is not None:
            if answer := self.agent.reload(config):
                self.said.append(answer)
            self._wait_served()
        self.settle()

    def list(self, resource: str, name: str, hardware: str | None, times: int = 3) -> None:
        """Have a resource list a device as this hardware, or list it no more."""
        if hardware is None:
            self.cards[resource].pop(name, None)
        else:
            self.cards[resource][name] = Card(name, self._hardware(resource, name, hardware), times)
        if self.agent is not None:
            self.agent.list(resource, tuple(self.cards[resource].values()))
            self._wait_served()
        self.settle()

    # Pods.

    def pod(self, resource: str, count: int = 1, how: PodKind = "") -> Started:
        """Start a pod by limits. rejected: the kubelet does not admit it after Allocate. init: a container before."""
        self._numbers += 1
        name, limits = f"p{self._numbers}", {resource: count}
        if how == "rejected":
            self.node.reject_next_pod()
        if how == "static" and resource in self.node.resources():
            with contextlib.suppress(TimeoutError):
                self.node.run_pod(name, limits, static=True, check=False, timeout=BRIEF)
            return self._follow(Started(self.node.pods[f"default/{name}"]))
        before = {"init": limits} if how == "init" else None
        return self._follow(Started(self.node.start_pod(name, limits, init_containers=before)))

    def claimant(self, driver: str, *, admin: bool = False, count: int = 1) -> Started:
        """Start a pod with a claim that is made for it; one for administrative access has the pod's name and stays."""
        self._numbers += 1
        name = f"c{self._numbers}"
        if not admin:
            return self._follow(Started(self.node.start_pod(name, template={driver: count})))
        self.server.create(claim_body(name, driver, count=count, adminAccess=True))
        return self._follow(Started(self.node.start_pod(name, claims=[name]), name))

    def user(self, claim: str, driver: str) -> Started:
        """Start a pod that uses a claim of this name, which is made if it is not there; another pod may use it, too."""
        if not any(one["metadata"]["name"] == claim for one in self.server.objects("resourceclaims")):
            self.node.claim(claim, driver)
        name = f"{claim}-user"
        if f"default/{name}" in self.node.pods:
            self._numbers += 1
            name = f"{name}-{self._numbers}"
        return self._follow(Started(self.node.start_pod(name, claims=[claim]), claim))

    def _follow(self, started: Started) -> Started:
        self.started.append(started)
        if self.node.is_up and self.agent is not None:
            self._wait(lambda: started.rests, BRIEF)
        self.settle()
        return started

    def end(self, one: Started, how: End) -> None:
        """End a pod, or have it forgotten while its containers run on (hang)."""
        pod = one.pod
        if pod.gone or one.hangs:
            return
        with contextlib.suppress(TimeoutError):
            if how == "delete":
                pod.delete(BRIEF)
            elif how == "complete":
                pod.complete(timeout=BRIEF)
            else:
                one.hangs = how == "hang" and any(each.state == "running" for each in pod.containers.values())
                pod.force_delete(hang=one.hangs, timeout=BRIEF)
        self.settle()

    def reap(self, one: Started) -> None:
        """End containers that live on."""
        if one.hangs and not one.pod.gone:
            with contextlib.suppress(TimeoutError):
                one.pod.end_containers(BRIEF)
            self.settle()

    def restart_container(self, one: Started) -> None:
        """Have a container end and start again in place."""
        pod = one.pod
        if pod.running and not (pod.deleting or pod.gone) and self.node.is_up:
            with contextlib.suppress(Exception):  # it may be refused
                pod.restart_container(timeout=BRIEF)
            self.settle()

    # The kubelet.

    def stop_kubelet(self) -> None:
        self.node.stop()

    def start_kubelet(self, *, outage: bool = False) -> None:
        """Start the kubelet, if it does not run. outage: without the API server, until `end_outage`."""
        if self.node.is_up:
            return
        if outage:
            self.node.hold_sources()
        elif self.agent is None:
            self.lost_now.add("slices")
        self.node.start()
        self._wait_served()
        self.settle()
        if self.agent is not None:
            self.lost_now.clear()

    def end_outage(self) -> None:
        self.node.release_sources()
        self.settle()

    def reconcile(self) -> None:
        """Have the kubelet unprepare what pods use that are not active, as it does every 60 s."""
        if self.node.is_up:
            self.node.reconcile_claims()
            self.settle()

    def foreign(self) -> None:
        """Let another vendor's claim, which has a device of one of our names, be prepared while the kubelet starts."""
        bystander = self.node.start_pod("bystander") if "default/bystander" not in self.node.pods else None
        if bystander is None:
            return
        self.node.stop()
        uid = "0f0f0f0f-0000-4000-8000-000000000001"
        device = AnsweredDevice(("r0",), NODE, "d0", (), None)
        claim = DevicesOfClaim("default", "nic", uid, {FOREIGN: [device]}, {bystander.uid})
        claim_states.write(self.node.root, [*claim_states.read_or_create(self.node.root), claim])
        result = {"request": "r0", "driver": FOREIGN, "pool": NODE, "device": "d0"}
        spec = {"devices": {"requests": [{"name": "r0", "exactly": {"deviceClassName": FOREIGN, "count": 1}}]}}
        reserved = [{"resource": "pods", "name": bystander.name, "uid": bystander.uid}]
        self.server.create(
            {
                "apiVersion": "resource.k8s.io/v1",
                "kind": "ResourceClaim",
                "metadata": {"name": "nic", "namespace": "default", "uid": uid},
                "spec": spec,
                "status": {"allocation": {"devices": {"results": [result]}}, "reservedFor": reserved},
            }
        )
        self.start_kubelet()

    # Lost files.

    def lose(self, files: set[File], *, kill: bool = True) -> None:
        """Lose files while nobody who has them open runs; who ran runs again then.

        Not more than two of those that tell of a pod that runs: what is left is what the agent has to find it by. A
        plugin alone has the kubelet's checkpoint only, and loses it while it runs.
        """
        if not self.both:
            files = files & {"checkpoint"}
        lasting: set[File] = files & {"checkpoint", "claims"}
        agent, kubelet = self.agent is not None, self.node.is_up
        now = self.lost_now | files | ({"slices"} if lasting and kubelet else set())
        if not files or any(len(one | now) > 2 for one in self._lost().values()):
            return
        if self.both:
            self._end_agent(kill=kill)
        elif not agent:
            return
        if lasting:
            self.node.stop()
        for one in self.lost.values():
            one |= lasting
        self.lost_now |= files - lasting
        for file in files:
            self._lose(file)
        if kubelet:
            self.start_kubelet()
        if agent:
            self.start_agent()

    def _lose(self, file: File) -> None:
        plugins = self.node.root / "plugins"
        if file == "register":
            found = [*plugins.glob("*/ledger.db*"), *plugins.glob("*/register.db*")]
            found = [path for path in found if path.suffix != ".lock"]
        elif file == "copy":
            found = list(self.node.cdi.glob("*/*.allocations"))
        elif file == "slices":
            self.server.wipe(NODE)
            found = []
        else:
            found = [self.node.checkpoint if file == "checkpoint" else self.node.claim_state]
        for path in found:
            path.unlink(missing_ok=True)

    # Afterwards.

    def settle(self) -> None:
        """Wait until nothing has changed for a moment, then look who has what."""
        end = time.monotonic() + MOST
        seen, since = self._seen(), time.monotonic()
        while (now := time.monotonic()) < end and now - since < QUIET:
            with self.node.changed:
                self.node.changed.wait(0.01)
            if (seen_now := self._seen()) != seen:
                seen, since = seen_now, time.monotonic()
        self.check()

    def check(self) -> None:
        """Raise DoubleHoldingError if hardware was held for more than its whole."""
        if self.agent is not None and not self.agent.alive:
            raise AssertionError(f"the agent has ended:\n{self.agent.log()}")
        if self.node.doubles:
            log = self.agent.log() if self.agent is not None else ""
            raise DoubleHoldingError("\n".join([*self.node.doubles, *self.said, log]))

    def _seen(self) -> object:
        with self.node.changed:
            pods = [
                (
                    pod.uid,
                    pod.phase,
                    pod.bound,
                    pod.gone,
                    [(one.state, len(one.starts)) for one in pod.containers.values()],
                )
                for pod in (*self.node.pods.values(), *self.node.orphans.values())
            ]
        devices = [self.node.devices(name) for name in (A, B)]
        slices = [(one["spec"]["driver"], one["spec"].get("devices")) for one in self.server.objects()]
        return pods, devices, slices

    def _wait(self, what: Callable[[], bool], seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            self.node.wait_until(what, seconds)

    def leave_alone(self) -> None:
        """End all pods and have everything run, then raise LostDeviceError if a device is offered nowhere.

        All shares are none, so that nothing is contradictory where two resources have one piece of hardware.
        """
        self.node.release_sources()
        self.start_kubelet()
        self.start_agent()
        for one in self.started:
            if one.hangs:
                self.reap(one)
            else:
                self.end(one, "delete")
        self._wait(lambda: all(one.pod.gone for one in self.started), 2.0)
        with contextlib.suppress(PodError):
            self.node.reconcile_claims()
        for claim in self.server.objects("resourceclaims"):
            if claim["metadata"]["name"] != "nic":
                self.server.delete("resourceclaims", claim["metadata"]["name"], "default")
        self.reload({name: type(one)(one.driver, one.replicas, "none") for name, one in self.config.items()})
        self._wait(lambda: not self.withheld(), AT_LAST)
        if withheld := self.withheld():
            log = self.agent.log() if self.agent is not None else ""
            raise LostDeviceError(
                f"offered nowhere: {sorted(withheld)}; {self.node.devices(A)}, {self.node.devices(B)}\n{log}"
            )

    def withheld(self) -> set[str]:
        """Return the hardware that is listed and that no pod and no claim can have now."""
        sliced = self._published()
        listed: set[str] = set()
        offered: set[str] = set()
        for resource, settings in self.config.items():
            healthy = self._healthy(resource)
            for name, card in self.cards[resource].items():
                listed.add(card.hardware)
                if name in healthy or (settings.driver, f"{resource} {name}") in sliced:
                    offered.add(card.hardware)
        return listed - offered


def _results(claim: Any) -> list[Any]:
    allocation = (claim.get("status") or {}).get("allocation") or {}
    return (allocation.get("devices") or {}).get("results") or []


def _identity(claim: Any) -> tuple[Any, ...]:
    """Return what a claim is: the object, and what it is allocated."""
    listed = [
        (one["driver"], one["pool"], one["device"], one.get("shareID", ""), bool(one.get("adminAccess")))
        for one in _results(claim)
    ]
    return (claim["metadata"]["uid"], *sorted(listed))


def _make_node(path: Path, number: int) -> bool:
    """Make a device node that stands for no hardware of this machine; return whether that is allowed."""
    try:
        os.mknod(path, 0o600 | stat.S_IFCHR, os.makedev(60, number))  # for local experiments: devices.txt of Linux
    except PermissionError:
        return False
    return True
