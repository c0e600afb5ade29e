"""HealthCheckProgram: drain a node that fails, and resume it once it passes again.

slurmd runs it on idle nodes too, and before it has registered; its exit code drains nothing. So it
calls scontrol, but acts only on a node that is registered with slurmctld, and only on our own
drains. It stays within the 54 s that slurm/health_check.sh allows.

The helpers that hooks start in their own session are here too: they may wait.
"""

import contextlib
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum

from gpuops.checks.core.runner import CheckRun
from gpuops.config.resolve import GateMode
from gpuops.errors import ProbeError, SlurmError
from gpuops.gate.drain import (
    DrainPublication,
    DrainRecord,
    DrainRetry,
    DrainStage,
    drain_node,
    read_diagnostic,
    read_resumes,
    save_outcome,
    update_diagnostic,
    write_resumes,
)
from gpuops.gate.hook import (
    WRITE_S,
    GateResult,
    HookContext,
    await_record,
    record_and_decide,
    record_decision,
    recorded_drain,
    save_drain,
    start_helper,
)
from gpuops.gate.node_lock import try_lock
from gpuops.gate.node_state import StateError, read_state
from gpuops.gate.permit import GateSettings, sync_from_store
from gpuops.gate.policy import (
    DrainOutcome,
    DrainStep,
    may_resume,
    next_drain_step,
    proves_healthy,
    resume_refusal,
    return_refusal,
)
from gpuops.gate.record import record, record_check_run
from gpuops.gate.session import check_node, start_saving_state
from gpuops.host.clock import Clock
from gpuops.incident.runbook import return_condition
from gpuops.model import Event, FailureClass, ReturnCondition
from gpuops.resources import data_dir
from gpuops.slurm.scontrol import Scontrol, SlurmNode
from gpuops.units import US_PER_S


class NodeAction(StrEnum):
    """What was done about the node."""

    NOTHING = "nothing"
    DRAINED = "drained"
    RESUMED = "resumed"
    KEPT = "kept"
    FORGOTTEN = "forgotten"


@dataclass(frozen=True, slots=True)
class NodeActionResult:
    """What was done, why, and about which drain. ``diagnose``: start a diagnostic of the node."""

    action: NodeAction
    why: str
    drain: DrainRecord | None = None
    diagnose: bool = False


def reason_not_to_drain(view: SlurmNode) -> str | None:
    """Return why a failing node is not drained now; None: it is drained."""
    if not view.registered:
        return f"slurmctld does not hear from {view.name}"
    if view.drained:
        return f"drained already: {view.reason}"
    return f"down: {view.reason}" if view.down else None


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthContext:
    """What a health check acts with; ``write_s``: how long a dead disk may delay each record."""

    gate: GateSettings
    scontrol: Scontrol
    retry: DrainRetry
    clock: Clock
    write_s: float = WRITE_S

    def save(self, drain: DrainRecord | None) -> None:
        """Save *drain* as this node's own; if that fails, the next check finds the older one."""
        save_drain(self.gate, drain, write_s=self.write_s)


def act(
    result: GateResult, recorded: DrainRecord | None, view: SlurmNode, health: HealthContext
) -> NodeActionResult:
    """Drain or resume the node after *result*; *recorded* is the drain that it had before.

    Raises:
        SlurmError: slurmctld does not answer or refuses; the next check tries again.
    """
    if result.drain is not None:
        return _publish(result.drain, health)
    if recorded is None or not view.registered:
        return NodeActionResult(NodeAction.NOTHING, result.decision.why)
    healthy = proves_healthy(result.check_run.findings, recorded.check)
    if not view.drained and (recorded.stage == DrainStage.SET or healthy):
        health.save(None)
        return NodeActionResult(
            NodeAction.FORGOTTEN, "the node is in use again, and gpuops did not resume it", recorded
        )
    if view.reason != recorded.reason:
        return _resend(recorded, view, health)
    healthy = healthy and may_resume(view, recorded.reason)
    return _count_pass(recorded, health, healthy=healthy, idle=view.idle)


