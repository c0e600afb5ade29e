"""The pace of a script that says its steps and has an optimizer: two beats for one step."""

import pytest

from gpuops.agent.monitors.progress import SPREAD_S, StepTracker
from gpuops.wire.ring import Beat, StepSource, WorkerPhase


def beat(seq, step, at_s):
    return Beat(seq, step, round(at_s * 1e9), WorkerPhase.STEPPING, StepSource.UNKNOWN, 0)


def test_a_step_counts_once_however_often_it_beats():
    pace = StepTracker()
    beats = []
    for step in range(1, 11):
        # The optimizer's own beat knows the last step that was said; the word follows at once.
        beats += [beat(2 * step - 1, step - 1, step * 0.1), beat(2 * step, step, step * 0.1 + 1e-4)]

    pace.feed({0: beats})

    assert abs(pace.step_s() - 0.1) < 0.01
    assert pace.common_step() <= 10 + 1 + SPREAD_S / 0.1 + 2
    assert pace.seconds_to(15) == pytest.approx(0.5, abs=0.05)
    assert (pace.seconds_to(10), pace.seconds_to(None), StepTracker().seconds_to(3)) == (0, 0, 0)
