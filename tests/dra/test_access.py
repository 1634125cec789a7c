"""How the API server is reached."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dra_bridge import access
from dra_bridge.access import Access, AccessError, from_environment


@pytest.fixture
def account(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A pod's service account."""
    directory = tmp_path / "serviceaccount"
    directory.mkdir()
    (directory / "token").write_text("first\n")
    bundle = next(
        path for path in ("/etc/ssl/certs/ca-certificates.crt", "/etc/pki/tls/cert.pem") if Path(path).exists()
    )
    shutil.copy(bundle, directory / "ca.crt")
    monkeypatch.setattr(access, "SERVICE_ACCOUNT", directory)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "fd00::1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "6443")
    return directory


async def test_in_a_pod(account: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pod reaches its cluster by its service account, whose token is read again when it is old or refused."""
    found = from_environment()
    assert found.url == "https://[fd00::1]:6443"
    assert found.tls is not None
    assert found.tls.get_ca_certs()
    assert await found.authorize(False) == "Bearer first"
    (account / "token").write_text("second")
    assert await found.authorize(False) == "Bearer first"
    assert await found.authorize(True) == "Bearer second"
    monkeypatch.setattr(access, "TOKEN_AGE", 0.0)
    (account / "token").write_text("third")
    assert await found.authorize(False) == "Bearer third"


def kubeconfig(path: Path, user: dict[str, Any], **cluster: Any) -> Path:
    body = {
        "current-context": "c",
        "contexts": [{"name": "c", "context": {"cluster": "k", "user": "u"}}],
        "clusters": [{"name": "k", "cluster": {"server": "http://server.example", **cluster}}],
        "users": [{"name": "u", "user": user}],
    }
    path.write_text(json.dumps(body))
    return path


async def test_a_named_file_comes_first(account: Path, tmp_path: Path) -> None:
    """A kubeconfig that is named is used in a pod, too."""
    assert from_environment(kubeconfig(tmp_path / "config", {})).url == "http://server.example"


@pytest.mark.parametrize(
    ("user", "header"),
    [
        ({"token": "t"}, "Bearer t"),
        ({"username": "u", "password": "p"}, "Basic dTpw"),
        ({}, ""),
    ],
    ids=["token", "password", "nobody"],
)
async def test_users(tmp_path: Path, user: dict[str, Any], header: str) -> None:
    """A kubeconfig's token or password becomes the header, and stays when it is refused."""
    found = from_environment(kubeconfig(tmp_path / "config", user))
    assert await found.authorize(False) == header
    assert await found.authorize(True) == header


async def test_a_token_file_beside_the_config(tmp_path: Path) -> None:
    """A token file is named relative to the kubeconfig."""
    (tmp_path / "token").write_text("t")
    assert (
        await from_environment(kubeconfig(tmp_path / "config", {"tokenFile": "token"})).authorize(False) == "Bearer t"
    )


def exec_plugin(tmp_path: Path, script: str, version: str = "v1", **more: Any) -> Access:
    """Return the access by a plugin that runs this script, where $n is how often it was run."""
    plugin, runs = tmp_path / "plugin", tmp_path / "runs"
    plugin.write_text(f"#!/bin/sh\necho x >> {runs}\nn=$(grep -c x {runs})\n{script}\n")
    plugin.chmod(0o755)
    user = {"exec": {"apiVersion": f"client.authentication.k8s.io/{version}", "command": "./plugin", **more}}
    return from_environment(kubeconfig(tmp_path / "config", user))


@pytest.mark.parametrize("version", ["v1", "v1beta1"])
async def test_an_exec_plugin(tmp_path: Path, version: str) -> None:
    """An exec plugin is run once however many ask, and again when its token is refused."""
    found = exec_plugin(tmp_path, """echo '{"status": {"token": "'t$n'"}}'""", version)
    assert set(await asyncio.gather(*(found.authorize(False) for _ in range(5)))) == {"Bearer t1"}
    assert [await found.authorize(again) for again in (False, True, False)] == ["Bearer t1", "Bearer t2", "Bearer t2"]
    assert set(await asyncio.gather(*(found.authorize(True) for _ in range(5)))) == {"Bearer t3"}


async def test_an_exec_plugin_knows_what_it_is_asked_for(tmp_path: Path) -> None:
    """It has its arguments and variables, and the version in which it is to answer."""
    script = (
        """echo "{\\"status\\": {\\"token\\": \\"$1-$REGION-$(echo $KUBERNETES_EXEC_INFO | tr -d '" {},:')\\"}}" """
    )
    found = exec_plugin(tmp_path, script, args=["get-token"], env=[{"name": "REGION", "value": "north"}])
    token = await found.authorize(False)
    assert token.startswith("Bearer get-token-north-apiVersionclient.authentication.k8s.io/v1kindExecCredential")


@pytest.mark.parametrize(("ends", "again"), [("2020-01-01T00:00:00Z", "t2"), ("2999-01-01T00:00:00Z", "t1")])
async def test_a_token_that_has_ended_is_asked_for_again(tmp_path: Path, ends: str, again: str) -> None:
    """The plugin says until when its token is good."""
    script = f"""echo '{{"status": {{"expirationTimestamp": "{ends}", "token": "'t$n'"}}}}'"""
    found = exec_plugin(tmp_path, script)
    assert [await found.authorize(False), await found.authorize(False)] == ["Bearer t1", f"Bearer {again}"]


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("exit 3", r"plugin ended with 3"),
        ("echo nothing", "is no ExecCredential"),
        ("echo '[]'", "is no ExecCredential"),
        ("""echo '{"status": {"clientCertificateData": "x"}}'""", "printed no token"),
        ("exec sleep 600", "did not end in"),
    ],
)
async def test_what_exec_plugins_do_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, said: str
) -> None:
    """Credentials that cannot be had are an error that names the plugin."""
    monkeypatch.setattr(access, "EXEC_PATIENCE", 0.5 if "sleep" in script else 20.0)
    found = exec_plugin(tmp_path, script)
    with pytest.raises(AccessError, match=f"no credentials: .*{said}"):
        await found.authorize(False)


