"""The benchmark of checkpoints: a way that fails is named and left out, and the others go on."""

import pytest
from checkpoint_rounds import BenchRounds

from gpuops.worker.bench.run import measure_save
from gpuops.worker.bench.savers import HEAD_BYTES, BenchJob


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

    def clean(self):
        pass


@pytest.fixture(scope="module")
def subject():
    return BenchJob(HEAD_BYTES, 6)


def test_a_way_that_fails_once_is_left_out_with_the_reason(subject):
    good, bad = Way("good"), Way("bad", fails_at=2)
    turns = BenchRounds(subject, 1, lambda _text: None, needed=frozenset({"good"}))

    for _ in range(3):
        turns.run_round([good, bad])

    assert turns.missing == {"bad": "OSError: the disk is gone"}
    assert {name: list(each) for name, each in turns.samples.items()} == {"good": [0, 1, 2]}
    assert (good.saved, bad.saved) == (3, 2)


def test_the_failure_of_one_that_all_is_measured_against_is_raised(subject):
    turns = BenchRounds(subject, 1, lambda _text: None, needed=frozenset({"bad"}))

    with pytest.raises(OSError, match="disk is gone"):
        turns.run_round([Way("bad", fails_at=1)])


def test_a_guest_has_the_samples_of_the_rounds_in_which_it_was_there(subject):
    always, guest = Way("always"), Way("guest")
    turns = BenchRounds(subject, 1, lambda _text: None)

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
