"""All monitors of an agent as one: what one of them raises stops neither the others nor the run."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from gpuops.agent.monitors.api import Monitor, MonitoredAttempt
from gpuops.agent.monitors.evidence import EVIDENCE_S
from gpuops.host.clock import Clock
from gpuops.incident.suspicion import Suspicion
from gpuops.model import Evidence
from gpuops.units import NS_PER_S
from gpuops.wire.ring import Beat

# Does a call and records what it raises under a name; see `RunSession.safely`.
Safely = Callable[[str, Callable[[], Any]], Any]


class MonitorGroup:
    """Calls each of *monitors*."""

    def __init__(self, monitors: Iterable[Monitor], clock: Clock, safely: Safely) -> None:
        self._monitors = tuple(monitors)
        self._clock = clock
        self._safely = safely

    def begin(self, watched: MonitoredAttempt) -> None:
        """Watch a generation."""
        self._each("watching the workers", lambda monitor: monitor.begin(watched))

    def feed(self, beats: Mapping[int, Sequence[Beat]]) -> None:
        """Take in the heartbeats since the last call, by global rank."""
        self._each("reading heartbeats", lambda monitor: monitor.feed(beats))

    def poll(self) -> list[Suspicion]:
        """Return all that any of them suspects now."""
        found: list[Suspicion] = []
        self._each("watching the workers", lambda monitor: found.extend(monitor.poll()))
        return found

    def evidence(self) -> list[Evidence]:
        """Return what all of them know of the workers, `EVIDENCE_S` from now at the latest."""
        deadline_ns = self._clock.mono_ns() + round(EVIDENCE_S * NS_PER_S)
        found: list[Evidence] = []
        self._each(
            "collecting evidence", lambda monitor: found.extend(monitor.evidence(deadline_ns))
        )
        return found

    def close(self) -> None:
        """End their threads and processes."""
        self._each("ending a monitor", lambda monitor: monitor.close())

    def _each(self, what: str, call: Callable[[Monitor], object]) -> None:
        for monitor in self._monitors:
            self._safely(what, partial(call, monitor))
