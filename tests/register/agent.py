"""An agent in a process of its own, which can be reconfigured, listed other devices, ended and killed.

Only what authors of agents use: `Bridge` or `Agent`, and a `DeviceSource`. The process is forked from a server that
has imported everything, so that it serves some milliseconds later.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final, Literal

from deviceplugin import identity
from deviceplugin.device import ContainerEdits, Device, DeviceNode, Mount
from deviceplugin.kubelet.paths import Paths
from deviceplugin.node.agent import Agent, AgentError
from deviceplugin.source import DeviceSource
from dra_bridge.driver import preparation
from dra_bridge.handover.share import parse_share
from dra_bridge.kube import Cluster
from dra_bridge.node import claim_checks, device_reconciliation, slice_feed
from dra_bridge.node.bridge import Bridge
from dra_bridge.node.options import BridgeOptions
from dra_bridge.node.share import HandoverPolicy
from tests.forks import SERVER
from tests.scenarios.quick import hurry

_LOG: Final = logging.getLogger(__name__)

Kind = Literal["node", "file", "serial", "name"]
"""By what the agent can tell one piece of hardware from another; name: only by the devices' names."""

DEADLINE: Final = 30.0
"""Seconds for anything that an agent is asked; more than that is a failure."""

SHORTER: Final = (
    (preparation, "PATIENCE", 0.3),
    (claim_checks, "RECONCILE", 1.0),
    (claim_checks, "NOTICE", 0.1),
    (device_reconciliation, "RESOLVE", 0.5),
    (slice_feed, "FIRST", 0.2),
)
"""Seconds that an agent lets pass before it asks again, by module and name."""


@dataclass(frozen=True)
class Card:
    """A device of a list. hardware: what it is. times: what `replicas_of` answers for it at the most."""

    name: str
    hardware: str
    times: int = 3


@dataclass(frozen=True)
class Settings:
    """What the config says of a resource."""

    driver: str = ""
    replicas: int = 1
    share: str = "none"


Config = Mapping[str, Settings]
Lists = Mapping[str, Sequence[Card]]


@dataclass(frozen=True)
class Place:
    """Where and how an agent runs.

    server: the API server's URL, "" for the plugin side alone. hardware: a directory. period: of `Bridge` and `Agent`.
    """

    paths: Paths
    server: str
    node: str
    cdi: Path
    hardware: Path
    kind: Kind
    period: float


class Cards(DeviceSource):
    """Devices of which each says in its container what it is."""

    def __init__(self, resource: str, settings: Settings, cards: Sequence[Card], place: Place) -> None:
        self.resource = resource
        self.driver = settings.driver or None
        self.replicas = settings.replicas
        self._place = place
        self._changed = asyncio.Event()
        self._cards = cards

    def list(self, cards: Sequence[Card]) -> None:
        """Have these devices and no others."""
        self._cards = cards
        self._changed.set()

    async def watch(self) -> AsyncIterator[Sequence[Device]]:
        while True:
            self._changed.clear()
            yield [self._device(card) for card in self._cards]
            await self._changed.wait()

    def replicas_of(self, device: Device) -> int:
        return min(self.replicas, int(device.attributes["times"]))

    def _device(self, card: Card) -> Device:
        nodes: list[DeviceNode] = []
        mounts: list[Mount] = []
        known = ""
        path = str(self._place.hardware / card.hardware)
        if self._place.kind == "node":
            nodes = [DeviceNode(path)]
        elif self._place.kind == "file":
            mounts = [Mount(path, path)]
            known = identity.token(os.stat(path))
        elif self._place.kind == "serial":
            known = f"serial:{card.hardware}"
        env = {variable(self.resource, card.name): card.hardware}
        return Device(
            card.name,
            nodes=nodes,
            attributes={"times": card.times, "name": f"{self.resource} {card.name}"},
            edits=ContainerEdits(env, mounts=mounts),
            identity=known,
        )


def variable(resource: str, device: str) -> str:
    """Return the variable by which a container learns what a device of its is."""
    return f"HARDWARE_{resource.partition('/')[2]}_{device}"


