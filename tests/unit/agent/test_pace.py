"""What is known of a run's checkpoints from the beats of its ranks."""

import pytest

from gpuops.agent.monitors.progress import StepTracker
from gpuops.wire.ring import Beat, StepSource, WorkerPhase


def beats(*told):
    """Return beats of ``(phase, step)``, a second apart."""
    return [
        Beat(seq, step, seq * 10**9, phase, StepSource.REPORTED, seq)
        for seq, (phase, step) in enumerate(told, start=1)
    ]


RESTORE, STEP, SAVE, NEXT = (
    WorkerPhase.RESTORE,
    WorkerPhase.STEPPING,
    WorkerPhase.CHECKPOINT,
    WorkerPhase.RESUMED,
)


@pytest.mark.parametrize(
    ("told", "saved", "base"),
    [
        ([(STEP, 8), (STEP, 9)], None, None),
        ([(RESTORE, -1), (STEP, 1)], None, None),
        ([(RESTORE, -1), (NEXT, -1), (STEP, 11), (STEP, 12)], None, 10),
        ([(STEP, 10), (SAVE, 10), (NEXT, 10), (STEP, 11)], 10, 10),
        ([(STEP, 10), (SAVE, 10), (WorkerPhase.RAISED, 10)], None, None),
        ([(RESTORE, -1), (STEP, 6), (STEP, 10), (SAVE, 10), (NEXT, 10)], 10, 10),
    ],
    ids=["nothing", "fresh", "loaded", "saved", "failed to save", "loaded and saved"],
)
def test_which_checkpoint_a_failure_would_be_soon_after(told, saved, base):
    pace = StepTracker()
    pace.begin()
    pace.feed({0: beats(*told)})

    assert (pace.checkpoint_step, pace.base_step) == (saved, base)


def test_an_older_one_that_was_loaded_counts_until_a_newer_one_is_saved():
    pace = StepTracker()
    pace.feed({0: beats((STEP, 10), (SAVE, 10), (NEXT, 10))})
    pace.begin()
    assert pace.base_step == 10  # it may fail before its first step
    pace.feed({0: beats((RESTORE, -1), (NEXT, -1), (STEP, 6))})

    assert (pace.checkpoint_step, pace.base_step) == (10, 5)


def test_what_the_keeper_says_is_saved_and_loaded_counts():
    pace = StepTracker()
    pace.begin()
    pace.saved(40, is_new=False)  # of the workers before
    pace.loaded(30)  # the newer one was passed over
    assert (pace.checkpoint_step, pace.base_step) == (40, 30)
    pace.saved(31, is_new=True)
    assert (pace.checkpoint_step, pace.base_step) == (31, 31)
    pace.begin()
    assert pace.base_step == 31