def _count_pass(
    recorded: DrainRecord, health: HealthContext, *, healthy: bool, idle: bool
) -> NodeActionResult:
    """Count a passed check of a node that we drained; resume it after enough in a row.

    If its failure class returns by a diagnostic, one runs once the node is *idle*; a person starts
    a burn-in, which takes long, and inspects a node that was resumed too often.
    """
    passes, needed = recorded.passes + 1 if healthy else 0, health.gate.passes_to_resume
    if passes < needed:
        health.save(replace(recorded, passes=passes, stage=DrainStage.SET.value))
        return NodeActionResult(
            NodeAction.NOTHING, f"still drained: {passes} of {needed} passes in a row"
        )
    refused, diagnose = _may_return(recorded, health, idle=idle)
    why = refused or _try_resume(recorded, health)
    if why is not None:
        kept = replace(recorded, passes=passes, stage=DrainStage.SET.value, kept=why)
        health.save(kept)
        return NodeActionResult(
            NodeAction.NOTHING if recorded.kept else NodeAction.KEPT,
            f"still drained: {why}",
            kept,
            diagnose,
        )
    health.save(None)
    return NodeActionResult(NodeAction.RESUMED, f"{passes} health checks passed in a row", recorded)


# A node that fails its diagnostic is diagnosed again this much later.
DIAGNOSE_AGAIN_S = 3600.0


def _may_return(
    recorded: DrainRecord, health: HealthContext, *, idle: bool
) -> tuple[str | None, bool]:
    """Return why the node of *recorded* may not return yet, and whether to start a diagnostic."""
    gate, now_us = health.gate, health.clock.now_us()
    condition = return_condition(FailureClass(recorded.failure_class), data_dir("runbooks"))
    try:
        last = read_diagnostic(gate.state_dir, uid=gate.uid)
        tested_us = last.tested_us(condition)
        why = return_refusal(condition, recorded.t_us, tested_us, _repaired_us(gate))
        waits = why is not None and condition is ReturnCondition.DIAG
        asked_us = last.asked_us or 0
        is_due = asked_us < recorded.t_us or now_us - asked_us >= DIAGNOSE_AGAIN_S * US_PER_S
        if not (waits and idle and is_due):
            return why, False
        update_diagnostic(gate.state_dir, gate.uid, asked_us=now_us)
    except ProbeError as exc:
        return str(exc), False
    return why, True


def _repaired_us(gate: GateSettings) -> list[int]:
    try:
        return [repair.t_us for repair in read_state(gate.state_dir, gate.uid).repairs]
    except StateError:
        return []


def _try_resume(recorded: DrainRecord, health: HealthContext) -> str | None:
    """Resume the node and count that; return why not, if it was resumed too often.

    If the resume cannot be counted, the node stays drained.

    Raises:
        SlurmError: slurmctld does not answer or refuses.
    """
    gate, now_us = health.gate, health.clock.now_us()
    try:
        before = read_resumes(gate.state_dir, uid=gate.uid)
    except ProbeError as exc:
        return str(exc)
    why = resume_refusal(
        before.of(recorded.check), _repaired_us(gate), now_us, gate.resumes_max_per_day
    )
    if why is not None:
        return why
    try:
        write_resumes(gate.state_dir, before.with_one(recorded.check, now_us))
    except ProbeError as exc:
        return str(exc)
    try:
        health.scontrol.resume(recorded.node)
    except SlurmError:
        with contextlib.suppress(ProbeError):
            write_resumes(gate.state_dir, before)
        raise
    return None


def _resend(recorded: DrainRecord, view: SlurmNode, health: HealthContext) -> NodeActionResult:
    """Send the reason of *recorded* to slurmctld, unless the node has another one.

    If slurmctld had our reason before, any other is an administrator's.
    """
    was_set = recorded.stage == DrainStage.SET
    replaces = () if was_set else recorded.replaces
    step = next_drain_step(view, recorded.reason, replaces=replaces, was_set=was_set)
    if step is DrainStep.SET:
        return _publish(recorded, health)
    if step is DrainStep.YIELD:
        health.save(None)
        return NodeActionResult(
            NodeAction.FORGOTTEN, f"somebody else drained the node: {view.reason}", recorded
        )
    return NodeActionResult(NodeAction.NOTHING, f"the reason in slurmctld is {view.reason}")


