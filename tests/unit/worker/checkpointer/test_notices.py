"""What the keeper found, and no agent is there to tell, is said by the first rank: once."""

import logging

import torch
from support.in_process_keeper import InProcessNode

from gpuops.worker.checkpointer import Checkpointer


def test_a_notice_of_the_keeper_is_a_warning_of_the_first_rank(caplog):
    caplog.set_level(logging.WARNING, logger="gpuops")
    node = InProcessNode()
    with Checkpointer(keeper=node.connect(), model=torch.nn.Linear(2, 2), every=1) as ck:
        ck.restore()
        for step in range(1, 6):
            if step in (2, 4):
                node.core.replica_checker.notice = "rank 1 differs from ranks 0, 2"
            ck.step(step)
        assert ck.stats["off"] is None
    node.close()

    assert [r.getMessage() for r in caplog.records] == ["rank 1 differs from ranks 0, 2"]


def test_that_states_do_not_persist_is_said_and_that_they_do_again(tmp_path, caplog):
    caplog.set_level(logging.WARNING, logger="gpuops")
    directory, now = tmp_path / "states", [0.0]
    node = InProcessNode(clock_s=lambda: now[0])
    with Checkpointer(
        keeper=node.connect(),
        model=torch.nn.Linear(2, 2),
        every=1,
        directory=directory,
        persist_every=0.0,
    ) as ck:
        ck.restore()
        directory.write_text("in the way")
        for step in range(1, 5):
            ck.step(step)
        directory.unlink()
        now[0] += 3600
        for step in range(5, 9):
            ck.step(step)
        assert (ck.stats["saved"], ck.stats["off"]) == (8, None)
    node.close()

    failed, again = (record.getMessage() for record in caplog.records)
    assert failed.startswith("states do not persist, and are tried again later: ")
    assert str(directory) in failed
    assert again == "states persist again"
