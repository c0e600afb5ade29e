"""HealthCheckProgram: drain a node that fails, and take back our own drain once it passes again.

slurmd runs it on idle nodes too, and before it has registered; it drains nothing by its exit code.
So this one calls scontrol, but acts only on a node that slurmctld knows and hears from.
"""

import contextlib
from dataclasses import dataclass, replace
from enum import StrEnum

from gpuops.errors import ProbeError, SlurmError
from gpuops.gate.drain_record import DrainRecord, Stage
from gpuops.gate.hook import WRITE_S, Settled, keep
from gpuops.gate.permit import Gate
from gpuops.gate.publish import Patience, publish
from gpuops.gate.resumes import read_resumes, write_resumes
from gpuops.gate.state_file import StateError, read_state
from gpuops.host.clock import Clock
from gpuops.incident.gate import (
    Step,
    came_back_too_often,
    may_resume,
    next_step,
    proves_healthy,
)
from gpuops.slurm.nodes import NodeView, Scontrol


class Did(StrEnum):
    """What was done about the node."""

    NOTHING = "nothing"
    DRAINED = "drained"
    RESUMED = "resumed"
    KEPT = "kept"
    FORGOTTEN = "forgotten"


@dataclass(frozen=True, slots=True)
class Acted:
    """What was done, why, and about which drain."""

    did: Did
    why: str
    drain: DrainRecord | None = None


def reason_to_leave(view: NodeView) -> str | None:
    """Return why a node that fails is not drained now; None: it is to be drained."""
    if not view.registered:
        return f"slurmctld does not hear from {view.name}"
    if view.drained:
        return f"drained already: {view.reason}"
    return f"down: {view.reason}" if view.down else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """What acting needs besides the facts; ``write_s``: what a dead disk may cost each record."""

    gate: Gate
    scontrol: Scontrol
    patience: Patience
    clock: Clock
    write_s: float = WRITE_S

    def keep(self, drain: DrainRecord | None) -> None:
        """Keep *drain* as this node's own; where that fails, the next check finds the older one."""
        keep(self.gate, drain, write_s=self.write_s)


def act(settled: Settled, recorded: DrainRecord | None, view: NodeView, bench: Bench) -> Acted:
    """Do what *settled* asks for; *recorded* is the drain that this node had before.

    Raises:
        SlurmError: slurmctld does not answer or refuses; the next check tries again.
    """
    if settled.drain is not None:
        return _publish(settled.drain, bench)
    if recorded is None or not view.registered:
        return Acted(Did.NOTHING, settled.decision.why)
    healthy = proves_healthy(settled.ran.findings, recorded.check)
    if not view.drained and (recorded.stage == Stage.SET or healthy):
        bench.keep(None)
        return Acted(Did.FORGOTTEN, "the node is in use again, and not by us", recorded)
    if view.reason != recorded.reason:
        return _again(recorded, view, bench)
    return _counted(recorded, bench, healthy=healthy and may_resume(view, recorded.reason))


def _counted(recorded: DrainRecord, bench: Bench, *, healthy: bool) -> Acted:
    """Count a pass of a node that our drain keeps out; take that back after enough in a row.

    Not where that was done too often already: then somebody has to look at the node.
    """
    passes, needed = recorded.passes + 1 if healthy else 0, bench.gate.passes_to_resume
    if passes < needed:
        bench.keep(replace(recorded, passes=passes, stage=Stage.SET.value))
        return Acted(Did.NOTHING, f"our drain stands: {passes} of {needed} passes in a row")
    why = _resumed(recorded, bench)
    if why is not None:
        kept = replace(recorded, passes=passes, stage=Stage.SET.value, kept=why)
        bench.keep(kept)
        return Acted(Did.NOTHING if recorded.kept else Did.KEPT, f"our drain stands: {why}", kept)
    bench.keep(None)
    return Acted(Did.RESUMED, f"{passes} health checks passed in a row", recorded)


def _resumed(recorded: DrainRecord, bench: Bench) -> str | None:
    """Take the drain back and count that; return why not, where it was done too often already.

    What cannot be counted is not taken back.

    Raises:
        SlurmError: slurmctld does not answer or refuses.
    """
    gate, now_us = bench.gate, bench.clock.now_us()
    try:
        before = read_resumes(gate.state_dir, uid=gate.uid)
    except ProbeError as exc:
        return str(exc)
    try:
        repairs = read_state(gate.state_dir, gate.uid).repairs
    except StateError:
        repairs = ()
    why = came_back_too_often(
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
        bench.scontrol.resume(recorded.node)
    except SlurmError:
        with contextlib.suppress(ProbeError):
            write_resumes(gate.state_dir, before)
        raise
    return None


def _again(recorded: DrainRecord, view: NodeView, bench: Bench) -> Acted:
    """Bring the reason of *recorded* to slurmctld, unless the node has got somebody else's.

    Once slurmctld knew our reason, any other is one that somebody gave.
    """
    was_set = recorded.stage == Stage.SET
    replaces = () if was_set else recorded.replaces
    step = next_step(view, recorded.reason, replaces=replaces, was_set=was_set)
    if step is Step.SET:
        return _publish(recorded, bench)
    if step is Step.YIELD:
        bench.keep(None)
        return Acted(Did.FORGOTTEN, f"somebody else drained the node: {view.reason}", recorded)
    return Acted(Did.NOTHING, f"slurmctld says {view.reason}")


def _publish(drain: DrainRecord, bench: Bench) -> Acted:
    ended = publish(drain, bench.scontrol, lambda: drain, bench.patience, bench.clock)
    if ended.step is Step.DONE:
        bench.keep(replace(drain, stage=Stage.SET.value))
        return Acted(Did.DRAINED, drain.reason, drain)
    if ended.step in {Step.YIELD, Step.LIFTED}:
        bench.keep(None)
        return Acted(Did.FORGOTTEN, "somebody else drained or resumed the node", drain)
    return Acted(Did.NOTHING, ended.trouble or "slurmctld was not told")
