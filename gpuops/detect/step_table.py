"""A table of the operations of a recorded job, and how long each worker computed in each step.

Its columns are those of StragglerAnalysis (Lin et al., OSDI 2025): a row is an operation of a
worker in a step; ``duration`` is in seconds. A worker is a place in the pipeline (``stage``) and in
data parallelism (``dp_rank``): workers of one stage do the same work.
"""

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import NamedTuple

ROWS_MAX = 20_000_000
_COMPUTE = "-compute"
_COLUMNS = ("dp_rank", "stage", "step", "optype", "duration")


class TableWorker(NamedTuple):
    """A worker of the job in a table."""

    stage: int
    dp_rank: int

    def __str__(self) -> str:
        return f"stage {self.stage}, data-parallel rank {self.dp_rank}"


OwnTimes = Mapping[int, Mapping[TableWorker, float]]


def own_times(rows: Iterable[Mapping[str, str | None]]) -> OwnTimes:
    """Return the seconds that each worker computed, by step in their order.

    Raises:
        ValueError: A row lacks a column, or holds no number; or there are more than `ROWS_MAX`.
    """
    found: dict[int, dict[TableWorker, float]] = defaultdict(lambda: defaultdict(float))
    for number, row in enumerate(rows, 2):  # the first line has the names
        if number > ROWS_MAX:
            raise ValueError(f"it has more than {ROWS_MAX} rows")
        try:
            dp_rank, stage, step, operation, seconds = (row[name] or "" for name in _COLUMNS)
            worker, own_s = TableWorker(int(stage), int(dp_rank)), _seconds(seconds)
            if operation.endswith(_COMPUTE):
                found[int(step)][worker] += own_s
        except KeyError as exc:
            raise ValueError(f"it has no column {exc.args[0]!r}") from exc
        except ValueError as exc:
            raise ValueError(f"line {number}: {exc}") from exc
    return {step: found[step] for step in sorted(found)}


def _seconds(text: str) -> float:
    found = float(text)
    if not 0 <= found < math.inf:
        raise ValueError(f"{text!r} is no number of seconds")
    return found


def share_saved(own: OwnTimes, worker: TableWorker) -> float:
    """Return by which share steps would compute shorter if *worker* were as fast as its peers.

    A step takes as long as its slowest worker computes (the closed form of the what-if analysis of
    Lin et al., without communication); the worker's time is replaced by the median of its stage's
    others.
    """
    real = without = 0.0
    for times in own.values():
        others = [
            s for other, s in times.items() if other != worker and other.stage == worker.stage
        ]
        if worker in times and others:
            rest = (s for other, s in times.items() if other != worker)
            real += max(times.values())
            without += max(*rest, statistics.median(others))
    return 1 - without / real if real else 0.0
