"""A source for limits and claims, with parameters that users set in their claims."""

import msgspec

from deviceplugin import ContainerEdits, Device, DeviceSource, Version
from dra_bridge import run


class Tuning(msgspec.Struct, kw_only=True):
    """The parameters in a claim's `config: [{opaque: {driver: fpga.example.com, parameters: {...}}}]`.

    A parameter with another name is an error.
    """

    mode: str = "balanced"
    watts: int = 75


class Fpga(DeviceSource):
    resource = "example.com/fpga"
    driver = "fpga.example.com"
    config_type = Tuning

    async def watch(self):
        firmware = Version("2.1.0")
        yield [Device(f"fpga{n}", numa=n // 2, attributes={"family": "Arc", "firmware": firmware}) for n in range(4)]

    def edits(self, devices):  # for limits and claims
        return ContainerEdits(env={"FPGAS": ",".join(device.id for device in devices)})

    def prepare(self, devices, config):  # for claims only, before the container exists
        return ContainerEdits(env={"FPGA_TUNING": f"{config.mode} {config.watts} W"})


if __name__ == "__main__":
    run(Fpga(), share="none")  # dra-bridge migrate NODE --driver fpga.example.com --share all
