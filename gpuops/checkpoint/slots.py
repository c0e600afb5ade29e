"""Which slot holds what, and who may write where: the gate of one node.

With two slots and no gate, one rank may overwrite a state with the next but one while another
rank's last is still being copied; a crash then leaves no state that all ranks have. So: one state
is on its way at a time, the first rank that asks for a step decides for all ranks of the node, and
the slots of the newest committed state are never granted.

Nothing here reads a clock or touches memory: the caller says what happened.
"""

from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from gpuops.checkpoint.states import CheckpointError, StateId

_DECISIONS_KEPT = 256
_REFUSED_KEPT = 8


@dataclass(frozen=True, slots=True, order=True)
class SlotKey:
    """One slot: the arena (one rank's memory of one layout) and its number therein."""

    arena: int
    index: int


class Reason(StrEnum):
    """Why no slot was granted."""

    NOT_DUE = "not_due"
    NOT_RESTORED = "not_restored"
    NOT_RESERVED = "not_reserved"
    IN_FLIGHT = "in_flight"
    NO_FREE_SLOT = "no_free_slot"
    PASSED = "passed"


@dataclass(frozen=True, slots=True)
class Granted:
    """The rank is to write *state* into *slot*."""

    slot: SlotKey
    state: StateId


@dataclass(frozen=True, slots=True)
class Refused:
    """The rank is not to write; *why* says it to a person."""

    reason: Reason
    why: str


class GateError(CheckpointError):
    """The caller says what cannot have happened, such as a seal without a grant."""


class _Phase(StrEnum):
    GRANTED = "granted"  # its rank has not asked yet
    WRITING = "writing"
    SEALED = "sealed"
    VERIFIED = "verified"


@dataclass(slots=True)
class _Flight:
    """A state on its way; keys of both are local ranks."""

    state: StateId
    slots: dict[int, SlotKey]
    phases: dict[int, _Phase]

    @property
    def is_whole(self) -> bool:
        return all(phase is _Phase.VERIFIED for phase in self.phases.values())

    @property
    def is_sealed(self) -> bool:
        return all(phase in (_Phase.SEALED, _Phase.VERIFIED) for phase in self.phases.values())


