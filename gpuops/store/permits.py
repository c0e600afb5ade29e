"""Leave to drain a node, and the fuse that stops a wrong rule from draining a cluster.

The fuse counts the nodes that ask for the same check within a window, those it refused among
them: while as many nodes as the limit keep failing, not one more is drained.
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
from gpuops.store import live
from gpuops.store.columns import derived_id
from gpuops.store.engine import Store, open_store
from gpuops.store.facts.envelope import Envelope
from gpuops.store.ingest import ingest
from gpuops.store.lines import Line, canonical
from gpuops.units import US_PER_S

LIMIT = 3
WINDOW_S = 600.0
DEADLINE_S = 1.0
_NODES_SHOWN = 20


@dataclass(frozen=True, slots=True)
class Permit:
    """The answer to one who wants to drain, and why it is so."""

    granted: bool
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Request:
    cluster: str
    node: str
    check: str
    failure_class: str
    now_us: int
    limit: int
    window_s: float

    @property
    def about(self) -> dict[str, str]:
        """Return the columns that every row of this fuse shares."""
        return {"cluster": self.cluster, "check_name": self.check}

    @property
    def window_us(self) -> int:
        return round(self.window_s * US_PER_S)


def ask_permit(  # noqa: PLR0913 all but one are keywords
    url: str,
    *,
    cluster: str,
    node: str,
    check: str,
    failure_class: str,
    now_us: int,
    limit: int = LIMIT,
    window_s: float = WINDOW_S,
    deadline_s: float = DEADLINE_S,
    randomness: Callable[[int], bytes] = os.urandom,
) -> Permit:
    """Ask the store at *url* whether *node* may be drained for *check*; of many at once too.

    Refused is the node that would be the *limit*-th within *window_s* to fail the check, and every
    further one; a node that was granted is granted again. The first refusal records one incident
    of the whole cluster, of which each further node becomes evidence.

    Raises:
        UsageError, StoreError: The store gave no answer within *deadline_s*.
    """
    request = _Request(
        cluster=cluster,
        node=node,
        check=check,
        failure_class=failure_class,
        now_us=now_us,
        limit=limit,
        window_s=window_s,
    )
    with open_store(url, mode="write", deadline_s=deadline_s) as store:
        return _ask(store, request, randomness)


def _ask(store: Store, request: _Request, randomness: Callable[[int], bytes]) -> Permit:
    with store.begin() as connection:
        _lock(connection, request)
        asked = _asked(connection, request)
        before = asked.get(request.node)
        if before is not None and before.granted:
            return Permit(granted=True, reason="this node had leave already")
        granted = len({*asked, request.node}) < request.limit
        _write(connection, live.drain_permits, ("node",), _row(request, granted=granted))
        if granted:
            return Permit(granted=True, reason=_counted(request, len(asked)))
        incident = _blow(connection, request, asked)
        if before is None:
            _record(connection, request, incident, randomness)
        return Permit(
            granted=False,
            reason=f"{_failing(request, asked)}, so the check or what all nodes share is suspect; "
            f"see incident {incident.id[-8:]}",
        )


def _lock(connection: Connection, request: _Request) -> None:
    """Make those who ask about one check take turns; SQLite's writers do anyway."""
    if connection.dialect.name == "postgresql":
        key = canonical([request.cluster, request.check])
        connection.execute(
            text("SELECT pg_advisory_xact_lock(hashtextextended(:k, 0))"), {"k": key}
        )


_Asked = dict[str, Row[Any, Any, Any]]


def _asked(connection: Connection, request: _Request) -> _Asked:
    """Return what each node last asked within the window; a clock that is ahead counts as well."""
    table = live.drain_permits.c
    query = (
        select(table.node, table.t_us, table.granted)
        .where(table.cluster == request.cluster, table.check_name == request.check)
        .where(table.t_us > request.now_us - request.window_us)
        .where(table.t_us < request.now_us + request.window_us)
    )
    return {row.node: row for row in connection.execute(query).all()}


def _row(request: _Request, *, granted: bool) -> dict[str, object]:
    return {
        **request.about,
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


def _blow(connection: Connection, request: _Request, asked: _Asked) -> Incident:
    """Keep that the fuse refused; return the incident of this blow, which lasts as it does."""
    table = live.fuses.c
    query = select(table.blown_us, table.refusals).where(
        table.cluster == request.cluster,
        table.check_name == request.check,
        table.refused_us > request.now_us - request.window_us,
        table.refused_us < request.now_us + request.window_us,
    )
    lasting = connection.execute(query).one_or_none()
    blown_us, refusals = lasting or (request.now_us, 0)
    fuse = {
        **request.about,
        "blown_us": blown_us,
        "refused_us": request.now_us,
        "refusals": refusals + 1,
    }
    _write(connection, live.fuses, (), fuse)
    nodes = sorted({*asked, request.node})
    more = f" and {len(nodes) - _NODES_SHOWN} more" if len(nodes) > _NODES_SHOWN else ""
    found = f"{_failing(request, asked)}: {', '.join(nodes[:_NODES_SHOWN])}{more}"
    return Incident(
        id=derived_id("check suspect", request.cluster, request.check, blown_us),
        failure_class=FailureClass.TOOL,
        side=Side.AMBIGUOUS,
        confidence=Confidence.PROBABLE,
        state=IncidentState.OPEN,
        title=f"fleet-wide: check {request.check} is suspect, it fails on many nodes at once",
        first_us=blown_us,
        detected_us=blown_us,
        evidence=(Evidence(role=Role.ROOT, text=found),),
        rev=refusals + 1,
    )


def _failing(request: _Request, asked: _Asked) -> str:
    count = len({*asked, request.node})
    return (
        f"{count} nodes of {request.cluster} fail check {request.check} within "
        f"{request.window_s:g} s (limit {request.limit})"
    )


def _counted(request: _Request, others: int) -> str:
    return f"{others} other nodes asked for check {request.check} within {request.window_s:g} s"


def _record(
    connection: Connection,
    request: _Request,
    incident: Incident,
    randomness: Callable[[int], bytes],
) -> None:
    """Record *incident* as an event, as any writer's spool would bring it."""
    event = Event(
        id=uuid7(request.now_us, randomness(10)),
        kind="incident.recorded",
        t_us=request.now_us,
        node=request.node,
        severity=Severity.ERROR,
        payload=incident.to_json(),
    )
    line = Line(f"fuse.{randomness(6).hex()}", "fuse", 1, event)
    ingest(connection, [Envelope(line, request.cluster, os.geteuid())], request.now_us)
