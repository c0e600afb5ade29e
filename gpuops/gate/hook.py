"""A prolog or an epilog: check the node, decide, record, and report whether the hook must fail.

No Slurm command is called here: a prolog that waits for slurmctld delays every job. slurmd itself
drains a node whose hook fails; a helper in its own session writes the reason
(`gpuops.gate.drain`), also if a slow disk has the drain's record only later, or never.

Findings about left-over processes name their job, by the cgroup that slurmstepd made for it
(cgroup.conf(5), ``proctrack/cgroup``); elsewhere only the user is known. No process is ended.

The verdict file: what a hook of Slurm needs in addition to exit code 1, or to the end of its time,
before it fails. Python itself exits 1 if an import fails, so that the exit code alone would drain
every node with a broken environment. The hook passes a path with a new random number; only a
command that reached its own verdict in this very invocation writes that file.
"""

import json
import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from gpuops.checks.core.runner import CheckRun
from gpuops.checks.gpu.gpus import entity_of
from gpuops.config.resolve import GateMode, read_toml
from gpuops.errors import ProbeError, UsageError
from gpuops.gate.check_changes import is_new_decision
from gpuops.gate.drain import DrainRecord, read_drain, write_drain
from gpuops.gate.node_state import GPUS_PROBE, StateError, read_state
from gpuops.gate.permit import GateSettings, start_permission_request
from gpuops.gate.policy import (
    DrainCause,
    DrainDecision,
    DrainOutcome,
    FleetView,
    decide_drain,
    find_drain_causes,
    replaceable_reasons,
)
from gpuops.gate.record import (
    LATE_S,
    CheckOccasion,
    RecordOptions,
    late_text,
    record,
    record_check_run,
    start_detached_gpuops,
)
from gpuops.gate.session import CheckPlan, check_node, recheck_failures, start_saving_state
from gpuops.host.clock import Clock
from gpuops.host.gpu_names import Gpus
from gpuops.host.process import probe
from gpuops.host.process.abandoned import abandoned
from gpuops.host.records import from_json, to_json
from gpuops.host.trust import atomic_write, why_not_ours
from gpuops.incident.incidents.node import incident_key
from gpuops.incident.runbook import failing_runbooks
from gpuops.model import Event, FailureClass, Finding, Json, Severity, Status, UnknownReason, uuid7
from gpuops.resources import data_dir
from gpuops.units import NS_PER_S

REFUSE = "refuse"


def write_verdict(path: Path) -> None:
    """Write the file at *path* that refuses this node, atomically.

    Raises:
        UsageError: Its folder is not ours alone, or cannot be written.
    """
    problem = why_not_ours(path.parent, private=True)
    if problem is not None:
        raise UsageError(f"cannot write a verdict into {path.parent}: {problem}")
    try:
        atomic_write(path, f"{REFUSE}\n".encode(), 0o600)
    except OSError as exc:
        raise UsageError(f"cannot write the verdict {path}: {exc.strerror}") from exc


# tests/integration/test_slurm_files.py checks the sum of what a hook may take.
WRITE_S = 0.3
TELL_S = 0.5
# A drain of ours that is older was sent to slurmctld, or abandoned.
EARLIER_S = 900.0
_RECORD_AGAIN_S = 0.1
# A timeout or a crash of these is the driver's; a second check has to decide.
_DRIVER_CHECKS = frozenset({"gpu_driver", "gpu_count"})


