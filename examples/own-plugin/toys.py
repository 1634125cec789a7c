"""A plugin for limits and claims: `limits: {example.com/toy: 1}`, or `deviceClassName: toy.example.com`."""

from pathlib import Path

import msgspec

from deviceplugin import ContainerEdits, Device, DeviceSource, Health
from dra_bridge import run


class Tuning(msgspec.Struct):
    """The parameters of a claim: `parameters: {mode: fast}`."""

    mode: str = "balanced"


class Toys(DeviceSource):
    resource = "example.com/toy"
    driver = "toy.example.com"
    config_type = Tuning

    def __init__(self, nodes=("/dev/full", "/dev/zero")):
        self.nodes = [Path(node) for node in nodes]
        self.modes = {}

    def watch(self):  # one list is enough, because these device nodes never change
        yield [
            Device(
                node.name,
                nodes=[str(node)],
                health=Health.HEALTHY if node.is_char_device() else Health.UNHEALTHY,
                message="" if node.is_char_device() else f"{node} is no device node",
                attributes={"family": "toy"},
            )
            for node in self.nodes
        ]

    def edits(self, devices):
        return ContainerEdits(env={"TOYS": ",".join(device.id for device in devices)})

    def prepare(self, devices, config):
        self.modes |= {device.id: config.mode for device in devices}
        return ContainerEdits(env={"TOY_MODE": config.mode})

    def unprepare(self, devices):
        for device in devices:
            self.modes.pop(device.id, None)


if __name__ == "__main__":  # a test imports Toys
    run(Toys(), share="50%")
