"""A second look at failures that may pass by themselves, before they refuse a job or a node.

When an epilog runs, a process of the ended job may still be exiting, and its memory is given back
a moment later. Nothing is ended here: that is Slurm's part (``proctrack/cgroup``, ``KillWait``),
and what is left after it is a sign that it could not be done.
"""

from collections.abc import Callable
from dataclasses import replace

from gpuops.checks.core.runner import CheckRun
from gpuops.gate.node_state import READ_S
from gpuops.gate.session import CheckPlan, check_node
from gpuops.host.clock import Clock
from gpuops.model import FailureClass, Finding, Status

AGAIN_AFTER_S = 1.5
# A second look that has less is not begun.
LEAST_S = 0.5

Key = tuple[str, str, FailureClass | None]


def confirmed(
    plan: CheckPlan, ran: CheckRun, left_s: float, pause: Callable[[float], None], clock: Clock
) -> CheckRun:
    """Return *ran*, in which a failure that may pass by itself only warns unless it was seen twice.

    Args:
        plan: Of *ran*.
        ran: What the first look found.
        left_s: The seconds that are left for the pause and the second look.
        pause: Waits.
        clock: Dates the second run.
    """
    passing = {item.check.name for item in plan.suite.planned if item.check.passing}
    doubtful = tuple({item.check for item in _failures(ran) if item.check in passing})
    if not doubtful:
        return ran
    look_s = left_s - AGAIN_AFTER_S - READ_S
    if look_s < LEAST_S:
        return _settled(ran, doubtful, (), "no time was left for a second look")
    pause(AGAIN_AFTER_S)
    second = check_node(replace(plan, suite=plan.suite.only(doubtful).within(look_s)), clock)
    words = f"at a second look {AGAIN_AFTER_S:g} s later"
    return _settled(ran, doubtful, second.findings, words)


def _failures(ran: CheckRun) -> list[Finding]:
    return [item for item in ran.findings if item.status is Status.FAIL]


def _key(finding: Finding) -> Key:
    return finding.check, finding.entity.id, finding.failure_class


def _settled(
    ran: CheckRun, doubtful: tuple[str, ...], second: tuple[Finding, ...], words: str
) -> CheckRun:
    again = {_key(item): item for item in second if item.status is Status.FAIL}
    silent = {item.check for item in second if item.status is Status.UNKNOWN}

    def judged(first: Finding) -> Finding:
        if first.status is not Status.FAIL or first.check not in doubtful:
            return first
        found = again.get(_key(first))
        if found is not None:
            return replace(found, message=f"{found.message}, {words} too")
        if second and first.check not in silent:
            text = f"{first.message}; not any more {words}"
        else:
            text = f"{first.message}; {words}" + (", without an answer" if second else "")
        return replace(first, status=Status.WARN, message=text)

    return replace(ran, findings=tuple(judged(item) for item in ran.findings))
