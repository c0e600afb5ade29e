"""All ranks save the same steps, as often as was asked, or as the cost says."""

from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import TCPStore

from gpuops.checkpoint.types import CheckpointError
from gpuops.plan.failure_rate import FailureRate
from gpuops.plan.interval import steps_between_saves
from gpuops.worker.schedule import (
    DEFAULT_RESTORE_S,
    WARMUP_STEPS,
    RankZeroSchedule,
    SaveCost,
    SaveInterval,
    SingleRankSchedule,
    StepSchedule,
    make_schedule,
    parse_interval,
    parse_time,
)


@pytest.mark.parametrize(
    ("text", "every"),
    [
        ("auto", SaveInterval()),
        (1, SaveInterval(steps=1)),
        (500, SaveInterval(steps=500)),
        ("5s", SaveInterval(seconds=5)),
        ("2min", SaveInterval(seconds=120)),
        ("2 min", SaveInterval(seconds=120)),
        ("1.5h", SaveInterval(seconds=5400)),
        ("250ms", SaveInterval(seconds=0.25)),
    ],
)
def test_what_every_means(text, every):
    assert parse_interval(text) == every


@pytest.mark.parametrize("text", [0, -1, 1.5, True, None, "", "0s", "-5s", "5 parsecs", 10**7])
def test_what_every_cannot_mean(text):
    with pytest.raises(CheckpointError, match="every="):
        parse_interval(text)


def test_a_time_in_minutes_is_no_time_in_months():
    assert parse_time("10min", "persist_every") == 600
    with pytest.raises(CheckpointError, match="persist_every="):
        parse_time("10mini", "persist_every")


class Rank:
    """A rank with a clock of its own, and a training loop."""

    def __init__(self, schedule, cost, *, step_s, stall_s=0.0):
        self.schedule, self.cost = schedule, cost
        self.step_s, self.stall_s = step_s, stall_s
        self.now_s = 0.0
        self.saved = []

    def train(self, step):
        self.now_s += self.step_s
        self.cost.before_save(step, self.now_s)
        is_due = self.schedule.is_due(step, self.now_s)
        if is_due:
            self.saved.append(step)
            self.now_s += self.stall_s
        self.cost.after_save(step, self.now_s, self.stall_s if is_due else None)
        if is_due:
            self.schedule.on_handled(step, self.now_s)


def alone(every, **times):
    cost = SaveCost(1)
    rank = Rank(SingleRankSchedule(every, cost, 0.0), cost, **times)
    for step in range(1, 401):
        rank.train(step)
    return rank


def test_by_steps():
    policy = StepSchedule(3)

    assert [n for n in range(1, 11) if policy.is_due(n, 0.0)] == [3, 6, 9]


@pytest.mark.parametrize(
    ("told", "due"),
    [
        ([15, 25, 35, 45], [25, 35, 45]),
        ([8, 9, 11, 12, 19, 21], [11, 21]),
        ([10, 10, 11], [10, 10]),
        ([31, 32], []),
    ],
)
def test_a_due_step_that_is_jumped_over_is_made_up_for_at_the_next(told, due):
    policy = StepSchedule(10)

    assert [n for n in told if policy.is_due(n, 0.0)] == due


def test_one_rank_saves_by_the_clock():
    rank = alone(SaveInterval(seconds=5.0), step_s=0.5, stall_s=0.1)

    assert rank.saved[:3] == [10, 20, 30]


def test_one_rank_saves_as_the_cost_says():
    rank = alone(SaveInterval(), step_s=2.0, stall_s=0.1)

    assert rank.saved[0] == WARMUP_STEPS
    assert rank.saved[2] - rank.saved[1] == 50  # 0.1 s are a thousandth of 100 s


def test_a_save_that_was_skipped_is_made_up_for_within_a_few_steps():
    cost = SaveCost(1)
    schedule = SingleRankSchedule(SaveInterval(), cost, 0.0)

    def handle(step, stall_s):
        cost.before_save(step, float(step))
        assert schedule.is_due(step, float(step))
        cost.after_save(step, float(step), stall_s)
        schedule.on_handled(step, float(step))

    assert not schedule.is_due(1, 1.0)
    cost.after_save(WARMUP_STEPS - 1, float(WARMUP_STEPS - 1), None)
    handle(WARMUP_STEPS, 0.1)
    late = next(step for step in range(6, 10_000) if schedule.is_due(step, float(step)))
    assert late > 3 * WARMUP_STEPS
    handle(late, None)
    handle(late + WARMUP_STEPS, 0.1)
    assert not schedule.is_due(late + 2 * WARMUP_STEPS, 0.0)


