"""Is swap on or off, as in the profile?"""

from gpuops.checks.core.check import (
    NOT_IN_PROFILE,
    Check,
    JudgeContext,
    NoParameters,
    Probe,
    Subject,
    skipped,
)
from gpuops.host.kernel_state import Swap, read_swap
from gpuops.model import FailureClass, Finding, Status
from gpuops.units import format_bytes


def judge(facts: Swap, _parameters: NoParameters, context: JudgeContext) -> list[Finding]:
    """Return one finding; a difference from the profile warns."""
    expected, size_bytes = context.profile.swap, sum(area.size_bytes for area in facts.areas)
    used_bytes = sum(area.used_bytes for area in facts.areas)
    text = "no swap"
    if facts.areas:
        text = f"{format_bytes(size_bytes)} of swap, {format_bytes(used_bytes)} in use"
    subject = Subject("swap", context.node, FailureClass.HOST_CONFIG)
    if expected is None:
        return [skipped(subject, f"{text}; {NOT_IN_PROFILE}")]
    status = Status.PASS if expected.value == bool(facts.areas) else Status.WARN
    value, threshold = ("on" if is_on else "off" for is_on in (facts.areas, expected.value))
    return [subject.compared(status, value, threshold, expected.source, text)]


CHECK = Check(
    name="swap",
    about="swap is on or off, as in the profile",
    probe=Probe(
        "swap", Swap, lambda machine, _budget_s: read_swap(machine.root), sources=("/proc/swaps",)
    ),
    parameters=NoParameters,
    judge=judge,
)
