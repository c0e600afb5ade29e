"""Rounds of saves, each way in its turn; what each took of the training beside it."""

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from gpuops.worker.checkpointer_bench.savers import BenchError, Saver
from gpuops.worker.checkpointer_bench.subject import Subject

DEADLINE_S = 600.0
_POLL_S = 0.02


@dataclass(frozen=True, slots=True)
class Sample:
    """One save.

    ``stall_s``: what the call took. ``extra_s``: the step with the save in it, less the mean of the
    steps just before. ``recoverable_s`` and ``durable_s`` count from the end of the training step.
    ``loss``: by how much the steps between call and durability were slower, as a share of their
    rate; None where none was made. ``lost_s``: all the training time that the save took.
    """

    stall_s: float
    extra_s: float
    recoverable_s: float | None
    durable_s: float
    loss: float | None
    lost_s: float


def sample(subject: Subject, saver: Saver, step: int, n_before: int) -> Sample:
    """Save once in the middle of training.

    Raises:
        BenchError: Nothing was saved.
    """
    usual_s = statistics.fmean(subject.step() for _ in range(n_before))
    begun_s = time.perf_counter()
    saver.save(step)
    stall_s = time.perf_counter() - begun_s
    is_done = saver.is_done()
    durable_s = stall_s
    steps_s = [subject.step()]
    while not is_done:
        end_s = time.perf_counter() + _POLL_S
        while time.perf_counter() < end_s:
            steps_s.append(subject.step())
        # What the looking itself takes counts for nobody.
        durable_s = time.perf_counter() - begun_s
        if durable_s > DEADLINE_S:
            raise BenchError(f"{saver.name}: nothing durable after {DEADLINE_S:g} s")
        is_done = saver.is_done()
    slowed_s = sum(steps_s) - usual_s * len(steps_s)
    return Sample(
        stall_s=stall_s,
        extra_s=stall_s + steps_s[0] - usual_s,
        recoverable_s=saver.recoverable_s(stall_s, durable_s),
        durable_s=durable_s,
        loss=slowed_s / sum(steps_s) if len(steps_s) > 1 else None,
        lost_s=stall_s + slowed_s,
    )


def rounds(
    subject: Subject,
    savers: Sequence[Saver],
    n_rounds: int,
    n_before: int,
    tell: Callable[[str], None],
) -> dict[str, list[Sample]]:
    """Return the samples of each way, the cold one first: *n_rounds* and one."""
    found: dict[str, list[Sample]] = {saver.name: [] for saver in savers}
    step = 0
    for number in range(n_rounds + 1):
        # Another one first each time, so that none always follows the same one.
        turn = number % len(savers)
        for saver in [*savers[turn:], *savers[:turn]]:
            step += 1
            tell(f"round {number} of {n_rounds}: {saver.name}")
            found[saver.name].append(sample(subject, saver, step, n_before))
            saver.clean()
    return found


def figures(values: Iterable[float | None]) -> dict[str, Any]:
    """Return the first value apart, and median and extremes of the others."""
    first, *rest = list(values)
    there = [value for value in rest if value is not None]
    return {
        "first": first,
        "median": statistics.median(there) if there else None,
        "min": min(there, default=None),
        "max": max(there, default=None),
        "n": len(there),
    }


def summary(samples: Sequence[Sample]) -> dict[str, Any]:
    """Return the figures of each field of *samples*."""
    fields = [asdict(each) for each in samples]
    return {name: figures(each[name] for each in fields) for name in fields[0]}
