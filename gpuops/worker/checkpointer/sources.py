"""Where a rank's saved states come from: the keeper of its node, else the directory itself."""

import mmap
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Protocol

from gpuops.checkpoint.arena import SlotMemory
from gpuops.checkpoint.keeper import Keeper
from gpuops.checkpoint.keeper_line import KeeperGoneError
from gpuops.checkpoint.offering import Chosen, Wanted, choose
from gpuops.checkpoint.state_store import CheckpointStore
from gpuops.checkpoint.states import STEP_MAX, CheckpointError, Offer, Shard, StateId, Tier
from gpuops.worker.checkpointer.place import Place, is_group, least

N_TRIES = 64
_CODE_MAX = 2**63 - 1
_LARGE_BYTES = 64 * 2**20


@dataclass(frozen=True, slots=True)
class Found:
    """A state to load. ``why`` has what spoke against newer ones."""

    state: StateId
    world: int
    tier: Tier
    why: tuple[str, ...] = ()


class Kind(IntEnum):
    """Where states come from. Each kind has the ranks compare other numbers, so all need one."""

    NOTHING = 0
    DIRECTORY = 1
    KEEPER = 2


KIND_NAMES = ("nothing", "the directory", "the keeper of the node")


class StateSource(Protocol):
    """Finds a state, and opens the images of its shards."""

    @property
    def kind(self) -> Kind:
        """Return what finds it; must be the same on all ranks."""
        ...

    def find(self) -> Found | None:
        """Return the state that all ranks are to load, None where there is none.

        Raises:
            CheckpointError: That cannot be said.
        """
        ...

    def open(self, shard: Shard) -> memoryview:
        """Return the verified image of one of its shards, until `close`."""
        ...

    def loaded(self, seconds: float, nbytes: int) -> None:
        """Note that this rank has loaded it."""
        ...

    def close(self) -> None:
        """Let go of what was opened."""
        ...


class FromKeeper:
    """What the keeper of this node offers, from memory, a peer or the directory.

    *again* returns one in place of one that is gone, which is asked once more: a keeper that dies
    here may have told nobody anything yet. None: the ranks cannot compare what they were told.
    """

    kind = Kind.KEEPER

    def __init__(
        self, keeper: Keeper, deadline_s: float, again: Callable[[], Keeper] | None = None
    ) -> None:
        self._keeper = keeper
        self._deadline_s = deadline_s
        self._again = again
        self._offer: Offer | None = None
        self._opened: list[SlotMemory | _Mapped] = []

    def find(self) -> Found | None:
        try:
            offer = self._keeper.offer(self._deadline_s)
        except KeeperGoneError:
            if self._again is None:
                raise
            self._keeper = self._again()
            offer = self._keeper.offer(self._deadline_s)
        self._offer = offer
        if offer is None:
            return None
        return Found(offer.state, offer.world, offer.tier, offer.why)

    def open(self, shard: Shard) -> memoryview:
        assert self._offer is not None
        source = self._keeper.open_shard(self._offer, shard)
        opened = _Mapped(source) if isinstance(source, Path) else source
        self._opened.append(opened)
        return opened.view

    def loaded(self, seconds: float, nbytes: int) -> None:
        assert self._offer is not None
        self._keeper.restored(self._offer, seconds, nbytes)

    def close(self) -> None:
        _close_all(self._opened)


