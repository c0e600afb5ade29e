"""The verdicts on error counters of RDMA network ports."""

import pytest
from support.checks import CASE, NODE, limit, said

from gpuops.checks.core.check import JudgeContext
from gpuops.checks.nic.ib_errors import COUNTERS, Parameters, counters, judge
from gpuops.errors import ConfigError
from gpuops.host.infiniband import Port, RdmaPorts
from gpuops.host.node_state import Counters, CounterSample

LIMITS = Parameters(per_hour={"symbol_error": limit(warn=10, fail=100)})


def fabric(**found):
    return RdmaPorts((Port(device="mlx5_0", number=1, guid="g0", state="ACTIVE", counters=found),))


def case(earlier, hours=1.0):
    samples = (CounterSample(boot_id="b", since_boot_s=0.0, t_us=0, values=earlier),)
    return JudgeContext(
        node=NODE,
        counters=Counters(boot_id="b", since_boot_s=hours * 3600, t_us=0, samples=samples),
    )


@pytest.mark.parametrize(
    ("grown", "status"), [(9, "pass"), (10, "warn"), (11, "warn"), (99, "warn"), (100, "fail")]
)
def test_growth_in_an_hour_is_held_against_its_limit(grown, status):
    facts = fabric(symbol_error=1000 + grown)
    (finding,) = judge(facts, LIMITS, case({"ib_errors:g0:1/symbol_error": 1000.0}))

    assert finding.status.word == status
    assert (finding.entity.id == "g0") == (status != "pass")


def test_the_same_growth_over_ten_hours_is_a_tenth_of_it():
    earlier = case({"ib_errors:g0:1/symbol_error": 0.0}, hours=10)

    assert judge(fabric(symbol_error=99), LIMITS, earlier)[0].status.word == "pass"
    assert judge(fabric(symbol_error=100), LIMITS, earlier)[0].status.word == "warn"


def test_a_counter_that_fell_counts_from_zero():
    earlier = case({"ib_errors:g0:1/symbol_error": 65535.0})

    assert said(judge(fabric(symbol_error=10), LIMITS, earlier)) == [
        ("g0", "warn", "network.link_errors")
    ]


@pytest.mark.parametrize(("value", "status"), [(65534, "pass"), (65535, "skip"), (65536, "pass")])
def test_a_counter_that_is_full_tells_nothing(value, status):
    found = judge(
        fabric(symbol_error=value), LIMITS, case({"ib_errors:g0:1/symbol_error": float(value)})
    )

    assert [finding.status.word for finding in found] == [status]
    assert ("symbol_error of mlx5_0/1; `perfquery -R`" in found[0].message) == (status == "skip")


def test_a_counter_that_has_just_become_full_is_judged_once_more():
    found = judge(
        fabric(symbol_error=65535), LIMITS, case({"ib_errors:g0:1/symbol_error": 60000.0})
    )

    assert said(found) == [("g0", "fail", "network.link_errors")]


def test_a_full_counter_does_not_hide_those_that_still_count():
    limits = Parameters(per_hour={"symbol_error": limit(warn=10), "out_of_sequence": limit(warn=9)})
    earlier = {"ib_errors:g0:1/symbol_error": 65535.0, "ib_errors:g0:1/out_of_sequence": 0.0}
    quiet = judge(fabric(symbol_error=65535, out_of_sequence=8), limits, case(earlier))
    loud = judge(fabric(symbol_error=65535, out_of_sequence=9), limits, case(earlier))

    assert [finding.status.word for finding in quiet] == ["pass", "skip"]
    assert [finding.status.word for finding in loud] == ["warn", "skip"]


def test_a_first_look_and_a_node_without_adapters_are_skipped():
    assert said(judge(fabric(symbol_error=10**6), LIMITS, CASE)) == [("n1", "skip", None)]
    assert said(judge(RdmaPorts(), LIMITS, CASE)) == [("n1", "skip", None)]


def test_only_counters_that_are_kept_can_be_limited():
    with pytest.raises(ConfigError, match="has no counter 'symbol_errors'"):
        Parameters(per_hour={"symbol_errors": limit(warn=1)})

    assert counters(fabric(symbol_error=1, unknown_thing=2)) == {"ib_errors:g0:1/symbol_error": 1}
    assert "out_of_sequence" in COUNTERS
