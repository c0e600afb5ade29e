"""A repair on record: what was before it no longer counts against its entity.

On the node itself it needs no database: the node's file takes it, and the store gets it when
it can. Another node reads it from the store, with its next health check.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from gpuops.errors import GpuopsError, StoreError, UsageError
from gpuops.gate.node_state import StateError
from gpuops.gate.record import acknowledge, incident_events
from gpuops.host.clock import Clock
from gpuops.host.node_state import Repair
from gpuops.incident.incidents.node import close_repaired, is_repair_of
from gpuops.model import Entity, EntityKind, Event, Incident, IncidentState
from gpuops.store.engine import open_store
from gpuops.store.events import repaired_event
from gpuops.store.queries.node_queries import ROWS_MAX, components_of, find_node, incidents_of

STORE_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RepairRequest:
    """What was repaired. ``is_here``: this is the node, whose file is in ``state_dir``."""

    node: str
    entity: Entity
    by: str
    what: str
    is_here: bool
    state_dir: Path
    uid: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RepairSummary:
    """What came of it. ``events`` are to be recorded; ``notes``: what could not be done."""

    repair: Repair
    closed: tuple[Incident, ...]
    events: tuple[Event, ...]
    notes: tuple[str, ...] = ()


def acknowledge_repair(
    order: RepairRequest, store_url: str, cluster: str, clock: Clock
) -> RepairSummary:
    """Return what *order* comes to; on the node itself its file has taken it.

    Raises:
        UsageError: The store knows no such node, or no such part of it.
        StoreError: The node is another one, and the store gives no answer.
        GpuopsError: This is the node, and neither its file nor the store could be used.
    """
    event = repaired_event(order.node, order.entity, by=order.by, what=order.what, clock=clock)
    repair = Repair(
        entity_kind=order.entity.kind.value,
        entity_id=order.entity.id,
        t_us=event.t_us,
        by=order.by,
        what=order.what,
    )
    notes: list[str] = []
    closed: dict[str, Incident] = {}
    try:
        closed |= _by_id(_closed_in_store(order, repair, store_url, cluster))
    except StoreError as exc:
        if not order.is_here:
            raise
        notes.append(f"the store was not asked: {exc}")
    if order.is_here:
        try:
            closed |= _by_id(acknowledge(order.state_dir, order.uid, repair))
        except StateError as exc:
            if notes:
                raise GpuopsError(
                    f"this repair is not recorded: this node's file: {exc}; {notes[0]}"
                ) from exc
            notes.append(f"this node's file does not have it: {exc}")
    closed_events = incident_events(closed.values(), order.node, clock)
    return RepairSummary(
        repair=repair,
        closed=tuple(closed.values()),
        events=(event, *closed_events),
        notes=tuple(notes),
    )


def _by_id(incidents: Iterable[Incident]) -> dict[str, Incident]:
    return {incident.id: incident for incident in incidents}


def _closed_in_store(
    order: RepairRequest, repair: Repair, store_url: str, cluster: str
) -> list[Incident]:
    """Return the open incidents that the store has of the node, as closed by *repair*."""
    with (
        open_store(store_url, mode="read", deadline_s=STORE_S) as store,
        store.begin() as connection,
    ):
        try:
            node = find_node(connection, order.node, cluster=cluster)
        except UsageError:
            if order.is_here:
                return []
            raise
        _check_part(order, components_of(connection, node.id, order.entity.kind.value))
        found = incidents_of(connection, node.id, node.name, ROWS_MAX)
    is_open = (IncidentState.OPEN, IncidentState.MITIGATED)
    return [
        close_repaired(item, repair)
        for item in found
        if item.state in is_open and item.run_id is None and is_repair_of(repair, item)
    ]


def _check_part(order: RepairRequest, known: list[str]) -> None:
    entity = order.entity
    if entity.kind is EntityKind.NODE or not known or entity.id in known:
        return
    raise UsageError(
        f"node {order.node} never had a {entity.kind.value} {entity.id!r}; "
        f"on record are {', '.join(known)}"
    )
