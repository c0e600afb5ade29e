"""What is made of the strikes that the store told of."""

from dataclasses import replace

import pytest
from support.checks import CASE, limit, said

from gpuops.checks.host.strikes import CHECK, NoProbe, Parameters, judge
from gpuops.host.node_state import Repair, Strikes

LAST_US = 1_760_000_000_000_000


def strikes(count, kind="gpu", entity="GPU-1"):
    return Strikes(
        entity_kind=kind,
        entity_id=entity,
        count=count,
        last_us=LAST_US,
        why="gpu_hw.fell_off_bus",
    )


def repair(kind="gpu", entity="GPU-1", t_us=LAST_US):
    return Repair(entity_kind=kind, entity_id=entity, t_us=t_us, by="ada", what="a new GPU")


def findings(*told, repairs=(), warn=2, fail=None):
    case = replace(CASE, strikes=told, repairs=tuple(repairs))
    return judge(NoProbe(), Parameters(count=limit(warn=warn, fail=fail)), case)


def test_a_node_without_history_is_not_called_healthy():
    (finding,) = findings()

    assert said([finding]) == [("n1", "skip", None)]
    assert "the store reported none" in finding.message


@pytest.mark.parametrize(("count", "status"), [(1, "pass"), (2, "warn"), (3, "warn")])
def test_strikes_warn_from_the_limit_on(count, status):
    assert said(findings(strikes(count))) == [("GPU-1", status, None)]


@pytest.mark.parametrize(("count", "status"), [(3, "warn"), (4, "fail"), (5, "fail")])
def test_strikes_fail_only_where_a_site_sets_a_limit(count, status):
    (finding,) = findings(strikes(count), fail=4)

    assert finding.status.word == status
    assert (finding.failure_class is not None) == (status == "fail")


def test_each_part_has_its_own_finding():
    told = (strikes(2), strikes(1, "nic", "0x1"), strikes(5, "node", "n1"))

    assert said(findings(*told)) == [
        ("GPU-1", "warn", None),
        ("0x1", "pass", None),
        ("n1", "warn", None),
    ]


def test_the_finding_says_what_and_when():
    (finding,) = findings(strikes(2))

    assert finding.message == (
        "2 strikes (gpu_hw.fell_off_bus), the last at 2025-10-09T08:53:20.000000Z"
    )
    assert (finding.value, finding.threshold, finding.source) == (2, "< 2", "a test")


@pytest.mark.parametrize(
    ("by", "status"),
    [
        (repair(t_us=LAST_US - 1), "warn"),
        (repair(t_us=LAST_US), "skip"),
        (repair(t_us=LAST_US + 1), "skip"),
        (repair("node", "n1"), "skip"),
        (repair("gpu", "GPU-2"), "warn"),
        (repair("node", "n2"), "warn"),
    ],
    ids=["before", "at", "after", "of the node", "of another GPU", "of another node"],
)
def test_a_repair_since_the_last_strike_takes_all_away(by, status):
    (finding,) = findings(strikes(2), repairs=(by,))

    assert finding.status.word == status


def test_the_look_asks_the_machine_for_nothing():
    assert CHECK.probe.read(None, 0.0) == NoProbe()
