"""When silence is a hang: every rule, on a clock that is told the time."""

import pytest

from gpuops.agent.monitors.hang.judge import BEATLESS_S, HangJudge
from gpuops.agent.monitors.hang.timeouts import (
    STEP_FLOOR_S,
    STEPS_MIN,
    HangTimeouts,
    limits_for,
)
from gpuops.wire.ring import STEP_UNKNOWN, Beat, StepSource, WorkerPhase

S = 10**9


class Job:
    """A judge and ranks that beat when told to; looks each second, as an agent keeps looking."""

    def __init__(self, asked_s=None, ranks=(0, 1), env=None):
        self.judge = HangJudge(limits_for(asked_s, env or {}))
        self.ranks = ranks
        self.now_s = 1000.0
        self.seq = 0
        self.restart()

    def restart(self):
        self.judge.begin(self.ranks, self.ns)
        self.step = 0
        return self

    @property
    def ns(self):
        return round(self.now_s * S)

    def beat(self, *ranks, phase=WorkerPhase.STEPPING, name="", step=None):
        for rank in ranks or self.ranks:
            self.seq += 1
            number = self.step if step is None else step
            source = StepSource.REPORTED
            beat = Beat(self.seq, number, self.ns, phase, source, self.seq, name)
            self.judge.feed({rank: [beat]}, self.ns)
        return self

    def steps(self, count, gap_s=1.0, ranks=None):
        for _ in range(count):
            self.wait(gap_s)
            self.step += 1
            self.beat(*(ranks or self.ranks))
        return self

    def wait(self, seconds):
        """Look each second; return the first hang and when it was seen."""
        end_s = self.now_s + seconds
        while self.now_s < end_s:
            self.now_s = min(self.now_s + 1.0, end_s)
            hang = self.judge.judge(self.ns)
            if hang is not None:
                return hang
        return None

    def hang_after(self, limit_s=100_000.0):
        """Return after how many seconds of silence a hang is seen."""
        start_s = self.now_s
        assert self.wait(limit_s) is not None, f"nothing in {limit_s} s"
        return self.now_s - start_s


def test_a_steady_job_that_falls_silent_hangs_after_the_floor():
    assert Job().steps(20).hang_after() == 61


def test_a_job_that_goes_on_never_hangs():
    assert Job().steps(3000, gap_s=1.0).wait(0) is None


@pytest.mark.parametrize(
    ("gap_s", "expected_s"), [(1.0, 60), (30.0, 150), (200.0, 1000)], ids=["floor", "p99", "long"]
)
def test_the_limit_of_a_step_grows_with_the_steps(gap_s, expected_s):
    assert Job().steps(20, gap_s).hang_after() == expected_s + 1


def test_the_longest_step_ever_seen_counts_three_times_unless_it_was_of_the_warm_up():
    late = Job().steps(20).steps(1, gap_s=50.0).steps(2000)
    assert late.hang_after() == 151
    early = Job().steps(1).steps(1, gap_s=50.0).steps(20)
    assert early.hang_after() == 61


def test_the_first_step_has_its_own_limit_until_one_attempt_has_made_it():
    job = Job()
    job.beat(0, phase=WorkerPhase.OTHER, name="init", step=STEP_UNKNOWN)
    job.beat(0, phase=WorkerPhase.RESUMED, step=STEP_UNKNOWN)
    assert job.hang_after() == 601


@pytest.mark.parametrize(("first_s", "expected_s"), [(5, 600), (100, 600), (300, 900)])
def test_a_first_step_after_a_restart_may_load_where_the_fresh_start_had_nothing_to(
    first_s, expected_s
):
    job = Job().steps(1, gap_s=first_s).restart()

    assert job.hang_after() == expected_s + 1


def test_later_attempts_know_how_long_the_steps_after_the_first_may_compile():
    job = Job().steps(20, gap_s=1.0).restart().steps(1, gap_s=500.0)

    assert job.hang_after() == 61


def test_a_hang_is_seen_ahead_unless_a_rank_goes_on():
    job = Job().steps(20)
    assert job.wait(54) is None
    assert job.judge.judge(job.ns, 6.0) is None
    job.now_s += 1
    assert job.judge.judge(job.ns, 6.0) is not None
    assert job.judge.judge(job.ns) is None
    job.judge.excuse_until(job.ns + 10 * S)
    assert job.judge.judge(job.ns, 6.0) is None


