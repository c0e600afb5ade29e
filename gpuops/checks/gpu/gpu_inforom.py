"""Is the GPU's InfoROM, which holds its identity and error records, intact?"""

from collections.abc import Sequence

from gpuops.checks.core.check import Check, JudgeContext, NoParameters
from gpuops.checks.gpu.gpus import PROBE, GpuResult, GpuVerdict, NotReported, counted, judge_each
from gpuops.host.gpu_names import Gpus
from gpuops.host.nvml.facts import CORRUPTED_INFOROM, NvmlGpu
from gpuops.model import FailureClass, Finding, Status

_NAME = "gpu_inforom"


def judge(facts: Gpus, _parameters: NoParameters, context: JudgeContext) -> list[Finding]:
    """Return a finding for each GPU whose InfoROM the driver reports as corrupt."""
    return judge_each(_NAME, facts, context, _judge, _summary, ("nvmlDeviceValidateInforom",))


def _judge(gpu: NvmlGpu) -> GpuResult:
    calls = [error.call for error in gpu.errors if error.code == CORRUPTED_INFOROM]
    if gpu.inforom_valid is False or calls:
        how = f" ({', '.join(calls)})" if calls else ""
        return GpuVerdict(
            status=Status.FAIL,
            message=f"its InfoROM is corrupt{how}",
            value="corrupt",
            threshold="= valid",
            failure_class=FailureClass.GPU_INFOROM,
            hardware_reported=True,
        )
    return NotReported() if gpu.inforom_valid is None else ()


def _summary(gpus: Sequence[NvmlGpu]) -> GpuVerdict:
    return GpuVerdict(
        message=f"the InfoROM of {counted(gpus)} is valid", value="valid", threshold="= valid"
    )


CHECK = Check(
    name=_NAME,
    about="the InfoROM of every GPU is valid",
    probe=PROBE,
    parameters=NoParameters,
    judge=judge,
)
