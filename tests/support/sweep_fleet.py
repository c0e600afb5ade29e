"""A simulated fleet that is swept: one number for each pair test, with faults that are known."""

import random
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from gpuops.burnin.blame import open_questions
from gpuops.burnin.pairs import NodePair, PairOutcome, PairTest
from gpuops.burnin.schedule import (
    CONFIRMATION_ROUNDS,
    confirmation_round,
    first_rounds,
)
from gpuops.burnin.speed import speed_limits, with_speed

RATE = 400.0
SLOW_SHARE = 0.75


@dataclass
class Faults:
    """What is wrong: ``flaky`` nodes fail their tests with a probability; ``base`` is everybody's.

    ``noise`` is the standard deviation of healthy rates, as a share.
    """

    hard: Collection[str] = ()
    slow: Collection[str] = ()
    links: Collection[NodePair] = ()
    flaky: Mapping[str, float] = field(default_factory=dict)
    base: float = 0.0
    noise: float = 0.01

    def rate(self, pair: NodePair, rng: random.Random) -> float | None:
        """Return what one test of *pair* measures; None: it fails."""
        if pair in self.links or any(node in self.hard for node in pair):
            return None
        chances = (self.base, *(self.flaky[node] for node in pair if node in self.flaky))
        if any(rng.random() < chance for chance in chances):
            return None
        slow = SLOW_SHARE if any(node in self.slow for node in pair) else 1.0
        return rng.gauss(RATE, RATE * self.noise) * slow


def run_sweep(
    nodes: Collection[str],
    faults: Faults,
    *,
    seed: int,
    tested: Collection[NodePair] = (),
    sweep: str = "",
    nightly: bool = False,
) -> tuple[list[PairTest], int]:
    """Return the judged tests of one sweep as `gpuops sweep` makes it, and how many rounds.

    *nightly*: a third round of all nodes is made in any case.
    """
    rng = random.Random(f"tests {seed}")

    def measured(pairs, number):
        for pair in pairs:
            rate = faults.rate(pair, rng)
            outcome = PairOutcome.FAIL if rate is None else PairOutcome.PASS
            yield PairTest(nodes=pair, outcome=outcome, value=rate, round=number, sweep=sweep)

    rounds = first_rounds(nodes, seed=seed, tested=tested)
    raw = [test for n, one in enumerate(rounds) for test in measured(one.pairs, n)]
    limits = speed_limits(raw)
    tests = [with_speed(test, limits) for test in raw]
    n_rounds = len(rounds)
    for number in range(n_rounds, n_rounds + CONFIRMATION_ROUNDS):
        fill = nightly and number == len(rounds)
        pairs = confirmation_round(
            open_questions(tests), seed=seed + number, fill=fill, tested=tested
        ).pairs
        if not pairs:
            break
        n_rounds += 1
        tests += [with_speed(test, limits) for test in measured(pairs, number)]
    return tests, n_rounds
