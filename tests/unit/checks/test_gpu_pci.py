"""The verdicts on GPUs of the PCI bus, held against NVML."""

from support.checks import CASE, said

from gpuops.checks.core.check import NoParameters
from gpuops.checks.gpu.gpu_pci import judge
from gpuops.host.gpu_names import Gpus
from gpuops.host.nvml.facts import NvmlGpu, NvmlSnapshot, NvmlStatus
from gpuops.host.sysfs import PciGpu


def gpu(number, *, answers=True, driver="nvidia"):
    return PciGpu(f"0000:{number:02x}:00.0", answers=answers, driver=driver)


def nvml(*numbers, status=NvmlStatus.OK):
    gpus = tuple(NvmlGpu(index=n, uuid=f"GPU-{n}", address=f"0000:{n:02x}:00.0") for n in numbers)
    return NvmlSnapshot(status=status, gpus=gpus)


def findings(pci, snapshot):
    return said(judge(Gpus(tuple(pci), snapshot), NoParameters(), CASE))


def test_a_machine_without_gpus_is_skipped():
    assert findings([], nvml()) == [("n1", "skip", None)]


def test_gpus_that_answer_and_are_known_pass():
    assert findings([gpu(1), gpu(2)], nvml(1, 2)) == [("n1", "pass", None)]


def test_a_gpu_off_the_bus_fails_by_its_uuid_where_nvml_still_knows_it():
    assert findings([gpu(1), gpu(2, answers=False)], nvml(1, 2)) == [
        ("GPU-2", "fail", "gpu_hw.fell_off_bus")
    ]


def test_a_gpu_off_the_bus_fails_by_its_address_where_nvml_says_nothing():
    assert findings([gpu(2, answers=False)], nvml(status=NvmlStatus.TIMEOUT)) == [
        ("PCI:0000:02:00.0", "fail", "gpu_hw.fell_off_bus")
    ]


def test_a_gpu_that_nvml_does_not_list_warns():
    assert findings([gpu(1), gpu(2)], nvml(1)) == [("n1", "warn", "gpu_hw.missing")]


def test_a_gpu_of_another_driver_is_nobodys_loss():
    """vfio-pci lends a GPU to a virtual machine."""
    assert findings([gpu(1), gpu(2, driver="vfio-pci")], nvml(1)) == [("n1", "pass", None)]


def test_a_gpu_that_could_not_be_asked_is_told_and_convicted_of_nothing():
    (finding,) = judge(Gpus((gpu(1, answers=None),), nvml(1)), NoParameters(), CASE)

    assert finding.status.word == "pass"
    assert "1 could not be read" in finding.message
