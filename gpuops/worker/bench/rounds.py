"""Rounds of saves, each way in its turn; what each took of the training beside it."""

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from gpuops.worker.bench.savers import BenchError, BenchSaver
from gpuops.worker.bench.subject import BenchJob

DEADLINE_S = 600.0
PEER_TIMEOUT_S = 120.0  # that a way may take which is not needed
_POLL_S = 0.02


@dataclass(frozen=True, slots=True)
class SaveSample:
    """One save.

    ``stall_s``: what the call took. ``extra_s``: the step with the save in it, less the mean of the
    steps beside it: just before, and just after what it set going, for a shared machine drifts.
    ``recoverable_s`` and ``durable_s`` count from the end of the training step. ``loss``: by how
    much the steps between call and durability were slower, as a share of their rate; None where
    none was made. ``lost_s``: all the training time that the save took.
    """

    stall_s: float
    extra_s: float
    recoverable_s: float | None
    durable_s: float
    loss: float | None
    lost_s: float


def measure_save(
    subject: BenchJob,
    saver: BenchSaver,
    step: int,
    n_steps_around: int,
    *,
    deadline_s: float = DEADLINE_S,
) -> SaveSample:
    """Save once in the middle of training.

    Raises:
        BenchError: Nothing was saved.
    """
    usual = [subject.step() for _ in range(n_steps_around)]
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
        if durable_s > deadline_s:
            raise BenchError(f"{saver.name}: nothing durable after {deadline_s:g} s")
        is_done = saver.is_done()
    usual += [subject.step() for _ in range(n_steps_around)]
    usual_s = statistics.fmean(usual)
    slowed_s = sum(steps_s) - usual_s * len(steps_s)
    return SaveSample(
        stall_s=stall_s,
        extra_s=stall_s + steps_s[0] - usual_s,
        recoverable_s=saver.recoverable_s(stall_s, durable_s),
        durable_s=durable_s,
        loss=slowed_s / sum(steps_s) if len(steps_s) > 1 else None,
        lost_s=stall_s + slowed_s,
    )


class BenchRounds:
    """The ways to save, each in its turn in each round; the first round is the cold one.

    ``samples`` are by name and number of the round. ``missing`` has the names of those that failed,
    which takes none of the others along, and why.
    """

    def __init__(
        self,
        subject: BenchJob,
        n_steps_around: int,
        on_message: Callable[[str], None],
        *,
        needed: frozenset[str] = frozenset(),
    ) -> None:
        """Take *needed*, the names of those whose failure is one of the whole."""
        self._subject = subject
        self._n_beside = n_steps_around
        self._on_message = on_message
        self._needed = needed
        self._step = 0
        self._n_rounds = 0
        self.samples: dict[str, dict[int, SaveSample]] = {}
        self.missing: dict[str, str] = {}

    def run_round(self, savers: Sequence[BenchSaver]) -> None:
        """Save once in each way that has not failed."""
        # Another one first each time, so that none always follows the same one.
        first = self._n_rounds % len(savers)
        for saver in [*savers[first:], *savers[:first]]:
            if saver.name in self.missing:
                continue
            self._step += 1
            self._on_message(f"round {self._n_rounds}: {saver.name}")
            try:
                save_sample = measure_save(
                    self._subject,
                    saver,
                    self._step,
                    self._n_beside,
                    deadline_s=DEADLINE_S if saver.name in self._needed else PEER_TIMEOUT_S,
                )
                saver.clean()
            except Exception as exc:  # boundary: a peer may fail as it likes
                if saver.name in self._needed:
                    raise
                self.drop(saver.name, exc)
            else:
                self.samples.setdefault(saver.name, {})[self._n_rounds] = save_sample
        self._n_rounds += 1

    def drop(self, name: str, exc: Exception) -> None:
        """Leave the way of that name out from now on, and what was measured of it."""
        lines = str(exc).strip().splitlines() or [""]
        self.missing[name] = f"{type(exc).__name__}: {lines[0][:200]}"
        self.samples.pop(name, None)


def summarize(values: Iterable[float | None]) -> dict[str, Any]:
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


def summary(samples: Iterable[SaveSample]) -> dict[str, Any]:
    """Return the figures of each field of *samples*."""
    fields = [asdict(each) for each in samples]
    return {name: summarize(each[name] for each in fields) for name in fields[0]}
