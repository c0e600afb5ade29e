"""A copy into a slot leaves nothing in it of what was there before."""

import pytest
import torch

from gpuops.checkpoint.memory.shared_buffer import SharedBuffer
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
    with SharedBuffer.create("test", capture.plan.layout.nbytes) as memory:
        copier = SlotCopier(capture.plan, [memory], pytest.fail)
        copier.start(0, capture)
        wanted = bytes(memory.view)
        memory.view[20] ^= 1

        copier.start(0, capturer.capture(1))

        assert bytes(memory.view) == wanted
