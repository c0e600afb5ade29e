"""The rate of transfers, and their end before they are done."""

import threading
import time
from collections.abc import Callable

from gpuops.checkpoint.types import CheckpointError
from gpuops.host.clock import Clock, SystemClock


class RateThrottle:
    """Limits transfers together to *bytes_per_s*, and ends them when *stop* returns true.

    Threads may share it; they call *stop* in turn.

    Raises, when called:
        CheckpointError: *stop* returned true.
    """

    def __init__(
        self,
        bytes_per_s: float | None,
        *,
        stop: Callable[[], bool] = lambda: False,
        clock: Clock | None = None,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        self._bytes_per_s = bytes_per_s
        self._stop = stop
        self._clock = clock or SystemClock()
        self._sleep = sleep
        self._free_ns = 0
        self._lock = threading.Lock()

    def __call__(self, nbytes: int) -> None:
        if self._bytes_per_s:
            with self._lock:
                now_ns = self._clock.mono_ns()
                begin_ns = max(self._free_ns, now_ns)
                self._free_ns = begin_ns + round(nbytes / self._bytes_per_s * 1e9)
            if begin_ns > now_ns:
                self._sleep((begin_ns - now_ns) / 1e9)
        with self._lock:
            is_over = self._stop()
        if is_over:
            raise CheckpointError("persisting was stopped before it was done; nothing was kept")
