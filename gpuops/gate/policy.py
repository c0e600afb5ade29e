"""What the gate does after a check run: whether the job may start, and who owns a drain.

Pure: the findings, the mode, the fuse's reply and slurmctld's state are arguments.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from gpuops.config.resolve import GateMode
from gpuops.host.node_state import FleetCount
from gpuops.model import ActionKind, FailureClass, Finding, ReturnCondition, Status
from gpuops.slurm.reason import OF_SLURMD, is_ours, reason_text
from gpuops.slurm.scontrol import SlurmNode
from gpuops.store.fuse import CauseKind, FuseSettings

RESUMES_WINDOW_S = 86400.0

# Actions for which the node must not run jobs. Findings of other classes are only recorded.
DRAINING_ACTIONS = frozenset(
    {
        ActionKind.DRAIN,
        ActionKind.RESET_GPU,
        ActionKind.REBOOT,
        ActionKind.EXCLUDE_NODE,
        ActionKind.RMA,
    }
)

# No health check repeats these: a node drained for one returns by what its failure class asks for.
_ACTIVE_CHECKS = frozenset({"sweep"})

# A store that is silent for longer may have missed a storm.
FLEET_AGE_MAX_S = 900.0
# What one hook has time to ask for.
CAUSES_MAX = 4
_RANK = {CauseKind.HARDWARE: 0, CauseKind.SHARED: 1, CauseKind.LIMIT: 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainCause:
    """The finding for which a node is drained, and the action of its runbook."""

    finding: Finding
    failure_class: FailureClass
    action: ActionKind

    @property
    def kind(self) -> CauseKind:
        """Return who judged it, and whether other nodes may share its cause."""
        return CauseKind.of(self.finding)

    def reason(self, incident: str | None) -> str:
        """Return the reason of the drain; *incident* is the id of its incident."""
        value = self.finding.value
        text = f"{value:g}" if isinstance(value, float) else None if value is None else str(value)
        entity = self.finding.entity.id
        return reason_text(self.finding.check, entity, text, self.action.value, incident)


def find_drain_causes(
    findings: Iterable[Finding], actions: dict[FailureClass, ActionKind]
) -> list[DrainCause]:
    """Return the failures for which the node must run no jobs, at most one of each check.

    Those that the hardware reported come first: a fuse that one check trips must not hide what
    another finds. *actions* are those of the runbooks; a class without a runbook drains no node.
    """
    causes = [
        DrainCause(finding=finding, failure_class=kind, action=actions[kind])
        for finding in findings
        if finding.status is Status.FAIL
        and (kind := finding.failure_class) is not None
        and actions.get(kind) in DRAINING_ACTIONS
    ]
    causes.sort(key=lambda cause: _RANK[cause.kind])
    by_check: dict[str, DrainCause] = {}
    for cause in causes:
        by_check.setdefault(cause.finding.check, cause)
    return list(by_check.values())[:CAUSES_MAX]


class DrainOutcome(StrEnum):
    """What is done with a node that has a cause to drain it.

    ``kept``: it passes again, but was resumed too often.
    """

    START = "start"
    LEFT_ALONE = "left"
    WOULD_DRAIN = "would_drain"
    TRIPPED = "fused"
    NO_PERMIT = "no_permit"
    DRAIN = "drain"
    KEPT = "kept"


@dataclass(frozen=True, slots=True)
class PermitReply:
    """The store's reply about a drain. ``granted`` None: no reply; ``why`` says why not."""

    granted: bool | None
    why: str


NOT_ASKED = PermitReply(None, "not asked")


@dataclass(frozen=True, slots=True)
class DrainDecision:
    """What is done, and why in one sentence."""

    outcome: DrainOutcome
    why: str

    @property
    def drains(self) -> bool:
        """Return whether the node is drained; in a prolog, the job then does not start here."""
        return self.outcome is DrainOutcome.DRAIN


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetView:
    """What this node knows by itself of the fleet. ``count``: the store's last answer, if any."""

    settings: FuseSettings
    count: FleetCount | None
    now_us: int

    @property
    def recent_count(self) -> FleetCount | None:
        """Return the count if it is at most `FLEET_AGE_MAX_S` old."""
        if self.count is None or not 0 <= self.now_us - self.count.t_us <= FLEET_AGE_MAX_S * 1e6:
            return None
        return self.count


def decide_drain(
    causes: Sequence[DrainCause],
    mode: GateMode,
    replies: Sequence[PermitReply],
    fleet: FleetView,
    skip_reason: str | None = None,
) -> tuple[DrainCause | None, DrainDecision]:
    """Return what to do with a node that fails for *causes*, and for which of them.

    *replies*: of the store, to the first causes. *skip_reason* says why this node is not drained
    now, such as that it is drained already.
    """
    if not causes:
        return None, DrainDecision(DrainOutcome.START, "no failure that drains a node")
    if mode is GateMode.OBSERVE:
        return causes[0], DrainDecision(DrainOutcome.WOULD_DRAIN, "gate.mode is observe")
    if skip_reason is not None:
        return causes[0], DrainDecision(DrainOutcome.LEFT_ALONE, skip_reason)
    decided = [
        (cause, _decide_one(cause, reply, fleet))
        for cause, reply in zip(causes, replies or (NOT_ASKED,), strict=False)
    ]
    return next((item for item in decided if item[1].drains), decided[0])


