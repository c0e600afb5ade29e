"""The gate of a holder: what is pushed never costs the newest committed copy."""

import dataclasses
import os

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from support.draws import draws
from support.transfers import CHUNK, SHARD, Memory, copy_of, filled, push_of

from gpuops.checkpoint.digest import chunk_hash
from gpuops.checkpoint.memory.shared_buffer import SharedBuffer
from gpuops.checkpoint.peers.store import ReplicaStore
from gpuops.checkpoint.transfer.wire import TransferRefusal, TransferRefusedError
from gpuops.checkpoint.types import CheckpointError, Shard, StateId

NBYTES = 3 * CHUNK
OTHER = Shard(2, 4)


class Store(ReplicaStore):
    """A store that remembers what memory it was given."""

    def __init__(self, **more):
        self.made = []
        more = {"bytes_max": 100 * NBYTES, **more}
        super().__init__("holder", self._make, chunk_bytes=CHUNK, **more)
        self.keep_only([SHARD])

    def _make(self, _name, nbytes):
        self.made.append(Memory(nbytes))
        return self.made[-1]


@pytest.fixture
def store():
    held = Store()
    yield held
    held.close()


def image(step, epoch=3, nbytes=NBYTES, shard=SHARD, seed=None):
    """Return the bytes and the noun of a state."""
    memory = filled(nbytes, seed=step if seed is None else seed)
    data = bytes(memory.view)
    copy = copy_of(memory, state=StateId(epoch, step), shard=shard)
    memory.close()
    return data, copy


def test_a_copy_that_was_fetched_is_held_until_it_is_left_out(store):
    data, copy = image(7, shard=OTHER)
    memory = Memory(NBYTES)
    memory.view[:] = data

    assert store.adopt(copy, memory, NBYTES)
    assert not store.adopt(copy, memory, NBYTES)  # it is there
    assert store.copies() == [copy]
    assert store.held_bytes == NBYTES
    pinned = store.open(copy.state, OTHER)
    assert bytes(pinned.view) == data
    store.keep_only([SHARD, OTHER])
    assert store.copies() == [copy]
    store.keep_only([SHARD])
    assert store.copies() == []
    assert store.held_bytes == NBYTES  # somebody reads it
    pinned.release()
    assert store.held_bytes == 0


def begin(store, copy, committed=None):
    return store.accept(push_of(copy, committed), copy.digest)


def receive(inbox, data, chunks=None):
    """Put *chunks* of *data* into *inbox*, as one connection does, and leave the rest."""
    intake, claims = inbox.tracker, []
    while (claim := intake.claim()) is not None:
        claims.append(claim)
    for claim in claims:
        for number in range(claim.first, claim.first + claim.count):
            if chunks is None or number in chunks:
                with intake.chunk(number) as view:
                    view[:] = data[number * CHUNK : number * CHUNK + len(view)]
                    intake.record(number, chunk_hash(view))
        intake.release(claim)


def put(store, step, committed=None, **more):
    """Push a whole state; return its noun."""
    data, copy = image(step, **more)
    inbox = begin(store, copy, committed)
    receive(inbox, data)
    inbox.complete()
    inbox.detach()
    return copy


def steps(store):
    return [copy.state.step for copy in store.copies()]


def refusal(store, step, committed=None, **more):
    _data, copy = image(step, **more)
    with pytest.raises(TransferRefusedError) as caught:
        begin(store, copy, committed)
    return caught.value


def test_the_newest_committed_copy_is_never_overwritten(store):
    put(store, 1)
    store.commit(StateId(3, 1))
    for step in (2, 3, 4):
        put(store, step)
        assert steps(store) == [step, 1]
    store.commit(StateId(3, 4))
    put(store, 5)
    assert steps(store) == [5, 4]
    assert store.held_bytes == 2 * NBYTES


def test_a_push_tells_what_its_owner_knows_to_be_committed(store):
    put(store, 1)
    put(store, 2, committed=StateId(3, 1))
    put(store, 3, committed=StateId(3, 2))
    assert steps(store) == [3, 2]


def test_where_no_commit_is_known_the_newest_copy_stays(store):
    put(store, 1)
    put(store, 2)
    put(store, 3)
    assert steps(store) == [3, 2]


def test_a_copy_counts_only_when_it_is_complete(store):
    data, copy = image(1)
    inbox = begin(store, copy)
    receive(inbox, data, chunks={0, 2})
    assert store.copies() == []
    assert store.open(copy.state, copy.shard) is None
    with pytest.raises(CheckpointError, match="root"):
        inbox.complete()
    inbox.detach()
    again = begin(store, copy)
    assert again is inbox
    assert again.tracker.n_missing == 1
    receive(again, data)
    again.complete()
    again.complete()
    again.detach()
    (held,) = store.copies()
    assert held == dataclasses.replace(copy, holder="holder")
    assert begin(store, copy) is None