def test_one_rank_that_is_slow_to_start_is_waited_for_as_long_as_a_first_step_may_take():
    job = Job().steps(1, gap_s=10, ranks=[0])

    hang = job.wait(10_000)

    # The other one has made a single step, and may be at its second for as long.
    assert job.now_s == 1010 + 601
    assert hang.lagging == (1,)
    assert hang.phase == "first step"


def test_few_steps_are_no_reason_to_expect_the_next_soon():
    assert Job().steps(4).hang_after() == 601


def test_after_a_restart_the_first_few_steps_may_compile_again():
    job = Job().steps(100, gap_s=1.0).restart()
    job.steps(1, gap_s=50.0)

    # Three times the first step of the first attempt (1 s) is below the floor, steps are known.
    assert job.hang_after() == 61


@pytest.mark.parametrize(
    ("phase", "name", "doing"),
    [
        (WorkerPhase.EVAL, "eval", "eval"),
        (WorkerPhase.CHECKPOINT, "", "checkpoint"),
        (WorkerPhase.OTHER, "upload", "upload"),
    ],
)
def test_a_phase_has_its_own_limit(phase, name, doing):
    job = Job().steps(20).beat(phase=phase, name=name)
    hang = job.wait(10_000)

    assert (hang.phase, hang.limit_s) == (doing, 600)


def test_a_phase_that_took_long_may_take_three_times_as_long_but_no_other_may():
    job = Job().steps(20).beat(phase=WorkerPhase.EVAL, name="eval")
    job.wait(500)
    job.beat(phase=WorkerPhase.RESUMED).steps(10)
    job.beat(phase=WorkerPhase.EVAL, name="eval")
    assert job.hang_after() == 1501
    assert Job().steps(20).beat(phase=WorkerPhase.EVAL, name="test").hang_after() == 601


def test_a_phase_is_no_long_step():
    job = Job().steps(20).beat(phase=WorkerPhase.EVAL)
    job.wait(500)
    job.beat(phase=WorkerPhase.RESUMED).steps(10)

    assert job.hang_after() == 61


def test_a_rank_in_a_phase_excuses_those_that_wait_for_it():
    job = Job().steps(20).beat(0, phase=WorkerPhase.CHECKPOINT)
    hang = job.wait(10_000)

    assert job.now_s == 1020 + 601
    assert (hang.phase, hang.lagging) == ("checkpoint", (0,))


def test_a_rank_that_finished_is_no_hang_and_excuses_nobody():
    job = Job().steps(20).beat(0, phase=WorkerPhase.FINISHED)
    hang = job.wait(10_000)

    assert hang.silent_s == 61
    assert job.judge.finished == (0,)
    assert Job().steps(20).beat(phase=WorkerPhase.FINISHED).wait(10_000) is None


def test_a_rank_that_raised_and_does_not_end_is_a_hang():
    hang = Job().steps(20).beat(0, phase=WorkerPhase.RAISED).wait(10_000)

    assert (hang.phase, hang.silent_s) == ("ending after an exception", 61)


def test_what_the_user_asks_for_is_the_limit_of_a_step_only():
    assert Job(10.0).steps(20).hang_after() == 11
    assert Job(10.0).steps(20, gap_s=8.0).hang_after() == 11
    assert Job(10.0).steps(2).hang_after() == 11
    assert Job(10.0).steps(20).beat(phase=WorkerPhase.EVAL).hang_after() == 601
    assert Job(2000.0).steps(20).beat(phase=WorkerPhase.EVAL).hang_after() == 2001


def test_a_job_that_never_beats_never_hangs_and_is_said_once():
    job = Job()

    assert job.wait(BEATLESS_S - 1) is None
    assert not job.judge.is_beatless(job.ns)
    assert job.wait(BEATLESS_S * 10) is None
    assert job.judge.is_beatless(job.ns)
    assert not job.judge.is_beatless(job.ns)
    assert not job.restart().judge.is_beatless(job.ns + 2000 * S)


