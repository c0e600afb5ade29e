"""Record a repair: what was before it no longer counts against its entity.

On the node itself it needs no database: it is saved in the node's file, and sent to the store
later. On another node, the next health check reads it from the store.
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
    """The result. ``events`` are to be recorded; ``notes``: what could not be done."""

    repair: Repair
    closed: tuple[Incident, ...]
    events: tuple[Event, ...]
    notes: tuple[str, ...] = ()


def acknowledge_repair(
    request: RepairRequest, store_url: str, cluster: str, clock: Clock
) -> RepairSummary:
    """Acknowledge the repair in *request*; on the node itself it is then in the node's file.

    Raises:
        UsageError: The store knows no such node, or no such part of it.
        StoreError: The node is another one, and the store cannot be reached.
        GpuopsError: This is the node, and neither its file nor the store could be used.
    """
    entity = request.entity
    event = repaired_event(request.node, entity, by=request.by, what=request.what, clock=clock)
    repair = Repair(
        entity_kind=entity.kind.value,
        entity_id=entity.id,
        t_us=event.t_us,
        by=request.by,
        what=request.what,
    )
    notes: list[str] = []
    closed: dict[str, Incident] = {}
    try:
        closed |= _by_id(_closed_in_store(request, repair, store_url, cluster))
    except StoreError as exc:
        if not request.is_here:
            raise
        notes.append(f"the store was not asked: {exc}")
    if request.is_here:
        try:
            closed |= _by_id(acknowledge(request.state_dir, request.uid, repair))
        except StateError as exc:
            if notes:
                raise GpuopsError(
                    f"this repair is not recorded: this node's file: {exc}; {notes[0]}"
                ) from exc
            notes.append(f"it is not in this node's file: {exc}")
    closed_events = incident_events(closed.values(), request.node, clock)
    return RepairSummary(
        repair=repair,
        closed=tuple(closed.values()),
        events=(event, *closed_events),
        notes=tuple(notes),
    )


def _by_id(incidents: Iterable[Incident]) -> dict[str, Incident]:
    return {incident.id: incident for incident in incidents}


def _closed_in_store(
    request: RepairRequest, repair: Repair, store_url: str, cluster: str
) -> list[Incident]:
    """Return the node's open incidents in the store, as closed by *repair*."""
    with (
        open_store(store_url, mode="read", deadline_s=STORE_S) as store,
        store.begin() as connection,
    ):
        try:
            node = find_node(connection, request.node, cluster=cluster)
        except UsageError:
            if request.is_here:
                return []
            raise
        _check_entity(request, components_of(connection, node.id, request.entity.kind.value))
        found = incidents_of(connection, node.id, node.name, ROWS_MAX)
    is_open = (IncidentState.OPEN, IncidentState.MITIGATED)
    return [
        close_repaired(item, repair)
        for item in found
        if item.state in is_open and item.run_id is None and is_repair_of(repair, item)
    ]


def _check_entity(request: RepairRequest, known: list[str]) -> None:
    entity = request.entity
    if entity.kind is EntityKind.NODE or not known or entity.id in known:
        return
    raise UsageError(
        f"node {request.node} never had a {entity.kind.value} {entity.id!r}; "
        f"on record are {', '.join(known)}"
    )
