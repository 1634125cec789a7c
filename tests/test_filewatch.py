"""Hints that something in a directory changed."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from watchdog.observers.api import EventQueue, ObservedWatch
from watchdog.observers.inotify import InotifyEmitter, InotifyObserver

from deviceplugin import filewatch
from deviceplugin.filewatch import AT_ONCE, Gather, Watch, Watcher

LONG = 10.0
Watching = Callable[..., Watch]


@pytest.fixture
async def watching() -> AsyncIterator[Watching]:
    """Give a function that watches directories with a watcher of the test's own."""
    watcher = Watcher()
    watches = []

    def watch(*directories: Path, hints: Any = filewatch.NAMES, gather: Gather = AT_ONCE) -> Watch:
        watches.append(watcher.watch(map(str, directories), hints, gather))
        return watches[-1]

    yield watch
    for one in watches:
        one.close()
    watcher._observer.stop()
    watcher._observer.join(LONG)


async def in_flight(watch: Watch) -> Watch:
    """Take all hints that are on their way; return the watch."""
    while await watch.wait(0.05):
        pass
    return watch


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A directory that is there."""
    (made := tmp_path / "d").mkdir()
    return made


async def test_hint_for_each_name_that_comes_or_goes(watching: Watching, tmp_path: Path) -> None:
    """Creating, renaming and removing a name in the directory are hints."""
    watch = await in_flight(watching(tmp_path))
    for change in (
        lambda: (tmp_path / "a").touch(),
        lambda: (tmp_path / "a").rename(tmp_path / "b"),
        lambda: (tmp_path / "b").unlink(),
        lambda: (tmp_path / "d").mkdir(),
        lambda: (tmp_path / "d").rmdir(),
    ):
        change()
        assert await watch.wait(LONG)
        await in_flight(watch)


async def test_time_passes_without_a_hint(watching: Watching, tmp_path: Path) -> None:
    """Without a hint the wait ends with its time, and says so."""
    watch = await in_flight(watching(tmp_path))
    assert not await watch.wait(0.01)


async def test_hints_are_gathered_but_for_those_that_do_not_wait(watching: Watching, tmp_path: Path) -> None:
    """What comes in short order is one hint, at its end; a name that does not wait is one at once, also in a rename."""
    late, soon = (watching(tmp_path, gather=Gather(seconds, ".sock")) for seconds in (3600.0, 0.01))
    await in_flight(soon)
    for _ in range(20):
        soon.hint(str(tmp_path / "file"))
    assert await soon.wait(LONG)
    assert not await soon.wait(0.1), "there was one hint for all"
    (tmp_path / "file").touch()
    assert await soon.wait(LONG), "the next ones are gathered anew"
    assert not await late.wait(0.01)
    (tmp_path / "file").rename(tmp_path / "kubelet.sock")
    assert await late.wait(LONG)


async def test_writes_are_hints_only_if_wanted(watching: Watching, tmp_path: Path) -> None:
    """A file that is written to is a hint for whoever asked for writes."""
    file = tmp_path / "f"
    file.write_text("1")
    names, writes = watching(tmp_path), watching(tmp_path, hints=filewatch.NAMES_AND_WRITES)
    await in_flight(names)
    await in_flight(writes)
    file.write_text("2")
    assert await writes.wait(LONG)
    assert not await names.wait(0.05)


@pytest.mark.parametrize("first", [True, False])
async def test_who_wants_writes_hears_of_them_whoever_else_watches_the_directory(
    watching: Watching, tmp_path: Path, first: bool
) -> None:
    """Also where it is only the parent of what others watch; and these hear of no write."""
    (tmp_path / "d").mkdir()
    file = tmp_path / "a"
    file.touch()
    kinds = {True: filewatch.NAMES_AND_WRITES, False: filewatch.NAMES}
    made = {writes: watching(tmp_path, hints=kinds[writes]) for writes in (first, not first)}
    beside = watching(tmp_path / "d")
    for watch in (*made.values(), beside):
        await in_flight(watch)
    file.write_text("1")
    assert await made[True].wait(LONG)
    assert not await made[False].wait(0.2)
    await in_flight(made[True])
    beside.close()
    made[False].close()
    await in_flight(made[True])
    file.write_text("2")
    assert await made[True].wait(LONG)
    again = watching(tmp_path)
    made[True].close()
    await in_flight(again)
    file.write_text("3")
    assert not await again.wait(0.2)
    (tmp_path / "b").touch()
    assert await again.wait(LONG)


async def test_hints_are_coalesced(watching: Watching, tmp_path: Path) -> None:
    """Any number of changes before a wait are one hint."""
    watch = await in_flight(watching(tmp_path))
    for number in range(50):
        (tmp_path / str(number)).touch()
    assert await watch.wait(LONG)
    await in_flight(watch)
    assert not await watch.wait(0.01)


async def test_directory_that_is_made_again(watching: Watching, directory: Path) -> None:
    """A directory that is deleted and made again is watched again, by way of its parent."""
    watch = await in_flight(watching(directory))
    for _ in range(3):
        shutil.rmtree(directory)
        assert await watch.wait(LONG)
        directory.mkdir()
        await in_flight(watch)
        (directory / "f").touch()
        assert await watch.wait(LONG)
        await in_flight(watch)


async def test_directory_that_is_replaced_between_looks(watching: Watching, directory: Path, tmp_path: Path) -> None:
    """A directory that is another one now (another inode under the same name) is watched from the next wait on."""
    watch = await in_flight(watching(directory))
    directory.rename(tmp_path / "old")
    directory.mkdir()
    await in_flight(watch)
    (directory / "f").touch()
    assert await watch.wait(LONG)


async def test_the_parent_of_a_directory_that_is_there_is_not_watched(
    watching: Watching, directory: Path, tmp_path: Path
) -> None:
    """Files that come and go beside the directory cost nothing."""
    watch = await in_flight(watching(directory))
    assert watch._watcher._armed.keys() == {str(directory)}
    directory.rmdir()
    assert await watch.wait(LONG)
    assert str(tmp_path) in watch._watcher._armed


async def test_directory_that_comes_while_its_parent_begins_to_be_watched(
    watching: Watching, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is watched though nothing said that it came."""
    directory = tmp_path / "d"
    missing = Watch._missing

    def comes(watch: Watch) -> frozenset[str]:
        found = missing(watch)
        directory.mkdir(exist_ok=True)
        return found

    monkeypatch.setattr(Watch, "_missing", comes)
    watch = watching(directory)
    monkeypatch.undo()
    assert str(directory) in watch._watcher._armed