def test_a_restart_of_a_job_that_has_shown_no_step_is_judged_as_a_start():
    job = Job()
    assert job.wait(BEATLESS_S - 10) is None
    hang = job.restart().wait(100_000)

    assert (hang.silent_s, hang.limit_s, hang.ever_stepped) == (601, 600, False)
    assert not job.judge.is_beatless(job.ns)
    assert job.restart().wait(100_000) is not None


def test_no_restart_is_judged_where_a_start_without_a_step_took_longer_than_a_hang():
    job = Job()
    assert job.wait(BEATLESS_S + 1) is None
    assert job.judge.is_beatless(job.ns)

    assert job.restart().wait(10_000) is None
    assert job.steps(1).restart().wait(100_000) is not None, "it does show its steps"


def test_a_rank_that_never_steps_is_not_missed_while_the_others_do():
    job = Job()
    for _ in range(3000):
        assert job.wait(1) is None
        job.step += 1
        job.beat(0)
    hang = job.wait(10_000)

    assert hang.silences_s[0] == 61
    assert hang.lagging == ()  # rank 0 has made three thousand steps without it


def test_in_process_restarts_get_ten_times_as_long():
    job = Job(env={"TORCHFT_LIGHTHOUSE": "http://l:1"})

    assert job.steps(20).hang_after() == 601


def test_limits_last_over_restarts():
    job = Job().steps(20, gap_s=100.0).restart().steps(20, gap_s=1.0)

    assert job.hang_after() == 501


@pytest.mark.parametrize(
    ("steps", "lagging"),
    [({0: 20, 1: 20}, ()), ({0: 20, 1: 19}, (1,)), ({0: 18, 1: 18, 2: 20}, (0, 1))],
)
def test_the_lowest_step_lags(steps, lagging):
    job = Job(ranks=tuple(steps)).steps(17)
    job.now_s += 1
    for rank, step in steps.items():
        job.beat(rank, step=step)
    hang = job.wait(10_000)

    assert hang.lagging == lagging
    assert hang.steps == steps


def test_one_that_is_silent_while_the_others_go_on_is_named():
    job = Job(ranks=(0, 1, 2)).steps(20)
    job.step = STEP_UNKNOWN
    for _ in range(60):
        assert job.wait(1) is None
        job.beat(0, 2, phase=WorkerPhase.RESUMED)
    hang = job.wait(2)

    assert hang.lagging == (1,)


def test_an_agent_that_was_stopped_itself_does_not_blame_its_workers():
    job = Job().steps(20)
    job.now_s += 3600

    assert job.judge.judge(job.ns) is None
    assert job.hang_after() == 61


def test_what_all_slept_through_is_no_long_step():
    job = Job().steps(20)
    job.now_s += 3600
    job.judge.feed({}, job.ns)
    job.steps(20)

    assert job.hang_after() == 61


def test_an_excuse_ends():
    job = Job().steps(20)
    job.judge.excuse_until(job.ns + 300 * S)

    assert job.hang_after() == 300


def test_other_nodes_learn_for_how_long_ours_are_busy():
    job = Job().steps(20)
    assert job.judge.busy_for_s(job.ns) == 0
    job.beat(0, phase=WorkerPhase.EVAL)
    assert job.wait(100) is None
    assert job.judge.busy_for_s(job.ns) == 500
    assert Job().judge.busy_for_s(1000 * S) == 600


def test_each_phase_has_a_limit_of_its_own():
    job = Job().steps(20, gap_s=20.0).beat(phase=WorkerPhase.EVAL, name="eval")
    job.wait(300)
    job.beat(phase=WorkerPhase.RESUMED)
    limits = job.judge.limits

    assert (limits.first_step(), limits.step(0, 20)) == (600, 100)
    assert limits.phase(WorkerPhase.EVAL, "eval") == 900
    for phase in (WorkerPhase.EVAL, WorkerPhase.CHECKPOINT, WorkerPhase.RESTORE):
        assert limits.phase(phase, "another") == 600
    assert HangTimeouts(asked_s=10.0).step(0, 0) == 10


def test_a_rank_that_has_made_few_steps_may_be_compiling_still():
    limits = HangTimeouts()
    for _ in range(2 * STEPS_MIN):
        limits.learn_step(0, 1.0)

    assert limits.step(0, made=STEPS_MIN) == STEP_FLOOR_S
    assert limits.step(0, made=STEPS_MIN - 1) == limits.first_step() > STEP_FLOOR_S
