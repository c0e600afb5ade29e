"""What the gate does about a check run: whether the job may start here, and whose drain is whose.

Pure: the findings, the mode, the fuse's answer and slurmctld's state are arguments.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from enum import StrEnum

from gpuops.config.resolve import GateMode
from gpuops.model import ActionKind, FailureClass, Finding, Status
from gpuops.slurm.reason import OF_SLURMD, is_ours, reason_text
from gpuops.slurm.scontrol import SlurmNode

RESUMES_WINDOW_S = 86400.0

# Actions for which the node must not run jobs. Of other classes a finding is on record, no more.
TAKES_NODE_OUT = frozenset(
    {
        ActionKind.DRAIN,
        ActionKind.RESET_GPU,
        ActionKind.REBOOT,
        ActionKind.EXCLUDE_NODE,
        ActionKind.RMA,
    }
)

# Here the driver, the device or the kernel itself says that it is broken. All other failures are a
# number held against a limit, and a wrong limit fails every node of a cluster at once.
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
# Checks that only repeat what the driver says, whatever the class of it is.
HARDWARE_REPORTED_CHECKS = frozenset({"gpu_recovery_action"})


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainCause:
    """The finding for which a node goes out, and what its runbook says to do."""

    finding: Finding
    failure_class: FailureClass
    action: ActionKind

    @property
    def hardware_reported(self) -> bool:
        """Say whether the hardware, its driver or the kernel reported it, and no limit of ours."""
        return (
            self.failure_class in HARDWARE_REPORTED
            or self.finding.check in HARDWARE_REPORTED_CHECKS
        )

    def reason(self, incident: str | None) -> str:
        """Return the reason of the drain; *incident* is the id of what it belongs to."""
        value = self.finding.value
        text = f"{value:g}" if isinstance(value, float) else None if value is None else str(value)
        entity = self.finding.entity.id
        return reason_text(self.finding.check, entity, text, self.action.value, incident)


def find_drain_cause(
    findings: Iterable[Finding], actions: dict[FailureClass, ActionKind]
) -> DrainCause | None:
    """Return the failure for which the node must run no jobs, None where there is none.

    Of several, one that the hardware reported goes first. *actions* are those of the runbooks;
    a class without a runbook takes no node out, as nobody has said what it means.
    """
    causes = [
        DrainCause(finding=finding, failure_class=kind, action=actions[kind])
        for finding in findings
        if finding.status is Status.FAIL
        and (kind := finding.failure_class) is not None
        and actions.get(kind) in TAKES_NODE_OUT
    ]
    return min(causes, key=lambda cause: not cause.hardware_reported, default=None)


class DrainOutcome(StrEnum):
    """What becomes of a node with a cause to drain it.

    ``kept``: it passes again, but has come back too often.
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
    """What the store said of a drain. ``granted`` None: it gave no answer; ``why`` says so."""

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
        """Say whether the node goes out; in a prolog, that the job does not start here."""
        return self.outcome is DrainOutcome.DRAIN


def decide_drain(
    cause: DrainCause | None,
    mode: GateMode,
    permission: PermitReply,
    skip_reason: str | None = None,
) -> DrainDecision:
    """Return what to do with a node that fails for *cause*.

    Without an answer about the fuse only the hardware's own verdict drains. *skip_reason* says why
    this node is not to be drained now, as where it is drained already.
    """
    if cause is None:
        return DrainDecision(DrainOutcome.START, "nothing that takes a node out")
    if mode is GateMode.OBSERVE:
        return DrainDecision(DrainOutcome.WOULD_DRAIN, "gate.mode is observe")
    if skip_reason is not None:
        return DrainDecision(DrainOutcome.LEFT_ALONE, skip_reason)
    if permission.granted is not None:
        return DrainDecision(
            DrainOutcome.DRAIN if permission.granted else DrainOutcome.TRIPPED, permission.why
        )
    if cause.hardware_reported:
        why = f"no permit ({permission.why}), but the hardware's own verdict"
        return DrainDecision(DrainOutcome.DRAIN, why)
    return DrainDecision(
        DrainOutcome.NO_PERMIT, f"no permit ({permission.why}), and only a limit's verdict"
    )


class DrainStep(StrEnum):
    """What to do next about a drain of ours that is wanted."""

    WAIT = "wait"
    SET = "set"
    DONE = "done"
    YIELD = "yield"
    LIFTED = "lifted"


def next_drain_step(
    view: SlurmNode, reason: str, *, replaces: Collection[str], was_set: bool
) -> DrainStep:
    """Return what to do so that *view* is drained for *reason*, and never over another's reason.

    Args:
        view: The node as slurmctld sees it now.
        reason: Ours.
        replaces: The reasons that ours may take the place of, to the letter.
        was_set: It has been set before: where it is gone, an administrator removed it.
    """
    if view.drained:
        if view.reason == reason:
            return DrainStep.DONE
        return DrainStep.SET if view.reason in replaces else DrainStep.YIELD
    if was_set:
        return DrainStep.LIFTED
    if view.reason is None:
        return DrainStep.SET
    # A node that is down keeps slurmctld's reason; it is asked again when it is back.
    return DrainStep.WAIT if not view.registered else DrainStep.YIELD


def replaceable_reasons(
    hook: str, earlier: str | None, earlier_replaces: Collection[str]
) -> list[str]:
    """Return the reasons that a drain wanted by *hook* may take the place of.

    That is slurmd's word for our own failed hook, and *earlier*, the reason of a drain that we
    wanted shortly before, with slurmd's words that this one might replace: after a prolog that
    fails, the epilog runs, and fails as well.
    """
    slurmd_reasons = [OF_SLURMD[hook]] if hook in OF_SLURMD else []
    slurmd_reasons += [
        slurmd_reason for slurmd_reason in earlier_replaces if slurmd_reason in OF_SLURMD.values()
    ]
    return list(dict.fromkeys([*slurmd_reasons, *([earlier] if earlier else [])]))


def may_resume(view: SlurmNode, reason: str) -> bool:
    """Say whether the drain of *view* is ours alone to take back: the very reason we recorded."""
    return view.drained and not view.down and is_ours(reason) and view.reason == reason


def resume_refusal(
    resumed_us: Iterable[int], repaired_us: Iterable[int], now_us: int, limit: int
) -> str | None:
    """Return why a drain is not taken back once more; None: it may be.

    Args:
        resumed_us: When earlier drains for the same check were taken back.
        repaired_us: When the node was repaired: what was before counts no longer.
        now_us: Now.
        limit: So many may be taken back within `RESUMES_WINDOW_S`.
    """
    since_us = max([now_us - round(RESUMES_WINDOW_S * 1e6), *repaired_us])
    count = sum(since_us < item <= now_us for item in resumed_us)
    if count < limit:
        return None
    times = "once" if count == 1 else f"{count} times"
    text = f"taken back {times} in {RESUMES_WINDOW_S / 3600:g} h for the same check"
    return f"{text}; `gpuops repair` or a resume by hand ends it"


def proves_healthy(findings: Iterable[Finding], check: str) -> bool:
    """Say whether nothing fails and the check that drained the node was really answered."""
    statuses: list[Status] = []
    for finding in findings:
        if finding.status is Status.FAIL:
            return False
        if finding.check == check:
            statuses.append(finding.status)
    return bool(statuses) and max(statuses) <= Status.WARN and Status.PASS in statuses