@dataclass(frozen=True, slots=True, kw_only=True)
class HookContext:
    """What every hook works with. ``hook``: its name; ``job_id`` and ``job_uid``: of its job.

    ``write_s``: how long the hook waits for the record of a drain.
    """

    hook: str
    job_id: str | None
    job_uid: int | None
    plan: CheckPlan
    gate: GateSettings
    options: RecordOptions
    clock: Clock
    pause: Callable[[float], None]
    write_s: float = WRITE_S

    @property
    def occasion(self) -> CheckOccasion:
        return CheckOccasion(
            trigger=self.hook,
            job_id=self.job_id,
            gpus=self.plan.request.gpus,
            mode=self.gate.mode.value,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class GateResult:
    """The result of one check of the gate. ``problems``: what could not be done or recorded.

    ``drain`` is the drain that is now wanted; ``is_saved``: whether it is on record.
    """

    check_run: CheckRun
    decision: DrainDecision
    cause: DrainCause | None = None
    drain: DrainRecord | None = None
    is_saved: bool = True
    problems: tuple[str, ...] = ()


def run_hook(context: HookContext, verdict: Path) -> GateResult:
    """Check the node; if it must be drained, write *verdict* and start the helper for the reason.

    The caller must have a single thread.

    Raises:
        UsageError: The verdict cannot be written; the hook does not fail then.
    """
    check_run = _check_twice(context)
    wait_for_state = start_saving_state(context.plan, check_run)
    result = record_and_decide(context, check_run)
    problems: list[str | None] = [*result.problems]
    if result.drain is not None:
        write_verdict(verdict)
        words = ["publish", "--id", result.drain.id]
        if not result.is_saved:
            words += ["--unsaved", json.dumps(to_json(result.drain))]
        problems.append(start_helper(context.options, words))
    problems.append(wait_for_state())
    if result.drain is None and driver_undecided(check_run):
        problems.append(start_helper(context.options, ["followup"]))
    return replace(result, problems=tuple(filter(None, problems)))


def _check_twice(context: HookContext) -> CheckRun:
    """Check within the suite's deadline, and again where failures may be transient."""
    begun_ns = context.clock.mono_ns()
    check_run = check_node(context.plan, context.clock)
    left_s = context.plan.suite.deadline_s - (context.clock.mono_ns() - begun_ns) / 1e9
    check_run = recheck_failures(context.plan, check_run, left_s, context.pause, context.clock)
    return with_owners(check_run, context.plan.request.root, context.job_uid)


def within_shipped_deadline(plan: CheckPlan, name: str) -> CheckPlan:
    """Return *plan* with at most the deadline of the shipped suite *name*.

    The timeout of the hook's script is based on that one; a site's own suite may take less.
    """
    shipped = read_toml(data_dir("checks") / "suites" / f"{name}.toml")
    deadline_s = min(plan.suite.deadline_s, float(shipped["deadline_s"]))
    return replace(plan, suite=plan.suite.within(deadline_s))


def record_and_decide(
    context: HookContext, check_run: CheckRun, skip_reason: str | None = None
) -> GateResult:
    """Record *check_run*, decide about the node, and save the drain record, if there is one.

    Slurm does not know of the drain yet. *skip_reason*: see `gpuops.gate.policy.decide_drain`. The
    caller must have a single thread.
    """
    gate = context.gate
    runbooks = failing_runbooks(check_run.findings, data_dir("runbooks"))
    actions = {kind: page.action for kind, page in runbooks.items()}
    causes = find_drain_causes(check_run.findings, actions)
    permission = None
    if causes and gate.mode is GateMode.ENFORCE and skip_reason is None:
        # The store answers while the findings are recorded.
        permission = start_permission_request(gate, causes, context.clock)
    not_recorded = record_check_run(check_run, context.occasion, context.options, context.clock)
    replies = [] if permission is None else permission()
    fleet = FleetView(settings=gate.fuse, count=check_run.fleet, now_us=context.clock.now_us())
    cause, decision = decide_drain(causes, gate.mode, replies, fleet, skip_reason)
    problems = [not_recorded]
    drain, not_saved = None, None
    if cause is not None:
        drain, not_saved = _save_new_drain(context, cause, decision)
        problems.append(not_saved)
        # If the node is drained, the helper records the decision, to save time.
        if not decision.drains and not_recorded is None:
            outcome = decision.outcome
            problems.append(record_decision(context.options, drain, outcome, context.clock))
    return GateResult(
        check_run=check_run,
        decision=decision,
        cause=cause,
        drain=drain if decision.drains else None,
        is_saved=not_saved is None,
        problems=tuple(filter(None, problems)),
    )


def save_drain(
    gate: GateSettings, drain: DrainRecord | None, *, write_s: float = WRITE_S
) -> str | None:
    """Save *drain* as this node's own; return what went wrong. A dead disk costs *write_s*."""
    question = f"drain record {gate.state_dir}"
    try:
        probe.ask(
            lambda: write_drain(gate.state_dir, drain), write_s, question=question, left=abandoned()
        )
    except ProbeError as exc:
        return f"gpuops: the drain is not recorded in {gate.state_dir}: {exc}"
    return None


def _save_new_drain(
    context: HookContext, cause: DrainCause, decision: DrainDecision
) -> tuple[DrainRecord, str | None]:
    """Return the drain for *cause*, saved if it is to be done, and what went wrong with that.

    If the state folder is slow, the child that saves it continues for `LATE_S`.
    """
    gate, now_us = context.gate, context.clock.now_us()
    drain = DrainRecord(
        id=uuid7(now_us, os.urandom(10)),
        node=gate.node,
        hook=context.hook,
        reason=cause.reason(None),
        check=cause.finding.check,
        failure_class=cause.failure_class.value,
        t_us=now_us,
        why=decision.why,
        replaces=tuple(replaceable_reasons(context.hook, None, ())),
        job_id=context.job_id,
    )

    def complete() -> Json:
        incident, recent = _open_incident_id(gate, cause), recorded_drain(gate)
        full = replace(drain, incident=incident, reason=cause.reason(incident))
        if recent is not None and 0 <= now_us - recent.t_us <= EARLIER_S * 1e6:
            replaces = replaceable_reasons(context.hook, recent.reason, recent.replaces)
            full = replace(full, replaces=tuple(replaces))
        if decision.drains:
            write_drain(gate.state_dir, full)
        return to_json(full)  # type: ignore[no-any-return]  # a dataclass is a table

    question = f"drain record {gate.state_dir}"
    try:
        child = probe.start_call(complete, deadline_s=LATE_S, question=question, left=abandoned())
        outcome = probe.within(child, context.write_s)
        if outcome is None:
            late = late_text("the drain", gate.state_dir, child.pid, context.write_s)
            return drain, late if decision.drains else None
        saved = probe.answer(outcome)
    except ProbeError as exc:
        return drain, f"gpuops: the drain is not recorded in {gate.state_dir}: {exc}"
    return from_json(DrainRecord, saved, "the drain record"), None


def recorded_drain(gate: GateSettings) -> DrainRecord | None:
    """Return the drain that this node has on record; None also if it cannot be read."""
    try:
        return read_drain(gate.state_dir, uid=gate.uid)
    except ProbeError:
        return None


def await_record(context: HookContext, drain: DrainRecord) -> DrainRecord:
    """Return *drain* as the child of its hook records it within `LATE_S`, else as it is."""
    end_ns = context.clock.mono_ns() + round(LATE_S * NS_PER_S)
    while context.clock.mono_ns() < end_ns:
        recorded = recorded_drain(context.gate)
        if recorded is not None and recorded.id == drain.id:
            return recorded
        context.pause(_RECORD_AGAIN_S)
    return drain


def _open_incident_id(gate: GateSettings, cause: DrainCause) -> str | None:
    """Return the id of the open incident that *cause* belongs to, if this node knows one."""
    try:
        incidents = read_state(gate.state_dir, gate.uid).incidents
    except StateError:
        return None
    found = incidents.get(incident_key(cause.failure_class, cause.finding.entity))
    return None if found is None else found.incident.id


def record_decision(
    options: RecordOptions, drain: DrainRecord, outcome: DrainOutcome, clock: Clock
) -> str | None:
    """Record the decision about the node of *drain*; return what went wrong.

    A failing node that is not drained is decided about again at each check: the same decision about
    the same job is recorded once.
    """

    def events() -> list[Event]:
        from gpuops.store.events import new_event

        what = (outcome, drain.check, drain.failure_class, drain.incident, drain.job_id)
        is_repeated = options.state_dir is not None and not is_new_decision(
            options.state_dir, options.uid, " ".join(map(str, what))
        )
        if is_repeated and outcome not in (DrainOutcome.DRAIN, DrainOutcome.KEPT):
            return []

        payload: Json = {
            "course": outcome.value,
            "why": drain.why,
            "hook": drain.hook,
            "job_id": drain.job_id,
            "check": drain.check,
            "failure_class": drain.failure_class,
            "incident": drain.incident,
            "reason": drain.reason,
        }
        severity = Severity.ERROR if outcome is DrainOutcome.DRAIN else Severity.WARNING
        return [
            new_event(
                "gate.decided", node=drain.node, clock=clock, severity=severity, payload=payload
            )
        ]

    return record(events, drain.node, options, clock, deadline_s=TELL_S)


def start_helper(options: RecordOptions, words: list[str]) -> str | None:
    """Start ``gpuops slurm WORDS`` in its own session, where slurmd cannot kill it with the hook.

    Returns what went wrong.
    """
    try:
        start_detached_gpuops(options, "slurm", *words)
    except OSError as exc:
        return f"gpuops: cannot start `gpuops slurm {words[0]}`: {exc.strerror}"
    return None


def driver_undecided(check_run: CheckRun) -> bool:
    """Return whether a probe of the GPU driver timed out or crashed."""
    undecided = {UnknownReason.TIMEOUT, UnknownReason.CRASH}
    return any(
        finding.check in _DRIVER_CHECKS and finding.unknown_reason in undecided
        for finding in check_run.findings
    )


OWNERS_S = 0.2
_SHOWN = 8
_JOB = re.compile(r"/job_(\d+)(?:/|$)", re.MULTILINE)


def with_owners(
    check_run: CheckRun, root: Path, job_uid: int | None, *, deadline_s: float = OWNERS_S
) -> CheckRun:
    """Return *check_run*; findings about left-over processes name the owners, if known.

    *job_uid*: the user of the job that the hook is for; *deadline_s*: for reading them.
    The caller must have a single thread.
    """
    if not any(_is_leftover(finding) for finding in check_run.findings):
        return check_run
    pids = _pids(check_run)
    shown = sorted({pid for item in pids.values() for pid in item})[:_SHOWN]
    try:
        owners = probe.ask(
            lambda: _owners(root, shown, job_uid),
            deadline_s,
            question=f"owners {root}",
            left=abandoned(),
        )
    except ProbeError:
        return check_run

    def with_owner(finding: Finding) -> Finding:
        known = [str(pid) for pid in pids.get(finding.entity.id, ()) if str(pid) in owners]
        if not known or not _is_leftover(finding):
            return finding
        text = ", ".join(f"{pid} is {owners[pid]}" for pid in known)
        return replace(finding, message=f"{finding.message}; {text}")

    return replace(check_run, findings=tuple(with_owner(item) for item in check_run.findings))


def _is_leftover(finding: Finding) -> bool:
    bad = finding.status in {Status.FAIL, Status.WARN}
    return bad and finding.failure_class is FailureClass.HOST_LEFTOVERS


def _pids(check_run: CheckRun) -> dict[str, tuple[int, ...]]:
    """Return the processes on each GPU, by the id of its entity."""
    gpus = check_run.facts.get(GPUS_PROBE)
    if not isinstance(gpus, Gpus):
        return {}
    found = {}
    for gpu in gpus.nvml.gpus:
        for finding in check_run.findings:
            if finding.entity == entity_of(gpu, finding.entity):
                found[finding.entity.id] = tuple(item.pid for item in gpu.processes or ())
    return found


def _owners(root: Path, pids: Iterable[int], job_uid: int | None) -> dict[str, str]:
    found = {}
    for pid in pids:
        folder = root / "proc" / str(pid)
        try:
            uid, cgroup = folder.stat().st_uid, (folder / "cgroup").read_text(errors="replace")
        except OSError:
            continue
        job = _JOB.search(cgroup)
        if job is not None:
            found[str(pid)] = f"of job {job[1]}"
        elif uid == job_uid:
            found[str(pid)] = f"of the job's user, {uid}"
    return found
