"""Is there memory left for a job?"""

from dataclasses import dataclass

from gpuops.checks.core.check import Check, CheckLimit, JudgeContext, Probe, Subject
from gpuops.host.procfs import Memory, read_memory
from gpuops.model import FailureClass, Finding
from gpuops.units import format_bytes

PROBE = Probe(
    "memory",
    Memory,
    lambda machine, _budget_s: read_memory(machine.root),
    sources=("/proc/meminfo",),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """``available_percent`` of all memory that programs can get without swapping."""

    available_percent: CheckLimit


def judge(facts: Memory, parameters: Parameters, context: JudgeContext) -> list[Finding]:
    """Return one finding about the node's available memory."""
    limit = parameters.available_percent
    percent = 100 * facts.available_bytes / facts.total_bytes
    text = f"{format_bytes(facts.available_bytes)} of {format_bytes(facts.total_bytes)} available"
    subject = Subject("memory", context.node, FailureClass.HOST_MEM_LOW, "%")
    threshold, shown = limit.text(">", "%"), round(percent, 1)
    return [subject.compared(limit.floor(percent), shown, threshold, limit.source, text)]


CHECK = Check(
    name="memory", about="available memory", probe=PROBE, parameters=Parameters, judge=judge
)
