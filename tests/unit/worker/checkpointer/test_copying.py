"""A copy into a slot leaves nothing in it of what was there before."""

import pytest
import torch
from support.keeper_ranks import LEASE, reserved_of

from gpuops.checkpoint.types import Shard
from gpuops.worker.assemble import StateAssembler
from gpuops.worker.staging.capture import StateCapturer
from gpuops.worker.staging.slot_copier import SlotCopier


def parts_of(**values):
    given = StateAssembler(allow_pickle=False, warn=pytest.fail)
    given.add_values("extra", values)
    return given.adapters


def test_a_header_that_changed_in_memory_is_written_anew():
    capturer = StateCapturer(parts_of(x=torch.arange(9.0)), Shard(0, 1), allow_pickle=False)
    capture = capturer.capture(1)
    with reserved_of(capture.plan.layout) as reserved:
        memory = reserved.slots[0]
        copier = SlotCopier(capture.plan, reserved, pytest.fail)
        copier.start(LEASE, capture)
        wanted = bytes(memory.view)
        memory.view[20] ^= 1

        copier.start(LEASE, capturer.capture(1))

        assert bytes(memory.view) == wanted
