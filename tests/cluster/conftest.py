"""Fixtures for tests on a real node. ``python -m tests.cluster.isolate python -m pytest tests/cluster`` runs the tests.

``cluster`` is one started Cluster for the whole session. After each test that uses the cluster, the objects of the test
are removed from the API server (``Cluster.clean``), and stopped components are started again. ``make_cluster`` returns
the cluster with other options: for another kubelet configuration the kubelet is restarted, and for other feature gates
a new Cluster is started. The options stay until a test requests others.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.cluster import build, image, isolate, matrix
from tests.cluster.node import COMPONENTS, Cluster, ClusterError
from tests.programs import image_environment

_LOGS = pytest.StashKey[list[Path]]()
_SHARED = pytest.StashKey["Shared"]()


class Shared:
    """The session's cluster. `get` starts the cluster if it is not running, or if other options are wanted."""

    def __init__(self, config: pytest.Config) -> None:
        """Store the configuration; no cluster is started."""
        self._config = config
        self._cluster: Cluster | None = None
        self._gates: Mapping[str, bool] = {}
        self._kubelet: Mapping[str, Any] = {}

    def get(
        self, *, feature_gates: Mapping[str, bool] | None = None, kubelet_config: Mapping[str, Any] | None = None
    ) -> Cluster:
        """Return the started cluster, with only these options of Cluster."""
        gates, kubelet = feature_gates or {}, kubelet_config or {}
        if self._cluster is None or gates != self._gates:
            self.stop()
            cluster = Cluster(feature_gates=gates, kubelet_config=kubelet)
            self._config.stash.setdefault(_LOGS, []).append(cluster.logs)
            cluster.start()
            self._cluster = cluster
        elif kubelet != self._kubelet:
            self._cluster.kubelet_config = dict(kubelet)
            self._cluster.restart_kubelet(reported=True)
            self._cluster.wait_for(self._cluster.ready, 60.0, "the node is ready")
        self._gates, self._kubelet = gates, kubelet
        return self._cluster

    def stop(self) -> None:
        """Stop the cluster, if there is one."""
        cluster, self._cluster = self._cluster, None
        if cluster is not None:
            cluster.stop()

    def clean(self) -> None:
        """Start stopped components, and remove a test's objects. If this fails, stop the cluster."""
        cluster = self._cluster
        if cluster is None:
            return
        try:
            for name in COMPONENTS:
                if not cluster.components[name].running:
                    cluster.start_component(name)
            cluster.clean()
        except ClusterError:
            self.stop()  # the next test gets a new cluster
            raise


def longest_first(items: Sequence[pytest.Item], processes: int) -> list[pytest.Item]:
    """Return the tests in an order in which each process begins with some of the longest tests (`lengthy`).

    `--dist worksteal` gives each process a consecutive part of the tests, and later moves tests from the end of a part.
    The other tests keep their order, because neighbours often need the same options of the cluster.
    """
    longest = [item for item in items if item.get_closest_marker("lengthy")]
    rest = [item for item in items if item not in longest]
    ordered: list[pytest.Item] = []
    for index in range(processes):
        first = longest[index::processes]
        more = max(0, (len(items) - len(ordered)) // (processes - index) - len(first))
        ordered += [*first, *rest[:more]]
        del rest[:more]
    return ordered + rest


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Exit if the tests of this directory do not run isolated, as their node would harm the machine. Sort the tests.

    Each test of this directory gets a timeout of 1800 s.
    """
    here = Path(__file__).parent
    ours = [item for item in items if here in item.path.parents]
    if len(ours) == len(items):
        items[:] = longest_first(items, getattr(config, "workerinput", {}).get("workercount", 1))
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
    """The object that starts and stops the session's cluster."""
    shared = request.config.stash.setdefault(_SHARED, Shared(request.config))
    yield shared
    shared.stop()


@pytest.fixture
def make_cluster(shared_cluster: Shared) -> Iterator[Callable[..., Cluster]]:
    """A function (`Shared.get`) that returns the session's cluster with these options, without other tests' objects."""
    yield shared_cluster.get
    shared_cluster.clean()


@pytest.fixture
def cluster(make_cluster: Callable[..., Cluster]) -> Cluster:
    """The session's cluster with default options, without objects of other tests."""
    return make_cluster()


@pytest.fixture(scope="session")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The archive of the image of examples/Dockerfile, with two tags; written once for all processes of a run."""
    text = (Path(__file__).parents[2] / "examples" / "Dockerfile").read_text()
    (entrypoint,) = re.findall(r"^ENTRYPOINT (.+)$", text, re.MULTILINE)
    directory = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        directory = directory.parent
    path = directory / "agent.tar"
    with open(directory / "agent.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            new = path.with_suffix(".new")
            image.write_agent(new, json.loads(entrypoint), image.AGENTS, image_environment())
            new.rename(path)
    return path


@pytest.fixture
def node(cluster: Cluster, archive: Path) -> Cluster:
    """The session's cluster, whose containerd has the image."""
    if archive not in cluster.imported:
        cluster.import_image(archive)
        cluster.imported.add(archive)
    return cluster


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add the directory of the cluster's logs to the report of a failed test."""
    report = yield
    logs = item.config.stash.get(_LOGS, [])
    if report.failed and logs:
        report.sections.append(("cluster", f"the logs of the cluster are in {logs[-1]}"))
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print a table of scenarios: the numbers of holders, of devices with two holders, and the seconds of moves."""
    reports = [report for reports in terminalreporter.stats.values() for report in reports]
    found = [
        json.loads(str(value))
        for report in reports
        if isinstance(report, pytest.TestReport) and report.when == "teardown"
        for name, value in report.user_properties
        if name == "holders"
    ]
    if found:
        rows = [[name, build.default_version(), *cells] for name, *cells in found]
        terminalreporter.section("holders")
        terminalreporter.write_line(matrix.markdown([matrix.HEAD, *rows]))
