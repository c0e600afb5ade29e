"""Does every mount respond? A dead file server blocks jobs inside the kernel."""

from collections.abc import Collection
from dataclasses import dataclass, replace

from gpuops.checks.core.check import Check, CheckLimit, JudgeContext, Subject, not_judged
from gpuops.checks.storage.disk_space import PROBE, not_ignored, required_mounts, selection
from gpuops.host.storage.mounts import Filesystems, Mount, MountAnswer
from gpuops.model import Entity, EntityKind, FailureClass, Finding, Status, UnknownReason
from gpuops.units import format_seconds

# errno(3): the file system or its server is gone. Others (EACCES of a user's FUSE mount, ENOENT
# of a mount point that another mount hides) are about this process, not about the mount.
_DEAD = frozenset(
    {"EHOSTDOWN", "EHOSTUNREACH", "EIO", "ENODEV", "ENOTCONN", "ESHUTDOWN", "ESTALE", "ETIMEDOUT"}
)

_SHARED = frozenset({FailureClass.STORAGE_REQUIRED_MOUNT, FailureClass.STORAGE_SHARED_FS})


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """``answer_s``: seconds for one statvfs(3); ``ignore``: patterns of mount points."""

    answer_s: CheckLimit
    ignore: tuple[str, ...] = ()


def judge(facts: Filesystems, parameters: Parameters, context: JudgeContext) -> list[Finding]:
    """Return a finding for each mount that is dead, silent or slow, else one for the slowest.

    A timeout fails only if the process was stuck inside the kernel: a busy machine may not have
    scheduled it. A FUSE mount that may be any user's own (`Mount.is_a_users`) warns at most. A
    network mount that the profile requires has a failure class of its own, which drains the node.
    """
    answers = not_ignored(facts.answers, parameters.ignore)
    required = required_mounts(context.profile)
    findings = [
        _at_most_a_warning(found) if item.is_a_users(required) else found
        for item in answers
        if (found := _problem(item, parameters, required)) is not None
    ]
    if facts.not_asked:
        text = f"{facts.not_asked} more mounts were not checked: too many"
        findings.append(_finding(context.node, Status.WARN, text))
    if findings:
        return findings
    answered = [item for item in answers if item.space is not None]
    if not answered:
        return [_finding(context.node, Status.SKIP, "no mount to check")]
    slowest = max(answered, key=lambda item: item.elapsed_s)
    text = f"{len(answered)} mounts respond, {slowest.mount.point} last"
    return [_timed(context.node, slowest, parameters, text)]


def _problem(
    answer: MountAnswer, parameters: Parameters, required: Collection[str]
) -> Finding | None:
    mount, entity = answer.mount, Entity(EntityKind.MOUNT, answer.mount.point)
    what, kind = f"{mount.source} ({mount.filesystem})", _mount_class(mount, required)
    if answer.silent is not None and answer.stuck:
        return _finding(entity, Status.FAIL, f"{what} {answer.silent}", kind)
    if answer.silent is not None:
        text = f"{what} {answer.silent}"
        return not_judged("mount_alive", entity, text, UnknownReason.TIMEOUT)
    if answer.error in _DEAD:
        text = f"{what}: statvfs failed with {answer.error}"
        return _finding(entity, Status.FAIL, text, kind)
    status = parameters.answer_s.ceiling(answer.elapsed_s)
    if answer.space is not None and status is not Status.PASS:
        took = format_seconds(answer.elapsed_s)
        return _timed(entity, answer, parameters, f"{what} responded after {took}")
    return None


def _at_most_a_warning(finding: Finding) -> Finding:
    status = min(finding.status, Status.WARN)
    return replace(finding, status=status, unknown_reason=None, shared_cause=False)


def _mount_class(mount: Mount, required: Collection[str] = ()) -> FailureClass:
    """Return the failure class of a dead mount: the file server's or a disk's."""
    if not mount.is_network:
        return FailureClass.HOST_DISK
    if mount.point in required:
        return FailureClass.STORAGE_REQUIRED_MOUNT
    return FailureClass.STORAGE_SHARED_FS


def _timed(entity: Entity, answer: MountAnswer, parameters: Parameters, message: str) -> Finding:
    kind, is_shared = _mount_class(answer.mount), answer.mount.is_network
    subject = Subject("mount_alive", entity, kind, unit="s", shared_cause=is_shared)
    return subject.below(parameters.answer_s, answer.elapsed_s, message, digits=3, unit="s")


def _finding(
    entity: Entity, status: Status, message: str, failure_class: FailureClass | None = None
) -> Finding:
    return Finding(
        check="mount_alive",
        entity=entity,
        status=status,
        message=message,
        source=None if failure_class is None else "kernel (statvfs)",
        failure_class=failure_class,
        shared_cause=status is Status.FAIL and failure_class in _SHARED,
    )


CHECK = Check(
    name="mount_alive",
    about="every mount responds, each checked in its own process",
    probe=PROBE,
    parameters=Parameters,
    judge=judge,
    inputs=lambda parameters, profile: selection(parameters.ignore, profile),
)
