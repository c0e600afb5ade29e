"""The tables of active tests: what a burn-in measured, and each test of a pair in a sweep."""

from sqlalchemy import BigInteger, Boolean, Column, Double, ForeignKey, Index, Table, Text

from gpuops.store.columns import JsonText, Key, metadata

# One test of one part. ``value`` is the median of ``repeats`` results, null if the test did not
# measure; ``check_run_id`` is the run of the suite, which may arrive later.
measurements = Table(
    "measurements",
    metadata,
    Column("id", Key, primary_key=True),
    Column("node_id", Key, ForeignKey("nodes.id"), nullable=False),
    Column("check_run_id", Key, nullable=False),
    Column("t_us", BigInteger, nullable=False),
    Column("suite", Text, nullable=False),
    Column("test", Key, nullable=False),
    Column("part_kind", Text, nullable=False),
    Column("part_id", Text, nullable=False),
    Column("parameters", Key, nullable=False),
    Column("value", Double),
    Column("spread_percent", Double),
    Column("repeats", BigInteger, nullable=False),
    Column("unit", Text, nullable=False),
    Column("higher_is_better", Boolean, nullable=False),
    Column("status", Text, nullable=False),
    Column("shape", Key, nullable=False),
    Column("software", JsonText, nullable=False),
    Column("origin_uid", BigInteger, nullable=False),
    Index(None, "node_id", "t_us"),
    Index(None, "check_run_id"),
)

# Nodes by the names that the sweep has for them: who reports a test may be neither of them.
pair_tests = Table(
    "pair_tests",
    metadata,
    Column("id", Key, primary_key=True),
    Column("cluster_id", Key, ForeignKey("clusters.id"), nullable=False),
    Column("sweep_id", Key, nullable=False),
    Column("round", BigInteger, nullable=False),
    Column("node_a", Key, nullable=False),
    Column("node_b", Key, nullable=False),
    Column("rail", BigInteger),
    Column("outcome", Text, nullable=False),
    Column("value", Double),
    Column("unit", Text),
    Column("parameters", Text, nullable=False),
    Column("t_us", BigInteger, nullable=False),
    Column("origin_uid", BigInteger, nullable=False),
    Index(None, "node_a", "t_us"),
    Index(None, "node_b", "t_us"),
    Index(None, "sweep_id"),
)
