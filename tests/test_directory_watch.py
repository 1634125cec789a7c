"""Directories that many look at: one look for all, and a reader sleeps until what is there has changed."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

from deviceplugin.directory_watch import DirectoryWatch, reading
from deviceplugin.filewatch import AT_ONCE
from deviceplugin.looks import Looks

READERS = 64


class Names(DirectoryWatch[frozenset[str]]):
    """The names in a directory; counts its looks."""

    def __init__(self, path: Path, poll: float = 1000.0) -> None:
        super().__init__(Looks(str(path)), self._names, (path,), AT_ONCE, poll)
        self.path = path
        self.count = 0

    def _names(self) -> frozenset[str]:
        self.count += 1
        return frozenset(entry.name for entry in self.path.iterdir())


async def test_a_look_serves_all_who_ask_before_it_begins(tmp_path: Path) -> None:
    """However many resources there are, and each sees what was there when it asked."""
    names = Names(tmp_path)
    assert set(await asyncio.gather(*(names.now() for _ in range(READERS)))) == {frozenset()}
    assert names.count == 1
    (tmp_path / "a").touch()
    assert await names.now() == {"a"}


async def test_readers_are_woken_when_something_has_changed(tmp_path: Path) -> None:
    """A change costs looks for all of them together, and a look that finds the same wakes none."""
    names = Names(tmp_path, poll=0.05)
    async with asyncio.timeout(20):
        with contextlib.ExitStack() as stack:
            readers = [stack.enter_context(reading(names)) for _ in range(READERS)]
            await asyncio.gather(*(reader.wait() for reader in readers))  # the first look
            before = names.count
            waits = [asyncio.create_task(reader.wait()) for reader in readers]
            while names.count < before + 3:
                await names.now()
            assert not any(wait.done() for wait in waits)
            (tmp_path / "a").touch()
            assert all(await asyncio.gather(*waits))
            assert names.latest == frozenset({"a"})


async def test_a_reader_is_woken_by_hand_and_by_its_deadline(tmp_path: Path) -> None:
    """A wake that comes before the wait ends it, too."""
    names = Names(tmp_path)
    async with asyncio.timeout(20):
        with reading(names) as reader:
            await reader.wait()
            assert not await reader.wait(0.01)
            await asyncio.to_thread(reader.wake)
            assert await reader.wait()
