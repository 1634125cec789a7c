"""A device plugin: `limits: {example.com/toy: 1}` gives a container /dev/zero or /dev/full to itself."""

from deviceplugin import ContainerEdits, Device, DeviceSource, run


class Toys(DeviceSource):
    resource = "example.com/toy"

    async def watch(self):  # yield the full list now, and again whenever it changes
        yield [Device(name, nodes=[f"/dev/{name}"]) for name in ("zero", "full")]

    def edits(self, devices):  # what a container gets beyond its device nodes
        return ContainerEdits(env={"TOYS": ",".join(device.id for device in devices)})

    def reset(self, devices):  # before each start of a container; may take its time
        print("made ready:", *(device.id for device in devices), flush=True)


if __name__ == "__main__":  # a test imports Toys
    run(Toys())
