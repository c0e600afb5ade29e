"""What a node remembers: samples an hour apart, a job's own, hangs until the driver answers."""

from dataclasses import replace

import pytest
from support.checks import NODE

from gpuops.checks.core.runner import CheckRun
from gpuops.gate.node_state import (
    HANGS_MAX,
    JOB_AGE_MAX_S,
    JOBS_MAX,
    SAMPLE_AGE_MAX_S,
    SAMPLE_EVERY_S,
    SAMPLES_MAX,
    StateUpdate,
    judge_context_for,
    state_after,
)
from gpuops.host.gpu_names import Gpus
from gpuops.host.node_state import BootMoment, CounterSample, DriverHang, NodeState
from gpuops.host.nvml.facts import Modes, NvmlGpu, NvmlSnapshot, NvmlStatus

HOUR_S = 3600.0
T0_US = 1_700_000_000_000_000
MANUAL = StateUpdate()


def at(since_boot_s, *, boot="boot-1", jump_s=0.0):
    """Return a time of a boot; *jump_s* is by how much the wall clock is wrong."""
    t_us = T0_US + round((since_boot_s + jump_s) * 1e6)
    return BootMoment(boot_id=boot, since_boot_s=since_boot_s, t_us=t_us)


def sample(moment, **values):
    return CounterSample(
        boot_id=moment.boot_id,
        since_boot_s=moment.since_boot_s,
        t_us=moment.t_us,
        values={name: float(value) for name, value in values.items()},
    )


def run(nvml=None, profile="none", **counters):
    return CheckRun(
        suite="test",
        node="n1",
        start_us=0,
        end_us=0,
        findings=(),
        counters={name: float(value) for name, value in counters.items()},
        profile=profile,
        facts={} if nvml is None else {"gpus": Gpus((), nvml)},
    )


def after(state, ran, moment, purpose=MANUAL):
    return state_after(state, ran, moment=moment, purpose=purpose)


def test_the_first_check_leaves_a_sample():
    assert after(NodeState(), run(a=1), at(100)).samples == (sample(at(100), a=1),)


@pytest.mark.parametrize(
    ("elapsed_s", "samples"),
    [(SAMPLE_EVERY_S - 1, 1), (SAMPLE_EVERY_S, 2), (SAMPLE_EVERY_S + 1, 2)],
)
def test_the_next_sample_is_an_hour_later(elapsed_s, samples):
    first = after(NodeState(), run(a=1), at(100))

    assert len(after(first, run(a=2), at(100 + elapsed_s)).samples) == samples


def test_a_suite_that_reads_few_counters_does_not_put_off_the_others_samples():
    first = after(NodeState(), run(a=1), at(100))
    second = after(first, run(a=2, b=7), at(200))

    assert second.samples == (sample(at(100), a=1), sample(at(200), b=7))


def test_a_check_that_counts_nothing_leaves_no_sample():
    assert after(NodeState(), run(), at(100)).samples == ()


def test_samples_are_kept_for_a_day_and_two_hours():
    state = NodeState()
    for hour in range(60):
        state = after(state, run(a=hour), at(hour * HOUR_S))

    ages_h = [59 - round(item.since_boot_s / HOUR_S) for item in state.samples]
    assert ages_h == list(range(round(SAMPLE_AGE_MAX_S / HOUR_S), -1, -1))


def test_no_number_of_suites_makes_the_file_grow_without_bound():
    state = NodeState()
    for n in range(SAMPLES_MAX + 5):
        state = after(state, run(**{f"c{n}": n}), at(n))

    assert len(state.samples) == SAMPLES_MAX
    assert f"c{SAMPLES_MAX + 4}" in state.samples[-1].values


def test_another_boot_begins_with_a_sample_of_its_own():
    first = after(NodeState(), run(a=5), at(1000))
    second = after(first, run(a=1), at(10, boot="boot-2"))

    assert [item.boot_id for item in second.samples] == ["boot-1", "boot-2"]


def test_a_sample_from_the_future_of_this_boot_is_no_sample():
    wrong = NodeState(samples=(sample(at(9999), a=1),))

    assert after(wrong, run(a=2), at(100)).samples == (sample(at(100), a=2),)


