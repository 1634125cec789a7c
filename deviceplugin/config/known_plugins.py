"""Lists the known device plugins of vendors. An agent that has adopted one can serve `limits`, and perhaps claims.

These facts come from the plugins' code (November 2026). For a claim, the agent calls the plugin's Allocate although no
pod requests the resource. So a plugin cannot serve claims if it searches for the requesting pod, or if it frees devices
for which the kubelet lists no pod. Several plugins may use the same resource name; the ids of their devices then
distinguish the plugins.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Final, Literal, NamedTuple


class KnownPlugin(NamedTuple):
    """A known plugin. resources: patterns of the resource names that the plugin registers.

    serves: "both" (the plugin can serve limits and claims), "limits" (only limits), or "no" (it cannot be adopted).
    why: the reason why `serves` is not "both"; "" if `serves` is "both". ids: a regular expression that matches the ids
    of this plugin's devices, but not the ids of another plugin with the same resource name.
    """

    plugin: str
    resources: tuple[str, ...]
    serves: Literal["both", "limits", "no"]
    why: str = ""
    ids: str = ""


_UUID: Final = r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}"
_PENDING: Final = "it looks for the pending pod in the API server, and a claim has none"

PLUGINS: Final = (
    # HAMi's plugin too uses the name nvidia.com/gpu, but cannot serve claims, because it searches for the pending pod.
    # Its device ids begin with the device's UUID and a number (UUID-0, UUID-1).
    KnownPlugin(
        "NVIDIA/k8s-device-plugin",
        ("nvidia.com/gpu", "nvidia.com/gpu.shared", "nvidia.com/mig-*"),
        "both",
        ids=rf"(GPU-|MIG-)(GPU-)?{_UUID}(/[0-9]+/[0-9]+)?(::[0-9]+)?",
    ),
    KnownPlugin("ROCm/k8s-device-plugin", ("amd.com/*",), "both"),
    KnownPlugin(
        "intel/intel-device-plugins-for-kubernetes",
        tuple(f"{kind}.intel.com/*" for kind in ("gpu", "qat", "sgx", "dsa", "iaa", "npu", "dlb")),
        "both",
    ),
    KnownPlugin("HabanaAI/gaudi-device-plugin", ("habana.ai/*",), "both"),
    KnownPlugin("squat/generic-device-plugin", ("squat.ai/*", "devic.es/*"), "both"),
    KnownPlugin("smarter-project/smarter-device-manager", ("smarter-devices/*",), "both"),
    KnownPlugin("Mellanox/k8s-rdma-shared-dev-plugin", ("rdma/*",), "both"),
    KnownPlugin(
        "intel/intel-device-plugins-for-kubernetes (FPGA)",
        ("fpga.intel.com/*",),
        "limits",
        "in region mode it answers with an annotation for a hook of the runtime, which claims cannot give",
    ),
    KnownPlugin(
        "project-akri/akri", ("akri.sh/*",), "limits", "it frees what PodResources does not show for a pod after 20 s"
    ),
    KnownPlugin("volcano-sh/devices", ("volcano.sh/*",), "limits", _PENDING),
    KnownPlugin("Ascend", ("huawei.com/*",), "limits", f"with Volcano {_PENDING}"),
    KnownPlugin("Cambricon", ("cambricon.com/*",), "limits", f"for dynamic parts {_PENDING}"),
    KnownPlugin(
        "tkestack/gpu-manager, elastic-ai/elastic-gpu-agent",
        ("tencent.com/vcuda-*", "elasticgpu.io/*"),
        "limits",
        "before a container starts it looks for its pod in PodResources, and makes the device nodes then",
    ),
    KnownPlugin(
        "AWS Neuron", ("aws.amazon.com/neuron*",), "limits", "its source is not public; two resources are one hardware"
    ),
    KnownPlugin(
        "KubeVirt",
        ("devices.kubevirt.io/*",),
        "no",
        "virt-handler mounts the whole directory of the kubelet, and its operator reverts changes",
    ),
)


def known_plugin(resource: str) -> KnownPlugin | None:
    """Return the known plugin that registers a resource; None if there is none."""
    return next((plugin for plugin in PLUGINS if any(fnmatchcase(resource, name) for name in plugin.resources)), None)
