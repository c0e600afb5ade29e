"""Do the software RAID arrays run with all their members?"""

from gpuops.checks.core.check import Check, JudgeContext, NoParameters, Probe, Subject, skipped
from gpuops.host.storage.nvme import Array, MdRaid, read_mdraid
from gpuops.model import Entity, EntityKind, FailureClass, Finding, Status


def judge(facts: MdRaid, _parameters: NoParameters, context: JudgeContext) -> list[Finding]:
    """Return a finding for each array that is not complete, else one for all.

    One that the kernel stopped (``inactive``, ``broken``) fails. A degraded one still has all its
    data, and only warns.
    """
    subject = Subject("md_raid", context.node, FailureClass.HOST_DISK)
    if not facts.arrays:
        return [skipped(subject, "no software RAID")]
    findings = [found for array in facts.arrays if (found := _problem(array)) is not None]
    if findings:
        return findings
    named = ", ".join(
        array.name + (f" ({array.work})" if array.work else "") for array in facts.arrays
    )
    return [
        Finding(
            check="md_raid",
            entity=context.node,
            status=Status.PASS,
            source="kernel (mdstat)",
            message=f"complete: {named}",
        )
    ]


def _problem(array: Array) -> Finding | None:
    work = f", {array.work}" if array.work else ""
    lost = f", failed: {', '.join(array.failed)}" if array.failed else ""
    if array.state != "active":
        return _finding(array, Status.FAIL, "active", f"is {array.state}{lost}{work}")
    if array.wanted is not None and array.working is not None and array.working < array.wanted:
        text = f"runs on {array.working} of {array.wanted} members{lost}{work}"
        return _finding(array, Status.WARN, f"{array.wanted} members", text)
    if array.failed:
        return _finding(array, Status.WARN, "no failed member", f"is active{lost}{work}")
    return None


def _finding(array: Array, status: Status, threshold: str, message: str) -> Finding:
    text = f"{array.name} ({array.level or 'no level'}) {message}"
    entity = Entity(EntityKind.DISK, array.name)
    subject = Subject("md_raid", entity, FailureClass.HOST_DISK, hardware_reported=True)
    return subject.compared(status, array.state, threshold, "kernel (mdstat)", text)


CHECK = Check(
    name="md_raid",
    about="software RAID arrays run with all their members",
    probe=Probe(
        "mdraid",
        MdRaid,
        lambda machine, _budget_s: read_mdraid(machine.root),
        sources=("/proc/mdstat",),
    ),
    parameters=NoParameters,
    judge=judge,
)
