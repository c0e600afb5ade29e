"""The verdicts on the rates of NVLink errors."""

from dataclasses import replace

import pytest
from support.checks import CASE, limit, said
from support.counters import HOUR_S, grown_from
from support.gpus import gpu, node, shipped

from gpuops.checks.fabric.nvlink_errors import Parameters, counters, judge
from gpuops.host.nvml.facts import NvLink

LIMITS = Parameters(
    recovery_per_hour=limit(warn=1), replay_per_hour=limit(warn=5), crc_per_hour=limit(warn=100)
)
NAMES = {kind: f"nvlink_errors:GPU-0:{kind}" for kind in ("recovery", "replay", "crc", "receive")}
NONE = dict.fromkeys(NAMES.values(), 0.0)


def linked(**errors):
    """Return a GPU whose third link has *errors*; the others have none."""
    quiet = {"recovery_errors": 0, "replay_errors": 0, "crc_errors": 0}
    links = [NvLink(link=number, active=True, **quiet) for number in range(4)]
    links[2] = replace(links[2], **errors)
    return gpu(0, nvlinks=tuple(links))


def findings(one, past=NONE, age_s=HOUR_S, **changes):
    case = replace(CASE, counters=grown_from(past, age_s, **changes))
    return judge(node(one), LIMITS, case)


@pytest.mark.parametrize(
    ("errors", "status"),
    [
        ({"recovery_errors": 0}, "pass"),
        ({"recovery_errors": 1}, "warn"),
        ({"recovery_errors": 2}, "warn"),
        ({"replay_errors": 4}, "pass"),
        ({"replay_errors": 5}, "warn"),
        ({"replay_errors": 6}, "warn"),
        ({"crc_errors": 99}, "pass"),
        ({"crc_errors": 100}, "warn"),
        ({"crc_errors": 101}, "warn"),
        ({"receive_errors": 99}, "pass"),
        ({"receive_errors": 100}, "warn"),
    ],
)
def test_each_kind_is_judged_by_its_own_rate(errors, status):
    (verdict,) = said(findings(linked(**errors)))

    assert verdict == (
        ("GPU-0", "warn", "gpu_hw.nvlink") if status == "warn" else ("n1", "pass", None)
    )


def test_the_link_that_counted_most_is_named():
    (finding,) = findings(linked(replay_errors=9))

    assert finding.message == (
        "GPU 0: 9 replay errors on its NVLinks in 60 min; link 2 has counted most"
    )


def test_old_errors_are_no_fault():
    assert said(findings(linked(replay_errors=500), {NAMES["replay"]: 500.0})) == [
        ("n1", "pass", None)
    ]


def test_a_first_look_and_one_after_a_boot_judge_nothing():
    assert said(findings(linked(replay_errors=500), {})) == [("n1", "skip", None)]
    assert said(findings(linked(replay_errors=500), boot_id="before")) == [("n1", "skip", None)]


def test_links_that_are_not_told_and_cards_without_links_are_skipped():
    assert said(findings(gpu(0, nvlinks=None))) == [("n1", "skip", None)]
    (finding,) = findings(gpu(0, nvlinks=()))
    assert finding.message == "not judged on GPU 0: it has no NVLink"


def test_the_next_look_compares_with_the_sums_over_all_links():
    assert counters(node(linked(replay_errors=3))) == {
        NAMES["recovery"]: 0.0,
        NAMES["replay"]: 3.0,
        NAMES["crc"]: 0.0,
    }


@pytest.mark.parametrize(("recoveries", "status"), [(0, "pass"), (1, "warn"), (2, "warn")])
def test_as_shipped_a_single_recovery_warns_even_after_a_day(recoveries, status):
    case = replace(CASE, counters=grown_from(NONE, 24 * HOUR_S))
    facts = node(linked(recovery_errors=recoveries))
    (finding,) = judge(facts, shipped("nvlink_errors")["nvlink_errors"], case)

    assert finding.status.word == status
