"""Queries about nodes: their history for commands; repairs and strikes for checks.

A strike counts for 28 days, the window in which Meta's lemon detection sums a node's signals
(arXiv 2410.21680, on lemon nodes), and until a repair of its entity.
"""

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple, TypeVar

from sqlalchemy import Connection, Select, Table, and_, func, select, true

from gpuops.errors import UsageError
from gpuops.host.node_state import FleetCount, Repair, Strikes
from gpuops.model import EntityKind, Incident, IncidentState
from gpuops.store import schema
from gpuops.store.checks import check_results, check_runs
from gpuops.store.columns import derived_id
from gpuops.store.engine import open_store
from gpuops.store.queries.fleet_queries import held_permits, nodes_seen
from gpuops.units import US_PER_S

FINDING_DAYS = 7
ROWS_MAX = 50
STRIKE_DAYS = 28
FETCH_DEADLINE_S = 2.0
_REPAIRS_MAX = 64
_STRIKES_MAX = 64
_RESULTS_MAX = 2000
_DAY_US = 86_400 * US_PER_S
_UNREMARKABLE = ("pass", "skip")
_NAMED_MAX = 5
_CLOSE = 0.4

R = TypeVar("R")


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRow:
    """One node. ``state``: ``drained`` or ``resumed``, the last on record, if any.

    ``verdict`` and ``open_incidents`` are root's: a user can run checks, and blame any node.
    """

    id: str
    name: str
    cluster: str
    first_seen_us: int
    last_seen_us: int
    state: str | None = None
    verdict: str | None = None
    open_incidents: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class FindingRow:
    """A finding of a check about one entity, seen ``count`` times, with the last message.

    ``uid``: the user who ran the check, who can lie.
    """

    check: str
    entity_kind: str
    entity_id: str
    status: str
    message: str
    failure_class: str | None
    first_us: int
    last_us: int
    count: int
    uid: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StateRow:
    """One drain or resume."""

    t_us: int
    state: str
    reason: str
    actor: str
    job_id: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ComponentRow:
    """A part, and the times at which it was first and last seen in the node."""

    kind: str
    component_id: str
    first_seen_us: int
    last_seen_us: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BootRow:
    """One boot of a node; None: not reported."""

    boot_id: str
    boot_us: int | None
    kernel: str | None
    driver: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedAttemptRow:
    """An attempt of a run that failed with this node in it."""

    run_id: str
    ordinal: int
    end_us: int | None
    exit_code: int | None
    slurm_job_id: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Strike:
    """One strike: an incident that an entity is blamed for, on the node where it was."""

    entity_kind: str
    entity_id: str
    node_id: str
    t_us: int
    failure_class: str
    weight: float
    incident_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeHistory:
    """The history of a node, newest first; ``findings`` of the last `FINDING_DAYS`."""

    node: NodeRow
    findings: tuple[FindingRow, ...]
    incidents: tuple[Incident, ...]
    states: tuple[StateRow, ...]
    repairs: tuple[Repair, ...]
    strikes: tuple[Strike, ...]
    components: tuple[ComponentRow, ...]
    boots: tuple[BootRow, ...]
    failed: tuple[FailedAttemptRow, ...]


def nodes(connection: Connection, *, name: str | None = None) -> list[NodeRow]:
    """Return all nodes by name, or those called *name*: one in each cluster that has it."""
    table = schema.nodes.c
    query = (
        select(
            table.id,
            table.hostname.label("name"),
            schema.clusters.c.name.label("cluster"),
            table.cluster_id,
            table.first_seen_us,
            table.last_seen_us,
        )
        .join(schema.clusters, schema.clusters.c.id == table.cluster_id)
        .order_by(table.hostname, schema.clusters.c.name)
    )
    if name is not None:
        query = query.where(table.hostname == name)
    found = connection.execute(query).all()
    ids = [row.id for row in found] if name is not None else None
    states = _newest(connection, schema.node_states, "t_us", "state", ids)
    statuses = _newest(connection, check_runs, "last_us", "status", ids)
    checked_us = _newest(connection, check_runs, "last_us", "last_us", ids)
    open_incidents = _open_incidents(connection, name)
    return [
        NodeRow(
            id=row.id,
            name=row.name,
            cluster=row.cluster,
            first_seen_us=row.first_seen_us,
            last_seen_us=max(row.last_seen_us, checked_us.get(row.id, 0)),
            state=states.get(row.id),
            verdict=statuses.get(row.id),
            open_incidents=open_incidents.get((row.cluster_id, row.name), 0),
        )
        for row in found
    ]


