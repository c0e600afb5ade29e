"""What measurements, digests and ends of programs become: findings with class and source."""

import dataclasses
import math

import pytest

from gpuops.burnin.baseline import WILKS_RESULTS, Floor
from gpuops.burnin.judge import JudgeTerms, PeerLimits, judge_test
from gpuops.burnin.measurement import Measurement
from gpuops.burnin.plan import TESTS
from gpuops.burnin.results import (
    NotMeasured,
    ProgramEnd,
    ProgramNote,
    ProgramOutput,
    ResultDigest,
    WrongResult,
)
from gpuops.model import Entity, EntityKind, FailureClass, Status, UnknownReason

GEMM = TESTS["gemm"]
NODE = Entity(EntityKind.NODE, "n1")
TERMS = JudgeTerms(node=NODE)


def part(number, kind=EntityKind.GPU):
    return Entity(kind, f"{kind.value}-{number}")


def output(number, *records, kind=EntityKind.GPU, ended=True):
    end = (ProgramEnd(test="gemm"),) if ended else ()
    return ProgramOutput(part(number, kind), [*records, *end])


def measured(number, *values, kind=EntityKind.GPU, **changes):
    item = Measurement(
        test="gemm",
        part=part(number, kind),
        parameters={"dtype": "bf16"},
        values=values,
        unit="TFLOP/s",
    )
    return dataclasses.replace(item, **changes)


def digest(number, text, model="H100", parameters="dtype=bf16"):
    return ResultDigest(
        test="gemm", part=part(number), parameters=parameters, model=model, digest=text
    )


def rates(*values, kind=EntityKind.GPU, **changes):
    return [
        output(i, measured(i, value, kind=kind, **changes), kind=kind)
        for i, value in enumerate(values)
    ]


def test_equal_parts_pass_in_one_row_with_the_worst_of_them():
    (found,) = judge_test(GEMM, rates(700, 690, 705, 698), TERMS)

    assert (found.check, found.entity, found.status) == ("burnin/gemm", NODE, Status.PASS)
    assert (found.value, found.unit, found.threshold) == (690, "TFLOP/s", "> 650.1 TFLOP/s")
    assert "stas00/ml-engineering" in found.source
    assert "the worst of 4 (gpu gpu-1)" in found.message


@pytest.mark.parametrize(
    ("kind", "failure_class"),
    [(EntityKind.GPU, FailureClass.GPU_SLOW), (EntityKind.CPU, FailureClass.HOST_SLOW)],
)
def test_a_slow_part_warns_with_its_class(kind, failure_class):
    (found,) = judge_test(GEMM, rates(700, 700, 640, 701, kind=kind), TERMS)

    assert (found.entity, found.status) == (part(2, kind), Status.WARN)
    assert found.failure_class is failure_class
    assert "8.6 % worse than the median of 3 others (700 TFLOP/s)" in found.message
    assert "suspect" not in found.message


def test_twelve_percent_is_suspect_and_still_only_warns():
    (found,) = judge_test(GEMM, rates(700, 700, 600, 701), TERMS)

    assert found.status is Status.WARN
    assert found.message.endswith(", suspect")


def test_a_slow_part_fails_only_where_the_site_says_so():
    terms = JudgeTerms(node=NODE, limits=PeerLimits(fail_percent=12, source="site"))
    (found,) = judge_test(GEMM, rates(700, 700, 600, 701), terms)

    assert (found.status, found.source) == (Status.FAIL, "site")


def test_peers_that_scatter_themselves_make_nobody_slow():
    (found,) = judge_test(GEMM, rates(700, 500, 620, 900, 610), TERMS)

    assert found.status is Status.PASS


def test_two_parts_are_not_compared_and_it_says_why():
    (found,) = judge_test(GEMM, rates(700, 500), TERMS)

    assert found.status is Status.PASS
    assert found.threshold is None
    assert "not compared: 3 parts of a kind are needed" in found.message


def test_a_latency_is_slow_where_it_is_higher():
    (found,) = judge_test(GEMM, rates(10, 10, 12, 10, higher_is_better=False), TERMS)

    assert (found.entity, found.threshold) == (part(2), "< 10.7 TFLOP/s")


@pytest.mark.parametrize("value", [0.0, math.nan, math.inf])
def test_no_number_is_unknown_and_never_slow(value):
    bad, good = judge_test(GEMM, rates(700, value, 700, 700), TERMS)

    assert (bad.entity, bad.status) == (part(1), Status.UNKNOWN)
    assert good.status is Status.PASS


