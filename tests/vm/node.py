"""A cluster whose only node is a virtual machine: systemd 252, cgroup v2, and containerd, kubelet and agent as units.

etcd, API server, controller manager, scheduler and kubectl run on the host, as in ``tests.cluster``. The kubelet uses
the systemd cgroup driver. Its unit is that of Kubernetes' own packages, without kubeadm's flags.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from tests.cluster import image, isolate
from tests.cluster.build import find_busybox
from tests.cluster.node import Cluster, Pod
from tests.vm import build
from tests.vm.machine import LIMIT, Machine, accelerated, wait_for

ROOT = Path(__file__).resolve().parents[2]
FPGAS = "example.com/fpga"
DRIVER = "fpga.example.com"
AGENT = "dra-bridge.service"
NUMBERS = "/etc/fpga.numbers"
"""The file of the devices that the machine makes at its boot. Each line has a name, a major and a minor number."""
MAJOR, FIRST = 120, 0
"""The devices' major number and first minor number. The major is for local use; no driver of the machine has it.

So an open fails with ENXIO in a container that may open the device, and with EPERM in other containers. The kernel does
not announce the devices, so only the unit that makes them also makes their links in /dev/char.
"""
_SERVER = f"https://{isolate.NODE_IP}:443"

_CONTAINERD = """
version = 3
[grpc]
address = "/run/containerd/containerd.sock"
[plugins."io.containerd.nri.v1.nri"]
disable = true
[plugins."io.containerd.cri.v1.images".pinned_images]
sandbox = "{image}"
[plugins."io.containerd.cri.v1.runtime"]
enable_cdi = true
cdi_spec_dirs = ["/etc/cdi", "/var/run/cdi"]
[plugins."io.containerd.cri.v1.runtime".containerd]
default_runtime_name = "runc"
[plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc]
runtime_type = "io.containerd.runc.v2"
[plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc.options]
SystemdCgroup = true
[plugins."io.containerd.cri.v1.runtime".cni]
bin_dirs = ["/usr/lib/cni"]
conf_dir = "/etc/cni/net.d"
"""
_CONTAINERD_UNIT = """
[Unit]
After=network.target local-fs.target
[Service]
Type=notify
Environment=PATH=/opt/node/bin:/usr/sbin:/usr/bin:/sbin:/bin GOGC=400
ExecStart=/opt/node/bin/containerd
Delegate=yes
KillMode=process
Restart=always
RestartSec=5
OOMScoreAdjust=-999
[Install]
WantedBy=multi-user.target
"""
_KUBELET_UNIT = """
[Unit]
Wants=network-online.target
After=network-online.target containerd.service
StartLimitIntervalSec=0
[Service]
Environment=GOGC=400
ExecStart=/opt/node/bin/kubelet --config=/etc/kubernetes/kubelet.json --kubeconfig=/etc/kubernetes/kubelet.kubeconfig \
 --hostname-override={name} --node-ip={address} -v=2
Restart=always
RestartSec=10
[Install]
WantedBy=multi-user.target
"""
_FPGA_UNIT = f"""
[Unit]
After=systemd-udevd.service
Before=dra-bridge.service deviceplugin.service kubelet.service
[Service]
Type=oneshot
RemainAfterExit=yes
ExecStart=/bin/sh -euc 'while read name major minor; do \\
 mknod -m 0666 /dev/$name c $major $minor; ln -sf ../$name /dev/char/$major:$minor; done < {NUMBERS}'
