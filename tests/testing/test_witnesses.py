"""The fake kubelet's files that show which pods run: cgroups, pod directories, and the claim state."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from deviceplugin.testing import ContainerSpec, FakeKubelet, FakePod, PluginCallError
from deviceplugin.testing.cgroups import CgroupLayout
from tests.testing.bare import RESOURCE, BarePlugin, Hold

Plugins = Callable[..., BarePlugin]
Kubelets = Callable[..., FakeKubelet]
ONE = {RESOURCE: 1}


def cgroup(kubelet: FakeKubelet, pod: FakePod) -> Path:
    return kubelet.cgroup_root / "kubepods" / "besteffort" / f"pod{pod.uid}"


def populated(path: Path) -> bool:
    events = dict(line.split() for line in (path / "cgroup.events").read_text().splitlines())
    assert events["frozen"] == "0"
    return events["populated"] == "1"


def containers(path: Path) -> set[str]:
    return {one.name for one in path.iterdir() if one.is_dir()}


class TestCgroups:
    def test_a_running_pod(self, fake_kubelet: FakeKubelet, plugins: Plugins) -> None:
        """A running pod's cgroup is populated, and has a child for its sandbox and one for each running container."""
        plugins(fake_kubelet, "a")
        pod = fake_kubelet.run_pod("p", ONE, init_containers=[ContainerSpec("i", ONE)])
        path = cgroup(fake_kubelet, pod)
        assert populated(path)
        assert (path / "cgroup.procs").read_text() == ""
        assert containers(path) == {pod.sandbox, pod.container().id}
        assert int((path / pod.container().id / "cgroup.procs").read_text()) > 0
        assert populated(path.parent)
        assert "memory" in (fake_kubelet.cgroup_root / "cgroup.controllers").read_text().split()

    def test_a_restarted_container(self, fake_kubelet: FakeKubelet, plugins: Plugins) -> None:
        """While a container is down, the sandbox keeps the pod's cgroup populated; a restart has a new container id."""
        plugins(fake_kubelet, "a")
        pod = fake_kubelet.run_pod("p", ONE)
        before = pod.container().id
        pod.crash_container()
        assert containers(cgroup(fake_kubelet, pod)) == {pod.sandbox}
        assert populated(cgroup(fake_kubelet, pod))
        pod.restart_container()
        assert before not in containers(cgroup(fake_kubelet, pod)) == {pod.sandbox, pod.container().id}

    def test_admission_makes_none(self, fake_kubelet: FakeKubelet, plugins: Plugins) -> None:
        """A pod in admission, or a rejected one, has neither a cgroup nor a directory."""
        plugin = plugins(fake_kubelet, "a")
        hold = Hold(plugin, "Allocate")
        pod = fake_kubelet.start_pod("p", ONE)
        assert hold.arrived.wait(10)
        fake_kubelet.reject_next_pod()
        hold.let_go.set()
        pod.wait_phase("Failed")
        assert not cgroup(fake_kubelet, pod).exists()
        assert not fake_kubelet.pod_directory(pod).exists()

    @pytest.mark.parametrize("layout", ["v1", "v1-systemd", "v2-systemd"])
    def test_layouts(self, kubelets: Kubelets, plugins: Plugins, tmp_path: Path, layout: CgroupLayout) -> None:
        """With v1 each controller has a cgroup tree, without cgroup.events; with systemd, slices have full names."""
        kubelet = kubelets(cgroup_layout=layout, cgroup_root=tmp_path / "cg")
        plugins(kubelet, "a")
        pod = kubelet.run_pod("p", ONE)
        uid = pod.uid.replace("-", "_")
        path, container = {
            "v1": (f"memory/kubepods/besteffort/pod{pod.uid}", pod.container().id),
            "v1-systemd": (
                f"memory/kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-pod{uid}.slice",
                f"cri-containerd-{pod.container().id}.scope",
            ),
            "v2-systemd": (
                f"kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-pod{uid}.slice",
                f"cri-containerd-{pod.container().id}.scope",
            ),
        }[layout]
        assert int((tmp_path / "cg" / path / container / "cgroup.procs").read_text()) > 0
        assert (tmp_path / "cg" / path / "cgroup.events").exists() is (layout == "v2-systemd")
        pod.complete()
        assert not (tmp_path / "cg" / path).exists()
        assert (tmp_path / "cg" / path).parent.is_dir()


class Unprepared(FakeKubelet):
    """A fake kubelet that records whether a pod's cgroup has processes when claims are prepared and unprepared."""

    seen: tuple[tuple[str, bool], ...] = ()

    def prepare_pod(self, pod: FakePod) -> None:
        self.seen += (("prepare", populated(cgroup(self, pod))),)
        assert not list(self.pod_logs.glob("*")), "made with the sandbox"
        if len(self.seen) == 1:
            raise PluginCallError("not yet")

    def unprepare_pod(self, pod: FakePod) -> None:
        self.seen += (("unprepare", populated(cgroup(self, pod))),)


def test_claims_are_prepared_in_an_empty_cgroup() -> None:
    """Claims are prepared before the sandbox starts and unprepared after its end, while the pod's cgroup is empty."""
    with Unprepared(start_backoff=0.01) as kubelet:
        pod = kubelet.run_pod("p")
        pod.restart_container()
        assert [path.name for path in kubelet.pod_logs.iterdir()] == [f"default_p_{pod.uid}"]
        pod.delete()
        assert kubelet.seen == (("prepare", False), ("prepare", False), ("unprepare", False))


def test_the_claim_state_is_there_from_the_first_start(fake_kubelet: FakeKubelet) -> None:
    """A kubelet that starts creates an empty claim state if there is none; with a damaged one it does not start."""
    path = fake_kubelet.root / "dra_manager_state"
    assert path.exists()
    fake_kubelet.stop()
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(ValueError, match="delimiter"):
        fake_kubelet.start()
    path.unlink()
    fake_kubelet.start()
    assert path.exists()
