"""Queries about runs, as plain records; and failures per node hour."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, Connection, Select, case, func, select

from gpuops.errors import UsageError
from gpuops.model import Event, Incident, IncidentState, Severity, Side
from gpuops.store import checks, schema

__all__ = [
    "AttemptRow",
    "CheckRunRow",
    "DecisionRow",
    "ExclusionRow",
    "RunRow",
    "attempts",
    "check_runs",
    "decisions",
    "event_of",
    "events",
    "exclusions",
    "find_incident",
    "find_run",
    "incidents",
    "runs",
]

UNKNOWN = "unknown"
_PREFIX_MIN = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRow:
    """One run. ``created_us`` is the time of its first event where its start was not reported."""

    id: str
    name: str
    user: str
    cluster: str
    command: tuple[str, ...]
    run_dir: str
    created_us: int
    ended_us: int | None
    outcome: str | None
    exit_code: int | None
    reason: str | None
    torch_version: str | None
    max_restarts: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptRow:
    """One attempt of a run, merged from the reports of all its agents."""

    run_id: str
    ordinal: int
    start_us: int | None
    first_step_us: int | None
    redo_done_us: int | None
    last_step_us: int | None
    end_us: int | None
    outcome: str | None
    exit_code: int | None
    world_size: int | None
    n_nodes: int | None
    steps_first: int | None
    steps_last: int | None
    beats: int | None
    step_source: str | None
    log_dir: str | None
    slurm_job_id: str | None
    nodes: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgressRow:
    """About a minute of an attempt from ``minute_us`` on; step times in microseconds."""

    ordinal: int
    minute_us: int
    step_last: int | None
    step_time_p50_us: int
    step_time_max_us: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckRunRow:
    """A run of a suite on a node, and those until ``last_us`` with the same result."""

    id: str
    node: str
    suite: str
    trigger: str
    start_us: int
    last_us: int
    runs: int
    status: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DecisionRow:
    """The decision after the failure of one attempt; ``body`` is the event's payload.

    An agent of the run's user wrote it: it is not trusted.
    """

    ordinal: int
    node: str
    t_us: int
    verdict: str
    rule: str
    reason: str
    exit_code: int | None
    backoff_us: int | None
    restarts_used: int | None
    restarts_max: int | None
    note: str | None
    body: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExclusionRow:
    """A node that a run has excluded; ``ordinal`` is the attempt after which, if any."""

    excluded: str
    t_us: int
    ordinal: int | None
    reason: str
    told_by: str


def runs(connection: Connection, *, limit: int = 20) -> list[RunRow]:
    """Return the newest runs, newest first."""
    query = _runs_query().limit(limit)
    return [_run(row) for row in connection.execute(query).mappings()]


def _runs_query() -> Select[Any]:
    table = schema.runs
    created = func.coalesce(table.c.created_us, table.c.first_seen_us).label("shown_created_us")
    return (
        select(table, schema.clusters.c.name.label("cluster"), created)
        .join(schema.clusters, schema.clusters.c.id == table.c.cluster_id)
        .order_by(created.desc(), table.c.id.desc())
    )


def _run(row: Mapping[Any, Any]) -> RunRow:
    return RunRow(
        id=row["id"],
        name=row["name"] or UNKNOWN,
        user=row["user"] or UNKNOWN,
        cluster=row["cluster"],
        command=tuple(row["command"] or ()),
        run_dir=row["run_dir"] or "",
        created_us=row["shown_created_us"],
        ended_us=row["ended_us"],
        outcome=row["outcome"],
        exit_code=row["exit_code"],
        reason=row["reason"],
        torch_version=row["torch_version"],
        max_restarts=row["max_restarts"],
    )


def find_run(connection: Connection, prefix: str | None) -> RunRow:
    """Return the run whose id starts or ends with *prefix*, the newest run for None.

    Raises:
        UsageError: No such run, or several.
    """
    if prefix is None:
        newest = runs(connection, limit=1)
        if not newest:
            raise UsageError("the store holds no run yet; start one with `gpuops run`")
        return newest[0]
    run_id = _unique_id(connection, schema.runs.c.id, prefix, "run")
    query = _runs_query().where(schema.runs.c.id == run_id)
    return _run(connection.execute(query).mappings().one())


def _unique_id(connection: Connection, column: Any, part: str, noun: str) -> str:  # noqa: ANN401 a column of text
    wanted = part.strip().lower()
    if len(wanted) < _PREFIX_MIN:
        raise UsageError(f"{part!r} is too short: give {_PREFIX_MIN} characters of the {noun}'s id")
    match = column.startswith(wanted, autoescape=True) | column.endswith(wanted, autoescape=True)
    found = list(
        connection.execute(select(column).where(match).order_by(column).limit(6)).scalars()
    )
    if not found:
        raise UsageError(f"no {noun} has an id that starts or ends with {part!r}")
    if len(found) > 1:
        ends = ", ".join(f"…{item[-8:]}" for item in found[:5])
        raise UsageError(f"{part!r} fits several {noun}s ({ends}); give their last 8 characters")
    return str(found[0])


def attempts(connection: Connection, run_id: str) -> list[AttemptRow]:
    """Return the attempts of a run, in order."""
    query = (
        select(schema.attempts)
        .where(schema.attempts.c.run_id == run_id)
        .order_by(schema.attempts.c.ordinal)
    )
    rows = list(connection.execute(query).mappings())
    nodes = _nodes_of(connection, run_id)
    return [_attempt(row, nodes.get(row["id"], ())) for row in rows]


def progress(connection: Connection, run_id: str) -> list[ProgressRow]:
    """Return the minutes of a run in which steps were timed, in order."""
    query = (
        select(schema.progress, schema.attempts.c.ordinal)
        .join(schema.attempts, schema.attempts.c.id == schema.progress.c.attempt_id)
        .where(schema.attempts.c.run_id == run_id)
        .where(schema.progress.c.step_time_p50_us.is_not(None))
        .where(schema.progress.c.step_time_max_us.is_not(None))
        .order_by(schema.attempts.c.ordinal, schema.progress.c.minute_us)
    )
    names = ProgressRow.__dataclass_fields__
    rows = connection.execute(query).mappings()
    return [ProgressRow(**{name: row[name] for name in names}) for row in rows]


def _nodes_of(connection: Connection, run_id: str) -> dict[str, tuple[str, ...]]:
    part, node = schema.attempt_nodes, schema.nodes
    query = (
        select(part.c.attempt_id, node.c.hostname)
        .join(node, node.c.id == part.c.node_id)
        .join(schema.attempts, schema.attempts.c.id == part.c.attempt_id)
        .where(schema.attempts.c.run_id == run_id)
        .order_by(part.c.group_rank, node.c.id)
    )
    found: dict[str, tuple[str, ...]] = {}
    for attempt, hostname in connection.execute(query):
        found[attempt] = (*found.get(attempt, ()), hostname)
    return found


def _attempt(row: Mapping[Any, Any], nodes: tuple[str, ...]) -> AttemptRow:
    names = [name for name in AttemptRow.__dataclass_fields__ if name != "nodes"]
    return AttemptRow(**{name: row[name] for name in names}, nodes=nodes)


def incidents(
    connection: Connection,
    *,
    run_id: str | None = None,
    state: IncidentState | str | None = None,
    limit: int = 100,
) -> list[Incident]:
    """Return incidents, newest first."""
    table = schema.incidents.c
    query = select(table.body).order_by(table.first_us.desc(), table.id.desc()).limit(limit)
    if run_id is not None:
        query = query.where(table.run_id == run_id)
    if state is not None:
        query = query.where(table.state == str(state))
    return [Incident.from_json(body) for body in connection.execute(query).scalars()]


def find_incident(connection: Connection, prefix: str) -> Incident:
    """Return the incident whose id starts or ends with *prefix*.

    Raises:
        UsageError: No such incident, or several.
    """
    table = schema.incidents.c
    incident_id = _unique_id(connection, table.id, prefix, "incident")
    query = select(table.body).where(table.id == incident_id)
    return Incident.from_json(connection.execute(query).scalar_one())


def decisions(
    connection: Connection, run_id: str, *, ordinal: int | None = None
) -> list[DecisionRow]:
    """Return the decisions of a run, or only those after the failure of attempt *ordinal*."""
    table, place = schema.decisions, schema.nodes
    query = (
        select(table, place.c.hostname.label("node"))
        .join(place, place.c.id == table.c.node_id)
        .where(table.c.run_id == run_id)
        .order_by(table.c.ordinal, table.c.t_us, table.c.id)
    )
    if ordinal is not None:
        query = query.where(table.c.ordinal == ordinal)
    names = DecisionRow.__dataclass_fields__
    rows = connection.execute(query).mappings()
    return [DecisionRow(**{name: row[name] for name in names}) for row in rows]


def exclusions(connection: Connection, run_id: str) -> list[ExclusionRow]:
    """Return the nodes that a run excluded, in order of time."""
    table = schema.exclusions
    query = select(table).where(table.c.run_id == run_id).order_by(table.c.t_us, table.c.excluded)
    names = ExclusionRow.__dataclass_fields__
    rows = connection.execute(query).mappings()
    return [ExclusionRow(**{name: row[name] for name in names}) for row in rows]


def last_event_us(connection: Connection, run_id: str) -> int | None:
    """Return the time of the run's newest event, None where it has none."""
    table = schema.events.c
    query = select(func.max(table.t_us)).where(table.run_id == run_id)
    newest: int | None = connection.execute(query).scalar()
    return newest


