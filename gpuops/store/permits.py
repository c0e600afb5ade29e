"""Permission to drain a node, and the fuse that stops a wrong rule from draining a cluster.

The fuse counts the nodes that request a drain for the same check within a window, including those
it refused, and those that it granted and that are not back: a wrong rule that fails a node now and
then would else drain a cluster slowly. `gpuops.store.fuse` says how many are too many.
"""

import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Row, Table, delete, insert, select, text

from gpuops.model import (
    Confidence,
    Event,
    Evidence,
    FailureClass,
    Incident,
    IncidentState,
    Role,
    Severity,
    Side,
    uuid7,
)
from gpuops.store import coordination
from gpuops.store.columns import derived_id
from gpuops.store.engine import open_store
from gpuops.store.fuse import HELD_S, CauseKind, FuseCounts, FuseSettings, is_tripped, may_drain
from gpuops.store.ingest.batch import ingest
from gpuops.store.ingest.envelope import EventEnvelope
from gpuops.store.queries.fleet_queries import held_permits, nodes_seen
from gpuops.store.spool.format import SpoolLine, canonical_json
from gpuops.units import US_PER_S

PERMIT_DEADLINE_S = 1.0
_NODES_SHOWN = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainRequest:
    """A failure for which a node would be drained."""

    check: str
    failure_class: FailureClass
    kind: CauseKind = CauseKind.LIMIT


@dataclass(frozen=True, slots=True)
class DrainPermit:
    """The answer to a drain request, and the reason."""

    granted: bool
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asker:
    cluster: str
    node: str
    now_us: int
    settings: FuseSettings
    seen: int

    @property
    def window_us(self) -> int:
        return round(self.settings.window_s * US_PER_S)


@dataclass(frozen=True, slots=True)
class _Asked:
    """One request with what it is judged by. ``failing``: the other nodes that fail the check."""

    request: DrainRequest
    asker: _Asker
    failing: frozenset[str]
    counts: FuseCounts

    @property
    def key_columns(self) -> dict[str, str]:
        """Return the columns that every row of this fuse shares."""
        return {"cluster": self.asker.cluster, "check_name": self.request.check}

    @property
    def failing_text(self) -> str:
        limit = self.asker.settings.limit(self.counts.seen)
        return (
            f"{self.counts.failing} nodes of {self.asker.cluster} fail check {self.request.check} "
            f"within {self.asker.settings.window_s:g} s or are drained for it (limit {limit})"
        )

    @property
    def drained_text(self) -> str:
        cap = self.asker.settings.cap(self.counts.seen)
        return f"{self.counts.drained} nodes are drained (gate.max_drained {cap})"


def request_permits(  # noqa: PLR0913 all but two are keywords
    url: str,
    requests: Sequence[DrainRequest],
    *,
    cluster: str,
    node: str,
    now_us: int,
    settings: FuseSettings = FuseSettings(),  # noqa: B008 it is frozen
    deadline_s: float = PERMIT_DEADLINE_S,
    randomness: Callable[[int], bytes] = os.urandom,
) -> list[DrainPermit]:
    """Request permission to drain *node* from the store at *url*; concurrency-safe.

    *requests* are answered in order up to the first that is granted. A node that holds a permit for
    a check is granted it again. The first refusal of a check records one incident of the entire
    cluster, to which each further node is added as evidence.

    Raises:
        UsageError, StoreError: The store gave no answer within *deadline_s*.
    """
    permits: list[DrainPermit] = []
    with (
        open_store(url, mode="write", deadline_s=deadline_s) as store,
        store.begin() as connection,
    ):
        # Before the lock: in a storm the requests of all nodes wait for each other there.
        seen = nodes_seen(connection, cluster, now_us)
        _lock(connection, cluster)
        asker = _Asker(cluster=cluster, node=node, now_us=now_us, settings=settings, seen=seen)
        for n, request in enumerate(requests):
            asked, previous = _count(connection, request, asker)
            refused = {earlier.kind for earlier in requests[:n]}
            permits.append(_decide(connection, asked, previous, refused, randomness))
            if permits[-1].granted:
                break
    return permits