class FromDirectory:
    """The newest state of a directory or URL that verifies, without any keeper.

    Each rank reads and verifies its own shard; where one finds it bad, all go to the state before.
    """

    kind = Kind.DIRECTORY

    def __init__(self, store: CheckpointStore, place: Place) -> None:
        self._store = store
        self._place = place
        self._chosen: Chosen | None = None
        self._why: list[str] = []
        self._opened: list[SlotMemory | _Mapped] = []

    def find(self) -> Found | None:
        states, trouble = self._listed()
        below = _CODE_MAX
        for _ in range(N_TRIES):
            self._chosen = self._newest([state for state in states if _code(state) <= below])
            code = _code(self._chosen.state) if self._chosen else 0
            low, high, n_fine = code, code, int(not trouble)
            if is_group(self._place):
                low, high, n_fine = least([code, -code, n_fine])
                high = -high
            if low == high:
                break
            below = low
        else:
            raise CheckpointError(f"the ranks see different states in {self._store.address}")
        if self._chosen is not None:
            chosen = self._chosen
            return Found(chosen.state, chosen.world, Tier.PERSISTENT, tuple(self._why))
        if not n_fine:
            reasons = "; ".join([trouble, *self._why[:4]] if trouble else self._why[:4])
            raise CheckpointError(
                f"whether there is a state to go on from in {self._store.address} cannot be told: "
                f"{reasons or 'another rank cannot read it'}. Repair the directory, or give "
                "another one to start anew"
            )
        return None

    def open(self, shard: Shard) -> memoryview:
        chosen = self._chosen
        assert chosen is not None
        source = chosen.sources.get(shard)
        if source is None:
            found = choose(
                {}, self._store, Wanted(only=chosen.state, shards=frozenset({shard}))
            ).chosen
            if found is None:
                raise CheckpointError(
                    f"the shard of rank {shard.rank} of {chosen.state} in {self._store.address} "
                    "cannot be read, and the state is not whole without it"
                )
            source = found.sources[shard]
        opened = _Mapped(source) if isinstance(source, Path) else source
        self._opened.append(opened)
        return opened.view

    def loaded(self, seconds: float, nbytes: int) -> None:
        pass

    def close(self) -> None:
        _close_all(self._opened)

    def _listed(self) -> tuple[list[StateId], str]:
        """Return the states, newest first, and what is wrong if starting anew could lose one."""
        try:
            survey = self._store.survey()
        except CheckpointError as exc:
            return [], str(exc)
        self._why += [f"{each.name} {each.verdict}: {each.why}" for each in survey.damaged]
        trouble = "it holds states, and none is whole" if survey.states or survey.damaged else ""
        return [stored.state for stored in survey.states], trouble

    def _newest(self, states: Sequence[StateId]) -> Chosen | None:
        own = frozenset({Shard(self._place.rank, self._place.world)})
        for state in states:
            try:
                choice = choose({}, self._store, Wanted(only=state, shards=own))
            except CheckpointError as exc:
                self._why.append(str(exc))
                continue
            self._why += choice.why
            if choice.chosen is not None:
                return choice.chosen
        return None


class _Mapped:
    """A file, mapped to be read."""

    def __init__(self, path: Path) -> None:
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                mapped = mmap.mmap(fd, 0, access=mmap.ACCESS_READ)
            finally:
                os.close(fd)
        except (OSError, ValueError) as exc:
            raise CheckpointError(f"cannot read {path}: {exc}") from exc
        self.view = memoryview(mapped)

    def close(self) -> None:
        """Let go of it; it stays mapped until nothing refers to `view`."""
        self.view = memoryview(b"")


def _close_all(opened: list[SlotMemory | _Mapped]) -> None:
    """Let go of all of *opened*; large memory is unmapped while the training begins."""
    large = [
        each for each in opened if isinstance(each, SlotMemory) and each.nbytes >= _LARGE_BYTES
    ]
    for each in opened:
        if each not in large:
            each.close()
    opened.clear()
    if large:
        # No daemon: CPython kills those as it ends, wherever they are, C++ included.
        threading.Thread(target=_unmap, args=(large,), name="gpuops-unmap").start()


def _unmap(memories: list[SlotMemory]) -> None:
    """Unmap and close *memories*; once the program ends, leave it to the kernel within 1 ms."""
    main = threading.main_thread()
    while memories:
        memory = memories.pop()
        memory.unmap(lambda: not main.is_alive())
        memory.close()


def _code(state: StateId) -> int:
    """Return a number that is greater for a newer state, and above 0."""
    return state.epoch * (STEP_MAX + 1) + state.step + 1
