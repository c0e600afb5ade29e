"""A prolog or an epilog: check the node, decide, record, and say whether the hook has to fail.

No command of Slurm is called here: a prolog that waits for slurmctld holds up every job. The drain
itself is slurmd's, which drains a node whose hook fails; its reason is written by a helper in its
own session (`gpuops.gate.drain`).

Findings about left-over processes name their job, by the cgroup that slurmstepd made for it
(cgroup.conf(5), ``proctrack/cgroup``); elsewhere only the user is known. No process is ended.

The verdict file: what a hook of Slurm needs in addition to exit code 1 before it fails.

Python itself exits 1 where an import fails, so that exit code alone would drain every node with a
broken environment. The hook names the file with a number that it just drew; only a command that
came to its own verdict in this very invocation writes it.
"""

import os
import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from gpuops.checks.core.runner import CheckRun
from gpuops.checks.gpu.gpus import entity_of
from gpuops.config.resolve import GateMode, read_toml
from gpuops.errors import ProbeError, UsageError
from gpuops.gate.drain import DrainRecord, read_drain, write_drain
from gpuops.gate.node_state import GPUS_LOOK, StateError, read_state
from gpuops.gate.permit import DrainPermitClient, permission_of, start_asking
from gpuops.gate.policy import (
    NOT_ASKED,
    DrainCause,
    DrainDecision,
    DrainOutcome,
    decide_drain,
    find_drain_cause,
    replaceable_reasons,
)
from gpuops.gate.record import CheckOccasion, RecordOptions, record, record_check_run
from gpuops.gate.session import CheckPlan, check_node, confirmed, keeping
from gpuops.host.clock import Clock
from gpuops.host.gpu_names import Gpus
from gpuops.host.process import probe
from gpuops.host.process.command import spawn_detached
from gpuops.host.process.run_with_deadline import abandoned
from gpuops.host.records import from_json, to_json
from gpuops.host.trust import atomic_write, why_not_ours
from gpuops.incident.incidents.node import incident_key
from gpuops.incident.runbook import failing_runbooks
from gpuops.model import Event, FailureClass, Finding, Json, Severity, Status, UnknownReason, uuid7
from gpuops.resources import data_dir

REFUSE = "refuse"


def write_verdict(path: Path) -> None:
    """Write at *path* that this node is refused; all of it is there or nothing.

    Raises:
        UsageError: Its folder is not ours alone, or cannot be written.
    """
    trouble = why_not_ours(path.parent, private=True)
    if trouble is not None:
        raise UsageError(f"cannot write a verdict into {path.parent}: {trouble}")
    try:
        atomic_write(path, f"{REFUSE}\n".encode(), 0o600)
    except OSError as exc:
        raise UsageError(f"cannot write the verdict {path}: {exc.strerror}") from exc


# tests/integration/test_slurm_files.py holds the sum of what a hook may take.
WRITE_S = 0.3
TELL_S = 0.5
# A drain of ours that is older has been sent to slurmctld, or given up.
EARLIER_S = 900.0
# Of these a probe without an answer is a hung driver; a second check has to decide.
_DRIVER_CHECKS = frozenset({"gpu_driver", "gpu_count"})


@dataclass(frozen=True, slots=True, kw_only=True)
class HookContext:
    """What every hook works with. ``hook``: its name; ``job_id``: of the job that it is for.

    ``job_uid``: of that job's user.
    """

    hook: str
    job_id: str | None
    job_uid: int | None
    plan: CheckPlan
    gate: DrainPermitClient
    memory: RecordOptions
    clock: Clock
    pause: Callable[[float], None]

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
    """What came of one check of the gate. ``trouble``: what of it could not be done or recorded.

    ``drain`` is the drain that is now wanted.
    """

    ran: CheckRun
    decision: DrainDecision
    cause: DrainCause | None = None
    drain: DrainRecord | None = None
    trouble: tuple[str, ...] = ()


def run_hook(context: HookContext, verdict: Path) -> GateResult:
    """Check the node; where it has to go out, write *verdict* and start the helper for the reason.

    The caller must have a single thread.

    Raises:
        UsageError: The verdict cannot be written; the hook does not fail then.
    """
    ran = _looked_at(context)
    kept = keeping(context.plan, ran)
    settled = settle(context, ran)
    trouble = list(settled.trouble)
    if settled.drain is not None:
        write_verdict(verdict)
        trouble.append(start_helper(context.memory, ["publish", "--id", settled.drain.id]) or "")
    trouble.append(kept() or "")
    if settled.drain is None and hung(ran):
        trouble.append(start_helper(context.memory, ["followup"]) or "")
    return replace(settled, trouble=tuple(filter(None, trouble)))