def test_a_wrong_result_fails_its_part_however_fast_it_was():
    wrong = WrongResult(
        test="gemm", part=part(1), parameters="dtype=bf16", message="3 elements differ"
    )
    outputs = [output(0, measured(0, 700)), output(1, measured(1, 700), wrong)]
    found = judge_test(GEMM, outputs, TERMS)[0]

    assert (found.entity, found.status) == (part(1), Status.FAIL)
    assert found.failure_class is FailureClass.GPU_WRONG_RESULT
    assert found.message == "dtype=bf16: 3 elements differ"
    assert found.hardware_reported


@pytest.mark.parametrize(
    ("kind", "failure_class"),
    [(EntityKind.CPU, FailureClass.HOST_CPU), (EntityKind.MOUNT, FailureClass.HOST_DISK)],
)
def test_a_wrong_result_of_the_host_has_the_class_of_its_part(kind, failure_class):
    wrong = WrongResult(test="disk", part=part(1, kind), parameters="", message="differs")

    assert judge_test(GEMM, [output(1, wrong, kind=kind)], TERMS)[0].failure_class is failure_class


def test_the_majority_says_whose_result_is_wrong():
    outputs = [output(i, digest(i, "bad" if i == 2 else "good")) for i in range(4)]
    (found,) = judge_test(GEMM, outputs, TERMS)

    assert (found.entity, found.status) == (part(2), Status.FAIL)
    assert found.failure_class is FailureClass.GPU_WRONG_RESULT
    assert "differs from that of 3 others" in found.message


def test_of_two_that_differ_both_are_named_and_the_node_fails():
    outputs = [output(0, digest(0, "a")), output(1, digest(1, "b"))]
    (found,) = judge_test(GEMM, outputs, TERMS)

    assert (found.entity, found.status) == (NODE, Status.FAIL)
    assert "gpu gpu-0, gpu gpu-1; none has a majority" in found.message


def test_results_of_other_models_or_other_work_are_not_compared():
    outputs = [
        output(0, digest(0, "a")),
        output(1, digest(1, "b", model="A100")),
        output(2, digest(2, "c", parameters="dtype=fp16")),
    ]
    (found,) = judge_test(GEMM, outputs, TERMS)

    assert "measured nothing" in found.message


def test_equal_digests_and_notes_are_said_with_the_rate():
    note = ProgramNote(test="gemm", part=part(0), message="80 GiB tested")
    outputs = [output(i, measured(i, 700), digest(i, "a"), note) for i in range(3)]
    (found,) = judge_test(GEMM, outputs, TERMS)

    assert found.message.endswith("; the same bits on 3; 80 GiB tested")


def test_a_program_without_its_last_line_is_unknown_though_its_numbers_are_good():
    outputs = [
        output(0, measured(0, 700)),
        dataclasses.replace(output(1, measured(1, 700), ended=False), garbage=2),
    ]
    unknown, rate = judge_test(GEMM, outputs, TERMS)

    assert (unknown.entity, unknown.unknown_reason) == (part(1), UnknownReason.CRASH)
    assert unknown.message == "its program ended before the test did; 2 lines were no results"
    assert rate.status is Status.PASS


def test_a_program_that_hung_is_unknown_by_timeout_with_its_pid():
    hung = ProgramOutput(
        part(0), reason=UnknownReason.TIMEOUT, problem="gave no answer in 9.0 s (pid 71, state D)"
    )
    (found,) = judge_test(GEMM, [hung], TERMS)[:1]

    assert (found.entity, found.unknown_reason) == (part(0), UnknownReason.TIMEOUT)
    assert "pid 71" in found.message


@pytest.mark.parametrize(
    ("reason", "status"),
    [
        (UnknownReason.NOT_SUPPORTED, Status.SKIP),
        (UnknownReason.NO_PERMISSION, Status.UNKNOWN),
    ],
)
def test_what_a_part_cannot_do_is_skipped_and_what_was_refused_is_unknown(reason, status):
    item = NotMeasured(test="gemm", part=part(0), reason=reason, message="no bf16")
    found = judge_test(GEMM, [output(0, item)], TERMS)[0]

    assert (found.status, found.message) == (status, "not measured: no bf16")


LEARNED = Floor(
    test="gemm",
    parameters="dtype=bf16",
    value=680.0,
    median=700.0,
    unit="TFLOP/s",
    results=4 * WILKS_RESULTS,
    parts=WILKS_RESULTS,
    nodes=20,
    source="learned: 20 nodes",
)
QUOTED = Floor(test="gemm", parameters="dtype=bf16", value=680.0, unit="TFLOP/s", source="DCGM")


