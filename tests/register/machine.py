"""Drives a whole agent through random configurations, lists, pods, claims, restarts and losses; see `checked`.

What is drawn depends on nothing that takes its own time: a step that cannot be done now does nothing.
"""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from tests.register.agent import Config, Kind, Settings
from tests.register.checked import HARDWARE, A, B, CheckedNode, D, E, End, File, PodKind, Started

__all__ = ["Machine"]

SETTINGS = st.builds(
    Settings,
    driver=st.sampled_from([D, E, ""]),
    replicas=st.sampled_from([1, 1, 2, 3]),
    share=st.sampled_from(["all", "none", "1"]),
)
CONFIGS = st.one_of(
    st.fixed_dictionaries({A: SETTINGS}),
    st.fixed_dictionaries({A: SETTINGS, B: SETTINGS}),
    st.fixed_dictionaries({B: SETTINGS}),
)
"""An agent has at least one resource."""
NAMES = st.sampled_from([(A, "d0"), (A, "d1"), (B, "d0"), (B, "x1")])
RECENT = st.integers(0, 3)
"""A pod: 0 is the one that was started last."""
DRIVERS = st.sampled_from([D, D, E])
LOSSES: st.SearchStrategy[set[File]] = st.sets(st.sampled_from(get_args(File)), max_size=2)
ENDS: list[End] = ["delete", "hang", "hang", "force", "complete"]


class Machine(RuleBasedStateMachine):
    """A node on which anything may be configured, lost and started in any order."""

    both = True
    check_lost = True
    _here: CheckedNode | None = None

    @initialize(kind=st.sampled_from(get_args(Kind)), config=CONFIGS, period=st.sampled_from([0.02, 1.0]))
    def begin(self, kind: Kind, config: Config, period: float) -> None:
        self._here = CheckedNode(kind, both=self.both, period=period, config=config)

    def teardown(self) -> None:
        if self._here is None:
            return
        try:
            if self.check_lost and not self._here.node.doubles:
                self._here.leave_alone()
        finally:
            self._here.close()

    @property
    def here(self) -> CheckedNode:
        assert self._here is not None
        return self._here

    def recent(self, which: int) -> Started | None:
        there = [one for one in self.here.started if not one.pod.gone]
        return there[-1 - which] if which < len(there) else None

    # The config and the lists.

    @rule(config=CONFIGS)
    def reload(self, config: Config) -> None:
        self.here.reload(config)

    @rule(driver=st.sampled_from([D, E, "", None]))
    def rename(self, driver: str | None) -> None:
        """Only the driver of a resource is another one, or none; or the resources have each other's settings (None)."""
        config = self.here.config
        if driver is None:
            config = {other: config[one] for one, other in ((A, B), (B, A)) if one in config}
        elif A in config:
            config = {**config, A: replace(config[A], driver=driver)}
        self.here.reload(config)

    @rule(name=NAMES, hardware=st.sampled_from([*HARDWARE, None]), times=st.sampled_from([3, 2, 1]))
    def list(self, name: tuple[str, str], hardware: str | None, times: int) -> None:
        self.here.list(*name, hardware, times)

    # Pods and claims.

    @rule(
        resource=st.sampled_from([A, A, B]),
        count=st.sampled_from([1, 1, 2]),
        how=st.sampled_from(["", "", "static", "rejected", "init"]),
    )
    def pod(self, resource: str, count: int, how: PodKind) -> None:
        self.here.pod(resource, count, how)

    @rule(driver=DRIVERS, admin=st.sampled_from([False, False, False, True]), count=st.sampled_from([1, 1, 2]))
    def claimant(self, driver: str, admin: bool, count: int) -> None:
        self.here.claimant(driver, admin=admin, count=count)

    @rule(claim=st.sampled_from(["mine", "ours"]), driver=DRIVERS)
    def user(self, claim: str, driver: str) -> None:
        self.here.user(claim, driver)

    @rule(which=RECENT, how=st.sampled_from(ENDS))
    def end(self, which: int, how: End) -> None:
        if (one := self.recent(which)) is not None:
            self.here.end(one, how)

    @rule(which=RECENT)
    def reap(self, which: int) -> None:
        if (one := self.recent(which)) is not None:
            self.here.reap(one)

    @rule(which=RECENT)
    def restart_container(self, which: int) -> None:
        if (one := self.recent(which)) is not None:
            self.here.restart_container(one)

    # Restarts and losses.

    @rule(kill=st.booleans(), files=LOSSES)
    def restart_agent(self, kill: bool, files: set[File]) -> None:
        """Restart it; files are lost meanwhile."""
        if files:
            self.here.lose(files, kill=kill)
        else:
            self.here.end_agent(kill=kill)
            self.here.start_agent()

    @rule(what=st.sampled_from(["kubelet", "agent", "killed agent"]))
    def down(self, what: str) -> None:
        if what == "kubelet":
            self.here.stop_kubelet()
        else:
            self.here.end_agent(kill=what == "killed agent")

    @rule(agent_first=st.booleans(), outage=st.sampled_from([False, False, True]))
    def up(self, agent_first: bool, outage: bool) -> None:
        """Start what does not run; outage: the kubelet does not reach the API server."""
        if agent_first:
            self.here.start_agent()
        self.here.start_kubelet(outage=outage)
        self.here.start_agent()

    @rule(what=st.sampled_from(["restart", "reconcile", "end outage", "foreign claim"]))
    def kubelet(self, what: str) -> None:
        if what == "restart":
            self.here.stop_kubelet()
            self.here.start_kubelet()
        elif what == "reconcile":
            self.here.reconcile()
        elif what == "end outage":
            self.here.end_outage()
        else:
            self.here.foreign()


class PluginMachine(Machine):
    """The same with the plugin side alone."""

    both = False
