"""The verdicts on the rate of corrected memory errors."""

from dataclasses import replace

import pytest
from support.checks import CASE, limit, said
from support.counters import DAY_S, HOUR_S, grown_from
from support.gpus import gpu, node
from support.gpus import part as changed

from gpuops.checks.gpu.gpu_ecc_corrected import Parameters, counters, judge

LIMITS = Parameters(per_day=limit(warn=1000))
AGGREGATE, VOLATILE = "gpu_ecc_corrected:GPU-0:aggregate", "gpu_ecc_corrected:GPU-0:volatile"


def errors(aggregate, volatile=None):
    return changed(gpu(0), "ecc", aggregate_corrected=aggregate, volatile_corrected=volatile)


def findings(one, past, age_s=DAY_S, **changes):
    case = replace(CASE, counters=grown_from(past, age_s, **changes))
    return judge(node(one), LIMITS, case)


@pytest.mark.parametrize(
    ("now", "status"), [(5000, "pass"), (5999, "pass"), (6000, "warn"), (6001, "warn")]
)
def test_the_rate_of_a_day_is_judged(now, status):
    (verdict,) = said(findings(errors(now), {AGGREGATE: 5000}))

    assert verdict == (
        ("GPU-0", "warn", "gpu_hw.ecc_uncorrectable") if status == "warn" else ("n1", "pass", None)
    )


def test_a_few_errors_in_a_short_time_are_no_rate():
    """41 errors in ten seconds are 41 in an hour, which is 984 a day."""
    assert said(findings(errors(41), {AGGREGATE: 0}, 10)) == [("n1", "pass", None)]
    assert said(findings(errors(42), {AGGREGATE: 0}, 10))[0][1] == "warn"


def test_the_count_of_the_gpus_life_is_compared_across_a_boot():
    past = {AGGREGATE: 0, VOLATILE: 0}

    assert said(findings(errors(2000, 2000), past, boot_id="before"))[0][1] == "warn"


def test_the_volatile_count_is_compared_within_a_boot_only():
    assert said(findings(errors(None, 2000), {VOLATILE: 0}))[0][1] == "warn"
    (finding,) = findings(errors(None, 2000), {VOLATILE: 0}, boot_id="before")
    assert finding.message == "not judged on GPU 0: no earlier count to compare with"


def test_a_count_that_fell_was_reset_and_starts_at_zero():
    assert said(findings(errors(None, 999), {VOLATILE: 10**6})) == [("n1", "pass", None)]
    assert said(findings(errors(None, 1000), {VOLATILE: 10**6}))[0][1] == "warn"


def test_a_first_look_judges_nothing():
    assert said(findings(errors(10**9), {})) == [("n1", "skip", None)]


def test_errors_that_are_not_counted_are_skipped():
    assert said(findings(errors(None), {}, HOUR_S)) == [("n1", "skip", None)]


def test_the_next_look_compares_with_what_this_one_saw():
    assert counters(node(errors(7, 3))) == {AGGREGATE: 7.0, VOLATILE: 3.0}
    assert counters(node(errors(None))) == {}
