"""Which clock source does the kernel use? A slow one makes every time stamp expensive."""

from gpuops.checks.core.check import Check, JudgeContext, NoParameters, Subject, one_of, skipped
from gpuops.checks.host.cpu_count import PROBE
from gpuops.host.kernel_state import Cpu
from gpuops.model import FailureClass, Finding, Status


def judge(facts: Cpu, _parameters: NoParameters, context: JudgeContext) -> list[Finding]:
    """Return one finding; a source that the profile does not name warns.

    The kernel leaves ``tsc`` for ``hpet`` or ``acpi_pm`` when it finds the processor's counter
    unstable (Documentation/virt/kvm/x86/timekeeping of Linux); virtual machines have sources of
    their own, so that a difference only warns.
    """
    subject = Subject("clock_source", context.node, FailureClass.HOST_CONFIG)
    if facts.clock_source is None:
        return [skipped(subject, "the kernel does not report its clock source")]
    others = ", ".join(facts.clock_sources)
    text = f"clock source {facts.clock_source}" + (f" (available: {others})" if others else "")
    return [
        one_of(subject, facts.clock_source, context.profile.clock_source, text, bad=Status.WARN)
    ]


CHECK = Check(
    name="clock_source",
    about="the kernel's clock source is the profile's",
    probe=PROBE,
    parameters=NoParameters,
    judge=judge,
)
