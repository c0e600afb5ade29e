"""RDMA ports out of a recorded tree."""

from pathlib import Path

import pytest
from support.fake_root import FakeRoot

from gpuops.host.infiniband import RdmaPorts, read_fabric, read_pkeys


def adapter(
    root, name="mlx5_0", *, state="4: ACTIVE", rate="400 Gb/sec (4X NDR)", layer="InfiniBand"
):
    device = f"sys/class/infiniband/{name}"
    root.write(f"{device}/node_guid", "506b:4b03:00f5:6b10\n")
    root.write(f"{device}/fw_ver", "28.39.1002\n")
    port = f"{device}/ports/1"
    root.write(f"{port}/state", f"{state}\n")
    root.write(f"{port}/phys_state", "5: LinkUp\n")
    root.write(f"{port}/rate", f"{rate}\n")
    root.write(f"{port}/link_layer", f"{layer}\n")
    root.write(f"{port}/counters/symbol_error", "3\n")
    root.write(f"{port}/counters/port_rcv_data", "99999999\n")
    root.write(f"{port}/counters/unicast_rcv_packets", "77\n")
    root.write(f"{port}/hw_counters/out_of_sequence", "5\n")
    root.write(f"{port}/hw_counters/lifespan", "10\n")
    return root


def test_a_port_is_read_with_its_errors_and_without_its_traffic(tmp_path):
    (port,) = read_fabric(adapter(FakeRoot(tmp_path)).path).ports

    assert (port.name, port.guid, port.firmware) == (
        "mlx5_0/1",
        "506b:4b03:00f5:6b10",
        "28.39.1002",
    )
    assert (port.state, port.phys_state, port.link_layer) == ("ACTIVE", "LinkUp", "InfiniBand")
    assert port.counters == {"symbol_error": 3, "out_of_sequence": 5}
    assert port.is_active


@pytest.mark.parametrize(
    ("rate", "rate_gbs"),
    [("400 Gb/sec (4X NDR)", 50.0), ("2.5 Gb/sec (1X SDR)", 0.3125), ("fast", None)],
)
def test_gigabits_become_gigabytes(tmp_path, rate, rate_gbs):
    (port,) = read_fabric(adapter(FakeRoot(tmp_path), rate=rate).path).ports

    assert port.rate_gbs == rate_gbs


@pytest.mark.parametrize(
    ("file", "said", "downs"),
    [("carrier_down_count", "3", 3), ("carrier_changes", "7", 3), ("carrier_changes", "0", 0)],
)
def test_losses_of_carrier_are_those_of_the_network_interface(tmp_path, file, said, downs):
    root = adapter(FakeRoot(tmp_path), layer="Ethernet")
    root.write(f"sys/class/infiniband/mlx5_0/device/net/eth0/{file}", f"{said}\n")
    root.write("sys/class/infiniband/mlx5_0/device/net/eth0/dev_port", "0\n")
    root.write("sys/class/infiniband/mlx5_0/device/net/a_second/dev_port", "1\n")
    root.write("sys/class/infiniband/mlx5_0/device/net/a_second/carrier_down_count", "90\n")

    (port,) = read_fabric(root.path).ports
    assert port.counters["carrier_downs"] == downs


def test_a_tree_that_half_vanished_says_less_and_never_raises(tmp_path):
    root = adapter(FakeRoot(tmp_path))
    port = root.path / "sys/class/infiniband/mlx5_0/ports/1"
    for name in ("state", "rate", "phys_state", "link_layer", "counters/symbol_error"):
        (port / name).unlink()
    (port.parent.parent / "fw_ver").unlink()
    (port.parent.parent / "node_guid").unlink()

    (found,) = read_fabric(root.path).ports
    assert (found.state, found.rate_gbs, found.firmware, found.guid) == (None, None, None, "mlx5_0")
    assert not found.is_active


