"""A one-node Kubernetes cluster of real programs: ``Cluster`` starts and stops the cluster, ``Pod`` is one of its pods.

A cluster only runs inside ``tests.cluster.isolate``. etcd, kube-apiserver, kube-controller-manager, kube-scheduler,
containerd and the kubelet are child processes. Each has a log file in ``Cluster.logs``, on the host, where the files
stay after the run. Authorization is ``Node,RBAC`` with the NodeRestriction admission plugin, as in kubeadm's clusters;
the kubelet has only the rights of ``system:node:node1``, and may read all claims.

Differences from an ordinary cluster:

* There is no kube-proxy and no DNS. The API server has the address of the ``kubernetes`` service itself and listens on
  port 443, so that clients in pods can use the in-cluster configuration.
* The kubelet updates its node status every second instead of every 10 s (``nodeStatusUpdateFrequency``), so that
  ``allocatable`` has a device plugin's devices sooner. It synchronises each pod every 10 to 15 s instead of every 60 to
  90 s (``syncFrequency``), for example a pod whose claims could not be prepared, or a volume of a changed ConfigMap.
* The kubelet's own port needs no authentication.
* Images cannot be pulled: pods run ``image.IMAGE``, a busybox, or images of ``Cluster.import_image``.
"""

from __future__ import annotations

import base64
import contextlib
import http.client
import itertools
import json
import os
import re
import secrets
import shutil
import signal
import ssl
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self, TypeVar

import grpc

from deviceplugin.wire import podresources_pb2, podresources_pb2_grpc
from tests.cluster import build, image, isolate
from tests.cluster.api import Api, ApiError, Object, Objects

T = TypeVar("T")

KUBELET_DIRECTORY = Path("/var/lib/kubelet")
DEVICE_PLUGINS = KUBELET_DIRECTORY / "device-plugins"
PLUGINS_REGISTRY = KUBELET_DIRECTORY / "plugins_registry"
PLUGINS = KUBELET_DIRECTORY / "plugins"
LEDGER = PLUGINS / "dra-bridge" / "register.db"
COPIES = Path("/var/run/cdi/deviceplugin/allocations")
"""The directory with the copies of agents' allocations."""
POD_RESOURCES_SOCKET = KUBELET_DIRECTORY / "pod-resources" / "kubelet.sock"

COMPONENTS = ("etcd", "containerd", "kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubelet")

# Feature gates that are on in a Cluster, each with the minor version that introduced it, from
# pkg/features/kube_features.go of 1.32.2 to 1.37.1. A server that does not know a named gate refuses to start; a server
# with a gate off drops the feature's fields without an error. On by default since: DynamicResourceAllocation 1.34,
# DRAPrioritizedList and DRAAdminAccess 1.34, DRAResourceClaimDeviceStatus 1.33, DRAConsumableCapacity,
# DRADeviceBindingConditions, DRADeviceTaints, DRAExtendedResource and DRAPartitionableDevices 1.36, DRADeviceTaintRules
# 1.37. In 1.33 and 1.34 the gate of DeviceTaintRules is DRADeviceTaints. KubeletPodResourcesDynamicResources and
# KubeletPodResourcesGet are to be removed after 1.37.
FEATURE_GATES = {
    "DynamicResourceAllocation": 26,
    "KubeletPodResourcesDynamicResources": 27,
    "KubeletPodResourcesGet": 27,
    "ResourceHealthStatus": 31,
    "DRAAdminAccess": 32,
    "DRAResourceClaimDeviceStatus": 32,
    "DRADeviceTaints": 33,
    "DRAPartitionableDevices": 33,
    "DRAPrioritizedList": 33,
    "DRAConsumableCapacity": 34,
    "DRADeviceBindingConditions": 34,
    "DRAExtendedResource": 34,
    "DRADeviceTaintRules": 35,
}
# API versions of DRA that are not served by default (v1 is, since 1.34), with the minor version that introduced each.
RUNTIME_CONFIG = {"resource.k8s.io/v1alpha3": 31, "resource.k8s.io/v1beta1": 32, "resource.k8s.io/v1beta2": 33}

_API_PORT = 443
_KUBELET_PORT = 10250
_REPOSITORY = Path(__file__).resolve().parents[2]
_counter = itertools.count(1)


class ClusterError(Exception):
    """An operation on the cluster has failed."""


class ClusterTimeout(ClusterError, TimeoutError):  # noqa: N818
    """A condition was not true in time."""


class ExecError(ClusterError):
    """A command in a container failed."""

    def __init__(self, argv: Sequence[str], code: int, stdout: str, stderr: str) -> None:
        """Store the command's exit status and output."""
        super().__init__(f"{list(argv)} ended with {code}: {stderr.strip()} {stdout.strip()}")
        self.code = code
        self.stdout = stdout
        self.stderr = stderr


KNOWN_PANIC = "devicemanager.(*podDevices).removeContainerAllocatedResources"
"""A function in the stack of a panic of kubelet 1.36, which restarts a container while it admits another pod.

Both operations call ManagerImpl.Allocate, and one removes the other's entry in devicesToReuse
(devicemanager/manager.go).
"""


class Component:
    """One program of the cluster as a child process that appends to one log file."""

    def __init__(self, name: str, argv: Sequence[str], log: Path, directory: Path, path: str = "") -> None:
        """Store the options; the process is not started. ``path`` is put in front of PATH."""
        self.name = name
        self.argv = list(argv)
        self.log = log
        self.directory = directory
        self.path = path
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def running(self) -> bool:
        """Whether the process runs."""
        return self.process is not None and self.process.poll() is None

    @property
    def pid(self) -> int:
        """The process id, in the pid namespace of the run."""
        assert self.process is not None
        return self.process.pid

    def start(self) -> None:
        """Start the process."""
        if self.running:
            raise ClusterError(f"{self.name} runs already")
        environment = {key: value for key, value in os.environ.items() if not key.startswith(("KUBE", "CONTAINERD"))}
        environment.setdefault("GOGC", "400")  # kube-apiserver needs less CPU, and some 200 MB more memory
        if self.path:
            environment["PATH"] = f"{self.path}:{environment.get('PATH', '/usr/sbin:/usr/bin:/sbin:/bin')}"
        with open(self.log, "ab") as log:
            log.write(f"--- {' '.join(self.argv)}\n".encode())
            log.flush()
            # A session of its own: Ctrl-C must end the tests, not the cluster.
            self.process = subprocess.Popen(
                self.argv,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self.directory,
                env=environment,
                start_new_session=True,
            )

    def stop(self, number: signal.Signals = signal.SIGTERM, timeout: float = 20.0) -> None:
        """End the process by a signal, and by SIGKILL if it still runs after the timeout."""
        if self.process is None:
            return
        process, self.process = self.process, None
        if process.poll() is None:
            process.send_signal(number)
            try:
                process.wait(timeout)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def tail(self, lines: int = 15) -> str:
        """Return the log's path and last lines, for error messages."""
        try:
            text = self.log.read_text(errors="replace")
        except OSError:
            text = ""
        quoted = "\n".join(f"    {line[:400]}" for line in text.splitlines()[-lines:])
        return f"{self.log} ends with:\n{quoted}"


