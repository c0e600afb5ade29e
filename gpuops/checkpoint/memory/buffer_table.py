"""Which slot holds what, and who may write where, on one node.

With two slots and no coordination, one rank may overwrite a state with the next but one while
another rank's last is still being copied; after a crash no state is complete on all ranks. So: one
state is in flight at a time, the first rank that asks for a step decides for all ranks of the node,
and the slots of the newest committed state are never granted.

This module reads no clock and touches no memory: the caller reports what happened.
"""

from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from gpuops.checkpoint.memory.state_record import SlotKey, SlotPhase, StateRecord
from gpuops.checkpoint.types import CheckpointError, StateId

_DECISIONS_KEPT = 256
_REJECTED_KEPT = 8


class SkipReason(StrEnum):
    """Why no slot was granted."""

    NOT_DUE = "not_due"
    NOT_RESTORED = "not_restored"
    NOT_RESERVED = "not_reserved"
    IN_FLIGHT = "in_flight"
    NO_FREE_SLOT = "no_free_slot"
    PASSED = "passed"


@dataclass(frozen=True, slots=True)
class SlotLease:
    """The rank is to write *state* into *slot*. ``number``: no other state's leases have it."""

    slot: SlotKey
    state: StateId
    number: int


@dataclass(frozen=True, slots=True)
class SlotRefusal:
    """The rank is not to write, *why* is for people; *awaits_nodes*: to commit the last state."""

    reason: SkipReason
    why: str
    awaits_nodes: bool = False


class BufferTableError(CheckpointError):
    """An impossible call, such as `mark_written` without a lease."""


