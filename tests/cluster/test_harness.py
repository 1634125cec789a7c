"""Tests of the harness: if one of them fails, failures of other tests in this package prove nothing."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from tests.cluster.api import ApiError
from tests.cluster.node import KUBELET_DIRECTORY, Cluster, ClusterError, ClusterTimeout, ExecError


def test_pod_runs_and_takes_commands(cluster: Cluster) -> None:
    assert cluster.node()["status"]["nodeInfo"]["kubeletVersion"] == f"v{cluster.version}"
    assert cluster.api.request("GET", "/version")["gitVersion"] == f"v{cluster.version}"
    pod = cluster.start_pod("one", command=["/bin/sh", "-c", "echo hello; exec sleep 1000"]).wait_running()
    assert pod.exec(["sh", "-c", "echo $((6 * 7))"]) == "42\n"
    assert pod.logs() == "hello\n"
    assert cluster.kubectl("exec", "one", "--", "echo", "by kubectl") == "by kubectl\n"
    with pytest.raises(ExecError) as failed:
        pod.exec(["sh", "-c", "echo no >&2; exit 3"])
    assert failed.value.code == 3
    assert failed.value.stderr == "no\n"
    assert "Started" in [event["reason"] for event in pod.events()]
    pod.delete()
    pod.wait_gone()


def test_container_ends_as_soon_as_it_is_told_to(cluster: Cluster) -> None:
    pod = cluster.start_pod("one").wait_running()
    begun = time.monotonic()
    pod.delete(grace=30)
    pod.wait_gone()
    assert time.monotonic() - begun < 15


def test_pod_that_fails_says_why(cluster: Cluster) -> None:
    pod = cluster.start_pod("one", command=["/bin/false"], restartPolicy="Never")
    assert pod.wait_phase("Failed", "Succeeded") == "Failed"
    with pytest.raises(ClusterError, match="Failed"):
        pod.wait_running()


def test_container_has_no_devices_that_it_was_not_given(cluster: Cluster) -> None:
    pod = cluster.start_pod("one").wait_running()
    pod.exec(["mknod", "/tmp/kmsg", "c", "1", "11"])
    with pytest.raises(ExecError, match="not permitted"):
        pod.exec(["head", "-c", "1", "/tmp/kmsg"])


def test_objects_are_applied_and_removed(cluster: Cluster) -> None:
    cluster.api.apply("{apiVersion: v1, kind: ConfigMap, metadata: {name: a}, data: {k: v}}\n---\n")
    cluster.api.apply({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "a"}, "data": {"k": "w"}})
    assert cluster.api.get("cm", "a")["data"] == {"k": "w"}
    cluster.api.delete("ConfigMap", "a")
    cluster.api.delete("ConfigMap", "a")
    with pytest.raises(ApiError, match="404"):
        cluster.api.get("ConfigMap", "a")


def test_devices_of_a_former_plugin_are_not_waited_for(cluster: Cluster) -> None:
    """`wait_allocatable` accepts no allocatable number of an ended plugin, which only the Node's status still has."""
    former = {name: {"example.net/former": "1"} for name in ("capacity", "allocatable")}
    cluster.api.patch("node", cluster.node_name, {"status": former}, "default", "status")
    cluster.wait_for(lambda: cluster.allocatable("example.net/former") == 1, 30.0, "the status has it")
    assert cluster.healthy("example.net/former") == 0
    with pytest.raises(ClusterTimeout):
        cluster.wait_allocatable("example.net/former", 1, timeout=1.0)
    cluster.clean()
    assert "example.net/former" not in cluster.node()["status"]["allocatable"]


def test_directories_of_pods_are_gone_when_the_node_is_clean(cluster: Cluster) -> None:
    """`clean` waits for the removal of pods' directories, because agents withhold a pod's devices until then."""
    pod = cluster.start_pod("one").wait_running()
    directory = KUBELET_DIRECTORY / "pods" / pod.uid
    assert directory.is_dir()
    cluster.clean()
    assert not directory.exists()


