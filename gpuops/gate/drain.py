"""A drain that this node wants or has: recorded in a file, sent to slurmctld.

slurmd drains a node whose prolog fails for the reason "Prolog error", which says nothing. This
runs in its own session next to the hook, as slurmd kills the hook's process group, and retries for
some minutes while slurmctld is down. The next health check completes what is left.

Only a recorded drain is ours: a reason in Slurm is text that anybody can type. A second small file
lists the resumes; it outlives the drain record, which ends with its drain.
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
from gpuops.model import ReturnCondition, UnknownReason
from gpuops.slurm.scontrol import Scontrol

T = TypeVar("T")

_NAME = "drain.json"
_BYTES_MAX = 65536


class DrainStage(StrEnum):
    """How far a drain is: wanted here, or known to slurmctld."""

    WANTED = "wanted"
    SET = "set"


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainRecord:
    """One drain. ``hook``: what found the cause; ``why``: the reason for the decision.

    ``replaces``: reasons that its own may replace (`gpuops.gate.policy.replaceable_reasons`);
    ``passes``: health checks passed in a row since; ``kept``: why the node is not resumed although
    there were enough of them. ``node`` is Slurm's name of it, ``stage`` a `DrainStage`.
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
    """Return the recorded drain, None if there is none.

    Raises:
        ProbeError: The file cannot be read, is not such a record, or is writable by others.
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
    """How long to retry, and how to wait. ``settle_s``: wait between a drain and its check."""

    limit_s: float = PUBLISH_S
    settle_s: float = SETTLE_S
    pause: Callable[[float], None]


@dataclass(frozen=True, slots=True)
class DrainPublication:
    """The result. ``step`` None: it timed out, or another drain replaced this one."""

    step: DrainStep | None
    error: str | None = None


def drain_node(
    drain: DrainRecord,
    scontrol: Scontrol,
    read_record: Callable[[], DrainRecord | None],
    retry: DrainRetry,
    clock: Clock,
) -> DrainPublication:
    """Drain ``drain.node`` for its reason, with retries.

    *read_record* returns the drain that this node has on record: if it is another, this one ends.
    """
    end_s = clock.mono_ns() / 1e9 + retry.limit_s
    pause_s, was_set = _PAUSE_MIN_S, drain.stage == DrainStage.SET
    while True:
        current = read_record()
        if current is None or current.id != drain.id:
            return DrainPublication(None, "another drain, or none, is recorded now")
        step, error = _next_step(drain, scontrol, was_set=was_set)
        if step in {DrainStep.DONE, DrainStep.YIELD, DrainStep.LIFTED}:
            return DrainPublication(step)
        was_set = was_set or step is DrainStep.SET
        wait_s = retry.settle_s if step is DrainStep.SET else pause_s
        pause_s = min(pause_s * 2, _PAUSE_MAX_S)
        if clock.mono_ns() / 1e9 + wait_s > end_s:
            return DrainPublication(
                None, error or f"slurmctld did not confirm it in {retry.limit_s:g} s"
            )
        retry.pause(wait_s)


def _next_step(
    drain: DrainRecord, scontrol: Scontrol, *, was_set: bool
) -> tuple[DrainStep, str | None]:
    try:
        view = scontrol.node(drain.node)
        step = next_drain_step(view, drain.reason, replaces=drain.replaces, was_set=was_set)
        if step is DrainStep.SET:
            scontrol.drain(drain.node, drain.reason)
    except SlurmError as exc:
        return DrainStep.WAIT, str(exc)
    return step, None


def save_outcome(
    drain: DrainRecord, result: DrainPublication, state_dir: Path
) -> DrainRecord | None:
    """Save the outcome of *drain*; return the drain as it is now, None if it is not ours.

    Raises:
        ProbeError: The record cannot be written.
    """
    if result.step is None:
        return drain
    saved = replace(drain, stage=DrainStage.SET.value) if result.step is DrainStep.DONE else None
    write_drain(state_dir, saved)
    return saved


_DIAGNOSTIC_NAME = "diagnostic.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedDiagnostic:
    """The node's last diagnostics: when one was started for its return, and when one passed.

    ``burnin_us``: when a burn-in began that passed.
    """

    asked_us: int | None = None
    passed_us: int | None = None
    burnin_us: int | None = None

    def tested_us(self, condition: ReturnCondition) -> int | None:
        """Return when what *condition* asks for last passed."""
        return self.burnin_us if condition is ReturnCondition.BURNIN else self.passed_us


def read_diagnostic(state_dir: Path, *, uid: int) -> RecordedDiagnostic:
    """Return the recorded diagnostics.

    Raises:
        ProbeError: The file cannot be read, is not such a record, or is writable by others.
    """
    found = _read(RecordedDiagnostic, state_dir / _DIAGNOSTIC_NAME, "record of diagnostics", uid)
    return found or RecordedDiagnostic()


def write_diagnostic(state_dir: Path, diagnostic: RecordedDiagnostic) -> None:
    """Replace the recorded diagnostics by *diagnostic*.

    Raises:
        ProbeError: It cannot be written.
    """
    _write(diagnostic, state_dir / _DIAGNOSTIC_NAME, "record of diagnostics")


def update_diagnostic(state_dir: Path, uid: int, **times_us: int) -> None:
    """Replace *times_us* in the recorded diagnostics.

    Raises:
        ProbeError: The record cannot be read or written.
    """
    write_diagnostic(state_dir, replace(read_diagnostic(state_dir, uid=uid), **times_us))


_RESUMES_NAME = "resumes.json"
_RESUMES_MAX = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedResume:
    """A node that was drained for ``check`` was resumed at ``t_us``."""

    check: str
    t_us: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeHistory:
    """The resumes that are younger than `RESUMES_WINDOW_S`, the oldest first."""

    items: tuple[RecordedResume, ...] = ()

    def of(self, check: str) -> list[int]:
        """Return when the node was resumed after drains for *check*."""
        return [item.t_us for item in self.items if item.check == check]

    def with_one(self, check: str, now_us: int) -> "ResumeHistory":
        """Return these and one more, without those that are too old to count."""
        since_us = now_us - RESUMES_WINDOW_S * 1e6
        items = [item for item in self.items if since_us < item.t_us <= now_us]
        items.append(RecordedResume(check=check, t_us=now_us))
        return ResumeHistory(items=tuple(items[-_RESUMES_MAX:]))


def read_resumes(state_dir: Path, *, uid: int) -> ResumeHistory:
    """Return the recorded resumes.

    Raises:
        ProbeError: The file cannot be read, is not such a record, or is writable by others.
    """
    found = _read(ResumeHistory, state_dir / _RESUMES_NAME, "record of resumes", uid)
    return found or ResumeHistory()


def write_resumes(state_dir: Path, resumes: ResumeHistory) -> None:
    """Replace the recorded resumes by *resumes*.

    Raises:
        ProbeError: It cannot be written.
    """
    _write(resumes, state_dir / _RESUMES_NAME, "record of resumes")
