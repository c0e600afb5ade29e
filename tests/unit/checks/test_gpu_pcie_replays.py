"""The verdicts on the rate of PCIe replays."""

from dataclasses import replace

import pytest
from support.checks import CASE, limit, said
from support.counters import HOUR_S, grown_from
from support.gpus import gpu, node, part

from gpuops.checks.gpu.gpu_pcie_replays import Parameters, counters, judge

LIMITS = Parameters(per_hour=limit(warn=480))
NAME = "gpu_pcie_replays:GPU-0:replays"


def findings(now, past, age_s=HOUR_S, **changes):
    case = replace(CASE, counters=grown_from(past, age_s, **changes))
    return judge(node(part(gpu(0), "pcie", replays=now)), LIMITS, case)


@pytest.mark.parametrize(
    ("now", "age_s", "status"),
    [
        (1479, HOUR_S, "pass"),
        (1480, HOUR_S, "warn"),
        (1481, HOUR_S, "warn"),
        (1480, 2 * HOUR_S, "pass"),
        (1479, 10, "pass"),
        (1480, 10, "warn"),
    ],
)
def test_the_rate_of_an_hour_is_judged(now, age_s, status):
    (verdict,) = said(findings(now, {NAME: 1000}, age_s))

    assert verdict == (
        ("GPU-0", "warn", "host_hw.pcie") if status == "warn" else ("n1", "pass", None)
    )


def test_a_great_count_that_does_not_grow_passes():
    assert said(findings(10**6, {NAME: 10**6})) == [("n1", "pass", None)]


def test_a_count_that_fell_was_reset_and_starts_at_zero():
    assert said(findings(479, {NAME: 10**6})) == [("n1", "pass", None)]


def test_a_first_look_and_one_after_a_boot_judge_nothing():
    assert said(findings(10**6, {})) == [("n1", "skip", None)]
    assert said(findings(10**6, {NAME: 0}, boot_id="before")) == [("n1", "skip", None)]


def test_replays_that_are_not_told_are_skipped():
    assert said(findings(None, {NAME: 0})) == [("n1", "skip", None)]


def test_the_next_look_compares_with_what_this_one_saw():
    nameless = gpu(1, uuid=None, address=None)

    assert counters(node(part(gpu(0), "pcie", replays=7), nameless)) == {NAME: 7.0}