def events(
    connection: Connection, *, run_id: str | None = None, kind: str | None = None
) -> list[Event]:
    """Return events, oldest first."""
    table = schema.events.c
    query = select(schema.events).order_by(table.t_us, table.id)
    if run_id is not None:
        query = query.where(table.run_id == run_id)
    if kind is not None:
        query = query.where(table.kind == kind)
    return [event_of(row) for row in connection.execute(query).mappings()]


def event_of(row: Mapping[Any, Any]) -> Event:
    """Return the event in a row of ``events``."""
    return Event(
        id=row["id"],
        kind=row["kind"],
        t_us=row["t_us"],
        node=row["node"],
        severity=Severity(row["severity"]),
        run_id=row["run_id"],
        attempt=row["attempt"],
        payload=row["payload"],
    )


def check_runs(
    connection: Connection, *, node: str | None = None, limit: int = 20
) -> list[CheckRunRow]:
    """Return runs of check suites, newest first."""
    table, place = checks.check_runs, schema.nodes
    query = (
        select(table, place.c.hostname)
        .join(place, place.c.id == table.c.node_id)
        .order_by(table.c.start_us.desc(), table.c.id.desc())
        .limit(limit)
    )
    if node is not None:
        query = query.where(place.c.hostname == node)
    return [
        CheckRunRow(
            id=row["id"],
            node=row["hostname"],
            suite=row["suite"],
            trigger=row["trigger"],
            start_us=row["start_us"],
            last_us=row["last_us"],
            runs=row["runs"],
            status=row["status"],
        )
        for row in connection.execute(query).mappings()
    ]


