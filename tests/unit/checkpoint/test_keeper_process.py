"""A keeper that does not answer: who hangs, and who is only slow."""

import pytest

from gpuops.checkpoint.keeper.process import (
    IDLE_SAMPLES,
    SAMPLES_MAX,
    ProcessSample,
    sample_process,
    why_hung,
)


def looks(states, *, ticks=0):
    """Return a look for each of *states*; the processor time grows by *ticks* from one to next."""
    return [ProcessSample(state, 100 + n * ticks) for n, state in enumerate(states)]


@pytest.mark.parametrize(
    ("states", "ticks", "how"),
    [
        ("T" * IDLE_SAMPLES, 0, "stopped"),
        ("t" * IDLE_SAMPLES, 0, "stopped"),
        ("S" * IDLE_SAMPLES, 0, "used no processor"),
        ("RSR" + "T" * IDLE_SAMPLES, 0, "stopped"),
        ("T" * (IDLE_SAMPLES - 1), 0, None),
        ("S" * (IDLE_SAMPLES - 1), 0, None),
        ("S" * IDLE_SAMPLES, 1, None),  # a thread of it works, and holds the others up
        ("SSSRSS", 0, None),
        ("D" * IDLE_SAMPLES, 0, None),  # it waits for memory, or for a disk
        ("TTTTTS", 0, None),  # it goes on
        ("R" * (SAMPLES_MAX - 1), 100, None),
        ("R" * SAMPLES_MAX, 100, "state R"),
        ("D" * SAMPLES_MAX, 0, "state D"),
        ("", 0, None),
    ],
)
def test_who_computes_or_waits_in_the_kernel_is_slow_for_a_while(states, ticks, how):
    found = why_hung(looks(states, ticks=ticks))

    assert found is None if how is None else how in found


def test_how_a_process_is_can_be_seen_as_long_as_it_is_there():
    assert sample_process(1).state in "SRDI"
    assert sample_process(2**22 + 1) is None