@pytest.mark.parametrize("jump_s", [-86400.0 * 365, 86400.0 * 365])
def test_a_clock_that_jumps_changes_nothing_about_counters_of_this_boot(jump_s):
    first = after(NodeState(), run(a=1), at(100))
    now = at(100 + HOUR_S, jump_s=jump_s)
    case = judge_context_for(after(first, run(a=4), now), node=NODE, moment=now, purpose=MANUAL)

    assert case.counters.since("a", 4).grown == 3
    assert case.counters.since("a", 4).elapsed_s == HOUR_S


PROLOG = StateUpdate(trigger="prolog", job_id="7")
EPILOG = StateUpdate(trigger="epilog", job_id="7")


def test_a_jobs_epilog_is_held_against_its_own_prolog():
    state = after(NodeState(), run(a=1), at(0))
    state = after(state, run(a=5), at(60), PROLOG)
    case = judge_context_for(state, node=NODE, moment=at(90), purpose=EPILOG)

    assert case.counters.since("a", 6).grown == 1
    assert case.counters.since("a", 6).elapsed_s == 30


def test_another_check_meanwhile_is_held_against_the_hours_before():
    state = after(NodeState(), run(a=1), at(0))
    state = after(state, run(a=5), at(60), PROLOG)

    assert judge_context_for(state, node=NODE, moment=at(90), purpose=MANUAL).counters.samples == (
        sample(at(0), a=1),
    )


def test_a_requeued_job_starts_from_a_sample_of_its_second_prolog():
    state = after(NodeState(), run(a=1), at(0), PROLOG)
    case = judge_context_for(state, node=NODE, moment=at(60), purpose=PROLOG)
    again = after(state, run(a=3), at(60), PROLOG)

    assert case.counters.samples == state.samples
    assert again.jobs == {"7": sample(at(60), a=3)}


def test_the_epilog_takes_its_jobs_sample_away_and_no_others():
    state = after(NodeState(), run(a=1), at(0), PROLOG)
    state = after(state, run(a=1), at(1), StateUpdate(trigger="prolog", job_id="8"))

    assert list(after(state, run(a=2), at(60), EPILOG).jobs) == ["8"]


@pytest.mark.parametrize(("age_s", "kept"), [(JOB_AGE_MAX_S, True), (JOB_AGE_MAX_S + 1, False)])
def test_a_job_whose_epilog_never_came_is_forgotten(age_s, kept):
    state = after(NodeState(), run(a=1), at(0), PROLOG)

    assert ("7" in after(state, run(a=1), at(age_s)).jobs) is kept


def test_no_job_outlives_a_boot():
    state = after(NodeState(), run(a=1), at(0), PROLOG)

    assert after(state, run(a=1), at(5, boot="boot-2")).jobs == {}


def test_of_more_jobs_than_a_node_can_run_the_last_are_kept():
    state = NodeState()
    for n in range(JOBS_MAX + 3):
        state = after(state, run(a=1), at(n), StateUpdate(trigger="prolog", job_id=str(n)))

    assert next(iter(state.jobs)) == "3"
    assert len(state.jobs) == JOBS_MAX


def hung(call="nvmlInit", state="D"):
    return NvmlSnapshot(status=NvmlStatus.TIMEOUT, hung_call=call, state=state)


def answered(*persistence, status=NvmlStatus.OK):
    gpus = tuple(NvmlGpu(index=n, modes=Modes(persistence=on)) for n, on in enumerate(persistence))
    return NvmlSnapshot(status=status, gpus=gpus)


def test_calls_that_hung_are_counted_until_the_driver_answers():
    once = after(NodeState(), run(hung()), at(10))
    twice = after(once, run(hung("nvmlDeviceGetCount")), at(20))

    assert [(hang.call, hang.state) for hang in twice.hangs] == [
        ("nvmlInit", "D"),
        ("nvmlDeviceGetCount", "D"),
    ]
    assert after(twice, run(answered(True)), at(30)).hangs == ()


def test_a_driver_that_answers_with_an_error_has_answered():
    once = after(NodeState(), run(hung()), at(10))

    assert after(once, run(answered(status=NvmlStatus.ERROR)), at(20)).hangs == ()


@pytest.mark.parametrize("status", [NvmlStatus.CRASH, NvmlStatus.ABSENT])
def test_a_library_that_crashed_or_is_gone_says_nothing_about_a_hang(status):
    once = after(NodeState(), run(hung()), at(10))

    assert after(once, run(answered(status=status)), at(20)).hangs == once.hangs


