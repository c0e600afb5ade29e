"""The fabric manager, on made-up boards with NVSwitches and without."""

import pytest
from support.checks import NODE, limit, said
from support.fake_root import FakeRoot

from gpuops.checks.core.check import JudgeContext
from gpuops.checks.fabric.fabric_manager import Parameters, judge
from gpuops.host.node_state import Counters
from gpuops.host.pci.nvswitch import NvSwitchBoard, read_nvswitch_board

LIMITS = Parameters(starting_s=limit(fail=300))
A100, H100 = 0x1AF1, 0x22A3
MISSING = {"fabric_manager": False, "switches": 6, "models": (A100,)}


def findings(board, since_boot_s=9000.0):
    context = JudgeContext(node=NODE, counters=Counters(since_boot_s=since_boot_s))
    return said(judge(board, LIMITS, context))


def machine(path, *, model="0x22a3", driver="nvidia-nvswitch", processes=("systemd",), namespace=1):
    root = FakeRoot(path)
    switch = root.path / "sys/bus/pci/devices/0000:07:00.0"
    root.write(f"{switch}/vendor", "0x10de\n").write(f"{switch}/class", "0x068000\n")
    root.write(f"{switch}/device", f"{model}\n")
    if driver:
        (switch / "driver").symlink_to(f"/sys/bus/pci/drivers/{driver}")
    for pid, name in enumerate(processes, 1):
        root.write(f"proc/{pid}/comm", f"{name}\n")
    link = root.path / "proc/self/ns/pid"
    link.parent.mkdir(parents=True)
    link.symlink_to("pid:[4026531836]" if namespace == 1 else "pid:[4026532801]")
    return root


def test_on_an_h100_board_without_it_a_node_warns_and_on_an_a100_board_it_fails(tmp_path):
    h100 = read_nvswitch_board(machine(tmp_path / "h100").path)
    a100 = read_nvswitch_board(machine(tmp_path / "a100", model="0x1af1").path)

    assert (h100.switches, h100.models, h100.fabric_manager) == (1, (H100,), False)
    assert findings(h100) == [("n1", "warn", "gpu_sw.fabric")]
    assert findings(a100) == [("n1", "fail", "gpu_sw.fabric")]


def test_where_it_runs_it_passes(tmp_path):
    root = machine(tmp_path, processes=("systemd", "nv-fabricmanage", "slurmd"))

    assert findings(read_nvswitch_board(root.path)) == [("n1", "pass", None)]


@pytest.mark.parametrize("driver", [None, "vfio-pci"])
def test_switches_that_the_driver_does_not_have_are_not_ours(tmp_path, driver):
    board = read_nvswitch_board(machine(tmp_path, driver=driver).path)

    assert board == NvSwitchBoard()
    assert findings(board) == [("n1", "skip", None)]


def test_a_board_without_switches_and_a_guest_with_gpus_alone_are_skipped(tmp_path):
    assert read_nvswitch_board(FakeRoot(tmp_path).gpu("0000:1b:00.0").path) == NvSwitchBoard()


@pytest.mark.parametrize(
    "changed", [{"namespace": 2}, {"processes": ()}], ids=["a container", "hidepid"]
)
def test_where_processes_are_hidden_it_is_not_missing(tmp_path, changed):
    board = read_nvswitch_board(machine(tmp_path, model="0x1af1", **changed).path)

    assert board.fabric_manager is None
    assert findings(board) == [("n1", "unknown", None)]


@pytest.mark.parametrize(
    ("changed", "since_boot_s", "status"),
    [
        ({}, 301, "fail"),
        ({}, 299, "warn"),
        ({"divided": True}, 9000, "warn"),
        ({"nvlink_off": True}, 9000, "skip"),
        ({"models": ()}, 9000, "warn"),
        ({"models": (A100, H100)}, 9000, "warn"),
        ({"models": (0xFFFF,)}, 9000, "warn"),
    ],
)
def test_only_a_board_that_cannot_work_without_it_fails(changed, since_boot_s, status):
    ((_, verdict, _),) = findings(NvSwitchBoard(**{**MISSING, **changed}), since_boot_s)

    assert verdict == status


def test_mig_and_a_driver_without_nvlink_are_seen(tmp_path):
    root = machine(tmp_path)
    root.write("proc/driver/nvidia/params", "EnableMSI: 1\nNvLinkDisable: 1\n")
    root.write("proc/driver/nvidia/capabilities/gpu3/mig/gi1/access", "")
    board = read_nvswitch_board(root.path)

    assert (board.divided, board.nvlink_off) == (True, True)
    root.write("proc/driver/nvidia/params", b"\xff\x00 NvLinkDisable: 1")
    assert not read_nvswitch_board(root.path).nvlink_off