@dataclass(slots=True)
class Gate:
    """The slots of one node.

    ``newest`` is the newest committed state that memory holds. ``is_alone`` is false where other
    nodes have a say: a state is then committed by `commit_from_outside` only; ``not_before`` is the
    first step that all of them can save next, until `resume`. ``refused`` has the
    newest states that were skipped or given up, the newest last. ``last`` is the state that a rank
    asked for as the last one, of this epoch.
    """

    newest: StateId | None = None
    epoch: int | None = None
    every_s: float = 0.0
    not_before: int = 0
    is_alone: bool = True
    skipped: Counter[Reason] = field(default_factory=Counter)
    granted: int = 0
    committed: int = 0
    given_up: int = 0
    refused: deque[StateId] = field(default_factory=lambda: deque(maxlen=_REFUSED_KEPT))
    last: StateId | None = None
    _n_ranks: int = 0
    _arenas: dict[int, set[SlotKey]] = field(default_factory=dict)
    _current: dict[int, int] = field(default_factory=dict)
    _whole: dict[StateId, dict[int, SlotKey]] = field(default_factory=dict)
    _flight: _Flight | None = None
    _hands: set[tuple[int, StateId, SlotKey]] = field(default_factory=set)
    _pins: dict[str, set[SlotKey]] = field(default_factory=dict)
    _decided: OrderedDict[int, Refused | None] = field(default_factory=OrderedDict)
    _decided_to: int = -1
    _granted_s: float | None = None

    # The life of the workers.

    def begin_epoch(self, n_ranks: int, *, is_alone: bool = True) -> None:
        """Expect *n_ranks* new local ranks; the old ones are gone.

        What they had not sealed is discarded. What all had sealed may still become whole, until
        `resume` says from which state the new ones go on; nothing is granted before.
        """
        self._hands.clear()
        self._current.clear()
        self._decided.clear()
        self._decided_to = -1
        self._granted_s = None
        self.epoch = self.last = None
        self._n_ranks = n_ranks
        if self._flight is not None and not self._flight.is_sealed:
            self._give_up()
        self.is_alone = is_alone

    @property
    def is_settling(self) -> bool:
        """Say whether a state that all former ranks have sealed is still being verified."""
        flight = self._flight
        return self.epoch is None and flight is not None and not flight.is_whole

    @property
    def in_flight(self) -> StateId | None:
        """The state that is on its way, if one is."""
        return None if self._flight is None else self._flight.state

    @property
    def decided(self) -> StateId | None:
        """The newest state of which it was decided whether it is saved."""
        is_none = self.epoch is None or self._decided_to < 0
        return None if is_none or self.epoch is None else StateId(self.epoch, self._decided_to)

    def resume(self, state: StateId | None, epoch: int) -> None:
        """Let the ranks go on from *state* (None: from the start) with states of *epoch*.

        What is newer than *state* was passed over, and is not kept: else it would be protected
        in place of the state that the job now rests on.
        """
        self._flight = None
        for other in [s for s in self._whole if state is None or s > state]:
            del self._whole[other]
        self.newest = max(self._whole, default=None)
        self.epoch = epoch
        self.not_before = 0

    def register(self, local_rank: int, arena: int, indexes: Iterable[int]) -> None:
        """Take note that the rank saves into these slots of an arena from now on."""
        if not 0 <= local_rank < self._n_ranks:
            raise GateError(f"this node has no local rank {local_rank} of {self._n_ranks}")
        if self._current.get(local_rank) != arena:
            self._give_up_unsealed(local_rank)
        keys = self._arenas.setdefault(arena, set())
        keys.update(SlotKey(arena, index) for index in indexes)
        self._current[local_rank] = arena

    def lost(self, local_rank: int) -> None:
        """Discard what the rank was writing: it is gone."""
        self._hands = {hand for hand in self._hands if hand[0] != local_rank}
        self._current.pop(local_rank, None)
        self._give_up_unsealed(local_rank)

    # One state.

    def begin(
        self, local_rank: int, step: int, now_s: float, *, is_last: bool = False
    ) -> Granted | Refused:
        """Return the slot for *step*, or why there is none; the same for all ranks.

        *now_s*: where other nodes have a say, of a clock that they have, too. *is_last*: no step
        follows, so it is never too early, and a step that was refused, or given up, is decided
        anew; it is not due (`Reason.NOT_DUE`) only where the rank has saved it.
        """
        if not 0 <= local_rank < self._n_ranks:
            raise GateError(f"this node has no local rank {local_rank} of {self._n_ranks}")
        self._pass(local_rank, step)
        if is_last and self.epoch is not None and step >= self._decided_to:
            self.last = StateId(self.epoch, step)
            if self._has(local_rank, self.last):
                return _SAVED
        if step > self._decided_to or (is_last and self._is_over(step)):
            self._decide(step, now_s, is_last=is_last)
        refused = self._decided.get(step, _PASSED)
        if refused is not None:
            return refused
        flight = self._flight
        if flight is None or flight.state.step != step or local_rank not in flight.phases:
            return _PASSED
        if flight.phases[local_rank] not in (_Phase.GRANTED, _Phase.WRITING):
            return _PASSED
        flight.phases[local_rank] = _Phase.WRITING
        slot = flight.slots[local_rank]
        self._hands.add((local_rank, flight.state, slot))
        return Granted(slot, flight.state)

    def seal(self, local_rank: int, state: StateId) -> SlotKey | None:
        """Return the slot that is complete now; None where the state was given up meanwhile."""
        self._let_go(local_rank, state)
        flight = self._flight
        if flight is None or flight.state != state:
            return None
        flight.phases[local_rank] = _Phase.SEALED
        return flight.slots[local_rank]

    def abandon(self, local_rank: int, state: StateId) -> None:
        """Give the state up: this rank could not copy it."""
        self._let_go(local_rank, state)
        self.give_up(state)

    def give_up(self, state: StateId) -> None:
        """Give up *state* where it is on its way."""
        if self._flight is not None and self._flight.state == state:
            self._give_up()

    def verified(self, slot: SlotKey, state: StateId) -> bool:
        """Take note that a sealed slot was read whole; say whether the state now is, too.

        It is committed by that where this node is alone.
        """
        flight = self._flight
        if flight is None or flight.state != state:
            return False
        for local_rank, its in flight.slots.items():
            if its == slot and flight.phases[local_rank] is _Phase.SEALED:
                flight.phases[local_rank] = _Phase.VERIFIED
                break
        else:
            return False
        if not flight.is_whole:
            return False
        self._whole[state] = flight.slots
        if self.is_alone:
            self._commit(state)
        return True

    def commit_from_outside(self, state: StateId) -> bool:
        """Commit a state that is whole here, as all nodes have it; say whether it was."""
        if state not in self._whole or (self.newest is not None and state <= self.newest):
            return False
        self._commit(state)
        return True

    def forget(self, state: StateId) -> None:
        """Let go of a state whose bytes are not what they were."""
        self._whole.pop(state, None)
        if self._flight is not None and self._flight.state == state:
            self._flight = None
        if self.newest == state:
            self.newest = max(self._whole, default=None)

    # Who reads what.

    def pin(self, state: StateId, who: str) -> Mapping[int, SlotKey]:
        """Keep the slots of a whole state as they are until `unpin`; return them.

        Raises:
            GateError: Memory does not hold the state whole.
        """
        if state not in self._whole:
            raise GateError(f"memory does not hold {state}")
        self._pins.setdefault(who, set()).update(self._whole[state].values())
        return dict(self._whole[state])

    def unpin(self, who: str) -> None:
        """Take away all pins of *who*; a slot that was pinned stays as it was until then."""
        self._pins.pop(who, None)

    def whole(self) -> Mapping[StateId, Mapping[int, SlotKey]]:
        """Return the states of which memory has what this node's ranks saved."""
        return {state: dict(slots) for state, slots in self._whole.items()}

    def release(self) -> tuple[SlotKey, ...]:
        """Return, and forget, slots that no rank will use again and that hold nothing of worth."""
        if self.epoch is None or len(self._current) < self._n_ranks:
            return ()
        stale = set(self._arenas) - set(self._current.values())
        keys = {key for arena in stale for key in self._arenas[arena]}
        keys -= self._busy()
        for state in [s for s, slots in self._whole.items() if not self._is_protected(s)]:
            if keys & set(self._whole[state].values()):
                self._whole.pop(state, None)
        for slots in self._whole.values():
            keys -= set(slots.values())
        for key in keys:
            self._arenas[key.arena].discard(key)
        for arena in stale:
            if not self._arenas[arena]:
                del self._arenas[arena]
        return tuple(sorted(keys))

    # Behind it.

    def _has(self, local_rank: int, state: StateId) -> bool:
        """Say whether the rank has saved *state*, as far as nobody gave it up."""
        flight = self._flight
        if flight is not None and flight.state == state:
            return flight.phases.get(local_rank) in (_Phase.SEALED, _Phase.VERIFIED)
        return state in self._whole or self.newest == state

    def _is_over(self, step: int) -> bool:
        """Say whether the newest step was refused or given up, and nobody writes it any more."""
        is_open = self._flight is not None and self._flight.state.step == step
        is_written = any(state.step == step for _rank, state, _slot in self._hands)
        return step == self._decided_to and not is_open and not is_written

    def _pass(self, local_rank: int, step: int) -> None:
        """Give up the state on its way where this rank went past it without asking for it."""
        flight = self._flight
        if flight is None or self.epoch is None or step <= flight.state.step:
            return
        if flight.phases.get(local_rank) is _Phase.GRANTED:
            self._give_up()

    def _decide(self, step: int, now_s: float, *, is_last: bool) -> None:
        is_anew, self._decided_to = step == self._decided_to, step
        refused = self._refusal(step, now_s, is_last=is_last)
        self._decided[step] = refused
        if is_anew:
            if refused is not None:
                return
            self.refused = deque((s for s in self.refused if s.step != step), self.refused.maxlen)
        if len(self._decided) > _DECISIONS_KEPT:
            self._decided.popitem(last=False)
        if refused is not None:
            self.skipped[refused.reason] += 1
            if self.epoch is not None:
                self.refused.append(StateId(self.epoch, step))
        else:
            self.granted += 1
            self._granted_s = now_s

    def _refusal(self, step: int, now_s: float, *, is_last: bool) -> Refused | None:
        """Return why *step* is not saved; where it is, the slots of all ranks are taken."""
        if self.epoch is None:
            return Refused(Reason.NOT_RESTORED, "the state to go on from is not known yet")
        early = self._why_early(step, now_s)
        if early and not is_last:
            return Refused(Reason.NOT_DUE, early)
        missing = [r for r in range(self._n_ranks) if r not in self._current]
        if missing:
            return Refused(Reason.NOT_RESERVED, f"local rank {missing[0]} has no slots yet")
        if self._flight is not None:
            return Refused(Reason.IN_FLIGHT, f"{self._flight.state} is still {self._stage()}")
        slots: dict[int, SlotKey] = {}
        for local_rank, arena in self._current.items():
            free = self._free(arena)
            if free is None:
                why = f"no slot of local rank {local_rank} is free"
                return Refused(Reason.NO_FREE_SLOT, why)
            slots[local_rank] = free
        self._take(slots.values())
        phases = dict.fromkeys(slots, _Phase.GRANTED)
        self._flight = _Flight(StateId(self.epoch, step), slots, phases)
        return None

    def _why_early(self, step: int, now_s: float) -> str:
        """Return why it is too early for the next save, "" where it is not.

        Nodes that decide apart have to come to the same: with them a save is due once in each
        stretch of *every_s* of the time of day. By the time since the last grant, two nodes that
        once differed by a step would differ for ever.
        """
        if step < self.not_before:
            return f"all nodes save step {self.not_before} next, or after"
        if self._granted_s is None or self.every_s <= 0:
            return ""
        if self.is_alone:
            is_early = now_s - self._granted_s < self.every_s
            return f"the last one is less than {self.every_s:g} s old" if is_early else ""
        is_early = now_s // self.every_s == self._granted_s // self.every_s
        return f"of these {self.every_s:g} s one was saved" if is_early else ""

    def _stage(self) -> str:
        assert self._flight is not None
        if self._flight.is_whole:
            return "not committed by all nodes"
        return "being verified" if self._flight.is_sealed else "being copied"

    def _free(self, arena: int) -> SlotKey | None:
        """Return an empty slot, else the one of the oldest state that nobody needs."""
        busy = self._busy()
        holds = {key: state for state, slots in self._whole.items() for key in slots.values()}
        found: list[tuple[StateId, SlotKey]] = []
        for key in sorted(self._arenas[arena] - busy):
            state = holds.get(key)
            if state is None:
                return key
            if not self._is_protected(state):
                found.append((state, key))
        return min(found)[1] if found else None

    def _busy(self) -> set[SlotKey]:
        busy = {slot for _rank, _state, slot in self._hands} | self._pinned()
        if self._flight is not None:
            busy |= set(self._flight.slots.values())
        return busy

    def _pinned(self) -> set[SlotKey]:
        return {key for keys in self._pins.values() for key in keys}

    def _is_protected(self, state: StateId) -> bool:
        is_newest = self.newest is None or state >= self.newest
        return is_newest or not self._pinned().isdisjoint(self._whole[state].values())

    def _take(self, slots: Iterable[SlotKey]) -> None:
        """Let go of every state that loses one of *slots*."""
        taken = set(slots)
        for state in [s for s, held in self._whole.items() if taken & set(held.values())]:
            self._whole.pop(state, None)

    def _commit(self, state: StateId) -> None:
        self.newest = state
        self.committed += 1
        if self._flight is not None and self._flight.state == state:
            self._flight = None

    def _give_up(self) -> None:
        assert self._flight is not None
        self._whole.pop(self._flight.state, None)
        self.refused.append(self._flight.state)
        self._flight = None
        self.given_up += 1

    def _give_up_unsealed(self, local_rank: int) -> None:
        """Give up the state on its way where it waits for this rank's copy."""
        flight = self._flight
        if flight is None or self.epoch is None:
            return
        if flight.phases.get(local_rank) in (_Phase.GRANTED, _Phase.WRITING):
            self._give_up()

    def _let_go(self, local_rank: int, state: StateId) -> None:
        mine = [hand for hand in self._hands if hand[:2] == (local_rank, state)]
        if not mine:
            raise GateError(f"local rank {local_rank} is not writing {state}")
        self._hands.difference_update(mine)


_PASSED = Refused(Reason.PASSED, "this step was passed, or decided before")
_SAVED = Refused(Reason.NOT_DUE, "this step is saved already")
