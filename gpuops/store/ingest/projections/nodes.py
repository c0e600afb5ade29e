"""Clusters, nodes, boots, drains, repairs and check runs.

Only events written by root count for a node's history.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from gpuops.model import EntityKind
from gpuops.store import schema
from gpuops.store.checks import check_results, check_runs, check_samples
from gpuops.store.columns import derived_id
from gpuops.store.ingest.envelope import EventEnvelope, PayloadReader, ProjectedRow, attempt_id
from gpuops.store.ingest.merge import MergeRule, Row
from gpuops.store.spool.format import SpoolLineError
from gpuops.units import US_PER_S

CLUSTERS = MergeRule(table=schema.clusters, key=("id",))
NODES = MergeRule(
    table=schema.nodes, key=("id",), least=("first_seen_us",), greatest=("last_seen_us",)
)
BOOTS = MergeRule(
    table=schema.boots,
    key=("node_id", "boot_id"),
    best={"seen_key": ("boot_us", "kernel", "driver", "gpuops_version")},
)
RUNS = MergeRule(
    table=schema.runs,
    key=("id",),
    least=("cluster_id", "first_seen_us", "created_us"),
    greatest=("ended_us",),
    best={
        "start_key": (
            "name",
            "user",
            "command",
            "run_dir",
            "torch_version",
            "gpuops_version",
            "max_restarts",
        ),
        "end_key": ("outcome", "exit_code", "reason"),
    },
)
ATTEMPTS = MergeRule(
    table=schema.attempts,
    key=("id",),
    least=("start_us", "first_step_us", "redo_done_us", "steps_first"),
    greatest=("last_step_us", "end_us", "world_size", "n_nodes", "steps_last", "beats"),
    best={
        "start_key": ("torch_run_id", "log_dir", "slurm_job_id", "slurm_restart_count"),
        "step_key": ("step_source",),
        "end_key": ("outcome", "exit_code"),
    },
)


def common_rows(envelope: EventEnvelope) -> list[ProjectedRow]:
    """Return the rows that every event implies, so that its references exist in any order."""
    event = envelope.event
    rows: list[ProjectedRow] = [
        (CLUSTERS, {"id": envelope.cluster_id, "name": envelope.cluster}),
        (
            NODES,
            {
                "id": envelope.node_id,
                "cluster_id": envelope.cluster_id,
                "hostname": event.node,
                "first_seen_us": event.t_us,
                "last_seen_us": event.t_us,
            },
        ),
    ]
    if event.run_id is not None:
        run = {"id": event.run_id, "cluster_id": envelope.cluster_id, "first_seen_us": event.t_us}
        rows.append((RUNS, run))
        if event.attempt is not None:
            rows.append((ATTEMPTS, attempt_stub(event.run_id, event.attempt)))
    return rows


def attempt_stub(run_id: str, ordinal: int) -> dict[str, object]:
    """Return the columns that every attempt has."""
    return {"id": attempt_id(run_id, ordinal), "run_id": run_id, "ordinal": ordinal}


def node_seen(envelope: EventEnvelope) -> list[ProjectedRow]:
    """Return the boot in a ``node.seen``."""
    fields = envelope.payload_reader()
    boot = {
        "node_id": envelope.node_id,
        "boot_id": fields.short_text("boot_id") or envelope.line.boot_id,
        "boot_us": fields.integer("boot_us"),
        "kernel": fields.text("kernel"),
        "driver": fields.text("driver"),
        "gpuops_version": fields.text("gpuops_version"),
        "seen_key": envelope.order_key,
    }
    return [(BOOTS, boot)]


REPAIRS = MergeRule(table=schema.repairs, key=("id",))
NODE_STATES = MergeRule(table=schema.node_states, key=("id",))
_KINDS = frozenset(kind.value for kind in EntityKind)


def node_drained(envelope: EventEnvelope) -> list[ProjectedRow]:
    """Return the drain in a ``node.drained``."""
    return _state(envelope, "drained")


def node_resumed(envelope: EventEnvelope) -> list[ProjectedRow]:
    """Return the end of a drain in a ``node.resumed``."""
    return _state(envelope, "resumed")


def node_repaired(envelope: EventEnvelope) -> list[ProjectedRow]:
    """Return the repair in a ``node.repaired``, after which the node is in repair."""
    fields = envelope.payload_reader()
    entity = envelope.event.payload.get("entity")
    if not isinstance(entity, dict) or entity.get("kind") not in _KINDS:
        raise fields.field_error("entity", "one")
    repair = {
        "id": envelope.event.id,
        "node_id": envelope.node_id,
        "entity_kind": entity["kind"],
        "entity_id": PayloadReader(entity, "the entity of node.repaired").required_short_text("id"),
        "t_us": envelope.event.t_us,
        "by": fields.required_short_text("by"),
        "what": fields.required_text("what"),
    }
    return [
        *([(REPAIRS, repair)] if envelope.is_from_root else []),
        *_state_row(envelope, "repair", repair["what"], repair["by"]),
    ]


def _state(envelope: EventEnvelope, state: str) -> list[ProjectedRow]:
    fields = envelope.payload_reader()
    reason, actor = fields.required_text("reason"), fields.required_short_text("actor")
    return _state_row(envelope, state, reason, actor, job_id=fields.short_text("job_id"))


def _state_row(
    envelope: EventEnvelope, state: str, reason: object, actor: object, **changes: object
) -> list[ProjectedRow]:
    """Return the *state* of the node that an event of root reports."""
    row = {
        "id": envelope.event.id,
        "node_id": envelope.node_id,
        "t_us": envelope.event.t_us,
        "state": state,
        "reason": reason,
        "actor": actor,
        **changes,
    }
    return [(NODE_STATES, row)] if envelope.is_from_root else []


_BURNIN = "burnin"
_PASSED = ("pass", "skip", "warn")


def _burnin_states(envelope: EventEnvelope, run: Row, began_us: int) -> list[ProjectedRow]:
    """Return that a node was in a burn-in, and in service once it had passed; else nothing."""
    if run["suite"] != _BURNIN:
        return []
    tested = _state_row(envelope, "burn_in", "gpuops burnin", "gpuops", t_us=began_us)
    if run["status"] not in _PASSED:
        return tested
    passed_id = derived_id("in_service", envelope.event.id)
    text = f"its burn-in ended with {run['status']}"
    return [*tested, *_state_row(envelope, "in_service", text, "gpuops", id=passed_id)]


CHECK_RUNS = MergeRule(
    table=check_runs,
    key=("id",),
    greatest=("last_us", "runs"),
    best={"recorded_key": ("end_us", "late", "job_id", "profile", "mode")},
)
CHECK_SAMPLES = MergeRule(
    table=check_samples,
    key=("node_id", "suite", "hour_us"),
    best={"sampled_key": ("numbers",)},
)
CHECK_RESULTS = MergeRule(table=check_results, key=("check_run_id", "ordinal"))
COMPONENTS = MergeRule(
    table=schema.components,
    key=("node_id", "kind", "component_id"),
    least=("first_seen_us",),
    greatest=("last_seen_us",),
)
_COMPONENTS = ("gpu", "nic")
_UNREMARKABLE = ("pass", "skip")
_HOUR_US = 3600 * US_PER_S


def check_ran(envelope: EventEnvelope) -> list[ProjectedRow]:
    """Return the run of a suite, and its findings that did not pass or that changed."""
    fields, event = envelope.payload_reader(), envelope.event
    start_us = fields.required_integer("start_us")
    run = {
        **_run_columns(envelope, fields),
        "id": event.id,
        "start_us": start_us,
        "end_us": fields.required_integer("end_us"),
        "last_us": start_us,
        "runs": 1,
        "late": fields.texts("late"),
        "job_id": fields.short_text("job_id"),
        "profile": fields.text("profile"),
        "mode": fields.text("mode"),
        "recorded_key": envelope.order_key,
    }
    findings, parts = (_list(fields, event.payload, name) for name in ("findings", "parts"))
    results = [_result(event.id, n, finding) for n, finding in enumerate(findings)]
    seen = {(row["entity_kind"], row["entity_id"]) for row in results}
    seen |= {_part(n, part) for n, part in enumerate(parts)}
    # Without this key a release wrote it that sent every finding.
    has_changes_only = "parts" in event.payload
    kept = (row for row in results if has_changes_only or row["status"] not in _UNREMARKABLE)
    return [
        (CHECK_RUNS, run),
        *_boot(envelope, fields),
        *((CHECK_RESULTS, result) for result in kept),
        *_components(envelope, seen),
        *_sample(envelope, fields, start_us),
        *_burnin_states(envelope, run, start_us),
    ]


def check_unchanged(envelope: EventEnvelope) -> list[ProjectedRow]:
    """Return the recorded run that a run with the same result extends; only root's count."""
    fields = envelope.payload_reader()
    last_us = fields.required_integer("start_us")
    run = {
        **_run_columns(envelope, fields),
        "id": fields.required_short_text("run"),
        "start_us": fields.required_integer("first_us"),
        "last_us": last_us,
        "runs": fields.required_integer("runs"),
    }
    rows = [(CHECK_RUNS, run), *_sample(envelope, fields, last_us)]
    rows += _burnin_states(envelope, run, last_us)
    return rows if envelope.is_from_root else []