def _looked_at(context: HookContext) -> CheckRun:
    """Return what was found within the suite's deadline; doubtful results are checked again."""
    begun_ns = context.clock.mono_ns()
    ran = check_node(context.plan, context.clock)
    left_s = context.plan.suite.deadline_s - (context.clock.mono_ns() - begun_ns) / 1e9
    ran = confirmed(context.plan, ran, left_s, context.pause, context.clock)
    return with_owners(ran, context.plan.request.root, context.job_uid)


def bounded(plan: CheckPlan, name: str) -> CheckPlan:
    """Return *plan* within the deadline of the shipped suite *name*.

    What the hook's script grants is reckoned with that one; a site's own suite may take less.
    """
    shipped = read_toml(data_dir("checks") / "suites" / f"{name}.toml")
    deadline_s = min(plan.suite.deadline_s, float(shipped["deadline_s"]))
    return replace(plan, suite=plan.suite.within(deadline_s))


def settle(context: HookContext, ran: CheckRun, left: str | None = None) -> GateResult:
    """Record *ran*, decide what becomes of the node, and keep the drain that it takes.

    Slurm does not know of it yet. *left*: see `gpuops.gate.policy.decide_drain`. The caller must
    have a single thread.
    """
    gate = context.gate
    runbooks = failing_runbooks(ran.findings, data_dir("runbooks"))
    cause = find_drain_cause(ran.findings, {kind: page.action for kind, page in runbooks.items()})
    asks = cause is not None and gate.mode is GateMode.ENFORCE and left is None
    # The store thinks about it while the findings are written down.
    asked = start_asking(gate, cause, context.clock) if cause is not None and asks else None
    trouble = [record_check_run(ran, context.occasion, context.memory, context.clock)]
    decision = decide_drain(cause, gate.mode, permission_of(asked) if asks else NOT_ASKED, left)
    drain = None
    if cause is not None:
        drain, amiss = _wanted(context, cause, decision)
        trouble.append(amiss)
        # The helper records a drain, as there is no time to lose.
        if not decision.drains and trouble[0] is None:
            trouble.append(tell_decision(context.memory, drain, decision.outcome, context.clock))
    return GateResult(
        ran=ran,
        decision=decision,
        cause=cause,
        drain=drain if decision.drains else None,
        trouble=tuple(line for line in trouble if line is not None),
    )


def keep(
    gate: DrainPermitClient, drain: DrainRecord | None, *, write_s: float = WRITE_S
) -> str | None:
    """Keep *drain* as this node's own; return what went wrong. A dead disk costs *write_s*."""
    question = f"drain record {gate.state_dir}"

    def written() -> None:
        write_drain(gate.state_dir, drain)

    try:
        probe.ask(written, write_s, question=question, left=abandoned())
    except ProbeError as exc:
        return f"gpuops: {exc}"
    return None


def _wanted(
    context: HookContext, cause: DrainCause, decision: DrainDecision
) -> tuple[DrainRecord, str | None]:
    """Return the drain for *cause*, kept where it is to be done, and what went wrong with that."""
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

    def completed() -> Json:
        incident, earlier = _incident(gate, cause), _earlier(gate, now_us)
        if earlier is not None:
            words = replaceable_reasons(context.hook, earlier.reason, earlier.replaces)
        else:
            words = replaceable_reasons(context.hook, None, ())
        reason = cause.reason(incident)
        full = replace(drain, incident=incident, reason=reason, replaces=tuple(words))
        if decision.drains:
            write_drain(gate.state_dir, full)
        return to_json(full)  # type: ignore[no-any-return]  # a dataclass is a table

    question = f"drain record {gate.state_dir}"
    try:
        kept = probe.ask(completed, WRITE_S, question=question, left=abandoned())
    except ProbeError as exc:
        return drain, f"gpuops: {exc}"
    return from_json(DrainRecord, kept, "the drain record"), None


