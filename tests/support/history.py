"""Runs, attempts and incidents as the store gives them, built by hand."""

from gpuops.incident.lifecycle import close, mitigate, with_action
from gpuops.model import ActionKind
from gpuops.store.events import new_event
from gpuops.store.queries.run_queries import AttemptRow, RunRow
from support.exits import NODE, RUN, incident_of, killed, terminated

T0 = 1_700_000_000_000_000


def us(seconds):
    return T0 + round(seconds * 1e6)


def run_row(**changes):
    fields = {
        "id": RUN,
        "name": "demo",
        "user": "ada",
        "cluster": "default",
        "command": ("gpuops", "run", "--standalone", "--nproc-per-node", "2", "train.py"),
        "run_dir": "/runs/20231114T221320Z-demo-abcd1234",
        "created_us": T0,
        "ended_us": us(100),
        "outcome": "completed",
        "exit_code": 0,
        "reason": "every rank exited with code 0",
        "torch_version": "2.13.0",
        "max_restarts": 3,
    }
    return RunRow(**{**fields, **changes})


def attempt_row(ordinal, times, steps=(None, None), outcome="completed", **changes):
    """Return an attempt; *times* in seconds: start, first step, caught up, last step, end."""
    start, first, caught, last, end = (None if t is None else us(t) for t in times)
    fields = {
        "run_id": RUN,
        "ordinal": ordinal,
        "start_us": start,
        "first_step_us": first,
        "redo_done_us": caught,
        "last_step_us": last,
        "end_us": end,
        "outcome": outcome,
        "exit_code": 0 if outcome == "completed" else 1,
        "world_size": 2,
        "n_nodes": 1,
        "steps_first": steps[0],
        "steps_last": steps[1],
        "beats": None if steps[1] is None else 2 * steps[1],
        "step_source": "optimizer_state",
        "log_dir": f"/runs/20231114T221320Z-demo-abcd1234/generation-{ordinal}",
        "slurm_job_id": None,
        "nodes": ("n041",),
    }
    return AttemptRow(**{**fields, **changes})


def a_killed_run():
    """Return a run of 100 s that lost rank 1 at step 57 and made 57 steps again."""
    attempts = [
        attempt_row(0, (1, 10, None, 40, 40.5), (1, 57), "failed"),
        attempt_row(1, (41, 45, 70, 95, 96), (1, 120)),
    ]
    opened = incident_of(killed(1, at_s=40.1), terminated(0, at_s=40.3), detected_s=40.4)
    again = mitigate(
        with_action(opened, ActionKind.RESTART),
        at_us=us(45),
        lost_s={"detect": 0.4, "restart": 4.6},
    )
    done = close(
        again, at_us=us(70), lost_s={"redo": 25.0}, resolution="past the step where it had failed"
    )
    return run_row(), attempts, [done]


def record_run(recorder, run, rows, incidents, clock):
    """Record the events from which a store makes *run*, its attempts and its incidents."""

    def tell(kind, attempt=None, payload=None, **fields):
        body = fields if payload is None else payload
        recorder.record(
            new_event(kind, node=NODE, clock=clock, run_id=run.id, attempt=attempt, payload=body)
        )

    tell(
        "run.started",
        name=run.name,
        command=list(run.command),
        user=run.user,
        cluster=run.cluster,
        run_dir=run.run_dir,
        torch_version=run.torch_version,
        gpuops_version="0.1.0",
        max_restarts=run.max_restarts,
        slurm_job_id=None,
    )
    for row in rows:
        _record_attempt(tell, row)
    for incident in incidents:
        tell("incident.recorded", incident.attempt, payload=incident.to_json())
    if run.outcome is not None:
        tell("run.ended", outcome=run.outcome, exit_code=run.exit_code, reason=run.reason)


def _record_attempt(tell, row):
    tell(
        "attempt.started",
        row.ordinal,
        start_us=row.start_us,
        world_size=row.world_size,
        n_nodes=row.n_nodes,
        group_rank=0,
        torch_run_id="t",
        log_dir=row.log_dir,
        slurm_job_id=None,
        slurm_restart_count=0,
    )
    if row.first_step_us is not None:
        tell(
            "attempt.first_step",
            row.ordinal,
            first_step_us=row.first_step_us,
            step=row.steps_first,
            step_source=row.step_source,
        )
    if row.redo_done_us is not None:
        tell("attempt.caught_up", row.ordinal, redo_done_us=row.redo_done_us, step=58)
    tell(
        "attempt.ended",
        row.ordinal,
        end_us=row.end_us,
        outcome=row.outcome,
        last_step_us=row.last_step_us,
        steps_first=row.steps_first,
        steps_last=row.steps_last,
        beats=row.beats,
        exit_code=row.exit_code,
    )
