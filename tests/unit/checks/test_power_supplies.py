"""Power supplies out of made-up outputs of ipmitool."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.checks import CASE, said
from support.fake_root import FakeRoot

from gpuops.checks.core.check import NoParameters
from gpuops.checks.host.power_supplies import judge
from gpuops.host.bmc import PowerSupplies, parse_supplies, read_power_supplies

WELL = "PS{0} Status       | C{0}h | ok  | 10.{0} | Presence detected"
FAILED = WELL + ", Failure detected"
NO_INPUT = WELL + ", Power Supply AC lost"
EMPTY = "PS{0} Status       | C{0}h | ok  | 10.{0} |"
NO_READING = "PS{0} Status       | C{0}h | ns  | 10.{0} | No Reading"
WATTS = "PS{0} Input Power  | D{0}h | ok  | 10.{0} | 640 Watts"
LOST = "PS Redundancy    | 77h | ok  | 10.9 | Redundancy Lost"
TOO_FEW = "PS Redundancy    | 77h | ok  | 10.9 | Non-Redundant: Insufficient Resources"


def findings(*rows):
    text = "\n".join(row.format(number) for number, row in enumerate(rows, 1))
    return judge(PowerSupplies(sensors=parse_supplies(text)), NoParameters(), CASE)


@pytest.mark.parametrize(
    ("rows", "status"),
    [
        ([WELL, WELL, WATTS], "pass"),
        ([WELL, EMPTY, NO_READING], "pass"),
        ([WELL, LOST], "pass"),
        ([WELL, TOO_FEW], "pass"),
        ([WELL, FAILED], "warn"),
        ([WELL, WELL + ", Predictive failure"], "warn"),
        ([WELL, NO_INPUT, LOST], "warn"),
        ([WELL, FAILED, TOO_FEW], "fail"),
        ([FAILED, FAILED, TOO_FEW], "warn"),
        ([], "skip"),
        (["Unable to open SDR for reading"], "skip"),
        (["|||||", "PS | xx | ok | 10.1 | Failure detected"], "skip"),
    ],
)
def test_a_lost_supply_warns_and_fails_only_where_the_rest_do_not_suffice(rows, status):
    (finding,) = findings(*rows)

    assert finding.status.word == status


def test_the_lost_one_is_named_and_a_feed_is_shared_by_nodes():
    (finding,) = findings(WELL, NO_INPUT, TOO_FEW)

    assert said([finding]) == [("n1", "fail", "gpu_hw.thermal_power")]
    assert finding.shared_cause
    assert (
        "lost: PS2 Status (presence detected, power supply ac lost); 1 delivers" in finding.message
    )


@pytest.mark.parametrize(
    ("script", "status"),
    [
        (f"[ \"$*\" = 'sdr type Power Supply' ] && echo '{WELL.format(1)}'", "pass"),
        ("exit 0", "skip"),
        ("echo 'Could not open device' >&2; exit 1", "skip"),
        ("exec sleep 1000", "skip"),
    ],
    ids=["answers", "empty", "EIO", "hangs"],
)
def test_an_answer_is_read_and_none_is_no_fault(tmp_path, script, status):
    root = FakeRoot(tmp_path).write("dev/ipmi0", "")
    root.write("usr/bin/ipmitool", f"#!/bin/sh\n{script}\n")
    (root.path / "usr/bin/ipmitool").chmod(0o755)
    found = read_power_supplies(root.path, 1.2 if "sleep" in script else 20)

    assert said(judge(found, NoParameters(), CASE)) == [("n1", status, None)]
    assert read_power_supplies(tmp_path / "none", 1.2).missing == "ipmitool is not installed"


@given(st.text(max_size=300))
def test_any_text_is_read_without_an_error(text):
    judge(PowerSupplies(sensors=parse_supplies(text)), NoParameters(), CASE)
