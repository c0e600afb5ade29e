"""What of a check run is recorded: what changed, and what did not pass."""

import os
from dataclasses import replace

import pytest

from gpuops.checks.core.runner import CheckFailure, CheckRun
from gpuops.gate.check_changes import (
    RECORD_EVERY_S,
    SAMPLE_EVERY_S,
    is_new_decision,
    plan_record,
)
from gpuops.host.node_state import BootMoment
from gpuops.model import Entity, EntityKind, FailureClass, Finding, Status

HOUR_US = SAMPLE_EVERY_S * 10**6
START_US = 400_000 * HOUR_US
PASSES = Finding(
    check="gpu_lost", entity=Entity(EntityKind.GPU, "GPU-1"), status=Status.PASS, message="answers"
)
FAILS = replace(PASSES, status=Status.FAIL, failure_class=FailureClass.GPU_FELL_OFF_BUS)
WARM = Finding(
    check="gpu_temperature",
    entity=Entity(EntityKind.NODE, "n1"),
    status=Status.PASS,
    message="all are cool",
    value=61.5,
    unit="C",
)
SKIPPED = replace(WARM, check="swap", status=Status.SKIP, value=1.0)


def ran(*findings, at_s=0, boot="a", **more):
    start_us = START_US + at_s * 10**6
    moment = BootMoment(boot_id=boot, since_boot_s=1.0, t_us=start_us)
    values = {"suite": "health", "node": "n1", "start_us": start_us, "end_us": start_us + 1}
    return CheckRun(**{**values, "findings": findings, "moment": moment, **more})


def plan(check_run, before=None, *, mode="enforce", all_gpus=True):
    ids = f"id-{check_run.start_us}"
    return plan_record(check_run, before, mode=mode, all_gpus=all_gpus, new_id=lambda: ids)


def after(*findings, **more):
    return plan(ran(*findings, **more)).run


def test_of_a_first_run_what_did_not_pass_is_recorded_with_the_parts_and_the_values():
    found = plan(ran(PASSES, WARM, SKIPPED, replace(FAILS, check="gpu_ecc")))

    assert (found.is_new, [item.check for item in found.findings]) == (True, ["gpu_ecc"])
    assert found.parts == (PASSES.entity,)
    assert found.numbers == {"gpu_temperature[C]": 61.5}


def test_the_same_result_in_other_words_and_numbers_extends_the_record():
    before = after(FAILS, WARM)

    found = plan(ran(replace(FAILS, message="still"), replace(WARM, value=70), at_s=300), before)

    assert (found.is_new, found.findings, found.numbers) == (False, (), None)
    assert (found.run.id, found.run.runs, found.run.start_us) == (before.id, 2, START_US)


@pytest.mark.parametrize(
    "now",
    [
        ran(at_s=300),
        ran(PASSES, at_s=300),
        ran(replace(FAILS, status=Status.WARN), at_s=300),
        ran(replace(FAILS, failure_class=FailureClass.GPU_CONFIG), at_s=300),
        ran(FAILS, replace(WARM, status=Status.WARN), at_s=300),
        ran(FAILS, at_s=300, boot="b"),
        ran(FAILS, at_s=300, profile="other"),
        ran(FAILS, replace(PASSES, check="x", entity=Entity(EntityKind.NIC, "0x1")), at_s=300),
        ran(FAILS, at_s=RECORD_EVERY_S),
        ran(FAILS, at_s=-SAMPLE_EVERY_S),
    ],
)
def test_another_result_is_recorded(now):
    assert plan(now, after(FAILS)).is_new


def test_another_mode_of_the_gate_is_recorded():
    assert plan(ran(FAILS, at_s=300), after(FAILS), mode="observe").is_new


def test_what_passes_again_is_recorded_once():
    again = plan(ran(PASSES, WARM, at_s=300), after(FAILS, WARM))
    later = plan(ran(PASSES, WARM, at_s=600), again.run)

    assert [item.status for item in again.findings] == [Status.PASS]
    assert not later.is_new


def test_a_job_on_some_gpus_changes_nothing_about_the_others():
    before = after(PASSES, replace(PASSES, entity=Entity(EntityKind.GPU, "GPU-2")))

    assert not plan(ran(PASSES, at_s=300), before, all_gpus=False).is_new
    assert plan(ran(PASSES, at_s=300), before, all_gpus=True).is_new


def test_the_parts_are_recorded_when_they_change_and_once_a_record():
    before = after(PASSES)
    changed = plan(ran(PASSES, replace(WARM, status=Status.WARN), at_s=300), before)
    again = plan(ran(PASSES, WARM, at_s=RECORD_EVERY_S), changed.run)

    assert (changed.is_new, changed.parts) == (True, ())
    assert again.parts == (PASSES.entity,)


def test_values_are_sampled_once_an_hour():
    record, sampled = None, []
    for at_s in range(0, 3 * SAMPLE_EVERY_S, 300):
        found = plan(ran(replace(WARM, value=at_s), at_s=at_s), record)
        record = found.run
        if found.numbers is not None:
            sampled.append(found.numbers)

    assert sampled == [{"gpu_temperature[C]": hour * SAMPLE_EVERY_S} for hour in range(3)]


def test_a_failure_of_gpuops_that_stays_is_told_once_a_record():
    failed = CheckFailure("judge of x", "KeyError", "…")
    first = plan(ran(WARM, failures=(failed,)))
    second = plan(ran(WARM, at_s=300, failures=(replace(failed, error="KeyError 2"),)), first.run)
    other = plan(ran(WARM, at_s=600, failures=(replace(failed, what="y"),)), second.run)

    assert (first.failures, second.failures) == ((failed,), ())
    assert [item.what for item in other.failures] == ["y"]


def test_a_decision_is_new_once(tmp_path):
    told = [is_new_decision(tmp_path, os.geteuid(), words) for words in ("a", "a", "b", "a")]

    assert told == [True, False, True, True]
