"""The round trip of a credential."""

import pytest
from support.checks import CASE, limit, said

from gpuops.checks.host.munge import Parameters, judge
from gpuops.host.munge import MungeTrip

LIMITS = Parameters(elapsed_s=limit(warn=1, fail=4))


@pytest.mark.parametrize(
    ("elapsed_s", "status"),
    [(0.999, "pass"), (1.0, "warn"), (3.999, "warn"), (4.0, "fail"), (4.001, "fail")],
)
def test_a_slow_trip_is_judged_by_its_limit(elapsed_s, status):
    (finding,) = judge(MungeTrip(installed=True, elapsed_s=elapsed_s), LIMITS, CASE)

    assert finding.status.word == status


@pytest.mark.parametrize(("required", "status"), [(False, "warn"), (True, "fail")])
def test_a_broken_trip_fails_only_where_munge_is_required(required, status):
    facts = MungeTrip(installed=True, error="unmunge exited with code 15: Expired", decoding=True)
    parameters = Parameters(elapsed_s=limit(warn=1), required=required)

    (finding,) = judge(facts, parameters, CASE)
    assert said([finding]) == [("n1", status, "host_sw.service")]
    assert finding.value == "not decoded"


def test_without_munge_it_is_skipped():
    assert said(judge(MungeTrip(installed=False), LIMITS, CASE)) == [("n1", "skip", None)]
