"""Load a saved state into the parts of a job: all of them, or none with a reason.

The source of a rank's states: the keeper of its node, else the directory itself.
"""

import logging
import mmap
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any, Protocol

from gpuops.checkpoint.agreement.local_recovery import (
    SelectedState,
    StateSearchCriteria,
    find_restorable,
)
from gpuops.checkpoint.keeper.connection import KeeperGoneError
from gpuops.checkpoint.keeper.rank_client import RankKeeperClient
from gpuops.checkpoint.memory.shared_buffer import SharedBuffer
from gpuops.checkpoint.storage.api import CheckpointStore
from gpuops.checkpoint.types import (
    STEP_MAX,
    CheckpointError,
    CorruptError,
    RestorePoint,
    Shard,
    StateId,
    Tier,
)
from gpuops.convert.values import ValueDecoder, dumps
from gpuops.worker.ranks import (
    RankContext,
    all_reduce_min,
    check_same_source,
    check_same_state,
    has_process_group,
)
from gpuops.worker.state.adapter import FinishLoad, StateAdapter
from gpuops.worker.state.objects import reseed, write_rng
from gpuops.worker.state.parallel_copy import copy_threads
from gpuops.worker.state.saved_state import SavedState

AGREE_ATTEMPTS = 64
_SORT_KEY_MAX = 2**63 - 1
_LARGE_BYTES = 64 * 2**20


