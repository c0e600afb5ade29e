"""Have the job's GPUs let go of the memory of dead workers, before new ones are started on them?

A killed process gives its GPU memory back only when the driver has taken its context down, which
takes seconds, or never where the driver is sick; a worker that starts meanwhile runs out of memory.
"""

import json
import logging
import threading
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from gpuops.host.clock import Clock
from gpuops.host.process.watcher import WatchingChild, module_command
from gpuops.incident.decision import NodeReport, ReportKind
from gpuops.model import Confidence, Entity, EntityKind, FailureClass, Side
from gpuops.units import format_bytes

log = logging.getLogger(__name__)

EVERY_S = 2.0
WAIT_MAX_S = 50.0
# A context of another process that comes or goes is of this size.
TOLERANCE_BYTES = 512 * 2**20
# A driver that says nothing for so long is for the health gate to judge.
SILENT_S = 15.0
_SHOWN = 3


class GpuMemorySource(Protocol):
    """A source of lines; see `WatchingChild`."""

    def take(self, lines_max: int) -> list[bytes]: ...

    def close(self, wait_s: float = 0.0) -> None: ...

    @property
    def given_up(self) -> threading.Event: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuMemoryRelease:
    """What became of the wait. ``held``: bytes by UUID beyond what was held before the run.

    ``note`` says why nothing was judged, where nothing was.
    """

    released: bool
    waited_s: float
    held: Mapping[str, int] = field(default_factory=dict)
    note: str | None = None

    def to_report(self, node: str, generation: int) -> NodeReport:
        """Return what the agent of *node* reports where the memory was not released."""
        gpus = [
            f"{format_bytes(held)} on {uuid}" for uuid, held in list(self.held.items())[:_SHOWN]
        ]
        return NodeReport(
            kind=ReportKind.GATE_FAILED,
            node=node,
            generation=generation,
            failure_class=FailureClass.GPU_LEAKED_MEMORY,
            side=Side.INFRA,
            confidence=Confidence.CONFIRMED,
            how=f"GPU memory of ended workers is not released after {self.waited_s:.0f} s:"
            f" {', '.join(gpus)}",
            culprits=(
                *(Entity(EntityKind.GPU, uuid) for uuid in self.held),
                Entity(EntityKind.NODE, node),
            ),
            blames_node=True,
        )


def open_memory(env: Mapping[str, str], agent_pid: int, clock: Clock) -> "GpuMemoryGate":
    """Return a watch over the GPUs' memory; to be opened before the first worker starts."""
    command = module_command("gpuops.host.nvml.facts", str(agent_pid), str(EVERY_S))
    return GpuMemoryGate(lambda: WatchingChild("gpu-memory", command, env, restarts_max=2), clock)


class GpuMemoryGate:
    """Compares the memory held now with that before the first worker; no call waits.

    Call `started` when workers start, `begin` when they are being ended, then `poll` until it
    returns something. Between `started` and `begin` nobody looks.
    """

    def __init__(
        self,
        open_lines: Callable[[], GpuMemorySource],
        clock: Clock,
        *,
        wait_max_s: float = WAIT_MAX_S,
    ) -> None:
        self._open_lines = open_lines
        self._clock = clock
        self._wait_max_s = wait_max_s
        self._before: Mapping[str, int] | None = None
        self._now: Mapping[str, int] | None = None
        self._now_ns = 0
        self._started = False
        self._begun_ns = clock.mono_ns()
        self._lines: GpuMemorySource | None = open_lines()

    def started(self) -> None:
        """Take what was held until now, the first time, as what does not belong to this run."""
        self._read()
        if not self._started:
            self._started = True
            self._before = self._now
        self.close()

    @property
    def has_looked(self) -> bool:
        """Say whether there is something to take as held before, or never will be."""
        self._read()
        nobody = self._lines is None or self._lines.given_up.is_set()
        return self._started or self._now is not None or nobody

    def begin(self) -> None:
        """Begin to look: the workers of this node are dead, or will be soon."""
        self._begun_ns = self._clock.mono_ns()
        if self._before and self._lines is None:
            self._lines = self._open_lines()

    def poll(self, uuids: Collection[str] | None = None) -> GpuMemoryRelease | None:
        """Return the result once there is one, None while memory of *uuids* is held still.

        *uuids* None: of all GPUs, as it is not known which are the job's.
        """
        self._read()
        waited_s = (self._clock.mono_ns() - self._begun_ns) / 1e9
        if not self._before:
            return GpuMemoryRelease(
                released=True, waited_s=waited_s, note="held before the run: not known"
            )
        if self._now is None or self._now_ns < self._begun_ns:
            return self._untold(waited_s)
        held = self._beyond(uuids)
        if held and waited_s < self._wait_max_s:
            return None
        return GpuMemoryRelease(released=not held, waited_s=waited_s, held=held)

    def close(self) -> None:
        """End the watching process, if there is one."""
        if self._lines is not None:
            self._lines.close()
            self._lines = None

    def _untold(self, waited_s: float) -> GpuMemoryRelease | None:
        is_over = self._lines is None or self._lines.given_up.is_set()
        if waited_s < SILENT_S and not is_over:
            return None
        return GpuMemoryRelease(
            released=True, waited_s=waited_s, note="NVML does not tell what is held"
        )

    def _beyond(self, uuids: Collection[str] | None) -> dict[str, int]:
        assert self._before is not None
        assert self._now is not None
        return {
            uuid: now - before
            for uuid, before in self._before.items()
            if (uuids is None or uuid in uuids)
            and (now := self._now.get(uuid, 0)) - before > TOLERANCE_BYTES
        }

    def _read(self) -> None:
        for line in () if self._lines is None else self._lines.take(100):
            try:
                told = json.loads(line)
                held = {str(uuid): int(used) for uuid, used in told["held"].items()}
                self._now, self._now_ns = held, int(told["mono_ns"])
            except (ValueError, TypeError, KeyError, AttributeError):
                log.debug("gpu memory: %r", line[:200])
