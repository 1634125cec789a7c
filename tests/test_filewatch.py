"""Watches of directories, which give hints (wake the waiting task) when something in a directory has changed."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import resource
import shutil
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from watchdog import events
from watchdog.observers import Observer
from watchdog.observers.inotify_c import InotifyEvent, InotifyFD

from deviceplugin import filewatch, unwatched
from deviceplugin.filewatch import AT_ONCE, Gather, Watch, Watcher
from deviceplugin.unwatched import UnwatchedCause
from tests.waits import until

LONG = 10.0
Watching = Callable[..., Watch]
Hints = frozenset[type[events.FileSystemEvent]]


def inotify_instances() -> int:
    """Return the number of inotify instances of this process."""
    found = 0
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # another thread has closed the file since the listing
            found += "inotify" in os.readlink(f"/proc/self/fd/{fd}")
    return found


@pytest.fixture
async def watcher() -> AsyncIterator[Watcher]:
    """A watcher of the test's own; after the test its inotify instances must have ended."""
    before = inotify_instances()
    yield Watcher()
    await until(lambda: inotify_instances() <= before)


@pytest.fixture
async def watching(watcher: Watcher) -> AsyncIterator[Watching]:
    """Return a function that watches directories."""
    watches = []

    def watch(*directories: Path, hints: Hints = filewatch.NAMES, gather: Gather = AT_ONCE) -> Watch:
        watches.append(watcher.watch(map(str, directories), hints, gather))
        return watches[-1]

    yield watch
    for one in watches:
        one.close()


async def in_flight(watch: Watch) -> Watch:
    """Wait until all directories are watched, and take all pending hints; return the watch."""
    await until(lambda: all(place.watched for place in watch.places.values()))
    while await watch.wait(0.05):
        pass
    return watch


async def until_looked_at(watch: Watch, renew: float = filewatch.RENEW) -> None:
    """Wait until the watcher has checked each directory once more, and take all hints. renew: `RENEW` meanwhile."""
    await in_flight(watch)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(filewatch, "RENEW", renew)
        for _ in range(2):  # a check that is under way may have begun before
            looks = {place: place.next_look for place in watch.places.values()}
            async with asyncio.timeout(LONG):
                while any(place.next_look == look for place, look in looks.items()):
                    await watch.wait(0.01)
    await in_flight(watch)


async def watched_at(watch: Watch, directory: Path) -> None:
    """Wait until the watch's only directory is watched at this path: its own, or its nearest existing ancestor's."""
    await until(lambda: [place.at for place in watch.places.values() if place.watched] == [str(directory)])


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """An existing directory."""
    (made := tmp_path / "d").mkdir()
    return made


async def test_hint_for_each_name_that_comes_or_goes(watching: Watching, tmp_path: Path) -> None:
    """Creating, renaming and removing a name in the directory give hints (wake the waiting task)."""
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


async def test_hints_are_gathered_but_for_those_that_do_not_wait(watching: Watching, tmp_path: Path) -> None:
    """Hints in quick succession are one hint; a name with the suffix `.sock` gives a hint at once, also by a rename."""
    late, soon = (watching(tmp_path, gather=Gather(seconds, ".sock")) for seconds in (3600.0, 0.01))
    await in_flight(late)
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


@pytest.mark.parametrize("first", [True, False])
async def test_who_wants_writes_hears_of_them_whoever_else_watches_the_directory(
    watching: Watching, tmp_path: Path, first: bool
) -> None:
    """A watch with NAMES_AND_WRITES gets writes, and a watch with NAMES none, also if both watch one directory."""
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


