"""Runs an agent as a process: handles signals, the config file and its changes, the metrics server, the exit status."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import stat
import sys
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from deviceplugin import blocking, files, filewatch, looked_at
from deviceplugin.adoption.plugins import VendorPlugins
from deviceplugin.adoption.source import Adopted, AdoptedSource
from deviceplugin.backoff import Backoff
from deviceplugin.kubelet.paths import Paths
from deviceplugin.looks import LONG, Looks, LookTimeoutError
from deviceplugin.naming import node_name
from deviceplugin.node.agent import Agent, AgentError
from deviceplugin.node.options import metrics_config, parse_run
from deviceplugin.node.systemd import ServiceManager
from deviceplugin.source import DeviceSource
from deviceplugin.tasks import cancel_all
from deviceplugin.version import VERSION

if TYPE_CHECKING:
    from deviceplugin.config import Config, Lock, MetricsConfig
    from deviceplugin.config.types import ResourceConfig

_LOG: Final = logging.getLogger(__name__)

REFUSED: Final = 1.0
"""Maximum seconds to wait, at the agent's end, for cancelled tasks. The process then ends without these tasks."""
ENDING: Final = 25
"""Seconds after SIGTERM after which the kernel ends the process by SIGALRM, if it has not ended by itself.

The number is less than the 30 s after which the kubelet kills a pod. The alarm is necessary because gRPC removes a
socket in the event loop's thread, and this call has no deadline if the file system hangs.
"""
DEBOUNCE: Final = 0.05
"""Seconds after the last change of a config file after which the file counts as completely written."""
UNSERVED: Final = Backoff(first=1.0, most=60.0)
"""The pauses between two tries to serve a part of the config that could not be served."""


@dataclass(frozen=True, slots=True)
class ConfigFile:
    """A config file whose changes the agent applies.

    lock: the commands and paths that the file may name. content: the file's bytes; None if it is unreadable. config:
    the parsed content. refused: why the last change of the file was refused; "" if the change was applied. unserved:
    why a part of the config is not applied; "" if all of it is. again: whether this reason may pass, so that the config
    is applied again after a pause. kept: the path of the copy of the last valid file; None if no copy is saved. former:
    whether `config` comes from this copy. vendors: the vendors' plugins that register with the agent. looks: the
    threads that read the file. kept_looks: the thread that accesses the copy.
    """

    path: Path
    lock: Lock
    content: bytes | None
    config: Config
    refused: str = ""
    unserved: str = ""
    again: bool = False
    kept: Path | None = None
    former: bool = False
    vendors: VendorPlugins | None = None
    looks: Looks = field(default_factory=lambda: Looks("the config file"))
    kept_looks: Looks = field(default_factory=lambda: Looks("the saved config file", threads=1))

    @classmethod
    def read(cls, path: Path, lock: Lock, kept: Path | None = None, vendors: VendorPlugins | None = None) -> ConfigFile:
        """Read a config file. If the file is invalid, log the error and use the copy of the last valid file (`kept`).

        Raises ConfigError if file and copy are invalid, or name a command or path that the lock forbids.
        """
        from deviceplugin import config

        # `content` is from before the parsing, so that a change during the parsing is noticed at the next comparison.
        content = _content(path)
        try:
            return cls(path, lock, content, _load(path, lock), kept=kept, vendors=vendors)
        except config.ConfigError as error:
            try:
                former = config.load(kept, lock) if kept is not None else None
            except config.ConfigError:
                former = None
            if former is None:
                raise
            why = f"the config file is refused, the last good one is served: {_on_one_line(error)}"
            _LOG.error("%s", why)
            return cls(path, lock, content, former, refused=why, kept=kept, former=True, vendors=vendors)

    async def keep(self) -> None:
        """Save a copy of the config file if all of it is applied. A later start with an invalid file uses the copy."""
        if self.kept is None or self.content is None or self.refused or self.unserved:
            return
        try:
            await self.kept_looks.at("config file", _put, self.kept, self.content)
        except OSError as error:
            _LOG.warning("%s: cannot save the config file for a start with an invalid file: %s", self.kept, error)

    def sources(self) -> list[DeviceSource]:
        """Return new sources of the resources in the config file."""
        return [self.source(resource) for resource in self.config.resources]

    def source(self, resource: ResourceConfig) -> DeviceSource:
        """Return a new source of a resource in the config file."""
        from deviceplugin import sources
        from deviceplugin.config.known_plugins import known_plugin
        from deviceplugin.config.types import typed_attributes

        if (plugin := resource.plugin) is not None and self.vendors is not None:
            vendor = known_plugin(resource.name)
            adopted = Adopted(
                resource.driver,
                typed_attributes(resource.attributes),
                resource.capacity,
                plugin.answer == "claim",
                plugin.drop_annotations,
                plugin.pre_start == "once",
                vendor.ids if vendor is not None and not plugin.claims else "",
            )
            return AdoptedSource(resource.name, self.vendors, adopted)
        return sources.ConfiguredSource(resource, self.lock, self.config.profiles)


