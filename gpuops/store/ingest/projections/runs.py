"""Runs, their attempts, progress by minute, and decisions.

Every agent of a run reports the same attempt: it began when the first of them began, ended when the
last of them ended, and failed if it failed on any node.
"""

import math
from typing import Any

from gpuops.store import schema
from gpuops.store.ingest.envelope import EventEnvelope, PayloadReader, ProjectedRow, attempt_id
from gpuops.store.ingest.merge import MergeRule, Row
from gpuops.store.ingest.projections.nodes import ATTEMPTS, RUNS, attempt_stub
from gpuops.store.spool.format import SpoolLineError

ATTEMPT_NODES = MergeRule(
    table=schema.attempt_nodes,
    key=("attempt_id", "node_id"),
    least=("group_rank", "from_us"),
    greatest=("to_us",),
)
PROGRESS = MergeRule(
    table=schema.progress,
    key=("attempt_id", "minute_us"),
    greatest=("step_last", "beats", "step_time_p50_us", "step_time_max_us"),
)
# A failure on any node outranks a cancellation, which outranks a node whose part completed.
_OUTCOME_WEIGHT = {"completed": 1, "cancelled": 2, "failed": 3}


def run_started(envelope: EventEnvelope) -> list[ProjectedRow]:
    """Return the run as reported by the first agent that started it."""
    fields, event = envelope.payload_reader(), envelope.event
    run = {
        **_run_stub(envelope),
        "created_us": event.t_us,
        "name": fields.text("name"),
        "user": fields.text("user"),
        "command": fields.texts("command"),
        "run_dir": fields.text("run_dir"),
        "torch_version": fields.text("torch_version"),
        "gpuops_version": fields.text("gpuops_version"),
        "max_restarts": fields.integer("max_restarts"),
        "start_key": envelope.earliest_key,
    }
    return [(RUNS, run)]


def run_ended(envelope: EventEnvelope) -> list[ProjectedRow]:
    """Return the end of the run; a later attempt's end replaces an earlier one's."""
    fields, event = envelope.payload_reader(), envelope.event
    outcome = fields.required_short_text("outcome")
    attempt = -1 if event.attempt is None else event.attempt
    run = {
        **_run_stub(envelope),
        "ended_us": event.t_us,
        "outcome": outcome,
        "exit_code": fields.integer("exit_code"),
        "reason": fields.text("reason"),
        "end_key": f"{attempt + 1:010d}/{_outcome_weight(outcome)}/{envelope.order_key}",
    }
    return [(RUNS, run)]


def attempt_started(envelope: EventEnvelope) -> list[ProjectedRow]:
    """Return the attempt and this node's part in it."""
    fields = envelope.payload_reader()
    group_rank = fields.integer("group_rank")
    attempt = {
        **_attempt_stub(envelope),
        "start_us": fields.integer("start_us"),
        "world_size": fields.integer("world_size"),
        "n_nodes": fields.integer("n_nodes"),
        "torch_run_id": fields.text("torch_run_id"),
        "log_dir": fields.text("log_dir"),
        "slurm_job_id": fields.short_text("slurm_job_id"),
        "slurm_restart_count": fields.integer("slurm_restart_count"),
        # The agent of group rank 0 takes precedence, then the earliest.
        "start_key": f"{10**10 - 1 - _group_rank_or_last(group_rank):010d}/{envelope.earliest_key}",
    }
    part = _attempt_node(envelope, group_rank=group_rank, from_us=fields.integer("start_us"))
    return [(ATTEMPTS, attempt), part]


def attempt_first_step(envelope: EventEnvelope) -> list[ProjectedRow]:
    """Return when the attempt made its first step."""
    fields = envelope.payload_reader()
    step = fields.integer("step")
    attempt = {
        **_attempt_stub(envelope),
        "first_step_us": fields.integer("first_step_us"),
        "steps_first": step,
        "step_source": fields.text("step_source"),
        "step_key": envelope.earliest_key,
    }
    return [(ATTEMPTS, attempt)]


def attempt_caught_up(envelope: EventEnvelope) -> list[ProjectedRow]:
    """Return when the attempt passed every step of the attempts before it."""
    fields = envelope.payload_reader()
    attempt = {**_attempt_stub(envelope), "redo_done_us": fields.integer("redo_done_us")}
    return [(ATTEMPTS, attempt)]


def attempt_progress(envelope: EventEnvelope) -> list[ProjectedRow]:
    """Return one minute of the attempt: of several agents' values the greatest counts."""
    fields = envelope.payload_reader()
    run_id, ordinal = _run_and_attempt(envelope)
    minute = {
        "attempt_id": attempt_id(run_id, ordinal),
        "minute_us": fields.required_integer("minute_us"),
        "step_last": fields.integer("step_last"),
        "beats": fields.integer("beats"),
        "step_time_p50_us": fields.integer("step_time_p50_us"),
        "step_time_max_us": fields.integer("step_time_max_us"),
    }
    return [(PROGRESS, minute)]


