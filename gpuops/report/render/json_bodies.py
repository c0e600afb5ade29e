"""Reports as JSON: ``gpuops.report/1`` and ``gpuops.node/1``; the keys are a contract."""

from dataclasses import asdict
from typing import Any

from gpuops.model import Json
from gpuops.report.advice import advice
from gpuops.report.render.incident_text import decision_json, exclusion_json
from gpuops.report.time_breakdown import AttemptBreakdown, RunBreakdown
from gpuops.store.queries.burnin_queries import BurninRow, NodeSweep
from gpuops.store.queries.node_queries import NodeHistory, NodeRow
from gpuops.store.queries.run_queries import RunRow
from gpuops.units import iso_utc

ETTR_DEFINITION = "productive / wall seconds from launch to end, queue excluded (arXiv 2410.21680)"


def report_json(breakdown: RunBreakdown) -> Json:
    """Return the body of ``gpuops report --json``; unknown values are null."""
    return {
        "run": {
            **_run_json(breakdown.run),
            "agent": breakdown.agent.value if breakdown.is_live else None,
        },
        "nodes": sorted({node for a in breakdown.attempts for node in a.row.nodes}),
        "wall_seconds": breakdown.wall_s,
        "seconds_by_phase": {phase.value: s for phase, s in breakdown.seconds.items()},
        "lost_seconds": round(breakdown.lost_s, 6),
        "lost_seconds_by_phase": {phase.value: round(s, 6) for phase, s in breakdown.lost.items()},
        "ettr_alloc": breakdown.ettr_alloc,
        "ettr_alloc_max": breakdown.ettr_alloc_max,
        "ettr_definition": ETTR_DEFINITION,
        "redone_steps": breakdown.redone_steps,
        "attempts": [_attempt_json(item, breakdown) for item in breakdown.attempts],
        "exclusions": [exclusion_json(row) for row in breakdown.exclusions],
        "decisions": [decision_json(row) for row in breakdown.decisions],
        "incidents": [incident.to_json() for incident in breakdown.incidents],
        "advice": advice(breakdown),
    }


def _iso_or_none(time_us: int | None) -> str | None:
    return None if time_us is None else iso_utc(time_us)


def _run_json(run: RunRow) -> Json:
    return {
        "id": run.id,
        "name": run.name,
        "user": run.user,
        "cluster": run.cluster,
        "command": list(run.command),
        "run_dir": run.run_dir,
        "created": iso_utc(run.created_us),
        "ended": _iso_or_none(run.ended_us),
        "outcome": run.outcome,
        "exit_code": run.exit_code,
        "reason": run.reason,
        "torch_version": run.torch_version,
        "max_restarts": run.max_restarts,
    }


def _attempt_json(item: AttemptBreakdown, breakdown: RunBreakdown) -> Json:
    row = item.row
    spans = [span for span in breakdown.spans if span.ordinal == row.ordinal]
    return {
        "attempt": row.ordinal,
        "outcome": row.outcome,
        "exit_code": row.exit_code,
        "started": _iso_or_none(row.start_us),
        "first_step": _iso_or_none(row.first_step_us),
        "caught_up": _iso_or_none(row.redo_done_us),
        "last_step": _iso_or_none(row.last_step_us),
        "ended": _iso_or_none(row.end_us),
        "world_size": row.world_size,
        "n_nodes": row.n_nodes,
        "nodes": list(row.nodes),
        "steps_first": row.steps_first,
        "steps_last": row.steps_last,
        "step_source": row.step_source,
        "beats": row.beats,
        "redone_steps": item.redone_steps,
        "began_again": item.restarted_from_scratch,
        "log_dir": row.log_dir,
        "slurm_job_id": row.slurm_job_id,
        "phases": [
            {"phase": span.phase.value, "start": iso_utc(span.start_us), "seconds": span.seconds}
            for span in spans
        ],
    }


_TIMES = {
    "t_us": "time",
    "boot_us": "boot",
    "first_us": "first_seen",
    "last_us": "last_seen",
    "end_us": "ended",
    "first_seen_us": "first_seen",
    "last_seen_us": "last_seen",
}
_NAMES = {"run_id": "run", "ordinal": "attempt", "incident_id": "incident", "component_id": "id"}
_NAMES |= {"check_run_id": "check_run", "sweep_id": "sweep"}


def node_json(node: NodeRow) -> Json:
    """Return one node of ``gpuops node ls --json``."""
    return _row_json(node, exclude=("id",))


def history_json(history: NodeHistory, burnin: BurninRow | None, sweep: NodeSweep | None) -> Json:
    """Return the body of ``gpuops node show --json``; unknown values are null.

    *burnin* and *sweep*: the node's last ones.
    """
    return {
        "node": node_json(history.node),
        "findings": [_row_json(item) for item in history.findings],
        "incidents": [item.to_json() for item in history.incidents],
        "states": [_row_json(item) for item in history.states],
        "repairs": [_row_json(item) for item in history.repairs],
        "strikes": [_row_json(item, exclude=("node_id",)) for item in history.strikes],
        "components": [_row_json(item) for item in history.components],
        "boots": [_row_json(item) for item in history.boots],
        "failed_attempts": [_row_json(item) for item in history.failed],
        "burnin": burnin
        and {
            **_row_json(burnin),
            "measurements": [_row_json(item, exclude=("node",)) for item in burnin.measurements],
        },
        "sweep": sweep and {**_row_json(sweep), "tests": [_row_json(item) for item in sweep.tests]},
    }


def _row_json(record: Any, exclude: tuple[str, ...] = ()) -> Json:  # noqa: ANN401 any of the rows
    values = asdict(record)
    body: Json = {}
    if "entity_kind" in values:
        body["entity"] = {"kind": values.pop("entity_kind"), "id": values.pop("entity_id")}
    for name, value in values.items():
        if name in _TIMES:
            body[_TIMES[name]] = None if value is None else iso_utc(value)
        elif name not in exclude:
            body[_NAMES.get(name, name)] = value
    return body
