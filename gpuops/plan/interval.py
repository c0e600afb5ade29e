"""How often to save: what a save costs against what a failure loses.

With saves that each take delta from training, failures at random with a mean time M between them,
and a restart that takes R, the time to do the work T_s in intervals of tau is (Daly, "A higher
order estimate of the optimum checkpoint interval for restart dumps", FGCS 22, 2006)::

    T_w = M exp(R / M) (exp((tau + delta) / M) - 1) T_s / tau

All times are in seconds; an infinite time between failures is allowed.
"""

import math
from dataclasses import dataclass

# arXiv 2410.21680 (Kokolis et al., 2024): 6.5 failures of an A100 node in 1000 days, RSC-1.
FAILURES_PER_1000_NODE_DAYS = 6.5
STALL_S_MIN = 1e-3  # no call is free, whatever a clock says
STEP_S_MIN = 1e-6
INTERVAL_S_MAX = 1800.0
WASTE_MARGIN = 0.01
_SERIES_BELOW = 0.1
_EXPONENT_MAX = 700.0


def young(cost_s: float, mtbf_s: float) -> float:
    """Return sqrt(2 delta M), the optimum to first order (Young, CACM 17(9), 1974).

    Raises:
        ValueError: A cost below zero or infinite, or a time between failures not above zero.
    """
    _check(cost_s, mtbf_s)
    return 0.0 if cost_s == 0 else math.sqrt(2 * cost_s * mtbf_s)


