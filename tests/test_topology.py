"""Choosing devices that go well together."""

from __future__ import annotations

from deviceplugin.topology import natural, numa_compact


def sims(*numbers: int) -> list[str]:
    return [f"sim-{number}" for number in numbers]


class TestNumaCompact:
    """NUMA alone: few nodes, best fit, natural order, any size."""

    def test_ids_are_compared_naturally(self) -> None:
        """Runs of digits count by value, however long they are."""
        assert sorted(["sim-10", "sim-2", "sim-02", "sim", "9" * 5000, "3a"], key=natural) == [
            "3a", "9" * 5000, "sim", "sim-02", "sim-2", "sim-10",
        ]  # fmt: skip

    def test_the_node_with_the_fewest_free_devices_that_fits_is_used(self) -> None:
        """Best fit keeps the larger node whole for a larger request."""
        devices = {f"sim-{n}": (0,) if n < 8 else (1,) for n in range(12)}
        assert numa_compact(devices, list(devices), [], 4) == sims(8, 9, 10, 11)
        assert numa_compact(devices, list(devices), [], 5) == sims(0, 1, 2, 3, 4)

    def test_the_nodes_of_required_devices_come_first(self) -> None:
        """A required device draws the others to its node, as far as that reaches."""
        devices = {f"sim-{n}": (0,) if n < 8 else (1,) for n in range(12)}
        assert numa_compact(devices, list(devices), ["sim-11"], 3) == sims(8, 9, 11)
        assert numa_compact(devices, list(devices), ["sim-11"], 6) == sims(0, 1, 8, 9, 10, 11)

    def test_unknown_numa_comes_last(self) -> None:
        """Devices without a node are taken when nothing else is left, or when nobody has one."""
        devices: dict[str, tuple[int, ...]] = {"sim-1": (), "sim-5": (1,), "sim-7": (0,)}
        assert numa_compact(devices, ["sim-1", "sim-5", "sim-7", "new"], [], 3) == ["new", "sim-5", "sim-7"]
        assert numa_compact({}, sims(10, 9, 2), [], 2) == sims(2, 9)

    def test_a_device_near_two_nodes_counts_for_both(self) -> None:
        """Such a device fills up either of its nodes."""
        devices: dict[str, tuple[int, ...]] = {"sim-0": (0,), "sim-1": (0, 1), "sim-2": (1,), "sim-3": (1,)}
        assert numa_compact(devices, list(devices), [], 2) == sims(0, 1)
        assert numa_compact(devices, list(devices), [], 3) == sims(1, 2, 3)

    def test_impossible_input_gives_what_there_is(self) -> None:
        """Too many required, too few available, unknown, negative, twice: a list, never an error."""
        assert numa_compact({}, sims(1), sims(2, 3), 1) == sims(2, 3)
        assert numa_compact({}, sims(1, 1), [], 5) == sims(1)
        assert numa_compact({}, sims(1), sims(1), -4) == sims(1)
        assert numa_compact({}, [], [], 3) == []
