"""What the gate does after a check run: whether the job may start, and who owns a drain.

Pure: the findings, the mode, the fuse's reply and slurmctld's state are arguments.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from enum import StrEnum

from gpuops.config.resolve import GateMode
from gpuops.model import ActionKind, FailureClass, Finding, Status
from gpuops.slurm.reason import OF_SLURMD, is_ours, reason_text
from gpuops.slurm.scontrol import SlurmNode

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

# The driver, the device or the kernel itself reports these. All other failures compare a number
# with a limit, and a wrong limit fails every node of a cluster at once.
HARDWARE_REPORTED = frozenset(
    {
        FailureClass.GPU_FELL_OFF_BUS,
        FailureClass.GPU_ECC_UNCORRECTABLE,
        FailureClass.GPU_ROW_REMAP,
        FailureClass.GPU_NVSWITCH,
        FailureClass.GPU_INFOROM,
        FailureClass.GPU_GSP,
        FailureClass.HOST_DIMM,
        FailureClass.KERNEL_FAULT,
    }
)
# Checks that only repeat what the driver reports, of any class.
HARDWARE_REPORTED_CHECKS = frozenset({"gpu_recovery_action"})


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainCause:
    """The finding for which a node is drained, and the action of its runbook."""

    finding: Finding
    failure_class: FailureClass
    action: ActionKind

    @property
    def hardware_reported(self) -> bool:
        """Return whether the hardware, its driver or the kernel reported it, not our limit."""
        return (
            self.failure_class in HARDWARE_REPORTED
            or self.finding.check in HARDWARE_REPORTED_CHECKS
        )

    def reason(self, incident: str | None) -> str:
        """Return the reason of the drain; *incident* is the id of its incident."""
        value = self.finding.value
        text = f"{value:g}" if isinstance(value, float) else None if value is None else str(value)
        entity = self.finding.entity.id
        return reason_text(self.finding.check, entity, text, self.action.value, incident)


def find_drain_cause(
    findings: Iterable[Finding], actions: dict[FailureClass, ActionKind]
) -> DrainCause | None:
    """Return the failure for which the node must run no jobs, None if there is none.

    Of several, one that the hardware reported comes first. *actions* are those of the runbooks;
    a class without a runbook drains no node.
    """
    causes = [
        DrainCause(finding=finding, failure_class=kind, action=actions[kind])
        for finding in findings
        if finding.status is Status.FAIL
        and (kind := finding.failure_class) is not None
        and actions.get(kind) in DRAINING_ACTIONS
    ]
    return min(causes, key=lambda cause: not cause.hardware_reported, default=None)


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


def decide_drain(
    cause: DrainCause | None,
    mode: GateMode,
    permission: PermitReply,
    skip_reason: str | None = None,
) -> DrainDecision:
    """Return what to do with a node that fails for *cause*.

    Without a reply about the fuse, only a failure that the hardware reported drains the node.
    *skip_reason* says why this node is not drained now, such as that it is drained already.
    """
    if cause is None:
        return DrainDecision(DrainOutcome.START, "no failure that drains a node")
    if mode is GateMode.OBSERVE:
        return DrainDecision(DrainOutcome.WOULD_DRAIN, "gate.mode is observe")
    if skip_reason is not None:
        return DrainDecision(DrainOutcome.LEFT_ALONE, skip_reason)
    if permission.granted is not None:
        return DrainDecision(
            DrainOutcome.DRAIN if permission.granted else DrainOutcome.TRIPPED, permission.why
        )
    if cause.hardware_reported:
        why = f"no permit ({permission.why}), but the hardware itself reports the failure"
        return DrainDecision(DrainOutcome.DRAIN, why)
    return DrainDecision(
        DrainOutcome.NO_PERMIT, f"no permit ({permission.why}), and only a limit is exceeded"
    )


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


def proves_healthy(findings: Iterable[Finding], check: str) -> bool:
    """Return whether nothing fails and the check that drained the node gave a result."""
    statuses: list[Status] = []
    for finding in findings:
        if finding.status is Status.FAIL:
            return False
        if finding.check == check:
            statuses.append(finding.status)
    return bool(statuses) and max(statuses) <= Status.WARN and Status.PASS in statuses
