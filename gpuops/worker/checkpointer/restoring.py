"""Loads a saved state into the parts of a job: all of them, or none with a reason."""

import logging
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from gpuops.checkpoint.states import CheckpointError, CorruptError
from gpuops.worker.checkpointer.filling import n_threads_of
from gpuops.worker.checkpointer.part import Finish, Part
from gpuops.worker.checkpointer.place import Place, check_agreed, check_alike, is_group
from gpuops.worker.checkpointer.rng import reseed, write_rng
from gpuops.worker.checkpointer.saved_state import SavedState
from gpuops.worker.checkpointer.sources import KIND_NAMES, Found, Kind, StateSource
from gpuops.worker.checkpointer.values import Decoder, dumps

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Restored:
    """What was loaded. ``world``: of how many ranks it was; ``seconds`` from the offer on."""

    step: int
    epoch: int
    world: int
    tier: str
    nbytes: int
    seconds: float
    why: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """Return it for ``stats``."""
        return asdict(self)


def restore_parts(
    parts: Sequence[Part], source: StateSource | None, place: Place, *, allow_pickle: bool
) -> Restored | None:
    """Load what *source* has into *parts*; None where it has nothing.

    Raises:
        CheckpointError: It cannot be loaded, or the ranks do not agree on what to load.
    """
    begun_s = time.monotonic()
    try:
        if is_group(place):
            kind = source.kind if source is not None else Kind.NOTHING
            check_alike(kind, KIND_NAMES, place)
        found = source.find() if source is not None else None
        if is_group(place):
            check_agreed((found.state, found.world) if found else None, "by keeper or directory")
        if found is None or source is None:
            _log.info("no checkpoint: training begins anew")
            return None
        for why in found.why if place.rank == 0 else ():  # all ranks have the same
            _log.warning("checkpoint: %s", why)
        nbytes = _load(parts, source, found, place, allow_pickle=allow_pickle)
        seconds = time.monotonic() - begun_s
        source.loaded(seconds, nbytes)
    finally:
        if source is not None:
            source.close()
    state = found.state
    _log.info("%s restored from %s in %.2f s", state, found.tier, seconds)
    return Restored(
        state.step, state.epoch, found.world, str(found.tier), nbytes, seconds, found.why
    )


def _load(
    parts: Sequence[Part], source: StateSource, found: Found, place: Place, *, allow_pickle: bool
) -> int:
    saved = SavedState(
        source.open,
        step=found.state.step,
        world=found.world,
        rank=place.rank,
        own_world=place.world,
    )
    finishes = [_aimed(part, saved) for part in parts]
    ignored = sorted(saved.part_keys() - {part.key for part in parts})
    if ignored and place.rank == 0:
        _log.warning(
            "the checkpoint also has %s, which was not given and is not loaded", ", ".join(ignored)
        )
    nbytes = saved.load(n_threads_of(place.local_world))
    for part, finish in zip(parts, finishes, strict=True):
        _finished(part, finish)
    if saved.is_own:
        write_rng(_rng(saved, allow_pickle=allow_pickle))
    else:
        _say_what_changed(parts, saved, found, place)
        reseed(found.state.step, place.rank, place.world, dumps(saved.head.get("rng")))
    return nbytes


def _aimed(part: Part, saved: SavedState) -> Finish:
    try:
        return part.aim(saved)
    except CheckpointError:
        raise
    except Exception as exc:  # boundary: a state of another shape, or the user's own state_dict
        raise CheckpointError(
            f"{part.key} cannot be restored from what was saved of it: {type(exc).__name__}: {exc}"
        ) from exc


def _finished(part: Part, finish: Finish) -> None:
    try:
        finish()
    except Exception as exc:  # boundary: the user's own load_state_dict
        raise CheckpointError(
            f"{part.key} does not take the state that was saved: {type(exc).__name__}: {exc}"
        ) from exc


def _rng(saved: SavedState, *, allow_pickle: bool) -> dict[str, Any]:
    decoder = Decoder(_no_tensor, allow_pickle=allow_pickle)
    states = decoder.decode(saved.head.get("rng"), "rng")
    if not isinstance(states, dict):
        raise CorruptError("the random states of the checkpoint are no mapping")
    return states


def _no_tensor(_what: object, path: str) -> Any:  # noqa: ANN401 it never returns
    raise CorruptError(f"{path[:200]} is a tensor, which no random state is")


def _say_what_changed(parts: Sequence[Part], saved: SavedState, found: Found, place: Place) -> None:
    if place.rank != 0:
        return
    differing = [
        part.key
        for part in parts
        if part.key.partition(".")[0] in {"dataloader", "scheduler", "scaler", "extra"}
        and len({dumps(fragment) for fragment in saved.fragments(part.key)}) > 1
    ]
    _log.warning(
        "%s was saved by %d ranks and is loaded by %d: sharded tensors are put together anew; what "
        "each rank had for itself (buffers, positions in data) is that of the lowest rank%s; the "
        "random generators are seeded anew, from step and rank",
        found.state,
        found.world,
        place.world,
        f", and differed between ranks in {', '.join(differing)}" if differing else "",
    )
