"""Fixtures for tests on a real node; ``python -m tests.cluster.isolate python -m pytest tests/cluster`` runs them.

``cluster`` is one started Cluster for the whole session; after each test that uses it everything the test may have left
on the API server is removed (``Cluster.clean``), and a component that the test stopped is started again.
``make_cluster`` makes a Cluster with other options for one test, in place of the shared one, which is stopped for it.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster import isolate
from tests.cluster.node import COMPONENTS, Cluster, ClusterError

_LOGS = pytest.StashKey[list[Path]]()
_SHARED = pytest.StashKey["Shared"]()


class Shared:
    """The session's cluster, started when it is first wanted and again after another one took its place."""

    def __init__(self, config: pytest.Config) -> None:
        """Start nothing yet."""
        self._config = config
        self._cluster: Cluster | None = None

    def get(self) -> Cluster:
        """The started cluster."""
        if self._cluster is None:
            self._cluster = self.start(Cluster())
        return self._cluster

    def start(self, cluster: Cluster) -> Cluster:
        """Start a cluster and remember its logs for what is printed at the end."""
        self._config.stash.setdefault(_LOGS, []).append(cluster.logs)
        cluster.start()
        return cluster

    def stop(self) -> None:
        """Stop the cluster, if there is one."""
        cluster, self._cluster = self._cluster, None
        if cluster is not None:
            cluster.stop()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Refuse to run where a node would harm the machine, instead of skipping."""
    here = Path(__file__).parent
    ours = [item for item in items if here in item.path.parents]
    for item in ours:
        item.add_marker(pytest.mark.timeout(1800))  # a cluster starts, and containers come and go
    wanted = bool(ours)
    if wanted and not config.option.collectonly and not isolate.inside():
        pytest.exit(
            "tests/cluster starts a kubelet and has to run isolated:\n"
            "  python -m tests.cluster.isolate python -m pytest tests/cluster",
            returncode=pytest.ExitCode.USAGE_ERROR,
        )


@pytest.fixture(scope="session")
def shared_cluster(request: pytest.FixtureRequest) -> Iterator[Shared]:
    """What keeps the session's cluster."""
    shared = request.config.stash.setdefault(_SHARED, Shared(request.config))
    yield shared
    shared.stop()


@pytest.fixture
def cluster(shared_cluster: Shared) -> Iterator[Cluster]:
    """The session's cluster, with nothing on it but the node."""
    started = shared_cluster.get()
    yield started
    try:
        for name in COMPONENTS:
            if not started.components[name].running:
                started.start_component(name)
        started.clean()
    except ClusterError:
        shared_cluster.stop()  # the next test gets a new one
        raise


@pytest.fixture
def make_cluster(shared_cluster: Shared) -> Iterator[Callable[..., Cluster]]:
    """Start a Cluster with the given options (those of Cluster) in place of the session's."""
    made: list[Cluster] = []

    def make(**options: Any) -> Cluster:
        shared_cluster.stop()
        if made:
            made.pop().stop()
        made.append(Cluster(**options))
        return shared_cluster.start(made[0])

    yield make
    if made:
        made.pop().stop()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Say with a failure where the logs of the cluster are."""
    report = yield
    logs = item.config.stash.get(_LOGS, [])
    if report.failed and logs:
        report.sections.append(("cluster", f"the logs of the cluster are in {logs[-1]}"))
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Say after a run with failures where the logs are."""
    logs = config.stash.get(_LOGS, [])
    if logs and (terminalreporter.stats.get("failed") or terminalreporter.stats.get("error")):
        terminalreporter.section("cluster logs")
        for path in logs:
            terminalreporter.line(str(path))
