"""Whether this node may take a seat: its health check, and the memory of its GPUs.

Both are looked at while the workers of the last generation are being ended, so that a healthy node
waits for neither.
"""

from collections.abc import Callable, Collection
from typing import Protocol

from gpuops.agent.gpu_memory import GpuMemory
from gpuops.agent.health_gate import HealthGate
from gpuops.agent.seat import Gate
from gpuops.host.clock import Clock
from gpuops.units import NS_PER_S

LOOK_S = 0.02
# A spare that has waited for longer since its check is checked again before it is seated.
STALE_S = 60.0
FIRST_LOOK_S = 3.0


class GateKeeper(Protocol):
    """Says whether this node is fit for a generation."""

    def begin(self) -> None:
        """Start to look, unless that has begun already."""
        ...

    def started(self) -> None:
        """Hear that workers are about to be started."""
        ...

    def result(self, wait: Callable[[float], object]) -> Gate:
        """Return what was found; *wait* is called with seconds between looks, and may raise."""
        ...

    def close(self) -> None:
        """Let go of processes."""
        ...


class OpenGate:
    """Lets everyone in: ``--health-gate=off``."""

    def begin(self) -> None:
        """Do nothing."""

    def started(self) -> None:
        """Do nothing."""

    def result(self, wait: Callable[[float], object]) -> Gate:  # noqa: ARG002 never waits
        """Return that this node may join."""
        return Gate(passed=True)

    def close(self) -> None:
        """Do nothing."""


def _not_known() -> Collection[str] | None:
    return None


class HealthKeeper:
    """Asks the preflight suite, and waits for memory that dead workers still hold.

    *uuids* says which GPUs are the job's, None where that is not known: what another job holds on
    a GPU of its own is none of our business.
    """

    def __init__(
        self,
        make: Callable[[], HealthGate],
        memory: GpuMemory,
        clock: Clock,
        say: Callable[[str], None],
        uuids: Callable[[], Collection[str] | None] = _not_known,
    ) -> None:
        self._make = make
        self._memory = memory
        self._clock = clock
        self._say = say
        self._uuids = uuids
        self._gate: HealthGate | None = None
        self._begun_ns = 0

    def begin(self) -> None:
        """Start to look, unless that has begun already."""
        if self._gate is not None and not self._is_stale():
            return
        self._begun_ns = self._clock.mono_ns()
        self._memory.begin()
        self._gate = self._make()
        self._gate.start()

    def started(self) -> None:
        """Take the memory that is held now as somebody else's."""
        self._memory.started()

    def result(self, wait: Callable[[float], object]) -> Gate:
        """Return what was found; *wait* is called with seconds between looks, and may raise."""
        self.begin()
        assert self._gate is not None
        while (found := self._gate.result()) is None:
            wait(LOOK_S)
        self._gate = None
        if not found.passed:
            return Gate(passed=False, reason=found.reason, to_report=found.to_report)
        if found.reason:
            self._say(found.reason)
        while (release := self._memory.poll(self._uuids())) is None:
            wait(LOOK_S)
        self._first_look(wait)
        if release.released:
            return Gate(passed=True, reason=found.reason)
        reason = release.to_report("", 0).how
        return Gate(passed=False, reason=reason, to_report=release.to_report)

    def _first_look(self, wait: Callable[[float], object]) -> None:
        """Give the look at the memory before the first worker the moment that NVML needs."""
        ends_ns = self._clock.mono_ns() + round(FIRST_LOOK_S * NS_PER_S)
        while not self._memory.has_looked and self._clock.mono_ns() < ends_ns:
            wait(LOOK_S)

    def close(self) -> None:
        """End what runs."""
        if self._gate is not None:
            self._gate.cancel()
        self._memory.close()

    def _is_stale(self) -> bool:
        return self._clock.mono_ns() - self._begun_ns > STALE_S * NS_PER_S
