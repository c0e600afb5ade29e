"""What a node's history is made of: its parts, strikes, repairs, drains; and the drain permits."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"

# Frozen: what gpuops.store.schema gained at this revision, whatever becomes of it.
_KEY = sa.Text().with_variant(sa.Text(collation="C"), "postgresql")


def upgrade() -> None:
    """Add the tables and the columns."""
    # Not in a batch: SQLite does these itself, while a copy would break the keys that lead here.
    for name in ("job_id", "profile", "mode"):
        op.add_column("check_runs", sa.Column(name, sa.Text()))
    op.create_index("ix_check_runs_job_id", "check_runs", ["job_id"])
    _blame()
    _history()
    _permits()


def _blame() -> None:
    op.create_table(
        "incident_culprits",
        sa.Column("incident_id", _KEY, nullable=False),
        sa.Column("entity_kind", _KEY, nullable=False),
        sa.Column("entity_id", _KEY, nullable=False),
        sa.PrimaryKeyConstraint(
            "incident_id", "entity_kind", "entity_id", name="pk_incident_culprits"
        ),
        sa.ForeignKeyConstraint(
            ["incident_id"], ["incidents.id"], name="fk_incident_culprits_incident_id"
        ),
        sa.Index("ix_incident_culprits_entity_kind_entity_id", "entity_kind", "entity_id"),
    )
    op.create_table(
        "strikes",
        sa.Column("incident_id", _KEY, nullable=False),
        sa.Column("entity_kind", _KEY, nullable=False),
        sa.Column("entity_id", _KEY, nullable=False),
        sa.Column("node_id", _KEY, nullable=False),
        sa.Column("t_us", sa.BigInteger(), nullable=False),
        sa.Column("failure_class", sa.Text(), nullable=False),
        sa.Column("weight", sa.Double(), nullable=False),
        sa.Column("account_key", _KEY, nullable=False),
        sa.PrimaryKeyConstraint("incident_id", "entity_kind", "entity_id", name="pk_strikes"),
        sa.ForeignKeyConstraint(["incident_id"], ["incidents.id"], name="fk_strikes_incident_id"),
        sa.ForeignKeyConstraint(["node_id"], ["nodes.id"], name="fk_strikes_node_id"),
        sa.Index("ix_strikes_entity_kind_entity_id_t_us", "entity_kind", "entity_id", "t_us"),
        sa.Index("ix_strikes_node_id_t_us", "node_id", "t_us"),
    )


def _history() -> None:
    op.create_table(
        "components",
        sa.Column("node_id", _KEY, nullable=False),
        sa.Column("kind", _KEY, nullable=False),
        sa.Column("component_id", _KEY, nullable=False),
        sa.Column("first_seen_us", sa.BigInteger(), nullable=False),
        sa.Column("last_seen_us", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("node_id", "kind", "component_id", name="pk_components"),
        sa.ForeignKeyConstraint(["node_id"], ["nodes.id"], name="fk_components_node_id"),
        sa.Index("ix_components_kind_component_id", "kind", "component_id"),
    )
    op.create_table(
        "repairs",
        sa.Column("id", _KEY, nullable=False),
        sa.Column("node_id", _KEY, nullable=False),
        sa.Column("entity_kind", sa.Text(), nullable=False),
        sa.Column("entity_id", sa.Text(), nullable=False),
        sa.Column("t_us", sa.BigInteger(), nullable=False),
        sa.Column("by", sa.Text(), nullable=False),
        sa.Column("what", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_repairs"),
        sa.ForeignKeyConstraint(["node_id"], ["nodes.id"], name="fk_repairs_node_id"),
        sa.Index("ix_repairs_node_id_t_us", "node_id", "t_us"),
    )
    op.create_table(
        "node_states",
        sa.Column("id", _KEY, nullable=False),
        sa.Column("node_id", _KEY, nullable=False),
        sa.Column("t_us", sa.BigInteger(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("actor", sa.Text(), nullable=False),
        sa.Column("job_id", sa.Text()),
        sa.PrimaryKeyConstraint("id", name="pk_node_states"),
        sa.ForeignKeyConstraint(["node_id"], ["nodes.id"], name="fk_node_states_node_id"),
        sa.Index("ix_node_states_node_id_t_us", "node_id", "t_us"),
    )


def _permits() -> None:
    op.create_table(
        "drain_permits",
        sa.Column("cluster", _KEY, nullable=False),
        sa.Column("check_name", _KEY, nullable=False),
        sa.Column("node", _KEY, nullable=False),
        sa.Column("t_us", sa.BigInteger(), nullable=False),
        sa.Column("granted", sa.Boolean(), nullable=False),
        sa.Column("failure_class", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("cluster", "check_name", "node", name="pk_drain_permits"),
    )
    op.create_table(
        "fuses",
        sa.Column("cluster", _KEY, nullable=False),
        sa.Column("check_name", _KEY, nullable=False),
        sa.Column("blown_us", sa.BigInteger(), nullable=False),
        sa.Column("refused_us", sa.BigInteger(), nullable=False),
        sa.Column("refusals", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("cluster", "check_name", name="pk_fuses"),
    )


def downgrade() -> None:
    """Drop what was added; the events that tell of it stay."""
    for name in (
        "fuses",
        "drain_permits",
        "node_states",
        "repairs",
        "strikes",
        "components",
        "incident_culprits",
    ):
        op.drop_table(name)
    op.drop_index("ix_check_runs_job_id", "check_runs")
    for name in ("mode", "profile", "job_id"):
        op.drop_column("check_runs", name)
