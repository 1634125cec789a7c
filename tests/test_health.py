"""The rules of health, compared with a model, and the probes."""

from __future__ import annotations

import asyncio
import errno
import os
import re
import threading
import tracemalloc
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deviceplugin import config, sources
from deviceplugin.device import Device, DeviceNode, Health
from deviceplugin.health import HealthHistory, HealthRules, Prober, Verdict, command_probe, open_probe, worst
from deviceplugin.sources import configured
from deviceplugin.sources.nvidia import NvidiaSource
from deviceplugin.sources.nvidia.nvml import Gpu, NvmlError, NvmlScan, Xid

GOOD, BAD, UNREADABLE = Verdict.GOOD, Verdict.BAD, Verdict.UNREADABLE

# --- the rules ------------------------------------------------------------------------------------


def model(history: str, rules: HealthRules) -> Health:
    """The expected health for a history, found by regular expressions.

    F: a fault, G: a good probe, g: a good probe too soon after a fault, B: a bad probe, U: an unreadable probe.
    """
    telling = history.replace("U", "")
    while broken := re.search(rf"F|^B|B{{{rules.failures}}}", telling):
        healed = re.search(rf"G{{{rules.successes}}}", telling[broken.end() :])
        if healed is None:
            return Health.UNHEALTHY
        telling = "!" + telling[broken.end() + healed.end() :]
    return Health.HEALTHY if re.search(r"[Gg]B*$", history) else Health.UNKNOWN


EVENTS = st.lists(st.tuples(st.sampled_from("FGGGBBU"), st.floats(0, 30, allow_nan=False, width=16)), max_size=60)


@given(EVENTS, st.integers(1, 4), st.integers(1, 4), st.sampled_from([0.0, 20.0, None]))
def test_health_follows_its_rules_whatever_is_seen(
    events: list[tuple[str, float]], failures: int, successes: int, quiet: float | None
) -> None:
    """For any sequence of probes and faults, the health is that of the model."""
    rules = HealthRules(failures, successes, quiet)
    course, history, now, fault = HealthHistory(), "", 0.0, None
    for kind, wait in events:
        now += wait
        if kind == "F":
            course, fault = course.faulted("fault", now), now
        else:
            course = course.checked({"G": GOOD, "B": BAD, "U": UNREADABLE}[kind], kind, now, rules)
            if kind == "G" and fault is not None and (quiet is None or now - fault < quiet):
                kind = "g"
        history += kind
        assert course.health is model(history, rules), history
        assert bool(course.message) == (course.health is not Health.HEALTHY)


def test_worst_opinion_wins() -> None:
    """`worst` prefers unhealthy to unknown and unknown to healthy, each with its own message."""
    assert worst((Health.HEALTHY, ""), (Health.UNKNOWN, "a"), (Health.UNHEALTHY, "b")) == (Health.UNHEALTHY, "b")
    assert worst((Health.HEALTHY, ""), (Health.UNKNOWN, "a")) == (Health.UNKNOWN, "a")


# --- a day ----------------------------------------------------------------------------------------

DAY = 24 * 3600
PERIOD = 240
GPUS = 3

happenings = st.lists(
    st.tuples(
        st.integers(0, DAY - 1),
        st.integers(0, GPUS - 1),
        st.one_of(
            st.sampled_from([13, 31, 43, 45, 48, 63, 79, 94]),  # XIDs
            st.tuples(st.sampled_from(["bad", "unreadable", "gone", "driver", "hang"]), st.integers(1, 3 * 3600)),
        ),
    ),
    max_size=60,
)


