"""How many pages of a GPU's memory are retired (Volta and earlier)?"""

from collections.abc import Sequence
from dataclasses import dataclass
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
    span,
)
from gpuops.host.gpu_names import Gpus
from gpuops.host.nvml.facts import NvmlGpu, RetiredPages
from gpuops.model import FailureClass, Finding

_NAME = "gpu_retired_pages"
_CALLS = ("nvmlDeviceGetRetiredPages", "NVML_FI_DEV_RETIRED")
_beyond = partial(beyond, failure_class=FailureClass.GPU_ROW_REMAP)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """``pages`` retired in total; ``pending``: 1 if one waits for a reset."""

    pages: CheckLimit
    pending: CheckLimit


def judge(facts: Gpus, parameters: Parameters, context: JudgeContext) -> list[Finding]:
    """Return a finding for each GPU with too many retired pages or one that waits for a reset."""
    return judge_each(_NAME, facts, context, lambda gpu: _judge(gpu, parameters), _summary, _CALLS)


def _judge(gpu: NvmlGpu, parameters: Parameters) -> GpuResult:
    pages = gpu.retired
    if pages is None:
        return NotReported() if gpu.remapped is None else ()
    total = _total(pages)
    return [
        *_beyond(parameters.pages, total, f"{total} pages retired", unit="pages"),
        *_beyond(parameters.pending, pages.pending, "a page waits for a reset to be retired"),
    ]


def _total(pages: RetiredPages) -> int:
    return pages.single_bit + pages.double_bit


def _summary(gpus: Sequence[NvmlGpu]) -> GpuVerdict:
    retired = [_total(gpu.retired) for gpu in gpus if gpu.retired is not None]
    if not retired:
        return GpuVerdict(message=f"{counted(gpus)} remap rows instead (see gpu_row_remap)")
    return GpuVerdict(
        message=f"{span(retired)} pages retired on {counted(gpus)}, none pending",
        value=max(retired),
        unit="pages",
    )


CHECK = Check(
    name=_NAME,
    about="few retired pages of GPU memory, none pending (before Ampere)",
    probe=PROBE,
    parameters=Parameters,
    judge=judge,
)
