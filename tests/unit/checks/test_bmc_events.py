"""The BMC's event log: made-up outputs of ipmitool, what is read, and what becomes of it."""

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.checks import NODE, said
from support.fake_root import FakeRoot

from gpuops.checks.core.check import JudgeContext
from gpuops.checks.host.bmc_events import Parameters, judge
from gpuops.errors import ProbeError
from gpuops.host.bmc import BmcEvent, BmcLog, parse_log, read_bmc_log
from gpuops.host.node_state import Counters, Repair

HOUR_S = 3600.0
BOOTED = Counters(since_boot_s=2 * HOUR_S, t_us=10**15)
LIMITS = Parameters(hours=24, source="us")

# The form of 1.8.18, then that of 1.8.19; a log without names of sensors, then one with them.
LOG = """   1 |  Pre-Init  |0000000123| Memory #0x02 | Uncorrectable ECC | Asserted
   2 | 05/04/2026 | 10:00:00 | Memory #0x02 | Uncorrectable ECC (@DIMMB2(CPU1)) | Asserted
  1a | 05/04/26 | 10:30:00 UTC | Power Supply PS2 Status | Power Supply AC lost | Asserted
  1b | 05/04/26 | 10:31:00 UTC | Temperature In | Upper Critical going high | Asserted | Reading 47
  1c | 05/04/26 | 10:32:00 UTC | Memory #0x88 | Correctable ECC (CPU0 |  DIMMD7) | Asserted
  1d | Linux kernel panic: Fatal excep
  1e | 05/04/2026 | 10:33:00 | OEM record c1 | 000137 | 010203040506
"""


def event(sensor="Memory #0x02", text="Uncorrectable ECC", age_s=HOUR_S, *, asserted=True):
    return BmcEvent(sensor=sensor, text=text, asserted=asserted, age_s=age_s)


PSU = ("Power Supply #0x51", "Failure detected")
HOTTER = ("Temperature #0x04", "Upper Non-recoverable going high")
HOT = ("Temperature #0x04", "Upper Critical going high")


IERR = ("Processor #0xc9", "IERR")
TRIP = ("Processor #0x70", "Thermal Trip")
CATERR = ("Processor #0x80", "State Asserted")  # Intel's boards; sel list shows no names


def findings(*events, repairs=(), **more):
    context = JudgeContext(node=NODE, counters=BOOTED, repairs=repairs)
    return said(judge(BmcLog(events=events, **more), LIMITS, context))


def machine(path, script, device=True):
    root = FakeRoot(path).write("usr/bin/ipmitool", f"#!/bin/sh\n{script}\n")
    (root.path / "usr/bin/ipmitool").chmod(0o755)
    return root.write("dev/ipmi0", "").path if device else root.path


def test_both_forms_of_the_log_are_read():
    now = 1777892400.0  # 2026-05-04 11:00:00 UTC
    events = parse_log(LOG, now)

    assert [(item.sensor, item.age_s) for item in events] == [
        ("Memory #0x02", None),
        ("Memory #0x02", 3600.0),
        ("Power Supply PS2 Status", 1800.0),
        ("Temperature In", 1740.0),
        ("Memory #0x88", 1680.0),
    ]
    assert events[4].text == "Correctable ECC (CPU0 | DIMMD7)"
    assert {item.age_s for item in parse_log(LOG, None)} == {None}
    assert findings(*events) == [
        ("n1", "fail", "host_hw.dimm"),
        ("n1", "warn", "gpu_hw.thermal_power"),
        ("n1", "warn", "gpu_hw.thermal_power"),
    ]


