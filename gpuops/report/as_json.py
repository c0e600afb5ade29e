"""A run's account for a program to read; the keys are a contract (``gpuops.report/1``)."""

from gpuops.model import Json
from gpuops.report.account import AttemptAccount, RunAccount
from gpuops.report.advice import advice
from gpuops.report.decision_text import decision_json, exclusion_json
from gpuops.store.queries import RunRow
from gpuops.units import iso_utc

ETTR_DEFINITION = "productive / wall seconds from launch to end, queue excluded (arXiv 2410.21680)"


def report_json(account: RunAccount) -> Json:
    """Return the body of ``gpuops report --json``; unknown values are null."""
    return {
        "run": {
            **_run(account.run),
            "agent": account.agent.value if account.is_live else None,
        },
        "nodes": sorted({node for a in account.attempts for node in a.row.nodes}),
        "wall_seconds": account.wall_s,
        "seconds_by_phase": {phase.value: s for phase, s in account.seconds.items()},
        "lost_seconds": round(account.lost_s, 6),
        "lost_seconds_by_phase": {phase.value: round(s, 6) for phase, s in account.lost.items()},
        "ettr_alloc": account.ettr_alloc,
        "ettr_alloc_max": account.ettr_alloc_max,
        "ettr_definition": ETTR_DEFINITION,
        "redone_steps": account.redone_steps,
        "attempts": [_attempt(item, account) for item in account.attempts],
        "exclusions": [exclusion_json(row) for row in account.exclusions],
        "decisions": [decision_json(row) for row in account.decisions],
        "incidents": [incident.to_json() for incident in account.incidents],
        "advice": advice(account),
    }


def _time(time_us: int | None) -> str | None:
    return None if time_us is None else iso_utc(time_us)


def _run(run: RunRow) -> Json:
    return {
        "id": run.id,
        "name": run.name,
        "user": run.user,
        "cluster": run.cluster,
        "command": list(run.command),
        "run_dir": run.run_dir,
        "created": iso_utc(run.created_us),
        "ended": _time(run.ended_us),
        "outcome": run.outcome,
        "exit_code": run.exit_code,
        "reason": run.reason,
        "torch_version": run.torch_version,
        "max_restarts": run.max_restarts,
    }


def _attempt(item: AttemptAccount, account: RunAccount) -> Json:
    row = item.row
    spans = [span for span in account.spans if span.ordinal == row.ordinal]
    return {
        "attempt": row.ordinal,
        "outcome": row.outcome,
        "exit_code": row.exit_code,
        "started": _time(row.start_us),
        "first_step": _time(row.first_step_us),
        "caught_up": _time(row.redo_done_us),
        "last_step": _time(row.last_step_us),
        "ended": _time(row.end_us),
        "world_size": row.world_size,
        "n_nodes": row.n_nodes,
        "nodes": list(row.nodes),
        "steps_first": row.steps_first,
        "steps_last": row.steps_last,
        "step_source": row.step_source,
        "beats": row.beats,
        "redone_steps": item.redone_steps,
        "began_again": item.began_again,
        "log_dir": row.log_dir,
        "slurm_job_id": row.slurm_job_id,
        "phases": [
            {
                "phase": span.phase.value,
                "start": iso_utc(span.start_us),
                "seconds": span.seconds,
            }
            for span in spans
        ],
    }
