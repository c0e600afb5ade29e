"""What active tests measured: by part in a burn-in, by pair of nodes in a sweep.

The rows of these tables are filled from the events.
"""

import sqlalchemy as sa
from alembic import op

from gpuops.store.views import drop_views

revision = "0005"
down_revision = "0004"

_KEY = sa.Text().with_variant(sa.Text(collation="C"), "postgresql")


def upgrade() -> None:
    """Make the tables."""
    op.create_table(
        "measurements",
        sa.Column("id", _KEY, primary_key=True),
        sa.Column("node_id", _KEY, sa.ForeignKey("nodes.id"), nullable=False),
        sa.Column("check_run_id", _KEY, nullable=False),
        sa.Column("t_us", sa.BigInteger, nullable=False),
        sa.Column("suite", sa.Text, nullable=False),
        sa.Column("test", _KEY, nullable=False),
        sa.Column("part_kind", sa.Text, nullable=False),
        sa.Column("part_id", sa.Text, nullable=False),
        sa.Column("parameters", _KEY, nullable=False),
        sa.Column("value", sa.Double),
        sa.Column("spread_percent", sa.Double),
        sa.Column("repeats", sa.BigInteger, nullable=False),
        sa.Column("unit", sa.Text, nullable=False),
        sa.Column("higher_is_better", sa.Boolean, nullable=False),
        sa.Column("status", sa.Text, nullable=False),
        sa.Column("shape", _KEY, nullable=False),
        sa.Column("software", sa.Text, nullable=False),
        sa.Column("origin_uid", sa.BigInteger, nullable=False),
    )
    op.create_index("ix_measurements_node_id_t_us", "measurements", ["node_id", "t_us"])
    op.create_index("ix_measurements_check_run_id", "measurements", ["check_run_id"])
    op.create_table(
        "pair_tests",
        sa.Column("id", _KEY, primary_key=True),
        sa.Column("cluster_id", _KEY, sa.ForeignKey("clusters.id"), nullable=False),
        sa.Column("sweep_id", _KEY, nullable=False),
        sa.Column("round", sa.BigInteger, nullable=False),
        sa.Column("node_a", _KEY, nullable=False),
        sa.Column("node_b", _KEY, nullable=False),
        sa.Column("rail", sa.BigInteger),
        sa.Column("outcome", sa.Text, nullable=False),
        sa.Column("value", sa.Double),
        sa.Column("unit", sa.Text),
        sa.Column("parameters", sa.Text, nullable=False),
        sa.Column("t_us", sa.BigInteger, nullable=False),
        sa.Column("origin_uid", sa.BigInteger, nullable=False),
    )
    for columns in (["node_a", "t_us"], ["node_b", "t_us"], ["sweep_id"]):
        op.create_index(f"ix_pair_tests_{'_'.join(columns)}", "pair_tests", columns)


def downgrade() -> None:
    """Drop the tables."""
    drop_views(op.get_bind())
    op.drop_table("pair_tests")
    op.drop_table("measurements")
