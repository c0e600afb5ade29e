"""What was decided after a failure of a run, and which nodes were left out of it."""

import math
from typing import Any

from gpuops.store import schema
from gpuops.store.facts.envelope import Envelope, Fact, attempt_id
from gpuops.store.facts.places import ATTEMPTS, RUNS, attempt_stub
from gpuops.store.fields import Fields
from gpuops.store.lines import LineError
from gpuops.store.merge import Merge

# Two deciders of one failure would both be on record: each event is one.
DECISIONS = Merge(table=schema.decisions, key=("id",))
EXCLUSIONS = Merge(
    table=schema.exclusions,
    key=("run_id", "excluded"),
    best={"told_key": ("t_us", "ordinal", "reason", "told_by")},
)


def decision_made(envelope: Envelope) -> list[Fact]:
    """Return the decision that a ``decision.made`` tells of; the payload is kept whole."""
    event, fields = envelope.event, envelope.fields()
    if event.run_id is None or event.attempt is None:
        raise LineError("decision.made without a run and an attempt")
    made = _inner(event.payload, "decision")
    budget = _inner(event.payload, "budget")
    row = {
        "id": event.id,
        "run_id": event.run_id,
        "attempt_id": attempt_id(event.run_id, event.attempt),
        "ordinal": event.attempt,
        "node_id": envelope.node_id,
        "t_us": event.t_us,
        "verdict": made.wanted_word("verdict"),
        "rule": made.wanted_word("rule"),
        "reason": made.wanted_text("reason"),
        "exit_code": made.integer("exit_code"),
        "backoff_us": _microseconds(event.payload["decision"].get("backoff_s")),
        "restarts_used": budget.integer("used"),
        "restarts_max": budget.integer("max"),
        "note": fields.text("note"),
        "body": event.payload,
    }
    return [
        (RUNS, _run_stub(envelope)),
        (ATTEMPTS, attempt_stub(event.run_id, event.attempt)),
        (DECISIONS, row),
    ]


def node_excluded(envelope: Envelope) -> list[Fact]:
    """Return the exclusion that a ``node.excluded`` tells of; of several the first stands."""
    event, fields = envelope.event, envelope.fields()
    if event.run_id is None:
        raise LineError("node.excluded without a run")
    row = {
        "run_id": event.run_id,
        "excluded": fields.wanted_word("excluded"),
        "t_us": event.t_us,
        "ordinal": event.attempt,
        "reason": fields.wanted_text("reason"),
        "told_by": event.node,
        "told_key": envelope.earliest_key,
    }
    return [(RUNS, _run_stub(envelope)), (EXCLUSIONS, row)]


def _run_stub(envelope: Envelope) -> dict[str, Any]:
    return {
        "id": envelope.event.run_id,
        "cluster_id": envelope.cluster_id,
        "first_seen_us": envelope.event.t_us,
    }


def _inner(payload: dict[str, Any], name: str) -> Fields:
    inner = payload.get(name)
    if not isinstance(inner, dict):
        raise LineError(f"decision.made: {name} is not an object")
    return Fields(inner, f"{name} of decision.made")


def _microseconds(seconds: object) -> int | None:
    if isinstance(seconds, bool) or not isinstance(seconds, int | float):
        return None
    is_plain = math.isfinite(seconds) and 0 <= seconds < 1e9
    return round(seconds * 1e6) if is_plain else None
