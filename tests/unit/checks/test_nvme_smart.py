"""The verdicts on NVMe drives."""

from dataclasses import replace

import pytest
from support.checks import CASE, NODE, limit, said

from gpuops.checks.core.check import JudgeContext
from gpuops.checks.core.profile import NumberExpectation, Profile
from gpuops.checks.storage.nvme_smart import Parameters, counters, judge
from gpuops.host.node_state import Counters, CounterSample
from gpuops.host.storage.nvme import Nvme, NvmeDrive

LIMITS = Parameters(used_percent=limit(warn=100), media_errors_per_day=limit(warn=1, fail=100))
GOOD = NvmeDrive(
    name="nvme0",
    serial="S1",
    model="SAMSUNG",
    state="live",
    transport="pcie",
    critical_warning=0,
    media_errors=0,
    used_percent=3,
)


def problems(case=CASE, **changes):
    return said(judge(Nvme((replace(GOOD, **changes),), tool=True), LIMITS, case))[1:]


def expecting(count):
    return JudgeContext(
        node=NODE,
        profile=Profile(name="p", nvme_count=NumberExpectation(value=count, source="order 7")),
    )


@pytest.mark.parametrize(("wanted", "status"), [(2, "fail"), (1, "pass"), (0, "warn")])
def test_drives_are_counted_against_the_profile(wanted, status):
    (finding,) = judge(Nvme((GOOD,), tool=True), LIMITS, expecting(wanted))

    assert (finding.status.word, finding.value) == (status, 1)


@pytest.mark.parametrize(
    ("mask", "status"),
    [(1, "fail"), (2, "warn"), (3, "fail"), (4, "fail"), (8, "fail"), (64, "fail")],
)
def test_a_critical_warning_fails_but_for_temperature_alone(mask, status):
    assert problems(critical_warning=mask) == [("S1", status, "host_hw.disk")]


@pytest.mark.parametrize(
    ("state", "status"),
    [("live", None), (None, None), ("resetting", "warn"), ("dead", "fail"), ("deleting", "fail")],
)
def test_the_kernels_state_of_a_drive(state, status):
    assert problems(state=state) == ([("S1", status, "host_hw.disk")] if status else [])


@pytest.mark.parametrize(("used", "bad"), [(99, False), (100, True), (101, True), (None, False)])
def test_a_drive_beyond_its_rated_life_warns(used, bad):
    assert problems(used_percent=used) == ([("S1", "warn", "host_hw.disk")] if bad else [])


@pytest.mark.parametrize(
    ("grown", "status"), [(0, None), (1, "warn"), (99, "warn"), (100, "fail"), (101, "fail")]
)
def test_new_media_errors_are_counted_across_reboots(grown, status):
    values = {"nvme_smart:S1:media_errors": 40.0}
    samples = (CounterSample(boot_id="other", since_boot_s=9e9, t_us=0, values=values),)
    case = JudgeContext(
        node=NODE, counters=Counters(boot_id="b", t_us=3600_000_000, samples=samples)
    )

    assert problems(case, media_errors=40 + grown) == (
        [("S1", status, "host_hw.disk")] if status else []
    )
    assert problems(case, media_errors=30) == []


def test_a_log_that_cannot_be_read_warns():
    assert problems(critical_warning=None, trouble="no time") == [("S1", "warn", "host_hw.disk")]


def test_without_the_tool_the_first_finding_says_so():
    (finding,) = judge(Nvme((replace(GOOD, critical_warning=None),)), LIMITS, CASE)

    assert "nvme-cli is not installed" in finding.message


def test_remote_drives_are_left_out_and_no_drive_is_skipped():
    remote = Nvme((replace(GOOD, transport="tcp", state="connecting"),), tool=True)

    assert said(judge(remote, LIMITS, CASE)) == [("n1", "skip", None)]
    assert said(judge(Nvme(), LIMITS, expecting(1))) == [("n1", "fail", "host_hw.disk")]
    assert counters(Nvme((GOOD,))) == {"nvme_smart:S1:media_errors": 0}
