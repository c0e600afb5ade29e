"""Whom the flight recorders of real ranks over gloo name, for faults injected inside a worker."""

import pytest
from support.drilled_hangs import MODES, STOPPED, HangingRanks, diagnosed, drawn, is_exact

pytestmark = [pytest.mark.torch, pytest.mark.timeout(900)]
QUICK = ("hold-lock", "skip-collective", "other-operation", STOPPED)


def check(modes, seeds, tmp_path):
    wrong = []
    with HangingRanks() as ranks:
        for number, (mode, seed) in enumerate((mode, seed) for seed in seeds for mode in modes):
            hang, folder = drawn(mode, seed), tmp_path / str(number)
            folder.mkdir()
            found = diagnosed(hang, ranks.dumps(hang, folder))
            wrong += [] if is_exact(hang, found) else [(hang, found)]
    assert wrong == []


def test_exactly_the_rank_at_fault_is_named(tmp_path):
    check(QUICK, [1], tmp_path)


@pytest.mark.soak
def test_exactly_the_ranks_at_fault_are_named_in_all_modes(tmp_path):
    check(MODES, range(2, 6), tmp_path)
