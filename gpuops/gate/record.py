"""Record a check run: events in the spool, and a detached flusher that sends them to the store.

No verdict waits for it: a spool that hangs costs `RECORD_S`. If it is only slow, the run is
recorded late, without its effect on the node's incidents if a newer check has run.
The node's file holds its open incidents; it is changed in the child that records the run, so that
a file that hangs or cannot be written costs no verdict either.
"""

import contextlib
import os
import uuid
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from gpuops.checks.core.runner import CheckRun
from gpuops.config.resolve import Settings, environ
from gpuops.errors import ProbeError
from gpuops.gate.check_changes import RunRecord, plan_record
from gpuops.gate.node_state import StateError, change_state
from gpuops.host.clock import Clock
from gpuops.host.node_state import NodeState, RecordedRun, Repair, boot_id
from gpuops.host.process import probe
from gpuops.host.process.abandoned import abandoned
from gpuops.host.process.command import module_command, spawn_detached
from gpuops.host.process.inspect import process_state
from gpuops.host.records import to_json
from gpuops.host.trust import current_uid
from gpuops.incident.incidents.node import NodeCheckContext, acknowledge_repairs, update_incidents
from gpuops.incident.runbook import failing_runbooks
from gpuops.log import printable
from gpuops.model import Event, Incident, IncidentState, Json, Severity, Status, uuid7
from gpuops.resources import data_dir
from gpuops.units import NS_PER_S

# tests/integration/test_slurm_files.py checks the sum of what a hook may take.
RECORD_S = 1.0
# Of a test of minutes, which keeps no job waiting.
RECORD_TEST_S = 10.0
LATE_S = 30.0
_NAMESPACE = uuid.UUID("1b4c5a52-6c0e-5d0b-8a3f-9a4e6d1f2c70")
_DAY_US = 86_400_000_000

