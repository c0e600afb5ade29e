"""Incidents from their snapshots: the one with the highest account key is current, all are kept.

Snapshots are ordered by authority, then revision, then event id (`gpuops.model.Incident`); those of
root are above those of users. An incident of a node that root reports is a strike against its
culprit.

gpuops' own failures are incidents as well: one for each node, failed part and day (UTC), of a user
also for each run, closed when they are reported, because gpuops continues without that part.
"""

import hashlib
from collections.abc import Iterator

from gpuops.model import (
    Confidence,
    Entity,
    EntityKind,
    Evidence,
    FailureClass,
    Incident,
    IncidentState,
    Role,
    Side,
)
from gpuops.store import schema
from gpuops.store.columns import derived_id
from gpuops.store.ingest.envelope import SHORT_TEXT_MAX, EventEnvelope, ProjectedRow, attempt_id
from gpuops.store.ingest.merge import MergeRule, Row
from gpuops.store.ingest.projections.nodes import ATTEMPTS, RUNS, attempt_stub
from gpuops.store.spool.format import RUN_ID_PATTERN, SpoolLineError, canonical_json

EVIDENCE_CHARS_MAX = 8192
_RANK_MAX = 10**9

INCIDENTS = MergeRule(
    table=schema.incidents,
    key=("id",),
    best={
        "account_key": tuple(
            column.name
            for column in schema.incidents.columns
            if column.name not in ("id", "cluster_id", "account_key")
        )
    },
    least=("cluster_id",),
)
REVISIONS = MergeRule(table=schema.incident_revisions, key=("id",))
CULPRITS = MergeRule(
    table=schema.incident_culprits,
    key=("incident_id", "entity_kind", "entity_id"),
    best={"account_key": ("node_id",)},
)
STRIKES = MergeRule(
    table=schema.strikes,
    key=("incident_id", "entity_kind", "entity_id"),
    best={"account_key": ("node_id", "t_us", "failure_class", "weight")},
)
# The weight of an incident as a strike; one without a known cause is none.
_WEIGHTS = {Confidence.CONFIRMED: 1.0, Confidence.PROBABLE: 0.5}
# A configuration error, a job's left-over or a fault of all nodes is no evidence against a part.
_NO_STRIKE = frozenset(
    {
        FailureClass.GPU_CONFIG,
        FailureClass.GPU_LEAKED_MEMORY,
        FailureClass.HOST_CONFIG,
        FailureClass.HOST_LEFTOVERS,
        FailureClass.SITE_CHECK,
        FailureClass.STORAGE_NO_SPACE,
        FailureClass.STORAGE_REQUIRED_MOUNT,
        FailureClass.STORAGE_SHARED_FS,
        FailureClass.TOOL,
    }
)
# Parts that keep their id when they move to another node; the rest counts against its node.
_MOVABLE = (EntityKind.GPU, EntityKind.NIC)

INCIDENT_ATTEMPTS = MergeRule(
    table=schema.incident_attempts,
    key=("incident_id", "attempt_id"),
    best={"account_key": ("lost_us",)},
)
EVIDENCE = MergeRule(table=schema.evidence, key=("id",), least=("first_us",))
INCIDENT_EVIDENCE = MergeRule(
    table=schema.incident_evidence,
    key=("incident_id", "evidence_id"),
    best={"account_key": ("role", "file_ref")},
)
ACTIONS = MergeRule(
    table=schema.actions,
    key=("id",),
    least=("requested_us",),
    best={"requested_key": ("actor", "dry_run", "detail", "node_id")},
)


def incident_recorded(envelope: EventEnvelope) -> list[ProjectedRow]:
    """Return the incident, this revision of it, and its dependent rows."""
    incident = _parse_incident(envelope)
    body = incident.to_json()
    rank = account_key(
        envelope, f"{incident.authority:010d}/{incident.rev:010d}/{envelope.event.id}"
    )
    rows: list[ProjectedRow] = [
        (INCIDENTS, incident_row(incident, body, envelope.cluster_id, rank)),
        (REVISIONS, _revision_row(incident, body, envelope)),
    ]
    rows.extend((CULPRITS, row) for row in _culprit_rows(incident, envelope, rank))
    rows.extend((STRIKES, row) for row in _strike_rows(incident, envelope, rank))
    rows.extend(_attempt_rows(incident, envelope, rank))
    for item in incident.evidence:
        rows.extend(_evidence_rows(incident, item, envelope.event.t_us, rank))
    rows.extend((ACTIONS, row) for row in _action_rows(incident, envelope))
    return rows


