"""The paths of the kubelet, the container runtime and the cgroups on the node."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from deviceplugin import cdi


@dataclass(frozen=True, slots=True)
class Paths:
    """The paths of the kubelet's files and sockets, and of the host's cgroup file system.

    The device plugin directory is /var/lib/kubelet/device-plugins with any --root-dir of the kubelet, but the path of
    the PodResources socket depends on --root-dir (kubernetes#68567; the paths of k3s, k0s and microk8s differ). So both
    paths can be set separately. pod_log_dir: the kubelet's podLogsDir, with a directory `<namespace>_<name>_<uid>` for
    each pod. container_log_dir: the directory of the links to container logs (`deviceplugin.kubelet.containers`), a
    constant in the kubelet. cdi_dir: the directory in which the container runtime finds CDI specs.
    """

    kubelet_root: Path = Path("/var/lib/kubelet")
    device_plugin_dir: Path | None = None
    pod_resources_socket: Path | None = None
    cgroup_root: Path = Path("/sys/fs/cgroup")
    pod_log_dir: Path = Path("/var/log/pods")
    container_log_dir: Path = Path("/var/log/containers")
    cdi_dir: Path = Path(cdi.DIRECTORY)

    @property
    def plugins(self) -> Path:
        """The path of the kubelet's device plugin directory."""
        return self.device_plugin_dir or self.kubelet_root / "device-plugins"

    @property
    def pod_resources(self) -> Path:
        """The path of the PodResources service's socket."""
        return self.pod_resources_socket or self.kubelet_root / "pod-resources" / "kubelet.sock"
