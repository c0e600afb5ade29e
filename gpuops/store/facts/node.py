"""A node's drains and repairs. Only root's word counts: users write history as well."""

from gpuops.model import EntityKind
from gpuops.store import schema
from gpuops.store.facts.envelope import Envelope, Fact
from gpuops.store.fields import Fields
from gpuops.store.merge import Merge

REPAIRS = Merge(table=schema.repairs, key=("id",))
NODE_STATES = Merge(table=schema.node_states, key=("id",))
_KINDS = frozenset(kind.value for kind in EntityKind)


def node_drained(envelope: Envelope) -> list[Fact]:
    """Return the drain that a ``node.drained`` tells of."""
    return _state(envelope, "drained")


def node_resumed(envelope: Envelope) -> list[Fact]:
    """Return the end of a drain that a ``node.resumed`` tells of."""
    return _state(envelope, "resumed")


def node_repaired(envelope: Envelope) -> list[Fact]:
    """Return the repair that a ``node.repaired`` tells of."""
    fields = envelope.fields()
    entity = envelope.event.payload.get("entity")
    if not isinstance(entity, dict) or entity.get("kind") not in _KINDS:
        raise fields.refuse("entity", "one")
    repair = {
        "id": envelope.event.id,
        "node_id": envelope.node_id,
        "entity_kind": entity["kind"],
        "entity_id": Fields(entity, "the entity of node.repaired").wanted_word("id"),
        "t_us": envelope.event.t_us,
        "by": fields.wanted_word("by"),
        "what": fields.wanted_text("what"),
    }
    return [(REPAIRS, repair)] if envelope.is_roots else []


def _state(envelope: Envelope, state: str) -> list[Fact]:
    fields = envelope.fields()
    row = {
        "id": envelope.event.id,
        "node_id": envelope.node_id,
        "t_us": envelope.event.t_us,
        "state": state,
        "reason": fields.wanted_text("reason"),
        "actor": fields.wanted_word("actor"),
        "job_id": fields.word("job_id"),
    }
    return [(NODE_STATES, row)] if envelope.is_roots else []
