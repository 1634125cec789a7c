"""Shows the progress of nodes during moves or a rollout: as lines, and on a terminal also as bars below the lines."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dra_bridge.rollout import fleet
from dra_bridge.rollout.fleet import NodeView, Phase

OTHER_ROWS = 6
"""Number of terminal rows that are reserved for lines and for the bar of all nodes."""


class Reporter:
    """Shows the progress of nodes. bars: rich's progress bars; None to print lines instead.

    say: a function that prints a line. stopped: the reasons why a rollout has stopped, which the program prints last,
    after the bars were removed.
    """

    def __init__(self, say: Callable[[str], None], bars: Any = None) -> None:
        self.say = say
        self.stopped: list[str] = []
        self._bars = bars
        self._total: Any = None
        self._tasks: dict[str, Any] = {}
        self._done: set[str] = set()
        self._printed: dict[str, str] = {}
        self._explained: dict[str, list[str]] = {}
        self._most: dict[str, int] = {}

    def show(self, nodes: Sequence[NodeView]) -> None:
        """Update each node's bar, or without bars, print a line for each node that has changed."""
        for view in nodes:
            node = view.node
            if self._bars is not None and node not in self._tasks:
                self._tasks[node] = self._bars.add_task(node, total=None, unit="devices", visible=False)
            # The annotation was removed, and the agent has not read this yet, so the share that applies next is
            # unknown.
            if view.reported is None or (view.requested is None and view.reported.requested):
                continue
            left = fleet.distance(view)
            most = self._most[node] = max(self._most.get(node, 0), left)
            text = f"{node}: {most - left} of {most} devices moved" if most else f"{node}: nothing to move"
            if self._bars is not None:
                self._bars.update(self._tasks[node], total=max(most, 1), completed=most - left if most else 1)
                (self._done.add if fleet.finished(view) else self._done.discard)(node)
            elif self._printed.get(node) != text:
                self._printed[node] = text
                self.say(text)
        if self._bars is not None:
            self._make_room()

    def total(self, phases: Mapping[str, Phase]) -> None:
        """Update the bar of all nodes, which is above the bars of single nodes. phases: for each node, its phase."""
        if self._bars is None:
            return
        of = {phase: sum(each is phase for each in phases.values()) for phase in Phase}
        words = f"{of[Phase.MOVING]} moving, {of[Phase.WAITING]} not started"
        done = of[Phase.DONE] + of[Phase.UNTOUCHED]
        # The bar needs its total from the beginning, because rich may draw the bar immediately.
        if self._total is None:
            self._total = self._bars.add_task(words, total=len(phases), completed=done, unit="nodes")
        self._bars.update(self._total, description=words, total=len(phases), completed=done)

    def _make_room(self) -> None:
        """Hide the bars of nodes for which the terminal has no rows, and show the others.

        Bars of finished nodes are hidden first. Finished nodes have a bar of their own only if there is no bar of all
        nodes.
        """
        moving = [node for node in self._tasks if node not in self._done]
        rest = [node for node in self._tasks if node in self._done] if self._total is None else []
        shown = [*moving, *rest][: max(1, self._bars.console.height - OTHER_ROWS)]
        for node, task in self._tasks.items():
            self._bars.update(task, visible=node in shown)

    def explain(self, nodes: Sequence[NodeView]) -> None:
        """Print why nodes do not have the requested share yet, if the reasons have changed since they were printed."""
        for view in nodes:
            lines = fleet.obstacles(view)
            if lines and self._explained.get(view.node) != lines:
                self._explained[view.node] = lines
                for line in lines:
                    self.say(f"{view.node}: {line}")
