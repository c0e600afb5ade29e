"""What the keeper found, and no agent is there to tell, is said by the first rank: once."""

import logging

import pytest
import torch
from support.in_process_keeper import InProcessNode

from gpuops.worker.checkpointer import Checkpointer
from gpuops.worker.save_stats import SaveStats


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


@pytest.mark.parametrize(("every", "is_said"), [(1, True), (3, False), ("auto", False)])
def test_that_states_are_saved_less_often_than_asked_for_is_said_once(every, is_said, caplog):
    caplog.set_level(logging.WARNING, logger="gpuops")
    node = InProcessNode()
    table = node.core.memory.buffer_table
    with Checkpointer(keeper=node.connect(), model=torch.nn.Linear(2, 2), every=every) as ck:
        ck.restore()
        for step in range(1, 90):
            table.not_before = 3 * (1 + (step - 1) // 3)  # as where all nodes agree on that step
            ck.step(step)
        assert ck.stats["off"] is None
    node.close()

    said = [record.getMessage() for record in caplog.records]
    assert len(said) == is_said
    assert all("every=1 is not met: a state is saved every 3 steps (" in line for line in said)


@pytest.mark.parametrize(
    ("awaits_nodes", "is_zero", "n_said"), [(True, True, 1), (True, False, 0), (False, True, 0)]
)
def test_only_states_that_wait_for_other_nodes_are_said_to_do_so(
    awaits_nodes, is_zero, n_said, caplog
):
    caplog.set_level(logging.WARNING, logger="gpuops")
    stats = SaveStats(is_rank_zero=is_zero, every="1")
    for number in range(30):
        stats.copied(4 * number, 0.5 * number)
        stats.skip("the state before is still in progress", awaits_nodes=awaits_nodes)

    line = (
        "every=1 is not met: a state is saved every 4 steps (0.50 s), since all nodes agree on one "
        "before they save the next; training does not wait for that"
    )
    assert [record.getMessage() for record in caplog.records] == n_said * [line]
