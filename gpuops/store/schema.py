"""The tables. ``events`` is append-only; all others but `COORDINATION_TABLES` are derived from it.

Only runs of checks that change nothing are no events: they extend rows of `check_runs`, and add
samples (``UNSTORED_KINDS`` in `gpuops.store.ingest.projections.registry`).

The same on SQLite and Postgres, with identical rows: ids are text (UUIDv7 from a writer, UUIDv5 of
the natural key for a derived row), times are epoch microseconds UTC in ``*_us``, JSON is canonical
text. No foreign key refers from ``events`` to a derived table, because those can be dropped and
rebuilt from it.

Columns called ``*_key`` order the reports of several writers about one entity: sortable text, the
greatest takes precedence (`gpuops.store.ingest.merge`).
"""

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Double,
    ForeignKey,
    Index,
    PrimaryKeyConstraint,
    Table,
    Text,
    UniqueConstraint,
)

import gpuops.store.burnin
import gpuops.store.checks  # noqa: F401 both for their tables, which belong to metadata
from gpuops.store.columns import JsonText, Key
from gpuops.store.columns import metadata as metadata  # noqa: PLC0414 with all tables, from here
from gpuops.store.coordination import drain_permits, fuses

# Pre-releases wrote stores with the revisions 0002 and 0003, which are not of this sequence.
REVISION = "0005"
"""The revision of the newest migration: it makes these tables."""

ROOT_ACCOUNT = "root/"
"""With it begins the ``account_key`` of what root wrote: above those of users."""

events = Table(
    "events",
    metadata,
    Column("id", Key, primary_key=True),
    Column("origin", Key, nullable=False),
    Column("boot_id", Key, nullable=False),
    Column("seq", BigInteger, nullable=False),
    Column("origin_uid", BigInteger, nullable=False),
    Column("cluster", Text, nullable=False),
    Column("node", Text, nullable=False),
    Column("kind", Text, nullable=False),
    Column("severity", BigInteger, nullable=False),
    Column("t_us", BigInteger, nullable=False),
    Column("run_id", Key),
    Column("attempt", BigInteger),
    Column("payload", JsonText, nullable=False),
    Column("schema_v", BigInteger, nullable=False),
    Column("ingested_us", BigInteger, nullable=False),
    UniqueConstraint("origin", "boot_id", "seq"),
    Index(None, "node", "t_us"),
    Index(None, "run_id", "t_us"),
    Index(None, "kind", "t_us"),
)

clusters = Table(
    "clusters",
    metadata,
    Column("id", Key, primary_key=True),
    Column("name", Text, nullable=False, unique=True),
)

nodes = Table(
    "nodes",
    metadata,
    Column("id", Key, primary_key=True),
    Column("cluster_id", Key, ForeignKey("clusters.id"), nullable=False),
    Column("hostname", Text, nullable=False),
    Column("instance_id", Text),
    Column("first_seen_us", BigInteger, nullable=False),
    Column("last_seen_us", BigInteger, nullable=False),
    UniqueConstraint("cluster_id", "hostname", "instance_id"),
)

boots = Table(
    "boots",
    metadata,
    Column("node_id", Key, ForeignKey("nodes.id"), nullable=False),
    Column("boot_id", Key, nullable=False),
    Column("boot_us", BigInteger),
    Column("kernel", Text),
    Column("driver", Text),
    Column("gpuops_version", Text),
    Column("seen_key", Key, nullable=False),
    PrimaryKeyConstraint("node_id", "boot_id"),
)

runs = Table(
    "runs",
    metadata,
    Column("id", Key, primary_key=True),
    Column("cluster_id", Key, ForeignKey("clusters.id"), nullable=False),
    Column("first_seen_us", BigInteger, nullable=False),
    Column("created_us", BigInteger),
    Column("name", Text),
    Column("user", Text),
    Column("command", JsonText),
    Column("run_dir", Text),
    Column("torch_version", Text),
    Column("gpuops_version", Text),
    Column("max_restarts", BigInteger),
    Column("start_key", Key),
    Column("ended_us", BigInteger),
    Column("outcome", Text),
    Column("exit_code", BigInteger),
    Column("reason", Text),
    Column("end_key", Key),
    Index(None, "first_seen_us"),
)

attempts = Table(
    "attempts",
    metadata,
    Column("id", Key, primary_key=True),
    Column("run_id", Key, ForeignKey("runs.id"), nullable=False),
    Column("ordinal", BigInteger, nullable=False),
    Column("start_us", BigInteger),
    Column("first_step_us", BigInteger),
    Column("redo_done_us", BigInteger),
    Column("last_step_us", BigInteger),
    Column("end_us", BigInteger),
    Column("world_size", BigInteger),
    Column("n_nodes", BigInteger),
    Column("steps_first", BigInteger),
    Column("steps_last", BigInteger),
    Column("beats", BigInteger),
    Column("torch_run_id", Text),
    Column("log_dir", Text),
    Column("slurm_job_id", Text),
    Column("slurm_restart_count", BigInteger),
    Column("start_key", Key),
    Column("step_source", Text),
    Column("step_key", Key),
    Column("outcome", Text),
    Column("exit_code", BigInteger),
    Column("end_key", Key),
    UniqueConstraint("run_id", "ordinal"),
    Index(None, "end_us"),
    Index(None, "slurm_job_id"),
)

