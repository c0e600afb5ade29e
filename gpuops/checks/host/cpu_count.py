"""Are all processors there and online?"""

from gpuops.checks.core.check import (
    Check,
    ExpectedSubject,
    JudgeContext,
    NoParameters,
    Probe,
    exactly,
    skipped,
)
from gpuops.host.kernel_state import Cpu, read_cpu
from gpuops.model import FailureClass, Finding

LOOK = Probe(
    "cpu",
    Cpu,
    lambda machine, _budget_s: read_cpu(machine.root),
    sources=("/sys/devices/system/cpu", "/sys/devices/system/clocksource"),
)


def judge(facts: Cpu, _parameters: NoParameters, case: JudgeContext) -> list[Finding]:
    """Return one finding: fewer logical processors online than ``cpu_count`` fail."""
    subject = ExpectedSubject(
        check="cpu_count", entity=case.node, failure_class=FailureClass.HOST_CONFIG, unit="CPUs"
    )
    if facts.online is None:
        return [skipped(subject, "the kernel does not tell which CPUs are online")]
    text = f"{facts.online} CPUs online"
    if facts.present is not None and facts.present > facts.online:
        text += f", {facts.present - facts.online} more are present and offline"
    return [exactly(subject, facts.online, case.profile.cpu_count, text)]


CHECK = Check(
    name="cpu_count",
    about="as many logical CPUs online as the profile expects",
    look=LOOK,
    parameters=NoParameters,
    judge=judge,
)
