"""The payloads of the events that an agent records, one function for each kind.

The keys are the store's contract; all times are epoch microseconds, UTC.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from gpuops.agent.monitors.progress import AttemptProgress, FirstStep, MinuteProgress
from gpuops.incident.budget import count_failures
from gpuops.incident.decision import (
    HISTORY_MAX,
    ClusterState,
    NodeReport,
    PastFailure,
    ReportKind,
    RestartDecision,
    RestartPolicy,
)
from gpuops.model import Json, WorkerExit

REPORTS_MAX = 64  # in one event, which a line of the spool must hold
ENDS_MAX = 8
COLLECTIVES_MAX = 32  # ranks, those of the reports that came first


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """The facts of a run before its first attempt."""

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
    """The facts of this node."""

    boot_id: str
    boot_us: int | None
    kernel: str
    driver: str | None
    gpuops_version: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptFacts:
    """The facts of an attempt when its workers start."""

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


def first_step(first: FirstStep, at_us: int) -> Json:
    """Return the payload of ``attempt.first_step``."""
    return {"first_step_us": at_us, "step": first.step, "step_source": first.source.name.lower()}


def minute(summary: MinuteProgress, minute_us: int) -> Json:
    """Return the payload of ``attempt.progress``."""
    return {
        "minute_us": minute_us,
        "step_last": summary.step_last,
        "beats": summary.beats,
        "step_time_p50_us": summary.step_time_p50_us,
        "step_time_max_us": summary.step_time_max_us,
    }


def attempt_ended(
    progress: AttemptProgress,
    *,
    end_us: int,
    outcome: str,
    exit_code: int | None,
    last_us: int | None,
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


def decision_made(
    decision: RestartDecision,
    reports: Sequence[NodeReport],
    cluster: ClusterState,
    history: Sequence[PastFailure],
    note: str | None,
) -> Json:
    """Return the payload of ``decision.made``: the decision and all its inputs.

    Of many reports those of nodes with a failure have precedence; ``reports_total`` is the number
    of all.
    """
    shown = [report.to_json() for report in _most_relevant(reports)]
    shown = [{**body, "ends": body["ends"][:ENDS_MAX]} for body in shown]
    for end in [end for body in shown for end in body["ends"]][COLLECTIVES_MAX:]:
        del end["collectives"]
    return {
        "decision": decision.to_json(),
        "reports": shown,
        "reports_total": len(reports),
        "cluster": cluster_json(cluster),
        "history": [failure.to_json() for failure in history[-HISTORY_MAX:]],
        "budget": budget(cluster.policy, (*history, decision.failure)),
        "note": note,
    }


def budget(policy: RestartPolicy, history: Sequence[PastFailure]) -> Json:
    """Return the restarts used within the window, the newest failure included."""
    used = count_failures(history, policy, history[-1].at_s) if history else 0
    return {"used": used, "max": policy.restarts_max, "window_s": policy.restarts_window_s}


def cluster_json(cluster: ClusterState) -> Json:
    """Return the members of the cluster, and the policy."""
    policy = cluster.policy
    return {
        "generation": cluster.generation,
        "members": list(cluster.members),
        "live": list(cluster.live),
        "excluded": dict(cluster.excluded),
        "doubted": dict(cluster.suspected),
        "terms": {
            "nodes_min": policy.nodes_min,
            "nodes_max": policy.nodes_max,
            "node_unit": policy.node_unit,
            "restarts_max": policy.restarts_max,
            "restarts_window_s": policy.restarts_window_s,
            "on_exhausted": policy.on_exhausted.value,
            "benign_exit_codes": sorted(policy.benign_exit_codes),
        },
    }


def _most_relevant(reports: Sequence[NodeReport]) -> list[NodeReport]:
    quiet = (ReportKind.STOPPED, ReportKind.DONE)
    first = sorted(reports, key=lambda report: (report.kind in quiet, report.arrival))
    return sorted(first[:REPORTS_MAX], key=lambda report: report.arrival)


def first_exit_code(exits: Sequence[WorkerExit]) -> int | None:
    """Return the code of the first failure that was not teardown, as a shell would show it."""
    failed = [w for w in exits if not w.terminated and w.exit_code != 0]
    first = min(failed, key=lambda w: w.error_mono_ns or w.seen_mono_ns, default=None)
    return None if first is None else first.exit_code
