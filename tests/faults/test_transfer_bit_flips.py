"""Bits flipped on the way: all are found, and what they spoilt is asked for again."""

import random

import pytest
from support.corrupting_proxy import CorruptingProxy
from support.transfers import (
    CHUNK,
    SHARD,
    Memory,
    Shelf,
    copy_of,
    filled,
    job_pass,
    limits,
    no_pace,
    peer,
    push_of,
    replica_store,
    serving,
    terms,
)

from gpuops.checkpoint.pieces import PIECE_BYTES
from gpuops.checkpoint.transfer import connection
from gpuops.checkpoint.transfer.chunks import PinnedCopy
from gpuops.checkpoint.transfer.client import fetch, push
from gpuops.checkpoint.transfer.parts import fetch_parts
from gpuops.checkpoint.types import StateId

NBYTES = 48 * CHUNK + 77
# A chunk that is spoilt six times in a row would be the end of its transfer.
GAP_BYTES = 20 * CHUNK


@pytest.fixture(autouse=True)
def over_a_network(monkeypatch):
    """Chunks have tags, too, as they have between two machines."""
    monkeypatch.setattr(connection, "is_on_network", lambda _sock: True)


some_flips = pytest.mark.parametrize("n_flips", [100, pytest.param(1000, marks=pytest.mark.soak)])


@some_flips
def test_flips_while_copies_are_fetched_are_found_and_repaired(n_flips):
    memory = filled(NBYTES)
    copy = copy_of(memory)
    n_fetched = n_damaged = 0
    with (
        serving(Shelf((memory, copy))) as server,
        CorruptingProxy(server.port, seed=11, gap_bytes=GAP_BYTES) as proxy,
    ):
        while proxy.n_flips < n_flips:
            target = filled(NBYTES, seed=n_fetched + 1)
            found = fetch([peer(proxy.port)], job_pass(), copy, target.view, terms(60, 30))
            assert bytes(target.view) == bytes(memory.view)
            target.close()
            n_fetched += 1
            n_damaged += found.n_damaged

    # Most of what passes is chunks; the rest of the flips broke frames, which ends a connection.
    assert n_flips / 2 < n_damaged <= proxy.n_flips
    assert n_fetched > n_flips * GAP_BYTES / NBYTES / 4


def test_flips_while_parts_are_fetched_are_found_and_repaired():
    bounds = limits(chunk_bytes=4 * PIECE_BYTES)
    nbytes, found = 11 * PIECE_BYTES + 77, {}
    memory = filled(nbytes)
    copy = copy_of(memory, chunk_bytes=bounds.chunk_bytes)
    ranges = [(at, min(at + PIECE_BYTES, nbytes)) for at in range(0, nbytes, PIECE_BYTES)]
    with (
        serving(Shelf((memory, copy)), bounds=bounds) as server,
        CorruptingProxy(server.port, seed=13, gap_bytes=2 * PIECE_BYTES) as proxy,
    ):
        while proxy.n_flips < 30:
            fetch_parts(
                peer(proxy.port),
                job_pass(),
                copy,
                ranges,
                lambda at, data: found.update({at: bytes(data)}),
                terms(60, 30, limits=bounds),
            )
            assert b"".join(found[begin] for begin, _end in ranges) == bytes(memory.view)
            found.clear()


@some_flips
def test_flips_while_replicas_are_pushed_are_found_and_repaired(n_flips):
    store = replica_store()
    memory, target = filled(NBYTES), Memory(NBYTES)
    step = 0
    with (
        serving(store, store) as server,
        CorruptingProxy(server.port, seed=12, gap_bytes=GAP_BYTES) as proxy,
    ):
        while proxy.n_flips < n_flips:
            step += 1
            state = StateId(3, step)
            memory.view[:] = random.Random(step).randbytes(NBYTES)
            copy = copy_of(memory, state=state)
            pinned = PinnedCopy(memory.fd, copy.digest)
            push(peer(proxy.port), job_pass(), push_of(copy), pinned, terms(60, 30), no_pace())
            store.commit(state)
            held = store.open(state, SHARD)
            fetch([peer(server.port)], job_pass(), copy, target.view, terms())
            held.release()
            assert bytes(target.view) == bytes(memory.view)

    assert server.counters()["received_bytes"] > step * NBYTES + n_flips / 4 * CHUNK
    store.close()
