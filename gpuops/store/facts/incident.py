"""Incidents from their snapshots: the best account's newest one stands, all are kept.

Accounts are ordered by authority, then revision, then event id (`gpuops.model.Incident`); root's
account of an incident outweighs any user's. An incident of a node that root tells of is a strike
against what it blames.
"""

import hashlib
from collections.abc import Iterator

from gpuops.model import Confidence, Entity, EntityKind, Evidence, FailureClass, Incident, Side
from gpuops.store import schema
from gpuops.store.columns import derived_id
from gpuops.store.facts.envelope import Envelope, Fact, attempt_id
from gpuops.store.facts.places import ATTEMPTS, RUNS, attempt_stub
from gpuops.store.fields import WORD_MAX
from gpuops.store.lines import RUN_ID, LineError, canonical
from gpuops.store.merge import Merge, Row

EVIDENCE_CHARS_MAX = 8192
_RANK_MAX = 10**9

INCIDENTS = Merge(
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
REVISIONS = Merge(table=schema.incident_revisions, key=("id",))
CULPRITS = Merge(table=schema.incident_culprits, key=("incident_id", "entity_kind", "entity_id"))
STRIKES = Merge(
    table=schema.strikes,
    key=("incident_id", "entity_kind", "entity_id"),
    best={"account_key": ("node_id", "t_us", "failure_class", "weight")},
)
# How much an incident weighs; one without a known cause is no strike.
_WEIGHTS = {Confidence.CONFIRMED: 1.0, Confidence.PROBABLE: 0.5}
# What a person wrote down wrong, a job left behind or all nodes share says nothing about a part.
_NO_STRIKE = frozenset(
    {
        FailureClass.GPU_CONFIG,
        FailureClass.GPU_LEAKED_MEMORY,
        FailureClass.HOST_CONFIG,
        FailureClass.HOST_LEFTOVERS,
        FailureClass.SITE_CHECK,
        FailureClass.STORAGE_NO_SPACE,
        FailureClass.STORAGE_SHARED_FS,
        FailureClass.TOOL,
    }
)
# What keeps its name when it moves to another node; the rest counts against its node.
_MOVABLE = (EntityKind.GPU, EntityKind.NIC)

INCIDENT_ATTEMPTS = Merge(
    table=schema.incident_attempts,
    key=("incident_id", "attempt_id"),
    best={"account_key": ("lost_us",)},
)
EVIDENCE = Merge(table=schema.evidence, key=("id",), least=("first_us",))
INCIDENT_EVIDENCE = Merge(
    table=schema.incident_evidence,
    key=("incident_id", "evidence_id"),
    best={"account_key": ("role", "file_ref")},
)
ACTIONS = Merge(
    table=schema.actions,
    key=("id",),
    least=("requested_us",),
    best={"requested_key": ("actor", "dry_run", "detail", "node_id")},
)


def incident_recorded(envelope: Envelope) -> list[Fact]:
    """Return the incident, this revision of it, and what hangs on it."""
    incident = _parse(envelope)
    body = incident.to_json()
    rank = account_key(
        envelope, f"{incident.authority:010d}/{incident.rev:010d}/{envelope.event.id}"
    )
    facts: list[Fact] = [
        (INCIDENTS, incident_row(incident, body, envelope.cluster_id, rank)),
        (REVISIONS, _revision(incident, body, envelope)),
    ]
    facts.extend((CULPRITS, row) for row in _culprits(incident))
    facts.extend((STRIKES, row) for row in _strikes(incident, envelope, rank))
    facts.extend(_attempt(incident, envelope, rank))
    for item in incident.evidence:
        facts.extend(_evidence(incident, item, envelope.event.t_us, rank))
    facts.extend((ACTIONS, row) for row in _actions(incident, envelope))
    return facts


def _parse(envelope: Envelope) -> Incident:
    payload = envelope.event.payload
    try:
        incident = Incident.from_json(payload)
        canonical(incident.to_json())
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as exc:
        raise LineError(f"incident.recorded: not an incident ({exc!r:.200})") from exc
    attempt = incident.attempt
    for name in (incident.id, incident.run_id):
        if name is not None and not (isinstance(name, str) and RUN_ID.fullmatch(name)):
            raise LineError("incident.recorded: its id or its run is not an id")
    if any(len(culprit.id) > WORD_MAX for culprit in incident.culprits):
        raise LineError(f"incident.recorded: a culprit has more than {WORD_MAX} characters")
    if attempt is not None and (not isinstance(attempt, int) or not 0 <= attempt <= _RANK_MAX):
        raise LineError("incident.recorded: its attempt is not a number")
    if not (0 <= incident.authority <= _RANK_MAX and 0 <= incident.rev <= _RANK_MAX):
        raise LineError("incident.recorded: its authority or rev is out of range")
    return incident


def account_key(envelope: Envelope, rank: str) -> str:
    """Return the order of one account: any of root's is above those of users and of old."""
    return f"root/{rank}" if envelope.is_roots else rank


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


def _revision(incident: Incident, body: Row, envelope: Envelope) -> Row:
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


def _culprits(incident: Incident) -> Iterator[Row]:
    for entity in incident.culprits:
        if len(entity.id) <= WORD_MAX:
            yield _entity(incident, entity)


def _strikes(incident: Incident, envelope: Envelope, rank: str) -> Iterator[Row]:
    weight = _WEIGHTS.get(incident.confidence)
    is_of_node = incident.side is Side.INFRA and incident.run_id is None
    counts = is_of_node and incident.failure_class not in _NO_STRIKE
    if not (envelope.is_roots and counts and weight and incident.culprits):
        return
    culprit = incident.culprits[0]
    if culprit.kind not in _MOVABLE or len(culprit.id) > WORD_MAX:
        culprit = Entity(EntityKind.NODE, envelope.event.node)
    yield {
        **_entity(incident, culprit),
        "node_id": envelope.node_id,
        "t_us": incident.first_us,
        "failure_class": incident.failure_class.value,
        "weight": weight,
        "account_key": rank,
    }


def _entity(incident: Incident, entity: Entity) -> Row:
    return {
        "incident_id": incident.id,
        "entity_kind": entity.kind.value,
        "entity_id": entity.id,
    }


def _attempt(incident: Incident, envelope: Envelope, rank: str) -> Iterator[Fact]:
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


def _evidence(incident: Incident, item: Evidence, t_us: int, rank: str) -> Iterator[Fact]:
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


def _actions(incident: Incident, envelope: Envelope) -> Iterator[Row]:
    for kind in dict.fromkeys(incident.actions):
        idem_key = f"{incident.id}/{kind.value}"
        yield {
            "id": derived_id("action", idem_key),
            "incident_id": incident.id,
            "node_id": envelope.node_id,
            "kind": kind.value,
            "requested_us": envelope.event.t_us,
            # Of a node the gate only says what its runbook asks for; what was done is in
            # node_states.
            "actor": "policy" if incident.run_id else "runbook",
            "dry_run": incident.run_id is None,
            "idem_key": idem_key,
            "requested_key": envelope.earliest_key,
        }
