"""Rounds of saves in which a peer may fail: it is named and left out, and the others go on."""

from collections.abc import Callable, Sequence

from gpuops.worker.bench.run import SAVE_TIMEOUT_S, SaveSample, in_turns, measure_save
from gpuops.worker.bench.savers import BenchJob, BenchSaver

PEER_TIMEOUT_S = 120.0  # that a way may take which is not needed


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
        for saver in in_turns(savers, self._n_rounds):
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
                    timeout_s=SAVE_TIMEOUT_S if saver.name in self._needed else PEER_TIMEOUT_S,
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