def test_a_check_without_a_look_at_the_gpus_says_nothing_about_a_hang():
    once = after(NodeState(), run(hung()), at(10))

    assert after(once, run(), at(20)).hangs == once.hangs


def test_one_gpu_that_hangs_among_others_that_answer_is_a_hang():
    gpu = NvmlGpu(index=1, hung_call="nvmlDeviceGetPowerUsage")
    state = after(NodeState(), run(NvmlSnapshot(status=NvmlStatus.OK, gpus=(gpu,))), at(10))

    assert [hang.call for hang in state.hangs] == ["nvmlDeviceGetPowerUsage"]


@pytest.mark.parametrize(("waited_s", "hangs"), [(0.99, 1), (1.0, 2), (None, 2)])
def test_a_call_that_was_waited_for_less_than_a_second_neither_hung_nor_answered(waited_s, hangs):
    once = after(NodeState(), run(hung()), at(10))

    assert len(after(once, run(replace(hung(), hung_s=waited_s)), at(20)).hangs) == hangs


def test_hangs_of_an_earlier_boot_are_no_evidence():
    once = after(NodeState(), run(hung()), at(10))
    case = judge_context_for(once, node=NODE, moment=at(5, boot="boot-2"), purpose=MANUAL)
    twice = after(once, run(hung()), at(5, boot="boot-2"))

    assert case.hangs == ()
    assert [hang.boot_id for hang in twice.hangs] == ["boot-2"]


def crashed(signal="SIGSEGV"):
    return NvmlSnapshot(status=NvmlStatus.CRASH, crash=signal)


def test_crashes_are_counted_per_boot_until_every_gpu_answers():
    one_gpu = NvmlSnapshot(status=NvmlStatus.OK, gpus=(NvmlGpu(index=0, crash="SIGBUS"),))
    once = after(NodeState(), run(crashed()), at(10))
    twice = after(once, run(one_gpu), at(20))
    case = judge_context_for(twice, node=NODE, moment=at(30), purpose=MANUAL)

    assert [crash.signal for crash in twice.crashes] == ["SIGSEGV", "SIGBUS"]
    assert case.crashes == twice.crashes
    assert (
        judge_context_for(twice, node=NODE, moment=at(5, boot="b2"), purpose=MANUAL).crashes == ()
    )
    assert after(twice, run(crashed()), at(5, boot="b2")).crashes[0].boot_id == "b2"
    assert after(twice, run(hung()), at(30)).crashes == twice.crashes
    assert after(twice, run(crashed(None)), at(30)).crashes == twice.crashes
    assert after(twice, run(answered(True)), at(30)).crashes == ()


def test_hangs_are_bounded():
    state = NodeState()
    for n in range(HANGS_MAX + 2):
        state = after(state, run(hung()), at(n))

    assert len(state.hangs) == HANGS_MAX


@pytest.mark.parametrize(
    ("told", "persistence"),
    [((True, True), True), ((True, False), False), ((None, True), True), ((None,), None)],
)
def test_persistence_is_that_of_all_gpus_that_tell_it(told, persistence):
    assert after(NodeState(), run(answered(*told)), at(1)).persistence is persistence


def test_persistence_is_remembered_while_the_driver_hangs():
    state = after(NodeState(), run(answered(True)), at(1))

    assert after(state, run(hung()), at(2)).persistence is True


def test_the_profile_is_remembered_from_a_check_that_saw_the_gpus():
    state = after(NodeState(), run(answered(True), profile="h100"), at(1))

    assert after(state, run(profile="none"), at(2)).profile == "h100"


def test_where_the_boot_is_not_known_nothing_is_remembered_and_nothing_compared():
    state = NodeState(
        samples=(sample(at(0, boot=""), a=1),),
        hangs=(DriverHang(boot_id="", t_us=0, call="x"),),
    )
    unknown = at(60, boot="")
    case = judge_context_for(state, node=NODE, moment=unknown, purpose=MANUAL)

    assert (case.counters.samples, case.hangs) == ((), ())
    assert after(state, run(hung(), a=2), unknown) == state


def test_what_others_keep_in_the_file_stays():
    state = NodeState(incidents={}, repairs=(), strikes=())
    kept = after(replace(state, persistence=True), run(a=1), at(1))

    assert kept.persistence is True


def test_a_case_knows_when_the_node_booted():
    assert (
        judge_context_for(NodeState(), node=NODE, moment=at(100), purpose=MANUAL).boot_us == T0_US
    )
