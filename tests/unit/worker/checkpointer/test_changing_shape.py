"""A state whose shape changes: saved again once it stays as it is; where it never does, said."""

import logging
import threading

import pytest
import torch
from support.in_process_keeper import InProcessNode
from torch import nn

from gpuops.worker.checkpointer import Checkpointer


@pytest.fixture
def warnings(caplog):
    caplog.set_level(logging.WARNING, logger="gpuops")
    return lambda: [record.getMessage() for record in caplog.records]


class Grows(nn.Module):
    """A module with a buffer that gets longer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(1))

    def grow(self, n):
        self.seen = torch.full((n,), float(n))


@pytest.fixture
def ranks(monkeypatch):
    """Two ranks of one node, each with its model; they have begun."""
    node, made = InProcessNode(), []
    for rank in range(2):
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
        for name, value in place.items():
            monkeypatch.setenv(name, str(value))
        keeper = node.connect(rank=rank, world=2, local_rank=rank, local_world=2)
        model = Grows()
        made.append((model, Checkpointer(keeper=keeper, model=model, every=1)))
    threads = [threading.Thread(target=ck.restore) for _, ck in made]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    yield made
    node.close()


def steps(ranks, first, last, *, grows):
    for n in range(first, last + 1):
        for model, ck in ranks:
            if grows:
                model.grow(n)
            ck.step(n)


def test_a_state_that_changes_at_every_save_is_said_and_saved_once_it_does_not(ranks, warnings):
    steps(ranks, 2, 5, grows=True)
    assert [ck.stats["saved"] for _, ck in ranks] == [0, 0]
    assert len(warnings()) == 2  # each of its own state
    assert all("changed at each of the last 3 saves (model.seen)" in w for w in warnings())

    steps(ranks, 6, 8, grows=False)

    assert [ck.stats["saved"] for _, ck in ranks] == [3, 3]
    assert [ck.stats["off"] for _, ck in ranks] == [None, None]
    assert len(warnings()) == 2


def test_a_change_now_and_then_costs_a_save_and_no_word(ranks, warnings):
    for n in range(1, 13):
        steps(ranks, n, n, grows=n % 3 == 0)

    assert [ck.stats["saved"] for _, ck in ranks] == [8, 8]
    assert warnings() == []


def test_reasons_of_skipped_saves_are_few(ranks):
    steps(ranks, 1, 2, grows=False)
    (_, first), (_, second) = ranks
    for n in range(3, 9):
        first.step(n)  # the second is late, and is not heard of while the state is on its way
    second.step(8)

    assert set(first.stats["skipped"]) == {"the state before is still being copied"}
