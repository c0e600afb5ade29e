"""From the worker exits of one attempt on one host to exactly one incident."""

from collections.abc import Sequence

from gpuops.incident import exception
from gpuops.incident.cause import HostCause, JudgedExits
from gpuops.incident.classify import ClassifiedExit, ending_signal
from gpuops.incident.evidence import evidence_for, format_ranks, rank_entity, step_phrase
from gpuops.incident.lifecycle import incident_id
from gpuops.model import (
    Confidence,
    Entity,
    EntityKind,
    FailureClass,
    Incident,
    IncidentState,
    Role,
)
from gpuops.scrub import scrub

MESSAGE_CHARS = 120
USAGE_CHARS = 500  # of a usage error: it ends the run, and says what to do at its end


def incident_from_exits(
    judged: JudgedExits,
    *,
    run_id: str,
    attempt: int,
    node: str,
    detected_us: int,
    detected_mono_ns: int,
) -> Incident:
    """Return the incident that ended *attempt*, as this node saw it.

    A worker that its agent ended is never a culprit. Without a failure of a worker the incident is
    unresolved, with authority 0: without an incident the failure would be missing from all failure
    rates.

    Args:
        judged: The ends of all workers of the attempt on this node.
        run_id: The run.
        attempt: 0-based.
        node: This node.
        detected_us: When the agent decided that the attempt had failed, epoch µs.
        detected_mono_ns: The same moment on this host's monotonic clock.
    """
    classified, cause = judged.exits, judged.cause
    return Incident(
        id=incident_id(run_id, attempt),
        failure_class=cause.failure_class,
        side=cause.side,
        confidence=cause.confidence,
        state=IncidentState.OPEN,
        title=scrub(_title(cause, classified, node)),
        first_us=_first_us(cause, detected_us, detected_mono_ns),
        detected_us=detected_us,
        run_id=run_id,
        attempt=attempt,
        culprits=_culprits(cause, node),
        culprit_how=cause.how,
        evidence=evidence_for(cause, classified, node, judged.remarks),
        authority=cause.authority,
    )


def _first_us(cause: HostCause, detected_us: int, detected_mono_ns: int) -> int:
    """Return when the failure was, dated back from the detection on the monotonic clock.

    The wall clock may be stepped between the two; the monotonic one is not.
    """
    if cause.first is None:
        return detected_us
    return detected_us - max(detected_mono_ns - cause.first.failed_ns, 0) // 1000


def _culprits(cause: HostCause, node: str) -> tuple[Entity, ...]:
    ranks = [rank_entity(v.worker) for v in cause.blamed]
    node_name = cause.blamed[0].worker.node if cause.blamed else node
    return (*ranks, Entity(EntityKind.NODE, node_name)) if cause.blames_node else tuple(ranks)


def _title(cause: HostCause, exits: Sequence[ClassifiedExit], node: str) -> str:
    text = _what_happened(cause, exits, node)
    if cause.kernel is not None and cause.confidence is not Confidence.CONFIRMED:
        return f"{text}; the kernel log of {node} shows {cause.failure_class.value}"
    return text


def _what_happened(cause: HostCause, exits: Sequence[ClassifiedExit], node: str) -> str:
    if cause.first is None:
        return f"the attempt failed, but no worker on {node} failed by itself"
    if not cause.blamed:
        n_symptoms = sum(1 for v in exits if v.role is Role.SYMPTOM)
        noun = "rank" if n_symptoms == 1 else "ranks"
        lost = "timed out waiting for" if _is_timeout(cause.first) else "lost"
        return f"{n_symptoms} {noun} on {node} {lost} a peer {step_phrase(cause.first.worker)}"
    first = cause.blamed[0].worker
    if len(cause.blamed) > 1:
        who = f"ranks {format_ranks([v.worker.rank for v in cause.blamed])} on {first.node}"
    else:
        who = f"rank {first.rank} on {first.node}"
    action_text, step = _action_text(cause.first), step_phrase(cause.first.worker)
    if len(cause.blamed) > 1:
        action_text, step = (
            action_text.replace("was ", "were ", 1),
            step.replace(" its ", " their "),
        )
    return f"{who} {action_text} {step}{_message_text(cause.first)}"


def describe_exit(classified: ClassifiedExit) -> str:
    """Return how a worker ended and its message, such as ``"raised KeyError: 'labels'"``."""
    return f"{_action_text(classified)}{_message_text(classified)}"


def _is_timeout(classified: ClassifiedExit) -> bool:
    return classified.failure_class is FailureClass.COLLECTIVE_TIMEOUT


def _action_text(classified: ClassifiedExit) -> str:
    worker = classified.worker
    if worker.exception_type is not None:
        return f"raised {worker.exception_type.rpartition('.')[2]}"
    signal = None if worker.completed else ending_signal(worker)
    if signal is not None:
        how = f"was ended by {signal}"
        return f"{how} (out of memory)" if _was_oom(classified) else how
    return worker.describe()


def _was_oom(classified: ClassifiedExit) -> bool:
    return classified.failure_class in (FailureClass.CGROUP_OOM, FailureClass.KERNEL_OOM)


def _message_text(classified: ClassifiedExit) -> str:
    """Return the worker's message about its end: its exception, or the line of its log."""
    worker = classified.worker
    if worker.exception_type is not None:
        width = USAGE_CHARS if classified.failure_class.is_usage_error else MESSAGE_CHARS
        message_text = exception.headline(worker, width).partition(": ")[2]
    elif classified.lines and (
        ending_signal(worker) is None
        or classified.failure_class in {FailureClass.ABORT, FailureClass.COLLECTIVE_MISMATCH}
    ):
        message_text = exception.truncate(
            exception.strip_rank_prefix(classified.lines[0]).strip(), MESSAGE_CHARS
        )
    else:
        message_text = ""
    return f": {message_text}" if message_text else ""
