"""Clusters, nodes and boots; and the stubs of runs and attempts that any event implies."""

from gpuops.store import schema
from gpuops.store.facts.envelope import Envelope, Fact, attempt_id
from gpuops.store.merge import Merge

CLUSTERS = Merge(table=schema.clusters, key=("id",))
NODES = Merge(table=schema.nodes, key=("id",), least=("first_seen_us",), greatest=("last_seen_us",))
BOOTS = Merge(
    table=schema.boots,
    key=("node_id", "boot_id"),
    best={"seen_key": ("boot_us", "kernel", "driver", "gpuops_version")},
)
RUNS = Merge(
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
ATTEMPTS = Merge(
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


def common(envelope: Envelope) -> list[Fact]:
    """Return the rows that every event implies, so that no order of arrival leaves a gap."""
    event = envelope.event
    facts: list[Fact] = [
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
        facts.append((RUNS, run))
        if event.attempt is not None:
            facts.append((ATTEMPTS, attempt_stub(event.run_id, event.attempt)))
    return facts


def attempt_stub(run_id: str, ordinal: int) -> dict[str, object]:
    """Return the least that is known of an attempt."""
    return {"id": attempt_id(run_id, ordinal), "run_id": run_id, "ordinal": ordinal}


def node_seen(envelope: Envelope) -> list[Fact]:
    """Return the boot that a ``node.seen`` tells of."""
    fields = envelope.fields()
    boot = {
        "node_id": envelope.node_id,
        "boot_id": fields.word("boot_id") or envelope.line.boot_id,
        "boot_us": fields.integer("boot_us"),
        "kernel": fields.text("kernel"),
        "driver": fields.text("driver"),
        "gpuops_version": fields.text("gpuops_version"),
        "seen_key": envelope.order_key,
    }
    return [(BOOTS, boot)]
