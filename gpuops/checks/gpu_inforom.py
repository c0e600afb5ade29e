"""Is the GPU's InfoROM, which holds its identity and error records, intact?"""

from collections.abc import Sequence

from gpuops.checks.gpus import LOOK, Untold, Verdict, counted, each_gpu
from gpuops.checks.protocol import Case, Check, NoParameters
from gpuops.host.gpu_facts import CORRUPTED_INFOROM, NvmlGpu
from gpuops.host.gpus import Gpus
from gpuops.model import FailureClass, Finding, Status

_NAME = "gpu_inforom"


def judge(facts: Gpus, _parameters: NoParameters, case: Case) -> list[Finding]:
    """Return a finding for each GPU whose InfoROM the driver finds corrupt: its own verdict."""
    return each_gpu(_NAME, facts, case, _one, _well, ("nvmlDeviceValidateInforom",))


def _one(gpu: NvmlGpu) -> Sequence[Verdict] | Untold:
    said = [error.call for error in gpu.errors if error.code == CORRUPTED_INFOROM]
    if gpu.inforom_valid is False or said:
        how = f" ({', '.join(said)} said so)" if said else ""
        return [
            Verdict(
                status=Status.FAIL,
                message=f"its InfoROM is corrupt{how}",
                value="corrupt",
                threshold="= valid",
                failure_class=FailureClass.GPU_INFOROM,
            )
        ]
    return Untold() if gpu.inforom_valid is None else ()


def _well(gpus: Sequence[NvmlGpu]) -> Verdict:
    return Verdict(
        message=f"the InfoROM of {counted(gpus)} is valid", value="valid", threshold="= valid"
    )


CHECK = Check(
    name=_NAME,
    about="the InfoROM of every GPU is valid",
    look=LOOK,
    parameters=NoParameters,
    judge=judge,
)
