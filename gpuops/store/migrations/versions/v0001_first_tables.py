"""The first tables: facts, runs, checks and incidents."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None

# Frozen: what gpuops.store.schema was at this revision, whatever becomes of it.
_TABLES = sa.MetaData()
_KEY = sa.Text().with_variant(sa.Text(collation="C"), "postgresql")

sa.Table(
    "clusters",
    _TABLES,
    sa.Column("id", _KEY, nullable=False),
    sa.Column("name", sa.Text(), nullable=False),
    sa.PrimaryKeyConstraint("id", name="pk_clusters"),
    sa.UniqueConstraint("name", name="uq_clusters_name"),
)
sa.Table(
    "events",
    _TABLES,
    sa.Column("id", _KEY, nullable=False),
    sa.Column("origin", _KEY, nullable=False),
    sa.Column("boot_id", _KEY, nullable=False),
    sa.Column("seq", sa.BigInteger(), nullable=False),
    sa.Column("origin_uid", sa.BigInteger(), nullable=False),
    sa.Column("cluster", sa.Text(), nullable=False),
    sa.Column("node", sa.Text(), nullable=False),
    sa.Column("kind", sa.Text(), nullable=False),
    sa.Column("severity", sa.BigInteger(), nullable=False),
    sa.Column("t_us", sa.BigInteger(), nullable=False),
    sa.Column("run_id", _KEY),
    sa.Column("attempt", sa.BigInteger()),
    sa.Column("payload", sa.Text(), nullable=False),
    sa.Column("schema_v", sa.BigInteger(), nullable=False),
    sa.Column("ingested_us", sa.BigInteger(), nullable=False),
    sa.PrimaryKeyConstraint("id", name="pk_events"),
    sa.UniqueConstraint("origin", "boot_id", "seq", name="uq_events_origin_boot_id_seq"),
    sa.Index("ix_events_kind_t_us", "kind", "t_us"),
    sa.Index("ix_events_node_t_us", "node", "t_us"),
    sa.Index("ix_events_run_id_t_us", "run_id", "t_us"),
)
sa.Table(
    "evidence",
    _TABLES,
    sa.Column("id", _KEY, nullable=False),
    sa.Column("sha256", sa.Text(), nullable=False),
    sa.Column("text", sa.Text(), nullable=False),
    sa.Column("n_lines", sa.BigInteger(), nullable=False),
    sa.Column("first_us", sa.BigInteger(), nullable=False),
    sa.PrimaryKeyConstraint("id", name="pk_evidence"),
    sa.UniqueConstraint("sha256", name="uq_evidence_sha256"),
)
sa.Table(
    "ingest_log",
    _TABLES,
    sa.Column("origin", _KEY, nullable=False),
    sa.Column("boot_id", _KEY, nullable=False),
    sa.Column("origin_uid", sa.BigInteger(), nullable=False),
    sa.Column("first_seq", sa.BigInteger(), nullable=False),
    sa.Column("last_seq", sa.BigInteger(), nullable=False),
    sa.Column("rows", sa.BigInteger(), nullable=False),
    sa.PrimaryKeyConstraint("origin", "boot_id", name="pk_ingest_log"),
)
sa.Table(
    "incidents",
    _TABLES,
    sa.Column("id", _KEY, nullable=False),
    sa.Column("cluster_id", _KEY, nullable=False),
    sa.Column("run_id", _KEY),
    sa.Column("attempt", sa.BigInteger()),
    sa.Column("failure_class", sa.Text(), nullable=False),
    sa.Column("category", sa.Text(), nullable=False),
    sa.Column("side", sa.Text(), nullable=False),
    sa.Column("confidence", sa.Text(), nullable=False),
    sa.Column("state", sa.Text(), nullable=False),
    sa.Column("title", sa.Text(), nullable=False),
    sa.Column("first_us", sa.BigInteger(), nullable=False),
    sa.Column("detected_us", sa.BigInteger(), nullable=False),
    sa.Column("resolved_us", sa.BigInteger()),
    sa.Column("culprit_kind", sa.Text()),
    sa.Column("culprit_id", sa.Text()),
    sa.Column("culprit_how", sa.Text()),
    sa.Column("lost_us", sa.BigInteger(), nullable=False),
    sa.Column("authority", sa.BigInteger(), nullable=False),
    sa.Column("rev", sa.BigInteger(), nullable=False),
    sa.Column("body", sa.Text(), nullable=False),
    sa.Column("account_key", _KEY, nullable=False),
    sa.PrimaryKeyConstraint("id", name="pk_incidents"),
    sa.ForeignKeyConstraint(["cluster_id"], ["clusters.id"], name="fk_incidents_cluster_id"),
    sa.Index(
        "ix_incidents_culprit_kind_culprit_id_first_us", "culprit_kind", "culprit_id", "first_us"
    ),
    sa.Index("ix_incidents_first_us", "first_us"),
    sa.Index("ix_incidents_run_id", "run_id"),
)
sa.Table(
    "nodes",
    _TABLES,
    sa.Column("id", _KEY, nullable=False),
    sa.Column("cluster_id", _KEY, nullable=False),
    sa.Column("hostname", sa.Text(), nullable=False),
    sa.Column("instance_id", sa.Text()),
    sa.Column("first_seen_us", sa.BigInteger(), nullable=False),
    sa.Column("last_seen_us", sa.BigInteger(), nullable=False),
    sa.PrimaryKeyConstraint("id", name="pk_nodes"),
    sa.ForeignKeyConstraint(["cluster_id"], ["clusters.id"], name="fk_nodes_cluster_id"),
    sa.UniqueConstraint(
        "cluster_id", "hostname", "instance_id", name="uq_nodes_cluster_id_hostname_instance_id"
    ),
)
sa.Table(
    "runs",
    _TABLES,
    sa.Column("id", _KEY, nullable=False),
    sa.Column("cluster_id", _KEY, nullable=False),
    sa.Column("first_seen_us", sa.BigInteger(), nullable=False),
    sa.Column("created_us", sa.BigInteger()),
    sa.Column("name", sa.Text()),
    sa.Column("user", sa.Text()),
    sa.Column("command", sa.Text()),
    sa.Column("run_dir", sa.Text()),
    sa.Column("torch_version", sa.Text()),
    sa.Column("gpuops_version", sa.Text()),
    sa.Column("max_restarts", sa.BigInteger()),
    sa.Column("start_key", _KEY),
    sa.Column("ended_us", sa.BigInteger()),
    sa.Column("outcome", sa.Text()),
    sa.Column("exit_code", sa.BigInteger()),
    sa.Column("reason", sa.Text()),
    sa.Column("end_key", _KEY),
    sa.PrimaryKeyConstraint("id", name="pk_runs"),
    sa.ForeignKeyConstraint(["cluster_id"], ["clusters.id"], name="fk_runs_cluster_id"),
    sa.Index("ix_runs_first_seen_us", "first_seen_us"),
)
sa.Table(
    "actions",
    _TABLES,
    sa.Column("id", _KEY, nullable=False),
    sa.Column("incident_id", _KEY),
    sa.Column("node_id", _KEY),
    sa.Column("kind", sa.Text(), nullable=False),
    sa.Column("requested_us", sa.BigInteger(), nullable=False),
    sa.Column("done_us", sa.BigInteger()),
    sa.Column("ok", sa.Boolean()),
    sa.Column("actor", sa.Text(), nullable=False),
    sa.Column("dry_run", sa.Boolean(), nullable=False),
    sa.Column("detail", sa.Text()),
    sa.Column("idem_key", sa.Text(), nullable=False),
    sa.Column("requested_key", _KEY, nullable=False),
    sa.PrimaryKeyConstraint("id", name="pk_actions"),
    sa.UniqueConstraint("idem_key", name="uq_actions_idem_key"),
    sa.ForeignKeyConstraint(["incident_id"], ["incidents.id"], name="fk_actions_incident_id"),
    sa.ForeignKeyConstraint(["node_id"], ["nodes.id"], name="fk_actions_node_id"),
)
sa.Table(
    "attempts",
    _TABLES,
    sa.Column("id", _KEY, nullable=False),
    sa.Column("run_id", _KEY, nullable=False),
    sa.Column("ordinal", sa.BigInteger(), nullable=False),
    sa.Column("start_us", sa.BigInteger()),
    sa.Column("first_step_us", sa.BigInteger()),
    sa.Column("redo_done_us", sa.BigInteger()),
    sa.Column("last_step_us", sa.BigInteger()),
    sa.Column("end_us", sa.BigInteger()),
    sa.Column("world_size", sa.BigInteger()),
    sa.Column("n_nodes", sa.BigInteger()),
    sa.Column("steps_first", sa.BigInteger()),
    sa.Column("steps_last", sa.BigInteger()),
    sa.Column("beats", sa.BigInteger()),
    sa.Column("torch_run_id", sa.Text()),
    sa.Column("log_dir", sa.Text()),
    sa.Column("slurm_job_id", sa.Text()),
    sa.Column("slurm_restart_count", sa.BigInteger()),
    sa.Column("start_key", _KEY),
    sa.Column("step_source", sa.Text()),
    sa.Column("step_key", _KEY),
    sa.Column("outcome", sa.Text()),
    sa.Column("exit_code", sa.BigInteger()),
    sa.Column("end_key", _KEY),
    sa.PrimaryKeyConstraint("id", name="pk_attempts"),
    sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name="fk_attempts_run_id"),
    sa.UniqueConstraint("run_id", "ordinal", name="uq_attempts_run_id_ordinal"),
    sa.Index("ix_attempts_end_us", "end_us"),
    sa.Index("ix_attempts_slurm_job_id", "slurm_job_id"),
)
sa.Table(
    "boots",
    _TABLES,
    sa.Column("node_id", _KEY, nullable=False),
    sa.Column("boot_id", _KEY, nullable=False),
    sa.Column("boot_us", sa.BigInteger()),
    sa.Column("kernel", sa.Text()),
    sa.Column("driver", sa.Text()),
    sa.Column("gpuops_version", sa.Text()),
    sa.Column("seen_key", _KEY, nullable=False),
    sa.PrimaryKeyConstraint("node_id", "boot_id", name="pk_boots"),
    sa.ForeignKeyConstraint(["node_id"], ["nodes.id"], name="fk_boots_node_id"),
)
sa.Table(
    "check_runs",
    _TABLES,
    sa.Column("id", _KEY, nullable=False),
    sa.Column("node_id", _KEY, nullable=False),
    sa.Column("suite", sa.Text(), nullable=False),
    sa.Column("trigger", sa.Text(), nullable=False),
    sa.Column("start_us", sa.BigInteger(), nullable=False),
    sa.Column("end_us", sa.BigInteger(), nullable=False),
    sa.Column("verdict", sa.Text(), nullable=False),
    sa.Column("late", sa.Text(), nullable=False),
    sa.PrimaryKeyConstraint("id", name="pk_check_runs"),
    sa.ForeignKeyConstraint(["node_id"], ["nodes.id"], name="fk_check_runs_node_id"),
    sa.Index("ix_check_runs_node_id_start_us", "node_id", "start_us"),
)
sa.Table(
    "incident_evidence",
    _TABLES,
    sa.Column("incident_id", _KEY, nullable=False),
    sa.Column("evidence_id", _KEY, nullable=False),
    sa.Column("role", sa.Text(), nullable=False),
    sa.Column("file_ref", sa.Text()),
    sa.Column("account_key", _KEY, nullable=False),
    sa.PrimaryKeyConstraint("incident_id", "evidence_id", name="pk_incident_evidence"),
    sa.ForeignKeyConstraint(
        ["evidence_id"], ["evidence.id"], name="fk_incident_evidence_evidence_id"
    ),
    sa.ForeignKeyConstraint(
        ["incident_id"], ["incidents.id"], name="fk_incident_evidence_incident_id"
    ),
)
sa.Table(
    "incident_revisions",
    _TABLES,
    sa.Column("id", _KEY, nullable=False),
    sa.Column("incident_id", _KEY, nullable=False),
    sa.Column("authority", sa.BigInteger(), nullable=False),
    sa.Column("rev", sa.BigInteger(), nullable=False),
    sa.Column("t_us", sa.BigInteger(), nullable=False),
    sa.Column("actor", sa.Text(), nullable=False),
    sa.Column("state", sa.Text(), nullable=False),
    sa.Column("body", sa.Text(), nullable=False),
    sa.PrimaryKeyConstraint("id", name="pk_incident_revisions"),
    sa.ForeignKeyConstraint(
        ["incident_id"], ["incidents.id"], name="fk_incident_revisions_incident_id"
    ),
    sa.Index("ix_incident_revisions_incident_id", "incident_id"),
)
sa.Table(
    "attempt_nodes",
    _TABLES,
    sa.Column("attempt_id", _KEY, nullable=False),
    sa.Column("node_id", _KEY, nullable=False),
    sa.Column("group_rank", sa.BigInteger()),
    sa.Column("from_us", sa.BigInteger()),
    sa.Column("to_us", sa.BigInteger()),
    sa.Column("role", sa.Text(), nullable=False),
    sa.PrimaryKeyConstraint("attempt_id", "node_id", name="pk_attempt_nodes"),
    sa.ForeignKeyConstraint(["attempt_id"], ["attempts.id"], name="fk_attempt_nodes_attempt_id"),
    sa.ForeignKeyConstraint(["node_id"], ["nodes.id"], name="fk_attempt_nodes_node_id"),
    sa.Index("ix_attempt_nodes_node_id_from_us", "node_id", "from_us"),
)
sa.Table(
    "check_results",
    _TABLES,
    sa.Column("check_run_id", _KEY, nullable=False),
    sa.Column("ordinal", sa.BigInteger(), nullable=False),
    sa.Column("check_name", sa.Text(), nullable=False),
    sa.Column("entity_kind", sa.Text(), nullable=False),
    sa.Column("entity_id", sa.Text(), nullable=False),
    sa.Column("verdict", sa.Text(), nullable=False),
    sa.Column("value", sa.Double()),
    sa.Column("value_text", sa.Text()),
    sa.Column("unit", sa.Text()),
    sa.Column("threshold", sa.Text()),
    sa.Column("source", sa.Text()),
    sa.Column("message", sa.Text(), nullable=False),
    sa.Column("failure_class", sa.Text()),
    sa.Column("unknown_reason", sa.Text()),
    sa.PrimaryKeyConstraint("check_run_id", "ordinal", name="pk_check_results"),
    sa.ForeignKeyConstraint(
        ["check_run_id"], ["check_runs.id"], name="fk_check_results_check_run_id"
    ),
    sa.Index("ix_check_results_check_name_verdict", "check_name", "verdict"),
    sa.Index("ix_check_results_entity_kind_entity_id", "entity_kind", "entity_id"),
)
sa.Table(
    "incident_attempts",
    _TABLES,
    sa.Column("incident_id", _KEY, nullable=False),
    sa.Column("attempt_id", _KEY, nullable=False),
    sa.Column("lost_us", sa.BigInteger(), nullable=False),
    sa.Column("account_key", _KEY, nullable=False),
    sa.PrimaryKeyConstraint("incident_id", "attempt_id", name="pk_incident_attempts"),
    sa.ForeignKeyConstraint(
        ["attempt_id"], ["attempts.id"], name="fk_incident_attempts_attempt_id"
    ),
    sa.ForeignKeyConstraint(
        ["incident_id"], ["incidents.id"], name="fk_incident_attempts_incident_id"
    ),
)
sa.Table(
    "progress",
    _TABLES,
    sa.Column("attempt_id", _KEY, nullable=False),
    sa.Column("minute_us", sa.BigInteger(), nullable=False),
    sa.Column("step_last", sa.BigInteger()),
    sa.Column("beats", sa.BigInteger()),
    sa.Column("step_time_p50_us", sa.BigInteger()),
    sa.Column("step_time_max_us", sa.BigInteger()),
    sa.PrimaryKeyConstraint("attempt_id", "minute_us", name="pk_progress"),
    sa.ForeignKeyConstraint(["attempt_id"], ["attempts.id"], name="fk_progress_attempt_id"),
)


def upgrade() -> None:
    """Create every table."""
    _TABLES.create_all(op.get_bind())


def downgrade() -> None:
    """Drop every table."""
    _TABLES.drop_all(op.get_bind())
