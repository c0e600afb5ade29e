"""The failure rate from the incident store, for workers that save with ``every="auto"``.

It is read in a thread: nothing waits for the store. Where the store is missing or does not answer,
the workers use a published rate.
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
REFRESH_S = 3600.0
_DAY_US = 86_400 * 1_000_000


class FailureRecord:
    """The recorded failures. *read* is called at construction, and hourly when workers start."""

    def __init__(self, read: Callable[[], FailureRate], clock: Clock) -> None:
        self._read = read
        self._clock = clock
        self._rate: FailureRate | None = None
        self._thread: threading.Thread | None = None
        self._begin()

    def env(self) -> Mapping[str, str]:
        """Return the environment variables for workers that start now; never waits."""
        if (self._clock.mono_ns() - self._begun_ns) / NS_PER_S >= REFRESH_S:
            self._begin()
        rate = self._rate
        return {} if rate is None else {FAILURES_VARIABLE: rate.to_text()}

    def join(self, within_s: float) -> bool:
        """Wait for the read; return whether it has finished."""
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
            log.debug("the recorded failures cannot be read: %s", exc)
        except Exception:  # boundary: whatever a database raises, the published rate remains
            log.debug("the recorded failures cannot be read", exc_info=True)
        else:
            if rate != self._rate:
                log.info('every="auto" uses %s', rate.describe())
            self._rate = rate


def failures_on_record(url: str, cluster: str, root: Path, clock: Clock) -> FailureRate:
    """Return the failure rate of *cluster* in the last `WINDOW_DAYS` days, from the store at *url*.

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
            connection, since_us=now_us - WINDOW_DAYS * _DAY_US, until_us=now_us, cluster=cluster
        )
    return FailureRate(min(found.n_failures, N_MAX), min(found.node_hours, HOURS_MAX))
