"""Can NVML open every GPU, and can the driver still reach it?"""

from collections.abc import Sequence

from gpuops.checks.core.check import Check, JudgeContext, NoParameters
from gpuops.checks.gpu.gpus import PROBE, GpuResult, GpuVerdict, counted, judge_each
from gpuops.host.gpu_names import Gpus
from gpuops.host.nvml.facts import (
    CORRUPTED_INFOROM,
    GPU_IS_LOST,
    NO_PERMISSION,
    RESET_REQUIRED,
    UNREADABLE,
    NvmlGpu,
)
from gpuops.model import FailureClass, Finding, Status, UnknownReason

_NAME = "gpu_lost"
_INSUFFICIENT_POWER = 8

# Codes by which the driver reports a fault of a GPU (nvml.h, nvmlReturn_t). Others only warn.
_FAULTS = {
    _INSUFFICIENT_POWER: ("its external power is not connected", FailureClass.GPU_THERMAL_POWER),
    CORRUPTED_INFOROM: ("its InfoROM is corrupt", FailureClass.GPU_INFOROM),
    GPU_IS_LOST: ("the driver has lost it", FailureClass.GPU_FELL_OFF_BUS),
    RESET_REQUIRED: ("it works again only after a reset", FailureClass.GPU_DRIVER),
}
# Of single calls: errors of the driver, the interrupt or the system.
_CALL_ERRORS = frozenset({9, 10, 11, 17, 20, 999, UNREADABLE})


def judge(facts: Gpus, _parameters: NoParameters, context: JudgeContext) -> list[Finding]:
    """Return a finding for each GPU that NVML cannot open, has lost, or hangs on.

    A code that reports a fault of the GPU fails, others warn. A call that hung or crashed is
    unknown: `gpu_driver` judges those.
    """
    return judge_each(_NAME, facts, context, _judge, _summary)


def _judge(gpu: NvmlGpu) -> GpuResult:
    if gpu.hung_call is not None:
        return GpuVerdict(
            status=Status.UNKNOWN,
            message=f"gave no answer in {gpu.hung_call}; see gpu_driver",
            unknown_reason=UnknownReason.TIMEOUT,
        )
    if gpu.crash is not None:
        return GpuVerdict(
            status=Status.UNKNOWN,
            message=f"its calls end their process by {gpu.crash}; see gpu_driver",
            unknown_reason=UnknownReason.CRASH,
        )
    if gpu.error is not None:
        return [_unopened(gpu.error, gpu.error_code)]
    for code in (GPU_IS_LOST, RESET_REQUIRED):
        calls = [error.call for error in gpu.errors if error.code == code]
        if calls:
            return [_fault(code, f"reported by {', '.join(calls)}")]
    errors = [f"{error.call}: {error.text}" for error in gpu.errors if error.code in _CALL_ERRORS]
    if errors:
        more = f"; {len(errors) - 3} more" if len(errors) > 3 else ""
        return GpuVerdict(
            status=Status.WARN,
            message=f"{'; '.join(errors[:3])}{more}",
            value=len(errors),
            unit="calls",
            threshold="no call fails",
            failure_class=FailureClass.GPU_DRIVER,
        )
    return ()


def _unopened(error: str, code: int | None) -> GpuVerdict:
    if code in _FAULTS:
        return _fault(code, error)
    if code == NO_PERMISSION:
        return GpuVerdict(
            status=Status.UNKNOWN, message=error, unknown_reason=UnknownReason.NO_PERMISSION
        )
    return GpuVerdict(
        status=Status.WARN,
        message=error,
        value=code,
        unit="NVML code",
        threshold="NVML opens each GPU",
        failure_class=FailureClass.GPU_DRIVER,
    )


def _fault(code: int, how: str) -> GpuVerdict:
    text, failure_class = _FAULTS[code]
    return GpuVerdict(
        status=Status.FAIL,
        message=f"{text} ({how})",
        value=code,
        unit="NVML code",
        threshold="NVML opens each GPU",
        failure_class=failure_class,
        hardware_reported=True,
    )


def _summary(gpus: Sequence[NvmlGpu]) -> GpuVerdict:
    return GpuVerdict(
        message=f"{counted(gpus)} opened by NVML, none lost",
        value=0,
        unit="GPUs lost",
        threshold="NVML opens each GPU",
    )


CHECK = Check(
    name=_NAME,
    about="NVML opens every GPU, and none is lost or waits for a reset",
    probe=PROBE,
    parameters=NoParameters,
    judge=judge,
)
