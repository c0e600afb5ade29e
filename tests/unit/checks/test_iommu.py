"""The IOMMU's mode for GPUs and adapters."""

import pytest
from support.checks import CASE, said
from support.fake_root import FakeRoot

from gpuops.checks.core.check import NoParameters
from gpuops.checks.nic.iommu import judge
from gpuops.host.pci.paths import PciPaths, read_pci_paths

GPU = "0000:1b:00.0"


def machine(path, mode, flags="fpu acpi"):
    root = FakeRoot(path).gpu(GPU).write("proc/cpuinfo", f"flags : {flags}\n")
    if mode is not None:
        root.write(f"sys/bus/pci/devices/{GPU}/iommu_group/type", mode)
    return root.path


@pytest.mark.parametrize(
    ("mode", "status"),
    [
        ("DMA\n", "warn"),
        ("DMA-FQ\n", "warn"),
        ("identity\n", "pass"),
        ("blocked\n", "pass"),
        ("", "pass"),
        ("\x00\xff garbage", "pass"),
        (None, "pass"),
    ],
)
def test_only_translation_warns(tmp_path, mode, status):
    (finding,) = judge(read_pci_paths(machine(tmp_path, mode)), NoParameters(), CASE)

    assert finding.status.word == status


def test_a_virtual_machine_and_another_processor_are_not_judged(tmp_path):
    facts = read_pci_paths(machine(tmp_path, "DMA", flags="fpu hypervisor"))

    assert said(judge(facts, NoParameters(), CASE)) == [("n1", "skip", None)]
    grace = PciPaths(bare_metal=None, devices=(GPU,), translated=(GPU,), modes=("DMA",))
    assert said(judge(grace, NoParameters(), CASE)) == [("n1", "skip", None)]


def test_the_finding_says_how_many_and_in_which_mode():
    facts = PciPaths(
        bare_metal=True,
        devices=("a", "b", "c"),
        translated=("a", "b"),
        modes=("DMA-FQ", "identity"),
    )
    (finding,) = judge(facts, NoParameters(), CASE)

    assert said([finding]) == [("n1", "warn", "host_sw.config")]
    assert "2 of 3 GPUs and adapters (mode: DMA-FQ, identity)" in finding.message
