"""What one agent is made of, and the exceptions that end its run."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from gpuops.agent.checkpoint.api import CheckpointService
from gpuops.agent.elastic.attempt import CurrentAttempt
from gpuops.agent.elastic.logs import GenerationLogs
from gpuops.agent.elastic.signals import Cancellation
from gpuops.agent.journal.session import DecisionLog, RunSession
from gpuops.agent.launch.plan import LaunchPlan
from gpuops.agent.monitors.hang.monitor import HangMonitor
from gpuops.agent.monitors.preflight import PreflightGate
from gpuops.agent.monitors.progress import StepTracker
from gpuops.agent.monitors.registry import MonitorGroup
from gpuops.control.client import ControlClient
from gpuops.control.leader import Leader
from gpuops.host.clock import Clock
from gpuops.incident.kernel import JobXidFilter


def _no_env(_folder: Path) -> Mapping[str, str]:
    return {}


def _not_known(_since_ns: int | None) -> JobXidFilter | None:
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Services:
    """What the agent is given by `launch`."""

    clock: Clock
    node: str
    plan: LaunchPlan
    control: ControlClient
    leader: Leader
    decisions: DecisionLog
    session: RunSession
    logs: GenerationLogs
    cancellation: Cancellation
    current: CurrentAttempt
    preflight: PreflightGate
    monitors: MonitorGroup
    say: Callable[[str], None]
    agent_pid: int
    slurm_job_id: str | None
    slurm_restart_count: int
    failure_grace_s: float
    cancel_grace_s: float
    drain_grace_s: Callable[[str], float]
    hang: HangMonitor | None = None
    step_tracker: StepTracker = field(default_factory=StepTracker)
    gpu_uuids: Callable[[], Mapping[int, str]] = dict
    worker_env: Callable[[Path], Mapping[str, str]] = _no_env
    job_xids: Callable[[int | None], JobXidFilter | None] = (
        _not_known  # given until when all was well
    )
    checkpoints: CheckpointService = field(default_factory=CheckpointService)
