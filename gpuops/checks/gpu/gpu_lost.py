"""Does NVML open every GPU, and does the driver still reach it?"""

from collections.abc import Sequence

from gpuops.checks.core.check import Check, JudgeContext, NoParameters
from gpuops.checks.gpu.gpus import PROBE, GpuVerdict, NotReported, counted, judge_each
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

# The driver's own verdicts on a GPU (nvml.h, nvmlReturn_t). Any other code is a sign.
_VERDICTS = {
    _INSUFFICIENT_POWER: ("its external power is not connected", FailureClass.GPU_THERMAL_POWER),
    CORRUPTED_INFOROM: ("its InfoROM is corrupt", FailureClass.GPU_INFOROM),
    GPU_IS_LOST: ("the driver has lost it", FailureClass.GPU_FELL_OFF_BUS),
    RESET_REQUIRED: ("it works again only after a reset", FailureClass.GPU_DRIVER),
}
# Of single calls: what the driver, the interrupt or the system said went wrong in asking the GPU.
_SIGNS = frozenset({9, 10, 11, 17, 20, 999, UNREADABLE})


def judge(facts: Gpus, _parameters: NoParameters, context: JudgeContext) -> list[Finding]:
    """Return a finding for each GPU that NVML cannot open, has lost, or hangs on.

    A code that says what is wrong with the GPU fails, others warn. A call without an answer is
    unknown: `gpu_driver` judges hangs, by the second one.
    """
    return judge_each(_NAME, facts, context, _one, _well)


def _one(gpu: NvmlGpu) -> Sequence[GpuVerdict] | NotReported:
    if gpu.hung_call is not None:
        return [
            GpuVerdict(
                status=Status.UNKNOWN,
                message=f"gave no answer in {gpu.hung_call}; see gpu_driver",
                unknown_reason=UnknownReason.TIMEOUT,
            )
        ]
    if gpu.error is not None:
        return [_unopened(gpu.error, gpu.error_code)]
    for code in (GPU_IS_LOST, RESET_REQUIRED):
        calls = [error.call for error in gpu.errors if error.code == code]
        if calls:
            return [_said(code, f"{', '.join(calls)} said so")]
    signs = [f"{error.call}: {error.text}" for error in gpu.errors if error.code in _SIGNS]
    if signs:
        return [
            GpuVerdict(
                status=Status.WARN,
                message=f"{'; '.join(signs[:3])}{_more(len(signs) - 3)}",
                value=len(signs),
                unit="calls",
                threshold="no call fails",
                failure_class=FailureClass.GPU_DRIVER,
            )
        ]
    return ()


def _unopened(error: str, code: int | None) -> GpuVerdict:
    if code in _VERDICTS:
        return _said(code, error)
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


def _said(code: int, how: str) -> GpuVerdict:
    text, failure_class = _VERDICTS[code]
    return GpuVerdict(
        status=Status.FAIL,
        message=f"{text} ({how})",
        value=code,
        unit="NVML code",
        threshold="NVML opens each GPU",
        failure_class=failure_class,
    )


def _more(count: int) -> str:
    return f"; {count} more" if count > 0 else ""


def _well(gpus: Sequence[NvmlGpu]) -> GpuVerdict:
    return GpuVerdict(
        message=f"{counted(gpus)} opened by NVML, none lost",
        value=0,
        unit="GPUs lost",
        threshold="NVML opens each GPU",
    )


CHECK = Check(
    name=_NAME,
    about="every GPU is opened by NVML, and none is lost or waits for a reset",
    probe=PROBE,
    parameters=NoParameters,
    judge=judge,
)
