"""Are there free space and inodes, and can the disks still be written?"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace

from gpuops.checks.core.check import Check, CheckLimit, JudgeContext, Probe, Subject
from gpuops.checks.core.profile import Profile
from gpuops.host.storage.mounts import (
    Filesystems,
    MountAnswer,
    MountSelection,
    Space,
    is_ignored,
    read_filesystems,
)
from gpuops.model import Entity, EntityKind, FailureClass, Finding, Status
from gpuops.units import format_bytes

PROBE = Probe(
    "filesystems",
    Filesystems,
    lambda machine, budget_s: read_filesystems(
        machine.root, budget_s, [MountSelection.parse(text) for text in machine.inputs]
    ),
    sources=("/proc/self/mountinfo", "statvfs(2) of each mount"),
)
_IN_MEMORY = frozenset({"tmpfs", "ramfs"})
# A medium that cannot be written is not a fault, whatever the mount's own flag says.
_NEVER_WRITABLE = frozenset({"cramfs", "erofs", "iso9660", "romfs", "squashfs", "udf"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """Percentages available to users without privilege; ``ignore``: patterns of mount points."""

    space_percent: CheckLimit
    inodes_percent: CheckLimit
    ignore: tuple[str, ...] = ()


def judge(facts: Filesystems, parameters: Parameters, context: JudgeContext) -> list[Finding]:
    """Return a finding for each mount with a problem, else one for the fullest.

    `mount_alive` judges mounts that do not respond. Three kinds warn at most: mounts that another
    machine serves, as their space is not this node's; file systems in memory (``/dev/shm``), which
    any user may fill; and users' own mounts.
    """
    required = required_mounts(context.profile)
    answers = not_ignored(facts.answers, parameters.ignore)
    findings = [_read_only(item, required) for item in answers if _should_be_writable(item)]
    tightest: tuple[float, Finding] | None = None
    for item in answers:
        if item.space is None or "ro" in item.mount.options:
            continue
        is_the_nodes = _is_the_nodes(item, required)
        for percent, found in _free(item, item.space, parameters):
            worst = Status.FAIL if is_the_nodes else Status.WARN
            finding = replace(found, status=min(found.status, worst))
            if finding.status is not Status.PASS:
                findings.append(finding)
            if tightest is None or percent < tightest[0]:
                tightest = percent, finding
    if findings:
        return findings
    if tightest is not None:
        return [tightest[1]]
    text = "no writable file system of its own to judge"
    return [Finding(check="disk_space", entity=context.node, status=Status.SKIP, message=text)]


def not_ignored(answers: Iterable[MountAnswer], patterns: tuple[str, ...]) -> list[MountAnswer]:
    """Return *answers* without the mounts that a suite excludes."""
    return [item for item in answers if not is_ignored(item.mount.point, patterns)]


def required_mounts(profile: Profile) -> tuple[str, ...]:
    """Return the mount points that *profile* requires."""
    points = () if profile.mounts is None else profile.mounts.value
    return tuple(point.rstrip("/") or "/" for point in points)


def selection(ignore: tuple[str, ...], profile: Profile) -> tuple[str, ...]:
    """Return the input of `PROBE` for a check that ignores the mount points *ignore*."""
    return (MountSelection(ignore=ignore, required=required_mounts(profile)).text(),)


def _should_be_writable(answer: MountAnswer) -> bool:
    mount = answer.mount
    if mount.filesystem in _NEVER_WRITABLE or "ro" not in mount.options:
        return False
    return mount.turned_read_only or answer.writable_in_fstab is True


def _read_only(answer: MountAnswer, required: Collection[str]) -> Finding:
    mount = answer.mount
    why = (
        "the kernel has stopped writing to it, as it does after an error (see the kernel log)"
        if mount.turned_read_only
        else "in /etc/fstab it is writable"
    )
    source = "kernel (mountinfo)" if mount.turned_read_only else "/etc/fstab"
    text = f"{mount.source} ({mount.filesystem}) is read-only: {why}"
    subject = Subject("disk_space", _entity(answer), FailureClass.STORAGE_READ_ONLY)
    status = Status.WARN if answer.is_a_users(required) else Status.FAIL
    return subject.compared(status, "read-only", "read-write", source, text)


def _is_the_nodes(answer: MountAnswer, required: Collection[str]) -> bool:
    mount = answer.mount
    in_memory = mount.filesystem in _IN_MEMORY
    return not (mount.is_network or in_memory or answer.is_a_users(required))


def _free(answer: MountAnswer, space: Space, parameters: Parameters) -> list[tuple[float, Finding]]:
    found = []
    if space.total_bytes:
        percent = 100 * space.available_bytes / space.total_bytes
        text = f"{format_bytes(space.available_bytes)} of {format_bytes(space.total_bytes)}"
        limit = parameters.space_percent
        found.append((percent, _finding(answer, percent, limit, f"{text} available")))
    if space.inodes_total:
        percent = 100 * space.inodes_available / space.inodes_total
        text = f"{space.inodes_available} of {space.inodes_total} inodes available"
        found.append((percent, _finding(answer, percent, parameters.inodes_percent, text)))
    return found


def _finding(answer: MountAnswer, percent: float, limit: CheckLimit, message: str) -> Finding:
    subject = Subject("disk_space", _entity(answer), FailureClass.STORAGE_NO_SPACE, "%")
    shown, threshold = round(percent, 1), limit.text(">", "%")
    return subject.compared(limit.floor(percent), shown, threshold, limit.source, message)


def _entity(answer: MountAnswer) -> Entity:
    return Entity(EntityKind.MOUNT, answer.mount.point)


CHECK = Check(
    name="disk_space",
    about="free space, free inodes, mounts that turned read-only",
    probe=PROBE,
    parameters=Parameters,
    judge=judge,
    inputs=lambda parameters, profile: selection(parameters.ignore, profile),
)
