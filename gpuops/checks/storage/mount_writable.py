"""Are the folders writable that jobs use? A file is created, synced and removed."""

from dataclasses import dataclass, replace

from gpuops.checks.core.check import Check, CheckLimit, JudgeContext, Probe, Subject, skipped
from gpuops.checks.core.profile import Profile
from gpuops.host.storage.write_test import WriteAnswer, Writes, read_writes
from gpuops.model import Entity, EntityKind, FailureClass, Finding, Status, UnknownReason
from gpuops.units import format_seconds

# errno(3). EACCES and EPERM are not a fault: a file server may give root no rights.
_CLASSES = {
    "EROFS": FailureClass.STORAGE_READ_ONLY,
    "ENOSPC": FailureClass.STORAGE_NO_SPACE,
    "EDQUOT": FailureClass.STORAGE_NO_SPACE,
}
_NOT_ALLOWED = frozenset({"EACCES", "EPERM"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """``paths``: the folders; ``elapsed_s`` of creating, syncing and removing a file."""

    elapsed_s: CheckLimit
    paths: tuple[str, ...] = ()
    source: str = "suite"


def judge(facts: Writes, parameters: Parameters, context: JudgeContext) -> list[Finding]:
    """Return a finding for each folder that cannot be written in time, else one for the slowest.

    A timeout fails only if the process was stuck inside the kernel.
    """
    subject = Subject("mount_writable", context.node, FailureClass.STORAGE_SHARED_FS)
    answers = [answer for answer in facts.answers if answer.path in parameters.paths]
    if not answers:
        return [skipped(subject, "the suite names no folder")]
    findings = [_judged(answer, parameters) for answer in answers]
    bad = [finding for finding in findings if finding.status is not Status.PASS]
    slowest = max(range(len(answers)), key=lambda n: answers[n].elapsed_s)
    return bad or [findings[slowest]]


def _judged(answer: WriteAnswer, parameters: Parameters) -> Finding:
    entity = Entity(EntityKind.MOUNT, answer.path)
    subject = Subject(
        "mount_writable", entity, FailureClass.STORAGE_SHARED_FS, "s", shared_cause=True
    )
    if answer.silent is not None:
        return Finding(
            check="mount_writable",
            entity=entity,
            status=Status.FAIL if answer.stuck else Status.UNKNOWN,
            source="kernel (process state)",
            message=f"writing in {answer.path} {answer.silent}",
            failure_class=FailureClass.STORAGE_SHARED_FS,
            unknown_reason=None if answer.stuck else UnknownReason.TIMEOUT,
            shared_cause=answer.stuck,
        )
    if answer.error is not None:
        denied = answer.error in _NOT_ALLOWED
        status = Status.UNKNOWN if denied else Status.FAIL
        kind = _CLASSES.get(answer.error, FailureClass.STORAGE_SHARED_FS)
        text = f"writing in {answer.path} failed with {answer.error}"
        about = replace(subject, failure_class=kind, unit=None)
        unknown = UnknownReason.NO_PERMISSION if denied else None
        return about.compared(status, answer.error, "written", parameters.source, text, unknown)
    text = f"{answer.path} was written in {format_seconds(answer.elapsed_s)}"
    return subject.below(parameters.elapsed_s, answer.elapsed_s, text, digits=3, unit="s")


def inputs(parameters: Parameters, _profile: Profile) -> tuple[str, ...]:
    """Return the folders to write in."""
    return parameters.paths


CHECK = Check(
    name="mount_writable",
    about="a small file can be created, synced and removed in the folders of the suite",
    probe=Probe(
        "writing",
        Writes,
        lambda machine, budget_s: read_writes(machine.root, budget_s, machine.inputs),
        sources=("a file created and removed in each folder",),
    ),
    parameters=Parameters,
    judge=judge,
    inputs=inputs,
)