def daly(cost_s: float, mtbf_s: float) -> float:
    """Return Daly's higher-order optimum (FGCS 22, 2006): M from delta = 2 M on.

    Raises:
        ValueError: As `young`.
    """
    _check(cost_s, mtbf_s)
    if cost_s >= 2 * mtbf_s:
        return mtbf_s
    ratio = cost_s / (2 * mtbf_s)
    return young(cost_s, mtbf_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - cost_s


def optimum(cost_s: float, mtbf_s: float) -> float:
    """Return the tau that makes T_w least: M (1 + W(-exp(-1 - delta / M))), W Lambert's, branch 0.

    With u = tau / M this is the root of -u - log(1 - u) = delta / M between 0 and 1, which keeps
    its precision where the argument of W comes close to its branch point.

    Raises:
        ValueError: As `young`.
    """
    _check(cost_s, mtbf_s)
    if math.isinf(mtbf_s):
        return 0.0 if cost_s == 0 else math.inf
    return mtbf_s * one_plus_lambert_w(cost_s / mtbf_s)


def one_plus_lambert_w(x: float) -> float:
    """Return 1 + W(-exp(-1 - x)) for x >= 0, W the principal branch, to a few parts in 1e15.

    Newton's iteration, begun above the root of a convex function: it only goes down.
    """
    u = min(math.sqrt(2 * x), -math.expm1(-1 - x))
    while 0 < u < 1:
        closer = u - (_minus_u_minus_log1p(u) - x) * (1 - u) / u
        if not 0 < closer < u:
            break
        u = closer
    return u


def _minus_u_minus_log1p(u: float) -> float:
    """Return -u - log(1 - u), by its series u^2/2 + u^3/3 + ... where the terms would cancel."""
    if u >= _SERIES_BELOW:
        return -u - math.log1p(-u)
    total, power, n = 0.0, u * u, 2
    while power / n > total * 1e-17:
        total += power / n
        power *= u
        n += 1
    return total


def wall_time(
    work_s: float, interval_s: float, cost_s: float, restart_s: float, mtbf_s: float
) -> float:
    """Return Daly's T_w, infinite where hardly an interval is ever completed.

    Raises:
        ValueError: As `young`; or an interval that is not above zero, or a restart below it.
    """
    worked = _work_share(interval_s, cost_s, restart_s, mtbf_s)
    return work_s / worked if worked > 0 else math.inf


def waste(interval_s: float, cost_s: float, restart_s: float, mtbf_s: float) -> float:
    """Return the share of the wall time that is not work, 1 - T_s / T_w: from 0 to 1.

    Raises:
        ValueError: As `wall_time`.
    """
    return 1 - _work_share(interval_s, cost_s, restart_s, mtbf_s)


def _work_share(interval_s: float, cost_s: float, restart_s: float, mtbf_s: float) -> float:
    """Return T_s / T_w, 0 where that is too small for a number."""
    _check(cost_s, mtbf_s)
    if not interval_s > 0 or not 0 <= restart_s < math.inf:
        raise ValueError(f"no interval of {interval_s} s and restart of {restart_s} s")
    if math.isinf(interval_s):
        return 1.0 if math.isinf(mtbf_s) else 0.0
    if math.isinf(mtbf_s):
        return interval_s / (interval_s + cost_s)
    exponent = (interval_s + cost_s) / mtbf_s
    if exponent + restart_s / mtbf_s > _EXPONENT_MAX:
        return 0.0
    return interval_s / (mtbf_s * math.exp(restart_s / mtbf_s) * math.expm1(exponent))


def _check(cost_s: float, mtbf_s: float) -> None:
    if not 0 <= cost_s < math.inf or not mtbf_s > 0:
        raise ValueError(f"no interval for a cost of {cost_s} s and {mtbf_s} s between failures")


@dataclass(frozen=True, slots=True)
class TierCost:
    """What a tier takes and gives.

    ``save_s`` is what a save takes from training (its stall, or the slowdown while it is written);
    ``busy_s`` how long a save is under way: the next one does not begin before, and until then a
    failure goes back to the save before. ``restore_s`` is from a failure to the next new step, but
    for the steps that are made again.
    """

    save_s: float
    busy_s: float
    restore_s: float


@dataclass(frozen=True, slots=True)
class TierInterval:
    """How often to save to one tier, ``mtbf_s`` being that of the failures that it serves.

    ``interval_s`` is ``optimum_s``, but not below what a save is busy for.
    """

    mtbf_s: float
    young_s: float
    daly_s: float
    optimum_s: float
    interval_s: float
    waste: float


@dataclass(frozen=True, slots=True)
class TwoTiers:
    """The two intervals; None for a tier that serves no failure. ``waste`` is of both together."""

    memory: TierInterval | None
    persistent: TierInterval | None
    waste: float


def two_tiers(
    memory: TierCost, persistent: TierCost, mtbf_s: float, missed: float, step_s: float = 0.0
) -> TwoTiers:
    """Return how often to save to memory and to the persistent tier.

    Memory serves the failures at a rate (1 - p) / M and the persistent tier the p / M that memory
    cannot serve. Each tier is then on its own (to first order the waste is the sum
    delta_i / tau_i + p_i (tau_i / 2 + R_i) / M, with one tau_i in each term; Vaidya, "A case for
    two-level distributed recovery schemes", SIGMETRICS 1995), and what both leave is the product
    of what each leaves.

    Args:
        memory: What the memory tier costs.
        persistent: What the persistent tier costs.
        mtbf_s: The mean time between failures of the job, of all kinds.
        missed: The share of failures that memory cannot serve, from 0 to 1.
        step_s: The time of a training step, the least interval there is.

    Raises:
        ValueError: As `wall_time`; or *missed* is no share.
    """
    if not 0 <= missed <= 1:
        raise ValueError(f"a share of {missed} of the failures")
    tiers = [
        _tier(cost, mtbf_s / share, step_s) if share > 0 else None
        for cost, share in ((memory, 1 - missed), (persistent, missed))
    ]
    left = math.prod(1 - tier.waste for tier in tiers if tier is not None)
    return TwoTiers(tiers[0], tiers[1], 1 - left)


def _tier(cost: TierCost, mtbf_s: float, step_s: float) -> TierInterval:
    best = optimum(cost.save_s, mtbf_s)
    interval_s = max(best, cost.busy_s, step_s, STALL_S_MIN)
    # A failure finds the newest save still under way for busy_s: so much more is made again.
    lost = waste(interval_s, cost.save_s, cost.restore_s + cost.busy_s, mtbf_s)
    return TierInterval(
        mtbf_s, young(cost.save_s, mtbf_s), daly(cost.save_s, mtbf_s), best, interval_s, lost
    )


def mtbf_of_nodes(n_nodes: int, per_1000_node_days: float = FAILURES_PER_1000_NODE_DAYS) -> float:
    """Return the seconds between failures of a job on so many nodes, at that rate of failures.

    The rate of a job is the sum of its nodes' (arXiv 2410.21680).

    Raises:
        ValueError: No node, or a rate that is not above zero.
    """
    if n_nodes < 1 or not per_1000_node_days > 0:
        raise ValueError(f"no failures of {n_nodes} nodes at a rate of {per_1000_node_days}")
    return 1000 * 86_400.0 / (n_nodes * per_1000_node_days)


def failures_per_hour(
    n_nodes: int,
    n_failures: int = 0,
    observed_node_hours: float = 0.0,
    per_1000_node_days: float = FAILURES_PER_1000_NODE_DAYS,
) -> float:
    """Return the rate of failures of a job on so many nodes, from a history of any size.

    The mean of a Gamma posterior whose prior weighs as much as one failure at the published rate:
    without a history it is that rate, and a long history is followed.

    Raises:
        ValueError: As `mtbf_of_nodes`; or a history with less than nothing.
    """
    if n_failures < 0 or not 0 <= observed_node_hours < math.inf:
        raise ValueError(
            f"no history has {n_failures} failures in {observed_node_hours} node hours"
        )
    prior_node_hours = n_nodes * mtbf_of_nodes(n_nodes, per_1000_node_days) / 3600
    return n_nodes * (1 + n_failures) / (prior_node_hours + observed_node_hours)


def steps_between_saves(
    stall_s: float,
    restore_s: float,
    failures_per_hour: float,
    step_s: float,
    *,
    interval_s_max: float = INTERVAL_S_MAX,
) -> int:
    """Return after how many steps to save again: what ``every="auto"`` means.

    The most steps for which the expected waste is within 1 % of the least: the curve is flat
    there, and a save that is not made costs nothing that no clock has measured. A slow restore
    weighs in so: beside it, a few more steps made again do not count.

    Args:
        stall_s: What a save takes from training, measured.
        restore_s: From a failure to the next new step, measured.
        failures_per_hour: Of the whole job; 0 where none are expected.
        step_s: The time of a step, measured.
        interval_s_max: No more than this is ever lost, whatever the rate of failures.

    Raises:
        ValueError: A figure below zero or not finite, or a step that takes no time.
    """
    figures = (stall_s, restore_s, failures_per_hour, step_s, interval_s_max)
    if not all(0 <= figure < math.inf for figure in figures) or step_s == 0 or interval_s_max == 0:
        raise ValueError(
            f"no interval follows from a stall of {stall_s} s, a restore of {restore_s} s,"
            f" {failures_per_hour} failures an hour and steps of {step_s} s"
        )
    step_s = max(step_s, STEP_S_MIN)
    n_most = max(1, int(interval_s_max / step_s))
    if failures_per_hour == 0:
        return n_most
    cost_s, mtbf_s = max(stall_s, STALL_S_MIN), 3600 / failures_per_hour

    def wasted(n_steps: int) -> float:
        return waste(n_steps * step_s, cost_s, restore_s, mtbf_s)

    n_best = max(1, min(n_most, round(min(optimum(cost_s, mtbf_s), interval_s_max) / step_s)))
    enough = wasted(n_best) * (1 + WASTE_MARGIN)
    low, high = n_best, n_most  # waste grows from n_best on; low is within the margin
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if wasted(middle) <= enough else (low, middle - 1)
    return low