def test_where_failures_are_frequent_they_decide():
    cost = SaveCost(16_000)
    cost.before_save(1, 0.0)
    cost.after_save(1, 0.0, None)
    cost.before_save(2, 10.0)
    cost.after_save(2, 12.0, 2.0)

    distance = cost.steps_until_next(SaveInterval())
    assert distance == steps_between_saves(2.0, DEFAULT_RESTORE_S, cost._failures_per_hour, 10.0)
    assert 1 < distance < 200


def test_what_is_on_record_decides_over_what_was_published():
    def distance(*record):
        cost = SaveCost(1000, FailureRate(*record))
        cost.before_save(1, 0.0)
        cost.after_save(1, 0.0, None)
        cost.before_save(2, 10.0)
        cost.after_save(2, 12.0, 20.0)
        return cost.steps_until_next(SaveInterval())

    published = distance()
    assert distance(5000, 1e5) < published / 5
    assert distance(0, 1e6) > published
    assert distance(1, 3692.3) == published


def test_what_takes_longer_is_saved_less_often():
    cheap = alone(SaveInterval(), step_s=2.0, stall_s=0.001)
    dear = alone(SaveInterval(), step_s=2.0, stall_s=5.0)

    assert len(cheap.saved) > len(dear.saved)


class Store:
    """What the ranks of a process group share; it does not tell of keys that end as one of *late*.

    ``asked`` has the keys that were waited for.
    """

    def __init__(self):
        self.values = {}
        self.late = ()
        self.asked = []

    def set(self, key, value):
        self.values[key] = value

    def wait(self, keys, timeout):
        self.asked += keys
        assert timeout.total_seconds() < 60
        if not self.check(keys):
            raise RuntimeError("timed out")

    def check(self, keys):
        return all(key in self.values and not key.endswith(self.late) for key in keys)

    def get(self, key):
        return self.values[key].encode()


def agreed(every, times, store):
    ranks = []
    for number, (step_s, stall_s) in enumerate(times):
        cost = SaveCost(1)
        schedule = RankZeroSchedule(every, cost, store, is_rank_zero=number == 0, run="a")
        schedule._prefix = "same on all ranks"  # a process of its own counts from 0
        ranks.append(Rank(schedule, cost, step_s=step_s, stall_s=stall_s))
    return ranks


@given(
    st.lists(st.tuples(st.floats(0.01, 3.0), st.floats(0.0, 2.0)), min_size=2, max_size=4),
    st.sampled_from([SaveInterval(), SaveInterval(seconds=5.0), SaveInterval(seconds=0.1)]),
    st.integers(1, 10_000),
    st.integers(1, 10),
)
def test_ranks_with_any_clocks_save_the_same_steps(times, every, start, stride):
    ranks = agreed(every, times, Store())
    for step in range(start, start + 200, stride):
        for rank in ranks:
            rank.train(step)

    assert all(rank.saved == ranks[0].saved for rank in ranks)
    assert ranks[0].saved


def test_a_rank_asks_once_for_each_save():
    store = Store()
    ranks = agreed(SaveInterval(seconds=5.0), [(0.5, 0.0), (0.5, 0.0)], store)
    for step in range(1, 201):
        for rank in ranks:
            rank.train(step)

    assert ranks[0].saved[1] - ranks[0].saved[0] == 10
    assert len(store.asked) == len(ranks[1].saved)


@pytest.mark.parametrize("every", [SaveInterval(), SaveInterval(seconds=5.0)])
@pytest.mark.parametrize("stride", [1, 2, 10])
def test_a_due_step_that_is_not_told_of_is_made_up_for_at_the_next(every, stride):
    """A batch that is left out, or several optimizer steps between two calls."""
    ranks = agreed(every, [(0.1, 0.01), (0.3, 0.0)], Store())
    left_out = []
    for step in range(stride, 2000 * stride + 1, stride):
        if step == ranks[0].schedule._next_step and len(ranks[0].saved) % 2:
            left_out.append(step)
            continue
        for rank in ranks:
            rank.train(step)

    assert left_out
    assert ranks[0].saved == ranks[1].saved
    assert len(ranks[0].saved) > 15
    assert ranks[0].saved[-1] > 1800 * stride
    if stride == 1:
        assert {step + 1 for step in left_out} <= set(ranks[0].saved)


