"""Where a rank finds the state to load: at the keeper of its node, else in the directory itself."""

import mmap
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Protocol

from gpuops.checkpoint.agreement.local_recovery import (
    SelectedState,
    StateSearchCriteria,
    find_restorable,
)
from gpuops.checkpoint.hashed_image import HashedImage
from gpuops.checkpoint.keeper.connection import KeeperGoneError
from gpuops.checkpoint.keeper.rank_client import KeeperParts, RankKeeperClient
from gpuops.checkpoint.memory.shared_buffer import SharedBuffer
from gpuops.checkpoint.partial_image import CompleteImage, OpenedImage, PartialImage
from gpuops.checkpoint.storage.api import CheckpointStore
from gpuops.checkpoint.storage.stored_ranges import open_partial
from gpuops.checkpoint.types import (
    STEP_MAX,
    CheckpointError,
    RestorePoint,
    Shard,
    StateId,
    Tier,
)
from gpuops.worker.map_ahead import MappedImages
from gpuops.worker.ranks import (
    RankContext,
    all_reduce_min,
    has_process_group,
)

AGREE_ATTEMPTS = 64
_SORT_KEY_MAX = 2**63 - 1
_LARGE_BYTES = 64 * 2**20


@dataclass(frozen=True, slots=True)
class StateToLoad:
    """A state to load. ``why``: why newer ones were skipped.

    Unless ``is_verified``, the same state may be found again after `StateSource.reject`.
    ``stored_by``: the run that wrote it to the directory, None: it is not there.
    """

    state: StateId
    world: int
    tier: Tier
    why: tuple[str, ...] = ()
    is_verified: bool = True
    stored_by: str | None = None


class SourceKind(IntEnum):
    """The kind of source. Each has the ranks compare other numbers, so all need the same one."""

    NOTHING = 0
    DIRECTORY = 1
    KEEPER = 2


SOURCE_KIND_NAMES = ("nothing", "the directory", "the keeper of the node")


class StateSource(Protocol):
    """Finds a state, and opens the images of its shards."""

    @property
    def kind(self) -> SourceKind:
        """Return the kind of source; must be the same on all ranks."""
        ...

    def find(self) -> StateToLoad | None:
        """Return the state that all ranks load, None where there is none.

        Raises:
            CorruptError: It is damaged, and ranks on other nodes may find it intact.
            CheckpointError: It cannot be determined.
        """
        ...

    def open(self, shard: Shard) -> OpenedImage:
        """Return the image of one of its shards, until `close`."""
        ...

    def reject(self, why: str, *, is_given_up: bool) -> None:
        """Have `find` look anew: this state is damaged. All ranks must call it.

        It then finds an older one; the same one verified, where it was not and not *is_given_up*.

        Raises:
            CheckpointError: It cannot look anew.
        """
        ...

    def report_loaded(self, seconds: float, nbytes: int) -> None:
        """Record that this rank has loaded it."""
        ...

    def close(self) -> None:
        """Release the opened images."""
        ...


# A new keeper disconnects the ranks that have joined before its agent begins the generation.
_FIND_ATTEMPTS = 3


class KeeperStateSource:
    """The state that the keeper of this node offers, from memory, a peer or the directory.

    *reconnect* returns the replacement of a keeper that is gone, which is asked as well: a keeper
    that dies here may not have answered any rank. None: the ranks cannot compare their answers.
    *mapped*: images that were mapped ahead; closed with this source.
    """

    kind = SourceKind.KEEPER

    def __init__(
        self,
        keeper: RankKeeperClient,
        deadline_s: float,
        reconnect: Callable[[], RankKeeperClient] | None = None,
        mapped: MappedImages | None = None,
    ) -> None:
        self._keeper = keeper
        self._mapped = mapped
        self._deadline_s = deadline_s
        self._reconnect = reconnect
        self._restore_point: RestorePoint | None = None
        self._opened: list[_Opened] = []

    def find(self) -> StateToLoad | None:
        self._restore_point = None
        for n_left in reversed(range(_FIND_ATTEMPTS)):
            try:
                restore_point = self._keeper.restore_point(self._deadline_s)
                break
            except KeeperGoneError:
                if self._reconnect is None or not n_left:
                    raise
                self._keeper = self._reconnect()
        self._restore_point = restore_point
        if restore_point is None:
            return None
        point = restore_point
        return StateToLoad(
            point.state, point.world, point.tier, point.why, point.is_verified, point.stored_by
        )

    def open(self, shard: Shard) -> OpenedImage:
        assert self._restore_point is not None
        source = self._keeper.open_shard(self._restore_point, shard)
        opened = _MappedFile(source) if isinstance(source, Path) else source
        self._opened.append(opened)
        if isinstance(opened, HashedImage) and self._mapped is not None:
            mapped = self._mapped.take(opened)
            if mapped is not None:
                opened.copy_from(mapped)
        if isinstance(opened, HashedImage | KeeperParts):
            return opened
        return CompleteImage(opened.view)

    def reject(self, why: str, *, is_given_up: bool) -> None:
        self._keeper.reject(self._restore_point, why, is_given_up=is_given_up)
        self.close()

    def report_loaded(self, seconds: float, nbytes: int) -> None:
        assert self._restore_point is not None
        self._keeper.report_restored(self._restore_point, seconds, nbytes)

    def close(self) -> None:
        _close_all(self._opened)
        if self._mapped is not None:
            self._mapped.close()


