"""May memory that processes share, as that of checkpoints, be in huge pages?"""

from gpuops.checks.core.check import Check, JudgeContext, NoParameters, Probe, Subject, skipped
from gpuops.host.kernel_state import ShmemHugePages, read_shmem_huge_pages
from gpuops.model import FailureClass, Finding, Status


def judge(facts: ShmemHugePages, _parameters: NoParameters, context: JudgeContext) -> list[Finding]:
    """Return one finding: a pass, or a skip. It never warns, as the kernel's default is ``never``.

    Without huge pages a first start takes longer to allocate the memory of its checkpoints.
    """
    subject = Subject("shmem_huge_pages", context.node, FailureClass.HOST_CONFIG)
    if facts.setting is None:
        return [skipped(subject, "the kernel has no huge pages for shared memory")]
    text = f"shmem_enabled is {facts.setting}: checkpoints in memory are in"
    if facts.setting in {"never", "deny"}:
        return [skipped(subject, f"{text} pages of the base size; advise allows huge ones")]
    source = "Linux: Documentation/admin-guide/mm/transhuge.rst"
    threshold = "not never"
    message = f"{text} huge pages"
    return [subject.compared(Status.PASS, facts.setting, threshold, source, message)]


CHECK = Check(
    name="shmem_huge_pages",
    about="whether checkpoints in memory may be in huge pages",
    probe=Probe(
        "shmem_huge_pages",
        ShmemHugePages,
        lambda machine, _budget_s: read_shmem_huge_pages(machine.root),
        sources=("/sys/kernel/mm/transparent_hugepage",),
    ),
    parameters=NoParameters,
    judge=judge,
)