def release_permits(
    url: str, *, cluster: str, node: str, before_us: int, deadline_s: float = PERMIT_DEADLINE_S
) -> None:
    """Take back the permits of *node* from before *before_us*: it is not drained any more.

    Raises:
        UsageError, StoreError: The store gave no answer within *deadline_s*.
    """
    table = coordination.drain_permits
    with (
        open_store(url, mode="write", deadline_s=deadline_s) as store,
        store.begin() as connection,
    ):
        connection.execute(
            delete(table)
            .where(table.c.cluster == cluster, table.c.node == node)
            .where(table.c.granted, table.c.t_us < before_us)
        )


def hold_permit(
    url: str,
    request: DrainRequest,
    *,
    cluster: str,
    node: str,
    now_us: int,
    deadline_s: float = PERMIT_DEADLINE_S,
) -> None:
    """Record that *node* is drained for *request*, which the store was not asked about.

    Raises:
        UsageError, StoreError: The store gave no answer within *deadline_s*.
    """
    row: dict[str, object] = {
        "cluster": cluster,
        "check_name": request.check,
        "node": node,
        "t_us": now_us,
        "granted": True,
        "failure_class": request.failure_class.value,
    }
    with (
        open_store(url, mode="write", deadline_s=deadline_s) as store,
        store.begin() as connection,
    ):
        _lock(connection, cluster)
        _write(connection, coordination.drain_permits, ("node",), row)


_PermitRow = Row[Any, Any, Any]


def _count(
    connection: Connection, request: DrainRequest, asker: _Asker
) -> tuple[_Asked, _PermitRow | None]:
    """Return *request* with its counts, and this node's last request for the check, if any."""
    recent = _recent_requests(connection, request.check, asker)
    previous = recent.pop(asker.node, None)
    held = held_permits(connection, asker.cluster, asker.now_us)
    counts = FuseCounts(seen=asker.seen, failing=len(recent) + 1, drained=len(held - {asker.node}))
    return _Asked(request, asker, frozenset(recent), counts), previous


def _decide(
    connection: Connection,
    asked: _Asked,
    previous: _PermitRow | None,
    refused: Collection[CauseKind],
    randomness: Callable[[int], bytes],
) -> DrainPermit:
    if previous is not None and previous.granted:
        return DrainPermit(granted=True, reason="this node has a permit already")
    granted = may_drain(asked.request.kind, asked.counts, asked.asker.settings, refused)
    row: dict[str, object] = {
        **asked.key_columns,
        "node": asked.asker.node,
        "t_us": asked.asker.now_us,
        "granted": granted,
        "failure_class": asked.request.failure_class.value,
    }
    _write(connection, coordination.drain_permits, ("node",), row)
    if granted:
        return DrainPermit(granted=True, reason=_granted_text(asked))
    if not is_tripped(asked.counts, asked.asker.settings):
        why = "another failure of this node, perhaps of the same cause, drains too many nodes"
        return DrainPermit(granted=False, reason=f"{why}; {asked.drained_text}")
    incident = _trip_fuse(connection, asked)
    if previous is None:
        _record_incident(connection, asked, incident, randomness)
    why = _WHY[asked.request.kind]
    if asked.request.kind is CauseKind.HARDWARE:
        why = asked.drained_text
    return DrainPermit(
        granted=False, reason=f"{asked.failing_text}, {why}; see incident {incident.id[-8:]}"
    )


_WHY = {
    CauseKind.HARDWARE: "",
    CauseKind.SHARED: "so a network, storage or switch that they share is suspect",
    CauseKind.LIMIT: "so the check or what it expects is suspect",
}


def _lock(connection: Connection, cluster: str) -> None:
    """Serialize the requests of a cluster; SQLite's writers are serialized anyway."""
    if connection.dialect.name == "postgresql":
        key = canonical_json(["drain permits", cluster])
        connection.execute(
            text("SELECT pg_advisory_xact_lock(hashtextextended(:k, 0))"), {"k": key}
        )