class DirectoryStateSource:
    """The newest state of a directory or URL that verifies, without any keeper.

    Each rank reads and verifies its own shard, or what it needs of a state of another number of
    ranks; where that is corrupt, all ranks try the state before.
    """

    kind = SourceKind.DIRECTORY

    def __init__(self, store: CheckpointStore, ranks: RankContext) -> None:
        self._store = store
        self._ranks = ranks
        self._selected: SelectedState | None = None
        self._reasons: list[str] = []
        self._rejected: set[StateId] = set()
        self._opened: list[_Opened] = []

    def find(self) -> StateToLoad | None:
        states, store_error = self._list_states()
        states = [state for state in states if state not in self._rejected]
        below = _SORT_KEY_MAX
        for _ in range(AGREE_ATTEMPTS):
            self._selected = self._find_newest(
                [state for state in states if _sort_key(state) <= below]
            )
            sort_key = _sort_key(self._selected.state) if self._selected else 0
            low, high, n_fine = sort_key, sort_key, int(not store_error)
            if has_process_group(self._ranks):
                low, high, n_fine = all_reduce_min([sort_key, -sort_key, n_fine])
                high = -high
            if low == high:
                break
            below = low
        else:
            raise CheckpointError(f"the ranks see different states in {self._store.address}")
        if self._selected is not None:
            selected = self._selected
            return StateToLoad(
                selected.state,
                selected.world,
                Tier.PERSISTENT,
                tuple(self._reasons),
                stored_by=selected.stored_by,
            )
        if not n_fine:
            reasons = "; ".join(
                [store_error, *self._reasons[:4]] if store_error else self._reasons[:4]
            )
            raise CheckpointError(
                f"cannot determine whether {self._store.address} has a state to resume from: "
                f"{reasons or 'another rank cannot read it'}. Repair the directory, or give "
                "another one to start anew"
            )
        return None

    def open(self, shard: Shard) -> OpenedImage:
        selected = self._selected
        assert selected is not None
        source = selected.sources.get(shard)
        if source is None:  # of another rank: the placements have changed
            record = self._store.read_manifest(selected.state).record(shard)
            source = open_partial(self._store, selected.state, record)
        opened = _MappedFile(source) if isinstance(source, Path) else source
        self._opened.append(opened)
        return opened if isinstance(opened, PartialImage) else CompleteImage(opened.view)

    def reject(self, why: str, *, is_given_up: bool) -> None:  # noqa: ARG002 all was verified
        assert self._selected is not None
        self._rejected.add(self._selected.state)
        self._reasons.append(f"{self._selected.state} is skipped: {why}")
        self.close()

    def report_loaded(self, seconds: float, nbytes: int) -> None:
        pass

    def close(self) -> None:
        _close_all(self._opened)

    def _list_states(self) -> tuple[list[StateId], str]:
        """Return the states, newest first, and the error if starting anew could lose one."""
        try:
            scan = self._store.scan()
        except CheckpointError as exc:
            return [], str(exc)
        self._reasons += [f"{each.name} {each.condition}: {each.why}" for each in scan.damaged]
        store_error = "it has states, and none is complete" if scan.states or scan.damaged else ""
        return [stored.state for stored in scan.states], store_error

    def _find_newest(self, states: Sequence[StateId]) -> SelectedState | None:
        own_shard = frozenset({Shard(self._ranks.rank, self._ranks.world)})
        for state in states:
            try:
                criteria = StateSearchCriteria(
                    only=state, shards=own_shard, loading_world=self._ranks.world
                )
                result = find_restorable({}, self._store, criteria)
            except CheckpointError as exc:
                self._reasons.append(str(exc))
                continue
            self._reasons += result.why
            if result.selected is not None:
                return result.selected
        return None


class _MappedFile:
    """A file, mapped read-only."""

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
        """Release it; it stays mapped until nothing refers to `view`."""
        self.view = memoryview(b"")


_Opened = SharedBuffer | PartialImage | KeeperParts | _MappedFile


def _close_all(opened: list[_Opened]) -> None:
    """Release all of *opened*; large memory is unmapped in the background."""
    large = [
        each for each in opened if isinstance(each, SharedBuffer) and each.nbytes >= _LARGE_BYTES
    ]
    for each in opened:
        if each not in large:
            each.close()
    opened.clear()
    if large:
        # Not a daemon: CPython kills those at exit, wherever they are, C++ included.
        threading.Thread(target=_unmap, args=(large,), name="gpuops-unmap").start()


def _unmap(memories: list[SharedBuffer]) -> None:
    """Unmap and close *memories*; at exit, leave it to the kernel within 1 ms."""
    main = threading.main_thread()
    while memories:
        memory = memories.pop()
        memory.unmap(lambda: not main.is_alive())
        memory.close()


def _sort_key(state: StateId) -> int:
    """Return a number that is greater for a newer state, and above 0."""
    return state.epoch * (STEP_MAX + 1) + state.step + 1
