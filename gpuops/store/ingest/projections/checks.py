"""A check run, the result of each of its checks, and the parts of the node that root saw in it."""

from collections.abc import Iterator
from typing import Any

from gpuops.store import schema
from gpuops.store.ingest.envelope import EventEnvelope, PayloadReader, ProjectedRow
from gpuops.store.ingest.merge import MergeRule, Row
from gpuops.store.ingest.projections.nodes import BOOTS
from gpuops.store.spool.format import SpoolLineError

CHECK_RUNS = MergeRule(table=schema.check_runs, key=("id",))
CHECK_RESULTS = MergeRule(table=schema.check_results, key=("check_run_id", "ordinal"))
COMPONENTS = MergeRule(
    table=schema.components,
    key=("node_id", "kind", "component_id"),
    least=("first_seen_us",),
    greatest=("last_seen_us",),
)
_COMPONENTS = ("gpu", "nic")


def check_ran(envelope: EventEnvelope) -> list[ProjectedRow]:
    """Return the run of a suite and what it found."""
    fields, event = envelope.payload_reader(), envelope.event
    run = {
        "id": event.id,
        "node_id": envelope.node_id,
        "suite": fields.required_short_text("suite"),
        "trigger": fields.required_short_text("trigger"),
        "start_us": fields.required_integer("start_us"),
        "end_us": fields.required_integer("end_us"),
        "verdict": fields.required_short_text("verdict"),
        "late": fields.texts("late"),
        "job_id": fields.short_text("job_id"),
        "profile": fields.text("profile"),
        "mode": fields.text("mode"),
    }
    findings = event.payload.get("findings", [])
    if not isinstance(findings, list):
        raise fields.field_error("findings", "a list")
    results = [_result(event.id, n, finding) for n, finding in enumerate(findings)]
    return [
        (CHECK_RUNS, run),
        *_boot(envelope, fields),
        *((CHECK_RESULTS, result) for result in results),
        *_components(envelope, results),
    ]


def _boot(envelope: EventEnvelope, fields: PayloadReader) -> Iterator[ProjectedRow]:
    boot = {
        "node_id": envelope.node_id,
        "boot_id": envelope.line.boot_id,
        "boot_us": fields.integer("boot_us"),
        # Below every key of a node.seen, which tells more; of check runs the first one's counts.
        "seen_key": f"-{envelope.earliest_key}",
    }
    if envelope.is_from_root and boot["boot_us"] is not None:
        yield BOOTS, boot


def _components(envelope: EventEnvelope, results: list[Row]) -> Iterator[ProjectedRow]:
    seen = {(row["entity_kind"], row["entity_id"]) for row in results}
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
        "verdict": fields.required_short_text("status"),
        "value": number,
        "value_text": fields.text("value") if number is None else None,
        "unit": fields.text("unit"),
        "threshold": fields.text("threshold"),
        "source": fields.text("source"),
        "message": fields.required_text("message"),
        "failure_class": fields.text("failure_class"),
        "unknown_reason": fields.text("unknown_reason"),
    }
