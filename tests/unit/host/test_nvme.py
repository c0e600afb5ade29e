"""NVMe drives out of a recorded tree and a fake nvme-cli."""

import pytest
from support.fake_root import FakeRoot

from gpuops.host.storage.nvme import Nvme, NvmeDrive, read_nvme, with_smart_log

# nvme-cli 1.x and 2.x, shortened; the third is of `-v` and of counters beyond 2^53.
LOGS = {
    '{"critical_warning":0,"temperature":311,"percent_used":4,"media_errors":0}': (0, 4, 0),
    '{"critical_warning":4,"avail_spare":100,"percentage_used":101,"media_errors":7}': (4, 101, 7),
    '{"critical_warning":{"value":2,"temp_threshold":1},"media_errors":"18446744073709551616"}': (
        2,
        None,
        2**64,
    ),
}
BARE = NvmeDrive(name="nvme0", serial="S1")


def drive(root, name="nvme0", serial="S5G7NE0R", state="live"):
    for file, text in {
        "serial": f"{serial}   ",
        "model": "SAMSUNG MZQL23T8HCLS-00A07  ",
        "state": state,
        "transport": "pcie",
    }.items():
        root.write(f"sys/class/nvme/{name}/{file}", f"{text}\n")
    return root


def tool(root, script):
    root.write("usr/sbin/nvme", f"#!/bin/sh\n{script}\n")
    (root.path / "usr/sbin/nvme").chmod(0o755)
    return root


@pytest.mark.parametrize(("text", "values"), LOGS.items())
def test_both_spellings_of_the_log_are_read(text, values):
    found = with_smart_log(BARE, text)

    assert (found.critical_warning, found.used_percent, found.media_errors) == values


@pytest.mark.parametrize("text", ["", "usage: nvme", "[]", "{}", "[" * 100_000])
def test_what_is_no_log_is_trouble_and_not_health(text):
    found = with_smart_log(BARE, text)

    assert (found.critical_warning, found.trouble) == (None, "nvme smart-log printed no log")


def test_without_the_tool_the_state_is_all(tmp_path):
    assert read_nvme(drive(FakeRoot(tmp_path)).path, 10) == Nvme(
        (
            NvmeDrive(
                name="nvme0",
                serial="S5G7NE0R",
                model="SAMSUNG MZQL23T8HCLS-00A07",
                state="live",
                transport="pcie",
            ),
        )
    )


def test_each_drive_is_asked(tmp_path):
    root = drive(drive(FakeRoot(tmp_path)), "nvme1", "S2")
    script = 'case "$*" in *nvme1) echo "no such device" >&2; exit 1;; esac\n'
    tool(root, script + 'echo \'{"critical_warning": 1, "media_errors": 3}\'')
    good, bad = read_nvme(root.path, 20).drives

    assert (good.critical_warning, good.media_errors, good.trouble) == (1, 3, None)
    assert bad.trouble == "nvme exited with code 1: no such device"


def test_a_tool_that_hangs_costs_the_budget_and_no_more(tmp_path):
    root = tool(drive(drive(FakeRoot(tmp_path)), "nvme1"), "exec sleep 1000")
    first, second = read_nvme(root.path, 0.3).drives

    assert first.trouble.startswith("nvme gave no answer in")
    assert second.trouble == "no time was left to read it"
