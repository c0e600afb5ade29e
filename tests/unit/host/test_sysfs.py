"""GPUs on the PCI bus, on machines made of files."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.fake_root import FakeRoot

from gpuops.host.sysfs import (
    PciGpu,
    driver_version,
    hypervisor,
    read_pci_gpus,
    sysfs_address,
)


def test_gpus_are_listed_by_address_with_their_drivers(tmp_path):
    root = FakeRoot(tmp_path).gpu("0000:86:00.0").gpu("0000:1b:00.0", driver=None)

    assert read_pci_gpus(root.path) == (
        PciGpu("0000:1b:00.0", answers=True, driver=None),
        PciGpu("0000:86:00.0", answers=True, driver="nvidia"),
    )


def test_a_gpu_that_reads_as_all_ones_is_still_listed_but_does_not_answer(tmp_path):
    root = FakeRoot(tmp_path).gpu("0000:1b:00.0", answers=False)

    assert read_pci_gpus(root.path) == (PciGpu("0000:1b:00.0", answers=False, driver="nvidia"),)


@pytest.mark.parametrize(
    ("vendor", "kind"),
    [("0x8086", "0x030000"), ("0x10de", "0x068000"), ("0x10de", "0x020700"), ("?", "0x030200")],
    ids=["another maker", "an NVSwitch", "a network card", "unreadable"],
)
def test_other_devices_are_no_gpus(tmp_path, vendor, kind):
    root = FakeRoot(tmp_path).gpu("0000:1b:00.0")
    root.write("sys/bus/pci/devices/0000:1b:00.0/vendor", vendor)
    root.write("sys/bus/pci/devices/0000:1b:00.0/class", kind)

    assert read_pci_gpus(root.path) == ()


def test_a_configuration_space_that_cannot_be_read_is_neither(tmp_path):
    root = FakeRoot(tmp_path).gpu("0000:1b:00.0")
    (tmp_path / "sys/bus/pci/devices/0000:1b:00.0/config").unlink()

    assert read_pci_gpus(root.path)[0].answers is None


def test_a_machine_without_a_pci_bus_has_no_gpus(tmp_path):
    assert read_pci_gpus(tmp_path) == ()


@given(st.integers(0, 2**20), st.integers(0, 255), st.integers(0, 31), st.integers(0, 7))
def test_the_address_of_nvml_becomes_that_of_sysfs(domain, bus, device, function):
    tail = f"{bus:02x}:{device:02x}.{function}"

    assert sysfs_address(f"{domain:08X}:{tail.upper()}") == f"{domain:04x}:{tail}"


@given(st.text())
def test_any_text_gives_some_address(text):
    assert isinstance(sysfs_address(text), str)


def test_the_loaded_driver_says_its_version(tmp_path):
    root = FakeRoot(tmp_path).write("sys/module/nvidia/version", "570.86.15\n")

    assert driver_version(root.path) == "570.86.15"
    assert driver_version(tmp_path / "nowhere") is None


X86, ARM = "processor\t: 0\nflags\t\t: fpu vme sse\n", "processor\t: 0\nFeatures\t: fp asimd\n"
GUEST = X86.replace("sse", "sse hypervisor lahf_lm")


@pytest.mark.parametrize(
    ("cpuinfo", "dmi", "expected"),
    [
        (X86, {"sys_vendor": "Supermicro", "product_name": "SYS-821GE-TNHR"}, None),
        (X86, {"sys_vendor": "Amazon EC2", "product_name": "p5.metal"}, None),
        (X86, {}, None),
        (GUEST, {}, "unknown hypervisor"),
        (GUEST, {"sys_vendor": "QEMU", "product_name": "Standard PC"}, "QEMU"),
        (GUEST, {"sys_vendor": "Amazon EC2", "product_name": "p5.48xlarge"}, "Amazon EC2"),
        (GUEST, {"product_name": "Google Compute Engine"}, "Google Compute Engine"),
        (
            GUEST,
            {"sys_vendor": "Microsoft Corporation", "product_name": "Virtual Machine"},
            "Hyper-V",
        ),
        (ARM, {"sys_vendor": "NVIDIA", "product_name": "GB200 NVL"}, None),
        (ARM, {"sys_vendor": "QEMU", "product_name": "KVM Virtual Machine"}, "KVM"),
        ("", {}, None),
    ],
)
def test_a_virtual_machine_is_known_by_the_processor_and_its_firmware(
    tmp_path, cpuinfo, dmi, expected
):
    root = FakeRoot(tmp_path).write("proc/cpuinfo", cpuinfo)
    for name, text in dmi.items():
        root.write(f"sys/class/dmi/id/{name}", f"{text}\n")

    assert hypervisor(root.path) == expected
