"""Slots come from the NUMA node of the GPU."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from gpuops.checkpoint.memory.numa import numa_node_of, prefer_numa_node
from gpuops.checkpoint.memory.shared_buffer import SharedBuffer

GPU = SimpleNamespace(pci_domain_id=0, pci_bus_id=0x9B, pci_device_id=0)


@pytest.mark.parametrize(("said", "node"), [("1", 1), ("-1", None), (None, None), ("4096", None)])
def test_the_node_of_a_gpu_is_the_one_that_its_pci_device_names(tmp_path, said, node):
    device = tmp_path / "sys/bus/pci/devices/0000:9b:00.0"
    device.mkdir(parents=True)
    if said is not None:
        (device / "numa_node").write_text(f"{said}\n")
    assert numa_node_of(GPU, tmp_path) == node
    assert numa_node_of(SimpleNamespace(name="of an older torch"), tmp_path) is None


@pytest.mark.skipif(not Path("/proc/self/numa_maps").exists(), reason="a kernel without NUMA")
def test_pages_are_taken_from_the_preferred_node():
    with SharedBuffer.create("numa-test", 2**20 + 5) as slot:
        if not prefer_numa_node(slot, 0):
            pytest.skip("the kernel refuses mbind(2) here")
        assert slot.populate()
        (line,) = [
            line
            for line in Path("/proc/self/numa_maps").read_text().splitlines()
            if "numa-test" in line
        ]
        assert " prefer:0 " in line or " prefer=relative:0 " in line, line


def test_a_node_that_does_not_exist_is_refused_and_the_memory_is_usable():
    with SharedBuffer.create("slot", 2**20) as slot:
        assert not prefer_numa_node(slot, 1000)
        assert slot.populate()
