"""Which pair tests of a sweep are slow: compared with the fleet's own median.

A test is slow below ``median - max(5 %, 4 MAD)`` of the fleet's pairs; MAD is the median distance
from the median. 5 % is the spread of healthy nodes in stas00/ml-engineering; the factor of 4 is
judgement. One slow node among four slows half of all pairs, so pairs that are clearly slow are left
out of both figures: those 10 % below the median of the nodes' own (higher) medians.
"""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from gpuops.burnin.pairs import PairOutcome, PairTest, is_same_domain

SHARE_MIN = 0.05
MADS = 4
CLEARLY_SLOW = 2 * SHARE_MIN
PAIRS_MIN = 3
SOURCE = "this sweep's median (5 %: stas00/ml-engineering; 4 MAD: judgement, gpuops)"
Level = bool | None  # both nodes below one leaf switch, or not, or unknown


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedLimit:
    """Below ``low`` a pair is slow; in the unit of the tests. ``source`` says where it is from."""

    low: float
    text: str
    source: str


def speed_limits(
    tests: Iterable[PairTest],
    *,
    domains: Mapping[str, str] | None = None,
    slow_percent: float | None = None,
) -> dict[Level, SpeedLimit]:
    """Return the limits of pairs of one leaf, of two, and of those of which no leaf is known.

    They are of the *tests* that measured: those of a sweep's first rounds. A level with fewer than
    three such pairs has the limit of all tests together; fewer than three in all have none.
    *slow_percent*: the site's own distance from the median, in the place of 5 % and 4 MAD.
    """
    groups: dict[Level, list[PairTest]] = {True: [], False: [], None: []}
    measured = [test for test in tests if test.outcome is PairOutcome.PASS and _rate(test)]
    for test in measured:
        groups[is_same_domain(test.nodes, domains or {})].append(test)
    found = {}
    for level, group in groups.items():
        enough = group if len(group) >= PAIRS_MIN else measured
        if (limit := _relative(enough, slow_percent)) is not None:
            found[level] = limit
    return found


def with_speed(
    test: PairTest,
    limits: Mapping[Level, SpeedLimit],
    domains: Mapping[str, str] | None = None,
) -> PairTest:
    """Return *test* with its outcome: ``slow`` below its limit, ``unknown`` without a rate.

    Only a test that passed is changed. Zero, NaN and infinity are no rates: nothing was measured.
    """
    if test.outcome is not PairOutcome.PASS:
        return test
    if not _rate(test):
        return replace(test, outcome=PairOutcome.UNKNOWN)
    limit = limits.get(is_same_domain(test.nodes, domains or {}))
    is_slow = limit is not None and _rate(test) < limit.low
    return replace(test, outcome=PairOutcome.SLOW) if is_slow else test


def _rate(test: PairTest) -> float:
    """Return the rate of *test*; 0 where it did not measure one."""
    rate = test.value
    return rate if rate is not None and math.isfinite(rate) and rate > 0 else 0.0


def _relative(tests: Sequence[PairTest], slow_percent: float | None) -> SpeedLimit | None:
    if len(tests) < PAIRS_MIN:
        return None
    by_node: dict[str, list[float]] = {}
    for test in tests:
        for node in test.nodes:
            by_node.setdefault(node, []).append(_rate(test))
    usual = statistics.median(statistics.median_high(rates) for rates in by_node.values())
    share = CLEARLY_SLOW if slow_percent is None else slow_percent / 100
    rates = [rate for test in tests if (rate := _rate(test)) >= (1 - share) * usual]
    median = statistics.median(rates)
    mad = statistics.median(abs(rate - median) for rate in rates)
    low = median - max(SHARE_MIN * median, MADS * mad)
    if slow_percent is not None:
        low = (1 - share) * median
    text = f">= {low:.4g} {tests[0].unit} (median of {len(rates)} pairs: {median:.4g})"
    source = SOURCE if slow_percent is None else f"this sweep's median (slow-percent {share:.0%})"
    return SpeedLimit(low=low, text=text, source=source)
