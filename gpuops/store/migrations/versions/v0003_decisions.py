"""What was decided after each failure of a run, on what, and who was left out."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"

# Frozen: what gpuops.store.schema gained at this revision, whatever becomes of it.
_KEY = sa.Text().with_variant(sa.Text(collation="C"), "postgresql")


def upgrade() -> None:
    """Add the tables."""
    op.create_table(
        "decisions",
        sa.Column("id", _KEY, nullable=False),
        sa.Column("run_id", _KEY, nullable=False),
        sa.Column("attempt_id", _KEY, nullable=False),
        sa.Column("ordinal", sa.BigInteger(), nullable=False),
        sa.Column("node_id", _KEY, nullable=False),
        sa.Column("t_us", sa.BigInteger(), nullable=False),
        sa.Column("verdict", sa.Text(), nullable=False),
        sa.Column("rule", sa.Text(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("exit_code", sa.BigInteger()),
        sa.Column("backoff_us", sa.BigInteger()),
        sa.Column("restarts_used", sa.BigInteger()),
        sa.Column("restarts_max", sa.BigInteger()),
        sa.Column("note", sa.Text()),
        sa.Column("body", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_decisions"),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name="fk_decisions_run_id"),
        sa.ForeignKeyConstraint(["attempt_id"], ["attempts.id"], name="fk_decisions_attempt_id"),
        sa.ForeignKeyConstraint(["node_id"], ["nodes.id"], name="fk_decisions_node_id"),
        sa.Index("ix_decisions_run_id_ordinal", "run_id", "ordinal"),
        sa.Index("ix_decisions_rule_t_us", "rule", "t_us"),
    )
    op.create_table(
        "exclusions",
        sa.Column("run_id", _KEY, nullable=False),
        sa.Column("excluded", _KEY, nullable=False),
        sa.Column("t_us", sa.BigInteger(), nullable=False),
        sa.Column("ordinal", sa.BigInteger()),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("told_by", sa.Text(), nullable=False),
        sa.Column("told_key", _KEY, nullable=False),
        sa.PrimaryKeyConstraint("run_id", "excluded", name="pk_exclusions"),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name="fk_exclusions_run_id"),
        sa.Index("ix_exclusions_excluded_t_us", "excluded", "t_us"),
    )


def downgrade() -> None:
    """Drop what was added; the events that tell of it stay."""
    op.drop_table("exclusions")
    op.drop_table("decisions")
