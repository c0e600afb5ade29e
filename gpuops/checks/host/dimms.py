"""Are all memory modules present and of the right size, as the firmware reports it?"""

from collections import Counter
from dataclasses import replace

from gpuops.checks.core.check import (
    Check,
    JudgeContext,
    NoParameters,
    Probe,
    Subject,
    at_least,
    exactly,
    in_gb,
    skipped,
)
from gpuops.host.memory_modules import Dimms, read_dimms
from gpuops.model import FailureClass, Finding, Status
from gpuops.units import format_bytes


def judge(facts: Dimms, _parameters: NoParameters, context: JudgeContext) -> list[Finding]:
    """Return a finding about the number of modules, and one for each that is too small.

    Sizes and slots: DMTF DSP0134, §7.18 Memory Device.
    """
    subject = Subject("dimms", context.node, FailureClass.HOST_DIMM, "modules")
    fitted = [slot for slot in facts.slots if slot.size_bytes]
    if not fitted:
        return [skipped(subject, "the firmware describes no memory module")]
    sizes = Counter(slot.size_bytes or 0 for slot in fitted)
    kinds = " and ".join(f"{count} x {format_bytes(size)}" for size, count in sorted(sizes.items()))
    text = f"{kinds} in {len(facts.slots)} slots"
    findings = [exactly(subject, len(fitted), context.profile.dimm_count, text)]
    if context.profile.dimm_bytes is not None:
        each = replace(subject, unit="GB")
        sized = (
            at_least(
                each,
                (slot.size_bytes or 0) / 1e9,
                in_gb(context.profile.dimm_bytes),
                f"{slot.locator or 'a module'} has {format_bytes(slot.size_bytes or 0)}",
            )
            for slot in fitted
        )
        findings += [finding for finding in sized if finding.status is not Status.PASS]
    return findings


CHECK = Check(
    name="dimms",
    about="number and size of the memory modules, as the firmware reports them to root",
    probe=Probe(
        "dimms",
        Dimms,
        lambda machine, _budget_s: read_dimms(machine.root),
        sources=("/sys/firmware/dmi/entries/17-*/raw",),
    ),
    parameters=NoParameters,
    judge=judge,
)
