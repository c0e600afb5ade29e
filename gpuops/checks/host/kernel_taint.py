"""Has the kernel marked itself as tainted?"""

from dataclasses import dataclass

from gpuops.checks.core.check import Check, JudgeContext, Probe, Subject
from gpuops.host.kernel_state import Taint, read_taint
from gpuops.model import FailureClass, Finding, Status

# Bit, letter and meaning: Documentation/admin-guide/tainted-kernels of Linux. The proprietary
# driver of NVIDIA sets P, O and E on every healthy node.
MEANINGS = {
    0: "P proprietary module",
    1: "F module was forced in",
    2: "S processor or board out of its specification",
    3: "R module was forced out",
    4: "M machine check",
    5: "B bad page",
    6: "U asked for from user space",
    7: "D oops",
    8: "A ACPI table was overridden",
    9: "W warning",
    10: "C staging driver",
    11: "I firmware bug worked around",
    12: "O module from outside the kernel",
    13: "E unsigned module",
    14: "L soft lockup",
    15: "K live patch",
    16: "X of the distribution",
    17: "T randomised structures",
    18: "N test",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """Bits of the mask that warn and that fail, and the source of that choice."""

    source: str
    warn_bits: tuple[int, ...] = ()
    fail_bits: tuple[int, ...] = ()


def judge(facts: Taint, parameters: Parameters, context: JudgeContext) -> list[Finding]:
    """Return one finding; bits that the suite does not name are reported and pass."""
    bits = [bit for bit in range(facts.mask.bit_length()) if facts.mask >> bit & 1]
    status = Status.PASS
    if any(bit in parameters.fail_bits for bit in bits):
        status = Status.FAIL
    elif any(bit in parameters.warn_bits for bit in bits):
        status = Status.WARN
    judged = sorted({*parameters.warn_bits, *parameters.fail_bits})
    named = ", ".join(MEANINGS.get(bit, f"bit {bit}") for bit in bits)
    threshold = f"none of bits {', '.join(map(str, judged))}"
    text = f"tainted: {named}" if bits else "not tainted"
    subject = Subject("kernel_taint", context.node, FailureClass.KERNEL_FAULT, "mask")
    return [subject.compared(status, facts.mask, threshold, parameters.source, text)]


CHECK = Check(
    name="kernel_taint",
    about="the kernel has seen no machine check, bad page, oops or lockup since boot",
    probe=Probe(
        "taint",
        Taint,
        lambda machine, _budget_s: read_taint(machine.root),
        sources=("/proc/sys/kernel/tainted",),
    ),
    parameters=Parameters,
    judge=judge,
)
