"""What the store knows of a node that its own checks want to know: repairs, and strikes.

A strike counts for 28 days, the window in which Meta's lemon detection adds up a node's signals
(arXiv 2410.21680, on lemon nodes), and until a repair of what it is against.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from sqlalchemy import Connection, select

from gpuops.host.node_state import Repair, Strikes
from gpuops.model import EntityKind
from gpuops.store import schema
from gpuops.store.columns import derived_id
from gpuops.store.engine import open_store
from gpuops.units import US_PER_S

STRIKE_DAYS = 28
FETCH_DEADLINE_S = 2.0
_REPAIRS_MAX = 64
_STRIKES_MAX = 64
_DAY_US = 86_400 * US_PER_S


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


def fetch_repairs_and_strikes(
    url: str, *, cluster: str, node: str, now_us: int, deadline_s: float = FETCH_DEADLINE_S
) -> tuple[tuple[Repair, ...], tuple[Strikes, ...]]:
    """Return the repairs of *node*, and the strikes against it and the parts last seen in it.

    Of each thing that was repaired only its latest repair; the newest first, of both.

    Raises:
        UsageError, StoreError: The store gave no answer within *deadline_s*.
    """
    with open_store(url, mode="read", deadline_s=deadline_s) as store, store.begin() as connection:
        node_id = derived_id("node", cluster, node)
        repairs = latest_repairs(connection, node_id)
        return repairs, count_strikes(node_strikes(connection, node_id, now_us=now_us))


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
    """Return the strikes that count against a node and the parts last seen in it, newest first."""
    strike, incident = schema.strikes.c, schema.incidents.c
    entities = _entities_of_node(connection, node_id)
    query = (
        select(*(strike[name] for name in Strike.__dataclass_fields__))
        # Where a later account blames something else, the earlier one's strike is void.
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
        # Nodes of other clusters may bear the same name.
        and (item.entity_kind != EntityKind.NODE.value or item.node_id == node_id)
    ]
    repairs = _relevant_repairs(connection, on_this_node)
    return [item for item in on_this_node if not any(_clears(*repair, item) for repair in repairs)]


def count_strikes(strikes: Iterable[Strike]) -> tuple[Strikes, ...]:
    """Return *strikes* added up by entity; of probable causes it takes two to make one."""
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
    """Return the node itself and the parts that were seen nowhere else since."""
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
    """Return the repairs of what was struck, and of the nodes where that was."""
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