def _recent_requests(connection: Connection, check: str, asker: _Asker) -> dict[str, _PermitRow]:
    """Return each node's last request in the window, or its permit; a clock may be ahead."""
    table, now_us = coordination.drain_permits.c, asker.now_us
    is_held = table.granted & (table.t_us > now_us - round(HELD_S * US_PER_S))
    query = (
        select(table.node, table.t_us, table.granted)
        .where(table.cluster == asker.cluster, table.check_name == check)
        .where(is_held | (table.t_us > now_us - asker.window_us))
        .where(table.t_us < now_us + asker.window_us)
    )
    return {row.node: row for row in connection.execute(query).all()}


def _write(
    connection: Connection, table: Table, key: tuple[str, ...], row: dict[str, object]
) -> None:
    names = ("cluster", "check_name", *key)
    connection.execute(delete(table).where(*(table.c[name] == row[name] for name in names)))
    connection.execute(insert(table).values(row))


def _trip_fuse(connection: Connection, asked: _Asked) -> Incident:
    """Record the refusal; return the incident of this trip, one for as long as the fuse is open."""
    table, check = coordination.fuses.c, asked.request.check
    window_us = asked.asker.window_us
    query = select(table.blown_us, table.refusals).where(
        table.cluster == asked.asker.cluster,
        table.check_name == check,
        table.refused_us > asked.asker.now_us - window_us,
        table.refused_us < asked.asker.now_us + window_us,
    )
    open_fuse = connection.execute(query).one_or_none()
    blown_us, refusals = open_fuse or (asked.asker.now_us, 0)
    fuse: dict[str, object] = {
        **asked.key_columns,
        "blown_us": blown_us,
        "refused_us": asked.asker.now_us,
        "refusals": refusals + 1,
    }
    _write(connection, coordination.fuses, (), fuse)
    nodes = sorted({*asked.failing, asked.asker.node})
    more = f" and {len(nodes) - _NODES_SHOWN} more" if len(nodes) > _NODES_SHOWN else ""
    shown = f"{', '.join(nodes[:_NODES_SHOWN])}{more}"
    title, failure_class, side = _INCIDENTS[asked.request.kind]
    return Incident(
        id=derived_id("check suspect", asked.asker.cluster, check, blown_us),
        failure_class=failure_class or asked.request.failure_class,
        side=side,
        confidence=Confidence.PROBABLE,
        state=IncidentState.OPEN,
        title=f"fleet-wide: {title.format(check=check)}",
        first_us=blown_us,
        detected_us=blown_us,
        evidence=(
            Evidence(
                role=Role.ROOT, text=f"{asked.failing_text}; {asked.drained_text}; failing: {shown}"
            ),
        ),
        rev=refusals + 1,
    )


_INCIDENTS: dict[CauseKind, tuple[str, FailureClass | None, Side]] = {
    CauseKind.HARDWARE: (
        "check {check} finds more faulty hardware than gate.max_drained lets gpuops drain",
        None,
        Side.INFRA,
    ),
    CauseKind.SHARED: (
        "check {check} fails on many nodes at once, a shared network, storage or switch is suspect",
        None,
        Side.INFRA,
    ),
    CauseKind.LIMIT: (
        "check {check} is suspect, it fails on many nodes at once",
        FailureClass.TOOL,
        Side.AMBIGUOUS,
    ),
}


def _granted_text(asked: _Asked) -> str:
    if is_tripped(asked.counts, asked.asker.settings):
        return f"the hardware itself reports it; {asked.failing_text}, {asked.drained_text}"
    return f"{asked.counts.failing - 1} other nodes fail check {asked.request.check}"


def _record_incident(
    connection: Connection,
    asked: _Asked,
    incident: Incident,
    randomness: Callable[[int], bytes],
) -> None:
    """Record *incident* as an event, like one from a writer's spool."""
    event = Event(
        id=uuid7(asked.asker.now_us, randomness(10)),
        kind="incident.recorded",
        t_us=asked.asker.now_us,
        node=asked.asker.node,
        severity=Severity.ERROR,
        payload=incident.to_json(),
    )
    line = SpoolLine(f"fuse.{randomness(6).hex()}", "fuse", 1, event)
    ingest(connection, [EventEnvelope(line, asked.asker.cluster, os.geteuid())], asked.asker.now_us)
