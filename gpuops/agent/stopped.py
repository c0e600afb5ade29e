"""Workers that somebody has stopped (SIGSTOP, a cgroup's freezer): no phase explains that.

A rank that evaluates or compiles may be silent for long; one in state T does nothing at all. So it
has the limit of a step, whatever it said it was doing. A debugger's stop (state t) is left alone.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path

from gpuops.host.procfs import parse_stat
from gpuops.host.small_files import text_of

STOPPED = "T"
LOOK_S = 1.0


class StoppedRanks:
    """For how long each rank has been seen stopped, without a look in between that said otherwise.

    The time in which this agent did not look either is not counted.
    """

    def __init__(self) -> None:
        self._since_ns: dict[int, int] = {}
        self._looked_ns: int | None = None

    def is_due(self, now_ns: int) -> bool:
        """Say whether it is time for the next look."""
        return self._looked_ns is None or now_ns - self._looked_ns >= LOOK_S * 1e9

    def look(self, states: Mapping[int, str | None], now_ns: int) -> None:
        """Take in the state letters by rank."""
        away_ns = 0 if self._looked_ns is None else now_ns - self._looked_ns
        if away_ns > 5 * LOOK_S * 1e9:
            self._since_ns.clear()
        self._looked_ns = now_ns
        stopped = {rank for rank, state in states.items() if state == STOPPED}
        self._since_ns = {rank: self._since_ns.get(rank, now_ns) for rank in stopped}

    def heard(self, ranks: Iterable[int]) -> None:
        """Take *ranks* as going on: they have beaten."""
        for rank in ranks:
            self._since_ns.pop(rank, None)

    def longer_than(self, limit_s: float, now_ns: int) -> dict[int, float]:
        """Return the ranks that have been stopped for *limit_s*, with their seconds."""
        lasted = {rank: (now_ns - since) / 1e9 for rank, since in self._since_ns.items()}
        return {rank: seconds for rank, seconds in lasted.items() if seconds >= limit_s}


def state_of(pid: int, root: Path = Path("/")) -> str | None:
    """Return the state letter of the main thread of *pid* (proc(5)), None where it is gone."""
    found = parse_stat(text_of(root / f"proc/{pid}/stat") or "")
    return None if found is None else found.state
