"""The benchmark of checkpoints: its rounds, the ways that fail, and the limits beside them."""

import io

import pytest
from checkpoint_rounds import BenchRounds
from rich.console import Console

from gpuops.cli.ckpt.bench import print_bench
from gpuops.worker.bench.figures import SaveSample, restore_figures, save_figures
from gpuops.worker.bench.limits import Limits, Surroundings, measure_between
from gpuops.worker.bench.run import measure_save
from gpuops.worker.bench.savers import HEAD_BYTES, BenchJob

NO_LIMITS = None  # which only gpuops is measured against


class Way:
    """Saves nothing, and fails when its time comes."""

    def __init__(self, name, fails_at=None):
        self.name, self.saved, self._fails_at = name, 0, fails_at

    def save(self, _step):
        self.saved += 1
        if self.saved == self._fails_at:
            raise OSError("the disk is gone\nand more lines")

    def is_done(self):
        return True

    def recoverable_s(self, _stall_s, _durable_s):
        return None

    def settle(self):
        pass

    def clean(self):
        pass


@pytest.fixture(scope="module")
def subject():
    return BenchJob(HEAD_BYTES, 6)


def test_a_way_that_fails_once_is_left_out_with_the_reason(subject):
    good, bad = Way("good"), Way("bad", fails_at=2)
    turns = BenchRounds(subject, NO_LIMITS, 1, lambda _text: None, needed=frozenset({"good"}))

    for _ in range(3):
        turns.run_round([good, bad])

    assert turns.missing == {"bad": "OSError: the disk is gone"}
    assert {name: list(each) for name, each in turns.samples.items()} == {"good": [0, 1, 2]}
    assert (good.saved, bad.saved) == (3, 2)


def test_the_failure_of_one_that_all_is_measured_against_is_raised(subject):
    turns = BenchRounds(subject, NO_LIMITS, 1, lambda _text: None, needed=frozenset({"bad"}))

    with pytest.raises(OSError, match="disk is gone"):
        turns.run_round([Way("bad", fails_at=1)])


def test_a_guest_has_the_samples_of_the_rounds_in_which_it_was_there(subject):
    always, guest = Way("always"), Way("guest")
    turns = BenchRounds(subject, NO_LIMITS, 1, lambda _text: None)

    turns.run_round([always])
    turns.run_round([always, guest])

    assert list(turns.samples["guest"]) == [1]
    assert list(turns.samples["always"]) == [0, 1]


class Slowing:
    """A job whose steps take longer and longer, whoever saves."""

    def __init__(self):
        self._n = 0

    def step(self):
        self._n += 1
        return 1.0 + self._n / 1000


class Late(Way):
    """Is durable at the second look."""

    def is_done(self):
        self.looks = getattr(self, "looks", 0) + 1
        return self.looks > 1


def test_a_machine_that_grows_slower_is_no_loss_of_the_saver():
    taken = measure_save(Slowing(), Late("late"), 1, 10)

    assert taken.loss == pytest.approx(0.0, abs=1e-9)
    assert taken.lost_s == pytest.approx(taken.stall_s, abs=1e-6)


def test_a_save_that_is_durable_before_the_next_step_has_no_loss():
    taken = measure_save(Slowing(), Way("at once"), 1, 10)

    assert taken.loss is None
    assert taken.durable_s == taken.stall_s


class Machine:
    """Limits that are as given, one after the other."""

    def __init__(self, *memcpy_s):
        self._memcpy_s = list(memcpy_s)

    def __call__(self):
        return Limits(self._memcpy_s.pop(0), hash_s=1.0, write_s=2.0)


def test_a_figure_is_taken_between_equal_limits():
    figures = iter("abc")
    # The machine was slower at first: the limits around the first and the second figure differ.
    measured, around = measure_between(lambda: next(figures), Machine(3.0, 2.0, 1.0, 1.2))

    assert measured == "c"
    assert around.is_quiet
    assert around.mean == Limits(pytest.approx(1.1), 1.0, 2.0)


def test_a_machine_that_is_never_quiet_is_not_waited_for():
    figures = iter("abcd")
    measured, around = measure_between(lambda: next(figures), Machine(1.0, 2.0, 1.0, 2.0))

    assert measured == "c"
    assert not around.is_quiet


def around(before_s, after_s):
    return Surroundings(Limits(before_s, 1.0, 2.0), Limits(after_s, 1.0, 2.0))


def sample(stall_s):
    return SaveSample(stall_s, stall_s, 2 * stall_s, 4 * stall_s, 0.0, stall_s)


def test_only_quiet_rounds_are_compared_with_the_limits(subject):
    samples = {"gpuops": {0: sample(9.0), 1: sample(1.0), 2: sample(5.0), 3: sample(1.5)}}
    limits = {0: around(1.0, 9.0), 1: around(1.0, 1.0), 2: around(1.0, 2.0), 3: around(1.0, 1.0)}

    figures = save_figures(subject, samples, limits)

    assert figures["quiet_rounds"] == {"quiet": 2, "of": 3}
    stall = figures["ratios"]["stall over memcpy"]
    assert (stall["median"], stall["min"], stall["max"], stall["n"]) == (1.25, 1.0, 1.5, 2)
    assert figures["ratios"]["recoverable over memcpy + hash"]["median"] == 1.25
    assert figures["ratios"]["durable over write past the cache + fsync"]["median"] == 2.5


def test_where_no_round_was_quiet_all_count_and_it_is_said(subject):
    took = {"gpuops": [9.0, 2.0, 4.0], "memcpy": [1.0, 1.0, 1.0]}
    figures = restore_figures(took, {at: around(0.5, 1.5) for at in range(3)})

    assert figures["ratios"]["recovery over memcpy"]["median"] == 3.0
    assert figures["quiet_rounds"] == {"quiet": 0, "of": 2}
    body = {"plan": {"rounds": 2, "nbytes": 8}, "torch": "2", "goals": []}
    output = io.StringIO()
    print_bench({**body, "recovery": figures}, Console(file=output, width=200))
    assert "0 of 2 rounds were quiet" in output.getvalue()