def _newest(
    connection: Connection, table: Table, order: str, column: str, ids: list[str] | None
) -> dict[str, Any]:
    """Return *column* of each node's row of root's with the greatest *order*."""
    by_root = table.c.origin_uid == 0 if table is check_runs else true()
    last = select(table.c.node_id, func.max(table.c[order]).label("last")).where(by_root)
    last = last.group_by(table.c.node_id)
    if ids is not None:
        last = last.where(table.c.node_id.in_(ids))
    newest = last.subquery()
    query = (
        select(table.c.node_id, table.c[column])
        .join(newest, and_(newest.c.node_id == table.c.node_id, newest.c.last == table.c[order]))
        .where(by_root)
        .order_by(table.c.id)
    )
    found = connection.execute(query).all()
    return {row[0]: row[1] for row in found}


def _open_incidents(connection: Connection, name: str | None) -> dict[tuple[str, str], int]:
    """Return how many open incidents of root's name each node, by its cluster and its name."""
    incident, culprit = schema.incidents.c, schema.incident_culprits.c
    query = (
        select(incident.cluster_id, culprit.entity_id, func.count())
        .join(schema.incident_culprits, culprit.incident_id == incident.id)
        .where(incident.state == IncidentState.OPEN.value)
        .where(culprit.entity_kind == EntityKind.NODE.value)
        # A superseded snapshot may have named it.
        .where(culprit.account_key == incident.account_key)
        .where(incident.account_key.startswith(schema.ROOT_ACCOUNT))
        .group_by(incident.cluster_id, culprit.entity_id)
    )
    if name is not None:
        query = query.where(culprit.entity_id == name)
    return {(cluster_id, node): count for cluster_id, node, count in connection.execute(query)}


def find_node(connection: Connection, name: str, *, cluster: str) -> NodeRow:
    """Return the node called *name*: that of *cluster*, else the only one of that name.

    Raises:
        UsageError: There is none, or several other clusters have one.
    """
    found = nodes(connection, name=name)
    candidates = [row for row in found if row.cluster == cluster] or found
    if len(candidates) == 1:
        return candidates[0]
    if candidates:
        cluster_names = ", ".join(row.cluster for row in candidates)
        raise UsageError(
            f"several clusters have a node {name!r} ({cluster_names}); set `cluster` to one"
        )
    known = list(connection.execute(select(schema.nodes.c.hostname).distinct()).scalars())
    close = difflib.get_close_matches(name, known, n=_NAMED_MAX, cutoff=_CLOSE)
    hint = f"did you mean {' or '.join(close)}? " if close else ""
    raise UsageError(
        f"the store knows no node {name!r}; {hint}`gpuops node ls` names those on record"
    )


def node_history(connection: Connection, node: NodeRow, *, now_us: int) -> NodeHistory:
    """Return the history of *node*."""
    return NodeHistory(
        node=node,
        findings=list_findings(connection, node.id, since_us=now_us - FINDING_DAYS * _DAY_US),
        incidents=tuple(incidents_of(connection, node.id, node.name, ROWS_MAX)),
        states=_newest_rows(connection, StateRow, schema.node_states, "t_us", node.id),
        repairs=_newest_rows(connection, Repair, schema.repairs, "t_us", node.id),
        strikes=tuple(node_strikes(connection, node.id, now_us=now_us)),
        components=_newest_rows(
            connection, ComponentRow, schema.components, "last_seen_us", node.id
        ),
        boots=_newest_rows(connection, BootRow, schema.boots, "boot_us", node.id),
        failed=_failed_attempts(connection, node.id),
    )


def components_of(connection: Connection, node_id: str, kind: str) -> list[str]:
    """Return the ids of the parts of *kind* that were ever seen in a node."""
    table = schema.components.c
    query = select(table.component_id).where(table.node_id == node_id, table.kind == kind)
    return list(connection.execute(query.order_by(table.component_id)).scalars())


def incidents_of(connection: Connection, node_id: str, name: str, limit: int) -> list[Incident]:
    """Return the incidents that blame the node *name*, newest first."""
    incident, culprit = schema.incidents.c, schema.incident_culprits.c
    query = (
        select(incident.body)
        .join(schema.incident_culprits, culprit.incident_id == incident.id)
        .join(schema.nodes, schema.nodes.c.cluster_id == incident.cluster_id)
        .where(schema.nodes.c.id == node_id)
        .where(culprit.entity_kind == EntityKind.NODE.value, culprit.entity_id == name)
        .where(culprit.account_key == incident.account_key)
        .order_by(incident.first_us.desc(), incident.id.desc())
        .limit(limit)
    )
    return [Incident.from_json(body) for body in connection.execute(query).scalars()]


