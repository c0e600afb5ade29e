"""Incidents of runs that a signal ended: recorded, but not failures.

If a worker had failed on its own before, the run ended by that failure, and the signal only
interrupted its handling. Processes that got the same signal (scancel and a terminal signal every
process) did not fail on their own, and neither did those that failed because of it.
"""

from collections.abc import Sequence
from dataclasses import replace

from gpuops.errors import EXIT_REQUEUE
from gpuops.incident.cause import JudgedExits, judge_exits
from gpuops.incident.classify import ending_signal
from gpuops.incident.evidence import rank_entity, scrub_and_clip, step_phrase
from gpuops.incident.incidents.worker_failure import incident_from_exits
from gpuops.incident.lifecycle import close, incident_id, with_action
from gpuops.model import (
    ActionKind,
    Confidence,
    Entity,
    EntityKind,
    Evidence,
    FailureClass,
    Incident,
    IncidentState,
    Role,
    Side,
    WorkerExit,
)
from gpuops.rules import LogRule

# Ctrl-C and a closed terminal come from the user; SIGTERM and others from a scheduler.
_BY_HAND = frozenset({"SIGINT", "SIGHUP", "SIGQUIT"})


def incident_from_cancel(  # noqa: PLR0913  all that the agent knows of the end
    signal_name: str,
    exits: Sequence[WorkerExit] = (),
    *,
    run_id: str,
    attempt: int,
    node: str,
    rules: Sequence[LogRule],
    detected_us: int,
    detected_mono_ns: int,
    signal_seen_mono_ns: int | None = None,
    kernel_lines: Sequence[str] = (),
) -> Incident:
    """Return the closed incident of a run whose agent on *node* received *signal_name*.

    There is no culprit and no lost time, unless a worker had failed on its own before the signal:
    then it is the incident of that failure.

    Args:
        signal_name: What the agent received.
        exits: Every worker of the attempt on this node.
        run_id: The run.
        attempt: 0-based.
        node: This node.
        rules: Log rules (worker and kernel).
        detected_us: When the agent closes the run, epoch µs.
        detected_mono_ns: The same moment on this host's monotonic clock.
        signal_seen_mono_ns: When the signal arrived. If unknown, failures before a worker ended
            by the same signal count as before it.
        kernel_lines: The kernel log around the end; empty if it may not be read.
    """
    judged = judge_exits(exits, rules, kernel_lines)
    if _failed_before(signal_name, judged, signal_seen_mono_ns):
        failure = incident_from_exits(
            judged,
            run_id=run_id,
            attempt=attempt,
            node=node,
            detected_us=detected_us,
            detected_mono_ns=detected_mono_ns,
        )
        return close(
            with_action(failure, ActionKind.STOP),
            at_us=detected_us,
            lost_s={},
            resolution=f"cancelled by {signal_name} while ending or restarting the workers",
        )
    return _cancellation_incident(
        signal_name, exits, run_id=run_id, attempt=attempt, node=node, detected_us=detected_us
    )


def incident_from_drain(  # noqa: PLR0913  all that the agent knows of the end
    signal_name: str,
    exits: Sequence[WorkerExit],
    exit_code: int,
    *,
    run_id: str,
    attempt: int,
    node: str,
    rules: Sequence[LogRule],
    detected_us: int,
    detected_mono_ns: int,
) -> Incident:
    """Return the closed incident of a run that was asked to stop and did after its step.

    Arguments as for `incident_from_cancel`; *exit_code* is the run's.
    """
    cancelled = incident_from_cancel(
        signal_name,
        exits,
        run_id=run_id,
        attempt=attempt,
        node=node,
        rules=rules,
        detected_us=detected_us,
        detected_mono_ns=detected_mono_ns,
    )
    if cancelled.culprits:
        return cancelled
    requeues = exit_code == EXIT_REQUEUE
    outcome_text = "and requested a requeue" if requeues else f"with exit code {exit_code}"
    return replace(
        cancelled,
        failure_class=FailureClass.PREEMPTED if requeues else cancelled.failure_class,
        title=f"drained on {signal_name}: {_stop_text(exits)}",
        actions=(ActionKind.REQUEUE,) if requeues else (ActionKind.STOP,),
        resolution=f"drained: the run ended cleanly {outcome_text}",
    )


def _stop_text(exits: Sequence[WorkerExit]) -> str:
    return "the workers stopped after a step" if exits else "no worker ran"


def _failed_before(signal_name: str, judged: JudgedExits, signal_seen_mono_ns: int | None) -> bool:
    """Return whether a worker failed on its own before any process got the signal."""
    received_ns, roots = [], []
    for item in judged.exits:
        if item.worker.terminated:
            continue
        if _got_same_signal(item.worker, signal_name):
            received_ns.append(item.worker.seen_mono_ns)
        elif item.role is Role.ROOT:
            roots.append(item.failed_ns)
    if signal_seen_mono_ns is not None:
        received_ns.append(signal_seen_mono_ns)
    return bool(roots) and min(roots) < min(received_ns, default=min(roots) + 1)


def _got_same_signal(worker: WorkerExit, signal_name: str) -> bool:
    interrupted = signal_name == "SIGINT" and worker.exception_type == "KeyboardInterrupt"
    return interrupted or ending_signal(worker) == signal_name


def _cancellation_incident(
    signal_name: str,
    exits: Sequence[WorkerExit],
    *,
    run_id: str,
    attempt: int,
    node: str,
    detected_us: int,
) -> Incident:
    by_hand = signal_name in _BY_HAND
    who = "the user" if by_hand else "the scheduler or an administrator"
    asked = Evidence(
        role=Role.ROOT,
        text=f"the agent on {node} received {signal_name}",
        entity=Entity(EntityKind.NODE, node),
    )
    ranks = [
        _rank_evidence(worker, signal_name)
        for worker in sorted(exits, key=lambda worker: worker.rank)
    ]
    return Incident(
        id=incident_id(run_id, attempt),
        failure_class=FailureClass.CANCELLED,
        side=Side.USER if by_hand else Side.SCHEDULER,
        confidence=Confidence.CONFIRMED,
        state=IncidentState.CLOSED,
        title=f"cancelled by {signal_name}: the agent on {node} received it",
        first_us=detected_us,
        detected_us=detected_us,
        run_id=run_id,
        attempt=attempt,
        culprit_how=f"no culprit; {signal_name} is sent by {who}",
        evidence=(asked, *ranks),
        actions=(ActionKind.STOP,),
        resolved_us=detected_us,
        resolution="cancelled: the workers were ended and the run was closed",
        authority=2,
    )


def _rank_evidence(worker: WorkerExit, signal_name: str) -> Evidence:
    text = f"rank {worker.rank} (pid {worker.pid}) {worker.describe()} {step_phrase(worker)}"
    role, why = _role_of(worker, signal_name)
    return Evidence(
        role=role,
        text=f"{text}; {why}",
        entity=rank_entity(worker),
        lines=scrub_and_clip(worker.log_tail[-3:]),
        path=worker.log_path,
    )


def _role_of(worker: WorkerExit, signal_name: str) -> tuple[Role, str]:
    """Return the role of *worker*'s end in the cancellation, and the same as text."""
    if worker.terminated:
        return Role.TEARDOWN, "its agent ended it"
    if worker.exit_code == 0:
        return Role.NOISE, "it finished"
    if _got_same_signal(worker, signal_name):
        return Role.CONFIRMATION, f"{signal_name} reached it as well, not from its agent"
    return Role.SYMPTOM, "not ended by its agent, and not before the signal"