def test_the_slot_of_a_push_that_has_begun_is_no_copy_any_more(store):
    put(store, 1)
    put(store, 2, committed=StateId(3, 1))
    _data, copy = image(3)
    begin(store, copy, StateId(3, 2)).detach()
    assert steps(store) == [2]


def test_an_older_state_is_refused(store):
    put(store, 5)
    assert refusal(store, 4).code is TransferRefusal.NOT_WANTED
    assert "superseded by step 5" in str(refusal(store, 4))
    store.commit(StateId(3, 9))
    assert "superseded by step 9" in str(refusal(store, 8))


def test_the_committed_state_is_taken_after_a_newer_one_that_was_given_up(store):
    put(store, 12)
    store.commit(StateId(3, 10))
    put(store, 10)
    assert steps(store) == [12, 10]
    put(store, 11, epoch=4)
    assert steps(store) == [11, 10]


def test_another_content_for_the_same_state_is_refused(store):
    put(store, 1)
    assert refusal(store, 1, seed=99).code is TransferRefusal.DIFFERENT
    _data, copy = image(2)
    inbox = begin(store, copy)
    assert refusal(store, 2, seed=99).code is TransferRefusal.DIFFERENT
    inbox.detach()
    # What nobody sends any more does not block it.
    put(store, 2, seed=99)
    assert steps(store) == [2, 1]


def test_shards_of_others_are_refused(store):
    assert refusal(store, 1, shard=OTHER).code is TransferRefusal.NOT_WANTED


def test_no_slot_is_reused_while_it_is_read(store):
    put(store, 1)
    first = store.open(StateId(3, 1), SHARD)
    put(store, 2, committed=StateId(3, 1))
    busy = refusal(store, 3, committed=StateId(3, 2))
    assert busy.code is TransferRefusal.BUSY
    data, _copy = image(1)
    assert os.pread(first.fd, NBYTES, 0) == data
    first.release()
    first.release()
    put(store, 3)
    assert steps(store) == [3, 2]


def test_a_newer_push_ends_an_older_one_that_is_still_coming(store):
    put(store, 1)
    store.commit(StateId(3, 1))
    _data, two = image(2)
    inbox = begin(store, two)
    assert inbox.is_wanted()
    assert refusal(store, 3).code is TransferRefusal.BUSY
    assert not inbox.is_wanted()
    with pytest.raises(TransferRefusedError, match="superseded"):
        inbox.complete()
    inbox.detach()
    put(store, 3)
    assert steps(store) == [3, 1]


def test_a_new_epoch_drops_what_was_on_its_way(store):
    data, copy = image(1)
    waiting = begin(store, copy)
    receive(waiting, data, chunks={0})
    waiting.detach()
    _data, other = image(2)
    active = begin(store, other)
    store.begin_epoch(4)
    assert not active.is_wanted()
    active.detach()
    assert begin(store, copy).tracker.n_missing == 3


def test_a_push_again_waits_for_the_end_of_the_last_one(store):
    data, copy = image(1)
    old = begin(store, copy)
    store.begin_epoch(4)
    assert refusal(store, 1).code is TransferRefusal.BUSY
    old.detach()
    new = begin(store, copy)
    receive(new, data)
    new.complete()
    new.detach()
    assert steps(store) == [1]


def test_a_shard_that_is_held_no_more_gives_its_memory_back_when_unused(store):
    put(store, 1)
    pinned = store.open(StateId(3, 1), SHARD)
    store.keep_only([OTHER])
    assert store.copies() == []
    assert not store.made[0].is_closed
    pinned.release()
    assert store.made[0].is_closed
    assert store.held_bytes == 0


def test_memory_that_is_being_written_is_not_closed(store):
    _data, copy = image(1)
    inbox = begin(store, copy)
    store.keep_only([])
    assert not inbox.is_wanted()
    assert not store.made[0].is_closed
    inbox.detach()
    assert store.made[0].is_closed


def test_chunks_that_did_not_change_are_not_asked_for_again(store):
    data, one = image(1)
    put(store, 1)
    put(store, 2, committed=StateId(3, 1))
    # The slot of step 1 is next; two of its three chunks are frozen.
    memory = Memory(NBYTES)
    memory.view[:] = data
    memory.view[CHUNK] ^= 1
    three = copy_of(memory, state=StateId(3, 3))
    inbox = begin(store, three, StateId(3, 2))
    assert (inbox.tracker.n_missing, inbox.tracker.found_bytes) == (1, 2 * CHUNK)
    receive(inbox, bytes(memory.view))
    inbox.complete()
    inbox.detach()
    pinned = store.open(three.state, SHARD)
    assert os.pread(pinned.fd, NBYTES, 0) == bytes(memory.view)
    assert one.digest != three.digest
    pinned.release()
    memory.close()