@pytest.mark.parametrize("every", [SaveInterval(), SaveInterval(seconds=5.0)])
@pytest.mark.parametrize("for_steps", [1, 50, 500])
def test_a_late_answer_is_waited_for_once_and_all_save_the_same_again(every, for_steps, warnings):
    """The distance is another one at each save, so that a guess would be wrong."""
    store = Store()
    ranks = agreed(every, [(0.5, 0.01), (0.5, 0.0)], store)
    late_at = None
    for step in range(1, 3001):
        ranks[0].step_s = 0.5 + 0.1 * (step % 7)
        for rank in ranks:
            rank.train(step)
        if late_at is None and len(ranks[0].saved) == 10:
            late_at, store.late = step, ("/9", "/10")
        if late_at is not None and step == late_at + for_steps:
            store.late = ()

    first, second = ranks
    assert set(second.saved) <= set(first.saved)
    missed = sorted(set(first.saved) - set(second.saved))
    assert all(late_at < step <= late_at + for_steps for step in missed)
    assert (len(missed) > 0) == (for_steps > 1)
    assert first.saved[-1] == second.saved[-1]
    assert len(store.asked) == len(set(store.asked)) <= len(second.saved)
    assert ["rank 0 has not published" in text for text in warnings()] == [True]


def test_a_rank_without_an_answer_saves_nothing_and_waits_no_more():
    store = Store()
    ranks = agreed(SaveInterval(seconds=5.0), [(0.5, 0.0), (0.5, 0.0)], store)
    for step in range(1, 40):
        for rank in ranks:
            rank.train(step)
    before, waits = list(ranks[1].saved), len(store.asked)
    for step in range(40, 1000):
        ranks[1].train(step)

    assert [step for step in ranks[1].saved if step >= 40] == [45]  # which was said before
    assert ranks[1].saved[: len(before)] == before
    assert len(store.asked) == waits + 1


def test_an_answer_that_comes_late_is_found_in_the_store_of_a_process_group():
    """Its client has to get over the wait that it gave up."""
    within = timedelta(seconds=60)
    server = TCPStore("127.0.0.1", 0, is_master=True, timeout=within, wait_for_workers=False)
    client = TCPStore("127.0.0.1", server.port, timeout=within, wait_for_workers=False)
    costs = [SaveCost(1), SaveCost(1)]
    first = RankZeroSchedule(
        SaveInterval(seconds=5.0), costs[0], server, is_rank_zero=True, run="a"
    )
    second = RankZeroSchedule(
        SaveInterval(seconds=5.0), costs[1], client, is_rank_zero=False, run="a", timeout_s=0.01
    )
    second._prefix = first._prefix
    for cost in costs:
        cost.after_save(0, 0.0, None)
        cost.before_save(1, 1.0)  # so that a save follows after each 5 steps

    assert [step for step in range(1, 6) if first.is_due(step, 0.0)] == [5]
    assert [step for step in range(1, 6) if second.is_due(step, 0.0)] == [5]
    second.on_handled(5, 0.0)
    assert not any(second.is_due(step, 0.0) for step in range(6, 11))
    first.on_handled(5, 0.0)
    assert [step for step in range(6, 11) if first.is_due(step, 0.0)] == [10]
    first.on_handled(10, 0.0)
    assert [step for step in range(11, 16) if second.is_due(step, 0.0)] == [15]


def test_who_decides():
    def schedule(every, world, store):
        return make_schedule(
            every, SaveCost(1), world=world, make_store=lambda: store, rank=0, now_s=0.0
        )

    assert isinstance(schedule(SaveInterval(steps=2), 8, None), StepSchedule)
    assert isinstance(schedule(SaveInterval(), 1, None), SingleRankSchedule)
    assert isinstance(schedule(SaveInterval(), 8, (Store(), "run")), RankZeroSchedule)
    assert schedule(SaveInterval(seconds=5), 8, None).asks_keeper
