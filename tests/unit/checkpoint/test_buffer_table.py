"""The table of one node: who may write where, and what a crash at any moment leaves."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)
from support.draws import draws

from gpuops.checkpoint.memory.buffer_table import (
    ALREADY_SAVED,
    BufferTable,
    BufferTableError,
    SkipReason,
    SlotLease,
    SlotRefusal,
)
from gpuops.checkpoint.types import StateId


def gate_of(n_ranks=2, n_slots=2, **kwargs):
    table = BufferTable(**kwargs)
    table.begin_epoch(n_ranks)
    table.resume(None, 1)
    for local_rank in range(n_ranks):
        table.register(local_rank, local_rank + 1, range(n_slots))
    return table


def save(table, step, n_ranks=2, now_s=0.0):
    """Save *step* by all ranks; return whether it was committed."""
    for local_rank in range(n_ranks):
        answer = table.acquire(local_rank, step, now_s)
        if isinstance(answer, SlotRefusal):
            return False
        key = table.mark_written(local_rank, answer.state)
        table.mark_verified(key, answer.state)
    return table.last_committed == StateId(table.epoch, step)


def reason(answer):
    assert isinstance(answer, SlotRefusal)
    return answer.reason


def test_a_state_is_committed_once_all_ranks_are_verified():
    table = gate_of()
    slots = [table.acquire(r, 5, 0.0).slot for r in (0, 1)]
    state = StateId(1, 5)

    assert table.mark_written(0, state) == slots[0]
    assert table.mark_written(1, state) == slots[1]
    assert not table.mark_verified(slots[0], state)
    assert table.last_committed is None
    assert table.mark_verified(slots[1], state)
    assert table.last_committed == state


def test_the_newest_is_never_granted_and_two_slots_take_turns():
    table = gate_of(n_ranks=1)
    used = []
    for step in range(1, 7):
        answer = table.acquire(0, step, 0.0)
        used.append(answer.slot.index)
        assert answer.slot not in table.complete_states().get(table.last_committed, {}).values()
        table.mark_verified(table.mark_written(0, answer.state), answer.state)

    assert used == [0, 1, 0, 1, 0, 1]


def test_the_first_rank_decides_for_all_also_for_a_skip():
    table = gate_of()
    table.acquire(0, 1, 0.0)

    assert reason(table.acquire(0, 2, 0.0)) is SkipReason.IN_FLIGHT
    assert isinstance(table.acquire(1, 1, 0.0), SlotLease)
    for local_rank in (0, 1):
        state = StateId(1, 1)
        table.mark_verified(table.mark_written(local_rank, state), state)
    # Nothing is in flight now, but rank 0 was told to skip step 2.
    assert reason(table.acquire(1, 2, 0.0)) is SkipReason.IN_FLIGHT
    assert table.skipped == {SkipReason.IN_FLIGHT: 1}


def test_a_rank_that_passed_a_step_gives_it_up_and_its_writer_keeps_the_slot():
    table = gate_of()
    save(table, 1)
    first = table.acquire(0, 2, 0.0)

    # Rank 1 never asks for step 2; rank 0 still writes into its only free slot.
    assert reason(table.acquire(1, 3, 0.0)) is SkipReason.NO_FREE_SLOT
    assert table.in_flight is None
    assert table.n_given_up == 1
    assert table.mark_written(0, first.state) is None
    assert isinstance(table.acquire(0, 4, 0.0), SlotLease)


def test_a_pinned_slot_is_not_granted():
    table = gate_of(n_ranks=1)
    save(table, 1, 1)
    table.pin(StateId(1, 1), "persist")
    save(table, 2, 1)

    assert reason(table.acquire(0, 3, 0.0)) is SkipReason.NO_FREE_SLOT
    table.unpin("persist")
    assert isinstance(table.acquire(0, 4, 0.0), SlotLease)


def test_what_is_not_complete_cannot_be_pinned():
    table = gate_of(n_ranks=1)
    table.acquire(0, 1, 0.0)

    with pytest.raises(BufferTableError, match="does not hold"):
        table.pin(StateId(1, 1), "persist")


def test_nothing_is_due_before_its_time_and_all_ranks_hear_it():
    table = gate_of(every_s=5.0)
    assert save(table, 1, now_s=100.0)

    assert reason(table.acquire(0, 2, 104.9)) is SkipReason.NOT_DUE
    assert reason(table.acquire(1, 2, 105.1)) is SkipReason.NOT_DUE
    assert isinstance(table.acquire(1, 3, 105.1), SlotLease)
    assert isinstance(table.acquire(0, 3, 105.2), SlotLease)


def test_a_clock_that_jumps_keeps_several_nodes_from_no_save():
    table = gate_of(every_s=5.0)
    table.is_single_node = False
    for step, now_s in enumerate((100.0, 3700.0, 99.0, 1.0, 1e9, 50.0), 1):
        save(table, step, now_s=now_s)
        assert table.commit(StateId(1, step)), now_s
        assert reason(table.acquire(0, step, now_s)) is SkipReason.PASSED
    assert reason(table.acquire(0, 7, 51.0)) is SkipReason.NOT_DUE
    assert (
        reason(table.acquire(1, 7, 3700.0)) is SkipReason.NOT_DUE
    )  # the first that asked has decided
    assert isinstance(table.acquire(1, 8, 3700.0), SlotLease)


def test_the_last_step_is_due_at_any_time_and_may_be_asked_for_until_there_is_room():
    table = gate_of(every_s=5.0)
    assert save(table, 1, now_s=100.0)
    table.pin(StateId(1, 1), "persist")
    assert save(table, 7, now_s=105.0)

    assert reason(table.acquire(0, 8, 105.1)) is SkipReason.NOT_DUE
    assert list(table.rejected) == [StateId(1, 8)]
    assert reason(table.acquire(1, 8, 105.1, is_last=True)) is SkipReason.NO_FREE_SLOT
    table.unpin("persist")
    first, second = (table.acquire(r, 8, 105.2, is_last=True) for r in (1, 0))
    assert first.state == second.state == StateId(1, 8)
    # Whoever asks as usual and comes late is to copy as well, and no other node hears of a refusal.
    assert isinstance(table.acquire(0, 8, 105.3), SlotLease)
    assert not table.rejected
    assert sum(table.skipped.values()) == 1


def test_the_last_step_is_saved_once_and_again_where_it_was_given_up():
    table = gate_of()
    table.is_single_node = False  # other nodes commit
    first, second = (table.acquire(r, 5, 0.0) for r in (0, 1))
    table.mark_verified(table.mark_written(0, first.state), first.state)
    table.abandon(1, second.state)
    assert first.state not in table.complete_states()

    answers = [table.acquire(r, 5, 0.0, is_last=True) for r in (0, 1)]
    assert {answer.state for answer in answers} == {first.state} == {table.final}
    for local_rank in (0, 1):
        table.mark_verified(table.mark_written(local_rank, first.state), first.state)
        assert reason(table.acquire(local_rank, 5, 0.0, is_last=True)) is SkipReason.NOT_DUE
    table.give_up(first.state)
    assert isinstance(table.acquire(0, 5, 0.0, is_last=True), SlotLease)


def test_the_last_step_is_not_begun_anew_while_a_rank_still_writes_what_was_given_up():
    table = gate_of()
    first, second = (table.acquire(r, 5, 0.0) for r in (0, 1))
    table.abandon(0, first.state)

    assert reason(table.acquire(0, 5, 0.0, is_last=True)) is SkipReason.PASSED
    assert table.mark_written(1, second.state) is None
    assert isinstance(table.acquire(0, 5, 0.0, is_last=True), SlotLease)


def test_an_older_step_than_the_last_decided_is_no_last_one():
    table = gate_of(every_s=5.0)
    assert save(table, 1, now_s=100.0)
    table.acquire(0, 2, 100.1)
    table.acquire(0, 3, 100.2)

    assert table.acquire(1, 1, 100.3, is_last=True) is ALREADY_SAVED
    assert table.acquire(1, 2, 100.3, is_last=True) is not ALREADY_SAVED


def test_nothing_is_granted_before_it_is_known_where_to_continue_and_all_have_slots():
    table = BufferTable()
    table.begin_epoch(2)
    table.register(0, 1, range(2))

    assert reason(table.acquire(0, 1, 0.0)) is SkipReason.NOT_RESTORED
    table.resume(None, 1)
    assert reason(table.acquire(0, 2, 0.0)) is SkipReason.NOT_RESERVED
    table.register(1, 2, range(2))
    assert isinstance(table.acquire(0, 3, 0.0), SlotLease)


def test_a_rank_that_is_lost_while_it_writes_takes_its_state_with_it():
    table = gate_of()
    save(table, 1)
    first, second = (table.acquire(r, 2, 0.0) for r in (0, 1))
    table.mark_verified(table.mark_written(1, second.state), second.state)
    table.remove_rank(0)

    assert table.in_flight is None
    assert table.last_committed == StateId(1, 1)
    assert first.slot not in table.complete_states()[table.last_committed].values()
    assert reason(table.acquire(1, 3, 0.0)) is SkipReason.NOT_RESERVED


def test_what_all_ranks_had_written_may_still_be_committed_after_they_are_gone():
    table = gate_of()
    state = StateId(1, 1)
    slots = [table.acquire(r, 1, 0.0).slot for r in (0, 1)]
    for local_rank in (0, 1):
        table.mark_written(local_rank, state)
        table.remove_rank(local_rank)
    table.begin_epoch(2)

    assert table.is_verifying
    table.mark_verified(slots[0], state)
    table.mark_verified(slots[1], state)
    assert not table.is_verifying
    assert table.last_committed == state


def test_what_one_rank_had_not_written_is_discarded_by_new_workers():
    table = gate_of()
    slots = [table.acquire(r, 1, 0.0).slot for r in (0, 1)]
    table.mark_written(0, StateId(1, 1))
    table.begin_epoch(2)

    assert not table.is_verifying
    assert not table.mark_verified(slots[0], StateId(1, 1))
    assert table.last_committed is None


def test_a_late_digest_of_a_slot_that_has_another_state_by_now_counts_for_nothing():
    table = gate_of(n_ranks=1)
    old = table.acquire(0, 1, 0.0)
    table.mark_written(0, old.state)
    table.begin_epoch(1)
    table.resume(None, 2)
    table.register(0, 1, range(2))
    new = table.acquire(0, 1, 0.0)

    assert new.slot == old.slot
    assert not table.mark_verified(old.slot, old.state)
    assert table.last_committed is None


def test_what_is_newer_than_the_state_that_was_chosen_is_dropped():
    table = gate_of(n_ranks=1)
    save(table, 1, 1)
    save(table, 2, 1)
    table.begin_epoch(1)
    table.resume(StateId(1, 1), 2)
    table.register(0, 1, range(2))

    assert table.last_committed == StateId(1, 1)
    assert table.acquire(0, 2, 0.0).slot not in table.complete_states()[StateId(1, 1)].values()


def test_several_nodes_commit_together():
    table = BufferTable()
    table.begin_epoch(1, is_alone=False)
    table.resume(None, 1)
    table.register(0, 1, range(2))
    save(table, 1, 1)
    state = StateId(1, 1)

    assert table.last_committed is None
    assert list(table.complete_states()) == [state]
    assert reason(table.acquire(0, 2, 0.0)) is SkipReason.IN_FLIGHT
    assert table.commit(state)
    assert not table.commit(state)
    assert isinstance(table.acquire(0, 3, 0.0), SlotLease)
    table.give_up(StateId(1, 3))
    assert table.last_committed == state


def test_another_layout_keeps_the_old_memory_until_it_has_a_commit_of_its_own():
    table = gate_of(n_ranks=1)
    save(table, 1, 1)
    save(table, 2, 1)
    table.register(0, 9, range(2))

    freed = table.release()
    assert {key.pool for key in freed} == {1}
    assert len(freed) == 1
    assert table.last_committed == StateId(1, 2)
    assert save(table, 3, 1)
    assert {key.pool for key in table.release()} == {1}
    assert table.release() == ()
    assert table.last_committed == StateId(1, 3)


def test_another_layout_while_the_rank_was_copying_gives_the_state_up():
    table = gate_of(n_ranks=1)
    table.acquire(0, 1, 0.0)
    table.register(0, 9, range(2))

    assert table.in_flight is None


@pytest.mark.parametrize("local_rank", [-1, 2])
def test_a_rank_that_is_none_of_this_node_is_refused(local_rank):
    table = gate_of()

    with pytest.raises(BufferTableError, match="no local rank"):
        table.acquire(local_rank, 1, 0.0)
    with pytest.raises(BufferTableError, match="no local rank"):
        table.register(local_rank, 7, range(2))


def test_a_seal_without_a_grant_is_refused():
    with pytest.raises(BufferTableError, match="is not writing"):
        gate_of().mark_written(0, StateId(1, 1))


def test_the_digest_of_what_was_in_a_slot_before_says_nothing_of_what_is_written_now():
    table = gate_of(n_ranks=1)
    old = table.acquire(0, 1, 0.0)
    table.mark_written(0, old.state)
    table.begin_epoch(1)
    table.resume(None, 2)
    table.register(0, 1, range(2))
    new = table.acquire(0, 1, 0.0)
    table.mark_written(0, new.state)

    assert new.slot == old.slot
    assert not table.mark_verified(old.slot, old.state)
    assert table.last_committed is None
    assert table.mark_verified(new.slot, new.state)


def test_slots_that_killed_workers_were_writing_are_free_for_the_next_ones():
    table = gate_of()
    save(table, 1)
    for local_rank in (0, 1):
        table.acquire(local_rank, 2, 0.0)
    table.begin_epoch(2)
    table.resume(StateId(1, 1), 2)
    for local_rank in (0, 1):
        table.register(local_rank, local_rank + 1, range(2))

    assert all(save(table, step) for step in (2, 3, 4))


def test_of_three_slots_the_oldest_state_gives_way():
    table = gate_of(n_ranks=1, n_slots=3)
    for step in (1, 2, 3):
        save(table, step, 1)
    table.acquire(0, 4, 0.0)

    assert sorted(table.complete_states()) == [StateId(1, 2), StateId(1, 3)]


def test_a_slot_that_is_read_stays_as_it_is_also_when_its_state_was_skipped():
    table = gate_of(n_ranks=1)
    save(table, 1, 1)
    save(table, 2, 1)
    read = set(table.pin(StateId(1, 2), "persist").values())
    table.begin_epoch(1)
    table.resume(StateId(1, 1), 2)
    table.register(0, 1, range(2))

    assert reason(table.acquire(0, 2, 0.0)) is SkipReason.NO_FREE_SLOT
    table.unpin("persist")
    assert table.acquire(0, 3, 0.0).slot in read


class Node(RuleBasedStateMachine):
    """A node whose ranks run, stall, fail, die and change, beside a model of what is in memory."""

    @initialize(n_ranks=st.integers(1, 3), n_slots=st.integers(2, 3), alone=st.booleans())
    def start(self, n_ranks, n_slots, alone):
        self.table = BufferTable()
        self.n_ranks, self.n_slots, self.alone = n_ranks, n_slots, alone
        self.bytes = {}  # slot -> the state whose bytes it has, None where it is torn
        self.steps = {}
        self.writing = {}  # rank -> {state: slot}
        self.stamped = set()
        self.hashing = []
        self.answers = {}
        self.pins = {}
        self.epoch = 0
        self.layouts = {}
        self._new_workers(n_ranks, None)

    def _new_workers(self, n_ranks, state):
        self.n_ranks = n_ranks
        self.epoch += 1
        self.table.begin_epoch(n_ranks, is_alone=self.alone)
        for key, old in self.hashing:
            self.table.mark_verified(key, old)
        self.hashing = []
        self.table.resume(self.table.last_committed if state is None else state, self.epoch)
        self.steps = dict.fromkeys(range(n_ranks), 0)
        self.writing = {rank: {} for rank in range(n_ranks)}
        self.answers = {}
        self.arenas = {}
        for rank in range(n_ranks):
            self._reserve(rank)

    def _reserve(self, rank):
        """Take the memory of the layout that the rank has now; the same for the same layout."""
        layout = self.layouts.get(rank, 0)
        arena = 100 * self.n_ranks + 10 * rank + layout
        self.arenas[rank] = arena
        self.table.register(rank, arena, range(self.n_slots))

    @rule(rank=st.integers(0, 2), ahead=st.integers(0, 3))
    def ask(self, rank, ahead):
        if rank >= self.n_ranks:
            return
        self.steps[rank] += ahead
        self._ask(rank, self.steps[rank])

    @rule(rank=st.integers(0, 2))
    def ask_last(self, rank):
        if rank >= self.n_ranks:
            return
        self._ask(rank, self.steps[rank], is_last=True)

    def _ask(self, rank, step, *, is_last=False):
        for state in self.stamped & set(self.writing[rank]):
            self._seal(rank, state)  # a rank that lives reports it before anything else
        answer = self.table.acquire(rank, step, 0.0, is_last=is_last)
        if is_last:  # Whoever was refused may ask again.
            told = self.answers.get(step, {})
            self.answers[step] = {r: its for r, its in told.items() if isinstance(its, SlotLease)}
        if isinstance(answer, SlotLease):
            assert (
                answer.slot
                not in self.table.complete_states().get(self.table.last_committed, {}).values()
            )
            assert all(answer.slot not in slots for slots in self.pins.values())
            for other, slots in self.writing.items():
                for state, slot in slots.items():
                    assert slot != answer.slot or (other, state) == (rank, answer.state)
            self.bytes[answer.slot] = None
            self.writing[rank][answer.state] = answer.slot
            # No rank of the node was told to skip what another is granted, while it is wanted.
            told = self.answers.setdefault(step, {})
            assert all(isinstance(its, SlotLease) for its in told.values())
        elif answer.reason is SkipReason.PASSED:
            return  # It had its answer.
        elif is_last and answer.reason is SkipReason.NOT_DUE:
            found = {self.table.last_committed, self.table.in_flight, *self.table.complete_states()}
            assert StateId(self.table.epoch, step) in found
            assert StateId(self.table.epoch, step) not in self.writing[rank]
            return
        else:
            told = self.answers.setdefault(step, {})
            assert all(isinstance(its, SlotRefusal) for its in told.values())
        self.answers.setdefault(step, {})[rank] = answer

    @precondition(lambda self: any(self.writing.values()))
    @rule(data=st.data())
    def mark_written(self, data):
        rank = data.draw(st.sampled_from([r for r, slots in self.writing.items() if slots]))
        state = data.draw(st.sampled_from(sorted(self.writing[rank])))
        self._seal(rank, state)

    def _seal(self, rank, state):
        slot = self.writing[rank].pop(state)
        self.bytes[slot] = state
        key = self.table.mark_written(rank, state)
        if key is not None:
            assert key == slot
            self.hashing.append((key, state))

    @rule(rank=st.integers(0, 2))
    def stamp(self, rank):
        """Have a rank complete its copy and not report it yet, or ever."""
        state = self.table.in_flight
        slot = self.writing.get(rank, {}).get(state)
        if slot is not None:
            self.bytes[slot] = state
            self.stamped.add(state)
            for key in self.table.find(state).mark_stamped(lambda key: key == slot):
                self.hashing.append((key, state))

    @precondition(lambda self: any(self.writing.values()))
    @rule(data=st.data())
    def abandon(self, data):
        rank = data.draw(st.sampled_from([r for r, slots in self.writing.items() if slots]))
        state = data.draw(st.sampled_from(sorted(self.writing[rank])))
        self.writing[rank].pop(state)
        self.table.abandon(rank, state)

    @precondition(lambda self: self.hashing)
    @rule(data=st.data())
    def hash(self, data):
        key, state = self.hashing.pop(data.draw(st.integers(0, len(self.hashing) - 1)))
        self.table.mark_verified(key, state)

    @precondition(lambda self: not self.alone)
    @rule()
    def others_commit(self):
        for state in self.table.complete_states():
            self.table.commit(state)

    @precondition(lambda self: not self.alone)
    @rule()
    def others_fail(self):
        if self.table.in_flight is not None:
            self.table.give_up(self.table.in_flight)

    @rule(data=st.data(), who=st.sampled_from(["persist", "serve"]))
    def pin(self, data, who):
        if self.table.complete_states():
            state = data.draw(st.sampled_from(sorted(self.table.complete_states())))
            self.table.unpin(who)
            self.pins[who] = set(self.table.pin(state, who).values())

    @rule(who=st.sampled_from(["persist", "serve"]))
    def unpin(self, who):
        self.table.unpin(who)
        self.pins.pop(who, None)

    @rule(rank=st.integers(0, 2))
    def other_layout(self, rank):
        if rank < self.n_ranks:
            self.layouts[rank] = (self.layouts.get(rank, 0) + 1) % 3
            self._reserve(rank)

    @rule()
    def save_by_all(self):
        step = max(self.steps.values()) + 1
        for rank in range(self.n_ranks):
            self.steps[rank] = step
            self._ask(rank, step)
        for rank in range(self.n_ranks):
            for state in [s for s in self.writing[rank] if s.step == step]:
                self._seal(rank, state)
        for key, state in self.hashing:
            self.table.mark_verified(key, state)
        self.hashing = []

    @rule()
    def release(self):
        for key in self.table.release():
            assert all(key not in slots.values() for slots in self.writing.values())
            assert all(key not in slots for slots in self.pins.values())
            self.bytes.pop(key, None)

    @rule(rank=st.integers(0, 2))
    def die(self, rank):
        if rank < self.n_ranks:
            self.table.remove_rank(rank)
            self.writing[rank] = {}
            self._reserve(rank)

    @rule(n_ranks=st.integers(1, 3))
    def kill_all(self, n_ranks):
        newest = self.table.last_committed
        self._new_workers(n_ranks, None)
        assert newest is None or self.table.last_committed >= newest

    @rule(data=st.data())
    def go_back(self, data):
        if self.table.complete_states():
            state = data.draw(st.sampled_from(sorted(self.table.complete_states())))
            self._new_workers(self.n_ranks, state)

    @invariant()
    def the_newest_is_whole(self):
        table = self.table
        if table.last_committed is not None:
            slots = table.complete_states()[table.last_committed]
            assert slots
            assert all(self.bytes[slot] == table.last_committed for slot in slots.values())
        for state, slots in table.complete_states().items():
            assert all(self.bytes[slot] == state for slot in slots.values())

    @invariant()
    def every_decision_is_counted(self):
        table = self.table
        assert table.n_granted >= table.n_committed + table.n_given_up - 1


TestNode = Node.TestCase
TestNode.settings = settings(max_examples=draws(150), stateful_step_count=60)


def test_who_seals_a_state_that_was_given_up_leaves_the_next_one_unsealed():
    table = gate_of(n_ranks=1, n_slots=3)
    late = table.acquire(0, 1, 0.0)
    table.give_up(late.state)
    current = table.acquire(0, 2, 0.0)

    assert table.mark_written(0, late.state) is None
    # The slot of step 2 is not sealed yet: what is in it cannot be verified, nor committed.
    assert not table.mark_verified(current.slot, current.state)
    assert table.last_committed is None
    assert table.mark_written(0, current.state) == current.slot
