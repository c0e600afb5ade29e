"""Is swap on or off, as the profile wants it?"""

from gpuops.checks.core.check import Check, JudgeContext, NoParameters, Probe
from gpuops.host.kernel_state import Swap, read_swap
from gpuops.model import FailureClass, Finding, Status
from gpuops.units import format_bytes


def judge(facts: Swap, _parameters: NoParameters, context: JudgeContext) -> list[Finding]:
    """Return one finding; swap that is not as the profile wants it warns."""
    wanted, size_bytes = context.profile.swap, sum(area.size_bytes for area in facts.areas)
    used_bytes = sum(area.used_bytes for area in facts.areas)
    text = "no swap"
    if facts.areas:
        text = f"{format_bytes(size_bytes)} of swap, {format_bytes(used_bytes)} in use"
    if wanted is None:
        return [
            Finding(
                check="swap",
                entity=context.node,
                status=Status.SKIP,
                message=f"{text}; no profile tells what is expected",
            )
        ]
    status = Status.PASS if wanted.value == bool(facts.areas) else Status.WARN
    return [
        Finding(
            check="swap",
            entity=context.node,
            status=status,
            value="on" if facts.areas else "off",
            threshold="on" if wanted.value else "off",
            source=wanted.source,
            message=text,
            failure_class=None if status is Status.PASS else FailureClass.HOST_CONFIG,
        )
    ]


CHECK = Check(
    name="swap",
    about="swap is on or off, as the profile wants it",
    probe=Probe(
        "swap", Swap, lambda machine, _budget_s: read_swap(machine.root), sources=("/proc/swaps",)
    ),
    parameters=NoParameters,
    judge=judge,
)
