"""Drains by administrators: found in Slurm's view of the whole cluster, recorded in the store.

One host asks slurmctld once for all nodes: a question from every node's health check would be a
load on it, and a node that is down checks nothing. If slurmctld or the store does not respond,
nothing is lost: Slurm keeps the reason and its time, and the next run finds them.

What gpuops drains and resumes is recorded by the node itself, and so is a person's end of such a
drain. Those events may arrive late: gpuops' own drains are left to the node.
"""

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from sqlalchemy import Connection, text

from gpuops.host.clock import Clock
from gpuops.log import printable
from gpuops.model import Event
from gpuops.scrub import scrub
from gpuops.slurm.reason import OF_SLURMD, is_ours
from gpuops.slurm.scontrol import Scontrol, SlurmNode
from gpuops.store.engine import open_store
from gpuops.store.events import ADMINISTRATOR, drained_event, resumed_event
from gpuops.store.ingest.batch import ingest
from gpuops.store.ingest.envelope import EventEnvelope
from gpuops.store.queries.fleet_queries import LastState, last_states
from gpuops.store.spool.format import SpoolLine, canonical_json
from gpuops.units import US_PER_S

# The node's health check records who took its drain over, if it runs; it has this long.
TAKEOVER_S = 3600.0
REASON_CHARS_MAX = 500
_USER_CHARS_MAX = 64
_GPUOPS = "gpuops"
_DRAINED = "drained"


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainChange:
    """A drain by an administrator, or its end (``drained`` False), that the store lacks."""

    node: str
    drained: bool
    reason: str
    actor: str
    t_us: int


def drain_changes(
    nodes: Iterable[SlurmNode], last: Mapping[str, LastState | None], asked_us: int
) -> list[DrainChange]:
    """Return what *nodes*, as slurmctld knew them at *asked_us*, add to the *last* states.

    Only nodes that the store knows count: others are not checked by gpuops.
    """
    found = (
        _change(node, last[node.name], asked_us)
        for node in sorted(nodes, key=lambda node: node.name)
        if node.name in last
    )
    return [change for change in found if change is not None]


def _change(node: SlurmNode, last: LastState | None, asked_us: int) -> DrainChange | None:
    is_recorded = last is not None and last.state == _DRAINED
    if node.drained:
        return None if _is_not_a_persons(node, last, asked_us) else _drain(node, last, asked_us)
    if last is None or not is_recorded or last.actor == _GPUOPS or node.down:
        return None
    return DrainChange(
        node=node.name,
        drained=False,
        reason=f"in use again; was {_plain(last.reason)}",
        actor=ADMINISTRATOR,
        # Slurm has its times in seconds: a later drain must not seem earlier than this.
        t_us=max(asked_us // US_PER_S * US_PER_S, last.t_us + 1),
    )


def _is_not_a_persons(node: SlurmNode, last: LastState | None, asked_us: int) -> bool:
    """Return whether the drain of *node* is that of gpuops or of slurmd, or is on record."""
    if is_ours(node.reason) or node.reason in OF_SLURMD.values():
        return True
    if last is None or last.state != _DRAINED:
        return False
    if last.actor == _GPUOPS:
        set_us = asked_us if node.reason_us is None else node.reason_us
        return asked_us - set_us < TAKEOVER_S * US_PER_S
    is_later = node.reason_us is not None and node.reason_us > last.t_us
    return _plain(last.reason) == _reason(node) and not is_later


def _drain(node: SlurmNode, last: LastState | None, asked_us: int) -> DrainChange:
    t_us = asked_us if node.reason_us is None else node.reason_us
    user = _plain(node.reason_by or "").replace(" ", "")[:_USER_CHARS_MAX]
    return DrainChange(
        node=node.name,
        drained=True,
        reason=_reason(node),
        actor=f"{ADMINISTRATOR} {user}".rstrip(),
        # After what is on record, whose clock may be ahead; else it would be found new each time.
        t_us=t_us if last is None else max(t_us, last.t_us + 1),
    )


def _reason(node: SlurmNode) -> str:
    return _plain(node.reason or "no reason")


def _plain(words: str) -> str:
    """Return *words*, which anybody may have typed, as one printable line without secrets."""
    return printable(scrub(" ".join(words.split())))[:REASON_CHARS_MAX]


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainsReport:
    """What was found: ``nodes`` in Slurm, ``unknown`` of them to the store, and the changes."""

    nodes: int
    unknown: int
    changes: tuple[DrainChange, ...]


def record_drains(  # noqa: PLR0913 all but two are keywords
    scontrol: Scontrol,
    store_url: str,
    *,
    cluster: str,
    clock: Clock,
    root: Path = Path("/"),
    dry_run: bool = False,
    randomness: Callable[[int], bytes] = os.urandom,
) -> DrainsReport:
    """Record the drains by administrators in the store; with *dry_run* only return them.

    Several hosts may do it at once: they compare and write one after the other.

    Raises:
        SlurmError: slurmctld does not respond.
        UsageError, StoreError: The store cannot be used.
    """
    asked_us = clock.now_us()
    nodes = scontrol.nodes()
    with (
        open_store(store_url, mode="read" if dry_run else "write", root=root) as store,
        store.begin() as connection,
    ):
        if not dry_run:
            _lock(connection, cluster)
        last = last_states(connection, cluster)
        changes = drain_changes(nodes, last, asked_us)
        if changes and not dry_run:
            _write(connection, changes, cluster, clock, randomness)
    unknown = sum(node.name not in last for node in nodes)
    return DrainsReport(nodes=len(nodes), unknown=unknown, changes=tuple(changes))


def _lock(connection: Connection, cluster: str) -> None:
    """Serialize the runs for a cluster; SQLite's writers are serialized anyway."""
    if connection.dialect.name == "postgresql":
        key = canonical_json(["drains of administrators", cluster])
        connection.execute(
            text("SELECT pg_advisory_xact_lock(hashtextextended(:k, 0))"), {"k": key}
        )


def _write(
    connection: Connection,
    changes: Iterable[DrainChange],
    cluster: str,
    clock: Clock,
    randomness: Callable[[int], bytes],
) -> None:
    """Record *changes* as events, like those from a writer's spool."""
    origin = f"slurm.{randomness(6).hex()}"
    lines = [
        SpoolLine(origin, "slurm", number, _event(change, clock, randomness))
        for number, change in enumerate(changes, 1)
    ]
    ingest(
        connection, [EventEnvelope(line, cluster, os.geteuid()) for line in lines], clock.now_us()
    )


def _event(change: DrainChange, clock: Clock, randomness: Callable[[int], bytes]) -> Event:
    make = drained_event if change.drained else resumed_event
    event = make(change.node, change.reason, clock=clock, actor=change.actor, randomness=randomness)
    return replace(event, t_us=change.t_us)
