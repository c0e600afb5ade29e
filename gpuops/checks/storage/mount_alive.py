"""Does every mount answer? A dead file server blocks jobs inside the kernel."""

from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from gpuops.checks.core.check import Check, CheckLimit, JudgeContext
from gpuops.checks.storage.disk_space import PROBE, ignored
from gpuops.host.storage.mounts import Filesystems, MountAnswer
from gpuops.model import Entity, EntityKind, FailureClass, Finding, Status, UnknownReason
from gpuops.units import format_seconds

# errno(3): the file system or its server is gone. Others (EACCES of a user's FUSE mount, ENOENT
# of a mount point that another mount hides) say something about us and nothing about the mount.
_DEAD = frozenset(
    {"EHOSTDOWN", "EHOSTUNREACH", "EIO", "ENODEV", "ENOTCONN", "ESHUTDOWN", "ESTALE", "ETIMEDOUT"}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """``answer_s``: seconds for one statvfs(3); ``ignore``: patterns of mount points."""

    answer_s: CheckLimit
    ignore: tuple[str, ...] = ()


def judge(facts: Filesystems, parameters: Parameters, context: JudgeContext) -> list[Finding]:
    """Return a finding for each mount that is dead, silent or slow, else one for the slowest.

    Silence convicts a mount only where the asking process was stuck inside the kernel: a busy
    machine may merely not have run it. A FUSE mount that neither fstab nor the profile names may
    be any user's own, and a dead one only warns.
    """
    answers = [item for item in facts.answers if not ignored(item, parameters.ignore)]
    mounts = context.profile.mounts
    wanted = frozenset(mounts.value if mounts is not None else ())
    findings = [
        found for item in answers if (found := _problem(item, parameters, wanted)) is not None
    ]
    if facts.not_asked:
        findings.append(_too_many(facts.not_asked, context.node))
    if findings:
        return findings
    answered = [item for item in answers if item.space is not None]
    if not answered:
        return [_finding(context.node, Status.SKIP, "no mount to ask")]
    slowest = max(answered, key=lambda item: item.elapsed_s)
    text = f"{len(answered)} mounts answer, {slowest.mount.point} last"
    return [_timed(context.node, Status.PASS, slowest, parameters, text)]


def _problem(
    answer: MountAnswer, parameters: Parameters, wanted: AbstractSet[str]
) -> Finding | None:
    mount, entity = answer.mount, Entity(EntityKind.MOUNT, answer.mount.point)
    what = f"{mount.source} ({mount.filesystem})"
    if answer.silent is not None and answer.stuck:
        return _finding(entity, Status.FAIL, f"{what} {answer.silent}", mount_class(answer))
    if answer.silent is not None:
        return Finding(
            check="mount_alive",
            entity=entity,
            status=Status.UNKNOWN,
            message=f"{what} {answer.silent}",
            unknown_reason=UnknownReason.TIMEOUT,
        )
    if answer.error in _DEAD:
        text = f"{what}: statvfs came back with {answer.error}"
        status = Status.WARN if _is_a_users(answer, wanted) else Status.FAIL
        return _finding(entity, status, text, mount_class(answer))
    status = parameters.answer_s.ceiling(answer.elapsed_s)
    if answer.space is not None and status is not Status.PASS:
        took = format_seconds(answer.elapsed_s)
        return _timed(entity, status, answer, parameters, f"{what} answered after {took}")
    return None


def _is_a_users(answer: MountAnswer, wanted: AbstractSet[str]) -> bool:
    named = answer.writable_in_fstab is not None or answer.mount.point in wanted
    return answer.mount.filesystem.startswith("fuse.") and not named


def mount_class(answer: MountAnswer) -> FailureClass:
    """Return whose failure a dead mount is: the file server's or a disk's."""
    if answer.mount.is_network:
        return FailureClass.STORAGE_SHARED_FS
    return FailureClass.HOST_DISK


def _timed(
    entity: Entity, status: Status, answer: MountAnswer, parameters: Parameters, message: str
) -> Finding:
    return Finding(
        check="mount_alive",
        entity=entity,
        status=status,
        value=round(answer.elapsed_s, 3),
        unit="s",
        threshold=parameters.answer_s.text("<", "s"),
        source=parameters.answer_s.source,
        message=message,
        failure_class=None if status is Status.PASS else mount_class(answer),
    )


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
    )


def _too_many(count: int, node: Entity) -> Finding:
    return _finding(node, Status.WARN, f"{count} more mounts were not asked: too many")


CHECK = Check(
    name="mount_alive",
    about="every mount answers, each asked in its own process",
    probe=PROBE,
    parameters=Parameters,
    judge=judge,
)
