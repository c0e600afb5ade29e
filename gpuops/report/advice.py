"""Advice from the time breakdown of a run, with the seconds concerned."""

from collections.abc import Sequence

from gpuops.model import EntityKind, FailureClass, Incident, IncidentState
from gpuops.report.time_breakdown import AttemptBreakdown, RunBreakdown, TimePhase
from gpuops.units import format_seconds

# A restart is a process start, the import of torch and the set-up of the process groups.
RESTART_SHARE_MIN = 0.1
_RESTART_PHASES = (TimePhase.DECIDE, TimePhase.RENDEZVOUS, TimePhase.INIT, TimePhase.RESTART)


def advice(breakdown: RunBreakdown) -> list[str]:
    """Return sentences for the owner of the run, the most urgent first."""
    found = [
        *_repeated(breakdown),
        *_differing(breakdown),
        *_redone(breakdown),
        *_stepless(breakdown),
    ]
    found += [*_unseen(breakdown), *_restarts(breakdown)]
    found += _open(breakdown)
    failures = [i for i in breakdown.incidents if not i.failure_class.is_request]
    if not found and failures:
        found.append("nothing to change: the failures were handled at minimal cost")
    return found


def _differing(breakdown: RunBreakdown) -> list[str]:
    """Return what to check, and where to resume from, for ranks that still differ."""
    return [
        (
            f"{item.title}, and no later comparison found them equal: {_to_check(item)}; resume"
            f" from an earlier checkpoint; gpuops runbook {item.failure_class.value}"
        )
        for item in breakdown.incidents
        if item.failure_class is FailureClass.REPLICAS_DIFFER and item.state is IncidentState.OPEN
    ]


def _to_check(incident: Incident) -> str:
    """Return the nodes in which a device may be faulty; if only ranks are known, these."""
    ranks = [item.id for item in incident.culprits if item.kind is EntityKind.RANK]
    known = [item for item in incident.culprits if item.kind is EntityKind.NODE]
    evidence_nodes = [item.entity for item in incident.evidence if item.entity is not None]
    names = sorted({entity.id for entity in known or evidence_nodes})
    if known or len(names) > 1:
        nodes = " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))
    else:
        named = f"rank{'' if len(ranks) == 1 else 's'} {', '.join(ranks)}"
        nodes = f"where {named} ran" if ranks else "where these ranks ran"
    return f"check {nodes} (`gpuops check --suite full`, with nothing else running there)"


def _redone(breakdown: RunBreakdown) -> list[str]:
    again = [attempt for attempt in breakdown.attempts if attempt.redone_steps]
    if not again:
        return []
    n_steps = sum(attempt.redone_steps or 0 for attempt in again)
    steps = "1 step was" if n_steps == 1 else f"{n_steps} steps were"
    took = format_seconds(breakdown.seconds[TimePhase.REDO])
    from_scratch = [attempt for attempt in again if attempt.restarted_from_scratch]
    lost = _lost_with_keeper(breakdown, again)
    if lost is not None:
        return [f"{steps} made a second time, in {took}, because {lost}"]
    if from_scratch:
        first = from_scratch[0].row
        start = breakdown.starts.get(first.ordinal)
        if start is not None and start.is_fresh:
            return [
                (
                    f"{steps} made a second time, in {took}, because the Checkpointer of attempt"
                    f" {first.ordinal} had nothing to load: {start.why}; save earlier or more often"
                    " (every=), and to a directory (--ckpt-dir)"
                )
            ]
        return [
            (
                f"{steps} made a second time because attempt {first.ordinal} began again"
                f" at step {first.steps_first}: the job loads no checkpoint. They took {took}; a"
                " checkpoint that the script saves and loads at its start would have kept them"
                " (gpuops.Checkpointer; in a Hugging Face Trainer GpuopsCallback, see"
                " docs/frameworks.md)"
            )
        ]
    whys = [
        breakdown.starts[item.row.ordinal].why for item in again if _has_reason(breakdown, item)
    ]
    if whys:
        return [
            (
                f"{steps} made a second time, in {took}, because a newer checkpoint could not be"
                f" loaded: {'; '.join(dict.fromkeys(whys))}"
            )
        ]
    return [
        (
            f"{steps} made a second time, in {took}: the checkpoints that were loaded"
            " were that much older than the failures; save more often if a save costs less"
        )
    ]


