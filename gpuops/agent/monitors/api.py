"""What a monitor of running workers is: of hangs, GPU errors, a site's detectors, apart from exits.

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
    """The generation that is being watched on this node."""

    generation: int
    node: str
    workers: Sequence[Worker]
    folder: Path  # logs and evidence of this generation


class Monitor:
    """Watches one generation after another; each method does nothing unless overridden.

    ``name`` is of its key in the control store; ASCII without spaces or slashes.

    No method waits, but `evidence`. What one raises is recorded as a failure of ours; neither the
    other monitors nor the training notice it.
    """

    name = ""

    def begin(self, watched: MonitoredAttempt) -> None:
        """Watch a generation whose workers have just been started; the one before is over."""

    def feed(self, beats: Mapping[int, Sequence[Beat]]) -> None:
        """Take in the heartbeats since the last call, by global rank."""

    def poll(self) -> Sequence[Suspicion]:
        """Return all that is suspected now, in this generation; takes at most 10 ms."""
        return ()

    def evidence(self, deadline_ns: int) -> Sequence[Evidence]:  # noqa: ARG002 an interface
        """Return evidence on the workers that still live.

        Called once, before they are ended, on every node of a run that makes no progress. All
        monitors share *deadline_ns* of the host's monotonic clock; past it, what is there is
        returned at once.
        """
        return ()

    def publish(self) -> Json | None:
        """Return what the leader is to know of this node, in 4 KiB of JSON; asked every 5 s."""
        return None

    def close(self) -> None:
        """End its threads and processes."""


class FleetMonitor(Protocol):
    """Judges on the leader what the monitor of its ``name`` publishes on all nodes; pure.

    It may keep history, which is lost when another agent leads.
    """

    name: str

    def judge(self, published: Mapping[str, Json], now_s: float) -> Sequence[Suspicion]:
        """Return what is suspected now, by what each node has *published* in this generation.

        A suspicion that ends the generation does; one of SUSPECT takes its node out at the next
        restart; nothing follows from a note.
        """
        ...