@dataclass(slots=True)
class BufferTable:
    """The slots of one node.

    ``last_committed`` is the newest committed state that memory holds. Where ``is_single_node`` is
    false, states are committed by `commit` only; ``not_before`` is the first step that all nodes
    can save next, until `resume`. ``rejected``: the newest states that were skipped or given up,
    the newest last. ``final``: the state of this epoch that a rank saved as the last one.
    """

    last_committed: StateId | None = None
    epoch: int | None = None
    every_s: float = 0.0
    not_before: int = 0
    is_single_node: bool = True
    skipped: Counter[SkipReason] = field(default_factory=Counter)
    n_granted: int = 0
    n_committed: int = 0
    n_given_up: int = 0
    rejected: deque[StateId] = field(default_factory=lambda: deque(maxlen=_REJECTED_KEPT))
    final: StateId | None = None
    _n_ranks: int = 0
    _pools: dict[int, set[SlotKey]] = field(default_factory=dict)
    _pool_of_rank: dict[int, int] = field(default_factory=dict)
    _complete: dict[StateId, StateRecord] = field(default_factory=dict)
    _pending: StateRecord | None = None
    _writers: set[tuple[int, StateId, SlotKey]] = field(default_factory=set)
    _pins: dict[str, set[SlotKey]] = field(default_factory=dict)
    _decisions: OrderedDict[int, SlotRefusal | None] = field(default_factory=OrderedDict)
    _last_decided_step: int = -1
    _granted_s: float | None = None

    # Workers.

    def begin_epoch(self, n_ranks: int, *, is_alone: bool = True) -> None:
        """Expect *n_ranks* new local ranks; the old ones are gone.

        Unwritten slots of old ranks are discarded. A state that all of them had written may still
        become complete, until `resume` says which state the new ones resume from; nothing is
        granted before.
        """
        self._writers.clear()
        self._pool_of_rank.clear()
        self._decisions.clear()
        self._last_decided_step = -1
        self._granted_s = None
        self.epoch = self.final = None
        self._n_ranks = n_ranks
        if self._pending is not None and not self._pending.is_written:
            self._give_up()
        self.is_single_node = is_alone

    @property
    def is_verifying(self) -> bool:
        """Return whether a state that all former ranks have written is still being verified."""
        pending = self._pending
        return self.epoch is None and pending is not None and not pending.is_complete

    @property
    def in_flight(self) -> StateId | None:
        return None if self._pending is None else self._pending.state

    @property
    def decided(self) -> StateId | None:
        """The newest state of which it was decided whether to save it."""
        if self.epoch is None or self._last_decided_step < 0:
            return None
        return StateId(self.epoch, self._last_decided_step)

    def resume(self, state: StateId | None, epoch: int) -> None:
        """Have the ranks resume from *state* (None: from scratch) with states of *epoch*.

        States newer than *state* were skipped, and are discarded: otherwise they would be protected
        in place of the state that the job has resumed from.
        """
        self._pending = None
        for other in [s for s in self._complete if state is None or s > state]:
            del self._complete[other]
        self.last_committed = max(self._complete, default=None)
        self.epoch = epoch
        self.not_before = 0

    def register(self, local_rank: int, pool: int, indexes: Iterable[int]) -> None:
        """Record that the rank saves into these slots of a pool from now on."""
        if not 0 <= local_rank < self._n_ranks:
            raise BufferTableError(f"this node has no local rank {local_rank} of {self._n_ranks}")
        if self._pool_of_rank.get(local_rank) != pool:
            self._give_up_unwritten(local_rank)
        keys = self._pools.setdefault(pool, set())
        keys.update(SlotKey(pool, index) for index in indexes)
        self._pool_of_rank[local_rank] = pool

    def remove_rank(self, local_rank: int) -> None:
        """Discard what the rank was writing: it has disconnected."""
        self._writers = {writer for writer in self._writers if writer[0] != local_rank}
        self._pool_of_rank.pop(local_rank, None)
        self._give_up_unwritten(local_rank)

    def unregister(self, local_rank: int) -> None:
        """Grant nothing before the rank has reserved other slots; the old ones stay as they are."""
        self._pool_of_rank.pop(local_rank, None)

    # One state.

    def acquire(
        self, local_rank: int, step: int, now_s: float, *, is_last: bool = False
    ) -> SlotLease | SlotRefusal:
        """Return the slot for *step*, or why there is none; the same for all ranks.

        *now_s*: with several nodes, of a clock that they share. *is_last*: it is never too early,
        and decided again where it was refused or given up; `ALREADY_SAVED` where the rank did that.
        """
        if not 0 <= local_rank < self._n_ranks:
            raise BufferTableError(f"this node has no local rank {local_rank} of {self._n_ranks}")
        self._give_up_if_passed(local_rank, step)
        if is_last and self.epoch is not None:
            last = StateId(self.epoch, step)
            if step >= self._last_decided_step:
                self.final = last
            if self._has_saved(local_rank, last):
                return ALREADY_SAVED
        if step > self._last_decided_step or (is_last and self._may_decide_again(step)):
            self._decide(step, now_s, is_last=is_last)
        refused = self._decisions.get(step, _STEP_PASSED)
        if refused is not None:
            return refused
        pending = self._pending
        if pending is None or pending.state.step != step:
            return _STEP_PASSED
        if pending.phases.get(local_rank) not in (SlotPhase.GRANTED, SlotPhase.WRITING):
            return _STEP_PASSED
        pending.phases[local_rank] = SlotPhase.WRITING
        slot = pending.slots[local_rank]
        self._writers.add((local_rank, pending.state, slot))
        return SlotLease(slot, pending.state, pending.number)

    def mark_written(self, local_rank: int, state: StateId) -> SlotKey | None:
        """Return the slot that is now written.

        None where it was already, as its stamp said, or where the state was given up meanwhile.
        """
        self._remove_writer(local_rank, state)
        pending = self._pending
        if pending is None or pending.state != state:
            return None
        if pending.phases[local_rank] is not SlotPhase.WRITING:
            return None
        pending.phases[local_rank] = SlotPhase.WRITTEN
        return pending.slots[local_rank]

    def abandon(self, local_rank: int, state: StateId) -> None:
        """Give the state up: this rank could not copy it."""
        self._remove_writer(local_rank, state)
        self.give_up(state)

    def give_up(self, state: StateId) -> None:
        """Give up *state* if it is in flight."""
        if self._pending is not None and self._pending.state == state:
            self._give_up()

    def mark_verified(self, slot: SlotKey, state: StateId) -> bool:
        """Record that a written slot was verified; return whether the state is now complete.

        On a single node that commits it.
        """
        pending = self._pending
        if pending is None or pending.state != state:
            return False
        for local_rank, leased in pending.slots.items():
            if leased == slot and pending.phases[local_rank] is SlotPhase.WRITTEN:
                pending.phases[local_rank] = SlotPhase.VERIFIED
                break
        else:
            return False
        if not pending.is_complete:
            return False
        self._complete[state] = pending
        if self.is_single_node:
            self._commit(state)
        return True

    def commit(self, state: StateId) -> bool:
        """Commit a state that is complete here and on all nodes; return whether it was complete."""
        if state not in self._complete or (
            self.last_committed is not None and state <= self.last_committed
        ):
            return False
        self._commit(state)
        return True

    def forget(self, state: StateId) -> None:
        """Discard a state whose bytes have changed."""
        self._complete.pop(state, None)
        if self._pending is not None and self._pending.state == state:
            self._pending = None
        if self.last_committed == state:
            self.last_committed = max(self._complete, default=None)

    # Readers.

    def pin(self, state: StateId, owner: str) -> Mapping[int, SlotKey]:
        """Keep the slots of a complete state unchanged until `unpin`; return them.

        Raises:
            BufferTableError: Memory does not have the complete state.
        """
        if state not in self._complete:
            raise BufferTableError(f"memory does not hold {state}")
        self._pins.setdefault(owner, set()).update(self._complete[state].slots.values())
        return dict(self._complete[state].slots)

    def unpin(self, owner: str) -> None:
        """Remove all pins of *owner*; pinned slots were unchanged until then."""
        self._pins.pop(owner, None)

    def complete_states(self) -> Mapping[StateId, Mapping[int, SlotKey]]:
        """Return the states of which memory has the shards of this node's ranks."""
        return {state: dict(saved.slots) for state, saved in self._complete.items()}

    def find(self, state: StateId) -> StateRecord | None:
        """Return the record of a state that is complete or in flight."""
        is_pending = self._pending is not None and self._pending.state == state
        return self._pending if is_pending else self._complete.get(state)

    @property
    def complete(self) -> Mapping[StateId, StateRecord]:
        """The states of which memory has the shards of this node's ranks."""
        return self._complete

    def release(self) -> tuple[SlotKey, ...]:
        """Remove and return slots that no rank will use again and that hold no needed state."""
        if self.epoch is None or len(self._pool_of_rank) < self._n_ranks:
            return ()
        stale = set(self._pools) - set(self._pool_of_rank.values())
        keys = {key for pool in stale for key in self._pools[pool]}
        keys -= self._slots_in_use()
        self._evict(keys, only_unprotected=True)
        for saved in self._complete.values():
            keys -= set(saved.slots.values())
        for key in keys:
            self._pools[key.pool].discard(key)
        for pool in stale:
            if not self._pools[pool]:
                del self._pools[pool]
        return tuple(sorted(keys))

    def release_empty(self, local_rank: int, next_pool: int | None) -> tuple[SlotKey, ...]:
        """Remove and return the empty slots of the rank's pool, unless *next_pool* is the same."""
        pool = self._pool_of_rank.get(local_rank)
        if pool is None or pool == next_pool:
            return ()
        self.unregister(local_rank)
        keys = self._pools[pool] - self._slots_in_use()
        keys -= {key for saved in self._complete.values() for key in saved.slots.values()}
        self._pools[pool] -= keys
        if not self._pools[pool]:
            del self._pools[pool]
        return tuple(sorted(keys))

    # Internals.

    def _has_saved(self, local_rank: int, state: StateId) -> bool:
        """Return whether the rank has saved *state* and it was not given up."""
        pending = self._pending
        if pending is not None and pending.state == state:
            return pending.phases.get(local_rank) in (SlotPhase.WRITTEN, SlotPhase.VERIFIED)
        return state in self._complete or self.last_committed == state

    def _may_decide_again(self, step: int) -> bool:
        """Return whether the newest step was refused or given up, and no rank writes it."""
        is_open = self._pending is not None and self._pending.state.step == step
        is_written = any(state.step == step for _rank, state, _slot in self._writers)
        return step == self._last_decided_step and not is_open and not is_written

    def _give_up_if_passed(self, local_rank: int, step: int) -> None:
        """Give up the state in flight where this rank skipped it."""
        pending = self._pending
        if pending is None or self.epoch is None or step <= pending.state.step:
            return
        if pending.phases.get(local_rank) is SlotPhase.GRANTED:
            self._give_up()

    def _decide(self, step: int, now_s: float, *, is_last: bool) -> None:
        is_anew, self._last_decided_step = step == self._last_decided_step, step
        refused = self._try_lease(step, now_s, is_last=is_last)
        self._decisions[step] = refused
        if is_anew:
            if refused is not None:
                return
            self.rejected = deque(
                (s for s in self.rejected if s.step != step), self.rejected.maxlen
            )
        if len(self._decisions) > _DECISIONS_KEPT:
            self._decisions.popitem(last=False)
        if refused is not None:
            self.skipped[refused.reason] += 1
            if self.epoch is not None:
                self.rejected.append(StateId(self.epoch, step))
        else:
            self.n_granted += 1
            self._granted_s = now_s

    def _try_lease(self, step: int, now_s: float, *, is_last: bool) -> SlotRefusal | None:
        """Return why *step* is not saved; None: it is, and the slots of all ranks are leased."""
        if self.epoch is None:
            return SlotRefusal(SkipReason.NOT_RESTORED, "the state to resume from is not known yet")
        early = self._why_early(step, now_s)
        if early and not is_last:
            return SlotRefusal(SkipReason.NOT_DUE, early)
        missing = [r for r in range(self._n_ranks) if r not in self._pool_of_rank]
        if missing:
            return SlotRefusal(SkipReason.NOT_RESERVED, f"local rank {missing[0]} has no slots yet")
        if self._pending is not None:
            why = f"{self._pending.state} is still {self._pending_stage()}"
            return SlotRefusal(SkipReason.IN_FLIGHT, why, self._pending.is_complete)
        slots: dict[int, SlotKey] = {}
        for local_rank, pool in self._pool_of_rank.items():
            free = self._find_free_slot(pool)
            if free is None:
                why = f"all slots of local rank {local_rank} are in use"
                return SlotRefusal(SkipReason.NO_FREE_SLOT, why)
            slots[local_rank] = free
        self._evict(slots.values())
        phases = dict.fromkeys(slots, SlotPhase.GRANTED)
        self._pending = StateRecord(StateId(self.epoch, step), slots, phases, self.n_granted + 1)
        return None

    def _why_early(self, step: int, now_s: float) -> str:
        """Return why it is too early for the next save, "" where it is not.

        Several nodes decide independently and must agree: with them a save is due once in each
        interval of *every_s* of the time of day. If the time since the last grant counted, two
        nodes that once differed by a step would differ for ever.
        """
        if step < self.not_before:
            return f"all nodes save step {self.not_before} next, or a later one"
        if self._granted_s is None or self.every_s <= 0:
            return ""
        if self.is_single_node:
            is_early = now_s - self._granted_s < self.every_s
            return f"the last one is less than {self.every_s:g} s old" if is_early else ""
        is_early = now_s // self.every_s == self._granted_s // self.every_s
        return f"one state was saved in this interval of {self.every_s:g} s" if is_early else ""

    def _pending_stage(self) -> str:
        assert self._pending is not None
        if self._pending.is_complete:
            return "not committed by all nodes"
        return "being verified" if self._pending.is_written else "being copied"

    def _find_free_slot(self, pool: int) -> SlotKey | None:
        """Return an empty slot, else the one of the oldest state that is not needed."""
        busy = self._slots_in_use()
        holds = {key: s for s, saved in self._complete.items() for key in saved.slots.values()}
        found: list[tuple[StateId, SlotKey]] = []
        for key in sorted(self._pools[pool] - busy):
            state = holds.get(key)
            if state is None:
                return key
            if not self._is_protected(state):
                found.append((state, key))
        return min(found)[1] if found else None

    def _slots_in_use(self) -> set[SlotKey]:
        busy = {slot for _rank, _state, slot in self._writers} | self._pinned_slots()
        if self._pending is not None:
            busy |= set(self._pending.slots.values())
        return busy

    def _pinned_slots(self) -> set[SlotKey]:
        return {key for keys in self._pins.values() for key in keys}

    def _is_protected(self, state: StateId) -> bool:
        is_newest = self.last_committed is None or state >= self.last_committed
        return is_newest or not self._pinned_slots().isdisjoint(
            self._complete[state].slots.values()
        )

    def _evict(self, slots: Iterable[SlotKey], *, only_unprotected: bool = False) -> None:
        """Discard every state that loses one of *slots*."""
        taken = set(slots)
        for state, saved in list(self._complete.items()):
            is_kept = only_unprotected and self._is_protected(state)
            if not is_kept and taken & set(saved.slots.values()):
                del self._complete[state]

    def _commit(self, state: StateId) -> None:
        self.last_committed = state
        self.n_committed += 1
        if self._pending is not None and self._pending.state == state:
            self._pending = None

    def _give_up(self) -> None:
        assert self._pending is not None
        self._complete.pop(self._pending.state, None)
        self.rejected.append(self._pending.state)
        self._pending = None
        self.n_given_up += 1

    def _give_up_unwritten(self, local_rank: int) -> None:
        """Give up the state in flight where it waits for this rank's copy."""
        pending = self._pending
        if pending is None or self.epoch is None:
            return
        if pending.phases.get(local_rank) in (SlotPhase.GRANTED, SlotPhase.WRITING):
            self._give_up()

    def _remove_writer(self, local_rank: int, state: StateId) -> None:
        own_writers = [writer for writer in self._writers if writer[:2] == (local_rank, state)]
        if not own_writers:
            raise BufferTableError(f"local rank {local_rank} is not writing {state}")
        self._writers.difference_update(own_writers)


_STEP_PASSED = SlotRefusal(SkipReason.PASSED, "a decision for this or a later step exists")
ALREADY_SAVED = SlotRefusal(SkipReason.NOT_DUE, "this step is already saved")