# Sides other than the user's: an error in a script occurs early or with a change, not at random.
COUNTED_SIDES = (Side.INFRA, Side.AMBIGUOUS, Side.EXTERNAL)
_HOUR_US = 3600 * 1_000_000


@dataclass(frozen=True, slots=True)
class FailureExposure:
    """Attempts of runs that ended by a failure, and the node hours of all attempts.

    Failures are of the sides `COUNTED_SIDES`, several incidents of one attempt as one.
    """

    n_failures: int
    node_hours: float


def read_exposure(
    connection: Connection, *, since_us: int, until_us: int, cluster: str | None = None
) -> FailureExposure:
    """Return the failures and node hours from *since_us* to *until_us*.

    An attempt counts with its part in that time, from its start to its end, or to its last known
    step if it has no end.

    Args:
        connection: To a store.
        since_us: Begin.
        until_us: End.
        cluster: Only runs of this cluster; None: all.
    """
    attempt, incident = schema.attempts.c, schema.incidents.c
    begin = _clamp(attempt.start_us, since_us, until_us)
    end = _clamp(
        func.coalesce(attempt.end_us, attempt.last_step_us, attempt.start_us), since_us, until_us
    )
    n_nodes = func.coalesce(attempt.n_nodes, 1)
    node_time: ColumnElement[int] = case((end > begin, (end - begin) * n_nodes), else_=0)
    hours: Select[Any] = select(func.sum(node_time)).where(attempt.start_us.is_not(None))
    ended = (
        select(incident.run_id, incident.attempt)
        .where(incident.run_id.is_not(None), incident.attempt.is_not(None))
        .where(incident.first_us >= since_us, incident.first_us < until_us)
        .where(incident.side.in_([side.value for side in COUNTED_SIDES]))
        .where(incident.state != IncidentState.MERGED.value)
        .distinct()
    )
    if cluster is not None:
        cluster_columns = schema.clusters.c
        cluster_ids = select(cluster_columns.id).where(cluster_columns.name == cluster)
        of_cluster = select(schema.runs.c.id).where(schema.runs.c.cluster_id.in_(cluster_ids))
        hours = hours.where(attempt.run_id.in_(of_cluster))
        ended = ended.where(incident.cluster_id.in_(cluster_ids))
    node_us = connection.execute(hours).scalar() or 0
    n_failures = connection.execute(select(func.count()).select_from(ended.subquery())).scalar()
    return FailureExposure(n_failures or 0, float(node_us) / _HOUR_US)


def _clamp(at_us: ColumnElement[int], low_us: int, high_us: int) -> ColumnElement[int]:
    return case((at_us < low_us, low_us), (at_us > high_us, high_us), else_=at_us)
