"""Scores rules for slow ranks on made-up jobs: ours and those of others, on the same steps."""

import math
import random
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from gpuops.detect.own_time import Measure, RankSteps
from gpuops.detect.slow_rank import SlowRankDetector
from gpuops.detect.step_summary import STEPS_MAX, pack_summary, unpack_summary
from support.slow_traces import ONSET, TraceOptions, own_times

# A read of the recorder each ten minutes, of so many steps.
STEPS_SEEN_AN_HOUR = 6 * STEPS_MAX
SIZES = (4, 8, 16, 64)
NVRX_LIMIT, NVRX_WINDOW = 0.75, 10

Steps = Sequence[Mapping[int, float]]
# From the own times of a job to when each rank was first named, by the number of the step.
Rule = Callable[[Steps], Mapping[int, int]]


def ours(steps: Steps) -> dict[int, int]:
    """Return whom the detector names, by what it gets in a run: summaries of `STEPS_MAX` steps."""
    detector, named = SlowRankDetector(dict.fromkeys(steps[0], "all")), dict[int, int]()
    for number, own in enumerate(_published(steps)):
        for slow in detector.feed(own):
            named.setdefault(slow.rank, number)
    return named


def nvrx(steps: Steps) -> dict[int, int]:
    """Return whom the relative scores of NVRx 0.4.1 name: best median over own median below 0.75.

    Source: its documentation of straggler detection; its default limit, medians of ten steps.
    """
    named = dict[int, int]()
    for end in range(NVRX_WINDOW, len(steps) + 1):
        window = steps[end - NVRX_WINDOW : end]
        medians = {rank: statistics.median(own[rank] for own in window) for rank in steps[0]}
        best = min(medians.values())
        for rank, median in medians.items():
            if best / median < NVRX_LIMIT:
                named.setdefault(rank, end - 1)
    return named


def _published(steps: Steps) -> Iterator[dict[int, float]]:
    for first in range(0, len(steps), STEPS_MAX):
        part = steps[first : first + STEPS_MAX]
        summaries = {
            rank: unpack_summary(
                pack_summary(
                    RankSteps(
                        role=1,
                        measure=Measure.OWN,
                        seconds={n: own[rank] for n, own in enumerate(part)},
                        step_s=1.0,
                    )
                )
            )
            for rank in steps[0]
        }
        for number in range(len(part)):
            yield {rank: summary.seconds[number] for rank, summary in summaries.items()}


@dataclass(frozen=True, kw_only=True)
class Score:
    """``delays``: the steps from onset to name of each slow rank that was named.

    ``wrong``: the jobs in which a healthy rank was named.
    """

    injections: int
    within: int
    delays: tuple[int, ...]
    wrong: int

    @property
    def recall(self) -> float:
        return len(self.delays) / self.injections

    def row(self) -> dict[str, object]:
        low, high = wilson(len(self.delays), self.injections)
        return {
            "recall": round(self.recall, 4),
            "interval_95": [round(low, 4), round(high, 4)],
            "median_delay_steps": statistics.median(self.delays) if self.delays else None,
            "right_rank": round(1 - self.wrong / self.injections, 4),
        }


def score(
    rule: Rule, *, factor: float, noise: tuple[float, float], within: int, n: int, seed: int
) -> Score:
    """Return how *rule* finds one slow rank in each of *n* jobs, *within* steps of its onset."""
    draw, delays, wrong = random.Random(seed), list[int](), 0
    for number in range(n):
        n_ranks = draw.choice(SIZES)
        rank = draw.randrange(n_ranks)
        options = TraceOptions(
            seed=seed + number,
            n_ranks=n_ranks,
            n_steps=ONSET + within,
            noise=draw.uniform(*noise),
            slow={rank: factor},
        )
        named = rule([*own_times(options)])
        wrong += bool(named.keys() - {rank})
        if named.get(rank, -1) >= ONSET:
            delays.append(named[rank] - ONSET + 1)
    return Score(injections=n, within=within, delays=tuple(delays), wrong=wrong)


def false_alarms(rule: Rule, *, noise: float, n: int, seed: int) -> tuple[int, float]:
    """Return how many ranks of *n* healthy jobs of each size were named, and in how many hours."""
    named = steps = 0
    for n_ranks in SIZES:
        for number in range(n):
            options = TraceOptions(
                seed=seed + number, n_ranks=n_ranks, n_steps=20 * STEPS_MAX, noise=noise
            )
            named += len(rule([*own_times(options)]))
            steps += n_ranks * options.n_steps
    return named, steps / STEPS_SEEN_AN_HOUR


def wilson(hits: int, n: int) -> tuple[float, float]:
    """Return the 95 % interval of a share (Wilson 1927)."""
    z, share = 1.96, hits / n
    middle = share + z * z / (2 * n)
    width = z * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    return (middle - width) / (1 + z * z / n), (middle + width) / (1 + z * z / n)