attempt_nodes = Table(
    "attempt_nodes",
    metadata,
    Column("attempt_id", Key, ForeignKey("attempts.id"), nullable=False),
    Column("node_id", Key, ForeignKey("nodes.id"), nullable=False),
    Column("group_rank", BigInteger),
    Column("from_us", BigInteger),
    Column("to_us", BigInteger),
    Column("role", Text, nullable=False),
    PrimaryKeyConstraint("attempt_id", "node_id"),
    Index(None, "node_id", "from_us"),
)

progress = Table(
    "progress",
    metadata,
    Column("attempt_id", Key, ForeignKey("attempts.id"), nullable=False),
    Column("minute_us", BigInteger, nullable=False),
    Column("step_last", BigInteger),
    Column("beats", BigInteger),
    Column("step_time_p50_us", BigInteger),
    Column("step_time_max_us", BigInteger),
    PrimaryKeyConstraint("attempt_id", "minute_us"),
)

incidents = Table(
    "incidents",
    metadata,
    Column("id", Key, primary_key=True),
    Column("cluster_id", Key, ForeignKey("clusters.id"), nullable=False),
    Column("run_id", Key),
    Column("attempt", BigInteger),
    Column("failure_class", Text, nullable=False),
    Column("category", Text, nullable=False),
    Column("side", Text, nullable=False),
    Column("confidence", Text, nullable=False),
    Column("state", Text, nullable=False),
    Column("title", Text, nullable=False),
    Column("first_us", BigInteger, nullable=False),
    Column("detected_us", BigInteger, nullable=False),
    Column("resolved_us", BigInteger),
    Column("culprit_kind", Text),
    Column("culprit_id", Text),
    Column("culprit_how", Text),
    Column("lost_us", BigInteger, nullable=False),
    Column("authority", BigInteger, nullable=False),
    Column("rev", BigInteger, nullable=False),
    Column("body", JsonText, nullable=False),
    Column("account_key", Key, nullable=False),
    Index(None, "first_us"),
    Index(None, "run_id"),
    Index(None, "culprit_kind", "culprit_id", "first_us"),
)

# Every culprit in any writer's report. It stands if the incident's account is the one that named
# it last (`v_culprits`). ``node_id``: where it was, if the report says or its node wrote it.
incident_culprits = Table(
    "incident_culprits",
    metadata,
    Column("incident_id", Key, ForeignKey("incidents.id"), nullable=False),
    Column("entity_kind", Key, nullable=False),
    Column("entity_id", Key, nullable=False),
    Column("node_id", Key),
    Column("account_key", Key, nullable=False),
    PrimaryKeyConstraint("incident_id", "entity_kind", "entity_id"),
    Index(None, "entity_kind", "entity_id"),
    Index(None, "node_id"),
)

incident_attempts = Table(
    "incident_attempts",
    metadata,
    Column("incident_id", Key, ForeignKey("incidents.id"), nullable=False),
    Column("attempt_id", Key, ForeignKey("attempts.id"), nullable=False),
    Column("lost_us", BigInteger, nullable=False),
    Column("account_key", Key, nullable=False),
    PrimaryKeyConstraint("incident_id", "attempt_id"),
)

incident_revisions = Table(
    "incident_revisions",
    metadata,
    Column("id", Key, primary_key=True),
    Column("incident_id", Key, ForeignKey("incidents.id"), nullable=False),
    Column("authority", BigInteger, nullable=False),
    Column("rev", BigInteger, nullable=False),
    Column("t_us", BigInteger, nullable=False),
    Column("actor", Text, nullable=False),
    Column("state", Text, nullable=False),
    Column("body", JsonText, nullable=False),
    Index(None, "incident_id"),
)

evidence = Table(
    "evidence",
    metadata,
    Column("id", Key, primary_key=True),
    Column("sha256", Text, nullable=False, unique=True),
    Column("text", Text, nullable=False),
    Column("n_lines", BigInteger, nullable=False),
    Column("first_us", BigInteger, nullable=False),
)

incident_evidence = Table(
    "incident_evidence",
    metadata,
    Column("incident_id", Key, ForeignKey("incidents.id"), nullable=False),
    Column("evidence_id", Key, ForeignKey("evidence.id"), nullable=False),
    Column("role", Text, nullable=False),
    Column("file_ref", Text),
    Column("account_key", Key, nullable=False),
    PrimaryKeyConstraint("incident_id", "evidence_id"),
)

