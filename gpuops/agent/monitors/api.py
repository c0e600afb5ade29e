"""The interface of monitors, which watch running workers for anything except their exits.

The agent calls each `Monitor` from its main thread, ten times a second; the leader calls each
`FleetMonitor` from its control thread. A new one is a class and a line in
`gpuops.agent.monitors.registry`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from gpuops.agent.elastic.workers import Worker
from gpuops.incident.suspicion import Suspicion
from gpuops.model import Evidence, Json
from gpuops.wire.ring import Beat


@dataclass(frozen=True, slots=True, kw_only=True)
class MonitoredAttempt:
    """The generation that is monitored on this node."""

    generation: int
    node: str
    workers: Sequence[Worker]
    folder: Path  # logs and evidence of this generation
    world_size: int | None = None  # of all nodes


class Monitor:
    """Watches one generation after another; each method does nothing unless overridden.

    ``name`` is used in its key in the control store; ASCII without spaces or slashes.

    No method waits, except `evidence`. An exception is recorded as a failure of gpuops and affects
    neither the other monitors nor the training.
    """

    name = ""

    def begin(self, watched: MonitoredAttempt) -> None:
        """Watch a generation whose workers have just been started; the previous one has ended."""

    def feed(self, beats: Mapping[int, Sequence[Beat]]) -> None:
        """Take in the heartbeats since the last call, by global rank."""

    def poll(self) -> Sequence[Suspicion]:
        """Return all present suspicions in this generation; takes at most 10 ms."""
        return ()

    def evidence(self, deadline_ns: int) -> Sequence[Evidence]:  # noqa: ARG002 an interface
        """Return evidence on the workers that are still alive.

        Called once, before they are ended, on every node of a run that makes no progress. All
        monitors share *deadline_ns* of the host's monotonic clock; past it, the evidence collected
        so far is returned at once.
        """
        return ()

    def publish(self) -> Json | None:
        """Return this node's data for the leader, at most 4 KiB of JSON; called every 5 s."""
        return None

    def published(self, name: str, body: Json) -> None:
        """Take in what the monitor *name* of this node publishes."""

    def close(self) -> None:
        """End its threads and processes."""


class FleetMonitor(Protocol):
    """Judges on the leader what the monitor of its ``name`` publishes on all nodes; pure.

    It may keep history, which is lost when the leader changes.
    """

    name: str

    def judge(self, published: Mapping[str, Json], now_s: float) -> Sequence[Suspicion]:
        """Return the suspicions that follow from what each node *published* in this generation.

        One of level END ends the generation, one of SUSPECT excludes its node at the next restart;
        a NOTE has no consequence.
        """
        ...
