"""Sending in the gaps that the training leaves on the network.

GEMINI (Wang et al., SOSP 2023, section 5) profiles the idle spans between a training's collectives
and sends replicas in these only. A keeper cannot see collectives; it sees what the interface has
sent, and knows what of it was its own: the rest is the training's. While there is any, replicas
are held to what they need to be through in time; where there is none, they have all of the network.

`Foreground` and `rate_for` are pure; `GapPace` looks at the counters and the clock.
"""

from collections.abc import Callable
from dataclasses import dataclass

from gpuops.checkpoint.transfer_pace import LOOK_S, RATE_MIN_BYTES_S, Pace
from gpuops.host.clock import Clock
from gpuops.units import NS_PER_S

# Longer than the pauses between the buckets of one reduction.
QUIET_S = 0.02
# Slower than this, and than this share of what was ever seen, is no training.
BUSY_MIN_BYTES_S = 4 * 2**20
BUSY_SHARE = 0.02
# Headers of packets of 1500 bytes, and some acknowledgements. Rather too much than too little: our
# own must not look like somebody else's.
OVERHEAD = 1.06
# What may be on its way from us to the counter: socket buffers.
BEHIND_MAX_BYTES = 8 * 2**20
# So little is on its way before anybody could wait for a gap.
FREE_BYTES = 8 * 2**20
# Spans vary: no more than this share of the gaps that there were is counted on.
GAMMA = 0.7
_REMEMBERED_S = 10.0


class Foreground:
    """What others than we send over an interface, from its counter and our own.

    ``gap_share`` is which part of the time nobody else sends, ``gap_bytes_per_s`` how much of ours
    a second of that takes; both of the last ten seconds or so that we were sending.
    """

    def __init__(self) -> None:
        self.gap_share = 0.0
        self.gap_bytes_per_s = 0.0
        self._last: tuple[float, float, float] | None = None
        self._top_bytes = 0.0
        self._peak_bytes_s = 0.0
        self._busy_until_s = 0.0
        self._now_s = 0.0
        self._known_s = self._known_gaps_s = 0.0

    @property
    def is_busy(self) -> bool:
        return self._now_s < self._busy_until_s

    def look(self, now_s: float, sent_bytes: float, own_bytes: float) -> None:
        """Take in how much the interface has sent so far, and how much of it we gave it."""
        last, self._now_s = self._last, now_s
        self._last = (now_s, sent_bytes, own_bytes)
        others_bytes = sent_bytes - OVERHEAD * own_bytes
        if last is None or now_s <= last[0] or sent_bytes < last[1]:
            self._top_bytes = others_bytes
            return
        span_s = now_s - last[0]
        self._peak_bytes_s = max(self._peak_bytes_s, (sent_bytes - last[1]) / span_s)
        more_bytes = max(others_bytes - self._top_bytes, 0.0)
        self._top_bytes = min(self._top_bytes + more_bytes, others_bytes + BEHIND_MAX_BYTES)
        least = max(BUSY_MIN_BYTES_S, BUSY_SHARE * self._peak_bytes_s)
        was_busy = self.is_busy
        if more_bytes > least * span_s:
            self._busy_until_s = now_s + QUIET_S
        if span_s <= _REMEMBERED_S / 10:
            self._remember(span_s, own_bytes - last[2], is_gap=not was_busy and not self.is_busy)

    def _remember(self, span_s: float, own_bytes: float, *, is_gap: bool) -> None:
        self._known_s = min(self._known_s + span_s, _REMEMBERED_S)
        self.gap_share += span_s / self._known_s * (is_gap - self.gap_share)
        if is_gap:
            self._known_gaps_s = min(self._known_gaps_s + span_s, _REMEMBERED_S)
            more = own_bytes / span_s - self.gap_bytes_per_s
            self.gap_bytes_per_s += span_s / self._known_gaps_s * more


@dataclass(frozen=True, slots=True)
class Due:
    """So many bytes are to be through by *at_s*."""

    left_bytes: float
    at_s: float


def rate_for(now_s: float, seen: Foreground, due: Due | None) -> float | None:
    """Return how many bytes per second may be sent now; None: as many as go.

    While others send, no more than what the gaps to come will leave over, and never less than
    `RATE_MIN_BYTES_S`; where time is up, or `FREE_BYTES` are left, all that goes.
    """
    if not seen.is_busy:
        return None
    if due is None or due.left_bytes <= 0:
        return RATE_MIN_BYTES_S
    left_s = due.at_s - now_s
    if left_s <= LOOK_S or due.left_bytes <= FREE_BYTES:
        return None
    in_gaps = GAMMA * seen.gap_share * seen.gap_bytes_per_s * left_s
    rest, busy_s = due.left_bytes - in_gaps, left_s * (1 - GAMMA * seen.gap_share)
    return max(rest / busy_s, RATE_MIN_BYTES_S)


class GapPace(Pace):
    """A pace that follows the traffic of others, and is never above what `set_rate` says.

    Until `watch` it is a plain one. ``yielded_s``: for how long it held back.
    """

    def __init__(self, clock: Clock) -> None:
        super().__init__(None, clock)
        self._most: float | None = None
        self._counter: Callable[[], int | None] | None = None
        self._seen = Foreground()
        self._due: Due | None = None
        self._looked_ns = 0
        self.yielded_s = 0.0

    @property
    def bytes_per_s(self) -> float | None:
        return self._most

    def set_rate(self, bytes_per_s: float | None) -> None:
        super().set_rate(bytes_per_s)
        self._most = self._rate

    def watch(self, counter: Callable[[], int | None] | None) -> None:
        """Follow *counter*, which says how many bytes the interface has sent; None: nothing."""
        with self._lock:
            self._counter, self._seen = counter, Foreground()
            self._change(self._most)

    def owe(self, left_bytes: float, within_s: float) -> None:
        """Note that so many bytes are to be through *within_s* from now on."""
        with self._lock:
            now_s = self._clock.mono_ns() / NS_PER_S
            # Counted down by what is taken from here on.
            self._due = Due(left_bytes + self._taken_bytes, now_s + within_s)

    def turn(self, nbytes: int) -> float:
        self._look()
        return super().turn(nbytes)

    def wait_s(self, turn: float) -> float:
        self._look()
        return super().wait_s(turn)

    def _look(self) -> None:
        with self._lock:
            counter, now_ns = self._counter, self._clock.mono_ns()
            since_s = (now_ns - self._looked_ns) / NS_PER_S
            if counter is None or 0 <= since_s < LOOK_S:
                return
            self._looked_ns = now_ns
            sent_bytes = counter()
            if sent_bytes is None:
                self._change(self._most)
                return
            if self._seen.is_busy and since_s < 1.0:
                self.yielded_s += since_s
            now_s = now_ns / NS_PER_S
            self._seen.look(now_s, sent_bytes, self._taken_bytes)
            due = self._due
            if due is not None:
                due = Due(due.left_bytes - self._taken_bytes, due.at_s)
            rate, most = rate_for(now_s, self._seen, due), self._most
            self._change(most if rate is None else rate if most is None else min(rate, most))

    def _change(self, rate: float | None) -> None:
        """Go on at *rate*; who waits for a turn goes on to wait, for less or more."""
        self._earn()
        self._rate = rate
