"""The incident of a decision over several nodes: one cause, all reports as evidence.

Each agent records an incident as its own node saw it; the deciding agent has read all reports and
records it for the run. Pure.
"""

from collections.abc import Sequence
from dataclasses import replace

from gpuops.incident.correlate import limited_list
from gpuops.incident.decision import NodeReport, RankEnd, ReportKind, RestartDecision, RunAction
from gpuops.incident.lifecycle import about_gate, about_note, about_suspect, incident_id
from gpuops.incident.suspicion import Suspicion
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
    run_incident_id,
)
from gpuops.scrub import scrub

# The account of the decision is above that of a node (2); that of a remote failure is below it (1).
AUTHORITY_DECIDED = 3
AUTHORITY_REMOTE = 1
AUTHORITY_LOCAL = 2
SEPARATE_REPORTS_MAX = 32
TITLE_CHARS_MAX = 300

_NO_FAILURE_KINDS = frozenset({ReportKind.STOPPED, ReportKind.DONE})
_ACTIONS = {
    RunAction.RESTART: (ActionKind.RESTART,),
    RunAction.REQUEUE: (ActionKind.REQUEUE,),
    RunAction.STOP: (ActionKind.STOP,),
    RunAction.FAIL: (),
}
_TITLES = {
    ReportKind.WORKERS_FAILED: "a worker failed on {node}",
    ReportKind.HANG: "workers on {node} made no progress",
    ReportKind.GPU_FAULT: "a GPU of {node} failed",
    ReportKind.VERDICT: "a detector reports {node}",
    ReportKind.NODE_LOST: "node {node} was lost",
    ReportKind.GATE_FAILED: "node {node} failed its health check",
    ReportKind.START_FAILED: "the workers could not be started on {node}",
    ReportKind.STOPPED: "nothing failed on {node}",
    ReportKind.DONE: "every worker on {node} finished",
}


def merge_report(incident: Incident, report: NodeReport) -> Incident:
    """Return *incident*, made from a node's exits, with the additional knowledge of its *report*.

    Exits show workers that failed. For a hang, a failed GPU or a refused start they show only that
    workers were ended; nor do they show that a GPU had reported a fault just before.
    """
    if report.kind is ReportKind.WORKERS_FAILED and _names_gpu(report):
        title = f"{incident.title}, after {report.how}"
        incident = replace(incident, evidence=(*_gpu_evidence(report), *incident.evidence))
    elif report.kind is ReportKind.WORKERS_FAILED or report.kind in _NO_FAILURE_KINDS:
        return incident
    else:
        title = title_of(report)
        incident = replace(
            incident, evidence=(*_rank_evidence(report, Role.ROOT), *incident.evidence)
        )
    return replace(
        incident,
        failure_class=report.failure_class,
        side=report.side,
        confidence=report.confidence,
        title=scrub(title)[:TITLE_CHARS_MAX],
        culprits=_culprits(report),
        culprit_how=scrub(report.how) or None,
        authority=AUTHORITY_LOCAL,
    )


def _names_gpu(report: NodeReport) -> bool:
    return any(culprit.kind is EntityKind.GPU for culprit in report.culprits)


def _gpu_evidence(report: NodeReport) -> tuple[Evidence, ...]:
    gpu = next(culprit for culprit in report.culprits if culprit.kind is EntityKind.GPU)
    return (Evidence(role=Role.ROOT, text=scrub(report.how), entity=gpu),)


def decided_incident(  # noqa: PLR0913 all that is known of it
    decision: RestartDecision,
    reports: Sequence[NodeReport],
    *,
    run_id: str,
    node: str,
    detected_us: int,
    own_incident: Incident | None = None,
    evidence: Sequence[Evidence] = (),
) -> Incident:
    """Return the incident as the deciding agent records it.

    Args:
        decision: What was decided.
        reports: All reports, in order of arrival.
        run_id: The run.
        node: The node of the deciding agent.
        detected_us: When that agent received the first report; used without *own_incident*.
        own_incident: Its own incident of the same failure: the evidence is kept, and if the cause
            is on its own node, all of it.
        evidence: Further evidence.
    """
    cause = decision.cause
    base = own_incident or _remote_incident(decision, run_id, detected_us)
    cause_is_local = own_incident is not None and _is_account_of(node, cause, reports)
    if cause is not None and not cause_is_local:
        base = replace(
            base,
            failure_class=cause.failure_class,
            side=cause.side,
            confidence=cause.confidence,
            title=title_of(cause),
            culprits=_culprits(cause),
            culprit_how=scrub(cause.how) or None,
        )
    if decision.exclude_checkpoint is not None:
        base = replace(
            base,
            failure_class=FailureClass.CHECKPOINT_POISONED,
            side=Side.AMBIGUOUS,
            confidence=Confidence.PROBABLE,
            title=f"the checkpoint of step {decision.exclude_checkpoint} is bad: {base.title}"[
                :TITLE_CHARS_MAX
            ],
        )
    cause_evidence = (
        base.evidence
        if cause_is_local
        else _cause_evidence(cause, base.evidence if own_incident else ())
    )
    return replace(
        base,
        evidence=(*cause_evidence, *_other_evidence(reports, cause), *evidence),
        culprit_how=_how_text(base.culprit_how, reports),
        actions=actions_of(decision),
        authority=AUTHORITY_DECIDED,
        rev=base.rev + 1,
    )