async def test_directory_that_is_not_there_yet(watching: Watching, tmp_path: Path) -> None:
    """Nothing of the path need exist: each part that appears is a hint, and in the end the directory is watched."""
    directory = tmp_path / "a" / "b" / "c"
    watch = await in_flight(watching(directory))
    directory.mkdir(parents=True)
    assert await watch.wait(LONG)
    await in_flight(watch)
    (directory / "f").touch()
    assert await watch.wait(LONG)


async def test_what_lies_beside_is_no_hint(watching: Watching, directory: Path, tmp_path: Path) -> None:
    """Names beside the directory, in its parent, are nobody's concern."""
    watch = await in_flight(watching(directory))
    (tmp_path / "other").touch()
    (tmp_path / "dd").mkdir()
    assert not await watch.wait(0.1)


async def test_set_changes_what_is_watched(watching: Watching, tmp_path: Path) -> None:
    """After `set`, the new directories are watched and the old ones are not."""
    one, two = tmp_path / "1", tmp_path / "2"
    one.mkdir()
    two.mkdir()
    watch = watching(one)
    watch.set([str(two)])
    await in_flight(watch)
    (one / "f").touch()
    assert not await watch.wait(0.05)
    (two / "f").touch()
    assert await watch.wait(LONG)


async def test_wake_from_another_thread(watching: Watching, tmp_path: Path) -> None:
    """A hint can be given by hand, from any thread, before or during a wait."""
    watch = await in_flight(watching(tmp_path))
    await asyncio.to_thread(watch.wake)
    assert await watch.wait(LONG)
    waiting = asyncio.create_task(watch.wait(LONG))
    await asyncio.to_thread(watch.wake)
    assert await waiting


async def test_hint_is_not_lost_when_a_wait_is_cancelled(watching: Watching, tmp_path: Path) -> None:
    """A cancelled wait takes no hint along."""
    watch = await in_flight(watching(tmp_path))
    waiting = asyncio.create_task(watch.wait(LONG))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    (tmp_path / "f").touch()
    assert await watch.wait(LONG)


@pytest.mark.parametrize("there", [True, False])
async def test_relative_path_is_watched(
    watching: Watching, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, there: bool
) -> None:
    """A relative path is one below the working directory, whether it is there or not."""
    monkeypatch.chdir(tmp_path)
    if there:
        (tmp_path / "d").mkdir()
    watch = await in_flight(watching(Path("d")))
    (tmp_path / "d" / "a").touch() if there else (tmp_path / "d").mkdir()
    assert await watch.wait(LONG)


async def test_closed_watch_hears_nothing(watching: Watching, tmp_path: Path) -> None:
    """A closed watch gets no hints; others on the same directory still do."""
    one, two = watching(tmp_path), watching(tmp_path)
    one.close()
    one.close()
    await in_flight(two)
    (tmp_path / "f").touch()
    assert await two.wait(LONG)
    assert not one._hinted.is_set()


def inotify_instances() -> int:
    """How many inotify instances this process has."""
    links = (
        os.readlink(f"/proc/self/fd/{fd}")
        for fd in os.listdir("/proc/self/fd")
        if os.path.islink(f"/proc/self/fd/{fd}")
    )
    return sum("inotify" in link for link in links)


async def test_all_watches_share_one_inotify_instance(watching: Watching, tmp_path: Path) -> None:
    """A hundred directories take one inotify instance: a machine has 128 for a user."""
    before = inotify_instances()
    for number in range(100):
        (tmp_path / str(number)).mkdir()
        watching(tmp_path / str(number))
    assert inotify_instances() - before <= 1


async def test_machine_without_watches_left_falls_back_and_says_so_once(
    watching: Watching, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Where no more can be watched, waits end with their time, and one line says what may be too low."""

    def refuse(*arguments: object, **options: object) -> None:
        raise OSError(28, "inotify watch limit reached")

    monkeypatch.setattr(InotifyObserver, "schedule", refuse)
    watch, other = watching(tmp_path), watching(tmp_path / "d")
    assert not await watch.wait(0.01)
    assert not await other.wait(0.01)
    said = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert len(said) == 1
    assert "max_user_watches" in said[0].getMessage()


def test_shared_watcher_is_one() -> None:
    """The process has one watcher."""
    assert filewatch.shared() is filewatch.shared()


async def test_an_emitter_that_was_stopped_is_no_error(
    watching: Watching, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """An event that comes when a directory is not watched any more is nothing that an operator is told."""
    watching(tmp_path)
    emitter = InotifyEmitter(EventQueue(), ObservedWatch(str(tmp_path), recursive=False))
    emitter.queue_events(0)
    logging.getLogger("watchdog.observers.inotify").error("something else")
    assert caplog.messages == ["something else"]