def test_feature_gates_are_on(cluster: Cluster) -> None:
    for name in cluster.feature_gates:
        assert cluster.metric("kubernetes_feature_enabled", name=name) == 1, name


def test_service_account_has_the_rights_of_its_role_only(cluster: Cluster) -> None:
    cluster.api.apply(
        """
        apiVersion: rbac.authorization.k8s.io/v1
        kind: Role
        metadata: {name: reader}
        rules: [{apiGroups: [""], resources: [configmaps], verbs: [get]}]
        ---
        apiVersion: rbac.authorization.k8s.io/v1
        kind: RoleBinding
        metadata: {name: reader}
        roleRef: {apiGroup: rbac.authorization.k8s.io, kind: Role, name: reader}
        subjects: [{kind: ServiceAccount, name: default, namespace: default}]
        """
    )
    api = cluster.api_with_token(cluster.service_account_token("default", bound_to=("Node", cluster.node_name)))
    cluster.wait_for(lambda: api.get("ConfigMap", "kube-root-ca.crt"), what="the role counts")
    with pytest.raises(ApiError, match="403"):
        api.get("Secret", "any")
    review = {"apiVersion": "authentication.k8s.io/v1", "kind": "SelfSubjectReview"}
    user = api.request("POST", "/apis/authentication.k8s.io/v1/selfsubjectreviews", review)["status"]["userInfo"]
    assert user["username"] == "system:serviceaccount:default:default"
    assert user["extra"]["authentication.kubernetes.io/node-name"] == [cluster.node_name]


def test_kubeconfig_of_any_user(cluster: Cluster) -> None:
    path = cluster.kubeconfig_for("some/body+x", ["testers", "more"])
    said = cluster.kubectl(f"--kubeconfig={path}", "auth", "whoami", "-ojsonpath={.status.userInfo}")
    assert '"username":"some/body+x"' in said
    assert '"testers"' in said
    assert '"more"' in said


def test_pod_reaches_the_api_server_at_the_address_of_its_service(cluster: Cluster) -> None:
    pod = cluster.start_pod("one", automountServiceAccountToken=True).wait_running()
    assert pod.exec(["sh", "-c", "echo $KUBERNETES_SERVICE_HOST:$KUBERNETES_SERVICE_PORT"]) == "10.96.0.1:443\n"
    pod.exec(["sh", "-c", "nc -w 5 $KUBERNETES_SERVICE_HOST $KUBERNETES_SERVICE_PORT < /dev/null"])
    assert pod.exec(["cat", "/var/run/secrets/kubernetes.io/serviceaccount/token"])


def test_wait_names_the_log_and_quotes_it(cluster: Cluster) -> None:
    with pytest.raises(ClusterTimeout) as raised:
        cluster.wait_for(lambda: False, 0.1, "pigs fly", log="kubelet")
    assert "pigs fly" in str(raised.value)
    assert f"{cluster.logs}/kubelet.log ends with:\n" in str(raised.value)
    assert len(str(raised.value).splitlines()) > 10


def test_component_that_ends_by_itself_is_an_error_at_once(cluster: Cluster) -> None:
    process = cluster.components["kube-scheduler"].process
    assert process is not None
    process.kill()
    process.wait()
    with pytest.raises(ClusterError, match="kube-scheduler ended by itself with -9"):
        cluster.wait_for(lambda: False, 20, "pigs fly")
    cluster.kill("kube-scheduler")


def test_cluster_with_other_options(make_cluster: Callable[..., Cluster]) -> None:
    other = make_cluster(kubelet_config={"topologyManagerPolicy": "restricted"})
    assert other.api.list("Pod") == []
    assert '"topologyManagerPolicy":"restricted"' in other.kubelet_get("/configz")[1]
    other.start_pod("one").wait_running()
    assert (other.logs / "kubelet.log").stat().st_size > 0
    again = make_cluster()
    assert '"topologyManagerPolicy":"none"' in again.kubelet_get("/configz")[1]
    again.start_pod("two").wait_running()
