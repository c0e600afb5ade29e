"""A drain that this node wants or has: recorded in a file, sent to slurmctld.

slurmd drains a node whose prolog fails for the reason "Prolog error", which says nothing. This
runs in its own session next to the hook, as slurmd kills the hook's process group, and retries
while slurmctld is down for some minutes. The next health check does what is left undone.

The record makes a drain ours: a reason in Slurm is only text that anybody can type. A second small
file lists the drains that were taken back; it outlives the drain record, which ends with its drain.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import TypeVar

from gpuops.errors import ConfigError, ProbeError, SlurmError
from gpuops.gate.policy import RESUMES_WINDOW_S, DrainStep, next_drain_step
from gpuops.host.clock import Clock
from gpuops.host.records import from_json, to_json
from gpuops.host.trust import atomic_write, refuse_foreign_file
from gpuops.model import UnknownReason
from gpuops.slurm.scontrol import Scontrol

T = TypeVar("T")

_NAME = "drain.json"
_BYTES_MAX = 65536


class DrainStage(StrEnum):
    """How far it came: wanted here, or known to slurmctld."""

    WANTED = "wanted"
    SET = "set"


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainRecord:
    """One drain. ``hook``: what found the cause; ``why``: it was decided to drain.

    ``replaces``: reasons that its own may take the place of
    (`gpuops.gate.policy.replaceable_reasons`); ``passes``: health checks passed in a row since;
    ``kept``: why it is not taken back though there were enough of them.

    ``node`` is the name that Slurm has for it, ``stage`` a `DrainStage`.
    """

    id: str
    node: str
    hook: str
    reason: str
    check: str
    failure_class: str
    t_us: int
    why: str = ""
    replaces: tuple[str, ...] = ()
    incident: str | None = None
    job_id: str | None = None
    stage: str = DrainStage.WANTED.value
    passes: int = 0
    kept: str | None = None


def read_drain(state_dir: Path, *, uid: int) -> DrainRecord | None:
    """Return the recorded drain, None where there is none.

    Raises:
        ProbeError: The file cannot be read, is not such a record, or others can write it.
    """
    return _read(DrainRecord, state_dir / _NAME, "drain record", uid)


def write_drain(state_dir: Path, record: DrainRecord | None) -> None:
    """Replace the recorded drain by *record*; None: gpuops has no drain any more.

    Raises:
        ProbeError: It cannot be written.
    """
    _write(record, state_dir / _NAME, "drain record")


def _read(form: type[T], path: Path, noun: str, uid: int) -> T | None:
    try:
        with path.open("rb") as file:
            data = file.read(_BYTES_MAX)
        refuse_foreign_file(path, uid=uid)
        return from_json(form, json.loads(data), f"the {noun} {path}")
    except FileNotFoundError:
        return None
    except (OSError, ValueError, ConfigError) as exc:
        raise ProbeError(f"cannot use the {noun} {path}: {exc}", UnknownReason.CRASH) from exc


def _write(record: object | None, path: Path, noun: str) -> None:
    try:
        if record is None:
            path.unlink(missing_ok=True)
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(path, json.dumps(to_json(record)).encode(), 0o600)
    except OSError as exc:
        text = f"cannot write the {noun} {path}: {exc.strerror}"
        raise ProbeError(text, UnknownReason.CRASH) from exc


# slurmd reports a failed hook some milliseconds after us: its reason may follow ours.
SETTLE_S = 2.0
_PAUSE_MIN_S = 0.25
_PAUSE_MAX_S = 15.0
PUBLISH_S = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainRetry:
    """How long to go on, and how to wait. ``settle_s``: wait between a drain and its check."""

    limit_s: float = PUBLISH_S
    settle_s: float = SETTLE_S
    pause: Callable[[float], None]


@dataclass(frozen=True, slots=True)
class DrainPublication:
    """How it ended. ``step`` None: the time was over, or another drain took this one's place."""

    step: DrainStep | None
    trouble: str | None = None


def drain_node(
    drain: DrainRecord,
    scontrol: Scontrol,
    state: Callable[[], DrainRecord | None],
    patience: DrainRetry,
    clock: Clock,
) -> DrainPublication:
    """Return how it ended to drain ``drain.node`` for its reason.

    *state* returns the drain that this node records now: where it is another, this one is over.
    """
    end_s = clock.mono_ns() / 1e9 + patience.limit_s
    pause_s, was_set = _PAUSE_MIN_S, drain.stage == DrainStage.SET
    while True:
        current = state()
        if current is None or current.id != drain.id:
            return DrainPublication(None, "another drain, or none, is recorded now")
        step, trouble = _one(drain, scontrol, was_set=was_set)
        if step in {DrainStep.DONE, DrainStep.YIELD, DrainStep.LIFTED}:
            return DrainPublication(step)
        was_set = was_set or step is DrainStep.SET
        wait_s = patience.settle_s if step is DrainStep.SET else pause_s
        pause_s = min(pause_s * 2, _PAUSE_MAX_S)
        if clock.mono_ns() / 1e9 + wait_s > end_s:
            return DrainPublication(
                None, trouble or f"slurmctld was not sure of it in {patience.limit_s:g} s"
            )
        patience.pause(wait_s)


def _one(drain: DrainRecord, scontrol: Scontrol, *, was_set: bool) -> tuple[DrainStep, str | None]:
    try:
        view = scontrol.node(drain.node)
        step = next_drain_step(view, drain.reason, replaces=drain.replaces, was_set=was_set)
        if step is DrainStep.SET:
            scontrol.drain(drain.node, drain.reason)
    except SlurmError as exc:
        return DrainStep.WAIT, str(exc)
    return step, None


def conclude(drain: DrainRecord, ended: DrainPublication, state_dir: Path) -> DrainRecord | None:
    """Keep what came of *drain*; return it as it stands now, None where it is no drain of ours.

    Raises:
        ProbeError: The record cannot be written.
    """
    if ended.step is None:
        return drain
    kept = replace(drain, stage=DrainStage.SET.value) if ended.step is DrainStep.DONE else None
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


_RESUMES_NAME = "resumes.json"
_KEPT = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedResume:
    """A drain for *check* was taken back at *t_us*."""

    check: str
    t_us: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeHistory:
    """All that are younger than `RESUMES_WINDOW_S`, the oldest first."""

    items: tuple[RecordedResume, ...] = ()

    def of(self, check: str) -> list[int]:
        """Return when drains for *check* were taken back."""
        return [item.t_us for item in self.items if item.check == check]

    def with_one(self, check: str, now_us: int) -> "ResumeHistory":
        """Return these with one more, without those that are too old to count."""
        since_us = now_us - RESUMES_WINDOW_S * 1e6
        items = [item for item in self.items if since_us < item.t_us <= now_us]
        return ResumeHistory(items=(*items, RecordedResume(check=check, t_us=now_us))[-_KEPT:])


def read_resumes(state_dir: Path, *, uid: int) -> ResumeHistory:
    """Return the recorded resumes.

    Raises:
        ProbeError: The file cannot be read, is not such a record, or others can write it.
    """
    found = _read(ResumeHistory, state_dir / _RESUMES_NAME, "record of resumes", uid)
    return found or ResumeHistory()


def write_resumes(state_dir: Path, resumes: ResumeHistory) -> None:
    """Replace the recorded resumes by *resumes*.

    Raises:
        ProbeError: It cannot be written.
    """
    _write(resumes, state_dir / _RESUMES_NAME, "record of resumes")
