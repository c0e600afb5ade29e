"""Queries about all nodes of a cluster: the fuse's counts (`gpuops.store.permits`), last states."""

from typing import NamedTuple

from sqlalchemy import Connection, and_, exists, func, select

from gpuops.store import coordination, schema
from gpuops.store.checks import check_runs
from gpuops.store.fuse import HELD_S, SEEN_S
from gpuops.units import US_PER_S

_DAY_US = 86_400 * US_PER_S
# Of the states of a node, those that say whether Slurm starts jobs there.
DRAIN_ACTS = ("drained", "resumed")


class LastState(NamedTuple):
    """A node's last drain or resume: ``state`` is ``drained`` or ``resumed``."""

    t_us: int
    state: str
    reason: str
    actor: str


def last_states(connection: Connection, cluster: str) -> dict[str, LastState | None]:
    """Return the last drain or resume of each node of *cluster*; None: it never had one."""
    node, state = schema.nodes.c, schema.node_states.c
    # The order of the view v_drains.
    place = func.row_number().over(
        partition_by=state.node_id, order_by=(state.t_us.desc(), state.id.desc())
    )
    acts = select(schema.node_states, place.label("place")).where(state.state.in_(DRAIN_ACTS))
    ranked = acts.subquery()
    query = (
        select(node.hostname, *(ranked.c[name] for name in LastState._fields))
        .join(schema.clusters, schema.clusters.c.id == node.cluster_id)
        .outerjoin(ranked, and_(ranked.c.node_id == node.id, ranked.c.place == 1))
        .where(schema.clusters.c.name == cluster)
    )
    return {
        hostname: None if values[0] is None else LastState(*values)
        for hostname, *values in connection.execute(query)
    }


def nodes_seen(connection: Connection, cluster: str, now_us: int) -> int:
    """Return how many nodes of *cluster* root has checked in the last `SEEN_S`.

    Events of users do not count: one who invents nodes would raise the fuse and the cap.
    """
    node, run, since_us = schema.nodes.c, check_runs.c, now_us - round(SEEN_S * US_PER_S)
    is_checked = exists().where(run.node_id == node.id, run.last_us > since_us, run.origin_uid == 0)
    query = (
        select(func.count(node.hostname.distinct()))
        .join(schema.clusters, schema.clusters.c.id == node.cluster_id)
        .where(schema.clusters.c.name == cluster, is_checked)
    )
    return int(connection.execute(query).scalar_one())


def held_permits(connection: Connection, cluster: str, now_us: int) -> frozenset[str]:
    """Return the nodes of *cluster* that gpuops drained in the last `HELD_S` and that are not back.

    A clock may be ahead: permits from more than a day in the future do not count.
    """
    permit = coordination.drain_permits.c
    query = (
        select(permit.node)
        .where(permit.cluster == cluster, permit.granted)
        .where(permit.t_us > now_us - round(HELD_S * US_PER_S), permit.t_us < now_us + _DAY_US)
    )
    return frozenset(connection.execute(query).scalars())
