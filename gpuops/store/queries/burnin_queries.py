"""Queries about burn-ins and sweeps. Only root's count: a user can invent results."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from sqlalchemy import Connection, Select, Text, or_, select, type_coerce

from gpuops.store import schema
from gpuops.store.burnin import measurements, pair_tests
from gpuops.store.checks import check_runs

_FETCHED_ROWS = 5_000


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasurementRow:
    """One test of one part; ``value`` in ``unit`` is the median of ``repeats`` results.

    None: the test did not measure. ``parameters`` as ``"dtype=bf16 size=8192"``.
    """

    node: str
    t_us: int
    test: str
    part_kind: str
    part_id: str
    parameters: str
    value: float | None
    spread_percent: float | None
    repeats: int
    unit: str
    higher_is_better: bool
    status: str
    shape: str
    software: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class BurninRow:
    """A run of the suite of active tests on one node, with what it measured."""

    check_run_id: str
    start_us: int
    end_us: int | None
    status: str
    measurements: tuple[MeasurementRow, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PairTestRow:
    """One test of two nodes, ``node_a`` before ``node_b`` by name; ``value`` in ``unit``.

    ``outcome``: ``pass``, ``slow``, ``fail`` or ``timeout``.
    """

    sweep_id: str
    round: int
    node_a: str
    node_b: str
    rail: int | None
    outcome: str
    value: float | None
    unit: str | None
    parameters: str
    t_us: int


_MEASURED = [
    measurements.c[name]
    for name in MeasurementRow.__dataclass_fields__
    if name not in {"node", "software"}
]
_TESTED = [pair_tests.c[name] for name in PairTestRow.__dataclass_fields__]


def passed_measurements(
    connection: Connection, *, cluster: str, since_us: int, shape: str | None = None
) -> Iterator[MeasurementRow]:
    """Yield what root measured in *cluster* since *since_us* in runs that passed, in no order.

    A run with one part that did not pass is left out as a whole: its node is in doubt.
    """
    table, run = measurements.c, check_runs.c
    query = (
        select(schema.nodes.c.hostname, type_coerce(table.software, Text).label("text"), *_MEASURED)
        .join(check_runs, run.id == table.check_run_id)
        .join(schema.nodes, schema.nodes.c.id == table.node_id)
        .join(schema.clusters, schema.clusters.c.id == schema.nodes.c.cluster_id)
        .where(schema.clusters.c.name == cluster, table.t_us >= since_us)
        .where(table.origin_uid == 0, run.origin_uid == 0, run.node_id == table.node_id)
        .where(run.status == "pass", table.status == "pass", table.value.is_not(None))
        .execution_options(yield_per=_FETCHED_ROWS)
    )
    if shape is not None:
        query = query.where(table.shape == shape)
    for row in connection.execute(query).mappings():
        yield _measurement(row)


def last_burnin(connection: Connection, node_id: str) -> BurninRow | None:
    """Return root's last run that measured something on a node."""
    table, run = measurements.c, check_runs.c
    newest = (
        select(run.id, run.start_us, run.end_us, run.status)
        .join(measurements, table.check_run_id == run.id)
        .where(table.node_id == node_id, table.origin_uid == 0)
        .where(run.node_id == node_id, run.origin_uid == 0)
        .order_by(table.t_us.desc(), table.id.desc())
        .limit(1)
    )
    found = connection.execute(newest).one_or_none()
    if found is None:
        return None
    query = (
        select(schema.nodes.c.hostname, type_coerce(table.software, Text).label("text"), *_MEASURED)
        .join(schema.nodes, schema.nodes.c.id == table.node_id)
        .where(table.check_run_id == found.id, table.node_id == node_id, table.origin_uid == 0)
        .order_by(table.t_us, table.id)
    )
    return BurninRow(
        check_run_id=found.id,
        start_us=found.start_us,
        end_us=found.end_us,
        status=found.status,
        measurements=tuple(map(_measurement, connection.execute(query).mappings())),
    )


def last_sweep(connection: Connection, cluster: str, node: str) -> tuple[PairTestRow, ...]:
    """Return the tests of *node* in root's last sweep that tested it, in order; none: ``()``."""
    table = pair_tests.c
    of_node = or_(table.node_a == node, table.node_b == node)
    newest = _of_root(cluster).where(of_node).order_by(table.t_us.desc(), table.id.desc()).limit(1)
    last = connection.execute(newest).mappings().one_or_none()
    if last is None:
        return ()
    query = _of_root(cluster).where(of_node, table.sweep_id == last["sweep_id"])
    found = connection.execute(query.order_by(table.round, table.t_us, table.id)).mappings()
    return tuple(PairTestRow(**row) for row in found)


def pair_tests_since(connection: Connection, cluster: str, since_us: int) -> list[PairTestRow]:
    """Return root's tests of pairs in *cluster* since *since_us*, in the order of time."""
    query = _of_root(cluster).where(pair_tests.c.t_us >= since_us)
    query = query.order_by(pair_tests.c.t_us, pair_tests.c.id)
    return [PairTestRow(**row) for row in connection.execute(query).mappings()]


def _of_root(cluster: str) -> Select[Any]:
    return (
        select(*_TESTED)
        .join(schema.clusters, schema.clusters.c.id == pair_tests.c.cluster_id)
        .where(schema.clusters.c.name == cluster, pair_tests.c.origin_uid == 0)
    )


# A fleet has few combinations of versions, and a year of it has millions of measurements.
@lru_cache(maxsize=1024)
def _software(text: str) -> Mapping[str, str]:
    versions: Mapping[str, str] = json.loads(text)
    return versions


def _measurement(row: Mapping[Any, Any]) -> MeasurementRow:
    values = {column.name: row[column.name] for column in _MEASURED}
    return MeasurementRow(node=row["hostname"], software=_software(row["text"]), **values)
