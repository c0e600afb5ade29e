"""The two ways of adapters to GPU memory."""

import pytest
from support.checks import CASE, said
from support.fake_root import FakeRoot

from gpuops.checks.core.check import NoParameters
from gpuops.checks.nic.gpudirect_rdma import judge
from gpuops.host.pci.nvswitch import NvSwitchBoard, read_nvswitch_board

CLOSED = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.54.03  Tue Jun  6 22:20:39 UTC 2023\n"
OPEN = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.124.06  Release Build\n"


def board(path, *, version=CLOSED, module=None, vendor="0x15b3", switch="0x10de"):
    root = FakeRoot(path)
    device = root.path / "sys/bus/pci/devices/0000:07:00.0"
    root.write(f"{device}/vendor", switch).write(f"{device}/class", "0x068000")
    (device / "driver").symlink_to("/sys/bus/pci/drivers/nvidia-nvswitch")
    root.write("sys/class/infiniband/mlx5_0/device/vendor", vendor)
    if version is not None:
        root.write("proc/driver/nvidia/version", version)
    if module:
        root.write(f"sys/module/{module}/refcnt", "0")
    return read_nvswitch_board(root.path)


@pytest.mark.parametrize(
    ("changed", "verdict"),
    [
        ({}, ("warn", "host_sw.config")),
        ({"module": "nvidia_peermem"}, ("pass", None)),
        ({"module": "nv_peer_mem"}, ("pass", None)),
        ({"version": OPEN}, ("pass", None)),
        ({"version": None}, ("skip", None)),
        ({"version": ""}, ("skip", None)),
        ({"version": "garbage \x00"}, ("skip", None)),
        ({"vendor": "0x1d0f"}, ("skip", None)),
        ({"switch": "0x1000"}, ("skip", None)),
    ],
    ids=[
        "neither", "peermem", "its predecessor", "DMA-BUF", "no version", "empty", "garbage",
        "another maker's adapter", "no NVSwitch",
    ],
)  # fmt: skip
def test_only_a_board_with_neither_way_warns(tmp_path, changed, verdict):
    assert said(judge(board(tmp_path, **changed), NoParameters(), CASE)) == [("n1", *verdict)]


def test_a_board_without_adapters_needs_none():
    facts = NvSwitchBoard(switches=4, open_driver=False)

    assert said(judge(facts, NoParameters(), CASE)) == [("n1", "skip", None)]