def _parse_incident(envelope: EventEnvelope) -> Incident:
    payload = envelope.event.payload
    try:
        incident = Incident.from_json(payload)
        canonical_json(incident.to_json())
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as exc:
        raise SpoolLineError(f"incident.recorded: not an incident ({exc!r:.200})") from exc
    attempt = incident.attempt
    for name in (incident.id, incident.run_id):
        if name is not None and not (isinstance(name, str) and RUN_ID_PATTERN.fullmatch(name)):
            raise SpoolLineError("incident.recorded: its id or its run is not an id")
    if any(len(culprit.id) > SHORT_TEXT_MAX for culprit in incident.culprits):
        raise SpoolLineError(
            f"incident.recorded: a culprit has more than {SHORT_TEXT_MAX} characters"
        )
    if attempt is not None and (not isinstance(attempt, int) or not 0 <= attempt <= _RANK_MAX):
        raise SpoolLineError("incident.recorded: its attempt is not a number")
    if not (0 <= incident.authority <= _RANK_MAX and 0 <= incident.rev <= _RANK_MAX):
        raise SpoolLineError("incident.recorded: its authority or rev is out of range")
    return incident


def account_key(envelope: EventEnvelope, rank: str) -> str:
    """Return the order key of one snapshot: those of root are above those of users."""
    return f"{schema.ROOT_ACCOUNT}{rank}" if envelope.is_from_root else rank


def incident_row(incident: Incident, body: Row, cluster_id: str, rank: str) -> Row:
    """Return the row of *incident*, *body* being its JSON."""
    culprit = incident.culprits[0] if incident.culprits else None
    return {
        "id": incident.id,
        "cluster_id": cluster_id,
        "run_id": incident.run_id,
        "attempt": incident.attempt,
        "failure_class": incident.failure_class.value,
        "category": incident.failure_class.category,
        "side": incident.side.value,
        "confidence": incident.confidence.value,
        "state": incident.state.value,
        "title": incident.title,
        "first_us": incident.first_us,
        "detected_us": incident.detected_us,
        "resolved_us": incident.resolved_us,
        "culprit_kind": culprit and culprit.kind.value,
        "culprit_id": culprit and culprit.id,
        "culprit_how": incident.culprit_how,
        "lost_us": _lost_us(incident),
        "authority": incident.authority,
        "rev": incident.rev,
        "body": body,
        "account_key": rank,
    }


def _lost_us(incident: Incident) -> int:
    return min(round(incident.lost_seconds * 1e6), 2**62)


def _revision_row(incident: Incident, body: Row, envelope: EventEnvelope) -> Row:
    return {
        "id": envelope.event.id,
        "incident_id": incident.id,
        "authority": incident.authority,
        "rev": incident.rev,
        "t_us": envelope.event.t_us,
        "actor": f"{'agent' if incident.run_id else 'gate'} on {envelope.event.node}",
        "state": incident.state.value,
        "body": body,
    }


def _culprit_rows(incident: Incident, envelope: EventEnvelope, rank: str) -> Iterator[Row]:
    named = [item.id for item in incident.culprits if item.kind is EntityKind.NODE]
    # An agent reports about all nodes of its run, a check about its own.
    others = named if incident.run_id else [envelope.event.node]
    for entity in incident.culprits:
        if len(entity.id) <= SHORT_TEXT_MAX:
            where = [entity.id] if entity.kind is EntityKind.NODE else others
            yield {
                **_entity_columns(incident, entity),
                "node_id": derived_id("node", envelope.cluster, where[0])
                if len(where) == 1
                else None,
                "account_key": rank,
            }


def _strike_rows(incident: Incident, envelope: EventEnvelope, rank: str) -> Iterator[Row]:
    weight = _WEIGHTS.get(incident.confidence)
    is_of_node = incident.side is Side.INFRA and incident.run_id is None
    counts = is_of_node and incident.failure_class not in _NO_STRIKE
    if not (envelope.is_from_root and counts and weight and incident.culprits):
        return
    culprit = incident.culprits[0]
    if culprit.kind not in _MOVABLE or len(culprit.id) > SHORT_TEXT_MAX:
        culprit = Entity(EntityKind.NODE, envelope.event.node)
    yield {
        **_entity_columns(incident, culprit),
        "node_id": envelope.node_id,
        "t_us": incident.first_us,
        "failure_class": incident.failure_class.value,
        "weight": weight,
        "account_key": rank,
    }


