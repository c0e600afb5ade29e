"""Is the clock synchronised? Timestamps across nodes and munge credentials depend on it."""

from dataclasses import dataclass, replace

from gpuops.checks.core.check import Check, CheckLimit, JudgeContext, Probe, Subject
from gpuops.host.clock_state import KernelClockState, read_clock_state
from gpuops.model import FailureClass, Finding, Status
from gpuops.units import format_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """``error_max_s`` is the kernel's bound on the clock's error, in seconds."""

    error_max_s: CheckLimit


def judge(facts: KernelClockState, parameters: Parameters, context: JudgeContext) -> list[Finding]:
    """Return one finding; the kernel's unsynchronised flag comes first, and only warns."""
    subject = Subject("clock_sync", context.node, FailureClass.HOST_CLOCK)
    if not facts.synchronised:
        text = "nothing synchronises this clock: see chronyd, ntpd or timesyncd"
        source = "kernel STA_UNSYNC"
        return [subject.compared(Status.WARN, "unsynchronised", "synchronised", source, text)]
    text = (
        f"synchronised to within {format_seconds(facts.error_max_s)}, "
        f"{facts.offset_s * 1000:+.3f} ms to correct"
    )
    limit, error_s = parameters.error_max_s, facts.error_max_s
    return [replace(subject, unit="s").below(limit, error_s, text, digits=6, unit="s")]


CHECK = Check(
    name="clock_sync",
    about="the clock is synchronised, as the kernel reports it",
    probe=Probe(
        "clock",
        KernelClockState,
        lambda machine, _budget_s: read_clock_state(machine.root),
        sources=("adjtimex(2)",),
    ),
    parameters=Parameters,
    judge=judge,
)