class Program:
    """An agent as a program: signals stop the agent, and changes of the config file reconfigure it.

    node: the node's name, for the log.
    """

    def __init__(self, agent: Agent, node: str = "") -> None:
        self.agent = agent
        self.node = node or node_name()

    async def run(self) -> None:
        """Serve until the agent is stopped. Raises AgentError if a resource cannot be served at all."""
        await self.agent.run()

    async def take(self, config: Config, changed: Mapping[str, DeviceSource], unchanged: Sequence[str]) -> None:
        """Apply a new config.

        changed: for each new or changed resource, the source. unchanged: the names of the config's other resources.
        """
        await self.agent.reconfigure(changed, unchanged)


def run(
    *sources: DeviceSource,
    metrics_address: str | None = None,
    certificate: str | Path | None = None,
    key: str | Path | None = None,
    client_ca: str | Path | None = None,
    token: str | Path | None = None,
    argv: Sequence[str] | None = None,
) -> None:
    """Serve these sources until SIGTERM or SIGINT. Call this function at the end of your plugin's file.

    metrics_address: HOST:PORT of the metrics. The option --metrics-address takes precedence; without either there are
    no metrics. certificate, key, client_ca, token: absolute paths of files that protect the metrics, with the meaning
    of `metrics` in a config file. The kubelet's probes need neither token nor client certificate.

    Reads options from the command line (or `argv`); see `--help`. Ends the process with status 1 if the node cannot be
    served. Raises TypeError if an argument is not a source, NamingError for an invalid resource or driver, ValueError
    if a path is not absolute or the certificate is missing.
    """
    metrics = metrics_config(certificate=certificate, key=key, client_ca=client_ca, token=token)
    options = parse_run(argv, metrics_address)
    address = options.metrics_address

    def make() -> Program:
        return Program(Agent(sources, options.paths, report_holders=address is not None))

    if status := serve(make, metrics_address=address, metrics=metrics):
        sys.exit(status)


def run_config(path: Path, paths: Paths, metrics_address: str | None, lock: Lock, adopt: Path | None = None) -> int:
    """Serve the resources of a config file until SIGTERM or SIGINT. Apply the file's changes. Return the exit status.

    adopt: the directory where vendors' plugins register with this agent; None if none may register. Raises ConfigError
    if the file is invalid at the start, or names a command or path that `lock` forbids. Such errors in a later version
    of the file are only logged.
    """
    vendors = VendorPlugins(adopt) if adopt is not None else None
    file = ConfigFile.read(path, lock, vendors=vendors)

    def make() -> Program:
        return Program(Agent(file.sources(), paths, report_holders=metrics_address is not None, vendors=vendors))

    return serve(make, metrics_address=metrics_address, config=file)


def serve(
    make: Callable[[], Program],
    *,
    metrics_address: str | None = None,
    metrics: MetricsConfig | None = None,
    config: ConfigFile | None = None,
) -> int:
    """Run a program until a signal ends it. Apply the changes of its config file. Return the process's exit status.

    make: a function that returns the program; called in the event loop. metrics: the settings of the metrics if there
    is no config file; None for the defaults.
    """
    work = _serve(make, metrics_address, config.config.metrics if config else metrics, config)
    try:
        asyncio.run(work)
    except AgentError as error:
        _LOG.error("%s", error)  # The error needs no traceback, because the user must correct it.
        return 1
    finally:
        work.close()  # `close` prevents a warning if `asyncio.run` did not start the coroutine.
    return 0