def _earlier(gate: DrainPermitClient, now_us: int) -> DrainRecord | None:
    """Return the drain that this node wanted a short while ago."""
    try:
        found = read_drain(gate.state_dir, uid=gate.uid)
    except ProbeError:
        return None
    recent = found is not None and 0 <= now_us - found.t_us <= EARLIER_S * 1e6
    return found if recent else None


def _incident(gate: DrainPermitClient, cause: DrainCause) -> str | None:
    """Return the id of the open incident that *cause* belongs to, where this node knows one."""
    try:
        incidents = read_state(gate.state_dir, gate.uid).incidents
    except StateError:
        return None
    found = incidents.get(incident_key(cause.failure_class, cause.finding.entity))
    return None if found is None else found.incident.id


def tell_decision(
    memory: RecordOptions, drain: DrainRecord, course: DrainOutcome, clock: Clock
) -> str | None:
    """Record what was decided about the node of *drain*; return what went wrong."""

    def events() -> list[Event]:
        return [_decided(drain, course, clock)]

    return record(events, drain.node, memory, clock, deadline_s=TELL_S)


def start_helper(memory: RecordOptions, words: list[str]) -> str | None:
    """Start ``gpuops slurm WORDS`` in its own session, where slurmd cannot kill it with the hook.

    Returns what went wrong.
    """
    config = ["--config", str(memory.config_file)] if memory.config_file else []
    argv = [sys.executable, "-P", "-m", "gpuops", *config, "slurm", *words]
    try:
        spawn_detached(argv, memory.environ)
    except OSError as exc:
        return f"gpuops: cannot start `gpuops slurm {words[0]}`: {exc.strerror}"
    return None


def hung(ran: CheckRun) -> bool:
    """Say whether a probe of the GPU driver gave no answer."""
    return any(
        finding.check in _DRIVER_CHECKS and finding.unknown_reason is UnknownReason.TIMEOUT
        for finding in ran.findings
    )


def _decided(drain: DrainRecord, course: DrainOutcome, clock: Clock) -> Event:
    from gpuops.store.events import new_event

    payload: Json = {
        "course": course.value,
        "why": drain.why,
        "hook": drain.hook,
        "job_id": drain.job_id,
        "check": drain.check,
        "failure_class": drain.failure_class,
        "incident": drain.incident,
        "reason": drain.reason,
    }
    severity = Severity.ERROR if course is DrainOutcome.DRAIN else Severity.WARNING
    return new_event(
        "gate.decided", node=drain.node, clock=clock, severity=severity, payload=payload
    )


OWNERS_S = 0.2
_SHOWN = 8
_JOB = re.compile(r"/job_(\d+)(?:/|$)", re.MULTILINE)


def with_owners(
    ran: CheckRun, root: Path, job_uid: int | None, *, deadline_s: float = OWNERS_S
) -> CheckRun:
    """Return *ran* with the owners of left-over processes in its findings, where they are known.

    *job_uid*: the user of the job that the hook is for; *deadline_s*: how long to look for them.
    The caller must have a single thread.
    """
    if not any(_is_leftover(finding) for finding in ran.findings):
        return ran
    pids = _pids(ran)
    wanted = sorted({pid for item in pids.values() for pid in item})[:_SHOWN]
    try:
        owners = probe.ask(
            lambda: _owners(root, wanted, job_uid),
            deadline_s,
            question=f"owners {root}",
            left=abandoned(),
        )
    except ProbeError:
        return ran

    def with_owner(finding: Finding) -> Finding:
        mine = [str(pid) for pid in pids.get(finding.entity.id, ()) if str(pid) in owners]
        if not mine or not _is_leftover(finding):
            return finding
        words = ", ".join(f"{pid} is {owners[pid]}" for pid in mine)
        return replace(finding, message=f"{finding.message}; {words}")

    return replace(ran, findings=tuple(with_owner(item) for item in ran.findings))


def _is_leftover(finding: Finding) -> bool:
    bad = finding.status in {Status.FAIL, Status.WARN}
    return bad and finding.failure_class is FailureClass.HOST_LEFTOVERS


def _pids(ran: CheckRun) -> dict[str, tuple[int, ...]]:
    """Return the processes on each GPU, by the id of its entity."""
    gpus = ran.facts.get(GPUS_LOOK)
    if not isinstance(gpus, Gpus):
        return {}
    found = {}
    for gpu in gpus.nvml.gpus:
        for finding in ran.findings:
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
