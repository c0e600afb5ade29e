"""The pair tests of several weeks: which node or link fails more often than the fleet does.

A node that fails a fifth of its tests passes most sweeps. Over weeks an exact binomial test finds
it: how probable are so many failures or more at the fleet's base rate (Clopper and Pearson,
Biometrika 1934)? Many nodes and pairs are looked at, so the probabilities of all nodes, and those
of all pairs, are corrected for their number by Holm's method (Scandinavian Journal of Statistics
1979). One look at a healthy fleet names one with a probability of at most `ALPHA`.

The base rate of a node or pair is that of all other trials, plus one failure, so that it is never
0. What is named explains its trials; the rest is asked again. A trial is one sweep of one pair:
it counts for the pair and both nodes. A repair of a node forgets its trials before.
History warns; it drains nothing.
"""

import math
import statistics
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from gpuops.burnin.pairs import NodePair, PairOutcome, PairTest, node_pair
from gpuops.model import Entity, EntityKind, FailureClass, Finding, Status

ALPHA = 0.05
POWER = 0.95
SOURCE = f"exact binomial test, corrected by Holm's method, alpha {ALPHA:g}"
RATES = (0.05, 0.1, 0.2)
SWEEPS_MAX = 10_000
_NEGLIGIBLE = 1e-17  # of a sum of floats: less changes none of its digits


