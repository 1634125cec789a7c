"""The hooks that work on devices now."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping
from typing import Any, Final

from deviceplugin import hooks
from deviceplugin.exclusion import ConflictError, Key, titled

_LOG: Final = logging.getLogger(__name__)
RELEASING: Final = "`released` still works on it, after its timeout"
CANCELLED: Final = 1.0
"""Seconds that a coroutine has to end after it was cancelled."""


class HookRuns:
    """The `released` hooks that work now; nobody is given a device before its hook has ended.

    Hooks of devices that are one thing run one by one. same_thing: returns devices and those that are the same thing,
    or parts of it. changed: called when a hook works on after its timeout, and when such a hook has ended.
    """

    def __init__(self, same_thing: Callable[[Iterable[Key]], set[Key]], changed: Callable[[], None]) -> None:
        self._same_thing = same_thing
        self._changed = changed
        self._tasks: dict[asyncio.Task[str], frozenset[Key]] = {}
        self._overdue: dict[asyncio.Future[Any], frozenset[Key]] = {}

    @property
    def overdue(self) -> Mapping[Key, str]:
        """The devices on which hooks work on after their timeouts."""
        return dict.fromkeys(frozenset().union(*self._overdue.values()), "released")

    def run(self, keys: Iterable[Key], work: Coroutine[Any, Any, None]) -> asyncio.Task[str]:
        """Run the `released` hook of devices; the task returns why it failed, "" if it did not.

        The task ends with the hook's timeout, though the hook may work on. work: raises HookError if the hook fails.
        """
        keys = frozenset(keys)
        task = asyncio.create_task(self._run(keys, work, self._of(keys)))
        self._tasks[task] = keys
        task.add_done_callback(self._tasks.pop)
        return task

    async def _run(
        self, keys: frozenset[Key], work: Coroutine[Any, Any, None], earlier: Collection[asyncio.Task[str]]
    ) -> str:
        try:
            if earlier:
                await asyncio.wait(earlier)
            await work
        except hooks.HookError as error:
            _LOG.warning("%s", error)
            work_left = error.work if isinstance(error, hooks.HookTimeoutError) else None
            if isinstance(work_left, asyncio.Task):
                await asyncio.wait((work_left,), timeout=CANCELLED)
            if work_left is not None and not work_left.done():
                self._overdue[work_left] = keys
                work_left.add_done_callback(self._overdue_ended)
                self._changed()
            return str(error)
        return ""

    def _overdue_ended(self, work: asyncio.Future[Any]) -> None:
        keys = self._overdue.pop(work)
        _LOG.info("`released` has ended, after its timeout: %s", ", ".join(map(titled, sorted(keys))))
        self._changed()

    async def wait(self, keys: Iterable[Key]) -> None:
        """Wait for the hooks of these and the same things. Raises ConflictError: one works on after its timeout."""
        if not (self._tasks or self._overdue):
            return
        keys = tuple(keys)
        if tasks := self._of(keys):
            await asyncio.wait(tasks)
        if overdue := self.overdue.keys() & self._same_thing(keys):
            raise ConflictError(f"{titled(min(overdue))}: {RELEASING}")

    def _of(self, keys: Iterable[Key]) -> set[asyncio.Task[str]]:
        wanted = self._same_thing(keys) if self._tasks else set()
        return {task for task, of in self._tasks.items() if not wanted.isdisjoint(of)}