async def _serve(
    make: Callable[[], Program], metrics_address: str | None, metrics: MetricsConfig | None, config: ConfigFile | None
) -> None:
    program = make()
    manager = ServiceManager()
    loop = asyncio.get_running_loop()
    reload = asyncio.Event()
    what = f"config file {config.path}" if config else "no config file"
    _LOG.info("version %s starts on node %s: %s", VERSION, program.node, what)

    def stop(name: str) -> None:
        _LOG.info("%s: the agent ends; pods keep their devices", name)
        if manager.there:
            manager.tell(STOPPING=1, STATUS="the agent ends; pods keep their devices")
        program.agent.stop()

    def end(number: int, _: object) -> None:
        # If a coroutine blocks the loop, this signal handler still runs, but the loop cannot call `stop`. SIGALRM, or a
        # second signal, then ends the process.
        signal.alarm(ENDING)
        signal.signal(number, signal.SIG_DFL)
        loop.call_soon_threadsafe(stop, signal.Signals(number).name)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)
    loop.add_signal_handler(signal.SIGHUP, reload.set)
    if config is None:
        loop.add_signal_handler(signal.SIGHUP, _LOG.info, "SIGHUP is ignored: this agent has no config file")
    with contextlib.ExitStack() as stack:
        stack.callback(blocking.LoopWatch().end)
        if metrics_address is not None:
            from deviceplugin.metrics import collectors

            try:
                stack.enter_context(collectors.serving(metrics_address, program.agent, metrics))
            except OSError as error:
                raise AgentError(f"cannot serve metrics at {metrics_address}: {error.strerror or error}") from error
            # Another thread renders the metrics page. With Python's default switch interval of 5 ms, each step of the
            # event loop could wait 5 ms for the rendering thread.
            sys.setswitchinterval(0.0005)
        gc.freeze()  # Without the objects of loaded modules, a garbage collection takes 5 ms instead of 35 ms.
        following = [follow_config(program, config, reload), _keep(program, config)] if config else []
        if manager.there:
            following.append(manager.follow(program.agent.status))
        tasks = [asyncio.create_task(coroutine) for coroutine in following]
        try:
            await program.run()
        finally:
            await cancel_all(tasks)
    await _end_without_others()
    signal.alarm(0)


async def _end_without_others() -> None:
    """End the process if cancelled tasks do not end, because asyncio would wait for these tasks for ever."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    _, pending = await asyncio.wait(others, timeout=REFUSED) if others else ((), ())
    if pending:
        names = ", ".join(sorted(getattr(task.get_coro(), "__qualname__", task.get_name()) for task in pending))
        _LOG.warning("the agent ends without waiting for %s, which do not end after their cancellation", names)
        logging.shutdown()
        os._exit(0)


async def follow_config(program: Program, file: ConfigFile, reload: asyncio.Event) -> None:
    """Apply the config file at SIGHUP and after each change, also after a swap of the link `..data` of a ConfigMap.

    reload: an event that is set if SIGHUP arrived before this function began.
    """
    path, content, pauses = file.path, file.content, UNSERVED.fresh()
    _tell(program.agent, file)
    with filewatch.shared().watch([str(path.absolute().parent)], filewatch.NAMES_AND_WRITES) as watch:

        def read_again() -> None:
            reload.set()
            watch.wake()

        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, read_again)
        while True:
            try:
                now = await file.looks.at("config file", _content, path)
            except LookTimeoutError as error:
                _LOG.warning("the config file cannot be read: %s", error)
                await watch.wait(30.0)
                continue
            if now != content or reload.is_set() or file.again:
                reload.clear()
                content = now
                file = replace(await take_changed(program, file), content=now)
                await file.keep()
                _tell(program.agent, file)
            if not file.again:
                pauses.reset()
            pause = pauses.next() if file.again else 30.0
            if await watch.wait(pause, unwatched=filewatch.AT_REST) and not reload.is_set():
                deadline = time.monotonic() + 2.0
                while await watch.wait(DEBOUNCE) and time.monotonic() < deadline:
                    pass


def _tell(agent: Agent, file: ConfigFile) -> None:
    """Report in the agent's status whether the config file was applied."""
    agent.config_error, agent.former_config = file.refused or file.unserved, file.former


