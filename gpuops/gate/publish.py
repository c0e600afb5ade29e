"""Tell slurmctld of a drain that is wanted, and go on until it heard or it is nobody's wish.

slurmd drains a node whose prolog fails for the reason "Prolog error", which says nothing. This
runs in its own session beside the hook, as slurmd kills the hook's process group, and outlasts a
slurmctld that is down for some minutes. What it leaves undone, the next health check does.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from gpuops.errors import ProbeError, SlurmError
from gpuops.gate.drain_record import DrainRecord, Stage, read_drain, write_drain
from gpuops.host.clock import Clock
from gpuops.incident.gate import Step, next_step
from gpuops.slurm.nodes import Scontrol

# slurmd reports a failed hook some milliseconds after us: its reason may follow ours.
SETTLE_S = 2.0
_PAUSE_MIN_S = 0.25
_PAUSE_MAX_S = 15.0
PUBLISH_S = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How long to go on, and how to wait. ``settle_s``: to look again after slurmctld was told."""

    limit_s: float = PUBLISH_S
    settle_s: float = SETTLE_S
    pause: Callable[[float], None]


@dataclass(frozen=True, slots=True)
class Published:
    """How it ended. ``step`` None: the time was over, or another drain took this one's place."""

    step: Step | None
    trouble: str | None = None


def publish(
    drain: DrainRecord,
    scontrol: Scontrol,
    state: Callable[[], DrainRecord | None],
    patience: Patience,
    clock: Clock,
) -> Published:
    """Return how it ended to drain ``drain.node`` for its reason.

    *state* returns the drain that this node records now: where it is another, this one is over.
    """
    end_s = clock.mono_ns() / 1e9 + patience.limit_s
    pause_s, was_set = _PAUSE_MIN_S, drain.stage == Stage.SET
    while True:
        current = state()
        if current is None or current.id != drain.id:
            return Published(None, "another drain, or none, is recorded now")
        step, trouble = _one(drain, scontrol, was_set=was_set)
        if step in {Step.DONE, Step.YIELD, Step.LIFTED}:
            return Published(step)
        was_set = was_set or step is Step.SET
        wait_s = patience.settle_s if step is Step.SET else pause_s
        pause_s = min(pause_s * 2, _PAUSE_MAX_S)
        if clock.mono_ns() / 1e9 + wait_s > end_s:
            return Published(
                None, trouble or f"slurmctld was not sure of it in {patience.limit_s:g} s"
            )
        patience.pause(wait_s)


def _one(drain: DrainRecord, scontrol: Scontrol, *, was_set: bool) -> tuple[Step, str | None]:
    try:
        view = scontrol.node(drain.node)
        step = next_step(view, drain.reason, replaces=drain.replaces, was_set=was_set)
        if step is Step.SET:
            scontrol.drain(drain.node, drain.reason)
    except SlurmError as exc:
        return Step.WAIT, str(exc)
    return step, None


def conclude(drain: DrainRecord, ended: Published, state_dir: Path) -> DrainRecord | None:
    """Keep what came of *drain*; return it as it stands now, None where it is no drain of ours.

    Raises:
        ProbeError: The record cannot be written.
    """
    if ended.step is None:
        return drain
    kept = replace(drain, stage=Stage.SET.value) if ended.step is Step.DONE else None
    write_drain(state_dir, kept)
    return kept


def recorded(state_dir: Path, *, uid: int) -> Callable[[], DrainRecord | None]:
    """Return a reader of the drain record; one that cannot be read is none."""

    def read() -> DrainRecord | None:
        try:
            return read_drain(state_dir, uid=uid)
        except ProbeError:
            return None

    return read
