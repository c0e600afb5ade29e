"""Limit how fast a keeper sends: training comes first.

A token bucket over all connections of a keeper, and, where the kernel has it, a rate per socket
that spreads the packets evenly (``SO_MAX_PACING_RATE``), so that a full bucket causes no burst.

GEMINI (Wang et al., SOSP 2023, section 5) profiles the idle spans between a training's collectives
and sends replicas only in these. A keeper cannot observe collectives; it reads how much the
interface has sent, and subtracts its own bytes: the rest is the training's. During such traffic,
replicas get only the rate that they need to finish in time; without it, the whole network.

`ForegroundTraffic` and `rate_for` are pure; `GapPace` reads the counters and the clock.
"""

import socket
import struct
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from gpuops.host.clock import Clock
from gpuops.units import NS_PER_S

# At a lower rate, a receiver with several connections takes them for dead.
RATE_MIN_BYTES_S = 4 * 2**20
# How much may be sent at once after a pause.
BURST_S = 0.05
# A waiting sender asks again after this time: the rate may have changed.
RECHECK_S = 0.005
_SO_MAX_PACING_RATE = 47  # asm-generic/socket.h; not named in Python 3.11
_UNLIMITED = 2**64 - 1


class SendPace:
    """A thread-safe token bucket; ``None`` bytes per second is no limit.

    Bytes are numbered in the order of the requests: a sender may send once the bucket has earned
    all numbers before its own.
    """

    def __init__(self, bytes_per_s: float | None, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._rate: float | None = None
        self._earned_bytes = 0.0
        self._taken_bytes = 0.0
        self._at_ns = clock.mono_ns()
        self.set_rate(bytes_per_s)

    @property
    def bytes_per_s(self) -> float | None:
        """Return the limit of the total rate of all connections."""
        return self._rate

    def set_rate(self, bytes_per_s: float | None) -> None:
        """Change the rate, to at least `RATE_MIN_BYTES_S`; bytes already sent are not affected."""
        with self._lock:
            self._rate = None if bytes_per_s is None else max(bytes_per_s, RATE_MIN_BYTES_S)
            self._settle()

    def take(self, nbytes: int) -> float:
        """Record that *nbytes* will be sent; return after how many seconds they may."""
        return self.wait_s(self.enqueue(nbytes))

    def enqueue(self, nbytes: int) -> float:
        """Record that *nbytes* will be sent; return a position to `wait_s` for."""
        with self._lock:
            self._earn()
            position = self._taken_bytes
            self._taken_bytes += nbytes
            return position

    def wait_s(self, position: float) -> float:
        """Return for how many seconds *position* still has to wait, at the current rate."""
        with self._lock:
            self._earn()
            return (
                0.0 if self._rate is None else max(position - self._earned_bytes, 0.0) / self._rate
            )

    def _earn(self) -> None:
        """Add what was earned since the last call."""
        if self._rate is None:
            self._settle()
            return
        now_ns = self._clock.mono_ns()
        gained = max(now_ns - self._at_ns, 0) / 1e9 * self._rate
        self._at_ns = now_ns
        earned_max_bytes = self._taken_bytes + BURST_S * self._rate
        self._earned_bytes = min(self._earned_bytes + gained, earned_max_bytes)

    def _settle(self) -> None:
        self._earned_bytes = self._taken_bytes
        self._at_ns = self._clock.mono_ns()


def set_socket_pacing(sock: socket.socket, bytes_per_s: float | None) -> None:
    """Have the kernel pace *sock*; where it cannot, only the bucket does."""
    rate = _UNLIMITED if bytes_per_s is None else int(bytes_per_s)
    with suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, struct.pack("=Q", rate))


# Longer than the pauses between the buckets of one reduction.
QUIET_S = 0.02
# Traffic below this, and below this share of the highest rate seen, is not training.
BUSY_MIN_BYTES_S = 4 * 2**20
BUSY_SHARE = 0.02
# Headers of packets of 1500 bytes, and some acknowledgements. Rather too much than too little: own
# bytes must not count as foreground traffic.
OVERHEAD = 1.06
# What may be in flight between us and the counter: socket buffers.
BEHIND_MAX_BYTES = 8 * 2**20
# This little is sent before waiting for a gap would help.
FREE_BYTES = 8 * 2**20
# Gaps vary: only this share of the past gaps is relied on.
GAMMA = 0.7
_AVERAGED_S = 10.0