def _is_account_of(node: str, cause: NodeReport | None, reports: Sequence[NodeReport]) -> bool:
    """Return whether *node* itself reported *cause*; of a hang all nodes together may know more."""
    if cause is None or cause.node != node:
        return False
    found = (cause.failure_class, set(cause.culprits))
    own = [(r.failure_class, set(r.culprits)) for r in reports if r.node == node]
    return cause.kind is not ReportKind.HANG or found in own


def remote_incident(decision: RestartDecision, *, run_id: str, detected_us: int) -> Incident:
    """Return the incident as recorded by an agent whose node saw nothing of it."""
    return replace(_remote_incident(decision, run_id, detected_us), actions=actions_of(decision))


def preflight_incident(report: NodeReport, *, run_id: str, now_us: int) -> Incident:
    """Return the incident of a node that failed its health check, which ends no generation.

    It is closed for the run, which that node does not join, not for the node.
    """
    is_named = report.failure_class is not FailureClass.UNRESOLVED
    about = about_gate(report.generation, report.node)
    return Incident(
        id=run_incident_id(run_id, about),
        about=about,
        failure_class=report.failure_class if is_named else FailureClass.GATE_FAILED,
        side=report.side,
        confidence=report.confidence,
        state=IncidentState.CLOSED,
        title=title_of(report),
        first_us=now_us,
        detected_us=now_us,
        run_id=run_id,
        attempt=report.generation,
        culprits=_culprits(report),
        culprit_how=scrub(report.how) or None,
        evidence=_report_evidence(report, Role.ROOT),
        actions=(ActionKind.EXCLUDE_NODE,),
        resolved_us=now_us,
        resolution=f"{report.node} does not join the run",
        authority=AUTHORITY_LOCAL,
    )


def suspect_incident(report: NodeReport, *, run_id: str, now_us: int) -> Incident:
    """Return the open incident of the node that *report* suspects, which ends no generation.

    It is closed for the run once the node is excluded.
    """
    root, text = Entity(EntityKind.NODE, report.node), scrub(report.how)
    return _of_suspicion(
        about_suspect(report.node),
        report,
        _culprits(report),
        title=f"{report.node} is suspected: {text}",
        evidence=Evidence(role=Role.ROOT, text=text, entity=root),
        run_id=run_id,
        now_us=now_us,
    )


def note_incident(suspicion: Suspicion, *, run_id: str, now_us: int) -> Incident:
    """Return the open incident of a *suspicion* that has no consequence for a node."""
    text = scrub(suspicion.why)
    return _of_suspicion(
        about_note(suspicion.entity.id),
        suspicion,
        suspicion.culprits,
        title=text,
        evidence=Evidence(role=Role.ROOT, text=text, entity=suspicion.entity),
        run_id=run_id,
        now_us=now_us,
    )


def _of_suspicion(  # noqa: PLR0913 all that is known of it
    about: str,
    cause: NodeReport | Suspicion,
    culprits: tuple[Entity, ...],
    *,
    title: str,
    evidence: Evidence,
    run_id: str,
    now_us: int,
) -> Incident:
    return Incident(
        id=run_incident_id(run_id, about),
        about=about,
        failure_class=cause.failure_class,
        side=cause.side,
        confidence=cause.confidence,
        state=IncidentState.OPEN,
        title=title[:TITLE_CHARS_MAX],
        first_us=now_us,
        detected_us=now_us,
        run_id=run_id,
        culprits=culprits,
        culprit_how=f"{evidence.text}; no workers were ended",
        evidence=(evidence,),
        authority=AUTHORITY_LOCAL,
    )


def actions_of(decision: RestartDecision) -> tuple[ActionKind, ...]:
    """Return the actions of *decision*."""
    excludes = (ActionKind.EXCLUDE_NODE,) if decision.exclude else ()
    return (*excludes, *_ACTIONS[decision.action])


