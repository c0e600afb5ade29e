"""The monitors of an agent: the list, and the group that calls them.

A new monitor is a class and its line here. An exception of a monitor affects neither the others nor
the run.
"""

import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from gpuops.agent.monitors.api import FleetMonitor, Monitor, MonitoredAttempt
from gpuops.agent.monitors.evidence import EVIDENCE_S
from gpuops.agent.monitors.gpu import open_gpu_monitor
from gpuops.agent.monitors.hang.monitor import HangMonitor
from gpuops.agent.monitors.nccl_ras import RasMonitor
from gpuops.agent.monitors.plugins import open_detectors
from gpuops.agent.monitors.step_recorder import StepRecorder
from gpuops.agent.monitors.straggler.fleet import StragglerFleetMonitor
from gpuops.agent.monitors.straggler.monitor import READ_S, StragglerMonitor
from gpuops.agent.monitors.straggler.signs import HostSigns, throttled_gpus
from gpuops.control.client import ControlClient
from gpuops.control.record import pack
from gpuops.control.store import ControlStoreError
from gpuops.host.clock import Clock
from gpuops.incident.suspicion import Suspicion
from gpuops.model import Evidence, Json
from gpuops.units import NS_PER_S
from gpuops.wire.ring import Beat

log = logging.getLogger(__name__)
PUBLISH_S = 5.0
PUBLISHED_BYTES_MAX = 4096
# Runs a call and records its exception under a name; see `RunSession.safely`.
Safely = Callable[[str, Callable[[], Any]], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class MonitorContext:
    """The inputs of the monitors. ``hang_timeout_s`` None: learned from the job; 0: off.

    ``slow_after_s``: for how long a rank must be slow; 0: off.
    """

    clock: Clock
    node: str
    env: Mapping[str, str]
    root: Path
    site_dir: Path | None
    hang_timeout_s: float | None
    records_steps: bool = False
    slow_after_s: float = 0.0


class MonitorRegistry:
    """The monitors of one agent. ``hang`` and ``gpu`` have uses beyond `Monitor`."""

    def __init__(self, context: MonitorContext) -> None:
        self.hang = HangMonitor(context.clock, context.hang_timeout_s, context.env)
        self.gpu = open_gpu_monitor(
            context.env, context.clock, root=context.root, site_dir=context.site_dir
        )
        slow = StragglerMonitor(
            context.clock,
            context.slow_after_s,
            self.gpu.rank_gpus,
            HostSigns(context.root),
            partial(throttled_gpus, context.env, READ_S),
        )
        # NCCL's answer comes first: the samples of the hang monitor take all the time there is.
        ras, detectors = RasMonitor(context.clock, context.env), open_detectors(context.env)
        self.all: tuple[Monitor, ...] = (ras, self.hang, self.gpu, slow, detectors)
        if context.records_steps:
            self.all = (*self.all, StepRecorder(context.clock, context.slow_after_s))
        self.fleet: tuple[FleetMonitor, ...] = (  # on the leader
            StragglerFleetMonitor(context.slow_after_s),
        )


class MonitorGroup:
    """Calls each of *monitors*; their published data goes to the store of *control*."""

    def __init__(
        self, monitors: Iterable[Monitor], control: ControlClient, clock: Clock, safely: Safely
    ) -> None:
        self._monitors = tuple(monitors)
        self._control = control
        self._clock = clock
        self._safely = safely
        self._next_ns = 0
        self._writer: threading.Thread | None = None
        self.published: dict[str, Json] = {}  # the newest of this generation, by monitor

    def begin(self, watched: MonitoredAttempt) -> None:
        """Watch a generation."""
        self.published.clear()
        self._each("watching the workers", lambda monitor: monitor.begin(watched))

    def feed(self, beats: Mapping[int, Sequence[Beat]]) -> None:
        """Take in the heartbeats since the last call, by global rank."""
        self._each("reading heartbeats", lambda monitor: monitor.feed(beats))

    def poll(self) -> list[Suspicion]:
        """Return the suspicions of all monitors."""
        found: list[Suspicion] = []
        self._each("watching the workers", lambda monitor: found.extend(monitor.poll()))
        return found

    def evidence(self) -> list[Evidence]:
        """Return the evidence of all monitors, `EVIDENCE_S` from now at the latest."""
        deadline_ns = self._clock.mono_ns() + round(EVIDENCE_S * NS_PER_S)
        found: list[Evidence] = []
        self._each(
            "collecting evidence", lambda monitor: found.extend(monitor.evidence(deadline_ns))
        )
        return found

    def publish(self, generation: int) -> None:
        """Write the published data of *generation*, every `PUBLISH_S`.

        In a thread: a control store may take seconds to answer.
        """
        now_ns = self._clock.mono_ns()
        is_writing = self._writer is not None and self._writer.is_alive()
        if now_ns < self._next_ns or is_writing:
            return
        self._next_ns = now_ns + round(PUBLISH_S * NS_PER_S)
        values: dict[str, bytes] = {}

        def ask(monitor: Monitor) -> None:
            body = monitor.publish()
            if body is None:
                return
            value = pack({"generation": generation, "published": body})
            if len(value) > PUBLISHED_BYTES_MAX:
                raise ValueError(f"{monitor.name} publishes {len(value)} bytes")
            values[self._control.keys.published(monitor.name, self._control.me.agent)] = value
            self.published[monitor.name] = body
            self._each("recording steps", lambda each: each.published(monitor.name, body))

        self._each("publishing", ask)
        if values:
            self._writer = threading.Thread(
                target=self._write, args=(values,), name="gpuops-publish", daemon=True
            )
            self._writer.start()

    def _write(self, values: Mapping[str, bytes]) -> None:
        try:
            for key, value in values.items():
                self._control.store.put(key, value)
        except ControlStoreError as exc:
            log.debug("the data of monitors could not be published: %s", exc)

    def close(self) -> None:
        """End their threads and processes."""
        self._each("ending a monitor", lambda monitor: monitor.close())

    def _each(self, what: str, call: Callable[[Monitor], object]) -> None:
        for monitor in self._monitors:
            self._safely(what, partial(call, monitor))
