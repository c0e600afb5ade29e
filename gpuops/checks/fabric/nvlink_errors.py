"""Do the NVLinks count errors?"""

from collections.abc import Callable, Mapping, Sequence
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
    counter_name,
    judge_each,
)
from gpuops.host.gpu_names import Gpus
from gpuops.host.node_state import CounterGrowth
from gpuops.host.nvml.facts import NvLink, NvmlGpu
from gpuops.model import FailureClass, Finding

_NAME = "nvlink_errors"
_CALLS = ("NVML_FI_DEV_NVLINK",)
_beyond = partial(beyond, failure_class=FailureClass.GPU_NVLINK, unit="errors/h")

_KINDS: dict[str, Callable[[NvLink], int | None]] = {
    "recovery": lambda link: link.recovery_errors,
    "replay": lambda link: link.replay_errors,
    "crc": lambda link: link.crc_errors,
    "receive": lambda link: link.receive_errors,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """Errors of all links of one GPU in an hour, by kind.

    Blackwell counts receive errors where others count CRC errors: one limit holds for both.
    """

    recovery_per_hour: CheckLimit
    replay_per_hour: CheckLimit
    crc_per_hour: CheckLimit


def judge(facts: Gpus, parameters: Parameters, context: JudgeContext) -> list[Finding]:
    """Return a finding for each GPU and kind of error that grows too fast.

    A link has two ends: the fault may be at the other end.
    """
    return judge_each(
        _NAME, facts, context, lambda gpu: _judge(gpu, parameters, context), _summary, _CALLS
    )


def counters(facts: Gpus) -> Mapping[str, float]:
    """Return the errors of each GPU's links since the driver's load, by kind."""
    return {
        name: float(count)
        for gpu in facts.nvml.gpus
        for kind, count in _counted(gpu).items()
        if (name := counter_name(_NAME, gpu, kind))
    }


def _counted(gpu: NvmlGpu) -> dict[str, int]:
    """Return the errors of all links by kind; a kind that no link reports is left out."""
    counts = {
        kind: [count for link in gpu.nvlinks or () if (count := read(link)) is not None]
        for kind, read in _KINDS.items()
    }
    return {kind: sum(each) for kind, each in counts.items() if each}


def _judge(gpu: NvmlGpu, parameters: Parameters, context: JudgeContext) -> GpuResult:
    counts = _counted(gpu)
    if not counts:
        return NotReported("it has no NVLink" if gpu.nvlinks == () else "")
    limits = {
        "recovery": parameters.recovery_per_hour,
        "replay": parameters.replay_per_hour,
        "crc": parameters.crc_per_hour,
        "receive": parameters.crc_per_hour,
    }
    growths = {
        kind: growth
        for kind, count in counts.items()
        if (name := counter_name(_NAME, gpu, kind))
        and (growth := context.counters.lately(name, count)) is not None
    }
    if not growths:
        return NotReported("no earlier count of this boot to compare with")
    return [
        verdict
        for kind, growth in growths.items()
        for verdict in _beyond(limits[kind], growth.per_hour, _text(gpu, kind, growth))
    ]


def _worst(gpu: NvmlGpu, kind: str) -> int:
    read = _KINDS[kind]
    return max(gpu.nvlinks or (), key=lambda link: read(link) or 0).link


def _text(gpu: NvmlGpu, kind: str, growth: CounterGrowth) -> str:
    return (
        f"{growth.grown:g} {kind} errors on its NVLinks in {growth.elapsed_s / 60:.0f} min;"
        f" link {_worst(gpu, kind)} has counted most"
    )


def _summary(gpus: Sequence[NvmlGpu]) -> GpuVerdict:
    return GpuVerdict(message=f"few or no recent NVLink errors on {counted(gpus)}")


CHECK = Check(
    name=_NAME,
    about="NVLinks count few errors",
    probe=PROBE,
    parameters=Parameters,
    judge=judge,
    counters=counters,
)
