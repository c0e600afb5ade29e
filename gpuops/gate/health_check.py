"""HealthCheckProgram: drain a node that fails, and take back our own drain once it passes again.

slurmd runs it on idle nodes too, and before it has registered; it drains nothing by its exit code.
So this one calls scontrol, but acts only on a node that is registered with slurmctld.

What a health check does, and the helpers that hooks start in their own session: they may wait.

A health check keeps within the 54 s that slurm/health_check.sh grants.
"""

import contextlib
import fcntl
import os
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path

from gpuops.checks.core.runner import CheckRun
from gpuops.config.resolve import GateMode
from gpuops.errors import ProbeError, SlurmError
from gpuops.gate.drain import (
    DrainPublication,
    DrainRecord,
    DrainRetry,
    DrainStage,
    conclude,
    drain_node,
    read_resumes,
    recorded,
    write_resumes,
)
from gpuops.gate.hook import WRITE_S, GateResult, HookContext, keep, settle, tell_decision
from gpuops.gate.node_state import StateError, read_state
from gpuops.gate.permit import DrainPermitClient, sync
from gpuops.gate.policy import (
    DrainOutcome,
    DrainStep,
    may_resume,
    next_drain_step,
    proves_healthy,
    resume_refusal,
)
from gpuops.gate.record import record
from gpuops.gate.session import check_node, keeping
from gpuops.host.clock import Clock
from gpuops.model import Event, FailureClass
from gpuops.slurm.scontrol import Scontrol, SlurmNode


class NodeAction(StrEnum):
    """What was done about the node."""

    NOTHING = "nothing"
    DRAINED = "drained"
    RESUMED = "resumed"
    KEPT = "kept"
    FORGOTTEN = "forgotten"


@dataclass(frozen=True, slots=True)
class NodeActionResult:
    """What was done, why, and about which drain."""

    did: NodeAction
    why: str
    drain: DrainRecord | None = None


def reason_to_leave(view: SlurmNode) -> str | None:
    """Return why a node that fails is not drained now; None: it is to be drained."""
    if not view.registered:
        return f"slurmctld does not hear from {view.name}"
    if view.drained:
        return f"drained already: {view.reason}"
    return f"down: {view.reason}" if view.down else None


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthContext:
    """What acting needs; ``write_s``: how long a dead disk may delay each record."""

    gate: DrainPermitClient
    scontrol: Scontrol
    patience: DrainRetry
    clock: Clock
    write_s: float = WRITE_S

    def keep(self, drain: DrainRecord | None) -> None:
        """Keep *drain* as this node's own; where that fails, the next check finds the older one."""
        keep(self.gate, drain, write_s=self.write_s)


def act(
    settled: GateResult, recorded: DrainRecord | None, view: SlurmNode, health: HealthContext
) -> NodeActionResult:
    """Do what *settled* asks for; *recorded* is the drain that this node had before.

    Raises:
        SlurmError: slurmctld does not answer or refuses; the next check tries again.
    """
    if settled.drain is not None:
        return _publish(settled.drain, health)
    if recorded is None or not view.registered:
        return NodeActionResult(NodeAction.NOTHING, settled.decision.why)
    healthy = proves_healthy(settled.ran.findings, recorded.check)
    if not view.drained and (recorded.stage == DrainStage.SET or healthy):
        health.keep(None)
        return NodeActionResult(
            NodeAction.FORGOTTEN, "the node is in use again, and not by us", recorded
        )
    if view.reason != recorded.reason:
        return _again(recorded, view, health)
    return _counted(recorded, health, healthy=healthy and may_resume(view, recorded.reason))


def _counted(recorded: DrainRecord, health: HealthContext, *, healthy: bool) -> NodeActionResult:
    """Count a pass of a node that our drain keeps out; take that back after enough in a row.

    Not where that was done too often already: then an administrator must inspect the node.
    """
    passes, needed = recorded.passes + 1 if healthy else 0, health.gate.passes_to_resume
    if passes < needed:
        health.keep(replace(recorded, passes=passes, stage=DrainStage.SET.value))
        return NodeActionResult(
            NodeAction.NOTHING, f"our drain stands: {passes} of {needed} passes in a row"
        )
    why = _resumed(recorded, health)
    if why is not None:
        kept = replace(recorded, passes=passes, stage=DrainStage.SET.value, kept=why)
        health.keep(kept)
        return NodeActionResult(
            NodeAction.NOTHING if recorded.kept else NodeAction.KEPT,
            f"our drain stands: {why}",
            kept,
        )
    health.keep(None)
    return NodeActionResult(NodeAction.RESUMED, f"{passes} health checks passed in a row", recorded)


