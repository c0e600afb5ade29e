"""Does the kernel have all the memory of this machine?"""

from gpuops.checks.core.check import Check, JudgeContext, NoParameters, Subject, at_least, in_gb
from gpuops.checks.host.memory import PROBE
from gpuops.host.procfs import Memory
from gpuops.model import FailureClass, Finding
from gpuops.units import format_bytes


def judge(facts: Memory, _parameters: NoParameters, context: JudgeContext) -> list[Finding]:
    """Return one finding: less than the profile's ``memory_bytes_min`` fails.

    ``MemTotal`` excludes the kernel's image and the firmware's share, and is some percent less than
    the size of the modules: the profile's number must allow for that.
    """
    subject = Subject("memory_size", context.node, FailureClass.HOST_DIMM, "GB")
    size_gb = facts.total_bytes / 1e9
    text = f"{format_bytes(facts.total_bytes)} of memory"
    return [at_least(subject, size_gb, in_gb(context.profile.memory_bytes_min), text)]


CHECK = Check(
    name="memory_size",
    about="as much memory as the profile expects",
    probe=PROBE,
    parameters=NoParameters,
    judge=judge,
)
