"""The verdicts on errors of the host's memory."""

import pytest
from support.checks import CASE, NODE, limit, said

from gpuops.checks.core.check import JudgeContext
from gpuops.checks.host.edac import Parameters, counters, judge
from gpuops.host.memory_modules import Edac, MemoryController
from gpuops.host.node_state import Counters, CounterSample, Repair

LIMITS = Parameters(uncorrected=limit(fail=2, warn=1), corrected_per_day=limit(warn=50, fail=500))
BOOT_US = 1_000_000


def edac(corrected=0, uncorrected=0, dimms=None):
    return Edac(
        (
            MemoryController(
                name="mc0", corrected=corrected, uncorrected=uncorrected, dimms=dimms or {}
            ),
        )
    )


def case(earlier=None, repaired_us=None):
    samples = (CounterSample(boot_id="b", since_boot_s=0.0, t_us=0, values=earlier or {}),)
    repairs = ()
    if repaired_us is not None:
        repairs = (
            Repair(entity_kind="node", entity_id="n1", t_us=repaired_us, by="ann", what="DIMM"),
        )
    return JudgeContext(
        node=NODE,
        counters=Counters(boot_id="b", since_boot_s=86400.0, t_us=0, samples=samples),
        repairs=repairs,
        boot_us=BOOT_US,
    )


@pytest.mark.parametrize(("count", "status"), [(0, "pass"), (1, "warn"), (2, "fail"), (3, "fail")])
def test_uncorrected_errors_since_boot_need_no_history(count, status):
    (finding,) = judge(edac(uncorrected=count), LIMITS, CASE)

    assert finding.status.word == status
    assert (finding.failure_class is None) == (status == "pass")


@pytest.mark.parametrize(
    ("grown", "status"), [(49, "pass"), (50, "warn"), (499, "warn"), (500, "fail")]
)
def test_corrected_errors_are_judged_by_the_day(grown, status):
    earlier = case({"edac:mc0:corrected": 1000.0})
    (finding,) = judge(edac(corrected=1000 + grown), LIMITS, earlier)

    assert finding.status.word == status


def test_corrected_errors_without_history_pass_and_are_told():
    (finding,) = judge(edac(corrected=10**6), LIMITS, CASE)

    assert (finding.status.word, finding.value) == ("pass", 10**6)


def test_the_modules_that_had_errors_are_named():
    (finding,) = judge(edac(uncorrected=2, dimms={"CPU0_A1": 2}), LIMITS, CASE)

    assert finding.message == "mc0: 2 uncorrected memory errors (since boot: CPU0_A1 2)"


def test_after_a_repair_only_new_uncorrected_errors_count():
    earlier = {"edac:mc0:uncorrected": 5.0}
    before, after = BOOT_US - 1, BOOT_US + 1

    assert said(judge(edac(uncorrected=5), LIMITS, case(earlier, before)))[0][1] == "fail"
    assert said(judge(edac(uncorrected=5), LIMITS, case(earlier, after)))[0][1] == "pass"
    assert said(judge(edac(uncorrected=7), LIMITS, case(earlier, after)))[0][1] == "fail"


def test_without_a_driver_it_is_skipped_and_counters_have_both_kinds():
    assert said(judge(Edac(), LIMITS, CASE)) == [("n1", "skip", None)]
    assert counters(edac(3, 1)) == {"edac:mc0:corrected": 3, "edac:mc0:uncorrected": 1}