[Install]
WantedBy=multi-user.target
"""
_PROGRAM = "#!/opt/deviceplugin/bin/python\nimport sys\nfrom {module}.cli import main\nsys.exit(main())\n"


class MachineCluster(Cluster):
    """The cluster. machine: the virtual machine, which is the node."""

    def __init__(self, version: str | None = None) -> None:
        super().__init__(version)
        self._temporary = tempfile.TemporaryDirectory(dir="/var/tmp", prefix="deviceplugin-vm-")
        directory, disk, binaries = Path(self._temporary.name), build.ensure(), self.binaries
        busybox = find_busybox()
        assert busybox is not None
        image.write_busybox(busybox, directory / "image.tar")
        programs = dict.fromkeys(("containerd", "containerd-shim-runc-v2", "ctr"), binaries.containerd)
        programs |= dict.fromkeys(("kubelet", "kubectl"), binaries.kubernetes)
        files = {f"bin/{name}": path / name for name, path in programs.items()}
        files |= {"image.tar": directory / "image.tar", "site": disk.site}
        files |= {f"site/{package}": ROOT / package for package in ("deviceplugin", "dra_bridge")}
        self.machine = Machine(disk, directory, files)
        self.node_name, self.node_ip = build.NODE, build.ADDRESS

    def start(self, timeout: float = LIMIT) -> None:
        """Start the machine and the cluster, and wait until a first pod can run."""
        self.machine.boot()
        super().start(timeout)

    def stop(self) -> None:
        """Store the machine's journal in the directory of logs, and end the machine and the cluster."""
        if self.logs.is_dir():
            with contextlib.suppress(Exception):
                (self.logs / "journal.log").write_text(self.machine.run("journalctl -q --no-pager -o short-precise"))
        self.machine.stop()
        super().stop()
        self._temporary.cleanup()

    def start_node(self, timeout: float) -> None:
        """Wait until the machine is up, install the units of containerd and kubelet, and start them."""
        self.machine.wait_up()
        self._write_kubelet_config()
        kubeconfig = (self.directory / "kubelet.kubeconfig").read_text()
        units = "/etc/systemd/system"
        self.machine.put(
            {
                "/etc/containerd/config.toml": _CONTAINERD.format(image=image.IMAGE),
                "/etc/cni/net.d/10-pods.conflist": self.directory / "cni" / "10-pods.conflist",
                "/etc/kubernetes/kubelet.json": self.directory / "kubelet.json",
                "/etc/kubernetes/kubelet.kubeconfig": self.reachable(kubeconfig),
                f"{units}/containerd.service": _CONTAINERD_UNIT,
                f"{units}/kubelet.service": _KUBELET_UNIT.format(name=self.node_name, address=self.node_ip),
            }
        )
        self.machine.run(
            "modprobe -a overlay veth; ln -sf /opt/node/bin/kubectl /usr/local/bin/;"
            "systemctl daemon-reload; systemctl enable -q containerd kubelet; systemctl start containerd;"
            "/opt/node/bin/ctr -n k8s.io images import /opt/node/image.tar; systemctl start kubelet"
        )

    def reachable(self, kubeconfig: str) -> str:
        """Return this kubeconfig with the address at which the virtual machine reaches the API server."""
        written = json.loads(kubeconfig)
        for each in written["clusters"]:
            each["cluster"]["server"] = _SERVER
        return json.dumps(written)

    def kubelet_configuration(self) -> dict[str, Any]:
        """Return the kubelet's configuration, with the systemd cgroup driver, as in most clusters."""
        config = super().kubelet_configuration()
        for key in ("cgroupRoot", "failCgroupV1", "enforceNodeAllocatable", "localStorageCapacityIsolation"):
            config.pop(key, None)
        socket = "unix:///run/containerd/containerd.sock"
        return {
            **config,
            "cgroupDriver": "systemd",
            "nodeStatusUpdateFrequency": "4s",
            "containerRuntimeEndpoint": socket,
            "volumePluginDir": "/var/lib/x",
        }

    def healthy(self, resource: str) -> int | None:
        """Return the Node's allocatable, because the kubelet's PodResources socket is inside the machine."""
        return self.allocatable(resource)

    # --- the agent ---

    def install_agent(self, resources: Sequence[Mapping[str, Any]], count: int) -> None:
        """Install the agent as docs/operations.md describes, and `count` devices, which the machine makes at boot."""
        self.number_devices({f"fpga{index}": FIRST + index for index in range(count)})
        with tempfile.TemporaryDirectory() as temporary:
            directory = Path(temporary)
            config = directory / "config.yaml"
            config.write_text(yaml.safe_dump({"resources": list(resources)}))
            extended = [] if self.minor >= 34 else ["--no-extended-resource"]
            printed = self.dra_bridge("manifests", f"--config={config}", f"--systemd={directory / 'units'}", *extended)
            self.api.apply([one for one in yaml.safe_load_all(printed) if one])
            units = {f"/etc/systemd/system/{unit.name}": unit for unit in (directory / "units").iterdir()}
            self.machine.run("python3 -m venv --without-pip /opt/deviceplugin")
            site = f"/opt/deviceplugin/lib/python{build.PYTHON}/site-packages/node.pth"
            self.machine.put({"/etc/dra-bridge/config.yaml": config, **units, site: "/opt/node/site\n"})
        programs = {"dra-bridge": "dra_bridge", "deviceplugin": "deviceplugin"}
        bins = {f"/opt/deviceplugin/bin/{name}": _PROGRAM.format(module=of) for name, of in programs.items()}
        self.machine.put(bins, mode=0o755)
        self.machine.put({"/etc/systemd/system/fpga-nodes.service": _FPGA_UNIT})
        if not accelerated():  # without KVM, the agent's start takes a minute or more
            slow = "[Service]\nTimeoutStartSec=15min\nWatchdogSec=5min\n"
            self.machine.put({f"/etc/systemd/system/{AGENT}.d/10-slow.conf": slow})
        self.machine.run("systemctl daemon-reload; systemctl enable -q --now fpga-nodes")
        self.give_token()
        self.machine.run(f"systemctl enable -q --now {AGENT} dra-bridge-token.timer")

    def give_token(self, duration: str = "24h") -> None:
        """Write the agent's token, and the API server's address and authority, as an administrator does on a node."""
        bound = ["--bound-object-kind=Node", f"--bound-object-name={self.node_name}"]
        token = self.kubectl(
            "create", "token", "dra-bridge", "--namespace=dra-bridge", f"--duration={duration}", *bound
        ).strip()
        server = f"KUBERNETES_SERVICE_HOST={isolate.NODE_IP}\nKUBERNETES_SERVICE_PORT=443\n"
        files: dict[str, str | Path] = {"server": server, "ca.crt": self.directory / "pki" / "ca.crt", "token": token}
        self.machine.put({f"/etc/dra-bridge/{name}": content for name, content in files.items()}, mode=0o600)

    def dra_bridge(self, *arguments: str) -> str:
        """Run `dra-bridge` on the host, with an administrator's rights, and return its output."""
        rights = [] if arguments[0] == "manifests" else [f"--kubeconfig={self.kubeconfig}"]
        command = [str(Path(sys.executable).with_name("dra-bridge")), *arguments, *rights]
        done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
        assert done.returncode == 0, f"{command}: {done.stderr}"
        return done.stdout

    def number_devices(self, minors: Mapping[str, int]) -> None:
        """Set the devices' minor numbers from the next boot on."""
        self.machine.put({NUMBERS: "".join(f"{name} {MAJOR} {minor}\n" for name, minor in minors.items())})

    def wait_agent(self) -> None:
        """Wait until the agent's unit is active."""
        wait_for(
            lambda: self.machine.setting(AGENT, "ActiveState") == "active",
            "the agent has started",
            context=lambda: self.machine.journal(AGENT),
        )

    def exec(self, pod: Pod, script: str, *, check: bool = True) -> str:
        """Run a shell script in a pod's container and return its output."""
        runc = f"runc --root /run/containerd/runc/k8s.io exec {pod.container_id()} /bin/sh -c"
        quoted = "'" + script.replace("'", "'\\''") + "'"
        return self.machine.run(f"{runc} {quoted}", check=check).strip()