def _resumed(recorded: DrainRecord, health: HealthContext) -> str | None:
    """Take the drain back and count that; return why not, where it was done too often already.

    What cannot be counted is not taken back.

    Raises:
        SlurmError: slurmctld does not answer or refuses.
    """
    gate, now_us = health.gate, health.clock.now_us()
    try:
        before = read_resumes(gate.state_dir, uid=gate.uid)
    except ProbeError as exc:
        return str(exc)
    try:
        repairs = read_state(gate.state_dir, gate.uid).repairs
    except StateError:
        repairs = ()
    why = resume_refusal(
        before.of(recorded.check),
        [repair.t_us for repair in repairs],
        now_us,
        gate.resumes_max_per_day,
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


def _again(recorded: DrainRecord, view: SlurmNode, health: HealthContext) -> NodeActionResult:
    """Send the reason of *recorded* to slurmctld, unless the node has another one.

    Once slurmctld had our reason, an administrator gave any other.
    """
    was_set = recorded.stage == DrainStage.SET
    replaces = () if was_set else recorded.replaces
    step = next_drain_step(view, recorded.reason, replaces=replaces, was_set=was_set)
    if step is DrainStep.SET:
        return _publish(recorded, health)
    if step is DrainStep.YIELD:
        health.keep(None)
        return NodeActionResult(
            NodeAction.FORGOTTEN, f"somebody else drained the node: {view.reason}", recorded
        )
    return NodeActionResult(NodeAction.NOTHING, f"slurmctld says {view.reason}")


def _publish(drain: DrainRecord, health: HealthContext) -> NodeActionResult:
    ended = drain_node(drain, health.scontrol, lambda: drain, health.patience, health.clock)
    if ended.step is DrainStep.DONE:
        health.keep(replace(drain, stage=DrainStage.SET.value))
        return NodeActionResult(NodeAction.DRAINED, drain.reason, drain)
    if ended.step in {DrainStep.YIELD, DrainStep.LIFTED}:
        health.keep(None)
        return NodeActionResult(
            NodeAction.FORGOTTEN, "somebody else drained or resumed the node", drain
        )
    return NodeActionResult(NodeAction.NOTHING, ended.trouble or "slurmctld was not reached")


HEALTH_PUBLISH_S = 6.0
_JITTER_STEPS = 1000

FindScontrol = Callable[[], Scontrol]


def publish_drain(context: HookContext, drain_id: str, find: FindScontrol) -> DrainPublication:
    """Bring the recorded drain *drain_id* to slurmctld, for `gpuops.gate.drain.PUBLISH_S`.

    Raises:
        SlurmError: There is no scontrol.
    """
    drain = recorded(context.gate.state_dir, uid=context.gate.uid)()
    if drain is None or drain.id != drain_id:
        return DrainPublication(None, f"no drain {drain_id} is recorded on this node")
    tell_decision(context.memory, drain, DrainOutcome.DRAIN, context.clock)
    return _publish_drain(context, drain, find)


def follow_up(context: HookContext, find: FindScontrol) -> GateResult | None:
    """Check again a driver that gave a hook no answer; drain where that fails the node.

    None: another process does it already.

    Raises:
        SlurmError: There is no scontrol.
    """
    with _alone(context.gate.state_dir / "followup.lock") as alone:
        if not alone:
            return None
        ran = check_node(context.plan, context.clock)
        kept = keeping(context.plan, ran)
        settled = settle(context, ran)
        kept()
        if settled.drain is not None:
            tell_decision(context.memory, settled.drain, DrainOutcome.DRAIN, context.clock)
            _publish_drain(context, settled.drain, find)
        return settled


def check_health(
    context: HookContext, find: FindScontrol, jitter_s: float
) -> tuple[GateResult, NodeActionResult]:
    """Check this node after its share of *jitter_s*, and do what that asks for.

    slurmd starts all nodes' health checks at the same instant: their shares differ.
    """
    time.sleep(jitter_s * share(context.gate.node))
    gate = context.gate
    amiss = sync(
        gate.store_url,
        cluster=gate.cluster,
        node=gate.node,
        state_dir=gate.state_dir,
        uid=gate.uid,
        clock=context.clock,
    )
    ran = check_node(context.plan, context.clock)
    kept = keeping(context.plan, ran)
    settled, acted = _settled_and_acted(context, ran, find)
    trouble = (*settled.trouble, *filter(None, [amiss, kept()]))
    return replace(settled, trouble=trouble), acted


def _settled_and_acted(
    context: HookContext, ran: CheckRun, find: FindScontrol
) -> tuple[GateResult, NodeActionResult]:
    if context.gate.mode is GateMode.OBSERVE:
        return settle(context, ran), NodeActionResult(NodeAction.NOTHING, "gate.mode is observe")
    try:
        scontrol = find()
        view = scontrol.node(context.gate.node)
    except SlurmError as exc:
        return settle(context, ran, str(exc)), NodeActionResult(NodeAction.NOTHING, str(exc))
    settled = settle(context, ran, reason_to_leave(view))
    if settled.drain is not None:
        tell_decision(context.memory, settled.drain, DrainOutcome.DRAIN, context.clock)
    return settled, _act(context, settled, view, scontrol)


def share(node: str) -> float:
    """Return a number from 0 to 1 that is the same for *node* each time."""
    return zlib.crc32(node.encode()) % _JITTER_STEPS / _JITTER_STEPS


def _act(
    context: HookContext, settled: GateResult, view: SlurmNode, scontrol: Scontrol
) -> NodeActionResult:
    before = recorded(context.gate.state_dir, uid=context.gate.uid)()
    patience = DrainRetry(limit_s=HEALTH_PUBLISH_S, pause=time.sleep)
    health = HealthContext(
        gate=context.gate, scontrol=scontrol, patience=patience, clock=context.clock
    )
    try:
        acted = act(settled, before, view, health)
    except SlurmError as exc:
        return NodeActionResult(NodeAction.NOTHING, str(exc))
    drain = acted.drain
    if drain is not None and acted.did is NodeAction.KEPT:
        told = replace(drain, why=acted.why)
        tell_decision(context.memory, told, DrainOutcome.KEPT, context.clock)
    if drain is not None and acted.did in {NodeAction.DRAINED, NodeAction.RESUMED}:
        tell = _drained_event if acted.did is NodeAction.DRAINED else _resumed_event
        record(lambda: [tell(context, drain, acted.why)], drain.node, context.memory, context.clock)
    return acted


def _publish_drain(
    context: HookContext, drain: DrainRecord, find: FindScontrol
) -> DrainPublication:
    read = recorded(context.gate.state_dir, uid=context.gate.uid)
    ended = drain_node(drain, find(), read, DrainRetry(pause=time.sleep), context.clock)
    conclude(drain, ended, context.gate.state_dir)
    if ended.step is DrainStep.DONE:
        record(
            lambda: [_drained_event(context, drain, "")], drain.node, context.memory, context.clock
        )
    return ended


def _drained_event(context: HookContext, drain: DrainRecord, _why: str) -> Event:
    from gpuops.store.events import drained_event

    return drained_event(
        drain.node,
        drain.reason,
        clock=context.clock,
        check=drain.check,
        failure_class=FailureClass(drain.failure_class),
        job_id=drain.job_id,
    )


def _resumed_event(context: HookContext, drain: DrainRecord, why: str) -> Event:
    from gpuops.store.events import resumed_event

    return resumed_event(drain.node, f"{why}; was {drain.reason}", clock=context.clock)


@contextmanager
def _alone(lock: Path) -> Iterator[bool]:
    """Say whether this is the only process that holds *lock*."""
    lock.parent.mkdir(parents=True, exist_ok=True)
    file = os.open(lock, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True
    finally:
        os.close(file)
