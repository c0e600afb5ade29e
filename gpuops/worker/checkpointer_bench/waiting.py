"""Waiting for what another process does."""

import time
from collections.abc import Callable
from typing import TypeVar

from gpuops.worker.checkpointer_bench.savers import BenchError

T = TypeVar("T")
_PAUSE_S = 0.002


def until(look: Callable[[], T | None], deadline_s: float, what: str) -> T:
    """Return the first true thing that *look* returns.

    Raises:
        BenchError: There was none within *deadline_s*.
    """
    end_s = time.monotonic() + deadline_s
    while not (found := look()):
        if time.monotonic() > end_s:
            raise BenchError(f"{what} did not come about within {deadline_s:g} s")
        time.sleep(_PAUSE_S)
    return found
