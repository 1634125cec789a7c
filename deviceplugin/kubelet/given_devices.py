"""Finds the hardware that an AllocateResponse gives to a container: by device node, by CDI name or by NVIDIA UUID."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

from deviceplugin import cdi_specs
from deviceplugin.device import ContainerEdits
from deviceplugin.identity import UUID, Tokens, numbers_of
from deviceplugin.wire import deviceplugin_pb2 as pb

CDI: Final = "cdi.k8s.io/"
"""The first characters of the annotation keys whose values name CDI devices (containerd 2.1.5,
internal/cri/opts/spec_linux.go: WithCDI)."""
_VISIBLE: Final = "NVIDIA_VISIBLE_DEVICES"
_VISIBLE_MOUNTS: Final = "/var/run/nvidia-container-devices/"
_UUIDS: Final = ("GPU-", "MIG-")


class GivenDevices(NamedTuple):
    """The devices in AllocateResponses.

    nodes: the host paths of device nodes. cdi: fully qualified names of CDI devices. uuids: the UUIDs of GPUs and MIG
    partitions that the NVIDIA container runtime adds, because a variable or a mount names them
    (NVIDIA/k8s-device-plugin v0.20.0, internal/plugin/server.go: the strategies envvar and volume-mounts).
    """

    nodes: tuple[str, ...] = ()
    cdi: tuple[str, ...] = ()
    uuids: tuple[str, ...] = ()

    @classmethod
    def of(cls, responses: Iterable[pb.ContainerAllocateResponse]) -> GivenDevices:
        """Return the devices in these responses."""
        nodes: list[str] = []
        cdi: list[str] = []
        uuids: list[str] = []
        for response in responses:
            nodes += (node.host_path for node in response.devices)
            cdi += cdi_names(response)
            uuids += _visible(response.envs, (mount.container_path for mount in response.mounts))
        return cls(tuple(nodes), tuple(cdi), tuple(uuids))

    @classmethod
    def in_edits(cls, edits: ContainerEdits) -> GivenDevices:
        """Return the devices in container edits."""
        nodes = tuple(node.host for node in edits.device_nodes)
        return cls(nodes, tuple(edits.cdi), tuple(_visible(edits.env, (mount.container for mount in edits.mounts))))

    def tokens(self, directories: Iterable[str] = cdi_specs.DIRECTORIES) -> Tokens:
        """Return the tokens of those devices that exist. Blocks. directories: the directories of CDI specs."""
        uuids = frozenset(f"{UUID}{uuid}" for uuid in self.uuids)
        return numbers_of(self.nodes) | cdi_specs.nodes_of(self.cdi, directories) | uuids


def _visible(env: Mapping[str, str], mounts: Iterable[str]) -> list[str]:
    """Return the UUIDs in a container's environment and mounts. mounts: the mounts' paths in the container."""
    names = (*env.get(_VISIBLE, "").split(","), *(path.removeprefix(_VISIBLE_MOUNTS) for path in mounts))
    return [name for name in names if name.startswith(_UUIDS)]


def cdi_names(response: pb.ContainerAllocateResponse) -> list[str]:
    """Return the names of the CDI devices in an AllocateResponse, each once.

    Both the response's field for CDI devices and its annotations name CDI devices.
    """
    names = [device.name for device in response.cdi_devices]
    for key, value in sorted(response.annotations.items()):
        if key.startswith(CDI):
            names += value.split(",")
    return list(dict.fromkeys(names))