async def test_an_exec_plugin_that_is_not_there(tmp_path: Path) -> None:
    """What the file says of how to get it is passed on."""
    user = {
        "exec": {
            "apiVersion": "client.authentication.k8s.io/v1",
            "command": "no-such-plugin",
            "installHint": "install it from example.com",
        }
    }
    found = from_environment(kubeconfig(tmp_path / "config", user))
    with pytest.raises(AccessError, match=r"no-such-plugin cannot be run: .*; install it from example.com"):
        await found.authorize(False)


def test_an_exec_plugin_of_another_time(tmp_path: Path) -> None:
    """A version that nobody knows is an error at once, which names those that are."""
    with pytest.raises(AccessError, match=r"config: user.exec.apiVersion is .*/v1alpha1'; .*/v1 and v1beta1 are known"):
        exec_plugin(tmp_path, "", "v1alpha1")


@pytest.mark.parametrize("text", ["", "[]", "{}", "current-context: none\nclusters: []\ncontexts: []\n", "a: ["])
def test_files_that_make_no_sense(tmp_path: Path, text: str) -> None:
    """A file that is no kubeconfig is an error that names it."""
    file = tmp_path / "config"
    file.write_text(text)
    with pytest.raises(AccessError, match="config"):
        from_environment(file)


def loaded(code: str) -> set[str]:
    """Run Python in a process of its own; return the roots of the modules that are loaded then."""
    code += "import sys\nprint(*{name.split('.')[0] for name in sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    found = set(done.stdout.split())
    assert "deviceplugin" in found
    return found


def test_a_pod_loads_no_kubernetes_client() -> None:
    """Reaching the cluster from a pod takes neither lightkube nor an HTTP library."""
    code = "import dra_bridge.agent, dra_bridge.access as access\naccess.from_server('https://127.0.0.1')\n"
    assert loaded(code).isdisjoint({"lightkube", "httpx2", "httpx", "anyio", "email", "http"})


def test_a_plugin_loads_no_kubernetes_client() -> None:
    """What `deviceplugin run` loads has nothing to do with an API server, nor with TLS."""
    code = (
        "import deviceplugin.cli as cli\n"
        "with cli._without_openssl():\n"
        "    import deviceplugin.config, deviceplugin.process, deviceplugin.sources\n"
    )
    assert loaded(code).isdisjoint({"lightkube", "httpx2", "httpx", "anyio", "dra_bridge", "ssl", "_ssl"})
