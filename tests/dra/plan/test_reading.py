"""The requests of `plan` to the API server, and its handling of missing answers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dra_bridge import cli
from dra_bridge.testing.apiserver import FakeApiServer, Fault
from tests.dra.plan.cases import BOARD, CALM, node
from tests.kubeconfigs import written


@pytest.mark.usefixtures("read_here")
def test_what_is_not_answered_is_not_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Kinds that a server does not serve, refused lists and kubelets without an answer are named, with status 5."""
    with FakeApiServer() as server:
        for body in (node("n1"), *CALM):
            server.create(body)
        kubeconfig = written(tmp_path / "kubeconfig", server.url)
        assert cli.main(["plan", "-o", "json", "--kubeconfig", str(kubeconfig)]) == 5
        found = json.loads(capsys.readouterr().out)
        unread = {one["what"] for one in found["unread"]}
        assert unread >= {"resourcequotas", "clusterroles", "nodes/proxy (the kubelets' configz)"}
        assert not unread & {"nodes", "pods", "deviceclasses"}
        assert [one["resource"] for one in found["resources"]] == [BOARD]
        assert not [one for one in server.log if one.method not in ("GET", "POST")]
        written_to = {one.path for one in server.log if one.method == "POST"}
        assert {path.rpartition("/")[2] for path in written_to} == {"selfsubjectaccessreviews"}
        server.fail(lambda request: request.path.endswith("/pods"), Fault(403), times=9)
        assert cli.main(["plan", "-o", "json", "--kubeconfig", str(kubeconfig)]) == 5
        assert "pods" in {one["what"] for one in json.loads(capsys.readouterr().out)["unread"]}
