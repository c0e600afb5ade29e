"""A check run, the result of each of its checks, and the parts of the node that root saw in it."""

from collections.abc import Iterator
from typing import Any

from gpuops.store import schema
from gpuops.store.facts.envelope import Envelope, Fact
from gpuops.store.facts.places import BOOTS
from gpuops.store.fields import Fields
from gpuops.store.lines import LineError
from gpuops.store.merge import Merge, Row

CHECK_RUNS = Merge(table=schema.check_runs, key=("id",))
CHECK_RESULTS = Merge(table=schema.check_results, key=("check_run_id", "ordinal"))
COMPONENTS = Merge(
    table=schema.components,
    key=("node_id", "kind", "component_id"),
    least=("first_seen_us",),
    greatest=("last_seen_us",),
)
_COMPONENTS = ("gpu", "nic")


def check_ran(envelope: Envelope) -> list[Fact]:
    """Return the run of a suite and what it found."""
    fields, event = envelope.fields(), envelope.event
    run = {
        "id": event.id,
        "node_id": envelope.node_id,
        "suite": fields.wanted_word("suite"),
        "trigger": fields.wanted_word("trigger"),
        "start_us": fields.wanted_integer("start_us"),
        "end_us": fields.wanted_integer("end_us"),
        "verdict": fields.wanted_word("verdict"),
        "late": fields.texts("late"),
        "job_id": fields.word("job_id"),
        "profile": fields.text("profile"),
        "mode": fields.text("mode"),
    }
    findings = event.payload.get("findings", [])
    if not isinstance(findings, list):
        raise fields.refuse("findings", "a list")
    results = [_result(event.id, n, finding) for n, finding in enumerate(findings)]
    return [
        (CHECK_RUNS, run),
        *_boot(envelope, fields),
        *((CHECK_RESULTS, result) for result in results),
        *_components(envelope, results),
    ]


def _boot(envelope: Envelope, fields: Fields) -> Iterator[Fact]:
    boot = {
        "node_id": envelope.node_id,
        "boot_id": envelope.line.boot_id,
        "boot_us": fields.integer("boot_us"),
        # Below every key of a node.seen, which tells more; of check runs the first one's counts.
        "seen_key": f"-{envelope.earliest_key}",
    }
    if envelope.is_roots and boot["boot_us"] is not None:
        yield BOOTS, boot


def _components(envelope: Envelope, results: list[Row]) -> Iterator[Fact]:
    seen = {(row["entity_kind"], row["entity_id"]) for row in results}
    for kind, component_id in sorted(seen):
        if envelope.is_roots and kind in _COMPONENTS:
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
        raise LineError(f"check.ran: finding {ordinal} is not one")
    fields = Fields(finding, f"finding {ordinal}")
    entity = Fields(finding["entity"], f"entity of finding {ordinal}")
    value: Any = finding.get("value")
    number = float(value) if type(value) in (int, float) else None
    return {
        "check_run_id": run_id,
        "ordinal": ordinal,
        "check_name": fields.wanted_word("check"),
        "entity_kind": entity.wanted_word("kind"),
        "entity_id": entity.wanted_word("id"),
        "verdict": fields.wanted_word("status"),
        "value": number,
        "value_text": fields.text("value") if number is None else None,
        "unit": fields.text("unit"),
        "threshold": fields.text("threshold"),
        "source": fields.text("source"),
        "message": fields.wanted_text("message"),
        "failure_class": fields.text("failure_class"),
        "unknown_reason": fields.text("unknown_reason"),
    }
