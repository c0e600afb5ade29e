"""ACS of PCIe switches: the registers out of a made-up bus, and what becomes of them."""

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.checks import CASE, said
from support.fake_root import FakeRoot

from gpuops.checks.core.check import NoParameters
from gpuops.checks.nic.pcie_acs import judge
from gpuops.host.pci.paths import PciPaths, SwitchPort, acs_control, read_pci_paths

TOP = "sys/devices/pci0000:15"
SWITCH = f"{TOP}/0000:15:01.0/0000:16:00.0"
ROOT_PORT, UPSTREAM, DOWNSTREAM = 4, 5, 6
REDIRECTS, PASSES = 0x1D, 0x01


def config(kind, control=None, *, size=4096):
    """Return the configuration space of a port of *kind*, with ACS behind another capability."""
    space = bytearray(4096)
    space[0:2], space[6], space[0x34] = b"\x86\x80", 0x10, 0x40
    space[0x40:0x44] = bytes([0x01, 0x50, 0, 0])
    space[0x50:0x53] = bytes([0x10, 0, kind << 4 | 2])
    if control is not None:
        struct.pack_into("<I", space, 0x100, 0x148 << 20 | 1 << 16 | 0x0001)
        struct.pack_into("<IHH", space, 0x148, 1 << 16 | 0x000D, 0x5F, control)
    return bytes(space[:size])


def bus(root, down=REDIRECTS, *, flags="fpu acpi", size=4096, driver="nvidia"):
    """Make a machine whose one switch leads to a GPU and to an adapter."""
    root.write("proc/cpuinfo", f"processor : 0\nflags\t\t: {flags}\n")
    folders = {
        "0000:15:01.0": (f"{TOP}/0000:15:01.0", "0x8086", "0x060400", ROOT_PORT, REDIRECTS),
        "0000:16:00.0": (SWITCH, "0x1000", "0x060400", UPSTREAM, None),
    }
    for number, (vendor, kind) in enumerate([("0x10de", "0x030200"), ("0x15b3", "0x020700")]):
        port = f"{SWITCH}/0000:17:0{number}.0"
        folders[f"0000:17:0{number}.0"] = (port, "0x1000", "0x060400", DOWNSTREAM, down)
        folders[f"0000:{18 + number}:00.0"] = (
            f"{port}/0000:{18 + number}:00.0", vendor, kind, 0, None,
        )  # fmt: skip
    there = root.path / "sys/bus/pci/devices"
    there.mkdir(parents=True)
    for address, (folder, vendor, kind, port_type, control) in folders.items():
        root.write(f"{folder}/vendor", vendor).write(f"{folder}/class", kind)
        root.write(f"{folder}/config", config(port_type, control, size=size))
        (there / address).symlink_to(root.path / folder)
        if kind == "0x030200":
            (root.path / folder / "driver").symlink_to(f"/sys/bus/pci/drivers/{driver}")
    return root.path


def findings(facts):
    return judge(facts, NoParameters(), CASE)


def test_a_switch_that_redirects_warns_and_is_named_with_what_is_below_it(tmp_path):
    (finding,) = findings(read_pci_paths(bus(FakeRoot(tmp_path))))

    assert said([finding]) == [("n1", "warn", "host_sw.config")]
    assert finding.value == 2
    assert "0000:17:00.0 above 0000:18:00.0, 0000:17:01.0 above 0000:19:00.0" in finding.message


@pytest.mark.parametrize(
    ("changed", "status"),
    [
        ({"down": PASSES}, "pass"),
        ({"down": None}, "pass"),
        ({"down": 0xFFFF}, "pass"),
        ({"flags": "fpu hypervisor acpi"}, "skip"),
        ({"size": 64}, "skip"),
        ({"size": 0}, "skip"),
        ({"driver": "vfio-pci"}, "skip"),
    ],
    ids=[
        "source validation only", "no ACS", "all ones", "a virtual machine", "not root",
        "empty", "the GPU is a guest's",
    ],
)  # fmt: skip
def test_nothing_else_warns(tmp_path, changed, status):
    assert said(findings(read_pci_paths(bus(FakeRoot(tmp_path), **changed)))) == [
        ("n1", status, None)
    ]


def test_root_ports_and_a_switch_with_one_device_are_no_detour(tmp_path):
    root = FakeRoot(tmp_path)
    bus(root)
    (root.path / "sys/bus/pci/devices/0000:19:00.0").unlink()

    assert read_pci_paths(root.path).ports == ()


def test_another_processor_and_a_machine_without_a_bus_are_not_judged(tmp_path):
    root = FakeRoot(tmp_path).write("proc/cpuinfo", "processor : 0\nFeatures : fp asimd\n")

    assert read_pci_paths(root.path) == PciPaths(bare_metal=None)
    assert said(findings(PciPaths(bare_metal=None))) == [("n1", "skip", None)]
    assert said(findings(PciPaths(bare_metal=True))) == [("n1", "skip", None)]


def test_a_config_that_errs_is_counted(tmp_path):
    path = bus(FakeRoot(tmp_path))
    for port in ("0000:17:00.0", "0000:17:01.0"):
        file = path / f"{SWITCH}/{port}/config"
        file.unlink()
        file.mkdir()  # EISDIR, as EIO would be
    facts = read_pci_paths(path)

    assert (facts.ports, facts.unreadable) == ((), 2)


def test_many_ports_make_one_finding():
    ports = tuple(SwitchPort(address=f"a{n}", below=f"d{n}", acs=REDIRECTS) for n in range(9))
    (finding,) = findings(PciPaths(bare_metal=True, devices=("d0",), ports=ports))

    assert finding.message.endswith("a3 above d3 and 5 more")


@given(st.binary(max_size=600))
def test_any_bytes_are_read_without_an_error(config):
    assert 0 <= acs_control(config) <= 0xFFFF
