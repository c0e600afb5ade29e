"""Permission to drain a node, and the fuse that stops a wrong rule from draining a cluster.

The fuse counts the nodes that request a drain for the same check within a window, including those
it refused: while as many nodes as the limit keep failing, no further node is drained.
"""

import os
from collections.abc import Callable
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
from gpuops.store.engine import IncidentStore, open_store
from gpuops.store.ingest.batch import ingest
from gpuops.store.ingest.envelope import EventEnvelope
from gpuops.store.spool.format import SpoolLine, canonical_json
from gpuops.units import US_PER_S

FUSE_NODES = 3
FUSE_WINDOW_S = 600.0
PERMIT_DEADLINE_S = 1.0
_NODES_SHOWN = 20


@dataclass(frozen=True, slots=True)
class DrainPermit:
    """The answer to a drain request, and the reason."""

    granted: bool
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _PermitRequest:
    cluster: str
    node: str
    check: str
    failure_class: str
    now_us: int
    limit: int
    window_s: float

    @property
    def key_columns(self) -> dict[str, str]:
        """Return the columns that every row of this fuse shares."""
        return {"cluster": self.cluster, "check_name": self.check}

    @property
    def window_us(self) -> int:
        return round(self.window_s * US_PER_S)


def request_permit(  # noqa: PLR0913 all but one are keywords
    url: str,
    *,
    cluster: str,
    node: str,
    check: str,
    failure_class: str,
    now_us: int,
    limit: int = FUSE_NODES,
    window_s: float = FUSE_WINDOW_S,
    deadline_s: float = PERMIT_DEADLINE_S,
    randomness: Callable[[int], bytes] = os.urandom,
) -> DrainPermit:
    """Request permission to drain *node* for *check* from the store at *url*; concurrency-safe.

    The *limit*-th node within *window_s* to fail the check is refused, and every further one; a
    node that was granted is granted again. The first refusal records one incident of the entire
    cluster, to which each further node is added as evidence.

    Raises:
        UsageError, StoreError: The store gave no answer within *deadline_s*.
    """
    request = _PermitRequest(
        cluster=cluster,
        node=node,
        check=check,
        failure_class=failure_class,
        now_us=now_us,
        limit=limit,
        window_s=window_s,
    )
    with open_store(url, mode="write", deadline_s=deadline_s) as store:
        return _decide(store, request, randomness)


def _decide(
    store: IncidentStore, request: _PermitRequest, randomness: Callable[[int], bytes]
) -> DrainPermit:
    with store.begin() as connection:
        _lock(connection, request)
        requests = _recent_requests(connection, request)
        previous = requests.get(request.node)
        if previous is not None and previous.granted:
            return DrainPermit(granted=True, reason="this node has a permit already")
        granted = len({*requests, request.node}) < request.limit
        _write(connection, coordination.drain_permits, ("node",), _row(request, granted=granted))
        if granted:
            return DrainPermit(granted=True, reason=_granted_text(request, len(requests)))
        incident = _trip_fuse(connection, request, requests)
        if previous is None:
            _record_incident(connection, request, incident, randomness)
        return DrainPermit(
            granted=False,
            reason=f"{_failing_text(request, requests)}, so the check or a shared resource is "
            f"suspect; see incident {incident.id[-8:]}",
        )


def _lock(connection: Connection, request: _PermitRequest) -> None:
    """Serialize requests about one check; SQLite's writers are serialized anyway."""
    if connection.dialect.name == "postgresql":
        key = canonical_json([request.cluster, request.check])
        connection.execute(
            text("SELECT pg_advisory_xact_lock(hashtextextended(:k, 0))"), {"k": key}
        )


_RequestsByNode = dict[str, Row[Any, Any, Any]]


def _recent_requests(connection: Connection, request: _PermitRequest) -> _RequestsByNode:
    """Return each node's last request within the window; a clock may be ahead."""
    table = coordination.drain_permits.c
    query = (
        select(table.node, table.t_us, table.granted)
        .where(table.cluster == request.cluster, table.check_name == request.check)
        .where(table.t_us > request.now_us - request.window_us)
        .where(table.t_us < request.now_us + request.window_us)
    )
    return {row.node: row for row in connection.execute(query).all()}


def _row(request: _PermitRequest, *, granted: bool) -> dict[str, object]:
    return {
        **request.key_columns,
        "node": request.node,
        "t_us": request.now_us,
        "granted": granted,
        "failure_class": request.failure_class,
    }


def _write(
    connection: Connection, table: Table, key: tuple[str, ...], row: dict[str, object]
) -> None:
    names = ("cluster", "check_name", *key)
    connection.execute(delete(table).where(*(table.c[name] == row[name] for name in names)))
    connection.execute(insert(table).values(row))


def _trip_fuse(
    connection: Connection, request: _PermitRequest, requests: _RequestsByNode
) -> Incident:
    """Record the refusal; return the incident of this trip, one for as long as the fuse is open."""
    table = coordination.fuses.c
    query = select(table.blown_us, table.refusals).where(
        table.cluster == request.cluster,
        table.check_name == request.check,
        table.refused_us > request.now_us - request.window_us,
        table.refused_us < request.now_us + request.window_us,
    )
    open_fuse = connection.execute(query).one_or_none()
    blown_us, refusals = open_fuse or (request.now_us, 0)
    fuse = {
        **request.key_columns,
        "blown_us": blown_us,
        "refused_us": request.now_us,
        "refusals": refusals + 1,
    }
    _write(connection, coordination.fuses, (), fuse)
    nodes = sorted({*requests, request.node})
    more = f" and {len(nodes) - _NODES_SHOWN} more" if len(nodes) > _NODES_SHOWN else ""
    evidence_text = f"{_failing_text(request, requests)}: {', '.join(nodes[:_NODES_SHOWN])}{more}"
    return Incident(
        id=derived_id("check suspect", request.cluster, request.check, blown_us),
        failure_class=FailureClass.TOOL,
        side=Side.AMBIGUOUS,
        confidence=Confidence.PROBABLE,
        state=IncidentState.OPEN,
        title=f"fleet-wide: check {request.check} is suspect, it fails on many nodes at once",
        first_us=blown_us,
        detected_us=blown_us,
        evidence=(Evidence(role=Role.ROOT, text=evidence_text),),
        rev=refusals + 1,
    )


def _failing_text(request: _PermitRequest, requests: _RequestsByNode) -> str:
    count = len({*requests, request.node})
    return (
        f"{count} nodes of {request.cluster} fail check {request.check} within "
        f"{request.window_s:g} s (limit {request.limit})"
    )


def _granted_text(request: _PermitRequest, others: int) -> str:
    return (
        f"{others} other nodes requested a drain for check {request.check} within "
        f"{request.window_s:g} s"
    )


def _record_incident(
    connection: Connection,
    request: _PermitRequest,
    incident: Incident,
    randomness: Callable[[int], bytes],
) -> None:
    """Record *incident* as an event, like one from a writer's spool."""
    event = Event(
        id=uuid7(request.now_us, randomness(10)),
        kind="incident.recorded",
        t_us=request.now_us,
        node=request.node,
        severity=Severity.ERROR,
        payload=incident.to_json(),
    )
    line = SpoolLine(f"fuse.{randomness(6).hex()}", "fuse", 1, event)
    ingest(connection, [EventEnvelope(line, request.cluster, os.geteuid())], request.now_us)
