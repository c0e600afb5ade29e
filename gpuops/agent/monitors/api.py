"""Monitors of running workers, apart from their exits: hangs, GPU errors, site detectors.

The agent polls each ten times a second from its main thread; a monitor returns a report once
something ends the generation. It must not raise for what it cannot read.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from gpuops.agent.elastic.workers import Worker
from gpuops.incident.decision import NodeReport
from gpuops.model import Evidence


@dataclass(frozen=True, slots=True, kw_only=True)
class MonitoredAttempt:
    """The generation that is being watched on this node."""

    generation: int
    node: str
    workers: Sequence[Worker]
    folder: Path  # logs and evidence of this generation


class Monitor(Protocol):
    """Watches one generation after another."""

    def begin(self, watched: MonitoredAttempt) -> None:
        """Watch a generation whose workers have just been started."""
        ...

    def poll(self) -> NodeReport | None:
        """Return the report that ends this generation, or None; takes at most 10 ms."""
        ...

    def evidence(self, deadline_s: float) -> tuple[Evidence, ...]:
        """Return evidence on the workers that still live, at most *deadline_s* later.

        Called once, before they are ended, on every node of the run.
        """
        ...

    def suspects(self) -> tuple[NodeReport, ...]:
        """Return the suspicions of this generation that do not end it."""
        ...

    def close(self) -> None:
        """End its threads and processes."""
        ...
