"""The verdicts on software RAID."""

import pytest
from support.checks import CASE, said

from gpuops.checks.core.check import NoParameters
from gpuops.checks.storage.md_raid import judge
from gpuops.host.storage.nvme import Array, MdRaid


def findings(**changes):
    array = Array(**{"name": "md0", "state": "active", "level": "raid1"} | changes)
    return judge(MdRaid((array,)), NoParameters(), CASE)


@pytest.mark.parametrize(
    ("state", "status"),
    [("active", "pass"), ("inactive", "fail"), ("broken", "fail")],
)
def test_an_array_that_the_kernel_stopped_fails(state, status):
    assert findings(state=state, level="raid0")[0].status.word == status


@pytest.mark.parametrize(("working", "status"), [(1, "warn"), (2, "pass"), (3, "pass")])
def test_a_degraded_array_warns(working, status):
    (finding,) = findings(wanted=2, working=working, work="recovery 12.6%")

    assert finding.status.word == status
    assert "recovery 12.6%" in finding.message


def test_a_failed_member_is_named():
    (finding,) = findings(wanted=2, working=1, failed=("sda1",))

    assert said([finding]) == [("md0", "warn", "host_hw.disk")]
    assert finding.message == "md0 (raid1) runs on 1 of 2 members, failed: sda1"
    assert said(findings(failed=("sdc1",))) == [("md0", "warn", "host_hw.disk")]


def test_without_arrays_it_is_skipped():
    assert said(judge(MdRaid(), NoParameters(), CASE)) == [("n1", "skip", None)]
