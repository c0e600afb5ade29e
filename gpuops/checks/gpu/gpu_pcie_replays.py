"""How often must a GPU's PCIe link send a packet again?"""

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
from gpuops.host.nvml.facts import NvmlGpu
from gpuops.model import FailureClass, Finding

_NAME = "gpu_pcie_replays"
_CALLS = ("nvmlDeviceGetPcieReplayCounter", "NVML_FI_DEV_PCIE_REPLAY")
_COUNTER = "replays"


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """``per_hour``: replays of one GPU's link."""

    per_hour: CheckLimit


def judge(facts: Gpus, parameters: Parameters, context: JudgeContext) -> list[Finding]:
    """Return a finding for each GPU whose replays grow too fast; the total is not judged."""
    return judge_each(
        _NAME,
        facts,
        context,
        lambda gpu: _judge(gpu, parameters.per_hour, context),
        _summary,
        _CALLS,
    )


def counters(facts: Gpus) -> Mapping[str, float]:
    """Return the replays of each GPU since the driver's load."""
    named = ((counter_name(_NAME, gpu, _COUNTER), gpu.pcie.replays) for gpu in facts.nvml.gpus)
    return {name: float(count) for name, count in named if name and count is not None}


def _judge(gpu: NvmlGpu, limit: CheckLimit, context: JudgeContext) -> GpuResult:
    name, count = counter_name(_NAME, gpu, _COUNTER), gpu.pcie.replays
    if count is None:
        return NotReported()
    growth = context.counters.lately(name, count) if name else None
    if growth is None:
        return NotReported("no earlier count of this boot to compare with")
    text = f"{growth.grown:g} PCIe replays in {growth.elapsed_s / 60:.0f} min"
    return beyond(limit, growth.per_hour, text, FailureClass.HOST_PCIE, unit="replays/h")


def _summary(gpus: Sequence[NvmlGpu]) -> GpuVerdict:
    return GpuVerdict(message=f"few or no recent PCIe replays on {counted(gpus)}")


CHECK = Check(
    name=_NAME,
    about="PCIe packets are rarely sent again",
    probe=PROBE,
    parameters=Parameters,
    judge=judge,
    counters=counters,
)
