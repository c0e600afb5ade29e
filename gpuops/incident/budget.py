"""How often and how soon a run is restarted: budget, back-off, number of nodes, growth.

The budget is that of the run, not of an agent, and optionally of a window of time. Every failure
counts, also a lost or excluded node, because a run that loses node after node does no work either.
Not counted: infrastructure of the launch (a port was taken), but only a few times in a row; a
preemption, which is no failure; a node that fails its check before joining, because no work was
under way and it leaves the run by itself.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from gpuops.config.schema import WINDOW_RESTARTS_MAX
from gpuops.incident.decision import (
    HISTORY_MAX,
    ClusterState,
    PastFailure,
    RestartDecision,
    RestartPolicy,
)

# The next attempt takes another port; five failures in a row are no coincidence. A guess.
INFRASTRUCTURE_FAILURES_MAX = 5
BACKOFF_FIRST_S = 1.0
BACKOFF_MAX_S = 30.0
# Without step numbers, a generation that stepped for this long made progress. A guess: longer than
# a start-up that then fails at once, shorter than any checkpoint interval.
PROGRESS_S = 600.0
GROWTH_SETTLE_S = 30.0
GROWTHS_MAX = 3
GROWTHS_WINDOW_S = 3600.0


def count_failures(history: Sequence[PastFailure], policy: RestartPolicy, now_s: float) -> int:
    """Return how many failures of *history* count against the budget at *now_s*."""
    if policy.restarts_window_s is None:
        kept = sum(1 for past in history if past.is_counted)
        return max(kept, history[-1].counted_total if history else 0)
    since_s = now_s - policy.restarts_window_s
    return sum(1 for at_s in _counted_times_s(history) if at_s > since_s)


def _counted_times_s(history: Sequence[PastFailure]) -> list[float]:
    earlier_s = history[0].earlier_failures_s if history else ()
    return [*earlier_s, *(past.at_s for past in history if past.is_counted)]


def restarts_left(history: Sequence[PastFailure], policy: RestartPolicy, now_s: float) -> int:
    """Return how many more failures will be followed by a restart."""
    return max(policy.restarts_max - count_failures(history, policy, now_s), 0)


def consecutive_infrastructure_failures(history: Sequence[PastFailure]) -> int:
    """Return how many failures at the end of *history* were infrastructure."""
    n = 0
    for past in reversed(history):
        if not past.is_infrastructure:
            break
        n += 1
    return n


def backoff_s(history: Sequence[PastFailure], failure: PastFailure) -> float:
    """Return how long to wait before the restart after *failure*, which follows *history*.

    Zero if there was progress since the failure before, that is a step beyond all earlier ones;
    else 1, 2, 4 … `BACKOFF_MAX_S` seconds.
    """
    n = 0
    failures = [*history, failure]
    for index in range(len(failures) - 1, 0, -1):
        if _has_progress(failures[:index], failures[index]):
            break
        n += 1
    if n == 0:
        return 0.0
    return float(min(BACKOFF_FIRST_S * 2 ** min(n - 1, 10), BACKOFF_MAX_S))


def _has_progress(earlier: Sequence[PastFailure], failure: PastFailure) -> bool:
    if failure.highest_step is not None:
        before = [past.highest_step for past in earlier if past.highest_step is not None]
        return failure.highest_step > max(before) if before else failure.has_stepped
    return failure.has_stepped and failure.at_s - earlier[-1].at_s >= PROGRESS_S


def history_after(
    decision: RestartDecision, history: Sequence[PastFailure]
) -> tuple[PastFailure, ...]:
    """Return the history that the control record keeps after *decision*.

    The oldest carries the times of those before it, for a budget of more failures than are kept.
    """
    failures = (*history, decision.failure)
    older, kept = failures[:-HISTORY_MAX], failures[-HISTORY_MAX:]
    if not older:
        return kept
    earlier_s = tuple(round(at_s, 3) for at_s in _counted_times_s(older)[-WINDOW_RESTARTS_MAX:])
    return (replace(kept[0], earlier_failures_s=earlier_s), *kept[1:])


def candidates(cluster: ClusterState, excluded: Collection[str] = ()) -> tuple[str, ...]:
    """Return the live nodes that may train, including spares, each once and in order."""
    all_excluded = {*cluster.excluded, *excluded}
    return tuple(dict.fromkeys(node for node in cluster.live if node not in all_excluded))


def trainable_nodes(cluster: ClusterState, excluded: Collection[str] = ()) -> int:
    """Return how many nodes the next generation would have: 0 if there are too few."""
    return allowed_nodes(len(candidates(cluster, excluded)), cluster.policy)


def allowed_nodes(n_nodes: int, policy: RestartPolicy) -> int:
    """Return how many of *n_nodes* may train: 0 if they are too few.

    The largest multiple of ``node_unit``, up to ``nodes_max``; at least ``nodes_min``.
    """
    n = min(n_nodes, policy.nodes_max)
    n -= n % max(policy.node_unit, 1)
    return n if n >= max(policy.nodes_min, 1) else 0


@dataclass(frozen=True, slots=True)
class GrowthDecision:
    """The number of nodes that a run may grow to now (0: not now), and why."""

    n_nodes: int
    why: str


def check_growth(
    cluster: ClusterState,
    *,
    grown_at_s: Sequence[float],
    now_s: float,
    waiting_since_s: float,
    at_checkpoint: bool,
    settle_s: float = GROWTH_SETTLE_S,
) -> GrowthDecision:
    """Return whether to restart the run now to include more nodes.

    Args:
        cluster: The nodes.
        grown_at_s: When it grew before.
        now_s: Now, by the same clock.
        waiting_since_s: When the set of waiting nodes last changed: nodes often come in groups.
        at_checkpoint: Whether a checkpoint has just completed, so that little is lost.
        settle_s: How long that set must have been unchanged.
    """
    n_nodes = trainable_nodes(cluster)
    recent = sum(1 for at_s in grown_at_s if at_s > now_s - GROWTHS_WINDOW_S)
    conditions = (
        ("no more nodes than now would train", n_nodes <= len(cluster.members)),
        ("it waits for the next checkpoint", not at_checkpoint),
        (f"nodes came within {settle_s:.0f} s", now_s - waiting_since_s < settle_s),
        (f"it grew {recent} times within an hour", recent >= GROWTHS_MAX),
    )
    obstacle = next((text for text, holds in conditions if holds), None)
    if obstacle is not None:
        return GrowthDecision(0, obstacle)
    return GrowthDecision(n_nodes, f"{n_nodes - len(cluster.members)} more nodes wait")