@pytest.mark.parametrize(
    ("events", "verdict"),
    [
        ([event(age_s=2 * HOUR_S)], ("fail", "host_hw.dimm")),
        ([event("Fan FAN1", "Lower Critical going low")], ("warn", "gpu_hw.thermal_power")),
        ([event(age_s=2 * HOUR_S + 1)], ("warn", "host_hw.dimm")),
        ([event(age_s=24 * HOUR_S + 1)], ("pass", None)),
        ([event(age_s=None)], ("pass", None)),
        ([event(*PSU)], ("warn", "gpu_hw.thermal_power")),
        (
            [event(*HOT), event(*HOTTER), event(*HOTTER, asserted=False)],
            ("warn", "gpu_hw.thermal_power"),
        ),
        ([event(*PSU), event(*PSU, asserted=False)], ("pass", None)),
        ([event(*PSU, asserted=False), event(*PSU)], ("warn", "gpu_hw.thermal_power")),
        ([event(*PSU), event(*PSU, age_s=None, asserted=False)], ("pass", None)),
        ([event(*HOT)], ("warn", "gpu_hw.thermal_power")),
        ([event(*HOT), event(*HOT, asserted=False)], ("pass", None)),
        (
            [event(*HOT), event("Temperature #0x05", HOT[1], asserted=False)],
            ("warn", "gpu_hw.thermal_power"),
        ),
        ([event(*IERR)], ("warn", "host_hw.cpu")),
        ([event(*IERR), event(*IERR, asserted=False)], ("warn", "host_hw.cpu")),
        ([event(*IERR, age_s=25 * HOUR_S), event(*IERR, asserted=False)], ("pass", None)),
        ([event(*TRIP), event(*TRIP, asserted=False)], ("warn", "gpu_hw.thermal_power")),
        ([event(*CATERR)], ("warn", "host_hw.cpu")),
        ([event(*CATERR), event(*CATERR, asserted=False)], ("pass", None)),
        ([event(IERR[0], "IERR (CPU 2 | APIC ID 35 )")], ("warn", "host_hw.cpu")),
        ([event(IERR[0], "Uncorrectable machine check exception")], ("warn", "host_hw.cpu")),
        ([event(IERR[0], "Presence detected")], ("pass", None)),
        ([event(IERR[0], "Correctable machine check error")], ("pass", None)),
        ([event("System Event #0x10", "State Asserted")], ("pass", None)),
        ([event(text="Correctable ECC")], ("pass", None)),
        ([event("Drive Slot #0x01", "Uncorrectable ECC")], ("pass", None)),
        ([event(text="all is well, no Uncorrectable ECC")], ("pass", None)),
        ([], ("pass", None)),
    ],
)
def test_only_a_fresh_fault_that_stands_is_told(events, verdict):
    assert findings(*events) == [("n1", *verdict)]


def test_a_repair_of_the_node_ends_it():
    at = round(BOOTED.t_us - HOUR_S * 1e6)
    later, earlier = (
        Repair(entity_kind="node", entity_id="n1", t_us=at + off, by="ann", what="DIMM")
        for off in (1, -1)
    )

    assert findings(event(), repairs=(later,)) == [("n1", "pass", None)]
    assert findings(event(), repairs=(earlier,)) == [("n1", "fail", "host_hw.dimm")]


def test_one_that_repeats_is_one_finding():
    assert findings(event(), event(age_s=60)) == [("n1", "fail", "host_hw.dimm")]


def test_ages_are_by_the_clock_of_the_controller(tmp_path):
    script = """[ "$TZ" = UTC0 ] || exit 1
case "$*" in
"sel time get") echo "01/01/2001 05:00:00" ;;
"sel list last 64") echo "1 | 01/01/2001 | 04:00:00 | Memory #0x02 | Uncorrectable ECC | Asserted"
  echo "2 | 05/04/2026 | 04:00:00 | Memory #0x02 | Uncorrectable ECC | Asserted" ;;
esac"""
    log = read_bmc_log(machine(tmp_path, script), 20)

    assert [item.age_s for item in log.events] == [3600.0, None]


@pytest.mark.parametrize(
    "script",
    [
        "exit 0",
        "echo 'SEL has no entries'",
        "head -c 3000 /dev/zero",
        "printf '|||||||\\n| Asserted\\n1|2|3|4|5|Asserted\\n'",
        "echo 'Could not open device at /dev/ipmi0' >&2; exit 1",
        "kill -9 $$",
        "exec sleep 1000",
    ],
    ids=["empty", "no entries", "zeros", "garbage", "EIO", "killed", "hangs"],
)
def test_odd_answers_convict_nobody(tmp_path, script):
    log = read_bmc_log(machine(tmp_path, script), 1.2)
    context = JudgeContext(node=NODE, counters=BOOTED)

    assert {item.status.word for item in judge(log, LIMITS, context)} <= {"pass", "skip"}


def test_without_tool_device_or_permission_nothing_is_asked(tmp_path, monkeypatch):
    assert read_bmc_log(tmp_path, 5).missing == "ipmitool is not installed"
    root = machine(tmp_path / "a", "exit 0", device=False)
    assert read_bmc_log(root, 5).missing == "no controller: there is no /dev/ipmi0"
    assert findings(missing="ipmitool is not installed") == [("n1", "skip", None)]
    monkeypatch.setattr("gpuops.host.bmc.os.access", lambda _path, mode: mode == os.X_OK)
    with pytest.raises(ProbeError, match="no permission to use"):
        read_bmc_log(machine(tmp_path / "b", "exit 0"), 5)


@given(st.text(max_size=300), st.none() | st.floats(0, 4e9))
def test_any_text_is_read_without_an_error(text, now_s):
    parse_log(text, now_s)
    parse_log(f"1 | {text} | {text} | Memory | Uncorrectable ECC | Asserted", now_s)
