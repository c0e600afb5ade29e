"""The monitors of an agent: the one list. A new one is a class and its line here."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from gpuops.agent.monitors.api import FleetMonitor, Monitor
from gpuops.agent.monitors.gpu import GpuMonitorContext, open_gpu_monitor
from gpuops.agent.monitors.hang.monitor import HangMonitor
from gpuops.agent.monitors.plugins import open_detectors
from gpuops.host.clock import Clock


@dataclass(frozen=True, slots=True, kw_only=True)
class MonitorContext:
    """What monitors are made from. ``hang_timeout_s`` None: learned from the job; 0: off."""

    clock: Clock
    node: str
    env: Mapping[str, str]
    root: Path
    site_dir: Path | None
    hang_timeout_s: float | None


class MonitorRegistry:
    """The monitors of one agent. ``hang`` and ``gpu`` are used for more than `Monitor` has."""

    def __init__(self, context: MonitorContext) -> None:
        self.hang = HangMonitor(context.clock, context.hang_timeout_s, context.env)
        gpu = GpuMonitorContext(
            node=context.node, env=context.env, root=context.root, site_dir=context.site_dir
        )
        self.gpu = open_gpu_monitor(gpu, context.clock)
        self.all: tuple[Monitor, ...] = (self.hang, self.gpu, open_detectors(context.env))
        self.fleet: tuple[FleetMonitor, ...] = ()  # on the leader