def list_findings(connection: Connection, node_id: str, *, since_us: int) -> tuple[FindingRow, ...]:
    """Return the findings of a node that are no pass, equal ones as one, newest first."""
    run, result = check_runs.c, check_results.c
    query = (
        select(check_results, run.start_us, run.last_us, run.runs, run.origin_uid)
        .join(check_runs, run.id == result.check_run_id)
        .where(run.node_id == node_id, run.last_us >= since_us)
        .where(result.status.not_in(_UNREMARKABLE))
        .order_by(run.start_us.desc(), run.id.desc(), result.ordinal)
        .limit(_RESULTS_MAX)
    )
    groups: dict[tuple[Any, ...], list[Any]] = {}
    for row in connection.execute(query).mappings():
        names = ("check_name", "entity_kind", "entity_id", "status", "failure_class")
        groups.setdefault((*(row[name] for name in names), row["origin_uid"]), []).append(row)
    found = [_group_findings(rows) for rows in groups.values()]
    return tuple(sorted(found, key=lambda item: -item.last_us)[:ROWS_MAX])


def _group_findings(rows: Sequence[Any]) -> FindingRow:
    newest = rows[0]
    return FindingRow(
        check=newest["check_name"],
        entity_kind=newest["entity_kind"],
        entity_id=newest["entity_id"],
        status=newest["status"],
        message=newest["message"],
        failure_class=newest["failure_class"],
        first_us=rows[-1]["start_us"],
        last_us=max(row["last_us"] for row in rows),
        count=sum(row["runs"] for row in rows),
        uid=newest["origin_uid"],
    )


def _newest_rows(
    connection: Connection, kind: type[R], table: Table, order: str, node_id: str
) -> tuple[R, ...]:
    names = [item.name for item in fields(kind)]  # type: ignore[arg-type] # dataclasses all
    query: Select[Any] = (
        select(*(table.c[name] for name in names))
        .where(table.c.node_id == node_id)
        .order_by(func.coalesce(table.c[order], 0).desc(), *table.primary_key.columns)
        .limit(ROWS_MAX)
    )
    return tuple(kind(**row) for row in connection.execute(query).mappings())


def _failed_attempts(connection: Connection, node_id: str) -> tuple[FailedAttemptRow, ...]:
    attempt, part = schema.attempts.c, schema.attempt_nodes.c
    query = (
        select(
            attempt.run_id, attempt.ordinal, attempt.end_us, attempt.exit_code, attempt.slurm_job_id
        )
        .join(schema.attempt_nodes, and_(part.attempt_id == attempt.id, part.node_id == node_id))
        .where(attempt.outcome == "failed")
        .order_by(attempt.end_us.desc(), attempt.id)
        .limit(ROWS_MAX)
    )
    return tuple(FailedAttemptRow(**row) for row in connection.execute(query).mappings())


class NodeRecords(NamedTuple):
    """What a check needs of the store. ``holds_permit``: the node was permitted to be drained."""

    repairs: tuple[Repair, ...]
    strikes: tuple[Strikes, ...]
    fleet: FleetCount
    holds_permit: bool


def fetch_node_records(
    url: str, *, cluster: str, node: str, now_us: int, deadline_s: float = FETCH_DEADLINE_S
) -> NodeRecords:
    """Return the repairs of *node*, the strikes against it and its parts, and the fleet's size.

    Only the latest repair of each entity; both newest first.

    Raises:
        UsageError, StoreError: The store gave no answer within *deadline_s*.
    """
    with open_store(url, mode="read", deadline_s=deadline_s) as store, store.begin() as connection:
        node_id = derived_id("node", cluster, node)
        held = held_permits(connection, cluster, now_us)
        return NodeRecords(
            latest_repairs(connection, node_id),
            count_strikes(node_strikes(connection, node_id, now_us=now_us)),
            FleetCount(
                t_us=now_us,
                seen=nodes_seen(connection, cluster, now_us),
                drained=len(held - {node}),
            ),
            node in held,
        )