class Process:
    """An agent that runs elsewhere. Each method returns when it is done there."""

    def __init__(self, place: Place, config: Config, lists: Lists, log: Path) -> None:
        self._connection, theirs = SERVER.Pipe()
        self._process = SERVER.Process(
            target=main, args=(theirs, place, dict(config), dict(lists), str(log)), daemon=True
        )
        self._process.start()
        theirs.close()
        self._log = log

    def reload(self, config: Config) -> str:
        """Have it take a config; return why not all of it is served, "" if it is."""
        return self._ask("reload", dict(config))

    def list(self, resource: str, cards: Sequence[Card]) -> None:
        """Have a resource list these devices."""
        self._ask("list", resource, tuple(cards))

    def stop(self) -> None:
        """End it as SIGTERM does."""
        self._ask("stop")
        self._process.join(DEADLINE)
        if self._process.is_alive():
            self._process.kill()
            raise TimeoutError(f"the agent does not end:\n{self.log()}")
        self._close()

    def kill(self) -> None:
        """End it as SIGKILL does."""
        self._process.kill()
        self._process.join()
        self._close()

    @property
    def alive(self) -> bool:
        return self._process.is_alive()

    def log(self) -> str:
        """Return what it has said so far."""
        return self._log.read_text(errors="replace") if self._log.exists() else ""

    def _close(self) -> None:
        self._connection.close()
        self._process.close()

    def _ask(self, *what: Any) -> str:
        try:
            self._connection.send(what)
            if not self._connection.poll(DEADLINE):
                raise TimeoutError(f"no answer to {what[0]}:\n{self.log()}")
            answer: str = self._connection.recv()
        except (EOFError, OSError) as error:
            raise RuntimeError(f"the agent has ended:\n{self.log()}") from error
        if answer.startswith("ERROR"):
            raise RuntimeError(f"{answer}\n{self.log()}")
        return answer


def main(connection: Connection, place: Place, config: Config, lists: Lists, log: str) -> None:
    """Run an agent until it is told to end, or nobody is there any more who could."""
    hurry()
    for module, name, seconds in SHORTER:
        assert hasattr(module, name)
        setattr(module, name, seconds)
    logging.basicConfig(filename=log, level=logging.INFO, format="%(relativeCreated)7d %(message)s", force=True)
    try:
        asyncio.run(_Child(connection, place, config, lists).run())
    except BaseException:
        _LOG.exception("the agent ends with an error")
        raise


class _Child:
    """The process's side."""

    def __init__(self, connection: Connection, place: Place, config: Config, lists: Lists) -> None:
        self._connection = connection
        self._place = place
        self._config = dict(config)
        self._lists = dict(lists)
        self._sources: dict[str, Cards] = {}
        sources = self._made(config)
        self._bridge: Bridge | None = None
        if place.server:
            self._bridge = Bridge(
                sources,
                _policies(config),
                BridgeOptions(place.paths, None, Cluster.from_server(place.server), place.node),
                period=place.period,
                grace=0.02,
            )
            self._agent = self._bridge.agent
        else:
            self._agent = Agent(sources, place.paths, period=place.period)

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        commands: asyncio.Queue[tuple[Any, ...]] = asyncio.Queue()
        threading.Thread(target=self._listen, args=(loop, commands), daemon=True).start()
        following = asyncio.create_task(self._follow(commands))
        try:
            await (self._bridge.run() if self._bridge is not None else self._agent.run())
        finally:
            following.cancel()

    def _made(self, config: Config) -> list[Cards]:
        made = [Cards(name, one, self._lists.get(name, ()), self._place) for name, one in config.items()]
        self._sources |= {source.resource: source for source in made}
        return made

    def _listen(self, loop: asyncio.AbstractEventLoop, commands: asyncio.Queue[tuple[Any, ...]]) -> None:
        while True:
            try:
                command = self._connection.recv()
            except (EOFError, OSError):
                os._exit(1)
            loop.call_soon_threadsafe(commands.put_nowait, command)
            if command[0] == "stop":
                return

    async def _follow(self, commands: asyncio.Queue[tuple[Any, ...]]) -> None:
        while True:
            command, *arguments = await commands.get()
            _LOG.info("--- %s %s", command, arguments)
            answer = ""
            try:
                if command == "reload":
                    await self._reload(*arguments)
                elif command == "list":
                    self._list(*arguments)
                else:
                    self._agent.stop()
            except AgentError as error:
                answer = f"refused: {error}"
            except Exception as error:
                _LOG.exception("%s", command)
                answer = f"ERROR: {error!r}"
            self._connection.send(answer)

    async def _reload(self, config: Config) -> None:
        changed = {name: one for name, one in config.items() if self._config.get(name) != one}
        before, self._config = self._config, dict(config)
        unchanged = [name for name in config if name not in changed]
        # Another share alone is a change of the policy as well; `ConfiguredSource` is made anew for it, too.
        sources = {source.resource: source for source in self._made(changed)}
        for name in before.keys() - config.keys():
            self._sources.pop(name, None)
        if self._bridge is not None:
            await self._bridge.reconfigure(sources, _policies(config), unchanged)
        else:
            await self._agent.reconfigure(sources, unchanged)

    def _list(self, resource: str, cards: Sequence[Card]) -> None:
        self._lists[resource] = cards
        if resource in self._sources:
            self._sources[resource].list(cards)


def _policies(config: Config) -> dict[str, HandoverPolicy]:
    return {name: HandoverPolicy(parse_share(one.share)) for name, one in config.items()}