def title_of(report: NodeReport) -> str:
    """Return *report* in one line: the first rank at fault, else the node."""
    first = _first_end(report)
    if first is None:
        what = _TITLES[report.kind].format(node=report.node)
        return scrub(f"{what}: {report.how}" if report.how else what)[:TITLE_CHARS_MAX]
    return scrub(_rank_text(report, first))[:TITLE_CHARS_MAX]


def _first_end(report: NodeReport) -> RankEnd | None:
    return next((end for end in report.ends if end.role is Role.ROOT), None)


def _rank_text(report: NodeReport, end: RankEnd) -> str:
    """Return the summary of *end* with its node."""
    what = end.summary.removeprefix(f"rank {end.rank} ") or "failed"
    return f"rank {end.rank} on {report.node} {what}"


def _culprits(report: NodeReport) -> tuple[Entity, ...]:
    """Return the culprits of *report*, and its node, except if several ranks failed alike.

    That is the program's fault (`gpuops.incident.cause`).
    """
    if report.kind in _NO_FAILURE_KINDS:
        return ()
    node = Entity(EntityKind.NODE, report.node)
    roots = [Entity(EntityKind.RANK, str(e.rank)) for e in report.ends if e.role is Role.ROOT]
    found = tuple(dict.fromkeys(report.culprits or roots))
    is_shared = report.side is Side.USER and len(roots) > 1
    return found if node in found or is_shared else (*found, node)


def _remote_incident(decision: RestartDecision, run_id: str, detected_us: int) -> Incident:
    cause, failure = decision.cause, decision.failure
    return Incident(
        id=incident_id(run_id, failure.generation),
        failure_class=failure.failure_class if cause is None else cause.failure_class,
        side=failure.side if cause is None else cause.side,
        confidence=Confidence.UNKNOWN if cause is None else cause.confidence,
        state=IncidentState.OPEN,
        title=scrub(decision.reason) if cause is None else title_of(cause),
        first_us=detected_us,
        detected_us=detected_us,
        run_id=run_id,
        attempt=failure.generation,
        culprits=() if cause is None else _culprits(cause),
        culprit_how=None if cause is None else scrub(cause.how) or None,
        evidence=_cause_evidence(cause, ()),
        authority=AUTHORITY_REMOTE,
    )


def _cause_evidence(
    cause: NodeReport | None, own_evidence: Sequence[Evidence]
) -> tuple[Evidence, ...]:
    """Return the cause's evidence, then that of the recording node, which is not the root."""
    evidence = () if cause is None else _report_evidence(cause, Role.ROOT)
    demoted = (
        replace(item, role=Role.SYMPTOM) if cause is not None and item.role is Role.ROOT else item
        for item in own_evidence
    )
    return (*evidence, *demoted)


def _report_evidence(report: NodeReport, role: Role) -> tuple[Evidence, ...]:
    ends = _rank_evidence(report, role)
    if ends:
        return ends
    node = Entity(EntityKind.NODE, report.node)
    return (Evidence(role=role, text=title_of(report), entity=node),)


def _rank_evidence(report: NodeReport, role: Role) -> tuple[Evidence, ...]:
    return tuple(
        Evidence(
            role=role if end.role is Role.ROOT else end.role,
            text=scrub(_rank_text(report, end)),
            entity=Entity(EntityKind.RANK, str(end.rank)),
            path=end.log_path,
        )
        for end in report.ends
        if end.role is not Role.TEARDOWN and end.role is not Role.NOISE
    )


def _other_evidence(reports: Sequence[NodeReport], cause: NodeReport | None) -> list[Evidence]:
    others = [r for r in reports if cause is None or r.node != cause.node]
    failed = [report for report in others if report.kind not in _NO_FAILURE_KINDS]
    quiet = [report.node for report in others if report.kind in _NO_FAILURE_KINDS]
    found = [
        Evidence(
            role=Role.SYMPTOM,
            text=f"reported after it: {title_of(report)}",
            entity=Entity(EntityKind.NODE, report.node),
        )
        for report in failed[:SEPARATE_REPORTS_MAX]
    ]
    if len(failed) > SEPARATE_REPORTS_MAX:
        text = f"{len(failed) - SEPARATE_REPORTS_MAX} more nodes reported failures"
        found.append(Evidence(role=Role.SYMPTOM, text=text))
    if quiet:
        text = f"nothing failed on {limited_list(quiet)}; stopped with the others"
        found.append(Evidence(role=Role.NOISE, text=text))
    return found


def _how_text(how: str | None, reports: Sequence[NodeReport]) -> str | None:
    failed = [report for report in reports if report.kind not in _NO_FAILURE_KINDS]
    if len(failed) < 2:
        return how
    return f"{how or 'its report'}; chosen among the reports of {len(failed)} nodes"
