"""What an agent shows of the states that its keeper holds; pure."""

from gpuops.agent.status.state import CheckpointState
from gpuops.checkpoint.keeper.messages import KeeperStatus
from gpuops.checkpoint.types import StateId


def held_by_it(
    before: CheckpointState | None,
    status: KeeperStatus,
    persisted: StateId | None,
    now_ns: int,
    *,
    is_used: bool,
) -> CheckpointState:
    """Return what is held at *now_ns*; *persisted* is the newest that lies in the directory."""
    newest = status.progress.newest
    known = newest or persisted
    step, epoch = (None, None) if known is None else (known.step, known.epoch)
    is_same = before is not None and (before.step, before.epoch) == (step, epoch)
    now = None if known is None else now_ns
    return CheckpointState(
        step=step,
        epoch=epoch,
        since_ns=before.since_ns if before and is_same else now,
        tier=None if known is None else ("memory" if newest is not None else "persistent"),
        persisted_step=None if persisted is None else persisted.step,
        committed=status.n_committed,
        skipped=status.skipped,
        copies=1 + status.n_holders - status.n_holders_gone,
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