def attempt_ended(envelope: EventEnvelope) -> list[ProjectedRow]:
    """Return the attempt's end and this node's."""
    fields = envelope.payload_reader()
    outcome = fields.required_short_text("outcome")
    attempt = {
        **_attempt_stub(envelope),
        "end_us": fields.integer("end_us"),
        "last_step_us": fields.integer("last_step_us"),
        "steps_first": fields.integer("steps_first"),
        "steps_last": fields.integer("steps_last"),
        "beats": fields.integer("beats"),
        "outcome": outcome,
        "exit_code": fields.integer("exit_code"),
        "end_key": f"{_outcome_weight(outcome)}/{envelope.order_key}",
    }
    return [(ATTEMPTS, attempt), _attempt_node(envelope, to_us=fields.integer("end_us"))]


def _run_stub(envelope: EventEnvelope) -> Row:
    event = envelope.event
    if event.run_id is None:
        raise SpoolLineError(f"{event.kind} without a run")
    return {"id": event.run_id, "cluster_id": envelope.cluster_id, "first_seen_us": event.t_us}


def _run_and_attempt(envelope: EventEnvelope) -> tuple[str, int]:
    event = envelope.event
    if event.run_id is None or event.attempt is None:
        raise SpoolLineError(f"{event.kind} without a run and an attempt")
    return event.run_id, event.attempt


def _attempt_stub(envelope: EventEnvelope) -> Row:
    run_id, ordinal = _run_and_attempt(envelope)
    return {"id": attempt_id(run_id, ordinal), "run_id": run_id, "ordinal": ordinal}


def _attempt_node(envelope: EventEnvelope, **columns: int | None) -> ProjectedRow:
    run_id, ordinal = _run_and_attempt(envelope)
    part = {
        "attempt_id": attempt_id(run_id, ordinal),
        "node_id": envelope.node_id,
        "role": "worker",
        **columns,
    }
    return ATTEMPT_NODES, part


def _outcome_weight(outcome: str) -> int:
    return _OUTCOME_WEIGHT.get(outcome, 0)


def _group_rank_or_last(group_rank: int | None) -> int:
    return 10**10 - 1 if group_rank is None else min(max(group_rank, 0), 10**10 - 1)


# One row for each event, also if two agents decided about the same failure.
DECISIONS = MergeRule(table=schema.decisions, key=("id",))
EXCLUSIONS = MergeRule(
    table=schema.exclusions,
    key=("run_id", "excluded"),
    best={"told_key": ("t_us", "ordinal", "reason", "told_by")},
)


def decision_made(envelope: EventEnvelope) -> list[ProjectedRow]:
    """Return the decision in a ``decision.made``; the payload is stored unchanged."""
    event, fields = envelope.event, envelope.payload_reader()
    if event.run_id is None or event.attempt is None:
        raise SpoolLineError("decision.made without a run and an attempt")
    decision = _inner_reader(event.payload, "decision")
    budget = _inner_reader(event.payload, "budget")
    row = {
        "id": event.id,
        "run_id": event.run_id,
        "attempt_id": attempt_id(event.run_id, event.attempt),
        "ordinal": event.attempt,
        "node_id": envelope.node_id,
        "t_us": event.t_us,
        "verdict": decision.required_short_text("verdict"),
        "rule": decision.required_short_text("rule"),
        "reason": decision.required_text("reason"),
        "exit_code": decision.integer("exit_code"),
        "backoff_us": _seconds_to_us(event.payload["decision"].get("backoff_s")),
        "restarts_used": budget.integer("used"),
        "restarts_max": budget.integer("max"),
        "note": fields.text("note"),
        "body": event.payload,
    }
    return [
        (RUNS, _run_row(envelope)),
        (ATTEMPTS, attempt_stub(event.run_id, event.attempt)),
        (DECISIONS, row),
    ]


def node_excluded(envelope: EventEnvelope) -> list[ProjectedRow]:
    """Return the exclusion in a ``node.excluded``; of several the first counts."""
    event, fields = envelope.event, envelope.payload_reader()
    if event.run_id is None:
        raise SpoolLineError("node.excluded without a run")
    row = {
        "run_id": event.run_id,
        "excluded": fields.required_short_text("excluded"),
        "t_us": event.t_us,
        "ordinal": event.attempt,
        "reason": fields.required_text("reason"),
        "told_by": event.node,
        "told_key": envelope.earliest_key,
    }
    return [(RUNS, _run_row(envelope)), (EXCLUSIONS, row)]


def _run_row(envelope: EventEnvelope) -> dict[str, Any]:
    return {
        "id": envelope.event.run_id,
        "cluster_id": envelope.cluster_id,
        "first_seen_us": envelope.event.t_us,
    }


def _inner_reader(payload: dict[str, Any], name: str) -> PayloadReader:
    inner = payload.get(name)
    if not isinstance(inner, dict):
        raise SpoolLineError(f"decision.made: {name} is not an object")
    return PayloadReader(inner, f"{name} of decision.made")


def _seconds_to_us(seconds: object) -> int | None:
    if isinstance(seconds, bool) or not isinstance(seconds, int | float):
        return None
    is_plain = math.isfinite(seconds) and 0 <= seconds < 1e9
    return round(seconds * 1e6) if is_plain else None
