"""Which frequency governor do the processors use?"""

from gpuops.checks.core.check import Check, JudgeContext, NoParameters, Subject, one_of, skipped
from gpuops.checks.host.cpu_count import PROBE
from gpuops.host.kernel_state import Cpu
from gpuops.model import FailureClass, Finding, Status


def judge(facts: Cpu, _parameters: NoParameters, context: JudgeContext) -> list[Finding]:
    """Return a finding for each governor in use; one that the profile does not name warns.

    It never fails: the node is only slower.
    """
    subject = Subject("cpu_governor", context.node, FailureClass.HOST_CONFIG)
    if not facts.governors:
        return [skipped(subject, "no frequency scaling, as in a virtual machine")]
    return [
        one_of(
            subject,
            name,
            context.profile.cpu_governor,
            f"governor {name} on {count} of {sum(facts.governors.values())} frequency policies",
            bad=Status.WARN,
        )
        for name, count in facts.governors.items()
    ]


CHECK = Check(
    name="cpu_governor",
    about="the CPUs' frequency governor is the profile's",
    probe=PROBE,
    parameters=NoParameters,
    judge=judge,
)
