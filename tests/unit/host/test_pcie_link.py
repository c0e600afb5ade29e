"""PCIe links of network adapters out of a recorded tree."""

from pathlib import Path

import pytest
from support.fake_root import FakeRoot

from gpuops.host.pci.nic_link import NicPcieLinks, PcieCapability, read_nic_pcie

FULL = PcieCapability(generation=5, width=16)
PORT, NIC = "0000:3a:01.0", "0000:3b:00.0"


def device(root, path, *, now=("32.0 GT/s PCIe", "16"), most=("32.0 GT/s PCIe", "16")):
    folder = f"sys/devices/pci0000:3a/{path}"
    for prefix, (speed, width) in (("current", now), ("max", most)):
        root.write(f"{folder}/{prefix}_link_speed", f"{speed}\n")
        root.write(f"{folder}/{prefix}_link_width", f"{width}\n")
    return folder


def listed(root, kind, name, folder):
    entry = root.path / "sys/class" / kind / name
    entry.mkdir(parents=True)
    (entry / "device").symlink_to(root.path / folder)
    return entry


@pytest.fixture
def root(tmp_path):
    return FakeRoot(tmp_path)


def adapter(root, **link):
    device(root, PORT)
    folder = device(root, f"{PORT}/{NIC}", **link)
    listed(root, "infiniband", "mlx5_0", folder)
    root.write("sys/class/infiniband/mlx5_0/node_guid", "506b:4b03:00f5:6b10\n")
    listed(root, "net", "ib0", folder)
    return folder


def test_an_adapter_is_read_once_with_its_names_and_the_port_above(root):
    adapter(root, now=("16.0 GT/s PCIe", "8"))
    (link,) = read_nic_pcie(root.path).links

    (root.path / "sys/class/net/ib0/master").symlink_to("../../../virtual/net/bond0")
    (bonded,) = read_nic_pcie(root.path).links

    assert bonded.names == ("mlx5_0", "ib0", "bond0")
    assert (link.address, link.names, link.guid) == (NIC, ("mlx5_0", "ib0"), "506b:4b03:00f5:6b10")
    assert (link.now, link.adapter, link.port) == (
        PcieCapability(generation=4, width=8),
        FULL,
        FULL,
    )


@pytest.mark.parametrize(
    ("speed", "width", "known"),
    [
        ("2.5 GT/s PCIe", "1", (1, 1)),
        ("8 GT/s", "8", (3, 8)),
        ("8.0 GT/s PCIe", "8", (3, 8)),
        ("64.0 GT/s PCIe", "16", (6, 16)),
        ("Unknown", "0", (None, None)),
        ("Unknown speed", "255", (None, None)),
        ("7.0 GT/s PCIe", "63", (None, None)),
        ("", "", (None, None)),
        ("\x00\xff", "sixteen", (None, None)),
    ],
)
def test_what_is_no_speed_or_width_is_not_known(root, speed, width, known):
    adapter(root, now=(speed, width))
    (link,) = read_nic_pcie(root.path).links

    assert (link.now.generation, link.now.width) == known


def test_a_tree_that_half_vanished_says_less_and_never_raises(root):
    folder = root.path / adapter(root)
    (folder / "current_link_speed").unlink()
    (folder / "max_link_width").unlink()
    (folder / "current_link_width").unlink()
    (folder / "current_link_width").mkdir()  # EISDIR
    (root.path / "sys/class/infiniband/mlx5_0/node_guid").unlink()
    (link,) = read_nic_pcie(root.path).links

    assert (link.guid, link.now) == ("mlx5_0", PcieCapability())
    assert link.adapter == PcieCapability(generation=5)


def test_what_has_no_pcie_link_of_its_own_is_left_out(root):
    folder = adapter(root)
    virtual = device(root, f"{PORT}/0000:3b:00.2")
    listed(root, "infiniband", "mlx5_9", virtual)
    (root.path / virtual / "physfn").symlink_to(root.path / folder)
    root.write("sys/devices/pci0000:3a/0000:3a:03.0/virtio2/uevent", "")
    listed(root, "net", "eth0", "sys/devices/pci0000:3a/0000:3a:03.0/virtio2")
    root.write("sys/class/net/lo/operstate", "unknown\n")
    root.write("sys/class/net/bonding_masters", "bond0\n")
    listed(root, "net", "gone", "sys/devices/gone")

    assert [link.address for link in read_nic_pcie(root.path).links] == [NIC]


def test_an_adapter_without_a_port_above_it_has_no_slot(root):
    listed(root, "net", "ens1", device(root, "0000:00:05.0"))
    (link,) = read_nic_pcie(root.path).links

    assert (link.guid, link.port) == (None, PcieCapability())


@pytest.mark.parametrize("error", [PermissionError(13, "denied"), OSError(5, "EIO")])
def test_a_tree_that_may_not_be_looked_into_has_no_known_links(root, monkeypatch, error):
    def refuse(*_args, **_kinds):
        raise error

    adapter(root)
    monkeypatch.setattr(Path, "open", refuse)
    assert {link.now for link in read_nic_pcie(root.path).links} == {PcieCapability()}
    for look in ("stat", "resolve"):
        monkeypatch.setattr(Path, look, refuse)
    assert read_nic_pcie(root.path) == NicPcieLinks()


def test_a_machine_without_adapters_has_none(tmp_path):
    assert read_nic_pcie(tmp_path) == NicPcieLinks()
