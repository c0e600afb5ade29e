"""Did a GPU's memory have errors that ECC could not correct?"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from gpuops.checks.core.check import Check, CheckLimit, JudgeContext
from gpuops.checks.gpu.gpus import (
    PROBE,
    GpuResult,
    GpuVerdict,
    NotReported,
    beyond,
    counted,
    judge_each,
)
from gpuops.host.gpu_names import Gpus
from gpuops.host.nvml.facts import EccErrors, NvmlGpu
from gpuops.model import FailureClass, Finding, Status

_NAME = "gpu_ecc"
_CALLS = (
    "nvmlDeviceGetTotalEccErrors",
    "nvmlDeviceGetMemoryErrorCounter",
    "nvmlDeviceGetSramEccErrorStatus",
)
_beyond = partial(beyond, failure_class=FailureClass.GPU_ECC_UNCORRECTABLE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """Errors that ECC could not correct.

    ``volatile``: since the driver's load or the GPU's last reset. ``sram_aggregate``: over the
    GPU's lifetime, in its SRAM, which has no spare rows.
    """

    volatile: CheckLimit
    sram_aggregate: CheckLimit


def judge(facts: Gpus, parameters: Parameters, context: JudgeContext) -> list[Finding]:
    """Return a finding for each GPU with uncorrected errors, or with the driver's error flag.

    The driver's flag (`nvmlDeviceGetSramEccErrorStatus`) always fails. Errors since the driver's
    load only warn where the driver may have contained them and requests no action.
    """
    return judge_each(_NAME, facts, context, lambda gpu: _judge(gpu, parameters), _summary, _CALLS)


def _judge(gpu: NvmlGpu, parameters: Parameters) -> GpuResult:
    ecc = gpu.ecc
    volatile = _volatile(ecc)
    aggregate = ecc.sram_aggregate_uncorrected
    if volatile is None and aggregate is None and ecc.sram_threshold_exceeded is None:
        if gpu.modes.ecc is False:
            return NotReported("ECC is off")
        return NotReported()
    verdicts = []
    if volatile is not None:
        text = f"{volatile} uncorrected errors since the driver's load or the last reset"
        found = _beyond(parameters.volatile, volatile, text, unit="errors")
        verdicts += [_contained(item) for item in found] if _may_contain(gpu) else found
    if aggregate is not None:
        text = f"{aggregate} uncorrected SRAM errors in its lifetime"
        verdicts += _beyond(parameters.sram_aggregate, aggregate, text, unit="errors")
    if ecc.sram_threshold_exceeded:
        verdicts.append(
            GpuVerdict(
                status=Status.FAIL,
                message="the driver reports that its SRAM errors exceed the threshold",
                value=1,
                unit="flag",
                threshold="= 0",
                failure_class=FailureClass.GPU_ECC_UNCORRECTABLE,
                hardware_reported=True,
            )
        )
    return verdicts


def _may_contain(gpu: NvmlGpu) -> bool:
    """Return whether *gpu* may have contained its errors; from Ampere on, as it remaps rows.

    Of a contained error NVIDIA restarts the application alone (Xid 94); after another one the
    driver wants a reset, and says so.
    """
    return gpu.remapped is not None and not gpu.recovery_action


def _contained(verdict: GpuVerdict) -> GpuVerdict:
    text = f"{verdict.message}; if the driver did not contain them, gpu_xid fails (Xid 48, 95)"
    return replace(verdict, status=min(verdict.status, Status.WARN), message=text)


def _volatile(ecc: EccErrors) -> int | None:
    counts = (ecc.volatile_uncorrected, ecc.sram_volatile_uncorrected)
    return max((count for count in counts if count is not None), default=None)


def _summary(gpus: Sequence[NvmlGpu]) -> GpuVerdict:
    flags = sum(gpu.ecc.sram_threshold_exceeded is None for gpu in gpus)
    unknown = f"; {flags} do not report the SRAM flag" if flags else ""
    return GpuVerdict(
        message=f"no uncorrected memory error on {counted(gpus)}{unknown}", value=0, unit="errors"
    )


CHECK = Check(
    name=_NAME,
    about="no memory error that ECC could not correct",
    probe=PROBE,
    parameters=Parameters,
    judge=judge,
)