class ForegroundTraffic:
    """The traffic of others on an interface, from its counter and our own bytes.

    ``gap_share``: the part of the time in which no one else sends; ``gap_bytes_per_s``: our rate in
    these gaps; both over about the last ten seconds of our own sending.
    """

    def __init__(self) -> None:
        self.gap_share = 0.0
        self.gap_bytes_per_s = 0.0
        self._last: tuple[float, float, float] | None = None
        self._top_bytes = 0.0
        self._peak_bytes_s = 0.0
        self._busy_until_s = 0.0
        self._now_s = 0.0
        self._observed_s = self._observed_gaps_s = 0.0

    @property
    def is_busy(self) -> bool:
        return self._now_s < self._busy_until_s

    def observe(self, now_s: float, sent_bytes: float, own_bytes: float) -> None:
        """Record how much the interface has sent so far, and how much of it was ours."""
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
        least_bytes_s = max(BUSY_MIN_BYTES_S, BUSY_SHARE * self._peak_bytes_s)
        was_busy = self.is_busy
        if more_bytes > least_bytes_s * span_s:
            self._busy_until_s = now_s + QUIET_S
        if span_s <= _AVERAGED_S / 10:
            self._update_averages(
                span_s, own_bytes - last[2], is_gap=not was_busy and not self.is_busy
            )

    def _update_averages(self, span_s: float, own_bytes: float, *, is_gap: bool) -> None:
        self._observed_s = min(self._observed_s + span_s, _AVERAGED_S)
        self.gap_share += span_s / self._observed_s * (is_gap - self.gap_share)
        if is_gap:
            self._observed_gaps_s = min(self._observed_gaps_s + span_s, _AVERAGED_S)
            change = own_bytes / span_s - self.gap_bytes_per_s
            self.gap_bytes_per_s += span_s / self._observed_gaps_s * change


@dataclass(frozen=True, slots=True)
class SendDeadline:
    """*left_bytes* have to be sent by *at_s*."""

    left_bytes: float
    at_s: float


def rate_for(
    now_s: float, foreground: ForegroundTraffic, deadline: SendDeadline | None
) -> float | None:
    """Return how many bytes per second may be sent now; None: no limit.

    While others send, only what the expected gaps leave to do, and at least `RATE_MIN_BYTES_S`;
    after the deadline, or for the last `FREE_BYTES`, there is no limit.
    """
    if not foreground.is_busy:
        return None
    if deadline is None or deadline.left_bytes <= 0:
        return RATE_MIN_BYTES_S
    left_s = deadline.at_s - now_s
    if left_s <= RECHECK_S or deadline.left_bytes <= FREE_BYTES:
        return None
    in_gaps = GAMMA * foreground.gap_share * foreground.gap_bytes_per_s * left_s
    rest, busy_s = deadline.left_bytes - in_gaps, left_s * (1 - GAMMA * foreground.gap_share)
    return max(rest / busy_s, RATE_MIN_BYTES_S)


class GapPace(SendPace):
    """A pace that adapts to the traffic of others, and never exceeds the rate of `set_rate`.

    Before `watch` it does not adapt. ``yielded_s``: for how long it held back.
    """

    def __init__(self, clock: Clock) -> None:
        super().__init__(None, clock)
        self._rate_max: float | None = None
        self._counter: Callable[[], int | None] | None = None
        self._foreground = ForegroundTraffic()
        self._deadline: SendDeadline | None = None
        self._observed_ns = 0
        self.yielded_s = 0.0

    @property
    def bytes_per_s(self) -> float | None:
        return self._rate_max

    def set_rate(self, bytes_per_s: float | None) -> None:
        super().set_rate(bytes_per_s)
        self._rate_max = self._rate

    def watch(self, counter: Callable[[], int | None] | None) -> None:
        """Watch *counter*, which returns how many bytes the interface has sent; None: nothing."""
        with self._lock:
            self._counter, self._foreground = counter, ForegroundTraffic()
            self._apply_rate(self._rate_max)

    def set_deadline(self, left_bytes: float, within_s: float) -> None:
        """Record that *nbytes* have to be sent *within_s* from now on."""
        with self._lock:
            now_s = self._clock.mono_ns() / NS_PER_S
            # Each request from here on counts down.
            self._deadline = SendDeadline(left_bytes + self._taken_bytes, now_s + within_s)

    def enqueue(self, nbytes: int) -> float:
        self._observe()
        return super().enqueue(nbytes)

    def wait_s(self, position: float) -> float:
        self._observe()
        return super().wait_s(position)

    def _observe(self) -> None:
        with self._lock:
            counter, now_ns = self._counter, self._clock.mono_ns()
            since_s = (now_ns - self._observed_ns) / NS_PER_S
            if counter is None or 0 <= since_s < RECHECK_S:
                return
            self._observed_ns = now_ns
            sent_bytes = counter()
            if sent_bytes is None:
                self._apply_rate(self._rate_max)
                return
            if self._foreground.is_busy and since_s < 1.0:
                self.yielded_s += since_s
            now_s = now_ns / NS_PER_S
            self._foreground.observe(now_s, sent_bytes, self._taken_bytes)
            deadline = self._deadline
            if deadline is not None:
                deadline = SendDeadline(deadline.left_bytes - self._taken_bytes, deadline.at_s)
            rate, rate_max = rate_for(now_s, self._foreground, deadline), self._rate_max
            self._apply_rate(
                rate_max if rate is None else rate if rate_max is None else min(rate, rate_max)
            )

    def _apply_rate(self, rate: float | None) -> None:
        """Change the rate; waiting senders wait for less or more."""
        self._earn()
        self._rate = rate