def test_chunks_that_changed_in_memory_are_asked_for_again(store):
    data, one = image(1)
    put(store, 1)
    put(store, 2, committed=StateId(3, 1))
    store.made[0].view[0] ^= 1
    inbox = begin(store, dataclasses.replace(one, state=StateId(3, 3)), StateId(3, 2))
    assert inbox.tracker.n_missing == 1
    receive(inbox, data)
    inbox.complete()
    inbox.detach()


def test_another_size_gets_another_memory(store):
    put(store, 1)
    put(store, 2, committed=StateId(3, 1))
    put(store, 3, committed=StateId(3, 2), nbytes=5 * CHUNK)
    assert steps(store) == [3, 2]
    assert store.made[0].is_closed
    assert store.held_bytes == 8 * CHUNK


def test_no_more_memory_than_allowed():
    store = Store(bytes_max=2 * NBYTES)
    store.keep_only([SHARD, OTHER])
    put(store, 1)
    put(store, 2, committed=StateId(3, 1))
    error = refusal(store, 3, shard=OTHER)
    assert error.code is TransferRefusal.NO_ROOM
    assert "its limit is 24.6 kB" in str(error)
    put(store, 3, committed=StateId(3, 2))
    store.close()


def test_memory_that_cannot_be_had_is_no_room():
    def allocate(_name, _nbytes):
        raise CheckpointError("none left")

    store = ReplicaStore("holder", allocate, bytes_max=2**40, chunk_bytes=CHUNK)
    store.keep_only([SHARD])
    error = refusal(store, 1)
    assert error.code is TransferRefusal.NO_ROOM
    assert "none left" in str(error)


def test_a_copy_found_damaged_is_none_any_more(store):
    copy = put(store, 1)
    pinned = store.open(copy.state, SHARD)
    pinned.on_damage(2)
    pinned.on_damage(2)
    pinned.release()
    assert store.copies() == []
    assert [(held.state, number) for held, number in store.take_damaged()] == [(copy.state, 2)]
    assert store.take_damaged() == []
    put(store, 1)
    assert steps(store) == [1]


def test_it_works_with_the_memory_of_the_arena():
    store = ReplicaStore("holder", SharedBuffer.create, bytes_max=2**20, chunk_bytes=CHUNK)
    store.keep_only([SHARD])
    put(store, 1)
    put(store, 2)
    store.keep_only([])
    assert store.held_bytes == 0
    store.close()


IMAGES = {step: image(step) for step in range(1, 7)}
STEPS = st.integers(1, 6)


class Holder(RuleBasedStateMachine):
    """No sequence of pushes costs the newest committed copy, or one that is read."""

    def __init__(self):
        super().__init__()
        self.store = Store()
        self.committed = None
        self.pins, self.coming = [], []

    @rule(step=STEPS, is_whole=st.booleans())
    def push(self, step, is_whole):
        data, copy = IMAGES[step]
        kept = self.newest_committed()
        try:
            inbox = begin(self.store, copy)
        except TransferRefusedError:
            inbox = None
        if inbox is not None and is_whole:
            receive(inbox, data)
            if inbox.tracker.is_complete:
                inbox.complete()
            inbox.detach()
        elif inbox is not None:
            self.coming.append(inbox)
        held = [copy.state for copy in self.store.copies()]
        assert kept is None or kept in held

    def newest_committed(self):
        states = [copy.state for copy in self.store.copies()]
        settled = [state for state in states if self.committed and state <= self.committed]
        return max(settled or states, default=None)

    @rule(step=STEPS)
    def commit(self, step):
        state = StateId(3, step)
        self.committed = max(self.committed or state, state)
        self.store.commit(state)

    @rule(step=STEPS)
    def pin(self, step):
        pinned = self.store.open(StateId(3, step), SHARD)
        if pinned is not None:
            self.pins.append((pinned, IMAGES[step][0]))

    @rule()
    def unpin(self):
        if self.pins:
            self.pins.pop()[0].release()

    @rule()
    def lose_connections(self):
        while self.coming:
            self.coming.pop().detach()

    @rule(epoch=st.integers(3, 4))
    def begin_epoch(self, epoch):
        self.store.begin_epoch(epoch)

    @invariant()
    def is_sound(self):
        assert len(self.store.made) <= 2
        for pinned, data in self.pins:
            assert os.pread(pinned.fd, NBYTES, 0) == data
        for copy in self.store.copies():
            pinned = self.store.open(copy.state, SHARD)
            assert os.pread(pinned.fd, NBYTES, 0) == IMAGES[copy.state.step][0]
            pinned.release()

    def teardown(self):
        self.store.close()


TestHolder = Holder.TestCase
TestHolder.settings = settings(max_examples=draws(100), stateful_step_count=30)