def held_to(*floors):
    return JudgeTerms(node=NODE, floors=floors)


def with_repeats(*values, number=0, **changes):
    return [output(number, measured(number, *values, **changes))]


def test_a_floor_is_what_is_wanted_with_its_source_and_beats_the_peers():
    (found,) = judge_test(GEMM, rates(700, 690, 705, 698), held_to(LEARNED))

    assert (found.status, found.value) == (Status.PASS, 690)
    assert (found.threshold, found.source) == (">= 680 TFLOP/s", "learned: 20 nodes")


def test_a_little_below_the_floor_is_a_note_as_one_in_fifty_healthy_results_is():
    (found,) = judge_test(GEMM, with_repeats(679, 679, 679), held_to(LEARNED))

    assert found.status is Status.PASS
    assert found.message.endswith("; below the floor, as one in fifty healthy results is")


@pytest.mark.parametrize(
    ("values", "changes", "status", "text"),
    [
        ((600, 600, 600), {}, Status.FAIL, "far from the median of healthy parts, 700"),
        ((600, 600), {}, Status.WARN, "far from the median of healthy parts, 700"),
        (
            (600, 600, 600),
            {"parts": WILKS_RESULTS - 1},
            Status.WARN,
            "learned from 148 parts it only warns (149 may fail)",
        ),
    ],
)
def test_far_below_a_learned_floor_fails_only_if_it_is_sure(values, changes, status, text):
    floor = dataclasses.replace(LEARNED, **changes)
    (found,) = judge_test(GEMM, with_repeats(*values), held_to(floor))

    assert (found.entity, found.status, found.value) == (part(0), status, 600)
    assert found.failure_class is FailureClass.GPU_SLOW
    assert (found.threshold, found.source) == (">= 680 TFLOP/s", "learned: 20 nodes")
    assert text in found.message


def test_a_quoted_floor_only_warns():
    (found,) = judge_test(GEMM, with_repeats(60, 60, 60), held_to(QUOTED))

    assert (found.status, found.source) == (Status.WARN, "DCGM")
    assert found.message == "dtype=bf16: below the floor; a quoted floor only warns"


def test_all_parts_below_the_floor_are_named_though_they_are_alike():
    found = judge_test(GEMM, rates(600, 601, 602, 603), held_to(QUOTED))

    assert [(item.entity, item.status) for item in found] == [
        (part(number), Status.WARN) for number in range(4)
    ]


def test_a_latency_above_its_floor_warns():
    floor = dataclasses.replace(QUOTED, value=5.0, unit="us", higher_is_better=False)
    outputs = with_repeats(9.0, 9.0, 9.0, unit="us", higher_is_better=False)
    (found,) = judge_test(GEMM, outputs, held_to(floor))

    assert (found.status, found.threshold) == (Status.WARN, "<= 5 us")
    assert "above the floor" in found.message


@pytest.mark.parametrize(
    "changes", [{"parameters": "dtype=fp8"}, {"unit": "GB/s"}], ids=["parameters", "unit"]
)
def test_a_floor_that_nothing_was_measured_for_is_shown_without_a_value(changes):
    floor = dataclasses.replace(QUOTED, **changes)
    passed, wanted = judge_test(GEMM, rates(700), held_to(floor))

    assert (passed.status, passed.threshold) == (Status.PASS, None)
    assert (wanted.status, wanted.value) == (Status.SKIP, None)
    assert (wanted.source, wanted.threshold) == ("DCGM", f">= 680 {floor.unit}")
    assert wanted.message == f"{floor.parameters}: not measured"


def test_floors_of_other_tests_are_not_wanted_of_this_one():
    (found,) = judge_test(GEMM, rates(700), held_to(dataclasses.replace(QUOTED, test="hbm")))

    assert found.status is Status.PASS


def test_a_slow_clock_has_the_reason_that_its_own_part_gives():
    notes = [ProgramNote(test="soak", part=part(i), message=f"reason {i}") for i in range(4)]
    outputs = [
        output(i, measured(i, mhz, unit="MHz", parameters={"kind": "clock"}), notes[i])
        for i, mhz in enumerate((1980, 1980, 1400, 1975))
    ]
    (found,) = judge_test(TESTS["soak"], outputs, TERMS)

    assert (found.entity, found.status) == (part(2), Status.WARN)
    assert found.message.endswith(", suspect; reason 2")
    assert "reason 1" not in found.message
