"""Check runs hold what changed; hourly samples; culprits with their node and account.

The rows of these tables are filled from the events again.
"""

import sqlalchemy as sa
from alembic import op

from gpuops.store.views import drop_views

revision = "0004"
down_revision = "0001"

_KEY = sa.Text().with_variant(sa.Text(collation="C"), "postgresql")


def upgrade() -> None:
    """Replace the tables of check runs and of culprits."""
    op.drop_table("check_results")
    op.drop_table("check_runs")
    op.create_table(
        "check_runs",
        sa.Column("id", _KEY, primary_key=True),
        sa.Column("node_id", _KEY, nullable=False),
        sa.Column("suite", sa.Text, nullable=False),
        sa.Column("trigger", sa.Text, nullable=False),
        sa.Column("start_us", sa.BigInteger, nullable=False),
        sa.Column("end_us", sa.BigInteger),
        sa.Column("last_us", sa.BigInteger, nullable=False),
        sa.Column("runs", sa.BigInteger, nullable=False),
        sa.Column("status", sa.Text, nullable=False),
        sa.Column("origin_uid", sa.BigInteger, nullable=False),
        sa.Column("late", sa.Text),
        sa.Column("job_id", sa.Text),
        sa.Column("profile", sa.Text),
        sa.Column("mode", sa.Text),
        sa.Column("recorded_key", _KEY),
    )
    op.create_index("ix_check_runs_node_id_start_us", "check_runs", ["node_id", "start_us"])
    op.create_index("ix_check_runs_job_id", "check_runs", ["job_id"])
    _create_results("status")
    op.create_table(
        "check_samples",
        sa.Column("node_id", _KEY, nullable=False),
        sa.Column("suite", _KEY, nullable=False),
        sa.Column("hour_us", sa.BigInteger, nullable=False),
        sa.Column("numbers", sa.Text, nullable=False),
        sa.Column("sampled_key", _KEY, nullable=False),
        sa.PrimaryKeyConstraint("node_id", "suite", "hour_us"),
    )
    _create_culprits(sa.Column("node_id", _KEY), sa.Column("account_key", _KEY, nullable=False))
    op.create_index("ix_incident_culprits_node_id", "incident_culprits", ["node_id"])


def _create_culprits(*columns: sa.Column[str]) -> None:
    op.drop_table("incident_culprits")
    op.create_table(
        "incident_culprits",
        sa.Column("incident_id", _KEY, sa.ForeignKey("incidents.id"), nullable=False),
        sa.Column("entity_kind", _KEY, nullable=False),
        sa.Column("entity_id", _KEY, nullable=False),
        *columns,
        sa.PrimaryKeyConstraint("incident_id", "entity_kind", "entity_id"),
    )
    op.create_index(
        "ix_incident_culprits_entity_kind_entity_id",
        "incident_culprits",
        ["entity_kind", "entity_id"],
    )


def _create_results(status: str) -> None:
    op.create_table(
        "check_results",
        sa.Column("check_run_id", _KEY, sa.ForeignKey("check_runs.id"), nullable=False),
        sa.Column("ordinal", sa.BigInteger, nullable=False),
        sa.Column("check_name", sa.Text, nullable=False),
        sa.Column("entity_kind", sa.Text, nullable=False),
        sa.Column("entity_id", sa.Text, nullable=False),
        sa.Column(status, sa.Text, nullable=False),
        sa.Column("value", sa.Double),
        sa.Column("value_text", sa.Text),
        sa.Column("unit", sa.Text),
        sa.Column("threshold", sa.Text),
        sa.Column("source", sa.Text),
        sa.Column("message", sa.Text, nullable=False),
        sa.Column("failure_class", sa.Text),
        sa.Column("unknown_reason", sa.Text),
        sa.PrimaryKeyConstraint("check_run_id", "ordinal"),
    )
    op.create_index(
        f"ix_check_results_check_name_{status}", "check_results", ["check_name", status]
    )
    op.create_index(
        "ix_check_results_entity_kind_entity_id", "check_results", ["entity_kind", "entity_id"]
    )


def downgrade() -> None:
    """Make these tables as they were."""
    drop_views(op.get_bind())
    _create_culprits()
    op.drop_table("check_samples")
    op.drop_table("check_results")
    op.drop_table("check_runs")
    op.create_table(
        "check_runs",
        sa.Column("id", _KEY, primary_key=True),
        sa.Column("node_id", _KEY, sa.ForeignKey("nodes.id"), nullable=False),
        sa.Column("suite", sa.Text, nullable=False),
        sa.Column("trigger", sa.Text, nullable=False),
        sa.Column("start_us", sa.BigInteger, nullable=False),
        sa.Column("end_us", sa.BigInteger, nullable=False),
        sa.Column("verdict", sa.Text, nullable=False),
        sa.Column("late", sa.Text, nullable=False),
        sa.Column("job_id", sa.Text),
        sa.Column("profile", sa.Text),
        sa.Column("mode", sa.Text),
    )
    op.create_index("ix_check_runs_node_id_start_us", "check_runs", ["node_id", "start_us"])
    op.create_index("ix_check_runs_job_id", "check_runs", ["job_id"])
    _create_results("verdict")
