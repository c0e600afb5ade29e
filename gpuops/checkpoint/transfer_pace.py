"""How fast a keeper may send: the network belongs to the training first.

A token bucket over all connections of a keeper, and, where the kernel has it, a rate per socket
that spreads the packets evenly (``SO_MAX_PACING_RATE``), so that a full bucket is no burst.
"""

import socket
import struct
import threading
from contextlib import suppress

from gpuops.host.clock import Clock

# Slower, a receiver of several connections takes them for dead.
RATE_MIN_BYTES_S = 4 * 2**20
# How much may be sent at once after a pause.
BURST_S = 0.05
# Whoever waits for its turn asks again after so long: the rate may have changed.
LOOK_S = 0.005
_SO_MAX_PACING_RATE = 47  # asm-generic/socket.h; not named in Python 3.11
_UNLIMITED = 2**64 - 1


class Pace:
    """A token bucket, safe from several threads; ``None`` bytes per second is no limit.

    Bytes are numbered in the order in which they were asked for: a sender has its turn once the
    bucket has earned all numbers before its own.
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
        """Return the rate of all connections together, at most."""
        return self._rate

    def set_rate(self, bytes_per_s: float | None) -> None:
        """Go on at another rate, at least `RATE_MIN_BYTES_S`; what was sent before is settled."""
        with self._lock:
            self._rate = None if bytes_per_s is None else max(bytes_per_s, RATE_MIN_BYTES_S)
            self._settle()

    def take(self, nbytes: int) -> float:
        """Note that *nbytes* will be sent; return after how many seconds they may."""
        return self.wait_s(self.turn(nbytes))

    def turn(self, nbytes: int) -> float:
        """Note that *nbytes* will be sent; return a turn to `wait_s` for."""
        with self._lock:
            self._earn()
            turn = self._taken_bytes
            self._taken_bytes += nbytes
            return turn

    def wait_s(self, turn: float) -> float:
        """Return for how many seconds *turn* has to wait still, if the rate stays as it is."""
        with self._lock:
            self._earn()
            return 0.0 if self._rate is None else max(turn - self._earned_bytes, 0.0) / self._rate

    def _earn(self) -> None:
        """Add what was earned since the last time."""
        if self._rate is None:
            self._settle()
            return
        now_ns = self._clock.mono_ns()
        gained = max(now_ns - self._at_ns, 0) / 1e9 * self._rate
        self._at_ns = now_ns
        most = self._taken_bytes + BURST_S * self._rate
        self._earned_bytes = min(self._earned_bytes + gained, most)

    def _settle(self) -> None:
        self._earned_bytes = self._taken_bytes
        self._at_ns = self._clock.mono_ns()


def smooth(sock: socket.socket, bytes_per_s: float | None) -> None:
    """Let the kernel spread what *sock* sends; a kernel that cannot is left to the bucket."""
    rate = _UNLIMITED if bytes_per_s is None else int(bytes_per_s)
    with suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, struct.pack("=Q", rate))
