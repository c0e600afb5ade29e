"""A copy into a slot leaves nothing in it of what was there before."""

import pytest
import torch

from gpuops.checkpoint.arena import SlotMemory
from gpuops.checkpoint.states import Shard
from gpuops.worker.checkpointer.assembly import Given
from gpuops.worker.checkpointer.capture import Capturer
from gpuops.worker.checkpointer.copying import SlotCopier


def parts_of(**values):
    given = Given(allow_pickle=False, warn=pytest.fail)
    given.values("extra", values)
    return given.parts


def test_a_header_that_changed_in_memory_is_written_anew():
    capturer = Capturer(parts_of(x=torch.arange(9.0)), Shard(0, 1), allow_pickle=False)
    capture = capturer.capture(1)
    with SlotMemory.create("test", capture.plan.layout.nbytes) as memory:
        copier = SlotCopier(capture.plan, [memory], pytest.fail)
        copier.start(0, capture)
        wanted = bytes(memory.view)
        memory.view[20] ^= 1

        copier.start(0, capturer.capture(1))

        assert bytes(memory.view) == wanted