_SEVERITY = {Status.FAIL: Severity.ERROR, Status.UNKNOWN: Severity.WARNING} | {
    Status.WARN: Severity.WARNING
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordOptions:
    """Where records go. ``config_file``: the one named on the command line, for the flusher.

    ``state_dir``: the folder of the node's open incidents, ``uid`` the trusted owner of that file.
    None: this is a user's own check, which opens no incidents of the node. ``job_uid``: the user of
    the job to start, who gets a spool in ``users_dir``.
    """

    spool_dir: Path
    spool_bytes_max: int
    root: Path
    config_file: Path | None
    environ: dict[str, str]
    state_dir: Path | None = None
    uid: int = 0
    users_dir: Path | None = None
    job_uid: int | None = None


def record_options(
    settings: Settings, config_file: str | None, state_dir: Path, job_uid: int | None = None
) -> RecordOptions:
    """Return where a command with *settings* records; *config_file*: of its command line."""
    return RecordOptions(
        spool_dir=settings.spool_dir,
        spool_bytes_max=settings.spool_bytes_max,
        root=settings.root,
        config_file=Path(config_file).absolute() if config_file else None,
        environ=environ(),
        state_dir=state_dir if current_uid() == 0 else None,
        users_dir=settings.spool_users_dir if current_uid() == 0 else None,
        job_uid=job_uid,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckOccasion:
    """Why a check ran. ``gpus``: those that it judged (None: all); ``mode``: the gate's."""

    trigger: str
    job_id: str | None = None
    gpus: frozenset[str] | None = None
    mode: str | None = None


def events_of(
    check_run: CheckRun, occasion: CheckOccasion, clock: Clock, planned: RunRecord | None = None
) -> list[Event]:
    """Return the events of *check_run*: the run itself, and each new failure of gpuops in it.

    *planned*: what of it is new; None: nothing is known of earlier runs.
    """
    from gpuops.store.events import UNCHANGED, new_event

    record = planned or _plan(check_run, occasion, None)
    kind, payload = "check.ran", _new_run_json(check_run, occasion, record)
    if not record.is_new:
        kind, payload = UNCHANGED, _extended_run_json(check_run, occasion, record)
    severity = _SEVERITY.get(check_run.verdict, Severity.INFO)
    event = new_event(kind, node=check_run.node, clock=clock, severity=severity, payload=payload)
    events = [replace(event, id=record.run.id) if record.is_new else event]
    for failure in record.failures:
        payload = to_json(failure)
        severity = Severity.WARNING
        events.append(
            new_event(
                "tool.failed", node=check_run.node, clock=clock, severity=severity, payload=payload
            )
        )
    return events


def _plan(check_run: CheckRun, occasion: CheckOccasion, before: RecordedRun | None) -> RunRecord:
    return plan_record(
        check_run,
        before,
        mode=occasion.mode,
        all_gpus=occasion.gpus is None,
        new_id=lambda: uuid7(check_run.start_us, os.urandom(10)),
    )


def _new_run_json(check_run: CheckRun, occasion: CheckOccasion, record: RunRecord) -> Json:
    return {
        "suite": check_run.suite,
        "trigger": occasion.trigger,
        "job_id": occasion.job_id,
        "gpus": None if occasion.gpus is None else sorted(occasion.gpus),
        "profile": check_run.profile,
        "mode": occasion.mode,
        "boot_us": _boot_us(check_run),
        "start_us": check_run.start_us,
        "end_us": check_run.end_us,
        "verdict": check_run.verdict.word,
        "findings": [finding.to_json() for finding in record.findings],
        "parts": [part.to_json() for part in record.parts],
        "late": list(check_run.late),
        **record.sample_json(),
    }


def _extended_run_json(check_run: CheckRun, occasion: CheckOccasion, record: RunRecord) -> Json:
    return {
        "run": record.run.id,
        "suite": check_run.suite,
        "trigger": occasion.trigger,
        "first_us": record.run.start_us,
        "start_us": check_run.start_us,
        "runs": record.run.runs,
        "verdict": check_run.verdict.word,
        **record.sample_json(),
    }


def _boot_us(check_run: CheckRun) -> int | None:
    moment = check_run.moment
    return None if moment is None else moment.t_us - round(moment.since_boot_s * 1e6)


def record_check_run(
    check_run: CheckRun,
    occasion: CheckOccasion,
    options: RecordOptions,
    clock: Clock,
    more: Callable[[str], list[Event]] = lambda _run_id: [],
    *,
    deadline_s: float = RECORD_S,
) -> str | None:
    """Spool *check_run* with its effect on the node's incidents, and start a flusher.

    *more* returns further events, given the id of the recorded run. Returns what went wrong, or
    None. The caller must have a single thread.
    """
    late_ns = clock.mono_ns() + round(deadline_s * NS_PER_S)

    def events() -> list[Event]:
        if options.state_dir is None:
            found = events_of(check_run, occasion, clock)
            return [*found, *more(_run_id(found))]
        changed = apply_to_state(
            check_run,
            occasion,
            options.state_dir,
            options.uid,
            is_late=lambda: clock.mono_ns() > late_ns,
        )
        found = events_of(check_run, occasion, clock, changed.record)
        incidents = incident_events(changed.incidents, check_run.node, clock)
        return [*found, *incidents, *more(_run_id(found))]

    return record(events, check_run.node, options, clock, deadline_s=deadline_s)


def _run_id(events: Sequence[Event]) -> str:
    """Return the id of the run that *events*, of `events_of`, are about."""
    return str(events[0].payload.get("run", events[0].id))


def incident_events(incidents: Iterable[Incident], node: str, clock: Clock) -> list[Event]:
    """Return the events about *incidents* of *node*."""
    from gpuops.store.events import new_event

    return [
        new_event(
            "incident.recorded",
            node=node,
            clock=clock,
            severity=Severity.ERROR if item.state is IncidentState.OPEN else Severity.INFO,
            payload=item.to_json(),
        )
        for item in incidents
    ]


def record(
    events: Callable[[], list[Event]],
    node: str,
    options: RecordOptions,
    clock: Clock,
    *,
    deadline_s: float = RECORD_S,
) -> str | None:
    """Spool the result of *events* and start a flusher; return what went wrong, or None.

    A spool that hangs costs *deadline_s*; the child then continues for `LATE_S`, as a disk that a
    job keeps busy may need seconds. Ctrl-C and SIGTERM take effect after it. The caller must have a
    single thread.
    """
    try:
        with probe.held_signals():
            child = probe.start_call(
                lambda: _spooled(options, node, events(), clock),
                deadline_s=LATE_S,
                question=f"record {options.spool_dir}",
                left=abandoned(),
            )
            outcome = probe.within(child, deadline_s)
        if outcome is None:
            return late_text("this result", options.spool_dir, child.pid, deadline_s)
        problem = probe.answer(outcome)
    except ProbeError as exc:
        why = printable(str(exc))
        return f"gpuops: this result is not recorded in {options.spool_dir}: {why}"
    if outcome.errors:
        return printable(outcome.errors.decode(errors="replace").rstrip("\n"))
    return None if problem is None else str(problem)


def late_text(what: str, folder: Path, pid: int, waited_s: float) -> str:
    """Return that *what* is not in *folder* after *waited_s*; the process *pid* still tries."""
    now = process_state(pid)
    where = "" if now is None else f", state {now.state}"
    where += f" in {now.wchan}" if now is not None and now.wchan else ""
    return (
        f"gpuops: {what} is not recorded yet: {folder} gave no answer in {waited_s:.1f} s"
        f" (pid {pid}{where}, which continues for {LATE_S:.0f} s)"
    )


def _spooled(options: RecordOptions, node: str, events: list[Event], clock: Clock) -> str | None:
    from gpuops.store.spool.record import spool_recorder
    from gpuops.store.spool.users import make_user_spool

    if not events:
        return None
    recorder = spool_recorder(
        options.spool_dir,
        node=node,
        boot_id=boot_id(options.root),
        bytes_max=options.spool_bytes_max,
        clock=clock,
    )
    recorder.record(*events)
    recorder.close()
    if recorder.lost and options.state_dir is not None:
        # These will never reach the store: the next run and decision are recorded in full, and an
        # incident that was opened is opened anew.
        opened = {
            event.payload["id"]
            for event in events
            if event.kind == "incident.recorded" and event.payload.get("rev") == 1
        }
        with contextlib.suppress(StateError):
            change_state(
                options.state_dir,
                options.uid,
                lambda state: without_records(state, opened),
            )
    problem = None
    if options.users_dir is not None and options.job_uid is not None:
        problem = make_user_spool(options.users_dir, options.job_uid, node=node)
    try:
        start_detached_gpuops(options, "db", "flush", "--quiet")
    except OSError as exc:
        return f"gpuops: recorded, but cannot start the flusher: {exc.strerror}"
    return None if problem is None else f"gpuops: recorded, but {problem}"


def without_records(state: NodeState, opened: Collection[str]) -> NodeState:
    """Return *state* as if its last run, its decision and the incidents *opened* were unknown."""
    kept = {k: v for k, v in state.incidents.items() if v.incident.id not in opened}
    return replace(state, recorded={}, decided=None, incidents=kept)


def start_detached_gpuops(options: RecordOptions, *words: str) -> None:
    """Start ``gpuops WORDS`` in its own session.

    Raises:
        OSError: It cannot be started.
    """
    config = ["--config", str(options.config_file)] if options.config_file else []
    spawn_detached(module_command("gpuops", *config, *words), options.environ)


@dataclass(frozen=True, slots=True)
class StateChanges:
    """What a run changes: ``incidents`` to record, and what of the run; None: all of it."""

    incidents: tuple[Incident, ...] = ()
    record: RunRecord | None = None


def apply_to_state(
    check_run: CheckRun,
    occasion: CheckOccasion,
    state_dir: Path,
    uid: int,
    *,
    is_late: Callable[[], bool] = lambda: False,
) -> StateChanges:
    """Return what *check_run* changes; the file in *state_dir* holds what was recorded before.

    If the file cannot be written, a failure is one incident a day: it would be a new one at each
    check. If it *is_late* and a newer check has run meanwhile, nothing is changed.
    """
    changed = StateChanges()
    key = f"{check_run.suite}/{occasion.trigger}"
    about = NodeCheckContext(
        runbooks=failing_runbooks(check_run.findings, data_dir("runbooks")),
        new_id=lambda _key: uuid7(check_run.start_us, os.urandom(10)),
        trigger=occasion.trigger,
        job_id=occasion.job_id,
        all_gpus_checked=occasion.gpus is None,
    )

    def change(state: NodeState) -> NodeState:
        nonlocal changed
        if is_late() and check_run.start_us < state.judged_us:
            return state
        found = update_incidents(check_run, state.incidents, replace(about, repairs=state.repairs))
        record = _plan(check_run, occasion, state.recorded.get(key))
        changed = StateChanges(found.changed, record)
        recorded = {**state.recorded, key: record.run}
        judged_us = max(state.judged_us, check_run.start_us)
        return replace(state, incidents=found.open, recorded=recorded, judged_us=judged_us)

    try:
        change_state(state_dir, uid, change)
    except StateError:
        daily = replace(about, new_id=lambda key: _daily_id(check_run, key))
        return StateChanges(update_incidents(check_run, {}, daily).changed)
    return changed


def acknowledge(state_dir: Path, uid: int, repair: Repair) -> tuple[Incident, ...]:
    """Save *repair* in the node's file; return the incidents that it closes.

    Raises:
        StateError: The file cannot be written.
    """
    changed: list[Incident] = []

    def change(state: NodeState) -> NodeState:
        found = acknowledge_repairs(state.incidents, (repair,))
        changed[:] = found.changed
        return replace(state, repairs=with_repair(state.repairs, repair), incidents=found.open)

    change_state(state_dir, uid, change)
    return tuple(changed)


def with_repair(repairs: tuple[Repair, ...], new: Repair) -> tuple[Repair, ...]:
    """Return *repairs* with *new*: only the latest repair of each entity, the newest first."""
    latest: dict[tuple[str, str], Repair] = {}
    for item in sorted((*repairs, new), key=lambda item: -item.t_us):
        latest.setdefault((item.entity_kind, item.entity_id), item)
    return tuple(latest.values())


def _daily_id(check_run: CheckRun, key: str) -> str:
    return str(uuid.uuid5(_NAMESPACE, f"{check_run.node}/{key}/{check_run.start_us // _DAY_US}"))
