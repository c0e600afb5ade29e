"""Waits until the GPU memory of dead workers is released, before new workers start.

The driver releases the memory of a killed process only when it has destroyed its context, which
takes seconds, or forever with a broken driver; a worker that starts earlier runs out of memory.
"""

import json
import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from gpuops.host.clock import Clock
from gpuops.host.process.command import module_command
from gpuops.host.process.watcher import WatchingChild
from gpuops.incident.decision import NodeReport, ReportKind
from gpuops.model import Confidence, Entity, EntityKind, FailureClass, Side
from gpuops.units import format_bytes

log = logging.getLogger(__name__)

EVERY_S = 2.0
WAIT_MAX_S = 50.0
# The size of a context of another process that may start or end meanwhile.
TOLERANCE_BYTES = 512 * 2**20
# A driver that does not answer for longer is judged by the health check.
SILENT_S = 15.0
_SHOWN = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuMemoryRelease:
    """The result of the wait. ``held``: bytes by UUID beyond those held before the run.

    ``note``: why nothing could be judged, None otherwise.
    """

    released: bool
    waited_s: float
    held: Mapping[str, int] = field(default_factory=dict)
    note: str | None = None

    def to_report(self, node: str, generation: int) -> NodeReport:
        """Return the report of *node*'s agent where the memory was not released."""
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
    """Return a monitor of the GPUs' memory; to be opened before the first worker starts."""
    command = module_command("gpuops.host.nvml.facts", str(agent_pid), str(EVERY_S))
    return GpuMemoryGate(lambda: WatchingChild("gpu-memory", command, env, restarts_max=2), clock)


class GpuMemoryGate:
    """Compares the memory held now with that before the first worker; no call waits.

    Call `started` when workers start, `begin` when they are being ended, then `poll` until it
    returns a result. Between `started` and `begin` the memory is not read.
    """

    def __init__(self, open_lines: Callable[[], WatchingChild], clock: Clock) -> None:
        self._open_lines = open_lines
        self._clock = clock

        self._before: Mapping[str, int] | None = None
        self._now: Mapping[str, int] | None = None
        self._now_ns = 0
        self._started = False
        self._begun_ns = clock.mono_ns()
        self._lines: WatchingChild | None = open_lines()

    def started(self) -> None:
        """Record the memory held before the first worker as not belonging to this run."""
        self._read()
        if not self._started:
            self._started = True
            self._before = self._now
        self.close()

    @property
    def has_baseline(self) -> bool:
        """Return whether the memory before the first worker is known, or will never be."""
        self._read()
        return self._started or self._now is not None or self._is_over()

    def begin(self) -> None:
        """Begin to read: the workers of this node are dead, or will be soon."""
        self._begun_ns = self._clock.mono_ns()
        if self._before and self._lines is None:
            self._lines = self._open_lines()

    def poll(self, uuids: Collection[str] | None = None) -> GpuMemoryRelease | None:
        """Return the result, None while memory of *uuids* is still held.

        *uuids* None: all GPUs, as it is not known which are the job's.
        """
        self._read()
        waited_s = (self._clock.mono_ns() - self._begun_ns) / 1e9
        if not self._before:
            return GpuMemoryRelease(
                released=True, waited_s=waited_s, note="held before the run: not known"
            )
        if self._now is None or self._now_ns < self._begun_ns:
            return self._without_answer(waited_s)
        held = self._leaked(uuids)
        if held and waited_s < WAIT_MAX_S:
            return None
        return GpuMemoryRelease(released=not held, waited_s=waited_s, held=held)

    def close(self) -> None:
        """End the watching process, if there is one."""
        if self._lines is not None:
            self._lines.close()
            self._lines = None

    def _is_over(self) -> bool:
        return self._lines is None or self._lines.given_up.is_set()

    def _without_answer(self, waited_s: float) -> GpuMemoryRelease | None:
        if waited_s < SILENT_S and not self._is_over():
            return None
        return GpuMemoryRelease(
            released=True, waited_s=waited_s, note="NVML does not report the memory in use"
        )

    def _leaked(self, uuids: Collection[str] | None) -> dict[str, int]:
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
                reading = json.loads(line)
                held = {str(uuid): int(used) for uuid, used in reading["held"].items()}
                self._now, self._now_ns = held, int(reading["mono_ns"])
            except (ValueError, TypeError, KeyError, AttributeError):
                log.debug("gpu memory: %r", line[:200])