actions = Table(
    "actions",
    metadata,
    Column("id", Key, primary_key=True),
    Column("incident_id", Key, ForeignKey("incidents.id")),
    Column("node_id", Key, ForeignKey("nodes.id")),
    Column("kind", Text, nullable=False),
    Column("requested_us", BigInteger, nullable=False),
    Column("done_us", BigInteger),
    Column("ok", Boolean),
    Column("actor", Text, nullable=False),
    Column("dry_run", Boolean, nullable=False),
    Column("detail", Text),
    Column("idem_key", Text, nullable=False, unique=True),
    Column("requested_key", Key, nullable=False),
)

# A GPU by its UUID or a network card by its GUID, on each node where it was seen.
components = Table(
    "components",
    metadata,
    Column("node_id", Key, ForeignKey("nodes.id"), nullable=False),
    Column("kind", Key, nullable=False),
    Column("component_id", Key, nullable=False),
    Column("first_seen_us", BigInteger, nullable=False),
    Column("last_seen_us", BigInteger, nullable=False),
    PrimaryKeyConstraint("node_id", "kind", "component_id"),
    Index(None, "kind", "component_id"),
)

strikes = Table(
    "strikes",
    metadata,
    Column("incident_id", Key, ForeignKey("incidents.id"), nullable=False),
    Column("entity_kind", Key, nullable=False),
    Column("entity_id", Key, nullable=False),
    Column("node_id", Key, ForeignKey("nodes.id"), nullable=False),
    Column("t_us", BigInteger, nullable=False),
    Column("failure_class", Text, nullable=False),
    Column("weight", Double, nullable=False),
    Column("account_key", Key, nullable=False),
    PrimaryKeyConstraint("incident_id", "entity_kind", "entity_id"),
    Index(None, "entity_kind", "entity_id", "t_us"),
    Index(None, "node_id", "t_us"),
)

repairs = Table(
    "repairs",
    metadata,
    Column("id", Key, primary_key=True),
    Column("node_id", Key, ForeignKey("nodes.id"), nullable=False),
    Column("entity_kind", Text, nullable=False),
    Column("entity_id", Text, nullable=False),
    Column("t_us", BigInteger, nullable=False),
    Column("by", Text, nullable=False),
    Column("what", Text, nullable=False),
    Index(None, "node_id", "t_us"),
)

node_states = Table(
    "node_states",
    metadata,
    Column("id", Key, primary_key=True),
    Column("node_id", Key, ForeignKey("nodes.id"), nullable=False),
    Column("t_us", BigInteger, nullable=False),
    Column("state", Text, nullable=False),
    Column("reason", Text, nullable=False),
    Column("actor", Text, nullable=False),
    Column("job_id", Text),
    Index(None, "node_id", "t_us"),
)

# One row for each ``decision.made``: what was decided after a failure, and in ``body`` on what.
decisions = Table(
    "decisions",
    metadata,
    Column("id", Key, primary_key=True),
    Column("run_id", Key, ForeignKey("runs.id"), nullable=False),
    Column("attempt_id", Key, ForeignKey("attempts.id"), nullable=False),
    Column("ordinal", BigInteger, nullable=False),
    Column("node_id", Key, ForeignKey("nodes.id"), nullable=False),
    Column("t_us", BigInteger, nullable=False),
    Column("verdict", Text, nullable=False),
    Column("rule", Text, nullable=False),
    Column("reason", Text, nullable=False),
    Column("exit_code", BigInteger),
    Column("backoff_us", BigInteger),
    Column("restarts_used", BigInteger),
    Column("restarts_max", BigInteger),
    Column("note", Text),
    Column("body", JsonText, nullable=False),
    Index(None, "run_id", "ordinal"),
    Index(None, "rule", "t_us"),
)

# Nodes that a run has excluded, by the name that the run has for them.
exclusions = Table(
    "exclusions",
    metadata,
    Column("run_id", Key, ForeignKey("runs.id"), nullable=False),
    Column("excluded", Key, nullable=False),
    Column("t_us", BigInteger, nullable=False),
    Column("ordinal", BigInteger),
    Column("reason", Text, nullable=False),
    Column("told_by", Text, nullable=False),
    Column("told_key", Key, nullable=False),
    PrimaryKeyConstraint("run_id", "excluded"),
    Index(None, "excluded", "t_us"),
)

ingest_log = Table(
    "ingest_log",
    metadata,
    Column("origin", Key, nullable=False),
    Column("boot_id", Key, nullable=False),
    Column("origin_uid", BigInteger, nullable=False),
    Column("first_seq", BigInteger, nullable=False),
    Column("last_seq", BigInteger, nullable=False),
    Column("rows", BigInteger, nullable=False),
    PrimaryKeyConstraint("origin", "boot_id"),
)

# Not history but coordination: recent drain requests, and the fuse that limits them.
COORDINATION_TABLES = (drain_permits, fuses)
"""The tables that are not derived from events: they cannot be rebuilt, and need not be."""
