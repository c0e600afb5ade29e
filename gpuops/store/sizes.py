"""How large a store is, and by how much each table grows."""

from dataclasses import dataclass

from sqlalchemy import Connection, func, select, text

from gpuops.store.schema import metadata
from gpuops.units import US_PER_S

GROWTH_DAYS = 7
_DAY_US = 86_400 * US_PER_S

# The column by which a row's age is known, in tables that grow with time.
_TIMES = {
    "events": "t_us",
    "check_runs": "start_us",
    "check_samples": "hour_us",
    "measurements": "t_us",
    "pair_tests": "t_us",
    "progress": "minute_us",
    "runs": "first_seen_us",
    "attempts": "start_us",
    "decisions": "t_us",
    "evidence": "first_us",
    "incidents": "first_us",
    "incident_revisions": "t_us",
    "node_states": "t_us",
    "strikes": "t_us",
    "actions": "requested_us",
}
_SQLITE_SIZES = """
    SELECT m.tbl_name, sum(s.pgsize) FROM dbstat s JOIN sqlite_master m ON m.name = s.name
    GROUP BY m.tbl_name
"""
_POSTGRES_SIZES = """
    SELECT relname, pg_total_relation_size(oid) FROM pg_class
    WHERE relkind = 'r' AND relnamespace = current_schema()::regnamespace
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class TableSize:
    """One table with its indexes. ``rows_per_day``: new ones, over the last `GROWTH_DAYS`.

    None: not known. ``bytes``: None where SQLite was built without its table of sizes.
    """

    name: str
    rows: int
    bytes: int | None
    rows_per_day: float | None = None

    @property
    def bytes_per_day(self) -> float | None:
        """Return the growth, if new rows are as large as the others."""
        if self.bytes is None or self.rows_per_day is None:
            return None
        return self.bytes * self.rows_per_day / self.rows if self.rows else 0.0


def measure_tables(connection: Connection, now_us: int) -> tuple[TableSize, ...]:
    """Return the size of each table that has rows, the largest first."""
    sizes = _sizes(connection)
    found = []
    for name, table in metadata.tables.items():
        rows = connection.scalar(select(func.count()).select_from(table)) or 0
        new = None
        if name in _TIMES:
            query = select(func.count()).select_from(table)
            since_us = now_us - GROWTH_DAYS * _DAY_US
            new = connection.scalar(query.where(table.c[_TIMES[name]] >= since_us)) or 0
        if rows:
            rate = None if new is None else new / GROWTH_DAYS
            found.append(TableSize(name=name, rows=rows, bytes=sizes.get(name), rows_per_day=rate))
    return tuple(sorted(found, key=lambda item: (-(item.bytes or 0), -item.rows, item.name)))


def _sizes(connection: Connection) -> dict[str, int]:
    is_sqlite = connection.dialect.name == "sqlite"
    if (
        is_sqlite
        and not connection.execute(
            text("SELECT count(*) FROM pragma_module_list WHERE name = 'dbstat'")
        ).scalar()
    ):
        return {}
    query = text(_SQLITE_SIZES if is_sqlite else _POSTGRES_SIZES)
    return {name: int(size) for name, size in connection.execute(query)}