class Cluster:
    """A one-node cluster.

    ``feature_gates`` and ``runtime_config`` add to ``FEATURE_GATES`` and ``RUNTIME_CONFIG`` or override them;
    ``kubelet_config`` is merged into the kubelet's configuration file and may be changed between two starts of the
    kubelet. In a run of ``isolate`` only one Cluster can be started at a time.
    """

    def __init__(
        self,
        version: str | None = None,
        *,
        feature_gates: Mapping[str, bool] | None = None,
        runtime_config: Mapping[str, bool] | None = None,
        kubelet_config: Mapping[str, Any] | None = None,
    ) -> None:
        """Store the options, and build missing programs of ``version``. The cluster is not started.

        Inside the isolation there is no network for a build: run ``python -m tests.cluster.build`` before.
        """
        self.binaries = build.ensure(version)
        self.version = self.binaries.version
        self.minor = self.binaries.minor
        self.imported: set[Path] = set()
        """The archives whose images were imported into containerd."""
        self.node_name = isolate.NODE_NAME
        self.node_ip = isolate.NODE_IP
        self.directory = isolate.STATE / "cluster"
        self.kubeconfig = self.directory / "admin.kubeconfig"
        self.feature_gates = {name: True for name, since in FEATURE_GATES.items() if since <= self.minor}
        self.feature_gates.update(feature_gates or {})
        self.runtime_config = {name: True for name, since in RUNTIME_CONFIG.items() if since <= self.minor}
        self.runtime_config.update(runtime_config or {})
        self.kubelet_config: dict[str, Any] = dict(kubelet_config or {})
        self.started_in = 0.0
        """The duration of start() in seconds."""
        base = Path(os.environ.get("CLUSTER_LOGS") or _REPOSITORY / ".cluster-logs")
        run = os.environ.get("DEVICEPLUGIN_CLUSTER_RUN", "").rpartition("-")[2]
        self.logs = base / f"{time.strftime('%Y%m%d-%H%M%S')}-{run}-{next(_counter)}"
        self.components: dict[str, Component] = {}
        self._api: Api | None = None
        self._tokens = {name: secrets.token_hex(16) for name in ("admin", "kubelet", "manager", "scheduler")}

    def __enter__(self) -> Self:
        """Start."""
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop."""
        self.stop()

    @property
    def api(self) -> Api:
        """The client of the API server, with all rights."""
        if self._api is None:
            raise ClusterError("the cluster is not started")
        return self._api

    # --- start and stop ---

    def start(self, timeout: float = 120.0) -> None:
        """Start all components and wait until pods can run."""
        started = time.monotonic()
        self.lay_out()
        try:
            self.components["etcd"].start()
            self.start_apiserver(timeout)
            self.components["kube-controller-manager"].start()
            self.components["kube-scheduler"].start()
            self.start_node(timeout)
            self._wait_usable(timeout)
            self._let_kubelets_read_claims()
        except BaseException:
            self.stop()
            raise
        self.started_in = time.monotonic() - started

    def lay_out(self) -> None:
        """Create the cluster's directories, certificates and configuration files, before its start."""
        if not isolate.inside():
            raise ClusterError("a Cluster runs inside `python -m tests.cluster.isolate` only")
        _wipe()
        self.logs.mkdir(parents=True, exist_ok=True)
        self.directory.mkdir(parents=True)
        self._write_files()

    def start_node(self, timeout: float) -> None:
        """Start containerd, import the busybox image, and start the kubelet; the control plane runs already."""
        self.components["containerd"].start()
        self._import_busybox(timeout)
        self.start_kubelet(timeout)

    def stop(self) -> None:
        """Kill all components and containers, and remove all their files except the logs."""
        for name in reversed(COMPONENTS):
            if name in self.components:
                self.components[name].stop(signal.SIGKILL)
        if self._api is not None:
            self._api.close()
            self._api = None
        if isolate.inside():
            with contextlib.suppress(OSError, shutil.Error):
                if any(Path("/var/log/pods").iterdir()):
                    shutil.copytree("/var/log/pods", self.logs / "pods", dirs_exist_ok=True)
            _wipe()

    def _write_files(self) -> None:
        """Write certificates and configuration files, and create the Component objects."""
        directory = self.directory
        pki = directory / "pki"
        pki.mkdir()
        # openssl would take missing settings from its own configuration, which differs between systems.
        (pki / "openssl.cnf").write_text(
            "[req]\ndistinguished_name=name\nprompt=no\n[name]\n[ca]\nbasicConstraints=critical,CA:TRUE\n"
            "keyUsage=critical,keyCertSign,cRLSign\nsubjectKeyIdentifier=hash\n"
            "[server]\nbasicConstraints=critical,CA:FALSE\nextendedKeyUsage=serverAuth\nsubjectKeyIdentifier=hash\n"
            "authorityKeyIdentifier=keyid\nsubjectAltName=DNS:localhost,DNS:kubernetes,DNS:kubernetes.default,"
            f"DNS:kubernetes.default.svc,IP:127.0.0.1,IP:{isolate.NODE_IP},IP:{isolate.SERVICE_IP}\n"
            "[client]\nbasicConstraints=critical,CA:FALSE\nextendedKeyUsage=clientAuth\nsubjectKeyIdentifier=hash\n"
            "authorityKeyIdentifier=keyid\n"
        )
        self._certificate("ca", "/CN=cluster-ca", "ca")
        self._certificate("apiserver", "/CN=kube-apiserver", "server")
        _openssl("genpkey", "-algorithm", "EC", "-pkeyopt", "ec_paramgen_curve:P-256", "-out", f"{pki}/sa.key")
        _openssl("pkey", "-in", f"{pki}/sa.key", "-pubout", "-out", f"{pki}/sa.pub")
        tokens = self._tokens
        (directory / "tokens.csv").write_text(
            f"{tokens['admin']},admin,admin,system:masters\n"
            f"{tokens['kubelet']},system:node:{self.node_name},node,system:nodes\n"
            f"{tokens['manager']},system:kube-controller-manager,manager,\n"
            f"{tokens['scheduler']},system:kube-scheduler,scheduler,\n"
        )
        self._api = Api("127.0.0.1", _API_PORT, tokens["admin"], f"{pki}/ca.crt")
        self._write_kubeconfig(self.kubeconfig, {"token": tokens["admin"]})
        for name in ("kubelet", "manager", "scheduler"):
            self._write_kubeconfig(directory / f"{name}.kubeconfig", {"token": tokens[name]})
        (directory / "cni").mkdir()
        (directory / "cni" / "10-pods.conflist").write_text(json.dumps(_CNI))
        (directory / "containerd.toml").write_text(_containerd_config(directory, self.binaries.cni))
        (directory / "volume-plugins").mkdir()

        gates = ",".join(f"{name}={str(on).lower()}" for name, on in self.feature_gates.items())
        served = ",".join(f"{name}={str(on).lower()}" for name, on in self.runtime_config.items())
        common = [f"--feature-gates={gates}"] if gates else []
        self._component(
            "etcd",
            f"--data-dir={directory}/etcd",
            "--listen-client-urls=http://127.0.0.1:2379",
            "--advertise-client-urls=http://127.0.0.1:2379",
            "--listen-peer-urls=http://127.0.0.1:2380",
            "--unsafe-no-fsync",
        )
        self._component("containerd", f"--config={directory}/containerd.toml")
        self._component(
            "kube-apiserver",
            "--etcd-servers=http://127.0.0.1:2379",
            "--bind-address=0.0.0.0",
            f"--secure-port={_API_PORT}",
            f"--advertise-address={isolate.NODE_IP}",
            f"--service-cluster-ip-range={isolate.SERVICE_IP}/16",
            f"--tls-cert-file={pki}/apiserver.crt",
            f"--tls-private-key-file={pki}/apiserver.key",
            f"--client-ca-file={pki}/ca.crt",
            f"--token-auth-file={directory}/tokens.csv",
            f"--service-account-key-file={pki}/sa.pub",
            f"--service-account-signing-key-file={pki}/sa.key",
            "--service-account-issuer=https://kubernetes.default.svc.cluster.local",
            "--authorization-mode=Node,RBAC",
            "--enable-admission-plugins=NodeRestriction",
            "--allow-privileged",
            # without this option, `kubectl logs` and `exec` resolve the Node's name, and there is no DNS
            "--kubelet-preferred-address-types=InternalIP",
            *([f"--runtime-config={served}"] if served else []),
            *common,
        )
        self._component(
            "kube-controller-manager",
            f"--kubeconfig={directory}/manager.kubeconfig",
            f"--service-account-private-key-file={pki}/sa.key",
            f"--root-ca-file={pki}/ca.crt",
            "--use-service-account-credentials",
            "--leader-elect=false",
            # with the default, 20 requests a second, the controller manager's start takes 4 s
            "--kube-api-qps=300",
            "--kube-api-burst=600",
            "--secure-port=0",
            *common,
        )
        self._component(
            "kube-scheduler",
            f"--kubeconfig={directory}/scheduler.kubeconfig",
            "--leader-elect=false",
            "--secure-port=0",
            *common,
        )
        self._component(
            "kubelet",
            f"--config={directory}/kubelet.json",
            f"--kubeconfig={directory}/kubelet.kubeconfig",
            f"--cert-dir={pki}/kubelet",
            f"--hostname-override={self.node_name}",
            f"--node-ip={self.node_ip}",
            "-v=4",
        )

    def _component(self, name: str, *arguments: str) -> None:
        argv = [self.binaries.path(name), *arguments]
        path = str(self.binaries.containerd) if name == "containerd" else ""  # containerd finds its shim by PATH
        self.components[name] = Component(name, argv, self.logs / f"{name}.log", self.directory, path)

    def _certificate(self, name: str, subject: str, kind: str) -> None:
        """Write ``<name>.key`` and ``<name>.crt``, signed by the cluster's authority, or by itself if kind is "ca"."""
        pki = self.directory / "pki"
        authority = [] if kind == "ca" else ["-CA", f"{pki}/ca.crt", "-CAkey", f"{pki}/ca.key"]
        curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "30"]
        files = ["-keyout", f"{pki}/{name}.key", "-out", f"{pki}/{name}.crt"]
        settings = ["-config", f"{pki}/openssl.cnf", "-extensions", kind, "-subj", subject]
        _openssl("req", "-x509", *authority, *curve, *settings, *files)

    def _write_kubeconfig(self, path: Path, user: Mapping[str, str]) -> None:
        ca = base64.b64encode((self.directory / "pki" / "ca.crt").read_bytes()).decode()
        server = {"server": f"https://127.0.0.1:{_API_PORT}", "certificate-authority-data": ca}
        path.write_text(
            json.dumps(
                {
                    "apiVersion": "v1",
                    "kind": "Config",
                    "clusters": [{"name": "cluster", "cluster": server}],
                    "users": [{"name": "user", "user": dict(user)}],
                    "contexts": [{"name": "cluster", "context": {"cluster": "cluster", "user": "user"}}],
                    "current-context": "cluster",
                }
            )
        )
        path.chmod(0o600)

    def kubelet_configuration(self) -> dict[str, Any]:
        """Return the kubelet's configuration, without a test's ``kubelet_config``."""
        return {
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "authentication": {"anonymous": {"enabled": True}, "webhook": {"enabled": False}},
            "authorization": {"mode": "AlwaysAllow"},
            "containerRuntimeEndpoint": f"unix://{self.directory}/containerd.sock",
            "cgroupDriver": "cgroupfs",
            "cgroupRoot": isolate.cgroup(),
            "failCgroupV1": False,
            "failSwapOn": False,
            "enforceNodeAllocatable": [],
            "localStorageCapacityIsolation": False,
            # the kubelet refuses 0; these thresholds are practically never reached
            "evictionHard": {"memory.available": "1Mi", "nodefs.available": "0.1%", "imagefs.available": "0.1%"},
            "featureGates": self.feature_gates,
            "nodeStatusUpdateFrequency": "1s",
            "port": _KUBELET_PORT,
            "syncFrequency": "10s",
            "volumePluginDir": f"{self.directory}/volume-plugins",
        }

    def _write_kubelet_config(self) -> None:
        config = {**self.kubelet_configuration(), **self.kubelet_config}
        (self.directory / "kubelet.json").write_text(json.dumps(config))

    def _import_busybox(self, timeout: float) -> None:
        busybox = build.find_busybox()
        assert busybox is not None
        archive = self.directory / "image.tar"
        image.write_busybox(busybox, archive)
        self.import_image(archive, timeout)

    def import_image(self, archive: Path, timeout: float = 60.0) -> None:
        """Import the images of an archive of ``tests.cluster.image`` into containerd, so that pods can run them."""

        def imported() -> bool:
            done = self._ctr("images", "import", str(archive))
            if done.returncode != 0:
                raise ClusterError(f"ctr images import: {done.stderr.strip()}")
            return True

        self.wait_for(imported, timeout, "containerd takes an image", log="containerd")

    def tag_image(self, name: str, other: str) -> None:
        """Give an image in containerd an additional name."""
        done = self._ctr("images", "tag", "--force", name, other)
        if done.returncode != 0:
            raise ClusterError(f"ctr images tag: {done.stderr.strip()}")

    def _ctr(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        address = f"{self.directory}/containerd.sock"
        argv = [self.binaries.path("ctr"), "--address", address, "--namespace", "k8s.io", *arguments]
        return subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True)

    def _wait_usable(self, timeout: float) -> None:
        def usable() -> bool:
            self.api.get("ServiceAccount", "default")
            self.api.get("ConfigMap", "kube-root-ca.crt")
            return self.ready() and not self.node()["spec"].get("taints")

        self.wait_for(usable, timeout, "the node is Ready and there is a default ServiceAccount", log="kubelet")

    def _let_kubelets_read_claims(self) -> None:
        """Give all kubelets the right to read all claims.

        The node authorizer learns from a watch which claims belong to a node's pods. On a busy machine this watch is
        sometimes behind the kubelet's own watch: the authorizer refuses the kubelet's GET ("no relationship found
        between node and this object"), and the kubelet tries the pod again 90 s later. Tests would only lose minutes.
        """
        rule = {"apiGroups": ["resource.k8s.io"], "resources": ["resourceclaims"], "verbs": ["get"]}
        metadata = {"name": "kubelets-read-claims"}
        rbac = "rbac.authorization.k8s.io"
        self.api.apply(
            [
                {"apiVersion": f"{rbac}/v1", "kind": "ClusterRole", "metadata": metadata, "rules": [rule]},
                {
                    "apiVersion": f"{rbac}/v1",
                    "kind": "ClusterRoleBinding",
                    "metadata": metadata,
                    "roleRef": {"apiGroup": rbac, "kind": "ClusterRole", "name": metadata["name"]},
                    "subjects": [{"apiGroup": rbac, "kind": "Group", "name": "system:nodes"}],
                },
            ]
        )

    # --- components ---

    def start_apiserver(self, timeout: float = 60.0) -> None:
        """Start the kube-apiserver and wait until it is ready."""
        self.components["kube-apiserver"].start()
        self.wait_for(lambda: self.api.raw("GET", "/readyz")[0] == 200, timeout, "ready", log="kube-apiserver")

    def stop_apiserver(self) -> None:
        """Kill the kube-apiserver, as in a crash."""
        self.components["kube-apiserver"].stop(signal.SIGKILL)

    def start_kubelet(self, timeout: float = 60.0) -> None:
        """Start the kubelet, and wait until it answers and has its socket for device plugins."""
        with contextlib.suppress(FileNotFoundError):  # the kubelet would remove the old socket only later
            (DEVICE_PLUGINS / "kubelet.sock").unlink()
        self._write_kubelet_config()
        self.components["kubelet"].start()

        def answers() -> bool:
            return self.kubelet_get("/healthz")[0] == 200 and (DEVICE_PLUGINS / "kubelet.sock").is_socket()

        self.wait_for(answers, timeout, "the kubelet answers", log="kubelet")

    def stop_kubelet(self) -> None:
        """End the kubelet by SIGTERM; the containers run on."""
        self.components["kubelet"].stop()

    def restart_kubelet(self, downtime: float = 0.0, *, reported: bool = False) -> None:
        """Stop the kubelet, and start it again after ``downtime`` seconds.

        Until the new kubelet writes the Node's status, the status is the former kubelet's; ``reported`` waits for the
        new status.
        """
        self.stop_kubelet()
        time.sleep(downtime)
        before = self._heartbeat() if reported else ""
        if reported:  # heartbeats have whole seconds: in the same second both kubelets' heartbeats would be equal
            self.wait_for(lambda: time.strftime("%FT%TZ", time.gmtime()) > before, 5.0, "the next second")
        self.start_kubelet()
        # Kubelet 1.32 writes no status after its start until a part of the status changes.
        if reported and self.minor >= 33:
            self.wait_for(lambda: self._heartbeat() != before, 30.0, "the kubelet writes the node's status")

    def wait_reported(self) -> None:
        """Wait for two reports of the kubelet: the first may have been prepared before this call."""
        for _ in range(2):
            before = self._heartbeat()
            self.wait_for(lambda before=before: self._heartbeat() != before, 30.0, "the kubelet reports")  # type: ignore[misc]

    def _heartbeat(self) -> str:
        (ready,) = [one for one in self.node()["status"]["conditions"] if one["type"] == "Ready"]
        return str(ready["lastHeartbeatTime"])

    def kill(self, component: str) -> None:
        """End a component (one of COMPONENTS) by SIGKILL."""
        self.components[component].stop(signal.SIGKILL)

    def start_component(self, component: str) -> None:
        """Start a killed component again; for kubelet and kube-apiserver, also wait until the component is ready."""
        if component == "kubelet":
            self.start_kubelet()
        elif component == "kube-apiserver":
            self.start_apiserver()
        else:
            self.components[component].start()

    def switch(self, component: str, version: str) -> None:
        """Restart a component in another version; ``version`` and ``minor`` are always those of kube-apiserver."""
        binaries = build.ensure(version)
        self.components[component].stop()
        self.components[component].argv[0] = binaries.path(component)
        if component == "kube-apiserver":
            self.binaries, self.version, self.minor = binaries, binaries.version, binaries.minor
        self.start_component(component)

    # --- waiting ---

    def wait_for(
        self, predicate: Callable[[], T], timeout: float = 30.0, what: str = "", *, log: str | None = None
    ) -> T:
        """Call the predicate until its value is true, and return this value. The interval grows from 50 ms to 200 ms.

        ApiError, OSError, ClusterError and KeyError (a missing field) count as false. Raises ClusterTimeout after
        ``timeout`` seconds, with the last such error and the end of the log of the component ``log``. Raises
        ClusterError at once if a component has ended without being stopped by a test.
        """
        began = time.monotonic()
        deadline = began + timeout
        while True:
            last: object = None
            try:
                value = predicate()
                if value:
                    return value
                last = value
            except (ApiError, OSError, ClusterError, KeyError) as error:
                if isinstance(error, PodFailed):
                    raise
                last = repr(error)
            for component in self.components.values():
                if component.process is not None and not component.running:
                    code = component.process.returncode
                    if component.name == "kubelet" and KNOWN_PANIC in component.tail(40):
                        print("the kubelet panicked (kubernetes#136021) and is started again, as systemd does")
                        component.start()
                        continue
                    raise ClusterError(
                        f"{component.name} ended by itself with {code}, waiting for: {what}\n{component.tail()}"
                    )
            if time.monotonic() > deadline:
                where = self.components[log].tail() if log else f"logs: {self.logs}"
                raise ClusterTimeout(f"not within {timeout:g} s: {what or predicate}; last: {last}\n{where}")
            time.sleep(min(0.2, max(0.05, (time.monotonic() - began) / 20)))

    # --- objects, beside those of `api` ---

    def allow_admin_access(self) -> None:
        """Allow claims with administrative access in the namespace `default`."""
        label = "resource.kubernetes.io/admin-access" if self.minor >= 34 else "resource.k8s.io/admin-access"
        metadata = {"name": "default", "labels": {label: "true"}}
        self.api.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": metadata})

    def events(self, name: str, namespace: str = "default") -> Objects:
        """Return the Events about all objects with this name, in no particular order."""
        return self.api.list("Event", namespace, "v1", field_selector=f"involvedObject.name={name}")

    def kubectl(self, *arguments: str, check: bool = True) -> str:
        """Run kubectl with all rights and return its output."""
        done = subprocess.run(
            [self.binaries.path("kubectl"), f"--kubeconfig={self.kubeconfig}", *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            env={**os.environ, "HOME": str(self.directory)},  # kubectl keeps its discovery cache in HOME
        )
        if check and done.returncode != 0:
            raise ClusterError(f"kubectl {' '.join(arguments)} ended with {done.returncode}: {done.stderr.strip()}")
        return done.stdout

    # --- the node ---

    def node(self) -> Object:
        """Return the Node object."""
        return self.api.get("Node", self.node_name)

    def ready(self) -> bool:
        """Return whether the Node is Ready."""
        conditions = self.node()["status"].get("conditions", [])
        return any(condition["type"] == "Ready" and condition["status"] == "True" for condition in conditions)

    def allocatable(self, resource: str) -> int:
        """Return the Node's allocatable number of an extended resource; 0 if the Node does not name the resource."""
        return int(self.node()["status"].get("allocatable", {}).get(resource, 0))

    def capacity(self, resource: str) -> int:
        """Return the Node's capacity of an extended resource; 0 if the Node does not name the resource."""
        return int(self.node()["status"].get("capacity", {}).get(resource, 0))

    def healthy(self, resource: str) -> int | None:
        """Return the number of a resource's healthy devices in the kubelet's list; None if the kubelet does not answer.

        The Node's status has a former plugin's devices until the kubelet writes the next status.
        """
        with grpc.insecure_channel(
            f"unix:{POD_RESOURCES_SOCKET}", (("grpc.default_authority", "localhost"),)
        ) as channel:
            stub = podresources_pb2_grpc.PodResourcesListerStub(channel)
            try:
                answer = stub.GetAllocatableResources(podresources_pb2.AllocatableResourcesRequest(), timeout=5)
            except grpc.RpcError:
                return None
        return len({name for one in answer.devices if one.resource_name == resource for name in one.device_ids})

    def wait_allocatable(self, resource: str, count: int, timeout: float = 30.0) -> None:
        """Wait until the kubelet's list of healthy devices and the Node's allocatable both have exactly this count."""
        self.wait_for(
            lambda: self.healthy(resource) == count == self.allocatable(resource),
            timeout,
            f"{resource} allocatable is {count}",
            log="kubelet",
        )

    def kubelet_get(self, path: str) -> tuple[int, str]:
        """Return status and body of a GET of a path on the kubelet's own port."""
        tls = ssl.create_default_context()
        tls.check_hostname = False
        tls.verify_mode = ssl.CERT_NONE  # the kubelet signed its certificate itself
        connection = http.client.HTTPSConnection(self.node_ip, _KUBELET_PORT, timeout=10, context=tls)
        try:
            connection.request("GET", path)
            response = connection.getresponse()
            return response.status, response.read().decode(errors="replace")
        except http.client.HTTPException as error:
            raise ConnectionError(f"kubelet {path}: {error!r}") from error
        finally:
            connection.close()

    def metrics(self, path: str = "/metrics") -> str:
        """Return the kubelet's metrics as text, by default those at ``/metrics``."""
        code, text = self.kubelet_get(path)
        if code != 200:
            raise ClusterError(f"kubelet {path}: {code} {text[:400]}")
        return text

    def metric(self, name: str, /, **labels: str) -> float:
        """Return the sum of all series of a kubelet's metric that have these labels; 0 without a series."""
        total = 0.0
        for line in self.metrics().splitlines():
            match = re.fullmatch(rf"{re.escape(name)}(?:\{{(.*)\}})? (\S+)(?: \d+)?", line)
            if match:
                has = dict(re.findall(r'(\w+)="((?:[^"\\]|\\.)*)"', match.group(1) or ""))
                if all(has.get(key) == value for key, value in labels.items()):
                    total += float(match.group(2))
        return total

    # --- identities ---

    def kubeconfig_for(self, user: str, groups: Sequence[str] = ()) -> Path:
        """Write a kubeconfig for a user name and groups, with a client certificate of the cluster's authority."""
        parts = [*(("O", group) for group in groups), ("CN", user)]
        subject = "".join(f"/{key}=" + re.sub(r"([\\/+])", r"\\\1", value) for key, value in parts)
        name = f"user-{re.sub(r'[^A-Za-z0-9.-]', '-', user)}-{secrets.token_hex(4)}"
        self._certificate(name, subject, "client")
        data = {
            f"client-{kind}-data": base64.b64encode((self.directory / "pki" / f"{name}.{end}").read_bytes()).decode()
            for kind, end in (("certificate", "crt"), ("key", "key"))
        }
        path = self.directory / f"{name}.kubeconfig"
        self._write_kubeconfig(path, data)
        return path

    def service_account_token(
        self,
        name: str,
        namespace: str = "default",
        bound_to: tuple[str, str] | None = None,
        seconds: int = 3600,
    ) -> str:
        """Return a token of a ServiceAccount.

        ``bound_to`` is ("Pod", name) or ("Node", name). The tokens that a kubelet puts into pods are bound to the pod
        and so contain the node's name, which admission policies check (``authentication.kubernetes.io/node-name``);
        binding to the node is on by default since 1.32.
        """
        spec: Object = {"expirationSeconds": seconds}
        if bound_to is not None:
            kind, target = bound_to
            uid = self.api.get(kind, target, namespace, "v1")["metadata"]["uid"]
            spec["boundObjectRef"] = {"apiVersion": "v1", "kind": kind, "name": target, "uid": uid}
        path = self.api.resource("ServiceAccount", "v1").path(name, namespace) + "/token"
        body = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": spec}
        return str(self.api.request("POST", path, body)["status"]["token"])

    def service_account_kubeconfig(
        self, name: str, namespace: str = "default", bound_to: tuple[str, str] | None = None
    ) -> Path:
        """Write a kubeconfig with a token of a ServiceAccount (see ``service_account_token``)."""
        path = self.directory / f"serviceaccount-{namespace}-{name}-{secrets.token_hex(4)}.kubeconfig"
        self._write_kubeconfig(path, {"token": self.service_account_token(name, namespace, bound_to)})
        return path

    def api_with_token(self, token: str) -> Api:
        """Return a client of the API server with another token."""
        return Api("127.0.0.1", _API_PORT, token, str(self.directory / "pki" / "ca.crt"))

    # --- pods ---

    def start_pod(
        self,
        name: str,
        limits: Mapping[str, object] | None = None,
        *,
        command: Sequence[str] | None = None,
        claims: Mapping[str, str | Mapping[str, str]] | None = None,
        namespace: str = "default",
        labels: Mapping[str, str] | None = None,
        annotations: Mapping[str, str] | None = None,
        container: Mapping[str, Any] | None = None,
        **spec: Any,
    ) -> Pod:
        """Create a pod with one container, ``main``, and return it without waiting.

        ``claims`` maps names of the pod's resource claims to ``{"resourceClaimName": ...}`` or
        ``{"resourceClaimTemplateName": ...}``; a plain string is the name of a ResourceClaim. The container gets all
        claims. ``container`` is merged into the container and ``spec`` into the pod's spec. Without a command the
        container waits, and ends at once on SIGTERM.
        """
        entries = {
            key: {"resourceClaimName": value} if isinstance(value, str) else dict(value)
            for key, value in (claims or {}).items()
        }
        resources: Object = {}
        if limits:
            resources["limits"] = {key: str(value) for key, value in limits.items()}
        if entries:
            resources["claims"] = [{"name": key} for key in entries]
        # Without a handler, the kernel does not deliver SIGTERM to a shell that is process 1.
        waiting = ["/bin/sh", "-c", "trap 'exit 0' TERM; sleep 2147483647 & wait"]
        main: Object = {
            "name": "main",
            "image": image.IMAGE,
            "imagePullPolicy": "Never",
            "command": list(command) if command is not None else waiting,
            "resources": resources,
            **(container or {}),
        }
        body: Object = {
            "containers": [main],
            "restartPolicy": "Always",
            "terminationGracePeriodSeconds": 2,
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            **spec,
        }
        if entries:
            body["resourceClaims"] = [{"name": key, **value} for key, value in entries.items()]
        metadata: Object = {"name": name, "labels": dict(labels or {}), "annotations": dict(annotations or {})}
        return self.create_pod({"metadata": metadata, "spec": body}, namespace)

    def create_pod(self, manifest: Mapping[str, Any], namespace: str = "default") -> Pod:
        """Create a pod from a complete manifest."""
        created = self.api.create({"apiVersion": "v1", "kind": "Pod", **manifest}, namespace)
        return Pod(self, created)

    def pod(self, name: str, namespace: str = "default") -> Pod:
        """Return an existing pod, such as a Deployment's pod."""
        return Pod(self, self.api.get("Pod", name, namespace))

    def pods(self, namespace: str | None = None, label_selector: str = "") -> Pods:
        """Return all pods, of one namespace or of all namespaces."""
        return [Pod(self, found) for found in self.api.list("Pod", namespace, "v1", label_selector)]

    def clean(self, timeout: float = 60.0) -> None:
        """Delete all workloads, pods, claims, device classes, slices and taint rules, and wait until they are gone.

        Also wait until the kubelet has removed the pods' directories: while a directory exists, agents withhold the
        pod's devices. Remove the tests' extended resources from the Node's status, because a kubelet that has lost its
        checkpoint keeps unknown resources there, with all their capacity allocatable (kubelet 1.36,
        nodestatus/setters.go, MachineInfo).
        """

        def forget() -> object:
            former = {name: None for name in self.node()["status"].get("capacity", {}) if name.startswith("example.")}
            status = {"status": {"capacity": former, "allocatable": former}}
            return self.api.patch("Node", self.node_name, status, subresource="status")

        self.wait_for(forget, timeout, "the Node has no extended resources")
        for lease in self.api.list("Lease"):  # agents' Leases; the cluster's own are in namespaces kube-*
            if not lease["metadata"]["namespace"].startswith("kube-"):
                self.api.delete("Lease", lease["metadata"]["name"], lease["metadata"]["namespace"])

        def rest() -> Sequence[str]:
            left = self._delete([*_WORKLOADS, *_OF_DEVICES])
            pods = {pod.uid for pod in self.pods()} if not left else set()
            directory = KUBELET_DIRECTORY / "pods"
            if not left and directory.exists():
                left += [f"directory of pod {one.name}" for one in directory.iterdir() if one.name not in pods]
            return left

        self.wait_for(lambda: not (left := rest()) or _not_yet(left), timeout, "all is removed", log="kubelet")
        for copy in COPIES.glob("*_*.json"):  # copies of agents without a name; an agent's name has no underscore
            copy.unlink()

    def end_pods(self, namespace: str, timeout: float = 60.0) -> None:
        """Delete all workloads and pods of a namespace, and wait until they are gone. Call this before the agent ends.

        Workloads that stay would replace the deleted pods. If the agent has ended by then, the kubelet cannot unprepare
        the claims of the new pods, and keeps the pods' directories.
        """

        def rest() -> Sequence[str]:
            return self._delete(_WORKLOADS, namespace)

        self.wait_for(lambda: not (left := rest()) or _not_yet(left), timeout, "no pod is left", log="kubelet")

    def _delete(self, kinds: Sequence[str], namespace: str | None = None) -> list[str]:
        """Delete all objects of these kinds; return the kinds and names of the objects that still existed."""
        left = []
        for kind in kinds:
            try:
                found = self.api.list(kind, namespace)
            except ApiError as error:
                if error.code == 404:
                    continue  # this version does not serve the kind
                raise
            for entry in found:
                metadata = entry["metadata"]
                left.append(f"{kind} {metadata['name']}")
                if "deletionTimestamp" not in metadata:
                    grace = 1 if kind == "Pod" else None
                    self.api.delete(kind, metadata["name"], metadata.get("namespace", "default"), grace=grace)
        return left


def remove_ledger(agent: str = LEDGER.parent.name) -> None:
    """Remove the directory of an ended agent, and the copy of its allocations."""
    shutil.rmtree(LEDGER.parent.with_name(agent), ignore_errors=True)
    (COPIES / f"{agent}.json").unlink(missing_ok=True)


Pods = list["Pod"]


class PodFailed(ClusterError):  # noqa: N818
    """A pod has ended although it should run."""


class Pod:
    """One pod, identified by its UID: a later pod of the same name is another pod."""

    def __init__(self, cluster: Cluster, created: Object) -> None:
        """Store name, namespace and UID of the created pod."""
        self.cluster = cluster
        self.name: str = created["metadata"]["name"]
        self.namespace: str = created["metadata"]["namespace"]
        self.uid: str = created["metadata"]["uid"]
        self._container_ids: dict[str | None, str] = {}

    def __repr__(self) -> str:
        """Return the class with the pod's namespace and name."""
        return f"Pod({self.namespace}/{self.name})"

    @property
    def object(self) -> Object:
        """The current Pod object. Raises ApiError with code 404 if the pod is gone."""
        found = self.cluster.api.get("Pod", self.name, self.namespace, "v1")
        if found["metadata"]["uid"] != self.uid:
            raise ApiError(404, "NotFound", f"{self} is gone, there is another of its name")
        return found

    @property
    def status(self) -> Object:
        """The pod's current status."""
        status: Object = self.object["status"]
        return status

    @property
    def phase(self) -> str:
        """Pending, Running, Succeeded or Failed."""
        return str(self.status["phase"])

    def _container_status(self, container: str | None) -> Object:
        status = self.status
        found = [*status.get("containerStatuses", []), *status.get("initContainerStatuses", [])]
        for entry in found:
            if container in (None, entry["name"]):
                return dict(entry)
        raise ClusterError(f"{self} has no container {container or ''} yet".replace("  ", " "))

    def restarts(self, container: str | None = None) -> int:
        """Return the number of restarts of a container."""
        return int(self._container_status(container)["restartCount"])

    def restart_container(self) -> None:
        """End the main process of the pod's only container, and wait until the container is ready again."""
        before = self.restarts()
        with contextlib.suppress(ExecError):  # The command may end with the container.
            self.exec(["kill", "1"])

        def restarted() -> bool:
            status = self.status["containerStatuses"][0]
            return bool(status["restartCount"] > before and status["ready"])

        self.cluster.wait_for(restarted, 60.0, f"{self} restarts its container")

    def container_id(self, container: str | None = None) -> str:
        """Return containerd's id of a container; while the API server is away, the last known id."""
        try:
            entry = self._container_status(container)
        except OSError:
            if container not in self._container_ids:
                raise
        else:
            self._container_ids[container] = str(entry["containerID"]).removeprefix("containerd://")
        return self._container_ids[container]

    def explain(self) -> str:
        """Return the pod's status and Events, for error messages."""
        try:
            status = self.status
            events = [f"    {event.get('reason')}: {event.get('message')}" for event in self.events()]
        except (ApiError, OSError) as error:
            return f"{self}: {error}"
        keys = ("phase", "reason", "message", "conditions", "initContainerStatuses", "containerStatuses")
        brief = {key: status[key] for key in keys if key in status}
        return "\n".join([f"{self}: {json.dumps(brief)}", "events:", *events])

    def _wait(self, predicate: Callable[[], T], timeout: float, what: str) -> T:
        try:
            return self.cluster.wait_for(predicate, timeout, f"{self} {what}", log="kubelet")
        except (ClusterTimeout, PodFailed) as error:
            raise type(error)(f"{error}\n{self.explain()}") from None

    def wait_running(self, timeout: float = 120.0) -> Pod:
        """Wait until all containers of the pod run. Raises PodFailed at once if the pod has ended."""

        def running() -> bool:
            status = self.status
            if status["phase"] in ("Failed", "Succeeded"):
                raise PodFailed(f"{self} {status['phase']}: {status.get('reason')} {status.get('message')}")
            containers = status.get("containerStatuses", [])
            return status["phase"] == "Running" and all("running" in entry["state"] for entry in containers)

        self._wait(running, timeout, "runs")
        self.container_id()  # the pod keeps this id, so that `exec` works without an API server
        return self

    def wait_phase(self, *phases: str, timeout: float = 30.0) -> str:
        """Wait until the pod's phase is one of these phases, and return the phase."""
        return self._wait(lambda: (phase := self.phase) in phases and phase, timeout, f"is {phases}") or ""

    def unschedulable(self) -> str:
        """Return the scheduler's reason why the pod fits on no node; "" if the pod is not marked unschedulable."""
        for condition in self.status.get("conditions", []):
            if condition["type"] == "PodScheduled" and condition.get("reason") == "Unschedulable":
                return str(condition.get("message") or "no reason")
        return ""

    def wait_unschedulable(self, timeout: float = 30.0) -> str:
        """Wait until the scheduler marks the pod as unschedulable, and return the scheduler's reason."""
        return self._wait(self.unschedulable, timeout, "is unschedulable")

    def gone(self) -> bool:
        """Return whether the Pod object is gone from the API server."""
        try:
            return not self.object
        except ApiError as error:
            if error.code == 404:
                return True
            raise

    def wait_gone(self, timeout: float = 30.0) -> None:
        """Wait until the Pod object is gone; if its deletion had a grace above 0, its containers have ended by then."""
        self._wait(self.gone, timeout, "is gone")

    def delete(self, grace: int = 1) -> None:
        """Delete the pod without waiting.

        The containers get SIGTERM, and SIGKILL after ``grace`` seconds. With 0 the API server removes the Pod object at
        once, while the containers run on and hold their devices for a while.
        """
        self.cluster.api.delete("Pod", self.name, self.namespace, "v1", grace)

    def exec(self, argv: Sequence[str], container: str | None = None, timeout: float = 30.0) -> str:
        """Run a command in a running container and return the command's output. Raises ExecError if the command fails.

        runc runs the command in the container's namespaces and cgroups, with its environment. This takes 20 ms, kubectl
        takes 110 ms; and it works while kubelet, containerd or API server are stopped.
        """
        command = ["runc", "--root", "/run/containerd/runc/k8s.io", "exec", self.container_id(container), *argv]
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout)
        if done.returncode != 0:
            raise ExecError(argv, done.returncode, done.stdout, done.stderr)
        return done.stdout

    def logs(self, container: str | None = None) -> str:
        """Return a container's log."""
        path = self.cluster.api.resource("Pod", "v1").path(self.name, self.namespace) + "/log"
        code, text = self.cluster.api.raw("GET", path + (f"?container={container}" if container else ""))
        if code != 200:
            raise ClusterError(f"logs of {self}: {code} {text.decode(errors='replace')}")
        return text.decode(errors="replace")

    def events(self) -> Objects:
        """Return the Events about the pod, the oldest first."""
        events = self.cluster.events(self.name, self.namespace)
        mine = [event for event in events if event["involvedObject"].get("uid") in (self.uid, None)]
        return sorted(mine, key=lambda event: str(event["metadata"]["creationTimestamp"]))


