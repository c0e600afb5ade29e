"""Incidents of a node from check findings: one for each entity and failure class.

An incident keeps its id and stays open while a check that found it fails or is unknown. It is
closed when all of them pass again, or when a repair is acknowledged. A repeated finding is
recorded once, and again only if another check finds it too. Pure.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from gpuops.checks.core.runner import CheckRun
from gpuops.host.node_state import OpenIncident, Repair
from gpuops.incident.lifecycle import close
from gpuops.incident.runbook import Runbook
from gpuops.model import (
    ActionKind,
    Confidence,
    Entity,
    EntityKind,
    Evidence,
    FailureClass,
    Finding,
    Incident,
    IncidentState,
    Role,
    Side,
    Status,
)

EVIDENCE_MAX = 8
_VALUE_CHARS_MAX = 80


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeCheckContext:
    """What the incidents of a check run depend on in addition to its findings.

    ``new_id`` makes the id of an incident from its `incident_key`. ``trigger`` and ``job_id``: the
    hook, and the Slurm job that it ran for. ``all_gpus_checked``: all GPUs of the node were
    checked.
    """

    runbooks: Mapping[FailureClass, Runbook]
    new_id: Callable[[str], str]
    trigger: str
    job_id: str | None = None
    all_gpus_checked: bool = True
    repairs: Sequence[Repair] = ()

    @property
    def source_text(self) -> str:
        """Return what ran the checks, as ``"the epilog of job 17"``."""
        return (
            f"the {self.trigger} of job {self.job_id}" if self.job_id else f"a {self.trigger} check"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class IncidentChanges:
    """``changed``: incidents to record, each a new snapshot; ``open``: incidents that stay open."""

    changed: tuple[Incident, ...] = ()
    open: Mapping[str, OpenIncident] = field(default_factory=dict)


def incident_key(failure_class: FailureClass, entity: Entity) -> str:
    """Return the key of an incident in a node's state: its failure class and entity."""
    return f"{failure_class.value} {entity.kind.value} {entity.id}"


def update_incidents(
    run: CheckRun, open_incidents: Mapping[str, OpenIncident], context: NodeCheckContext
) -> IncidentChanges:
    """Return how *run* changes *open_incidents*, and the incidents that it opens."""
    after_repairs = acknowledge_repairs(open_incidents, context.repairs)
    changed, still_open = list(after_repairs.changed), dict(after_repairs.open)
    failing = _failures_by_key(run)
    for key, item in after_repairs.open.items():
        remaining_checks = _failing_checks(item, run, all_gpus_checked=context.all_gpus_checked)
        if remaining_checks or key in failing:
            still_open[key] = replace(item, checks=remaining_checks)
        else:
            why = f"no longer found by {', '.join(item.checks)}, in {context.source_text}"
            changed.append(close(item.incident, at_us=run.end_us, lost_s={}, resolution=why))
            del still_open[key]
    for key, findings in failing.items():
        old = still_open.get(key)
        found = (
            _open_incident(key, findings, run, context)
            if old is None
            else _add_findings(old, findings, context)
        )
        if old is None or found.incident is not old.incident:
            changed.append(found.incident)
        still_open[key] = found
    return IncidentChanges(changed=tuple(changed), open=still_open)


def acknowledge_repairs(
    open_incidents: Mapping[str, OpenIncident], repairs: Sequence[Repair]
) -> IncidentChanges:
    """Return how *repairs* change *open_incidents*."""
    changed, still_open = [], {}
    for key, item in open_incidents.items():
        repair = next((repair for repair in repairs if is_repair_of(repair, item.incident)), None)
        if repair is None:
            still_open[key] = item
        else:
            changed.append(close_repaired(item.incident, repair))
    return IncidentChanges(changed=tuple(changed), open=still_open)


def close_repaired(incident: Incident, repair: Repair) -> Incident:
    """Return *incident* as closed by *repair*."""
    why = f"repaired by {repair.by}: {repair.what}"
    return close(incident, at_us=repair.t_us, lost_s={}, resolution=why)


def is_repair_of(repair: Repair, incident: Incident) -> bool:
    """Return whether *repair* is of a culprit of *incident*, and not earlier than it."""
    blamed = {(entity.kind.value, entity.id) for entity in incident.culprits}
    return (repair.entity_kind, repair.entity_id) in blamed and repair.t_us >= incident.first_us


