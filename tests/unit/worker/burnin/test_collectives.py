"""Collectives of the burn-in: what each rank must receive, and what is found if it does not."""

import pytest
import torch

from gpuops.burnin.bandwidth import COLLECTIVES
from gpuops.worker.burnin.collectives import CALLS, RankBuffers

RANKS = 3
SIZE = 4 * 300 * RANKS
CPU = torch.device("cpu")


def ready(name):
    """Return the buffers of all ranks, before the collective."""
    all_ranks = [RankBuffers.make(name, rank, RANKS, SIZE, CPU) for rank in range(RANKS)]
    for buffers in all_ranks:
        buffers.reset()
    return all_ranks


def exchange(name, all_ranks):
    """Do what the collective has to, by its definition in MPI."""
    sent = [buffers.sent.clone() for buffers in all_ranks]
    held = [buffers.received.clone() for buffers in all_ranks]
    for rank, buffers in enumerate(all_ranks):
        chunks = buffers.received.chunk(RANKS)
        match name:
            case "all_reduce":
                buffers.received.copy_(sum(held))
            case "all_gather":
                buffers.received.copy_(torch.cat([each.chunk(RANKS)[0] for each in sent]))
            case "reduce_scatter":
                chunks[0].copy_(sum(sent).chunk(RANKS)[rank])
            case "all_to_all":
                buffers.received.copy_(torch.cat([each.chunk(RANKS)[rank] for each in sent]))
            case "broadcast":
                buffers.received.copy_(held[0])
            case "send_recv":
                buffers.received.copy_(sent[rank - 1])


@pytest.mark.parametrize("name", CALLS)
def test_every_rank_must_receive_what_the_collective_defines(name):
    all_ranks = ready(name)
    exchange(name, all_ranks)

    assert [buffers.wrong() for buffers in all_ranks] == [None] * RANKS


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("value", [0.5, float("nan")])
def test_a_result_that_is_wrong_in_the_buffer_of_one_rank_is_found_there(name, value):
    all_ranks = ready(name)
    exchange(name, all_ranks)
    all_ranks[1].received[2] += value

    found = [buffers.wrong() for buffers in all_ranks]
    assert (found[0], found[2]) == (None, None)
    words = len(all_ranks[1].expected)
    assert found[1].startswith(f"1 of {words} floats are wrong: element 2 is ")


@pytest.mark.parametrize("name", CALLS)
def test_a_result_in_the_wrong_place_is_found(name):
    all_ranks = ready(name)
    exchange(name, all_ranks)
    for buffers in all_ranks:
        buffers.received.copy_(buffers.received.roll(1))

    assert None not in [buffers.wrong() for buffers in all_ranks]


@pytest.mark.parametrize("name", CALLS)
def test_a_collective_that_did_nothing_is_wrong(name):
    # Of a broadcast the root and nobody else has its own data already.
    found = [buffers.wrong() for buffers in ready(name)]

    assert sum(text is not None for text in found) >= RANKS - 1


@pytest.mark.parametrize("name", CALLS)
def test_eight_bytes_are_a_whole_float_for_each_rank(name):
    buffers = RankBuffers.make(name, 0, RANKS, 8, CPU)

    assert buffers.size_bytes == 4 * RANKS


def test_every_collective_with_a_formula_is_measured():
    assert set(CALLS) == set(COLLECTIVES)
