"""Are the kernel modules of the profile loaded?"""

from gpuops.checks.core.check import Check, JudgeContext, NoParameters, Probe, Subject, skipped
from gpuops.checks.core.profile import Profile
from gpuops.host.kernel_state import Modules, read_modules
from gpuops.model import FailureClass, Finding, Status

_THRESHOLD = "loaded or built in"


def judge(facts: Modules, _parameters: NoParameters, context: JudgeContext) -> list[Finding]:
    """Return a finding for each module that is expected and absent, else one for all."""
    subject = Subject("kernel_modules", context.node, FailureClass.HOST_CONFIG)
    expected = context.profile.kernel_modules
    if expected is None or not expected.value:
        return [skipped(subject, "the profile names no kernel module")]
    absent = [name for name in facts.absent if name in expected.value]
    if not absent:
        text = f"loaded: {', '.join(expected.value)}"
        return [subject.compared(Status.PASS, None, _THRESHOLD, expected.source, text)]
    return [
        subject.compared(Status.FAIL, name, _THRESHOLD, expected.source, f"{name} is not loaded")
        for name in absent
    ]


def inputs(_parameters: NoParameters, profile: Profile) -> tuple[str, ...]:
    """Return the names of the modules to look for."""
    return () if profile.kernel_modules is None else profile.kernel_modules.value


CHECK = Check(
    name="kernel_modules",
    about="the kernel modules of the profile are loaded",
    probe=Probe(
        "kernel_modules",
        Modules,
        lambda machine, _budget_s: read_modules(machine.root, machine.inputs),
        sources=("/sys/module",),
    ),
    parameters=NoParameters,
    judge=judge,
    inputs=inputs,
)
