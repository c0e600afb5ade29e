"""Does NVIDIA's fabric manager run where the board has NVSwitches?"""

from dataclasses import dataclass

from gpuops.checks.core.check import (
    Check,
    CheckLimit,
    JudgeContext,
    Probe,
    Subject,
    not_judged,
    skipped,
)
from gpuops.host.pci.nvswitch import NvSwitchBoard, read_nvswitch_board
from gpuops.model import FailureClass, Finding, Status, UnknownReason

_NAME = "fabric_manager"
_SOURCE = "NVIDIA Fabric Manager User Guide: ABORT_CUDA_JOBS_ON_FM_EXIT"
# pci.ids: the switches of V100 and A100 boards.
_BEFORE_H100 = frozenset({0x1AC2, 0x1AF1})

PROBE = Probe(
    "nvswitch_board",
    NvSwitchBoard,
    lambda machine, _budget_s: read_nvswitch_board(machine.root),
    sources=("/sys/bus/pci/devices", "/proc/*/comm", "/proc/driver/nvidia"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """``starting_s``: seconds after boot in which it may still be starting."""

    starting_s: CheckLimit


def judge(facts: NvSwitchBoard, parameters: Parameters, context: JudgeContext) -> list[Finding]:
    """Return one finding.

    Without it CUDA does not start on boards of V100 and A100 (error 802), which fails. On later
    ones running GPUs go on, and `gpu_fabric` judges whether they are in the fabric: that only
    warns, as it does where GPUs are divided (MIG) and while the node boots.
    """
    subject = Subject(_NAME, context.node, FailureClass.GPU_FABRIC)
    if not facts.switches:
        return [skipped(subject, "no NVSwitch that the NVIDIA driver of this machine has")]
    if facts.nvlink_off:
        return [skipped(subject, "a setting of the driver turns NVLink off (NvLinkDisable)")]
    if facts.fabric_manager is None:
        text = "nv-fabricmanager was not seen, and other processes are hidden from this one"
        return [not_judged(_NAME, context.node, text, UnknownReason.NO_PERMISSION)]
    board = f"{facts.switches} NVSwitches"
    if facts.fabric_manager:
        return [_found(subject, Status.PASS, "running", f"nv-fabricmanager runs ({board})")]
    young = parameters.starting_s.ceiling(context.counters.since_boot_s) is not Status.FAIL
    is_needed = bool(facts.models) and set(facts.models) <= _BEFORE_H100 and not facts.divided
    status = Status.FAIL if is_needed and not young else Status.WARN
    text = f"nv-fabricmanager does not run ({board})"
    text += " (the node has only just booted)" if young else ""
    return [_found(subject, status, "not running", text)]


def _found(subject: Subject, status: Status, value: str, message: str) -> Finding:
    return subject.compared(status, value, "running", _SOURCE, message)


CHECK = Check(
    name=_NAME,
    about="the fabric manager runs on a board with NVSwitches",
    probe=PROBE,
    parameters=Parameters,
    judge=judge,
    transient=True,
)
