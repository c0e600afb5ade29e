"""From the exits of one attempt on one host to exactly one incident."""

from collections.abc import Sequence

from gpuops.incident import exception, kernel
from gpuops.incident.cause import Cause, find_cause
from gpuops.incident.classify import Verdict, classify, ending_signal
from gpuops.incident.evidence import evidence_for, rank_entity, span, step_phrase
from gpuops.incident.identity import incident_id
from gpuops.model import (
    Confidence,
    Entity,
    EntityKind,
    FailureClass,
    Incident,
    IncidentState,
    Role,
    WorkerExit,
)
from gpuops.rules import LogRule
from gpuops.scrub import scrub

TOLD_CHARS = 120


def incident_from_exits(  # noqa: PLR0913  the agent's whole knowledge of a failure
    exits: Sequence[WorkerExit],
    *,
    run_id: str,
    attempt: int,
    node: str,
    rules: Sequence[LogRule],
    detected_us: int,
    detected_mono_ns: int,
    kernel_lines: Sequence[str] = (),
) -> Incident:
    """Return the incident that ended *attempt*, as this node saw it.

    The order of *exits* does not matter. A worker that its agent ended is never a culprit. With
    no failure among *exits* the incident is unresolved, with authority 0: it must exist, or the
    failure would be missing from every rate.

    Args:
        exits: Every worker of the attempt on this node.
        run_id: The run.
        attempt: 0-based.
        node: This node.
        rules: Log rules (worker and kernel).
        detected_us: When the agent decided that the attempt had failed, epoch µs.
        detected_mono_ns: The same moment on this host's monotonic clock.
        kernel_lines: The kernel log around the failure; none where it may not be read.
    """
    verdicts = sorted((classify(w, rules, kernel_lines) for w in exits), key=lambda v: v.order)
    cause = find_cause(verdicts, kernel.node_trouble(kernel_lines, rules))
    return Incident(
        id=incident_id(run_id, attempt),
        failure_class=cause.failure_class,
        side=cause.side,
        confidence=cause.confidence,
        state=IncidentState.OPEN,
        title=scrub(_title(cause, verdicts, node)),
        first_us=_first_us(cause, detected_us, detected_mono_ns),
        detected_us=detected_us,
        run_id=run_id,
        attempt=attempt,
        culprits=_culprits(cause, node),
        culprit_how=cause.how,
        evidence=evidence_for(cause, verdicts, node, kernel.remarks(kernel_lines, rules)),
        authority=cause.authority,
    )


def _first_us(cause: Cause, detected_us: int, detected_mono_ns: int) -> int:
    """Return when the failure was, dated back from the detection on the monotonic clock.

    The wall clock may be stepped between the two; the monotonic one is not.
    """
    if cause.first is None:
        return detected_us
    return detected_us - max(detected_mono_ns - cause.first.failed_ns, 0) // 1000


def _culprits(cause: Cause, node: str) -> tuple[Entity, ...]:
    ranks = [rank_entity(v.worker) for v in cause.blamed]
    named = cause.blamed[0].worker.node if cause.blamed else node
    return (*ranks, Entity(EntityKind.NODE, named)) if cause.blames_node else tuple(ranks)


def _title(cause: Cause, verdicts: Sequence[Verdict], node: str) -> str:
    text = _what_happened(cause, verdicts, node)
    if cause.kernel is not None and cause.confidence is not Confidence.CONFIRMED:
        return f"{text}; the kernel log of {node} shows {cause.failure_class.value}"
    return text


def _what_happened(cause: Cause, verdicts: Sequence[Verdict], node: str) -> str:
    if cause.first is None:
        return f"the attempt failed, but no worker on {node} failed by itself"
    if not cause.blamed:
        hurt = sum(1 for v in verdicts if v.role is Role.SYMPTOM)
        noun = "rank" if hurt == 1 else "ranks"
        lost = "waited in vain for" if _is_timeout(cause.first) else "lost"
        return f"{hurt} {noun} on {node} {lost} a peer {step_phrase(cause.first.worker)}"
    first = cause.blamed[0].worker
    if len(cause.blamed) > 1:
        who = f"ranks {span([v.worker.rank for v in cause.blamed])} on {first.node}"
    else:
        who = f"rank {first.rank} on {first.node}"
    deed, step = _deed(cause.first), step_phrase(cause.first.worker)
    if len(cause.blamed) > 1:
        deed, step = deed.replace("was ", "were ", 1), step.replace(" its ", " their ")
    return f"{who} {deed} {step}{_told(cause.first)}"


def told(verdict: Verdict) -> str:
    """Return how a worker ended and what it said, such as ``"raised KeyError: 'labels'"``."""
    return f"{_deed(verdict)}{_told(verdict)}"


def _is_timeout(verdict: Verdict) -> bool:
    return verdict.failure_class is FailureClass.COLLECTIVE_TIMEOUT


def _deed(verdict: Verdict) -> str:
    worker = verdict.worker
    if worker.exception_type is not None:
        return f"raised {worker.exception_type.rpartition('.')[2]}"
    signal = None if worker.was_done else ending_signal(worker)
    if signal is not None:
        how = f"was ended by {signal}"
        return f"{how} (out of memory)" if _was_oom(verdict) else how
    return worker.describe()


def _was_oom(verdict: Verdict) -> bool:
    return verdict.failure_class in (FailureClass.CGROUP_OOM, FailureClass.KERNEL_OOM)


def _told(verdict: Verdict) -> str:
    """Return what the worker said about its end: its exception, or its log's last word."""
    worker = verdict.worker
    if worker.exception_type is not None:
        told = exception.headline(worker, TOLD_CHARS).partition(": ")[2]
    elif ending_signal(worker) is None and verdict.lines:
        told = exception.clipped(exception.bare(verdict.lines[0]).strip(), TOLD_CHARS)
    else:
        told = ""
    return f": {told}" if told else ""
