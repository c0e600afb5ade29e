"""Who is alive: by how long a peer's heartbeat has not changed, on the reader's own clock.

Wall clocks of different hosts are never compared, so a skew or a jump kills nobody. A heartbeat is
a number that grows; what counts is for how long *this* reader has watched it stand still. Time in
which it did not look (frozen, cut off, a slow board) counts for little: it has seen nothing then.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from gpuops.units import NS_PER_S

# Of the time between two looks, so much counts as watched: a peer beats once in it.
BLIND_S = 3.0


class Life(StrEnum):
    """What a reader thinks of a peer."""

    LIVE = "live"
    SUSPECT = "suspect"
    DEAD = "dead"


@dataclass(slots=True)
class Liveness:
    """What one reader has seen of its peers; *suspect_s* and *dead_s* since the last change."""

    suspect_s: float
    dead_s: float
    _seen: dict[str, tuple[int, int]] = field(default_factory=dict)
    _looked_ns: int | None = None
    _blind_ns: int = 0  # in which nobody was watched, since the first look

    def look(self, beats: Mapping[str, int], now_ns: int) -> None:
        """Take in the newest number of every peer that has a heartbeat at all."""
        last, self._looked_ns = self._looked_ns, now_ns
        if last is not None:
            self._blind_ns += max(0, now_ns - last - round(BLIND_S * NS_PER_S))
        for peer, number in beats.items():
            before = self._seen.get(peer)
            if before is None or before[0] != number:
                self._seen[peer] = (number, now_ns - self._blind_ns)
        for peer in self._seen.keys() - beats.keys():
            del self._seen[peer]

    def silent_s(self, peer: str, now_ns: int) -> float:
        """Return for how long *peer* was seen not to beat; infinite for one that never did."""
        seen = self._seen.get(peer)
        watched_ns = now_ns - self._blind_ns
        return float("inf") if seen is None else (watched_ns - seen[1]) / NS_PER_S

    def of(self, peer: str, now_ns: int) -> Life:
        """Return what to think of *peer*."""
        silent_s = self.silent_s(peer, now_ns)
        if silent_s >= self.dead_s:
            return Life.DEAD
        return Life.SUSPECT if silent_s >= self.suspect_s else Life.LIVE

    def not_dead(self, peers: Iterable[str], now_ns: int) -> list[str]:
        """Return those of *peers* that are live or suspect, in their order."""
        return [peer for peer in peers if self.of(peer, now_ns) is not Life.DEAD]
