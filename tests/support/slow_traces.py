"""Own times of the ranks of made-up jobs: the frozen generator of the scorecard of slow ranks.

Seeds below 1,000 are for tuning, those from 1,000 on for scoring. What is tuned after the scoring
seeds were looked at needs new ones.
"""

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

ONSET = 40


@dataclass(frozen=True, kw_only=True)
class TraceOptions:
    """One job: ``noise`` is the spread of a rank from step to step, ``offset`` between ranks.

    ``drift``: of a rank, as an autoregressive process with a memory of 50 steps. ``hiccups``: the
    share of the steps of a rank that take a quarter longer. Each ``pause_every`` steps all ranks
    take 1.6 times as long (evaluation, saving). ``slow``: factors from ``ONSET`` on.
    """

    seed: int
    n_ranks: int = 8
    n_steps: int = 120
    noise: float = 0.01
    offset: float = 0.003
    drift: float = 0.002
    hiccups: float = 0.01
    pause_every: int = 100
    slow: Mapping[int, float] = field(default_factory=dict)


def own_times(options: TraceOptions) -> Iterator[dict[int, float]]:
    """Yield the seconds of each rank's own, step by step."""
    draw = random.Random(options.seed)
    offsets = [draw.gauss(0, options.offset) for _ in range(options.n_ranks)]
    drifts = [draw.gauss(0, options.drift) for _ in range(options.n_ranks)]
    memory = 0.98
    push = options.drift * (1 - memory**2) ** 0.5
    for step in range(options.n_steps):
        base_s = 0.1 * (1.6 if step % options.pause_every == options.pause_every - 1 else 1.0)
        own = {}
        for rank in range(options.n_ranks):
            drifts[rank] = memory * drifts[rank] + draw.gauss(0, push)
            factor = 1 + offsets[rank] + drifts[rank] + draw.gauss(0, options.noise)
            factor *= 1.25 if draw.random() < options.hiccups else 1.0
            factor *= options.slow.get(rank, 1.0) if step >= ONSET else 1.0
            own[rank] = base_s * max(factor, 0.01)
        yield own
