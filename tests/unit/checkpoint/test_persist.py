"""Shards are written several at a time, and the first error ends them all."""

import threading
import time

import pytest
from support.checkpoint_images import ORIGIN, images

from gpuops.checkpoint.storage.directory import DirectoryStore
from gpuops.checkpoint.storage.directory_writer import DirectoryWriter
from gpuops.checkpoint.storage.inspection import verify_state
from gpuops.checkpoint.storage.persist import persist, persist_node_shards
from gpuops.checkpoint.types import CheckpointError, StateId

STATE = StateId(1, 100)
AT_ONCE = DirectoryWriter.shards_at_once
TIMEOUT_S = 60.0


def alone(store, shards, throttle):
    persist(store, STATE, shards, origin=ORIGIN, throttle=throttle)


def together(store, shards, throttle):
    persist_node_shards(store, STATE, shards, session="run", throttle=throttle)


@pytest.mark.parametrize("write", [alone, together])
def test_so_many_shards_are_written_at_a_time_and_no_more(tmp_path, write):
    store, threads = DirectoryStore(tmp_path), set()
    all_begun = threading.Barrier(AT_ONCE)

    def throttle(_nbytes):
        threads.add(threading.get_ident())
        all_begun.wait(TIMEOUT_S)

    with images(2 * AT_ONCE) as shards:
        write(store, shards, throttle)
        assert len(threads) == AT_ONCE
        alone(store, shards, throttle=lambda _nbytes: None)

    assert verify_state(store, STATE) == []


class FailingStore:
    """Fails at shard 0, once shard 1 has begun; shard 1 goes on until its throttle raises."""

    shards_at_once = 2

    def __init__(self):
        self.has_begun, self.is_aborted, self.ended = threading.Event(), False, []

    def contains(self, _manifest):
        return False

    def open_writer(self, _state, _world):
        return self

    def put_shard(self, record, _source, *, throttle, verify):
        if record.shard.rank == 0:
            assert self.has_begun.wait(TIMEOUT_S)
            raise CheckpointError("no space")
        if record.shard.rank == 1:
            self.has_begun.set()
            end_s = time.monotonic() + TIMEOUT_S
            while time.monotonic() < end_s:
                try:
                    throttle(1)
                except CheckpointError:
                    self.ended.append(record.shard.rank)
                    raise
        self.ended.append(record.shard.rank)

    def abort(self):
        self.is_aborted = True


def test_the_first_error_ends_the_other_shards_and_is_the_one_that_is_raised():
    store = FailingStore()

    with images(3) as shards, pytest.raises(CheckpointError, match="no space"):
        alone(store, shards, throttle=lambda _nbytes: None)

    assert store.is_aborted
    assert store.ended == [1]  # shard 2 was never begun
