"""The verdict on the clock."""

import pytest
from support.checks import CASE, limit, said

from gpuops.checks.host.clock_sync import Parameters, judge
from gpuops.host.clock_state import KernelClockState

LIMITS = Parameters(error_max_s=limit(warn=1, fail=10))


@pytest.mark.parametrize(
    ("error_max_s", "status"),
    [
        (0.001, "pass"),
        (0.999, "pass"),
        (1.0, "warn"),
        (1.001, "warn"),
        (9.999, "warn"),
        (10.0, "fail"),
        (16.0, "fail"),
    ],
)
def test_a_synchronised_clock_is_judged_by_the_bound_on_its_error(error_max_s, status):
    (finding,) = judge(KernelClockState(True, 0.0, error_max_s), LIMITS, CASE)

    assert finding.status.word == status


def test_an_unsynchronised_clock_warns_whatever_its_bound():
    found = judge(KernelClockState(False, 0.0, 16.0), LIMITS, CASE)

    assert said(found) == [("n1", "warn", "host_sw.clock_unsynchronised")]
