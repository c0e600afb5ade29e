"""Are all processors present and online?"""

from gpuops.checks.core.check import (
    Check,
    JudgeContext,
    NoParameters,
    Probe,
    Subject,
    exactly,
    skipped,
)
from gpuops.host.kernel_state import Cpu, read_cpu
from gpuops.model import FailureClass, Finding

PROBE = Probe(
    "cpu",
    Cpu,
    lambda machine, _budget_s: read_cpu(machine.root),
    sources=("/sys/devices/system/cpu", "/sys/devices/system/clocksource"),
)


def judge(facts: Cpu, _parameters: NoParameters, context: JudgeContext) -> list[Finding]:
    """Return one finding: fewer logical processors online than ``cpu_count`` fail."""
    subject = Subject("cpu_count", context.node, FailureClass.HOST_CONFIG, "CPUs")
    if facts.online is None:
        return [skipped(subject, "the kernel does not report which CPUs are online")]
    text = f"{facts.online} CPUs online"
    if facts.present is not None and facts.present > facts.online:
        text += f", {facts.present - facts.online} more are present and offline"
    return [exactly(subject, facts.online, context.profile.cpu_count, text)]


CHECK = Check(
    name="cpu_count",
    about="as many logical CPUs online as the profile expects",
    probe=PROBE,
    parameters=NoParameters,
    judge=judge,
)
