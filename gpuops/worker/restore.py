"""Load a saved state into the parts of a job: all of them, or none with a reason."""

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from gpuops.checkpoint.types import (
    CheckpointError,
    CorruptError,
    StructureError,
)
from gpuops.convert.values import ValueDecoder, dumps
from gpuops.worker.ranks import (
    RankContext,
    all_reduce_min,
    check_same_source,
    check_same_state,
    has_process_group,
)
from gpuops.worker.restore_sources import (
    AGREE_ATTEMPTS,
    SOURCE_KIND_NAMES,
    SourceKind,
    StateSource,
    StateToLoad,
)
from gpuops.worker.state.adapter import FinishLoad, StateAdapter
from gpuops.worker.state.objects import reseed, write_rng
from gpuops.worker.state.parallel_copy import copy_threads
from gpuops.worker.state.saved_state import SavedState

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
    directory: str | None = None,
) -> RestoreSummary | None:
    """Load the state of *source* into *adapters*; None where it has none.

    *directory*: where the states persist, for the message of a `StructureError`.

    Raises:
        CheckpointError: It cannot be loaded, or the ranks do not agree on what to load.
    """
    started_s = time.monotonic()
    try:
        if has_process_group(ranks):
            kind = source.kind if source is not None else SourceKind.NOTHING
            check_same_source(kind, SOURCE_KIND_NAMES, ranks)
        loaded = _load_newest(adapters, source, ranks, directory) if source is not None else None
        if loaded is None and has_process_group(ranks):
            check_same_state(None, "by keeper or directory")
        if loaded is None or source is None:
            _log.info("no checkpoint: training starts from scratch")
            return None
        found = loaded.found
        for why in found.why if ranks.rank == 0 else ():  # equal on all ranks
            _log.warning("checkpoint: %s", why)
        _finish(adapters, loaded, ranks, allow_pickle=allow_pickle)
        seconds = time.monotonic() - started_s
        source.report_loaded(seconds, loaded.nbytes)
    finally:
        if source is not None:
            source.close()
    state, tier = found.state, str(found.tier)
    _log.info("%s restored from %s in %.2f s", state, tier, seconds)
    return RestoreSummary(
        state.step, state.epoch, found.world, tier, loaded.nbytes, seconds, found.why
    )


@dataclass(frozen=True, slots=True)
class _LoadedState:
    """A state of which all tensors were filled, and how each part completes its load."""

    found: StateToLoad
    saved: SavedState
    finishes: tuple[FinishLoad, ...]
    nbytes: int


class _Failure(IntEnum):
    """What a failed load of any rank means for all, the worst last."""

    NONE = 0
    UNVERIFIED = 1  # what memory has is damaged: look for the state elsewhere
    DAMAGED = 2  # look for an older state
    FINAL = 3


def _load_newest(
    adapters: Sequence[StateAdapter],
    source: StateSource,
    ranks: RankContext,
    directory: str | None,
) -> _LoadedState | None:
    """Load the newest state of which every rank has what it needs; None where there is none."""
    rejected: StateToLoad | None = None
    for _ in range(AGREE_ATTEMPTS):
        found, damage = _find_together(source, ranks)
        if damage is not None:
            source.reject(str(damage), is_given_up=True)
            continue
        if found is None:
            if rejected is not None:
                raise CorruptError(f"{rejected.state} is damaged, and there is no older state")
            return None
        if has_process_group(ranks):
            check_same_state((found.state, found.world), "by keeper or directory")
        elif rejected is not None and ranks.world > 1 and found.state != rejected.state:
            raise CorruptError(f"{rejected.state} is damaged; other ranks may have loaded it")
        loaded, failure, error = _load_together(adapters, source, found, ranks)
        if failure is _Failure.NONE:
            return loaded
        if failure is _Failure.FINAL:
            raise _final(error, found, directory)
        if failure is _Failure.DAMAGED or not found.is_verified:
            source.reject(str(error), is_given_up=failure is _Failure.DAMAGED)
        rejected = found
    raise CheckpointError(f"the newest {AGREE_ATTEMPTS} states are damaged")


