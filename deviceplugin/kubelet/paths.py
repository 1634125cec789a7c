"""Where on the node the kubelet, the container runtime and cgroups are found."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from deviceplugin import cdi


@dataclass(frozen=True, slots=True)
class Paths:
    """Where the kubelet keeps its files and sockets, and where the host's cgroup file system is mounted.

    The device plugin directory is /var/lib/kubelet/device-plugins whatever the kubelet's --root-dir says, while the
    PodResources socket follows it (kubernetes#68567; k3s, k0s and microk8s differ): each can be given. pod_log_dir:
    the kubelet's podLogsDir, where pods have directories named namespace_name_uid. container_log_dir: where the kubelet
    makes the links that `deviceplugin.kubelet.containers` reads; a constant of its source. cdi_dir: where the container
    runtime finds CDI specs.
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
        """The device plugin directory."""
        return self.device_plugin_dir or self.kubelet_root / "device-plugins"

    @property
    def pod_resources(self) -> Path:
        """The PodResources service's socket."""
        return self.pod_resources_socket or self.kubelet_root / "pod-resources" / "kubelet.sock"
