"""What beats add up to."""

from dataclasses import replace

from gpuops.agent.monitors.progress import MINUTE_NS, AttemptProgress
from gpuops.wire.ring import STEP_UNKNOWN, Beat, StepSource, WorkerPhase

S = 10**9


def beats(*pairs, source=StepSource.OPTIMIZER_STATE):
    return [
        Beat(seq, step, round(at * S), WorkerPhase.STEPPING, source, seq)
        for seq, (step, at) in enumerate(pairs, 1)
    ]


def test_the_first_step_is_that_of_the_fastest_rank():
    progress = AttemptProgress()
    progress.feed(1, beats((1, 10.2)))
    progress.feed(0, beats((1, 10.1), (2, 10.3)))

    assert progress.first.mono_ns == round(10.1 * S)
    assert (progress.steps_first, progress.steps_last, progress.beats) == (1, 2, 2)
    assert progress.last_mono_ns == round(10.3 * S)


def test_caught_up_is_the_first_step_above_all_earlier_ones():
    progress = AttemptProgress(highest_before=5)
    progress.feed(0, beats((4, 1.0), (5, 2.0), (6, 3.0), (7, 4.0)))
    progress.feed(1, beats((6, 2.9)))

    assert (progress.caught_up.step, progress.caught_up.mono_ns) == (6, round(2.9 * S))
    assert progress.highest == 7


def test_the_end_of_a_program_is_known_and_is_no_step():
    progress = AttemptProgress()
    end = Beat(3, 2, 9 * S, WorkerPhase.FINISHED, StepSource.OPTIMIZER_STATE, 2)
    progress.feed(1, [*beats((1, 1.0), (2, 2.0)), end])

    assert progress.ranks[1].finished_ns == 9 * S
    assert (progress.ranks[1].beats, progress.last_mono_ns) == (2, 2 * S)


def test_a_first_attempt_never_catches_up():
    progress = AttemptProgress()
    progress.feed(0, beats((1, 1.0), (2, 2.0)))

    assert progress.caught_up is None


def test_unknown_steps_count_as_beats_only():
    progress = AttemptProgress(highest_before=9)
    progress.feed(0, beats((STEP_UNKNOWN, 1.0), (STEP_UNKNOWN, 2.0), source=StepSource.UNKNOWN))

    assert progress.first.step is None
    assert (progress.steps_last, progress.highest, progress.beats) == (None, 9, 2)
    assert progress.caught_up is None


def test_a_minute_holds_the_steps_of_the_lowest_rank_only():
    progress = AttemptProgress()
    progress.feed(0, beats((1, 0.0), (2, 1.0), (3, 3.0)))
    progress.feed(1, beats((1, 0.0), (2, 9.0)))

    assert progress.take_minute(59 * S) is None
    minute = progress.take_minute(MINUTE_NS)
    assert (minute.beats, minute.step_last) == (3, 3)
    assert (minute.step_time_p50_us, minute.step_time_max_us) == (1_500_000, 2_000_000)
    assert progress.take_minute(10 * MINUTE_NS) is None


def test_a_script_that_says_its_steps_beats_twice_in_each_and_steps_once():
    progress = AttemptProgress()
    progress.feed(0, beats((STEP_UNKNOWN, 0.0), (1, 0.1), (1, 2.0), (2, 2.1), (2, 4.0), (3, 4.1)))

    minute = progress.take_minute(MINUTE_NS)
    assert (minute.step_time_p50_us, minute.step_time_max_us) == (2_000_000, 2_000_000)


def test_a_jump_of_the_optimizers_steps_is_a_load():
    progress = AttemptProgress(highest_before=12)
    progress.feed(0, beats((1, 1.0)))
    assert progress.may_load
    progress.feed(1, beats((1, 1.0), (9, 4.1)))
    progress.feed(0, beats((1, 1.0), (9, 4.0), (10, 5.0))[1:])

    assert not progress.may_load
    assert (progress.steps_first, progress.steps_last) == (9, 10)
    assert (progress.first.step, progress.first.mono_ns) == (9, 4 * S)


def test_neither_a_job_that_catches_up_nor_one_that_reports_every_tenth_step_loads():
    progress = AttemptProgress()
    progress.feed(0, beats((1, 1.0), (2, 2.0), (3, 3.0), (4, 4.0), (7, 5.0)))
    assert progress.steps_first == 1

    progress = AttemptProgress()
    progress.feed(0, beats((10, 1.0), (20, 2.0), (30, 3.0), source=StepSource.REPORTED))
    assert progress.steps_first == 10


def test_counted_steps_are_counted_and_are_no_step_numbers():
    counted = [
        replace(beat, step=STEP_UNKNOWN, counted=beat.seq)
        for beat in beats((1, 1.0), (2, 2.0), source=StepSource.COUNTED)
    ]
    progress = AttemptProgress(highest_before=1)
    progress.feed(0, [*counted, replace(counted[-1], seq=3, phase=WorkerPhase.EVAL)])

    assert (progress.beats, progress.ranks[0].counted, progress.ranks[0].last_step) == (2, 2, None)
    assert (progress.first.step, progress.first.source) == (None, StepSource.COUNTED)
    assert (progress.steps_last, progress.caught_up) == (None, None)
