"""Several nodes save the same step: none takes one that others may have passed."""

from gpuops.checkpoint.memory.buffer_table import BufferTable, SkipReason, SlotLease
from gpuops.checkpoint.types import StateId


def gate_of():
    gate = BufferTable()
    gate.begin_epoch(1, is_alone=False)
    gate.resume(None, 1)
    gate.register(0, 1, range(2))
    return gate


def test_nothing_is_granted_before_the_step_that_is_aimed_at():
    gate = gate_of()
    gate.not_before = 30

    assert gate.acquire(0, 20, 0.0).reason is SkipReason.NOT_DUE
    assert isinstance(gate.acquire(0, 40, 1.0), SlotLease)


def test_whoever_starts_anew_has_no_aim():
    gate = gate_of()
    gate.not_before = 30
    gate.begin_epoch(1, is_alone=False)
    gate.resume(None, 2)
    gate.register(0, 1, range(2))

    assert gate.acquire(0, 1, 0.0).state == StateId(2, 1)