def _decide_one(cause: DrainCause, reply: PermitReply, fleet: FleetView) -> DrainDecision:
    if reply.granted is not None:
        outcome = DrainOutcome.DRAIN if reply.granted else DrainOutcome.TRIPPED
        return DrainDecision(outcome, reply.why)
    no_permit = f"no permit ({reply.why})"
    if cause.kind is not CauseKind.HARDWARE:
        what = {
            CauseKind.SHARED: "other nodes may share the cause",
            CauseKind.LIMIT: "only a limit or an expectation of ours is missed",
        }[cause.kind]
        return DrainDecision(DrainOutcome.NO_PERMIT, f"{no_permit}, and {what}")
    why = f"{no_permit}, but the hardware itself reports the failure"
    count = fleet.recent_count
    if count is None:
        return DrainDecision(DrainOutcome.DRAIN, why)
    cap = fleet.settings.cap(count.seen)
    drained = f"{count.drained} nodes were drained at the last answer (gate.max_drained {cap})"
    outcome = DrainOutcome.DRAIN if count.drained < cap else DrainOutcome.NO_PERMIT
    return DrainDecision(outcome, f"{why}, and {drained}")


class DrainStep(StrEnum):
    """What to do next about a drain that we want."""

    WAIT = "wait"
    SET = "set"
    DONE = "done"
    YIELD = "yield"
    LIFTED = "lifted"


def next_drain_step(
    view: SlurmNode, reason: str, *, replaces: Collection[str], was_set: bool
) -> DrainStep:
    """Return what to do so that *view* is drained for *reason*, without replacing another's reason.

    Args:
        view: The node as slurmctld sees it now.
        reason: Ours.
        replaces: The reasons that ours may replace, verbatim.
        was_set: It was set before: if it is gone, an administrator removed it.
    """
    if view.drained:
        if view.reason == reason:
            return DrainStep.DONE
        return DrainStep.SET if view.reason in replaces else DrainStep.YIELD
    if was_set:
        return DrainStep.LIFTED
    if view.reason is None:
        return DrainStep.SET
    # A node that is down keeps slurmctld's reason; retry when it is back.
    return DrainStep.WAIT if not view.registered else DrainStep.YIELD


def replaceable_reasons(
    hook: str, earlier: str | None, earlier_replaces: Collection[str]
) -> list[str]:
    """Return the reasons that a drain by *hook* may replace.

    These are slurmd's reason for our own failed hook, and *earlier*, the reason of a drain that we
    wanted shortly before, with the slurmd reasons that it might replace: after a prolog that
    fails, the epilog runs, and fails as well.
    """
    slurmd_reasons = [OF_SLURMD[hook]] if hook in OF_SLURMD else []
    slurmd_reasons += [
        slurmd_reason for slurmd_reason in earlier_replaces if slurmd_reason in OF_SLURMD.values()
    ]
    return list(dict.fromkeys([*slurmd_reasons, *([earlier] if earlier else [])]))


def may_resume(view: SlurmNode, reason: str) -> bool:
    """Return whether the drain of *view* is ours: it has exactly the reason that we recorded."""
    return view.drained and not view.down and is_ours(reason) and view.reason == reason


def resume_refusal(
    resumed_us: Iterable[int], repaired_us: Iterable[int], now_us: int, limit: int
) -> str | None:
    """Return why the node is not resumed once more; None: it may be.

    Args:
        resumed_us: When the node was resumed after earlier drains for the same check.
        repaired_us: When the node was repaired: earlier resumes no longer count.
        now_us: Now.
        limit: How many resumes are allowed within `RESUMES_WINDOW_S`.
    """
    since_us = max([now_us - round(RESUMES_WINDOW_S * 1e6), *repaired_us])
    count = sum(since_us < item <= now_us for item in resumed_us)
    if count < limit:
        return None
    times = "once" if count == 1 else f"{count} times"
    text = f"resumed {times} in {RESUMES_WINDOW_S / 3600:g} h after drains for this check"
    return f"{text}; use `gpuops repair` or resume it by hand"


def return_refusal(
    condition: ReturnCondition,
    drained_us: int,
    tested_us: int | None,
    repaired_us: Iterable[int],
) -> str | None:
    """Return why a node whose checks pass again is not resumed; None: it may be.

    Args:
        condition: Of the failure class that it was drained for.
        drained_us: When it was drained.
        tested_us: When what *condition* asks for, a diagnostic or a burn-in, last passed there.
        repaired_us: When the node or a part of it was repaired, by a person's word.
    """
    if condition is ReturnCondition.CHECK or any(item > drained_us for item in repaired_us):
        return None
    if condition is ReturnCondition.PERSON:
        return "its failure class returns by a person: `gpuops repair`, or resume it by hand"
    if tested_us is not None and tested_us > drained_us:
        return None
    missing, command = "diagnostic", "`gpuops slurm diag` on the node (needs dcgmi)"
    if condition is ReturnCondition.BURNIN:
        missing, command = "burn-in", "`gpuops burnin` on the node, as root"
    return (
        f"no {missing} has passed since the drain: {command}, `gpuops repair`, or resume it by hand"
    )


def proves_healthy(findings: Iterable[Finding], check: str) -> bool:
    """Return whether nothing fails and the check that drained the node gave a result.

    A pair test gives none in a health check: there, nothing has to fail.
    """
    statuses: list[Status] = []
    for finding in findings:
        if finding.status is Status.FAIL:
            return False
        if finding.check == check:
            statuses.append(finding.status)
    if check in _ACTIVE_CHECKS:
        return True
    return bool(statuses) and max(statuses) <= Status.WARN and Status.PASS in statuses
