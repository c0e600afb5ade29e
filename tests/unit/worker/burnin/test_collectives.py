"""Collectives of the burn-in: what each rank must receive, and what is found if it does not."""

import pytest
import torch

from gpuops.burnin.bandwidth import COLLECTIVES
from gpuops.worker.burnin.collectives import CALLS, RankBuffers, fill, wrong_chunk

RANKS = 3
WORDS = 4 * RANKS


def filled(name):
    """Return the buffers of all ranks, before the collective."""
    all_ranks = [
        RankBuffers(rank, RANKS, torch.zeros(WORDS), torch.zeros(WORDS)) for rank in range(RANKS)
    ]
    for buffers in all_ranks:
        fill(name, buffers)
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
    all_ranks = filled(name)
    exchange(name, all_ranks)

    assert [wrong_chunk(name, buffers) for buffers in all_ranks] == [None] * RANKS


@pytest.mark.parametrize("name", CALLS)
def test_a_result_that_is_wrong_in_the_buffer_of_one_rank_is_found_there(name):
    all_ranks = filled(name)
    exchange(name, all_ranks)
    all_ranks[1].received[2] += 0.5

    found = [wrong_chunk(name, buffers) for buffers in all_ranks]
    assert (found[0], found[2]) == (None, None)
    assert found[1].startswith("chunk 0: 1 floats are not ")


@pytest.mark.parametrize("name", CALLS)
def test_a_collective_that_did_nothing_is_wrong(name):
    # Of a broadcast and a sum the root and nobody else may have its own data already.
    found = [wrong_chunk(name, buffers) for buffers in filled(name)]

    assert sum(text is not None for text in found) >= RANKS - 1


def test_every_collective_with_a_formula_is_measured():
    assert set(CALLS) == set(COLLECTIVES)