def _has_reason(breakdown: RunBreakdown, item: AttemptBreakdown) -> bool:
    start = breakdown.starts.get(item.row.ordinal)
    return start is not None and bool(start.why)


def _lost_with_keeper(breakdown: RunBreakdown, again: Sequence[AttemptBreakdown]) -> str | None:
    """Return that keepers of the checkpoints died, and what to do; None where none did."""
    starts = {item.row.ordinal: breakdown.starts.get(item.row.ordinal) for item in again}
    lost = {
        ordinal: start
        for ordinal, start in starts.items()
        if start is not None and start.lost_step is not None
    }
    if not lost:
        return None
    before = ", ".join(f"{ordinal} (step {start.lost_step})" for ordinal, start in lost.items())
    noun = "attempt" if len(lost) == 1 else "attempts"
    advised = "a state on disk outlives it: set a directory (--ckpt-dir)"
    if not any(start.is_fresh for start in lost.values()):
        advised = "the newest state on disk was that much older: persist_every= sets how often"
    return (
        "the keeper of the checkpoints died, and the states in memory were lost with it, before"
        f" {noun} {before}; {advised}. If the kernel ended it for lack of memory, its log"
        " (dmesg) says so"
    )


def _stepless(breakdown: RunBreakdown) -> list[str]:
    """Return why attempts that failed without a step are lost entirely."""
    lost = [
        str(item.row.ordinal)
        for item in breakdown.attempts
        if item.row.first_step_us is None and item.row.outcome == "failed"
    ]
    if not lost:
        return []
    noun = "attempt" if len(lost) == 1 else "attempts"
    return [
        (
            f"{noun} {', '.join(lost)} failed before a step was seen, so all of that time counts as"
            " lost; steps are seen if the script uses a torch optimizer"
        )
    ]


def _unseen(breakdown: RunBreakdown) -> list[str]:
    unknown_s = breakdown.seconds[TimePhase.UNKNOWN]
    if unknown_s <= 0:
        return []
    if breakdown.is_live:
        why = "the run has no end on record, so neither has what its last attempt did"
    elif all(attempt.row.first_step_us is None for attempt in breakdown.attempts):
        why = "no optimizer step was seen, so productive time cannot be told from the rest"
    else:
        why = "without step numbers, repeated steps cannot be told from new ones"
    return [f"{format_seconds(unknown_s)} are unknown: {why}"]


def _repeated(breakdown: RunBreakdown) -> list[str]:
    """Return a warning if the same program error ended several attempts."""
    kinds = (
        FailureClass.USER_EXCEPTION,
        FailureClass.CUDA_OOM,
        FailureClass.USER_EARLY_EXIT,
        FailureClass.ABORT,
    )
    programs = [item for item in breakdown.incidents if item.failure_class in kinds]
    seen: dict[tuple[str, str], list[Incident]] = {}
    for item in programs:
        seen.setdefault((item.failure_class.value, item.title), []).append(item)
    for (kind, title), items in seen.items():
        if len(items) > 1:
            return [
                (
                    f"the same {kind} ended {len(items)} attempts ({title}):"
                    " another restart will not help, the program or its data must change"
                )
            ]
    return []


def _restarts(breakdown: RunBreakdown) -> list[str]:
    first = breakdown.attempts[0].row.ordinal if breakdown.attempts else 0
    restart_s = sum(
        span.seconds
        for span in breakdown.spans
        if span.phase in _RESTART_PHASES and (span.ordinal, span.phase) != (first, TimePhase.INIT)
    )
    count = sum(1 for attempt in breakdown.attempts if attempt.row.ordinal > 0)
    if not count or restart_s < RESTART_SHARE_MIN * breakdown.wall_s:
        return []
    return [
        (
            f"restarts took {format_seconds(restart_s)} of {format_seconds(breakdown.wall_s)}"
            f" ({format_seconds(restart_s / count)} each): process start, imports, set-up up to the"
            " first step. In a long run this share falls; loading less before the first step helps"
        )
    ]


def _open(breakdown: RunBreakdown) -> list[str]:
    unresolved = [item for item in breakdown.incidents if not item.culprits and item.authority < 2]
    return [
        f"incident {item.id[-8:]} has no known cause: read gpuops runbook"
        f" {item.failure_class.value} before trusting these nodes"
        for item in unresolved
    ]