def _run_columns(envelope: EventEnvelope, fields: PayloadReader) -> Row:
    return {
        "node_id": envelope.node_id,
        "suite": fields.required_short_text("suite"),
        "trigger": fields.required_short_text("trigger"),
        "status": fields.required_short_text("verdict"),
        "origin_uid": envelope.uid,
    }


def _list(fields: PayloadReader, payload: Mapping[str, Any], name: str) -> list[Any]:
    values = payload.get(name) or []
    if not isinstance(values, list):
        raise fields.field_error(name, "a list")
    return values


def _sample(
    envelope: EventEnvelope, fields: PayloadReader, start_us: int
) -> Iterator[ProjectedRow]:
    numbers = envelope.event.payload.get("numbers")
    if numbers is None:
        return
    if not isinstance(numbers, dict) or not all(
        type(value) in (int, float) for value in numbers.values()
    ):
        raise fields.field_error("numbers", "a table of numbers")
    if envelope.is_from_root:
        row = {
            "node_id": envelope.node_id,
            "suite": fields.required_short_text("suite"),
            "hour_us": start_us // _HOUR_US * _HOUR_US,
            "numbers": numbers,
            "sampled_key": envelope.order_key,
        }
        yield CHECK_SAMPLES, row


def _boot(envelope: EventEnvelope, fields: PayloadReader) -> Iterator[ProjectedRow]:
    boot = {
        "node_id": envelope.node_id,
        "boot_id": envelope.line.boot_id,
        "boot_us": fields.integer("boot_us"),
        # Below every key of a node.seen, which has more data; among check runs the first counts.
        "seen_key": f"-{envelope.earliest_key}",
    }
    if envelope.is_from_root and boot["boot_us"] is not None:
        yield BOOTS, boot