def _find_together(
    source: StateSource, ranks: RankContext
) -> tuple[StateToLoad | None, CorruptError | None]:
    """Return the state to load, or how it is damaged, on this node or another; the same on all.

    Raises:
        CheckpointError: A rank cannot determine it. All ranks raise.
    """
    found, error, failure = None, None, _Failure.NONE
    try:
        found = source.find()
    except CheckpointError as exc:
        error = exc
        failure = _Failure.DAMAGED if isinstance(exc, CorruptError) else _Failure.FINAL
    if has_process_group(ranks):
        failure = _Failure(-all_reduce_min([-failure])[0])
    elif error is not None:
        raise error
    if failure is _Failure.FINAL:
        raise error or CheckpointError("another rank found no state to load; its log says why")
    if failure is _Failure.DAMAGED:
        how = error or "another node finds its part of it damaged"
        return None, CorruptError(str(how))
    return found, None


def _final(error: CheckpointError, found: StateToLoad, directory: str | None) -> CheckpointError:
    if not isinstance(error, StructureError):
        return error
    # The remedy comes first: a summary may cut the end off.
    return StructureError(
        f"{_describe(found, directory)} does not fit this script; restore it into what was saved, "
        f"or set another --ckpt-dir: {error}"
    )


def _describe(found: StateToLoad, directory: str | None) -> str:
    """Return what the state is called, and which run saved it in which directory, if it did."""
    if directory is None or found.stored_by is None:
        return str(found.state)
    saved_by = f", saved by run {found.stored_by}" if found.stored_by else ""
    return f"{found.state} in {directory}{saved_by},"


def _load_together(
    adapters: Sequence[StateAdapter], source: StateSource, found: StateToLoad, ranks: RankContext
) -> tuple[_LoadedState | None, _Failure, CheckpointError]:
    """Load *found*; return what this rank has loaded, the worst failure, and an error to raise."""
    loaded, failure = None, _Failure.NONE
    error = CheckpointError(f"another rank cannot load {found.state}")
    try:
        loaded = _load(adapters, source, found, ranks)
    except CheckpointError as exc:
        error, failure = exc, _failure(exc, found, ranks)
    if has_process_group(ranks):
        failure = _Failure(-all_reduce_min([-failure])[0])
    return loaded, failure, error


def _load(
    adapters: Sequence[StateAdapter], source: StateSource, found: StateToLoad, ranks: RankContext
) -> _LoadedState:
    saved = SavedState(
        source.open,
        step=found.state.step,
        world=found.world,
        rank=ranks.rank,
        own_world=ranks.world,
    )
    finishes = tuple(_plan_load(part, saved) for part in adapters)
    saved.fetch()
    return _LoadedState(found, saved, finishes, saved.load(copy_threads(ranks.local_world)))


def _failure(error: CheckpointError, found: StateToLoad, ranks: RankContext) -> _Failure:
    if not isinstance(error, CorruptError):
        return _Failure.FINAL
    if not found.is_verified:
        return _Failure.UNVERIFIED
    # What a rank needs of a state of its own number of ranks was verified when it was found.
    return _Failure.FINAL if found.world == ranks.world else _Failure.DAMAGED


def _finish(
    adapters: Sequence[StateAdapter],
    loaded: _LoadedState,
    ranks: RankContext,
    *,
    allow_pickle: bool,
) -> None:
    found, saved = loaded.found, loaded.saved
    ignored = sorted(saved.part_keys() - {part.key for part in adapters})
    if ignored and ranks.rank == 0:
        _log.warning(
            "the checkpoint also has %s, which was not given and is not loaded", ", ".join(ignored)
        )
    for part, finish in zip(adapters, loaded.finishes, strict=True):
        _finish_load(part, finish)
    if saved.is_own:
        write_rng(_rng(saved, allow_pickle=allow_pickle))
    else:
        _warn_resharded(adapters, saved, found, ranks)
        reseed(found.state.step, ranks.rank, ranks.world, dumps(saved.metadata.get("rng")))


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