async def test_directory_that_is_replaced_between_looks(
    watching: Watching, directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A directory that is replaced by another of the same name is watched after the next periodic check."""
    monkeypatch.setattr(filewatch, "CHECK", 0.0)
    watch = await in_flight(watching(directory))
    directory.rename(tmp_path / "old")
    directory.mkdir()
    await until_looked_at(watch)
    (directory / "f").touch()
    assert await watch.wait(LONG)


async def test_the_parent_of_a_directory_that_is_there_is_not_watched(
    watching: Watching, directory: Path, tmp_path: Path
) -> None:
    """The parent of a directory is watched only while the directory does not exist."""
    watch = watching(directory)
    await watched_at(watch, directory)
    directory.rmdir()
    await watched_at(watch, tmp_path)
    directory.mkdir()
    await watched_at(watch, directory)


async def test_directory_that_comes_while_its_parent_begins_to_be_watched(
    watching: Watching, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A directory that is created just before the watch of its parent begins is watched without an event."""
    directory = tmp_path / "d"
    add = InotifyFD.add_callback

    def comes(instance: InotifyFD, path: bytes, *arguments: Any) -> int:
        if path == bytes(tmp_path):
            directory.mkdir(exist_ok=True)
        return add(instance, path, *arguments)

    monkeypatch.setattr(InotifyFD, "add_callback", comes)
    await watched_at(watching(directory), directory)


async def test_link_that_leads_elsewhere(watching: Watching, directory: Path, tmp_path: Path) -> None:
    """After a symbolic link to a watched directory is replaced, the new target is watched."""
    (other := tmp_path / "other").mkdir()
    (link := tmp_path / "link").symlink_to(directory)
    watch = await in_flight(watching(link, tmp_path))
    (new := tmp_path / "new").symlink_to(other)
    new.rename(link)
    await in_flight(watch)
    (other / "f").touch()
    assert await watch.wait(LONG)


async def test_directory_that_is_not_there_yet(watching: Watching, tmp_path: Path) -> None:
    """A path that does not exist may be watched: its creation is a hint, and the new directory is watched."""
    directory = tmp_path / "a" / "b" / "c"
    watch = await in_flight(watching(directory))
    directory.mkdir(parents=True)
    assert await watch.wait(LONG)
    await in_flight(watch)
    (directory / "f").touch()
    assert await watch.wait(LONG)


async def test_what_lies_beside_is_no_hint(watching: Watching, directory: Path, tmp_path: Path) -> None:
    """Changes beside the directory, in its parent, give no hints (do not wake the waiting task)."""
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
    """`wake` gives a hint from any thread, before or during a wait."""
    watch = await in_flight(watching(tmp_path))
    await asyncio.to_thread(watch.wake)
    assert await watch.wait(LONG)
    waiting = asyncio.create_task(watch.wait(LONG))
    await asyncio.to_thread(watch.wake)
    assert await waiting


async def test_hint_is_not_lost_when_a_wait_is_cancelled(watching: Watching, tmp_path: Path) -> None:
    """A cancelled wait does not lose a hint."""
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
    """A relative path is relative to the working directory, whether it exists or not."""
    monkeypatch.chdir(tmp_path)
    if there:
        (tmp_path / "d").mkdir()
    watch = await in_flight(watching(Path("d")))
    (tmp_path / "d" / "a").touch() if there else (tmp_path / "d").mkdir()
    assert await watch.wait(LONG)


async def test_closed_watch_hears_nothing(watching: Watching, tmp_path: Path) -> None:
    """A closed watch gets no hints; another watch of the directory still does."""
    one, two = watching(tmp_path), watching(tmp_path)
    one.close()
    one.close()
    await in_flight(two)
    (tmp_path / "f").touch()
    assert await two.wait(LONG)
    assert not await one.wait(0.05)


async def test_all_watches_share_one_inotify_instance(watching: Watching, tmp_path: Path) -> None:
    """Watches of a hundred directories share one inotify instance: the limit is 128 per user."""
    before = inotify_instances()
    for number in range(100):
        (tmp_path / str(number)).mkdir()
        await in_flight(watching(tmp_path / str(number)))
    assert inotify_instances() - before <= 1


async def test_instance_ends_with_the_last_watch(watcher: Watcher, tmp_path: Path) -> None:
    """The inotify instance ends with the last watch; the next watch makes a new one."""
    before = inotify_instances()
    for _ in range(2):
        with watcher.watch([str(tmp_path)]) as watch:
            await in_flight(watch)
            assert inotify_instances() > before
        await until(lambda: inotify_instances() == before)


# --- no events -------------------------------------------------------------------------------------------------------


def refusing(number: int) -> Callable[..., Any]:
    """Return a function that raises OSError with this number."""

    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    return refuse


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Failed watches are tried again after 10 ms."""
    monkeypatch.setattr("deviceplugin.backoff.Backoff.next", lambda backoff: 0.01)
    monkeypatch.setattr(filewatch, "CHECK", 0.01)


@pytest.mark.parametrize(
    ("call", "number", "cause", "words"),
    [
        (
            (InotifyFD, "__init__"),
            errno.EMFILE,
            UnwatchedCause.INSTANCES,
            "no inotify instance left (fs.inotify.max_user_instances is ",
        ),
        ((InotifyFD, "__init__"), errno.ENFILE, UnwatchedCause.FILES, "no file can be opened any more"),
        ((InotifyFD, "__init__"), errno.ENOSYS, UnwatchedCause.ERROR, os.strerror(errno.ENOSYS)),
        (
            (InotifyFD, "add_callback"),
            errno.ENOSPC,
            UnwatchedCause.WATCHES,
            "no inotify watch left (fs.inotify.max_user_watches is ",
        ),
        ((InotifyFD, "add_callback"), errno.EPERM, UnwatchedCause.ERROR, os.strerror(errno.EPERM)),
        ((os, "access"), None, UnwatchedCause.ERROR, os.strerror(errno.EACCES)),
    ],
)
@pytest.mark.usefixtures("soon")
async def test_what_cannot_be_watched_is_read_again(
    watcher: Watcher,
    watching: Watching,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    call: tuple[object, str],
    number: int | None,
    cause: UnwatchedCause,
    words: str,
) -> None:
    """A directory that cannot be watched is reported once with its cause, is read again, and is watched later."""
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(*call, refusing(number) if number else lambda *_, **__: False)
    watch, other = watching(tmp_path), watching(tmp_path / "d")
    for one in (watch, other):
        assert not await one.wait(3600.0, unwatched=0.01)
    await until(watcher.unwatched)
    ((failure, directories),) = watcher.unwatched()
    assert failure.cause is cause
    assert directories[0] == str(tmp_path)
    (line,) = caplog.messages
    assert line.startswith(f"cannot watch {tmp_path}")
    assert words in line
    monkeypatch.undo()
    async with asyncio.timeout(LONG):
        while watcher.unwatched():
            await watch.wait(0.01)
            await other.wait(0.01)
    await in_flight(watch)
    (tmp_path / "f").touch()
    assert await watch.wait(LONG)
    assert caplog.messages == [line, "all directories are watched again"]


def test_a_full_table_of_files_is_no_lack_of_instances(monkeypatch: pytest.MonkeyPatch) -> None:
    """EMFILE means a lack of inotify instances, or of files if no other file can be opened either."""
    error = OSError(errno.EMFILE, "")
    assert UnwatchedCause.of(error) is UnwatchedCause.INSTANCES
    monkeypatch.setattr(os, "eventfd", refusing(errno.EMFILE))
    assert UnwatchedCause.of(error) is UnwatchedCause.FILES


async def test_no_instance_is_lost_while_files_run_out(watcher: Watcher, watching: Watching, tmp_path: Path) -> None:
    """If the process can open one file only, no inotify instance stays open, and the cause is FILES."""
    instances, limits = inotify_instances(), resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(name) for name in os.listdir("/proc/self/fd"))
    fillers: list[int] = []
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 10, limits[1]))
        with contextlib.suppress(OSError):
            while True:
                fillers.append(os.eventfd(0))
        os.close(fillers.pop())
        watching(tmp_path)
        assert inotify_instances() == instances
        assert [failure.cause for failure, _ in watcher.unwatched()] == [UnwatchedCause.FILES]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for filler in fillers:
            os.close(filler)


async def test_queue_that_overflows(
    watching: Watching,
    tmp_path: Path,
    directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """After an overflow of the inotify queue, the next check finds the changed directories, and hints come again."""
    monkeypatch.setattr(filewatch, "CHECK", 0.0)
    goes_on = threading.Event()
    read = InotifyFD.read_events

    def late(instance: InotifyFD) -> list[InotifyEvent]:
        goes_on.wait()
        return read(instance)

    late_comer = tmp_path / "late"
    watches = [await in_flight(watching(one)) for one in (directory, late_comer, tmp_path)]
    monkeypatch.setattr(InotifyFD, "read_events", late)
    limit = int(Path("/proc/sys/fs/inotify/max_queued_events").read_text())
    # Each file causes two events. A read that is under way takes as many events as fit into watchdog's buffer.
    for number in range(limit // 2 + 2100):
        (file := tmp_path / f"{number}").touch()
        file.unlink()
    shutil.rmtree(directory)
    directory.mkdir()
    late_comer.mkdir()
    goes_on.set()
    await until(lambda: "Inotify queue overflowed" in caplog.text)
    for watch, watched in zip(watches, (directory, late_comer, tmp_path), strict=True):
        await until_looked_at(watch, renew=0.0)  # the new directory may have the inode number of the former one
        assert [place.at for place in watch.places.values()] == [str(watched)]
        (watched / "f").touch()
        assert await watch.wait(LONG)


# --- file systems that do not answer ---------------------------------------------------------------------------------


@pytest.fixture
def hanging(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Path], None]]:
    """Return a function after which `os.stat` of a directory, or of a path below it, blocks until the test ends."""
    hung: list[str] = []
    over = threading.Event()
    stat = os.stat

    def hang(path: Any, **options: Any) -> os.stat_result:
        if any(f"{path}/".startswith(f"{one}/") for one in hung):
            over.wait()
        return stat(path, **options)

    monkeypatch.setattr(os, "stat", hang)
    yield lambda directory: hung.append(str(directory))
    over.set()


def looking() -> int:
    """Return the number of threads that begin to watch something."""
    return sum(thread.name.startswith("watch:") for thread in threading.enumerate())


async def test_directory_that_hangs_holds_up_its_own_watch_alone(
    watcher: Watcher,
    watching: Watching,
    tmp_path: Path,
    directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    hanging: Callable[[Path], None],
) -> None:
    """A hanging directory blocks one thread in all and no other watch, and is reported with the cause SILENT."""
    monkeypatch.setattr(filewatch, "CHECK", 0.01)
    monkeypatch.setattr(unwatched, "SILENT", 0.2)
    (slow := tmp_path / "slow").mkdir()
    before = await in_flight(watching(directory))
    threads = looking()
    hanging(slow)
    waits = [watching(slow) for _ in range(20)]
    mixed = watching(slow, directory)
    for watch in (before, await in_flight(watching(directory))):
        (directory / "f").touch()
        assert await watch.wait(LONG)
        await in_flight(watch)
        (directory / "f").unlink()
        assert await watch.wait(LONG)
        await in_flight(watch)
    async with asyncio.timeout(LONG):
        while not watcher.unwatched():
            for watch in waits:
                assert not await watch.wait(3600.0, unwatched=0.01)
    ((failure, directories),) = watcher.unwatched()
    assert (failure.cause, directories) == (UnwatchedCause.SILENT, (str(slow),))
    await waits[0].wait(0.0)
    assert f"cannot watch {slow}: its file system has not answered for" in caplog.text
    for watch in (*waits, mixed):
        watch.close()
    watching(slow)
    await until(lambda: looking() <= threads + 1)


async def test_file_system_that_ceases_to_answer_just_before_it_is_watched(
    watcher: Watcher,
    watching: Watching,
    tmp_path: Path,
    directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """While `inotify_add_watch` hangs, a new instance watches the other directories; the blocked one ends later."""
    monkeypatch.setattr(unwatched, "SILENT", 0.2)
    (slow := tmp_path / "slow").mkdir()
    before = await in_flight(watching(directory))
    instances = inotify_instances()
    entered, answers = threading.Event(), threading.Event()
    add = InotifyFD.add_callback

    def hang(instance: InotifyFD, path: bytes, *arguments: Any) -> int:
        if path == bytes(slow):
            entered.set()
            answers.wait()
        return add(instance, path, *arguments)

    monkeypatch.setattr(InotifyFD, "add_callback", hang)
    stat = os.stat

    def hang_as_well(path: Any, **options: Any) -> os.stat_result:
        if entered.is_set() and str(path).startswith(str(slow)):
            answers.wait()
        return stat(path, **options)

    monkeypatch.setattr(os, "stat", hang_as_well)
    try:
        watching(slow)
        await asyncio.to_thread(entered.wait, LONG)
        other = watching(tmp_path)
        async with asyncio.timeout(LONG):
            while "holds up the inotify instance" not in caplog.text:
                await other.wait(3600.0, unwatched=0.01)
        await in_flight(other)
        await in_flight(before)
        (directory / "f").touch()
        assert await before.wait(LONG)
        (tmp_path / "f").touch()
        assert await other.wait(LONG)
    finally:
        answers.set()
    await until(lambda: inotify_instances() == instances)
    assert not [one for one in watcher.unwatched() if str(slow) not in one.directories]


async def test_directory_that_answers_late(
    watching: Watching, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A directory whose watch begins late gives hints from then on, and a hint that it is watched."""
    entered, answers = threading.Event(), threading.Event()
    add = InotifyFD.add_callback

    def late(*arguments: Any) -> int:
        entered.set()
        answers.wait()
        return add(*arguments)

    monkeypatch.setattr(InotifyFD, "add_callback", late)
    watch = watching(directory)
    await asyncio.to_thread(entered.wait)
    assert not await watch.wait(3600.0, unwatched=0.01)
    (directory / "f").touch()
    answers.set()
    assert await watch.wait(LONG)
    await in_flight(watch)
    (directory / "f").unlink()
    assert await watch.wait(LONG)


async def test_no_file_operation_in_the_loop(
    watching: Watching, directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All file operations run in threads outside the event loop."""
    loop = threading.get_ident()
    calls: set[tuple[str, bool]] = set()

    def noted(name: str, function: Callable[..., object]) -> Callable[..., object]:
        def call(*arguments: object, **options: object) -> object:
            calls.add((name, threading.get_ident() == loop))
            return function(*arguments, **options)

        return call

    with monkeypatch.context() as patch:
        watchdogs = (Observer, ("schedule", "unschedule", "stop"))
        for place, names in (watchdogs, (os, ("stat", "lstat", "access", "scandir", "readlink"))):
            for name in names:
                patch.setattr(place, name, noted(name, getattr(place, name)))
        watch = watching(directory)
        await watched_at(watch, directory)
        watch.set([str(tmp_path / "a" / "b")])
        await watched_at(watch, tmp_path)
        await watch.wait(0.0)
        watch.close()
        await until(lambda: ("stop", False) in calls)
    assert not {name for name, in_loop in calls if in_loop}
    assert {name for name, _ in calls} >= {"schedule", "unschedule", "stop", "stat", "lstat"}