def _entity_columns(incident: Incident, entity: Entity) -> Row:
    return {"incident_id": incident.id, "entity_kind": entity.kind.value, "entity_id": entity.id}


def _attempt_rows(incident: Incident, envelope: EventEnvelope, rank: str) -> Iterator[ProjectedRow]:
    if incident.run_id is None or incident.attempt is None:
        return
    run = {
        "id": incident.run_id,
        "cluster_id": envelope.cluster_id,
        "first_seen_us": envelope.event.t_us,
    }
    yield RUNS, run
    yield ATTEMPTS, attempt_stub(incident.run_id, incident.attempt)
    hit = {
        "incident_id": incident.id,
        "attempt_id": attempt_id(incident.run_id, incident.attempt),
        "lost_us": _lost_us(incident),
        "account_key": rank,
    }
    yield INCIDENT_ATTEMPTS, hit


def _evidence_rows(
    incident: Incident, item: Evidence, t_us: int, rank: str
) -> Iterator[ProjectedRow]:
    text = "\n".join(item.lines) or item.text
    text = text[-EVIDENCE_CHARS_MAX:]
    digest = hashlib.sha256(text.encode("utf-8")).hexdigest()
    evidence_id = derived_id("evidence", digest)
    excerpt = {
        "id": evidence_id,
        "sha256": digest,
        "text": text,
        "n_lines": text.count("\n") + 1,
        "first_us": t_us,
    }
    link = {
        "incident_id": incident.id,
        "evidence_id": evidence_id,
        "role": item.role.value,
        "file_ref": item.path,
        "account_key": rank,
    }
    yield EVIDENCE, excerpt
    yield INCIDENT_EVIDENCE, link


def _action_rows(incident: Incident, envelope: EventEnvelope) -> Iterator[Row]:
    for kind in dict.fromkeys(incident.actions):
        idem_key = f"{incident.id}/{kind.value}"
        yield {
            "id": derived_id("action", idem_key),
            "incident_id": incident.id,
            "node_id": envelope.node_id,
            "kind": kind.value,
            "requested_us": envelope.event.t_us,
            # For a node these are the actions of its runbook; the actual ones are in node_states.
            "actor": "policy" if incident.run_id else "runbook",
            "dry_run": incident.run_id is None,
            "idem_key": idem_key,
            "requested_key": envelope.earliest_key,
        }


DAY_US = 86_400_000_000
_LINES_MAX = 30
_LINE_CHARS_MAX = 400


def tool_failed(envelope: EventEnvelope) -> list[ProjectedRow]:
    """Return the incident of a ``tool.failed``, as its earliest event reports it."""
    event, payload = envelope.event, envelope.event.payload
    # A malformed event is not refused: that would hide the failure.
    what = str(payload.get("what") or "gpuops")[:SHORT_TEXT_MAX]
    error = str(payload.get("error") or "no error was reported")[:_LINE_CHARS_MAX]
    trace = str(payload.get("traceback") or "").splitlines()[-_LINES_MAX:]
    # A user's report must not replace that of another user.
    key = () if envelope.is_from_root or event.run_id is None else (event.run_id,)
    where = f"on {event.node}" + (f" in run {event.run_id}" if event.run_id else "")
    incident = Incident(
        id=derived_id("tool", envelope.cluster, event.node, what, event.t_us // DAY_US, *key),
        failure_class=FailureClass.TOOL,
        side=Side.TOOL,
        confidence=Confidence.CONFIRMED,
        state=IncidentState.CLOSED,
        title=f"gpuops itself failed {where}: {what}",
        first_us=event.t_us,
        detected_us=event.t_us,
        evidence=(
            Evidence(
                role=Role.ROOT, text=error, lines=tuple(line[:_LINE_CHARS_MAX] for line in trace)
            ),
        ),
        resolved_us=event.t_us,
        resolution="gpuops continued without it; no node and no job is blamed for it",
    )
    rank = account_key(envelope, envelope.earliest_key)
    return [(INCIDENTS, incident_row(incident, incident.to_json(), envelope.cluster_id, rank))]
