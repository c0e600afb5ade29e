"""The transitions of the control record: pure functions, by which alone its phase changes.

Each gets the record as it is *now* and as the leader had *seen* it when it decided, and returns the
changed record; None where the generation or the phase has changed since: another agent was faster.
"""

from dataclasses import replace

from gpuops.control.record import ControlRecord, RunPhase
from gpuops.errors import EXIT_FAIL
from gpuops.incident.budget import history_after
from gpuops.incident.decision import HISTORY_MAX, ReportKind, RestartDecision, RunAction
from gpuops.incident.repeats import checkpoint_to_exclude


def _is_overtaken(now: ControlRecord, seen: ControlRecord, phase: RunPhase) -> bool:
    return (now.generation, now.phase) != (seen.generation, phase)


def collect(
    now: ControlRecord, seen: ControlRecord, *, trigger: ReportKind, reason: str, by: str
) -> ControlRecord | None:
    """RUN to COLLECT: something happened; all nodes stop their workers and report."""
    if _is_overtaken(now, seen, RunPhase.RUN):
        return None
    return replace(now, phase=RunPhase.COLLECT, trigger=trigger, reason=reason, decided_by=by)


def stop(
    now: ControlRecord, seen: ControlRecord, *, exit_code: int, reason: str, by: str
) -> ControlRecord | None:
    """Any phase to STOP: the run ends with *exit_code*."""
    if _is_overtaken(now, seen, seen.phase):
        return None
    return replace(now, phase=RunPhase.STOP, exit_code=exit_code, reason=reason, decided_by=by)


def decide(
    now: ControlRecord, seen: ControlRecord, decision: RestartDecision, *, by: str, now_s: float
) -> ControlRecord | None:
    """COLLECT to RENDEZVOUS of the next generation, or to STOP: as *decision* says.

    A decision while a generation is formed leads to STOP.
    """
    if _is_overtaken(now, seen, seen.phase):
        return None
    changed = replace(
        now,
        decision=decision,
        reason=decision.reason,
        decided_by=by,
        excluded={**now.excluded, **decision.exclude},
        excluded_checkpoint=checkpoint_to_exclude(now.excluded_checkpoint, decision),
        history=history_after(decision, now.history),
    )
    if decision.action is RunAction.RESTART:
        return replace(
            changed,
            phase=RunPhase.RENDEZVOUS,
            generation=now.generation + 1,
            not_before_s=now_s + decision.backoff_s,
            trigger=None,
        )
    code = EXIT_FAIL if decision.exit_code is None else decision.exit_code
    return replace(changed, phase=RunPhase.STOP, exit_code=code)


def run(
    now: ControlRecord, seen: ControlRecord, *, by: str, reason: str | None = None
) -> ControlRecord | None:
    """RENDEZVOUS to RUN: the roster of the generation is written."""
    if _is_overtaken(now, seen, RunPhase.RENDEZVOUS):
        return None
    return replace(now, phase=RunPhase.RUN, decided_by=by, reason=reason or now.reason)


def form_again(
    now: ControlRecord, seen: ControlRecord, *, reason: str, by: str
) -> ControlRecord | None:
    """RENDEZVOUS to that of the next generation: nobody follows the roster of this one."""
    if _is_overtaken(now, seen, RunPhase.RENDEZVOUS):
        return None
    return replace(now, generation=now.generation + 1, reason=reason, decided_by=by)


def grow(
    now: ControlRecord, seen: ControlRecord, *, reason: str, by: str, now_s: float
) -> ControlRecord | None:
    """RUN to RENDEZVOUS of the next generation, with more nodes."""
    if _is_overtaken(now, seen, RunPhase.RUN):
        return None
    return replace(
        now,
        phase=RunPhase.RENDEZVOUS,
        generation=now.generation + 1,
        reason=reason,
        decided_by=by,
        grown_at_s=(*now.grown_at_s, now_s)[-HISTORY_MAX:],
        decision=None,
        not_before_s=0.0,
    )


def readmit(now: ControlRecord, node: str) -> ControlRecord | None:
    """Any phase but STOP: *node*, which was excluded, may join again; None where it may not.

    Its agent joins the next generation, after a check; a run that may grow begins one for it.
    """
    if node not in now.excluded or now.phase is RunPhase.STOP:
        return None
    return replace(
        now,
        excluded={name: why for name, why in now.excluded.items() if name != node},
        suspected={name: why for name, why in now.suspected.items() if name != node},
    )
