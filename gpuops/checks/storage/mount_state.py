"""Is everything mounted that should be?

`mount_alive` judges whether mounts respond, `disk_space` whether they are read-only.
"""

from dataclasses import dataclass

from gpuops.checks.core.check import Check, JudgeContext, Probe, Subject
from gpuops.host.storage.mounts import MountTable, is_ignored, read_mount_table
from gpuops.model import Entity, EntityKind, FailureClass, Finding, Status


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """``expected`` mount points in addition to the profile's, and the source.

    ``ignore``: patterns of mount points in fstab that may be missing.
    """

    expected: tuple[str, ...] = ()
    source: str = "suite"
    ignore: tuple[str, ...] = ()


def judge(facts: MountTable, parameters: Parameters, context: JudgeContext) -> list[Finding]:
    """Return a finding for each mount that is missing, else one for all.

    A mount of the profile or the suite fails; one of fstab(5) alone warns.
    """
    expected = dict.fromkeys(parameters.expected, parameters.source)
    if context.profile.mounts is not None:
        expected |= dict.fromkeys(context.profile.mounts.value, context.profile.mounts.source)
    mounted = set(facts.mounted)
    missing = [
        _missing(point, Status.FAIL, source)
        for point, source in expected.items()
        if _plain(point) not in mounted
    ]
    in_fstab = [point for point in facts.in_fstab if not is_ignored(point, parameters.ignore)]
    named = {_plain(point) for point in expected}
    missing += [
        _missing(point, Status.WARN, "/etc/fstab")
        for point in in_fstab
        if point not in mounted and point not in named
    ]
    if missing:
        return missing
    count = len(named | set(in_fstab))
    status, text = Status.PASS, f"all {count} expected mounts are present"
    if not count:
        status, text = Status.SKIP, "neither profile nor fstab expects a mount"
    return [Finding(check="mount_state", entity=context.node, status=status, message=text)]


def _plain(point: str) -> str:
    return point.rstrip("/") or "/"


def _missing(point: str, status: Status, source: str) -> Finding:
    entity = Entity(EntityKind.MOUNT, _plain(point))
    is_required = status is Status.FAIL
    kind = FailureClass.STORAGE_REQUIRED_MOUNT if is_required else FailureClass.STORAGE_SHARED_FS
    subject = Subject("mount_state", entity, kind, shared_cause=True)
    text = f"nothing is mounted on {point}"
    return subject.compared(status, "not mounted", "mounted", source, text)


CHECK = Check(
    name="mount_state",
    about="all mounts of the profile, the suite and fstab are present",
    probe=Probe(
        "mount_table",
        MountTable,
        lambda machine, _budget_s: read_mount_table(machine.root),
        sources=("/proc/self/mountinfo", "/etc/fstab"),
    ),
    parameters=Parameters,
    judge=judge,
)
