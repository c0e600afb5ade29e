"""What the keeper found, and no agent is there to tell, is said by the first rank: once."""

import logging

import torch

from gpuops.checkpoint.memory_keeper import MemoryNode
from gpuops.worker.checkpointer import Checkpointer


def test_a_notice_of_the_keeper_is_a_warning_of_the_first_rank(caplog):
    caplog.set_level(logging.WARNING, logger="gpuops")
    node = MemoryNode()
    with Checkpointer(keeper=node.connect(), model=torch.nn.Linear(2, 2), every=1) as ck:
        ck.restore()
        for step in range(1, 6):
            if step in (2, 4):
                node.core.voting.notice = "rank 1 differs from ranks 0, 2"
            ck.step(step)
        assert ck.stats["off"] is None
    node.close()

    assert [r.getMessage() for r in caplog.records] == ["rank 1 differs from ranks 0, 2"]