# --- the programs' configuration -------------------------------------------------------------------------------------

_CNI: Object = {
    "cniVersion": "1.0.0",
    "name": "pods",
    "plugins": [
        {
            "type": "ptp",
            "ipMasq": False,
            "ipam": {"type": "host-local", "subnet": "10.88.0.0/16", "routes": [{"dst": "0.0.0.0/0"}]},
        }
    ],
}


def _containerd_config(directory: Path, cni: Path) -> str:
    # restrict_oom_score_adj: without it runc dies if root lacks CAP_SYS_RESOURCE ("can't get final child's PID").
    # native: an overlay file system does not work on every file system of development machines.
    return f"""
version = 3
root = "{directory}/containerd"
state = "{directory}/containerd-state"
[grpc]
address = "{directory}/containerd.sock"
[plugins."io.containerd.internal.v1.opt"]
path = "{directory}/containerd-opt"
[plugins."io.containerd.nri.v1.nri"]
disable = true
[plugins."io.containerd.cri.v1.images"]
snapshotter = "native"
[plugins."io.containerd.cri.v1.images".pinned_images]
sandbox = "{image.IMAGE}"
[plugins."io.containerd.cri.v1.runtime"]
enable_cdi = true
cdi_spec_dirs = ["/etc/cdi", "/var/run/cdi"]
restrict_oom_score_adj = true
[plugins."io.containerd.cri.v1.runtime".containerd]
default_runtime_name = "runc"
[plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc]
runtime_type = "io.containerd.runc.v2"
[plugins."io.containerd.cri.v1.runtime".cni]
bin_dirs = ["{cni}"]
conf_dir = "{directory}/cni"
"""