def latest_repairs(connection: Connection, node_id: str) -> tuple[Repair, ...]:
    """Return the latest repair of each entity of a node, newest first."""
    table = schema.repairs.c
    query = select(table.entity_kind, table.entity_id, table.t_us, table.by, table.what)
    query = query.where(table.node_id == node_id).order_by(table.t_us.desc(), table.id.desc())
    latest: dict[tuple[str, str], Repair] = {}
    for row in connection.execute(query).mappings():
        latest.setdefault((row["entity_kind"], row["entity_id"]), Repair(**row))
    return tuple(latest.values())[:_REPAIRS_MAX]


def node_strikes(connection: Connection, node_id: str, *, now_us: int) -> list[Strike]:
    """Return the valid strikes against a node and the parts last seen in it, newest first."""
    strike, incident = schema.strikes.c, schema.incidents.c
    entities = _entities_of_node(connection, node_id)
    query = (
        select(*(strike[name] for name in Strike.__dataclass_fields__))
        # If a later snapshot blames another entity, the strike of the earlier one is void.
        .join(schema.incidents, incident.id == strike.incident_id)
        .where(incident.account_key == strike.account_key)
        .where(strike.t_us > now_us - STRIKE_DAYS * _DAY_US)
        .where(strike.entity_id.in_({entity_id for _, entity_id in entities}))
        .order_by(strike.t_us.desc(), strike.incident_id.desc())
    )
    found = [Strike(**row) for row in connection.execute(query).mappings()]
    on_this_node = [
        item
        for item in found
        if (item.entity_kind, item.entity_id) in entities
        # Nodes of other clusters may have the same name.
        and (item.entity_kind != EntityKind.NODE.value or item.node_id == node_id)
    ]
    repairs = _relevant_repairs(connection, on_this_node)
    return [item for item in on_this_node if not any(_clears(*repair, item) for repair in repairs)]


def count_strikes(strikes: Iterable[Strike]) -> tuple[Strikes, ...]:
    """Return *strikes* summed by entity; two probable ones count as one."""
    groups: dict[tuple[str, str], list[Strike]] = {}
    for item in strikes:
        groups.setdefault((item.entity_kind, item.entity_id), []).append(item)
    sums = [
        Strikes(
            entity_kind=kind,
            entity_id=entity_id,
            count=int(sum(item.weight for item in items)),
            last_us=max(item.t_us for item in items),
            why=", ".join(dict.fromkeys(item.failure_class for item in items)),
        )
        for (kind, entity_id), items in groups.items()
    ]
    newest = sorted((item for item in sums if item.count), key=lambda item: -item.last_us)
    return tuple(newest[:_STRIKES_MAX])


def _entities_of_node(connection: Connection, node_id: str) -> set[tuple[str, str]]:
    """Return the node itself and the parts that were not seen elsewhere since."""
    here, elsewhere = schema.components.alias("here"), schema.components.alias("elsewhere")
    later = (
        select(elsewhere.c.node_id)
        .where(elsewhere.c.kind == here.c.kind, elsewhere.c.component_id == here.c.component_id)
        .where(elsewhere.c.last_seen_us > here.c.last_seen_us)
        .exists()
    )
    query = select(here.c.kind, here.c.component_id).where(here.c.node_id == node_id, ~later)
    parts = {(kind, component_id) for kind, component_id in connection.execute(query)}
    hostname = connection.scalar(
        select(schema.nodes.c.hostname).where(schema.nodes.c.id == node_id)
    )
    return parts if hostname is None else {*parts, (EntityKind.NODE.value, hostname)}


_RepairKey = tuple[str, str, str, int]


def _relevant_repairs(connection: Connection, strikes: Iterable[Strike]) -> set[_RepairKey]:
    """Return the repairs of the entities of *strikes*, and of their nodes."""
    strikes = list(strikes)
    table = schema.repairs.c
    names = {item.entity_id for item in strikes}
    node_ids = {item.node_id for item in strikes}
    query = select(table.entity_kind, table.entity_id, table.node_id, table.t_us).where(
        table.entity_id.in_(names)
        | (table.node_id.in_(node_ids) & (table.entity_kind == EntityKind.NODE.value))
    )
    return {(kind, name, node_id, t_us) for kind, name, node_id, t_us in connection.execute(query)}


def _clears(kind: str, name: str, node_id: str, t_us: int, strike: Strike) -> bool:
    if t_us < strike.t_us:
        return False
    if kind == EntityKind.NODE.value:
        return node_id == strike.node_id
    return (kind, name) == (strike.entity_kind, strike.entity_id)
