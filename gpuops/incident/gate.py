"""What the gate does about a check run: whether the job may start here, and whose drain is whose.

Pure: the findings, the mode, the fuse's answer and what slurmctld says are arguments.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from enum import StrEnum

from gpuops.config import Mode
from gpuops.model import ActionKind, FailureClass, Finding, Status
from gpuops.slurm.nodes import NodeView
from gpuops.slurm.reason import OF_SLURMD, is_ours, reason_text

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
OWN_VERDICT = frozenset(
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
OWN_VERDICT_CHECKS = frozenset({"gpu_recovery_action"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """The finding for which a node goes out, and what its runbook says to do."""

    finding: Finding
    failure_class: FailureClass
    action: ActionKind

    @property
    def own_verdict(self) -> bool:
        """Say whether the hardware, its driver or the kernel told of it, and no limit of ours."""
        return self.failure_class in OWN_VERDICT or self.finding.check in OWN_VERDICT_CHECKS

    def reason(self, incident: str | None) -> str:
        """Return the reason of the drain; *incident* is the id of what it belongs to."""
        value = self.finding.value
        text = f"{value:g}" if isinstance(value, float) else None if value is None else str(value)
        entity = self.finding.entity.id
        return reason_text(self.finding.check, entity, text, self.action.value, incident)


def cause_of(findings: Iterable[Finding], actions: dict[FailureClass, ActionKind]) -> Cause | None:
    """Return the failure for which the node must run no jobs, None where there is none.

    Of several, one that the hardware itself told goes first. *actions* are those of the runbooks;
    a class without a runbook takes no node out, as nobody has said what it means.
    """
    causes = [
        Cause(finding=finding, failure_class=kind, action=actions[kind])
        for finding in findings
        if finding.status is Status.FAIL
        and (kind := finding.failure_class) is not None
        and actions.get(kind) in TAKES_NODE_OUT
    ]
    return min(causes, key=lambda cause: not cause.own_verdict, default=None)


class Course(StrEnum):
    """What becomes of a node with a cause to drain it.

    ``kept``: it passes again, but has come back too often.
    """

    START = "start"
    LEFT = "left"
    WOULD_DRAIN = "would_drain"
    FUSED = "fused"
    NO_PERMIT = "no_permit"
    DRAIN = "drain"
    KEPT = "kept"


@dataclass(frozen=True, slots=True)
class Permission:
    """What the store said of a drain. ``granted`` None: it gave no answer; ``why`` says so."""

    granted: bool | None
    why: str


NOT_ASKED = Permission(None, "not asked")


@dataclass(frozen=True, slots=True)
class Decision:
    """What is done, and why in one sentence."""

    course: Course
    why: str

    @property
    def drains(self) -> bool:
        """Say whether the node goes out; in a prolog, that the job does not start here."""
        return self.course is Course.DRAIN


def decide(
    cause: Cause | None, mode: Mode, permission: Permission, left: str | None = None
) -> Decision:
    """Return what to do with a node that fails for *cause*.

    Without an answer about the fuse only the hardware's own verdict drains. *left* says why this
    node is not to be drained now, as where it is drained already.
    """
    if cause is None:
        return Decision(Course.START, "nothing that takes a node out")
    if mode is Mode.OBSERVE:
        return Decision(Course.WOULD_DRAIN, "gate.mode is observe")
    if left is not None:
        return Decision(Course.LEFT, left)
    if permission.granted is not None:
        return Decision(Course.DRAIN if permission.granted else Course.FUSED, permission.why)
    if cause.own_verdict:
        why = f"no permit ({permission.why}), but the hardware's own verdict"
        return Decision(Course.DRAIN, why)
    return Decision(Course.NO_PERMIT, f"no permit ({permission.why}), and only a limit's verdict")


class Step(StrEnum):
    """What to do next about a drain of ours that is wanted."""

    WAIT = "wait"
    SET = "set"
    DONE = "done"
    YIELD = "yield"
    LIFTED = "lifted"


def next_step(view: NodeView, reason: str, *, replaces: Collection[str], was_set: bool) -> Step:
    """Return what to do so that *view* is drained for *reason*, and never over somebody else's.

    Args:
        view: The node as slurmctld sees it now.
        reason: Ours.
        replaces: The reasons that ours may take the place of, to the letter.
        was_set: It has been set before: where it is gone, somebody took it back.
    """
    if view.drained:
        if view.reason == reason:
            return Step.DONE
        return Step.SET if view.reason in replaces else Step.YIELD
    if was_set:
        return Step.LIFTED
    if view.reason is None:
        return Step.SET
    # A node that is down keeps slurmctld's reason; it is asked again when it is back.
    return Step.WAIT if not view.registered else Step.YIELD


def replaceable(hook: str, earlier: str | None, earlier_replaces: Collection[str]) -> list[str]:
    """Return the reasons that a drain wanted by *hook* may take the place of.

    That is slurmd's word for our own failed hook, and *earlier*, the reason of a drain that we
    wanted shortly before, with slurmd's words that this one might replace: after a prolog that
    fails, the epilog runs, and fails as well.
    """
    words = [OF_SLURMD[hook]] if hook in OF_SLURMD else []
    words += [word for word in earlier_replaces if word in OF_SLURMD.values()]
    return list(dict.fromkeys([*words, *([earlier] if earlier else [])]))


def may_resume(view: NodeView, reason: str) -> bool:
    """Say whether the drain of *view* is ours alone to take back: the very reason we recorded."""
    return view.drained and not view.down and is_ours(reason) and view.reason == reason


def came_back_too_often(
    resumed_us: Iterable[int], repaired_us: Iterable[int], now_us: int, most: int
) -> str | None:
    """Return why a drain is not taken back once more; None: it may be.

    Args:
        resumed_us: When earlier drains for the same check were taken back.
        repaired_us: When somebody repaired the node: what was before counts no longer.
        now_us: Now.
        most: So many may be taken back within `RESUMES_WINDOW_S`.
    """
    since_us = max([now_us - round(RESUMES_WINDOW_S * 1e6), *repaired_us])
    count = sum(since_us < item <= now_us for item in resumed_us)
    if count < most:
        return None
    times = "once" if count == 1 else f"{count} times"
    told = f"taken back {times} in {RESUMES_WINDOW_S / 3600:g} h for the same check"
    return f"{told}; `gpuops repair` or a resume by hand ends it"


def proves_healthy(findings: Iterable[Finding], check: str) -> bool:
    """Say whether nothing fails and the check that drained the node was really answered."""
    statuses: list[Status] = []
    for finding in findings:
        if finding.status is Status.FAIL:
            return False
        if finding.check == check:
            statuses.append(finding.status)
    return bool(statuses) and max(statuses) <= Status.WARN and Status.PASS in statuses
