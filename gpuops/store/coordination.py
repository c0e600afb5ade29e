"""Coordination tables, which are not derived from events: drain requests and their answers."""

from sqlalchemy import BigInteger, Boolean, Column, PrimaryKeyConstraint, Table, Text

from gpuops.store.columns import Key, metadata

drain_permits = Table(
    "drain_permits",
    metadata,
    Column("cluster", Key, nullable=False),
    Column("check_name", Key, nullable=False),
    Column("node", Key, nullable=False),
    Column("t_us", BigInteger, nullable=False),
    Column("granted", Boolean, nullable=False),
    Column("failure_class", Text, nullable=False),
    PrimaryKeyConstraint("cluster", "check_name", "node"),
)

fuses = Table(
    "fuses",
    metadata,
    Column("cluster", Key, nullable=False),
    Column("check_name", Key, nullable=False),
    Column("blown_us", BigInteger, nullable=False),
    Column("refused_us", BigInteger, nullable=False),
    Column("refusals", BigInteger, nullable=False),
    PrimaryKeyConstraint("cluster", "check_name"),
)
