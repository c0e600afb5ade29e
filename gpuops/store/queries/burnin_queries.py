"""Queries about burn-ins and sweeps. Only root's count: a user can invent results."""

import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from sqlalchemy import Connection, Select, Text, func, or_, select, type_coerce

from gpuops.model import Json
from gpuops.store import schema
from gpuops.store.burnin import measurements, pair_tests
from gpuops.store.checks import check_results, check_runs
from gpuops.store.events import SWEEP_ENDED

_FETCHED_ROWS = 5_000
_SWEEPS_MAX = 5
_GOOD = ("pass", "skip")
_FINDING = ("status", "value", "unit", "threshold", "source", "message", "failure_class")


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
    """A burn-in of one node at ``t_us``: what did not pass (JSON), and what was measured."""

    check_run_id: str
    t_us: int
    status: str
    findings: tuple[Json, ...]
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
    outcome: str
    value: float | None
    unit: str | None
    parameters: str
    t_us: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepRow:
    """A sweep that *uid* recorded: the payload of its ``sweep.ended``."""

    t_us: int
    uid: int
    payload: Json


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSweep:
    """The tests of one node in a sweep, and the findings that name it (JSON)."""

    sweep_id: str
    t_us: int
    findings: tuple[Json, ...]
    tests: tuple[PairTestRow, ...]


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
    """Return root's last burn-in of a node."""
    table, run = measurements.c, check_runs.c
    newest = (
        select(run.id, run.last_us, run.status)
        .where(run.node_id == node_id, run.suite == "burnin", run.origin_uid == 0)
        .order_by(run.last_us.desc(), run.id.desc())
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
    measured = map(_measurement, connection.execute(query).mappings())
    return BurninRow(
        check_run_id=found.id,
        t_us=found.last_us,
        status=found.status,
        findings=tuple(_findings_of(connection, found.id)),
        # Runs with equal results share a row: the last value of each test is that of the last run.
        measurements=tuple(
            {(x.test, x.part_kind, x.part_id, x.parameters): x for x in measured}.values()
        ),
    )


def _findings_of(connection: Connection, check_run_id: str) -> Iterator[Json]:
    result = check_results.c
    query = select(check_results).where(result.check_run_id == check_run_id)
    query = query.where(result.status.not_in(_GOOD)).order_by(result.ordinal)
    for row in connection.execute(query).mappings():
        entity = {"kind": row["entity_kind"], "id": row["entity_id"]}
        yield {"check": row["check_name"], "entity": entity, **{n: row[n] for n in _FINDING}}


def last_sweep(connection: Connection, cluster: str, node: str) -> NodeSweep | None:
    """Return root's last sweep that tested *node*."""
    table = pair_tests.c
    of_node = _tests_by(cluster, {0}).where(or_(table.node_a == node, table.node_b == node))
    newest = of_node.order_by(table.t_us.desc(), table.id.desc()).limit(1)
    last = connection.execute(newest).mappings().one_or_none()
    if last is None:
        return None
    ended = sweeps(connection, cluster, last["sweep_id"])
    query = of_node.where(table.sweep_id == last["sweep_id"]).order_by(table.round, table.id)
    return NodeSweep(
        sweep_id=last["sweep_id"],
        t_us=last["t_us"],
        findings=tuple(
            finding
            for row in ended
            if row.uid == 0
            for finding in row.payload.get("findings", ())
            if node in finding["entity"]["id"].split(",")
        ),
        tests=tuple(PairTestRow(**row) for row in connection.execute(query).mappings()),
    )


def sweeps(connection: Connection, cluster: str, sweep_id: str | None = None) -> list[SweepRow]:
    """Return the last sweeps in *cluster* with a test, or those called *sweep_id*, newest first."""
    event = schema.events.c
    query = select(event.t_us, event.origin_uid.label("uid"), event.payload)
    query = query.where(event.kind == SWEEP_ENDED, event.cluster == cluster)
    # As canonical JSON has it.
    text = type_coerce(event.payload, Text)
    if sweep_id is None:
        query = query.where(text.not_like('%"n_tests":0,%'))
    else:
        query = query.where(text.contains(f'"sweep":{json.dumps(sweep_id)}', autoescape=True))
    query = query.order_by(event.t_us.desc(), event.id.desc()).limit(_SWEEPS_MAX)
    return [SweepRow(**row) for row in connection.execute(query).mappings()]


def sweep_tests(connection: Connection, cluster: str, sweep_id: str, uid: int) -> list[PairTestRow]:
    """Return the tests that *uid* recorded of a sweep, by round."""
    table = pair_tests.c
    query = _tests_by(cluster, {uid}).where(table.sweep_id == sweep_id)
    found = connection.execute(query.order_by(table.round, table.t_us, table.id)).mappings()
    return [PairTestRow(**row) for row in found]


def pair_tests_since(
    connection: Connection, cluster: str, since_us: int, uid: int = 0
) -> Iterator[PairTestRow]:
    """Yield the tests of pairs since *since_us* that root or *uid* recorded, in order of time."""
    table = pair_tests.c
    query = _tests_by(cluster, {0, uid}).where(table.t_us >= since_us)
    query = query.order_by(table.t_us, table.id).execution_options(yield_per=_FETCHED_ROWS)
    for row in connection.execute(query).mappings():
        yield PairTestRow(**row)


def tested_pairs(
    connection: Connection, cluster: str, since_us: int, uid: int
) -> frozenset[tuple[str, str]]:
    """Return the pairs of nodes that root or *uid* recorded tests of since *since_us*."""
    table = pair_tests.c
    query = _tests_by(cluster, {0, uid}).where(table.t_us >= since_us)
    found = connection.execute(query.with_only_columns(table.node_a, table.node_b).distinct())
    return frozenset((first, second) for first, second in found)


def last_repairs(connection: Connection, cluster: str) -> dict[str, int]:
    """Return when each node of *cluster*, or a part of it, was last repaired."""
    node, repair = schema.nodes.c, schema.repairs.c
    query = (
        select(node.hostname, func.max(repair.t_us))
        .join(schema.repairs, repair.node_id == node.id)
        .join(schema.clusters, schema.clusters.c.id == node.cluster_id)
        .where(schema.clusters.c.name == cluster)
        .group_by(node.hostname)
    )
    return {row[0]: row[1] for row in connection.execute(query)}


def _tests_by(cluster: str, uids: Collection[int]) -> Select[Any]:
    return (
        select(*_TESTED)
        .join(schema.clusters, schema.clusters.c.id == pair_tests.c.cluster_id)
        .where(schema.clusters.c.name == cluster, pair_tests.c.origin_uid.in_(uids))
    )


# A fleet has few combinations of versions, and a year of it has millions of measurements.
@lru_cache(maxsize=1024)
def _software(text: str) -> Mapping[str, str]:
    versions: Mapping[str, str] = json.loads(text)
    return versions


def _measurement(row: Mapping[Any, Any]) -> MeasurementRow:
    values = {column.name: row[column.name] for column in _MEASURED}
    return MeasurementRow(node=row["hostname"], software=_software(row["text"]), **values)
