"""Has a GPU memory rows to remap, or failed to remap one (Ampere and later)?"""

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
)
from gpuops.host.gpu_names import Gpus
from gpuops.host.nvml.facts import NvmlGpu
from gpuops.model import FailureClass, Finding

_NAME = "gpu_row_remap"
_CALLS = ("nvmlDeviceGetRemappedRows",)
_beyond = partial(beyond, failure_class=FailureClass.GPU_ROW_REMAP)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """``failed`` and ``pending``: 1 if the driver's flag is set. ``uncorrectable``: rows."""

    failed: CheckLimit
    pending: CheckLimit
    uncorrectable: CheckLimit


def judge(facts: Gpus, parameters: Parameters, context: JudgeContext) -> list[Finding]:
    """Return a finding for each GPU with a failed or pending remap, or with very many of them.

    A failed remap means that the bank has no spare rows left. A pending one is done by the next
    reset; until then the page with the bad row is offline and new jobs may start (NVIDIA, GPU
    memory error management).
    """
    return judge_each(_NAME, facts, context, lambda gpu: _judge(gpu, parameters), _summary, _CALLS)


def _judge(gpu: NvmlGpu, parameters: Parameters) -> GpuResult:
    rows = gpu.remapped
    if rows is None:
        return NotReported() if gpu.retired is None else ()
    if rows.pending is None and rows.failure is None:
        return NotReported()
    many = rows.uncorrectable or 0
    reset = f"reset it between jobs (nvidia-smi --gpu-reset -i {gpu.index})"
    pending = f"a row waits for a reset to be remapped: {reset}"
    remapped = f"{many} rows remapped after uncorrectable errors"
    return [
        *_beyond(
            parameters.failed, bool(rows.failure), "a row could not be remapped: no spare is left"
        ),
        *_beyond(parameters.pending, bool(rows.pending), pending),
        *_beyond(parameters.uncorrectable, many, remapped, unit="rows"),
    ]


def _summary(gpus: Sequence[NvmlGpu]) -> GpuVerdict:
    remapped = [gpu.remapped for gpu in gpus if gpu.remapped is not None]
    if not remapped:
        return GpuVerdict(message=f"{counted(gpus)} retire pages instead (see gpu_retired_pages)")
    rows = sum((item.correctable or 0) + (item.uncorrectable or 0) for item in remapped)
    return GpuVerdict(
        message=f"no remap pending or failed on {counted(gpus)}; {rows} rows remapped so far",
        value=rows,
        unit="rows",
        threshold="none pending, none failed",
    )


CHECK = Check(
    name=_NAME,
    about="no GPU memory row waits to be remapped or could not be",
    probe=PROBE,
    parameters=Parameters,
    judge=judge,
)
