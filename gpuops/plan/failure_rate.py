"""The rate of failures that the save interval is based on: the record, weighed with a prior.

With n failures in T node hours and a prior that weighs as much as one failure at the published
rate, the rate is the mean of the Gamma posterior, (1 + n) / (T_prior + T): without a record it is
the published one, and a long record is followed. The confidence interval is of the record alone,
the exact one of a Poisson count (Garwood, Biometrika 28, 1936): [chi2(2.5 %; 2n) / 2T, chi2(97.5 %;
2n + 2) / 2T].
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from gpuops.plan.interval import FAILURES_PER_1000_NODE_DAYS, failures_per_hour

FAILURES_VARIABLE = "GPUOPS_CKPT_FAILURES"  # set by an agent for its workers
HOURS_PER_1000_DAYS = 24_000.0
N_MAX = 10**9
HOURS_MAX = 1e12
_CONFIDENCE = 0.95
_EXACT_MAX = 100  # above, Wilson and Hilferty's approximation is right to a part in 10,000
_NORMAL_975 = 1.959963984540054
_TEXT = re.compile(r"(\d{1,10})/(\d{1,13}(?:\.\d{1,6})?)", re.ASCII)


@dataclass(frozen=True, slots=True)
class FailureRate:
    """*n_failures* in *node_hours*, as they are on record; none in none: nothing is.

    Raises:
        ValueError: Less than nothing, or more than there can be.
    """

    n_failures: int = 0
    node_hours: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.n_failures <= N_MAX or not 0 <= self.node_hours <= HOURS_MAX:
            raise ValueError(f"{self.n_failures} failures in {self.node_hours} node hours")

    @property
    def is_on_record(self) -> bool:
        return self.node_hours > 0

    def per_hour(self, n_nodes: int) -> float:
        """Return the failures an hour of a job on so many nodes."""
        return failures_per_hour(n_nodes, self.n_failures, self.node_hours)

    @property
    def per_1000_node_days(self) -> float:
        """Return the rate used, with the prior."""
        return self.per_hour(1) * HOURS_PER_1000_DAYS

    @property
    def bounds(self) -> tuple[float, float] | None:
        """Return the 95 % interval of the record in failures per 1000 node days, None without."""
        if not self.is_on_record:
            return None
        low, high = poisson_bounds(self.n_failures)
        days = self.node_hours / HOURS_PER_1000_DAYS
        return low / days, high / days

    @property
    def source(self) -> str:
        return "store" if self.is_on_record else "published"

    def describe(self) -> str:
        """Return which rate this is and where from, for a person."""
        rate = f"{self.per_1000_node_days:.3g} failures per 1000 node days"
        bounds = self.bounds
        if bounds is None:
            return f"{rate}: as published of a cluster of A100, none are on record"
        low, high = bounds
        return (
            f"{rate}: {self.n_failures} in {self.node_hours / 24:.3g} node days on record "
            f"(95 %: {low:.2g} to {high:.2g}), and the published "
            f"{FAILURES_PER_1000_NODE_DAYS:g} with the weight of one failure"
        )

    def as_dict(self) -> dict[str, Any]:
        """Return the same as figures; ``low_…`` and ``high_…`` are `bounds`, of the record alone.

        So the rate may be outside of them: it also has the weight of the prior.
        """
        bounds = self.bounds
        return {
            "per_1000_node_days": self.per_1000_node_days,
            "source": self.source,
            "failures": self.n_failures,
            "node_hours": self.node_hours,
            "low_per_1000_node_days": None if bounds is None else bounds[0],
            "high_per_1000_node_days": None if bounds is None else bounds[1],
        }

    def to_text(self) -> str:
        """Return ``3/8123.5``."""
        return f"{self.n_failures}/{self.node_hours:.6f}"

    @classmethod
    def from_env(cls, env: Mapping[str, str]) -> Self:
        """Return what an agent set in *env*; an empty record where that is unset or invalid."""
        match = _TEXT.fullmatch(env.get(FAILURES_VARIABLE, ""))
        try:
            return cls(int(match[1]), float(match[2])) if match else cls()
        except ValueError:
            return cls()


def poisson_bounds(n: int, confidence: float = _CONFIDENCE) -> tuple[float, float]:
    """Return the interval of the mean of a Poisson count that came out as *n*.

    Raises:
        ValueError: *n* is below 0.
    """
    if n < 0:
        raise ValueError(f"a count of {n}")
    if n > _EXACT_MAX and confidence == _CONFIDENCE:
        return _wilson_hilferty(n, -_NORMAL_975), _wilson_hilferty(n + 1, _NORMAL_975)
    tail = (1 - confidence) / 2
    # P(X >= n) = tail at the lower bound, P(X <= n) = tail at the upper one.
    low = 0.0 if n == 0 else _mean_where(n - 1, 1 - tail)
    return low, _mean_where(n, tail)


def _mean_where(n: int, share: float) -> float:
    """Return the mean of which P(X <= n) is *share*, by bisection: that falls with the mean."""
    low, high = 0.0, n + 20 * math.sqrt(n + 1) + 20
    while high - low > 1e-12 * high:
        middle = (low + high) / 2
        if middle in (low, high):
            break
        low, high = (middle, high) if _at_most(n, middle) > share else (low, middle)
    return (low + high) / 2


def _at_most(n: int, mean: float) -> float:
    """Return P(X <= n)."""
    if mean == 0:
        return 1.0
    log_mean = math.log(mean)
    return math.fsum(math.exp(k * log_mean - mean - math.lgamma(k + 1)) for k in range(n + 1))


def _wilson_hilferty(n: int, normal: float) -> float:
    """Return chi2(2n) / 2 at the quantile of the standard normal (PNAS 17, 1931)."""
    return float(n * (1 - 1 / (9 * n) + normal / (3 * math.sqrt(n))) ** 3)
