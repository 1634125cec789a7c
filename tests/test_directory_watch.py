"""Directories with several readers: one read serves all readers, and a reader sleeps until its part has changed."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from pathlib import Path

import pytest

from deviceplugin import looks
from deviceplugin.directory_watch import DirectoryWatch, all_of, reading
from deviceplugin.filewatch import AT_ONCE
from deviceplugin.looks import Looks

READERS = 64


class Names(DirectoryWatch[frozenset[str]]):
    """The names in a directory; counts how often the directory is read."""

    def __init__(self, path: Path, poll: float = 1000.0) -> None:
        super().__init__(Looks(str(path)), self._names, (path,), AT_ONCE, poll)
        self.path = path
        self.count = 0
        self.begun = threading.Event()
        self.hold: threading.Event | None = None

    def _names(self) -> frozenset[str]:
        self.count += 1
        self.begun.set()
        if self.hold is not None:
            self.hold.wait(20)
        return frozenset(entry.name for entry in self.path.iterdir())


async def test_while_a_read_hangs_the_next_read_serves_all_callers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a read hangs, all further callers wait for the same next read; each gets the content after its call."""
    monkeypatch.setattr(looks, "PROMPT", 0.001)
    names, go_on = Names(tmp_path), threading.Event()
    names.hold = go_on
    first = asyncio.create_task(names.now())
    others = [asyncio.create_task(names.now()) for _ in range(READERS)]
    async with asyncio.timeout(20):
        await asyncio.to_thread(names.begun.wait, 20)
        (tmp_path / "a").touch()
        go_on.set()
        assert set(await asyncio.gather(*others)) == {frozenset({"a"})}
        await first
    assert names.count <= 3
    (tmp_path / "b").touch()
    assert await names.now() == {"a", "b"}


async def test_a_reader_is_not_woken_by_changes_of_another_part(tmp_path: Path) -> None:
    """A reader that waits for one part of the content is not woken by changes of other parts."""
    names = Names(tmp_path)
    async with asyncio.timeout(20):
        with reading({names: lambda content: "a" in content}) as reader, reading({names: all_of}) as other:
            await asyncio.gather(reader.wait(), other.wait())  # both readers get the first read
            wait = asyncio.create_task(reader.wait())
            (tmp_path / "b").touch()
            await other.wait()
            assert not wait.done()
            (tmp_path / "a").touch()
            assert await wait


async def test_readers_are_woken_when_something_has_changed(tmp_path: Path) -> None:
    """A read that finds a change wakes all readers, and a read that finds no change wakes none."""
    names = Names(tmp_path, poll=0.05)
    async with asyncio.timeout(20):
        with contextlib.ExitStack() as stack:
            readers = [stack.enter_context(reading({names: all_of})) for _ in range(READERS)]
            await asyncio.gather(*(reader.wait() for reader in readers))  # the first read
            before = names.count
            waits = [asyncio.create_task(reader.wait()) for reader in readers]
            while names.count < before + 3:
                await names.now()
            assert not any(wait.done() for wait in waits)
            (tmp_path / "a").touch()
            assert all(await asyncio.gather(*waits))
            assert names.latest == frozenset({"a"})


async def test_a_reader_is_woken_by_hand_and_by_its_deadline(tmp_path: Path) -> None:
    """A wait ends at its deadline, and at `wake`, even if `wake` was called before the wait began."""
    names = Names(tmp_path)
    async with asyncio.timeout(20):
        with reading({names: all_of}) as reader:
            await reader.wait()
            assert not await reader.wait(0.01)
            await asyncio.to_thread(reader.wake)
            assert await reader.wait()


async def test_a_directory_is_watched_while_a_reader_needs_file_events(tmp_path: Path) -> None:
    """A directory is watched while a reader needs file events, and is read at intervals otherwise."""
    names = Names(tmp_path)
    async with asyncio.timeout(20):
        with reading({names: all_of}) as reader, reading({names: all_of}) as other:
            both = reader, other
            await asyncio.gather(*(one.wait() for one in both))  # the first read
            waits = [asyncio.create_task(one.wait(polled=(names,))) for one in both]
            await asyncio.sleep(0)
            (tmp_path / "a").touch()  # The last file event.
            assert all(await asyncio.gather(*waits))
            (tmp_path / "b").touch()
            assert not any(await asyncio.gather(*(one.wait(0.3, polled=(names,)) for one in both)))
            assert all(await asyncio.gather(*(one.wait(unwatched=0.05, polled=(names,)) for one in both)))
            for name in ("c", "d"):
                waits = [
                    asyncio.create_task(one.wait(unwatched=3600.0, polled=() if one is reader else (names,)))
                    for one in both
                ]
                (tmp_path / name).touch()
                assert all(await asyncio.gather(*waits))


async def test_a_reader_with_an_interval_is_not_woken_by_each_read_for_others(tmp_path: Path) -> None:
    """A reader with an interval is woken at the end of the interval, if reads for others have found a change."""
    names = Names(tmp_path)
    async with asyncio.timeout(20):
        with reading({names: all_of}) as rare, reading({names: all_of}) as other:
            await asyncio.gather(rare.wait(), other.wait())  # the first read
            wait = asyncio.create_task(rare.wait(interval=3600.0))
            for name in ("a", "b"):
                (tmp_path / name).touch()
                await other.wait()
            assert not wait.done()
            wait.cancel()
        with reading({names: all_of}) as rare, reading({names: all_of}) as other:
            await asyncio.gather(rare.wait(), other.wait())
            wait = asyncio.create_task(rare.wait(interval=0.5))
            await asyncio.sleep(0)
            (tmp_path / "c").touch()
            await other.wait()
            assert await wait