@dataclass(frozen=True, slots=True)
class StateToLoad:
    """A state to load. ``why``: why newer ones were skipped."""

    state: StateId
    world: int
    tier: Tier
    why: tuple[str, ...] = ()


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
            CheckpointError: That cannot be determined.
        """
        ...

    def open(self, shard: Shard) -> memoryview:
        """Return the verified image of one of its shards, until `close`."""
        ...

    def report_loaded(self, seconds: float, nbytes: int) -> None:
        """Record that this rank has loaded it."""
        ...

    def close(self) -> None:
        """Release the opened images."""
        ...


class KeeperStateSource:
    """The state that the keeper of this node offers, from memory, a peer or the directory.

    *reconnect* returns the replacement of a keeper that is gone, which is asked once more: a keeper
    that dies here may not have answered any rank. None: the ranks cannot compare their answers.
    """

    kind = SourceKind.KEEPER

    def __init__(
        self,
        keeper: RankKeeperClient,
        deadline_s: float,
        reconnect: Callable[[], RankKeeperClient] | None = None,
    ) -> None:
        self._keeper = keeper
        self._deadline_s = deadline_s
        self._reconnect = reconnect
        self._restore_point: RestorePoint | None = None
        self._opened: list[SharedBuffer | _MappedFile] = []

    def find(self) -> StateToLoad | None:
        try:
            restore_point = self._keeper.restore_point(self._deadline_s)
        except KeeperGoneError:
            if self._reconnect is None:
                raise
            self._keeper = self._reconnect()
            restore_point = self._keeper.restore_point(self._deadline_s)
        self._restore_point = restore_point
        if restore_point is None:
            return None
        return StateToLoad(
            restore_point.state, restore_point.world, restore_point.tier, restore_point.why
        )

    def open(self, shard: Shard) -> memoryview:
        assert self._restore_point is not None
        source = self._keeper.open_shard(self._restore_point, shard)
        opened = _MappedFile(source) if isinstance(source, Path) else source
        self._opened.append(opened)
        return opened.view

    def report_loaded(self, seconds: float, nbytes: int) -> None:
        assert self._restore_point is not None
        self._keeper.report_restored(self._restore_point, seconds, nbytes)

    def close(self) -> None:
        _close_all(self._opened)


class DirectoryStateSource:
    """The newest state of a directory or URL that verifies, without any keeper.

    Each rank reads and verifies its own shard; where one is corrupt, all ranks try the state
    before.
    """

    kind = SourceKind.DIRECTORY

    def __init__(self, store: CheckpointStore, ranks: RankContext) -> None:
        self._store = store
        self._ranks = ranks
        self._selected: SelectedState | None = None
        self._reasons: list[str] = []
        self._opened: list[SharedBuffer | _MappedFile] = []

    def find(self) -> StateToLoad | None:
        states, store_error = self._list_states()
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
                selected.state, selected.world, Tier.PERSISTENT, tuple(self._reasons)
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

    def open(self, shard: Shard) -> memoryview:
        selected = self._selected
        assert selected is not None
        source = selected.sources.get(shard)
        if source is None:
            found = find_restorable(
                {}, self._store, StateSearchCriteria(only=selected.state, shards=frozenset({shard}))
            ).selected
            if found is None:
                raise CheckpointError(
                    f"the shard of rank {shard.rank} of {selected.state} in {self._store.address} "
                    "cannot be read, and the state is incomplete without it"
                )
            source = found.sources[shard]
        opened = _MappedFile(source) if isinstance(source, Path) else source
        self._opened.append(opened)
        return opened.view

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
                result = find_restorable(
                    {}, self._store, StateSearchCriteria(only=state, shards=own_shard)
                )
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


def _close_all(opened: list[SharedBuffer | _MappedFile]) -> None:
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


_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RestoreSummary:
    """What was loaded. ``world``: of how many ranks it was; ``seconds``: since it was found."""

    step: int
    epoch: int
    world: int
    tier: str
    nbytes: int
    seconds: float
    why: tuple[str, ...]


def restore_adapters(
    adapters: Sequence[StateAdapter],
    source: StateSource | None,
    ranks: RankContext,
    *,
    allow_pickle: bool,
) -> RestoreSummary | None:
    """Load the state of *source* into *adapters*; None where it has none.

    Raises:
        CheckpointError: It cannot be loaded, or the ranks do not agree on what to load.
    """
    started_s = time.monotonic()
    try:
        if has_process_group(ranks):
            kind = source.kind if source is not None else SourceKind.NOTHING
            check_same_source(kind, SOURCE_KIND_NAMES, ranks)
        found = source.find() if source is not None else None
        if has_process_group(ranks):
            check_same_state(
                (found.state, found.world) if found else None, "by keeper or directory"
            )
        if found is None or source is None:
            _log.info("no checkpoint: training starts from scratch")
            return None
        for why in found.why if ranks.rank == 0 else ():  # equal on all ranks
            _log.warning("checkpoint: %s", why)
        nbytes = _load(adapters, source, found, ranks, allow_pickle=allow_pickle)
        seconds = time.monotonic() - started_s
        source.report_loaded(seconds, nbytes)
    finally:
        if source is not None:
            source.close()
    state = found.state
    _log.info("%s restored from %s in %.2f s", state, found.tier, seconds)
    return RestoreSummary(
        state.step, state.epoch, found.world, str(found.tier), nbytes, seconds, found.why
    )


def _load(
    adapters: Sequence[StateAdapter],
    source: StateSource,
    found: StateToLoad,
    ranks: RankContext,
    *,
    allow_pickle: bool,
) -> int:
    saved = SavedState(
        source.open,
        step=found.state.step,
        world=found.world,
        rank=ranks.rank,
        own_world=ranks.world,
    )
    finishes = [_plan_load(part, saved) for part in adapters]
    ignored = sorted(saved.part_keys() - {part.key for part in adapters})
    if ignored and ranks.rank == 0:
        _log.warning(
            "the checkpoint also has %s, which was not given and is not loaded", ", ".join(ignored)
        )
    nbytes = saved.load(copy_threads(ranks.local_world))
    for part, finish in zip(adapters, finishes, strict=True):
        _finish_load(part, finish)
    if saved.is_own:
        write_rng(_rng(saved, allow_pickle=allow_pickle))
    else:
        _warn_resharded(adapters, saved, found, ranks)
        reseed(found.state.step, ranks.rank, ranks.world, dumps(saved.metadata.get("rng")))
    return nbytes


def _plan_load(adapter: StateAdapter, saved: SavedState) -> FinishLoad:
    try:
        return adapter.plan_load(saved)
    except CheckpointError:
        raise
    except Exception as exc:  # boundary: a state of another shape, or the user's own state_dict
        raise CheckpointError(
            f"{adapter.key} cannot be restored from its saved state: {type(exc).__name__}: {exc}"
        ) from exc


def _finish_load(adapter: StateAdapter, finish: FinishLoad) -> None:
    try:
        finish()
    except Exception as exc:  # boundary: the user's own load_state_dict
        raise CheckpointError(
            f"{adapter.key} does not accept its saved state: {type(exc).__name__}: {exc}"
        ) from exc


def _rng(saved: SavedState, *, allow_pickle: bool) -> dict[str, Any]:
    decoder = ValueDecoder(_reject_tensor, allow_pickle=allow_pickle)
    states = decoder.decode(saved.metadata.get("rng"), "rng")
    if not isinstance(states, dict):
        raise CorruptError("the random states of the checkpoint are not an object")
    return states


def _reject_tensor(_reference: object, path: str) -> Any:  # noqa: ANN401 it never returns
    raise CorruptError(f"{path[:200]} is a tensor, which a random state has not")


def _warn_resharded(
    adapters: Sequence[StateAdapter], saved: SavedState, found: StateToLoad, ranks: RankContext
) -> None:
    if ranks.rank != 0:
        return
    differing_keys = [
        part.key
        for part in adapters
        if part.key.partition(".")[0] in {"dataloader", "scheduler", "scaler", "extra"}
        and len({dumps(fragment) for fragment in saved.fragments(part.key)}) > 1
    ]
    _log.warning(
        "%s was saved by %d ranks and is loaded by %d: sharded tensors are resharded; what "
        "each rank had for itself (buffers, positions in data) is that of the lowest rank%s; the "
        "random generators are seeded anew, from step and rank",
        found.state,
        found.world,
        ranks.world,
        f", and differed between ranks in {', '.join(differing_keys)}" if differing_keys else "",
    )
