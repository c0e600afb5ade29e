"""Network interfaces and bonds out of a recorded tree."""

from pathlib import Path

import pytest
from support.fake_root import FakeRoot

from gpuops.host.net.interfaces import Bond, BondSlave, Interfaces, read_interfaces

UP = {"operstate": "up", "carrier": "1", "flags": "0x1003", "address": "b8:3f:d2:00:00:01"}
WHOLE, DEFAULTED, EXPIRED = "61", "69", "181"


def interface(root, name, *, device=True, **files):
    for file, text in (UP | files).items():
        root.write(f"sys/class/net/{name}/{file}", f"{text}\n")
    if device:
        root.write(f"sys/class/net/{name}/device/vendor", "0x15b3\n")
    return root


def slave(root, name, *, state=WHOLE, mii="up", speed="25000", **files):
    interface(root, name, speed=speed, carrier_down_count="3", **files)
    folder = f"sys/class/net/{name}/bonding_slave"
    root.write(f"{folder}/mii_status", f"{mii}\n")
    root.write(f"{folder}/ad_actor_oper_port_state", f"{state}\n")
    root.write(f"{folder}/perm_hwaddr", f"b8:3f:d2:00:00:{name[-1]}0\n")


def bond(root, *, mode="802.3ad 4", slaves="ens0 ens1", partner="98:03:9b:00:00:01"):
    interface(root, "bond0", device=False)
    for file, text in (("mode", mode), ("slaves", slaves), ("ad_partner_mac", partner)):
        root.write(f"sys/class/net/bond0/bonding/{file}", f"{text}\n")


@pytest.fixture
def root(tmp_path):
    return FakeRoot(tmp_path)


def only(root, name="ens0"):
    return next(item for item in read_interfaces(root.path).interfaces if item.name == name)


def test_a_bond_and_its_slaves_are_read(root):
    bond(root)
    slave(root, "ens0")
    slave(root, "ens1", state="N/A", mii="down")
    found = read_interfaces(root.path)
    master, first, second = found.interfaces

    assert found.bonds == (
        Bond(name="bond0", mode="802.3ad", slaves=("ens0", "ens1"), has_partner=True),
    )
    assert (master.is_physical, master.has_link, master.slave) == (False, True, None)
    assert (first.address, first.rate_gbs, first.carrier_downs) == ("b8:3f:d2:00:00:00", 3.125, 3)
    assert first.slave == BondSlave(mii_status="up", actor_state=61)
    assert second.slave == BondSlave(mii_status="down", actor_state=None)


@pytest.mark.parametrize(
    ("state", "alone"),
    [(WHOLE, False), (DEFAULTED, True), (EXPIRED, True), ("N/A", False), ("", False)],
)
def test_a_port_state_of_lacp_tells_whether_a_partner_answers(root, state, alone):
    slave(root, "ens0", state=state)

    assert only(root).slave.is_alone is alone


@pytest.mark.parametrize(
    ("mode", "partner", "known"),
    [
        ("802.3ad 4", "00:00:00:00:00:00", False),
        ("802.3ad 4", "98:03:9b:00:00:01", True),
        ("802.3ad 4", "", None),  # without CAP_NET_ADMIN
        ("active-backup 1", "00:00:00:00:00:00", None),
        ("", "00:00:00:00:00:00", None),
    ],
)
def test_a_partner_of_zeros_is_none(root, mode, partner, known):
    bond(root, mode=mode, partner=partner)

    assert read_interfaces(root.path).bonds[0].has_partner is known


@pytest.mark.parametrize(
    ("files", "link"),
    [
        ({}, True),
        ({"carrier": "0", "operstate": "down"}, False),
        ({"carrier": "", "operstate": "down", "flags": "0x1002"}, False),
        ({"carrier": "1", "operstate": "unknown"}, True),
        ({"carrier": "1", "operstate": "dormant"}, True),
        ({"carrier": "", "operstate": "up"}, True),
        ({"carrier": "", "operstate": "lowerlayerdown"}, False),
        ({"carrier": "", "operstate": "unknown"}, None),
        ({"carrier": "yes", "operstate": "\x00\xff", "flags": "up"}, None),
        ({"carrier": "", "operstate": "", "flags": ""}, None),
    ],
)
def test_a_link_is_there_not_there_or_not_known(root, files, link):
    interface(root, "ens0", **files)

    assert only(root).has_link is link


@pytest.mark.parametrize(
    ("speed", "rate_gbs"),
    [("100000", 12.5), ("-1", None), ("0", None), ("4294967295", None), ("fast", None)],
)
def test_a_speed_that_is_not_known_is_none(root, speed, rate_gbs):
    slave(root, "ens0", speed=speed)

    assert only(root).rate_gbs == rate_gbs


@pytest.mark.parametrize("address", ["00:00:00:00:00:00", "", "garbage", "../x"])
def test_an_address_that_is_none_names_nothing(root, address):
    interface(root, "ens0", address=address)

    assert only(root).address is None


@pytest.mark.parametrize(
    ("settings", "expected"),
    [(("somaxconn", "netdev_max_backlog"), True), (("somaxconn",), False), ((), None)],
)
def test_the_settings_of_the_kernel_tell_a_containers_namespace(root, settings, expected):
    for name in settings:
        root.write(f"proc/sys/net/core/{name}", "4096\n")

    assert read_interfaces(root.path).in_host_namespace is expected


def test_files_that_are_folders_and_entries_that_are_files_say_nothing(root):
    root.write("sys/class/net/bonding_masters", "bond0\n")
    for file in ("carrier", "operstate", "flags", "speed"):
        (root.path / "sys/class/net/ens0" / file).mkdir(parents=True)
    (found,) = read_interfaces(root.path).interfaces

    assert (found.has_link, found.rate_gbs, found.is_switched_on) == (None, None, None)


@pytest.mark.parametrize("error", [PermissionError(13, "denied"), OSError(5, "EIO")])
def test_a_tree_that_may_not_be_looked_into_says_nothing(root, monkeypatch, error):
    def refuse(*_args, **_kinds):
        raise error

    bond(root)
    slave(root, "ens0")
    for look in ("stat", "open"):
        monkeypatch.setattr(Path, look, refuse)
    found = read_interfaces(root.path)

    assert found.bonds == ()
    assert {(item.is_physical, item.has_link) for item in found.interfaces} == {(False, None)}
    monkeypatch.setattr(Path, "iterdir", refuse)
    assert read_interfaces(root.path) == Interfaces()


def test_a_machine_that_lists_no_interfaces_has_none(tmp_path):
    assert read_interfaces(tmp_path) == Interfaces()


def test_an_interface_of_rdma_is_known_as_one(root):
    interface(root, "ens0")
    root.write("sys/class/net/ens0/device/infiniband/mlx5_0/node_guid", "1\n")

    assert only(root).has_rdma
