"""Runs, their attempts, and what each minute of them showed.

Every agent of a run tells about the same attempt: it began when the first of them began, ended
when the last of them ended, and failed if it failed anywhere.
"""

from gpuops.store import schema
from gpuops.store.facts.envelope import Envelope, Fact, attempt_id
from gpuops.store.facts.places import ATTEMPTS, RUNS
from gpuops.store.lines import LineError
from gpuops.store.merge import Merge, Row

ATTEMPT_NODES = Merge(
    table=schema.attempt_nodes,
    key=("attempt_id", "node_id"),
    least=("group_rank", "from_us"),
    greatest=("to_us",),
)
PROGRESS = Merge(
    table=schema.progress,
    key=("attempt_id", "minute_us"),
    greatest=("step_last", "beats", "step_time_p50_us", "step_time_max_us"),
)
# A failure anywhere outweighs a cancellation, which outweighs an agent that saw its part complete.
_OUTCOME_WEIGHT = {"completed": 1, "cancelled": 2, "failed": 3}


def run_started(envelope: Envelope) -> list[Fact]:
    """Return the run as the first agent that started it tells it."""
    fields, event = envelope.fields(), envelope.event
    run = {
        **_run_stub(envelope),
        "created_us": event.t_us,
        "name": fields.text("name"),
        "user": fields.text("user"),
        "command": fields.texts("command"),
        "run_dir": fields.text("run_dir"),
        "torch_version": fields.text("torch_version"),
        "gpuops_version": fields.text("gpuops_version"),
        "max_restarts": fields.integer("max_restarts"),
        "start_key": envelope.earliest_key,
    }
    return [(RUNS, run)]


def run_ended(envelope: Envelope) -> list[Fact]:
    """Return the end of the run; a later attempt's end replaces an earlier one's."""
    fields, event = envelope.fields(), envelope.event
    outcome = fields.wanted_word("outcome")
    attempt = -1 if event.attempt is None else event.attempt
    run = {
        **_run_stub(envelope),
        "ended_us": event.t_us,
        "outcome": outcome,
        "exit_code": fields.integer("exit_code"),
        "reason": fields.text("reason"),
        "end_key": f"{attempt + 1:010d}/{_weight(outcome)}/{envelope.order_key}",
    }
    return [(RUNS, run)]


def attempt_started(envelope: Envelope) -> list[Fact]:
    """Return the attempt and this node's part in it."""
    fields = envelope.fields()
    group_rank = fields.integer("group_rank")
    attempt = {
        **_attempt_stub(envelope),
        "start_us": fields.integer("start_us"),
        "world_size": fields.integer("world_size"),
        "n_nodes": fields.integer("n_nodes"),
        "torch_run_id": fields.text("torch_run_id"),
        "log_dir": fields.text("log_dir"),
        "slurm_job_id": fields.word("slurm_job_id"),
        "slurm_restart_count": fields.integer("slurm_restart_count"),
        # The agent of group rank 0 speaks for all, then the earliest.
        "start_key": f"{10**10 - 1 - _rank(group_rank):010d}/{envelope.earliest_key}",
    }
    part = _part(envelope, group_rank=group_rank, from_us=fields.integer("start_us"))
    return [(ATTEMPTS, attempt), part]


def attempt_first_step(envelope: Envelope) -> list[Fact]:
    """Return when the attempt made its first step."""
    fields = envelope.fields()
    step = fields.integer("step")
    attempt = {
        **_attempt_stub(envelope),
        "first_step_us": fields.integer("first_step_us"),
        "steps_first": step,
        "step_source": fields.text("step_source"),
        "step_key": envelope.earliest_key,
    }
    return [(ATTEMPTS, attempt)]


def attempt_caught_up(envelope: Envelope) -> list[Fact]:
    """Return when the attempt passed every step of the attempts before it."""
    fields = envelope.fields()
    attempt = {**_attempt_stub(envelope), "redo_done_us": fields.integer("redo_done_us")}
    return [(ATTEMPTS, attempt)]


def attempt_progress(envelope: Envelope) -> list[Fact]:
    """Return one minute of the attempt: of several agents' figures the greatest counts."""
    fields = envelope.fields()
    run_id, ordinal = _attempt(envelope)
    minute = {
        "attempt_id": attempt_id(run_id, ordinal),
        "minute_us": fields.wanted_integer("minute_us"),
        "step_last": fields.integer("step_last"),
        "beats": fields.integer("beats"),
        "step_time_p50_us": fields.integer("step_time_p50_us"),
        "step_time_max_us": fields.integer("step_time_max_us"),
    }
    return [(PROGRESS, minute)]


def attempt_ended(envelope: Envelope) -> list[Fact]:
    """Return the attempt's end and this node's."""
    fields = envelope.fields()
    outcome = fields.wanted_word("outcome")
    attempt = {
        **_attempt_stub(envelope),
        "end_us": fields.integer("end_us"),
        "last_step_us": fields.integer("last_step_us"),
        "steps_first": fields.integer("steps_first"),
        "steps_last": fields.integer("steps_last"),
        "beats": fields.integer("beats"),
        "outcome": outcome,
        "exit_code": fields.integer("exit_code"),
        "end_key": f"{_weight(outcome)}/{envelope.order_key}",
    }
    return [(ATTEMPTS, attempt), _part(envelope, to_us=fields.integer("end_us"))]


def _run_stub(envelope: Envelope) -> Row:
    event = envelope.event
    if event.run_id is None:
        raise LineError(f"{event.kind} without a run")
    return {
        "id": event.run_id,
        "cluster_id": envelope.cluster_id,
        "first_seen_us": event.t_us,
    }


def _attempt(envelope: Envelope) -> tuple[str, int]:
    event = envelope.event
    if event.run_id is None or event.attempt is None:
        raise LineError(f"{event.kind} without a run and an attempt")
    return event.run_id, event.attempt


def _attempt_stub(envelope: Envelope) -> Row:
    run_id, ordinal = _attempt(envelope)
    return {"id": attempt_id(run_id, ordinal), "run_id": run_id, "ordinal": ordinal}


def _part(envelope: Envelope, **columns: int | None) -> Fact:
    run_id, ordinal = _attempt(envelope)
    part = {
        "attempt_id": attempt_id(run_id, ordinal),
        "node_id": envelope.node_id,
        "role": "worker",
        **columns,
    }
    return ATTEMPT_NODES, part


def _weight(outcome: str) -> int:
    return _OUTCOME_WEIGHT.get(outcome, 0)


def _rank(group_rank: int | None) -> int:
    return 10**10 - 1 if group_rank is None else min(max(group_rank, 0), 10**10 - 1)
