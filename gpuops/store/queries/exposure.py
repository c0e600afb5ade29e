"""How many failures the store knows of, and how many node hours they are to be seen beside.

A rate is worth nothing without both: which failures were counted, and over the hours of what.
"""

from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, Connection, Select, case, func, select

from gpuops.model import IncidentState, Side
from gpuops.store import schema

# What nobody's script did: a mistake in a script comes early or with a change, not at random.
COUNTED_SIDES = (Side.INFRA, Side.AMBIGUOUS, Side.EXTERNAL)
_HOUR_US = 3600 * 1_000_000


@dataclass(frozen=True, slots=True)
class FailureExposure:
    """Attempts of runs that ended by a failure, and the node hours of all attempts.

    Failures are of the sides `COUNTED_SIDES`, several incidents of one attempt as one.
    """

    n_failures: int
    node_hours: float


def read_exposure(
    connection: Connection, *, since_us: int, until_us: int, cluster: str | None = None
) -> FailureExposure:
    """Return what is on record of the time from *since_us* to *until_us*.

    An attempt counts with the part of it that lies in that time, from its start to its end, or to
    the last step that is known of one without an end.

    Args:
        connection: Of a store.
        since_us: Begin.
        until_us: End.
        cluster: Of which runs; None: of all.
    """
    attempt, incident = schema.attempts.c, schema.incidents.c
    begin = _clamp(attempt.start_us, since_us, until_us)
    end = _clamp(
        func.coalesce(attempt.end_us, attempt.last_step_us, attempt.start_us), since_us, until_us
    )
    n_nodes = func.coalesce(attempt.n_nodes, 1)
    node_time: ColumnElement[int] = case((end > begin, (end - begin) * n_nodes), else_=0)
    hours: Select[Any] = select(func.sum(node_time)).where(attempt.start_us.is_not(None))
    ended = (
        select(incident.run_id, incident.attempt)
        .where(incident.run_id.is_not(None), incident.attempt.is_not(None))
        .where(incident.first_us >= since_us, incident.first_us < until_us)
        .where(incident.side.in_([side.value for side in COUNTED_SIDES]))
        .where(incident.state != IncidentState.MERGED.value)
        .distinct()
    )
    if cluster is not None:
        cluster_columns = schema.clusters.c
        cluster_ids = select(cluster_columns.id).where(cluster_columns.name == cluster)
        of_cluster = select(schema.runs.c.id).where(schema.runs.c.cluster_id.in_(cluster_ids))
        hours = hours.where(attempt.run_id.in_(of_cluster))
        ended = ended.where(incident.cluster_id.in_(cluster_ids))
    node_us = connection.execute(hours).scalar() or 0
    n_failures = connection.execute(select(func.count()).select_from(ended.subquery())).scalar()
    return FailureExposure(n_failures or 0, float(node_us) / _HOUR_US)


def _clamp(at_us: ColumnElement[int], low_us: int, high_us: int) -> ColumnElement[int]:
    return case((at_us < low_us, low_us), (at_us > high_us, high_us), else_=at_us)
