"""Are the NVMe drives present and healthy, as they report it?"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from gpuops.checks.core.check import (
    Check,
    CheckLimit,
    JudgeContext,
    Probe,
    Subject,
    exactly,
    skipped,
)
from gpuops.host.storage.nvme import Nvme, NvmeDrive, read_nvme
from gpuops.model import Entity, EntityKind, FailureClass, Finding, Status
from gpuops.units import format_seconds

_SPECIFICATION = "NVM Express Base Specification, SMART / Health Information"
# Bits of critical_warning, ibid. The temperature recovers by itself; the others do not.
_WARNINGS = {
    0: "few spare blocks are left",
    1: "its temperature exceeds a limit",
    2: "its reliability is degraded",
    3: "it became read-only",
    4: "its volatile memory backup failed",
    5: "its persistent memory region became read-only",
}
_TEMPERATURE = 1 << 1
_LOCAL = frozenset({None, "pcie"})
# Documentation/ABI/testing/sysfs-nvme: the states of a controller while it starts.
_STARTING = frozenset({"new", "resetting", "connecting"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """``used_percent`` of the rated life; ``media_errors_per_day`` that are new."""

    used_percent: CheckLimit
    media_errors_per_day: CheckLimit


def judge(facts: Nvme, parameters: Parameters, context: JudgeContext) -> list[Finding]:
    """Return a finding about the number of drives and one for each fault of a drive.

    A critical warning, or a dead controller, fails. Without nvme-cli only the kernel's state is
    judged, and the first finding says so.
    """
    drives = [drive for drive in facts.drives if drive.transport in _LOCAL]
    subject = Subject("nvme_smart", context.node, FailureClass.HOST_DISK, "drives")
    expected = context.profile.nvme_count
    if not drives and not expected:
        return [skipped(subject, "no NVMe drive")]
    text = f"{len(drives)} NVMe drives"
    if drives and not facts.tool:
        text += ", judged by their state alone: nvme-cli is not installed"
    findings = [exactly(subject, len(drives), expected, text)]
    for drive in drives:
        findings += _drive(drive, parameters, context)
    return findings


def _drive(drive: NvmeDrive, parameters: Parameters, context: JudgeContext) -> list[Finding]:
    findings = []
    if drive.state not in {None, "live"}:
        status = Status.WARN if drive.state in _STARTING else Status.FAIL
        findings.append(
            _reported(drive, status, drive.state, "live", "kernel (sysfs)", f"is {drive.state}")
        )
    if drive.trouble is not None:
        text = f"its log could not be read: {drive.trouble}"
        findings.append(_finding(drive, Status.WARN, None, "answers", "nvme-cli", text))
    if drive.critical_warning:
        findings.append(_critical(drive, drive.critical_warning))
    limit, used = parameters.used_percent, drive.used_percent
    if used is not None and limit.ceiling(used) is not Status.PASS:
        status, text = limit.ceiling(used), f"{used} % of its rated life is used"
        findings.append(_finding(drive, status, used, limit.text("<", "%"), limit.source, text))
    return findings + _media_errors(drive, parameters.media_errors_per_day, context)


def _critical(drive: NvmeDrive, mask: int) -> Finding:
    warnings = [text for bit, text in _WARNINGS.items() if mask >> bit & 1] or [f"mask {mask:#x}"]
    status = Status.WARN if mask == _TEMPERATURE else Status.FAIL
    text = f"warns: {', '.join(warnings)}"
    return _reported(drive, status, mask, "= 0", _SPECIFICATION, text)


def _media_errors(drive: NvmeDrive, limit: CheckLimit, context: JudgeContext) -> list[Finding]:
    if drive.media_errors is None:
        return []
    growth = context.counters.lasting(_name(drive), drive.media_errors)
    status = Status.PASS if growth is None else limit.ceiling(growth.grown)
    if growth is None or growth.reset or status is Status.PASS:
        return []
    text = f"{growth.grown:g} new media errors in {format_seconds(growth.elapsed_s)}"
    return [_finding(drive, status, growth.grown, limit.text("<"), limit.source, text)]


def _finding(
    drive: NvmeDrive,
    status: Status,
    value: float | str | None,
    threshold: str,
    source: str,
    message: str,
) -> Finding:
    text = f"{drive.name} ({drive.model or 'no model'}) {message}"
    subject = Subject("nvme_smart", Entity(EntityKind.DISK, drive.serial), FailureClass.HOST_DISK)
    return subject.compared(status, value, threshold, source, text)


def _reported(
    drive: NvmeDrive,
    status: Status,
    value: float | str | None,
    threshold: str,
    source: str,
    message: str,
) -> Finding:
    """Return the finding about what the drive or the kernel reports as a fault."""
    found = _finding(drive, status, value, threshold, source, message)
    return replace(found, hardware_reported=status is Status.FAIL)


def _name(drive: NvmeDrive) -> str:
    return f"nvme_smart:{drive.serial}:media_errors"


def counters(facts: Nvme) -> Mapping[str, float]:
    """Return each drive's media errors."""
    return {
        _name(drive): drive.media_errors for drive in facts.drives if drive.media_errors is not None
    }


CHECK = Check(
    name="nvme_smart",
    about="NVMe drives: number, state, critical warnings, wear and new media errors",
    probe=Probe(
        "nvme",
        Nvme,
        lambda machine, budget_s: read_nvme(machine.root, budget_s),
        sources=("/sys/class/nvme", "nvme smart-log -o json"),
    ),
    parameters=Parameters,
    judge=judge,
    counters=counters,
)
