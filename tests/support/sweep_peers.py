"""How others locate a bad node, as schedules over the same faults as `support.sweep_fleet`.

From their published descriptions, not their code. A test is bad if it failed, or if it is more than
5 % slower than a healthy one: the peers get gpuops' own definition, except dlrover, of whose scheme
the rule of twice the median is a part. Each returns the nodes and pairs that it names, and rounds.
"""

import itertools
import random
import statistics
from dataclasses import dataclass, field

from gpuops.burnin.blame import BlameKind, blame
from gpuops.burnin.pairs import node_pair
from gpuops.model import Status
from support.sweep_fleet import RATE, SLOW_SHARE, run_sweep

LIMIT = 0.95 * RATE


@dataclass
class Named:
    """What a scheme names. ``suspects``: nodes with a warning, which only gpuops gives."""

    nodes: set = field(default_factory=set)
    pairs: set = field(default_factory=set)
    suspects: set = field(default_factory=set)
    rounds: int = 0


class Bench:
    """Makes the tests of one sweep, of pairs and of larger groups."""

    def __init__(self, faults, seed):
        self.faults = faults
        self.rng = random.Random(f"tests {seed}")

    def rate(self, pair):
        return self.faults.rate(pair, self.rng)

    def is_bad(self, pair):
        rate = self.rate(pair)
        return rate is None or rate < LIMIT

    def is_bad_group(self, group):
        """A collective over *group* runs at the pace of its slowest member, and fails with one."""
        faults, members = self.faults, set(group)
        if members & set(faults.hard) or any(members >= set(pair) for pair in faults.links):
            return True
        chances = [faults.flaky[node] for node in group if node in faults.flaky]
        if any(self.rng.random() < chance for chance in chances):
            return True
        slow = SLOW_SHARE if members & set(faults.slow) else 1.0
        return self.rng.gauss(RATE, RATE * faults.noise) * slow < LIMIT


def gpuops(nodes, faults, seed):
    tests, rounds = run_sweep(nodes, faults, seed=seed)
    named = Named(rounds=rounds)
    for verdict in blame(tests):
        if verdict.kind is BlameKind.NODE:
            sure = verdict.status is Status.FAIL
            (named.nodes if sure else named.suspects).add(verdict.entity.id)
        elif verdict.kind is BlameKind.PAIR:
            named.pairs.add(tuple(verdict.entity.id.split(",")))
    return named


def dlrover(nodes, faults, seed):
    """Neighbours; then, sorted by time, the fastest with the slowest. Bad: failed both times."""
    bench, elapsed = Bench(faults, seed), {node: [] for node in nodes}
    order = list(nodes)
    for _ in range(2):
        half = len(order) // 2
        for a, b in zip(order[:half], reversed(order[half:]), strict=True):
            rate = bench.rate(node_pair(a, b))
            for node in (a, b):
                elapsed[node].append(float("inf") if rate is None else RATE / rate)
        order = sorted(nodes, key=lambda node: elapsed[node][0])
    best = {node: min(times) for node, times in elapsed.items()}
    limit = 2 * statistics.median(best.values())
    return Named(nodes={node for node, time in best.items() if time > limit}, rounds=2)


def two_pass(nodes, faults, seed):
    """cluster-health-scanner: random pairs; each suspect again with a node that passed."""
    bench, rng = Bench(faults, seed), random.Random(f"order {seed}")
    order = rng.sample(nodes, len(nodes))
    pairs = list(zip(order[::2], order[1::2], strict=True))
    bad = {pair: None for pair in pairs if bench.is_bad(node_pair(*pair))}
    suspects = [node for pair in bad for node in pair]
    good = [node for pair in pairs if pair not in bad for node in pair]
    rng.shuffle(good)
    if not good:
        return Named(nodes=set(suspects), rounds=1)
    partners = itertools.cycle(good)
    named = {node for node in suspects if bench.is_bad(node_pair(node, next(partners)))}
    return Named(nodes=named, rounds=1 + -(-len(suspects) // len(good)))


def pair_wise(nodes, faults, seed):
    """SuperBench: all pairs in N - 1 rounds. Bad: most of its pairs are."""
    bench = Bench(faults, seed)
    bad = {pair for pair in itertools.combinations(sorted(nodes), 2) if bench.is_bad(pair)}
    counts = dict.fromkeys(nodes, 0)
    for node in itertools.chain.from_iterable(bad):
        counts[node] += 1
    named = {node for node, count in counts.items() if 2 * count > len(nodes) - 1}
    pairs = {pair for pair in bad if not named & set(pair)}
    return Named(nodes=named, pairs=pairs, rounds=len(nodes) - 1)


def one_by_one(nodes, faults, seed):
    """gcm: all pairs, one after another. Bad: the mean of its rates is 5 % below the median's."""
    bench, rates = Bench(faults, seed), {node: [] for node in nodes}
    pairs = list(itertools.combinations(sorted(nodes), 2))
    for pair in pairs:
        rate = bench.rate(pair) or 0.0
        for node in pair:
            rates[node].append(rate)
    means = {node: statistics.fmean(values) for node, values in rates.items()}
    limit = 0.95 * statistics.median(means.values())
    return Named(nodes={node for node in nodes if means[node] < limit}, rounds=len(pairs))


def bisection(nodes, faults, seed):
    """Cluster Readiness Engine: halves of what is bad; the last two each with a good one."""
    bench = Bench(faults, seed)
    groups, good, rounds = [list(nodes)], [], 0
    ends, named = [], set()
    while groups:
        rounds += 1
        bad = []
        for group in groups:
            if bench.is_bad_group(group):
                bad.append(group)
            else:
                good += group
        ends += [group for group in bad if len(group) <= 2]
        halves = [(g[: len(g) // 2], g[len(g) // 2 :]) for g in bad if len(g) > 2]
        groups = [half for two in halves for half in two if len(half) > 1]
        ends += [half for two in halves for half in two if len(half) == 1]
    if ends and good:
        rounds += 1
        partners = itertools.cycle(good)
        last = [node for group in ends for node in group]
        named = {node for node in last if bench.is_bad(node_pair(node, next(partners)))}
    return Named(nodes=named, rounds=rounds)


SCHEMES = {
    "gpuops": gpuops,
    "dlrover, 2 rounds": dlrover,
    "cluster-health-scanner, 2 passes": two_pass,
    "SuperBench, pair-wise": pair_wise,
    "gcm, one by one": one_by_one,
    "Cluster Readiness Engine, halves": bisection,
}
ALL_PAIRS = {"SuperBench, pair-wise", "gcm, one by one"}
