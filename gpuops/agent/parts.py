"""What one agent is made of, and the exceptions that end its run."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from gpuops.agent.checkpoints import Checkpoints, NoCheckpoints
from gpuops.agent.gatekeeper import GateKeeper
from gpuops.agent.gpu_signs import GpuSign
from gpuops.agent.logs import GenerationLogs
from gpuops.agent.pace import Pace
from gpuops.agent.plan import Plan
from gpuops.agent.rulings import Rulings
from gpuops.agent.sentry import Sentry
from gpuops.agent.session import Session
from gpuops.agent.signals import Cancellation
from gpuops.control.leader import Leader
from gpuops.control.link import Link
from gpuops.host.clock import Clock
from gpuops.incident.decision import NodeReport
from gpuops.incident.kernel import JobXids
from gpuops.wire import Beat


class HangWatch(Protocol):
    """What the agent asks of who watches for hangs, beside its being a sentry."""

    def feed(self, beats: Mapping[int, Sequence[Beat]]) -> None:
        """Take in the beats since the last call, by global rank."""
        ...

    @property
    def is_suspicious(self) -> bool:
        """Say whether something is being looked into."""
        ...

    def busy_for_s(self) -> float:
        """Return for how long other nodes may have to wait for ours."""
        ...

    def others_are_busy_for(self, seconds: float) -> None:
        """Accept silence here for so long."""
        ...


def _no_env(_folder: Path) -> Mapping[str, str]:
    return {}


def _not_known(_since_ns: int | None) -> JobXids | None:
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What the agent is given by `launch`."""

    clock: Clock
    node: str
    plan: Plan
    link: Link
    leader: Leader
    rulings: Rulings
    session: Session
    logs: GenerationLogs
    cancellation: Cancellation
    gate: GateKeeper
    say: Callable[[str], None]
    agent_pid: int
    slurm_job_id: str | None
    slurm_restart_count: int
    failure_grace_s: float
    cancel_grace_s: float
    drain_grace_s: Callable[[str], float]
    sentries: Sequence[Sentry] = ()
    hang: HangWatch | None = None
    pace: Pace = field(default_factory=Pace)
    gpu_uuids: Callable[[], Mapping[int, str]] = dict
    worker_env: Callable[[Path], Mapping[str, str]] = _no_env
    gpu_signs: Callable[[], Sequence[GpuSign]] = tuple
    job_xids: Callable[[int | None], JobXids | None] = _not_known  # given until when all was well
    doubts: Callable[[], Sequence[NodeReport]] = tuple  # of this node; they have ended nothing
    checkpoints: Checkpoints = field(default_factory=NoCheckpoints)