@given(happenings, st.integers(1, 4), st.integers(1, 4), st.sampled_from([300.0, 3600.0, None]))
@settings(max_examples=settings().max_examples // 2)
def test_health_of_gpus_follows_the_rules_through_a_day(
    happened: list[tuple[int, int, Any]], failures: int, successes: int, quiet: float | None
) -> None:
    """Through 24 hours of XIDs, removed and lost GPUs, reloads and hangs, each GPU has the health of the model."""
    now = 0.0
    rules = HealthRules(failures, successes, quiet)
    source = NvidiaSource(rules=rules, clock=lambda: now)
    gpus = [Gpu(f"GPU-{number}", number) for number in range(GPUS)]
    histories: dict[str, str] = {}
    faults: dict[str, float] = {}
    times = sorted({*range(0, DAY, PERIOD), *(at for at, _, _ in happened)})
    by_time: dict[int, list[tuple[int, int]]] = {}
    spans: dict[str, list[tuple[int, int, int]]] = {}
    for at, number, what in happened:
        if isinstance(what, int):
            by_time.setdefault(at, []).append((number, what))
        else:
            spans.setdefault(what[0], []).append((at, at + what[1], number))

    def holds(kind: str, at: int, number: int | None = None) -> bool:
        return any(begin <= at < end and number in (None, one) for begin, end, one in spans.get(kind, ()))

    def judge(name: str, verdict: Verdict) -> None:
        soon = name in faults and (quiet is None or now - faults[name] < quiet)
        histories[name] += {GOOD: "g" if soon else "G", BAD: "B", UNREADABLE: "U"}[verdict]

    for at in times:
        now = float(at)
        for number, code in by_time.get(at, ()):
            name = gpus[number].uuid
            source.update(Xid(name, code))
            if name in histories and code not in source.health.ignore_xids:
                histories[name] += "F"
                faults[name] = now
        if at % PERIOD:
            continue
        if holds("driver", at) or holds("hang", at):
            verdict = BAD if holds("driver", at) else UNREADABLE
            source.update(NvmlError("no driver" if verdict is BAD else "hangs", verdict))
            for name in histories:
                judge(name, verdict)
        else:
            there = [gpu for gpu in gpus if not holds("gone", at, gpu.index)]
            findings = {
                gpu.uuid: (BAD, "lost")
                if holds("bad", at, gpu.index)
                else (UNREADABLE, "?")
                if holds("unreadable", at, gpu.index)
                else (GOOD, "")
                for gpu in there
            }
            source.update(NvmlScan(tuple(there), findings))
            for name in histories.keys() - findings.keys():
                del histories[name]
                faults.pop(name, None)
            for name, (verdict, _) in findings.items():
                histories.setdefault(name, "")
                judge(name, verdict)
        reported = {device.id: device.health for device in source.devices()}
        # Shorten long histories whose beginning no longer matters, to keep the search fast.
        histories = {name: cut(history, rules) for name, history in histories.items()}
        assert reported == {name: model(history, rules) for name, history in histories.items()}


def cut(history: str, rules: HealthRules) -> str:
    """Return only the end of a long history that ends with enough good probes."""
    longest = max(rules.failures, rules.successes) + 1
    if len(history) > 50 and history.endswith("G" * longest) and model(history, rules) is Health.HEALTHY:
        return "G" * longest
    return history


# --- probes ---------------------------------------------------------------------------------------


def lists_of(text: str) -> Any:
    """Return the asynchronous generator of the device lists of a config file's resource."""
    return sources.ConfiguredSource(config.parse(text).resources[0]).watch()


def test_open_probe_tells_missing_from_forbidden_from_busy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing node is bad, a node without the right to open it is unreadable, and a busy node is good."""
    node = tmp_path / "node"
    device = Device("a", nodes=[str(node)])
    assert open_probe(device) == (BAD, f"{node} cannot be opened: No such file or directory")
    node.touch()
    assert open_probe(device) == (GOOD, "")
    for number, verdict in (
        (errno.EBUSY, GOOD),
        (errno.EACCES, UNREADABLE),
        (errno.ENXIO, BAD),
        (errno.EMFILE, UNREADABLE),
    ):

        def fail(path: str, flags: int, number: int = number) -> int:
            raise OSError(number, os.strerror(number))

        with monkeypatch.context() as patch:
            patch.setattr(os, "open", fail)
            assert open_probe(device)[0] is verdict


def test_open_probe_opens_as_far_as_the_permissions_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node is opened with the access of its permissions, non-blocking, and not as a controlling terminal."""
    node = tmp_path / "node"
    node.touch()
    seen = []
    real = os.open

    def note(path: str, flags: int) -> int:
        seen.append(flags)
        return real(path, flags)

    monkeypatch.setattr(os, "open", note)
    for permissions in ("r", "w", "rw"):
        open_probe(Device("a", nodes=[DeviceNode(str(node), permissions=permissions)]))
    assert [flags & os.O_ACCMODE for flags in seen] == [os.O_RDONLY, os.O_WRONLY, os.O_RDWR]
    assert all(flags & os.O_NONBLOCK and flags & os.O_NOCTTY for flags in seen)


def test_command_probe_tells_by_its_status(tmp_path: Path) -> None:
    """Status 0 is good, 75 unreadable, others bad; the command gets the id and nodes as arguments and variables."""
    script = tmp_path / "check"
    script.write_text('#!/bin/sh\necho first; echo "$1 $2 $DEVICE_ID $DEVICE_NODES"; exit $(cat "$0.status")\n')
    script.chmod(0o755)
    device = Device("dev-1", nodes=["/dev/null", "/dev/zero"])
    probe = command_probe([str(script), "{id}", "{node}"], 10)
    for status, verdict in ((0, GOOD), (75, UNREADABLE), (3, BAD)):
        (tmp_path / "check.status").write_text(str(status))
        found, why = probe(device)
        assert found is verdict
        if status:
            assert why == f"{script} ended with {status}: dev-1 /dev/null dev-1 /dev/null:/dev/zero"
    assert command_probe([str(tmp_path / "none")], 1)(device)[0] is UNREADABLE


def test_command_that_does_not_end_is_killed_with_its_children(tmp_path: Path) -> None:
    """A probe command past its timeout is bad, and is killed with its child processes."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    # The child holds the fifo open for writing: when the child ends, the reader gets the end of file.
    probe = command_probe(["/bin/sh", "-c", f"(exec 3>{fifo}; sleep 1000) & sleep 1000"], 0.2)
    ended = threading.Event()

    def read() -> None:
        fifo.read_bytes()
        ended.set()

    threading.Thread(target=read, daemon=True).start()
    verdict, why = probe(Device("a"))
    assert (verdict, why) == (BAD, "/bin/sh did not end within 0.2 s")
    assert ended.wait(10)


def test_command_may_say_more_than_there_is_memory() -> None:
    """Only the end of a probe's output is kept, and a command that prints without end is killed at its timeout."""
    tracemalloc.start()
    try:
        talker = command_probe(["/bin/sh", "-c", "head -c 100000000 /dev/zero; echo; echo last; exit 3"], 60)
        assert talker(Device("a")) == (BAD, "/bin/sh ended with 3: last")
        assert command_probe(["yes"], 0.3)(Device("a")) == (BAD, "yes did not end within 0.3 s")
        assert tracemalloc.get_traced_memory()[1] < 10_000_000
    finally:
        tracemalloc.stop()
    silent = command_probe(["/bin/sh", "-c", "exec >/dev/null 2>&1; sleep 1000"], 0.3)
    assert silent(Device("a")) == (BAD, "/bin/sh did not end within 0.3 s")


async def test_probe_that_hangs_keeps_only_its_own_device_waiting() -> None:
    """A hanging probe is bad after its timeout and is not started again; probes of other devices go on."""
    free, looked = threading.Event(), []

    def probe(device: Device) -> tuple[Verdict, str]:
        looked.append(device.id)
        if device.id == "b":
            free.wait(20)
        return GOOD, ""

    prober = Prober(probe, timeout=1.0)
    devices = [Device("a"), Device("b"), Device("c")]
    found = await prober.check(devices)
    assert [found[name][0] for name in "abc"] == [GOOD, BAD, GOOD]
    assert (await prober.check(devices))["b"] == (BAD, "the probe still hangs")
    assert looked.count("b") == 1
    free.set()
    async with asyncio.timeout(10):
        while (await prober.check(devices))["b"][0] is not GOOD:
            pass


async def test_probes_that_hang_take_only_so_many_threads() -> None:
    """When as many probes hang as may run at once, no more are started; the other devices are unreadable."""
    free = threading.Event()
    begun = []

    def probe(device: Device) -> tuple[Verdict, str]:
        begun.append(device.id)
        free.wait(20)
        return GOOD, ""

    prober = Prober(probe, timeout=1.0, at_once=2)
    devices = [Device(f"d{number}") for number in range(6)]
    found = await prober.check(devices)
    assert [verdict for verdict, _ in found.values()].count(BAD) == len(begun) == 2
    assert [verdict for verdict, _ in found.values()].count(UNREADABLE) == 4
    free.set()
    async with asyncio.timeout(10):
        while {verdict for verdict, _ in (await prober.check(devices)).values()} != {GOOD}:
            pass


async def test_look_that_nobody_waits_for_any_more_tells_nothing_while_it_has_time() -> None:
    """A probe whose check was cancelled before the timeout is not started again, and its device is unreadable."""
    free, begun = threading.Event(), threading.Event()

    def probe(device: Device) -> tuple[Verdict, str]:
        begun.set()
        free.wait(60)
        return GOOD, ""

    prober = Prober(probe, timeout=60)
    left = asyncio.create_task(prober.check([Device("a")]))
    await asyncio.to_thread(begun.wait, 20)
    left.cancel()
    assert (await prober.check([Device("a")]))["a"][0] is UNREADABLE
    free.set()
    async with asyncio.timeout(20):
        while (await prober.check([Device("a")]))["a"][0] is not GOOD:
            pass


async def test_first_look_that_takes_long_counts_when_it_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device with a slow first probe is listed as unknown until the probe ends, also when other devices appear."""
    monkeypatch.setattr(configured, "FIRST_PROBE", 0.2)
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/a").touch()
    os.mkfifo(tmp_path / "go")
    command = f"echo {{id}} >>{tmp_path}/begun; if mkdir {tmp_path}/first; then read line <{tmp_path}/go; fi"
    text = f"""
        resources:
        - name: example.com/x
          devices: [{{path: "{tmp_path}/dev/*"}}]
          health: {{period: 3600, probe: {{command: [/bin/sh, -c, "{command}"], timeout: 300}}}}
    """
    async with asyncio.timeout(60), aclosing(lists_of(text)) as lists:
        (slow,) = await anext(lists)
        assert slow.health is Health.UNKNOWN
        (tmp_path / "dev/b").touch()
        async for devices in lists:
            health = [device.health for device in devices]
            assert health[0] is Health.UNKNOWN
            if health[1:] == [Health.HEALTHY]:
                break
        await asyncio.to_thread((tmp_path / "go").write_text, "now\n")
        async for devices in lists:
            if {device.health for device in devices} == {Health.HEALTHY}:
                break
        assert sorted((tmp_path / "begun").read_text().split()) == sorted(device.id for device in devices)


async def test_probe_that_fails_by_itself_tells_nothing() -> None:
    """A probe that raises an exception is unreadable, not bad."""

    def probe(device: Device) -> tuple[Verdict, str]:
        raise ZeroDivisionError

    assert (await Prober(probe, timeout=5).check([Device("a")]))["a"][0] is UNREADABLE


async def test_configured_probe_withdraws_and_offers_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A device is unhealthy after `failures` bad probes, which is logged, and healthy after `successes` good ones."""
    caplog.set_level("DEBUG")
    for name in ("a", "b"):
        (tmp_path / name).touch()
    bad = tmp_path / "bad"
    text = f"""
        resources:
        - name: example.com/x
          devices: [{{path: "{tmp_path}/[ab]"}}]
          health:
            probe: {{command: [/bin/sh, -c, "! grep -qx {{id}} {bad}"]}}
            period: 1
            failures: 2
            successes: 2
    """
    async with asyncio.timeout(30), aclosing(lists_of(text)) as lists:
        first = await anext(lists)
        assert [device.health for device in first] == [Health.HEALTHY] * 2
        bad.write_text(f"{first[1].id}\n")
        second = await anext(lists)
        assert [device.health for device in second] == [Health.HEALTHY, Health.UNHEALTHY]
        assert "ended with 1" in second[1].message
        bad.write_text("")
        third = await anext(lists)
        assert [device.health for device in third] == [Health.HEALTHY] * 2
    assert f"{second[1].id} is unhealthy: /bin/sh ended with 1" in caplog.messages


async def test_all_probes_are_of_the_devices_own_nodes(tmp_path: Path) -> None:
    """The first probe gets the same nodes as later ones: the device's own, without the resource's `nodes`."""
    node, log = tmp_path / "a", tmp_path / "log"
    node.symlink_to("/dev/null")
    command = f"echo $DEVICE_NODES >>{log}; test $(wc -l <{log}) = 1"
    text = f"""
        resources:
        - name: example.com/x
          devices: [{{path: "{node}"}}]
          nodes: [/dev/tty]
          health: {{period: 1, failures: 1, probe: {{command: [/bin/sh, -c, "{command}"]}}}}
    """
    async with asyncio.timeout(30), aclosing(lists_of(text)) as lists:
        assert [device.health for device in await anext(lists)] == [Health.HEALTHY]
        assert [device.health for device in await anext(lists)] == [Health.UNHEALTHY]
    assert log.read_text().split() == [str(node), str(node)]


@pytest.mark.parametrize(
    ("fields", "health"),
    [
        ("health: {probe: {command: [/bin/sh, -c, exit 1]}}", Health.UNHEALTHY),
        ("health: {probe: open}", Health.HEALTHY),
        ("health: {probe: open}, mounts: [{host: /missing, container: /opt/missing}]", Health.HEALTHY),
    ],
)
async def test_first_list_has_the_result_of_the_first_probe(tmp_path: Path, fields: str, health: Health) -> None:
    """The first list has the first probe's result, also for a fifo; a missing host directory of a mount is ignored."""
    os.mkfifo(tmp_path / "a")
    text = f"resources: [{{name: example.com/x, devices: [{{path: {tmp_path}/a}}], {fields}}}]"
    async with asyncio.timeout(30), aclosing(lists_of(text)) as lists:
        assert [device.health for device in await anext(lists)] == [health]