def test_virtual_functions_are_left_out(tmp_path):
    root = adapter(adapter(FakeRoot(tmp_path)), "mlx5_7")
    root.write("sys/class/infiniband/mlx5_7/device/physfn/vendor", "0x15b3\n")

    assert [port.device for port in read_fabric(root.path).ports] == ["mlx5_0"]


def test_a_machine_without_adapters_has_none(tmp_path):
    assert read_fabric(tmp_path) == RdmaPorts()


def keyed(root, *keys, **kinds):
    """Return the tree with an adapter whose P_Key table begins with *keys*."""
    adapter(root, **kinds)
    for index, key in enumerate(keys):
        root.write(f"sys/class/infiniband/mlx5_0/ports/1/pkeys/{index}", f"{key}\n")
    return root


EMPTY = ("0x0000",) * 20


@pytest.mark.parametrize(
    ("table", "expected", "keys", "complete"),
    [
        (("0x7fff", "0x8001", *EMPTY), (), (0x7FFF,), False),
        ((*EMPTY, "0xffff"), (), (0xFFFF,), False),
        (("0x7fff", *EMPTY, "0x8001"), (0x8001,), (0x7FFF, 0x8001), False),
        (("0x0001", "0x8001"), (0x8001,), (0x0001, 0x8001), False),
        (("0x0001", "0x8001"), (0x0001,), (0x0001,), False),
        (("0x7fff", *EMPTY), (0x8001,), (0x7FFF,), True),
        (EMPTY, (), (), True),
        (("0x8000", "0x0000"), (), (), True),
        (("0x7fff", "", *EMPTY), (0x8001,), (0x7FFF,), False),
        (("0x7fff", "0x18001", "key"), (0x8001,), (0x7FFF,), False),
        ((), (0x8001,), (), False),
    ],
)
def test_a_table_is_read_until_the_keys_are_found(tmp_path, table, expected, keys, complete):
    (port,) = read_pkeys(keyed(FakeRoot(tmp_path), *table).path, expected).ports

    assert (port.guid, port.is_active) == ("506b:4b03:00f5:6b10", True)
    assert (port.keys, port.is_complete) == (keys, complete)


def test_an_entry_that_cannot_be_read_leaves_the_table_incomplete(tmp_path):
    root = keyed(FakeRoot(tmp_path), "0x7fff", "0x0000")
    (root.path / "sys/class/infiniband/mlx5_0/ports/1/pkeys/2").mkdir()  # EISDIR
    (port,) = read_pkeys(root.path, (0x8001,)).ports

    assert (port.keys, port.is_complete) == ((0x7FFF,), False)


@pytest.mark.parametrize("error", [PermissionError(13, "denied"), OSError(5, "EIO")])
def test_a_table_that_may_not_be_looked_into_has_no_known_keys(tmp_path, monkeypatch, error):
    def refuse(path, *_args, **_kinds):
        if path.parent.name == "pkeys" or path.name == "physfn":
            raise error
        return found(path)

    root, found = keyed(FakeRoot(tmp_path), "0x7fff"), Path.stat
    monkeypatch.setattr(Path, "stat", refuse)
    assert len(read_fabric(root.path).ports) == 1
    opened = Path.open
    monkeypatch.setattr(Path, "open", lambda path, *args: refuse(path) and opened(path, *args))
    (port,) = read_pkeys(root.path, (0x8001,)).ports

    assert (port.keys, port.is_complete) == ((), False)


@pytest.mark.parametrize("layer", ["Ethernet", "", "\x00"])
def test_only_infiniband_has_partitions(tmp_path, layer):
    assert read_pkeys(keyed(FakeRoot(tmp_path), "0xffff", layer=layer).path, ()).ports == ()


def test_keys_of_a_port_without_a_link_are_of_no_fabric(tmp_path):
    root = keyed(FakeRoot(tmp_path), "0xffff", state="1: DOWN")
    (port,) = read_pkeys(root.path, ()).ports

    assert not port.is_active
    assert read_pkeys(tmp_path / "nothing", ()).ports == ()
