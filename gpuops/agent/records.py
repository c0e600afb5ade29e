"""The payloads of the events that an agent records, one function for each kind.

The keys are the store's contract; all times are epoch microseconds, UTC.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from gpuops.agent.progress import FirstStep, Minute, Progress
from gpuops.model import Json, WorkerExit


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """What is known of a run before its first attempt."""

    name: str
    command: Sequence[str]
    user: str
    cluster: str
    run_dir: str
    torch_version: str
    gpuops_version: str
    max_restarts: int
    slurm_job_id: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFacts:
    """What is known of this node."""

    boot_id: str
    boot_us: int | None
    kernel: str
    driver: str | None
    gpuops_version: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptFacts:
    """What is known of an attempt when its workers start."""

    start_us: int
    world_size: int
    n_nodes: int
    group_rank: int
    torch_run_id: str
    log_dir: str
    slurm_job_id: str | None
    slurm_restart_count: int


def slurm_job(env: Mapping[str, str]) -> tuple[str | None, int]:
    """Return Slurm's job id and how often it has restarted the job, by its environment."""
    restarts = env.get("SLURM_RESTART_COUNT", "")
    return env.get("SLURM_JOB_ID") or None, int(restarts) if restarts.isdecimal() else 0


def run_started(facts: RunFacts) -> Json:
    """Return the payload of ``run.started``."""
    return {**asdict(facts), "command": list(facts.command)}


def first_step(first: FirstStep, at_us: int) -> Json:
    """Return the payload of ``attempt.first_step``."""
    return {
        "first_step_us": at_us,
        "step": first.step,
        "step_source": first.source.name.lower(),
    }


def minute(summary: Minute, minute_us: int) -> Json:
    """Return the payload of ``attempt.progress``."""
    return {
        "minute_us": minute_us,
        "step_last": summary.step_last,
        "beats": summary.beats,
        "step_time_p50_us": summary.step_time_p50_us,
        "step_time_max_us": summary.step_time_max_us,
    }


def attempt_ended(
    progress: Progress, *, end_us: int, outcome: str, exit_code: int | None, last_us: int | None
) -> Json:
    """Return the payload of ``attempt.ended``."""
    return {
        "end_us": end_us,
        "outcome": outcome,
        "last_step_us": last_us,
        "steps_first": progress.steps_first,
        "steps_last": progress.steps_last,
        "beats": progress.beats,
        "exit_code": exit_code,
    }


def worker_exited(worker: WorkerExit) -> Json:
    """Return the payload of ``worker.exited``: every field of the record."""
    data = asdict(worker)
    data["traceback"], data["log_tail"] = list(worker.traceback), list(worker.log_tail)
    return data