@dataclass(frozen=True, slots=True, kw_only=True)
class RepeatOffender:
    """A node or pair that failed ``n_failed`` of ``n_trials``; the fleet's rate is ``base``.

    ``probability``: of so many failures at the base rate, corrected for all that was looked at.
    """

    entity: Entity
    n_failed: int
    n_trials: int
    base: float
    probability: float

    @property
    def why(self) -> str:
        """Return the figures as a sentence."""
        return (
            f"failed {self.n_failed} of {self.n_trials} tests since its last repair, the rest of"
            f" the fleet {100 * self.base:.2g} %; by chance with a probability of"
            f" {self.probability:.1g}, corrected for how many were looked at"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryPower:
    """What a history can find of a node that fails ``rate`` of its tests more than the fleet.

    ``found``: the probability that it is named by the history at hand. ``sweeps``: after how many
    it is named with a probability of `POWER`; None: not within 10,000.
    """

    rate: float
    found: float
    sweeps: int | None


class PairHistory:
    """The trials in *tests* that are later than the last repair of both nodes.

    *repaired_us*: when each node was last repaired, by the clock of ``PairTest.t_us``. ``trials``:
    by sweep and pair, whether it failed; ``n_sweeps``: how many sweeps they are of.
    """

    def __init__(
        self, tests: Iterable[PairTest], repaired_us: Mapping[str, int] | None = None
    ) -> None:
        repaired = repaired_us or {}
        self.trials: dict[tuple[str, NodePair], bool] = {}
        for test in tests:
            is_new = all(test.t_us > repaired.get(node, -1) for node in test.nodes)
            if is_new and test.outcome is not PairOutcome.UNKNOWN:
                key = (test.sweep, test.nodes)
                self.trials[key] = self.trials.get(key, False) or test.outcome.is_bad
        self.n_sweeps = len({sweep for sweep, _ in self.trials})

    def offenders(self) -> list[RepeatOffender]:
        """Return the nodes and pairs that fail more often than the fleet, the clearest first."""
        tally = _Tally(self.trials)
        found: list[RepeatOffender] = []
        while named := _named_at_once(tally):
            found += named
        return sorted(found, key=lambda item: (item.probability, item.entity))

    def power(self, rates: Sequence[float] = RATES) -> list[HistoryPower]:
        """Return what this history can find, for nodes of each of *rates*; none without trials."""
        if not self.trials:
            return []
        tally = _Tally(self.trials)
        usual = statistics.median_low(n for n, _ in tally.nodes.values())
        in_a_sweep = usual / self.n_sweeps
        while _named_at_once(tally):
            pass
        n_nodes, base = len(tally.nodes), tally.base((0, 0))

        def power(rate: float) -> HistoryPower:
            def found(n_sweeps: int) -> float:
                n_trials = round(n_sweeps * in_a_sweep)
                return _chance_found(n_trials, 1 - (1 - rate) * (1 - base), base, n_nodes)

            enough = bisect_left(range(1, SWEEPS_MAX + 1), POWER, key=found) + 1
            return HistoryPower(
                rate=rate,
                found=found(self.n_sweeps),
                sweeps=enough if enough <= SWEEPS_MAX else None,
            )

        return [power(rate) for rate in rates]


def history_findings(offenders: Iterable[RepeatOffender]) -> list[Finding]:
    """Return a warning for each of *offenders*."""
    return [
        Finding(
            check="sweep_history",
            entity=item.entity,
            status=Status.WARN,
            value=round(100 * item.n_failed / item.n_trials, 1),
            unit="%",
            threshold=f"the fleet's {100 * item.base:.2g} %",
            source=SOURCE,
            message=item.why,
            failure_class=FailureClass.NETWORK_NODE_FAILING
            if item.entity.kind is EntityKind.NODE
            else FailureClass.NETWORK_PAIR_SLOW,
        )
        for item in offenders
    ]


class _Tally:
    """Trials and failures of each node and pair, without those that something named explains."""

    def __init__(self, trials: Mapping[tuple[str, NodePair], bool]) -> None:
        self.nodes: dict[str, tuple[int, int]] = {}
        self.pairs: dict[NodePair, tuple[int, int]] = {}
        self.total = (0, 0)
        self._partners: dict[str, set[str]] = {}
        for (_, pair), is_bad in trials.items():
            self._count(pair, (1, int(is_bad)))
            for node, other in (pair, pair[::-1]):
                self._partners.setdefault(node, set()).add(other)

    def base(self, own: tuple[int, int]) -> float:
        """Return the failure rate of all trials but *own*, plus one failure."""
        n_trials, n_failed = self.total[0] - own[0], self.total[1] - own[1]
        return (n_failed + 1) / (n_trials + 1)

    def look_up(self, entity: str | NodePair) -> tuple[tuple[int, int], int]:
        """Return trials and failures of a node or pair, and how many of its kind there are."""
        if isinstance(entity, str):
            return self.nodes.get(entity, (0, 0)), len(self.nodes)
        return self.pairs.get(entity, (0, 0)), len(self.pairs)

    def explain(self, entity: str | NodePair) -> None:
        """Forget the trials of a node or pair that has been named."""
        if isinstance(entity, str):
            for other in self._partners.pop(entity, ()):
                self._drop(node_pair(entity, other))
            self.nodes.pop(entity, None)
        else:
            self._drop(entity)

    def _count(self, pair: NodePair, more: tuple[int, int]) -> None:
        self.total = (self.total[0] + more[0], self.total[1] + more[1])
        _add(self.pairs, pair, more)
        for node in pair:
            _add(self.nodes, node, more)

    def _drop(self, pair: NodePair) -> None:
        if pair in self.pairs:
            n_trials, n_failed = self.pairs[pair]
            self._count(pair, (-n_trials, -n_failed))
            del self.pairs[pair]


def _add(table: dict[Any, tuple[int, int]], key: object, more: tuple[int, int]) -> None:
    n_trials, n_failed = table.get(key, (0, 0))
    table[key] = (n_trials + more[0], n_failed + more[1])


def _named_at_once(tally: _Tally) -> list[RepeatOffender]:
    """Return what fails more often than the rest of *tally* at present, and explain its trials."""
    queue: list[tuple[float, str, str | NodePair]] = []
    entities: list[str | NodePair] = [*tally.nodes, *tally.pairs]
    for entity in entities:
        own, n_alike = tally.look_up(entity)
        if own[1]:
            queue.append((_corrected(tally, own, n_alike), str(entity), entity))
    named: list[RepeatOffender] = []
    for _, _, entity in sorted(item for item in queue if item[0] <= ALPHA / 2):
        own, n_alike = tally.look_up(entity)  # less what was named before it explains
        probability = _corrected(tally, own, n_alike)
        if not own[1] or probability > ALPHA / 2:
            continue
        named.append(
            RepeatOffender(
                entity=_entity(entity),
                n_failed=own[1],
                n_trials=own[0],
                base=tally.base(own),
                probability=probability,
            )
        )
        tally.explain(entity)
    return named


def _entity(entity: str | NodePair) -> Entity:
    if isinstance(entity, str):
        return Entity(EntityKind.NODE, entity)
    return Entity(EntityKind.PAIR, ",".join(entity))


def _corrected(tally: _Tally, own: tuple[int, int], n_others: int) -> float:
    return min(1.0, n_others * binomial_tail(own[1], own[0], tally.base(own)))


@lru_cache(maxsize=100_000)
def binomial_tail(k: int, n: int, p: float) -> float:
    """Return the probability of *k* or more of *n*, each with probability *p*."""
    if k <= 0 or p >= 1:
        return 1.0
    if p <= 0 or k > n:
        return 0.0
    if k <= n * p:  # the other tail is the shorter sum, and its first term the largest
        return 1 - binomial_tail(n - k + 1, n, 1 - p)
    log_term = math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)
    term = math.exp(log_term + k * math.log(p) + (n - k) * math.log1p(-p))
    total, i = 0.0, k
    while term > total * _NEGLIGIBLE:
        total += term
        term *= (n - i) / (i + 1) * p / (1 - p)
        i += 1
    return total


def _chance_found(n_trials: int, rate: float, base: float, n_nodes: int) -> float:
    """Return how probably a node that fails *rate* of its trials is named, of *n_nodes*."""
    limit = ALPHA / 2 / max(n_nodes, 1)
    counts = range(1, n_trials + 1)
    enough = bisect_left(counts, -limit, key=lambda k: -binomial_tail(k, n_trials, base)) + 1
    return binomial_tail(enough, n_trials, rate)
