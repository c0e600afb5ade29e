"""Measurements of a burn-in, and tests of pairs in a sweep.

Those of users are kept with their uid: only root's are learned from, or count for a node.
"""

from typing import Any

from gpuops.model import EntityKind
from gpuops.store.burnin import measurements, pair_tests
from gpuops.store.ingest.envelope import EventEnvelope, PayloadReader, ProjectedRow
from gpuops.store.ingest.merge import MergeRule
from gpuops.store.spool.format import NAME_PATTERN

MEASUREMENTS = MergeRule(table=measurements, key=("id",))
PAIR_TESTS = MergeRule(table=pair_tests, key=("id",))
STATUSES = frozenset({"pass", "warn", "unknown", "fail"})
OUTCOMES = frozenset({"pass", "slow", "fail", "timeout"})
_KINDS = frozenset(kind.value for kind in EntityKind)
_SOFTWARE_MAX = 64


def burnin_measured(envelope: EventEnvelope) -> list[ProjectedRow]:
    """Return the measurement in a ``burnin.measured``."""
    fields, payload = envelope.payload_reader(), envelope.event.payload
    part = payload.get("part")
    if not isinstance(part, dict) or part.get("kind") not in _KINDS:
        raise fields.field_error("part", "one")
    if not isinstance(payload.get("higher_is_better"), bool):
        raise fields.field_error("higher_is_better", "true or false")
    row = {
        "id": envelope.event.id,
        "node_id": envelope.node_id,
        "check_run_id": fields.required_short_text("check_run"),
        "t_us": envelope.event.t_us,
        "suite": fields.required_short_text("suite"),
        "test": fields.required_short_text("test"),
        "part_kind": part["kind"],
        "part_id": PayloadReader(part, "the part of burnin.measured").required_short_text("id"),
        "parameters": fields.required_short_text("parameters"),
        "value": fields.number("value"),
        "spread_percent": fields.number("spread_percent"),
        "repeats": fields.required_integer("repeats"),
        "unit": fields.required_short_text("unit"),
        "higher_is_better": payload["higher_is_better"],
        "status": _one_of(fields, "status", STATUSES),
        "shape": fields.required_short_text("shape"),
        "software": _software(fields, payload.get("software")),
        "origin_uid": envelope.uid,
    }
    return [(MEASUREMENTS, row)]


def sweep_tested(envelope: EventEnvelope) -> list[ProjectedRow]:
    """Return the test of a pair in a ``sweep.tested``."""
    fields = envelope.payload_reader()
    names = fields.texts("nodes")
    if len(set(names)) != 2 or len(names) != 2 or not all(map(NAME_PATTERN.fullmatch, names)):
        raise fields.field_error("nodes", "the names of two nodes")
    first, second = sorted(names)
    row = {
        "id": envelope.event.id,
        "cluster_id": envelope.cluster_id,
        "sweep_id": fields.required_short_text("sweep"),
        "round": fields.required_integer("round"),
        "node_a": first,
        "node_b": second,
        "rail": fields.integer("rail"),
        "outcome": _one_of(fields, "outcome", OUTCOMES),
        "value": fields.number("value"),
        "unit": fields.short_text("unit"),
        "parameters": fields.required_short_text("parameters"),
        "t_us": envelope.event.t_us,
        "origin_uid": envelope.uid,
    }
    return [(PAIR_TESTS, row)]


def _one_of(fields: PayloadReader, name: str, words: frozenset[str]) -> str:
    word = fields.required_short_text(name)
    if word not in words:
        raise fields.field_error(name, f"one of {', '.join(sorted(words))}")
    return word


def _software(fields: PayloadReader, versions: Any) -> dict[str, str]:  # noqa: ANN401 JSON of another process
    if (
        not isinstance(versions, dict)
        or len(versions) > _SOFTWARE_MAX
        or not all(isinstance(text, str) for text in versions.values())
    ):
        raise fields.field_error("software", f"a table of at most {_SOFTWARE_MAX} versions")
    reader = PayloadReader(versions, "the software of burnin.measured")
    return {name: reader.required_short_text(name) for name in versions}