async def _keep(program: Program, file: ConfigFile) -> None:
    """Save a copy of the config file once its resources are served."""
    await program.agent.begun.wait()
    await file.keep()  # A later version is saved after this version, because `kept_looks` has only one thread.


def _on_one_line(error: Exception) -> str:
    return "; ".join(str(error).splitlines())


def _put(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    files.put(str(path), content, f"{path}.new", 0o600)


def _content(path: Path) -> bytes | None:
    """Return the content of a regular file; None if there is no such file, or if it cannot be read. Blocks."""
    from deviceplugin.config import MAX_BYTES

    try:
        if not stat.S_ISREG(looked_at.stat(path).st_mode):
            return None  # `open` of a pipe without a writer does not return.
        with path.open("rb") as file:
            return file.read(MAX_BYTES + 1)
    except (OSError, ValueError):  # A path with a NUL raises ValueError.
        return None


def _load(path: Path, lock: Lock) -> Config:
    """Read and parse the config file of an agent, which is read again and again. Blocks.

    Raises ConfigError, also for a pipe or socket: a pipe can be read only once, and `open` waits for the writer.
    """
    from deviceplugin import config
    from deviceplugin.config.document import file_error

    kind = None
    with contextlib.suppress(OSError, ValueError):  # A path with a NUL raises ValueError.
        kind = _UNREADABLE.get(stat.S_IFMT(looked_at.stat(path).st_mode))
    if kind is None:
        return config.load(path, lock)
    why = f"is a {kind}, which an agent cannot read again; write the config into a regular file"
    raise file_error(str(path), why)


_UNREADABLE: Final = {stat.S_IFIFO: "pipe", stat.S_IFSOCK: "socket", stat.S_IFCHR: "device", stat.S_IFBLK: "device"}
"""The types of files that are no config file of an agent, and their names in messages."""


def _settings(config: Config) -> dict[str, Hashable]:
    """Return, for each resource, all settings by which its source is built.

    A source with `mig: mixed` also depends on the MIG profiles of all resources.
    """
    kinds = {
        one.name: {entry.nvidia.mig for entry in one.devices if entry.nvidia is not None} for one in config.resources
    }
    return {one.name: (one, "mixed" in kinds[one.name] and config.profiles) for one in config.resources}


async def take_changed(program: Program, file: ConfigFile) -> ConfigFile:
    """Apply the config file's present content; return the file's new state.

    If the content is invalid, the old config stays in use. If the last change could not be applied completely for a
    reason that may pass, all resources are served anew.
    """
    path, current = file.path, file.config
    try:
        wanted = await file.looks.until_answered("config file", _load, path, file.lock, timeout=LONG)
        before, after = _settings(current), _settings(wanted)
        same = {} if file.again else before
        new = replace(file, config=wanted)
        changed = {one.name: new.source(one) for one in wanted.resources if same.get(one.name) != after[one.name]}
    except Exception as error:  # The present config stays in use after any error.
        why = f"the config file is refused, nothing is changed: {_on_one_line(error)}"
        _LOG.error("%s", why)
        return replace(file, refused=why, again=False)
    gone = before.keys() - after.keys()
    differences = {"new": after.keys() - before.keys(), "changed": changed.keys() & before.keys(), "gone": gone}
    if wanted.metrics != current.metrics:
        _LOG.warning("%s: `metrics` is read at the start only; restart the agent to apply the change", path)
    if not (any(differences.values()) or file.again):
        what = "it is valid again, and nothing changed" if file.refused else "nothing changed"
        _LOG.info("%s was read again: %s", path, what)
        return replace(file, config=wanted, refused="", former=False)
    why, again = "", False
    try:
        await program.take(wanted, changed, [name for name in after if name not in changed])
    except Exception as error:  # The agent goes on after any error, so that it can apply later changes of the file.
        why = f"{path} was read again, but not all of it is served: {error}"
        # An AgentError does not pass, because the user must correct it. It is logged without a traceback.
        again = not isinstance(error, AgentError)
        _LOG.log(logging.DEBUG if file.again and why == file.unserved else logging.ERROR, "%s", why, exc_info=again)
    else:
        listed = (f"{what} {', '.join(sorted(names))}" for what, names in differences.items() if names)
        _LOG.info("%s was read again: %s", path, "; ".join(listed))
    return replace(file, config=wanted, refused="", unserved=why, again=again, former=False)