def _publish(drain: DrainRecord, health: HealthContext) -> NodeActionResult:
    result = drain_node(drain, health.scontrol, lambda: drain, health.retry, health.clock)
    if result.step is DrainStep.DONE:
        health.save(replace(drain, stage=DrainStage.SET.value))
        return NodeActionResult(NodeAction.DRAINED, drain.reason, drain)
    if result.step in {DrainStep.YIELD, DrainStep.LIFTED}:
        health.save(None)
        return NodeActionResult(
            NodeAction.FORGOTTEN, "somebody else drained or resumed the node", drain
        )
    return NodeActionResult(NodeAction.NOTHING, result.error or "slurmctld was not reached")


HEALTH_PUBLISH_S = 6.0
# The check whose pass is a diagnostic that passed.
DIAGNOSTIC = "dcgm_diag"
_JITTER_STEPS = 1000

FindScontrol = Callable[[], Scontrol]


def publish_drain(
    context: HookContext, drain_id: str, find: FindScontrol, unsaved: DrainRecord | None = None
) -> DrainPublication:
    """Send the recorded drain *drain_id* to slurmctld, within `gpuops.gate.drain.PUBLISH_S`.

    *unsaved* is the drain itself, if the hook that wants it had no time to see it on record. It is
    sent even if the disk never takes the record; the node is then resumed by a person.

    Raises:
        SlurmError: There is no scontrol.
        ProbeError: The drain is known to slurmctld, but its record cannot be written.
    """
    drain = recorded_drain(context.gate) if unsaved is None else await_record(context, unsaved)
    if drain is None or drain.id != drain_id:
        return DrainPublication(None, f"no drain {drain_id} is recorded on this node")
    record_decision(context.options, drain, DrainOutcome.DRAIN, context.clock)
    return _publish_drain(context, drain, find)


def follow_up(context: HookContext, find: FindScontrol) -> GateResult | None:
    """Check a driver again that gave a hook no answer; drain the node if that fails.

    None: another process already does it.

    Raises:
        SlurmError: There is no scontrol.
    """
    with try_lock(context.gate.state_dir / "followup.lock") as is_locked:
        if not is_locked:
            return None
        check_run = check_node(context.plan, context.clock)
        wait_for_state = start_saving_state(context.plan, check_run)
        result = record_and_drain(context, check_run, find)
        wait_for_state()
        return result


def record_and_drain(context: HookContext, check_run: CheckRun, find: FindScontrol) -> GateResult:
    """Record *check_run*, decide about the node, and drain it, if so decided, before it returns.

    For commands outside of slurmd, which may wait. The caller must have a single thread.

    Raises:
        SlurmError: There is no scontrol; the next health check sends the drain.
    """
    result = record_and_decide(context, check_run)
    drain = result.drain
    if drain is not None and not result.is_saved:
        drain = await_record(context, drain)
    if drain is not None:
        record_decision(context.options, drain, DrainOutcome.DRAIN, context.clock)
        _publish_drain(context, drain, find)
    return result


def diagnose(context: HookContext) -> CheckRun | None:
    """Run the node's diagnostic and record it; a drained node may return after one that passes.

    None: another process already does it.

    Raises:
        ProbeError: The result cannot be saved for the health check.
    """
    with try_lock(context.gate.state_dir / "diag.lock") as is_locked:
        if not is_locked:
            return None
        started_us = context.clock.now_us()
        check_run = check_node(context.plan, context.clock)
        record_check_run(check_run, context.occasion, context.options, context.clock)
        if proves_healthy(check_run.findings, DIAGNOSTIC):
            update_diagnostic(context.gate.state_dir, context.gate.uid, passed_us=started_us)
        return check_run


def check_health(
    context: HookContext, find: FindScontrol, jitter_s: float
) -> tuple[GateResult, NodeActionResult]:
    """Check this node after its share of *jitter_s*, and drain or resume it.

    slurmd starts all nodes' health checks at the same instant: their shares differ.
    """
    time.sleep(jitter_s * jitter_share(context.gate.node))
    gate = context.gate
    not_fetched = sync_from_store(
        gate.store_url,
        cluster=gate.cluster,
        node=gate.node,
        state_dir=gate.state_dir,
        uid=gate.uid,
        clock=context.clock,
    )
    check_run = check_node(context.plan, context.clock)
    wait_for_state = start_saving_state(context.plan, check_run)
    result, action = _decide_and_act(context, check_run, find)
    problems = (*result.problems, *filter(None, [not_fetched, wait_for_state()]))
    return replace(result, problems=problems), action


