"""The table of `gpuops profile capture`, and what its rows take from the facts."""

import tomllib
from dataclasses import fields
from pathlib import Path

import pytest
from support.fake_root import FakeRoot
from support.gpus import eight, gpu, node, part

from gpuops.checks import check_named
from gpuops.checks.core.profile import Profile
from gpuops.checks.core.profile_files import fits, parse_profile
from gpuops.gate.profile_capture import profile_text
from gpuops.gate.profile_rows import ROWS
from gpuops.host.infiniband import Port, RdmaPorts
from gpuops.host.kernel_state import Modules
from gpuops.host.net.interfaces import read_interfaces
from gpuops.host.pci.nic_link import NicPcieLink, NicPcieLinks, PcieCapability
from gpuops.host.systemd import Unit, Units

NOT_EXPECTED = {"name", "about", "path", "inherits", "match"}
# What jobs need of them is nothing that a node shows.
BY_HAND = {"ib_pkeys", "users"}


def captured(tmp_path, **facts):
    text = profile_text(facts, node="n1", day="2026-03-02", root=tmp_path)
    earlier = {"h100-sxm": Profile(name="h100-sxm")}
    return parse_profile(Path("rack7.toml"), tomllib.loads(text), earlier)


def test_each_key_of_a_profile_has_a_row_or_is_written_by_hand():
    keys = {item.name for item in fields(Profile)} - NOT_EXPECTED

    assert {row.key for row in ROWS} == keys - BY_HAND
    assert all(check_named(row.check).probe for row in ROWS)


def test_only_what_runs_is_required(tmp_path):
    units = (
        Unit(name="munge", load="loaded", active="active"),
        Unit(name="sssd", load="loaded", active="inactive"),
        Unit(name="docker", load="not-found", active="inactive"),
    )
    profile = captured(
        tmp_path,
        services=Units(systemd=True, units=units),
        kernel_modules=Modules(("nvidia",), ("gdrdrv",)),
    )

    assert profile.services.value == ("munge",)
    assert profile.services.source == "captured on n1, 2026-03-02 (services)"
    assert profile.kernel_modules.value == ("nvidia",)
    assert profile.match.nodes == ("n1",)


def test_what_differs_between_the_gpus_is_left_out(tmp_path):
    odd = part(gpu(7), "power", limit_w=500.0)
    profile = captured(tmp_path, gpus=node(*eight()[:7], odd))

    assert profile.power_limit_w is None
    assert (profile.nvlink_count.value, profile.fabric.value) == (18, True)
    assert not profile.nvlink_count.is_shipped


def test_a_name_with_signs_of_a_pattern_matches_itself(tmp_path):
    named = "NVIDIA X100 (2) [a+b]"
    profile = captured(tmp_path, gpus=node(gpu(0, name=named)))

    assert profile.match.gpu == r"NVIDIA X100 \(2\) \[a\+b\]"


def test_a_node_with_several_models_is_matched_by_its_name(tmp_path):
    """No pattern of one model fits all its GPUs."""
    mixed = node(*eight()[:6], *(gpu(n, name="NVIDIA A40") for n in (6, 7)))
    profile = captured(tmp_path, gpus=mixed)

    assert profile.about == "captured on n1, 2026-03-02: 6 x NVIDIA H100 80GB HBM3, 2 x NVIDIA A40"
    assert (profile.match.gpu, profile.match.gpu_count) == (None, 8)
    assert fits(profile.match, "n1", [item.name for item in mixed.nvml.gpus], 8)
    assert not fits(profile.match, "n2", ["NVIDIA A40"] * 8, 8)


def test_interfaces_that_other_nodes_do_not_have_are_left_out(tmp_path):
    root = FakeRoot(tmp_path)
    for name in ("eth0", "usb0", "enx0a1b2c3d4e5f", "ibx0a1b2c3d4e5f"):
        root.write(f"sys/class/net/{name}/flags", "0x1003")
        root.write(f"sys/class/net/{name}/carrier", "1")
        root.write(f"sys/class/net/{name}/device/uevent", "")
    root.write("sys/class/net/usb0/device/bInterfaceNumber", "00")
    profile = captured(tmp_path, interfaces=read_interfaces(root.path))

    assert profile.interfaces.value == ("eth0",)


def test_a_bond_is_required_and_not_each_slave_of_it(tmp_path):
    root = FakeRoot(tmp_path)
    for name in ("eth0", "eth1", "eth2", "bond0"):
        root.write(f"sys/class/net/{name}/carrier", "1")
    for name in ("eth0", "eth1", "eth2"):
        root.write(f"sys/class/net/{name}/device/uevent", "")
    root.write("sys/class/net/bond0/bonding/mode", "802.3ad 4")
    root.write("sys/class/net/bond0/bonding/slaves", "eth0 eth1")
    profile = captured(tmp_path, interfaces=read_interfaces(root.path))

    assert profile.interfaces.value == ("bond0", "eth2")


def rdma(*rates):
    return RdmaPorts(
        tuple(
            Port(device=f"mlx5_{n}", number=1, guid=f"g{n}", state="ACTIVE", rate_gbs=rate)
            for n, rate in enumerate(rates)
        )
    )


@pytest.mark.parametrize(
    ("rates", "expected"),
    [
        ((50.0,) * 8, (50.0,)),
        ((3.125, *[50.0] * 8), (*[50.0] * 8, 3.125)),
        ((50.0, None), None),
        ((), None),
    ],
)
def test_a_slow_port_does_not_lower_what_the_fast_ones_must_have(tmp_path, rates, expected):
    profile = captured(tmp_path, infiniband=rdma(*rates))

    assert (profile.nic_rate_gbs and profile.nic_rate_gbs.value) == expected


def nic(address, width, *, guid="g", most=16):
    return NicPcieLink(
        address=address,
        names=(address,),
        guid=guid,
        now=PcieCapability(width=width),
        adapter=PcieCapability(width=most),
    )


@pytest.mark.parametrize(
    ("others", "width"),
    [
        ((), 16),
        ((nic("management", 4, guid=None, most=4),), 16),
        ((nic("storage", 8, most=8),), None),
        ((nic("management", 8, guid=None),), None),
    ],
)
def test_a_narrow_adapter_does_not_lower_what_the_others_must_have(tmp_path, others, width):
    links = NicPcieLinks((nic("a", 16), nic("b", 16), *others))
    profile = captured(tmp_path, nic_pcie=links)

    assert (profile.nic_pcie_width and profile.nic_pcie_width.value) == width
