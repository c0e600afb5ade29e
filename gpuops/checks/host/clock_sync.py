"""Is the clock synchronised? Timestamps across nodes and munge credentials lean on it."""

from dataclasses import dataclass

from gpuops.checks.core.check import Check, CheckLimit, JudgeContext, Probe
from gpuops.host.clock_state import KernelClockState, read_clock_state
from gpuops.model import FailureClass, Finding, Status
from gpuops.units import format_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """``error_max_s`` is the kernel's bound on the clock's error, in seconds."""

    error_max_s: CheckLimit


def judge(facts: KernelClockState, parameters: Parameters, context: JudgeContext) -> list[Finding]:
    """Return one finding; the kernel's own verdict comes first, and warns only."""
    limit = parameters.error_max_s
    if not facts.synchronised:
        return [
            Finding(
                check="clock_sync",
                entity=context.node,
                status=Status.WARN,
                value="unsynchronised",
                threshold="synchronised",
                source="kernel STA_UNSYNC",
                message="nothing disciplines this clock: see chronyd, ntpd or timesyncd",
                failure_class=FailureClass.HOST_CLOCK,
            )
        ]
    status = limit.ceiling(facts.error_max_s)
    return [
        Finding(
            check="clock_sync",
            entity=context.node,
            status=status,
            value=round(facts.error_max_s, 6),
            unit="s",
            threshold=limit.text("<", "s"),
            source=limit.source,
            message=f"synchronised to within {format_seconds(facts.error_max_s)}, "
            f"{facts.offset_s * 1000:+.3f} ms to correct",
            failure_class=None if status is Status.PASS else FailureClass.HOST_CLOCK,
        )
    ]


CHECK = Check(
    name="clock_sync",
    about="clock synchronised, by the kernel's own account",
    probe=Probe(
        "clock",
        KernelClockState,
        lambda machine, _budget_s: read_clock_state(machine.root),
        sources=("adjtimex(2)",),
    ),
    parameters=Parameters,
    judge=judge,
)
