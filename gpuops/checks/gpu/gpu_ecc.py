"""Did a GPU's memory lose data: errors that ECC could not correct?"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from gpuops.checks.core.check import Check, CheckLimit, JudgeContext
from gpuops.checks.gpu.gpus import PROBE, GpuVerdict, NotReported, beyond, counted, judge_each
from gpuops.host.gpu_names import Gpus
from gpuops.host.nvml.facts import EccErrors, NvmlGpu
from gpuops.model import FailureClass, Finding, Status

_NAME = "gpu_ecc"
_beyond = partial(beyond, failure_class=FailureClass.GPU_ECC_UNCORRECTABLE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """Errors that ECC could not correct.

    ``volatile``: since the driver's load or the GPU's last reset. ``sram_aggregate``: of the
    GPU's life, in its SRAM, which has no spare rows.
    """

    volatile: CheckLimit
    sram_aggregate: CheckLimit


def judge(facts: Gpus, parameters: Parameters, context: JudgeContext) -> list[Finding]:
    """Return a finding for each GPU with uncorrected errors, or whose driver says that it is due.

    The driver's flag (`nvmlDeviceGetSramEccErrorStatus`) is its own verdict and always fails.
    """
    return judge_each(
        _NAME,
        facts,
        context,
        lambda gpu: _one(gpu, parameters),
        _well,
        (
            "nvmlDeviceGetTotalEccErrors",
            "nvmlDeviceGetMemoryErrorCounter",
            "nvmlDeviceGetSramEccErrorStatus",
        ),
    )


def _one(gpu: NvmlGpu, parameters: Parameters) -> Sequence[GpuVerdict] | NotReported:
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
        verdicts += _beyond(parameters.volatile, volatile, text, unit="errors")
    if aggregate is not None:
        text = f"{aggregate} uncorrected SRAM errors in its life"
        verdicts += _beyond(parameters.sram_aggregate, aggregate, text, unit="errors")
    if ecc.sram_threshold_exceeded:
        verdicts.append(
            GpuVerdict(
                status=Status.FAIL,
                message="the driver says that its SRAM errors are beyond the threshold",
                value=1,
                unit="flag",
                threshold="= 0",
                failure_class=FailureClass.GPU_ECC_UNCORRECTABLE,
            )
        )
    return verdicts


def _volatile(ecc: EccErrors) -> int | None:
    told = [
        count
        for count in (ecc.volatile_uncorrected, ecc.sram_volatile_uncorrected)
        if count is not None
    ]
    return max(told, default=None)


def _well(gpus: Sequence[NvmlGpu]) -> GpuVerdict:
    flags = sum(gpu.ecc.sram_threshold_exceeded is None for gpu in gpus)
    untold = f"; {flags} do not tell the SRAM flag" if flags else ""
    return GpuVerdict(
        message=f"no uncorrected memory error on {counted(gpus)}{untold}",
        value=0,
        unit="errors",
    )


CHECK = Check(
    name=_NAME,
    about="no memory error that ECC could not correct",
    probe=PROBE,
    parameters=Parameters,
    judge=judge,
)
