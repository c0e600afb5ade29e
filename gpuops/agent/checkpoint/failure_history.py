"""What the store says of failures, for workers that save as often as failures make worth it.

It is read in a thread: nothing waits for a store, and one that is not there, or does not answer, is
no news. Until something was read the workers go by a published rate.
"""

import logging
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

from gpuops.errors import GpuopsError
from gpuops.host.clock import Clock
from gpuops.plan.failure_rate import FAILURES_VARIABLE, HOURS_MAX, N_MAX, FailureRate
from gpuops.units import NS_PER_S

log = logging.getLogger(__name__)

WINDOW_DAYS = 90
DEADLINE_S = 10.0
AGAIN_S = 3600.0
_DAY_US = 86_400 * 1_000_000


class FailureRecord:
    """The failures on record, read by *read* when this is made, and hourly when workers start."""

    def __init__(self, read: Callable[[], FailureRate], clock: Clock) -> None:
        self._read = read
        self._clock = clock
        self._rate: FailureRate | None = None
        self._thread: threading.Thread | None = None
        self._begin()

    def env(self) -> Mapping[str, str]:
        """Return what workers that start now are given; never waits."""
        if (self._clock.mono_ns() - self._begun_ns) / NS_PER_S >= AGAIN_S:
            self._begin()
        rate = self._rate
        return {} if rate is None else {FAILURES_VARIABLE: rate.to_text()}

    def join(self, within_s: float) -> bool:
        """Wait for the reading; return whether it is over."""
        thread = self._thread
        if thread is not None:
            thread.join(within_s)
        return thread is None or not thread.is_alive()

    def _begin(self) -> None:
        self._begun_ns = self._clock.mono_ns()
        if self._thread is not None and self._thread.is_alive():
            return
        self._thread = threading.Thread(target=self._run, name="gpuops-failures", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            rate = self._read()
        except GpuopsError as exc:
            log.debug("the failures on record cannot be read: %s", exc)
        except Exception:  # boundary: whatever a database raises, the published rate will do
            log.debug("the failures on record cannot be read", exc_info=True)
        else:
            if rate != self._rate:
                log.info('every="auto" goes by %s', rate.describe())
            self._rate = rate


def failures_on_record(url: str, cluster: str, root: Path, clock: Clock) -> FailureRate:
    """Return what the store at *url* has of the last `WINDOW_DAYS` days of *cluster*.

    Raises:
        GpuopsError: There is no store, or it cannot be read.
    """
    from gpuops.store.engine import open_store
    from gpuops.store.queries.run_queries import read_exposure

    now_us = clock.now_us()
    with (
        open_store(url, mode="read", root=root, deadline_s=DEADLINE_S) as store,
        store.begin() as connection,
    ):
        found = read_exposure(
            connection,
            since_us=now_us - WINDOW_DAYS * _DAY_US,
            until_us=now_us,
            cluster=cluster,
        )
    return FailureRate(min(found.n_failures, N_MAX), min(found.node_hours, HOURS_MAX))