def _part(ordinal: int, part: object) -> tuple[str, str]:
    if not isinstance(part, dict):
        raise SpoolLineError(f"check.ran: part {ordinal} is not one")
    fields = PayloadReader(part, f"part {ordinal}")
    return fields.required_short_text("kind"), fields.required_short_text("id")


def _components(envelope: EventEnvelope, seen: set[tuple[str, str]]) -> Iterator[ProjectedRow]:
    for kind, component_id in sorted(seen):
        if envelope.is_from_root and kind in _COMPONENTS:
            component = {
                "node_id": envelope.node_id,
                "kind": kind,
                "component_id": component_id,
                "first_seen_us": envelope.event.t_us,
                "last_seen_us": envelope.event.t_us,
            }
            yield COMPONENTS, component


def _result(run_id: str, ordinal: int, finding: Any) -> Row:  # noqa: ANN401 JSON of another process
    if not isinstance(finding, dict) or not isinstance(finding.get("entity"), dict):
        raise SpoolLineError(f"check.ran: finding {ordinal} is not one")
    fields = PayloadReader(finding, f"finding {ordinal}")
    entity = PayloadReader(finding["entity"], f"entity of finding {ordinal}")
    value: Any = finding.get("value")
    number = float(value) if type(value) in (int, float) else None
    return {
        "check_run_id": run_id,
        "ordinal": ordinal,
        "check_name": fields.required_short_text("check"),
        "entity_kind": entity.required_short_text("kind"),
        "entity_id": entity.required_short_text("id"),
        "status": fields.required_short_text("status"),
        "value": number,
        "value_text": fields.text("value") if number is None else None,
        "unit": fields.text("unit"),
        "threshold": fields.text("threshold"),
        "source": fields.text("source"),
        "message": fields.required_text("message"),
        "failure_class": fields.text("failure_class"),
        "unknown_reason": fields.text("unknown_reason"),
    }
