"""The end of transfers before they are done."""

import threading
from collections.abc import Callable

from gpuops.checkpoint.storage.api import Throttle
from gpuops.checkpoint.types import CheckpointError


def until_stopped(stop: Callable[[], bool]) -> Throttle:
    """Return what ends transfers once *stop* is true; threads share it, and call *stop* in turn.

    It raises CheckpointError then.
    """
    lock = threading.Lock()

    def throttle(_nbytes: int) -> None:
        with lock:
            is_over = stop()
        if is_over:
            raise CheckpointError("persisting was stopped before it was done; nothing was kept")

    return throttle
