"""Clusters, nodes, boots, drains and repairs; only root's word counts for a node's history."""

from gpuops.model import EntityKind
from gpuops.store import schema
from gpuops.store.ingest.envelope import EventEnvelope, PayloadReader, ProjectedRow, attempt_id
from gpuops.store.ingest.merge import MergeRule

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
    """Return the rows that every event implies, so that no order of arrival leaves a gap."""
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
        run = {
            "id": event.run_id,
            "cluster_id": envelope.cluster_id,
            "first_seen_us": event.t_us,
        }
        rows.append((RUNS, run))
        if event.attempt is not None:
            rows.append((ATTEMPTS, attempt_stub(event.run_id, event.attempt)))
    return rows


def attempt_stub(run_id: str, ordinal: int) -> dict[str, object]:
    """Return the least that is known of an attempt."""
    return {"id": attempt_id(run_id, ordinal), "run_id": run_id, "ordinal": ordinal}


def node_seen(envelope: EventEnvelope) -> list[ProjectedRow]:
    """Return the boot that a ``node.seen`` tells of."""
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
    """Return the drain that a ``node.drained`` tells of."""
    return _state(envelope, "drained")


def node_resumed(envelope: EventEnvelope) -> list[ProjectedRow]:
    """Return the end of a drain that a ``node.resumed`` tells of."""
    return _state(envelope, "resumed")


def node_repaired(envelope: EventEnvelope) -> list[ProjectedRow]:
    """Return the repair that a ``node.repaired`` tells of."""
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
    return [(REPAIRS, repair)] if envelope.is_from_root else []


def _state(envelope: EventEnvelope, state: str) -> list[ProjectedRow]:
    fields = envelope.payload_reader()
    row = {
        "id": envelope.event.id,
        "node_id": envelope.node_id,
        "t_us": envelope.event.t_us,
        "state": state,
        "reason": fields.required_text("reason"),
        "actor": fields.required_short_text("actor"),
        "job_id": fields.short_text("job_id"),
    }
    return [(NODE_STATES, row)] if envelope.is_from_root else []
