"""How fast do memory errors that ECC corrected occur?"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gpuops.checks.core.check import Check, CheckLimit, JudgeContext
from gpuops.checks.gpu.gpus import (
    PROBE,
    GpuResult,
    GpuVerdict,
    NotReported,
    beyond,
    counted,
    counter_name,
    judge_each,
)
from gpuops.host.gpu_names import Gpus
from gpuops.host.node_state import CounterGrowth
from gpuops.host.nvml.facts import NvmlGpu
from gpuops.model import FailureClass, Finding

_NAME = "gpu_ecc_corrected"
_CALLS = ("nvmlDeviceGetTotalEccErrors", "nvmlDeviceGetMemoryErrorCounter")
_AGGREGATE = "aggregate"
_VOLATILE = "volatile"


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """``per_day``: corrected errors of one GPU in a day."""

    per_day: CheckLimit


def judge(facts: Gpus, parameters: Parameters, context: JudgeContext) -> list[Finding]:
    """Return a warning for each GPU whose corrected errors occur too fast.

    Only the growth since the oldest sample of the last day is judged. The lifetime count is
    preferred, since it survives a reset.
    """
    return judge_each(
        _NAME,
        facts,
        context,
        lambda gpu: _judge(gpu, parameters.per_day, context),
        _summary,
        _CALLS,
    )


def counters(facts: Gpus) -> Mapping[str, float]:
    """Return the corrected errors of each GPU, over its lifetime and since the driver's load."""
    values = {}
    for gpu in facts.nvml.gpus:
        for kind, count in (
            (_AGGREGATE, gpu.ecc.aggregate_corrected),
            (_VOLATILE, gpu.ecc.volatile_corrected),
        ):
            name = counter_name(_NAME, gpu, kind)
            if name and count is not None:
                values[name] = float(count)
    return values


def _judge(gpu: NvmlGpu, limit: CheckLimit, context: JudgeContext) -> GpuResult:
    if gpu.ecc.aggregate_corrected is None and gpu.ecc.volatile_corrected is None:
        return NotReported("ECC is off" if gpu.modes.ecc is False else "")
    growth = _growth(gpu, context)
    if growth is None:
        return NotReported("no earlier count to compare with")
    text = f"{growth.grown:g} errors corrected in {growth.elapsed_s / 3600:.1f} h"
    return beyond(
        limit, growth.per_day, text, FailureClass.GPU_ECC_UNCORRECTABLE, unit="errors/day"
    )


def _growth(gpu: NvmlGpu, context: JudgeContext) -> CounterGrowth | None:
    for kind, count, compare in (
        (_AGGREGATE, gpu.ecc.aggregate_corrected, context.counters.lasting),
        (_VOLATILE, gpu.ecc.volatile_corrected, context.counters.since),
    ):
        name = counter_name(_NAME, gpu, kind)
        growth = compare(name, count) if name and count is not None else None
        if growth is not None:
            return growth
    return None


def _summary(gpus: Sequence[NvmlGpu]) -> GpuVerdict:
    return GpuVerdict(message=f"few or no recent corrected errors on {counted(gpus)}")


CHECK = Check(
    name=_NAME,
    about="memory errors that ECC corrects do not occur fast",
    probe=PROBE,
    parameters=Parameters,
    judge=judge,
    counters=counters,
)