def _failures_by_key(run: CheckRun) -> dict[str, list[Finding]]:
    found: dict[str, list[Finding]] = {}
    for finding in run.findings:
        if finding.status is Status.FAIL and finding.failure_class is not None:
            found.setdefault(incident_key(finding.failure_class, finding.entity), []).append(
                finding
            )
    return found


def _failing_checks(
    item: OpenIncident, run: CheckRun, *, all_gpus_checked: bool
) -> tuple[str, ...]:
    return tuple(
        check for check in item.checks if not _passes(check, item.incident, run, all_gpus_checked)
    )


def _passes(check: str, incident: Incident, run: CheckRun, all_gpus_checked: bool) -> bool:
    """Return whether *check* examined the first culprit of *incident* and passed it.

    Checks report each failed part, and the healthy ones together: a check without a finding for
    the part passed it if it examined all parts, was not unknown, and has no finding against the
    node.
    """
    entity, node = incident.culprits[0], Entity(EntityKind.NODE, run.node)
    check_findings = [finding for finding in run.findings if finding.check == check]
    named = [finding for finding in check_findings if finding.entity == entity]
    if named:
        return all(_is_healthy(finding, incident.failure_class) for finding in named)
    if entity.kind is EntityKind.GPU and not all_gpus_checked:
        return False
    return bool(check_findings) and all(
        _is_healthy(finding, incident.failure_class)
        if finding.entity == node
        else finding.status in (Status.PASS, Status.WARN)
        for finding in check_findings
    )


def _is_healthy(finding: Finding, failure_class: FailureClass) -> bool:
    return finding.status is Status.PASS or finding.failure_class not in (None, failure_class)


def _open_incident(
    key: str, findings: Sequence[Finding], run: CheckRun, context: NodeCheckContext
) -> OpenIncident:
    first = findings[0]
    assert first.failure_class is not None
    runbook = context.runbooks.get(first.failure_class)
    action = ActionKind.NONE if runbook is None else runbook.action
    node = Entity(EntityKind.NODE, run.node)
    where = "" if first.entity == node else f"{first.entity} on "
    incident = Incident(
        id=context.new_id(key),
        failure_class=first.failure_class,
        side=Side.INFRA if runbook is None else runbook.side,
        # Only the device's own status or a documented expectation fails a check.
        confidence=Confidence.CONFIRMED,
        state=IncidentState.OPEN,
        title=f"{where}{node}: {first.headline}",
        first_us=run.start_us,
        detected_us=run.end_us,
        culprits=(node,) if first.entity == node else (first.entity, node),
        culprit_how=f"check {first.check} in {context.source_text}",
        evidence=_evidence(findings, context),
        actions=() if action is ActionKind.NONE else (action,),
    )
    return OpenIncident(incident=incident, checks=_checks(findings))


def _add_findings(
    item: OpenIncident, findings: Sequence[Finding], context: NodeCheckContext
) -> OpenIncident:
    """Return *item* with *findings* added; its incident is unchanged if they add no check."""
    known = {text.partition(":")[0] for text in (item.text for item in item.incident.evidence)}
    new = [finding for finding in findings if finding.check not in known]
    checks = tuple(dict.fromkeys((*item.checks, *_checks(findings))))
    if not new or len(item.incident.evidence) >= EVIDENCE_MAX:
        return replace(item, checks=checks)
    evidence = (*item.incident.evidence, *_evidence(new, context))[:EVIDENCE_MAX]
    incident = replace(item.incident, evidence=evidence, rev=item.incident.rev + 1)
    return OpenIncident(incident=incident, checks=checks)


def _checks(findings: Sequence[Finding]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(finding.check for finding in findings))


def _evidence(findings: Sequence[Finding], context: NodeCheckContext) -> tuple[Evidence, ...]:
    return tuple(
        Evidence(
            role=Role.ROOT,
            text=(
                f"{finding.check}: {finding.message}{_expectation_text(finding)}, in "
                f"{context.source_text}"
            ),
            entity=finding.entity,
        )
        for finding in findings[:EVIDENCE_MAX]
    )


def _expectation_text(finding: Finding) -> str:
    """Return value and expectation, if the finding has both."""
    if finding.value is None or finding.threshold is None:
        return ""
    unit = f" {finding.unit}" if finding.unit else ""
    value = str(finding.value)[:_VALUE_CHARS_MAX]
    source = f" ({finding.source})" if finding.source else ""
    return f": {value}{unit}, expected {finding.threshold}{source}"
