"""The tables of check runs: what changed, what did not pass, and the values of one run an hour."""

from sqlalchemy import (
    BigInteger,
    Column,
    Double,
    ForeignKey,
    Index,
    PrimaryKeyConstraint,
    Table,
    Text,
)

from gpuops.store.columns import JsonText, Key, metadata

# A run of a suite whose result was new, and the ``runs`` - 1 after it with the same result, the
# last at ``last_us``. No foreign key to the node: an unchanged run is one write, in any order.
check_runs = Table(
    "check_runs",
    metadata,
    Column("id", Key, primary_key=True),
    Column("node_id", Key, nullable=False),
    Column("suite", Text, nullable=False),
    Column("trigger", Text, nullable=False),
    Column("start_us", BigInteger, nullable=False),
    Column("end_us", BigInteger),
    Column("last_us", BigInteger, nullable=False),
    Column("runs", BigInteger, nullable=False),
    Column("status", Text, nullable=False),
    Column("origin_uid", BigInteger, nullable=False),
    Column("late", JsonText),
    Column("job_id", Text),
    Column("profile", Text),
    Column("mode", Text),
    Column("recorded_key", Key),
    # ``last_us`` is in no index: most writes to the store change it alone.
    Index(None, "node_id", "start_us"),
    Index(None, "job_id"),
)

# The findings of a run that did not pass, and those that passed again.
check_results = Table(
    "check_results",
    metadata,
    Column("check_run_id", Key, ForeignKey("check_runs.id"), nullable=False),
    Column("ordinal", BigInteger, nullable=False),
    Column("check_name", Text, nullable=False),
    Column("entity_kind", Text, nullable=False),
    Column("entity_id", Text, nullable=False),
    Column("status", Text, nullable=False),
    Column("value", Double),
    Column("value_text", Text),
    Column("unit", Text),
    Column("threshold", Text),
    Column("source", Text),
    Column("message", Text, nullable=False),
    Column("failure_class", Text),
    Column("unknown_reason", Text),
    PrimaryKeyConstraint("check_run_id", "ordinal"),
    Index(None, "check_name", "status"),
    Index(None, "entity_kind", "entity_id"),
)

# The measured values of one run an hour, by check and entity: what trends are drawn from.
check_samples = Table(
    "check_samples",
    metadata,
    Column("node_id", Key, nullable=False),
    Column("suite", Key, nullable=False),
    Column("hour_us", BigInteger, nullable=False),
    Column("numbers", JsonText, nullable=False),
    Column("sampled_key", Key, nullable=False),
    PrimaryKeyConstraint("node_id", "suite", "hour_us"),
)
