"""What an agent shows of the states that its keeper holds; pure."""

from collections.abc import Mapping
from typing import Any

from gpuops.agent.checkpoint.keeper_events import whole
from gpuops.agent.status.state import CheckpointState
from gpuops.checkpoint.types import StateId


def held_by_it(
    before: CheckpointState | None,
    stats: Mapping[str, Any],
    newest: StateId | None,
    persisted: StateId | None,
    now_ns: int,
    *,
    is_used: bool,
) -> CheckpointState:
    """Return what is held at *now_ns*, from what the keeper counts; *newest* is in memory."""
    known = newest or persisted
    is_same = before is not None and known == _named(before)
    skipped = stats.get("skipped")
    now = None if known is None else now_ns
    return CheckpointState(
        step=None if known is None else known.step,
        epoch=None if known is None else known.epoch,
        since_ns=before.since_ns if before and is_same else now,
        tier=None if known is None else ("memory" if newest is not None else "persistent"),
        persisted_step=None if persisted is None else persisted.step,
        committed=whole(stats.get("committed")) or 0,
        skipped=_counts(skipped) if isinstance(skipped, Mapping) else {},
        copies=1 + _length(stats.get("holders")) - _length(stats.get("holders_gone")),
        is_used=is_used,
    )


def held_by_none(before: CheckpointState | None) -> CheckpointState | None:
    """Return what is known where the keeper is gone."""
    if before is None:
        return None
    return CheckpointState(
        persisted_step=before.persisted_step,
        committed=before.committed,
        skipped=before.skipped,
        is_alive=False,
    )


def _named(state: CheckpointState) -> StateId | None:
    if state.step is None or state.epoch is None:
        return None
    return StateId(state.epoch, state.step)


def _length(found: object) -> int:
    return len(found) if isinstance(found, list) else 0


def _counts(found: Mapping[Any, Any]) -> dict[str, int]:
    return {str(k)[:40]: n for k, v in list(found.items())[:16] if (n := whole(v)) is not None}
