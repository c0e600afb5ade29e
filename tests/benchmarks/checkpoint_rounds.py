"""Rounds of saves in which a peer may fail: it is named and left out, and the others go on."""

from collections.abc import Callable, Sequence

from gpuops.worker.bench.run import SAVE_TIMEOUT_S, SaveLimits, SaveRounds
from gpuops.worker.bench.savers import BenchJob, BenchSaver

PEER_TIMEOUT_S = 120.0  # that a way may take which is not needed


class BenchRounds(SaveRounds):
    """Rounds with ``missing``: the names of the ways that failed, and why.

    The failure of a way whose name is among *needed* is one of the whole.
    """

    def __init__(
        self,
        job: BenchJob,
        limits: SaveLimits,
        n_beside: int,
        on_message: Callable[[str], None],
        *,
        needed: frozenset[str] = frozenset(),
    ) -> None:
        super().__init__(job, limits, n_beside, on_message)
        self._needed = needed
        self.missing: dict[str, str] = {}

    def run_round(self, savers: Sequence[BenchSaver]) -> None:
        """Save once in each way that has not failed."""
        super().run_round([saver for saver in savers if saver.name not in self.missing])

    def add(self, saver: BenchSaver, *, timeout_s: float = PEER_TIMEOUT_S) -> None:
        """Save once in that way; drop it if it fails."""
        if saver.name in self._needed:
            super().add(saver, timeout_s=SAVE_TIMEOUT_S)
            return
        try:
            super().add(saver, timeout_s=timeout_s)
        except Exception as exc:  # noqa: BLE001 boundary: a peer may fail as it likes
            self.drop(saver.name, exc)

    def drop(self, name: str, exc: Exception) -> None:
        """Leave the way of that name out from now on, and what was measured of it."""
        lines = str(exc).strip().splitlines() or [""]
        self.missing[name] = f"{type(exc).__name__}: {lines[0][:200]}"
        self.samples.pop(name, None)
