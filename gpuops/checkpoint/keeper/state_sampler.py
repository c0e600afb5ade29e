"""Which committed states have their replicas compared."""

import math

import xxhash

from gpuops.checkpoint.types import StateId

CORE_SHARE = 0.01
_HALVINGS_MAX = 20
_SMOOTH = 0.25


class StateSampler:
    """Samples committed states so that comparing them takes *share* of a core.

    One of every 2^j states is chosen, by its number alone: a node with a larger j chooses a subset
    of the states that the others choose.
    """

    def __init__(self, share: float = CORE_SHARE) -> None:
        self._share = share
        self._every_s: float | None = None
        self._last_s: float | None = None
        self._took_s = 0.0

    @property
    def n_halvings(self) -> int:
        if not self._took_s or not self._every_s:
            return 0
        ratio = self._took_s / (self._share * self._every_s)
        return min(max(0, math.ceil(math.log2(ratio))), _HALVINGS_MAX)

    def is_sampled(self, state: StateId, now_s: float) -> bool:
        """Record that *state* was committed; return whether it is to be checked."""
        if self._last_s is not None:
            self._every_s = _smooth(self._every_s, max(now_s - self._last_s, 1e-3))
        self._last_s = now_s
        name_hash: int = xxhash.xxh3_64_intdigest(state.name.encode())
        return name_hash & ((1 << self.n_halvings) - 1) == 0

    def record_cost(self, seconds: float) -> None:
        """Record the cost of one check, in seconds of a core."""
        self._took_s = _smooth(self._took_s or None, seconds)


def _smooth(before: float | None, now: float) -> float:
    return now if before is None else (1 - _SMOOTH) * before + _SMOOTH * now