def _decide_and_act(
    context: HookContext, check_run: CheckRun, find: FindScontrol
) -> tuple[GateResult, NodeActionResult]:
    if context.gate.mode is GateMode.OBSERVE:
        nothing = NodeActionResult(NodeAction.NOTHING, "gate.mode is observe")
        return record_and_decide(context, check_run), nothing
    try:
        scontrol = find()
        view = scontrol.node(context.gate.node)
    except SlurmError as exc:
        result = record_and_decide(context, check_run, str(exc))
        return result, NodeActionResult(NodeAction.NOTHING, str(exc))
    result = record_and_decide(context, check_run, reason_not_to_drain(view))
    if result.drain is not None:
        record_decision(context.options, result.drain, DrainOutcome.DRAIN, context.clock)
    return result, _act(context, result, view, scontrol)


def jitter_share(node: str) -> float:
    """Return a number from 0 to 1 that is the same for *node* each time."""
    return zlib.crc32(node.encode()) % _JITTER_STEPS / _JITTER_STEPS


def _act(
    context: HookContext, result: GateResult, view: SlurmNode, scontrol: Scontrol
) -> NodeActionResult:
    health = HealthContext(
        gate=context.gate,
        scontrol=scontrol,
        retry=DrainRetry(limit_s=HEALTH_PUBLISH_S, pause=time.sleep),
        clock=context.clock,
    )
    try:
        action = act(result, recorded_drain(context.gate), view, health)
    except SlurmError as exc:
        return NodeActionResult(NodeAction.NOTHING, str(exc))
    drain = action.drain
    if action.diagnose:
        start_helper(context.options, ["diag"])
    if drain is not None and action.action is NodeAction.KEPT:
        kept = replace(drain, why=action.why)
        record_decision(context.options, kept, DrainOutcome.KEPT, context.clock)
    if drain is not None and action.action is NodeAction.DRAINED:
        _record_drained(context, drain)
    if drain is not None and action.action is NodeAction.RESUMED:
        _record_resumed(context, drain, action.why)
    if drain is not None and action.action is NodeAction.FORGOTTEN:
        _record_takeover(context, drain, view)
    return action


def _publish_drain(
    context: HookContext, drain: DrainRecord, find: FindScontrol
) -> DrainPublication:
    before = recorded_drain(context.gate)
    was_recorded = before is not None and before.id == drain.id

    def read_record() -> DrainRecord | None:
        recorded = recorded_drain(context.gate)
        is_newer = recorded is not None and recorded.t_us >= drain.t_us
        return recorded if was_recorded or is_newer else drain

    retry = DrainRetry(pause=context.pause)
    result = drain_node(drain, find(), read_record, retry, context.clock)
    if result.step is DrainStep.DONE:
        _record_drained(context, drain)
    save_outcome(drain, result, context.gate.state_dir)
    return result


def _record_drained(context: HookContext, drain: DrainRecord) -> None:
    def events() -> list[Event]:
        from gpuops.store.events import drained_event

        event = drained_event(
            drain.node,
            drain.reason,
            clock=context.clock,
            check=drain.check,
            failure_class=FailureClass(drain.failure_class),
            job_id=drain.job_id,
        )
        return [event]

    record(events, drain.node, context.options, context.clock)


def _record_resumed(context: HookContext, drain: DrainRecord, why: str) -> None:
    def events() -> list[Event]:
        from gpuops.store.events import resumed_event

        return [resumed_event(drain.node, f"{why}; was {drain.reason}", clock=context.clock)]

    record(events, drain.node, context.options, context.clock)


def _record_takeover(context: HookContext, drain: DrainRecord, view: SlurmNode) -> None:
    """Record that a person resumed the node, or has it drained for a reason of their own."""

    def events() -> list[Event]:
        from gpuops.store.events import ADMINISTRATOR, drained_event, resumed_event

        if view.drained and view.reason != drain.reason:
            text = view.reason or "no reason"
            return [drained_event(drain.node, text, clock=context.clock, actor=ADMINISTRATOR)]
        if not view.drained and drain.stage == DrainStage.SET:
            text = f"resumed by hand; was {drain.reason}"
            return [resumed_event(drain.node, text, clock=context.clock, actor=ADMINISTRATOR)]
        return []

    record(events, drain.node, context.options, context.clock)