def _openssl(*arguments: str) -> None:
    done = subprocess.run(["openssl", *arguments], stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode != 0:
        raise ClusterError(f"openssl {' '.join(arguments)}: {done.stderr.strip()}")


_WORKLOADS: Final = ("DaemonSet", "Deployment", "ReplicaSet", "StatefulSet", "Job", "Pod")
_OF_DEVICES: Final = ("ResourceClaimTemplate", "ResourceClaim", "DeviceClass", "DeviceTaintRule", "ResourceSlice")


def _not_yet(left: Sequence[str]) -> bool:
    raise ClusterError(f"still there: {', '.join(left)}")


def _wipe() -> None:
    """Remove a former cluster's containers, shims, mounts, files and cgroups in this run of isolate."""
    name = isolate.cgroup().lstrip("/")
    deadline = time.monotonic() + 20
    while True:
        isolate.kill_cgroup(name)
        shims = []
        for link in Path("/proc").glob("[0-9]*/exe"):
            with contextlib.suppress(OSError):
                if os.readlink(link).removesuffix(" (deleted)").endswith("/containerd-shim-runc-v2"):
                    shims.append(int(link.parent.name))
        for pid in shims:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        below = [path for path in isolate.cgroup_directories(name) if path.name != name]
        for path in below:
            with contextlib.suppress(OSError):
                path.rmdir()
        if not shims and not below:
            break
        if time.monotonic() > deadline:
            raise ClusterError(f"cannot remove what a cluster left: processes {shims}, cgroups {below}")
        time.sleep(0.02)
    keep = {str(path) for path in isolate.HIDDEN}
    for line in reversed(Path("/proc/self/mountinfo").read_text().splitlines()):
        point = line.split()[4]
        if point not in keep and any(point.startswith(f"{path}/") for path in keep):
            subprocess.run(["umount", "--lazy", point], capture_output=True)
    for directory in isolate.HIDDEN:
        if directory == isolate.DEVICES:
            continue
        for entry in directory.iterdir():
            if entry == isolate.STATE / "etc":
                continue
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            else:
                entry.unlink()
