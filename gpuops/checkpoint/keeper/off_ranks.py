"""Run background work on processors to which no rank is bound."""

import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import TypeVar

T = TypeVar("T")


def off_ranks(rank_pids: Iterable[int], work: Callable[[], T]) -> Callable[[], T]:
    """Return *work* for a thread, which it keeps off the processors of *rank_pids*.

    If they may run on all processors of this process, or if one of them is in another pid namespace
    (0), the thread may, too. Threads that it starts are bound as it is.
    """
    allowed = os.sched_getaffinity(os.getpid())
    cpus = allowed - _cpus_of(rank_pids, allowed) or allowed

    def run() -> T:
        with suppress(OSError):  # the allowed processors have changed
            os.sched_setaffinity(0, cpus)
        return work()

    return run


def _cpus_of(pids: Iterable[int], every: set[int]) -> set[int]:
    found: set[int] = set()
    for pid in pids:
        if pid == 0:
            return every
        with suppress(ProcessLookupError):
            found |= os.sched_getaffinity(pid)
    return found
